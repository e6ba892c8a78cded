"""From a configuration to an experiment: mesh, model, tokenizer, questions, samplers, state."""

import dataclasses
import functools
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import watchdog
from jaxrl_llm.curation import Collector, in_order
from jaxrl_llm.curation.collectors.protocol import (
    collector_needs,
    parts_with_groups,
    sized,
    width_of,
)
from jaxrl_llm.data.prompts import row_text
from jaxrl_llm.data.questions import Question, TextEncoder, encode_prompts
from jaxrl_llm.data.rendering import make_renderer
from jaxrl_llm.models.denoising import is_causal
from jaxrl_llm.models.heads import with_head, with_vocabulary, without_output
from jaxrl_llm.models.lora import Adapted, describe_params, with_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import (
    AXES,
    batch_shards,
    param_shardings,
    shard,
    with_axes_of,
)
from jaxrl_llm.rollout.collect import DataRows, Limits
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.sampler import bucket_of, count_shared_prefix, prompt_room
from jaxrl_llm.rollout.subagent import SubagentPlayer
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.batches import Passes, check_group_fits, check_reads_rows
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.serialization import (
    abstract,
    base_fingerprint,
    shapes_of,
    values_digest,
)
from jaxrl_llm.train.config import TrainConfig, find_prompts, find_recipe
from jaxrl_llm.train.critic import init_critic
from jaxrl_llm.train.evaluate import Accuracy, evaluate, play_tasks
from jaxrl_llm.train.evolution import make_evolution, moving_only
from jaxrl_llm.train.fields import check_fields
from jaxrl_llm.train.grading import Grader
from jaxrl_llm.train.mesh import (
    MeshConfig,
    check_expert_axis,
    load_meshes,
    place_batch,
    replicated,
    sampling_mesh,
)
from jaxrl_llm.train.offline import OfflineRows, ReferenceLogp, offline_batches, reference_logp
from jaxrl_llm.train.optimizer import make_optimizer, make_schedule
from jaxrl_llm.train.policy_gradient import (
    StepOptions,
    make_policy_gradient,
    make_scorer,
)
from jaxrl_llm.train.samplers import Samplers, compile_sampler, make_samplers, policy_sampler
from jaxrl_llm.train.score_batch import Teacher, check_teacher
from jaxrl_llm.train.start import find_start
from jaxrl_llm.train.state import SubagentState, TrainState, init_state
from jaxrl_llm.train.subagent import SubagentParts, make_subagent_sampler, with_subagent
from jaxrl_llm.train.teachers import (
    AlignedTeacher,
    ModelTeacher,
    StoredTeacher,
    TokenTeacher,
    check_host_teacher,
    from_name,
    tokenizer_digest,
)

