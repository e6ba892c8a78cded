"""The configuration of a run: frozen records. An option without an effect raises an error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrl_llm.core import bind, checks
from jaxrl_llm.core.runtime.precision import resolve_dtype
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import (
    collector_parts,
    width_of,
)
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.quantize import QUANTIZATIONS, check_quantization
from jaxrl_llm.recipes import EvolutionRecipe, Recipe
from jaxrl_llm.recipes.catalog import check_preset, preset
from jaxrl_llm.recipes.needs import is_recipe
from jaxrl_llm.rewards.scoring import ON_ERROR, OnError
from jaxrl_llm.rollout.denoising import DenoisingOptions
from jaxrl_llm.rollout.episodes import EpisodeOptions
from jaxrl_llm.rollout.sampling.filters import GREEDY_BELOW
from jaxrl_llm.train.algorithms import check_algorithm
from jaxrl_llm.train.batches import PACKING, Passes
from jaxrl_llm.train.checkpoint.start import check_start
from jaxrl_llm.train.data.offline import check_offline
from jaxrl_llm.train.evaluation.evaluate import check_evaluation
from jaxrl_llm.train.logging.sinks import SINKS
from jaxrl_llm.train.mesh import AsyncConfig, MeshConfig, check_batch
from jaxrl_llm.train.models.teachers import AlignedTeacher, TokenTeacher
from jaxrl_llm.train.optimizer import OptimizerConfig, policy_optimizer

PromptSource = Callable[[], Any]
"""Returns a ``data.PromptSet``; usually a ``bind`` of one of the functions of ``data``."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The questions for training and the held-out questions for evaluation.

    Attributes:
      prompts: A function that returns the prompts; or a .jsonl, .json or .parquet file, or
        `gym:TASK` for a thousand questions of a reasoning-gym task.
      evaluation: Prompts of the held-out evaluation, in the same forms; None uses `held_out`.
      held_out: Share of the distinct questions to hold out; 0 for none. A run without an
        evaluation holds out none and trains on all questions.
      seed: Seed of the split and of the order of the questions.
      chat: Render each question with the model's chat template, as the user's message.
      system: A system message before each question.
      unreadable: Treatment of rows that the reward cannot grade whatever the response, by its
        `check_row`: "refuse" the run before its first step, or "drop" and count them.
      too_long: Treatment of rows with a prompt or a response of the data that is too long:
        "refuse" the run, "drop" and count them, or "truncate": a response has its first
        `max_new_tokens` tokens and no end, a prompt its last tokens.
      template_options: Variables of the chat template by name, such as enable_thinking=false.
    """

    prompts: PromptSource | str
    evaluation: PromptSource | str | None = None
    held_out: float = 0.2
    seed: int = 0
    chat: bool = True
    system: str | None = None
    unreadable: str = "refuse"
    too_long: str = "refuse"
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        name = "data"
        checks.check_option(name, "unreadable", self.unreadable, ("refuse", "drop"))
        checks.check_option(name, "too_long", self.too_long, ("refuse", "truncate", "drop"))
        checks.check_numbers(name, self)
        checks.check_non_negative(name, held_out=self.held_out, seed=self.seed)
        if self.held_out >= 1:
            raise ValueError(f"data: held_out must be a share below 1; got {self.held_out:g}.")
        if self.evaluation is not None and self.held_out:
            raise ValueError(
                "data: held_out has no effect if evaluation names its own prompts; set held_out to "
                "0."
            )
        for x in () if self.chat else ("system", "template_options"):
            if getattr(self, x) not in (None, {}):
                raise ValueError(f"data: {x} has no effect without the chat template (chat=False).")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled; the policy is trained at the same temperature.

    top_k, top_p and min_p restrict each token to a subset of the vocabulary. It is recorded, and
    the trained policy is renormalized over it, so that filters do not change ratios. Tokens outside
    the subset get no gradient. The record takes 4 top_k bytes per token, or V / 8 without top_k.

    Attributes:
      group_size: Rollouts per prompt. With `curation.offline_pairs`, whose groups are pairs of the
        data, it is only the number of samples of an evaluation.
      max_new_tokens: Maximum length of a response, in tokens.
      temperature: Divides the logits.
      top_k: Keep the k most likely tokens.
      top_p: Keep the most likely tokens up to this probability mass.
      min_p: Keep tokens at least this likely relative to the most likely one.
      slots: Number of rollouts that decode at once. Grading then starts with the first finished
        group, and the last long responses decode in fewer slots; the rollouts are the same. None
        decodes all rollouts of a step in one program, which is fastest if lengths are similar.
      quantization: "int8" or "fp8" rounds the operands of linear layers to 8 bits where rollouts
        are sampled, and nowhere else: scoring, training and evaluation have the policy in full
        precision. With a recipe that makes drafts, only drafts are rounded. None is the recipe's
        own choice, which is no rounding for all but a few, such as "sol_rl"; "off" samples
        with these in full precision too.
      denoising: For a denoising model: its steps, its blocks, and which tokens to keep.
      prompt_length: Maximum length of prompts that a collector or a teacher writes, in tokens; None
        for 1,024 more than the longest prompt of the data (for a teacher, with a response), up to
        the limit of the context.
    """

    group_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    slots: int | None = None
    prompt_length: int | None = None
    quantization: str | None = None
    denoising: DenoisingOptions = field(default_factory=DenoisingOptions)

    def __post_init__(self):
        name = "sampling"
        checks.check_sections(name, self)
        checks.check_numbers(name, self)
        checks.check_positive(name, group_size=self.group_size, max_new_tokens=self.max_new_tokens)
        checks.check_positive(name, temperature=self.temperature, top_k=self.top_k)
        checks.check_positive(name, top_p=self.top_p, min_p=self.min_p)
        if self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"sampling: temperature must be at least {GREEDY_BELOW:g}, below which nothing is "
                f"drawn; got {self.temperature:g}."
            )
        for option in ("top_p", "min_p"):
            value = getattr(self, option)
            if value is not None and value >= 1:
                raise ValueError(
                    f"sampling: {option} must be below 1; got {value:g}. None turns it off."
                )
        checks.check_positive(name, slots=self.slots, prompt_length=self.prompt_length)
        checks.check_option(name, "quantization", self.quantization, (*QUANTIZATIONS, "off"))
        if self.quantization != "off":
            check_quantization(name, self.quantization)
        self.denoising.schedule(self.max_new_tokens)

    def grid(self, prompts: int, *, prompt_length: int | None = None) -> tuple[int, int]:
        """Rows and width of the slots for a batch.

        A row has one prompt, and is free for the next prompt once all of its responses have ended.
        Rows are therefore narrow if prompts are short: as narrow as possible while the keys and
        values of the prompts take at most half the memory of those of the responses. With
        ``prompt_length`` None a row has all the slots of a prompt.

        Args:
          prompts: Number of prompts of a batch.
          prompt_length: Tokens of the longest prompt.

        Raises:
          ValueError: If there are no slots, or they do not form such a grid.
        """
        if self.slots is None:
            raise ValueError("sampling: a grid needs a number of slots; got slots=None.")
        slots, size = self.slots, prompts * self.group_size
        rows = min(prompts, slots)
        if slots % rows or slots > size:
            raise ValueError(
                f"sampling: slots must be below the {prompts} prompts of a step, or a multiple of "
                f"them up to its {size} rollouts; got {slots}."
            )
        width = slots // rows
        if prompt_length is not None:
            enough = 2 * prompt_length / self.max_new_tokens
            divisors = [w for w in range(1, width + 1) if width % w == 0]
            width = next((w for w in divisors if w >= enough), width)
        return slots // width, width


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved; it always is at the end of a run, on Ctrl-C and after an error.

    A checkpoint that cannot be written then is an error. Between two steps it is only a warning:
    the run continues, and earlier checkpoints remain.

    Attributes:
      every: Steps between two checkpoints; 0 for only the last one.
      keep: Number of latest checkpoints to keep.
      best: Also keep the best checkpoint by this metric: "reward" of the rollouts of a step; or
        "greedy" or "sampled", the mean reward on held-out questions, or "pairs", the accuracy on
        held-out pairs of the data; these require an evaluation at each checkpoint.
    """

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self):
        name = "checkpoint"
        checks.check_numbers(name, self)
        checks.check_non_negative(name, every=self.every)
        checks.check_positive(name, keep=self.keep)
        if self.best is not None:
            checks.check_option(name, "best", self.best, ("reward", "greedy", "sampled", "pairs"))
            if not self.every:
                raise ValueError(
                    f"{name}: best has no effect if only the last step is saved; set every."
                )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The held-out evaluation, before the first and after the last step.

    Attributes:
      enabled: Whether to evaluate.
      every: Steps between further evaluations; 0 for none.
      samples: Completions per question in the sampled evaluation; None uses the group size, which
        needs no further compilation.
      limit: Maximum number of held-out questions; None for all.
    """

    enabled: bool = True
    every: int = 0
    samples: int | None = None
    limit: int | None = None

    def __post_init__(self):
        name = "evaluation"
        checks.check_numbers(name, self)
        checks.check_non_negative(name, every=self.every)
        checks.check_positive(name, samples=self.samples, limit=self.limit)
        if not self.enabled and (self.every or self.samples or self.limit):
            raise ValueError("evaluation: every, samples and limit have no effect if not enabled.")


