"""From a configuration to an experiment, its algorithm and its first state."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime.files import with_home
from jaxrl_llm.curation import in_order
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import width_of
from jaxrl_llm.data.chat import date_written
from jaxrl_llm.data.questions import TextEncoder
from jaxrl_llm.models.denoising import is_causal
from jaxrl_llm.models.lora import Adapted
from jaxrl_llm.models.sharding import AXES, batch_shards
from jaxrl_llm.rollout.sampler import bucket_of, count_shared_prefix
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.algorithms import algorithm_of
from jaxrl_llm.train.batches import check_group_fits, check_reads_rows
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.config_text import config_text
from jaxrl_llm.train.checkpoint.serialization import (
    base_fingerprint,
    reference_fingerprint,
    shapes_of,
    values_digest,
)
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.data.halves import has_halves
from jaxrl_llm.train.data.offline import ReferenceLogp, reference_logp
from jaxrl_llm.train.evolution import moving_only
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.left_out import LeftOut, fitted, gradable
from jaxrl_llm.train.experiment.pairs import make_logp, place_rows
from jaxrl_llm.train.experiment.run_data import (
    check_classes,
    check_data,
    load_prompts,
    text_room,
    warn_of_group_size,
    warn_of_length,
    warn_of_one_update,
    warn_of_rewrites,
    warn_of_warmup,
)
from jaxrl_llm.train.experiment.run_models import (
    head_key,
    holds_reference,
    is_named,
    load_reference,
    load_subagent,
    load_teacher,
    open_trained,
    teacher_digest,
)
from jaxrl_llm.train.experiment.samplers import make_samplers
from jaxrl_llm.train.mesh import MeshConfig, load_meshes, replicated, sampling_mesh
from jaxrl_llm.train.models.critic import init_critic
from jaxrl_llm.train.models.rounding import check_rounded_model
from jaxrl_llm.train.optimizer import at_updates, make_optimizer, policy_optimizer
from jaxrl_llm.train.state import SubagentState, TrainState
from jaxrl_llm.train.subagent import SubagentParts
from jaxrl_llm.train.update.init import init_state
from jaxrl_llm.train.update.part import Teacher


def with_mesh_sizes(config: TrainConfig) -> TrainConfig:
    """The configuration with each mesh size of -1 replaced by a number.

    Raises:
      ValueError: If the mesh does not divide the batch or the devices.
    """
    sizes = config.mesh, config.asynchrony, config.prompts_per_step, config.microbatches
    mesh, _ = load_meshes(*sizes)
    mesh_sizes = dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)
    return dataclasses.replace(config, mesh=MeshConfig(**mesh_sizes))


def load_experiment(
    config: TrainConfig, *, trains: bool = True, compiles: bool = False, starts: bool = True
) -> tuple[Experiment, ArrayTree]:
    """The components of a run, checked for compatibility, and the parameters of its model.

    Args:
      config: The configuration of the run.
      trains: Whether the run trains; if not, no teacher is loaded.
      compiles: Whether to compile the samplers of a new state while the weights are read.
      starts: Whether ``config.init_from`` is read; not needed for parameters that those of a
        checkpoint replace.

    Raises:
      ValueError: If components are incompatible: the mesh does not divide the devices or the batch,
        a prompt is longer than the context, or an evaluation has no held-out questions.
    """
    if config.environment is not None and jax.process_count() > 1:
        raise ValueError(
            f"config: an environment needs a single process; there are {jax.process_count()}."
        )
    mesh, sampler_mesh = load_meshes(
        config.mesh, config.asynchrony, config.prompts_per_step, config.microbatches
    )
    prompts, others, digest = load_prompts(config)
    prompts, others, unreadable = gradable(config, prompts, others)
    recipe = find_recipe(config.recipe, config.sampling, num_prompts=len(prompts))
    check_data(config, recipe, prompts, others, trains=trains)
    model, tokenizer, shapes, read = open_trained(
        config if starts else dataclasses.replace(config, init_from=None),
        recipe,
        mesh,
        sampler_mesh,
    )
    check_reads_rows("train", model, config.layout)
    train, held_out, too_long, truncated = fitted(
        config, recipe, model, tokenizer, prompts, others, trains=trains
    )
    if len(train) < len(prompts):
        recipe = find_recipe(config.recipe, config.sampling, num_prompts=len(train))
    without = LeftOut.of(unreadable=unreadable, too_long=too_long, truncated=truncated)
    collector = recipe.collector
    needs = needs_of(collector)
    shared_prefix_len = count_shared_prefix([q.tokens for q in (*train, *held_out)])
    if needs.sends_text or needs.sets_prompts or config.environment or not is_causal(model):
        shared_prefix_len = 0
    longest = text_room(config, recipe, model, max(len(q.tokens) for q in train))
    if (budget := config.tokens_per_microbatch) is not None:
        group_size = width_of(collector or in_order(), config.sampling.group_size)
        length = config.sampling.max_new_tokens + (longest if needs.sends_text else 0)
        # An evaluation of pairs packs held-out rows in the same way.
        compared = held_out if config.compares_held_out else []
        prompt = max([longest, *(len(q.tokens) for q in compared)])
        shape = bucket_of(prompt), group_size, length
        check_group_fits("train", model, budget, shape, batch_shards(mesh))
    cuts = config.data.too_long == "truncate"
    encoder = TextEncoder(tokenizer, longest, config.data.chat, config.data.system, cuts)
    teacher = None
    if trains:
        check_rounded_model(config, model)
        check_classes(recipe, encoder)
        teacher = load_teacher(config, recipe, model, train, mesh, encoder=encoder)
        warn_of_rewrites(config, recipe, model, tokenizer, teacher)
        warn_of_warmup(config, recipe)
        warn_of_one_update(config, recipe)
        warn_of_length(config, recipe)
        warn_of_group_size(config, recipe)
    if isinstance(teacher, Teacher):
        check_reads_rows("train", teacher.model, config.layout, what="teacher")
    experiment = Experiment(
        config=config,
        mesh=mesh,
        sampler_mesh=sampler_mesh,
        model=model,
        tokenizer=tokenizer,
        recipe=recipe,
        train=train,
        unlimited=held_out,
        samplers=make_samplers(
            config,
            recipe,
            model,
            tokenizer,
            sampling_mesh(mesh, config.prompts_per_step),
            sampler_mesh,
            longest=longest,
            shared_prefix_len=shared_prefix_len,
            teacher=teacher,
        ),
        questions=digest + without.digest,
        left_out=without,
        shared_prefix_len=shared_prefix_len,
        encoder=encoder,
        teacher=teacher,
    )
    if compiles and is_named(config, recipe) and mesh == experiment.rollout_mesh:
        key = _abstract_key(mesh)
        experiment.compile_rollouts(shapes(), key)
        experiment.compile_greedy(shapes(), key)
    params = read()
    if trains and recipe.needs.subagent is not None:
        subagent = load_subagent(config, recipe, model, params, tokenizer, mesh)
        experiment = dataclasses.replace(experiment, subagent=subagent)
    return experiment, params


def _abstract_key(mesh: jax.sharding.Mesh | None) -> jax.Array | jax.ShapeDtypeStruct:
    """A key like that of a run's state before the first step."""
    key = jax.random.key(0)
    if mesh is None:
        return key
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh))


