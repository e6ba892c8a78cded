"""The sections of a run's configuration, from data to reports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.train.mesh import MeshConfig
from jaxrl_llm.train.sinks import SINKS

PromptSource = Callable[[], Any]
"""Returns a ``data.PromptSet``; usually a ``bind`` of one of the functions of ``data``."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which questions are trained on and which are held out.

    Attributes:
      prompts: A function that returns the prompts; or a .jsonl, .json or .parquet file, or
        `gym:TASK` for a thousand questions of a reasoning-gym task.
      evaluation: Prompts of the held-out evaluation, given in the same way; None takes `held_out`.
      held_out: Share of the distinct questions that is held out; 0 for none. A run without an
        evaluation holds none out and trains on all questions.
      seed: Of the split and of the order.
      chat: Put a question through the model's chat template, as the user's message.
      system: A system message before each question.
    """

    prompts: PromptSource | str
    evaluation: PromptSource | str | None = None
    held_out: float = 0.2
    seed: int = 0
    chat: bool = True
    system: str | None = None

    def __post_init__(self):
        name = "data"
        checks.check_non_negative(name, held_out=self.held_out, seed=self.seed)
        if self.held_out >= 1:
            raise ValueError(f"data: held_out is a share below 1; got {self.held_out:g}.")
        if self.evaluation is not None and self.held_out:
            raise ValueError(
                "data: held_out has no effect where evaluation brings its own prompts; set it to 0."
            )
        if self.system is not None and not self.chat:
            raise ValueError("data: system has no effect without the chat template (chat=False).")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled; the policy that trains is the one at this temperature.

    With top_k, top_p or min_p a token comes from a part of the vocabulary. That part is recorded,
    and the policy that trains is renormalized over it, so that filters do not change ratios. Tokens
    outside get no gradient. Recording takes 4 top_k bytes a token, without top_k V / 8.

    Attributes:
      group_size: Rollouts of one prompt.
      max_new_tokens: Longest response, in tokens.
      temperature: The logits are divided by it.
      top_k: Keep the k most likely tokens.
      top_p: Keep the most likely tokens up to this probability mass.
      min_p: Keep tokens at least this likely relative to the most likely one.
      slots: How many rollouts decode at a time. Rewards then begin with the first group that is
        finished, and the last long responses decode in fewer slots; the rollouts are the same. None
        decodes all rollouts of a step in one program, which is quickest where lengths are alike.
    """

    group_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    slots: int | None = None

    def __post_init__(self):
        name = "sampling"
        checks.check_positive(name, group_size=self.group_size, max_new_tokens=self.max_new_tokens)
        checks.check_positive(name, temperature=self.temperature, top_k=self.top_k)
        checks.check_positive(name, top_p=self.top_p, min_p=self.min_p)
        for option in ("top_p", "min_p"):
            value = getattr(self, option)
            if value is not None and value >= 1:
                raise ValueError(
                    f"sampling: {option} must be below 1; got {value:g}. None turns it off."
                )
        checks.check_positive(name, slots=self.slots)

    def grid(self, prompts: int) -> tuple[int, int]:
        """Rows and width of the slots for a batch: a row for each prompt, as far as slots go.

        Raises:
          ValueError: If there are none, or they make no such grid.
        """
        if self.slots is None:
            raise ValueError("sampling: slots is None; a grid takes a number of them.")
        slots, size = self.slots, prompts * self.group_size
        rows = min(prompts, slots)
        if slots % rows or slots > size:
            raise ValueError(
                f"sampling: slots must be below the {prompts} prompts of a step, or a multiple of "
                f"them up to its {size} rollouts; got {slots}."
            )
        return rows, slots // rows


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Whether the next rollouts are sampled and graded while a step trains.

    Batch n trains version n of the weights. It may be started once version n - max_staleness is
    there, and then takes the newest there is. A recipe that reads ``behavior_logp`` or has a
    correction makes up for older weights in its own way; for any other, what sampled is its
    ``old_logp``, so that its ratio is that of the policy to what sampled. One without a ratio is
    refused. What a checkpoint finds finished and not yet trained on, it keeps.

    On one device rewards overlap with everything else, but a sampler and a step take turns, and
    the sampler has a copy of the weights (two while it ends a batch of older ones). With
    `sampler_devices` the two go on at once. During an evaluation between steps the reward may be
    called by two threads.

    Attributes:
      max_staleness: Updates by which the weights that sample may be older than those that train.
        0 samples and trains in turns; 1 does both at once; more evens out batches that take
        unequally long.
      sampler_devices: How many devices, the last ones, do nothing but sample; the mesh is made of
        the others. None shares the one device of a run without a mesh.
      sampler_mesh: How those are laid out; by default all of them split the batch.
    """

    max_staleness: int = 0
    sampler_devices: int | None = None
    sampler_mesh: MeshConfig = MeshConfig(data=-1)

    def __post_init__(self):
        name = "asynchrony"
        checks.check_non_negative(name, max_staleness=self.max_staleness)
        checks.check_positive(name, sampler_devices=self.sampler_devices)
        if self.sampler_devices is not None and not self.max_staleness:
            raise ValueError(
                "asynchrony: sampler_devices has no effect with max_staleness 0: sampling and "
                "training take turns on all devices."
            )
        if self.sampler_devices is None and self.sampler_mesh != MeshConfig(data=-1):
            raise ValueError("asynchrony: sampler_mesh has no effect without sampler_devices.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved; it always is at the end of a run, on Ctrl-C and after an error.

    One of the last kind that cannot be written is an error. One between two steps is a warning: the
    run goes on, and what was saved before stands.

    Attributes:
      every: Steps between two checkpoints; 0 for the last one only.
      keep: How many of the last are kept.
      best: Keep one more, the best by this metric: "reward" of the step's batch, or held-out
        accuracy, "greedy" or "sampled", which each checkpoint then must have.
    """

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self):
        name = "checkpoint"
        checks.check_non_negative(name, every=self.every)
        checks.check_positive(name, keep=self.keep)
        if self.best is not None:
            checks.check_option(name, "best", self.best, ("reward", "greedy", "sampled"))
            if not self.every:
                raise ValueError(f"{name}: best has no effect where only the last step is saved.")

    def check_evaluated(self, evaluation: "EvaluationConfig") -> None:
        """Raises ValueError if the best is chosen by an accuracy that checkpoints do not have."""
        if self.best in (None, "reward"):
            return
        if not evaluation.enabled or not evaluation.every or self.every % evaluation.every:
            raise ValueError(
                f"checkpoint: best={self.best!r} needs an evaluation at each checkpoint: set "
                f"evaluation.every to {self.every} or a divisor of it."
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The held-out evaluation, before the first and after the last step.

    Attributes:
      enabled: Evaluate at all.
      every: Steps between further evaluations; 0 for none.
      samples: Completions of one question in the sampled evaluation; None takes the group size,
        which compiles nothing anew.
      limit: How many held-out questions to use at most; None for all.
    """

    enabled: bool = True
    every: int = 0
    samples: int | None = None
    limit: int | None = None

    def __post_init__(self):
        checks.check_non_negative("evaluation", every=self.every)
        checks.check_positive("evaluation", samples=self.samples, limit=self.limit)
        if not self.enabled and (self.every or self.samples or self.limit):
            raise ValueError("evaluation: every, samples and limit have no effect if not enabled.")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What a run reports besides metrics.jsonl, samples.jsonl, reward.png and report.html.

    Attributes:
      sinks: Where the numbers go as well: "tensorboard", "trackio", "wandb", or functions that make
        a `train.sinks.Sink`.
      peak_flops: Operations a second of one device in `dtype`, as its vendor says, for the model
        FLOP utilization; None measures a matrix product on a CPU, and leaves it out elsewhere.
      profile: Steps of which jax.profiler makes a trace, in the folder `profile` of the run. The
        first one shows mostly the compiler.
    """

    sinks: tuple[str | Callable, ...] = ()
    peak_flops: float | None = None
    profile: tuple[int, ...] = ()

    def __post_init__(self):
        name = "report"
        checks.check_positive(name, peak_flops=self.peak_flops)
        for option in ("sinks", "profile"):
            given = getattr(self, option)
            if not isinstance(given, tuple):
                raise TypeError(f"report: {option} must be a tuple; got {given!r}.")
            if len(set(given)) < len(given):
                raise ValueError(f"report: {option} names one twice: {given!r}.")
        for step in self.profile:
            checks.check_positive(name, profile=step)
        for sink in self.sinks:
            if not callable(sink):
                checks.check_option(name, "sinks", sink, SINKS)
