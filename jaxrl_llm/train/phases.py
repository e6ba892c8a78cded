"""Bytes on one device while a step trains and while a policy samples, besides the state."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.lora import trainable
from jaxrl_llm.models.protocol import cast_params
from jaxrl_llm.models.quantize import RoundedWeights
from jaxrl_llm.models.sharding import update_spec
from jaxrl_llm.recipes import EvolutionRecipe
from jaxrl_llm.train import memory
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.subject import Subject

Mesh = Mapping[str, int]

# What the formulas of activations read of a model's configuration; not every model has it.
_SIZES = ("width", "num_heads", "mlp_width")


class Grid(NamedTuple):
    """What a sampler decodes at one time.

    Attributes:
      rows: Prompts.
      slots: Responses.
      recorded: Bytes of the outputs of a token.
      blocks: How often the logits of all slots are there.
    """

    rows: int
    slots: int
    recorded: int
    blocks: int


def step_bytes(
    config: TrainConfig, subject: Subject, params: ArrayTree, mesh: Mesh, *, accelerator: bool
) -> dict[str, int]:
    """Gradients, casts, activations and logits of one microbatch, or an update of a population."""
    recipe, moving = find_recipe(config.recipe, config.sampling), trainable(params)
    if isinstance(recipe, EvolutionRecipe):
        noise = 4 * min(recipe.chunk, _members(config, recipe)) * _drawn(recipe, moving)
        return {"gradients": memory.tree_bytes(moving, mesh), "noise of an update": noise}
    parts = {"gradients": _gradient_bytes(moving, mesh, config.microbatches)}
    if recipe.critic is not None:  # a whole model, whatever of the policy moves
        of_critic = _gradient_bytes(subject.params, mesh, config.microbatches)
        parts["gradients of the critic"] = of_critic
    if not unknown_sizes(subject):
        parts["activations"] = _activation_bytes(config, subject, mesh, accelerator)
    parts["logits"] = memory.logits_bytes(
        *_logits_shape(config, subject),
        mesh=mesh,
        statistics=bool(recipe.statistics or recipe.scored or recipe.taught),
    )
    if support := _support_bytes(config, subject, mesh):
        parts["support of tokens"] = support
    if config.lora.rank is None or recipe.critic is not None:
        parts |= _present("weights as multiplied", _cast_bytes(subject, mesh))
    if mesh["fsdp"] > 1:
        parts |= _present("weights gathered", _gathered_bytes(subject, mesh))
    return parts


def unknown_sizes(subject: Subject) -> tuple[str, ...]:
    """What a model's configuration does not say and activations cannot be counted without."""
    return tuple(name for name in _SIZES if not hasattr(subject.model.config, name))


def _present(name: str, size: int) -> dict[str, int]:
    return {name: size} if size else {}