# Separates the random numbers of a head from those of the sampler.
_HEAD = 0x637269
# Default number of tokens by which a collector's text may exceed the longest prompt.
_TEXT_ROOM = 1024
# Default maximum number of tokens in the first observation of an environment.
_OBSERVATION_ROOM = 512


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The components of a run, except its state.

    Attributes:
      config: The configuration.
      mesh: The device mesh, or None for one device.
      sampler_mesh: The mesh of the devices that only sample, or None if there are none.
      model: The model.
      tokenizer: A ``data.Tokenizer``.
      recipe: The method, a ``Recipe`` or an ``EvolutionRecipe``.
      train: Training questions.
      unlimited: Held-out questions, empty if there are none. With ``reference_logp`` the list is
        not yet cut to ``evaluation.limit``.
      samplers: Samplers of rollouts and evaluations.
      questions: Digest of all questions, before any limit, and of their split and order.
      shared_prefix_len: Number of first tokens that all prompts share and that are computed once
        per batch; 0 if a collector sends texts.
      encoder: Encodes the texts that a collector sends.
      references: Stored log-probabilities of the data's responses under a frozen reference, if any.
      teacher: A ``score_batch.Teacher`` on the devices, a teacher on the host, or None.
      subagent: What answers the questions of the environment, or None.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh | None
    sampler_mesh: jax.sharding.Mesh | None
    model: Model
    tokenizer: Any
    recipe: Any
    train: list[Question]
    unlimited: list[Question]
    samplers: Samplers
    questions: str
    shared_prefix_len: int
    encoder: TextEncoder
    references: ReferenceLogp | None = None
    teacher: Any = None
    subagent: SubagentParts | None = None

    @property
    def rollout_mesh(self) -> jax.sharding.Mesh | None:
        """The mesh of rollouts and evaluations on the devices of ``mesh``."""
        return sampling_mesh(self.mesh, self.config.prompts_per_step)

    def on_rollout_mesh(self, tree: ArrayTree) -> ArrayTree:
        """Parameters and keys of ``mesh`` for the samplers, on the same devices and not copied."""
        before, mesh = self.mesh, self.rollout_mesh
        if before is None or mesh is None or mesh == before:
            return tree
        return with_axes_of(tree, mesh, before=before)

    @property
    def held_out(self) -> list[Question]:
        """The questions of the evaluation."""
        return self.unlimited[: self.config.evaluation.limit]

    @functools.cached_property
    def rows(self) -> DataRows:
        """The training rows as collectors see them; values computed from all rows are cached."""
        return DataRows(self.train)

    @property
    def collector(self) -> Collector:
        """The recipe's collector; by default one that takes prompts in the order of the data."""
        sampling = self.config.sampling
        return sized(
            self.recipe.collector or in_order(),
            group_size=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            num_groups=self.config.prompts_per_step,
        )

    def behavior_params(self, params: ArrayTree) -> ArrayTree:
        """Parameters for sampling rollouts: the policy's, plus those of a teacher that samples."""
        if self.recipe.forward_only or not self.recipe.teacher_mixture:
            return params
        return {"first": params, "second": self.on_rollout_mesh(self.teacher.params)}

    @property
    def grader(self) -> Grader:
        """The reward of the run."""
        config = self.config
        return Grader(config.reward, config.reward_deadline, config.reward_on_error)

    def sampler(self, group_size: int) -> Callable:
        """A sampler of ``group_size`` responses per prompt, with the run's sampling options."""
        return policy_sampler(
            self.config.sampling,
            self.recipe,
            self.model,
            self.tokenizer,
            self.rollout_mesh,
            group_size=group_size,
            shared_prefix_len=self.shared_prefix_len,
        )

    def evaluate(
        self,
        params: ArrayTree,
        key: jax.Array,
        *,
        collector_state: ArrayTree = (),
        check: Callable[[], None] = lambda: None,
        k: Sequence[int] = (),
        success: float = 1.0,
        subagent: ArrayTree | None = None,
    ) -> tuple[dict[str, Accuracy], list[dict]]:
        """Greedy and sampled accuracy on the held-out questions, and the greedy completions.

        Args:
          params: Parameters of the policy.
          key: Key of the run's state; the same key gives the same evaluation.
          collector_state: State of the collector. ``evaluation_text(state, takes_text)``, if the
            collector has it, returns a function from a held-out row to its message, or None for
            the text of the row alone.
          check: Called before each batch; an exception from it ends the evaluation.
          k, success: For pass@k and maj@k of the sampled completions; see
            :func:`~jaxrl_llm.train.evaluate`.
          subagent: Parameters of the subagent, whose answers are sampled in both evaluations.
        """
        if self.config.environment is not None:
            player = None
            if subagent is not None:
                player = self.subagent_player(subagent, self.on_rollout_mesh(key), 0x7FFFFFFF)
            elif self.recipe.subagent is not None:
                raise ValueError(
                    f"evaluate: recipe {self.recipe.name!r} has a subagent, whose parameters are "
                    "in the state of its run; a run evaluates them."
                )
            return self._evaluate_episodes(params, key, player, check=check, k=k, success=success)
        params, key = self.on_rollout_mesh((params, key))
        config = self.config
        questions, rows_of_batch = self._to_evaluate(collector_state)

        def run(sampler: Callable, batch_size: int, k=()) -> tuple[Accuracy, list[dict]]:
            def checked(params, key, prompts):
                check()
                return sampler(params, key, prompts)

            return evaluate(
                checked,
                params,
                jax.random.fold_in(key, 0x7FFFFFFF),
                questions,
                reward=config.reward,
                tokenizer=self.tokenizer,
                deadline=config.reward_deadline,
                on_error=config.reward_on_error,
                batch_size=batch_size,
                k=k,
                success=success,
            )

        # Its program is compiled while the greedy one is, and while that decodes.
        samplers = self.samplers
        if samplers.sampled is not samplers.greedy:
            compile_sampler(samplers.sampled, params, key, questions, config.prompts_per_step)
        greedy, rows = run(samplers.greedy, rows_of_batch)
        sampled, _ = run(samplers.sampled, config.prompts_per_step, k)
        return {"greedy": greedy, "sampled": sampled}, rows

    def compile_rollouts(self, params: ArrayTree, key: Array | jax.ShapeDtypeStruct) -> None:
        """Begins to compile the sampler of the first batch in another thread.

        ``params`` and ``key`` are those of the state or their shapes. Without effect if the prompts
        of the batch, or what samples them, are not known before a collector was asked.
        """
        recipe, samplers = self.recipe, self.samplers
        if recipe.forward_only or recipe.teacher_mixture or self.config.offline:
            return
        if self.sampler_mesh is not None or samplers.engine is not None:
            return
        widths = {bucket_of(len(question.tokens)) for question in self.train}
        if len(widths) == 1 and not collector_needs(recipe.collector, "sends_text"):
            params, key = self.on_rollout_mesh((params, key))
            size = self.config.prompts_per_step
            compile_sampler(samplers.rollouts, params, key, self.train, size)

    def compile_greedy(
        self,
        params: ArrayTree,
        key: Array | jax.ShapeDtypeStruct,
        collector_state: ArrayTree | None = None,
    ) -> None:
        """Begins to compile the sampler of the greedy evaluation in another thread.

        ``params`` and ``key`` are those of the state or their shapes. Without effect if there is no
        such evaluation, or its texts depend on a ``collector_state`` that is not passed.
        """
        config = self.config
        evaluates = config.evaluation.enabled and config.samples_held_out
        if not evaluates or config.environment is not None:
            return
        if collector_state is None and hasattr(self.collector, "evaluation_text"):
            return
        params, key = self.on_rollout_mesh((params, key))
        questions, rows = self._to_evaluate(collector_state)
        compile_sampler(self.samplers.greedy, params, key, questions, rows)

    def _to_evaluate(self, collector_state: ArrayTree) -> tuple[list[Question], int]:
        """The questions of an evaluation, and how many of them are decoded greedily at a time."""
        config, shards = self.config, batch_shards(self.rollout_mesh)
        questions, message = self.held_out, None
        if config.reads_columns:  # several rows of one prompt are one question
            questions = list({x.prompt.content: x for x in questions}.values())
        if hasattr(self.collector, "evaluation_text"):
            message = self.collector.evaluation_text(collector_state, self.encoder.takes_text)
        if message is not None:
            rows_of_data = DataRows(questions)
            questions = [
                question._replace(tokens=self.encoder.prompt(message(row), "of an evaluation"))
                for question, row in zip(questions, rows_of_data, strict=True)
            ]
        # As many rows as a training batch, but no more than the questions need.
        enough = -(-len(questions) // shards) * shards
        return questions, min(config.prompts_per_step * config.sampling.group_size, enough)

    def offline_batches(
        self, questions: Sequence[Question], examples: Sequence[Question] = ()
    ) -> Iterator[OfflineRows]:
        """Batches of every row of ``questions``; a collector may draw from ``examples`` too."""
        config = self.config
        return offline_batches(
            self.collector,
            questions,
            examples=examples,
            num_groups=config.prompts_per_step,
            group_size=config.sampling.group_size,
            limits=Limits(
                self.encoder, config.sampling.max_new_tokens, self.model.config.vocab_size
            ),
            pad_id=self.tokenizer.pad_id,
        )

    def subagent_player(
        self, params: ArrayTree, key: jax.Array, number: int
    ) -> SubagentPlayer | None:
        """Answers the questions of the episodes of batch ``number``, if the run has a subagent."""
        if self.subagent is None:
            return None
        return self.subagent.player(self.on_rollout_mesh(params), key, number)

    def episodes(self, seed: Sequence[int], subagent: SubagentPlayer | None = None) -> Episodes:
        """The player of the run's environment; ``seed`` extends the seed of the run."""
        config = self.config
        return Episodes(
            config.environment,
            make_renderer(self.tokenizer, chat=config.data.chat, system=config.data.system),
            decode=self.tokenizer.decode,
            seed=(config.seed, *seed),
            max_new_tokens=config.sampling.max_new_tokens,
            options=config.episodes,
            watch=watchdog.SHARED,
            subagent=subagent,
        )

    def _evaluate_episodes(
        self,
        params: ArrayTree,
        key: jax.Array,
        subagent: SubagentPlayer | None,
        *,
        check,
        k: Sequence[int],
        success: float,
    ) -> tuple[dict[str, Accuracy], list[dict]]:
        """As :meth:`evaluate`, for an environment: mean returns of the held-out tasks."""
        if self.sampler_mesh is None:
            params, key = self.on_rollout_mesh((params, key))
        else:  # the engine of the rollouts is on their devices
            rules = self.model.sharding_rules
            params = jax.device_put(params, param_shardings(params, self.sampler_mesh, rules))
            key = jax.device_put(key, replicated(self.sampler_mesh))
        sampling, results, rows = self.config.sampling, {}, []
        samples = self.config.evaluation.samples or sampling.group_size
        for name, size, temperature in (("greedy", 1, 0.0), ("sampled", samples, None)):
            check()
            result, records = play_tasks(
                self.samplers.engine,
                params,
                jax.random.fold_in(key, 0x7FFFFFFF),
                self.held_out,
                self.episodes((0x7FFFFFFF,), subagent),
                decode=self.tokenizer.decode,
                samples=size,
                temperature=temperature,
                max_new_tokens=sampling.max_new_tokens,
                pad_id=self.tokenizer.pad_id,
                k=k if name == "sampled" else (),
                success=success,
            )
            results[name], rows = result, rows or records
        return results, rows

    def describe(self, params: ArrayTree) -> str:
        """One line about the run."""
        config, devices = self.config, 1 if self.mesh is None else self.mesh.size
        name = config.model if isinstance(config.model, str) else "model"
        used = f"{devices} of {jax.device_count()} {jax.default_backend()} device(s)"
        if most := config.asynchrony.max_staleness:
            sampling = config.asynchrony.sampler_devices
            used += f" and {sampling} more that sample" if sampling else ""
            used += f", rollouts at most {most} update(s) behind"
        rollouts = f"{config.sampling.group_size} rollouts"
        if config.offline:
            width = width_of(self.collector, config.sampling.group_size)
            rollouts = f"{width} response{'s' if width > 1 else ''} of the data"
        # The optimizer steps of a batch, if more than one or not as in the paper.
        steps = ""
        if not self.recipe.forward_only:
            passes, paper = config.passes, self.recipe.minibatches
            steps = f", {passes.updates} optimizer steps a batch" if passes.updates > 1 else ""
            if config.minibatches is None and paper != passes.minibatches:
                steps += f", not in the {paper} minibatches of its paper, which are too many for it"
        decay = config.optimizer.decay_steps
        last = config.steps if decay is None else config.optimizer.warmup_steps + decay
        if last < config.steps and getattr(self.recipe, "turn_updates", None) is None:
            steps += f", at a learning rate of 0 after step {last} of {config.steps}"
        return (
            f"{name}, {describe_params(params)}, {used}; {self.recipe.name}, "
            f"{config.prompts_per_step} prompts x {rollouts} a step{steps}; "
            f"{len(self.train)} questions to train on, {len(self.held_out)} held out"
        )


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
        found = OpenedModel(models.make_model(shape), tokenizer, opened.shapes, opened.read)
    else:
        model, params, tokenizer = config.model()
        params = _placed(model, params, mesh)
        found = OpenedModel(model, tokenizer, lambda: params, lambda: params)
    return found if config.init_from is None else _begun_from(config.init_from, found)


def _begun_from(source: str, opened: OpenedModel) -> OpenedModel:
    """The model with the policy of an earlier run in place of its own parameters."""
    read = find_start(source, opened.model)
    shapes = jax.tree.map(abstract, opened.shapes())
    return opened._replace(shapes=lambda: shapes, read=lambda: read(shapes))


def load_model(config: TrainConfig, mesh, *, frozen=False) -> tuple[Model, ArrayTree, Any]:
    """The model, its parameters on the mesh (float32 unless ``frozen``), and its tokenizer."""
    opened = open_model(config, mesh, frozen=frozen)
    return opened.model, opened.read(), opened.tokenizer


def with_trained(
    config: TrainConfig, recipe: Any, model: Model, params: ArrayTree, *, mesh=None
) -> tuple[Model, ArrayTree]:
    """The model and parameters with the adapter and the head that a run trains, if any."""
    if model.velocity is not None and (recipe.head or config.lora.rank is not None):
        what = f"recipe {recipe.name!r} trains a head" if recipe.head else "lora adds adapters"
        raise ValueError(f"config: {what}, which a flow model does not have.")
    if recipe.head and isinstance(config.model, str):
        model, params = without_output(model, params)
    model, params = with_adapter(model, params, config.lora, mesh=mesh)
    if not recipe.head:
        return model, params
    key = jax.random.fold_in(jax.random.key(config.seed), _HEAD)
    return with_head(model, params, key=key, mesh=mesh)


def load_reference(config: TrainConfig, model: Model, params: ArrayTree, mesh) -> ArrayTree:
    """The parameters of the reference at the start of a run: ``config.reference``'s or ``params``.

    Raises:
      ValueError: If the reference's parameters differ from the policy's in structure or shape.
    """
    params = params.base if isinstance(params, Adapted) else params
    if config.reference is None:
        return params
    if isinstance(config.reference, str):
        from jaxrl_llm import models

        _, reference = models.load_model(config.reference, mesh=mesh)
    else:
        reference = _placed(model, config.reference()[1], mesh)
    trees.check_alike("config", "the parameters of model and reference", params, reference)
    return reference


def holds_reference(config: TrainConfig, recipe: Any) -> bool:
    """Whether a run holds the parameters of a reference in addition to the policy's.

    If the reference's log-probabilities are stored, only ``kl_ref_logp``, which depends on the
    other rows of a batch, and other statistics of the reference need its parameters.
    """
    if not recipe.uses_reference or config.reference_logp is None:
        return recipe.uses_reference
    return "kl_ref_logp" in recipe.required_fields or bool(recipe.computed_from("reference"))


def score_data(experiment: Experiment, reference: ArrayTree) -> ReferenceLogp:
    """Log-probabilities of the data's responses under a reference, computed or read from a file.

    Raises:
      ValueError: If the file belongs to another reference or other data.
    """
    config, model, mesh = experiment.config, experiment.model, experiment.mesh
    scorer = make_scorer(
        model,
        microbatches=config.microbatches,
        temperature=config.sampling.temperature,
        shared_prefix_len=experiment.shared_prefix_len,
        mesh=mesh,
    )
    about = {
        "reference model": f"{values_digest(reference)} {model.config!r}",
        "temperature": config.sampling.temperature,
    }
    questions = [*experiment.train, *experiment.unlimited]
    return reference_logp(
        Path(str(config.reference_logp)),
        lambda: experiment.offline_batches(questions),
        lambda batch: scorer(reference, place_batch(batch, mesh)),
        about=about,
        questions=questions,
    )


def load_teacher(
    config: TrainConfig, recipe: Any, model: Model, tokenizer, questions, mesh, *, longest: int
) -> Any:
    """The teacher of a run: a ``Teacher`` on the devices, a teacher on the host, or None.

    Args:
      config: The configuration, which names the teacher.
      recipe, model, tokenizer: Recipe, model and tokenizer of the policy.
      questions: All questions of the run; stored scores must cover them.
      mesh: Mesh of the devices.
      longest: Tokens of the longest prompt.

    Raises:
      ValueError: If the teacher does not return what the recipe reads, has another tokenizer or too
        short a context, or has stored scores of another tokenizer or data set.
    """
    teacher = config.teacher
    if teacher is None:
        return None
    teacher = from_name(teacher) if isinstance(teacher, str) else teacher
    if isinstance(teacher, TokenTeacher | AlignedTeacher):
        check_host_teacher(recipe, teacher)
        _check_on_host(config, teacher, questions)
        if isinstance(teacher, StoredTeacher):
            teacher.check(tokenizer, questions)
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
    same_tokens = tokenizer_digest(theirs) == tokenizer_digest(tokenizer)
    if same_tokens and other.config.vocab_size > model.config.vocab_size:
        other = with_vocabulary(other, model.config.vocab_size)
    check_teacher("config", recipe, model, other)
    needed = longest + config.sampling.max_new_tokens
    if needed > other.config.max_length:
        raise ValueError(
            f"config: prompts and responses may have {needed} tokens together, but the teacher's "
            f"context has {other.config.max_length}."
        )
    if not same_tokens:
        raise ValueError(
            "config: the teacher has another tokenizer than the policy, but recipe "
            f"{recipe.name!r} compares tokens; use span_distillation."
        )
    return Teacher(other, params)


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
            f"data: prompt {several.id or several.text[:40]!r} is a conversation, but {teacher!r} "
            "reads only the text of a prompt."
        )


