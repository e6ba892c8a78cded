"""The sharding of parameters and batches over a mesh, as data.

One table gives the mesh axis that splits each axis of a parameter, by the end of the parameter's
path. An axis that the mesh does not divide is not split, so the same rules work on a laptop and on
a pod.

``rules`` is such a table: that of the built-in decoder by default, or ``Model.sharding_rules``.
``mesh`` may lack axes of :data:`AXES`, which then count as size one. ``path`` is that of a leaf,
such as ``layers/0/mlp/up/kernel``, and ``shape`` its shape; trees may hold shapes in place of
arrays.
"""

import contextvars
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes

AXES = ("data", "context", "fsdp", "expert", "tensor")

# Those over which the prompts of a batch are spread.
BATCH_AXES = ("data", "fsdp", "expert")

# Those that split no parameter, or experts alone: only activations, gradients and the optimizer's
# state.
_WITHOUT_PARAMS = ("data", "context", "expert")

ShardingRules = tuple[tuple[str, tuple[str | tuple[str, ...] | None, ...]], ...]

_COLUMNS, _ROWS = ("fsdp", "tensor"), ("tensor", "fsdp")
_LINEARS = {
    "attention/q": _COLUMNS,
    "attention/k": _COLUMNS,
    "attention/v": _COLUMNS,
    "attention/o": _ROWS,
    "mlp/gate": _COLUMNS,
    "mlp/up": _COLUMNS,
    "mlp/down": _ROWS,
    "mlp/router": ("fsdp", None),
}
_WITHOUT_BIAS = {
    "attention/gate": _COLUMNS,
    "attention/beta": _COLUMNS,
    "attention/decay": _COLUMNS,
    "shared/gate": _COLUMNS,
    "shared/up": _COLUMNS,
    "shared/down": _ROWS,
    "mlp/shared_gate": ("fsdp", None),
}
# Experts are spread over ``fsdp``, as rows of other matrices are, and gathered where they compute;
# if it does not divide their number, their matrices are split, or else each device would hold all.
# Each device of ``tensor`` computes some hidden units of every expert: loads are equal whatever the
# router chooses. Each of ``expert`` keeps and computes some of the experts.
_SPREAD = ("expert", "fsdp")
_EXPERTS = {
    "experts/gate": (_SPREAD, None, "tensor"),
    "experts/up": (_SPREAD, None, "tensor"),
    "experts/down": (_SPREAD, "tensor", None),
}

# The mesh axis of each array axis, by the end of a parameter's path; other parameters are
# replicated. A bias is split as the columns of its kernel.
RULES: ShardingRules = (
    ("embed/embedding", ("tensor", "fsdp")),
    ("head/kernel", ("tensor", "fsdp")),
    *((f"{path}/kernel", axes) for path, axes in (_LINEARS | _WITHOUT_BIAS).items()),
    *((f"{path}/bias", ("tensor",)) for path, axes in _LINEARS.items() if axes == _COLUMNS),
    *((f"attention/{name}_conv", (None, None, "tensor")) for name in "qkv"),
    *((f"{path}/kernel", axes) for path, axes in _EXPERTS.items()),
    *((f"{path}/bias", (axes[0], axes[2])) for path, axes in _EXPERTS.items()),
)

# Those of the model whose step is being traced, inside `on_mesh`.
_traced_rules = contextvars.ContextVar("traced_rules", default=RULES)


