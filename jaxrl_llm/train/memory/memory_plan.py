"""The device memory that a run needs, computed from shapes; nothing is allocated.

``plan_text`` implements ``--plan``: a table, and the options for a run that does not fit.
``check_memory`` refuses a run whose state alone exceeds the memory of a device. The rest of the
module is the inputs of a plan (``load_inputs``), the plan (``make_plan``), a step and a sampler;
the formulas of single quantities are in ``memory_bytes``. All numbers are bytes on one device.

Shared arguments: ``config``, the run; ``elsewhere``, whether it runs on devices that this machine
does not have, as many as its mesh sizes specify.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime.memory import available_memory
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import in_order, width_of
from jaxrl_llm.data.chat import with_template_options
from jaxrl_llm.evolution.leaves import num_drawn
from jaxrl_llm.models.denoising import block_length_of, is_causal
from jaxrl_llm.models.lora import Adapted, trainable
from jaxrl_llm.models.protocol import (
    EXPERT_DTYPE,
    Model,
    cast_params,
    expert_shape,
    is_rounded,
    round_params,
)
from jaxrl_llm.models.sharding import BATCH_AXES, param_spec, update_spec
from jaxrl_llm.recipes import EvolutionRecipe
from jaxrl_llm.recipes.records import replace_fields
from jaxrl_llm.rollout.denoising import cells_at_once, options_of
from jaxrl_llm.rollout.sampler import bucket_of
from jaxrl_llm.rollout.sampling.options import DrawOptions
from jaxrl_llm.train.batches import Passes, check_reads_rows
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.evolution import moving_only
from jaxrl_llm.train.experiment.left_out import fitted, gradable
from jaxrl_llm.train.experiment.run_data import (
    check_data,
    load_prompts,
    teacher_room,
    text_room,
)
from jaxrl_llm.train.experiment.run_models import holds_reference, with_trained
from jaxrl_llm.train.experiment.samplers import check_denoising, check_replay, engine_grid
from jaxrl_llm.train.experiment.setup import with_mesh_sizes
from jaxrl_llm.train.memory.memory_bytes import (
    BatchShape,
    LayerPlacement,
    activation_bytes,
    cache_bytes,
    largest_layer_bytes,
    logits_bytes,
    recorded_bytes,
    tree_bytes,
)
from jaxrl_llm.train.mesh import (
    MeshConfig,
    check_batch,
    check_expert_axis,
    sampling_shards,
)
from jaxrl_llm.train.models.critic import init_critic
from jaxrl_llm.train.models.model_rewards import abstract_reward, judge
from jaxrl_llm.train.models.rounding import check_rounded_model
from jaxrl_llm.train.models.teachers import AlignedTeacher, TokenTeacher, from_name
from jaxrl_llm.train.optimizer import describe_optimizer, make_optimizer, policy_optimizer
from jaxrl_llm.train.state import device_bytes
from jaxrl_llm.train.update.cost import describe
from jaxrl_llm.train.update.part import Setup, Start
from jaxrl_llm.train.update.parts import parts_of

# Share of a device's memory for what is counted; the compiler and fragmentation take the rest.
_SHARE = 0.95
# A top-k filter that rarely changes what is sampled.
_TOP_K = 128
# Sizes in a model's configuration that the activations depend on; not every model has them.
_SIZES = ("width", "num_heads", "mlp_width")


class OutOfMemory(ValueError):
    """A run needs more memory than a device has."""


class PlanInputs(NamedTuple):
    """The shapes and sizes that a plan depends on, in addition to the configuration."""

    model: Model  # without an adapter
    params: ArrayTree  # shapes of its parameters
    longest_prompt: int  # tokens, including the sampler's padding
    num_held_out: int  # questions
    teacher: ArrayTree | None = None  # shapes of the parameters of a teacher on the devices
    teacher_state: int = 0  # bytes of one of its hidden states
    teacher_config: Any = None  # its configuration
    subagent: tuple[Model, ArrayTree] | None = None  # a subagent's model, shapes of its parameters
    slot_prompt: int | None = None  # tokens that slots have for a prompt; None is longest_prompt


class Plan(NamedTuple):
    """Bytes on one device, by purpose."""

    loading: dict[str, int]  # until the state is complete
    state: dict[str, int]  # from the first step to the last
    step: dict[str, int]  # in addition, while a step trains
    sampling: dict[str, int]  # in addition, while rollouts are sampled or the policy is evaluated
    episodes: dict[str, int]  # in addition to `sampling`, while episodes are evaluated
    overlap: bool  # whether a step and the sampler run at the same time
    sampler: dict[str, int]  # on a device that only samples; empty if there is none
    unknown: tuple[str, ...] = ()  # missing sizes, without which activations are not counted

    @property
    def resident(self) -> int:
        """Bytes in use from the first step to the last."""
        return sum(self.state.values())

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at one time on a device that trains."""
        phases = (self.step, self.sampling, self.episodes)
        step, sampling, episodes = (sum(parts.values()) for parts in phases)
        working = max(step, episodes) + sampling if self.overlap else max(step, sampling)
        return max(sum(self.loading.values()), self.resident + working)

    @property
    def most(self) -> int:
        """The largest number of bytes in use at one time on any device."""
        return max(self.peak, sum(self.sampler.values()))

    def table(self) -> list[str]:
        """The lines of a table: the bytes of each phase and of each purpose in it."""
        lines = []
        for title, parts, needed in (
            ("until all is loaded", self.loading, False),
            ("always", self.state, True),
            ("while a step trains", self.step, True),
            ("while the policy samples", self.sampling, True),
            ("while episodes are evaluated", self.episodes, False),
            ("at most", {"": self.peak}, True),
            ("on a device that samples", self.sampler, False),
        ):
            if parts or needed:
                lines.append(_row(2, title, sum(parts.values())))
                lines += [_row(4, name, count) for name, count in parts.items() if name]
        return lines


