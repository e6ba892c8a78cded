"""Advantages from a teacher: what the policy earns for tokens that the teacher likes better.

They follow an estimator in a chain, ``f(advantages, mask, **evidence) -> advantages``, so a teacher
is added to the rewards of a task, or takes their place behind zeros.

- ``advantages``: floating point, ``[...]`` spread over the tokens, or ``[..., T]``.
- ``mask``: bool ``[..., T]``, True for the response tokens that are trained.
- ``old_logp``: ``[..., T]`` log-probabilities (nats) under the policy that sampled.
- ``coef``: Weight of the teacher beside the advantages that come in, not negative.
- Results are float32 ``[..., T]``, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits


@traits(token_values=True)
def teacher_advantages(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    teacher_token_logp: Array,
    coef: float = 1.0,
    discount: float = 0.0,
    normalize: bool = False,
) -> Array:
    """Adds the log-ratio of the teacher to the policy: the policy gradient of the reverse KL.

        r[t]  = teacher_token_logp[t] - old_logp[t]
        A'[t] = A[t] + coef R[t],   R[t] = sum_{u >= t} discount^(u - t) r[u]
        with normalize, R[t] is divided by sum_{u >= t} discount^(u - t)

    With discount 0, on policy, the expected gradient of ``-A' logp`` is at each token that of
    KL(student || teacher) of the next token (k1 in the reward); with discount 1 it is that of the
    KL of the full response. Masked tokens count in no sum and take no place in it.

    Args:
      advantages, mask, old_logp, coef: See the module.
      teacher_token_logp: ``[..., T]`` of the same tokens under the teacher.
      discount: Of later tokens, from 0 to 1.
      normalize: Whether R is a weighted mean of the rest of the response.

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, teacher = jnp.array([-1.0, -1.0]), jnp.array([-0.5, -2.0])
      >>> mask, zeros = jnp.ones(2, bool), jnp.zeros(())
      >>> for discount in (0.0, 1.0):
      ...     print(jr.advantages.teacher_advantages(
      ...         zeros, mask, old_logp=old_logp, teacher_token_logp=teacher, discount=discount))
      [ 0.5 -1. ]
      [-0.5 -1. ]

    References:
      Gu et al., MiniLLM (arXiv:2306.08543), discount 1 with the mean over the rest. TRL 1.13's
      MiniLLM trainer multiplies by discount^u instead of discount^(u - t), which is the same with
      ``normalize`` only, and counts masked tokens as places.
    """
    name = "teacher_advantages"
    masking.check_tokens(name, mask, old_logp=old_logp, teacher_token_logp=teacher_token_logp)
    checks.check_non_negative(name, finite=True, coef=coef)
    if not 0 <= discount <= 1:
        raise ValueError(f"{name}: discount must be in [0, 1]; got {discount:g}.")
    if normalize and not discount:
        raise ValueError(f"{name}: normalize has no effect with discount 0.")
    before = masking.spread(name, "advantages", advantages, mask)
    reward = masking.safe_log_ratio(teacher_token_logp, old_logp, mask)
    if discount:

        def earlier(rest, now):
            (total, places), (reward, there) = rest, now
            total = jnp.where(there, reward + discount * total, total)
            places = jnp.where(there, 1.0 + discount * places, places)
            return (total, places), (total, places)

        zeros = jnp.zeros(jnp.shape(mask)[:-1], jnp.float32)
        arrays = (jnp.moveaxis(reward, -1, 0), jnp.moveaxis(mask, -1, 0))
        _, sums = jax.lax.scan(earlier, (zeros, zeros), arrays, reverse=True)
        total, places = (jnp.moveaxis(x, 0, -1) for x in sums)
        reward = total / jnp.where(mask, places, 1.0) if normalize else total
    return masking.zero_masked(before + coef * reward, mask)


@traits(token_values=True)
def prefix_weighted(advantages: Array, mask: Array, *, gamma: float = 0.5) -> Array:
    """Early tokens count more: where the policy left the teacher, what follows is off its path.

        w[t]  = 1 + gamma (1 - sum_{u < t} |A[u]| / sum_u |A[u]|)
        A'[t] = w[t] A[t]

    Args:
      advantages: ``[..., T]``, such as those of :func:`teacher_advantages`.
      mask: See the module.
      gamma: What the first token counts more than the last, not negative; 0 changes nothing.

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.prefix_weighted(
      ...     jnp.array([1.0, -1.0, 2.0]), jnp.ones(3, bool), gamma=1.0).tolist()
      [2.0, -1.75, 3.0]

    References:
      On the Position Bias of On-Policy Distillation (arXiv:2606.22600), IW-OPD, as in TRL 1.16.
    """
    name = "prefix_weighted"
    checks.check_mask(name, mask)
    checks.check_float(name, advantages=advantages)
    checks.check_same_shape(name, advantages=advantages, mask=mask)
    checks.check_non_negative(name, finite=True, gamma=gamma)
    advantages = masking.zero_masked(jnp.asarray(advantages, jnp.float32), mask)
    size = jnp.abs(advantages)
    total = jnp.sum(size, axis=-1, keepdims=True)
    share = (jnp.cumsum(size, axis=-1) - size) / jnp.where(total > 0, total, 1.0)
    return advantages * (1.0 + gamma * (1.0 - share))


@traits(token_values=True)
def span_advantages(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    teacher_span_logp: Array,
    span_ids: Array,
    coef: float = 1.0,
) -> Array:
    """The log-ratio to a teacher with another tokenizer, over spans that both cut alike.

        R[k]  = teacher's log-probability of span k - sum over the tokens t of span k of old_logp[t]
        A'[t] = A[t] + coef R[span of t]

    A span is the shortest stretch of text that ends where a token of both tokenizers ends; with one
    tokenizer every span is a token, and this is :func:`teacher_advantages` with discount 0.

    Args:
      advantages, mask, old_logp, coef: See the module.
      teacher_span_logp: ``[..., T]``, the teacher's log-probability of the span of each token.
      span_ids: Integers ``[..., T]``, the span of each token, below T; -1 for tokens that no span
        has, which learn nothing from the teacher.

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.span_advantages(  # "ab" is two tokens here and one there
      ...     jnp.zeros(()), jnp.ones(3, bool), span_ids=jnp.array([0, 0, 1]),
      ...     old_logp=jnp.array([-1.0, -2.0, -1.0]),
      ...     teacher_span_logp=jnp.array([-2.0, -2.0, -1.5])).tolist()
      [1.0, 1.0, -0.5]

    References:
      The spans are those of TRL's GOLD trainer, which compares merged distributions instead
      (Universal Logit Distillation, arXiv:2402.12030); that one number is compared for each span
      is ours.
    """
    name = "span_advantages"
    masking.check_tokens(name, mask, old_logp=old_logp, teacher_span_logp=teacher_span_logp)
    checks.check_integer(name, span_ids=span_ids)
    checks.check_same_shape(name, span_ids=span_ids, mask=mask)
    checks.check_non_negative(name, finite=True, coef=coef)
    before = masking.spread(name, "advantages", advantages, mask)
    size = jnp.shape(mask)[-1]
    there = mask & (span_ids >= 0)
    ids = jnp.where(there, span_ids, size)

    def of_row(logp: Array, ids: Array) -> Array:
        sums = jnp.zeros(size + 1, jnp.float32).at[ids].add(logp, mode="drop")
        return jnp.take(sums, jnp.minimum(ids, size))

    logp = masking.zero_masked(old_logp, there).astype(jnp.float32)
    policy = jax.vmap(of_row)(logp.reshape(-1, size), ids.reshape(-1, size))
    policy = policy.reshape(jnp.shape(mask))
    ratio = masking.zero_masked(masking.zero_masked(teacher_span_logp, there) - policy, there)
    return masking.zero_masked(before + coef * ratio, mask)
