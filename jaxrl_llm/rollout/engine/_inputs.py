"""Checks of the host's rules, whose arrays are NumPy arrays with known values."""

import numpy as np

from jaxrl_llm.core import checks


def counts(function: str, **arrays) -> list[np.ndarray]:
    """Each as int64; raises unless it holds integers from 0."""
    converted = []
    for name, x in arrays.items():
        x = np.asarray(x)
        if x.size:  # NumPy takes an empty list for floats.
            checks.check_integer(function, **{name: x})
            if x.min() < 0:
                raise ValueError(f"{function}: {name} must not be negative; got {x.min()}.")
        converted.append(x.astype(np.int64))
    return converted


def flags(function: str, like: np.ndarray, **mask) -> np.ndarray | None:
    """A mask that may be None; raises unless it is bool and of the shape of ``like``."""
    ((name, x),) = mask.items()
    if x is None:
        return None
    x = np.asarray(x)
    if x.size:
        checks.check_bool(function, **{name: x})
    checks.check_shape(function, name, x, like.shape)
    return x.astype(bool)


def numbers(function: str, **array) -> np.ndarray:
    """As float64; raises if one is NaN, with its index."""
    ((name, x),) = array.items()
    x = np.asarray(x, np.float64)
    if np.isnan(x).any():
        index = tuple(np.argwhere(np.isnan(x))[0].tolist())
        raise ValueError(f"{function}: {name} must be numbers; it is NaN at {index}.")
    return x
