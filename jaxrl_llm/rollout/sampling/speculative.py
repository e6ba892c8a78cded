"""Speculative sampling: cheap drafts, accepted such that the distribution does not change."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.rollout.sampling.draw import sample_from


def spec_accept(key: Array, p: Array, q: Array, draft: Array) -> tuple[Array, Array]:
    """Accepts a prefix of drafted tokens, and draws the token after it.

        draft x_k ~ q_k is accepted with probability min(1, p_k(x_k) / q_k(x_k)), the first
        rejection at k ends it:  token ~ max(p_k - q_k, 0) normalized;  none:  token ~ p_K

    Each returned token, drafted or drawn, has exactly the distribution ``p`` for any ``q``, so its
    ``behavior_logp`` is ``log p``. Where p and q agree, everything is accepted. Both are the
    distributions really sampled, after temperature and filters. An older rollout of the prompt can
    serve as the draft, with the probabilities under which it was sampled.

    Args:
      key: Typed key; it is consumed.
      p: ``[..., K + 1, V]``, probabilities of the policy for each drafted token and the one after
        the last, each conditioned on the draft before it.
      q: ``[..., K, V]``, probabilities that the draft was sampled from.
      draft: int ``[..., K]``, the drafted tokens.

    Returns:
      ``(n_accept, token)``, both int32 ``[...]``: the first ``n_accept`` of the K drafts stay, and
      ``token`` follows them.

    Raises:
      TypeError: If ``draft`` does not hold integers or another array is not floating point.
      ValueError: If the shapes differ.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> p = jnp.array([[0.2, 0.8], [1.0, 0.0]])
      >>> n_accept, token = jr.rollout.spec_accept(jax.random.key(0), p, p[:1], jnp.array([1]))
      >>> int(n_accept), int(token)
      (1, 0)

    References:
      Leviathan et al. (arXiv:2211.17192); Chen et al. (arXiv:2302.01318).
    """
    function = "spec_accept"
    checks.check_min_rank(function, 2, p=p, q=q)
    checks.check_float(function, p=p, q=q)
    checks.check_min_rank(function, 1, draft=draft)
    checks.check_integer(function, draft=draft)
    *rows, drafts, size = jnp.shape(q)
    checks.check_shape(function, "draft", draft, (*rows, drafts))
    checks.check_shape(function, "p", p, (*rows, drafts + 1, size))
    accepting, drawing = jax.random.split(key)
    uniform = jax.random.uniform(accepting, (*rows, drafts))
    return decide(p, q, draft, uniform, jax.random.uniform(drawing, tuple(rows)))


def decide(
    p: Array, q: Array, draft: Array, accepting: Array, drawing: Array
) -> tuple[Array, Array]:
    """:func:`spec_accept` with its uniform numbers in [0, 1), without checks.

    ``accepting`` is ``[..., K]``, ``drawing`` is ``[...]``.
    """
    p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
    drafts = draft.shape[-1]

    def of_draft(x: Array) -> Array:
        return jnp.take_along_axis(x[..., :drafts, :], draft[..., None], axis=-1)[..., 0]

    # Without a division: a draft that q cannot have sampled is accepted if p may sample it.
    accepted = accepting * of_draft(q) < of_draft(p)
    n_accept = jnp.sum(jnp.cumprod(accepted, axis=-1), axis=-1, dtype=jnp.int32)
    # After the last draft, q is 0.
    q = jnp.concatenate([q, jnp.zeros_like(p[..., :1, :])], axis=-2)
    index = n_accept[..., None, None]
    here, drafted = (jnp.take_along_axis(x, index, axis=-2)[..., 0, :] for x in (p, q))
    rest = jnp.maximum(here - drafted, 0.0)
    # Rounding may reject a draft where p - q is 0 everywhere; then the token is drawn from p.
    rest = jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, here)
    return n_accept, sample_from(jnp.log(rest), drawing)
