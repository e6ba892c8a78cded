"""A state as Orbax stores it: plain arrays by name, and the fingerprint of their run."""

import contextlib
import hashlib
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.lora import Adapted, LoRAConfig
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.train.checkpoint.config_text import comparable, config_text, without_precision
from jaxrl_llm.train.state import TrainState

# Ends the name of a checkpoint that is being written; Orbax adds further names behind it.
UNFINISHED = ".unfinished"

FORMAT = 5
_KNOWN = ("critic", "reference", "earlier", "subagent")


class Extras(NamedTuple):
    """Arrays that are saved with a state and are not part of it; reading them needs no shapes."""

    arrays: ArrayTree  # NumPy arrays in dicts and lists
    notes: Any  # anything that JSON can hold


def shapes_of(state: TrainState) -> TrainState:
    """The state with shapes, dtypes and shardings in place of its large arrays.

    :meth:`Checkpoints.restore` needs no more, so the arrays can be freed before it reads others.
    """
    names = ("params", "opt_state", "algo_state", "parts")
    return state._replace(**{k: jax.tree.map(abstract, getattr(state, k)) for k in names})


def fingerprint(model: Model, state: TrainState) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that reads it."""
    return {
        "format": FORMAT,
        "model": config_text(model.config),
        "params": shapes_digest(state.params),
        "state": shapes_digest(
            (
                state.opt_state,
                state.algo_state,
                state.critic,
                state.reference,
                state.collector_state,
                state.earlier,
                state.subagent,
                *([further] if (further := _parts(state, known=False)) else []),
            )
        ),
    }


def base_fingerprint(params: ArrayTree, config: LoRAConfig) -> dict[str, str]:
    """Identifies the frozen model of an adapter, which is not in the checkpoint; else empty."""
    if not isinstance(params, Adapted):
        return {}
    return {"lora": repr(config), "base": values_digest(params.base)}


def reference_fingerprint(params: ArrayTree, reference: ArrayTree | None) -> dict[str, str]:
    """Identifies a frozen reference, which is not in the checkpoint; else empty."""
    # That of an adapter is its base, which has a digest.
    if reference is None or isinstance(params, Adapted) and reference is params.base:
        return {}
    return {"reference": values_digest(reference)}


class OtherRun(Exception):
    """The checkpoint is complete, but not of this run."""


def check_same_run(path: Path, metadata: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises OtherRun with one sentence about the first difference.

    Raises:
      ValueError: If an entry of the fingerprint is missing.
    """
    for key, value in wanted.items():
        if key not in metadata and key in ("reference", "teacher"):
            continue  # of a run that had none
        if key not in metadata:
            raise ValueError("it does not say which model it belongs to")
        stored = metadata[key]
        if key == "model":
            value, stored = comparable(value), comparable(str(stored))
            if without_precision(value) == value:
                stored = without_precision(stored)
        if stored != value:
            what = {
                "format": f"was written by another version: it has format {stored}, "
                f"this one reads {value}",
                "model": f"belongs to another model: {stored}, not {value}",
                "params": "belongs to another model or adapter: parameter names or shapes differ",
                "state": "was made with another optimizer or recipe than this run has",
                "questions": "was made with other questions, or another split or order of them",
                "seed": f"was made with seed {stored}, this run has {value}",
                "base": "belongs to an adapter of another model, or of one in another precision: "
                "the frozen parameters differ",
                "reference": "was made with another reference: the parameters of the model that "
                "the run loads differ",
                "teacher": "was made with another teacher, or with one in another precision: the "
                "parameters or scores that the run loads differ",
            }.get(key, f"was made with {key} {stored!r}, this run has {value!r}")
            raise OtherRun(f"The checkpoint {str(path)!r} {what}.")