def _placed(model: Model, params: ArrayTree, mesh) -> ArrayTree:
    """Parameters in float32, on the mesh if there is one."""
    params = trees.cast(params, jnp.float32)
    if mesh is None:
        return params
    return shard(params, param_shardings(params, mesh, model.sharding_rules))


def with_mesh_sizes(config: TrainConfig) -> TrainConfig:
    """The configuration with each mesh size of -1 replaced by a number.

    Raises:
      ValueError: If the mesh does not divide the batch or the devices.
    """
    sizes = config.mesh, config.asynchrony, config.prompts_per_step, config.microbatches
    mesh, _ = load_meshes(*sizes)
    found = dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)
    return dataclasses.replace(config, mesh=MeshConfig(**found))


def load_prompts(config: TrainConfig) -> tuple[Sequence, Sequence, str]:
    """The training prompts, the held-out prompts, and a digest of all prompts.

    Raises:
      ValueError: If there are no prompts for training or for an evaluation.
    """
    from jaxrl_llm import data

    prompts, held_out = find_prompts(config.data.prompts), ()
    if config.data.evaluation is not None:
        held_out = find_prompts(config.data.evaluation)
        known = {prompt.content for prompt in prompts}
        if both := sum(prompt.content in known for prompt in held_out):
            warnings.warn(
                f"data: {both} of the {len(held_out)} evaluation prompts are also trained on.",
                stacklevel=2,
            )
    elif config.data.held_out and config.evaluation.enabled:
        prompts, held_out = data.split_distinct(
            prompts,
            held_out=config.data.held_out,
            seed=config.data.seed,
            keep_repeats=config.reads_columns,
            by_row=config.environment is not None,
        )
    if len(prompts) == 0:
        raise ValueError("data: there are no prompts to train on.")
    by_row = config.reads_columns or config.environment is not None
    texts = [[row_text(x) if by_row else x.content for x in part] for part in (prompts, held_out)]
    digest = hashlib.sha256(json.dumps([*texts, config.data.seed]).encode()).hexdigest()
    # The reference's scores are stored for all held-out prompts, whatever the limit of a run.
    if config.evaluation.limit is not None and config.reference_logp is None:
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
    """Lists of prompts, such as training and held-out prompts, with their tokens.

    Raises:
      ValueError: If a prompt is too long for the model's context or contains a denoiser's mask id.
    """
    room = prompt_room("sampling", model, config.sampling.max_new_tokens)
    chat, system = config.data.chat, config.data.system
    encoded = [encode_prompts(x, tokenizer, room=room, chat=chat, system=system) for x in parts]
    mask_id = None if is_causal(model) else model.config.mask_id
    for prompt, tokens in itertools.chain(*encoded):
        if mask_id is not None and mask_id in tokens:
            raise ValueError(
                f"data: prompt {prompt.id or prompt.text[:40]!r} holds the mask id {mask_id}, "
                "which is reserved for masked positions."
            )
    return encoded


