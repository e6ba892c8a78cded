"""Several rewards of a rollout: by name, each normalized in its group, or of unit tests.

- ``rewards``: name to floating point ``[..., G]``, one per rollout; a group lies along the last
  axis. NaN means that a reward does not apply to a rollout.
- ``weights``: name to number for every reward, or a tuple of such pairs; None means 1 for each.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``mask``: bool ``[..., G, T]``, True for the response tokens that are trained.
- Results are float32, 0 where masked.
- A wrong type or dtype raises TypeError; shapes that do not match, names without a counterpart, and
  an option that is unknown or out of its range raise ValueError.
"""

import numbers
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, batch, group
from jaxrl_llm.core import Array, checks, masking, stats, traits

__all__ = ["density_weights", "gate_rewards", "gdpo", "gdpo_token", "sum_components", "verpo"]

Components = Mapping[str, Array]
Weights = Mapping[str, float] | tuple[tuple[str, float], ...]


def gdpo(
    rewards: Components,
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

    Normalizing the sum instead (:func:`sum_components`, then :func:`grpo`) lets the reward with the
    widest spread dominate, and different combinations of rewards can get equal advantages. Here
    distinct combinations have distinct advantages, and scaling a reward changes nothing.

    A reward that does not apply counts in no statistic and adds 0. A rollout to which no reward
    applies gets 0 and does not count in the batch's statistics. A component with fewer than two
    values in a group, or equal values, adds 0 there. The last step must see the global batch; where
    all sums are equal the result is exactly 0.

    Args:
      rewards, where, weights: See the module.
      gate: ``by`` and ``threshold`` of :func:`gate_rewards`. None means no gate.
      batch_norm: "sequence" or "none". For a normalization over tokens see :func:`gdpo_token`.
      eps: Added to each deviation, above 0.
      ddof: Delta degrees of freedom of the deviations: 1 divides by n - 1, 0 by n.

    Returns:
      Advantages ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([[0.0, 1.0], [0.0, 1.0]]),
      ...            "short": jnp.array([[0.0, 1.0], [0.0, 0.0]])}
      >>> jr.advantages.gdpo(rewards).round(4).tolist()  # two satisfied rewards count twice
      [[-1.095..., 1.095...], [-0.547..., 0.547...]]

    References:
      GDPO (arXiv:2601.05242), as in TRL (``normalize_then_sum``), which does the same for a single
      reward; the authors' code is then plain :func:`grpo`. The authors' code treats NaN as a reward
      of 0.
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
    rewards: Components,
    mask: Array,
    *,
    where: Array | None = None,
    weights: Weights | None = None,
    gate: tuple[str, float] | None = None,
    eps: float = 1e-6,
    norm_eps: float = 1e-8,
    ddof: int = 1,
) -> Array:
    """:func:`gdpo` whose last normalization is over the tokens of the batch, so that length counts.

        A_it = (a_i - m) / sqrt(v + norm_eps)     m, v of a_i over all unmasked tokens, v over n - 1

    ``a_i`` is the sum of the normalized rewards, as in :func:`gdpo`; it counts once for each token.

    Args:
      rewards, mask, where: See the module.
      weights, gate: As in :func:`gdpo`.
      eps: Added to the deviation of each reward, above 0.
      norm_eps: Added to the variance over tokens, above 0.
      ddof: Of the deviation of each reward, 1 or 0.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([0.0, 1.0]), "short": jnp.array([0.0, 1.0])}
      >>> mask = jnp.array([[True, False], [True, True]])
      >>> jr.advantages.gdpo_token(rewards, mask).round(3).tolist()
      [[-1.155..., 0.0], [0.577..., 0.577...]]

    References:
      GDPO (arXiv:2601.05242), as in the authors' verl and in verl's ``gdpo`` from 0.9. Both treat
      NaN as a reward of 0, and give the only rollout of a group its reward.
    """
    x = _prepare("gdpo_token", rewards, where, weights, gate, eps, ddof)
    checks.check_positive("gdpo_token", finite=True, norm_eps=norm_eps)
    tokens = _inputs.check_tokens("gdpo_token", x.total, mask, None) & x.present[..., None]
    return batch.whiten(x.total, tokens, eps=norm_eps)


