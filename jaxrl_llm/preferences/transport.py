"""Alignment by optimal transport: one distribution of rewards should dominate another.

The ranks are over all pairs of the arrays. The package describes the shared arguments. All raise
TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.preferences import scores


def aot(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    where: Array | None = None,
) -> Array:
    """Alignment by optimal transport: the policy's margins should exceed the reference's margins.

        a = chosen_logp - rejected_logp,   b = chosen_ref_logp - rejected_ref_logp
        z = beta (a of rank k - b of rank k)
        loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z),   e = label_smoothing

    The ranks are over all pairs of the arrays: the distribution of a should dominate the
    distribution of b, while a single pair may fall short of its reference. The loss of rank k is
    returned at the pair whose a has rank k.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      label_smoothing: See the package.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-1.0, -2.0], [-3.0, -3.0], [-2.0, -1.0], [-3.0, -3.0]])
      >>> jr.preferences.aot(*logp).round(4).tolist()  # margins 2 and 1, of the reference 1 and 2
      [0.693..., 0.693...]

    References:
      Melnyk et al., AOT (arXiv:2406.05882), with pairs; as in TRL.
    """
    function = "aot"
    margins, ref_margins = _margins(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    return _transported(function, margins, ref_margins, beta, label_smoothing, where)


def aot_margins(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    where: Array | None = None,
) -> Array:
    """The margins that turn DPO into :func:`aot`, for batches that are split into parts.

        margin = beta (b of the rank of a - b),   a, b as in aot

    Compute them for all pairs of a batch, with the policy before the step. Then
    ``dpo(..., margin=margin)`` on a part of the batch returns that part of the loss.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.

    Returns:
      ``[...]`` float32, without a gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-1.0, -2.0], [-3.0, -3.0], [-2.0, -1.0], [-3.0, -3.0]])
      >>> jr.preferences.aot_margins(*logp, beta=1.0).tolist()
      [1.0, -1.0]

    References:
      As :func:`aot`.
    """
    function = "aot_margins"
    margins, ref_margins = _margins(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    checks.check_positive(function, finite=True, beta=beta)
    margin = beta * (_matched(margins, ref_margins, where) - ref_margins)
    return jax.lax.stop_gradient(masking.zero_masked(margin, where))


def aot_unpaired(
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    where: Array | None = None,
) -> Array:
    """Alignment by optimal transport: rewards of good responses should exceed those of bad ones.

        z = beta (log-ratio of rank k of the chosen - log-ratio of rank k of the rejected)
        loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z),   e = label_smoothing

    A chosen and a rejected response at the same index may have different prompts, but there must be
    as many chosen as rejected responses. The loss of rank k is returned at the chosen response of
    rank k.

    Args:
      chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where, beta: See the package.
      label_smoothing: See the package.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> chosen, rejected, ref = jnp.array([2.0, 1.0]), jnp.array([1.0, 2.0]), jnp.zeros(2)
      >>> jr.preferences.aot_unpaired(chosen, rejected, ref, ref).round(4).tolist()
      [0.693..., 0.693...]

    References:
      Melnyk et al., AOT (arXiv:2406.05882), without pairs; as in TRL.
    """
    function = "aot_unpaired"
    chosen, rejected = scores.log_ratios(
        function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
    )
    return _transported(function, chosen, rejected, beta, label_smoothing, where)


def _margins(
    function, chosen_logp, rejected_logp, chosen_ref_logp, rejected_ref_logp, where
) -> tuple[Array, Array]:
    """Checks the arrays of pairs; returns the margins of the policy and of the reference."""
    scores.check_rows(
        function,
        where,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        chosen_ref_logp=chosen_ref_logp,
        rejected_ref_logp=rejected_ref_logp,
    )
    ref_margins = masking.safe_log_ratio(chosen_ref_logp, rejected_ref_logp, where)
    margins = masking.safe_log_ratio(chosen_logp, rejected_logp, where)
    return margins, jax.lax.stop_gradient(ref_margins)


def _transported(
    function: str,
    x: Array,
    other: Array,
    beta: float,
    label_smoothing: float,
    where: Array | None,
) -> Array:
    """The logistic loss of the difference of two samples rank by rank, in the order of ``x``."""
    checks.check_positive(function, finite=True, beta=beta)
    scores.check_smoothing(function, label_smoothing)
    loss = scores.logistic(beta * (x - _matched(x, other, where)), label_smoothing)
    return masking.zero_masked(loss, where)


def _matched(x: Array, other: Array, where: Array | None) -> Array:
    """At each index, the value of ``other`` whose rank equals the rank of ``x``."""
    valid = jnp.ones(jnp.shape(x), bool) if where is None else jnp.asarray(where)

    def order(x: Array) -> Array:
        return jnp.argsort(jnp.where(valid, jax.lax.stop_gradient(x), jnp.inf), axis=None)

    ranks = jnp.argsort(order(x))
    return jnp.ravel(other)[order(other)][ranks].reshape(jnp.shape(x))
