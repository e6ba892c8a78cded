"""Shared helpers of the preference losses: log-ratios, their transforms, and the shapes of a loss.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")

# exp(80) is finite in float32, with room for the factors of a gradient.
_LARGEST_EXPONENT = 80.0
_NEAR_ONE = 1e-6


def check_rows(function: str, where: Array | None, **arrays) -> None:
    """Raises unless arrays (None is skipped) are floating point with the shape of ``where``."""
    checks.check_bool(function, where=where)
    checks.check_alike(function, arrays, where=where)


def log_ratio(logp: Array, ref_logp: Array, where: Array | None) -> Array:
    """``logp - ref_logp`` in float32, 0 where absent; no gradient flows into the reference."""
    return masking.safe_log_ratio(logp, jax.lax.stop_gradient(ref_logp), where)


def log_ratios(
    function: str,
    chosen_logp: Array,
    rejected_logp: Array,
    chosen_ref_logp: Array,
    rejected_ref_logp: Array,
    where: Array | None,
) -> tuple[Array, Array]:
    """Checks the arrays of pairs; returns the log-ratios of the chosen and rejected responses."""
    check_rows(
        function,
        where,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        chosen_ref_logp=chosen_ref_logp,
        rejected_ref_logp=rejected_ref_logp,
    )
    chosen = log_ratio(chosen_logp, chosen_ref_logp, where)
    return chosen, log_ratio(rejected_logp, rejected_ref_logp, where)


def per_token(
    function: str,
    x: Array,
    lengths: Array | None,
    where: Array | None,
    name: str = "chosen_lengths",
) -> Array:
    """Divides a sum over tokens by the length; ``name`` is the name of the lengths."""
    if lengths is None:
        raise ValueError(f"{function}: a mean over tokens needs {name}; got None.")
    checks.check_shape(function, name, lengths, jnp.shape(x))
    tokens = jnp.asarray(lengths, jnp.float32)
    return x / (tokens if where is None else jnp.where(where, tokens, 1.0))


def both_per_token(
    function: str,
    chosen: Array,
    rejected: Array,
    chosen_lengths: Array | None,
    rejected_lengths: Array | None,
    where: Array | None,
) -> tuple[Array, Array]:
    """Divides the sums over the tokens of both responses by their lengths."""
    return (
        per_token(function, chosen, chosen_lengths, where),
        per_token(function, rejected, rejected_lengths, where, "rejected_lengths"),
    )


def per_pair(function: str, name: str, x: float | Array, like: Array, where: Array | None) -> Array:
    """Data with one value per pair or one for all, without a gradient, 0 where absent."""
    if not jnp.ndim(x):
        return jax.lax.stop_gradient(jnp.asarray(x, jnp.float32))
    checks.check_shape(function, name, x, jnp.shape(like))
    return jax.lax.stop_gradient(masking.zero_masked(x, where))


def power_score(x: Array, exponent: float) -> Array:
    """``(exp(c x) - 1) / c``, which is ``x`` for c = 0; the exponential is bounded."""
    if abs(exponent) < _NEAR_ONE:
        return x
    return jnp.expm1(jnp.minimum(exponent * x, _LARGEST_EXPONENT)) / exponent


def check_divergence(function: str, divergence: str, alpha: float | None) -> None:
    """Raises ValueError for an unknown divergence, or an ``alpha`` that has no effect."""
    checks.check_option(function, "divergence", divergence, DIVERGENCES)
    if divergence != "alpha":
        checks.check_no_effect(function, f"with divergence={divergence!r}", alpha=alpha)


def divergence_score(x: Array, divergence: str, alpha: float | None) -> Array:
    """The derivative of an f-divergence at the ratio ``exp(x)``, up to a constant.

    reverse_kl: x; forward_kl: 1 - e^-x; js: log 2 + log sigmoid(x); alpha:
    (e^((alpha - 1) x) - 1) / (alpha - 1).
    """
    if divergence == "reverse_kl":
        return x
    if divergence == "js":
        return jnp.log(2.0) - jax.nn.softplus(-x)
    if divergence == "forward_kl":
        return power_score(x, -1.0)
    return power_score(x, (0.5 if alpha is None else alpha) - 1.0)


def check_smoothing(function: str, label_smoothing: float) -> None:
    """Raises ValueError unless a share of wrong labels is in [0, 0.5)."""
    checks.check_non_negative(function, label_smoothing=label_smoothing)
    if isinstance(label_smoothing, int | float) and label_smoothing >= 0.5:
        raise ValueError(f"{function}: label_smoothing must be below 0.5; got {label_smoothing:g}.")


def logistic(z: Array, label_smoothing: float = 0.0) -> Array:
    """``-(1 - e) log sigmoid(z) - e log sigmoid(-z)``."""
    loss = jax.nn.softplus(-z)
    # softplus(z) = softplus(-z) + z
    return loss + masking.product(label_smoothing, z)


def square_to_target(x: Array, target: float | Array) -> Array:
    """``(x - target)^2``."""
    return jnp.square(x - target)
