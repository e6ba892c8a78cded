"""Noise levels: how much of a response is masked in each of J draws.

- ``samples``: J, how many draws; even for "antithetic".
- ``draws``: "independent", "antithetic" (draw ``j + J/2`` mirrors draw ``j``) or "stratified" (one
  draw in each of J equal parts of the range). Each draw alone is uniform, so all three keep an
  estimate unbiased; the last two lower its variance.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.diffusion import _inputs

DRAWS = ("independent", "antithetic", "stratified")


def noise_levels(
    key: Array,
    shape: Sequence[int],
    *,
    samples: int,
    draws: str = "independent",
    least: float = 1e-3,
) -> Array:
    """Draws levels uniform in ``[least, 1]``, for masks of independent tokens.

        t = least + (1 - least) u,   u ~ U[0, 1]

    Args:
      key: See the package.
      shape: Shape of the rows, ``[...]``; ``()`` for levels that all rows share.
      samples, draws: See the module.
      least: The lowest level, in (0, 1). Terms of small levels are rare and large: at 0 the
        variance of :func:`elbo` is infinite. The cutoff causes a bias of the order of ``least``.

    Returns:
      ``[J, ...]`` float32.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> t = jr.diffusion.noise_levels(jax.random.key(0), (), samples=4, draws="antithetic")
      >>> [f"{x:.3f}" for x in t[:2] + t[2:]]
      ['1.001', '1.001']

    References:
      Nie et al., LLaDA (arXiv:2502.09992), independent levels; Zhu et al., VRPO (arXiv:2505.19223),
      their variance. Antithetic and stratified levels are ours.
    """
    function = "noise_levels"
    checks.check_share(function, zero=False, one=False, least=least)
    return least + (1.0 - least) * _uniform(function, key, tuple(shape), samples, draws)


def mask_counts(
    key: Array, valid: Array, *, samples: int, draws: str = "independent", least: int = 1
) -> Array:
    """Draws how many tokens to mask, uniformly from ``least`` to L, for :func:`mask_exact`.

    Args:
      key, valid: See the package.
      samples, draws: See the module.
      least: 0 or 1; 0 for masks with complements, since the complement of L masked tokens is empty.

    Returns:
      int32 ``[J, ...]``; 0 for rows without a valid token.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> valid = jnp.arange(8) < 6
      >>> counts = jr.diffusion.mask_counts(
      ...     jax.random.key(0), valid, samples=6, draws="stratified")
      >>> counts.tolist()
      [1, 2, 3, 4, 5, 6]

    References:
      Nie et al., LLaDA (arXiv:2502.09992), from 1; Ou et al., ESPO (arXiv:2512.03759), from 0 and
      spread evenly over the batch.
    """
    function = "mask_counts"
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_option(function, "least", least, (0, 1))
    u = _uniform(function, key, jnp.shape(valid)[:-1], samples, draws)
    length = masking.lengths(valid)
    counts = least + jnp.floor(u * (length + 1.0 - least))
    return jnp.minimum(counts, length).astype(jnp.int32)


def quadrature_levels(samples: int) -> tuple[Array, Array]:
    """Fixed levels and weights: Gauss-Legendre quadrature of the noise level over [0, 1].

        ELBO = integral of f(t) dt ~ sum_j weights[j] f(t[j]),   f(t) = E over masks of l(t) / t

    f is a polynomial in t of degree L - 1, so J >= L / 2 levels have no bias, and only the masks
    are random. A few levels already remove most of the variance.

    Args:
      samples: J, how many levels, at least 1.

    Returns:
      ``(t, weights)``, both ``[J]`` float32; the weights add up to 1.

    Raises:
      ValueError: If ``samples`` is no integer above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> t, weights = jr.diffusion.quadrature_levels(2)
      >>> t.round(4).tolist(), weights.tolist()
      ([0.211..., 0.788...], [0.5, 0.5])

    References:
      Rojas et al., GDPO, semi-deterministic Monte Carlo (arXiv:2510.08554). The released code has
      1 to 5 levels, and hides exactly floor(t L) tokens at each.
    """
    checks.check_count("quadrature_levels", samples=samples)
    nodes, weights = np.polynomial.legendre.leggauss(samples)
    return jnp.asarray((nodes + 1.0) / 2.0, jnp.float32), jnp.asarray(weights / 2.0, jnp.float32)


def _uniform(function: str, key: Array, shape: tuple[int, ...], samples: int, draws: str) -> Array:
    """``[J, ...]`` numbers, each uniform in [0, 1]."""
    checks.check_key(function, key)
    checks.check_count(function, samples=samples)
    checks.check_option(function, "draws", draws, DRAWS)
    if draws == "antithetic":
        if samples % 2:
            raise ValueError(f"{function}: samples must be even with 'antithetic'; got {samples}.")
        half = jax.random.uniform(key, (samples // 2, *shape))
        return jnp.concatenate([half, 1.0 - half], axis=0)
    u = jax.random.uniform(key, (samples, *shape))
    if draws == "stratified":
        u = (u + jnp.arange(samples).reshape(-1, *(1,) * len(shape))) / samples
    return u
