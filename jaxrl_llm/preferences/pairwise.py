"""Losses of pairs: a response that is preferred and one that is not.

Shared arguments:
  ``chosen_logp``, ``rejected_logp``: ``[...]``, floating point, log-probability (nats) of the
    complete response under the policy being trained, summed over its tokens.
  ``chosen_ref_logp``, ``rejected_ref_logp``: ``[...]``, likewise under the reference.
  ``where``: bool ``[...]``, True for the pairs that there are; the others are not read and get 0.
    None keeps all.
  ``beta``: Above 0; the implicit reward of a response is ``beta (logp - ref_logp)``.

The losses are one number a pair, to be averaged over the pairs. The gradient stops at the
reference. All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out
of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def dpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    where: Array | None = None,
) -> Array:
    """Direct preference optimization: the chosen response is likelier than the rejected one.

        loss = -log sigmoid(x_w - x_l),   x = beta (logp - ref_logp)

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.dpo(zero, zero, zero, zero).round(4).tolist()
      [0.693...]

    References:
      Rafailov et al., DPO (arXiv:2305.18290).
    """
    chosen, rejected, _ = _implicit(
        "dpo", chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    return masking.zero_masked(jax.nn.softplus(rejected - chosen), where)


def bco(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    center: float | Array = 0.0,
    where: Array | None = None,
) -> Array:
    """Binary classification of the two responses, one by one.

        loss = -log sigmoid(x_w - d) - log sigmoid(-(x_l - d)),   x = beta (logp - ref_logp)

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the module.
      center: ``[]``, d: a running mean of the implicit rewards; the gradient stops at it.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero = jnp.zeros(1)
      >>> jr.preferences.bco(zero, zero, zero, zero).round(4).tolist()
      [1.386...]

    References:
      Jung et al., binary classifier optimization (arXiv:2404.04656), as a loss of pairs; TRL's has
      ``center=0``.
    """
    chosen, rejected, _ = _implicit(
        "bco", chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    checks.check_rank("bco", 0, center=center)
    d = jax.lax.stop_gradient(jnp.asarray(center, jnp.float32))
    loss = jax.nn.softplus(d - chosen) + jax.nn.softplus(rejected - d)
    return masking.zero_masked(loss, where)


def mpo(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    lengths: Array,
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    likelihood: float = 1.0,
    center: float | Array = 0.0,
    where: Array | None = None,
) -> Array:
    """Mixed preference optimization: preference, quality and likelihood of the chosen response.

        loss = preference dpo + quality bco - likelihood chosen_logp / lengths

    With ``preference=1``, ``quality=0`` and ``likelihood=5`` it is CGPO's CODPO, on the pairs of
    ``curation.constrained_pairs``.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the module.
      lengths: ``[...]``, numbers, tokens of the chosen response, at least 1.
      preference: Weight of :func:`dpo`, not negative.
      quality: Weight of :func:`bco`, not negative.
      likelihood: Weight of the mean negative log-likelihood a token, not negative.
      center: As in :func:`bco`.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> zero, lengths = jnp.zeros(1), jnp.array([4])
      >>> jr.preferences.mpo(zero, zero, zero, zero, lengths=lengths).round(4).tolist()
      [0.831...]

    References:
      Wang et al., MPO (arXiv:2411.10442), with the weights of TRL's documentation; used with GRPO
      by Skywork R1V2 (arXiv:2504.16656). CODPO: CGPO (arXiv:2409.20370). TRL and the paper average
      the likelihood over the tokens of a batch, here it is over those of a response.
    """
    function = "mpo"
    chosen, rejected, valid = _implicit(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
    )
    checks.check_same_shape(function, chosen_logp=chosen_logp, lengths=lengths)
    checks.check_non_negative(
        function, finite=True, preference=preference, quality=quality, likelihood=likelihood
    )
    checks.check_rank(function, 0, center=center)
    d = jax.lax.stop_gradient(jnp.asarray(center, jnp.float32))
    tokens = jnp.where(valid, jnp.asarray(lengths, jnp.float32), 1.0)
    loss = (
        preference * jax.nn.softplus(rejected - chosen)
        + quality * (jax.nn.softplus(d - chosen) + jax.nn.softplus(rejected - d))
        - likelihood * masking.zero_masked(chosen_logp, where) / tokens
    )
    return masking.zero_masked(loss, where)


def _implicit(
    function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, beta, where
) -> tuple[Array, Array, Array]:
    """Checks the shared arguments; returns both implicit rewards and which pairs there are."""
    checks.check_float(
        function,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        chosen_ref_logp=chosen_ref_logp,
        rejected_ref_logp=rejected_ref_logp,
    )
    checks.check_bool(function, where=where)
    checks.check_same_shape(
        function,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        chosen_ref_logp=chosen_ref_logp,
        rejected_ref_logp=rejected_ref_logp,
        where=where,
    )
    checks.check_positive(function, finite=True, beta=beta)

    def reward(logp: Array, ref_logp: Array) -> Array:
        return beta * masking.safe_log_ratio(logp, jax.lax.stop_gradient(ref_logp), where)

    valid = jnp.ones(jnp.shape(chosen_logp), bool) if where is None else jnp.asarray(where)
    return reward(chosen_logp, chosen_ref_logp), reward(rejected_logp, rejected_ref_logp), valid
