"""Cheap ways to call the library and to make arrays.

An operation outside of a program is a program of its own for every shape. To compile them costs far
more than to run all tests.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from jaxrl_llm.core.compose import Bound, Transform

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
_Jitted = type(jax.jit(len))

# A law over a few drawn examples, the same in every run. The fixture is that of ``for_each``.
quick = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def compiled(function: Callable) -> Callable:
    """``function`` in one program, with NumPy arrays back.

    What is no array is an option of the program, and so is a number in an array, which ``function``
    can check as it does outside of a program. Inside another program or gradient ``compiled`` adds
    nothing but the program. A call without an array runs as it is.
    """
    if isinstance(function, _Jitted):  # knows its own options
        return functools.wraps(function)(
            lambda *args, **options: _plain(function(*args, **options))
        )
    programs = {}

    @functools.wraps(function)
    def call(*args, **options):
        leaves, tree = jax.tree.flatten((args, options))
        moving = [_moves(x) for x in leaves]
        if not any(moving):
            return _with_compiled_update(function(*args, **options))
        fixed = [None if moves else x for x, moves in zip(leaves, moving, strict=True)]
        key = (tree, *map(_key, fixed), *moving)
        if key not in programs:

            def run(arrays):
                arrays = iter(arrays)
                both = [next(arrays) if m else x for x, m in zip(fixed, moving, strict=True)]
                args, options = jax.tree.unflatten(tree, both)
                return function(*args, **options)

            run.__name__ = getattr(function, "__name__", "run")
            programs[key] = jax.jit(run, inline=True)
        out = programs[key]([x for x, m in zip(leaves, moving, strict=True) if m])
        return _plain(out)

    return call


def grad(function: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    """``jax.grad`` in one program."""
    return compiled(jax.grad(function, argnums, has_aux=has_aux))


def value_and_grad(function: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    """``jax.value_and_grad`` in one program."""
    return compiled(jax.value_and_grad(function, argnums, has_aux=has_aux))


def compile_names(names: dict[str, Any]) -> dict[str, Any]:
    """Of the names of a module, what is of the library and can be called, ``compiled``.

    That may stand in a dictionary, or have been jitted or partially applied.
    """
    return {key: _of_library(value) for key, value in names.items() if _is_ours(value)}


def _is_ours(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_ours, value.values())) and not any(map(inspect.ismodule, value.values()))
    if isinstance(value, functools.partial):
        return _is_ours(value.func)
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith("jaxrl_llm")
    if isinstance(value, Bound | Transform | _Jitted):
        return True
    return inspect.isfunction(value) and value.__module__.startswith("jaxrl_llm")


def _of_library(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _of_library(x) if _is_ours(x) else x for k, x in value.items()}
    return _with_compiled_update(value) if isinstance(value, Transform) else _compiled_once(value)


def _with_compiled_update(value: Any) -> Any:
    """A transform with its update ``compiled``; equal transforms stay equal."""
    if isinstance(value, Transform):
        return value._replace(update=_compiled_once(value.update))
    return value


@functools.cache
def _compiled_once(value: Any) -> Any:
    return _Module(value) if isinstance(value, types.ModuleType) else compiled(value)


class _Module:
    """A module whose functions are compiled."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _of_library(value) if _is_ours(value) else value


def _moves(leaf: Any) -> bool:
    """An argument of the program: an array with axes, a key, or a value of another program."""
    if isinstance(leaf, jax.core.Tracer):
        return True
    if not isinstance(leaf, jax.Array | np.ndarray):
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return True
    return leaf.ndim > 0 and leaf.dtype.kind not in "OSU"


def _key(leaf: Any) -> Any:
    """What tells options apart, of which 1, 1.0 and True are three, and 0.0 and -0.0 two."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
        return type(leaf), str(getattr(leaf, "dtype", "")), repr(leaf)
    return type(leaf), leaf


def _plain(out: Any) -> Any:
    """NumPy arrays in place of JAX's, but for keys and values of another program."""

    def plain(leaf):
        traced = isinstance(leaf, jax.core.Tracer)
        if traced or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return np.asarray(leaf)

    return jax.tree.map(plain, out)


@pytest.fixture(autouse=True, scope="module")
def one_program_a_call(request):
    """While a file of tests runs, what it imported from the library is ``compiled``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in compile_names(vars(request.module)).items():
            patch.setattr(request.module, name, value)
        yield


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def put(array: Any, place: Any, value: Any) -> np.ndarray:
    """A copy of ``array`` with ``value`` at ``place``."""
    copy = np.array(array)
    copy[place] = value
    return copy