class DecodeShape(NamedTuple):
    """What a sampler decodes at one time."""

    rows: int  # prompts
    prompt_length: int  # room for a prompt
    slots: int  # responses
    recorded: int  # bytes recorded per token
    blocks: int  # copies of the logits of all slots that exist at one time


def plan_text(config: TrainConfig, *, memory: float | None = None) -> str:
    """The plan of a run as a table, if the run fits.

    Args:
      config: The run; its questions are read, its weights are not.
      memory: Bytes of one accelerator, which this machine need not have; the mesh sizes determine
        how many there are. None plans for the devices of this machine.

    Raises:
      OutOfMemory: If the run does not fit; the message has the table and the options that help.
      ValueError: If the run could not start because the configuration is incompatible with the
        model, the data or the devices.
    """
    from jaxrl_llm import models

    elsewhere = memory is not None
    wanted, present = math.prod(dataclasses.astuple(config.mesh)), jax.device_count()
    if not elsewhere and wanted > present:
        raise ValueError(
            f"plan: the mesh has {wanted} devices, but there are {present}; to plan for other "
            "devices, give the memory of one (--plan-memory)."
        )
    if elsewhere and config.dtype == "auto":  # not what this machine would choose
        config = dataclasses.replace(config, dtype="bfloat16")
    config = lay_out(config, elsewhere=elsewhere)
    accelerator = True if elsewhere else None
    available = _device_memory(config) if memory is None else int(memory)
    inputs = load_inputs(config)
    plan = make_plan(config, inputs, accelerator=accelerator)
    name = config.model if isinstance(config.model, str) else "model"
    sampling = config.sampling
    parts = f"{config.microbatches} microbatch(es)"
    if (budget := config.tokens_per_microbatch) is not None:
        parts = f"microbatches of up to {budget} cells"
    if (minibatches := config.passes.minibatches) > 1:
        parts = f"{minibatches} minibatches and {parts}"
    title = (
        f"{name}: {config.prompts_per_step} prompts of up to {inputs.longest_prompt} tokens x "
        f"{sampling.group_size} rollouts of up to {sampling.max_new_tokens}, in "
        f"{parts}; bytes on each device"
    )
    lines = [title, *plan.table()]
    if text := describe_optimizer(config):
        lines.append(f"Optimizer: {text}.")
    if (recipe := config.resolved_recipe).needs.reads_logp:
        epochs, minibatches = config.passes.epochs, config.passes.minibatches
        stale = config.samples_off_policy
        lines.append(describe(recipe, epochs=epochs, minibatches=minibatches, stale=stale))
    if plan.unknown:
        names = ", ".join(plan.unknown)
        lines.append(f"Activations are not counted: the model's configuration has no {names}.")
    if available is None:
        return "\n".join([*lines, "The device does not tell how much memory it has."])
    lines.append(_row(2, "a device has", available))
    if plan.most <= _SHARE * available:
        return "\n".join([*lines, "What is counted fits." if plan.unknown else "It fits."])
    lines.append("It does not fit. At most, one of these options at a time:")
    causal = is_causal(inputs.model)
    for text, changed in suggestions(config, causal=causal, elsewhere=elsewhere):
        try:
            changed = lay_out(changed, elsewhere=elsewhere)
            if changed.product_dtype != config.product_dtype:
                shape = dataclasses.replace(inputs.model.config, dtype=changed.product_dtype)
                inputs_then = inputs._replace(model=models.make_model(shape))
            else:
                inputs_then = inputs
            most = make_plan(changed, inputs_then, accelerator=accelerator).most
        except ValueError:  # such as a rank above the size of a matrix
            continue
        if most < 0.99 * plan.most:
            verdict = ", fits" if most <= _SHARE * available and not plan.unknown else ""
            lines.append(f"  {text:<40}{_size(most):>12}{verdict}")
    raise OutOfMemory("\n".join(lines))


def check_memory(config: TrainConfig) -> None:
    """Raises OutOfMemory if the state of a run alone exceeds the memory of a device.

    Only pretrained models are checked: their shapes are known before their weights are read.
    """
    if not isinstance(config.model, str):
        return
    config = lay_out(config)
    available = _device_memory(config)
    if available is None:
        return
    model, params, _ = abstract_model(config)
    subagent = _abstract_subagent(config, config.resolved_recipe, model, params)
    state = _state_bytes(_make_run(config, PlanInputs(model, params, 0, 0, subagent=subagent)))
    total = sum(state.values())
    if total > available:
        parts = ", ".join(f"{name} {_size(count)}" for name, count in state.items())
        raise OutOfMemory(
            f"train: the state of this run needs {_size(total)} on each device ({parts}), but "
            f"{_size(available)} are available; train an adapter (--lora.rank 16), split the state "
            "over devices (--mesh.fsdp), or see what helps with --plan."
        )


def _device_memory(config: TrainConfig) -> int | None:
    """Bytes that a device has for the run; None if it does not report them."""
    sampler_devices = config.asynchrony.sampler_devices or 0
    return available_memory(math.prod(dataclasses.astuple(config.mesh)) + sampler_devices)


