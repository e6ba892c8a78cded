"""A collector of trees all of whose branches split at the same depths."""

import dataclasses
import math
from collections.abc import Sequence

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    sized,
)
from jaxrl_llm.curation.collectors.trees.forked import forked
from jaxrl_llm.curation.collectors.trees.rounds import NEEDS_OF_TREES, call_repr, check_counts
from jaxrl_llm.curation.trees.forks import segment_forks, split_points

__all__ = ["branched"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Branched:
    """Made by :func:`branched`; what plays is what ``for_run`` returns."""

    splits: int | tuple[int, ...] | None
    branches: int | tuple[int, ...] | None
    segment: int | None
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | NEEDS_OF_TREES

    def for_run(self, group_size: int, max_new_tokens: int) -> Collector:
        widths = self._widths(group_size, max_new_tokens)
        if isinstance(self.splits, tuple):
            splits = self.splits
        elif len(widths) > max_new_tokens:
            raise ValueError(
                f"{self!r}: a response of {max_new_tokens} tokens cannot split at {len(widths)} "
                "places."
            )
        else:
            splits = split_points(max_new_tokens, rounds=len(widths))
            if self.segment is not None:
                splits = tuple(min(x, i * self.segment) for i, x in enumerate(splits))
        if (leaves := math.prod(widths)) > group_size:
            raise ValueError(
                f"{self!r}: a tree has {leaves} leaves, more than a group of {group_size}."
            )
        # The split before the first token makes several first responses of the prompt.
        ends = tuple(place for place in splits if place)
        widths = widths[len(splits) - len(ends) :]
        made = self.source
        if ends:
            made = forked(
                segment_forks,
                forks=1,
                branches=widths[0] if len(set(widths)) == 1 else widths,
                rounds=len(ends),
                segment=ends,
                source=self.source,
            )
        return sized(made, group_size=group_size, max_new_tokens=max_new_tokens)

    def _widths(self, group_size: int, max_new_tokens: int) -> tuple[int, ...]:
        """The branches of each split."""
        splits, branches = self.splits, self.branches
        if isinstance(branches, tuple):
            return branches
        if branches is None:
            # As wide as the group has room for; fewer splits where two branches do not fit.
            count = splits if isinstance(splits, int) else 1
            while count > 1 and 2**count > group_size:
                count -= 1
            branches = 2
            while (branches + 1) ** count <= group_size:
                branches += 1
            return (branches,) * count
        if isinstance(splits, tuple):
            return (branches,) * len(splits)
        if splits is None:
            # As many as the group has room for.
            splits = 1
            while branches ** (splits + 1) <= group_size and splits < max_new_tokens:
                splits += 1
        return (branches,) * splits

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")

    def __repr__(self) -> str:
        return call_repr(branched, self)


def branched(
    *,
    splits: int | Sequence[int] | None = None,
    branches: int | Sequence[int] | None = 2,
    segment: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Samples trees whose branches all split at the same depths.

        at each split a response pauses, and `branches` responses continue it

    The group consists of the leaves. A split before the first token divides the prompt, into more
    than ``branches`` if the group is large enough. A response that ends before a split does not
    split, so its group has fewer leaves.

    Args:
      splits: Number of splits, at equal distances from 0 as in
        :func:`~jaxrl_llm.curation.split_points`; or their positions in tokens, ascending; None for
        as many as fit into a group, or as there are ``branches``.
      branches: Branches of a split; or one number for each; or None for the widest tree that fits
        into a group, with ``splits`` levels, or fewer if not even two branches fit.
      segment: Tokens between two splits, instead of equal distances, which are the maximum.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If a number is no integer.
      ValueError: If a number is out of its range or has no effect; in a run, if a tree does not fit
        the group, or a split the response.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.branched(splits=4)
      branched(splits=4)

    References:
      BranchGRPO (arXiv:2509.06040): two branches at steps 0, 3, 6 and 9 of 20, so 16 leaves. Its
      steps denoise; tokens of a text are ours. SPO-tree (arXiv:2505.23564): 6, 6 and 6 branches,
      segments of 30 tokens.
    """
    name = "branched"
    counts: dict[str, int | None] = {"segment": segment}
    if isinstance(branches, Sequence):
        branches = tuple(branches)
        check_counts(name, {f"branches[{i}]": x for i, x in enumerate(branches)})
    else:
        counts["branches"] = branches
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
    if segment is not None and isinstance(splits, tuple):
        raise ValueError(f"{name}: segment={segment} has no effect with the places of the splits.")
    if branches is None and not isinstance(splits, int):
        raise ValueError(f"{name}: branches=None takes a number of splits; got {splits}.")
    if isinstance(branches, tuple):
        levels = len(splits) if isinstance(splits, tuple) else splits
        if not branches or levels not in (None, len(branches)):
            raise ValueError(
                f"{name}: branches must have one number for each split; got {branches} for "
                f"splits={splits}."
            )
    if branches is not None and min(branches if isinstance(branches, tuple) else [branches]) < 2:
        raise ValueError(f"{name}: branches must be at least 2; got {branches}.")
    return _Branched(
        splits=splits, branches=branches, segment=segment, source=prompt_source(name, source)
    )
