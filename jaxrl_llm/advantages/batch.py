"""Advantages normalized over the full batch, and scores scaled by running statistics.

- ``rewards``: floating point ``[..., G]``, one per rollout; a group lies along the last axis.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``mask``: bool ``[..., G, T]``, True for the response tokens that are trained.
- Statistics are over the global batch. Results are float32, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError. The
  arrays of a Transform are checked on update.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, returns
from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call, stats, traits

__all__ = [
    "RunningMoments",
    "batch_normalize",
    "center",
    "clip",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "scale_scores",
    "score_deviation",
    "score_scaler",
    "update_moments",
    "whiten",
]


@traits(token_values=True)
def whiten(x: Array, mask: Array, *, eps: float = 1e-8, shift_mean: bool = True) -> Array:
    """Shifts and scales values to mean 0 and variance 1 over the unmasked tokens.

        y = (x - m) / sqrt(v + eps)         m, v over all unmasked tokens, v with n - 1
        shift_mean=False:  y + m

    A rollout counts once for each of its tokens, unlike in :func:`batch_normalize`. Fewer than two
    tokens, or tokens of equal values, give exactly 0 (``m`` with ``shift_mean=False``).

    Args:
      x: ``[..., T]`` or one value per sequence ``[...]``, floating point.
      mask: bool ``[..., T]``, True = keep.
      eps: Above 0; added to the variance.
      shift_mean: Whether to remove the mean; False adds it back after the scaling.

    Returns:
      ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([[True, False, False], [True, True, True]])
      >>> jr.advantages.whiten(jnp.array([1.0, 0.0]), mask).round(4).tolist()
      [[1.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]

    References:
      verl's ``masked_whiten``. MOSS-RLHF divides the variance by n and adds 1e-6.
    """
    checks.check_mask("whiten", mask)
    checks.check_min_rank("whiten", 1, mask=mask)
    checks.check_positive("whiten", finite=True, eps=eps)
    x = masking.spread("whiten", "x", x, mask)
    mean = masking.masked_mean(x, mask)
    scaled = (x - mean) / jnp.sqrt(masking.masked_var(x, mask, ddof=1) + eps)
    scaled = jnp.where(masking.is_constant(x, mask), 0.0, scaled)
    return masking.zero_masked(scaled if shift_mean else scaled + mean, mask)


def clip(x: Array, *, bound: float) -> Array:
    """Clips advantages to a bound; in a chain it comes last.

        y = min(max(x, -bound), bound)

    Args:
      x: ``[...]``, floating point.
      bound: Largest magnitude, above 0.

    Returns:
      An array of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.clip(jnp.array([0.25, -3.0]), bound=0.5).tolist()
      [0.25, -0.5]

    References:
      Zheng et al., PPO-max (arXiv:2307.04964), with a bound of 0.5.
    """
    checks.check_float("clip", x=x)
    checks.check_positive("clip", finite=True, bound=bound)
    return jnp.clip(jnp.asarray(x, jnp.float32), -bound, bound)


def center(x: Array, *, where: Array | None = None) -> Array:
    """Rewards minus their mean over the batch.

        y_i = x_i - mean x

    Args:
      x: ``[..., G]``, floating point.
      where: See the module.

    Returns:
      ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.center(jnp.array([[1.0, 0.0], [0.0, 3.0]])).tolist()
      [[0.0, -1.0], [-1.0, 2.0]]

    References:
      CRPG of CGPO (arXiv:2409.20370); REINFORCE with the batch mean as its baseline.
    """
    stats.check_group("center", x, where, name="x")
    x = masking.zero_masked(x, where)
    return masking.zero_masked(x - masking.masked_mean(x, where), where)


def batch_normalize(x: Array, *, where: Array | None = None, eps: float = 1e-8) -> Array:
    """Shifts and scales one value per rollout to mean 0 and deviation 1 over the batch.

        y = (x - mean(x)) / (std(x) + eps)         over all unmasked rollouts, std with n - 1

    A rollout counts once, whatever its length. Fewer than two rollouts, or equal values, give
    exactly 0. In a chain it normalizes the advantages of the function before it.

    Args:
      x: ``[...]``, floating point, such as advantages ``[P, G]``.
      where: bool of the same shape; None keeps all.
      eps: Above 0; added to the deviation, in units of ``x``.

    Returns:
      An array of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.batch_normalize(jnp.array([[1.0, 0.0, 0.5]])).tolist()
      [[1.0, -1.0, 0.0]]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262); dividing by n - 1 is our choice.
    """
    checks.check_float("batch_normalize", x=x)
    checks.check_bool("batch_normalize", where=where)
    checks.check_same_shape("batch_normalize", x=x, where=where)
    checks.check_positive("batch_normalize", finite=True, eps=eps)
    x = masking.zero_masked(x, where)
    shifted = x - masking.masked_mean(x, where)
    scaled = shifted / (masking.masked_std(x, where, ddof=1) + eps)
    scaled = jnp.where(masking.is_constant(x, where), 0.0, scaled)
    return masking.zero_masked(scaled, where)


@traits(token_values=True)
def reinforce_pp_baseline(
    rewards: Array,
    mask: Array,
    *,
    where: Array | None = None,
    norm: Literal["token", "sequence"] = "token",
    eps: float = 1e-8,
) -> Array:
    """Rewards minus their group mean, then normalized over the batch, one value per token.

        a_i = r_i - mean_group(r)
        norm="token":     A[i, t] = (a_i - m) / sqrt(v + eps)      m, v over all unmasked tokens
        norm="sequence":  A[i, t] = (a_i - m) / (sqrt(v) + eps)    m, v over all unmasked rollouts

    Both variances divide by n - 1. In the token form (:func:`whiten`) m is not 0 when lengths
    differ, so a group of equal rewards then gets an advantage. With equal lengths the two forms
    differ only in n - 1 and eps. A group of one has ``a_i = r_i``. Fewer than two entries, or equal
    ones, give exactly 0.

    Args:
      rewards, mask, where: See the module.
      norm: Unit of the statistics: "token" or "sequence". Only "sequence" counts empty rollouts.
      eps: Above 0; added to the variance for "token", to the deviation for "sequence".

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> mask = jnp.arange(3) < jnp.array([[1, 3], [2, 2]])[..., None]
      >>> jr.advantages.reinforce_pp_baseline(rewards, mask)[..., 0].round(4).tolist()
      [[1.767..., -1.060...], [0.353..., 0.353...]]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262). ``norm="token"`` is verl's
      ``reinforce_plus_plus_baseline``; ``norm="sequence"`` is the form in BroRL and ProRL, where
      dividing by n - 1 is our choice. verl raises for fewer than two tokens.
    """
    tokens = _inputs.check_tokens("reinforce_pp_baseline", rewards, mask, where)
    checks.check_option("reinforce_pp_baseline", "norm", norm, ("token", "sequence"))
    checks.check_positive("reinforce_pp_baseline", finite=True, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    centered = jnp.where(
        stats.group_is_constant(rewards, where), 0.0, rewards - stats.group_mean(rewards, where)
    )
    centered = jnp.where(stats.group_count(rewards, where) == 1, rewards, centered)
    if norm == "token":
        return whiten(centered, tokens, eps=eps)
    normalized = batch_normalize(centered, where=where, eps=eps)
    return masking.spread("reinforce_pp_baseline", "advantages", normalized, tokens)


@traits(token_values=True)
def reinforce_pp(
    rewards: Array,
    mask: Array,
    *,
    where: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    kl_coef: float | Array = 0.0,
    gamma: float | Array = 1.0,
    eps: float = 1e-8,
) -> Array:
    """Token returns, whitened over the batch; no group and no critic.

        R[i, t] = 1[t is last] r_i - kl_coef (old_logp[i, t] - ref_logp[i, t])
        G[i, t] = R[i, t] + gamma G[i, next unmasked token]
        A = (G - m) / sqrt(v + eps)         m, v over all unmasked tokens of the batch, v with n - 1

    It is the chain of :func:`kl_shaped_rewards`, :func:`reward_to_go` and :func:`whiten`; write
    that chain for another estimator of the KL divergence. Fewer than two tokens, or equal returns,
    give exactly 0.

    Args:
      rewards, mask, where: See the module.
      old_logp: ``[..., G, T]`` log-probabilities (nats) of the sampler; for the penalty.
      ref_logp: ``[..., G, T]`` of the reference; for the penalty.
      kl_coef: Penalty for a nat, in units of reward: a number (0 for no penalty), or an array with
        the mask's axes, each full or 1, such as ``[P, 1, 1]`` from a controller.
      gamma: Discount for an unmasked token, in [0, 1].
      eps: Above 0; added to the variance.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(3) < jnp.array([[1], [3]])
      >>> jr.advantages.reinforce_pp(jnp.array([1.0, 0.0]), mask).round(4).tolist()
      [[1.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262), as verl's ``reinforce_plus_plus`` computes it from
      0.9 on (see :func:`reward_to_go`). We did not check which estimator the paper's penalty uses;
      verl's default is k1. verl raises for fewer than two tokens.
    """
    name = "reinforce_pp"
    tokens = _inputs.check_tokens(name, rewards, mask, where, old_logp=old_logp, ref_logp=ref_logp)
    checks.check_share(name, gamma=gamma)
    checks.check_coefficients(name, "mask", jnp.shape(mask), gamma=gamma)
    checks.check_positive(name, finite=True, eps=eps)
    token_rewards = returns.shaped(name, rewards, tokens, old_logp, ref_logp, kl_coef)
    return whiten(returns.reward_to_go(token_rewards, tokens, gamma=gamma), tokens, eps=eps)


class RunningMoments(NamedTuple):
    """Mean and variance of all scores so far; float32 scalars.

    Attributes:
      mean: Mean of the scores; 0 before the first score.
      var: Population variance; 1 before the first.
      count: Number of scores.
    """

    mean: Array
    var: Array
    count: Array

    @property
    def std(self) -> Array:
        """Sample deviation (n - 1); 1 where it is 0 or undefined: too few, or equal, scores."""
        usable = (self.count > 1) & (self.var > 0)
        corrected = self.var * self.count / jnp.maximum(self.count - 1.0, 1.0)
        return jnp.where(usable, jnp.sqrt(jnp.where(usable, corrected, 1.0)), 1.0)


def _first_moments() -> RunningMoments:
    # Three arrays, not one twice: a train step donates each buffer of its state.
    return RunningMoments(*(jnp.full((), first, jnp.float32) for first in (0.0, 1.0, 0.0)))


def update_moments(
    moments: RunningMoments, x: Array, *, where: Array | None = None
) -> RunningMoments:
    """Running mean and variance after another batch, as if over all scores at once.

        d = mean_b - mean,  n = count + n_b
        mean' = mean + d n_b / n
        var' = (var count + var_b n_b + d^2 count n_b / n) / n

    Args:
      moments: The moments so far; the first batch replaces those of ``score_scaler().init()``.
      x: Scores of any shape, floating point.
      where: bool of the same shape; None keeps all.

    Returns:
      The new moments; the old ones where nothing is unmasked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> moments = jr.advantages.score_scaler().init()
      >>> for scores in (jnp.array([1.0, 3.0]), jnp.array([2.0, 6.0])):
      ...     moments = jr.advantages.update_moments(moments, scores)
      >>> float(moments.mean), float(moments.var), round(float(moments.std), 4)
      (3.0, 3.5, 2.1602)

    References:
      Chan et al., Updating formulae (1979); PPO-max (arXiv:2307.04964), as in MOSS-RLHF.
    """
    checks.check_float("update_moments", x=x)
    checks.check_bool("update_moments", where=where)
    checks.check_same_shape("update_moments", x=x, where=where)
    x = masking.zero_masked(x, where)
    valid = jnp.ones(x.shape, bool) if where is None else where
    number = jnp.sum(valid, dtype=jnp.float32)
    # The mean of equal float32 scores need not be that score; its error would become a deviation.
    constant = masking.is_constant(x, valid)
    score = jnp.max(x, where=valid, initial=-jnp.inf)
    mean = jnp.where(constant & (number > 0), score, masking.masked_mean(x, valid))
    var = jnp.where(constant, 0.0, masking.masked_var(x, valid))
    total = moments.count + number
    share = number / jnp.maximum(total, 1.0)
    shift = mean - moments.mean
    old = moments.count / jnp.maximum(total, 1.0)
    after = RunningMoments(
        mean=moments.mean + shift * share,
        var=moments.var * old + var * share + shift**2 * old * share,
        count=total,
    )
    return RunningMoments(
        *(jnp.where(number > 0, new, past) for new, past in zip(after, moments, strict=True))
    )


@dataclasses.dataclass(frozen=True)
class _Scale:
    """The update half of :func:`score_scaler`; a value, so that equal transforms compare equal."""

    center: bool
    clip: float | None

    def __call__(self, rewards, state, *, where=None, **context):
        moments = update_moments(RunningMoments._make(state), rewards, where=where)
        scores = masking.zero_masked(rewards, where)
        scaled = (scores - moments.mean if self.center else scores) / moments.std
        if self.clip is not None:
            scaled = jnp.clip(scaled, -self.clip, self.clip)
        return masking.zero_masked(scaled, where), moments


@prints_as_call
def score_scaler(*, center: bool = False, clip: float | None = None) -> Transform:
    """Divides scores by the deviation of all scores so far, including the present batch.

        s = r / std        center=True:  s = (r - mean) / std        clip:  s to [-clip, clip]

    It comes first in a chain, before the advantage. While the deviation is 0 or undefined (one
    score, or equal scores) it divides by 1. The moments are saved with the train state.

    Args:
      center: Whether to subtract the running mean first.
      clip: Largest magnitude of a scaled score, above 0; None for no bound.

    Returns:
      A Transform ``rewards [...] -> [...]``, with ``where`` of the batch, over ``RunningMoments``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scaler = jr.advantages.score_scaler()
      >>> scores, state = scaler.update(jnp.array([1.0, 3.0]), scaler.init())
      >>> scores.round(4).tolist(), float(state.mean)
      ([0.707..., 2.121...], 2.0)

    References:
      Zheng et al., PPO-max (arXiv:2307.04964), as in MOSS-RLHF, whose scripts scale without
      centering and do not clip (its default bound is 10). MOSS-RLHF does not guard against a
      deviation of 0.
    """
    checks.check_positive("score_scaler", finite=True, clip=clip)
    return Transform(_first_moments, _Scale(center, clip))


@dataclasses.dataclass(frozen=True)
class _Deviation:
    """The update half of :func:`score_deviation`."""

    def __call__(self, rewards, state, *, where=None, **context):
        moments = update_moments(RunningMoments._make(state), rewards, where=where)
        return moments.std, moments


@prints_as_call
def score_deviation() -> Transform:
    """The deviation of all scores so far, including the present batch: a Recipe's controller.

    Under the name ``score_std``, with :func:`scale_scores`, it scales the rewards of both the
    advantages and the critic's returns; :func:`score_scaler` in a chain changes only the
    advantages.

    Returns:
      A Transform ``rewards [...] -> []``, with ``where`` of the batch, over ``RunningMoments``; 1
      while the deviation is 0 or undefined.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> controller = jr.advantages.score_deviation()
      >>> std, state = controller.update(jnp.array([1.0, 3.0]), controller.init())
      >>> round(float(std), 4)
      1.4142

    References:
      Zheng et al., PPO-max (arXiv:2307.04964), as in MOSS-RLHF.
    """
    return Transform(_first_moments, _Deviation())


def scale_scores(
    rewards: Array,
    *,
    score_std: float | Array,
    where: Array | None = None,
    clip: float | None = None,
) -> Array:
    """Rewards divided by a deviation, optionally clipped.

        s = r / score_std, then to [-clip, clip]

    Args:
      rewards, where: See the module.
      score_std: Above 0: a number, or ``[..., 1, 1]`` from a controller.
      clip: Largest magnitude of a scaled reward, above 0; None for no bound.

    Returns:
      Scaled rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, -6.0]])
      >>> jr.advantages.scale_scores(rewards, score_std=2.0, clip=1.0).tolist()
      [[0.5, -1.0]]

    References:
      Zheng et al., PPO-max (arXiv:2307.04964), as in MOSS-RLHF.
    """
    stats.check_group("scale_scores", rewards, where)
    checks.check_min_rank("scale_scores", 0, score_std=score_std)
    checks.check_positive("scale_scores", finite=True, score_std=score_std, clip=clip)
    std = jnp.asarray(score_std, jnp.float32)
    shape = jnp.shape(rewards)
    if std.ndim and std.shape not in ((*shape[:-1], 1, 1), (1,) * (len(shape) + 1)):
        raise ValueError(
            f"scale_scores: score_std must be a number or have shape {(*shape[:-1], 1, 1)}; got "
            f"{std.shape}."
        )
    scaled = masking.zero_masked(rewards, where) / (std[..., 0] if std.ndim else std)
    scaled = scaled if clip is None else jnp.clip(scaled, -clip, clip)
    return masking.zero_masked(scaled, where)
