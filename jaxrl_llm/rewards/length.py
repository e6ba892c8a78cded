"""Rewards that depend on the length of a response.

``max_length`` is the limit in tokens. ``rewards`` are floating point ``[..., G]``, ``mask`` is bool
``[..., G, T]``, True for the tokens of the response, and ``where`` is bool ``[..., G]``, True for
rollouts to include; the rest are not read and get 0. If a correction has already rejected tokens of
``mask``, ``response_mask`` is the mask before: a length counts every token of the response, whether
it trains or not. A recipe passes it. Every function returns float32, and raises TypeError for
another dtype and ValueError where shapes differ or a number is out of its range.

In the overlong functions, ``buffer`` is the width of the zone below the limit in tokens, above 0
and at most ``max_length``, and ``factor`` is the penalty of a response at or beyond the limit, in
units of reward, 0 or above.

In the HBPO functions, ``budgets`` are the tokens that each prompt's prefix allowed, ``max_length``
for no prefix; ``scale`` is the largest reward; ``slope`` is the reward lost per token of distance
to the budget, None for ``1 / max_length``; ``floor`` is the smallest reward of a right answer, None
for no bound.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, curves, masking, stats


def overlong_penalty(
    lengths: Array, *, max_length: float, buffer: float, factor: float = 1.0
) -> Array:
    """A linear penalty over the last ``buffer`` tokens before the limit.

        penalty = clip(-factor (length - (max_length - buffer)) / buffer, -factor, 0)

    It smooths the drop in reward between an answer just within the limit and a truncated one.

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
      manager has no lower bound, since responses cannot exceed its limit.
    """
    function = "overlong_penalty"
    checks.check_positive(function, finite=True, max_length=max_length, buffer=buffer)
    checks.check_non_negative(function, finite=True, factor=factor)
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
    response_mask: Array | None = None,
) -> Array:
    """Rewards plus :func:`overlong_penalty` of their responses; the form for a chain.

        r_i + penalty(tokens in mask_i)

    Args:
      rewards, mask, max_length, buffer, factor, where, response_mask: See the module.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(8) < jnp.array([[4], [7], [8]])
      >>> jr.rewards.overlong_rewards(jnp.ones(3), mask, max_length=8, buffer=2).tolist()
      [1.0, 0.5, 0.0]

    References:
      DAPO (arXiv:2503.14476). With this penalty the rewards of a group of right answers differ, so
      DAPO filters groups by accuracy, not by reward.
    """
    function = "overlong_rewards"
    rewards, lengths = _lengths(function, rewards, mask, where, response_mask)
    penalty = overlong_penalty(lengths, max_length=max_length, buffer=buffer, factor=factor)
    return masking.zero_masked(rewards + penalty, where)


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
    """A reward that depends on the distance between a response's length and its token budget.

        f(n) = scale cos(pi n / (2 max_length))
        right, n <= max_length:   R = min(f(n) - |budget - n| slope, f(budget))
        right, no budget:         R = f(n)
        wrong, or n > max_length: R = 0        not parsed: R = -1

    A budget of ``max_length`` or more means no budget. A right answer far beyond a small budget can
    score below the 0 of a wrong answer, as in the released code; ``floor=0.0`` prevents that.

    Args:
      correct: bool ``[...]``, True where the answer is right.
      lengths: ``[...]``, tokens of each response.
      budgets, max_length, scale, slope, floor: See the module.
      parsed: bool ``[...]``, False where the answer could not be parsed. None means all could.

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
    response_mask: Array | None = None,
) -> Array:
    """:func:`hbpo_reward` of a batch; the form for a chain.

        rewards > 0: right    rewards = 0: wrong    rewards < 0: not parsed

    Args:
      rewards, mask, max_length, scale, slope, floor, where, response_mask: See the module. Only the
        sign of the rewards counts.
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
    rewards, lengths = _lengths(function, rewards, mask, where, response_mask)
    checks.check_shape(function, "budgets", budgets, jnp.shape(rewards))
    shaped = hbpo_reward(
        rewards > 0,
        lengths,
        masking.zero_masked(budgets, where),
        max_length=max_length,
        scale=scale,
        slope=slope,
        parsed=rewards >= 0,
        floor=floor,
    )
    return _finish(rewards, shaped, where)


def cosine_length_reward(
    correct: Array,
    lengths: Array,
    *,
    max_length: float,
    min_right: float = 0.5,
    max_right: float = 1.0,
    min_wrong: float = -1.0,
    max_wrong: float = -0.5,
    exceeded: float | None = None,
) -> Array:
    """A reward that decreases with length for right answers and increases for wrong ones.

        right: min_right + (max_right - min_right) (1 + cos(pi n / max_length)) / 2
        wrong: max_wrong - (max_wrong - min_wrong) (1 + cos(pi n / max_length)) / 2

    Short right answers get ``max_right``, short wrong ones ``min_wrong``, so that wrong policies
    think longer. Beyond ``max_length`` the reward stays constant, or is ``exceeded`` from
    ``max_length`` on.

    Args:
      correct: bool ``[...]``, True where the answer is right.
      lengths: ``[...]``, tokens of each response.
      max_length: See the module.
      min_right, max_right: Rewards of a right answer of ``max_length`` tokens and of 0 tokens.
      min_wrong, max_wrong: Rewards of a wrong answer of 0 tokens and of ``max_length`` tokens.
      exceeded: Reward of a response of ``max_length`` tokens or more, right or wrong; None to
        disable.

    Returns:
      Rewards ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> correct, lengths = jnp.array([True, True, False]), jnp.array([50, 200, 50])
      >>> jr.rewards.cosine_length_reward(correct, lengths, max_length=100).round(4).tolist()
      [0.75, 0.5, -0.75]

    References:
      Demystifying long chain-of-thought reasoning (arXiv:2502.03373), which has right answers in
      [1, 2], wrong ones in [-10, 0] and ``exceeded=-10``. The defaults are those of TRL; open-r1
      counts characters, and its cosine increases again beyond ``max_length``.
    """
    function = "cosine_length_reward"
    checks.check_min_rank(function, 0, correct=correct, lengths=lengths)
    checks.check_bool(function, correct=correct)
    checks.check_same_shape(function, correct=correct, lengths=lengths)
    checks.check_positive(function, max_length=max_length)
    for kind, low, high in (("right", min_right, max_right), ("wrong", min_wrong, max_wrong)):
        if low > high:
            raise ValueError(
                f"{function}: min_{kind} must not exceed max_{kind}; got {low:g} and {high:g}."
            )
    lengths = jnp.asarray(lengths, jnp.float32)
    short = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(lengths / max_length, 1.0)))
    right = min_right + (max_right - min_right) * short
    wrong = max_wrong - (max_wrong - min_wrong) * short
    reward = jnp.where(correct, right, wrong)
    return reward if exceeded is None else jnp.where(lengths >= max_length, exceeded, reward)


def cosine_length_rewards(
    rewards: Array,
    mask: Array,
    *,
    max_length: float,
    min_right: float = 0.5,
    max_right: float = 1.0,
    min_wrong: float = -1.0,
    max_wrong: float = -0.5,
    exceeded: float | None = None,
    where: Array | None = None,
    response_mask: Array | None = None,
) -> Array:
    """:func:`cosine_length_reward` of a batch; the form for a chain.

        rewards > 0: right    otherwise: wrong

    Args:
      rewards, mask, max_length, where, response_mask: See the module. Only the sign of the rewards
        counts.
      min_right, max_right, min_wrong, max_wrong, exceeded: See :func:`cosine_length_reward`.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(8) < jnp.array([[4], [8], [4]])
      >>> rewards = jnp.array([1.0, 1.0, 0.0])
      >>> jr.rewards.cosine_length_rewards(rewards, mask, max_length=8).round(4).tolist()
      [0.75, 0.5, -0.75]

    References:
      Demystifying long chain-of-thought reasoning (arXiv:2502.03373).
    """
    rewards, lengths = _lengths("cosine_length_rewards", rewards, mask, where, response_mask)
    shaped = cosine_length_reward(
        rewards > 0,
        lengths,
        max_length=max_length,
        min_right=min_right,
        max_right=max_right,
        min_wrong=min_wrong,
        max_wrong=max_wrong,
        exceeded=exceeded,
    )
    return _finish(rewards, shaped, where)


def group_length_rewards(
    rewards: Array,
    mask: Array,
    *,
    weight: float = 1.0,
    where: Array | None = None,
    response_mask: Array | None = None,
) -> Array:
    """Rewards plus a bonus for the short responses of a group; the form for a chain.

        lambda_i = 1/2 - (n_i - min n) / (max n - min n)
        right: r_i + weight lambda_i        wrong: r_i + weight min(0, lambda_i)

    A group of equal lengths gets no bonus.

    Args:
      rewards, mask, where, response_mask: See the module. Above 0 is a right answer.
      weight: Weight of the bonus, 0 or above.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(8) < jnp.array([[2], [8], [4], [2]])
      >>> rewards = jnp.array([1.0, 1.0, 0.0, 0.0])
      >>> jr.rewards.group_length_rewards(rewards, mask).round(4).tolist()
      [1.5, 0.5, 0.0, 0.0]

    References:
      Kimi k1.5 (arXiv:2501.12599), section 2.3.3, which adds it with a weight, after a warm-up
      without it; open-r1's `len_reward` is only the bonus, in characters.
    """
    function = "group_length_rewards"
    checks.check_non_negative(function, weight=weight)
    rewards, lengths = _lengths(function, rewards, mask, where, response_mask)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    shortest = jnp.min(jnp.where(valid, lengths, jnp.inf), axis=-1, keepdims=True, initial=jnp.inf)
    longest = jnp.max(jnp.where(valid, lengths, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    spread = longest - shortest
    differ = valid & (spread > 0)
    place = jnp.where(differ, lengths - shortest, 0.0) / jnp.where(spread > 0, spread, 1.0)
    bonus = jnp.where(rewards > 0, 0.5 - place, jnp.minimum(0.0, 0.5 - place))
    return _finish(rewards, rewards + jnp.where(differ, weight * bonus, 0.0), where)


def budget_rewards(
    rewards: Array,
    mask: Array,
    *,
    budgets: Array,
    form: Literal["exact", "max", "clip"] = "exact",
    coef: float = 0.0003,
    delta: float = 0.5,
    where: Array | None = None,
    response_mask: Array | None = None,
) -> Array:
    """Rewards by the distance of a response's length to a budget; the form for a chain.

        exact: r_i - coef |budget - n|
        max:   r_i clip(coef (budget - n) + delta, 0, 1)
        clip:  r_i [n <= budget]

    A budget of 0 or below means no budget.

    Args:
      rewards, mask, where, response_mask: See the module.
      budgets: ``[..., G]``, the tokens that each prompt asks for.
      form: "exact" for a target length, "max" for a soft maximum, "clip" for a hard limit.
      coef: Reward per token of distance, 0 or above; not for "clip".
      delta: For "max", the factor of a response whose length equals the budget.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, budgets = jnp.arange(8) < jnp.array([[4], [8]]), jnp.array([6.0, 6.0])
      >>> jr.rewards.budget_rewards(jnp.ones(2), mask, budgets=budgets, coef=0.1).tolist()
      [0.8..., 0.8...]

    References:
      L1, length-controlled policy optimization (arXiv:2503.04697): "exact" and "max" with these
      defaults; "clip" is from prime-rl.
    """
    function = "budget_rewards"
    checks.check_option(function, "form", form, ("exact", "max", "clip"))
    checks.check_non_negative(function, coef=coef)
    rewards, lengths = _lengths(function, rewards, mask, where, response_mask)
    checks.check_shape(function, "budgets", budgets, jnp.shape(rewards))
    budgets = masking.zero_masked(jnp.asarray(budgets, jnp.float32), where)
    left = budgets - lengths
    if form == "exact":
        shaped = rewards - coef * jnp.abs(left)
    elif form == "max":
        shaped = rewards * jnp.clip(coef * left + delta, 0.0, 1.0)
    else:
        shaped = jnp.where(left < 0, 0.0, rewards)
    return _finish(rewards, jnp.where(budgets > 0, shaped, rewards), where)


def _lengths(
    function: str,
    rewards: Array,
    mask: Array,
    where: Array | None,
    response_mask: Array | None,
) -> tuple[Array, Array]:
    """Checks a batch; its rewards, zero where they are not read, and lengths ``[..., G]``."""
    stats.check_group(function, rewards, where)
    mask = masking.response_tokens(function, mask, response_mask)
    checks.check_shape(function, "mask", mask, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    return masking.zero_masked(rewards, where), masking.lengths(mask)


def _finish(rewards: Array, shaped: Array, where: Array | None) -> Array:
    """Shaped rewards, where a NaN that a comparison would swallow stays one."""
    return masking.zero_masked(jnp.where(jnp.isnan(rewards), jnp.nan, shaped), where)
