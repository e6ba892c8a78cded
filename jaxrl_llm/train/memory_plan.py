"""What a run takes of a device's memory, by formulas of shapes; nothing is allocated.

``plan_text`` is ``--plan``: a table, and the options that help where the run does not fit.
``check_memory`` refuses a run whose state alone is more than a device has. Below these come
what is planned (``load_inputs``), the plan (``make_plan``), a step, a sampler, and the formulas of
single things.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import logprobs
from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.kernels.vocabulary import block_words
from jaxrl_llm.models.lora import Adapted, trainable, with_adapter
from jaxrl_llm.models.protocol import Model, cast_params
from jaxrl_llm.models.quantize import RoundedWeights
from jaxrl_llm.models.sharding import AXES, param_spec, update_spec
from jaxrl_llm.recipes import EvolutionRecipe, Recipe
from jaxrl_llm.rollout.sampling.options import DrawOptions, make_draw
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.critic import init_critic
from jaxrl_llm.train.evolution import moving_only
from jaxrl_llm.train.mesh import MeshConfig, check_batch, load_meshes
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.packing import check_reads_segments
from jaxrl_llm.train.provide import check_provided
from jaxrl_llm.train.setup import load_questions

Mesh = Mapping[str, int]

# Of a device's memory, what the formulas may fill: compilers and fragments take the rest.
_SHARE = 0.95
# A limit on the tokens to sample from that is rarely noticed.
_TOP_K = 128
# What the formulas of activations read of a model's configuration; not every model has it.
_SIZES = ("width", "num_heads", "mlp_width")


class OutOfMemory(ValueError):
    """A run takes more memory than a device has."""


class PlanInputs(NamedTuple):
    """What a plan is about, as shapes.

    Attributes:
      model: The model, without an adapter.
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
      loading: Until the state is there.
      state: There for the whole run.
      step: Besides, while a step trains.
      sampling: Besides, while rollouts are sampled or the policy is evaluated.
      together: Whether a step and the sampler are at work at once.
      sampler: On a device that does nothing but sample; empty if there is none.
      unknown: What the model's configuration does not say, for which activations are left out.
    """

    loading: dict[str, int]
    state: dict[str, int]
    step: dict[str, int]
    sampling: dict[str, int]
    together: bool
    sampler: dict[str, int]
    unknown: tuple[str, ...] = ()

    @property
    def held(self) -> int:
        """Bytes that are there for the whole run."""
        return sum(self.state.values())

    @property
    def peak(self) -> int:
        """The most that is at one time on a device that trains."""
        step, sampling = sum(self.step.values()), sum(self.sampling.values())
        at_work = step + sampling if self.together else max(step, sampling)
        return max(sum(self.loading.values()), self.held + at_work)

    @property
    def most(self) -> int:
        """The most that is at one time on any device."""
        return max(self.peak, sum(self.sampler.values()))


class BatchShape(NamedTuple):
    """The part of a batch that a device works on at one time.

    Attributes:
      prompts: P.
      group_size: G.
      prompt_length: Lp, padding included.
      length: T.
    """

    prompts: int
    group_size: int
    prompt_length: int
    length: int


class DecodeShape(NamedTuple):
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


def plan_text(config: TrainConfig, *, memory: float | None = None) -> str:
    """The plan of a run as a table, if it fits.

    Args:
      config: The run; its questions are read, its weights are not.
      memory: Bytes of one device, an accelerator that need not be here, of which there are as many
        as the mesh says; None asks those that are here.

    Raises:
      OutOfMemory: If it does not fit; the message holds the table and the options that would help.
      ValueError: If the run could not start: the configuration does not fit the model, the data or
        the devices.
    """
    elsewhere = memory is not None
    _check_here(config, elsewhere)
    config = lay_out(config, elsewhere=elsewhere)
    accelerator = True if elsewhere else None
    room = _device_memory(config) if memory is None else int(memory)
    subject = load_inputs(config)
    plan = make_plan(config, subject, accelerator=accelerator)
    lines = [_title(config, subject), *_table(plan)]
    if plan.unknown:
        names = ", ".join(plan.unknown)
        lines.append(f"Activations are not counted: the model's configuration has no {names}.")
    if room is None:
        return "\n".join([*lines, "The device does not tell how much memory it has."])
    lines.append(_row(2, "a device has", room))
    if plan.most <= _SHARE * room:
        return "\n".join([*lines, "What is counted fits." if plan.unknown else "It fits."])
    lines.append("It does not fit. At most, one of these options at a time:")
    for text, less in _helpful_options(config, subject, elsewhere, accelerator):
        if less < 0.99 * plan.most:
            verdict = ", fits" if less <= _SHARE * room and not plan.unknown else ""
            lines.append(f"  {text:<40}{_size(less):>12}{verdict}")
    raise OutOfMemory("\n".join(lines))


def check_memory(config: TrainConfig) -> None:
    """Raises OutOfMemory if what is there for the whole run is already more than a device has.

    Only for a pretrained model, whose shapes are known before its weights are read.
    """
    if not isinstance(config.model, str):
        return
    config = lay_out(config)
    room = _device_memory(config)
    if room is None:
        return
    held = held_bytes(config)
    if sum(held.values()) > room:
        parts = ", ".join(f"{name} {_size(count)}" for name, count in held.items())
        raise OutOfMemory(
            f"train: the state of this run, {_size(sum(held.values()))} on each device ({parts}), "
            f"is more than the {_size(room)} there are; train an adapter (--lora.rank 16), split "
            "the state over devices (--mesh.fsdp), or see what helps with --plan."
        )


def _check_here(config: TrainConfig, elsewhere: bool) -> None:
    """Raises ValueError for a mesh of more devices than are here, where it is planned for those."""
    wanted, there = math.prod(dataclasses.astuple(config.mesh)), jax.device_count()
    if not elsewhere and wanted > there:
        raise ValueError(
            f"plan: the mesh is of {wanted} devices, but there are {there}; for devices elsewhere "
            "give the memory of one (--plan-memory)."
        )


def _device_memory(config: TrainConfig) -> int | None:
    """Bytes that a device has for the run."""
    own = config.asynchrony.sampler_devices or 0
    return available_memory(math.prod(dataclasses.astuple(config.mesh)) + own)


def _helpful_options(
    config: TrainConfig, subject: PlanInputs, elsewhere: bool, accelerator: bool | None
) -> Iterator[tuple[str, int]]:
    """Options and the most that the run would take with each of them, if it could start."""
    for text, changed in suggestions(config, elsewhere=elsewhere):
        try:
            changed = lay_out(changed, elsewhere=elsewhere)
            plan = make_plan(changed, _other(config, changed, subject), accelerator=accelerator)
        except ValueError:  # such as a rank above the size of a matrix
            continue
        yield text, plan.most


def suggestions(
    config: TrainConfig, *, elsewhere: bool = False
) -> Iterator[tuple[str, TrainConfig]]:
    """Options that make a run smaller; those that change least of what is learned come first.

    Args:
      config: The run, the sizes of its mesh in numbers.
      elsewhere: Whether its devices are not here, so that nobody knows how many there are.
    """
    sampling, count = config.sampling, config.prompts_per_step
    changes: list[tuple[str, dict]] = []
    if config.remat != "full":
        changes.append(("--remat full", {"remat": "full"}))
    more = [n for n in (2, 4, 8, 16, 32) if n > config.microbatches and count % n == 0]
    changes += [(f"--microbatches {n}", {"microbatches": n}) for n in more]
    if sampling.slots is None and count > 1:
        changes.append((f"--sampling.slots {count // 2}", {"sampling": {"slots": count // 2}}))
    changes += _meshes(config, elsewhere)
    if isinstance(config.model, str) and config.dtype == "float32":
        changes.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if config.optimizer.moment_dtype == "float32":
        half = {"optimizer": {"moment_dtype": "bfloat16"}}
        changes.append(("--optimizer.moment-dtype bfloat16", half))
    if sampling.top_k is None or sampling.top_k > _TOP_K:
        changes.append((f"--sampling.top-k {_TOP_K}", {"sampling": {"top_k": _TOP_K}}))
    if config.lora.rank is None:
        changes.append(("--lora.rank 16", {"lora": {"rank": 16}}))
    if (tokens := sampling.max_new_tokens // 2) > 0:
        shorter = {"sampling": {"max_new_tokens": tokens}}
        changes.append((f"--sampling.max-new-tokens {tokens}", shorter))
    for text, options in changes:
        try:
            yield text, _replaced(config, options)
        except ValueError:
            continue  # the rest of this configuration does not go with it


def _meshes(config: TrainConfig, elsewhere: bool) -> list[tuple[str, dict]]:
    """Options that spread a run over more devices, or split more of it."""
    mesh, own = config.mesh, config.asynchrony.sampler_devices or 1
    found: list[tuple[str, dict]] = []
    if mesh.fsdp == 1 and mesh.data > 1:
        size = mesh.data if elsewhere else -1
        found.append((f"--mesh.data 1 --mesh.fsdp {size}", {"mesh": {"data": 1, "fsdp": size}}))
    elif mesh.fsdp == 1:
        for size in (2, 4, 8) if elsewhere else (-1,):
            found += [
                (f"--mesh.{axis} {size}", {"mesh": {axis: size}}) for axis in ("data", "fsdp")
            ]
    if own > 1:
        name, split = "--asynchrony.sampler-mesh", MeshConfig(fsdp=own)
        text = f"{name}.data 1 {name}.fsdp {own}"
        found.append((text, {"asynchrony": {"sampler_mesh": split}}))
    return found


def _replaced(config: TrainConfig, options: dict) -> TrainConfig:
    """The configuration with other values, those of a section in a dict of their own."""
    changes = {
        name: dataclasses.replace(getattr(config, name), **value)
        if isinstance(value, dict)
        else value
        for name, value in options.items()
    }
    return dataclasses.replace(config, **changes)


def _other(config: TrainConfig, changed: TrainConfig, subject: PlanInputs) -> PlanInputs:
    """The subject of a configuration that differs at most in the dtype of the model."""
    if changed.dtype == config.dtype:
        return subject
    from jaxrl_llm import models

    model = models.make_model(dataclasses.replace(subject.model.config, dtype=changed.dtype))
    return subject._replace(model=model)


def _title(config: TrainConfig, subject: PlanInputs) -> str:
    name = config.model if isinstance(config.model, str) else "model"
    sampling = config.sampling
    return (
        f"{name}: {config.prompts_per_step} prompts of up to {subject.longest} tokens x "
        f"{sampling.group_size} rollouts of up to {sampling.max_new_tokens}, in "
        f"{config.microbatches} microbatch(es); bytes on each device"
    )


def _table(plan: Plan) -> list[str]:
    lines = []
    for title, parts, needed in (
        ("until all is loaded", plan.loading, False),
        ("always", plan.state, True),
        ("while a step trains", plan.step, True),
        ("while the policy samples", plan.sampling, True),
        ("at most", {"": plan.peak}, True),
        ("on a device that samples", plan.sampler, False),
    ):
        if parts or needed:
            lines.append(_row(2, title, sum(parts.values())))
            lines += [_row(4, name, count) for name, count in parts.items() if name]
    return lines


def _row(indent: int, name: str, count: int) -> str:
    return f"{' ' * indent}{name:<{30 - indent}}{_size(count):>12}"


def _size(count: float) -> str:
    """Bytes in words."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.1f} KiB"


