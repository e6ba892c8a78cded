"""What a run takes of each device's memory, before anything of it is allocated."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import param_spec, update_spec
from jaxrl_llm.recipes import EvolutionRecipe
from jaxrl_llm.train import memory
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.critic import init_critic
from jaxrl_llm.train.evolution import moving_only
from jaxrl_llm.train.frozen import with_adapter
from jaxrl_llm.train.lora import Adapted, trainable
from jaxrl_llm.train.optimizer import make_optimizer


class Subject(NamedTuple):
    """What a plan is about, as shapes.

    Attributes:
      model: The model, with the adapter if the run has one.
      params: Shapes of its parameters.
      longest: Tokens of the longest prompt, as the sampler pads it.
      held_out: How many questions are held out.
    """

    model: Model
    params: ArrayTree
    longest: int
    held_out: int


class Plan(NamedTuple):
    """Bytes on one device, by what they are for.

    Attributes:
      state: There for the whole run.
      step: Besides, while a step trains.
      sampling: Besides, while rollouts are sampled or the policy is evaluated.
      together: Whether a step and the sampler are at work at once.
    """

    state: dict[str, int]
    step: dict[str, int]
    sampling: dict[str, int]
    together: bool

    @property
    def held(self) -> int:
        """Bytes that are there for the whole run."""
        return sum(self.state.values())

    @property
    def peak(self) -> int:
        """The most that is there at one time."""
        step, sampling = sum(self.step.values()), sum(self.sampling.values())
        return self.held + (step + sampling if self.together else max(step, sampling))


def abstract_model(config: TrainConfig) -> tuple[Model, ArrayTree, Any]:
    """Model, shapes of its float32 parameters, and tokenizer; no weight is read.

    A function that returns the model is traced; one that cannot be is called.
    """
    from jaxrl_llm import data, models

    if isinstance(config.model, str):
        from jaxrl_llm.models.loading import open_model

        asked = {"dtype": config.dtype, "quantization": config.quantization}
        model = models.make_model(dataclasses.replace(open_model(config.model)[1], **asked))
        return model, models.param_shapes(model), data.load_tokenizer(config.model)
    found: list[Any] = []

    def build():
        model, params, tokenizer = config.model()
        found[:] = model, tokenizer
        return trees.cast(params, jnp.float32)

    try:
        shapes = jax.eval_shape(build)
    except jax.errors.JAXTypeError:  # it looks at values
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), build())
    return found[0], shapes, found[1]


def load_subject(config: TrainConfig) -> Subject:
    """What a plan of this configuration is about: reads the questions, but no weights."""
    from jaxrl_llm.rollout.sampler import BUCKETS
    from jaxrl_llm.train.setup import load_questions

    model, params, tokenizer = abstract_model(config)
    room = model.config.max_length - config.sampling.max_new_tokens
    train, held_out, _ = load_questions(config, tokenizer, room)
    longest = max(len(question.tokens) for question in [*train, *held_out])
    longest = next((size for size in BUCKETS if size >= longest), longest)
    return Subject(model, params, longest, len(held_out))


def held_bytes(config: TrainConfig) -> dict[str, int]:
    """Bytes on one device that are there for the whole run; only the shape of the model is read."""
    model, params, _ = abstract_model(config)
    return _state_bytes(config, *_with_adapter(config, model, params), mesh_sizes(config))


def make_plan(config: TrainConfig, subject: Subject, *, accelerator: bool | None = None) -> Plan:
    """Bytes of a run on each device.

    Args:
      config: The run.
      subject: From :func:`load_subject`, of this configuration or of one that differs in nothing
        that it depends on.
      accelerator: Whether the device multiplies bfloat16 numbers as they are; by default, whether
        the one that is here does. XLA for CPUs multiplies them as float32.

    Returns:
      The plan. Packed rows, which take less, are counted as if they were padded.
    """
    if accelerator is None:
        accelerator = jax.default_backend() != "cpu"
    mesh = mesh_sizes(config)
    model, params = _with_adapter(config, subject.model, subject.params)
    state = _state_bytes(config, model, params, mesh)
    step = _step_bytes(config, subject, trainable(params), mesh, accelerator)
    sampling = _sampling_bytes(config, subject, params, mesh)
    shared = config.asynchrony.max_staleness > 0 and config.asynchrony.sampler_devices is None
    if shared:
        sampling["weights of the sampler"] = 2 * memory.tree_bytes(trainable(params), mesh)
    return Plan(state, step, sampling, shared)


def mesh_sizes(config: TrainConfig) -> dict[str, int]:
    """Sizes of the mesh axes; -1 is what the devices that are here leave."""
    sizes = dataclasses.asdict(config.mesh)
    if -1 in sizes.values():
        known = -math.prod(sizes.values())
        left = jax.device_count() - (config.asynchrony.sampler_devices or 0)
        sizes = {k: max(left // known, 1) if v == -1 else v for k, v in sizes.items()}
    return sizes


def _with_adapter(config: TrainConfig, model: Model, params: ArrayTree) -> tuple[Model, ArrayTree]:
    shapes = jax.eval_shape(lambda p: with_adapter(model, p, config.lora)[1], params)
    return model, shapes


def _state_bytes(
    config: TrainConfig, model: Model, params: ArrayTree, mesh: dict[str, int]
) -> dict[str, int]:
    recipe = find_recipe(config.recipe, config.sampling)
    moving = trainable(params)
    base = params.base if isinstance(params, Adapted) else params
    chosen = moving_only(recipe, make_optimizer(config.optimizer))
    optimizer = jax.eval_shape(chosen.init, moving)
    parts = {"weights": memory.tree_bytes(params, mesh)}
    spec = param_spec if isinstance(recipe, EvolutionRecipe) else update_spec
    parts["optimizer"] = memory.tree_bytes(optimizer, mesh, spec=spec)
    if recipe.reference is not None:
        parts["reference"] = memory.tree_bytes(moving, mesh)
    elif "ref_logp" in recipe.needs and base is params:  # an adapter's reference is its base
        parts["reference"] = memory.tree_bytes(params, mesh)
    if recipe.critic is not None and config.critic is not None:
        heads, key = recipe.critic.heads, jax.random.key(0)
        critic = jax.eval_shape(lambda p: init_critic(model, p, heads=heads, key=key), base)
        own = jax.eval_shape(make_optimizer(config.critic).init, critic)
        copies = 1 if recipe.critic.target_rate is None else 2
        parts["critic"] = copies * memory.tree_bytes(critic, mesh)
        parts["critic"] += memory.tree_bytes(own, mesh, spec=update_spec)
    return parts


def _step_bytes(
    config: TrainConfig,
    subject: Subject,
    moving: ArrayTree,
    mesh: dict[str, int],
    accelerator: bool,
) -> dict[str, int]:
    """Gradients, casts, activations and logits of one microbatch, or an update of a population."""
    recipe = find_recipe(config.recipe, config.sampling)
    if isinstance(recipe, EvolutionRecipe):
        noise = 4 * min(recipe.chunk, _members(config, recipe)) * _drawn(recipe, moving)
        return {"gradients": memory.tree_bytes(moving, mesh), "noise of an update": noise}
    shape, split = subject.model.config, mesh["tensor"]
    batch = memory.Batch(
        -(-config.prompts_per_step // (config.microbatches * mesh["data"] * mesh["fsdp"])),
        config.sampling.group_size,
        subject.longest,
        config.sampling.max_new_tokens,
    )
    names = ("num_heads", "num_kv_heads", "mlp_width")
    local = dataclasses.replace(shape, **{k: max(getattr(shape, k) // split, 1) for k in names})
    half = jnp.dtype(shape.dtype).itemsize
    parts = {"gradients": _gradient_bytes(moving, mesh, config.microbatches)}
    parts["activations"] = memory.activation_bytes(
        local,
        batch,
        remat=config.remat,
        itemsize=half if accelerator else 4,
        adapter=config.lora.rank is not None,
    )
    parts["logits"] = memory.logits_bytes(-(-shape.vocab_size // split))
    if casts := _casts(subject, mesh) if config.lora.rank is None else 0:
        parts["weights as multiplied"] = casts
    if mesh["fsdp"] > 1:
        layer = memory.tree_bytes(subject.params["layers"]["0"], {"tensor": split})
        ends = {k: x for k, x in subject.params.items() if k != "layers"}
        table = memory.tree_bytes(ends, {"tensor": split})
        parts["weights gathered"] = (2 * layer + table) * half // 4 + table
    return parts


def _gradient_bytes(moving: ArrayTree, mesh: dict[str, int], microbatches: int) -> int:
    """Those of an update, and what is there before they are summed over ``data``."""
    own = memory.tree_bytes(moving, mesh, spec=update_spec)
    if microbatches > 1:
        return own + memory.tree_bytes(moving, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(moving)
    largest = max(memory.tree_bytes({trees.path_str(path): x}, mesh) for path, x in leaves)
    return own + (largest if mesh["data"] > 1 else 0)


def _casts(subject: Subject, mesh: dict[str, int]) -> int:
    """Bytes of the matrices in the dtype of the products, where that is another."""
    size = jnp.dtype(subject.model.config.dtype).itemsize
    if size == 4:
        return 0
    matrices = jax.tree.map(lambda x: x if x.ndim > 1 else None, subject.params)
    return memory.tree_bytes(matrices, mesh) * size // 4


def _sampling_bytes(
    config: TrainConfig, subject: Subject, params: ArrayTree, mesh: dict[str, int]
) -> dict[str, int]:
    """Keys, values and outputs of the greatest batch that is sampled, and its logits."""
    given, shape = config.sampling, subject.model.config
    prompts, slots = config.prompts_per_step, config.prompts_per_step * given.group_size
    grids = []
    if config.asynchrony.sampler_devices is None:
        if given.slots is None:
            grids.append((prompts, slots))
        else:
            rows, width = given.grid(prompts)
            grids.append((rows, rows * width))
    if config.evaluation.enabled:
        greedy = min(slots, max(subject.held_out, 1))
        grids.append((greedy, greedy))
        grids.append((prompts, prompts * (config.evaluation.samples or given.group_size)))
    recipe, parts = find_recipe(config.recipe, given), {}
    if isinstance(recipe, EvolutionRecipe):
        # A member reads the prompts itself.
        grids[0] = (slots * recipe.tries, slots * recipe.tries)
        parts["members"] = _member_bytes(config, recipe, params, mesh)
    if not grids:
        return {}
    shards = mesh["data"] * mesh["fsdp"]

    def cache(rows: int, slots: int) -> int:
        sizes = {"prompt_length": subject.longest, "length": given.max_new_tokens}
        return memory.cache_bytes(shape, prompts=rows, slots=slots, **sizes) // shards

    most = max(slots for _, slots in grids)
    parts["cache of the sampler"] = max(cache(*grid) for grid in grids)
    parts["logits of the sampler"] = 2 * 4 * shape.vocab_size * -(-most // shards)
    if (casts := _casts(subject, mesh)) and trainable(params) is params:
        parts["weights as multiplied"] = casts
    return parts


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
    config: TrainConfig, recipe: EvolutionRecipe, params: ArrayTree, mesh: dict[str, int]
) -> int:
    """Factors of all members, those of a pair once; or the weights of one member."""
    if recipe.noise == "full":
        return memory.tree_bytes(params, mesh)
    draws = _members(config, recipe) // (2 if recipe.pairs else 1)
    return 4 * draws * _drawn(recipe, params) // (mesh["data"] * mesh["fsdp"])
