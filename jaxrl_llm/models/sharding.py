"""Where parameters and batches live on a mesh, as data.

Two small tables decide it: which logical axes each kind of parameter has, and which mesh axis
carries each logical axis. An axis that a mesh does not divide is kept whole, so the same rules
serve a laptop and a pod.
"""

import functools
import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes

AXES = ("data", "fsdp", "tensor")

# Logical axes of a parameter, by the end of its path. What is not named here is replicated.
LOGICAL: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("embed/embedding", ("vocab", "width")),
    ("head/kernel", ("vocab", "width")),
    ("attention/q/kernel", ("width", "heads")),
    ("attention/k/kernel", ("width", "kv_heads")),
    ("attention/v/kernel", ("width", "kv_heads")),
    ("attention/o/kernel", ("heads", "width")),
    ("attention/q/bias", ("heads",)),
    ("attention/k/bias", ("kv_heads",)),
    ("attention/v/bias", ("kv_heads",)),
    ("mlp/gate/kernel", ("width", "mlp")),
    ("mlp/up/kernel", ("width", "mlp")),
    ("mlp/down/kernel", ("mlp", "width")),
    ("mlp/gate/bias", ("mlp",)),
    ("mlp/up/bias", ("mlp",)),
)

# The matrices of an adapter, [in, rank] and [rank, out], are split as the kernel beside them.
_KERNELS = tuple((end, axes) for end, axes in LOGICAL if end.split("/")[0] in ("attention", "mlp"))
LOGICAL += tuple(
    entry
    for end, axes in _KERNELS
    if end.endswith("kernel")
    for entry in ((end[:-6] + "a", (axes[0], None)), (end[:-6] + "b", (None, axes[1])))
)

# Which mesh axis carries a logical axis.
RULES: dict[str, str] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "width": "fsdp",
}


def param_spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules=RULES) -> P:
    """The partition of one parameter on ``mesh``.

    Args:
      path: Where the parameter stands, as ``layers/0/mlp/up/kernel``.
      shape: Its shape.
      mesh: The mesh; axes of :data:`AXES` that it lacks count as size one.
      rules: Logical axis -> mesh axis.

    Returns:
      A ``PartitionSpec``; replicated where no rule applies or the mesh axis does not divide.
    """
    logical = next((axes for end, axes in LOGICAL if path.endswith(end)), ())
    names = []
    for size, axis in zip(shape, logical, strict=False):
        mesh_axis = rules.get(axis) if axis else None
        parts = dict(mesh.shape).get(mesh_axis, 1) if mesh_axis else 1
        names.append(mesh_axis if parts > 1 and size % parts == 0 else None)
    return P(*names)


def param_shardings(params: ArrayTree, mesh: Mesh, rules=RULES) -> ArrayTree:
    """A ``NamedSharding`` for each parameter; takes arrays or their shapes."""
    return trees.map_with_path(
        lambda path, x: NamedSharding(mesh, param_spec(path, x.shape, mesh, rules)), params
    )


def update_spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules=RULES) -> P:
    """The partition of a gradient, and of what an optimizer keeps of a parameter.

    That of the parameter, split over ``data`` as well along the first axis that allows it, so no
    two devices make the same part of an update. Vectors stay as they are.

    Args:
      path: Where it stands; its end is the parameter's own path.
      shape: Its shape.
      mesh: The mesh.
      rules: Logical axis -> mesh axis.

    Returns:
      A ``PartitionSpec``: that of :func:`param_spec` where ``data`` is 1, the leaf is a vector, or
      no axis divides.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((2, 4, 1), AXES)
      >>> list(param_spec("layers/0/mlp/up/kernel", (64, 128), mesh))
      ['fsdp', None]
      >>> list(update_spec("layers/0/mlp/up/kernel", (64, 128), mesh))
      [('fsdp', 'data'), None]

    References:
      ZeRO, stage 1 (arXiv:1910.02054).
    """
    spec = param_spec(path, shape, mesh, rules)
    sizes = dict(mesh.shape)
    if sizes.get("data", 1) == 1 or len(shape) < 2:
        return spec
    names = [*spec, *(None,) * (len(shape) - len(spec))]
    for i, (size, axis) in enumerate(zip(shape, names, strict=True)):
        if size % (sizes["data"] * sizes.get(axis, 1)) == 0:
            return P(*names[:i], (axis, "data") if axis else "data", *names[i + 1 :])
    return spec


