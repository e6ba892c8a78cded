"""Intervals of measured shares and means."""

import math

from scipy.special import stdtrit

from jaxrl_llm.core import checks

Z = 1.959963984540054  # 97.5% quantile of the normal distribution


def t_quantile(n: int) -> float:
    """97.5% quantile of Student's t for the mean of n values; NaN for one, which has no spread.

    Example:
      >>> round(t_quantile(4), 3), t_quantile(1)
      (3.182, nan)
    """
    return float(stdtrit(n - 1, 0.975)) if n > 1 else math.nan


def wilson(mean: float, n: float) -> tuple[float, float]:
    """95% interval of a proportion, by Wilson's score method.

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),   z = 1.96

    Args:
      mean: p, the proportion of successes, in [0, 1].
      n: Number of independent trials; need not be an integer.

    Returns:
      Lower and upper bounds, within [0, 1].

    Raises:
      ValueError: If ``mean`` is not in [0, 1] or ``n`` is not above 0.

    Example:
      >>> low, high = wilson(0.5, 40)
      >>> round(low, 4), round(high, 4)
      (0.352, 0.648)

    References:
      Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    checks.check_positive("wilson", n=n)
    if not 0 <= mean <= 1:
        raise ValueError(f"wilson: mean must be in [0, 1]; got {mean:g}.")
    z2 = Z * Z
    center = mean + z2 / (2 * n)
    spread = Z * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    low, high = (center - spread) / (1 + z2 / n), (center + spread) / (1 + z2 / n)
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))