def param_spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules = RULES) -> P:
    """The partition of one parameter; an axis is not split where no rule applies to it.

    Where a rule has two mesh axes for one axis of the parameter, and the second does not divide it,
    the second splits the first other axis that it divides and no mesh axis splits.
    """
    sizes, rule = dict(mesh.shape), _axes_of(path, rules)

    def split(size: int, axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Those of the mesh axes, from the first on, that divide an axis of the parameter."""
        found: list[str] = []
        for axis in _names(axes):
            if sizes.get(axis, 1) > 1 and size % math.prod(sizes[x] for x in (*found, axis)) == 0:
                found.append(axis)
        return tuple(found) if len(found) > 1 else next(iter(found), None)

    spec = list(map(split, shape, rule))
    for axis in (x for axes in rule for x in _names(axes)[1:] if sizes.get(x, 1) > 1):
        whole = [i for i, axes in enumerate(spec) if axes is None and shape[i] % sizes[axis] == 0]
        if whole and not any(axis in _names(axes) for axes in spec):
            spec[whole[0]] = axis
    return P(*spec)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in an entry of a partition."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _axes_of(path: str, rules: ShardingRules) -> tuple[str | tuple[str, ...] | None, ...]:
    """The mesh axis of each axis of a parameter."""
    for end, axes in rules:
        if path.endswith(end):
            return axes
    layer, _, name = path.rpartition("/")
    if layer.endswith("/kernel"):  # rounded weights, and their scales, one for many of them
        return _axes_of(layer, rules) if name == "q" else ()
    # The matrices of an adapter, [in, rank] and [rank, out], are split as those of their kernel;
    # those of experts have one more axis.
    kernel = _axes_of(f"{layer}/kernel", rules) if layer and name in ("a", "b") else ()
    if not kernel:
        return ()
    *experts, inputs, outputs = kernel
    return (*experts, inputs, None) if name == "a" else (*experts, None, outputs)


def param_shardings(params: ArrayTree, mesh: Mesh, rules: ShardingRules = RULES) -> ArrayTree:
    """The sharding of each parameter, or of each array of an adapter; see :func:`param_spec`.

    Args:
      params, mesh, rules: See the module.

    Returns:
      A ``NamedSharding`` for each leaf, such as for ``jax.device_put`` or ``out_shardings``.

    Warns:
      UserWarning: If there are matrices and an axis ``fsdp`` or ``tensor`` splits none of them, or
        an axis with another name than :data:`AXES`, which splits nothing.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model = jr.models.make_model(jr.testing.tiny_config())
      >>> mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"))
      >>> shardings = jr.models.param_shardings(jr.models.param_shapes(model), mesh)
      >>> list(shardings["layers"]["0"]["mlp"]["up"]["kernel"].spec)
      ['fsdp', 'tensor']
    """
    shardings = leaf_shardings(params, mesh, rules)
    if any(len(x.shape) > 1 for x in jax.tree.leaves(params)):
        used = {x for s in jax.tree.leaves(shardings) for axes in s.spec for x in _names(axes)}
        for axis, size in dict(mesh.shape).items():
            if size > 1 and axis not in (*used, *_WITHOUT_PARAMS):
                _warn_unused(axis, size)
    return shardings


def leaf_shardings(tree: ArrayTree, mesh: Mesh, rules: ShardingRules = RULES) -> ArrayTree:
    """The sharding of each leaf of a part of a model, such as its head or an adapter.

    As :func:`param_shardings`, without its warnings: an axis may split the rest of the model alone.
    """
    return trees.map_with_path(
        lambda path, x: NamedSharding(mesh, param_spec(path, x.shape, mesh, rules)), tree
    )


@functools.cache
def _warn_unused(axis: str, size: int) -> None:
    """Warns once for each axis and size: parameters are placed several times in a run."""
    if axis not in AXES:
        message = f"The mesh axis {axis!r} splits nothing: only {', '.join(AXES)} do."
    else:
        message = (
            f"The mesh axis {axis!r} splits no parameter: each of its {size} devices holds all of "
            "them. A model with other parameter names needs Model.sharding_rules."
        )
    warnings.warn(message, stacklevel=3)


def update_spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules = RULES) -> P:
    """The partition of a gradient and of the optimizer state of a parameter.

    The partition of the parameter whose path is the end of ``path``, split also over ``data``,
    ``context`` and ``expert`` along the first axis that allows it, so that no two devices compute
    the same elements of an update. It is :func:`param_spec` where these are 1, the leaf is a
    vector, or no axis divides.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((2, 1, 4, 1, 1), AXES)
      >>> list(param_spec("layers/0/mlp/up/kernel", (64, 128), mesh))
      ['fsdp', None]
      >>> list(update_spec("layers/0/mlp/up/kernel", (64, 128), mesh))
      [('fsdp', 'data'), None]

    References:
      ZeRO, stage 1 (arXiv:1910.02054).
    """
    spec = param_spec(path, shape, mesh, rules)
    sizes = dict(mesh.shape)
    used = {name for axes in spec for name in _names(axes)}
    others = tuple(x for x in _WITHOUT_PARAMS if sizes.get(x, 1) > 1 and x not in used)
    if not others or len(shape) < 2:
        return spec
    names = [*spec, *(None,) * (len(shape) - len(spec))]
    for i, (size, axes) in enumerate(zip(shape, names, strict=True)):
        split = (*_names(axes), *others)
        if size % math.prod(sizes[name] for name in split) == 0:
            return P(*names[:i], split if len(split) > 1 else split[0], *names[i + 1 :])
    return spec


def update_shardings(tree: ArrayTree, mesh: Mesh, rules: ShardingRules = RULES) -> ArrayTree:
    """A ``NamedSharding`` for each leaf of gradients or an optimizer's state."""
    return trees.map_with_path(
        lambda path, x: NamedSharding(mesh, update_spec(path, x.shape, mesh, rules)), tree
    )


def batch_spec(mesh: Mesh) -> P:
    """The partition of a batch: its prompts over :data:`BATCH_AXES`."""
    axes = tuple(x for x in BATCH_AXES if dict(mesh.shape).get(x, 1) > 1)
    return P(axes) if axes else P()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch ``[P, ...]``: its prompts over "data", "fsdp" and "expert".

    Args:
      mesh: See the module.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> mesh = jax.sharding.AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))
      >>> list(jr.models.batch_sharding(mesh).spec)
      [('data', 'fsdp')]
    """
    return NamedSharding(mesh, batch_spec(mesh))


def kv_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of keys or values ``[P, ..., Hk, ., .]``: rows as in a batch, heads as weights.

    Heads that ``tensor`` does not divide are on each of its devices.
    """
    size = dict(mesh.shape).get("tensor", 1)
    if size == 1 or shape[-3] % size:
        return batch_sharding(mesh)
    rows = next(iter(batch_spec(mesh)), None)
    return NamedSharding(mesh, P(rows, *(None,) * (len(shape) - 4), "tensor"))


