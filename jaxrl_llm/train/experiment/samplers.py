"""The samplers of a run: of rollouts, baselines, evaluations and drafts."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.data.questions import Question
from jaxrl_llm.data.rendering import make_renderer, response_ends
from jaxrl_llm.diffusion import FlowLikelihood
from jaxrl_llm.models.denoising import is_causal
from jaxrl_llm.models.mixture import mix_models
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.rollout import (
    DenoisingOptions,
    make_denoising_sampler,
    make_engine,
    make_flow_sampler,
    make_sampler,
)
from jaxrl_llm.train.config import SamplingConfig, TrainConfig
from jaxrl_llm.train.data.halves import has_halves
from jaxrl_llm.train.evolution import make_population
from jaxrl_llm.train.models.denoising import scorer_of
from jaxrl_llm.train.update.part import Teacher


class Samplers(NamedTuple):
    """The samplers of a run; equal samplers are shared, so each is compiled once."""

    # On the sampler mesh if there is one; of half a group if two sample; or a population.
    rollouts: Callable
    baseline: Callable  # one greedy response per question, on the same mesh
    greedy: Callable  # the same for the evaluation, on the training mesh
    sampled: Callable  # responses of the sampled evaluation
    engine: Any  # decodes rollouts in slots instead, or None
    drafts: Callable | None = None  # drafts of a flow policy, for a collector that requests them


def compile_sampler(
    sampler: Callable,
    params: ArrayTree,
    key: jax.Array,
    questions: Sequence[Question],
    batch_size: int,
) -> None:
    """Begins to compile the program of a sampler for these questions in another thread.

    A call of the sampler waits for it. ``params`` and ``key`` may be shapes. Without effect if the
    sampler cannot, or several processes have to compile theirs in one order.
    """
    compile_for = getattr(sampler, "compile_for", None)
    if compile_for is None or jax.process_count() > 1:
        return
    part = list(questions[:batch_size])
    prompts = [q.tokens for q in part + [part[-1]] * (batch_size - len(part))]
    compile_for(params, key, prompts)


def policy_sampler(
    sampling: SamplingConfig,
    recipe: Any,
    model: Model,
    tokenizer,
    mesh,
    *,
    chat: bool,
    group_size: int,
    greedy: bool = False,
    shared_prefix_len: int = 0,
    record_experts: bool = False,
) -> Callable:
    """A sampler of ``group_size`` responses per prompt, with the run's options or greedy.

    ``chat`` is whether prompts go through the chat template.
    """
    stop_ids = response_ends(tokenizer, chat=chat)
    if model.velocity is not None:
        steps, length = (
            recipe.likelihood.steps,
            recipe.likelihood.text_length(sampling.max_new_tokens),
        )
        if steps is not None and steps > sampling.max_new_tokens:
            raise ValueError(
                f"sampling: max_new_tokens {sampling.max_new_tokens} is below the {steps} steps of "
                f"recipe {recipe.name!r}."
            )
        return make_flow_sampler(
            model,
            recipe.likelihood,
            steps=sampling.max_new_tokens - length,
            group_size=group_size,
            deterministic=greedy,
            text_length=length,
            stop_ids=stop_ids if length else (),
            pad_id=tokenizer.pad_id,
            mesh=mesh,
        )
    if not is_causal(model):
        return make_denoising_sampler(
            model,
            group_size=group_size,
            mesh=mesh,
            temperature=0.0 if greedy else sampling.temperature,
            options=sampling.denoising,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=stop_ids,
            pad_id=tokenizer.pad_id,
        )
    return make_sampler(
        model,
        group_size=group_size,
        mesh=mesh,
        temperature=0.0 if greedy else sampling.temperature,
        top_k=None if greedy else sampling.top_k,
        top_p=None if greedy else sampling.top_p,
        min_p=None if greedy else sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_ids=stop_ids,
        pad_id=tokenizer.pad_id,
        shared_prefix_len=shared_prefix_len,
        record_experts=record_experts,
    )


def make_samplers(
    config: TrainConfig,
    recipe: Any,
    model: Model,
    tokenizer,
    mesh,
    sampler_mesh,
    *,
    longest: int,
    shared_prefix_len: int,
    teacher: Any = None,
) -> Samplers:
    """The samplers of a run; ``longest`` is the maximum number of tokens of a training prompt."""
    sampling, group_size = config.sampling, config.sampling.group_size
    width = group_size // 2 if has_halves(recipe) else group_size  # of a call of its sampler
    check_denoising(config, recipe, model)
    # The model that samples rollouts; evaluations and baselines use the policy alone.
    behavior = model
    if isinstance(teacher, Teacher) and recipe.needs.teacher_mixture:
        _check_mixture(config)
        behavior = mix_models(model, teacher.model, weight=recipe.needs.teacher_mixture)
    check_replay(config, behavior)
    chat = config.data.chat
    sampler = partial(
        policy_sampler,
        sampling,
        recipe,
        tokenizer=tokenizer,
        chat=chat,
        shared_prefix_len=shared_prefix_len,
    )
    # The mesh of the rollouts; evaluations are on the training mesh.
    place = mesh if sampler_mesh is None else sampler_mesh
    greedy = baseline = sampler(model, mesh=mesh, group_size=1, greedy=True)
    if sampler_mesh is not None:
        baseline = sampler(model, mesh=sampler_mesh, group_size=1, greedy=True)
    if recipe.needs.samples_members:
        filtered = recipe.temperature > 0
        rollouts = make_population(
            model,
            recipe,
            group_size=group_size,
            mesh=mesh,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=response_ends(tokenizer, chat=chat),
            pad_id=tokenizer.pad_id,
            shared_prefix_len=shared_prefix_len,
            top_k=sampling.top_k if filtered else None,
            top_p=sampling.top_p if filtered else None,
            min_p=sampling.min_p if filtered else None,
        )
    else:
        rollouts = sampler(
            behavior, mesh=place, group_size=width, record_experts=config.router_replay
        )
    # Rollouts of a flow have noise in their steps, evaluations do not.
    is_flow = model.velocity is not None
    samples = config.evaluation.samples or group_size
    same = behavior is model and sampler_mesh is None and samples == width
    # A program that takes rounded weights does not take those of an evaluation.
    if same and not (recipe.needs.samples_members or is_flow or config.rounds_rollouts):
        sampled = rollouts
    else:
        sampled = sampler(model, mesh=mesh, group_size=samples, greedy=is_flow)
    engine = _rollout_engine(config, recipe, behavior, tokenizer, place, longest=longest)
    drafts = None
    if (steps := needs_of(recipe.collector).draft_steps) is not None:
        drafts = make_flow_sampler(
            model,
            recipe.likelihood,
            steps=steps,
            group_size=group_size,
            deterministic=True,
            mesh=mesh,
        )
    return Samplers(rollouts, baseline, greedy, sampled, engine, drafts)


def engine_grid(config: TrainConfig, recipe: Any, *, longest: int) -> tuple[int, int] | None:
    """Rows and width of the slots of a run, or None for one that samples whole batches.

    An environment, and some collectors, need slots: one for each rollout of a step by default.
    """
    sampling = config.sampling
    if sampling.slots is None:
        if config.environment is None and not needs_of(recipe.collector).slots:
            return None
        every = config.prompts_per_step * sampling.group_size
        sampling = dataclasses.replace(sampling, slots=every)
    return sampling.grid(config.prompts_per_step, prompt_length=longest)


def _rollout_engine(
    config: TrainConfig,
    recipe: Any,
    behavior: Model,
    tokenizer,
    mesh,
    *,
    longest: int,
) -> Any:
    """The engine of a run, whose slots record what the recipe's collector reads; None without."""
    grid = engine_grid(config, recipe, longest=longest)
    if grid is None:
        return None
    sampling, needs, (rows, width) = config.sampling, needs_of(recipe.collector), grid
    if config.environment is not None:
        make_renderer(tokenizer, chat=config.data.chat)  # an error is seen before the first turn
    # An evaluation of episodes decodes greedily in the same slots.
    varies = config.environment is not None or needs.varies_temperature
    return make_engine(
        behavior,
        mesh=mesh,
        rows=rows,
        width=width,
        prompt_length=longest,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_ids=response_ends(tokenizer, chat=config.data.chat),
        pad_id=tokenizer.pad_id,
        vary=("temperature",) if varies else (),
        entropy=needs.records_entropy,
        runner_up=needs.records_runner_up,
        model_entropy=needs.records_model_entropy,
        entropy_tau=needs.entropy_tau,
        record_experts=config.router_replay,
    )


