"""DCPO (distribution-centric): steering the entropy by a warmer or cooler copy of the policy."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import modulators
from jaxrl_llm.core import Array, Transform, checks, masking, traits


@traits(token_values=True)
def dcpo_distribution(
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    old_logp: Array,
    hot_logp: Array,
    cold_logp: Array,
    policy_entropy: Array,
    where: Array | None = None,
    target_entropy: float = 0.5,
    max_gap: float = 0.1,
    good_above: float = 0.05,
) -> Array:
    """Advantages mixed with a pull of good rollouts toward another temperature.

        T' = hot where H <= target_entropy, else cold;   rho = exp(logp at T' - old_logp)
        good_i = 1[r_i > good_above],   x = min(|target_entropy - H|, max_gap) / mean(good)
        a = x / (1 + x),   A'[i, t] = (1 - a) A[i, t] + a good_i rho[i, t]

    Below the target the warmer policy favors rare tokens, above it the cooler one the likely ones.
    At the target a is 0, and without a good rollout too: then the advantages stay as they are. The
    mean is over all kept rollouts, so it must be given the global batch.

    Args:
      advantages: ``[..., G]`` spread over the tokens, or ``[..., G, T]``; floating point.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      rewards: ``[..., G]``, floating point.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy that sampled, at its own
        temperature.
      hot_logp: ``[..., G, T]`` under the same policy at a higher temperature (1.2).
      cold_logp: ``[..., G, T]`` at a lower one (0.8).
      policy_entropy: H, the entropy of the last step in nats a token: a scalar, or an array of size
        one a prompt ``[..., 1, 1]`` as a controller gives it. See :func:`sampled_entropy`.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all; the rest get 0 and
        may hold anything.
      target_entropy: In nats a token, not negative.
      max_gap: Greatest distance from the target that counts, in nats, not negative.
      good_above: Rewards above this are good.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Raises:
      TypeError: If a mask is not bool or another array is not floating point.
      ValueError: If the shapes do not match, or an option is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, old_logp = jnp.ones((2, 1), bool), jnp.log(jnp.array([[0.1142], [0.8438]]))
      >>> hot_logp = jnp.log(jnp.array([[0.1486], [0.7868]]))
      >>> jr.advantages.dcpo_distribution(
      ...     jnp.array([1.0, -1.0]), mask, rewards=jnp.array([1.0, 0.0]), old_logp=old_logp,
      ...     hot_logp=hot_logp, cold_logp=old_logp, policy_entropy=jnp.float32(0.45),
      ... ).round(4)[:, 0]
      Array([ 1.0274, -0.9091], dtype=float32)

    References:
      DCPO (arXiv:2601.12730), and its released code, which would divide by 0 without a good
      rollout, starts from H = 0, and has temperatures of 1.2 and 0.8.
    """
    name = "dcpo_distribution"
    evidence = {"old_logp": old_logp, "hot_logp": hot_logp, "cold_logp": cold_logp}
    modulators.check_evidence(name, advantages, mask, where, **evidence)
    checks.check_min_rank(name, 0, policy_entropy=policy_entropy)
    checks.check_float(name, rewards=rewards, policy_entropy=policy_entropy)
    checks.check_shape(name, "rewards", rewards, jnp.shape(mask)[:-1])
    checks.check_non_negative(name, target_entropy=target_entropy, max_gap=max_gap)
    tokens = mask if where is None else mask & where[..., None]
    advantages = masking.spread(name, "advantages", advantages, tokens)
    entropy = jnp.asarray(policy_entropy, jnp.float32)
    each = (*jnp.shape(mask)[:-2], 1, 1)
    if jnp.ndim(entropy) and jnp.shape(entropy) != each:
        raise ValueError(
            f"{name}: policy_entropy must be a scalar or of shape {each}; got {jnp.shape(entropy)}."
        )
    good = masking.zero_masked(rewards, where) > good_above
    good = good if where is None else good & where
    share = masking.masked_mean(good, where)
    gap = jnp.minimum(jnp.abs(target_entropy - entropy), max_gap)
    # x / (1 + x) with x = gap / share, without a division by a share of 0.
    strength = jnp.where(share > 0, gap / jnp.where(share > 0, gap + share, 1.0), 0.0)
    tempered = jnp.where(entropy <= target_entropy, hot_logp, cold_logp)
    ratio = jnp.exp(
        masking.safe_log_ratio(tempered, old_logp, tokens, clamp=masking.LOG_RATIO_CLAMP)
    )
    mixed = (1.0 - strength) * advantages + strength * jnp.where(good[..., None], ratio, 0.0)
    return masking.zero_masked(mixed, tokens)


def temperature_logp(logits: Array, targets: Array, *, temperature: float) -> Array:
    """Log-probability of some tokens after the logits are divided by a temperature.

        log softmax(logits / temperature)[target]

    Args:
      logits: ``[..., V]``, floating point.
      targets: integer ``[...]``, tokens in [0, V).
      temperature: Above 0; above 1 flattens.

    Returns:
      ``[...]`` float32, in nats.

    Raises:
      TypeError: If ``logits`` is not floating point or ``targets`` does not hold integers.
      ValueError: If the shapes do not match or ``temperature`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits, target = jnp.array([[2.0, 0.0, -1.0]]), jnp.array([1])
      >>> jnp.exp(jr.advantages.temperature_logp(logits, target, temperature=1.2)).round(4)
      Array([0.1486], dtype=float32)

    References:
      DCPO (arXiv:2601.12730).
    """
    name = "temperature_logp"
    checks.check_min_rank(name, 1, logits=logits)
    checks.check_float(name, logits=logits)
    checks.check_integer(name, targets=targets)
    checks.check_shape(name, "targets", targets, jnp.shape(logits)[:-1])
    checks.check_positive(name, temperature=temperature)
    logp = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32) / temperature, axis=-1)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]


class SampledEntropy(NamedTuple):
    """State of :func:`sampled_entropy`.

    Attributes:
      entropy: Float32 scalar, of the batch before, in nats a token.
    """

    entropy: Array


@dataclasses.dataclass(frozen=True)
class _EntropyInit:
    start: float

    def __call__(self) -> SampledEntropy:
        return SampledEntropy(jnp.float32(self.start))


@dataclasses.dataclass(frozen=True)
class _EntropyUpdate:
    def __call__(self, rewards, state, *, old_logp, mask, where=None, **context):
        checks.check_mask("sampled_entropy", mask)
        checks.check_same_shape("sampled_entropy", old_logp=old_logp, mask=mask)
        tokens = mask if where is None else mask & where[..., None]
        # A batch without a token says nothing about the policy.
        found = -masking.masked_mean(old_logp, tokens)
        measured = jnp.where(jnp.any(tokens), found, state.entropy)
        return state.entropy, SampledEntropy(measured)


def sampled_entropy(*, start: float = 0.0) -> Transform:
    """A controller that hands each batch the entropy of the batch before.

        H(next) = -mean of old_logp over all kept tokens

    The mean of -logp over tokens drawn from the policy is an unbiased estimate of its entropy.

    Args:
      start: What the first batch gets, in nats a token, not negative.

    Returns:
      A Transform ``rewards -> H``, a float32 scalar; its state is :class:`SampledEntropy`. It reads
      ``old_logp [P, G, T]``, ``mask`` and, if there, ``where [P, G]`` of the batch, which must be
      the global one.

    Raises:
      ValueError: If ``start`` is negative; on update, if shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy = jr.advantages.sampled_entropy()
      >>> batch = {"old_logp": jnp.full((1, 1, 2), -0.7), "mask": jnp.ones((1, 1, 2), bool)}
      >>> first, state = entropy.update(jnp.ones((1, 1)), entropy.init(), **batch)
      >>> second, state = entropy.update(jnp.ones((1, 1)), state, **batch)
      >>> round(float(first), 4), round(float(second), 4)
      (0.0, 0.7)

    References:
      DCPO (arXiv:2601.12730), whose released code measures it during the update.
    """
    checks.check_non_negative("sampled_entropy", start=start)
    return Transform(_EntropyInit(start), _EntropyUpdate())
