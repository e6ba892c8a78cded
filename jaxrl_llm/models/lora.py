"""LoRA: a frozen model with trainable low-rank matrices at its linear layers.

``config`` is a :class:`LoRAConfig` with a rank unless stated otherwise; without a rank the
functions raise ValueError.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model, cast_params

_RANK_ALONE = {"alpha": 32.0, "targets": ("attention", "mlp"), "seed": 0}


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Options of training only low-rank matrices of a frozen model.

    A linear layer ``y = x W`` becomes ``y = x W + (alpha / rank) (x A) B`` with ``A [in, rank]``
    random and ``B [rank, out]`` zero at first. Gradients and the optimizer state cover only A and
    B, which need a learning rate about ten times that of the full model. The frozen weights have
    the dtype of the matrix products, since they get no updates that could be lost in rounding.

    A recipe's frozen reference is the model without the adapter and takes no memory. A moving
    reference is an adapter too; an average of adapters is an average of their factors.

    Attributes:
      rank: Columns of A and rows of B; None trains all parameters and no adapter.
      alpha: The adapter is multiplied by alpha / rank.
      targets: Regular expressions. A linear layer has an adapter if one of them matches within its
        path, such as `layers/0/attention/q`. The default ones leave out matrices that are smaller
        than the rank, such as the decay of Qwen3.5, which has one output for each head.
      seed: Seed of the initial A.
    """

    rank: int | None = None
    alpha: float = _RANK_ALONE["alpha"]
    targets: tuple[str, ...] = _RANK_ALONE["targets"]
    seed: int = _RANK_ALONE["seed"]

    def __post_init__(self):
        checks.check_numbers("lora", self)
        checks.check_positive("lora", rank=self.rank, alpha=self.alpha)
        checks.check_non_negative("lora", seed=self.seed)
        if self.rank is None:
            for name, default in _RANK_ALONE.items():
                if getattr(self, name) != default:
                    raise ValueError(f"lora: {name} has no effect without a rank.")
        if not self.targets or isinstance(self.targets, str):
            raise ValueError(f"lora: targets must be a tuple of rules; got {self.targets!r}.")
        for rule in self.targets:
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(
                    f"lora: {rule!r} in targets is not a regular expression ({error})."
                ) from error

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        if self.rank is None:
            raise ValueError("lora: without a rank there is no adapter.")
        return self.alpha / self.rank


class Adapted(NamedTuple):
    """Parameters of a model with an adapter.

    Attributes:
      base: The frozen parameters.
      adapter: ``{"a": [in, rank], "b": [rank, out]}`` in the place of each linear layer that has
        one, float32.
    """

    base: ArrayTree
    adapter: ArrayTree