def check_replay(config: TrainConfig, behavior: Model) -> None:
    """Raises ValueError for a router_replay without effect."""
    if not config.router_replay:
        return
    if config.samples_nothing:
        raise ValueError("config: router_replay has no effect without rollouts of the policy.")
    if not is_causal(behavior):
        raise ValueError("config: router_replay has no effect with a denoising model.")
    if behavior.apply_routed is None:
        what = "the mixture with the teacher that samples" if behavior.logits else "the model"
        raise ValueError(f"config: router_replay has no effect: {what} records no experts.")


def _check_mixture(config: TrainConfig) -> None:
    """Raises ValueError for a run in which a teacher cannot sample with the policy."""
    if config.environment is not None:
        raise ValueError(
            "config: a recipe with teacher_mixture cannot use an environment, since a teacher does "
            "not sample episodes; use a recipe without teacher_mixture."
        )
    if config.asynchrony.sampler_devices:
        raise ValueError(
            "asynchrony: sampler_devices would need a second copy of the teacher, which samples "
            "with the policy; leave it out (None)."
        )


def check_denoising(config: TrainConfig, recipe: Any, model: Model) -> None:
    """Raises ValueError for options that the model of a run, causal or not, does not support."""
    sampling, needs = config.sampling, needs_of(recipe.collector)
    if needs.draft_steps is not None and model.velocity is None:
        raise ValueError(
            f"config: {recipe.collector!r} asks for drafts, which only a flow model makes."
        )
    if is_causal(model):
        if sampling.denoising != DenoisingOptions():
            raise ValueError(
                f"sampling: denoising has no effect with a causal model; got {sampling.denoising}."
            )
        if needs.fixes_tokens:
            raise ValueError(
                f"recipe {recipe.name!r}: its collector fixes tokens of a response, which needs a "
                "denoising model (causal=False)."
            )
        if recipe.needs.likelihood is not None:
            scorer_of(recipe, model)  # refuses the model before its weights are read
        return
    if needs.mixes_texts:
        raise ValueError(
            f"config: {recipe.collector!r} sends different messages for the members of a row. "
            "Where they differ, they would stand before the responses, and a denoising or flow "
            "model cannot read them there; use a collector with one message for each row."
        )
    for name in ("top_k", "top_p", "min_p", "slots"):
        if getattr(sampling, name) is not None:
            raise ValueError(f"sampling: {name} has no effect with a denoising model.")
    if recipe.needs.reads_logp:
        scorer_of(recipe, model, temperature=sampling.temperature)
    likelihood = recipe.needs.likelihood
    flow = likelihood if isinstance(likelihood, FlowLikelihood) else None
    begins_alike = flow is None or not (flow.splits or flow.text_length(sampling.max_new_tokens))
    if needs.draft_steps is not None and not begins_alike:
        raise ValueError(
            f"config: {recipe.collector!r} generates again from the noise of its drafts, but "
            f"recipe {recipe.name!r} splits or writes a text first, so its trajectories begin from "
            "other noise; use another collector."
        )
    if model.velocity is not None and config.mesh.context != 1:
        raise ValueError(
            f"mesh: context {config.mesh.context} has no effect with a flow model, whose latents "
            "are not split; use data."
        )
    if model.velocity is not None and sampling.denoising != DenoisingOptions():
        raise ValueError(
            f"sampling: denoising has no effect with a flow model; got {sampling.denoising}."
        )
    if config.environment is not None or needs.slots:
        raise ValueError(
            "config: a denoising model writes responses of a fixed length, which an environment or "
            "this collector cannot continue."
        )
    if config.offline and model.velocity is not None:
        raise ValueError(
            f"recipe {recipe.name!r}: a flow model trains on trajectories, which the responses of "
            "the data do not have."
        )
    members = recipe.needs.samples_members
    if members or config.asynchrony.max_staleness:
        what = "an evolution recipe" if members else "rollouts ahead of their step"
        raise ValueError(f"config: a denoising model cannot train with {what}.")
