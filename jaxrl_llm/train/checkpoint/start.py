"""The policy that an earlier run left, as the start of another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime.files import with_home
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.train.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.train.checkpoint.checkpoints import step_of


def find_start(source: str, model: Model) -> Callable[[ArrayTree], ArrayTree]:
    """Finds the policy of an earlier run; returns a function that reads it.

    Args:
      source: ``init_from`` of a config: a run folder, whose last checkpoint is read, or the folder
        of one checkpoint.
      model: The model, in any precision.

    Returns:
      ``read(like)``: the parameters, with the shapes, dtypes and, on a mesh, shardings of ``like``.

    Raises:
      ValueError: If there is no checkpoint. ``read`` also raises it for one of another model or of
        an adapter, and CheckpointError for one that cannot be read.
    """
    told, path = f"config: init_from {source!r}", with_home(source)
    step = step_of(path)
    folder = path / "checkpoints" if step is None else path.parent
    checkpoints = Checkpoints(folder, model=model)
    try:
        checkpoints.candidates(step)
    except CheckpointError as error:
        raise ValueError(f"{told}: {error}") from error

    def read(like: ArrayTree) -> ArrayTree:
        try:
            params = checkpoints.restore_params(jax.tree.map(_stored, like), step=step)
        except CheckpointError as error:
            raise CheckpointError(f"{told}: {error}") from error
        except ValueError as error:
            more = "Of a run that trained an adapter, export the model and name it as model."
            raise ValueError(f"{told}: {error} {more}") from error
        # One leaf after the other, so that the parameters are never twice in memory.
        leaves, structure = jax.tree.flatten(params)
        del params
        for i, x in enumerate(jax.tree.leaves(like)):
            leaves[i] = jnp.array(leaves[i], x.dtype)
        return jax.tree.unflatten(structure, leaves)

    return read


def _stored(x) -> jax.ShapeDtypeStruct | np.ndarray:
    """What a checkpoint has of a parameter, as Orbax is asked for it.

    Without a mesh this is NumPy's, since arrays that Orbax makes belong to a device, for which
    programs are compiled that differ from those for new arrays.
    """
    dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
    return np.empty(x.shape, dtype)


def check_start(config: Any) -> None:
    """Raises ValueError for a run that would start from itself."""
    if config.init_from is None:
        return
    start, run = (with_home(x).absolute() for x in (config.init_from, config.run_dir))
    if run in (start, *start.parents):
        raise ValueError(
            f"config: init_from {config.init_from!r} must be another run than run_dir."
        )