def sum_components(
    rewards: Components, *, where: Array | None = None, weights: Weights | None = None
) -> Array:
    """The weighted sum of the rewards of each rollout; a reward that does not apply (NaN) adds 0.

        r_i = sum_k w_k r_ik

    Args:
      rewards, where, weights: See the module.

    Returns:
      Rewards ``[..., G]``; 0 where no reward applies.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([0.0, 1.0]), "short": jnp.array([1.0, jnp.nan])}
      >>> jr.advantages.sum_components(rewards, weights={"right": 1.0, "short": 0.5}).tolist()
      [0.5, 1.0]

    References:
      TRL's ``sum_then_normalize`` adds the components this way before it normalizes.
    """
    weights = _weights("sum_components", _check("sum_components", rewards, where), weights)
    applies = {name: _applies(x, where) for name, x in rewards.items()}
    return sum(
        weights[name] * masking.zero_masked(rewards[name], applies[name])
        for name in sorted(weights)
    )


def gate_rewards(
    rewards: Components, *, by: str, threshold: float, components: tuple[str, ...] | None = None
) -> dict[str, Array]:
    """Rewards that count only where a more important reward reaches a threshold.

        r_ik <- r_ik  where r_i,by >= threshold,  else 0

    Used before :func:`gdpo`, it keeps the policy from earning an easy reward at the cost of the
    hard one. A reward that does not apply (NaN) stays NaN; where the gate's reward is NaN, the gate
    is closed.

    Args:
      rewards: See the module.
      by: The name of the reward that opens the gate; it is returned unchanged.
      threshold: Smallest value of that reward at which the others count, in its units.
      components: The names of the rewards that the gate controls; None for all but ``by``.

    Returns:
      Name to ``[..., G]``: all components, gated or not.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"right": jnp.array([0.0, 1.0]), "short": jnp.array([0.75, 0.5])}
      >>> jr.advantages.gate_rewards(rewards, by="right", threshold=1.0)["short"].tolist()
      [0.0, 0.5]

    References:
      GDPO (arXiv:2601.05242) conditions rewards in this way; NOTES reading.
    """
    names = _check("gate_rewards", rewards, None)
    checks.check_option("gate_rewards", "by", by, names)
    gated = tuple(n for n in names if n != by) if components is None else components
    for name in gated:
        checks.check_option("gate_rewards", "components", name, names)
    if by in gated:
        raise ValueError(
            f"gate_rewards: components must not hold {by!r}, which is the gate itself."
        )
    if not gated:
        raise ValueError(f"gate_rewards: by={by!r} has no effect without a reward behind the gate.")
    values = {name: jnp.asarray(x, jnp.float32) for name, x in rewards.items()}
    shut = ~(values[by] >= threshold)
    return {
        name: jnp.where(shut & ~jnp.isnan(x), 0.0, x) if name in gated else x
        for name, x in values.items()
    }


class _Sums(NamedTuple):
    """Weighted sums of normalized components, and where any applies; both ``[..., G]``."""

    total: Array
    present: Array


def _prepare(
    function: str,
    rewards: Components,
    where: Array | None,
    weights: Weights | None,
    gate,
    eps,
    ddof,
) -> _Sums:
    names = _check(function, rewards, where)
    if gate is not None:
        by, threshold = gate
        checks.check_option(function, "gate[0]", by, names)
        if len(names) == 1:
            raise ValueError(f"{function}: gate={gate!r} has no effect without another reward.")
        rewards = gate_rewards(rewards, by=by, threshold=threshold)
    weights = _weights(function, names, weights)
    checks.check_positive(function, finite=True, eps=eps)
    checks.check_option(function, "ddof", ddof, (0, 1))
    total, present = 0.0, False
    # In the order of the names: a mapping that has been through a jit comes back sorted.
    for name in sorted(names):
        applies = _applies(rewards[name], where)
        component = masking.zero_masked(rewards[name], applies)
        centered = component - stats.group_mean(component, applies)
        scaled = centered / (stats.group_std(component, applies, ddof=ddof) + eps)
        scaled = jnp.where(stats.group_is_constant(component, applies), 0.0, scaled)
        total = total + weights[name] * masking.zero_masked(scaled, applies)
        present = present | applies
    return _Sums(total, present)


