"""A collector of trees all of whose branches split at the same depths."""

import dataclasses
from collections.abc import Sequence

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    in_order,
    prompt_source,
    sized,
)
from jaxrl_llm.curation.collectors.trees.forked import forked
from jaxrl_llm.curation.collectors.trees.rounds import check_counts
from jaxrl_llm.curation.trees.forks import segment_forks, split_points


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Branched:
    """Made by :func:`branched`; what plays is what ``for_run`` returns."""

    splits: int | tuple[int, ...] | None
    branches: int
    source: Collector
    needs_slots = True
    asks_again = True

    def for_run(self, group_size: int, max_new_tokens: int) -> Collector:
        splits, branches = self.splits, self.branches
        if splits is None:
            # As many as the group has room for.
            splits = 1
            while branches ** (splits + 1) <= group_size and splits < max_new_tokens:
                splits += 1
        if isinstance(splits, int):
            if splits > max_new_tokens:
                raise ValueError(
                    f"{self!r}: a response of {max_new_tokens} tokens cannot split at {splits} "
                    "places."
                )
            splits = split_points(max_new_tokens, rounds=splits)
        # The split before the first token makes several first responses of the prompt.
        ends = tuple(place for place in splits if place)
        if (leaves := branches ** len(splits)) > group_size:
            raise ValueError(
                f"{self!r}: a tree has {leaves} leaves, more than a group of {group_size}."
            )
        made = self.source
        if ends:
            made = forked(
                segment_forks,
                forks=1,
                branches=branches,
                rounds=len(ends),
                segment=ends,
                source=self.source,
            )
        return sized(made, group_size=group_size, max_new_tokens=max_new_tokens)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")

    def __repr__(self) -> str:
        text = [] if self.splits is None else [f"splits={self.splits}"]
        text += [f"branches={self.branches}"] if self.branches != 2 else []
        text += [f"source={self.source!r}"] if self.source != in_order() else []
        return f"branched({', '.join(text)})"


def branched(
    *,
    splits: int | Sequence[int] | None = None,
    branches: int = 2,
    source: Collector | None = None,
) -> Collector:
    """Asks for trees all of whose branches split at the same depths.

        at each of the splits a response pauses, and `branches` responses go on from it

    The group are the leaves. A split before the first token divides the prompt; where the group has
    room for it, into more than ``branches``. A response that ends before a split does not split, so
    that its group has fewer leaves.

    Args:
      splits: How many, at equal distances from 0 as in :func:`~jaxrl_llm.curation.split_points`; or
        their places, rising, in tokens; None for as many as a group has room for.
      branches: Of a split.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If a number is no integer.
      ValueError: If a number is out of its range; in a run, if a tree does not fit the group, or a
        split the response.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.branched(splits=4)
      branched(splits=4)

    References:
      BranchGRPO (arXiv:2509.06040): two branches at steps 0, 3, 6 and 9 of 20, so 16 leaves. Its
      steps denoise; tokens of a text are ours.
    """
    name = "branched"
    counts: dict[str, int | None] = {"branches": branches}
    if isinstance(splits, Sequence):
        splits = tuple(splits)
        for i, place in enumerate(splits):
            if isinstance(place, bool) or not isinstance(place, int):
                raise TypeError(f"{name}: splits[{i}] must be an integer; got {place!r}.")
            checks.check_non_negative(name, **{f"splits[{i}]": place})
        if list(splits) != sorted(set(splits)) or not splits:
            raise ValueError(f"{name}: splits must rise, and be at least one; got {splits}.")
    else:
        counts["splits"] = splits
    check_counts(name, counts)
    if branches < 2:
        raise ValueError(f"{name}: branches must be at least 2; got {branches}.")
    return _Branched(splits=splits, branches=branches, source=prompt_source(name, source))