def init_lora(params: ArrayTree, config: LoRAConfig) -> ArrayTree:
    """The adapter before the first step, which does not change the model: B is zero.

        A ~ Normal(0, 1 / in),    B = 0

    Args:
      params: Parameters of the model, or their shapes; only shapes are read.
      config: See the module.

    Returns:
      The adapter of :class:`Adapted`. The initial values of a layer do not depend on the other
      targets.

    Raises:
      ValueError: If a rule matches no linear layer, or one that is in a list or a tuple, or the
        rank is above the size of a matrix; with the default targets, above that of every one.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> adapter = jr.train.init_lora(params, jr.train.LoRAConfig(rank=4, targets=("q$",)))
      >>> {k: v.shape for k, v in adapter["layers"]["0"]["attention"]["q"].items()}
      {'a': (32, 4), 'b': (4, 32)}

    References:
      LoRA (arXiv:2106.09685, ABSTRACT reading).
    """
    if config.rank is None:
        raise ValueError("init_lora: the configuration has no rank.")
    layers = _linear_layers(params)
    shapes = {path: layer.shape for path, layer in layers.items()}
    chosen = {path for path in shapes if any(re.search(rule, path) for rule in config.targets)}
    for rule in config.targets:
        if not any(re.search(rule, path) for path in chosen):
            in_a_layer = {re.sub(r"^layers/\d+/", "", path) for path in shapes}
            there = f"each layer has {', '.join(sorted(in_a_layer))}"
            raise ValueError(
                f"init_lora: {rule!r} in targets matches no linear layer; "
                f"{there if shapes else 'there is none with a kernel'}."
            )
    if config.targets == _RANK_ALONE["targets"]:  # no one asked for each of these matrices
        sizes = {path: min(shapes[path][-2:]) for path in chosen}
        chosen = {path for path in chosen if config.rank <= sizes[path]}
        if not chosen:
            raise ValueError(
                f"init_lora: rank {config.rank} is above the {max(sizes.values())} that the "
                "largest matrix of the default targets can have."
            )
    adapter: dict[str, Any] = {}
    for path in sorted(chosen):
        *lead, inputs, outputs = shapes[path]
        if config.rank > min(inputs, outputs):
            raise ValueError(
                f"init_lora: rank {config.rank} is above the {min(inputs, outputs)} that the "
                f"matrix {path} of {inputs} x {outputs} can have."
            )
        key = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(path.encode()))
        a = jax.random.normal(key, (*lead, inputs, config.rank), jnp.float32) * inputs**-0.5
        b = jnp.zeros((*lead, config.rank, outputs), jnp.float32)
        tree, node = adapter, params
        for i, name in enumerate(layers[path].keys):
            if not isinstance(node, Mapping):
                raise ValueError(
                    f"init_lora: {'/'.join(map(str, layers[path].keys[:i])) or 'params'} is a "
                    f"{type(node).__name__}; parameters with an adapter must be nested dicts."
                )
            tree, node = tree.setdefault(name, {}), node[name]
        tree |= {"a": a, "b": b}
    return adapter


def adapted_model(model: Model, config: LoRAConfig) -> Model:
    """The model as a function of :class:`Adapted` parameters, and of plain ones as before.

    Sampling, scoring and evaluation accept both. All of them add the adapter to the activations,
    so the sampling policy is numerically the same as the trained policy. Adding the adapter to the
    weights would need a second copy of them, and would lose small changes in bfloat16.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> config = jr.train.LoRAConfig(rank=4)
      >>> adapted = jr.train.Adapted(params, jr.train.init_lora(params, config))
      >>> policy = jr.train.adapted_model(model, config)
      >>> sample = jr.rollout.make_sampler(policy, max_new_tokens=4, group_size=2)
      >>> sample(adapted, jax.random.key(0), [[1, 2, 3]]).tokens.shape
      (1, 2, 4)
    """
    scale = config.scale

    def adapted(apply: Callable) -> Callable:
        def run(params, tokens, positions, context, *, delta=None, remat="none"):
            if isinstance(params, Adapted):
                if delta is not None:
                    raise ValueError("Model.apply: a model with an adapter takes no further delta.")
                params, delta = params.base, _delta(params.adapter, scale)
            return apply(params, tokens, positions, context, delta=delta, remat=remat)

        return run

    def output_matrix(params: ArrayTree) -> Array:
        return model.output_matrix(params.base if isinstance(params, Adapted) else params)

    return model._replace(
        apply=adapted(model.apply),
        output_matrix=output_matrix,
        apply_routed=None if model.apply_routed is None else adapted(model.apply_routed),
    )


def with_adapter(
    model: Model, params: ArrayTree, config: LoRAConfig, *, mesh: jax.sharding.Mesh | None = None
) -> tuple[Model, ArrayTree]:
    """Model and parameters with the configured adapter; unchanged without an adapter.

    A mesh, on which the parameters are, splits the adapter as the matrices that it adapts.
    """
    if config.rank is None:
        return model, params
    adapter = init_lora(params, config)
    if mesh is not None:
        from jaxrl_llm.models.sharding import leaf_shardings, shard

        adapter = shard(adapter, leaf_shardings(adapter, mesh, model.sharding_rules))
    # As matrix products take it: what never moves loses nothing in their dtype.
    return adapted_model(model, config), Adapted(cast_params(model, params, rounded=False), adapter)