def score_data(experiment: Experiment, reference: ArrayTree) -> ReferenceLogp:
    """Log-probabilities of the data's responses under a reference, computed or read from a file.

    Raises:
      ValueError: If the file belongs to another reference or other data.
    """
    config, logp = experiment.config, make_logp(experiment)
    about = {
        "reference model": f"{values_digest(reference)} {config_text(experiment.model.config)}",
        "temperature": config.sampling.temperature,
    }
    questions = [*experiment.train, *experiment.unlimited]
    return reference_logp(
        with_home(str(config.reference_logp)),
        lambda: experiment.offline_batches(questions),
        lambda batch: logp(reference, place_rows(experiment, batch, count=len(questions))),
        about=about,
        questions=questions,
        note=date_written(experiment.tokenizer),
    )


def init_experiment(
    config: TrainConfig, folder: Path, *, resume: bool, allow_changed: bool = False
) -> tuple[Experiment, Algorithm, Checkpoints, TrainState]:
    """The experiment, its algorithm, its checkpoints, and its initial state.

    ``folder`` contains the checkpoints; ``resume`` starts from the last readable one. Unless
    ``allow_changed``, a model that a function returns has the precision that the run had.
    """
    from jaxrl_llm.data import Cursor

    # The arrays of a restored state are committed to their devices: for these, a program that is
    # compiled for new arrays would be compiled again.
    starts = not resume or config.keeps_start
    experiment, params = load_experiment(config, compiles=not resume, starts=starts)
    recipe, updates = experiment.recipe, config.passes.updates
    base = params.base if isinstance(params, Adapted) else params
    start = None
    if recipe.needs.uses_reference:
        start = load_reference(config, experiment.model, params, experiment.mesh)
    reference = None if recipe.needs.moves_reference else start  # one that moves is in the state
    fingerprint = _fingerprint(experiment, params, reference)
    if config.reference_logp is not None:
        experiment = dataclasses.replace(experiment, references=score_data(experiment, reference))
    if not holds_reference(config, recipe):
        reference = start = None
    if has_halves(recipe):
        experiment = dataclasses.replace(experiment, reference=reference)
    optimizer = moving_only(recipe, make_optimizer(policy_optimizer(config), updates=updates))
    critic = critic_optimizer = None
    if config.critic_optimizer is not None:
        second = recipe.second_model
        count = 1 if second.steps_once else updates
        critic_optimizer = make_optimizer(config.critic_optimizer, updates=count)
        critic = init_critic(experiment.model, base, heads=second.heads, key=head_key(config))
    algorithm = algorithm_of(experiment, optimizer, critic_optimizer, reference)
    checkpoints = Checkpoints(
        folder,
        model=experiment.model,
        run=fingerprint,
        keep=config.checkpoint.keep,
        best=config.checkpoint.best,
        updates=updates,
    )
    # The caller may still use a model that its function returned.
    shared = reference is not None or not isinstance(config.model, str)
    state = init_state(
        params,
        optimizer,
        recipe,
        key=jax.random.key(config.seed),
        data_cursor=Cursor(),
        mesh=experiment.mesh,
        rules=experiment.model.sharding_rules,
        copy=shared and not resume,
        critic=critic,
        critic_optimizer=critic_optimizer,
        output_shape=jax.eval_shape(experiment.model.output_matrix, base).shape,
        reference=None if config.reference is None or not recipe.needs.moves_reference else start,
    )
    if experiment.subagent is not None:
        subagent_state = _subagent_state(experiment, experiment.subagent, optimizer)
        state = state.with_parts(subagent=subagent_state)
        # The state has the parameters from now on.
        subagent = dataclasses.replace(experiment.subagent, params=())
        experiment = dataclasses.replace(experiment, subagent=subagent)
    collector_state = experiment.collector.init(len(experiment.train))
    state = state._replace(collector_state=jax.tree.map(np.asarray, collector_state))
    if resume:
        state = shapes_of(state)
        del params, base, critic, start  # before the restore, so that memory holds one state
        checkpoints.sweep()
        # The precision of a named model is a setting, which has been compared.
        any_precision = allow_changed or isinstance(config.model, str)
        state = checkpoints.restore(state, any_precision=any_precision)
        state = _at_updates(state, recipe, old=checkpoints.restored_updates(), new=updates)
    return experiment, algorithm, checkpoints, state


