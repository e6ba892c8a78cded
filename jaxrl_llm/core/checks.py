"""Checks of shapes, dtypes and options at trace time, each with a one-sentence error.

They read only static properties, so they cost nothing in a compiled program and work under ``jit``,
``vmap`` and ``grad``. Values (a NaN reward, a token outside the vocabulary) are checked on the
host, where a rollout becomes a training batch.

``function`` is the name at the start of the message. Arrays, numbers and options are passed by
name; None is skipped where it is allowed. Only concrete numbers are checked: traced and batched
numbers pass. ``finite`` rejects infinity, which otherwise means no bound.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np


def _shape(x) -> tuple[int, ...]:
    return tuple(jnp.shape(x))


def _axes(rank: int) -> str:
    return "1 axis" if rank == 1 else f"{rank} axes"


# Kinds of NumPy arrays that jax has no dtype for: objects, text, bytes, dates and durations.
_NO_NUMBERS = frozenset("OUSMm")


def _check_array(function: str, name: str, x) -> None:
    """Raises TypeError for a value that jax does not accept as an array."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic, numbers.Number)) or hasattr(x, "dtype"):
        if getattr(getattr(x, "dtype", None), "kind", "") in _NO_NUMBERS:
            raise TypeError(
                f"{function}: {name} must hold numbers; got an array of {np.asarray(x).dtype}."
            )
        return
    raise TypeError(f"{function}: {name} must be an array; got {type(x).__name__}.")


def check_rank(function: str, rank: int, **arrays) -> None:
    """Raises ValueError unless every array has exactly ``rank`` axes."""
    for name, x in arrays.items():
        _check_array(function, name, x)
        try:
            chex.assert_rank(x, rank)
        except AssertionError as error:
            raise ValueError(
                f"{function}: {name} must have {_axes(rank)}; got shape {_shape(x)}."
            ) from error


def _check_min_rank(function: str, rank: int, arrays) -> None:
    for name, x in arrays.items():
        _check_array(function, name, x)
        if len(_shape(x)) < rank:
            raise ValueError(
                f"{function}: {name} must have at least {_axes(rank)}; got shape {_shape(x)}."
            )


def check_min_rank(function: str, rank: int, **arrays) -> None:
    """Raises ValueError unless every array has at least ``rank`` axes."""
    _check_min_rank(function, rank, arrays)


def _check_same_shape(function: str, arrays) -> None:
    present = {name: x for name, x in arrays.items() if x is not None}
    for name, x in present.items():
        _check_array(function, name, x)
    if len({_shape(x) for x in present.values()}) > 1:
        shapes = ", ".join(f"{name} {_shape(x)}" for name, x in present.items())
        raise ValueError(f"{function}: these must have the same shape: {shapes}.")


def check_same_shape(function: str, **arrays) -> None:
    """Raises ValueError unless all arrays share one shape."""
    _check_same_shape(function, arrays)


