"""A hint policy for denoising models: parts of a reference answer are fixed at their positions.

``threshold`` and ``metric`` are those of :mod:`~jaxrl_llm.curation.collectors.hints.policies`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.curation.collectors.hints.hinted import (
    GuidedGroup,
    HintPolicy,
    prompt_name,
    read_text,
)
from jaxrl_llm.curation.collectors.hints.policies import HintedPolicy, check_policy
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import HINTED, Outcome, Request, on_host

__all__ = ["inpainted"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Inpainted(HintedPolicy):
    """Made by :func:`inpainted`."""

    hold: Callable
    replace: Callable
    column: str = "demonstration"
    answer: str | None = "answer"
    seed: int = 0
    max_new_tokens: int | None = dataclasses.field(default=None, repr=False)  # of the run

    name = "inpainted"

    @property
    def needs(self) -> Needs:
        return Needs(fixes_tokens=True, grades_apart=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Inpainted":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def check(self, row: Mapping[str, Any]) -> None:
        self._trace(row)

    def _trace(self, row: Mapping[str, Any]) -> str:
        """The reference up to its final answer."""
        text = read_text(self.name, row, self.column)
        if self.answer is None:
            return text
        place = text.rfind(answer := read_text(self.name, row, self.answer))
        if place < 0:
            raise ValueError(
                f"{self.name}: {self.column!r} of prompt {prompt_name(row)} does not hold its "
                f"{self.answer!r}, {answer!r}, which is not to be held in place; answer=None "
                "holds any part."
            )
        return text[:place]

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        if len(group.requests) > 1 or not self.failed(group.outcomes[0]):
            return ()
        trace = np.asarray(group.encode(self._trace(group.row)), np.int32)[: self.max_new_tokens]
        size = group.group_size
        with on_host():
            key = jax.random.fold_in(jax.random.key(self.seed), group.step)
            rows = np.ones((size, len(trace)), bool)
            held = np.asarray(self.hold(jax.random.fold_in(key, group.place), rows))
        fixed = tuple(np.where(row, trace, -1).astype(np.int32) for row in held)
        return [Request(size, fixed=fixed, role=HINTED)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        row = [(group.numbers[0], member) for member in range(group.group_size)]
        if len(group.numbers) == 1:
            return row

        def above(outcome: Outcome) -> np.ndarray:
            rewards = self.rewards(outcome) - np.float32(self.threshold)
            return np.where(outcome.where, rewards, np.float32(-1.0))

        with on_host():
            source = np.asarray(self.replace(*map(above, group.outcomes)))
        for place in np.flatnonzero(source >= 0):
            row[place] = (group.numbers[1], int(source[place]))
        return row


def inpainted(
    hold: Callable,
    replace: Callable,
    *,
    column: str = "demonstration",
    answer: str | None = "answer",
    seed: int = 0,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """Samples a failed group again around reference tokens; right responses replace wrong ones.

    A denoising model writes the text between them. The tokens are part of the response and train
    with it; their version is -1, and the batch has them as ``hint_mask``.

    Args:
      hold: ``(key, trace bool [G, L]) -> held bool [G, L]``, the tokens of the reference that are
        fixed in each response, such as :func:`jaxrl_llm.diffusion.draw_hints`.
      replace: ``(rewards [G], new_rewards [G]) -> int [G]``, the new response that replaces each
        one, -1 for none, such as :func:`jaxrl_llm.diffusion.igpo_replace`; rewards are above 0
        for a right response.
      column: The column with the reference, a text.
      answer: The column with its final answer, from which on nothing is fixed; None to allow any
        part.
      seed: Seed of the key, with step and group.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``hold`` or ``replace`` is not a function.
      ValueError: If an option is out of its range; in a run, if a row has no reference, or one
        without its answer.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.inpainted(jr.diffusion.draw_hints, jr.diffusion.igpo_replace)
      inpainted(draw_hints, igpo_replace)

    References:
      Zhao et al., IGPO (arXiv:2509.10396); see both functions for what differs.
    """
    name = "inpainted"
    for option, function in (("hold", hold), ("replace", replace)):
        if not callable(function):
            raise TypeError(f"{name}: {option} must be a function; got {function!r}.")
    check_policy(name, threshold, metric)
    checks.check_seed(name, seed=seed)
    return _Inpainted(
        hold=hold,
        replace=replace,
        column=column,
        answer=answer,
        seed=seed,
        threshold=threshold,
        metric=metric,
    )
