"""The models of a run: the policy, its reference, its teacher and its subagent."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.data.chat import with_template_options
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.data.rendering import make_renderer
from jaxrl_llm.models.config import ModelConfig, differences
from jaxrl_llm.models.heads import with_head, with_vocabulary, without_output
from jaxrl_llm.models.lora import Adapted, with_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards, param_shardings, shard
from jaxrl_llm.train.batches import check_group_fits
from jaxrl_llm.train.checkpoint.serialization import abstract, values_digest
from jaxrl_llm.train.checkpoint.start import find_start
from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.experiment.left_out import data_responses
from jaxrl_llm.train.mesh import check_expert_axis, sampling_mesh
from jaxrl_llm.train.models.teachers import (
    AlignedTeacher,
    ModelTeacher,
    StoredTeacher,
    TokenTeacher,
    check_host_teacher,
    from_name,
    tokenizer_digest,
)
from jaxrl_llm.train.subagent import SubagentParts, make_subagent_sampler
from jaxrl_llm.train.update.part import Teacher
from jaxrl_llm.train.update.parts.teacher import check_teacher

# Separates the random numbers of a head from those of the sampler.
_HEAD = 0x637269


class OpenedModel(NamedTuple):
    """The model of a run, whose parameters may not have been read yet.

    Attributes:
      model: The model.
      tokenizer: Its tokenizer.
      shapes: Returns the shapes of the parameters, or the parameters if they are known.
      read: Returns the parameters on the mesh, float32 unless they are frozen.
    """

    model: Model
    tokenizer: Any
    shapes: Callable[[], ArrayTree]
    read: Callable[[], ArrayTree]


def open_model(config: TrainConfig, mesh, *, frozen=False) -> OpenedModel:
    """The model of a config.

    If ``config.model`` is a function, it returns the parameters as well, so nothing is left to
    read but the policy of ``config.init_from``.

    Raises:
      ValueError: If ``config.init_from`` has no checkpoint.
    """
    if isinstance(config.model, str):
        from jaxrl_llm import data, models
        from jaxrl_llm.models.loading import open_weights

        matrices = config.product_dtype if frozen else None
        opened = open_weights(config.model, mesh=mesh, matrices=matrices)
        shape = dataclasses.replace(
            opened.model.config,
            dtype=config.product_dtype,
            quantization=config.quantization,
            scan_layers=config.scan_layers,
        )
        tokenizer = data.load_tokenizer(config.model)
        loaded = OpenedModel(models.make_model(shape), tokenizer, opened.shapes, opened.read)
    else:
        model, params, tokenizer = config.model()
        params = _placed(model, params, mesh)
        loaded = OpenedModel(model, tokenizer, lambda: params, lambda: params)
    tokenizer = with_template_options(loaded.tokenizer, config.data.template_options)
    loaded = loaded._replace(tokenizer=tokenizer)
    return loaded if config.init_from is None else _begun_from(config.init_from, loaded)


def load_model(config: TrainConfig, mesh, *, frozen=False) -> tuple[Model, ArrayTree, Any]:
    """The model, its parameters on the mesh (float32 unless ``frozen``), and its tokenizer."""
    opened = open_model(config, mesh, frozen=frozen)
    return opened.model, opened.read(), opened.tokenizer


def _begun_from(source: str, opened: OpenedModel) -> OpenedModel:
    """The model with the policy of an earlier run in place of its own parameters."""
    read = find_start(source, opened.model)
    shapes = jax.tree.map(abstract, opened.shapes())
    return opened._replace(shapes=lambda: shapes, read=lambda: read(shapes))


def _placed(model: Model, params: ArrayTree, mesh) -> ArrayTree:
    """Parameters in float32, on the mesh if there is one."""
    params = trees.cast(params, jnp.float32)
    if mesh is None:
        return params
    return shard(params, param_shardings(params, mesh, model.sharding_rules))


def open_trained(config: TrainConfig, recipe: Any, mesh, sampler_mesh) -> OpenedModel:
    """The model of a run with the adapter and the head that it trains; without any, unread."""
    opened = open_model(config, mesh, frozen=config.lora.rank is not None)
    for devices in (mesh, sampler_mesh):
        if devices is not None:
            check_expert_axis(devices.shape, opened.shapes(), opened.model.sharding_rules)
    if is_named(config, recipe):
        return opened
    model, params = with_trained(config, recipe, opened.model, opened.read(), mesh=mesh)
    return OpenedModel(model, opened.tokenizer, lambda: params, lambda: params)


def is_named(config: TrainConfig, recipe: Any) -> bool:
    """Whether the policy's parameters are those of a named model, without any others."""
    return isinstance(config.model, str) and config.lora.rank is None and not recipe.needs.head


