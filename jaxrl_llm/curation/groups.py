"""Which groups and rollouts are used: by their rewards, and by how they ended.

- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all.
- ``threshold``: the coverage at and below which a right answer is dropped.
- ``width``: distance above ``threshold`` from which no answer is dropped, above 0.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks, masking, stats

__all__ = [
    "Compacted",
    "compact_groups",
    "ended_tokens",
    "informative_groups",
    "prs_keep_prob",
    "prs_where",
    "spread_groups",
    "truncation_mask",
    "window_tokens",
]


def informative_groups(
    rewards: Array,
    *,
    where: Array | None = None,
    metric: Array | Mapping[str, Array] | None = None,
    name: str | None = None,
    keep_singletons: bool = False,
) -> Array:
    """The groups whose rollouts differ in reward: dynamic sampling.

        keep_g = max over g of metric > min over g of metric

    A group with equal rewards has advantage 0 in every group-relative method; dropping it changes
    only the denominators. :func:`refill` samples replacements.

    Args:
      where: As in the module; a group without one is dropped.
      rewards: ``[..., G]``, floating point; compared without a ``metric``.
      metric: ``[..., G]``, floating point, compared in place of the rewards, such as the accuracy
        where length shapes the reward; or a mapping of names to such arrays, as a batch's reward
        components: ``connect(bind(informative_groups, name="accuracy"),
        metric="reward_components")``. An entry of it that is NaN does not apply and is not
        compared.
      name: The entry of the mapping to compare.
      keep_singletons: Whether a group of one rollout, which cannot differ, is kept.

    Returns:
      bool ``[..., G]``: ``where``, less the groups that are dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
      >>> jr.curation.informative_groups(rewards)[:, 0].tolist()
      [False, False, True]

    References:
      DAPO (arXiv:2503.14476), with accuracy as the metric; its released trainer keeps singletons.
    """
    function = "informative_groups"
    stats.check_group(function, rewards, where)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    compared = valid
    if isinstance(metric, Mapping):
        if name not in metric:
            raise ValueError(
                f"{function}: name must be one of {', '.join(map(repr, sorted(metric)))}; "
                f"got {name!r}."
            )
        metric = metric[name]
        compared = ~jnp.isnan(metric)
    elif name is not None:
        raise ValueError(
            f"{function}: name={name!r} has no effect unless metric is a mapping to arrays."
        )
    if metric is not None:
        checks.check_float(function, metric=metric)
        checks.check_same_shape(function, rewards=rewards, metric=metric)
    compared = valid & compared
    values = masking.zero_masked(rewards if metric is None else metric, compared)
    # A NaN compares as neither: the group stays, and the NaN is seen.
    keep = ~stats.group_is_constant(values, compared)
    if keep_singletons:
        keep |= stats.group_count(values, compared) == 1
    return valid & keep


def spread_groups(
    rewards: Array,
    *,
    where: Array | None = None,
    threshold: float = 0.3,
    keep_singletons: bool = True,
) -> Array:
    """The groups whose rewards have a standard deviation above a threshold.

        keep_g = std(r) > threshold,  ddof 0

    Args:
      where: As in the module; a group without one is dropped.
      rewards: ``[..., G]``, floating point.
      threshold: Largest deviation of a dropped group, in units of reward, not negative.
      keep_singletons: Whether a group of one rollout is kept.

    Returns:
      bool ``[..., G]``: ``where``, less the groups that are dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.9], [1.0, 0.0]])
      >>> jr.curation.spread_groups(rewards)[:, 0].tolist()
      [False, True]

    References:
      UI-S1 (arXiv:2509.11543), the released code, on the returns of first steps.
    """
    stats.check_group("spread_groups", rewards, where)
    checks.check_non_negative("spread_groups", finite=True, threshold=threshold)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    keep = stats.group_std(rewards, where, ddof=0) > threshold
    if keep_singletons:
        keep |= stats.group_count(rewards, where) == 1
    return valid & keep


class Compacted(NamedTuple):
    """Groups moved to the front, at a static size.

    Attributes:
      tree: The arrays, each ``[n_target, ...]``.
      where: bool ``[n_target]``, True for rows that hold a group of ``keep``.
      count: int32 ``[]``, number of groups in ``keep``; it may exceed ``n_target``.
    """

    tree: ArrayTree
    where: Array
    count: Array


def compact_groups(tree: ArrayTree, keep: Array, *, n_target: int) -> Compacted:
    """The first ``n_target`` groups of ``keep``, in their order, at a static size.

        row i of the result = the i-th row with keep = True;  rows beyond the last are filler

    Filler rows hold other groups; mask them with ``where``.

    Args:
      tree: Arrays ``[P, ...]`` with the same P.
      keep: bool ``[P]``.
      n_target: Number of rows of the result, at most P.

    Returns:
      :class:`Compacted`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> keep = jnp.array([False, True, False, True, True])
      >>> out = jr.curation.compact_groups({"x": jnp.arange(5)}, keep, n_target=4)
      >>> out.tree["x"].tolist(), out.where.tolist(), int(out.count)
      ([1, 3, 4, 0], [True, True, True, False], 3)

    References:
      Yu et al., DAPO (arXiv:2503.14476): the batch is cut to its first groups once it is full.
    """
    function = "compact_groups"
    checks.check_rank(function, 1, keep=keep)
    checks.check_bool(function, keep=keep)
    (prompts,) = jnp.shape(keep)
    if not 1 <= n_target <= prompts:
        raise ValueError(f"{function}: n_target must be from 1 to {prompts}; got {n_target}.")
    for leaf in jax.tree.leaves(tree):
        if jnp.shape(leaf)[:1] != (prompts,):
            raise ValueError(
                f"{function}: every array must have the {prompts} rows of keep; "
                f"got shape {jnp.shape(leaf)}."
            )
    order = jnp.argsort(~keep, stable=True)[:n_target]
    count = jnp.sum(keep, dtype=jnp.int32)
    return Compacted(
        tree=jax.tree.map(lambda x: jnp.asarray(x)[order], tree),
        where=jnp.arange(n_target) < count,
        count=count,
    )


def truncation_mask(advantages: Array, mask: Array, *, truncated: Array) -> Array:
    """Drops the tokens of truncated responses: overlong filtering, as a selection.

        keep[..., t] = mask[..., t] and not truncated[...]

    Their rewards stay in the baselines of their groups.

    Args:
      advantages: Not read; every selection gets them.
      mask: bool ``[..., G, T]``, True = keep.
      truncated: bool ``[..., G]``, True where the response ended by its length, not by a stop.

    Returns:
      bool ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, truncated = jnp.ones((2, 3), bool), jnp.array([False, True])
      >>> jr.curation.truncation_mask(jnp.zeros(2), mask, truncated=truncated)[:, 0].tolist()
      [True, False]

    References:
      Yu et al., DAPO (arXiv:2503.14476), the alternative to its overlong penalty.
    """
    del advantages
    checks.check_mask("truncation_mask", mask)
    checks.check_bool("truncation_mask", truncated=truncated)
    checks.check_shape("truncation_mask", "truncated", truncated, jnp.shape(mask)[:-1])
    return mask & ~truncated[..., None]


def window_tokens(
    mask: Array,
    *,
    unfinished: Array,
    versions: Array,
    current_version: Array | int,
    drop_tail: int = 0,
) -> Array:
    """The tokens that this batch sampled, for responses that continue from batch to batch.

        keep = version of the token is the current one
               and not (unfinished and one of the last drop_tail tokens)

    Each token trains once, in the batch that sampled it. In an unfinished response the estimates of
    the last tokens depend on the value that is bootstrapped for the rest.

    Args:
      mask: bool ``[..., T]``, True = keep.
      unfinished: bool ``[...]``, True where the response continues in a later batch.
      versions: ``[..., T]`` integers, of the weights that sampled each token.
      current_version: Version of the weights that sampled now: one integer, or integers with the
        leading axes of ``mask``, such as ``[P]``.
      drop_tail: Tokens, not negative.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, versions = jnp.ones((1, 4), bool), jnp.array([[3, 4, 4, 4]])
      >>> jr.curation.window_tokens(
      ...     mask, unfinished=jnp.array([True]), versions=versions, current_version=4,
      ...     drop_tail=1).tolist()
      [[False, True, True, False]]

    References:
      T-PPO (arXiv:2506.15050), PAPER, from a note on it; the tail is our reading.
    """
    checks.check_non_negative("window_tokens", drop_tail=drop_tail)
    newest = _sampled_now("window_tokens", mask, unfinished, versions, current_version)
    left = jnp.cumsum(jnp.asarray(mask)[..., ::-1], axis=-1)[..., ::-1]
    return newest & ~(jnp.asarray(unfinished)[..., None] & (left <= drop_tail))


def ended_tokens(
    mask: Array, *, unfinished: Array, versions: Array, current_version: Array | int
) -> Array:
    """All tokens of the responses that ended in this batch, whose returns are known.

    A critic that is trained on them alone, once each, needs no bootstrap.

    Args:
      mask, unfinished, versions, current_version: As in :func:`window_tokens`.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> versions = jnp.array([[3, 4], [3, 4], [2, 3]])
      >>> jr.curation.ended_tokens(jnp.ones((3, 2), bool), versions=versions,
      ...     current_version=4, unfinished=jnp.array([False, True, False])).tolist()
      [[True, True], [False, False], [False, False]]

    References:
      T-PPO (arXiv:2506.15050), PAPER, from a note on it.
    """
    newest = _sampled_now("ended_tokens", mask, unfinished, versions, current_version)
    now = jnp.any(newest, axis=-1) & ~jnp.asarray(unfinished)
    return mask & now[..., None]


def _sampled_now(
    function: str, mask: Array, unfinished: Array, versions: Array, current_version: Array | int
) -> Array:
    checks.check_mask(function, mask)
    checks.check_bool(function, unfinished=unfinished)
    checks.check_shape(function, "unfinished", unfinished, jnp.shape(mask)[:-1])
    current = jnp.asarray(current_version)
    checks.check_integer(function, versions=versions, current_version=current)
    checks.check_same_shape(function, mask=mask, versions=versions)
    lead = jnp.shape(mask)[: current.ndim]
    checks.check_shape(function, "current_version", current, lead)
    return mask & (versions == jnp.expand_dims(current, range(current.ndim, mask.ndim)))


def prs_keep_prob(
    coverage: Array, correct: Array, *, threshold: float = 0.3, width: float = 0.1
) -> Array:
    """The probability of keeping a rollout, by the share of its run time that its own work covers.

        p = clip((coverage - threshold) / width, 0, 1) where correct, else 1

    Correct answers that avoid the work are dropped; wrong answers are always kept.

    Args:
      threshold, width: See the module.
      coverage: ``[...]``, floating point, in [0, 1].
      correct: bool ``[...]``.

    Returns:
      Probabilities ``[...]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> correct = jnp.array([True, True, True, False])
      >>> jr.curation.prs_keep_prob(jnp.array([0.25, 0.35, 0.5, 0.0]), correct).round(3).tolist()
      [0.0, 0.5, 1.0, 1.0]

    References:
      Dr. Kernel (arXiv:2602.05885), profiling-based rejection sampling; the released code.
    """
    function = "prs_keep_prob"
    checks.check_min_rank(function, 0, coverage=coverage, correct=correct)
    checks.check_float(function, coverage=coverage)
    checks.check_bool(function, correct=correct)
    checks.check_same_shape(function, coverage=coverage, correct=correct)
    checks.check_positive(function, finite=True, width=width)
    ramp = jnp.clip((jnp.asarray(coverage, jnp.float32) - threshold) / width, 0.0, 1.0)
    return jnp.where(correct, ramp, 1.0)


def prs_where(
    rewards: Array,
    *,
    coverage: Array,
    key: Array,
    where: Array | None = None,
    threshold: float = 0.3,
    width: float = 0.1,
) -> Array:
    """Random selection of rollouts by :func:`prs_keep_prob`, for a curation slot.

        keep_i = u_i < p_i,   u_i uniform in [0, 1),   correct_i = rewards_i > 0

    Args:
      where, threshold, width: See the module.
      rewards: ``[..., G]``, floating point; above 0 for a right answer.
      coverage: ``[..., G]``, floating point, in [0, 1].
      key: Typed PRNG key.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> coverage = jnp.array([0.2, 0.9, 0.2])
      >>> rewards = jnp.array([1.0, 1.0, 0.0])
      >>> jr.curation.prs_where(rewards, coverage=coverage, key=jax.random.key(0)).tolist()
      [False, True, True]

    References:
      Dr. Kernel (arXiv:2602.05885); the released code, which draws for each turn.
    """
    stats.check_group("prs_where", rewards, where)
    checks.check_min_rank("prs_where", 1, coverage=coverage)
    checks.check_float("prs_where", coverage=coverage)
    checks.check_same_shape("prs_where", rewards=rewards, coverage=coverage)
    rewards = masking.zero_masked(rewards, where)
    prob = prs_keep_prob(coverage, rewards > 0, threshold=threshold, width=width)
    keep = jax.random.uniform(key, jnp.shape(rewards)) < prob
    return keep if where is None else keep & where
