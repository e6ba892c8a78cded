"""Rescaling of advantages by evidence about each rollout or token.

They follow an estimator in a chain, ``f(advantages, mask, **evidence) -> advantages``; none of them
centers again, so the advantages of a group need not add up to 0 afterwards.

- ``advantages``: floating point, ``[..., G]`` spread over the tokens, or ``[..., G, T]``.
- ``mask``: bool ``[..., G, T]``, True for the response tokens that are trained.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``old_logp``: ``[..., G, T]`` log-probabilities (nats) under the policy that sampled.
- Results are float32, ``[..., G, T]`` unless a function's page differs, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call, traits

__all__ = [
    "SampledEntropy",
    "ace",
    "dcpo_distribution",
    "entropy_shaping",
    "novelty_sharpening",
    "sampled_entropy",
    "sampled_entropy_shaping",
    "temperature_logp",
]


def novelty_sharpening(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    where: Array | None = None,
    bonus: float = 2.5,
    cap: float = 0.5,
) -> Array:
    """XRPO: right answers that the policy finds unlikely within their group count more.

        s_i = mean of old_logp over the tokens of i,   eta_i = exp(s_i - mean of s over the group)
        A+_i = A_i + min(max(bonus (1 - eta_i), 0), cap A_i)    where A_i > 0, else A_i

    An advantage grows by a factor of at most ``1 + cap``. Rollouts without tokens count in no mean
    and get no bonus; nor does the only rollout of a group.

    Args:
      mask, old_logp, where: See the module.
      advantages: ``[..., G]`` only.
      bonus: Bonus of a rollout of vanishing probability, not negative.
      cap: Largest bonus, as a share of the advantage, not negative.

    Returns:
      Advantages ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages, mask = jnp.array([0.75, 0.75, -0.75]), jnp.ones((3, 1), bool)
      >>> old_logp = jnp.array([[-0.5], [-1.0], [-0.3]])
      >>> jr.advantages.novelty_sharpening(advantages, mask, old_logp=old_logp).tolist()
      [0.75, 1.125, -0.75]

    References:
      XRPO (arXiv:2510.06672), PAPER reading: the formula and the defaults come from two
      restatements; there is no released code. The gate on ``A_i > 0`` is the paper's "correct";
      without it the cap would be negative for wrong answers and lower their advantages further.
    """
    name = "novelty_sharpening"
    _check_evidence(name, advantages, mask, where, old_logp=old_logp)
    checks.check_shape(name, "advantages", advantages, jnp.shape(mask)[:-1])
    checks.check_non_negative(name, finite=True, bonus=bonus, cap=cap)
    advantages = masking.zero_masked(advantages, where)
    score = masking.masked_mean(old_logp, mask, axis=-1)
    spoken = jnp.any(mask, axis=-1)
    spoken = spoken if where is None else spoken & where
    relative = masking.zero_masked(score - masking.masked_mean(score, spoken, -1, True), spoken)
    # Above the group's mean there is no bonus, so exp must not grow there.
    raw = jnp.maximum(bonus * -jnp.expm1(jnp.minimum(relative, 0.0)), 0.0)
    added = jnp.minimum(raw, cap * jnp.maximum(advantages, 0.0))
    return advantages + jnp.where(advantages > 0, added, 0.0)


def ace(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    ref_logp: Array,
    where: Array | None = None,
    wrong: Array | None = None,
    alpha: float = 1.0,
    length_normalize: bool = False,
    c_max: float | None = 10.0,
) -> Array:
    """ACE: wrong rollouts that are likelier under the policy than under its reference weigh more.

        c_i = sum over tokens of (old_logp - ref_logp), or their mean with ``length_normalize``
        A'_i = A_i (1 + alpha softplus(min(c_i, c_max)))    for wrong rollouts, else A_i

    A wrong rollout that has become much less likely (c far below 0) keeps its advantage; where
    policy and reference agree (c = 0) the factor is ``1 + alpha log 2``. ``c_max`` bounds the sum,
    which can reach tens of nats for long answers.

    Args:
      advantages, mask, old_logp, where: See the module.
      ref_logp: ``[..., G, T]`` under the reference.
      wrong: bool ``[..., G]``, which rollouts failed. None means those with a negative advantage.
      alpha: Strength, not negative; 0 changes nothing.
      length_normalize: Whether c is the mean instead of the sum.
      c_max: Upper bound of c, in nats; None for no bound.

    Returns:
      Advantages of the shape of the input.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages, mask = jnp.array([1.0, -1.0, -1.0]), jnp.ones((3, 2), bool)
      >>> old_logp, ref_logp = jnp.full((3, 2), -1.0), jnp.array([[-2.0], [-2.0], [1.5]])
      >>> ref_logp = jnp.broadcast_to(ref_logp, (3, 2))
      >>> out = jr.advantages.ace(advantages, mask, old_logp=old_logp, ref_logp=ref_logp)
      >>> [round(x, 3) for x in out.tolist()]
      [1.0, -3.127, -1.007]

    References:
      Xu et al., ACE (arXiv:2602.21420), ABSTRACT reading: c and the softplus are the paper's; the
      "1 +", what ``alpha`` scales, its default and ``c_max`` are ours.
    """
    _check_evidence("ace", advantages, mask, where, old_logp=old_logp, ref_logp=ref_logp)
    sequences = jnp.shape(mask)[:-1]
    if wrong is not None:
        checks.check_bool("ace", wrong=wrong)
        checks.check_shape("ace", "wrong", wrong, sequences)
    checks.check_non_negative("ace", finite=True, alpha=alpha)
    tokens = mask if where is None else mask & where[..., None]
    difference = masking.safe_log_ratio(old_logp, ref_logp, tokens)
    reduce = masking.masked_mean if length_normalize else masking.masked_sum
    confidence = reduce(difference, tokens, axis=-1)
    if c_max is not None:
        confidence = jnp.minimum(confidence, c_max)
    factor = 1.0 + alpha * jax.nn.softplus(confidence)
    keep = where
    if jnp.shape(advantages) != sequences:
        factor, keep = factor[..., None], tokens
        wrong = None if wrong is None else wrong[..., None]
    advantages = masking.zero_masked(advantages, keep)
    return jnp.where(advantages < 0 if wrong is None else wrong, advantages * factor, advantages)


@traits(token_values=True)
def entropy_shaping(
    advantages: Array,
    mask: Array,
    *,
    old_entropy: Array,
    scale: float = 0.4,
    cap: float = 2.0,
) -> Array:
    """Adds a bonus for tokens of high entropy to the advantage; the shaping half of MSSR.

        A'[i, t] = A[i, t] + min(scale H[i, t], |A[i, t]| / cap)

    With ``cap`` of 1 or more no advantage changes its sign.

    Args:
      advantages, mask: See the module.
      old_entropy: ``[..., G, T]`` entropy (nats) of the policy that sampled, not negative.
      scale: Advantage for a nat of entropy, not negative.
      cap: The bonus is at most the advantage's size divided by this; above 0.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, entropy = jnp.ones((1, 2), bool), jnp.array([[0.3, 3.0]])
      >>> shaped = jr.advantages.entropy_shaping(jnp.array([-1.0]), mask, old_entropy=entropy)
      >>> shaped.round(4)
      Array([[-0.88, -0.5 ]], dtype=float32)

    References:
      Cheng et al., Reasoning with Exploration (arXiv:2506.14758); Liu et al., MSSR
      (arXiv:2512.18215) with the constants of its released code, which uses the entropy estimate of
      :func:`sampled_entropy_shaping`.
    """
    name = "entropy_shaping"
    _check_evidence(name, advantages, mask, None, old_entropy=old_entropy)
    checks.check_non_negative(name, finite=True, scale=scale)
    checks.check_positive(name, finite=True, cap=cap)
    advantages = masking.spread(name, "advantages", advantages, mask)
    entropy = masking.zero_masked(old_entropy, mask)
    return advantages + jnp.minimum(scale * entropy, jnp.abs(advantages) / cap)


@traits(token_values=True)
def sampled_entropy_shaping(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    scale: float = 0.4,
    cap: float = 2.0,
) -> Array:
    """:func:`entropy_shaping` with the sampled token's term of the entropy instead of the entropy.

        H[i, t] = -p log p,   p = exp(old_logp[i, t])

    It is one term of the entropy's sum, at most 1 / e, and small for a token that was almost
    certain or very unlikely. It needs no pass over the vocabulary.

    Args:
      advantages, mask, old_logp: See the module.
      scale, cap: As in :func:`entropy_shaping`.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, old_logp = jnp.ones((1, 1), bool), jnp.array([[-1.0]])
      >>> shaped = jr.advantages.sampled_entropy_shaping(jnp.array([1.0]), mask, old_logp=old_logp)
      >>> shaped.round(4)
      Array([[1.1472]], dtype=float32)

    References:
      The released code of MSSR (arXiv:2512.18215).
    """
    name = "sampled_entropy_shaping"
    _check_evidence(name, advantages, mask, None, old_logp=old_logp)
    logp = masking.zero_masked(old_logp, mask)
    # A token that cannot have been sampled, logp = -inf, has no share, not 0 * inf of it.
    logp = jnp.maximum(logp, -100.0)
    return entropy_shaping(
        advantages, mask, old_entropy=-jnp.exp(logp) * logp, scale=scale, cap=cap
    )


def _check_evidence(function: str, advantages: Array, mask: Array, where, **tokens: Array) -> None:
    """Raises unless ``advantages`` are per rollout or per token and ``tokens`` are per token."""
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 2, mask=mask)
    for name, value in tokens.items():
        if value is None:
            raise ValueError(f"{function}: {name} is None; the method requires it.")
    checks.check_float(function, advantages=advantages)
    checks.check_arrays(function, tokens, mask=mask)
    if where is not None:
        checks.check_bool(function, where=where)
        checks.check_shape(function, "where", where, jnp.shape(mask)[:-1])
    shapes = (jnp.shape(mask), jnp.shape(mask)[:-1])
    if jnp.shape(advantages) not in shapes:
        raise ValueError(
            f"{function}: advantages must have the shape of mask {shapes[0]} or of its rollouts "
            f"{shapes[1]}; got {jnp.shape(advantages)}."
        )


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
    threshold: float = 0.05,
) -> Array:
    """Advantages mixed with a term that moves good rollouts toward another temperature.

        T' = hot where H <= target_entropy, else cold;   rho = exp(logp at T' - old_logp)
        good_i = 1[r_i > threshold],   x = min(|target_entropy - H|, max_gap) / mean(good)
        a = x / (1 + x),   A'[i, t] = (1 - a) A[i, t] + a good_i rho[i, t]

    Below the target entropy, the hotter policy favors rare tokens; above it, the colder policy
    favors likely tokens. At the target, and without a good rollout, a is 0 and the advantages do
    not change. The mean is over all unmasked rollouts of the global batch.

    Args:
      advantages, mask, where: See the module.
      rewards: ``[..., G]``, floating point.
      old_logp: As in the module, at the temperature of the policy.
      hot_logp: ``[..., G, T]`` under the same policy at a higher temperature (1.2).
      cold_logp: ``[..., G, T]`` at a lower one (0.8).
      policy_entropy: H, the entropy of the last step in nats per token (:func:`sampled_entropy`): a
        scalar, or ``[..., 1, 1]`` from a controller.
      target_entropy: In nats per token, not negative.
      max_gap: Upper bound of the distance from the target, in nats, not negative.
      threshold: Rewards above this are good.

    Returns:
      Advantages ``[..., G, T]``.

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
      DCPO (arXiv:2601.12730), and its released code, which divides by 0 without a good rollout,
      starts from H = 0, and uses temperatures of 1.2 and 0.8.
    """
    name = "dcpo_distribution"
    _check_evidence(
        name, advantages, mask, where, old_logp=old_logp, hot_logp=hot_logp, cold_logp=cold_logp
    )
    checks.check_min_rank(name, 0, policy_entropy=policy_entropy)
    checks.check_float(name, rewards=rewards, policy_entropy=policy_entropy)
    checks.check_shape(name, "rewards", rewards, jnp.shape(mask)[:-1])
    checks.check_non_negative(name, finite=True, target_entropy=target_entropy, max_gap=max_gap)
    tokens = mask if where is None else mask & where[..., None]
    advantages = masking.spread(name, "advantages", advantages, tokens)
    entropy = jnp.asarray(policy_entropy, jnp.float32)
    each = (*jnp.shape(mask)[:-2], 1, 1)
    if jnp.ndim(entropy) and jnp.shape(entropy) != each:
        raise ValueError(
            f"{name}: policy_entropy must be a scalar or of shape {each}; got {jnp.shape(entropy)}."
        )
    good = masking.zero_masked(rewards, where) > threshold
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
    """Log-probability of tokens at a temperature.

        log softmax(logits / temperature)[target]

    Args:
      logits: ``[..., V]``, floating point.
      targets: integer ``[...]``, tokens in [0, V).
      temperature: Above 0; above 1 flattens.

    Returns:
      ``[...]`` float32, in nats.

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
    checks.check_positive(name, finite=True, temperature=temperature)
    logp = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32) / temperature, axis=-1)
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]


class SampledEntropy(NamedTuple):
    """State of :func:`sampled_entropy`.

    Attributes:
      entropy: Float32 scalar, entropy of the previous batch, in nats per token.
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
        # A batch without a token has no entropy to measure.
        entropy = -masking.masked_mean(old_logp, tokens)
        measured = jnp.where(jnp.any(tokens), entropy, state.entropy)
        return state.entropy, SampledEntropy(measured)


@prints_as_call
def sampled_entropy(*, start: float = 0.0) -> Transform:
    """A controller whose value is the entropy of the previous batch.

        H(next) = -mean of old_logp over all unmasked tokens

    The mean of -logp over tokens drawn from the policy is an unbiased estimate of its entropy.

    Args:
      start: Value for the first batch, in nats per token, not negative.

    Returns:
      A Transform ``rewards -> H``, a float32 scalar; its state is :class:`SampledEntropy`. It reads
      ``old_logp``, ``mask`` and, if present, ``where`` of the global batch.

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
    checks.check_non_negative("sampled_entropy", finite=True, start=start)
    return Transform(_EntropyInit(start), _EntropyUpdate())