def with_trained(
    config: TrainConfig, recipe: Any, model: Model, params: ArrayTree, *, mesh=None
) -> tuple[Model, ArrayTree]:
    """The model and parameters with the adapter and the head that a run trains, if any."""
    head = recipe.needs.head
    if model.velocity is not None and (head or config.lora.rank is not None):
        what = f"recipe {recipe.name!r} trains a head" if head else "lora adds adapters"
        raise ValueError(f"config: {what}, which a flow model does not have.")
    if head and isinstance(config.model, str):
        model, params = without_output(model, params)
    model, params = with_adapter(model, params, config.lora, mesh=mesh)
    if not head:
        return model, params
    return with_head(model, params, key=head_key(config), mesh=mesh)


def head_key(config: TrainConfig) -> jax.Array:
    """The key of the random heads of a run, such as that of a reward model or a critic."""
    return jax.random.fold_in(jax.random.key(config.seed), _HEAD)


def load_reference(config: TrainConfig, model: Model, params: ArrayTree, mesh) -> ArrayTree:
    """The parameters of the reference at the start of a run: ``config.reference``'s or ``params``.

    Raises:
      ValueError: If the reference's parameters differ from the policy's in structure or shape, or
        it computes another function of them: the policy's model scores both.
    """
    params = params.base if isinstance(params, Adapted) else params
    if config.reference is None:
        return params
    if isinstance(config.reference, str):
        from jaxrl_llm import models

        other, reference = models.load_model(config.reference, mesh=mesh)
    else:
        other, reference, *_ = config.reference()
        reference = _placed(model, reference, mesh)
    trees.check_alike("config", "the parameters of model and reference", params, reference)
    configs = model.config, other.config
    if all(isinstance(each, ModelConfig) for each in configs) and (apart := differences(*configs)):
        raise ValueError(
            f"config: policy and reference are different functions of their parameters: {apart}; "
            "the policy's model scores both."
        )
    return reference


def holds_reference(config: TrainConfig, recipe: Any) -> bool:
    """Whether a run holds the parameters of a reference in addition to the policy's.

    If the reference's log-probabilities are stored, only ``kl_ref_logp``, which depends on the
    other rows of a batch, and other statistics of the reference need its parameters.
    """
    needs = recipe.needs
    if not needs.uses_reference or config.reference_logp is None:
        return needs.uses_reference
    return "kl_ref_logp" in needs.fields or bool(needs.computed_from("reference"))


def load_teacher(
    config: TrainConfig,
    recipe: Any,
    model: Model,
    questions: Sequence[Question],
    mesh,
    *,
    encoder: TextEncoder,
) -> Any:
    """The teacher of a run: a ``Teacher`` on the devices, a teacher on the host, or None.

    Args:
      config: The configuration, which names the teacher.
      recipe, model: Recipe and model of the policy.
      questions: The training questions. Stored scores must cover them and their responses.
      mesh: Mesh of the devices.
      encoder: The policy's text encoder, with room for the longest prompt.

    Raises:
      ValueError: If the teacher does not return what the recipe reads, has another tokenizer or too
        short a context, or has stored scores of another tokenizer or data set, or in a run that
        samples; or if its server does not answer.
    """
    teacher, tokenizer, longest = config.teacher, encoder.tokenizer, encoder.room
    if teacher is None:
        return None
    teacher = from_name(teacher) if isinstance(teacher, str) else teacher
    if isinstance(teacher, TokenTeacher | AlignedTeacher):
        check_host_teacher(recipe, teacher)
        _check_on_host(config, teacher, questions)
        if isinstance(teacher, StoredTeacher):
            most = config.sampling.max_new_tokens
            responses = (
                (x, (encoder.response(y, ends=True) if isinstance(y, str) else y)[:most])
                for x, y in data_responses(config, recipe, questions)
            )
            teacher.check(tokenizer, questions, responses)
            return teacher
        # As for scores, only the first process asks a server; one that is down ends the run here.
        scores = teacher.teacher if isinstance(teacher, AlignedTeacher) else teacher
        context = processes.from_first(lambda: getattr(scores, "context", None))
        if isinstance(teacher, TokenTeacher):
            _check_context(config, context, longest)
        return teacher
    if isinstance(teacher, str):
        from jaxrl_llm import data, models

        dtype = config.product_dtype
        other, params = models.load_model(teacher, mesh=mesh, matrices=dtype)
        other = models.make_model(dataclasses.replace(other.config, dtype=dtype))
        theirs = data.load_tokenizer(teacher)
    else:
        other, params, theirs = teacher()
        params = _placed(other, params, mesh)
    if "teacher_span_logp" in recipe.required_fields:
        aligned = AlignedTeacher(ModelTeacher(other, params), theirs)
        _check_on_host(config, aligned, questions)
        return aligned
    # A base model and its instruct model differ in the tokens that end a reply.
    same_tokens = tokenizer_digest(theirs, ends=False) == tokenizer_digest(tokenizer, ends=False)
    if same_tokens and other.config.vocab_size > model.config.vocab_size:
        other = with_vocabulary(other, model.config.vocab_size)
    check_teacher("config", recipe, model, other)
    _check_context(config, other.config.max_length, longest)
    if not same_tokens:
        raise ValueError(
            "config: the teacher has another tokenizer than the policy, but recipe "
            f"{recipe.name!r} compares tokens; use span_distillation."
        )
    if ends := [i for i in theirs.eos_ids if i not in encoder.stop_ids]:
        named = ", ".join(f"{theirs.decode([i], skip_special=False)!r} ({i})" for i in ends)
        warnings.warn(
            f"config: the teacher teaches the policy to end a response with {named}, but the "
            "policy goes on after it; add it to the policy's eos_ids, such as eos_token_id in its "
            "generation_config.json.",
            stacklevel=2,
        )
    return Teacher(other, params)


