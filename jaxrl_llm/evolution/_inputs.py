"""Checks that the functions of this package share."""

import math
import numbers

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks


def check_at_least(function: str, least: int, **values) -> None:
    """Raises unless every value (None is skipped) is an integer of at least ``least``."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be an integer; got {value!r}.")
        if value < least:
            raise ValueError(f"{function}: {name} must be at least {least}; got {value}.")


def check_matrix(function: str, shape: tuple[int, ...], rank: int, name: str = "shape") -> None:
    """Raises ValueError unless ``shape`` is that of a matrix whose rank can be ``rank``."""
    if len(shape) != 2:
        raise ValueError(f"{function}: {name} must be that of a matrix; got {tuple(shape)}.")
    check_at_least(function, 1, rank=rank)
    if rank > min(shape):
        remedy = "Lower the rank"
        if function == "perturb":  # a model takes full noise only for its biases and norms
            remedy += ", freeze the leaf by a rule, or give it full noise"
        elif name != "shape":
            remedy += ", or freeze the leaf by a rule"
        raise ValueError(
            f"{function}: rank must be at most the smaller side of {name} {tuple(shape)}; "
            f"got {rank}. {remedy}."
        )


def check_matrices(function: str, shape: tuple[int, ...], rank: int, name: str) -> None:
    """As :func:`check_matrix`, also for a stack of matrices ``[E, a, b]``."""
    check_matrix(function, shape[1:] if len(shape) == 3 else shape, rank, name)


def check_members(function: str, members: Array) -> None:
    """Raises TypeError unless the ids of members are integers."""
    checks.check_min_rank(function, 0, members=members)
    checks.check_integer(function, members=members)


def population(function: str, fitness: Array, *, pairs: bool) -> Array:
    """Fitness of all members as float32 ``[N]``; raises unless they form pairs where they must."""
    checks.check_min_rank(function, 1, fitness=fitness)
    checks.check_float(function, fitness=fitness)
    shape = jnp.shape(fitness)
    if math.prod(shape) == 0:
        raise ValueError(f"{function}: fitness must be of at least one member; got shape {shape}.")
    if pairs and shape[-1] % 2:
        where = "a group would end inside a pair" if len(shape) > 1 else "one has no partner"
        raise ValueError(
            f"{function}: fitness must be of an even number of members, two of each pair; "
            f"got shape {shape}, so that {where}."
        )
    return jnp.asarray(fitness, jnp.float32).reshape(-1)