def _applies(component: Array, where: Array | None) -> Array:
    """Where a reward takes part: unmasked and not NaN."""
    applies = ~jnp.isnan(component)
    return applies if where is None else applies & where


def _check(function: str, rewards: Components, where: Array | None) -> tuple[str, ...]:
    """Checks the components; returns their names."""
    if not isinstance(rewards, Mapping):
        raise TypeError(
            f"{function}: rewards must map the name of each reward to its array; "
            f"got {type(rewards).__name__}."
        )
    if not rewards:
        raise ValueError(f"{function}: rewards has no component.")
    arrays = {f"rewards[{name!r}]": component for name, component in rewards.items()}
    for name, component in arrays.items():
        checks.check_min_rank(function, 1, **{name: component})
    checks.check_bool(function, where=where)
    checks.check_arrays(function, arrays, where=where)
    return tuple(rewards)


def _weights(function: str, names: tuple[str, ...], weights: Weights | None) -> dict[str, float]:
    """The weight of each component by its name."""
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


def density_weights(
    pass_rates: Array,
    *,
    test_where: Array | None = None,
    sigma: float = 0.1,
    difficulty: float = 2.0,
    delta: float = 1e-6,
) -> Array:
    """Weights of a prompt's unit tests: more for hard tests, less for tests of similar pass rates.

        N_j = sum over k of exp(-(p_j - p_k)^2 / (2 sigma^2))
        w_j = exp(-difficulty p_j) / (N_j + delta)

    The sum includes j; k tests of equal pass rate together weigh about as much as one. O(U^2).

    Args:
      pass_rates: ``[..., U]``, floating point, share of the attempts that pass each test.
      test_where: bool ``[..., U]``, True for tests that exist; None for all. The rest get 0.
      sigma: Width within which pass rates count as similar, above 0.
      difficulty: How fast the weight decreases with the pass rate, not negative; 0 for a constant.
      delta: Added to the density, not negative.

    Returns:
      Weights ``[..., U]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rates = jnp.array([1.0, 0.75, 0.25, 0.0])
      >>> jr.advantages.density_weights(rates).round(4)
      Array([0.1296, 0.2137, 0.581 , 0.9579], dtype=float32)

    References:
      Wang et al., VeRPO (arXiv:2601.03525), PAPER reading (later version); the constants are ours.
    """
    name = "density_weights"
    checks.check_min_rank(name, 1, pass_rates=pass_rates)
    checks.check_float(name, pass_rates=pass_rates)
    checks.check_bool(name, test_where=test_where)
    checks.check_same_shape(name, pass_rates=pass_rates, test_where=test_where)
    checks.check_positive(name, finite=True, sigma=sigma)
    checks.check_non_negative(name, finite=True, difficulty=difficulty, delta=delta)
    rates = masking.zero_masked(pass_rates, test_where)
    kernel = jnp.exp(-((rates[..., :, None] - rates[..., None, :]) ** 2) / (2.0 * sigma**2))
    others = None if test_where is None else test_where[..., None, :]
    density = masking.masked_sum(kernel, others, axis=-1)
    # A test that does not exist may be alike to none, and delta may be 0.
    density = density if test_where is None else jnp.where(test_where, density, 1.0)
    return masking.zero_masked(jnp.exp(-difficulty * rates) / (density + delta), test_where)


