"""Trees of rollouts: where they fork, which forks are pruned, and which edges train.

These rules are functions of arrays; the caller samples, copies slots and ends rows.
``advantages.node_rewards`` and ``advantages.depth_advantages`` assign credit to the nodes of a
tree.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "Candidates",
    "branch_candidates",
    "branch_capacity",
    "depth_prune",
    "edit_distance",
    "lookahead_prune",
    "rouge_l",
    "segment_forks",
    "split_points",
    "suffix_match",
    "top_entropy_forks",
    "tree_rollouts",
    "width_prune",
]


def top_entropy_forks(old_entropy: Array, mask: Array, *, count: int) -> Array:
    """The tokens of a response before which it forks: the tokens with the largest entropy.

    A fork keeps the tokens before its position and samples the rest again, including the token at
    the position. M roots with N forks of B branches give M (1 + B N) rollouts, for about
    (1 + B N / 2) / (1 + B N) of the tokens of as many independent ones.

    Args:
      old_entropy: ``[..., T]`` entropy (nats) of the policy that sampled, floating point.
      mask: bool ``[..., T]``, True for the tokens of the response.
      count: Number of forks per response, at least 1.

    Returns:
      int32 ``[..., count]``, positions by decreasing entropy, ties in order of position; -1 where
      the response has fewer tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy, mask = jnp.array([0.1, 0.9, 0.5]), jnp.array([True, True, True])
      >>> jr.curation.top_entropy_forks(entropy, mask, count=2).tolist()
      [1, 2]

    References:
      ETTRL (arXiv:2508.11356), NOTES reading: 12 roots, 2 forks, 2 branches. Resampling the token
      at the fork is ours.
    """
    function = "top_entropy_forks"
    masking.check_tokens(function, mask, old_entropy=old_entropy)
    checks.check_positive(function, finite=True, count=count)
    falling = jnp.where(mask, -masking.zero_masked(old_entropy, mask), jnp.inf)
    order = jnp.argsort(falling, axis=-1, stable=True)[..., :count]
    missing = count - order.shape[-1]
    order = jnp.pad(order, [(0, 0)] * (order.ndim - 1) + [(0, missing)])
    there = jnp.arange(count) < jnp.sum(mask, axis=-1, keepdims=True)
    return jnp.where(there, order, -1).astype(jnp.int32)


def segment_forks(lengths: Array, unfinished: Array) -> Array:
    """Forks of paused responses, at their end.

        place = length where unfinished, else -1

    Args:
      lengths: ``[...]`` integers, tokens of each response.
      unfinished: bool ``[...]``, True where the response paused and has not ended.

    Returns:
      int32 ``[..., 1]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.segment_forks(jnp.array([4, 3]), jnp.array([True, False])).tolist()
      [[4], [-1]]

    References:
      BranchGRPO (arXiv:2509.06040): all branches split at the same depth. Its depths are steps of
      denoising; segments of a text are ours.
    """
    function = "segment_forks"
    checks.check_integer(function, lengths=lengths)
    checks.check_bool(function, unfinished=unfinished)
    checks.check_same_shape(function, lengths=lengths, unfinished=unfinished)
    return jnp.where(unfinished, lengths, -1).astype(jnp.int32)[..., None]


class Candidates(NamedTuple):
    """The most probable tokens of each row.

    Attributes:
      tokens: int32 ``[..., m]``, by decreasing probability.
      keep: bool ``[..., m]``, True where a branch continues with the token; always for the first.
    """

    tokens: Array
    keep: Array


def branch_candidates(
    probs: Array,
    *,
    candidates: int = 2,
    min_prob: float = 0.25,
    max_gap: float = 0.15,
    done: Array | None = None,
) -> Candidates:
    """Tokens at which a row splits: those almost as probable as the most probable token.

        keep_j = p_j > min_prob  and  p_1 - p_j < max_gap,   j = 2 .. candidates

    The row itself continues with the first token, and a copy of it with each other token.

    Args:
      probs: ``[..., V]``, floating point: probabilities of the next token at temperature 1.
      candidates: m, from 1 to V.
      min_prob: In [0, 1].
      max_gap: In [0, 1].
      done: bool ``[...]``, True for rows that have ended, which do not split. None for none.

    Returns:
      :class:`Candidates`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> out = jr.curation.branch_candidates(
      ...     jnp.array([0.5, 0.3, 0.2]), candidates=3, max_gap=0.25)
      >>> out.tokens.tolist(), out.keep.tolist()
      ([0, 1, 2], [True, True, False])

    References:
      LATR (arXiv:2510.24302); the defaults of the released class. Its script for mathematics has
      0.15 and 0.25.
    """
    function = "branch_candidates"
    checks.check_min_rank(function, 1, probs=probs)
    checks.check_float(function, probs=probs)
    checks.check_share(function, min_prob=min_prob, max_gap=max_gap)
    checks.check_bool(function, done=done)
    vocab = jnp.shape(probs)[-1]
    if not 1 <= candidates <= vocab:
        raise ValueError(f"{function}: candidates must be from 1 to {vocab}; got {candidates}.")
    top, tokens = jax.lax.top_k(jnp.asarray(probs, jnp.float32), candidates)
    keep = (top > min_prob) & (top[..., :1] - top < max_gap)
    if done is not None:
        checks.check_shape(function, "done", done, jnp.shape(probs)[:-1])
        keep &= ~jnp.asarray(done)[..., None]
    return Candidates(tokens.astype(jnp.int32), keep | (jnp.arange(candidates) == 0))


def branch_capacity(keep: Array, roots: Array, *, capacity: int) -> Array:
    """Limits the branches of each root to the number of slots.

    All first candidates have priority over all second ones; within a rank, rows are taken in order.

    Args:
      keep: bool ``[R, m]``, :func:`branch_candidates`.
      roots: ``[R]`` integers, the root of each row.
      capacity: Maximum number of rows per root, at least 1.

    Returns:
      bool ``[R, m]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> keep, roots = jnp.ones((3, 2), bool), jnp.array([0, 0, 1])
      >>> jr.curation.branch_capacity(keep, roots, capacity=3).tolist()
      [[True, True], [True, False], [True, True]]

    References:
      LATR (arXiv:2510.24302); the released code.
    """
    function = "branch_capacity"
    checks.check_rank(function, 2, keep=keep)
    checks.check_bool(function, keep=keep)
    checks.check_integer(function, roots=roots)
    checks.check_shape(function, "roots", roots, jnp.shape(keep)[:1])
    checks.check_positive(function, finite=True, capacity=capacity)
    rows, width = jnp.shape(keep)
    keep = jnp.asarray(keep)
    # By rank, then by row: how many of the same root come before.
    flat, owner = keep.T.reshape(-1), jnp.tile(jnp.asarray(roots), width)
    place = jnp.arange(flat.size)
    before = (owner[:, None] == owner) & flat & (place < place[:, None])
    within = flat & (jnp.sum(before, axis=-1) < capacity)
    return within.reshape(width, rows).T


def edit_distance(a: Array, b: Array) -> Array:
    """Levenshtein distance: the minimum number of insertions, deletions and substitutions.

        d[i, j] = min(d[i-1, j] + 1, d[i, j-1] + 1, d[i-1, j-1] + [a_i != b_j])

    Args:
      a: ``[..., N]`` integers.
      b: ``[..., M]`` integers, with the same leading axes.

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> int(jr.curation.edit_distance(jnp.array([1, 2, 3, 4]), jnp.array([9, 2, 3, 4])))
      1

    References:
      LATR (arXiv:2510.24302) compares branches by it.
    """
    a, b = _sequences("edit_distance", a, b)
    size = b.shape[-1]
    places = jnp.arange(size + 1)
    first = jnp.broadcast_to(places, (*b.shape[:-1], size + 1))

    def row(previous: Array, token: Array) -> tuple[Array, None]:
        other = previous[..., :-1] + (token[..., None] != b)
        start = previous[..., :1] + 1
        best = jnp.concatenate([start, jnp.minimum(other, previous[..., 1:] + 1)], axis=-1)
        # Insertions run along the row: each costs one more than its neighbor.
        return jax.lax.cummin(best - places, axis=best.ndim - 1) + places, None

    last, _ = jax.lax.scan(row, first, jnp.moveaxis(a, -1, 0))
    return last[..., -1].astype(jnp.int32)


def _sequences(function: str, a: Array, b: Array) -> tuple[Array, Array]:
    checks.check_integer(function, a=a, b=b)
    checks.check_min_rank(function, 1, a=a, b=b)
    a, b = jnp.asarray(a), jnp.asarray(b)
    checks.check_shape(function, "b", b, (*a.shape[:-1], b.shape[-1]))
    return a, b


def suffix_match(a: Array, b: Array) -> Array:
    """The share of the end of either sequence that occurs anywhere in the other.

        max(longest suffix of a that occurs in b, longest suffix of b that occurs in a) / N

    Args:
      a: ``[..., N]`` integers, N at least 1.
      b: ``[..., N]`` integers.

    Returns:
      ``[...]`` float32 in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.suffix_match(jnp.array([1, 2, 3, 4]), jnp.array([3, 4, 7, 8])))
      0.5

    References:
      LATR (arXiv:2510.24302); the released code.
    """
    a, b = _sequences("suffix_match", a, b)
    size = a.shape[-1]
    if size == 0 or b.shape[-1] != size:
        raise ValueError(
            f"suffix_match: a and b must have one length of at least 1; got {a.shape} and "
            f"{b.shape}."
        )
    # run[i, j]: tokens that agree when both are read backwards from places i and j.
    start = jnp.zeros((*b.shape[:-1], size + 1), jnp.int32)

    def row(previous: Array, token: Array) -> tuple[Array, Array]:
        run = jnp.where(token[..., None] == b, previous[..., :-1] + 1, 0)
        run = jnp.concatenate([jnp.zeros_like(run[..., :1]), run], axis=-1)
        return run, run[..., -1]

    last, ends = jax.lax.scan(row, start, jnp.moveaxis(a, -1, 0))
    longest = jnp.maximum(jnp.max(last, axis=-1), jnp.max(ends, axis=0))
    return longest.astype(jnp.float32) / size


def rouge_l(a: Array, b: Array) -> Array:
    """The F1 score of the longest common subsequence.

        2 lcs / (N + M)

    Args:
      a: ``[..., N]`` integers.
      b: ``[..., M]`` integers, with the same leading axes.

    Returns:
      ``[...]`` float32 in [0, 1]; 0 for two empty sequences.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.curation.rouge_l(jnp.array([1, 2, 3, 4]), jnp.array([1, 9, 3, 8])))
      0.5

    References:
      Lin, ROUGE (2004), as LATR (arXiv:2510.24302) compares branches.
    """
    a, b = _sequences("rouge_l", a, b)
    total = a.shape[-1] + b.shape[-1]
    start = jnp.zeros((*b.shape[:-1], b.shape[-1] + 1), jnp.int32)

    def row(previous: Array, token: Array) -> tuple[Array, None]:
        extended = jnp.where(token[..., None] == b, previous[..., :-1] + 1, previous[..., 1:])
        best = jnp.concatenate([jnp.zeros_like(extended[..., :1]), extended], axis=-1)
        return jax.lax.cummax(best, axis=best.ndim - 1), None

    last, _ = jax.lax.scan(row, start, jnp.moveaxis(a, -1, 0))
    return 2.0 * last[..., -1].astype(jnp.float32) / max(total, 1)


def lookahead_prune(
    tokens: Array,
    parents: Array,
    birth: Array,
    step: int | Array,
    *,
    ages: Sequence[int] = (20, 30, 50),
    max_distance: float | None = 0.4,
    min_suffix: float | None = None,
    min_overlap: float | None = None,
    eos_id: int,
) -> Array:
    """Prunes branches that are too similar to their parents.

        dropped at age r in ages, if of the last r tokens of branch and parent
            edit_distance / r < max_distance,  suffix_match > min_suffix  or  rouge_l > min_overlap

    Both are compared from the token at which they differ. A branch is kept if it or its parent has
    ended; roots are always kept.

    Args:
      tokens: ``[R, T]`` integers, the tokens of the rows up to ``step``.
      parents: ``[R]`` integers, the row of the parent; -1 for a root.
      birth: ``[R]`` integers, the step at which the branch took another token.
      step: Number of tokens of the rows.
      ages: Ages at which a branch is compared, each from 1 to T.
      max_distance: In [0, 1]; None disables the rule, also for the next two options.
      min_suffix: In [0, 1].
      min_overlap: In [0, 1].
      eos_id: The token that ends a response.

    Returns:
      bool ``[R]``, True for rows that are dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> tokens = jnp.array([[5, 1, 2, 3, 4], [5, 9, 2, 3, 4], [5, 9, 8, 7, 6]])
      >>> jr.curation.lookahead_prune(
      ...     tokens, jnp.array([-1, 0, 0]), jnp.array([0, 1, 1]), 5, ages=(4,), eos_id=0).tolist()
      [False, True, False]

    References:
      LATR (arXiv:2510.24302), the released code. Its script for mathematics has ``min_suffix=0.2``,
      ``min_overlap=0.5`` and no distance.
    """
    function = "lookahead_prune"
    checks.check_rank(function, 2, tokens=tokens)
    checks.check_integer(function, tokens=tokens, parents=parents, birth=birth)
    rows, size = jnp.shape(tokens)
    for name, x in (("parents", parents), ("birth", birth)):
        checks.check_shape(function, name, x, (rows,))
    checks.check_share(
        function, max_distance=max_distance, min_suffix=min_suffix, min_overlap=min_overlap
    )
    if max_distance is None and min_suffix is None and min_overlap is None:
        raise ValueError(f"{function}: one of the three rules must be on; all are None.")
    for age in ages:
        if not 1 <= age <= size:
            raise ValueError(f"{function}: each of ages must be from 1 to {size}; got {age}.")
    tokens, parents = jnp.asarray(tokens), jnp.asarray(parents)
    drop = jnp.zeros(rows, bool)
    for age in ages:
        start = jnp.clip(jnp.asarray(step) - age, 0, size - age)
        mine = jax.lax.dynamic_slice_in_dim(tokens, start, age, axis=1)
        theirs = mine[jnp.maximum(parents, 0)]
        ended = jnp.any((mine == eos_id) | (theirs == eos_id), axis=-1)
        alike = jnp.zeros(rows, bool)
        if max_distance is not None:
            alike |= edit_distance(mine, theirs) < max_distance * age
        if min_suffix is not None:
            alike |= suffix_match(mine, theirs) > min_suffix
        if min_overlap is not None:
            alike |= rouge_l(mine, theirs) > min_overlap
        due = (jnp.asarray(step) - jnp.asarray(birth) == age) & (parents >= 0)
        drop |= due & alike & ~ended
    return drop


def tree_rollouts(
    step: int | Array,
    *,
    group_size: int,
    starts: Sequence[int] = (0, 100, 200, 300),
    shares: Sequence[float] = (1.0, 0.75, 0.5, 0.25),
) -> Array:
    """Number of rollouts of a group from the tree; the others are sampled independently.

        round(share group_size), half to even;   share = that of the last start <= step

    Args:
      step: ``[...]`` integers, the training step, not before the first start.
      group_size: G, at least 1.
      starts: Increasing steps, from 0.
      shares: One share per start, in [0, 1].

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.tree_rollouts(jnp.array([0, 150, 999]), group_size=8).tolist()
      [8, 6, 2]

    References:
      LATR (arXiv:2510.24302); the released script.
    """
    function = "tree_rollouts"
    checks.check_integer(function, step=step)
    checks.check_positive(function, finite=True, group_size=group_size)
    if len(starts) != len(shares) or list(starts) != sorted(set(starts)) or not starts:
        raise ValueError(
            f"{function}: starts must rise and match shares; got {tuple(starts)} and "
            f"{tuple(shares)}."
        )
    for share in shares:
        checks.check_share(function, shares=share)
    place = jnp.searchsorted(jnp.asarray(starts), jnp.asarray(step), side="right") - 1
    counts = jnp.round(jnp.asarray(shares, jnp.float32) * group_size).astype(jnp.int32)
    return counts[jnp.maximum(place, 0)]


def split_points(
    length: int, *, rounds: int | None = None, points: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The steps at which every branch of a tree splits in two.

        i * (length // rounds),  i = 0 .. rounds - 1;   or the points themselves, in order
        cut to 0 .. length - 1

    With s splits a tree has 2^s leaves. A step is one unit of depth: a token, a turn or a
    denoising step.

    Args:
      length: Steps of a rollout, at least 1.
      rounds: Number of splits, from 1 to ``length``; None with ``points``.
      points: The steps; None with ``rounds``.

    Returns:
      A tuple of ints; computed on the host.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.split_points(20, rounds=4)
      (0, 5, 10, 15)

    References:
      BranchGRPO (arXiv:2509.06040): 0, 3, 6, 9 of 20 steps. A diffusion method; text is ours.
    """
    function = "split_points"
    checks.check_positive(function, finite=True, length=length)
    if rounds is not None and points is None:
        if not 1 <= rounds <= length:
            raise ValueError(f"{function}: rounds must be from 1 to {length}; got {rounds}.")
        points = [i * (length // rounds) for i in range(rounds)]
    elif rounds is not None or points is None:
        raise ValueError(
            f"{function}: give rounds or points; got rounds={rounds!r} and points={points!r}."
        )
    return tuple(sorted(min(max(int(p), 0), length - 1) for p in points))


def depth_prune(
    depth: Array,
    *,
    window: Sequence[int],
    step: int | Array = 0,
    interval: int | None = None,
    stop: int = 0,
) -> Array:
    """Edges that train: edges that do not end in a window of depths.

        keep = depth not in window - shift
        shift = min(step // interval, max(min(window) - stop, 0))

    Pruned edges still count for rewards and for the statistics of a depth.

    Args:
      depth: ``[...]`` integers, the depth of the node that an edge leads to.
      window: Depths that are excluded.
      step: The training step.
      interval: Steps after which the window slides up by one; None for a fixed one.
      stop: Depth beyond which the window does not slide, such as the last split.

    Returns:
      bool ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.depth_prune(
      ...     jnp.arange(4), window=(2, 3), step=40, interval=30, stop=1).tolist()
      [True, False, False, True]

    References:
      BranchGRPO (arXiv:2509.06040), the released code: a window of 15 to 17 of 20 steps that slides
      every 30 steps.
    """
    function = "depth_prune"
    checks.check_integer(function, depth=depth, step=step)
    checks.check_positive(function, finite=True, interval=interval)
    if not window:
        raise ValueError(f"{function}: window must name at least one depth; got none.")
    shift = 0
    if interval is not None:
        shift = jnp.minimum(jnp.asarray(step) // interval, max(min(window) - stop, 0))
    inside = jnp.asarray(depth)[..., None] == jnp.asarray(window) - shift
    return ~jnp.any(inside, axis=-1)


def width_prune(
    advantages: Array,
    *,
    ratio: float = 0.5,
    keep: Literal["best", "extremes"] = "extremes",
    where: Array | None = None,
) -> Array:
    """Edges after the last split that train: the best ones, or the best and the worst.

        "best"      the max(1, floor(ratio n)) of the greatest advantage
        "extremes"  max(2, floor(ratio n)): half of them the greatest (rounded down), else the least

    Among equal advantages the earlier counts as the larger. With "best" a row is a branch of the
    last split, with "extremes" a tree.

    Args:
      advantages: ``[..., N]``, floating point, of the edges of a row.
      ratio: Share of the edges that is kept, in [0, 1].
      keep: As above.
      where: bool ``[..., N]``, True for edges that exist. None for all.

    Returns:
      bool ``[..., N]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.width_prune(jnp.array([0.1, -2.0, 3.0, 0.2, 0.3, -0.1])).tolist()
      [False, True, True, False, False, True]

    References:
      BranchGRPO (arXiv:2509.06040), the released code, its modes 1 and 2.
    """
    function = "width_prune"
    stats.check_group(function, advantages, where, name="advantages")
    checks.check_share(function, ratio=ratio)
    checks.check_option(function, "keep", keep, ("best", "extremes"))
    valid = jnp.ones(jnp.shape(advantages), bool) if where is None else where
    falling = jnp.where(valid, -masking.zero_masked(advantages, where), jnp.inf)
    _, rank = stats.order_and_ranks(falling)
    n = jnp.sum(valid, axis=-1, keepdims=True)
    least = 1 if keep == "best" else 2
    count = jnp.maximum(jnp.floor(ratio * n + 1e-4).astype(jnp.int32), least)
    if keep == "best":
        return valid & (rank < count)
    best = count // 2
    return valid & ((rank < best) | (rank >= n - (count - best)))
