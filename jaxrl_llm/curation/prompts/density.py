"""Density ratios: how much more often a prompt occurs with good responses than with bad ones."""

import numpy as np

from jaxrl_llm.core import checks

__all__ = ["density_ratios"]

_STEPS = 50  # of Newton; a few are enough


def density_ratios(
    embeddings: np.ndarray,
    desirable: np.ndarray,
    *,
    low: float = 0.5,
    high: float = 10.0,
    penalty: float = 1.0,
) -> np.ndarray:
    """Density ratios of prompts, by a logistic classifier of the label from the prompt.

        p = sigmoid(w e + b),   w, b = argmin sum_i c_i log loss_i + penalty |w|^2 / 2
        ratio = p / (1 - p), in [low, high];   c_i = N / (2 rows of the class of i)

    Bad responses with these weights have the same distribution of prompts as the good ones. If all
    prompts occur equally with both, each ratio is 1.

    Args:
      embeddings: ``[N, D]``, floating point, finite, such as :func:`hashed_words` of each prompt.
      desirable: bool ``[N]``, with at least one of each.
      low: The smallest ratio, above 0.
      high: The largest ratio.
      penalty: L2 penalty of the classifier, not negative.

    Returns:
      ``[N]`` float32.

    Raises:
      ValueError: If a shape is wrong, a number is not finite, or all labels are equal.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> both = np.array([[1.0], [1.0], [-1.0], [-1.0]])
      >>> jr.curation.density_ratios(both, np.array([True, False, True, False])).tolist()
      [1.0, 1.0, 1.0, 1.0]

    References:
      Jung et al., BCO (arXiv:2404.04656), matching of the underlying distributions; the classifier
      and the bounds are those of TRL 1.13. Its embeddings are of a model.
    """
    name = "density_ratios"
    x, y = np.asarray(embeddings, np.float64), np.asarray(desirable)
    if x.ndim != 2 or y.shape != x.shape[:1] or not np.isfinite(x).all():
        raise ValueError(
            f"{name}: embeddings must be finite [N, D] and desirable [N]; got {x.shape}, {y.shape}."
        )
    if y.dtype != bool or y.all() or not y.any():
        raise ValueError(f"{name}: desirable must be bool, with rows of both classes.")
    checks.check_positive(name, finite=True, low=low, high=high)
    checks.check_non_negative(name, finite=True, penalty=penalty)
    if low > high:
        raise ValueError(f"{name}: low must be at most high; got {low:g} and {high:g}.")
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    counts = np.where(y, len(y) / (2 * y.sum()), len(y) / (2 * (~y).sum()))
    ridge = penalty * np.ones(x.shape[1])
    ridge[-1] = 0.0
    theta = np.zeros(x.shape[1])
    for _ in range(_STEPS):
        p = 1.0 / (1.0 + np.exp(-np.clip(x @ theta, -500, 500)))
        gradient = x.T @ (counts * (p - y)) + ridge * theta
        curvature = (x * (counts * p * (1 - p))[:, None]).T @ x + np.diag(ridge + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        theta -= step
        if np.abs(step).max() < 1e-9:
            break
    ratio = np.exp(np.clip(x @ theta, -500, 500))
    return np.clip(ratio, low, high).astype(np.float32)
