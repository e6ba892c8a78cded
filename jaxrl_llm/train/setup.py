"""From a configuration to an experiment: mesh, model, tokenizer, questions, samplers, state."""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.curation import Collector, in_order
from jaxrl_llm.curation.collectors.protocol import (
    collector_needs,
    collector_parts,
    entropy_tau_of,
    sized,
)
from jaxrl_llm.data.questions import Question, TextEncoder, encode_prompts
from jaxrl_llm.models.lora import Adapted, describe_params, with_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.rollout import make_engine, make_sampler
from jaxrl_llm.rollout.collect import DataRows
from jaxrl_llm.rollout.sampler import count_shared_prefix, prompt_room
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.batches import check_reads_rows
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.serialization import base_fingerprint, shapes_of, values_digest
from jaxrl_llm.train.config import TrainConfig, find_prompts, find_recipe
from jaxrl_llm.train.critic import init_critic
from jaxrl_llm.train.evaluate import Accuracy, evaluate
from jaxrl_llm.train.evolution import make_evolution, make_population, moving_only
from jaxrl_llm.train.fields import check_fields
from jaxrl_llm.train.grading import Grader
from jaxrl_llm.train.mesh import load_meshes
from jaxrl_llm.train.optimizer import make_optimizer, make_schedule
from jaxrl_llm.train.policy_gradient import StepOptions, make_policy_gradient
from jaxrl_llm.train.state import TrainState, init_state

# Tokens that a collector's text may be longer than the longest prompt, unless the run says more.
_TEXT_ROOM = 1024


