"""Advantages from a teacher: credit for tokens that are likelier under the teacher.

They follow an estimator in a chain, ``f(advantages, mask, **evidence) -> advantages``, so the
teacher's signal adds to the rewards of a task, or replaces them if the estimator returns zeros.

- ``advantages``: floating point, ``[...]`` spread over the tokens, or ``[..., T]``.
- ``mask``: bool ``[..., T]``, True for the response tokens that are trained.
- ``old_logp``: ``[..., T]`` log-probabilities (nats) under the policy that sampled.
- ``coef``: Weight of the teacher's term relative to the input advantages, not negative.
- Results are float32 ``[..., T]``, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits

__all__ = ["prefix_weighted", "rlsd", "span_advantages", "teacher_advantages"]


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

    On policy with discount 0, the expected gradient of ``-A' logp`` at each token is that of
    KL(student || teacher) of the next token (k1 in the reward); with discount 1 it is that of the
    KL of the full response. The sums skip masked tokens, which cost no discount.

    Args:
      advantages, mask, old_logp, coef: See the module.
      teacher_token_logp: ``[..., T]`` of the same tokens under the teacher.
      discount: Discount per later token, in [0, 1].
      normalize: Whether R is the weighted mean, instead of the sum, over the rest of the response.

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
      MiniLLM trainer multiplies by discount^u instead of discount^(u - t), which is equivalent only
      with ``normalize``, and its discount also counts masked tokens.
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
def rlsd(
    advantages: Array,
    mask: Array,
    *,
    old_logp: Array,
    teacher_token_logp: Array,
    has_teacher: Array | None,
    lam: Array | float = 0.5,
    eps: float = 0.2,
    negative_only: bool = False,
) -> Array:
    """The reward decides the direction of an update, a teacher how much each token counts.

        w[t]  = clip(exp(sign(A) (teacher_token_logp[t] - old_logp[t])), 1 - eps, 1 + eps)
        A'[t] = A ((1 - lam) + lam w[t])

    Tokens that the teacher, who knows the answer, finds likelier than the policy did count more in
    a good response and less in a bad one. No advantage changes its sign.

    Args:
      advantages, mask, old_logp: See the module.
      teacher_token_logp: ``[..., T]`` of the same tokens under the teacher.
      has_teacher: bool ``[...]``, False for responses without one, whose advantages stay; None if
        all have one.
      lam: Share of the weights, in [0, 1]; a number, or an array of one value for all responses
        that broadcasts against ``mask``. 0 changes nothing.
      eps: Largest distance of a weight from 1, not negative.
      negative_only: Whether only negative advantages are weighed.

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, teacher = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]])), jnp.log(0.55)
      >>> weighed = jr.advantages.rlsd(
      ...     jnp.array([1.0, -1.0]), jnp.ones((2, 2), bool), old_logp=old_logp,
      ...     teacher_token_logp=jnp.array([[teacher, 0.0], [teacher, 0.0]]),
      ...     has_teacher=None, lam=1.0)
      >>> weighed.round(3).tolist()
      [[1.1..., 1.2...], [-0.909..., -0.8...]]

    References:
      Yang et al., Self-Distilled RLVR (arXiv:2604.03128), as ms-swift 4.6 computes it
      (``advantage_reweight="rlsd"``).
    """
    name = "rlsd"
    masking.check_tokens(name, mask, old_logp=old_logp, teacher_token_logp=teacher_token_logp)
    checks.check_non_negative(name, finite=True, eps=eps)
    if isinstance(lam, int | float):
        checks.check_share(name, lam=lam)
    before = masking.spread(name, "advantages", advantages, mask)
    weighed = mask
    if has_teacher is not None:
        checks.check_bool(name, has_teacher=has_teacher)
        checks.check_shape(name, "has_teacher", has_teacher, jnp.shape(mask)[:-1])
        weighed = mask & has_teacher[..., None]
    if negative_only:
        weighed = weighed & (before < 0)
    evidence = jnp.sign(before) * masking.safe_log_ratio(teacher_token_logp, old_logp, weighed)
    weight = jnp.clip(jnp.exp(evidence), 1.0 - eps, 1.0 + eps)
    share = jnp.asarray(lam, jnp.float32)
    return masking.zero_masked(before * ((1.0 - share) + share * weight), mask)


@traits(token_values=True)
def prefix_weighted(advantages: Array, mask: Array, *, gamma: float = 0.5) -> Array:
    """Weighs early tokens more: after the policy has diverged, the teacher's signal is less useful.

        w[t]  = 1 + gamma (1 - sum_{u < t} |A[u]| / sum_u |A[u]|)
        A'[t] = w[t] A[t]

    Args:
      advantages: ``[..., T]``, such as those of :func:`teacher_advantages`.
      mask: See the module.
      gamma: Extra weight of the first token over the last, not negative; 0 changes nothing.

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
    """The log-ratio to a teacher with another tokenizer, over spans that both tokenizers share.

        R[k]  = teacher's log-probability of span k - sum over the tokens t of span k of old_logp[t]
        A'[t] = A[t] + coef R[span of t]

    A span is the shortest piece of text that ends at a token boundary of both tokenizers. If the
    tokenizers are the same, every span is a token, and this is :func:`teacher_advantages` with
    discount 0.

    Args:
      advantages, mask, old_logp, coef: See the module.
      teacher_span_logp: ``[..., T]``, the teacher's log-probability of the span of each token.
      span_ids: Integers ``[..., T]``, the span of each token, below T; -1 for tokens outside all
        spans, which learn nothing from the teacher.

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
      (Universal Logit Distillation, arXiv:2402.12030); comparing one number per span is ours.
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
