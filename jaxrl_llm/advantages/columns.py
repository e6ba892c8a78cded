"""Several rewards at once, by name: each normalized in its group before they are added."""

import numbers
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, batch
from jaxrl_llm.core import checks, masking, stats, traits
from jaxrl_llm.core.axes import Array

Columns = Mapping[str, Array]
Weights = Mapping[str, float] | tuple[tuple[str, float], ...]


def gdpo(
    rewards: Columns,
    *,
    where: Array | None = None,
    weights: Weights | None = None,
    gate: tuple[str, float] | None = None,
    batch_norm: Literal["sequence", "none"] = "sequence",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Array:
    """Each reward normalized within its group, then added, then normalized over the batch.

        z_ik = (r_ik - mean_group(r_k)) / (std_group(r_k) + eps)
        a_i = sum_k w_k z_ik
        A_i = (a_i - mean_batch(a)) / (std_batch(a) + eps)        batch_norm="none": A_i = a_i

    Adding the rewards first and normalizing their sum (:func:`sum_columns`, then :func:`grpo`) lets
    the reward with the widest spread decide, and cannot tell two satisfied rewards from one; here
    distinct combinations of rewards keep distinct advantages, and multiplying a reward by a
    constant changes nothing.

    NaN means that a reward does not apply to a rollout: it counts in no statistic of its column and
    adds 0. A rollout to which no reward applies gets 0 and is left out of the batch's statistics. A
    column that has fewer than two values in a group, or equal ones, adds 0 there. The batch's
    statistics must see the global batch; where all sums are equal the result is exactly 0.

    Args:
      rewards: Name to ``[..., G]``, floating point, one a rollout; a group lies along the last
        axis. NaN for a reward that does not apply.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest count in
        no statistic, get 0 and may hold anything.
      weights: Name to number, or a tuple of such pairs, which can be bound. None weighs each 1.
        Every column needs one.
      gate: Name of a reward and the least value of it at which the others count, as in
        :func:`gate_rewards`. None opens all.
      batch_norm: "sequence" or "none". For a normalization over tokens see :func:`gdpo_token`.
      eps: Added to each deviation, above 0.
      ddof: Delta degrees of freedom of the deviations: 1 divides by n - 1, 0 by n.

    Returns:
      Advantages ``[..., G]``, float32.

    Raises:
      TypeError: If ``rewards`` is not a mapping, a column is not floating point, ``where`` is not
        bool, or a weight is not a number.
      ValueError: If there is no column, shapes differ, a name of ``weights`` or of a column has no
        counterpart, or an option is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([[0.0, 1.0], [0.0, 1.0]]),
      ...            "short": jnp.array([[0.0, 1.0], [0.0, 0.0]])}
      >>> jr.advantages.gdpo(rewards).round(4).tolist()  # two satisfied rewards count twice
      [[-1.095..., 1.095...], [-0.547..., 0.547...]]

    References:
      GDPO (arXiv:2601.05242), as in TRL (``normalize_then_sum``), which does the same to a single
      reward; the authors' code is then plain :func:`grpo`. The authors count NaN as a reward of 0.
    """
    x = _prepare("gdpo", rewards, where, weights, gate, eps, ddof)
    checks.check_option("gdpo", "batch_norm", batch_norm, ("sequence", "none"))
    if batch_norm == "none":
        return x.total
    shifted = x.total - masking.masked_mean(x.total, x.present)
    scaled = shifted / (masking.masked_std(x.total, x.present, ddof=ddof) + eps)
    scaled = jnp.where(masking.is_constant(x.total, x.present), 0.0, scaled)
    return masking.zero_masked(scaled, x.present)


@traits(token_values=True)
def gdpo_token(
    rewards: Columns,
    mask: Array,
    *,
    where: Array | None = None,
    weights: Weights | None = None,
    gate: tuple[str, float] | None = None,
    eps: float = 1e-6,
    norm_eps: float = 1e-8,
    ddof: int = 1,
) -> Array:
    """:func:`gdpo` with the last step over the tokens of the batch, so that length counts.

        A_it = (a_i - m) / sqrt(v + norm_eps)      m, v of a_i over all kept tokens, v over n - 1

    ``a_i`` is the sum of the normalized rewards, as in :func:`gdpo`. A long rollout counts once for
    each of its tokens; its own value is the same at all of them.

    Args:
      rewards: Name to ``[..., G]``, floating point; NaN for a reward that does not apply.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest, and
        their tokens, count in no statistic, get 0 and may hold anything.
      weights: As in :func:`gdpo`.
      gate: As in :func:`gdpo`.
      eps: Added to the deviation of each reward, above 0.
      norm_eps: Added to the variance over tokens, above 0.
      ddof: Of the deviation of each reward, 1 or 0.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Raises:
      TypeError: If ``rewards`` is not a mapping, a column is not floating point, ``mask`` or
        ``where`` is not bool, or a weight is not a number.
      ValueError: As in :func:`gdpo`, and if the mask does not match the columns.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([0.0, 1.0]), "short": jnp.array([0.0, 1.0])}
      >>> mask = jnp.array([[True, False], [True, True]])
      >>> jr.advantages.gdpo_token(rewards, mask).round(3).tolist()
      [[-1.155..., 0.0], [0.577..., 0.577...]]

    References:
      GDPO (arXiv:2601.05242), as in the authors' verl and in verl's ``gdpo`` from 0.9. They count
      NaN as a reward of 0, and give the only rollout of a group its reward.
    """
    x = _prepare("gdpo_token", rewards, where, weights, gate, eps, ddof)
    checks.check_positive("gdpo_token", norm_eps=norm_eps)
    tokens = _inputs.check_tokens("gdpo_token", x.total, mask, None) & x.present[..., None]
    return batch.whiten(x.total, tokens, eps=norm_eps)


def sum_columns(
    rewards: Columns, *, where: Array | None = None, weights: Weights | None = None
) -> Array:
    """The weighted sum of the rewards of each rollout; what does not apply (NaN) adds nothing.

        r_i = sum_k w_k r_ik

    Args:
      rewards: Name to ``[..., G]``, floating point; NaN for a reward that does not apply.
      where: bool ``[..., G]``, True for rollouts that take part; the rest get 0.
      weights: Name to number, or a tuple of such pairs. None weighs each 1.

    Returns:
      Rewards ``[..., G]``, float32; 0 where no reward applies.

    Raises:
      TypeError: If ``rewards`` is not a mapping, a column is not floating point, ``where`` is not
        bool, or a weight is not a number.
      ValueError: If there is no column, shapes differ, or a name of ``weights`` or of a column has
        no counterpart.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([0.0, 1.0]), "short": jnp.array([1.0, jnp.nan])}
      >>> jr.advantages.sum_columns(rewards, weights={"right": 1.0, "short": 0.5}).tolist()
      [0.5, 1.0]

    References:
      TRL's ``sum_then_normalize`` adds the columns this way before it normalizes.
    """
    weights = _weights("sum_columns", _check("sum_columns", rewards, where), weights)
    applies = {name: _applies(x, where) for name, x in rewards.items()}
    return sum(
        weights[name] * masking.zero_masked(rewards[name], applies[name])
        for name in sorted(weights)
    )


def gate_rewards(
    rewards: Columns, *, by: str, threshold: float, columns: tuple[str, ...] | None = None
) -> dict[str, Array]:
    """Rewards that count only where a more important one is reached.

        r_ik <- r_ik  where r_i,by >= threshold,  else 0

    Apply it before :func:`gdpo`, so that an easy reward is not earned at the cost of the hard one.
    A reward that does not apply (NaN) stays so; where the gate itself does not apply it is shut.

    Args:
      rewards: Name to ``[..., G]``, floating point.
      by: The name of the reward that opens the gate; itself it stays as it is.
      threshold: Least value of it at which the others count, in its units.
      columns: The names of the rewards behind the gate; None for all but ``by``.

    Returns:
      Name to ``[..., G]``, float32: all columns, the gated and the others.

    Raises:
      TypeError: If ``rewards`` is not a mapping or a column is not floating point.
      ValueError: If a name is unknown, ``by`` is among ``columns``, no reward stands behind the
        gate, or shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([0.0, 1.0]), "short": jnp.array([0.75, 0.5])}
      >>> jr.advantages.gate_rewards(rewards, by="right", threshold=1.0)["short"].tolist()
      [0.0, 0.5]

    References:
      GDPO (arXiv:2601.05242) conditions rewards in this way; NOTES reading, no code was read.
    """
    names = _check("gate_rewards", rewards, None)
    checks.check_option("gate_rewards", "by", by, names)
    gated = tuple(n for n in names if n != by) if columns is None else columns
    for name in gated:
        checks.check_option("gate_rewards", "columns", name, names)
    if by in gated:
        raise ValueError(f"gate_rewards: columns must not hold {by!r}, which is the gate itself.")
    if not gated:
        raise ValueError(f"gate_rewards: by={by!r} has no effect without a reward behind the gate.")
    values = {name: jnp.asarray(x, jnp.float32) for name, x in rewards.items()}
    shut = ~(values[by] >= threshold)
    return {
        name: jnp.where(shut & ~jnp.isnan(x), 0.0, x) if name in gated else x
        for name, x in values.items()
    }


class _Sums(NamedTuple):
    """Weighted sums of normalized columns, and where any column applies; both ``[..., G]``."""

    total: Array
    present: Array


def _prepare(
    function: str, rewards: Columns, where: Array | None, weights: Weights | None, gate, eps, ddof
) -> _Sums:
    names = _check(function, rewards, where)
    if gate is not None:
        by, threshold = gate
        rewards = gate_rewards(rewards, by=by, threshold=threshold)
    weights = _weights(function, names, weights)
    checks.check_positive(function, eps=eps)
    checks.check_option(function, "ddof", ddof, (0, 1))
    total, present = 0.0, False
    # In the order of the names: a mapping that has been through a jit comes back sorted.
    for name in sorted(names):
        applies = _applies(rewards[name], where)
        column = masking.zero_masked(rewards[name], applies)
        centered = column - stats.group_mean(column, applies)
        scaled = centered / (stats.group_std(column, applies, ddof=ddof) + eps)
        scaled = jnp.where(stats.group_is_constant(column, applies), 0.0, scaled)
        total = total + weights[name] * masking.zero_masked(scaled, applies)
        present = present | applies
    return _Sums(total, present)


def _applies(column: Array, where: Array | None) -> Array:
    """Where a reward takes part: kept and not NaN."""
    applies = ~jnp.isnan(column)
    return applies if where is None else applies & where


def _check(function: str, rewards: Columns, where: Array | None) -> tuple[str, ...]:
    """Checks the columns; returns their names."""
    if not isinstance(rewards, Mapping):
        raise TypeError(
            f"{function}: rewards must map the name of each reward to its array; "
            f"got {type(rewards).__name__}."
        )
    if not rewards:
        raise ValueError(f"{function}: rewards has no column.")
    for name, column in rewards.items():
        checks.check_min_rank(function, 1, **{f"rewards[{name!r}]": column})
    arrays = {f"rewards[{name!r}]": column for name, column in rewards.items()}
    checks.check_float(function, **arrays)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, **arrays, where=where)
    return tuple(rewards)


def _weights(function: str, names: tuple[str, ...], weights: Weights | None) -> dict[str, float]:
    """The weight of each column by its name."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    weights = dict(weights)
    for name, weight in weights.items():
        if not isinstance(weight, numbers.Real) and getattr(weight, "shape", None) != ():
            raise TypeError(f"{function}: the weight of {name!r} must be a number; got {weight!r}.")
    unknown = sorted(set(weights) - set(names))
    missing = sorted(set(names) - set(weights))
    if unknown:
        raise ValueError(
            f"{function}: weights names {', '.join(map(repr, unknown))}, which is no reward; "
            f"the rewards are {', '.join(map(repr, sorted(names)))}."
        )
    if missing:
        raise ValueError(f"{function}: weights has none for {', '.join(map(repr, missing))}.")
    return weights