def batch_shards(mesh: Mesh | None) -> int:
    """Over how many devices the prompts of a batch are spread; 1 without a mesh."""
    sizes = {} if mesh is None else dict(mesh.shape)
    return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def on_mesh(function: Callable, mesh: Mesh | None, rules: ShardingRules = RULES) -> Callable:
    """The function, traced such that :func:`keep_apart` and :func:`spread_update` know the mesh.

    Without a mesh it is the function itself.
    """
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*args, **kwargs):
        token = _traced_rules.set(rules)
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*args, **kwargs)
        finally:
            _traced_rules.reset(token)

    return traced


def sampling_on_mesh(
    function: Callable, mesh: Mesh | None, rules: ShardingRules = RULES
) -> Callable:
    """:func:`on_mesh` for a sampler, which needs it only where ``expert`` splits the mesh.

    Without, the compiler would gather all experts for each token.
    """
    split = mesh is not None and dict(mesh.shape).get("expert", 1) > 1
    return on_mesh(function, mesh if split else None, rules)


def _batch_axes() -> dict[str, int]:
    """The mesh axes that spread a batch and their sizes, inside `on_mesh`; none elsewhere."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return {axis: sizes[axis] for axis in BATCH_AXES if sizes.get(axis, 1) > 1}


def spreads_batch() -> bool:
    """Whether this is traced, inside `on_mesh`, for a mesh that spreads a batch."""
    return bool(_batch_axes())


def splits_weights() -> bool:
    """Whether this is traced, inside `on_mesh`, for a mesh that splits weights over ``fsdp``."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("fsdp", 1) > 1