def update_shardings(tree: ArrayTree, mesh: Mesh, rules=RULES) -> ArrayTree:
    """A ``NamedSharding`` for each leaf of gradients or an optimizer's state, or of its shape."""
    return trees.map_with_path(
        lambda path, x: NamedSharding(mesh, update_spec(path, x.shape, mesh, rules)), tree
    )


def batch_spec(mesh: Mesh) -> P:
    """The partition of a batch: its prompts over the axes ``data`` and ``fsdp``."""
    axes = tuple(a for a in ("data", "fsdp") if a in mesh.axis_names)
    return P(axes) if axes else P()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch ``[P, ...]``."""
    return NamedSharding(mesh, batch_spec(mesh))


def kv_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of keys or values ``[P, ..., Hk, ., .]``: rows as in a batch, heads as weights.

    Heads that ``tensor`` does not divide are on each of its devices.
    """
    parts = dict(mesh.shape).get("tensor", 1)
    if parts == 1 or shape[-3] % parts:
        return batch_sharding(mesh)
    rows = tuple(batch_spec(mesh)) or (None,)
    return NamedSharding(mesh, P(*rows, *(None,) * (len(shape) - 4), "tensor"))


def batch_shards(mesh: Mesh | None) -> int:
    """Over how many devices the prompts of a batch are spread; 1 without a mesh."""
    shape = {} if mesh is None else dict(mesh.shape)
    return shape.get("data", 1) * shape.get("fsdp", 1)


def on_mesh(function: Callable, mesh: Mesh | None) -> Callable:
    """The function, traced such that :func:`keep_apart` knows the mesh; itself without one."""
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*arguments, **options):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments, **options)

    return traced


def _batch_axes() -> dict[str, int]:
    """The mesh axes that spread a batch and their sizes, inside `on_mesh`; none elsewhere."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return {axis: sizes[axis] for axis in ("data", "fsdp") if sizes.get(axis, 1) > 1}


def spreads_batch() -> bool:
    """Whether this is traced for a mesh that spreads a batch, which :func:`on_mesh` says."""
    return bool(_batch_axes())


def splits_weights() -> bool:
    """Whether this is traced, inside `on_mesh`, for a mesh whose devices gather weights."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("fsdp", 1) > 1


def keep_apart(x: Array) -> Array:
    """Activations ``[P, ...]`` with their prompts on the devices of the batch, inside `on_mesh`.

    Left to itself, the compiler may give the axis ``fsdp`` to the width, as the embedding has it:
    then each device computes with its part of the weights for the whole batch.
    """
    axes = _batch_axes()
    if not axes or x.shape[0] % math.prod(axes.values()):
        return x
    return jax.lax.with_sharding_constraint(x, P(tuple(axes)))


def on_each_device(function: Callable, batch: ArrayTree, whole: ArrayTree) -> ArrayTree:
    """``function(batch, whole)`` of each device's part of a batch ``[P, ...]``, inside `on_mesh`.

    What is ``whole`` is gathered over the axes of the batch once and its gradient summed once. The
    compiler would do either in every turn of a loop inside the function.

    Args:
      function: Gives arrays ``[P, ...]``, of which each row depends on that row of the batch.
      batch: Arrays ``[P, ...]``; not split where P is no multiple of the devices.
      whole: All else that the function reads and that is differentiated or traced.
    """
    axes = _batch_axes()
    count = math.prod(axes.values())
    if not axes or any(x.shape[0] % count for x in jax.tree.leaves(batch)):
        return function(batch, whole)
    rows = P(tuple(axes))
    spread = jax.shard_map(
        function, in_specs=(rows, P()), out_specs=rows, axis_names=set(axes), check_vma=False
    )
    return spread(batch, whole)


def spread_update(grads: ArrayTree) -> ArrayTree:
    """Gradients on the devices that make their part of the update, inside `on_mesh`.

    A device then gets the sum of its part alone, and what it adds to the parameters is gathered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if dict(mesh.shape).get("data", 1) == 1:
        return grads
    return trees.map_with_path(
        lambda path, x: jax.lax.with_sharding_constraint(x, update_spec(path, x.shape, mesh)), grads
    )


def shard(tree: ArrayTree, shardings: ArrayTree) -> ArrayTree:
    """Places a tree of arrays on its shardings."""
    return processes.place(tree, shardings)