class Samplers(NamedTuple):
    """The samplers of a run; those that agree are one, so that nothing is compiled twice."""

    rollouts: Callable  # on the sampler's mesh if there is one; or the population of an evolution
    baseline: Callable  # one most likely response a question, in the same place
    greedy: Callable  # the same for the evaluation, on the mesh
    sampled: Callable  # responses of the sampled evaluation
    engine: Any  # slots in which rollouts decode instead, or None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a run is made of, besides its state.

    Attributes:
      config: The configuration.
      mesh: The device mesh, or None for one device.
      sampler_mesh: That of the devices which only sample, or None if there are none.
      model: The model.
      tokenizer: A ``data.Tokenizer``.
      recipe: The method, a ``Recipe`` or an ``EvolutionRecipe``.
      train: Questions that are trained on.
      held_out: Questions that never are; empty if none are held out.
      samplers: Of rollouts and evaluations.
      questions: A digest of all questions, before any limit, and of their split and order.
      shared_prefix_len: How many first tokens all prompts share; they are computed once a batch. 0
        where a collector sends texts.
      encoder: Encodes what a collector sends.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh | None
    sampler_mesh: jax.sharding.Mesh | None
    model: Model
    tokenizer: Any
    recipe: Any
    train: list[Question]
    held_out: list[Question]
    samplers: Samplers
    questions: str
    shared_prefix_len: int
    encoder: TextEncoder

    @property
    def collector(self) -> Collector:
        """That of the recipe, or the one that takes each prompt in the order of the data."""
        sampling = self.config.sampling
        return sized(
            getattr(self.recipe, "collector", None) or in_order(),
            group_size=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            num_groups=self.config.prompts_per_step,
        )

    @property
    def grader(self) -> Grader:
        """The reward of the run."""
        config = self.config
        return Grader(config.reward, config.reward_deadline, config.reward_on_error)

    def evaluate(
        self,
        params: ArrayTree,
        key: jax.Array,
        *,
        check: Callable[[], None] = lambda: None,
        k: Sequence[int] = (),
        success: float = 1.0,
    ) -> tuple[dict[str, Accuracy], list[dict]]:
        """Greedy and sampled accuracy on the held-out questions, and the greedy completions.

        Args:
          params: Parameters of the policy.
          key: That of the run's state; the same key gives the same evaluation.
          check: Called before each batch; what it raises ends the evaluation.
          k, success: Of pass@k and maj@k of the sampled completions; see
            :func:`~jaxrl_llm.train.evaluate`.
        """
        config, shards = self.config, batch_shards(self.mesh)
        # As many rows as a training batch has, but no more prompts than there are.
        enough = -(-len(self.held_out) // shards) * shards
        rows_of_batch = min(config.prompts_per_step * config.sampling.group_size, enough)

        def run(sampler: Callable, batch_size: int, k=()) -> tuple[Accuracy, list[dict]]:
            def checked(params, key, prompts):
                check()
                return sampler(params, key, prompts)

            return evaluate(
                checked,
                params,
                jax.random.fold_in(key, 0x7FFFFFFF),
                self.held_out,
                reward=config.reward,
                tokenizer=self.tokenizer,
                deadline=config.reward_deadline,
                on_error=config.reward_on_error,
                batch_size=batch_size,
                k=k,
                success=success,
            )

        greedy, rows = run(self.samplers.greedy, rows_of_batch)
        sampled, _ = run(self.samplers.sampled, config.prompts_per_step, k)
        return {"greedy": greedy, "sampled": sampled}, rows

    def describe(self, params: ArrayTree) -> str:
        """One line about the run."""
        config, devices = self.config, 1 if self.mesh is None else self.mesh.size
        name = config.model if isinstance(config.model, str) else "model"
        used = f"{devices} of {jax.device_count()} {jax.default_backend()} device(s)"
        if most := config.asynchrony.max_staleness:
            sampling = config.asynchrony.sampler_devices
            used += f" and {sampling} more that sample" if sampling else ""
            used += f", rollouts at most {most} update(s) behind"
        # How many optimizer steps a batch serves, where that is not plainly one.
        steps = ""
        if not self.recipe.forward_only:
            passes, paper = config.passes, self.recipe.minibatches
            steps = f", {passes.updates} optimizer steps a batch" if passes.updates > 1 else ""
            if config.minibatches is None and paper != passes.minibatches:
                steps += f", not in the {paper} minibatches of its paper, which do not divide it"
        return (
            f"{name}, {describe_params(params)}, {used}; {self.recipe.name}, "
            f"{config.prompts_per_step} prompts x {config.sampling.group_size} rollouts a step"
            f"{steps}; "
            f"{len(self.train)} questions to train on, {len(self.held_out)} held out"
        )


def load_model(config: TrainConfig, mesh, *, frozen=False) -> tuple[Model, ArrayTree, Any]:
    """The model, its parameters on the mesh, float32 unless they stay frozen, and its tokenizer."""
    if isinstance(config.model, str):
        from jaxrl_llm import data, models

        matrices = config.dtype if frozen else None
        model, params = models.load_model(config.model, mesh=mesh, matrices=matrices)
        shape = dataclasses.replace(
            model.config, dtype=config.dtype, quantization=config.quantization
        )
        model = models.make_model(shape)
        return model, params, data.load_tokenizer(config.model)
    model, params, tokenizer = config.model()
    params = trees.cast(params, jnp.float32)
    if mesh is not None:
        from jaxrl_llm.models.sharding import param_shardings, shard

        params = shard(params, param_shardings(params, mesh, model.sharding_rules))
    return model, params, tokenizer


def load_prompts(config: TrainConfig) -> tuple[Sequence, Sequence, str]:
    """The prompts to train on and those held out, and a digest of all of them.

    Raises:
      ValueError: If there are none for the training or for an evaluation.
    """
    from jaxrl_llm import data

    prompts, held_out = find_prompts(config.data.prompts), ()
    if config.data.evaluation is not None:
        held_out = find_prompts(config.data.evaluation)
        known = {prompt.text for prompt in prompts}
        if both := sum(prompt.text in known for prompt in held_out):
            warnings.warn(
                f"data: {both} of the {len(held_out)} evaluation prompts are also trained on.",
                stacklevel=2,
            )
    elif config.data.held_out and config.evaluation.enabled:
        prompts, held_out = data.split_distinct(
            prompts, held_out=config.data.held_out, seed=config.data.seed
        )
    if len(prompts) == 0:
        raise ValueError("data: there are no prompts to train on.")
    texts = [[prompt.text for prompt in part] for part in (prompts, held_out)]
    digest = hashlib.sha256(json.dumps([*texts, config.data.seed]).encode()).hexdigest()
    if config.evaluation.limit is not None:
        held_out = held_out[: config.evaluation.limit]
    if config.evaluation.enabled and not held_out:
        raise ValueError(
            "evaluation: there are no held-out questions; set data.held_out or data.evaluation, or "
            "turn the evaluation off."
        )
    return prompts, held_out, digest


def encode_questions(
    config: TrainConfig, model: Model, tokenizer, *parts: Sequence
) -> list[list[Question]]:
    """Prompts, such as those to train on and those held out, with their tokens.

    Raises:
      ValueError: If the model's context has no room for one.
    """
    room = prompt_room("sampling", model, config.sampling.max_new_tokens)
    chat, system = config.data.chat, config.data.system
    return [encode_prompts(x, tokenizer, room=room, chat=chat, system=system) for x in parts]


def check_data(config: TrainConfig, recipe: Any, prompts: Sequence) -> None:
    """Raises ValueError if the data lacks what a recipe or its collector reads of each prompt."""
    if recipe.forward_only:
        return
    rows = [Question(prompt, []) for prompt in prompts]
    check_fields(recipe, rows)
    for part in collector_parts(recipe.collector):
        if hasattr(part, "check_data"):
            part.check_data(DataRows(rows))
        if hasattr(part, "check_sizes"):
            part.check_sizes(
                DataRows(rows),
                group_size=config.sampling.group_size,
                num_groups=config.prompts_per_step,
            )


def text_room(config: TrainConfig, recipe: Any, model: Model, longest: int) -> int:
    """Tokens that a prompt of a run may have whose data has prompts of up to ``longest``.

    Raises:
      ValueError: If ``sampling.prompt_length`` has no effect.
    """
    wanted = config.sampling.prompt_length
    if collector_needs(getattr(recipe, "collector", None), "sends_text"):
        room = prompt_room("sampling", model, config.sampling.max_new_tokens)
        return max(longest, min(room, wanted or longest + _TEXT_ROOM))
    if wanted is not None and (recipe.forward_only or not recipe.computed_from("teacher")):
        raise ValueError(
            f"sampling: prompt_length has no effect with recipe {recipe.name!r}, whose collector "
            "sends no text and which has no teacher."
        )
    return longest


def teacher_room(config: TrainConfig, model: Model, longest: int) -> int:
    """Tokens that the prompt of a teacher may have, which shows a response and a text besides.

    ``longest`` is that of the longest prompt.
    """
    sampling = config.sampling
    room = prompt_room("the teacher", model, sampling.max_new_tokens)
    wanted = sampling.prompt_length or longest + sampling.max_new_tokens + _TEXT_ROOM
    return min(room, wanted)


def load_experiment(config: TrainConfig) -> tuple[Experiment, ArrayTree]:
    """Everything that a run needs, loaded and checked against each other, and the parameters.

    Raises:
      ValueError: If it does not fit together: a mesh that the devices or the batch do not divide, a
        prompt that is longer than the context, no held-out questions for an evaluation.
    """
    mesh, sampler_mesh = load_meshes(
        config.mesh, config.asynchrony, config.prompts_per_step, config.microbatches
    )
    prompts, others, digest = load_prompts(config)
    recipe = find_recipe(config.recipe, config.sampling, num_prompts=len(prompts))
    check_data(config, recipe, prompts)
    model, params, tokenizer = load_model(config, mesh, frozen=config.lora.rank is not None)
    model, params = with_adapter(model, params, config.lora, mesh=mesh)
    check_reads_rows("train", model, config.packing)
    train, held_out = encode_questions(config, model, tokenizer, prompts, others)
    collector = getattr(recipe, "collector", None)
    sends_text = collector_needs(collector, "sends_text")
    shared_prefix_len = count_shared_prefix([q.tokens for q in (*train, *held_out)])
    shared_prefix_len = 0 if sends_text else shared_prefix_len
    longest = text_room(config, recipe, model, max(len(q.tokens) for q in train))
    encoder = TextEncoder(tokenizer, longest, config.data.chat, config.data.system)
    experiment = Experiment(
        config=config,
        mesh=mesh,
        sampler_mesh=sampler_mesh,
        model=model,
        tokenizer=tokenizer,
        recipe=recipe,
        train=train,
        held_out=held_out,
        samplers=make_samplers(
            config,
            recipe,
            model,
            tokenizer,
            mesh,
            sampler_mesh,
            longest=longest,
            shared_prefix_len=shared_prefix_len,
        ),
        questions=digest,
        shared_prefix_len=shared_prefix_len,
        encoder=encoder,
    )
    return experiment, params


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
) -> Samplers:
    """The samplers of a run, whose longest training prompt has ``longest`` tokens."""
    sampling, group_size = config.sampling, config.sampling.group_size

    def sampler(where, size: int, *, greedy: bool = False) -> Callable:
        return make_sampler(
            model,
            group_size=size,
            mesh=where,
            temperature=0.0 if greedy else sampling.temperature,
            top_k=None if greedy else sampling.top_k,
            top_p=None if greedy else sampling.top_p,
            min_p=None if greedy else sampling.min_p,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            shared_prefix_len=shared_prefix_len,
        )

    samples = config.evaluation.samples or group_size
    greedy = baseline = sampler(mesh, 1, greedy=True)
    if recipe.forward_only:
        filtered = recipe.temperature > 0
        rollouts = make_population(
            model,
            recipe,
            group_size=group_size,
            mesh=mesh,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            shared_prefix_len=shared_prefix_len,
            top_k=sampling.top_k if filtered else None,
            top_p=sampling.top_p if filtered else None,
            min_p=sampling.min_p if filtered else None,
        )
        sampled = sampler(mesh, samples)
    elif sampler_mesh is not None:
        rollouts = sampler(sampler_mesh, group_size)
        baseline = sampler(sampler_mesh, 1, greedy=True)
        sampled = sampler(mesh, samples)
    else:
        rollouts = sampler(mesh, group_size)
        sampled = rollouts if samples == group_size else sampler(mesh, samples)
    engine, collector = None, getattr(recipe, "collector", None)
    if sampling.slots is not None or collector_needs(collector, "needs_slots"):
        every = config.prompts_per_step * group_size
        slotted = sampling if sampling.slots else dataclasses.replace(sampling, slots=every)
        rows, width = slotted.grid(config.prompts_per_step)
        engine = make_engine(
            model,
            mesh=mesh if sampler_mesh is None else sampler_mesh,
            rows=rows,
            width=width,
            prompt_length=longest,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            vary=("temperature",) if collector_needs(collector, "varies_temperature") else (),
            entropy=collector_needs(collector, "records_entropy"),
            runner_up=collector_needs(collector, "records_runner_up"),
            model_entropy=collector_needs(collector, "records_model_entropy"),
            entropy_tau=entropy_tau_of(collector),
        )
    return Samplers(rollouts, baseline, greedy, sampled, engine)