def context_size() -> int:
    """Over how many devices the tokens of a row are split, inside `on_mesh`; 1 elsewhere."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("context", 1)


def keep_apart(x: Array, *, tokens: bool = False) -> Array:
    """Activations ``[P, ...]`` with their prompts on the devices of the batch, inside `on_mesh`.

    Otherwise the compiler may split the width over ``fsdp``, as the embedding is split: then each
    device computes with its shard of the weights for all of the batch. With ``tokens`` they are
    ``[P, G, T, ...]``, and T is split over ``context`` where that divides it.
    """
    axes = _batch_axes()
    rows = tuple(axes) if axes and x.shape[0] % math.prod(axes.values()) == 0 else None
    size = context_size() if tokens else 1
    if size > 1 and x.shape[2] % size == 0:
        return jax.lax.with_sharding_constraint(x, P(rows, None, "context"))
    return x if rows is None else jax.lax.with_sharding_constraint(x, P(rows))


def keep_tokens(x: Array) -> Array:
    """Activations ``[P, G, T, ...]`` with their tokens on the devices of ``context``.

    Other axes stay as they are. Otherwise the compiler may gather the tokens of a product's input
    and split its features, as the gradient of the weights is split.
    """
    size, free = context_size(), P.UNCONSTRAINED
    if size == 1 or x.shape[2] % size:
        return x
    return jax.lax.with_sharding_constraint(x, P(free, free, "context", *(free,) * (x.ndim - 3)))


def over_context(function: Callable, tokens: ArrayTree, shared: ArrayTree) -> Array | ArrayTree:
    """``function(tokens, shared)`` of each device's tokens along ``context``, inside `on_mesh`.

    Args:
      function: Gives arrays ``[P, G, T, ...]``, of which each token depends on that token of
        ``tokens`` and on all of ``shared``.
      tokens: Arrays ``[P, G, T, ...]`` or ``[T]``. Zeros are added where ``context`` does not
        divide T; not split where T is below its size.
      shared: All other traced or differentiated arrays that the function reads. What is split over
        ``context`` is gathered once, and its gradient summed once.
    """
    size = context_size()
    if size == 1:
        return function(tokens, shared)
    lengths = {x.shape[_token_axis(x)] for x in jax.tree.leaves(tokens)}
    (length,) = lengths
    if length < size:
        return function(tokens, shared)

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[_token_axis(x)] = (0, -length % size)
        return jnp.pad(x, widths)

    specs = jax.tree.map(lambda x: P(*(None,) * _token_axis(x), "context"), tokens)
    function, shared = _summed_in_float32(function, shared)
    out = jax.shard_map(
        function,
        in_specs=(specs, P()),
        out_specs=P(None, None, "context"),
        axis_names={"context"},
        check_vma=False,
    )(jax.tree.map(pad, tokens) if length % size else tokens, shared)
    return jax.tree.map(lambda x: x[:, :, :length], out) if length % size else out


def _summed_in_float32(function: Callable, shared: ArrayTree) -> tuple[Callable, ArrayTree]:
    """The same function of ``shared`` in float32 where it is bfloat16, on CPUs.

    XLA for CPUs ends the process on a sum of bfloat16 over some of the axes of a mesh, as the
    gradient of what a `shard_map` reads whole is.
    """
    half = jax.tree.map(lambda x: getattr(x, "dtype", None) == jnp.bfloat16, shared)
    if jax.default_backend() != "cpu" or not any(jax.tree.leaves(half)):
        return function, shared

    def cast(x: Array, narrow: bool, dtype: Any) -> Array:
        return x.astype(dtype) if narrow else x

    def narrowed(batch: ArrayTree, wide: ArrayTree, *others) -> ArrayTree:
        shared = jax.tree.map(lambda x, n: cast(x, n, jnp.bfloat16), wide, half)
        return function(batch, shared, *others)

    wide = jax.tree.map(lambda x, n: cast(x, n, jnp.float32), shared, half)
    return narrowed, wide


def _token_axis(x: Array) -> int:
    return 0 if x.ndim == 1 else 2


def on_each_device(function: Callable, batch: ArrayTree, shared: ArrayTree) -> ArrayTree:
    """``function(batch, shared)`` of each device's rows of a batch ``[P, ...]``, inside `on_mesh`.

    ``shared`` takes one all-gather over the axes of the batch, and its gradient one sum. Otherwise
    the compiler would do both in every iteration of a loop inside the function.

    Args:
      function: Gives arrays ``[P, ...]``, of which each row depends on that row of the batch.
      batch: Arrays ``[P, ...]``; not split where P is no multiple of the devices.
      shared: All other traced or differentiated arrays that the function reads.
    """
    axes = _batch_axes()
    count = math.prod(axes.values())
    if not axes or any(x.shape[0] % count for x in jax.tree.leaves(batch)):
        return function(batch, shared)
    rows = P(tuple(axes))
    spread = jax.shard_map(
        function, in_specs=(rows, P()), out_specs=rows, axis_names=set(axes), check_vma=False
    )
    return spread(batch, shared)


def on_each_device_in_slices(
    function: Callable,
    batch: ArrayTree,
    shared: ArrayTree,
    specs: ArrayTree,
    *,
    batch_specs: ArrayTree | None = None,
) -> ArrayTree:
    """As :func:`on_each_device`, where devices have slices of the shared arrays.

    Those of ``tensor`` and of ``expert`` do: each computes for its tokens what its slices add to
    the result, and those of ``expert``, which have tokens of their own, for the tokens of all of
    them.

    Args:
      function: ``function(batch, shared, index)`` gives arrays ``[P, G, T, ...]``, of which each
        token depends on that token of the batch. What is sliced gives one array, and those of all
        slices are summed. ``index`` is the number of the slice over ``expert``, 0 without.
      batch: Arrays ``[P, G, T, ...]``; not split where P is no multiple of the devices, or T none
        of those of ``context``.
      shared: All other traced or differentiated arrays that the function reads.
      specs: ``PartitionSpec`` of each shared array, of these two axes. An axis that does not divide
        every array that names it slices none.
      batch_specs: ``PartitionSpec`` of the axes of each array of the batch behind T, of ``tensor``;
        None if all devices have them whole.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    axes = _batch_axes()
    if any(x.shape[0] % math.prod(axes.values()) for x in jax.tree.leaves(batch)):
        axes = {}
    context = context_size()
    if context > 1 and any(x.shape[2] % context for x in jax.tree.leaves(batch)):
        context = 1
    pairs = list(zip(jax.tree.leaves(shared), jax.tree.leaves(specs), strict=True))

    def divides(axis: str) -> bool:
        lengths = [x.shape[i] for x, spec in pairs for i, name in enumerate(spec) if name == axis]
        return bool(lengths) and not any(length % sizes[axis] for length in lengths)

    sliced = {x for x in ("tensor", "expert") if sizes.get(x, 1) > 1 and divides(x)}
    if not axes and not sliced and context == 1:
        return function(batch, shared, 0)

    exchanged = "expert" in sliced and "expert" in axes
    function, shared = _summed_in_float32(function, shared)

    def local(batch, shared, index):
        if exchanged:
            batch = jax.tree.map(_of_all_experts, batch)
        y = function(batch, shared, index[0])
        if exchanged:
            y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
        summed = tuple(sliced - {"expert"} if exchanged else sliced)
        return jax.lax.psum(y, summed) if summed else y

    def sliced_axes(spec: P) -> tuple:
        return tuple(x if x in sliced else None for x in spec)

    names = ("context",) if context > 1 else ()
    rows = P(tuple(axes) or None, None, *names) if axes or names else P()
    of_batch: ArrayTree = rows
    if batch_specs is not None:
        of_batch = jax.tree.map(
            lambda spec: P(*(*rows, None, None, None)[:3], *sliced_axes(spec)), batch_specs
        )
    slices = jax.tree.map(lambda spec: P(*sliced_axes(spec)), specs)
    indices = P("expert") if "expert" in sliced else P()
    return jax.shard_map(
        local,
        in_specs=(of_batch, slices, indices),
        out_specs=rows,
        axis_names={*axes, *names, *sliced},
        check_vma=False,
    )(batch, shared, jnp.arange(sizes["expert"] if "expert" in sliced else 1))


