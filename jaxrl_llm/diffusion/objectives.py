"""Loss terms for responses whose log-likelihood is only bounded.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.diffusion import _inputs


def bgpo_terms(
    terms: Array, old_terms: Array, advantages: Array, *, cap: float | None = None
) -> Array:
    """A lower bound of ``A exp(elbo - old elbo)`` that is a sum over the draws.

        d_j = terms[j] - old_terms[j]
        A >= 0:  g_j = A (1 + d_j) / J        A < 0:  g_j = A exp(d_j) / J

    ``-sum_j g_j`` is the loss of a response. The gradients of the draws can be computed one by one
    and added, so memory does not grow with J. At ``d = 0`` value and gradient equal those of the
    exact ratio. Elsewhere the bound is lower, since ``1 + d <= exp(d)`` and a mean of exponentials
    is at least the exponential of the mean. With one draw and A < 0 it is the exact ratio.

    Args:
      terms: ``[J, ...]``, floating point, :func:`elbo_terms` under the policy being trained.
      old_terms: ``[J, ...]``, the same under the policy that sampled, with the same masks; a
        constant.
      advantages: ``[...]``, floating point; a constant.
      cap: Upper limit of d_j where A < 0, above 0: exp(d_j) may explode off policy. None for no
        limit, as in the paper.

    Returns:
      ``[J, ...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> d = jnp.array([0.4, -0.5, 0.4])
      >>> jr.diffusion.bgpo_terms(d, jnp.zeros(3), jnp.array(1.5)).sum().round(4).item()
      1.649...
      >>> jr.diffusion.bgpo_terms(d, jnp.zeros(3), jnp.array(-1.5)).sum().round(4).item()
      -1.795...

    References:
      Lin et al., BGPO (arXiv:2510.11683); confidence PAPER. ``cap`` is ours.
    """
    function = "bgpo_terms"
    checks.check_float(function, terms=terms, old_terms=old_terms, advantages=advantages)
    checks.check_min_rank(function, 1, terms=terms)
    checks.check_same_shape(function, terms=terms, old_terms=old_terms)
    checks.check_shape(function, "advantages", advantages, jnp.shape(terms)[1:])
    checks.check_positive(function, finite=True, cap=cap)
    advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    d = masking.safe_log_ratio(terms, jax.lax.stop_gradient(old_terms))
    good = advantages >= 0
    # The branch that is not taken must not overflow, or its gradient is NaN.
    power = jnp.where(good, 0.0, d if cap is None else jnp.minimum(d, cap))
    return advantages * jnp.where(good, 1.0 + d, jnp.exp(power)) / jnp.shape(terms)[0]


@traits(level="sequence", reads_sequence=True, policy_gradient=False, takes_correction=False)
def bgpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    draw_logp: Array,
    old_draw_logp: Array,
    cap: float | None = None,
) -> Array:
    """:func:`bgpo_terms` as the loss of a recipe.

        loss[t] = -sum_j g_j        the same at every token

    Args:
      logp, old_logp: Not used.
      advantages: ``[...]``, floating point; a constant.
      mask: bool ``[..., T]``, True for tokens that count.
      draw_logp: ``[..., T, J]``, floating point: ``1[masked] logp / t`` of each draw.
      old_draw_logp: ``[..., T, J]``, the same under the policy that sampled; a constant.
      cap: As in :func:`bgpo_terms`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> d, mask = jnp.array([[0.4, -0.5, 0.4]]), jnp.ones(1, bool)
      >>> jr.diffusion.bgpo(None, None, jnp.array(1.5), mask,
      ...     draw_logp=d, old_draw_logp=jnp.zeros((1, 3))).round(4).tolist()
      [-1.649...]

    References:
      Lin et al., BGPO (arXiv:2510.11683); confidence PAPER.
    """
    function = "bgpo"
    del logp, old_logp
    checks.check_float(function, draw_logp=draw_logp, old_draw_logp=old_draw_logp)
    checks.check_same_shape(function, draw_logp=draw_logp, old_draw_logp=old_draw_logp)
    _inputs.check_token_mask(function, "mask", mask)
    checks.check_shape(
        function, "draw_logp", draw_logp, (*jnp.shape(mask), jnp.shape(draw_logp)[-1])
    )

    def of_draws(x: Array) -> Array:
        return masking.row_sum(masking.zero_masked(jnp.moveaxis(x, -1, 0), mask))

    terms = bgpo_terms(of_draws(draw_logp), of_draws(old_draw_logp), advantages, cap=cap)
    loss = -jnp.sum(terms, axis=0)
    return masking.zero_masked(jnp.broadcast_to(loss[..., None], jnp.shape(mask)), mask)


@traits(level="sequence", reads_sequence=True)
def elbo_kl(logp: Array, ref_logp: Array, mask: Array, *, coef: float | Array = 1.0) -> Array:
    """A penalty for moving away from the reference: k2 of the bounds of complete responses.

        loss[t] = coef (sum_t logp[t] - ref_logp[t])^2 / (2 L)        the same at every token

    The difference of two bounds is only squared, whereas k3 takes its exponential, which overflows
    for sums over hundreds of tokens. Under ``aggregate.sequence_mean`` the loss is the mean over
    responses.

    Args:
      logp: ``[..., T]``, floating point: :func:`elbo` under the policy being trained.
      ref_logp: ``[..., T]``, the same under the reference, with the same masks; a constant.
      mask: bool ``[..., T]``, True for tokens that count.
      coef: Not negative.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.ones(2, bool)
      >>> jr.diffusion.elbo_kl(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -3.0]), mask).tolist()
      [1.0, 1.0]

    References:
      Ou et al., ESPO (arXiv:2512.03759). There L counts the padding of a response of fixed length.
    """
    function = "elbo_kl"
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp)
    checks.check_non_negative(function, finite=True, coef=coef)
    difference = masking.safe_log_ratio(logp, jax.lax.stop_gradient(ref_logp), mask)
    length = jnp.maximum(masking.lengths(mask), 1.0)
    each = coef * masking.row_sum(difference) ** 2 / (2.0 * length)
    return masking.zero_masked(jnp.broadcast_to(each[..., None], jnp.shape(mask)), mask)


def wd1_weights(advantages: Array, *, where: Array | None = None, scale: float = 1.0) -> Array:
    """The weight of each response of a group in :func:`wd1`: above 0 if good, below 0 if bad.

        w = softmax(scale A) - softmax(-scale A)          over the group

    The weights of a group add up to 0, and adding a constant to A changes nothing.

    Args:
      advantages: ``[..., G]``, floating point.
      where: bool ``[..., G]``, True for the responses that take part; None for all.
      scale: Above 0.

    Returns:
      ``[..., G]`` float32; 0 where ``where`` is False.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.wd1_weights(jnp.array([0.5, 0.5, -0.5, -0.5])).round(4).tolist()
      [0.231..., 0.231..., -0.231..., -0.231...]

    References:
      Tang et al., wd1 (arXiv:2507.08838), whose released code sets A to the reward minus the mean
      of its group, and ``scale=1``.
    """
    function = "wd1_weights"
    checks.check_float(function, advantages=advantages)
    checks.check_min_rank(function, 1, advantages=advantages)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, advantages=advantages, where=where)
    checks.check_positive(function, finite=True, scale=scale)
    valid = jnp.ones(jnp.shape(advantages), bool) if where is None else where
    x = scale * masking.zero_masked(advantages, valid)

    def share(x: Array) -> Array:
        top = jnp.max(jnp.where(valid, x, -jnp.inf), axis=-1, keepdims=True)
        mass = jnp.where(valid, jnp.exp(x - jnp.where(jnp.isneginf(top), 0.0, top)), 0.0)
        return mass / jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), 1e-30)

    return share(x) - share(-x)


@traits(has_ratio=False, reuses_samples=True, policy_gradient=False, takes_correction=False)
def wd1(
    logp: Array, old_logp: Array | None, advantages: Array, mask: Array, *, scale: float = 1.0
) -> Array:
    """Weighted likelihood without a ratio: raises good responses and lowers bad ones.

        loss[g, t] = -w_g logp[g, t],   w of :func:`wd1_weights`

    A ratio would take the exponential of two noisy estimates and so amplify their error. The
    samples are those of the old policy, so the method makes several passes over them. The paper's
    loss is ``aggregate.sequence_sum`` times G: the sum over the group.

    Args:
      logp: ``[..., G, T]``, floating point, an estimate such as :func:`mean_field`.
      old_logp: Not used.
      advantages: ``[..., G]``, floating point; a constant.
      mask: bool ``[..., G, T]``, True for tokens that count; a response without one has no weight.
      scale: As in :func:`wd1_weights`.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([[-1.0], [-2.0]]), jnp.ones((2, 1), bool)
      >>> jr.diffusion.wd1(logp, None, jnp.array([0.5, -0.5]), mask).round(4).tolist()
      [[0.462...], [-0.924...]]

    References:
      Tang et al., wd1 (arXiv:2507.08838).
    """
    function = "wd1"
    del old_logp
    masking.check_tokens(function, mask, logp=logp)
    checks.check_min_rank(function, 2, logp=logp)
    checks.check_shape(function, "advantages", advantages, jnp.shape(logp)[:-1])
    weights = wd1_weights(
        jax.lax.stop_gradient(advantages), where=jnp.any(mask, axis=-1), scale=scale
    )
    return -weights[..., None] * masking.zero_masked(logp, mask)