def check_shape(function: str, name: str, array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless ``array`` has exactly ``shape``."""
    _check_array(function, name, array)
    if _shape(array) != tuple(shape):
        raise ValueError(f"{function}: {name} must have shape {tuple(shape)}; got {_shape(array)}.")


def _check_dtype(function: str, must: str, dtype, arrays) -> None:
    """Raises TypeError unless the dtype of every array is a kind of ``dtype``."""
    for name, x in arrays.items():
        if x is None:
            continue
        _check_array(function, name, x)
        if not jnp.issubdtype(jnp.result_type(x), dtype):
            raise TypeError(
                f"{function}: {name} must {must}; got {jnp.result_type(x)} of shape {_shape(x)}."
            )


def check_bool(function: str, **masks) -> None:
    """Raises TypeError unless every mask is bool."""
    _check_dtype(function, "be bool, True = keep", jnp.bool_, masks)


def check_float(function: str, **arrays) -> None:
    """Raises TypeError unless every array is floating point."""
    _check_dtype(function, "be floating point", jnp.floating, arrays)


def check_integer(function: str, **arrays) -> None:
    """Raises TypeError unless every array holds integers."""
    _check_dtype(function, "hold integers", jnp.integer, arrays)


def check_arrays(function: str, arrays: Mapping[str, typing.Any], **masks) -> None:
    """Raises unless arrays are floating point, with at least one axis and the shape of the masks.

    A wrong dtype raises TypeError, a wrong shape ValueError.
    """
    _check_min_rank(function, 1, {name: x for name, x in arrays.items() if x is not None})
    _check_dtype(function, "be floating point", jnp.floating, arrays)
    _check_same_shape(function, {**arrays, **masks})


def check_alike(function: str, arrays: Mapping[str, typing.Any], **masks) -> None:
    """As :func:`check_arrays`, but scalars pass too."""
    _check_dtype(function, "be floating point", jnp.floating, arrays)
    _check_same_shape(function, {**arrays, **masks})


def check_mask(function: str, mask, *, name: str = "mask") -> None:
    """Raises TypeError unless ``mask``, the argument ``name``, is a bool array, not None."""
    if mask is None:
        raise TypeError(f"{function}: {name} must be a bool array, True = keep; got None.")
    check_bool(function, **{name: mask})


def check_coefficients(function: str, of: str, shape: tuple[int, ...], **values) -> None:
    """Raises ValueError unless each value is a scalar or broadcasts to ``shape`` at the same rank.

    One of fewer axes would broadcast along the last ones: a value per prompt, ``[P]``, over tokens.
    ``of`` names in the error what has the shape.
    """
    for name, value in values.items():
        got = np.shape(value)
        broadcasts = len(got) == len(shape) and all(
            size in (1, full) for size, full in zip(got, shape, strict=True)
        )
        if got and not broadcasts:
            raise ValueError(
                f"{function}: {name} must be a number, or an array with the axes, full or 1, of "
                f"{of} {shape}; got {got}."
            )


def check_option(function: str, name: str, value, allowed: Iterable) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``; suggests the nearest of them."""
    allowed = tuple(allowed)
    # True == 1, so a bool matches only a bool; an array has no single truth value.
    truth = isinstance(value, (bool, np.bool_))
    same = [a for a in allowed if isinstance(a, bool) == truth]
    if isinstance(value, Hashable) and value in same:
        return
    by_text = {str(a).lower(): a for a in allowed}
    near = difflib.get_close_matches(str(value).lower(), by_text, n=1)
    hint = f" Did you mean {by_text[near[0]]!r}?" if near else ""
    listed = ", ".join(map(repr, allowed))
    if near and len(allowed) > 20:  # the suggestion is not to drown in them
        listed = f"{len(allowed)} names"
    raise ValueError(f"{function}: {name} must be one of {listed}; got {value!r}.{hint}")


def check_no_effect(function: str, because: str, **options) -> None:
    """Raises ValueError if an option is set where it would be ignored.

    ``because`` is the reason in words: "with scale='none'".
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{function}: {name}={value!r} has no effect {because}; leave it out.")


# No option takes a finite number beyond this one.
_LARGEST = 1e18


def _concrete(function: str, values, finite: bool = False) -> Iterator[tuple[str, float]]:
    """The concrete numbers with their names; traced and batched numbers are skipped."""
    for name, value in values.items():
        if value is None:
            continue
        real = isinstance(value, numbers.Real)
        truth = isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_
        if truth or not (real or isinstance(value, (jax.Array, np.ndarray, np.generic))):
            raise TypeError(f"{function}: {name} must be a number; got {value!r}.")
        if not real and (isinstance(value, jax.core.Tracer) or value.shape != ()):
            continue
        number = float(value)
        if abs(number) > _LARGEST and (finite or math.isfinite(number)):
            what = "be finite" if math.isinf(number) else f"be at most {_LARGEST:g}"
            raise ValueError(f"{function}: {name} must {what}; got {number:g}.")
        yield name, number


def check_real(function: str, *, finite: typing.Any = False, **values) -> None:
    """Raises unless every value is a number: not a bool, not NaN, and at most 1e18 if finite."""
    for name, number in _concrete(function, values, finite):
        if math.isnan(number):
            raise ValueError(f"{function}: {name} must be a number; got nan.")


def check_bound(function: str, parameters: Mapping[str, inspect.Parameter], options) -> None:
    """Raises unless each option annotated as a number is a number, when a function is bound.

    A bool raises TypeError; NaN and a finite number beyond 1e18 raise ValueError. Infinity passes,
    as a limit without effect. The function checks its other conditions when it runs.
    """
    for name, value in options.items():
        kind = parameters[name].annotation if name in parameters else None
        kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if value is None or not {int, float} & {k for k in kinds if isinstance(k, type)}:
            continue
        if bool in kinds or not isinstance(value, (numbers.Real, np.bool_)):
            continue
        check_real(function, **{name: value})


def check_positive(function: str, *, finite: typing.Any = False, **values) -> None:
    """Raises ValueError unless every number is above zero."""
    for name, number in _concrete(function, values, finite):
        if not number > 0:
            raise ValueError(f"{function}: {name} must be above 0; got {number:g}.")


def check_non_negative(function: str, *, finite: typing.Any = False, **values) -> None:
    """Raises ValueError unless every number is zero or above."""
    for name, number in _concrete(function, values, finite):
        if math.isnan(number) or number < 0:
            raise ValueError(f"{function}: {name} must not be negative; got {number:g}.")


def check_numbers(function: str, record) -> None:
    """Raises unless every numeric field of a dataclass holds a number of its type and range.

    A field of type int takes integers of 32 bits; a field of type float takes what float32 can
    hold. True is neither. In a tuple of numbers, each number is checked. Fields of other types, and
    None where the type allows it, pass. A wrong type raises TypeError; a non-finite or too large
    number raises ValueError.
    """

    def check(name: str, value: typing.Any, kinds: tuple) -> None:
        kind = next((k for k in (int, float) if k in kinds), None)
        if kind is None:
            return
        numeric = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        what = "an integer" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, numeric):
            raise TypeError(f"{function}: {name} must be {what}; got {value!r}.")
        most = 2**32 - 1 if kind is int else float(np.finfo(np.float32).max)
        if not -most <= value <= most:  # NaN too
            raise ValueError(
                f"{function}: {name} must be finite and at most {most:.10g}; got {value!r}."
            )

    for name, value, kinds in _typed_fields(record):
        inner = [typing.get_args(k) for k in kinds if typing.get_origin(k) is tuple]
        if inner and isinstance(value, tuple):
            for each in value:
                check(name, each, inner[0])
        else:
            check(name, value, kinds)


def check_sections(function: str, record) -> None:
    """Raises TypeError unless a field typed as a dataclass holds one, or None where allowed."""
    for name, value, kinds in _typed_fields(record):
        sections: typing.Any = tuple(kind for kind in kinds if kind is not type(None))
        if all(map(dataclasses.is_dataclass, sections)) and not isinstance(value, sections):
            names = " or ".join(section.__name__ for section in sections)
            raise TypeError(f"{function}: {name} must be of type {names}; got {value!r}.")


def _typed_fields(record) -> Iterator[tuple[str, typing.Any, tuple]]:
    """Name, value and types of each field of a dataclass, without optional fields that are None."""
    for field in dataclasses.fields(record):
        value, kinds = getattr(record, field.name), (field.type,)
        if isinstance(field.type, types.UnionType):
            kinds = typing.get_args(field.type)
        if value is not None or type(None) not in kinds:
            yield field.name, value, kinds


def check_count(function: str, *, most: int | None = None, **values) -> None:
    """Raises ValueError unless every value is an integer from 1 to ``most``."""
    for name, value in values.items():
        integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not integer or value < 1 or (most is not None and value > most):
            within = "above 0" if most is None else f"from 1 to {most}"
            raise ValueError(f"{function}: {name} must be an integer {within}; got {value!r}.")


# Eleven days: some operating system waits take no more than three weeks.
_LONGEST_WAIT = 1e6


def check_seconds(function: str, **values) -> None:
    """Raises unless every value is a number of seconds to wait, above 0 and at most 1e6."""
    check_positive(function, finite=True, **values)
    for name, number in _concrete(function, values):
        if number > _LONGEST_WAIT:
            raise ValueError(
                f"{function}: {name} must be at most {_LONGEST_WAIT:,.0f} seconds; got {number:g}."
            )


def check_key(function: str, key) -> None:
    """Raises TypeError unless ``key`` is one typed key."""
    typed = jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key)
    if not typed or key.shape != ():
        raise TypeError(f"{function}: key must be one typed key, made by jax.random.key(seed).")


def check_seed(function: str, **values) -> None:
    """Raises unless every value is an integer from 0 to 2^64 - 1."""
    for name, seed in values.items():
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"{function}: {name} must be an integer; got {seed!r}.")
        if not 0 <= seed < 2**64:
            raise ValueError(f"{function}: {name} must be from 0 to 2**64 - 1; got {seed}.")


def check_token_ids(function: str, **values) -> None:
    """Raises unless every value holds integers (not bools) from 0 to 2^31 - 1.

    Other types raise TypeError; integers out of range raise ValueError.
    """
    for name, ids in values.items():
        if not isinstance(ids, Iterable):
            raise TypeError(f"{function}: {name} must be a list of token ids; got {ids!r}.")
        for each in ids:
            number = np.asarray(each)
            if number.shape != () or number.dtype.kind not in "iu":
                raise TypeError(f"{function}: {name} must hold integers of 32 bits; got {each!r}.")
            if not 0 <= number < 2**31:
                raise ValueError(
                    f"{function}: {name} must be from 0 to 2**31 - 1; got {number.item()}."
                )


def check_share(function: str, *, zero: bool = True, one: bool = True, **values) -> None:
    """Raises ValueError unless every number is in [0, 1]; ``zero`` and ``one`` admit the ends."""
    for name, number in _concrete(function, values):
        if 0 < number < 1 or (zero and number == 0) or (one and number == 1):
            continue
        within = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise ValueError(f"{function}: {name} must be in {within}; got {number:g}.")
