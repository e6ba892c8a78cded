"""Functions of arrays as one program each, where eager JAX would compile every operation."""

import functools

import jax
import numpy as np


def compiled(function):
    """The function, compiled once for each set of options and shapes.

    Arrays and trees of them are arguments of the program; numbers, texts and None are options.
    """

    @functools.wraps(function)
    def call(*args, **options):
        values = {f"{i}": x for i, x in enumerate(args)} | options
        arrays = {k: x for k, x in values.items() if _holds_arrays(x)}
        fixed = tuple((k, type(x), x) for k, x in values.items() if k not in arrays)
        try:
            program = _program(function, fixed)
        except TypeError:  # an option that cannot be hashed, such as a wrong one
            return function(*args, **options)
        return program(arrays)

    return call


def _holds_arrays(value):
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(x, (jax.Array, np.ndarray)) for x in leaves)


@functools.lru_cache(maxsize=256)
def _program(function, fixed):
    def run(arrays):
        values = arrays | {k: x for k, _, x in fixed}
        places = [values.pop(str(i)) for i in range(sum(k.isdigit() for k in values))]
        return function(*places, **values)

    return jax.jit(run)