def check_data(
    config: TrainConfig, recipe: Any, prompts: Sequence, held_out: Sequence = ()
) -> None:
    """Raises ValueError if prompts lack data that a recipe or its collector reads.

    Held-out prompts need the responses that an evaluation compares.
    """
    other_text = collector_needs(recipe.collector, "sends_text")
    other_text = other_text or recipe.computed_from("responses")
    several = next((prompt for prompt in prompts if prompt.messages is not None), None)
    if several is not None and (other_text or config.environment is not None):
        raise ValueError(
            f"data: prompt {several.id or several.text[:40]!r} is a conversation, but recipe "
            f"{recipe.name!r} or the environment reads only the text of a prompt."
        )
    if recipe.forward_only:
        return
    if config.environment is not None and collector_needs(recipe.collector, "stores_responses"):
        raise ValueError(
            f"config: {recipe.collector!r} reuses responses of earlier batches without the turns "
            "of an episode; use another recipe with an environment."
        )
    rows = [Question(prompt, []) for prompt in prompts]
    check_fields(recipe, rows, environment=config.environment is not None)
    for part, groups in parts_with_groups(recipe.collector, config.prompts_per_step):
        if hasattr(part, "check_data"):
            part.check_data(DataRows(rows))
        if groups and hasattr(part, "check_sizes"):
            part.check_sizes(
                DataRows(rows),
                group_size=config.sampling.group_size,
                num_groups=groups,
            )
        if getattr(part, "offline", False) and hasattr(part, "check_rows"):
            others = [Question(prompt, []) for prompt in held_out]
            part.check_rows(DataRows(others))
            if recipe.head:  # its evaluation reads the fields that training reads
                check_fields(recipe, others)