def verpo(
    rewards: Array,
    *,
    test_passes: Array,
    test_where: Array | None = None,
    turn_where: Array | None = None,
    where: Array | None = None,
    sigma: float = 0.1,
    difficulty: float = 2.0,
    delta: float = 1e-6,
    gamma: float | None = None,
    turn_weight: float = 0.5,
) -> Array:
    """The outcome of a rollout plus the weighted unit tests of each of its attempts, both centered.

        R[i, k] = sum over tests j of w_j passes[i, k, j],   w from :func:`density_weights`
        A_turn[i, k] = R[i, k] - mean over all attempts of the group
        A_outcome[i] = r_i gamma^(turns of i) - mean over the group
        A[i, k] = A_outcome[i] + turn_weight A_turn[i, k]

    The pass rates in the weights are over all unmasked attempts of the prompt. A test that all
    attempts or none pass cancels out. With ``turn_weight=0`` and ``gamma=1`` it is :func:`dr_grpo`
    for every attempt. Follow it with :func:`turns_to_tokens`.

    Args:
      where: See the module.
      rewards: ``[..., G]``, floating point, the outcome of each rollout in {0, 1}.
      test_passes: bool ``[..., G, K, U]``, which unit tests each attempt passes.
      test_where: bool ``[..., U]``, True for tests that exist. None keeps all.
      turn_where: bool ``[..., G, K]``, True for attempts that were made. None keeps all.
      sigma, difficulty, delta: As in :func:`density_weights`.
      gamma: Discount of the outcome for each attempt, in [0, 1]; None means 0.95, or 1 if K is 1.
      turn_weight: Weight of the unit tests, not negative.

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> passes = jnp.array([[[True, True]], [[True, False]]])
      >>> jr.advantages.verpo(jnp.array([1.0, 0.0]), test_passes=passes).round(4)
      Array([[ 0.592],
             [-0.592]], dtype=float32)

    References:
      Wang et al., VeRPO (arXiv:2601.03525), PAPER reading: the later version, with the density and
      without a division by a deviation; sigma, difficulty, delta, gamma and turn_weight are ours.
    """
    name = "verpo"
    checks.check_float(name, rewards=rewards)
    checks.check_bool(
        name, test_passes=test_passes, test_where=test_where, turn_where=turn_where, where=where
    )
    checks.check_min_rank(name, 3, test_passes=test_passes)
    shape = jnp.shape(test_passes)
    checks.check_shape(name, "rewards", rewards, shape[:-2])
    if test_where is not None:
        checks.check_shape(name, "test_where", test_where, (*shape[:-3], shape[-1]))
    if turn_where is not None:
        checks.check_shape(name, "turn_where", turn_where, shape[:-1])
    if where is not None:
        checks.check_shape(name, "where", where, shape[:-2])
    checks.check_non_negative(name, finite=True, turn_weight=turn_weight)
    attempts = jnp.ones(shape[:-1], bool) if turn_where is None else turn_where
    attempts = attempts if where is None else attempts & where[..., None]
    if gamma is None:
        gamma = 0.95 if shape[-2] > 1 else 1.0
    checks.check_share(name, gamma=gamma)
    passed = test_passes & attempts[..., None]
    tests = None if test_where is None else test_where[..., None, None, :]
    passed = passed if tests is None else passed & tests
    tried = jnp.sum(attempts, axis=(-1, -2), dtype=jnp.float32)[..., None]
    rates = jnp.sum(passed, axis=(-2, -3), dtype=jnp.float32) / jnp.maximum(tried, 1.0)
    weights = density_weights(
        rates, test_where=test_where, sigma=sigma, difficulty=difficulty, delta=delta
    )
    dense = jnp.sum(jnp.where(passed, weights[..., None, None, :], 0.0), axis=-1)
    flat = (*shape[:-3], shape[-3] * shape[-2])
    turn = group.dr_grpo(dense.reshape(flat), where=attempts.reshape(flat)).reshape(dense.shape)
    count = jnp.sum(attempts, axis=-1, dtype=jnp.float32)
    # Not gamma ** count, whose gradient in gamma at 0 ** 0 is not finite.
    discount = jnp.prod(jnp.where(attempts, jnp.float32(gamma), 1.0), axis=-1)
    made = count > 0
    outcome = group.dr_grpo(masking.zero_masked(rewards, made) * discount, where=made)
    return masking.zero_masked(outcome[..., None] + turn_weight * turn, attempts)