def abstract_model(config: TrainConfig) -> tuple[Model, ArrayTree, Any]:
    """Model, shapes of its float32 parameters, and tokenizer; no weight is read or fetched.

    A function that returns the model is traced; one that cannot be is called.
    """
    from jaxrl_llm import data, models

    if isinstance(config.model, str):
        from jaxrl_llm.models.loading import read_config

        files = models.resolve(config.model, weights=False)
        asked = {"dtype": config.dtype, "quantization": config.quantization}
        model = models.make_model(dataclasses.replace(read_config(files.config), **asked))
        return model, models.param_shapes(model), data.load_tokenizer(files.tokenizer)
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


def load_inputs(config: TrainConfig) -> PlanInputs:
    """What a plan of this configuration is about: reads the questions, but no weights.

    Raises:
      ValueError: If model or questions are such that the run would not start.
    """
    from jaxrl_llm.rollout.sampler import BUCKETS, prompt_room

    model, params, tokenizer = abstract_model(config)
    if config.packing == "always":
        check_reads_segments("train", model)
    room = prompt_room("sampling", model, config.sampling.max_new_tokens)
    train, held_out, _ = load_questions(config, tokenizer, room)
    if config.evaluation.enabled and not held_out:
        raise ValueError(
            "evaluation: there are no held-out questions; set data.held_out or data.evaluation, or "
            "turn the evaluation off."
        )
    recipe = find_recipe(config.recipe, config.sampling, num_prompts=len(train))
    if isinstance(recipe, Recipe):
        check_provided(recipe, train)
    longest = max(len(question.tokens) for question in [*train, *held_out])
    longest = next((size for size in BUCKETS if size >= longest), longest)
    return PlanInputs(model, params, longest, len(held_out))


