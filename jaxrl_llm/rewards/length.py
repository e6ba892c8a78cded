"""Rewards that depend on the length of a response.

``max_length`` is the limit in tokens. Of a batch, ``rewards`` are floating point ``[..., G]``,
``mask`` is bool ``[..., G, T]``, True for the tokens of the response (tokens that a correction has
rejected no longer count as length), and ``where`` is bool ``[..., G]``, True for rollouts to
include; the rest are not read and get 0. Every function returns float32, and raises TypeError for
another dtype and ValueError where shapes differ or a number is out of its range.

Of the overlong functions, ``buffer`` is the width of the zone below the limit in tokens, above 0
and at most ``max_length``, and ``factor`` is what a response at the limit or beyond loses, in units
of reward, 0 or above.

Of the HBPO functions, ``budgets`` are the tokens that each prompt's prefix allowed, ``max_length``
for no prefix; ``scale`` is the greatest reward; ``slope`` is the reward lost a token of distance to
the budget, None for ``1 / max_length``; ``floor`` is the least reward of a right answer, None for
none.
"""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, curves, masking, stats


def overlong_penalty(
    lengths: Array, *, max_length: float, buffer: float, factor: float = 1.0
) -> Array:
    """A linear penalty over the last ``buffer`` tokens before the limit.

        penalty = clip(-factor (length - (max_length - buffer)) / buffer, -factor, 0)

    It softens the cliff between an answer just in time and one cut off.

    Args:
      lengths: ``[...]``, tokens of each response, integers or floating point.
      max_length, buffer, factor: See the module.

    Returns:
      Penalties ``[...]``, 0 or below, to be added to the rewards.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> lengths = jnp.array([1000, 16384, 18432, 20480])
      >>> jr.rewards.overlong_penalty(lengths, max_length=20480, buffer=4096).tolist()
      [0.0, 0.0, -0.5, -1.0]

    References:
      DAPO (arXiv:2503.14476), with 20480 and 4096 tokens and rewards of -1 and 1. verl's reward
      manager has no lower bound; responses do not outgrow the limit there.
    """
    function = "overlong_penalty"
    checks.check_positive(function, max_length=max_length, buffer=buffer)
    checks.check_non_negative(function, factor=factor)
    if buffer > max_length:
        raise ValueError(
            f"{function}: buffer must not exceed max_length; got {buffer:g} and {max_length:g}."
        )
    beyond = jnp.asarray(lengths, jnp.float32) - (max_length - buffer)
    # Subtracted from zero, since minus zero would print.
    return 0.0 - factor * jnp.clip(beyond / buffer, 0.0, 1.0)