def shapes_digest(tree: ArrayTree) -> str:
    """A digest of the paths, shapes and dtypes of a tree, the same on every mesh."""
    lines = [
        f"{trees.path_str(path)} {tuple(x.shape)} {x.dtype}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def values_digest(params: ArrayTree) -> str:
    """A short digest of the values of parameters, the same on every mesh.

    Integer sums over the bits of each array, made on the devices that hold it: no array is moved,
    and their order does not matter.
    """
    lines = [
        f"{trees.path_str(path)} {x.shape} {x.dtype} {_bit_sums(x).tolist()}"
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@jax.jit
def _bit_sums(x: Array) -> Array:
    """Two sums of the bits of an array, weighted by place, modulo 2^32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    bits, place = bits.astype(jnp.uint32), jnp.uint32(1)
    for axis, size in enumerate(x.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place = place * jnp.uint32(size) + index
    place = (place ^ (place >> 15)) * jnp.uint32(0x2C1B3C6D)
    place = (place ^ (place >> 12)) * jnp.uint32(0x297A2D39) | 1
    return jnp.stack([jnp.sum(bits * place), jnp.sum((bits ^ place) * (place >> 7 | 1))])


def to_arrays(state: TrainState) -> dict[str, Any]:
    """The state as plain arrays: a typed key as its data, the integers of the cursor as arrays."""
    # The frozen parameters of an adapter are loaded anew; a digest stands for them.
    tree = {k: x for k, x in state._asdict().items() if k not in ("base", "parts")}
    # A checkpoint stores the states of these parts next to the parameters, two of them always.
    tree |= {"critic": (), "reference": ()} | _parts(state, known=True)
    if further := _parts(state, known=False):
        tree["parts"] = further
    tree["key"] = jax.random.key_data(state.key)
    tree["collector_state"] = jax.tree.map(np.asarray, state.collector_state)
    tree["data_cursor"] = [np.asarray(x, np.int64) for x in jax.tree.leaves(state.data_cursor)]
    return tree


def from_arrays(tree: dict[str, Any], like: TrainState) -> TrainState:
    """The inverse of :func:`to_arrays`, for a state with the structure of ``like``."""
    key = jax.random.wrap_key_data(tree["key"], impl=jax.random.key_impl(like.key))
    leaves = [int(x) for x in tree["data_cursor"]]
    cursor = jax.tree.unflatten(jax.tree.structure(like.data_cursor), leaves)
    return TrainState(
        params=tree["params"],
        opt_state=tree["opt_state"],
        algo_state=tree["algo_state"],
        key=key,
        step=tree["step"],
        data_cursor=cursor,
        base=like.base,
        collector_state=tree["collector_state"],
        parts={k: tree[k] if k in _KNOWN else tree["parts"][k] for k in like.parts},
    )


def _parts(state: TrainState, *, known: bool) -> dict[str, ArrayTree]:
    """The states of parts that the format names, or of all others."""
    return {name: x for name, x in state.parts.items() if (name in _KNOWN) is known}


def abstract(x):
    """Shape, dtype and sharding of an array; a NumPy array is returned as it is."""
    if isinstance(x, np.ndarray):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@contextlib.contextmanager
def orbax(*, partial: bool = False, seconds: float | None = None):
    """Orbax without compression, since weights hardly compress, and without its log.

    A save of several processes ends after ``seconds``, so as to hear of one that is lost. In one
    process we end a save that stands still, by a clock that no one corrects.
    """
    from orbax.checkpoint import v1 as ocp

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_orbax)
    if not isinstance(sys.unraisablehook, _Quiet):
        sys.unraisablehook = _Quiet(sys.unraisablehook)
    options = ocp.options
    limit: Any = None if seconds is None or jax.process_count() == 1 else int(seconds)
    context = ocp.Context(
        # Folders are made before anything waits for them: where they cannot be, its threads would
        # wait for minutes, and the program for them.
        async_options=options.AsyncOptions(
            create_directories_asynchronously=False, timeout_secs=limit
        ),
        array_options=options.ArrayOptions(
            saving=options.ArrayOptions.Saving(use_compression=False)
        ),
        pytree_options=options.PyTreeOptions(
            loading=options.PyTreeOptions.Loading(partial_load=partial)
        ),
    )
    with context:
        yield ocp


def _not_orbax(record: logging.LogRecord) -> bool:
    """Filters out Orbax: its errors arrive as exceptions, and its lines would bury our sentence."""
    text = record.getMessage() if record.name == "asyncio" else record.pathname
    if record.name == "asyncio" and record.exc_info:  # a write that nothing awaits after another
        text += "".join(traceback.format_exception(*record.exc_info))
    return not any(x in text for x in ("orbax", "tensorstore", "OCDBT", "zarr", UNFINISHED))


class _Quiet:
    """A hook for errors that no one can catch, without the pages of a failed save.

    The first of its writes that fails ends its event loop, and each of the others then calls the
    closed one from outside of Python.
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        outside = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        if not (outside and str(unraisable.exc_value) == "Event loop is closed"):
            self._hook(unraisable)
