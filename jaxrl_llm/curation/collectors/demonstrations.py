"""Collectors that add responses of the data: demonstrations or answers of teachers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.reasoning import Continuation
from jaxrl_llm.curation.collectors.hints.hinted import (
    GuidedGroup,
    as_response,
    check_ended,
    hinted,
    prompt_name,
    read_column,
)
from jaxrl_llm.curation.collectors.hints.policies import HintedPolicy, rows_of
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    JUDGE,
    Collector,
    Request,
    Response,
)

__all__ = ["demonstrations"]


def demonstrations_of(function: str, row: Mapping[str, Any], column: str) -> list[str | np.ndarray]:
    """The demonstrations of a prompt's row: texts or token ids, one or a list of several.

    Raises:
      ValueError: If there is none, or one is empty or neither of the two, or it was sampled and
        did not end; it names the prompt.
    """
    value = read_column(function, row, column)
    check_ended(function, row, column)
    several = (
        not isinstance(value, str) and len(value) and not isinstance(value[0], int | np.integer)
    )
    values = value if several else [value]
    return [as_response(function, row, column, each) for each in values]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Demonstrations(HintedPolicy):
    """Made by :func:`demonstrations`."""

    count: int = 1
    column: str = "demonstration"
    when: str = "always"
    probe: str | None = None
    reward: float | None = None
    least_sampled: int = 1
    max_new_tokens: int | None = dataclasses.field(default=None, repr=False)  # of the run

    name = "demonstrations"

    @property
    def needs(self) -> Needs:
        return Needs(
            brings_responses=True,
            helps_every_group=self.when == "always",
            lacks_components=self.reward is not None,
            grades_apart=self.reward is None,
        )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Demonstrations":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def first(self, group_size: int) -> int:
        if self.when == "failed":
            return group_size
        if self.count >= group_size:
            raise ValueError(
                f"{self!r}: count must be below the group's size {group_size}; got {self.count}."
            )
        return group_size - self.count

    def check_sizes(self, data: Sequence[Mapping[str, Any]], *, group_size: int, num_groups: int):
        """Raises ValueError unless a group has room for those of the data and of the policy."""
        del data, num_groups
        if self.when == "failed" or group_size - self.count >= self.least_sampled:
            return
        raise ValueError(
            f"{self!r}: a group holds {self.count} of the data and at least {self.least_sampled} "
            f"of the policy, so group_size must be at least {self.count + self.least_sampled}; "
            f"got {group_size}."
        )

    def width(self, group_size: int) -> int:
        if self.when == "always":
            return group_size
        return group_size + self.count * (1 if self.probe is None else 2)

    def check(self, row: Mapping[str, Any]) -> None:
        every = demonstrations_of(self.name, row, self.column)
        if len(every) < self.count and self.when == "always":
            raise ValueError(
                f"{self.name}: prompt {prompt_name(row)} has {len(every)} of {self.column!r}; "
                f"count is {self.count}."
            )
        if self.probe is None:
            return
        answer = read_column(self.name, row, self.probe)
        if not isinstance(answer, str) or not all(isinstance(each, str) for each in every):
            raise ValueError(
                f"{self.name}: {self.column!r} and {self.probe!r} of prompt {prompt_name(row)} "
                "must be texts, since the answer takes the place of the demonstration's."
            )

    def reader(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        """The responses of a row of the data that join its group."""
        chosen = demonstrations_of(self.name, row, self.column)[: self.count]
        return tuple(Response(each, reward=self.reward) for each in chosen)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        if len(group.requests) > 1:
            return ()
        if self.when == "failed" and not self.failed(group.outcomes[0]):
            return ()
        responses = self.reader(group.row)
        count = len(responses)
        requests = [Request(count, responses=responses, sampled=False, role=DEMONSTRATION)]
        if self.probe is not None:
            answer, probes = read_column(self.name, group.row, self.probe), []
            for text in (str(each.tokens) for each in responses):
                # A demonstration up to its answer, then the reference answer, which alone counts.
                place = text.rfind(answer)
                before = text[:place] if place >= 0 else f"{text}\n"
                context = list(group.encode(before))
                tokens = list(group.encode(Continuation(answer)))
                if (most := self.max_new_tokens) is not None:
                    tokens = tokens[:most]
                    # What comes right before the answer stays.
                    context = context[max(len(context) + len(tokens) - most, 0) :]
                counts = np.arange(len(context) + len(tokens)) >= len(context)
                probes.append(Response(np.int32(context + tokens), trains=counts, reward=0.0))
            request = Request(len(probes), responses=tuple(probes), sampled=False, role=JUDGE)
            requests.append(request)
        return requests

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        return rows_of(group)


def demonstrations(
    *,
    count: int = 1,
    column: str = "demonstration",
    when: Literal["always", "failed"] = "always",
    probe: str | None = None,
    reward: float | None = None,
    threshold: float = 0.0,
    metric: str | None = None,
    least_sampled: int = 1,
    source: Collector | None = None,
) -> Collector:
    """Adds responses of the data to each group, or to those in which no rollout is right.

        row = G - count rollouts, count demonstrations           when "always"
        row = G rollouts, at most count demonstrations, probes   when "failed", and all fail

    A demonstration is a response without log-probabilities, of role ``DEMONSTRATION``; the batch
    has it as ``steered``. A probe is a demonstration whose answer is replaced by the reference
    answer, the only tokens in its mask: their probability under the policy measures how well it
    follows the demonstration (:func:`~jaxrl_llm.curation.comprehension_score`); its role is
    ``JUDGE``, and it must leave the batch before the advantages
    (:func:`~jaxrl_llm.curation.best_teachers`). A probe that exceeds the maximum length loses its
    first tokens.

    Args:
      count: Number of demonstrations per group.
      column: The column with them: a text or token ids, or a list of several.
      when: Which groups get them.
      probe: The column with the reference answer, for probes; None for none.
      reward: Reward of a demonstration, for a recipe that reads no more of it than this number;
        None for the reward of the run.
      threshold: Largest reward of a failure; only with ``when="failed"``.
      metric: Name of the reward component that is compared with it.
      least_sampled: The fewest rollouts of the policy in a group, such as 2 for a recipe that
        compares these with each other; only with ``when="always"``.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      ValueError: If an option is unknown, out of its range or without effect; in a run, if a row
        has no demonstration, or G is too small for it.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.demonstrations(count=2)
      hinted(demonstrations(count=2))

    References:
      LUFFY (arXiv:2504.14945): one of eight; AMPO (arXiv:2510.02227): several teachers, if all
      rollouts fail.
    """
    name = "demonstrations"
    checks.check_count(name, count=count, least_sampled=least_sampled)
    checks.check_option(name, "when", when, ("always", "failed"))
    if when == "failed" and least_sampled != 1:
        checks.check_no_effect(name, "with when='failed'", least_sampled=least_sampled)
    if when == "always":
        checks.check_no_effect(
            name, "with when='always'", threshold=threshold or None, metric=metric, probe=probe
        )
    policy = _Demonstrations(
        count=int(count),
        column=column,
        when=when,
        probe=probe,
        reward=reward,
        least_sampled=int(least_sampled),
        threshold=threshold,
        metric=metric,
    )
    return hinted(policy, source=source)