def make_algorithm(
    experiment: Experiment,
    optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation | None,
    reference: ArrayTree | None,
) -> Algorithm:
    """What trains the recipe of an experiment."""
    config, recipe, sampler = experiment.config, experiment.recipe, experiment.samplers.rollouts
    if recipe.forward_only:
        return make_evolution(recipe, optimizer, sampler, mesh=experiment.mesh)
    options = StepOptions(
        passes=config.passes,
        temperature=config.sampling.temperature,
        remat=config.remat,
        shared_prefix_len=experiment.shared_prefix_len,
        packing=config.packing,
        stale=config.asynchrony.max_staleness > 0,
        mesh=experiment.mesh,
        learning_rate=make_schedule(config.optimizer),
    )
    return make_policy_gradient(
        experiment.model,
        recipe,
        optimizer,
        sampler,
        options=options,
        critic_optimizer=critic_optimizer,
        reference=reference,
    )


def init_experiment(
    config: TrainConfig, folder: Path, *, resume: bool
) -> tuple[Experiment, Algorithm, Checkpoints, TrainState]:
    """The experiment, its algorithm, its checkpoints, and the state it begins from.

    ``folder`` is that of the checkpoints; ``resume`` begins from the last that can be read.
    """
    from jaxrl_llm.data import Cursor

    experiment, params = load_experiment(config)
    recipe = experiment.recipe
    base = params.base if isinstance(params, Adapted) else params
    frozen = recipe.reference is None and recipe.uses_reference
    reference = base if frozen else None
    optimizer = moving_only(recipe, make_optimizer(config.optimizer))
    of_critic = config.critic_optimizer
    critic_optimizer = make_optimizer(of_critic) if of_critic is not None else None
    algorithm = make_algorithm(experiment, optimizer, critic_optimizer, reference)
    fingerprint = {"questions": experiment.questions, "seed": config.seed}
    fingerprint |= base_fingerprint(params, config.lora)
    if frozen and "base" not in fingerprint:  # it is loaded anew, also by a resumed run
        fingerprint["reference"] = values_digest(reference)
    checkpoints = Checkpoints(
        folder,
        model=experiment.model,
        run=fingerprint,
        keep=config.checkpoint.keep,
        best=config.checkpoint.best,
    )
    critic = None
    if recipe.critic is not None:
        key = jax.random.fold_in(jax.random.key(config.seed), 0x637269)
        critic = init_critic(experiment.model, base, heads=recipe.critic.heads, key=key)
    # A model that comes from a function may still be used by the code that made it.
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
    )
    collector_state = experiment.collector.init(len(experiment.train))
    state = state._replace(collector_state=jax.tree.map(np.asarray, collector_state))
    if resume:
        state = shapes_of(state)
        del params, base, critic  # before others are read, so that one state is in memory
        checkpoints.sweep()
        state = checkpoints.restore(state)
    return experiment, algorithm, checkpoints, state