def _check_context(config: TrainConfig, context: int | None, longest: int) -> None:
    """Raises ValueError if a teacher's context has no room for the longest prompt and response."""
    needed = longest + config.sampling.max_new_tokens
    if context is not None and needed > context:
        raise ValueError(
            f"config: prompts and responses may have {needed} tokens together, but the teacher's "
            f"context has {context}."
        )


def _check_on_host(config: TrainConfig, teacher: Any, questions: Sequence[Question]) -> None:
    """Raises ValueError if a teacher on the host cannot score a run's samples or read its prompts.

    The teacher scores its full vocabulary at temperature 1. A teacher with another tokenizer reads
    only the text of a prompt.
    """
    sampling = config.sampling
    if sampling.temperature != 1.0:
        raise ValueError(
            f"config: {teacher!r} scores at temperature 1; sampling.temperature is "
            f"{sampling.temperature:g}."
        )
    for name in ("top_k", "top_p", "min_p"):
        if (value := getattr(sampling, name)) is not None:
            raise ValueError(
                f"config: {teacher!r} scores all tokens of its vocabulary; sampling.{name} is "
                f"{value:g}."
            )
    if not isinstance(teacher, AlignedTeacher):
        return
    if config.environment is not None:
        raise ValueError(f"config: {teacher!r} reads the prompts of the data, not an environment.")
    several = next((x.prompt for x in questions if x.prompt.messages is not None), None)
    if several is not None:
        raise ValueError(
            f"data: prompt {several.name!r} is a conversation, but {teacher!r} "
            "reads only the text of a prompt."
        )


def teacher_digest(teacher: Any) -> str | None:
    """A digest of a teacher's parameters or stored scores; None if there is nothing to compare."""
    if isinstance(teacher, AlignedTeacher):
        teacher = teacher.teacher
    if isinstance(teacher, Teacher | ModelTeacher):
        return values_digest(teacher.params)
    return teacher.digest if isinstance(teacher, StoredTeacher) else None


def load_subagent(
    config: TrainConfig, recipe: Any, model: Model, params: ArrayTree, tokenizer, mesh
) -> SubagentParts | None:
    """The model of the recipe's subagent: that of the config, or a copy of the policy's.

    Raises:
      ValueError: If a question and an answer exceed the context of the model.
    """
    if recipe.needs.subagent is None:
        return None
    options, sampling = config.subagent, config.sampling
    if options.model is not None:
        data = dataclasses.replace(config.data, template_options={})  # of the policy's template
        other = dataclasses.replace(config.with_model(options.model), data=data)
        model, params, tokenizer = load_model(other, mesh)
    needed = options.prompt_length + options.max_new_tokens
    if needed > model.config.max_length:
        raise ValueError(
            f"subagent: a question of {options.prompt_length} tokens and an answer of "
            f"{options.max_new_tokens} exceed the context of {model.config.max_length} tokens."
        )
    if (budget := config.tokens_per_microbatch) is not None:
        row = options.prompt_length, 1, options.max_new_tokens
        check_group_fits("subagent", model, budget, row, batch_shards(mesh))
    where = sampling_mesh(mesh, config.prompts_per_step)
    shards = batch_shards(where)
    renderer = make_renderer(tokenizer, chat=config.data.chat, system=config.data.system)
    return SubagentParts(
        model=model,
        params=params,
        sampler=make_subagent_sampler(
            model,
            tokenizer,
            sampling,
            stop_ids=tuple(dict.fromkeys((*tokenizer.eos_ids, *renderer.stop_ids))),
            max_new_tokens=options.max_new_tokens,
            prompt_length=options.prompt_length,
            mesh=where,
        ),
        renderer=renderer,
        decode=tokenizer.decode,
        rows=-(-config.episodes.workers // shards) * shards,
        prompt_length=options.prompt_length,
    )