def text_room(config: TrainConfig, recipe: Any, model: Model, longest: int) -> int:
    """Maximum tokens of a prompt in a run; the prompts of the data have at most ``longest``.

    Raises:
      ValueError: If ``sampling.prompt_length`` has no effect.
    """
    wanted = config.sampling.prompt_length
    if config.environment is not None:
        room = prompt_room("sampling", model, config.sampling.max_new_tokens)
        return min(room, wanted or _OBSERVATION_ROOM)
    if collector_needs(recipe.collector, "sends_text"):
        room = prompt_room("sampling", model, config.sampling.max_new_tokens)
        return max(longest, min(room, wanted or longest + _TEXT_ROOM))
    prompts = recipe.has_teacher and not recipe.learns_from_model
    if wanted is not None and not prompts:
        raise ValueError(
            f"sampling: prompt_length has no effect with recipe {recipe.name!r}, whose collector "
            "sends no text and which has no teacher."
        )
    return longest


def teacher_room(config: TrainConfig, model: Model, longest: int) -> int:
    """Maximum tokens of a teacher's prompt, which also contains a response and a text.

    ``longest`` is the number of tokens of the longest prompt.
    """
    sampling = config.sampling
    room = prompt_room("the teacher", model, sampling.max_new_tokens)
    wanted = sampling.prompt_length or longest + sampling.max_new_tokens + _TEXT_ROOM
    return min(room, wanted)


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
    recipe = find_recipe(config.recipe, config.sampling, num_prompts=len(prompts))
    check_data(config, recipe, prompts, others)
    model, tokenizer, shapes, read = _open_trained(
        config if starts else dataclasses.replace(config, init_from=None),
        recipe,
        mesh,
        sampler_mesh,
    )
    check_reads_rows("train", model, config.layout)
    train, held_out = encode_questions(config, model, tokenizer, prompts, others)
    collector = recipe.collector
    sends_text = collector_needs(collector, "sends_text")
    shared_prefix_len = count_shared_prefix([q.tokens for q in (*train, *held_out)])
    sets_prompts = collector_needs(collector, "sets_prompts")
    if sends_text or sets_prompts or config.environment or not is_causal(model):
        shared_prefix_len = 0
    longest = text_room(config, recipe, model, max(len(q.tokens) for q in train))
    if (budget := config.tokens_per_microbatch) is not None:
        group_size = width_of(collector or in_order(), config.sampling.group_size)
        length = config.sampling.max_new_tokens + (longest if sends_text else 0)
        shape = bucket_of(longest), group_size, length
        check_group_fits("train", model, budget, shape, batch_shards(mesh))
    encoder = TextEncoder(tokenizer, longest, config.data.chat, config.data.system)
    teacher = None
    if trains:
        teacher = load_teacher(config, recipe, model, tokenizer, train, mesh, longest=longest)
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
        questions=digest,
        shared_prefix_len=shared_prefix_len,
        encoder=encoder,
        teacher=teacher,
    )
    if compiles and _is_named(config, recipe) and mesh == experiment.rollout_mesh:
        key = _abstract_key(mesh)
        experiment.compile_rollouts(shapes(), key)
        experiment.compile_greedy(shapes(), key)
    params = read()
    if trains and recipe.subagent is not None:
        subagent = load_subagent(config, recipe, model, params, tokenizer, mesh)
        experiment = dataclasses.replace(experiment, subagent=subagent)
    return experiment, params


