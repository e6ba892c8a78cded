"""``jaxrl-llm evaluate``."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.train import TrainConfig
from jaxrl_llm.train.checkpoint.serialization import reference_fingerprint
from jaxrl_llm.train.evaluation.at_k import check_k
from jaxrl_llm.train.experiment.pairs import evaluate_pairs, make_score
from jaxrl_llm.train.experiment.run_models import load_reference
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.models.model_rewards import judge


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Mean reward on the held-out questions, greedy and sampled, with 95% intervals; pass@k, maj@k.

    Attributes:
      target: The folder of a run, for its last checkpoint; or a config file, for its model before
        training.
      step: The step of the run's checkpoint; by default the last.
      best: Use the checkpoint that was saved as best.
      trust: Execute the config.py of a run that was not made here; read it first.
      limit: Maximum number of questions.
      samples: Completions per question in the sampled evaluation.
      k: Values of k for pass@k, and for maj@k if the reward extracts answers; at most the samples.
      success: A completion is right if its reward is at least this.
      seed: Seed of the sampling; by default that of the config.
      json: Print one JSON object.
      template_options: Variables of the chat template, such as enable_thinking=false; those of the
        run stay, unless they have the same name.
    """

    target: tyro.conf.Positional[str]
    step: int | None = None
    best: bool = False
    trust: bool = False
    limit: int | None = None
    samples: int | None = None
    k: tuple[int, ...] = ()
    success: float | None = None
    seed: int | None = None
    json: bool = False
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"--seed must not be negative; got {self.seed}.")
        if any(k < 1 for k in self.k):
            raise ValueError(f"--k must be above 0; got {min(self.k)}.")
        if len(set(self.k)) < len(self.k):
            raise ValueError(f"--k names one twice: {' '.join(map(str, self.k))}.")
        if self.success is not None and not self.k:
            raise ValueError("--success has no effect without --k.")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = options.parse(Evaluate, arguments, command="evaluate")
    with options.on_its_date(args.target):
        return _evaluate(args)


def _evaluate(args: Evaluate) -> int:
    target = options.load_target(args.target, trust=args.trust)
    choice = options.CheckpointChoice(args.target, args.step, args.best, args.trust)
    choice.check(None if target.run_dir is None else target.config)
    config = _to_evaluate(args, target)
    ranks = _ranks_pairs(config, target)
    options.use_compilation_cache()
    collector_state: ArrayTree = ()
    with options.usage_errors():
        experiment, params = load_experiment(config, trains=False)
        reference, marks = None, {}
        if ranks and experiment.recipe.needs.uses_reference:
            reference = load_reference(config, experiment.model, params, experiment.mesh)
            marks = reference_fingerprint(params, reference)
        remembers = hasattr(experiment.collector, "evaluation_text")
        if remembers:
            collector_state = experiment.collector.init(len(experiment.train))
        if target.run_dir is not None:
            params, checkpoints = choice.restore(target.run_dir, experiment, params, **marks)
            if remembers:
                step = checkpoints.last
                collector_state = checkpoints.restore_collector(collector_state, step=step)
    results = {}
    if config.samples_held_out:
        key = jax.random.key(config.seed if args.seed is None else args.seed)
        success = 1.0 if args.success is None else args.success
        results, _ = experiment.evaluate(
            params, key, collector_state=collector_state, k=args.k, success=success
        )
    if ranks:
        results["pairs"] = evaluate_pairs(experiment, make_score(experiment, params, reference))
    if args.json:
        print(json.dumps({kind: value.record() for kind, value in results.items()}))
        return 0
    what = "mean reward" if config.samples_held_out else "share of pairs in the right order"
    questions = next(iter(results.values())).questions
    print(f"{questions} held-out questions, {what} with 95% interval")
    at_k = results["sampled"].at_k if "sampled" in results else ()
    rows = [*results.items(), *((x.name, x) for x in at_k)]
    for kind, value in rows:
        print(f"{kind:<8} {value}")
    plays = config.environment is not None  # it grades its episodes: no reward extracts an answer
    if at_k and not plays and not any(kind.startswith("maj@") for kind, _ in rows):
        print("maj@k: the reward does not name how an answer is extracted (rewards.answer_of)")
    for kind, value in results.items():
        if value.failed:
            print(f"{kind}: {value.failed} completions left out, on which the reward failed")
    return 0


def _ranks_pairs(config: TrainConfig, target: options.Target) -> bool:
    """Whether held-out pairs are ranked, which needs the reference of the run.

    Raises:
      UsageError: If there is nothing else to evaluate.
    """
    recipe = config.resolved_recipe
    if not config.compares_held_out or target.run_dir is None or not recipe.needs.moves_reference:
        return config.compares_held_out
    told = (
        f"the reference of recipe {recipe.name!r} moves, so held-out pairs are ranked only within "
        "the run: see held_out in its metrics.jsonl."
    )
    if not config.samples_held_out:
        raise UsageError(told)
    print(f"jaxrl-llm evaluate: {told}", file=sys.stderr)
    return False


def _to_evaluate(args: Evaluate, target: options.Target) -> TrainConfig:
    """The configuration of a target, with the options of the command."""
    config, run_dir = target
    if run_dir is not None and not config.evaluation.enabled:
        raise UsageError(
            f"The run {args.target!r} holds no questions out: it was trained without an "
            "evaluation, on all of its questions."
        )
    if isinstance(config.reward, judge) and config.reward.compare:
        raise UsageError(
            f"{args.target!r} has a judge that compares responses to one prompt, and a greedy "
            "evaluation has one response."
        )
    default = config.evaluation
    with options.usage_errors():
        evaluation = dataclasses.replace(
            default,
            enabled=True,
            limit=default.limit if args.limit is None else args.limit,
            samples=default.samples if args.samples is None else args.samples,
        )
    if not config.samples_held_out and (args.samples or args.k or args.seed is not None):
        raise UsageError(
            f"--samples, --k and --seed have no effect: {args.target!r} has no reward, and its "
            "evaluation compares the responses of the data."
        )
    with options.usage_errors():
        config = dataclasses.replace(config, evaluation=evaluation)
    config = options.add_template_options(config, args.template_options)
    if run_dir is not None:
        config = options.on_these_devices(options.in_its_precision(run_dir, config))
        if not (config.compares_held_out and config.keeps_start):
            config = options.without_start(config)
    samples = evaluation.samples or config.sampling.group_size
    if max(args.k, default=0) > samples:
        raise UsageError(
            f"--k {max(args.k)} needs as many completions of each question; there are {samples}, "
            "which --samples changes."
        )
    with options.usage_errors():
        check_k(args.k, samples)
    return config
