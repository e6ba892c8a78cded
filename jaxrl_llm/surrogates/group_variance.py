"""GVPO: the log-ratios of a group's responses fitted to their rewards, both around their mean.

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


@traits(takes_correction=False, policy_gradient=False, level="sequence", reads_sequence=True)
def gvpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    beta: float = 0.1,
) -> Array:
    """Squared error of the implicit rewards of a group against its rewards, both centered.

        d_i = beta sum over t of (logp_i[t] - old_logp_i[t])
        e_i = (d_i - mean_j d_j) - (A_i - mean_j A_j)          means over the n responses
        loss[i, t] = n / (n - 1) e_i^2 / 2                     at every token of response i

    Under ``aggregate.group_mean`` the loss is the mean over groups of the sum of ``e_i^2 / 2`` over
    n - 1. It is 0 where the policy is the old policy times ``exp(r / beta)``, normalized: the
    optimum of the reward minus beta times the KL divergence. The normalizer is the same for all
    responses to a prompt, so it cancels, whichever policy sampled them; there is no ratio.

    Where the policy has not changed, the gradient at each token is beta times that of
    :func:`reinforce` under ``aggregate.sequence_sum`` with the advantages of
    :func:`jaxrl_llm.advantages.rloo`; later the spread of the log-ratios holds it back. A response
    alone in its group has loss 0. Responses without a token are not in their group.

    Args:
      logp, old_logp, mask: See the package; here ``[..., G, T]``.
      advantages: ``[..., G]``, one value per sequence: rewards, of which only the differences
        within a group count, or :func:`jaxrl_llm.advantages.dr_grpo` of them.
      beta: Weight of the KL divergence, above 0, in units of reward per nat of a whole response.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.log(jnp.full((2, 1), 0.25)), jnp.ones((2, 1), bool)
      >>> logp = jnp.log(jnp.array([[0.5], [0.25]]))
      >>> rewards = jnp.array([jnp.log(2.0), 0.0])
      >>> jr.surrogates.gvpo(logp, old_logp, rewards, mask, beta=1.0)[:, 0].tolist()
      [0.0, 0.0]

    References:
      Zhang et al., GVPO (arXiv:2504.19599), with beta 0.1 in the authors' code and in verl's
      recipe. There the loss is the sum over the prompts of a microbatch, here the mean over groups,
      and the gradient stops at the mean of ``d``, which changes nothing in a whole group.
    """
    checks.check_min_rank("gvpo", 2, logp=logp)
    hint = " It compares the responses of a group, not tokens."
    _inputs.check_sequence_advantages("gvpo", logp, advantages, hint)
    checks.check_positive("gvpo", finite=True, beta=beta)
    x = _inputs.prepare("gvpo", logp, old_logp, advantages, mask)
    members = jnp.any(mask, axis=-1)
    rewards = jax.lax.stop_gradient(masking.zero_masked(advantages, members))
    excess = beta * masking.row_sum(x.log_ratio) - rewards
    error = excess - masking.masked_mean(excess, members, axis=-1, keepdims=True)
    count = jnp.sum(members, axis=-1, keepdims=True, dtype=jnp.float32)
    loss = 0.5 * count / jnp.maximum(count - 1.0, 1.0) * error**2
    return x.finish(jnp.broadcast_to(loss[..., None], jnp.shape(mask)))