def merge_lora(params: Adapted, config: LoRAConfig) -> ArrayTree:
    """The parameters of an equivalent model without adapter.

        W + (alpha / rank) A B

    Args:
      params: Base and adapter; a base in float32 loses nothing in the sum.
      config: See the module.

    Returns:
      Parameters like ``params.base``, in its dtypes; parameters without an adapter are not copied.

    Raises:
      ValueError: If the adapter has a key that the base does not have, or a rank that is not that
        of the configuration.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> config = jr.train.LoRAConfig(rank=4)
      >>> merged = jr.train.merge_lora(
      ...     jr.train.Adapted(params, jr.train.init_lora(params, config)), config)
      >>> jax.tree.structure(merged) == jax.tree.structure(params)
      True
    """
    scale = config.scale

    def merge(base: Any, adapter: Any, path: str = "") -> Any:
        if not is_pair(adapter):
            if absent := [f"{path}{k}" for k in adapter if k not in base]:
                raise ValueError(
                    f"merge_lora: the model has no {absent[0]!r} that the adapter belongs to."
                )
            return {
                k: merge(x, adapter[k], f"{path}{k}/") if k in adapter else x
                for k, x in base.items()
            }
        a, b = adapter["a"], adapter["b"]
        if a.shape[-1] != config.rank:  # the scale would be that of another adapter
            raise ValueError(
                f"merge_lora: the configuration has rank {config.rank}, but the adapter of "
                f"{path.removesuffix('/')!r} has rank {a.shape[-1]}."
            )
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        kernel = (base["kernel"].astype(jnp.float32) + scale * product).astype(base["kernel"].dtype)
        return {**base, "kernel": kernel}

    return merge(params.base, params.adapter)


def trainable(params: ArrayTree) -> ArrayTree:
    """The parameters that are trained: the adapter if there is one, else all."""
    return params.adapter if isinstance(params, Adapted) else params


def merge_adapter(base: ArrayTree, params: ArrayTree) -> ArrayTree:
    """Trainable parameters as a model takes them: with their frozen base, if they have one.

    The base is ``()`` where all parameters are trained.
    """
    return params if isinstance(base, tuple) and not base else Adapted(base, params)


def describe_params(params: ArrayTree) -> str:
    """The number of parameters, in words."""
    if not isinstance(params, Adapted):
        return f"{trees.size(params):,} parameters"
    moving = trees.size(params.adapter)
    return f"{trees.size(params.base):,} frozen parameters and {moving:,} of an adapter"


def is_pair(adapter: Any) -> bool:
    """Whether a subtree of an adapter is the two matrices of one layer."""
    return isinstance(adapter, Mapping) and set(adapter) == {"a", "b"}


def _delta(adapter: Any, scale: float) -> Any:
    """The adapter as ``Model.apply`` takes it: ``(A, B, scale)`` for each layer."""
    if is_pair(adapter):
        return adapter["a"], adapter["b"], scale
    return {name: _delta(subtree, scale) for name, subtree in adapter.items()}


class _Linear(NamedTuple):
    """A linear layer: its keys in the parameters, and the shape of its kernel."""

    keys: tuple[Any, ...]
    shape: tuple[int, ...]


def _linear_layers(params: Any, keys: tuple[Any, ...] = ()) -> dict[str, _Linear]:
    """All linear layers by path, without the output matrix, and also those in a list.

    A gate with one output, as of a shared expert, is left out: it has no lower rank.
    """
    if isinstance(params, list | tuple):
        params = dict(enumerate(params))
    if not isinstance(params, Mapping):
        return {}
    path = "/".join(map(str, keys))
    if "kernel" in params and path != "head":
        shape = tuple(params["kernel"].shape)
        return {path: _Linear(keys, shape)} if shape[-1] > 1 else {}
    layers: dict[str, _Linear] = {}
    for name, subtree in params.items():
        layers |= _linear_layers(subtree, (*keys, name))
    return layers