def _is_named(config: TrainConfig, recipe: Any) -> bool:
    """Whether the policy's parameters are those of a named model, without any others."""
    return isinstance(config.model, str) and config.lora.rank is None and not recipe.head


def _open_trained(config: TrainConfig, recipe: Any, mesh, sampler_mesh) -> OpenedModel:
    """The model of a run with the adapter and the head that it trains; without any, unread."""
    opened = open_model(config, mesh, frozen=config.lora.rank is not None)
    for devices in (mesh, sampler_mesh):
        if devices is not None:
            check_expert_axis(devices.shape, opened.shapes(), opened.model.sharding_rules)
    if _is_named(config, recipe):
        return opened
    model, params = with_trained(config, recipe, opened.model, opened.read(), mesh=mesh)
    return OpenedModel(model, opened.tokenizer, lambda: params, lambda: params)


def _abstract_key(mesh: jax.sharding.Mesh | None) -> jax.Array | jax.ShapeDtypeStruct:
    """A key like that of a run's state before the first step."""
    key = jax.random.key(0)
    if mesh is None:
        return key
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh))


def load_subagent(
    config: TrainConfig, recipe: Any, model: Model, params: ArrayTree, tokenizer, mesh
) -> SubagentParts | None:
    """The model of the recipe's subagent: that of the config, or a copy of the policy's.

    Raises:
      ValueError: If a question and an answer exceed the context of the model.
    """
    if recipe.subagent is None:
        return None
    options, sampling = config.subagent, config.sampling
    if options.model is not None:
        model, params, tokenizer = load_model(config.with_model(options.model), mesh)
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