def lay_out(config: TrainConfig, *, elsewhere: bool = False) -> TrainConfig:
    """The configuration with the sizes of its mesh in numbers, if a run may have it.

    Args:
      config: The run.
      elsewhere: Whether it is planned for devices that are not here; as many as the sizes say.

    Raises:
      ValueError: If the mesh fits neither the batch nor the devices, or has a size of -1 though
        nobody knows how many devices there are.
    """
    if elsewhere:
        _check_elsewhere(config)
    else:
        mesh = load_meshes(
            config.mesh, config.asynchrony, config.prompts_per_step, config.microbatches
        )[0]
        sizes = dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)
        config = dataclasses.replace(config, mesh=MeshConfig(**sizes))
    if config.sampling.slots is not None:
        rows, _ = config.sampling.grid(config.prompts_per_step)
        alone = config.asynchrony.sampler_devices is not None
        sizes = sampler_mesh(config) if alone else dataclasses.asdict(config.mesh)
        if rows % (shards := sizes["data"] * sizes["fsdp"]):
            raise ValueError(
                f"sampling: slots {config.sampling.slots} are {rows} rows, which do not spread "
                f"over {shards} devices, the mesh axes data x fsdp."
            )
    return config


def _check_elsewhere(config: TrainConfig) -> None:
    """Raises ValueError for a mesh that a run refuses, or whose size is not known here."""
    sizes, given = dataclasses.asdict(config.mesh), config.asynchrony
    for axis, size in sizes.items():
        if size == -1:
            raise ValueError(
                f"mesh: how many devices there are elsewhere is not known here; give {axis} a size "
                f"in place of -1 (--mesh.{axis})."
            )
    if given.sampler_devices is not None:
        own = sampler_mesh(config)
        if math.prod(own.values()) != given.sampler_devices:
            text = " x ".join(f"{name} {size}" for name, size in own.items())
            raise ValueError(
                f"asynchrony: a sampler_mesh of {text} is not that of {given.sampler_devices} "
                "sampler_devices."
            )
        check_batch("asynchrony", config.prompts_per_step, 1, own["data"] * own["fsdp"])
    elif given.max_staleness and math.prod(sizes.values()) > 1:
        raise ValueError(
            "asynchrony: a sampler and a step that share several devices would wait for each other "
            "for ever; give the sampler some of its own with sampler_devices."
        )


