"""The configuration of a run: frozen records whose every option has an effect or is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_llm.core import bind, checks
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.quantize import check_quantization
from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS, EvolutionRecipe, Recipe
from jaxrl_llm.recipes.catalog import preset
from jaxrl_llm.rewards import BatchReward
from jaxrl_llm.train.mesh import MeshConfig, check_batch
from jaxrl_llm.train.optimizer import OptimizerConfig
from jaxrl_llm.train.packing import PACKING
from jaxrl_llm.train.sections import (
    AsyncConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    PromptSource,
    ReportConfig,
    SamplingConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Attributes:
      model: A name or path of a pretrained model; or a function that returns
        `(model, params, tokenizer)`.
      data: The questions.
      reward: `(prompt, completion, metadata) -> number or mapping`, sync or async, or a
        `VerifierPool`.
      recipe: The method: a `Recipe`, an `EvolutionRecipe`, or the name of a preset with its
        defaults. Of an evolution recipe, `sampling.group_size` members answer a prompt, at the
        recipe's own temperature; that of `sampling` is for the evaluation.
      sampling: How rollouts are sampled.
      optimizer: How the parameters move.
      critic: How those of the critic move, for a recipe that has one.
      lora: Whether an adapter moves and the parameters themselves are frozen.
      mesh: Over which devices.
      asynchrony: Whether sampling goes on while a step trains.
      checkpoint: When the state is saved.
      evaluation: How held-out questions are evaluated.
      report: What is reported, and where to.
      steps: Batches of rollouts in all, those before a resume included.
      prompts_per_step: Questions of a batch.
      microbatches: Parts of a batch that are in memory one after the other.
      updates_per_batch: Passes of the optimizer over one batch.
      packing: Whether responses to one prompt share rows in a step, so that short ones do not cost
        what the longest does: "auto" where that leaves at most 80% of the cells and spares 4,096
        of them or more, "always", or "never". Each of a few shapes is compiled when it first comes.
      max_skipped: Steps in a row whose update is left out, since the loss or the gradient is no
        finite number, that end the run; fewer are counted in metrics.jsonl as `skipped`.
      remat: What the backward pass keeps of a layer: "none" all (fast), "full" its input (small),
        "dots" its matrix products.
      dtype: Of the matrix products and what is between them: "float32" or "bfloat16". Parameters
        and the state of the optimizer are float32 either way, since a bfloat16 parameter would
        swallow small updates.
      quantization: "fp8" or "int8" rounds the operands of linear layers to 8 bits, where the policy
        samples and where it trains alike; None does not.
      reward_deadline: Seconds that one call of the reward may take; None is 60, and 3600 for a
        reward that takes whole batches. A `VerifierPool` has a deadline and a patience of its own.
      seed: Of the sampling; a run is resumed with the same one.
      samples_shown: Completions of each step that go to samples.jsonl.
      run_dir: The folder of the run: checkpoints, metrics.jsonl, samples.jsonl, report.html.
    """

    model: str | Callable
    data: DataConfig
    reward: Callable
    recipe: Recipe | EvolutionRecipe | str = "dr_grpo"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: OptimizerConfig | None = None
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    asynchrony: AsyncConfig = field(default_factory=AsyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    steps: int = 100
    prompts_per_step: int = 8
    microbatches: int = 1
    updates_per_batch: int = 1
    max_skipped: int = 3
    packing: str = "auto"
    remat: str = "full"
    dtype: str = "float32"
    quantization: str | None = None
    reward_deadline: float | None = None
    seed: int = 0
    samples_shown: int = 4
    run_dir: str = "runs/latest"

    def __post_init__(self):
        name = "config"
        checks.check_positive(name, steps=self.steps, updates_per_batch=self.updates_per_batch)
        checks.check_positive(name, max_skipped=self.max_skipped)
        checks.check_positive(name, reward_deadline=self.reward_deadline)
        checks.check_non_negative(name, seed=self.seed, samples_shown=self.samples_shown)
        checks.check_option(name, "packing", self.packing, PACKING)
        if self.packing == "always" and self.sampling.group_size == 1:
            raise ValueError('config: packing "always" has no effect with one rollout a prompt.')
        checks.check_option(name, "remat", self.remat, ("none", "dots", "full"))
        checks.check_option(name, "dtype", self.dtype, ("float32", "bfloat16"))
        check_quantization(name, self.quantization)
        for option, default in (("dtype", "float32"), ("quantization", None)):
            if not isinstance(self.model, str) and getattr(self, option) != default:
                raise ValueError(
                    f"config: {option} has no effect on a model that comes from a function; set it "
                    "there."
                )
        if not callable(self.reward):
            raise TypeError(f"config: reward must be callable; got {self.reward!r}.")
        own = isinstance(self.reward, BatchReward) and hasattr(self.reward, "patience")
        if self.reward_deadline is not None and own:
            raise ValueError(
                "config: reward_deadline has no effect on a reward that keeps its own, such as a "
                "VerifierPool; set the deadline there."
            )
        self.checkpoint.check_evaluated(self.evaluation)
        if self.data.evaluation is not None and not self.evaluation.enabled:
            raise ValueError("data: evaluation has no effect if the evaluation is not enabled.")
        if max(self.report.profile, default=0) > self.steps:
            last = max(self.report.profile)
            raise ValueError(f"report: profile names step {last}, but there are {self.steps}.")
        sizes = (self.mesh.data, self.mesh.fsdp)
        parts = 1 if -1 in sizes else math.prod(sizes)
        check_batch(name, self.prompts_per_step, self.microbatches, parts)
        recipe = find_recipe(self.recipe, self.sampling)
        recipe.check_group_size(self.sampling.group_size)
        if self.sampling.slots is not None:
            self.sampling.grid(self.prompts_per_step)
        if isinstance(recipe, EvolutionRecipe):
            self._check_evolution(recipe, parts)
        recipe.check_updates(self.updates_per_batch)
        recipe.check_staleness(self.asynchrony.max_staleness)
        if recipe.critic is not None and self.critic is None:
            raise ValueError(
                f"config: recipe {recipe.name!r} has a critic; say how it moves with "
                "critic=OptimizerConfig(...), or --critic.learning-rate on the command line."
            )
        if recipe.critic is None and self.critic is not None:
            raise ValueError(f"config: critic has no effect: recipe {recipe.name!r} has none.")

    def _check_evolution(self, recipe: EvolutionRecipe, shards: int) -> None:
        """Raises ValueError for what has no part in an evolution strategy or does not fit it."""
        nothing = {"remat": "full", "packing": "auto", "microbatches": 1}
        for option, default in nothing.items():
            if getattr(self, option) != default:
                raise ValueError(
                    f"config: {option} has no effect with {recipe.name!r}, which has no backward "
                    "pass."
                )
        if self.sampling.slots is not None:
            raise ValueError(f"sampling: slots has no effect with {recipe.name!r}.")
        if self.lora.rank is not None:
            raise ValueError(
                f"lora: {recipe.name!r} moves the weights of the model itself, by low-rank noise; "
                "leave the rank out."
            )
        members = recipe.population(self.prompts_per_step, self.sampling.group_size)
        if recipe.noise == "lowrank" and members % shards:
            raise ValueError(
                f"config: {members} members do not divide over the {shards} parts of the mesh axes "
                "data and fsdp."
            )


AnyRecipe = Recipe | EvolutionRecipe


def find_recipe(
    recipe: AnyRecipe | str, sampling: SamplingConfig, num_prompts: int = 1
) -> AnyRecipe:
    """The recipe itself, or the preset of that name.

    A preset that takes a constant ``length`` is given the sampler's budget, one that remembers
    prompts their number.
    """
    if not isinstance(recipe, str):
        return recipe
    checks.check_option("config", "recipe", recipe, (*PRESETS, *EVOLUTION_PRESETS))
    return preset(recipe, length=sampling.max_new_tokens, num_prompts=num_prompts)


def find_prompts(source: PromptSource | str):
    """The prompts that a source stands for.

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
        return data.from_file(source)
    raise ValueError(
        f"data: {source!r} is neither a .jsonl, .json or .parquet file nor gym:TASK; other sources "
        "are given as a function in the config file."
    )
