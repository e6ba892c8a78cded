"""An upper bound of the log-likelihood, and the choice of a bound by the sign of the advantage.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.diffusion import _inputs
from jaxrl_llm.diffusion.likelihood import elbo


def eubo(
    logp: Array,
    masked: Array,
    t: Array,
    valid: Array,
    *,
    beta: float = 1.5,
    weights: Array | None = None,
) -> Array:
    """The evidence upper bound, token by token: a power mean of probabilities.

        eubo[i] = (1 / beta) log sum_j weights[j] 1[masked_j[i]] exp(beta logp_j[i]) / t_j

    It is at least :func:`elbo` for every beta, and it grows with beta. It bounds the log-likelihood
    from above up to a constant that does not depend on the parameters; with ``beta >= L`` the
    constant is 0 (Hölder's inequality over the L tokens). Tokens that no draw masks get the mean of
    the others, so that the mean over all tokens equals the mean over the covered tokens. With few
    draws the estimate is biased downward, because the logarithm is concave.

    Args:
      logp, masked, t, valid, weights: See the package.
      beta: Power, above 0.

    Returns:
      ``[..., T]`` float32; 0 where not valid, and where no token is covered.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, masked = jnp.log(jnp.array([[0.2], [0.8]])), jnp.ones((2, 1), bool)
      >>> valid = jnp.ones(1, bool)
      >>> tokens = jr.diffusion.eubo(logp, masked, jnp.ones(2), valid, beta=1.0)
      >>> jnp.exp(tokens).round(4).tolist()
      [0.5]

    References:
      Wang et al., SPG (arXiv:2510.09541). Its released code averages over the covered tokens.
    """
    function = "eubo"
    _inputs.check_token_mask(function, "valid", valid)
    _inputs.check_draws(function, logp, masked)
    checks.check_shape(function, "logp", logp, (jnp.shape(logp)[0], *jnp.shape(valid)))
    checks.check_positive(function, finite=True, beta=beta)
    t = _inputs.of_draws(function, "t", t, jnp.shape(logp))
    weights = _inputs.draw_weights(function, weights, jnp.shape(logp))
    masked = masked & valid & (weights > 0)
    power = beta * masking.zero_masked(logp, masked) + jnp.log(
        jnp.where(masked, weights / jnp.where(masked, t, 1.0), 1.0)
    )
    top = jnp.max(power, axis=0, where=masked, initial=-jnp.inf)
    covered = jnp.isfinite(top)
    top = jax.lax.stop_gradient(jnp.where(covered, top, 0.0))
    total = jnp.sum(jnp.where(masked, jnp.exp(power - top), 0.0), axis=0)
    tokens = jnp.where(covered, (top + jnp.log(jnp.where(covered, total, 1.0))) / beta, 0.0)
    mean = masking.masked_mean(tokens, covered, axis=-1, keepdims=True)
    return jnp.where(valid, jnp.where(covered, tokens, mean), 0.0)


def sandwiched(
    logp: Array,
    masked: Array,
    t: Array,
    advantages: Array,
    valid: Array,
    *,
    beta: float = 1.5,
    mix: float = 0.5,
    weights: Array | None = None,
) -> Array:
    """The lower bound for good responses, and an upper bound for bad ones.

        A >= 0:  elbo        A < 0:  mix eubo + (1 - mix) elbo

    With ``surrogates.reinforce`` this pushes a good response's likelihood up from below and a bad
    one's down from above. ``mix=0`` is the lower bound everywhere.

    Args:
      logp, masked, t, valid, weights: See the package.
      advantages: ``[...]``, floating point, one value a response; only the sign is read.
      beta: As in :func:`eubo`.
      mix: Weight of the upper bound, in [0, 1].

    Returns:
      ``[..., T]`` float32; 0 where not valid.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.log(jnp.array([[0.2], [0.8]]))[:, None].repeat(2, 1)
      >>> masked, valid = jnp.ones((2, 2, 1), bool), jnp.ones((2, 1), bool)
      >>> tokens = jr.diffusion.sandwiched(
      ...     logp, masked, jnp.ones(2), jnp.array([1.0, -1.0]), valid, beta=1.0, mix=1.0)
      >>> [f"{x:.3f}" for x in jnp.exp(tokens[:, 0])]
      ['0.400', '0.500']

    References:
      Wang et al., SPG (arXiv:2510.09541), with its mixture. Its loss is ``-A`` times the mean over
      tokens, weighted by length over the batch: ``aggregate.token_mean``.
    """
    function = "sandwiched"
    checks.check_float(function, advantages=advantages)
    checks.check_share(function, mix=mix)
    upper = eubo(logp, masked, t, valid, beta=beta, weights=weights)
    checks.check_shape(function, "advantages", advantages, jnp.shape(valid)[:-1])
    lower = masking.zero_masked(elbo(logp, masked, t, weights=weights), valid)
    return jnp.where((advantages < 0)[..., None], mix * upper + (1.0 - mix) * lower, lower)