def overlong_rewards(
    rewards: Array,
    mask: Array,
    *,
    max_length: float,
    buffer: float,
    factor: float = 1.0,
    where: Array | None = None,
) -> Array:
    """Rewards plus :func:`overlong_penalty` of their responses; the form for a chain.

        r_i + penalty(tokens in mask_i)

    Args:
      rewards, mask, max_length, buffer, factor, where: See the module.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(8) < jnp.array([[4], [7], [8]])
      >>> jr.rewards.overlong_rewards(jnp.ones(3), mask, max_length=8, buffer=2).tolist()
      [1.0, 0.5, 0.0]

    References:
      DAPO (arXiv:2503.14476). With it a group of right answers has rewards that differ; DAPO
      therefore filters its groups on accuracy, not on this.
    """
    function = "overlong_rewards"
    stats.check_group(function, rewards, where)
    checks.check_mask(function, mask)
    checks.check_shape(function, "mask", mask, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    penalty = overlong_penalty(
        masking.lengths(mask), max_length=max_length, buffer=buffer, factor=factor
    )
    return masking.zero_masked(masking.zero_masked(rewards, where) + penalty, where)


def hbpo_reward(
    correct: Array,
    lengths: Array,
    budgets: Array,
    *,
    max_length: float = 4096,
    scale: float = 4.0,
    slope: float | None = None,
    parsed: Array | None = None,
    floor: float | None = None,
) -> Array:
    """A reward that is flat up to a token budget and falls beyond it.

        f(n) = scale cos(pi n / (2 max_length))
        right, n <= max_length:   R = min(f(n) - |budget - n| slope, f(budget))
        right, no budget:         R = f(n)
        wrong, or n > max_length: R = 0        not parsed: R = -1

    A budget of ``max_length`` or more is none. A right answer far beyond a small budget can score
    below a wrong one's 0, as in the released code; ``floor=0.0`` forbids it.

    Args:
      correct: bool ``[...]``, True where the answer is right.
      lengths: ``[...]``, tokens of each response.
      budgets, max_length, scale, slope, floor: See the module.
      parsed: bool ``[...]``, False where the answer is illegible. None means all are legible.

    Returns:
      Rewards ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> lengths, budgets = jnp.array([1024, 2560, 4096]), jnp.array([2048, 2048, 512])
      >>> jr.rewards.hbpo_reward(jnp.ones(3, bool), lengths, budgets).round(4).tolist()
      [2.82..., 2.09..., -0.875]

    References:
      Hierarchical budget policy optimization (arXiv:2507.15844) and its released reward. The code
      rounds the reward of a rollout without a budget to two decimals; we do not.
    """
    function = "hbpo_reward"
    checks.check_min_rank(function, 0, correct=correct, lengths=lengths, budgets=budgets)
    checks.check_bool(function, correct=correct, parsed=parsed)
    checks.check_same_shape(
        function, correct=correct, lengths=lengths, budgets=budgets, parsed=parsed
    )
    checks.check_positive(function, max_length=max_length, scale=scale)
    checks.check_non_negative(function, slope=slope)
    slope = 1.0 / max_length if slope is None else slope
    lengths, budgets = jnp.asarray(lengths, jnp.float32), jnp.asarray(budgets, jnp.float32)
    reached = curves.quarter_cosine(lengths, end=max_length, scale=scale)
    deviated = reached - jnp.abs(budgets - lengths) * slope
    ideal = curves.quarter_cosine(budgets, end=max_length, scale=scale)
    within = jnp.minimum(deviated, ideal)
    reward = jnp.where(budgets >= max_length, reached, within)
    reward = reward if floor is None else jnp.maximum(reward, floor)
    reward = jnp.where(correct & (lengths <= max_length), reward, 0.0)
    return reward if parsed is None else jnp.where(parsed, reward, -1.0)


def hbpo_rewards(
    rewards: Array,
    mask: Array,
    *,
    budgets: Array,
    max_length: float = 4096,
    scale: float = 4.0,
    slope: float | None = None,
    floor: float | None = None,
    where: Array | None = None,
) -> Array:
    """:func:`hbpo_reward` of a batch; the form for a chain.

        rewards > 0: right    rewards = 0: wrong    rewards < 0: illegible

    Args:
      rewards, mask, max_length, scale, slope, floor, where: See the module. Of the rewards only the
        sign counts.
      budgets: ``[..., G]``; see the module.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, budgets = jnp.ones((3, 8), bool), jnp.array([16.0, 16.0, 16.0])
      >>> rewards = jnp.array([1.0, 0.0, -1.0])
      >>> jr.rewards.hbpo_rewards(rewards, mask, budgets=budgets, max_length=32).round(3).tolist()
      [2.82..., 0.0, -1.0]

    References:
      Hierarchical budget policy optimization (arXiv:2507.15844).
    """
    function = "hbpo_rewards"
    stats.check_group(function, rewards, where)
    checks.check_mask(function, mask)
    checks.check_shape(function, "mask", mask, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    checks.check_shape(function, "budgets", budgets, jnp.shape(rewards))
    rewards = masking.zero_masked(rewards, where)
    shaped = hbpo_reward(
        rewards > 0,
        masking.lengths(mask),
        masking.zero_masked(budgets, where),
        max_length=max_length,
        scale=scale,
        slope=slope,
        parsed=rewards >= 0,
        floor=floor,
    )
    # Comparisons swallow a NaN, which an included reward must not hide.
    return masking.zero_masked(jnp.where(jnp.isnan(rewards), jnp.nan, shaped), where)