def _activation_bytes(config: TrainConfig, subject: Subject, mesh: Mesh, accelerator: bool) -> int:
    """Those of the part of a microbatch that one device has."""
    shape = subject.model.config
    batch = memory.Batch(
        -(-config.prompts_per_step // (config.microbatches * mesh["data"] * mesh["fsdp"])),
        config.sampling.group_size,
        subject.longest,
        config.sampling.max_new_tokens,
    )
    return memory.activation_bytes(
        shape,
        batch,
        remat=config.remat,
        itemsize=jnp.dtype(shape.dtype).itemsize if accelerator else 4,
        adapter=config.lora.rank is not None,
        split=mesh["tensor"],
    )


def _logits_shape(config: TrainConfig, subject: Subject) -> tuple[int, int, int]:
    """Vocabulary, tokens of the responses of a microbatch, width of hidden states."""
    tokens = config.prompts_per_step * config.sampling.group_size * config.sampling.max_new_tokens
    shape = subject.model.config
    return shape.vocab_size, -(-tokens // config.microbatches), getattr(shape, "width", 0)


def _gradient_bytes(moving: ArrayTree, mesh: Mesh, microbatches: int) -> int:
    """Those of an update, and what is there before they are summed over ``data``."""
    own = memory.tree_bytes(moving, mesh, spec=update_spec)
    if microbatches > 1:
        return own + memory.tree_bytes(moving, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(moving)
    largest = max(memory.tree_bytes({trees.path_str(path): x}, mesh) for path, x in leaves)
    return own + (largest if mesh["data"] > 1 else 0)


def _support_bytes(config: TrainConfig, subject: Subject, mesh: Mesh) -> int:
    """The batch's sets of tokens, and the copies that a step makes of them.

    Where they are scored their rows are laid out anew, and so they are to be split.
    """
    given, vocab_size = config.sampling, subject.model.config.vocab_size
    policy = {"temperature": given.temperature, **filters_of(config)}
    _, each = memory.recorded_bytes(vocab_size, **policy)
    tokens = config.prompts_per_step * given.group_size * given.max_new_tokens
    whole = each * tokens // (mesh["data"] * mesh["fsdp"])
    parts = config.microbatches
    return 2 * whole if parts == 1 else 3 * whole + whole // parts


def _cast_bytes(subject: Subject, mesh: Mesh) -> int:
    """Bytes of the matrices in the dtype of the products, where that is another."""
    size = jnp.dtype(subject.model.config.dtype).itemsize
    if size == 4:
        return 0
    matrices = jax.tree.map(lambda x: x if x.ndim > 1 else None, subject.params)
    return memory.tree_bytes(matrices, mesh) * size // 4


def _gathered_bytes(subject: Subject, mesh: Mesh) -> int:
    """Weights that a device gathers of others: of two layers and what is no layer, or of all."""
    params, half = subject.params, jnp.dtype(subject.model.config.dtype).itemsize
    across = {"tensor": mesh["tensor"]}
    layers = params.get("layers") if isinstance(params, Mapping) else None
    if not isinstance(layers, Mapping):
        whole = memory.tree_bytes(params, across)
        return whole if whole > memory.tree_bytes(params, mesh) else 0
    layer = max(memory.tree_bytes(x, across) for x in layers.values())
    table = memory.tree_bytes({k: x for k, x in params.items() if k != "layers"}, across)
    return (2 * layer + table) * half // 4 + table


def sampling_bytes(
    config: TrainConfig, subject: Subject, params: ArrayTree, mesh: Mesh
) -> dict[str, int]:
    """Keys, values and outputs of the greatest batch that is sampled, and its logits.

    Of devices that train: where others sample, it is the evaluation alone.
    """
    recipe, parts = find_recipe(config.recipe, config.sampling), {}
    grids = _evaluated(config, subject)
    if config.asynchrony.sampler_devices is None:
        grids.append(_sampled(config, subject))
    if isinstance(recipe, EvolutionRecipe):
        parts["members"] = _member_bytes(config, recipe, params, mesh)
    if not grids:
        return {}
    return parts | _decoding_bytes(config, subject, params, mesh, grids)


def sampler_bytes(
    config: TrainConfig, subject: Subject, params: ArrayTree, mesh: Mesh
) -> dict[str, int]:
    """All that is on a device which does nothing but sample."""
    held = memory.tree_bytes(params, mesh) - memory.tree_bytes(trainable(params), mesh)
    parts = {"weights": held + published_bytes(config, params, mesh)}
    return parts | _decoding_bytes(config, subject, params, mesh, [_sampled(config, subject)])


def published_bytes(config: TrainConfig, params: ArrayTree, mesh: Mesh) -> int:
    """The sampler's copies of what moves, where it samples while a step trains.

    Old ones for the batch under way, the newest, and those that replace these meanwhile.
    """
    copies = 2 if config.asynchrony.max_staleness == 1 else 3
    return copies * memory.tree_bytes(trainable(params), mesh)


def _decoding_bytes(
    config: TrainConfig, subject: Subject, params: ArrayTree, mesh: Mesh, grids: list[Grid]
) -> dict[str, int]:
    shards, shape = mesh["data"] * mesh["fsdp"], subject.model.config
    sizes = {"prompt_length": subject.longest, "length": config.sampling.max_new_tokens}

    def cache(grid: Grid) -> int:
        size = {"prompts": grid.rows, "slots": grid.slots, "recorded": grid.recorded}
        return memory.cache_bytes(shape, **size, **sizes, split=mesh["tensor"]) // shards

    logits = [4 * shape.vocab_size * grid.blocks * -(-grid.slots // shards) for grid in grids]
    parts = {"cache of the sampler": max(map(cache, grids)), "logits of the sampler": max(logits)}
    return parts | _present("weights as multiplied", _made_bytes(subject, params, mesh))


def _made_bytes(subject: Subject, params: ArrayTree, mesh: Mesh) -> int:
    """Bytes of the weights that a sampler makes before it decodes, cast or rounded to 8 bits."""

    def made(new, old):
        if isinstance(new, RoundedWeights):
            return new.q
        return None if new.dtype == old.dtype else new

    cast = jax.eval_shape(lambda p: cast_params(subject.model, p), params)
    rounded = {"is_leaf": lambda x: isinstance(x, RoundedWeights)}
    return memory.tree_bytes(jax.tree.map(made, cast, params, **rounded), mesh)


def _sampled(config: TrainConfig, subject: Subject) -> Grid:
    """What decodes at one time of a step's rollouts."""
    given, prompts = config.sampling, config.prompts_per_step
    recipe = find_recipe(config.recipe, given)
    if isinstance(recipe, EvolutionRecipe):  # a member reads the prompts itself
        count = prompts * given.group_size * recipe.tries
        return _grid(config, subject, count, count, recipe.temperature)
    rows, width = (prompts, given.group_size) if given.slots is None else given.grid(prompts)
    return _grid(config, subject, rows, rows * width, given.temperature)


def _evaluated(config: TrainConfig, subject: Subject) -> list[Grid]:
    """The same of the two evaluations, if there are any."""
    if not config.evaluation.enabled:
        return []
    given, prompts = config.sampling, config.prompts_per_step
    greedy = min(prompts * given.group_size, max(subject.held_out, 1))
    answers = prompts * (config.evaluation.samples or given.group_size)
    return [
        _grid(config, subject, greedy, greedy, 0.0),
        _grid(config, subject, prompts, answers, given.temperature),
    ]


def _grid(config: TrainConfig, subject: Subject, rows: int, slots: int, temperature: float) -> Grid:
    filters = filters_of(config) if temperature else {}
    vocab_size = subject.model.config.vocab_size
    recorded, support = memory.recorded_bytes(vocab_size, temperature=temperature, **filters)
    # Besides those of the model and those that are drawn from, a filter over all of them has its
    # own, sorted and summed.
    return Grid(rows, slots, recorded, 5 if 8 * support >= vocab_size else 2)


def filters_of(config: TrainConfig) -> dict:
    """Which tokens a sampler of the policy keeps."""
    return {name: getattr(config.sampling, name) for name in ("top_k", "top_p", "min_p")}


def _members(config: TrainConfig, recipe: EvolutionRecipe) -> int:
    return recipe.population(config.prompts_per_step, config.sampling.group_size)


def _drawn(recipe: EvolutionRecipe, params: ArrayTree) -> int:
    """Random numbers of one member; of noise of full rank those of one leaf, one at a time."""
    names, leaves = map(jax.tree.leaves, (recipe.classes(params), params))
    shapes = [x.shape for x, name in zip(leaves, names, strict=True) if name != "frozen"]
    if recipe.noise == "full":
        return max(map(math.prod, shapes))
    return sum(recipe.rank * sum(shape) for shape in shapes)


def _member_bytes(
    config: TrainConfig, recipe: EvolutionRecipe, params: ArrayTree, mesh: Mesh
) -> int:
    """Factors of all members, those of a pair once; or the weights of one member."""
    if recipe.noise == "full":
        return memory.tree_bytes(params, mesh)
    draws = _members(config, recipe) // (2 if recipe.pairs else 1)
    return 4 * draws * _drawn(recipe, params) // (mesh["data"] * mesh["fsdp"])