def make_algorithm(
    experiment: Experiment,
    optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation | None,
    reference: ArrayTree | None,
) -> Algorithm:
    """The algorithm that trains the recipe of an experiment."""
    config, recipe, sampler = experiment.config, experiment.recipe, experiment.samplers.rollouts
    if recipe.forward_only:
        return make_evolution(recipe, optimizer, sampler, mesh=experiment.mesh)
    options = StepOptions(
        passes=config.passes,
        temperature=config.sampling.temperature,
        remat=config.remat,
        shared_prefix_len=experiment.shared_prefix_len,
        packing=config.packing,
        stale=config.asynchrony.max_staleness > 0 or recipe.sampled_by == "reference",
        mesh=experiment.mesh,
        learning_rate=make_schedule(config.optimizer, updates=config.passes.updates),
        tokens_per_microbatch=config.tokens_per_microbatch,
        steps=config.steps,
    )
    main = make_policy_gradient(
        experiment.model,
        recipe,
        optimizer,
        sampler,
        options=options,
        critic_optimizer=critic_optimizer,
        reference=reference,
        teacher=experiment.teacher if isinstance(experiment.teacher, Teacher) else None,
    )
    if (parts := experiment.subagent) is None:
        return main
    passes = Passes(microbatches=config.microbatches)
    options = options._replace(passes=passes, shared_prefix_len=0)
    method, of_subagent = recipe.subagent.recipe, make_optimizer(config.optimizer)
    return with_subagent(
        main,
        make_policy_gradient(parts.model, method, of_subagent, parts.sampler, options=options),
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
    recipe = experiment.recipe
    base = params.base if isinstance(params, Adapted) else params
    frozen = recipe.reference is None and recipe.uses_reference
    start = None
    if recipe.uses_reference:
        start = load_reference(config, experiment.model, params, experiment.mesh)
    reference = start if frozen else None
    fingerprint = {"questions": experiment.questions, "seed": config.seed}
    fingerprint |= base_fingerprint(params, config.lora)
    # A resumed run loads a frozen reference again; its digest must then be the same.
    if frozen and (reference is not base or "base" not in fingerprint):
        fingerprint["reference"] = values_digest(reference)
    if config.reference_logp is not None:
        experiment = dataclasses.replace(experiment, references=score_data(experiment, reference))
    if not holds_reference(config, recipe):
        reference = start = None
    updates = config.passes.updates
    optimizer = moving_only(recipe, make_optimizer(config.optimizer, updates=updates))
    of_critic = config.critic_optimizer
    updates = updates if getattr(recipe, "prm", None) is None else 1  # it makes one a batch
    critic_optimizer = make_optimizer(of_critic, updates=updates) if of_critic is not None else None
    algorithm = make_algorithm(experiment, optimizer, critic_optimizer, reference)
    if isinstance(experiment.teacher, Teacher):
        fingerprint["teacher"] = values_digest(experiment.teacher.params)
    elif isinstance(experiment.teacher, StoredTeacher):
        fingerprint["teacher"] = experiment.teacher.digest
    elif isinstance(experiment.teacher, AlignedTeacher) and isinstance(
        experiment.teacher.teacher, ModelTeacher
    ):
        fingerprint["teacher"] = values_digest(experiment.teacher.teacher.params)
    checkpoints = Checkpoints(
        folder,
        model=experiment.model,
        run=fingerprint,
        keep=config.checkpoint.keep,
        best=config.checkpoint.best,
    )
    critic = None
    if recipe.second_model is not None:
        key = jax.random.fold_in(jax.random.key(config.seed), _HEAD)
        heads = recipe.second_model.heads
        critic = init_critic(experiment.model, base, heads=heads, key=key)
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
        reference=None if frozen or config.reference is None else start,
    )
    if experiment.subagent is not None:
        state = state._replace(subagent=_subagent_state(experiment, experiment.subagent, optimizer))
        # The state has the parameters from now on.
        parts = dataclasses.replace(experiment.subagent, params=())
        experiment = dataclasses.replace(experiment, subagent=parts)
    collector_state = experiment.collector.init(len(experiment.train))
    state = state._replace(collector_state=jax.tree.map(np.asarray, collector_state))
    if resume:
        state = shapes_of(state)
        del params, base, critic  # before the restore, so that memory holds one state
        checkpoints.sweep()
        # The precision of a named model is a setting, which has been compared.
        any_precision = allow_changed or isinstance(config.model, str)
        state = checkpoints.restore(state, any_precision=any_precision)
    return experiment, algorithm, checkpoints, state


def _subagent_state(experiment: Experiment, parts: SubagentParts, optimizer: Any) -> SubagentState:
    """The first state of a subagent; its parameters may be those of the policy, so are copied."""
    state = init_state(
        parts.params,
        optimizer,
        experiment.recipe.subagent.recipe,
        key=jax.random.key(experiment.config.seed),
        mesh=experiment.mesh,
        rules=parts.model.sharding_rules,
        copy=not isinstance(experiment.config.subagent.model, str),
    )
    return SubagentState(state.params, state.opt_state, state.algo_state)