def suggestions(
    config: TrainConfig, *, causal: bool = True, elsewhere: bool = False
) -> Iterator[tuple[str, TrainConfig]]:
    """Options that reduce the memory of a run; those that affect learning least come first.

    No mesh size in ``config`` is -1. A model that is not ``causal`` has no slots, and its sampler
    has no filters.
    """
    sampling, count, mesh = config.sampling, config.prompts_per_step, config.mesh
    changes: list[tuple[str, dict]] = []
    if config.remat != "full":
        changes.append(("--remat full", {"remat": "full"}))
    more = [n for n in (2, 4, 8, 16, 32) if n > config.microbatches and count % n == 0]
    if config.tokens_per_microbatch is None:
        changes += [(f"--microbatches {n}", {"microbatches": n}) for n in more]
    if causal and sampling.slots is None and count > 1:
        changes.append((f"--sampling.slots {count // 2}", {"sampling": {"slots": count // 2}}))
    if mesh.fsdp == 1 and mesh.data > 1:
        size = mesh.data if elsewhere else -1
        split = {"mesh": {"data": 1, "fsdp": size}}
        changes.append((f"--mesh.data 1 --mesh.fsdp {size}", split))
    elif mesh.fsdp == 1:
        for size in (2, 4, 8) if elsewhere else (-1,):
            changes += [
                (f"--mesh.{axis} {size}", {"mesh": {axis: size}}) for axis in ("data", "fsdp")
            ]
    if (sampler_devices := config.asynchrony.sampler_devices or 1) > 1:
        name, split = "--asynchrony.sampler-mesh", MeshConfig(fsdp=sampler_devices)
        text = f"{name}.data 1 {name}.fsdp {sampler_devices}"
        changes.append((text, {"asynchrony": {"sampler_mesh": split}}))
    if isinstance(config.model, str) and config.product_dtype == "float32":
        changes.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    optimizer = policy_optimizer(config)
    if optimizer.transform is None and optimizer.moment_dtype == "float32":
        config = dataclasses.replace(config, optimizer=optimizer)
        half = {"optimizer": {"moment_dtype": "bfloat16"}}
        changes.append(("--optimizer.moment-dtype bfloat16", half))
    if causal and (sampling.top_k is None or sampling.top_k > _TOP_K):
        changes.append((f"--sampling.top-k {_TOP_K}", {"sampling": {"top_k": _TOP_K}}))
    if config.lora.rank is None:
        changes.append(("--lora.rank 16", {"lora": {"rank": 16}}))
    if (tokens := sampling.max_new_tokens // 2) > 0:
        shorter = {"sampling": {"max_new_tokens": tokens}}
        changes.append((f"--sampling.max-new-tokens {tokens}", shorter))
    for text, options in changes:
        try:
            values = {
                name: replace_fields(getattr(config, name), value)
                if isinstance(value, dict)
                else value
                for name, value in options.items()
            }
            yield text, replace_fields(config, values)
        except ValueError:  # incompatible with the rest of the configuration
            continue


def _row(indent: int, name: str, count: int) -> str:
    return f"{' ' * indent}{name:<{30 - indent}}{_size(count):>12}"


def _size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.1f} KiB"


def abstract_model(config: TrainConfig) -> tuple[Model, ArrayTree, Any]:
    """The model, shapes of its float32 parameters, and tokenizer; no weights are read or fetched.

    A function that returns the model is traced, or called if it cannot be traced.
    """
    from jaxrl_llm import data, models

    if isinstance(config.model, str):
        from jaxrl_llm.models.loading import read_config

        files = models.resolve(config.model, weights=False)
        shape = dataclasses.replace(
            read_config(files.config),
            dtype=config.product_dtype,
            quantization=config.quantization,
            scan_layers=config.scan_layers,
        )
        model = models.make_model(shape)
        tokenizer = data.load_tokenizer(files.tokenizer)
        tokenizer = with_template_options(tokenizer, config.data.template_options)
        return model, models.param_shapes(model), tokenizer
    built: list[Any] = []

    def build():
        model, params, tokenizer = config.model()
        built[:] = model, tokenizer
        return trees.cast(params, jnp.float32)

    try:
        shapes = jax.eval_shape(build)
    except jax.errors.JAXTypeError:  # the function reads values
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), build())
    return built[0], shapes, built[1]


def load_inputs(config: TrainConfig) -> PlanInputs:
    """The inputs of a plan; reads the questions of the configuration, but no weights.

    Raises:
      ValueError: If the run could not start with this model or these questions.
    """
    model, params, tokenizer = abstract_model(config)
    if model.velocity is not None:
        raise ValueError("config: the memory of a flow model cannot be planned; leave out --plan.")
    check_reads_rows("train", model, config.layout)
    check_replay(config, model)
    check_rounded_model(config, model)
    prompts, others, _ = load_prompts(config)
    prompts, others, _ = gradable(config, prompts, others)
    recipe: Any = find_recipe(config.recipe, config.sampling, num_prompts=len(prompts))
    train, held_out, *_ = fitted(config, recipe, model, tokenizer, prompts, others)
    check_data(config, recipe, prompts, others)
    check_denoising(config, recipe, model)
    held_out = held_out[: config.evaluation.limit]
    # Slots are for training prompts, which the engine does not pad.
    slot_prompt = text_room(config, recipe, model, max(len(each.tokens) for each in train))
    longest = max([slot_prompt, *(len(each.tokens) for each in held_out)])
    return PlanInputs(
        model,
        params,
        bucket_of(longest),
        len(held_out),
        *_abstract_teacher(config),
        subagent=_abstract_subagent(config, recipe, model, params),
        slot_prompt=slot_prompt,
    )


def _abstract_subagent(
    config: TrainConfig, recipe: Any, model: Model, params: ArrayTree
) -> tuple[Model, ArrayTree] | None:
    """The subagent's model and the shapes of its parameters; those of the policy by default."""
    if recipe.needs.subagent is None:
        return None
    if (other := config.subagent.model) is None:
        return model, params
    return abstract_model(config.with_model(other))[:2]


def _abstract_teacher(config: TrainConfig) -> tuple[ArrayTree | None, int, Any]:
    """Shapes of a device teacher's parameters, bytes of one of its hidden states, and its config.

    Returns None, 0 and None if there is no such teacher.
    """
    teacher = config.teacher
    teacher = from_name(teacher) if isinstance(teacher, str) else teacher
    if teacher is None or isinstance(teacher, TokenTeacher | AlignedTeacher):
        return None, 0, None
    model, params, _ = abstract_model(config.with_model(teacher))
    if isinstance(teacher, str):  # its matrices are loaded in the dtype of its products
        params = jax.eval_shape(lambda p: cast_params(model, p), params)
    width = jax.eval_shape(model.output_matrix, params).shape[-1]
    return params, width * jnp.dtype(model.config.dtype).itemsize, model.config


def lay_out(config: TrainConfig, *, elsewhere: bool = False) -> TrainConfig:
    """The configuration with each mesh size of -1 replaced by a number.

    Raises:
      ValueError: If the mesh does not divide the batch or the devices, or a size is -1 and the
        number of devices is unknown.
    """
    if elsewhere:
        sizes, asynchrony = dataclasses.asdict(config.mesh), config.asynchrony
        for axis, size in sizes.items():
            if size == -1:
                raise ValueError(
                    f"mesh: the number of devices to plan for is unknown; set {axis} to a size "
                    f"instead of -1 (--mesh.{axis})."
                )
        if asynchrony.sampler_devices is not None:
            layout = sampler_mesh(config)
            if math.prod(layout.values()) != asynchrony.sampler_devices:
                text = " x ".join(f"{name} {size}" for name, size in layout.items())
                raise ValueError(
                    f"asynchrony: a sampler_mesh of {text} does not match "
                    f"{asynchrony.sampler_devices} sampler_devices."
                )
            shards = math.prod(layout[axis] for axis in BATCH_AXES)
            check_batch("asynchrony", config.prompts_per_step, 1, shards)
        asynchrony.check_apart(math.prod(sizes.values()))
    else:
        config = with_mesh_sizes(config)
    if config.sampling.slots is not None:
        rows, _ = config.sampling.grid(config.prompts_per_step)
        separate = config.asynchrony.sampler_devices is not None
        sizes = sampler_mesh(config) if separate else dataclasses.asdict(config.mesh)
        if rows % (shards := sampling_shards(sizes, config.prompts_per_step)):
            raise ValueError(
                f"sampling: slots {config.sampling.slots} are {rows} rows, which cannot be spread "
                f"over {shards} devices of the mesh."
            )
    return config


def sampler_mesh(config: TrainConfig) -> dict[str, int]:
    """Sizes of the mesh axes of the devices that only sample."""
    sizes = dataclasses.asdict(config.asynchrony.sampler_mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    left = (config.asynchrony.sampler_devices or 1) // known
    return {axis: left if size == -1 else size for axis, size in sizes.items()}


class _Run(NamedTuple):
    """A run, as read by the formulas."""

    config: TrainConfig
    inputs: PlanInputs
    recipe: Any
    params: ArrayTree  # shapes, with those of the adapter if the run has one
    trained: ArrayTree  # shapes of those that are trained
    mesh: dict[str, int]  # sizes of the axes

    @property
    def model(self) -> Model:
        """The model, without an adapter."""
        return self.inputs.model

    @property
    def shards(self) -> int:
        """The number of devices that a batch is spread over."""
        return math.prod(self.mesh[axis] for axis in BATCH_AXES)

    @property
    def sampling_shards(self) -> int:
        """The number of devices that the rollouts of a batch are spread over."""
        return sampling_shards(self.mesh, self.config.prompts_per_step)

    @property
    def slot_prompt(self) -> int:
        """Tokens that slots have for a prompt."""
        known = self.inputs.slot_prompt
        return self.inputs.longest_prompt if known is None else known

    @property
    def passes(self) -> Passes:
        """How a batch becomes optimizer steps, if all responses have the maximum length."""
        cells = self.inputs.longest_prompt + self.group_size * self.length
        passes = self.divided(self.config.passes, self.config.prompts_per_step, cells)
        if self.config.layout == "flat":  # whose rows are also scored by parts of minibatches
            return passes._replace(microbatches=passes.minibatches * passes.accumulated)
        return passes

    @property
    def parts(self) -> int:
        """Parts of a batch that backward passes read one after the other."""
        passes = self.passes
        second = self.recipe.needs.second_model
        if second is not None and second.steps_once:
            return passes.microbatches
        return passes.minibatches * passes.accumulated

    @property
    def num_answers(self) -> int:
        """Rows that train the subagent."""
        return self.config.prompts_per_step * self.group_size * self.recipe.needs.subagent.count

    @property
    def answer_parts(self) -> int:
        """Parts of these rows, whatever the minibatches of the batch."""
        options, passes = self.config.subagent, Passes(microbatches=self.config.microbatches)
        cells = options.prompt_length + options.max_new_tokens
        return self.divided(passes, self.num_answers, cells).microbatches

    def divided(self, passes: Passes, groups: int, cells: int) -> Passes:
        """The passes over groups of so many cells, as ``tokens_per_microbatch`` divides them."""
        if (budget := self.config.tokens_per_microbatch) is None:
            return passes
        each = -(-groups // (passes.minibatches * self.shards))
        count = -(-each // max(1, budget // cells))
        return passes._replace(microbatches=passes.minibatches * count)

    @property
    def group_size(self) -> int:
        """Rollouts of a group of a batch: G, or the collector's width for G."""
        collector = self.recipe.collector or in_order()
        return width_of(collector, self.config.sampling.group_size)

    @property
    def length(self) -> int:
        """Tokens of a row of a batch: T, plus those of a collector's text before the response."""
        sends_text = needs_of(self.recipe.collector).sends_text
        before = self.inputs.longest_prompt if sends_text else 0
        return self.config.sampling.max_new_tokens + before

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype of the matrix products."""
        return jnp.dtype(self.model.config.dtype).itemsize

    def of_sampler(self, params: ArrayTree) -> ArrayTree:
        """The shapes of parameters as a sampler of rollouts gets them."""
        mode = self.config.sampler_quantization if self.config.rounds_rollouts else None
        if mode is None:
            return params
        return jax.eval_shape(lambda p: round_params(self.model, p, mode=mode), params)

    @property
    def unknown_sizes(self) -> tuple[str, ...]:
        """Sizes that the activations depend on and the model's configuration lacks."""
        return tuple(name for name in _SIZES if not hasattr(self.model.config, name))

    @property
    def output_shape(self) -> tuple[int, int]:
        base = self.params.base if isinstance(self.params, Adapted) else self.params
        return jax.eval_shape(self.model.output_matrix, base).shape

    def bytes_of(self, tree: ArrayTree, *, spec: Callable = param_spec) -> int:
        """Bytes of parameters, gradients or moments on one device."""
        return tree_bytes(tree, self.mesh, spec=spec, rules=self.model.sharding_rules)


def _make_run(config: TrainConfig, inputs: PlanInputs) -> _Run:
    recipe, mesh = config.resolved_recipe, dataclasses.asdict(config.mesh)
    check_expert_axis(mesh, inputs.params, inputs.model.sharding_rules)
    params = jax.eval_shape(
        lambda p: with_trained(config, recipe, inputs.model, p)[1], inputs.params
    )
    return _Run(config, inputs, recipe, params, trainable(params), mesh)


def make_plan(config: TrainConfig, inputs: PlanInputs, *, accelerator: bool | None = None) -> Plan:
    """Bytes of a run on each device.

    Args:
      config: The run, with no mesh size of -1; see :func:`lay_out`.
      inputs: From :func:`load_inputs`, for this configuration or one that has the same inputs.
      accelerator: Whether the device multiplies bfloat16 numbers directly; by default, whether this
        machine's device does. On CPUs most values between products are float32.

    Returns:
      The plan. Packed rows take less memory, but are counted as if they were padded.

    Raises:
      ValueError: If a component of the run cannot be built, such as an adapter of too high a rank.
    """
    if accelerator is None:
        accelerator = jax.default_backend() != "cpu"
    run = _make_run(config, inputs)
    loading, sampler, episodes = {}, {}, {}
    if not isinstance(config.model, str) and isinstance(run.params, Adapted):
        # Weights from a function are float32; frozen ones are cast after all are loaded.
        loaded, cast = run.bytes_of(run.inputs.params), run.bytes_of(run.params.base)
        if cast < loaded:
            loading = {"weights in float32": loaded, "weights as kept": cast}
    separate = config.asynchrony.sampler_devices is not None
    overlap = config.asynchrony.max_staleness > 0 and not separate
    sampling = _sampling_bytes(run)
    # Episodes are evaluated in slots of their own while those of the next rollouts are in use.
    plays = config.environment is not None and config.evaluation.enabled
    between = plays and config.evaluation.every > 0
    if overlap:
        sampling["weights of the sampler"] = _published_bytes(run) + _rounded_base_bytes(run)
        if between:
            episodes = _decoding_bytes(run, [_rollout_shape(run)]) | _answering_bytes(run)
    if separate:
        other = run._replace(mesh=sampler_mesh(config))
        whole = other.bytes_of(other.params)
        frozen = whole - other.bytes_of(other.trained)
        of_base = _rounded_base_bytes(other) or frozen
        weights = {"weights": of_base + _published_bytes(other)}
        published = other._replace(params=other.of_sampler(other.params))
        decoding = _decoding_bytes(published, [_rollout_shape(other)])
        sampler = weights | {name: (1 + between) * size for name, size in decoding.items()}
        # The evaluation's copy of the policy. Before the first step and after the last, its trained
        # weights take the place of published ones.
        if plays and (copied := whole if between else frozen):
            sampler["weights of the evaluation"] = copied
    return Plan(
        loading,
        _state_bytes(run),
        _step_bytes(run, accelerator),
        sampling,
        episodes,
        overlap,
        sampler,
        run.unknown_sizes if run.recipe.needs.sums_gradients else (),
    )


def _state_bytes(run: _Run) -> dict[str, int]:
    recipe, needs, config = run.recipe, run.recipe.needs, run.config
    base = run.params.base if isinstance(run.params, Adapted) else run.params
    optimizer = jax.eval_shape(
        moving_only(recipe, make_optimizer(policy_optimizer(config))).init, run.trained
    )
    spec = update_spec if needs.sums_gradients else param_spec
    sizes = {
        "weights": run.bytes_of(run.params),
        "optimizer": run.bytes_of(optimizer, spec=spec),
    }
    if needs.sums_gradients:
        sizes |= _part_bytes(run, base)
    # An adapter's reference is its base, unless ``config.reference`` names another model.
    other = config.reference is not None or base is run.params
    if holds_reference(config, recipe) and other and not needs.moves_reference:
        # It is loaded in float32, even beside a frozen base in bfloat16.
        loaded = jax.eval_shape(lambda p: trees.cast(p, jnp.float32), base)
        sizes["reference"] = run.bytes_of(loaded)
    if run.inputs.subagent is not None:
        own = run.inputs.subagent[1]
        moments = jax.eval_shape(make_optimizer(policy_optimizer(config)).init, own)
        sizes["subagent"] = run.bytes_of(own) + run.bytes_of(moments, spec=spec)
    if run.inputs.teacher is not None:
        sizes["teacher"] = run.bytes_of(run.inputs.teacher)
    if (scores := abstract_reward(config.reward)) is not None:  # on one device, whatever the mesh
        sizes["model of the reward"] = device_bytes(scores[1])
    if states := [
        jax.eval_shape(lambda rule=rule: rule.init(*run.output_shape))
        for rule in needs.computed_from("optimizer").values()
    ]:
        sizes["moments of the last layer"] = device_bytes(states)
    return sizes


def _part_bytes(run: _Run, base: ArrayTree) -> dict[str, int]:
    """The states of the recipe's parts by name, from the shapes of their first states."""
    recipe, second, of_critic = run.recipe, run.recipe.second_model, run.config.critic_optimizer
    critic, nothing = None, cast(Any, None)
    if second is not None:
        heads, key = second.heads, jax.random.key(0)
        critic = jax.eval_shape(lambda p: init_critic(run.model, p, heads=heads, key=key), base)

    def first(params: ArrayTree, critic: ArrayTree | None) -> dict[str, Any]:
        start = Start(
            params=params,
            adapter=isinstance(run.params, Adapted),
            reference=None,
            second_params=critic,
            second_optimizer=None if of_critic is None else make_optimizer(of_critic),
            optimizer_state=lambda optimizer, params: optimizer.init(params),
            replicated=lambda x: x,
            copy=False,
        )
        parts = parts_of(Setup(recipe=recipe, scorer=nothing))
        return {part.name: part.init(recipe, start) for part in parts if part.init is not None}

    sizes = {}
    for name, state in jax.eval_shape(first, run.trained, critic).items():
        moments = getattr(state, "opt_state", ())
        rest = state._replace(opt_state=()) if hasattr(state, "opt_state") else state
        sizes[name] = run.bytes_of(rest) + run.bytes_of(moments, spec=update_spec)
    return sizes


def _step_bytes(run: _Run, accelerator: bool) -> dict[str, int]:
    """Gradients, casts, activations and logits of one microbatch.

    For an evolution strategy: the gradient of its update, and the noise of one chunk of members.
    """
    config, recipe, shape = run.config, run.recipe, run.model.config
    if not recipe.needs.sums_gradients:
        members = recipe.population(config.prompts_per_step, config.sampling.group_size)
        noise = 4 * min(recipe.chunk, members) * _drawn(recipe, run.trained)
        return {"gradients": run.bytes_of(run.trained), "noise of an update": noise}
    accumulated = run.passes.accumulated
    sizes = {"gradients": _gradient_bytes(run, run.trained, accumulated)}
    if recipe.second_model is not None:  # of all its parameters, whichever the policy trains
        summed = run.parts if recipe.second_model.steps_once else accumulated
        sizes["gradients of the critic"] = _gradient_bytes(run, run.inputs.params, summed)
    if run.inputs.subagent is not None:
        of_subagent = _gradient_bytes(run, run.inputs.subagent[1], run.answer_parts)
        sizes["gradients"] = max(sizes["gradients"], of_subagent)
    tokens = config.prompts_per_step * run.group_size * run.length
    sizes |= _pass_bytes(run, tokens, accelerator)
    if rules := recipe.computed_from("optimizer").values():
        # The sums so far, and the sums with one more chunk.
        sums = [jax.eval_shape(lambda rule=rule: rule.zeros(*run.output_shape)) for rule in rules]
        sizes["sums of the last layer"] = 2 * device_bytes(sums)
    # What a batch has for each token, with the copies that a step makes: scoring rearranges its
    # rows, and so does the split into microbatches.
    parts = run.parts

    def copies(each: int) -> int:
        size = each * tokens // run.shards
        return 2 * size if parts == 1 else 3 * size + size // parts

    _, each = _recorded_bytes(run, config.sampling.temperature)
    sizes["support of tokens"] = copies(each)
    if experts := _expert_bytes(run):
        sizes["experts of tokens"] = copies(experts)
    if recipe.reads_teacher_logits and run.inputs.teacher_state:
        states = tokens // run.shards * run.inputs.teacher_state
        sizes["hidden states of the teacher"] = states if parts == 1 else 2 * states
    if run.itemsize < 4 and (config.lora.rank is None or recipe.second_model is not None):
        matrices = jax.tree.map(lambda x: x if x.ndim > 1 else None, run.inputs.params)
        sizes["weights as multiplied"] = run.bytes_of(matrices) * run.itemsize // 4
    if getattr(shape, "scan_layers", False):  # and in the backward pass their gradients
        sizes["weights stacked"] = run.bytes_of(run.inputs.params.get("layers", {}))
    if run.mesh["fsdp"] > 1:
        sizes["weights gathered"] = _gathered_bytes(run)
    required = ("gradients", "gradients of the critic", "activations", "logits")
    return {name: size for name, size in sizes.items() if size or name in required}


def _pass_bytes(run: _Run, tokens: int, accelerator: bool) -> dict[str, int]:
    """Activations and logits of a backward pass, or of scoring if it takes more.

    Scoring reads a microbatch of the whole batch at a time, a backward pass one of a minibatch.
    """
    shape, passes = run.model.config, []
    for parts in (run.parts, run.passes.microbatches):
        logits = logits_bytes(
            shape.vocab_size,
            -(-tokens // parts),
            getattr(shape, "width", 0),
            mesh=run.mesh,
            statistics=bool(
                run.recipe.computed_from("policy", "old_policy", "reference", "teacher")
            ),
        )
        passes.append({"logits": logits})
    if not run.unknown_sizes:
        for sizes, activations in zip(passes, _activations(run, accelerator), strict=True):
            sizes["activations"] = activations
    return max(passes, key=lambda sizes: sum(sizes.values()))


def _activations(run: _Run, accelerator: bool) -> tuple[int, int]:
    """Activations of a backward pass of the policy or a subagent, and of scoring."""
    config, recipe, shape = run.config, run.recipe, run.model.config
    on = LayerPlacement(
        itemsize=run.itemsize if accelerator else 4,
        tensor=run.mesh["tensor"],
        context=run.mesh["context"],
        expert=run.mesh["expert"],
        accelerator=accelerator,
    )

    def batch_of(parts: int) -> BatchShape:
        prompts = -(-config.prompts_per_step // (parts * run.shards))
        batch = BatchShape(prompts, run.group_size, run.inputs.longest_prompt, run.length)
        if not is_causal(run.model):  # each response has a copy of its prompt
            batch = batch._replace(prompts=prompts * run.group_size, group_size=1)
        if (block := block_length_of(run.model)) is not None:  # each block a second time
            batch = batch._replace(prompt_length=batch.prompt_length + run.length + block - 1)
        return batch

    def scoring(batch: BatchShape) -> int:
        """One layer, and the prompts' keys and values of the others."""
        keys = max(shape.num_kv_heads // on.tensor, 1) * shape.head_dim
        others = (shape.num_layers - 1) * batch.prompts * batch.prompt_length * keys
        return largest_layer_bytes(shape, batch, on=on) + 2 * on.itemsize * others

    adapter = config.lora.rank is not None
    most = activation_bytes(shape, batch_of(run.parts), remat=config.remat, adapter=adapter, on=on)
    if run.inputs.subagent is not None:  # after the main step, on rows of its own
        answers = BatchShape(
            -(-run.num_answers // (run.answer_parts * run.shards)),
            1,
            config.subagent.prompt_length,
            config.subagent.max_new_tokens,
        )
        of_subagent = run.inputs.subagent[0].config
        most = max(most, activation_bytes(of_subagent, answers, remat=config.remat, on=on))
    scored = scoring(batch_of(run.passes.microbatches))
    if recipe.has_teacher and not recipe.learns_from_model:
        # The teacher's rows have a prompt each.
        room = teacher_room(config, run.model, run.slot_prompt)
        width, slices = power_of_two(room), run.passes.microbatches
        cells = run.group_size * (width + run.length)
        alone = run.divided(Passes(microbatches=slices), config.prompts_per_step, cells)
        slices = max(slices, alone.microbatches)
        rows = -(-config.prompts_per_step // (slices * run.shards))
        scored = max(scored, scoring(BatchShape(rows * run.group_size, 1, width, run.length)))
    return most, scored


def _gathered_bytes(run: _Run) -> int:
    """Weights from other devices: two layers and those outside the layers, or all weights."""
    params = run.inputs.params
    across = run._replace(mesh=run.mesh | {"data": 1, "context": 1, "fsdp": 1})
    layers = params.get("layers") if isinstance(params, Mapping) else None
    if not isinstance(layers, Mapping):
        everything = across.bytes_of(params)
        return everything if everything > run.bytes_of(params) else 0
    layer = max(across.bytes_of(x) for x in layers.values())
    table = across.bytes_of({name: x for name, x in params.items() if name != "layers"})
    return (2 * layer + table) * run.itemsize // 4 + table


def _gradient_bytes(run: _Run, trained: ArrayTree, accumulated: int) -> int:
    """Gradients of an update, and those that exist before the sum over devices.

    ``accumulated`` is the number of microbatches whose gradients are summed for an update.
    """
    update = run.bytes_of(trained, spec=update_spec)
    if accumulated > 1:
        return update + run.bytes_of(trained)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    largest = max(run.bytes_of({trees.path_str(path): x}) for path, x in leaves)
    summed = run.mesh["data"] * run.mesh["context"] * run.mesh["expert"] > 1
    return update + (largest if summed else 0)


def _sampling_bytes(run: _Run) -> dict[str, int]:
    """Keys, values, outputs and logits of the largest batch that the training devices sample.

    If other devices sample the rollouts, only the evaluation counts.
    """
    sampling, evaluation = run.config.sampling, run.config.evaluation
    prompts, group_size, recipe = run.config.prompts_per_step, sampling.group_size, run.recipe
    shapes = []
    # Episodes that are evaluated take the slots of the rollouts.
    plays = run.config.environment is not None
    if evaluation.enabled and run.config.samples_held_out and not plays:
        shards = run.sampling_shards  # which have equally many rows
        enough = max(-(-run.inputs.num_held_out // shards), 1) * shards
        greedy = min(prompts * group_size, enough)
        answers = prompts * (evaluation.samples or group_size)
        shapes.append(_decode_shape(run, greedy, greedy, 0.0))
        shapes.append(_decode_shape(run, prompts, answers, sampling.temperature))
    if run.config.asynchrony.sampler_devices is None and not run.config.offline:
        shapes.append(_rollout_shape(run))
    if not shapes:
        return {}
    sizes = _decoding_bytes(run, shapes) | _judging_bytes(run) | _mixture_bytes(run)
    sizes |= _answering_bytes(run)
    if not recipe.needs.samples_members:
        return sizes
    if recipe.noise == "full":  # the weights of one member
        return {"members": run.bytes_of(run.params)} | sizes
    # Factors of all members; the two members of a pair share theirs.
    draws = recipe.population(prompts, group_size) // (2 if recipe.pairs else 1)
    return {"members": 4 * draws * _drawn(recipe, run.params) // run.shards} | sizes


def _judging_bytes(run: _Run) -> dict[str, int]:
    """Keys and values of a judge, which reads a prompt and one or two completions."""
    reward, scores = run.config.reward, abstract_reward(run.config.reward)
    if scores is None or not isinstance(reward, judge):
        return {}
    model = scores[0]
    completions = (2 if reward.compare else 1) * run.config.sampling.max_new_tokens
    cache = cache_bytes(
        model.config,
        prompts=reward.batch_size,
        prompt_length=min(run.inputs.longest_prompt + completions, model.config.max_length),
        slots=reward.batch_size,
        length=reward.max_new_tokens,
    )
    return {"cache of the judge": cache}


def _answering_bytes(run: _Run) -> dict[str, int]:
    """Keys, values, outputs and logits of the subagent, which samples while the slots exist."""
    if run.inputs.subagent is None:
        return {}
    config, options = run.inputs.subagent[0].config, run.config.subagent
    rows = -(-run.config.episodes.workers // run.sampling_shards)
    cache = cache_bytes(
        config,
        prompts=rows,
        prompt_length=options.prompt_length,
        slots=rows,
        length=options.max_new_tokens,
        split=run.mesh["tensor"],
    )
    return {"sampler of the subagent": cache + 2 * 4 * config.vocab_size * rows}


def _mixture_bytes(run: _Run) -> dict[str, int]:
    """Keys, values and logits of a teacher that samples with the policy, and the mixed logits."""
    config = run.inputs.teacher_config
    if not run.recipe.needs.teacher_mixture or config is None:
        return {}
    shape = _rollout_shape(run)
    cache = cache_bytes(
        config,
        prompts=shape.rows,
        prompt_length=shape.prompt_length,
        slots=shape.slots,
        length=run.config.sampling.max_new_tokens,
        recorded=0,
        split=run.mesh["tensor"],
    )
    logits = 2 * 4 * config.vocab_size * -(-shape.slots // run.sampling_shards)
    return {"the teacher that samples": cache // run.sampling_shards + logits}


def _published_bytes(run: _Run) -> int:
    """The sampler's copies of the trained weights, if it samples while a step trains.

    They are the old weights of the batch in progress, the newest, and the ones that replace these.
    """
    copies = 2 if run.config.asynchrony.max_staleness == 1 else 3
    return copies * run.bytes_of(run.of_sampler(run.trained))


def _rounded_base_bytes(run: _Run) -> int:
    """The rounded copy of the frozen weights below an adapter, beside which a step trains."""
    if not (isinstance(run.params, Adapted) and run.config.rounds_rollouts):
        return 0
    return run.bytes_of(run.of_sampler(run.params.base))


def _rollout_shape(run: _Run) -> DecodeShape:
    """The rollouts of a step that decode at one time."""
    sampling, prompts = run.config.sampling, run.config.prompts_per_step
    if run.recipe.needs.samples_members:  # each member reads the prompts separately
        count = prompts * sampling.group_size * run.recipe.needs.tries
        return _decode_shape(run, count, count, run.recipe.temperature)
    grid = engine_grid(run.config, run.recipe, longest=run.slot_prompt)
    if grid is None:
        return _decode_shape(run, prompts, prompts * sampling.group_size, sampling.temperature)
    rows, width = grid
    shape = _decode_shape(run, rows, rows * width, sampling.temperature)
    return shape._replace(prompt_length=run.slot_prompt)


def _decode_shape(run: _Run, rows: int, slots: int, temperature: float) -> DecodeShape:
    recorded, support = _recorded_bytes(run, temperature)
    width = run.inputs.longest_prompt
    if not is_causal(run.model):  # logits of some cells: plain, scaled, normalized, drawn from
        length, size = run.config.sampling.max_new_tokens, run.model.config.vocab_size
        block, _ = options_of(run.config.sampling.denoising, run.model).schedule(length)
        return DecodeShape(rows, width, slots, recorded, 4 * cells_at_once(slots, block, size))
    # The model's logits and those that tokens are drawn from; a filter over the full vocabulary
    # adds sorted and summed copies.
    everywhere = 8 * support >= run.model.config.vocab_size
    return DecodeShape(rows, width, slots, recorded, 5 if everywhere else 2)


def _recorded_bytes(run: _Run, temperature: float) -> tuple[int, int]:
    """:func:`recorded_bytes` of the run's sampler at a temperature; at 0 there are no filters."""
    sampling, options = run.config.sampling, DrawOptions(temperature=temperature)
    if temperature:
        options = dataclasses.replace(
            options, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        )
    experts = _expert_bytes(run) if temperature else 0
    return recorded_bytes(run.model.config.vocab_size, options, experts=experts)


def _expert_bytes(run: _Run) -> int:
    """Bytes of the experts of a token, for a run that replays them; else 0."""
    shape = expert_shape(run.model) if run.config.router_replay else None
    return 0 if shape is None else math.prod(shape) * np.dtype(EXPERT_DTYPE).itemsize


def _decoding_bytes(run: _Run, shapes: list[DecodeShape]) -> dict[str, int]:
    """Maximum bytes over batches that are sampled one after the other."""
    cache = max(
        cache_bytes(
            run.model.config,
            prompts=shape.rows,
            prompt_length=shape.prompt_length,
            slots=shape.slots,
            length=run.config.sampling.max_new_tokens,
            recorded=shape.recorded,
            split=run.mesh["tensor"],
        )
        for shape in shapes
    )
    logits = max(shape.blocks * -(-shape.slots // run.sampling_shards) for shape in shapes)
    sizes = {
        "cache of the sampler": cache // run.sampling_shards,
        "logits of the sampler": 4 * run.model.config.vocab_size * logits,
    }

    def made(new, old):
        if is_rounded(new):
            return None if is_rounded(old) else new.q
        return None if new.dtype == old.dtype else new

    # The weights that a sampler casts or rounds to 8 bits before it decodes; an evaluation may
    # decode others than the rollouts.
    casts = [jax.eval_shape(lambda p: cast_params(run.model, p), run.params)]
    if not (run.config.asynchrony.max_staleness and run.config.rounds_rollouts):
        casts.append(run.of_sampler(run.params))  # else rounded when they are published
    if size := max(
        run.bytes_of(jax.tree.map(made, cast, run.params, is_leaf=is_rounded)) for cast in casts
    ):
        sizes["weights as multiplied"] = size
    return sizes


def _drawn(recipe: EvolutionRecipe, params: ArrayTree) -> int:
    """Random numbers of one member; with full-rank noise, of one leaf at a time, the largest."""
    names, leaves = map(jax.tree.leaves, (recipe.classes(params), params))
    drawn = [num_drawn(n, x.shape, recipe.rank) for n, x in zip(names, leaves, strict=True)]
    return max(drawn) if recipe.noise == "full" else sum(drawn)