@dataclass(frozen=True, kw_only=True)
class SubagentConfig:
    """The model that answers what the environment asks, for a recipe with a subagent.

    Attributes:
      model: As the model of the run; None for other weights of that model, equal at first.
      max_new_tokens: Maximum number of tokens of an answer.
      prompt_length: Maximum number of tokens of a question, with the chat template.
    """

    model: str | Callable | None = None
    max_new_tokens: int = 64
    prompt_length: int = 256

    def __post_init__(self):
        name = "subagent"
        checks.check_numbers(name, self)
        checks.check_positive(
            name, max_new_tokens=self.max_new_tokens, prompt_length=self.prompt_length
        )


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Reports of a run in addition to metrics.jsonl, samples.jsonl, reward.png and report.html.

    Attributes:
      sinks: Additional metric sinks: "tensorboard", "trackio", "wandb", or functions that make a
        `train.Sink`.
      peak_flops: Peak operations per second of one device in `dtype`, from its vendor, for the
        model FLOP utilization; None measures a matrix product on a CPU, and omits the metric
        elsewhere.
      profile: Steps that jax.profiler traces into the folder `profile` of the run. The first step
        shows mostly compilation.
    """

    sinks: tuple[str | Callable, ...] = ()
    peak_flops: float | None = None
    profile: tuple[int, ...] = ()

    def __post_init__(self):
        name = "report"
        checks.check_numbers(name, self)
        checks.check_positive(name, peak_flops=self.peak_flops)
        for option in ("sinks", "profile"):
            values = getattr(self, option)
            if not isinstance(values, tuple):
                raise TypeError(f"report: {option} must be a tuple; got {values!r}.")
            if len(set(values)) < len(values):
                raise ValueError(f"report: {option} has duplicates: {values!r}.")
        for step in self.profile:
            checks.check_positive(name, profile=step)
        for sink in self.sinks:
            if not callable(sink):
                checks.check_option(name, "sinks", sink, SINKS)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run.

    Attributes:
      model: A name or path of a pretrained model; or a function that returns
        `(model, params, tokenizer)`.
      init_from: An earlier run whose policy this one starts from, such as supervised fine-tuning
        of the same `model`: its run folder, of which the last checkpoint is read, or the folder of
        one checkpoint. It must stay while an adapter or a reference needs it. None starts from the
        weights of `model`. Of a run that trained an adapter, export the merged model and name it as
        `model`.
      reference: The reference model of a recipe, of the policy's architecture: a name or path, or a
        function like that of `model`, such as the average of two models (SALSA) or the policy
        before an earlier run. None uses the policy before its first step. A moving reference starts
        from this model.
      reference_logp: An `.npz` file for the reference's log-probabilities of the data's responses.
        If the file does not exist, they are computed before the first step and written; otherwise
        they are read. Steps then neither load nor run the reference. A file of another reference or
        of other data is rejected. None computes them in every step.
      teacher: The teacher of a distillation recipe, with the policy's tokenizer: a name or path,
        or a function like that of `model`; or a scorer of tokens on the host: the address of a
        token server (http://...), a file of stored scores (.npz), or a `TokenTeacher`. With
        `span_distillation` the tokenizer may differ.
      data: The questions.
      reward: `(prompt, completion, metadata) -> number or mapping`, sync or async, or a
        `VerifierPool`. None if an environment gives the rewards, or the data contain them, as with
        `curation.offline_pairs`; a reward is then only for the evaluation.
      environment: A task with several turns, an `environments.Env` that gets each row of the data;
        it decodes in slots. None if a response is one turn.
      episodes: Settings of episodes; `sampling.max_new_tokens` is the maximum length of an episode,
        including observations, and `sampling.prompt_length` that of the first observation, 512 if
        it is None.
      recipe: The method: a `Recipe`, an `EvolutionRecipe`, or the name of a preset with its
        defaults. By name, `length` is `sampling.max_new_tokens` (a penalty of long responses is
        then on) and `num_prompts` that of the data, for a preset with these options. With an
        evolution recipe, `sampling.group_size` members answer each prompt, at the temperature of
        the recipe; `sampling.temperature` is for the evaluation.
      sampling: How rollouts are sampled.
      optimizer: The optimizer of the policy; None for the recipe's, if it has one, else AdamW. Any
        function of optax with a learning rate is one too: ``bind(optax.contrib.muon, ...)``.
      critic: The optimizer of the critic or the process reward model, for a recipe that has one;
        None uses that of the policy.
      subagent: The model that answers what the environment asks, for a recipe with a subagent.
      lora: Whether to train an adapter and freeze the parameters of the model.
      mesh: The mesh of devices.
      asynchrony: Whether sampling continues while a step trains.
      checkpoint: When the state is saved.
      evaluation: How held-out questions are evaluated.
      report: Metric sinks and profiles of the run.
      steps: Total batches of rollouts, including those before a resume.
      prompts_per_step: Questions per batch.
      microbatches: Number of parts of a batch; only one part is in memory at a time.
      tokens_per_microbatch: Instead of a fixed number of microbatches, the maximum number of cells,
        tokens and padding, that a device computes at one time: a batch of short responses takes
        fewer microbatches. Rows are then flat, and one group must fit. None uses `microbatches`.
      epochs: Passes over one batch; None uses the number in the recipe's paper.
      minibatches: Optimizer steps per pass, on disjoint sets of complete groups; None uses the
        number in the recipe's paper, or the largest below it that divides the batch into
        minibatches of at least two groups.
      packing: What shares rows in a step, to reduce padding: "flat" for prompts and responses of
        any groups, with what begins alike stored once, so that the cost follows unique tokens;
        "always" for the responses to one prompt; "tree" for these with common prefixes; "never"
        for nothing. "auto" is "flat", or for a model that reads no trees of prompts "always",
        where this saves at least a fifth of the cells. Each of a few shapes is compiled when it
        first occurs.
      max_skipped: End the run after this many steps in a row whose loss or gradient is non-finite
        (`skipped` in metrics.jsonl), or that have no signal (`no_signal`): no rollout takes part,
        or, until a step of the run has had one, every advantage is 0.
      remat: Activations of a layer saved for the backward pass: "none" saves all (fast), "full"
        only its input (small), "dots" its matrix products.
      dtype: Dtype of matrix products and activations: "float32", "bfloat16", or "auto" for the one
        that the device multiplies fastest: bfloat16 on TPUs, on NVIDIA GPUs from compute capability
        8.0 on, and on processors with AVX512-BF16 or AMX, else float32. Parameters and the state of
        the optimizer are float32 in all cases, since bfloat16 parameters would lose small updates.
      scan_layers: Whether scoring and training run one scan over the stacked weights of the layers,
        so that the compiler works on one layer in place of all. Each microbatch then copies the
        weights. For deep models on accelerators, where a program compiles for minutes; on CPUs it
        gains nothing.
      router_replay: For a model with experts: whether the update takes the experts that the sampler
        took for each token (R3, arXiv:2510.11370), as the log-probabilities that it compares with
        then do. A token that the policy did not sample, a reference and a teacher choose.
      quantization: "fp8" or "int8" rounds the operands of linear layers to 8 bits, both in sampling
        and in training; None for no rounding. `sampling.quantization` rounds where rollouts are
        sampled only.
      reward_deadline: Seconds that one call of the reward may take; None is 60, and 3600 for a
        reward that takes full batches. A `VerifierPool` has its own deadline and patience.
      reward_on_error: Treatment of a response if its call in a `VerifierPool` hangs, raises or
        crashes, or an async reward raises or exceeds the deadline: "drop" excludes it from the
        step, "zero" trains on a reward of 0, "raise" ends the run. If all calls of a batch fail,
        the run ends in any case.
      seed: Seed of the sampling; a resumed run must have the same seed.
      samples_shown: Completions per step that go to samples.jsonl, from as many prompts as
        possible.
      samples_every: Completions go to samples.jsonl at the first step and every N-th step after it.
      run_dir: The folder of the run: checkpoints, metrics.jsonl, samples.jsonl, report.html.
    """

    model: str | Callable
    data: DataConfig
    init_from: str | None = None
    reference: str | Callable | None = None
    reference_logp: str | None = None
    teacher: str | Callable | TokenTeacher | AlignedTeacher | None = None
    reward: Callable | None = None
    environment: Any = None
    episodes: EpisodeOptions = field(default_factory=EpisodeOptions)
    recipe: Recipe | EvolutionRecipe | str = "dr_grpo"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optimizer: OptimizerConfig | None = None
    critic: OptimizerConfig | None = None
    subagent: SubagentConfig = field(default_factory=SubagentConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    asynchrony: AsyncConfig = field(default_factory=AsyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    steps: int = 100
    prompts_per_step: int = 8
    microbatches: int = 1
    tokens_per_microbatch: int | None = None
    epochs: int | None = None
    minibatches: int | None = None
    max_skipped: int = 3
    packing: str = "auto"
    remat: str = "full"
    dtype: str = "float32"
    scan_layers: bool = False
    router_replay: bool = False
    quantization: str | None = None
    reward_deadline: float | None = None
    reward_on_error: OnError = "drop"
    seed: int = 0
    samples_shown: int = 4
    samples_every: int = 1
    run_dir: str = "runs/latest"

    def __post_init__(self):
        name = "config"
        for each in ("optimizer", "critic"):
            object.__setattr__(self, each, OptimizerConfig.of(getattr(self, each)))
        checks.check_sections(name, self)
        checks.check_numbers(name, self)
        checks.check_positive(name, steps=self.steps)
        checks.check_positive(name, epochs=self.epochs, minibatches=self.minibatches)
        checks.check_positive(name, max_skipped=self.max_skipped, samples_every=self.samples_every)
        if self.samples_shown == 0 and self.samples_every != 1:
            raise ValueError("config: samples_every has no effect with samples_shown=0.")
        checks.check_seconds(name, reward_deadline=self.reward_deadline)
        checks.check_non_negative(name, seed=self.seed, samples_shown=self.samples_shown)
        checks.check_option(name, "packing", self.packing, PACKING)
        checks.check_positive(name, tokens_per_microbatch=self.tokens_per_microbatch)
        checks.check_option(name, "reward_on_error", self.reward_on_error, ON_ERROR)
        checks.check_option(name, "remat", self.remat, ("none", "dots", "full"))
        checks.check_option(name, "dtype", self.dtype, ("float32", "bfloat16", "auto"))
        check_quantization(name, self.quantization)
        self._check_model_options()
        self._check_folders()
        if (last := max(self.report.profile, default=0)) > self.steps:
            raise ValueError(f"report: profile names step {last}, but there are {self.steps}.")
        check_batch(name, self.prompts_per_step, self.microbatches, self.mesh.shards)
        check_start(self)
        check_algorithm(self, self.resolved_recipe)
        check_evaluation(self)
        check_offline(self)

    @property
    def resolved_recipe(self) -> Any:
        """The recipe; for the name of a preset, that preset with the length of this sampling.

        One that tracks prompts is made for a single prompt, since the data are not read yet; see
        :func:`find_recipe`.
        """
        return find_recipe(self.recipe, self.sampling)

    def _check_model_options(self) -> None:
        """Raises ValueError for options of a named model where a function returns the model."""
        for option in ("dtype", "quantization", "scan_layers"):
            changed = getattr(self, option) != getattr(TrainConfig, option)
            if changed and not isinstance(self.model, str):
                raise ValueError(
                    f"config: {option} has no effect on a model that a function returns; set it in "
                    "the function."
                )

    def _check_folders(self) -> None:
        """Raises unless the run's folder, and that of the run it starts from, have names."""
        for option in ("run_dir", "init_from"):
            value = getattr(self, option)
            if value is None and option == "init_from":
                continue
            if not isinstance(value, str):
                raise TypeError(f"config: {option} must be a string; got {value!r}.")
            if not value.strip():
                raise ValueError(f"config: {option} must name a folder; got {value!r}.")

    @property
    def sampler_quantization(self) -> str | None:
        """How the policy is rounded where it samples rollouts or drafts; None if it is not."""
        own = self.sampling.quantization or self.resolved_recipe.needs.sampler_quantization
        return None if own == "off" else own

    @property
    def rounds_rollouts(self) -> bool:
        """Whether the policy is rounded where it samples what trains, not only its drafts."""
        drafts = needs_of(self.resolved_recipe.collector).draft_steps
        return self.sampler_quantization is not None and drafts is None

    @property
    def samples_off_policy(self) -> bool:
        """Whether rollouts are of other weights than those that a step begins with."""
        stale = self.asynchrony.max_staleness > 0
        return stale or self.rounds_rollouts or self.resolved_recipe.needs.sampled_by != "policy"

    @property
    def offline(self) -> bool:
        """Whether the data contain the training responses and their rewards."""
        return needs_of(self.resolved_recipe.collector).offline

    @property
    def samples_nothing(self) -> bool:
        """Whether the data contain the training responses, but perhaps not their rewards."""
        return not self.resolved_recipe.needs.samples_responses

    @property
    def reads_columns(self) -> bool:
        """Whether the recipe reads responses or hints of the data, so rows of a prompt differ."""
        recipe = self.resolved_recipe
        parts = collector_parts(getattr(recipe, "collector", None))
        return any(hasattr(part, "check_data") for part in parts)

    @property
    def has_rewards(self) -> bool:
        """Whether all responses that are trained on come with their rewards."""
        recipe = self.resolved_recipe
        return needs_of(getattr(recipe, "collector", None)).has_rewards

    def with_model(self, model: str | Callable) -> "TrainConfig":
        """The config by which another model of the run is loaded, such as its teacher.

        The other model has the `dtype` of the policy unless a function returns it, and no
        `init_from`, `quantization` or `scan_layers`.
        """
        dtype = self.dtype if isinstance(model, str) else "float32"
        return replace(
            self, model=model, init_from=None, dtype=dtype, quantization=None, scan_layers=False
        )

    @property
    def product_dtype(self) -> str:
        """`dtype`, where "auto" is the choice of this machine."""
        return resolve_dtype(self.dtype)

    @property
    def keeps_start(self) -> bool:
        """Whether the parameters before the first step are needed after it.

        They are an adapter's frozen weights, or a reference that does not move.
        """
        needs = self.resolved_recipe.needs
        frozen = needs.uses_reference and not needs.moves_reference and self.reference is None
        return self.lora.rank is not None or frozen

    @property
    def compares_held_out(self) -> bool:
        """Whether an evaluation compares the responses, or the steps, of held-out rows."""
        if not self.offline:
            return False
        recipe, group_size = self.resolved_recipe, self.sampling.group_size
        return recipe.needs.head == "step" or width_of(recipe.collector, group_size) > 1

    @property
    def samples_held_out(self) -> bool:
        """Whether an evaluation samples answers to the held-out questions, which a reward grades.

        Otherwise it compares the likelihoods of pairs of the data.
        """
        return self.reward is not None or self.environment is not None

    @property
    def critic_optimizer(self) -> OptimizerConfig | None:
        """The critic's optimizer, by default the policy's; None for a recipe without a critic."""
        if self.resolved_recipe.needs.second_model is None:
            return None
        return policy_optimizer(self) if self.critic is None else self.critic

    @property
    def layout(self) -> str:
        """The packing, which a number of tokens per microbatch makes flat."""
        return self.packing if self.tokens_per_microbatch is None else "flat"

    @property
    def passes(self) -> Passes:
        """Epochs and minibatches of a batch: as configured, else those of the recipe's paper."""
        needs = self.resolved_recipe.needs
        epochs, minibatches = self.epochs or needs.epochs, self.minibatches or needs.minibatches
        passes = Passes(epochs, minibatches, self.microbatches)
        if self.minibatches is not None:
            return passes
        # One group alone often has no signal, and its update is then momentum only.
        most = min(passes.minibatches, self.prompts_per_step // 2)
        fewer = (passes._replace(minibatches=m) for m in range(most, 1, -1))
        divide = (x for x in fewer if x.divides(self.prompts_per_step, self.mesh.shards))
        return next(divide, passes._replace(minibatches=1))


def find_recipe(recipe: Any, sampling: SamplingConfig, num_prompts: int = 1) -> Any:
    """The recipe itself, or the preset of that name.

    A preset with an option ``length`` gets the sampler's budget; a preset that tracks prompts gets
    their number.
    """
    if is_recipe(recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"config: recipe must be a recipe or the name of a preset; got {recipe!r}.")
    check_preset("config", recipe)
    return preset(recipe, length=sampling.max_new_tokens, num_prompts=num_prompts)


def find_prompts(source: PromptSource | str):
    """The prompts of a source.

    Raises:
      ValueError: If a text is neither a file of a known kind nor `gym:TASK`.
    """
    from jaxrl_llm import data

    if not isinstance(source, str):
        return source()
    kind, _, name = source.partition(":")
    if kind == "gym" and name:
        return bind(data.from_reasoning_gym, task=name, size=1000)()
    if Path(source).suffix in (".jsonl", ".json", ".parquet"):
        return data.from_file(source, needs_answer=False)
    raise ValueError(
        f"data: {source!r} is neither a .jsonl, .json or .parquet file nor gym:TASK; other sources "
        "are functions in the config file."
    )
