"""Checks of sizes, token ids and of the arrays of the host's rules, whose values are known."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.core import checks

_INT32 = 2**31


def check_sizes(function: str, **values) -> None:
    """Raises unless every value is an integer above 0 of 32 bits."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{function}: {name} must be an integer; got {value!r}.")
        checks.check_positive(function, **{name: value})
        if value >= _INT32:
            raise ValueError(f"{function}: {name} must be below 2**31; got {value}.")


def check_spread(start: str, count: int, noun: str, shards: int) -> None:
    """Raises, in a sentence that begins with ``start``, unless S devices have equally many."""
    if count % shards:
        raise ValueError(
            f"{start}: {count} {noun} cannot be spread over the {shards} devices of the mesh axes "
            "data, fsdp and expert."
        )


def check_tokens(start: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises, in a sentence that begins with ``start``, unless all are ids of the vocabulary."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        ids = np.zeros(())
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"{start} must be a list of token ids; got {str(tokens)[:40]}.")
    if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
        raise ValueError(f"{start} holds token {wrong[0]}, outside the vocabulary of {vocab_size}.")


def check_ids(function: str, **array) -> np.ndarray:
    """As int32; raises unless it holds integers from 0 to 2**31 - 1."""
    ((name, x),) = array.items()
    x = np.asarray(x)
    if not x.size:
        return x.astype(np.int32)
    if x.dtype.kind not in "iu":
        raise TypeError(
            f"{function}: {name} must hold integers of 32 bits; got {x.dtype} of shape {x.shape}."
        )
    if len(wrong := x[(x < 0) | (x >= _INT32)]):
        raise ValueError(f"{function}: {name} must be from 0 to 2**31 - 1; got {wrong[0]}.")
    return x.astype(np.int32)


def counts(function: str, **arrays) -> list[np.ndarray]:
    """Each as int64; raises unless it holds integers from 0."""
    converted = []
    for name, x in arrays.items():
        x = np.asarray(x)
        if x.size:  # An empty list becomes an array of floats.
            checks.check_integer(function, **{name: x})
            if x.min() < 0:
                raise ValueError(f"{function}: {name} must not be negative; got {x.min()}.")
        converted.append(x.astype(np.int64))
    return converted


def check_limits(function: str, limits: np.ndarray, **like) -> None:
    """Raises unless ``max_new_tokens`` is one number or has the shape of another array."""
    ((name, x),) = like.items()
    if limits.shape not in ((), x.shape):
        raise ValueError(
            f"{function}: max_new_tokens must be one number or have the shape of {name} {x.shape}; "
            f"got {limits.shape}."
        )


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