def _fingerprint(
    experiment: Experiment, params: ArrayTree, reference: ArrayTree | None
) -> dict[str, Any]:
    """What a run and its checkpoints have in common: its data, and its models that do not train."""
    config = experiment.config
    fingerprint = {"questions": experiment.questions, "seed": config.seed}
    fingerprint |= base_fingerprint(params, config.lora)
    # A resumed run loads a frozen reference again; its digest must then be the same.
    fingerprint |= reference_fingerprint(params, reference)
    if (digest := teacher_digest(experiment.teacher)) is not None:
        fingerprint["teacher"] = digest
    return fingerprint


def _at_updates(state: TrainState, recipe: Any, *, old: int, new: int) -> TrainState:
    """The state of a run that goes on with another number of optimizer steps a batch."""
    if old == new:
        return state
    state = state._replace(opt_state=at_updates(state.opt_state, old=old, new=new))
    second = recipe.needs.second_model
    if second is None or second.steps_once:
        return state
    moved = at_updates(state.critic.opt_state, old=old, new=new)
    return state.with_parts(critic=state.critic._replace(opt_state=moved))


def _subagent_state(
    experiment: Experiment, subagent: SubagentParts, optimizer: Any
) -> SubagentState:
    """The first state of a subagent; its parameters may be those of the policy, so are copied."""
    state = init_state(
        subagent.params,
        optimizer,
        experiment.recipe.needs.subagent.recipe,
        key=jax.random.key(experiment.config.seed),
        mesh=experiment.mesh,
        rules=subagent.model.sharding_rules,
        copy=not isinstance(experiment.config.subagent.model, str),
    )
    return SubagentState(state.params, state.opt_state, state.algo_state)