def _of_all_experts(x: Array) -> Array:
    """The rows of all devices of ``expert``, in a `shard_map` over it."""
    # As for `_summed_in_float32`: the gradient is such a sum.
    wide = x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    rows = x.astype(jnp.float32) if wide else x
    return jax.lax.all_gather(rows, "expert", axis=0, tiled=True).astype(x.dtype)


def spread_update(grads: ArrayTree) -> ArrayTree:
    """Gradients on the devices that compute their elements of the update, inside `on_mesh`.

    Each device then receives the sum of its elements only, and an all-gather follows the update.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), _traced_rules.get()
    if all(dict(mesh.shape).get(axis, 1) == 1 for axis in _WITHOUT_PARAMS):
        return grads

    def spread(path: str, x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, update_spec(path, x.shape, mesh, rules))

    return trees.map_with_path(spread, grads)


def with_axes_of(tree: ArrayTree, mesh: Mesh, *, before: Mesh) -> ArrayTree:
    """Arrays of one mesh as those of another with the same devices in the same order; no copies.

    The axes that split an array have the same sizes in both. One compiled function takes arrays of
    one mesh only. Arrays elsewhere, on the host or on one device, stay as they are.
    """

    def relabel(x: Array) -> Array:
        if getattr(getattr(x, "sharding", None), "mesh", None) != before:
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = relabel(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        parts = [part.data for part in x.addressable_shards]
        sharding: Any = x.sharding
        sharding = NamedSharding(mesh, sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(relabel, tree)


def shard(tree: ArrayTree, shardings: ArrayTree) -> ArrayTree:
    """Places a tree of arrays on its shardings."""
    return processes.place(tree, shardings)
