"""``jaxrl-llm pairs``."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.files import write_whole
from jaxrl_llm.train import TrainConfig
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.sampled_pairs import SampledPairs, pair_row, sample_pairs
from jaxrl_llm.train.experiment.setup import load_experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Samples pairs of right and wrong answers from a model, for preference losses.

    The prompts are the training prompts of the config, never its held-out questions; sampling and
    reward are those of the config. A row of the file has "prompt", "chosen", "rejected" and the
    other fields of the prompt: the data of `--recipe dpo` and similar methods. Prompts without both
    a right and a wrong answer have no row; answers of maximum length are left out.

    Attributes:
      target: A config file, for its model before training; or the folder of a run, for its last
        checkpoint.
      out: The file to write, ending in .jsonl; it must not exist yet.
      samples: Number of answers sampled per prompt.
      pairs: Maximum number of pairs per prompt.
      prefer: Which right answers are chosen: the shortest of a prompt, or any in turn.
      success: An answer is right if its reward is at least this.
      temperature: Sampling temperature; by default that of the config. Below 1, more answers are
        right.
      limit: Maximum number of prompts.
      seed: Seed of the sampling; by default that of the config.
      step: The step of the run's checkpoint; by default the last.
      best: Use the checkpoint that was saved as best.
      trust: Execute the config.py of a run that was not made here; read it first.
    """

    target: tyro.conf.Positional[str]
    out: Path
    samples: int = 16
    pairs: int = 1
    prefer: Literal["short", "any"] = "short"
    success: float = 1.0
    temperature: float | None = None
    limit: int | None = None
    seed: int | None = None
    step: int | None = None
    best: bool = False
    trust: bool = False

    def __post_init__(self):
        if self.samples < 2:
            raise ValueError(f"--samples must be at least 2; got {self.samples}.")
        for name, value in (("pairs", self.pairs), ("limit", self.limit)):
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1; got {value}.")
        if self.pairs >= self.samples:
            raise ValueError(
                f"--pairs {self.pairs} needs more --samples than that; there are {self.samples}."
            )
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"--temperature must be positive; got {self.temperature:g}.")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"--seed must not be negative; got {self.seed}.")
        if self.out.suffix != ".jsonl":
            raise ValueError(f"--out must end in .jsonl; got {str(self.out)!r}.")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = options.parse(Pairs, arguments, command="pairs")
    with options.on_its_date(args.target):
        return _pairs(args)


def _pairs(args: Pairs) -> int:
    if args.out.exists():
        raise UsageError(f"{str(args.out)!r} exists already; name a file that does not.")
    config, run_dir = options.load_target(args.target, trust=args.trust)
    choice = options.CheckpointChoice(args.target, args.step, args.best, args.trust)
    choice.check(None if run_dir is None else config)
    _check_graded(args.target, config)
    options.check_creatable(args.out)
    if args.temperature is not None:
        sampling = dataclasses.replace(config.sampling, temperature=args.temperature)
        config = dataclasses.replace(config, sampling=sampling)
    if run_dir is not None:
        config = options.in_its_precision(run_dir, options.without_start(config))
        config = options.on_these_devices(config)
    options.use_compilation_cache()
    with options.usage_errors():
        experiment, params = load_experiment(config, trains=False)
        _check_rows(args.target, experiment)
        if run_dir is not None:
            params, _ = choice.restore(run_dir, experiment, params)
    from tqdm import tqdm

    key = jax.random.key(config.seed if args.seed is None else args.seed)
    total = len({question.prompt.content for question in experiment.train})
    total = min(total, args.limit or total)
    hidden = None if processes.is_first() else True  # None: where stderr is no terminal
    rows: list[dict[str, Any]] = []
    try:
        with tqdm(total=total, unit="prompt", dynamic_ncols=True, disable=hidden) as bar:

            def on_batch(prompts: int, of_batch: list[dict[str, Any]]) -> None:
                rows.extend(of_batch)
                bar.update(prompts)

            sampled = sample_pairs(
                experiment,
                params,
                key,
                samples=args.samples,
                pairs=args.pairs,
                success=args.success,
                prefer=args.prefer,
                limit=args.limit,
                on_batch=on_batch,
            )
    except BaseException:  # such as Ctrl-C; other processes may have failed, so they take no part
        if rows and processes.is_first():
            _write(args.out, rows)
            print(f"{args.out} holds the {len(rows):,} pairs so far.", file=sys.stderr)
        raise
    if processes.is_first():
        for line in summary(sampled, config.sampling.max_new_tokens):
            print(line)
    if not sampled.rows:
        raise UsageError("no prompt has both a right and a wrong answer, so no file is written.")
    processes.from_first(lambda: _write(args.out, sampled.rows))
    if processes.is_first():
        print(f"{args.out} holds {len(sampled.rows):,} pairs.")
    return 0


def summary(sampled: SampledPairs, max_new_tokens: int) -> list[str]:
    """A summary: the number of samples, and the prompts without a pair and the reasons."""
    absent = sampled.no_right + sampled.no_wrong
    lines = [
        f"{sampled.responses:,} answers to {sampled.prompts:,} prompts; "
        f"{sampled.unended:,} of them reached {max_new_tokens} tokens and take no part.",
        f"{sampled.prompts - absent:,} prompts have a right and a wrong answer, "
        f"{sampled.no_right:,} no right one, {sampled.no_wrong:,} right ones alone.",
    ]
    if sampled.failed:
        lines.append(f"The reward failed on {sampled.failed:,} answers, which take no part.")
    return lines


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _check_graded(target: str, config: TrainConfig) -> None:
    """Raises UsageError unless a reward grades one answer at a time."""
    if config.environment is not None:
        raise UsageError(f"{target!r} plays an environment; pairs are of answers of one turn.")
    if config.reward is None:
        raise UsageError(f"{target!r} has no reward, which tells right answers from wrong ones.")


def _check_rows(target: str, experiment: Experiment) -> None:
    """Raises UsageError if a field of a prompt is none that JSON has, before hours of sampling."""
    for question in experiment.train:
        try:
            json.dumps(pair_row(question.prompt, "", ""))
        except (TypeError, ValueError) as error:
            name = question.prompt.name
            raise UsageError(
                f"a field of prompt {name!r} of {target!r} cannot be written as JSON ({error})."
            ) from error
