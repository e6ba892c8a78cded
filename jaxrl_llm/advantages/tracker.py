"""A success rate for every prompt of the dataset, as a Beta distribution with forgetting.

A method with one rollout per prompt has no group to compare with; its baseline is the success rate
of the prompt's earlier rollouts. The state is arrays over the Q prompts of the dataset, saved with
the train state. Prompt ids outside ``[0, Q)`` have no entry: their value is NaN, which reaches the
loss, and an update leaves every entry as it was.

- ``state``: a :class:`BetaTracker` over Q prompts.
- ``prompt_ids``: integer ``[P]``, each in [0, Q).
- ``low``, ``high``: smallest and largest forgetting factor, ``0 <= low <= high < 1``.
- Results are float32.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import numbers
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "BetaTracker",
    "beta_tracker_init",
    "beta_tracker_update",
    "beta_tracker_value",
    "kl_forgetting",
    "uncertainty_sampling_weights",
    "window_kl_discount",
]


class BetaTracker(NamedTuple):
    """State of a tracker: pseudo-counts of success and failure.

    Attributes:
      alpha: ``[Q]`` float32, pseudo-counts of success; alpha + beta must be above 0.
      beta: ``[Q]`` float32, pseudo-counts of failure.
    """

    alpha: Array
    beta: Array


def beta_tracker_init(
    successes: Array,
    samples: int | Array,
    *,
    rho_min: float = 0.875,
    smoothing: float = 0.5,
) -> BetaTracker:
    """A tracker that starts from rollouts sampled before training.

        N0 = 1 / (1 - rho_min)
        alpha = N0 (S + smoothing) / (n + 2 smoothing)
        beta  = N0 (n - S + smoothing) / (n + 2 smoothing)

    N0 is the limit of alpha + beta under the constant factor ``rho_min``. A prompt without samples
    gets alpha = beta = ``smoothing``, or N0 / 2 each with ``smoothing=0``. SPO uses a smoothing of
    0.5; MSSR uses 0, with which a prompt may start at a value of 0 or 1.

    Args:
      successes: ``[Q]``, integer or floating point: sums S of each prompt's rewards in [0, 1].
      samples: How many rollouts n each prompt had: a number, or ``[Q]``.
      rho_min: The smallest forgetting factor, in [0, 1).
      smoothing: Pseudo-counts of one success and one failure, not negative.

    Returns:
      A :class:`BetaTracker`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.advantages.beta_tracker_init(jnp.array([3.0, 0.0]), 8)
      >>> [round(x, 3) for x in (*state.alpha.tolist(), *state.beta.tolist())]
      [3.111, 0.444, 4.889, 7.556]

    References:
      SPO (arXiv:2509.13232) and MSSR (arXiv:2512.18215), both as in the released code.
    """
    name = "beta_tracker_init"
    checks.check_rank(name, 1, successes=successes)
    if jnp.ndim(samples):
        checks.check_same_shape(name, successes=successes, samples=samples)
    checks.check_non_negative(name, finite=True, smoothing=smoothing)
    checks.check_share(name, one=False, rho_min=rho_min)
    successes = jnp.asarray(successes, jnp.float32)
    samples = jnp.broadcast_to(jnp.asarray(samples, jnp.float32), successes.shape)
    weight, fresh = 1.0 / (1.0 - rho_min), samples == 0
    scale = weight / jnp.where(fresh, 1.0, samples + 2.0 * smoothing)
    start = jnp.float32(smoothing if smoothing else 0.5 * weight)
    alpha = jnp.where(fresh, start, scale * (successes + smoothing))
    beta = jnp.where(fresh, start, scale * (samples - successes + smoothing))
    return BetaTracker(alpha, beta)


def beta_tracker_value(state: BetaTracker, prompt_ids: Array) -> Array:
    """The expected success rates of some prompts.

        v = alpha / (alpha + beta)

    Args:
      state: See the module.
      prompt_ids: integer ``[...]``, each in [0, Q).

    Returns:
      ``[...]`` float32 in [0, 1]; NaN for an id outside [0, Q).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.advantages.BetaTracker(jnp.array([1.0, 3.0]), jnp.array([1.0, 1.0]))
      >>> jr.advantages.beta_tracker_value(state, jnp.array([1, 0, 2])).tolist()
      [0.75, 0.5, nan]

    References:
      Xu and Ding, SPO (arXiv:2509.13232).
    """
    checks.check_integer("beta_tracker_value", prompt_ids=prompt_ids)
    return gather(state.alpha / (state.alpha + state.beta), prompt_ids)


def beta_tracker_update(
    state: BetaTracker,
    prompt_ids: Array,
    rewards: Array,
    rho: float | Array,
    *,
    where: Array | None = None,
) -> BetaTracker:
    """Updates the tracker with the prompts of a batch: forgets, then counts.

        alpha <- rho alpha + sum(r),   beta <- rho beta + sum(1 - r)

    A prompt forgets once per batch, whatever the number of its rollouts; if it has several rows,
    with the mean of their rho. A prompt without an unmasked rollout in the batch does not change.
    Under a constant rho and one rollout per visit, alpha + beta tends to 1 / (1 - rho).

    Args:
      state, prompt_ids: See the module.
      rewards: ``[P, G]``, floating point, each in [0, 1].
      rho: The forgetting factor, in [0, 1]: a number, or ``[P]``.
      where: bool ``[P, G]``, True for rollouts that take part; None for all. The rest are not read.

    Returns:
      The next :class:`BetaTracker`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.advantages.BetaTracker(jnp.array([2.0, 2.0]), jnp.array([2.0, 2.0]))
      >>> ids, rewards = jnp.array([1]), jnp.array([[1.0]])
      >>> state = jr.advantages.beta_tracker_update(state, ids, rewards, 0.5)
      >>> state.alpha.tolist(), state.beta.tolist()
      ([2.0, 2.0], [2.0, 1.0])

    References:
      Xu and Ding, SPO (arXiv:2509.13232). The released code uses only the last of several rows of
      one prompt; MSSR's code (arXiv:2512.18215) forgets once per rollout.
    """
    name = "beta_tracker_update"
    check_rows(name, prompt_ids, rewards, where)
    if jnp.ndim(rho):
        checks.check_shape(name, "rho", rho, jnp.shape(prompt_ids))
    count = stats.group_count(rewards, where)[:, 0]
    success = masking.masked_sum(rewards, where, axis=-1)
    size = state.alpha.shape[0]
    row = rows_of(prompt_ids, size, count > 0)

    def added(x):
        return jnp.zeros(size, jnp.float32).at[row].add(x, mode="drop")

    visits = added(jnp.ones_like(count))
    rho = added(jnp.broadcast_to(jnp.asarray(rho, jnp.float32), count.shape))
    rho = jnp.where(visits > 0, rho / jnp.maximum(visits, 1.0), 1.0)
    return BetaTracker(
        alpha=rho * state.alpha + added(success),
        beta=rho * state.beta + added(count - success),
    )


def uncertainty_sampling_weights(values: Array, *, explore: float = 0.05) -> Array:
    """Probability of sampling each prompt next: higher where the outcome is uncertain.

        w_q = sqrt(v_q (1 - v_q)) + explore,   p = w / sum(w)

    Args:
      values: ``[..., Q]``, floating point, the success rate of each prompt, in [0, 1].
      explore: Added to every prompt's weight, not negative. With 0, prompts with a rate of 0 or 1
        are never drawn, unless all prompts have such rates: then the distribution is uniform.

    Returns:
      Probabilities ``[..., Q]``; they add up to 1 over the last axis.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> weights = jr.advantages.uncertainty_sampling_weights(jnp.array([0.0, 0.5, 1.0]))
      >>> weights.round(4)
      Array([0.0769, 0.8462, 0.0769], dtype=float32)

    References:
      Xu and Ding, SPO (arXiv:2509.13232). Its code draws a batch by these weights from a larger
      pool, without replacement where the pool is large enough.
    """
    name = "uncertainty_sampling_weights"
    checks.check_min_rank(name, 1, values=values)
    checks.check_float(name, values=values)
    checks.check_non_negative(name, finite=True, explore=explore)
    values = jnp.asarray(values, jnp.float32)
    weights = masking.safe_sqrt(values * (1.0 - values)) + explore
    total = jnp.sum(weights, axis=-1, keepdims=True)
    even = 1.0 / max(values.shape[-1], 1)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), even)


def gather(values: Array, prompt_ids: Array) -> Array:
    """``values[prompt_ids]``, NaN for ids outside the dataset; not public."""
    known = (prompt_ids >= 0) & (prompt_ids < values.shape[0])
    return jnp.where(known, values[jnp.where(known, prompt_ids, 0)], jnp.nan)


def rows_of(prompt_ids: Array, size: int, visited: Array) -> Array:
    """Where a scatter with ``mode="drop"`` writes: ``size``, which it drops, for no visit."""
    return jnp.where(visited & (prompt_ids >= 0), prompt_ids, size)


def check_rows(function: str, prompt_ids: Array, rewards: Array, where: Array | None) -> None:
    """Raises unless ``rewards`` is floating ``[P, G]`` and ``prompt_ids`` integer ``[P]``."""
    checks.check_rank(function, 2, rewards=rewards)
    stats.check_group(function, rewards, where)
    checks.check_integer(function, prompt_ids=prompt_ids)
    checks.check_shape(function, "prompt_ids", prompt_ids, jnp.shape(rewards)[:1])


def check_num_prompts(function: str, num_prompts: int) -> None:
    """Raises ValueError unless the dataset has a prompt."""
    if not isinstance(num_prompts, numbers.Integral) or num_prompts < 1:
        raise ValueError(
            f"{function}: num_prompts must be an integer of 1 or more; got {num_prompts!r}."
        )


def check_tracker(function: str, num_prompts: int, prior: tuple[float, float]) -> None:
    """Raises ValueError unless there are prompts, and ``prior`` is a pair of numbers above 0."""
    check_num_prompts(function, num_prompts)
    if not isinstance(prior, tuple) or len(prior) != 2:
        raise ValueError(f"{function}: prior must be a pair (alpha, beta); got {prior!r}.")
    checks.check_positive(function, finite=True, **{"prior[0]": prior[0], "prior[1]": prior[1]})


def kl_forgetting(
    shift: Array, *, half_shift: float = 0.06, low: float = 0.875, high: float = 0.96
) -> Array:
    """The forgetting factor of a prompt, by how much the policy has changed since its last visit.

        rho = clip(2 ** (-D / half_shift), low, high)

    Args:
      low, high: See the module.
      shift: ``[...]``, floating point: D, the mean |log-ratio| in nats per token of the prompt's
        last response, now against its last visit. 0 at a prompt's first visit.
      half_shift: The shift, in nats per token, at which the factor is 1/2; above 0.

    Returns:
      Factors ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rho = jr.advantages.kl_forgetting(jnp.array([0.0, 0.01, 0.06]))
      >>> [round(x, 3) for x in rho.tolist()]
      [0.96, 0.891, 0.875]

    References:
      Xu and Ding, SPO (arXiv:2509.13232), and its released code.
    """
    checks.check_float("kl_forgetting", shift=shift)
    checks.check_positive("kl_forgetting", finite=True, half_shift=half_shift)
    check_factors("kl_forgetting", low, high)
    return jnp.clip(jnp.exp2(-jnp.asarray(shift, jnp.float32) / half_shift), low, high)


def window_kl_discount(
    kl_window: Array,
    *,
    count: int | Array | None = None,
    target: float = 0.01,
    low: float = 0.875,
    high: float = 0.96,
    rule: Literal["two_sided", "monotone"] = "two_sided",
) -> Array:
    """One forgetting factor for a batch, from the KL of the last updates.

        tau = mean of the window / target
        "two_sided":  rho = low + tau (high - low) where tau <= 1, else low
        "monotone":   rho = high - min(tau, 1) (high - low)

    The two agree above the target. Below it, "two_sided" (paper and code) increases as the KL
    approaches the target and drops there; "monotone" increases as the KL decreases, which is the
    stated aim of the paper. Before the first measured KL both give the middle, ``(low + high) /
    2``.

    Args:
      low, high: See the module.
      kl_window: ``[N]``, floating point: KL of the last updates in nats per token, in any order.
      count: Number of measured entries at the start of the window; None for all of them.
      target: Target KL, above 0.
      rule: "two_sided" or "monotone".

    Returns:
      Float32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> window = jnp.array([0.004, 0.006])
      >>> round(float(jr.advantages.window_kl_discount(window)), 4)
      0.9175
      >>> round(float(jr.advantages.window_kl_discount(window / 5, rule="monotone")), 4)
      0.9515

    References:
      Liu et al., MSSR (arXiv:2512.18215), and its released code, where the window has 10 entries
      whatever its setting (20), and the KL is to the reference.
    """
    name = "window_kl_discount"
    checks.check_rank(name, 1, kl_window=kl_window)
    checks.check_float(name, kl_window=kl_window)
    checks.check_positive(name, finite=True, target=target)
    check_factors(name, low, high)
    checks.check_option(name, "rule", rule, ("two_sided", "monotone"))
    size = jnp.shape(kl_window)[0]
    measured = jnp.arange(size) < (size if count is None else count)
    tau = masking.masked_mean(kl_window, measured) / target
    if rule == "monotone":
        rho = high - jnp.minimum(tau, 1.0) * (high - low)
    else:
        rho = jnp.where(tau > 1.0, low, low + jnp.minimum(tau, 1.0) * (high - low))
    return jnp.where(jnp.any(measured), jnp.clip(rho, low, high), 0.5 * (low + high))


def check_factors(function: str, low: float, high: float) -> None:
    """Raises ValueError unless ``0 <= low <= high < 1``."""
    checks.check_share(function, one=False, low=low, high=high)
    if isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and low > high:
        raise ValueError(f"{function}: low must not be above high; got {low:g} and {high:g}.")