def sampler_mesh(config: TrainConfig) -> dict[str, int]:
    """Sizes of the mesh axes of the devices which only sample."""
    sizes = dataclasses.asdict(config.asynchrony.sampler_mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    left = (config.asynchrony.sampler_devices or 1) // known
    return {axis: left if size == -1 else size for axis, size in sizes.items()}


def make_plan(config: TrainConfig, subject: PlanInputs, *, accelerator: bool | None = None) -> Plan:
    """Bytes of a run on each device.

    Args:
      config: The run, the sizes of its mesh in numbers; see :func:`lay_out`.
      subject: From :func:`load_inputs`, of this configuration or of one
        that differs in nothing that it depends on.
      accelerator: Whether the device multiplies bfloat16 numbers as they are; by default, whether
        the one that is here does. On CPUs most of what is between products is float32.

    Returns:
      The plan. Packed rows, which take less, are counted as if they were padded.

    Raises:
      ValueError: If a part of the run cannot be made, such as an adapter of too high a rank.
    """
    if accelerator is None:
        accelerator = jax.default_backend() != "cpu"
    mesh, own = dataclasses.asdict(config.mesh), config.asynchrony.sampler_devices
    model, params = _with_adapter(config, subject.model, subject.params)
    sampling = sampling_bytes(config, subject, params, mesh)
    shared = config.asynchrony.max_staleness > 0 and own is None
    if shared:
        sampling["weights of the sampler"] = published_bytes(config, params, mesh)
    evolves = isinstance(find_recipe(config.recipe, config.sampling), EvolutionRecipe)
    return Plan(
        {} if isinstance(config.model, str) else _loading_bytes(subject, params, mesh),
        _state_bytes(config, model, params, mesh),
        step_bytes(config, subject, params, mesh, accelerator=accelerator),
        sampling,
        shared,
        {} if own is None else sampler_bytes(config, subject, params, sampler_mesh(config)),
        () if evolves else unknown_sizes(subject),
    )


def held_bytes(config: TrainConfig) -> dict[str, int]:
    """Bytes on one device that are there for the whole run, whose mesh is laid out.

    Only the shape of the model is read.
    """
    model, params, _ = abstract_model(config)
    mesh = dataclasses.asdict(config.mesh)
    return _state_bytes(config, *_with_adapter(config, model, params), mesh)


def _with_adapter(config: TrainConfig, model: Model, params: ArrayTree) -> tuple[Model, ArrayTree]:
    shapes = jax.eval_shape(lambda p: with_adapter(model, p, config.lora)[1], params)
    return model, shapes


def _loading_bytes(subject: PlanInputs, params: ArrayTree, mesh: dict[str, int]) -> dict[str, int]:
    """A function's weights are float32; those that stay frozen are cast once all are there."""
    if not isinstance(params, Adapted):
        return {}
    kept = tree_bytes(params.base, mesh)
    loaded = tree_bytes(subject.params, mesh)
    return {"weights in float32": loaded, "weights as kept": kept} if kept < loaded else {}


def _state_bytes(
    config: TrainConfig, model: Model, params: ArrayTree, mesh: dict[str, int]
) -> dict[str, int]:
    recipe = find_recipe(config.recipe, config.sampling)
    moving = trainable(params)
    base = params.base if isinstance(params, Adapted) else params
    chosen = moving_only(recipe, make_optimizer(config.optimizer))
    optimizer = jax.eval_shape(chosen.init, moving)
    parts = {"weights": tree_bytes(params, mesh)}
    spec = param_spec if isinstance(recipe, EvolutionRecipe) else update_spec
    parts["optimizer"] = tree_bytes(optimizer, mesh, spec=spec)
    if recipe.reference is not None:
        parts["reference"] = tree_bytes(moving, mesh)
    elif recipe.uses_reference and base is params:  # an adapter's reference is its base
        parts["reference"] = tree_bytes(params, mesh)
    if recipe.critic is not None and config.critic is not None:
        heads, key = recipe.critic.heads, jax.random.key(0)
        critic = jax.eval_shape(lambda p: init_critic(model, p, heads=heads, key=key), base)
        own = jax.eval_shape(make_optimizer(config.critic).init, critic)
        copies = 1 if recipe.critic.target_rate is None else 2
        parts["critic"] = copies * tree_bytes(critic, mesh)
        parts["critic"] += tree_bytes(own, mesh, spec=update_spec)
    return parts


def step_bytes(
    config: TrainConfig, subject: PlanInputs, params: ArrayTree, mesh: Mesh, *, accelerator: bool
) -> dict[str, int]:
    """Gradients, casts, activations and logits of one microbatch, or an update of a population."""
    recipe, moving = find_recipe(config.recipe, config.sampling), trainable(params)
    if isinstance(recipe, EvolutionRecipe):
        noise = 4 * min(recipe.chunk, _members(config, recipe)) * _drawn(recipe, moving)
        return {"gradients": tree_bytes(moving, mesh), "noise of an update": noise}
    parts = {"gradients": _gradient_bytes(moving, mesh, config.microbatches)}
    if recipe.critic is not None:  # a whole model, whatever of the policy moves
        of_critic = _gradient_bytes(subject.params, mesh, config.microbatches)
        parts["gradients of the critic"] = of_critic
    if not unknown_sizes(subject):
        parts["activations"] = _activation_bytes(config, subject, mesh, accelerator)
    parts["logits"] = logits_bytes(
        *_logits_shape(config, subject),
        mesh=mesh,
        statistics=bool(recipe.computed_from("policy", "old_policy", "reference", "teacher")),
    )
    if support := _support_bytes(config, subject, mesh):
        parts["support of tokens"] = support
    if config.lora.rank is None or recipe.critic is not None:
        parts |= _present("weights as multiplied", _cast_bytes(subject, mesh))
    if mesh["fsdp"] > 1:
        parts |= _present("weights gathered", _gathered_bytes(subject, mesh))
    return parts


def unknown_sizes(subject: PlanInputs) -> tuple[str, ...]:
    """What a model's configuration does not say and activations cannot be counted without."""
    return tuple(name for name in _SIZES if not hasattr(subject.model.config, name))


def _present(name: str, size: int) -> dict[str, int]:
    return {name: size} if size else {}


def _activation_bytes(
    config: TrainConfig, subject: PlanInputs, mesh: Mesh, accelerator: bool
) -> int:
    """Those of the part of a microbatch that one device has."""
    shape = subject.model.config
    batch = BatchShape(
        -(-config.prompts_per_step // (config.microbatches * mesh["data"] * mesh["fsdp"])),
        config.sampling.group_size,
        subject.longest,
        config.sampling.max_new_tokens,
    )
    return activation_bytes(
        shape,
        batch,
        remat=config.remat,
        itemsize=jnp.dtype(shape.dtype).itemsize if accelerator else 4,
        adapter=config.lora.rank is not None,
        split=mesh["tensor"],
    )


def _logits_shape(config: TrainConfig, subject: PlanInputs) -> tuple[int, int, int]:
    """Vocabulary, tokens of the responses of a microbatch, width of hidden states."""
    tokens = config.prompts_per_step * config.sampling.group_size * config.sampling.max_new_tokens
    shape = subject.model.config
    return shape.vocab_size, -(-tokens // config.microbatches), getattr(shape, "width", 0)


def _gradient_bytes(moving: ArrayTree, mesh: Mesh, microbatches: int) -> int:
    """Those of an update, and what is there before they are summed over ``data``."""
    own = tree_bytes(moving, mesh, spec=update_spec)
    if microbatches > 1:
        return own + tree_bytes(moving, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(moving)
    largest = max(tree_bytes({trees.path_str(path): x}, mesh) for path, x in leaves)
    return own + (largest if mesh["data"] > 1 else 0)


def _support_bytes(config: TrainConfig, subject: PlanInputs, mesh: Mesh) -> int:
    """The batch's sets of tokens, and the copies that a step makes of them.

    Where they are scored their rows are laid out anew, and so they are to be split.
    """
    given, vocab_size = config.sampling, subject.model.config.vocab_size
    policy = {"temperature": given.temperature, **filters_of(config)}
    _, each = recorded_bytes(vocab_size, **policy)
    tokens = config.prompts_per_step * given.group_size * given.max_new_tokens
    whole = each * tokens // (mesh["data"] * mesh["fsdp"])
    parts = config.microbatches
    return 2 * whole if parts == 1 else 3 * whole + whole // parts


def _cast_bytes(subject: PlanInputs, mesh: Mesh) -> int:
    """Bytes of the matrices in the dtype of the products, where that is another."""
    size = jnp.dtype(subject.model.config.dtype).itemsize
    if size == 4:
        return 0
    matrices = jax.tree.map(lambda x: x if x.ndim > 1 else None, subject.params)
    return tree_bytes(matrices, mesh) * size // 4


def _gathered_bytes(subject: PlanInputs, mesh: Mesh) -> int:
    """Weights that a device gathers of others: of two layers and what is no layer, or of all."""
    params, half = subject.params, jnp.dtype(subject.model.config.dtype).itemsize
    across = {"tensor": mesh["tensor"]}
    layers = params.get("layers") if isinstance(params, Mapping) else None
    if not isinstance(layers, Mapping):
        whole = tree_bytes(params, across)
        return whole if whole > tree_bytes(params, mesh) else 0
    layer = max(tree_bytes(x, across) for x in layers.values())
    table = tree_bytes({k: x for k, x in params.items() if k != "layers"}, across)
    return (2 * layer + table) * half // 4 + table


def sampling_bytes(
    config: TrainConfig, subject: PlanInputs, params: ArrayTree, mesh: Mesh
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
    config: TrainConfig, subject: PlanInputs, params: ArrayTree, mesh: Mesh
) -> dict[str, int]:
    """All that is on a device which does nothing but sample."""
    held = tree_bytes(params, mesh) - tree_bytes(trainable(params), mesh)
    parts = {"weights": held + published_bytes(config, params, mesh)}
    return parts | _decoding_bytes(config, subject, params, mesh, [_sampled(config, subject)])


def published_bytes(config: TrainConfig, params: ArrayTree, mesh: Mesh) -> int:
    """The sampler's copies of what moves, where it samples while a step trains.

    Old ones for the batch under way, the newest, and those that replace these meanwhile.
    """
    copies = 2 if config.asynchrony.max_staleness == 1 else 3
    return copies * tree_bytes(trainable(params), mesh)


def _decoding_bytes(
    config: TrainConfig,
    subject: PlanInputs,
    params: ArrayTree,
    mesh: Mesh,
    grids: list[DecodeShape],
) -> dict[str, int]:
    shards, shape = mesh["data"] * mesh["fsdp"], subject.model.config
    sizes = {"prompt_length": subject.longest, "length": config.sampling.max_new_tokens}

    def cache(grid: DecodeShape) -> int:
        size = {"prompts": grid.rows, "slots": grid.slots, "recorded": grid.recorded}
        return cache_bytes(shape, **size, **sizes, split=mesh["tensor"]) // shards

    logits = [4 * shape.vocab_size * grid.blocks * -(-grid.slots // shards) for grid in grids]
    parts = {"cache of the sampler": max(map(cache, grids)), "logits of the sampler": max(logits)}
    return parts | _present("weights as multiplied", _made_bytes(subject, params, mesh))


def _made_bytes(subject: PlanInputs, params: ArrayTree, mesh: Mesh) -> int:
    """Bytes of the weights that a sampler makes before it decodes, cast or rounded to 8 bits."""

    def made(new, old):
        if isinstance(new, RoundedWeights):
            return new.q
        return None if new.dtype == old.dtype else new

    cast = jax.eval_shape(lambda p: cast_params(subject.model, p), params)
    rounded = {"is_leaf": lambda x: isinstance(x, RoundedWeights)}
    return tree_bytes(jax.tree.map(made, cast, params, **rounded), mesh)


def _sampled(config: TrainConfig, subject: PlanInputs) -> DecodeShape:
    """What decodes at one time of a step's rollouts."""
    given, prompts = config.sampling, config.prompts_per_step
    recipe = find_recipe(config.recipe, given)
    if isinstance(recipe, EvolutionRecipe):  # a member reads the prompts itself
        count = prompts * given.group_size * recipe.tries
        return _decode_shape(config, subject, count, count, recipe.temperature)
    rows, width = (prompts, given.group_size) if given.slots is None else given.grid(prompts)
    return _decode_shape(config, subject, rows, rows * width, given.temperature)


def _evaluated(config: TrainConfig, subject: PlanInputs) -> list[DecodeShape]:
    """The same of the two evaluations, if there are any."""
    if not config.evaluation.enabled:
        return []
    given, prompts = config.sampling, config.prompts_per_step
    greedy = min(prompts * given.group_size, max(subject.held_out, 1))
    answers = prompts * (config.evaluation.samples or given.group_size)
    return [
        _decode_shape(config, subject, greedy, greedy, 0.0),
        _decode_shape(config, subject, prompts, answers, given.temperature),
    ]


def _decode_shape(
    config: TrainConfig, subject: PlanInputs, rows: int, slots: int, temperature: float
) -> DecodeShape:
    filters = filters_of(config) if temperature else {}
    vocab_size = subject.model.config.vocab_size
    recorded, support = recorded_bytes(vocab_size, temperature=temperature, **filters)
    # Besides those of the model and those that are drawn from, a filter over all of them has its
    # own, sorted and summed.
    return DecodeShape(rows, slots, recorded, 5 if 8 * support >= vocab_size else 2)


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
        return tree_bytes(params, mesh)
    draws = _members(config, recipe) // (2 if recipe.pairs else 1)
    return 4 * draws * _drawn(recipe, params) // (mesh["data"] * mesh["fsdp"])


def tree_bytes(
    tree: ArrayTree, mesh: Mapping[str, int] | None = None, *, spec: Callable = param_spec
) -> int:
    """Bytes of arrays, or of their shapes, on one device of a mesh.

    Args:
      tree: Parameters, or an optimizer's state whose paths end as theirs do.
      mesh: Sizes of the mesh axes; they need not be those of devices that are there.
      spec: How a leaf is split: ``param_spec``, or ``update_spec`` of gradients and optimizers.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory_plan import tree_bytes
      >>> params = jr.testing.tiny_model()[1]
      >>> tree_bytes(params), tree_bytes(params, {"fsdp": 2})
      (107520, 54080)
    """
    sizes = {axis: (mesh or {}).get(axis, 1) for axis in AXES}
    there = jax.sharding.AbstractMesh(tuple(sizes.values()), AXES)

    def one(path: str, x) -> int:
        axes = jax.tree.leaves(tuple(spec(path, x.shape, there)))  # one may be split over two
        return x.size * x.dtype.itemsize // math.prod(sizes[axis] for axis in axes)

    arrays = [x for x in jax.tree_util.tree_leaves_with_path(tree) if hasattr(x[1], "shape")]
    return sum(one(trees.path_str(path), x) for path, x in arrays)


def activation_bytes(
    config: Any,
    batch: BatchShape,
    *,
    remat: str,
    itemsize: int = 4,
    adapter: bool = False,
    split: int = 1,
) -> int:
    """Bytes that the forward pass keeps for the backward pass, at their most.

    With N = P (Lp + G T) tokens, S = P (Lp^2 + G T (Lp + T)) pairs of them, width D, H query and K
    key heads of size d, and M hidden units, a layer keeps

        full   N D + 2 P Lp K d
        dots   N (2 D + (H + 2 K) d + 2 M) + 2 P Lp K d
        none   N (4 D + 2 (H + K) d + 3 M) + 2 H S

    numbers: its input and what responses attend to of the prompt, which is kept where prompts go
    through the layers first; its matrix products too; all.
    While a layer that keeps less is computed again, all of that one layer is there. With an adapter
    it is ``2 N M`` more: what is added to hidden units stands beside them. The last norm keeps ``2
    P G T D`` once.

    Args:
      config: A ``ModelConfig``.
      batch: What a device works on at one time.
      remat: "none", "dots" or "full".
      itemsize: Bytes of a number; those of attention scores are float32.
      adapter: Whether linear layers have low-rank matrices beside them.
      split: Size of the ``tensor`` axis: a device has that part of H, K and M.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory_plan import BatchShape, activation_bytes
      >>> config, batch = jr.testing.tiny_config(), BatchShape(1, 2, 8, 4)
      >>> activation_bytes(config, batch, remat="none")
      64512

    References:
      None; ours. Held to compiled programs on CPUs, and to what traced ones keep, by its tests.
    """
    checks.check_option("activation_bytes", "remat", remat, ("none", "dots", "full"))
    c, (P, G, Lp, T) = config, batch
    tokens, pairs = P * (Lp + G * T), P * (Lp * Lp + G * T * (Lp + T))
    heads, key_heads, hidden = (
        max(size // split, 1) for size in (c.num_heads, c.num_kv_heads, c.mlp_width)
    )
    width, queries, keys = c.width, heads * c.head_dim, key_heads * c.head_dim
    everything = 4 * width + 2 * (queries + keys) + 3 * hidden
    everything += queries + keys if getattr(c, "qk_norm", False) else 0
    everything += 2 * hidden if adapter else 0
    whole = itemsize * tokens * everything + 4 * 2 * heads * pairs
    ends = itemsize * P * G * T * width
    if remat == "none":
        return c.num_layers * whole + ends
    shared, kept = 2 * P * Lp * keys, width
    if remat == "dots":
        kept = 2 * width + queries + 2 * keys + 2 * hidden
    return c.num_layers * itemsize * (tokens * kept + shared) + whole + ends


def logits_bytes(
    vocab_size: int,
    tokens: int,
    width: int,
    *,
    mesh: Mapping[str, int] | None = None,
    statistics: bool = False,
) -> int:
    """Bytes on one device of the three blocks of logits that exist at one time.

    Args:
      vocab_size: V.
      tokens: Of the responses of a microbatch, on all devices.
      width: Of hidden states.
      mesh: Sizes by axis; None is one device.
      statistics: Whether statistics over the vocabulary are computed, in chunks of tokens.
    """
    mesh = dict.fromkeys(AXES, 1) | dict(mesh or {})
    parts = 1 if vocab_size % mesh["tensor"] else mesh["tensor"]
    own = -(-tokens // (mesh["data"] * mesh["fsdp"]))
    words = block_words(vocab_size, tokens, width, _chunk_of(logprobs.token_logprobs))
    found = own * -(-words // parts)
    if statistics:  # which are computed beside the log-probabilities
        chunk = min(_chunk_of(logprobs.vocabulary_statistics), own)
        found = max(found, chunk * vocab_size // parts)
    return 3 * 4 * found


def _chunk_of(scorer: Callable) -> int:
    return inspect.signature(scorer).parameters["chunk_size"].default


def recorded_bytes(vocab_size: int, **sampling) -> tuple[int, int]:
    """Bytes that a sampler records of one token, and how many of them are its support.

    Args:
      vocab_size: V.
      **sampling: Options of :class:`~jaxrl_llm.rollout.DrawOptions`.

    Example:
      >>> from jaxrl_llm.train.memory_plan import recorded_bytes
      >>> recorded_bytes(320), recorded_bytes(320, top_p=0.9), recorded_bytes(320, top_k=5)
      ((20, 0), (60, 40), (40, 20))
    """
    blank = make_draw("recorded_bytes", DrawOptions(**sampling), vocab_size=vocab_size).blank
    return _bytes(blank), _bytes(blank.support)


def cache_bytes(
    config: Any,
    *,
    prompts: int,
    prompt_length: int,
    slots: int,
    length: int,
    recorded: int = 20,
    split: int = 1,
) -> int:
    """Bytes of a sampler's keys, values and outputs.

    Args:
      config: A ``ModelConfig``.
      prompts: Whose keys and values are there once each.
      prompt_length: Room for a prompt.
      slots: Responses that decode at one time.
      length: Room for a response.
      recorded: Bytes of the outputs of one token, from :func:`recorded_bytes`.
      split: Devices that the weights of a layer are split over; those that divide its heads have
        each their part of keys and values.
    """
    heads = config.num_kv_heads
    each = 2 * config.num_layers * config.head_dim * (heads if heads % split else heads // split)
    each *= np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    return each * (prompts * prompt_length + slots * length) + recorded * slots * length


def _bytes(tree: ArrayTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def available_memory(devices: int = 1, *, root: str = "/") -> int | None:
    """Bytes that one device has for a run; None if it does not tell.

    On CPUs it is what the machine or the container has left, an equal share for each of the run's
    ``devices`` there.

    Args:
      devices: How many the run has.
      root: Where the files of the operating system begin.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu":
        return None
    try:
        lines = _numbers(Path(root, "proc/meminfo"))
        left = min([lines["MemAvailable:"] * 1024, *_left_in_groups(Path(root))])
    except (OSError, KeyError, ValueError):
        return None
    return left // max(min(devices, jax.local_device_count()), 1)


# By version of control groups: where memory is limited, its limit, use, and the files in that use
# that can be dropped.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left under each limit of the process's control groups, such as a container's."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        for kind, limit, used, droppable in _GROUPS:
            if kind not in names.split(","):
                continue
            here = PurePosixPath(path.lstrip("/"))
            for part in (here, *here.parents):  # in a container its own group may be the first
                folder = root / "sys/fs/cgroup" / kind / part
                try:
                    most, taken = (int((folder / name).read_text()) for name in (limit, used))
                    taken -= _numbers(folder / "memory.stat").get(droppable, 0)
                except (OSError, ValueError):  # not there, or "max": without a limit
                    continue
                yield max(most - taken, 0)


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line of a file of the operating system: a name and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
