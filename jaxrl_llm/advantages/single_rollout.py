"""Advantages for one rollout per prompt: the baseline is a tracked success rate.

- ``num_prompts``: Q, the prompts of the dataset, at least 1.
- ``prior``: alpha and beta of a prompt that was never visited, both above 0.
- ``eps``: added to the deviation of the batch, above 0, in units of reward.
- Trackers read ``prompt_ids`` int ``[P]`` from the batch. An id outside [0, Q) gives NaN advantages
  to its unmasked rollouts, and so to the batch, and changes no entry of the state.
- Trackers take rewards in [0, 1]. Advantages are float32. Batches must be the global ones.
- A wrong dtype raises TypeError; shapes that do not match, and an option that is unknown, out of
  its range or without effect, raise ValueError. A Transform checks its arrays on update.
"""

import dataclasses
import numbers
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import tracker
from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call, stats, traits

__all__ = ["MssrTracker", "mssr_tracker", "spo", "spo_tracker"]


def spo(
    rewards: Array,
    values: Array,
    *,
    where: Array | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Array:
    """Rewards minus their prompt's value before the batch, normalized over the batch.

        a_i = r_i - v(prompt of i)
        A_i = (a_i - mean(a)) / (std(a) + eps)

    Mean and deviation are over all unmasked rollouts. The value must not include the rewards of
    this batch, or the gradient is biased. A batch of equal differences gets exactly 0.

    Args:
      rewards: ``[..., G]``, floating point; G may be 1.
      eps: See the module.
      values: ``[...]``, floating point, one per prompt, in units of reward.
      where: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
        no statistic, get 0 and may hold anything.
      ddof: Delta degrees of freedom of the deviation: 1 (SPO) or 0 (MSSR).

    Returns:
      Advantages ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[1.0], [0.0], [1.0]]), jnp.array([0.5, 0.25, 0.75])
      >>> [round(x, 3) for x in jr.advantages.spo(rewards, values)[:, 0].tolist()]
      [0.873, -1.091, 0.218]

    References:
      Xu and Ding, SPO (arXiv:2509.13232), and its released code. Liu et al., MSSR
      (arXiv:2512.18215) divides by n; its code bounds the deviation below by 1e-3 and has no eps.
    """
    stats.check_group("spo", rewards, where)
    checks.check_float("spo", values=values)
    checks.check_shape("spo", "values", values, jnp.shape(rewards)[:-1])
    checks.check_option("spo", "ddof", ddof, (0, 1))
    checks.check_positive("spo", finite=True, eps=eps)
    values = jnp.asarray(values, jnp.float32)[..., None]
    gain = masking.zero_masked(masking.zero_masked(rewards, where) - values, where)
    centered = gain - masking.masked_mean(gain, where)
    scaled = centered / (masking.masked_std(gain, where, ddof=ddof) + eps)
    return masking.zero_masked(jnp.where(masking.is_constant(gain, where), 0.0, scaled), where)


@dataclasses.dataclass(frozen=True)
class _TrackerInit:
    num_prompts: int
    prior: tuple[float, float]

    def __call__(self) -> tracker.BetaTracker:
        success, failure = self.prior
        return tracker.BetaTracker(
            alpha=jnp.full(self.num_prompts, success, jnp.float32),
            beta=jnp.full(self.num_prompts, failure, jnp.float32),
        )


@traits(reward_range=(0.0, 1.0))
@dataclasses.dataclass(frozen=True)
class _SpoUpdate:
    rho: float
    eps: float

    def __call__(self, rewards, state, *, prompt_ids, where=None, **context):
        return _spo_step(rewards, state, prompt_ids, where, self.rho, self.eps)


@traits(reward_range=(0.0, 1.0))
@dataclasses.dataclass(frozen=True)
class _AdaptiveSpoUpdate:
    half_shift: float
    low: float
    high: float
    eps: float

    def __call__(self, rewards, state, *, prompt_ids, policy_shift, where=None, **context):
        checks.check_shape("spo_tracker", "policy_shift", policy_shift, jnp.shape(rewards)[:1])
        rho = tracker.kl_forgetting(
            policy_shift, half_shift=self.half_shift, low=self.low, high=self.high
        )
        return _spo_step(rewards, state, prompt_ids, where, rho, self.eps)


@dataclasses.dataclass(frozen=True)
class _StartedSpoUpdate(_SpoUpdate):
    start: "_Start"

    def __call__(
        self, rewards, state, *, prompt_ids, prefix_values, segment_where, where=None, **context
    ):
        state = self.start(state, prompt_ids, prefix_values, segment_where, where)
        return _spo_step(rewards, state, prompt_ids, where, self.rho, self.eps)


@dataclasses.dataclass(frozen=True)
class _StartedAdaptiveSpoUpdate(_AdaptiveSpoUpdate):
    start: "_Start"

    def __call__(
        self,
        rewards,
        state,
        *,
        prompt_ids,
        policy_shift,
        prefix_values,
        segment_where,
        where=None,
        **context,
    ):
        state = self.start(state, prompt_ids, prefix_values, segment_where, where)
        update = super().__call__
        return update(rewards, state, prompt_ids=prompt_ids, policy_shift=policy_shift, where=where)


@dataclasses.dataclass(frozen=True)
class _Start:
    """The first values of prompts, from rollouts that are not in the batch."""

    first: int
    rho_min: float
    prior: tuple[float, float]

    def __call__(self, state, prompt_ids, values, segments, where):
        checks.check_bool("spo_tracker", segment_where=segments)
        checks.check_rank("spo_tracker", 3, prefix_values=values)
        checks.check_same_shape("spo_tracker", prefix_values=values, segment_where=segments)
        # Of each rollout that trains, the value of the empty response.
        there = segments[..., 0] if where is None else segments[..., 0] & where
        size, known = state.alpha.shape[0], jnp.any(there, axis=-1)
        mean = masking.masked_mean(jnp.asarray(values[..., 0], jnp.float32), there, axis=-1)
        row = tracker.rows_of(prompt_ids, size, known)
        total = jnp.zeros((2, size), jnp.float32)
        total = total.at[:, row].add(jnp.stack([mean, jnp.ones_like(mean)]), mode="drop")
        started = tracker.beta_tracker_init(
            self.first * total[0], self.first * total[1], rho_min=self.rho_min
        )
        alpha, beta = (jnp.float32(x) for x in self.prior)
        new = (state.alpha == alpha) & (state.beta == beta) & (total[1] > 0)
        return tracker.BetaTracker(
            *(jnp.where(new, a, b) for a, b in zip(started, state, strict=True))
        )


def _spo_step(rewards, state, prompt_ids, where, rho, eps: float):
    """Advantages with the values before this batch, and the tracker after it."""
    tracker.check_rows("spo_tracker", prompt_ids, rewards, where)
    values = tracker.beta_tracker_value(state, prompt_ids)
    state = tracker.beta_tracker_update(state, prompt_ids, rewards, rho, where=where)
    return spo(rewards, values, where=where, eps=eps), state


@prints_as_call
def spo_tracker(
    *,
    num_prompts: int,
    rho: float | None = 0.875,
    half_shift: float | None = None,
    low: float | None = None,
    high: float | None = None,
    prior: tuple[float, float] = (0.5, 0.5),
    first: int = 0,
    eps: float = 1e-8,
) -> Transform:
    """SPO: the baseline is a persistent success rate per prompt instead of a group.

        v = alpha / (alpha + beta)                    before this batch
        A = (a - mean(a)) / (std(a) + eps), a = r - v                  :func:`spo`
        alpha <- rho alpha + sum(r), beta <- rho beta + sum(1 - r)     :func:`beta_tracker_update`

    A rollout's reward is not part of its baseline. With ``rho=None`` the transform also reads
    ``policy_shift [P]`` from the batch, which determines the rho of each prompt
    (:func:`kl_forgetting`). Several rollouts per prompt are allowed.

    Args:
      num_prompts, eps: See the module.
      rho: Forgetting factor: share of the counts that remains, in [0, 1); None for an adaptive one.
      half_shift: With ``rho=None`` only, see :func:`kl_forgetting`; None means 0.06 nats per token.
      low: With ``rho=None`` only: smallest factor; None means 0.875.
      high: With ``rho=None`` only: largest factor; None means 0.96.
      prior: As in the module.
      first: Number n of rollouts from which a prompt starts. With ``first`` the transform also
        reads ``prefix_values`` and ``segment_where [P, G, K]``: where a row has a first segment and
        its prompt is new, the tracker is first set by :func:`beta_tracker_init` of n rollouts with
        the mean reward ``prefix_values[..., 0]``. 0 for a start from the prior.

    Returns:
      A Transform ``rewards [P, G] -> advantages [P, G]`` over a :class:`BetaTracker`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> track = jr.advantages.spo_tracker(num_prompts=3, rho=0.875)
      >>> rewards, ids = jnp.array([[1.0], [0.0]]), jnp.array([2, 0])
      >>> advantages, state = track.update(rewards, track.init(), prompt_ids=ids)
      >>> advantages[:, 0].round(4), state.alpha.round(4)
      (Array([ 0.7071, -0.7071], dtype=float32), Array([0.4375, 0.5   , 1.4375], dtype=float32))

    References:
      Xu and Ding, SPO (arXiv:2509.13232). The released code scores the stored response after this
      update and after the last visit's update; the paper, and :func:`last_visit`, which measures
      the shift, score it before those updates.
    """
    name = "spo_tracker"
    tracker.check_tracker(name, num_prompts, prior)
    if rho is not None:
        checks.check_share(name, one=False, rho=rho)
        checks.check_no_effect(name, f"with rho={rho!r}", half_shift=half_shift, low=low, high=high)
    half_shift = 0.06 if half_shift is None else half_shift
    low, high = 0.875 if low is None else low, 0.96 if high is None else high
    checks.check_positive(name, finite=True, half_shift=half_shift, eps=eps)
    tracker.check_factors(name, low, high)
    if first:
        checks.check_count(name, first=first)
    start = _Start(int(first), low if rho is None else rho, prior)
    if rho is None:
        options = half_shift, low, high, eps
        adaptive = _StartedAdaptiveSpoUpdate(*options, start)
        update = adaptive if first else _AdaptiveSpoUpdate(*options)
    else:
        update = _StartedSpoUpdate(rho, eps, start) if first else _SpoUpdate(rho, eps)
    return Transform(_TrackerInit(num_prompts, prior), update)


class MssrTracker(NamedTuple):
    """State of :func:`mssr_tracker`.

    Attributes:
      rates: The success rates, a :class:`BetaTracker`.
      kl_window: ``[N]`` float32, KL of the last updates.
      batches: Int32 scalar, number of batches so far.
    """

    rates: tracker.BetaTracker
    kl_window: Array
    batches: Array


@dataclasses.dataclass(frozen=True)
class _MssrInit:
    rates: _TrackerInit
    window: int

    def __call__(self) -> MssrTracker:
        return MssrTracker(self.rates(), jnp.zeros(self.window, jnp.float32), jnp.int32(0))


@traits(reward_range=(0.0, 1.0))
@dataclasses.dataclass(frozen=True)
class _MssrUpdate:
    target: float
    low: float
    high: float
    rule: Literal["two_sided", "monotone"]
    eps: float

    def __call__(self, rewards, state, *, prompt_ids, last_kl, where=None, **context):
        tracker.check_rows("mssr_tracker", prompt_ids, rewards, where)
        checks.check_rank("mssr_tracker", 0, last_kl=last_kl)
        rates, window, batches = state
        # Before the first batch there was no update, so what last_kl holds then is no measurement.
        measured = window.at[(batches - 1) % window.shape[0]].set(jnp.float32(last_kl))
        window = jnp.where(batches > 0, measured, window)
        rho = tracker.window_kl_discount(
            window, count=batches, target=self.target, low=self.low, high=self.high, rule=self.rule
        )
        values = tracker.beta_tracker_value(rates, prompt_ids)
        rates = tracker.beta_tracker_update(rates, prompt_ids, rewards, rho, where=where)
        advantages = spo(rewards, values, where=where, ddof=0, eps=self.eps)
        return advantages, MssrTracker(rates, window, batches + 1)


@prints_as_call
def mssr_tracker(
    *,
    num_prompts: int,
    kl_target: float = 0.01,
    window: int = 20,
    low: float = 0.875,
    high: float = 0.96,
    rule: Literal["two_sided", "monotone"] = "two_sided",
    prior: tuple[float, float] = (4.0, 4.0),
    eps: float = 1e-8,
) -> Transform:
    """The tracker of MSSR: SPO's tracker with one forgetting factor for the full batch.

        rho = discount from the window of recent KLs      :func:`window_kl_discount`
        A   = (a - mean(a)) / (std(a) + eps), a = r - v    :func:`spo`, population deviation

    The other half of MSSR, an entropy bonus in the advantage, is :func:`entropy_shaping`, which
    follows in a chain. The tracker reads ``last_kl``, the KL of the previous update, from the
    second batch on.

    Args:
      num_prompts, prior, eps: See the module.
      kl_target: Target KL, in nats per token, above 0.
      window: Number of updates in the mean KL.
      low: Smallest forgetting factor, in [0, 1).
      high: Largest factor, not below ``low``, in [0, 1).
      rule: "two_sided" as released, or "monotone"; see :func:`window_kl_discount`.

    Returns:
      A Transform ``rewards [P, G] -> advantages [P, G]`` over a :class:`MssrTracker`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> track = jr.advantages.mssr_tracker(num_prompts=2)
      >>> rewards, ids = jnp.array([[1.0], [0.0]]), jnp.array([0, 1])
      >>> advantages, state = track.update(
      ...     rewards, track.init(), prompt_ids=ids, last_kl=jnp.float32(0.0))
      >>> advantages[:, 0].tolist(), state.rates.alpha.round(3)
      ([1.0, -1.0], Array([4.67, 3.67], dtype=float32))

    References:
      Liu et al., MSSR (arXiv:2512.18215). In its released code the prior has value 1/2 and weight
      1 / (1 - low), the KL is to the reference (ours is that of the last update, as in the paper),
      and a reward above 1/2 counts as 1.
    """
    name = "mssr_tracker"
    tracker.check_tracker(name, num_prompts, prior)
    checks.check_positive(name, finite=True, kl_target=kl_target, eps=eps)
    if not isinstance(window, numbers.Integral) or window < 1:
        raise ValueError(f"{name}: window must be an integer of 1 or more; got {window!r}.")
    tracker.check_factors(name, low, high)
    checks.check_option(name, "rule", rule, ("two_sided", "monotone"))
    return Transform(
        _MssrInit(_TrackerInit(num_prompts, prior), window),
        _MssrUpdate(kl_target, low, high, rule, eps),
    )
