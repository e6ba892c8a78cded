"""The slope of a float64 loss, which a gradient must have."""

from collections.abc import Callable

import numpy as np


def expect_derivative(
    grad, loss: Callable[[np.ndarray], float], logp, *, rtol: float, atol: float
) -> None:
    """Holds a gradient at ``logp`` to central differences of the loss along 12 random directions.

    Along each entry alone they would cost the loss as many times as there are tokens.
    """
    rng, step = np.random.default_rng(0), 1e-6
    for _ in range(12):
        direction = rng.normal(size=logp.shape)
        up, down = (loss(logp.astype(np.float64) + s * step * direction) for s in (1, -1))
        slope = (up - down) / (2 * step)
        np.testing.assert_allclose(np.sum(grad * direction), slope, rtol=rtol, atol=atol)
