"""Hint policies that help some rollouts of every group: a prefix of the solution, examples.

``metric`` is that of :mod:`~jaxrl_llm.curation.collectors.hints.policies`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.curation.collectors.hints.hinted import (
    GuidedGroup,
    HintPolicy,
    read_text,
    solution_of,
)
from jaxrl_llm.curation.collectors.hints.policies import HintedPolicy, check_policy, rows_of
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import HINTED, Request, Response, on_host
from jaxrl_llm.curation.hints import adhint_ratio, prefix_length

__all__ = ["examples_in_prompt", "hint_share"]

EXAMPLE = "Question: {question}\nAnswer: {solution}"


# The start of a solution, as the start of the response


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _HintShare(HintedPolicy):
    """Made by :func:`hint_share`."""

    column: str = "demonstration"
    plain: float = 0.5
    low: float = 0.0
    high: float = 0.8
    noise: float = 0.05
    seed: int = 0
    max_new_tokens: int | None = dataclasses.field(default=None, repr=False)  # of the run

    name = "hint_share"

    @property
    def needs(self) -> Needs:
        return Needs(slots=True, brings_responses=True, helps_every_group=True, grades_apart=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_HintShare":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def first(self, group_size: int) -> int:
        return min(max(round(self.plain * group_size), 1), group_size)

    def check(self, row: Mapping[str, Any]) -> None:
        solution_of(self.name, row, self.column)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        if (size := group.group_size - self.first(group.group_size)) == 0 or len(
            group.requests
        ) > 1:
            return ()
        solution = solution_of(self.name, group.row, self.column)
        outcome = group.outcomes[0]
        with on_host():
            key = jax.random.fold_in(jax.random.key(self.seed), group.step)
            ratio = adhint_ratio(
                np.clip(self.rewards(outcome), 0.0, 1.0),
                where=np.asarray(outcome.where),
                key=jax.random.fold_in(key, group.place) if self.noise else None,
                low=self.low,
                high=self.high,
                noise=self.noise or None,
            )
            shown = int(prefix_length(np.int32(len(solution)), ratio))
        hint = solution[:shown]
        if self.max_new_tokens is not None:
            tokens = group.encode(hint) if isinstance(hint, str) else hint
            hint = np.int32(tokens)[: self.max_new_tokens - 1]  # one token at least is sampled
        responses = (Response(hint),) * size if len(hint) else ()
        return [Request(size, responses=responses, role=HINTED)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        return rows_of(group)


def hint_share(
    *,
    column: str = "demonstration",
    plain: float = 0.5,
    low: float = 0.0,
    high: float = 0.8,
    noise: float = 0.05,
    seed: int = 0,
    metric: str | None = None,
) -> HintPolicy:
    """Some rollouts begin with a part of a solution, which is longer for harder prompts.

        w = clip(low + (high - low) (1 - mean reward of the plain rollouts) + u, 0, 1)
        u uniform in [-noise, noise];   hint = solution[: round(w length)]

    The hint is the start of the response and is trained with it; its tokens have version -1.

    Args:
      column: The column with the solution, a text, which is cut between characters, or token ids.
      plain: Share of the group without a hint, above 0; half of G is rounded to even.
      low, high: Bounds of the share that is shown, see :func:`~jaxrl_llm.curation.adhint_ratio`.
      noise: Half-width of its noise; 0 for none.
      seed: Seed of the noise.
      metric: See the module. The component, in [0, 1], that measures difficulty.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.hint_share(high=0.9)
      hint_share(high=0.9)

    References:
      ADHint (arXiv:2512.13095), PAPER reading of the ratio; its constants are ours.
    """
    name = "hint_share"
    checks.check_seed(name, seed=seed)
    checks.check_share(name, zero=False, plain=plain)
    checks.check_share(name, low=low, high=high)
    checks.check_non_negative(name, finite=True, noise=noise)
    if low > high:
        raise ValueError(f"{name}: low must not be above high; got {low:g} and {high:g}.")
    check_policy(name, 0.0, metric)
    return _HintShare(
        column=column, plain=plain, low=low, high=high, noise=noise, seed=seed, metric=metric
    )


# Examples in the prompt


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _ExamplesInPrompt(HintedPolicy):
    """Made by :func:`examples_in_prompt`."""

    count: int = 1
    shots: int = 1
    column: str = "demonstration"
    examples: tuple[tuple[str, str], ...] | None = None
    seed: int = 0

    name = "examples_in_prompt"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(helps_every_group=True)

    def first(self, group_size: int) -> int:
        if self.count >= group_size:
            raise ValueError(
                f"{self!r}: count must be below the group's size {group_size}; got {self.count}."
            )
        return group_size - self.count

    def check(self, row: Mapping[str, Any]) -> None:
        if self.examples is None:
            read_text(self.name, row, self.column)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        if len(group.requests) > 1:
            return ()
        draw = np.random.default_rng((self.seed, group.step, group.place))
        # Examples, none of which is the group's prompt.
        others, rows = len(group.data) - 1, group.data
        requests = []
        for _ in range(self.count):
            if self.examples is not None:
                most = min(self.shots, len(self.examples))
                places = draw.choice(len(self.examples), most, replace=False)
                drawn = [self.examples[i] for i in places]
            else:
                places = draw.choice(others, min(self.shots, others), replace=False)
                places = places + (places >= group.prompt)
                drawn = [(rows[i]["text"], rows[i][self.column]) for i in places]
            shown = [EXAMPLE.format(question=q, solution=solution) for q, solution in drawn]
            asked = f"Question: {group.row['text']}"
            while shown and not group.takes_text("\n\n".join([*shown, asked])):
                shown.pop()  # as few_shot_pairs leaves out what has no room
            text = "\n\n".join([*shown, asked])
            requests.append(Request(1, text=text, train_as_prompt=True, role=HINTED))
        return requests

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        return rows_of(group)


def examples_in_prompt(
    *,
    count: int = 1,
    shots: int = 1,
    column: str = "demonstration",
    examples: tuple[tuple[str, str], ...] | None = None,
    seed: int = 0,
) -> HintPolicy:
    """Some rollouts see other questions with their solutions, and train after the plain prompt.

    Args:
      count: Number of such rollouts per group, below G.
      shots: Number of examples in a message, drawn for each rollout.
      column: The column with the solutions of the data set, whose other prompts are the examples.
      examples: Pairs of question and solution to draw from instead; None for the data set's.
      seed: Seed of the draw.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.examples_in_prompt(shots=2)
      examples_in_prompt(shots=2)

    References:
      ICPO (arXiv:2510.26519): one rollout of eight, one example, drawn at random from another data
      set; the wording is ours.
    """
    name = "examples_in_prompt"
    checks.check_count(name, count=count, shots=shots)
    checks.check_seed(name, seed=seed)
    return _ExamplesInPrompt(count=count, shots=shots, column=column, examples=examples, seed=seed)
