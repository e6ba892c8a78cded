"""Rotary position embedding: its frequencies, their scaling, and the rotation.

In a head of dimension d, dimensions i and i + d/2 are rotated together by the angle

    position * f_i,    f_i = theta^(-2 i / d),    i = 0 .. d/2 - 1

A scaling changes the frequencies so that a model can read more tokens than in its pretraining.
``frequency`` is float32 ``[d/2]`` and ``theta`` its base.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the low rotary frequencies for a longer context, as in Llama 3.1 and later.

    With wavelength w = 2 pi / f and L the original context, a frequency f becomes

        f                      where w < L / high_freq_factor
        f / factor             where w > L / low_freq_factor
        (1 - s) f / factor + s f, s = (L / w - low) / (high - low)   in between

    Args:
      factor: How much longer the context becomes.
      low_freq_factor: L over the shortest wavelength that is fully stretched.
      high_freq_factor: L over the longest wavelength that is not stretched.
      original_max_length: L, tokens.

    References:
      The Llama 3 herd of models (arXiv:2407.21783); the factors are in the released config.json.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling: `high_freq_factor` ({self.high_freq_factor}) must be larger than "
                f"`low_freq_factor` ({self.low_freq_factor})"
            )

    def stretch(self, frequency: Array, theta: float) -> Array:
        """The frequencies after scaling."""
        wavelength = 2 * jnp.pi / frequency
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_max_length / wavelength - low) / (high - low)
        smooth = jnp.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by ``factor``.

    Args:
      factor: How much longer the context becomes.

    References:
      Position interpolation (arXiv:2306.15595).
    """

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self)

    def stretch(self, frequency: Array, theta: float) -> Array:
        """The frequencies after scaling."""
        return frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: high frequencies are unchanged, low ones are divided, with a ramp in between.

    With L the original context, frequency i makes ``L f_i / (2 pi)`` turns over it. The index of r
    turns is ``c(r) = d log(L / (2 pi r)) / (2 log theta)``; with ``l = max(c(beta_fast), 0)`` and
    ``h = min(c(beta_slow), d - 1)``

        f_i <- (1 - s_i) f_i + s_i f_i / factor,    s_i = clip((i - l) / (h - l), 0, 1)

    and cosines and sines are multiplied by ``attention_factor``.

    Args:
      factor: How much longer the context becomes.
      original_max_length: L, tokens.
      beta_fast: Turns above which a frequency is not stretched.
      beta_slow: Turns below which it is fully stretched.
      attention_factor: Factor of the table; ``0.1 log(factor) + 1`` in the paper.
      truncate: Whether l is rounded down and h up, as in almost all released models.

    References:
      YaRN (arXiv:2309.00071); the bounds and their rounding are those of transformers.
    """

    factor: float
    original_max_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"YarnScaling: `beta_fast` ({self.beta_fast}) must be larger than `beta_slow` "
                f"({self.beta_slow})"
            )

    def stretch(self, frequency: Array, theta: float) -> Array:
        """The frequencies after scaling."""
        size = 2 * frequency.shape[-1]

        def index(turns: float) -> float:
            return size * math.log(self.original_max_length / (turns * 2 * math.pi)) / base

        base = 2 * math.log(theta)
        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        # As transformers avoids a ramp of no width.
        width = high - low or 0.001
        ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / width, 0, 1)
        return (1 - ramp) * frequency + ramp * frequency / self.factor


Scaling = RopeScaling | LinearScaling | YarnScaling


class Rope(NamedTuple):
    """The base of the rotary frequencies, and their scaling, if any."""

    theta: float
    scaling: Scaling | None = None


def rotary_tables(positions: Array, size: int, rope: Rope) -> tuple[Array, Array]:
    """Cosines and sines ``[..., T, 1, d/2]`` of the rotary embedding, float32; d is the size."""
    half = size // 2
    frequency = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if rope.scaling is not None:
        frequency = rope.scaling.stretch(frequency, rope.theta)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    factor = getattr(rope.scaling, "attention_factor", 1.0)
    if factor == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return factor * jnp.cos(angle), factor * jnp.sin(angle)


@jax.custom_vjp
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of ``x`` ``[..., T, H, D]``: rotates dimension i with dimension i + d/2.

    Tables of d below D rotate the first d dimensions, and the others stay. The gradient is rotated
    back; the tables have none.
    """
    half = cos.shape[-1]
    parts = (x[..., :half], x[..., half : 2 * half])
    first, second = (part.astype(jnp.float32) for part in parts)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _rotate_back(tables: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    cos, sin = tables
    return rotate(dy, cos, -sin), None, None


rotate.defvjp(lambda x, cos, sin: (rotate(x, cos, sin), (cos, sin)), _rotate_back)


def _check_positive(scaling: Scaling) -> None:
    name = type(scaling).__name__
    checks.check_numbers(name, scaling)
    for field, value in vars(scaling).items():
        if not value > 0 and not isinstance(value, bool):
            raise ValueError(f"{name}: `{field}` must be positive, got {value!r}")
