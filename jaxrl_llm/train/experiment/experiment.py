"""The components of a run, and what they do together: sample, play, grade and evaluate."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import watchdog
from jaxrl_llm.curation import Collector, in_order
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import sized, width_of
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.data.rendering import make_renderer
from jaxrl_llm.models.lora import describe_params
from jaxrl_llm.models.protocol import Model, has_rounded, round_params
from jaxrl_llm.models.sharding import (
    batch_shards,
    leaf_shardings,
    param_shardings,
    with_axes_of,
)
from jaxrl_llm.rollout.collect import DataRows, Limits
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.sampler import bucket_of
from jaxrl_llm.rollout.subagent import SubagentPlayer
from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.data.grading import Grader, OnNonFinite
from jaxrl_llm.train.data.halves import Halves, has_halves
from jaxrl_llm.train.data.offline import OfflineRows, ReferenceLogp, offline_batches
from jaxrl_llm.train.evaluation.at_k import check_k
from jaxrl_llm.train.evaluation.evaluate import Accuracy, evaluate, play_tasks
from jaxrl_llm.train.experiment.left_out import LeftOut
from jaxrl_llm.train.experiment.run_data import why_no_rewrites, within_limit
from jaxrl_llm.train.experiment.samplers import Samplers, compile_sampler, policy_sampler
from jaxrl_llm.train.mesh import replicated, sampling_mesh
from jaxrl_llm.train.optimizer import describe_optimizer, policy_optimizer
from jaxrl_llm.train.subagent import SubagentParts

# The batch number of evaluations, which no batch of a run reaches.
_EVALUATION = 2**31 - 1


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
      left_out: Numbers of rows of the data that the run leaves out or cuts.
      references: Stored log-probabilities of the data's responses under a frozen reference, if any.
      teacher: A ``score_batch.Teacher`` on the devices, a teacher on the host, or None.
      subagent: What answers the questions of the environment, or None.
      reference: Parameters of a frozen reference that samples; None if it does not.
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
    left_out: LeftOut = LeftOut()
    references: ReferenceLogp | None = None
    teacher: Any = None
    subagent: SubagentParts | None = None
    reference: ArrayTree | None = None

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

    @functools.cached_property
    def held_out(self) -> list[Question]:
        """The questions of the evaluation."""
        prompts = [question.prompt for question in self.unlimited]
        return list(within_limit(self.config, self.unlimited, prompts))

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
        """Parameters for sampling rollouts: the policy's, plus those of another that samples."""
        if has_halves(self.recipe):
            return Halves(params, self.behavior(self.on_rollout_mesh(self.reference)))
        if not self.recipe.needs.teacher_mixture:
            return params
        return {"first": params, "second": self.on_rollout_mesh(self.teacher.params)}

    def behavior(self, params: ArrayTree) -> ArrayTree:
        """The policy's parameters where it samples rollouts: rounded if the run rounds them.

        They may be the frozen ones below an adapter, an adapter alone, or rounded already.
        """
        return self.rounded(params) if self._rounds_rollouts else params

    def rounded(self, params: ArrayTree) -> ArrayTree:
        """Parameters in the run's quantization of the sampler, made once for many tokens."""
        if self._round is None or has_rounded(params):
            return params
        shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(params))
        meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
        return self._round(params, next(meshes, None))

    def _rounded_shapes(self, params: ArrayTree) -> ArrayTree:
        """The shapes of :meth:`rounded` parameters, with their shardings on the training mesh."""
        made = jax.eval_shape(self.rounded, params)
        if self.mesh is None:
            return made
        shardings = leaf_shardings(made, self.mesh, self.model.sharding_rules)
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), made, shardings)

    @functools.cached_property
    def _rounds_rollouts(self) -> bool:
        return self.config.rounds_rollouts

    @functools.cached_property
    def _round(self) -> Callable | None:
        """``(params, mesh) -> params``, compiled; None if the sampler is as precise as the step."""
        model, mode = self.model, self.config.sampler_quantization
        if mode is None:
            return None

        def rounded(params: ArrayTree, mesh: jax.sharding.Mesh | None) -> ArrayTree:
            made = round_params(model, params, mode=mode)
            if mesh is None:
                return made
            shardings = leaf_shardings(made, mesh, model.sharding_rules)
            return jax.lax.with_sharding_constraint(made, shardings)

        return jax.jit(rounded, static_argnums=1)

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
            chat=self.config.data.chat,
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
        on_non_finite: OnNonFinite = "raise",
    ) -> tuple[dict[str, Accuracy], list[dict]]:
        """Greedy and sampled accuracy on the held-out questions, and the greedy completions.

        Args:
          params: Parameters of the policy.
          key: Key of the run's state; the same key gives the same evaluation.
          collector_state: State of the collector. ``evaluation_text(state, takes_text)``, if the
            collector has it, returns a function from a held-out row to its message, or None for
            the text of the row alone.
          check: Called before each batch, and while episodes are played; an exception from it ends
            the evaluation.
          k, success: For pass@k and maj@k of the sampled completions; see
            :func:`~jaxrl_llm.train.evaluate`.
          subagent: Parameters of the subagent, whose answers are sampled in both evaluations.
          on_non_finite: "raise" or "warn" if the logits of a completion are non-finite; episodes
            always end with an error then.
        """
        check_k(k, self.config.evaluation.samples or self.config.sampling.group_size)
        if self.config.environment is not None:
            player = None
            if subagent is not None:
                player = self.subagent_player(subagent, self.on_rollout_mesh(key), _EVALUATION)
            elif self.recipe.needs.subagent is not None:
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
                jax.random.fold_in(key, _EVALUATION),
                questions,
                reward=config.reward,
                tokenizer=self.tokenizer,
                deadline=config.reward_deadline,
                on_error=config.reward_on_error,
                batch_size=batch_size,
                k=k,
                success=success,
                on_non_finite=on_non_finite,
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
        if recipe.needs.teacher_mixture or self.config.offline:
            return
        if self.sampler_mesh is not None or samplers.engine is not None:
            return
        widths = {bucket_of(len(question.tokens)) for question in self.train}
        if len(widths) == 1 and not needs_of(recipe.collector).sends_text:
            params, key = self.on_rollout_mesh((params, key))
            size = self.config.prompts_per_step
            if self._rounds_rollouts:
                params = self._rounded_shapes(params)
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

    @functools.cached_property
    def _after_messages(self) -> list[Question]:
        """The held-out rows, with the messages of offline collectors as their prompts.

        Rows of one question stay apart: their messages differ, as with examples of several users.
        """
        tokens: dict[tuple[int, int], list[int]] = {}
        for places, batch, _, part in self.offline_batches(self.held_out, self.train):
            for p, place in enumerate(places):
                mask = np.asarray(batch.prompt_mask[p])
                tokens[part, place] = np.asarray(batch.prompt_tokens[p])[mask].tolist()
        return [self.held_out[i]._replace(tokens=x) for (_, i), x in sorted(tokens.items())]

    def _to_evaluate(self, collector_state: ArrayTree) -> tuple[list[Question], int]:
        """The questions of an evaluation, and how many of them are decoded greedily at a time."""
        config, shards = self.config, batch_shards(self.rollout_mesh)
        questions, message = self.held_out, None
        if config.offline and needs_of(self.collector).sends_text:
            questions = self._after_messages
        elif config.reads_columns:  # several rows of one prompt are one question
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

    def episodes(
        self, seed: Sequence[int], subagent: SubagentPlayer | None = None, *, trains: bool = False
    ) -> Episodes:
        """The player of the run's environment, of episodes that are trained on if ``trains``.

        ``seed`` extends the seed of the run: the number of the batch, which is left out if the
        collector needs episodes of a task that always begin alike.
        """
        config, no_rewrites = self.config, ""
        if tuple(seed) != (_EVALUATION,) and needs_of(self.recipe.collector).repeats_starts:
            seed = ()
        if trains:
            no_rewrites = why_no_rewrites(config, self.recipe, self.model, self.teacher)
        return Episodes(
            config.environment,
            make_renderer(self.tokenizer, chat=config.data.chat, system=config.data.system),
            decode=self.tokenizer.decode,
            seed=(config.seed, *seed),
            max_new_tokens=config.sampling.max_new_tokens,
            options=config.episodes,
            watch=watchdog.SHARED,
            subagent=subagent,
            no_rewrites=no_rewrites,
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
            result, records = play_tasks(
                self.samplers.engine,
                params,
                jax.random.fold_in(key, _EVALUATION),
                self.held_out,
                self.episodes((_EVALUATION,), subagent),
                decode=self.tokenizer.decode,
                samples=size,
                temperature=temperature,
                max_new_tokens=sampling.max_new_tokens,
                pad_id=self.tokenizer.pad_id,
                check=check,
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
        needs, passes = self.recipe.needs, config.passes
        steps = f", {passes.updates} optimizer steps a batch" if passes.updates > 1 else ""
        if config.minibatches is None and (paper := needs.minibatches) != passes.minibatches:
            steps += f", not in the {paper} minibatches of its paper, which are too many for it"
        if waits := needs.waits:
            steps += f", the critic alone in the first {waits}"
        optimizer = policy_optimizer(config)
        decay = optimizer.decay_steps
        last = config.steps if decay is None else waits + optimizer.warmup_steps + decay
        if last < config.steps and not needs.divides_batch:
            steps += f", at a learning rate of 0 after step {last} of {config.steps}"
        if text := describe_optimizer(config):
            steps += f", {text}"
        without = f"; {self.left_out}" if self.left_out.about() else ""
        return (
            f"{name}, {describe_params(params)}, {used}; {self.recipe.name}, "
            f"{config.prompts_per_step} prompts x {rollouts} a step{steps}; "
            f"{len(self.train)} questions to train on, {len(self.held_out)} held out{without}"
        )
