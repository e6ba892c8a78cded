"""``jaxrl-llm evaluate``."""

import dataclasses
import json
from collections.abc import Sequence

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.chosen import check_choice, chosen
from jaxrl_llm.train import Checkpoints
from jaxrl_llm.train.frozen import base_fingerprint, restore_policy
from jaxrl_llm.train.setup import load_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Accuracy on the held-out questions, greedy and sampled, with a 95% interval.

    Attributes:
      target: The folder of a run, for its last checkpoint; or a config file, for its model as it
        is before training.
      step: Which checkpoint of the run; by default the last.
      best: The checkpoint that was kept as the best.
      limit: How many questions at most.
      samples: Completions of each question in the sampled evaluation.
      seed: Of the sampling; by default that of the config.
      json: Print one JSON object.
    """

    target: tyro.conf.Positional[str]
    step: int | None = None
    best: bool = False
    limit: int | None = None
    samples: int | None = None
    seed: int | None = None
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    given = options.parse(Evaluate, arguments, command="evaluate")
    config, run_dir = options.load_target(given.target)
    which = {"step": given.step, "best": given.best}
    check_choice(given.target, None if run_dir is None else config, **which)
    if run_dir is not None and not config.evaluation.enabled:
        raise UsageError(
            f"The run {given.target!r} holds no questions out: it was trained without an "
            "evaluation, on all of them."
        )
    changes = {k: getattr(given, k) for k in ("limit", "samples")}
    changes = {k: v for k, v in changes.items() if v is not None}
    try:
        evaluation = dataclasses.replace(config.evaluation, enabled=True, **changes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    config = dataclasses.replace(config, evaluation=evaluation)
    options.use_compilation_cache()
    parts, params = load_parts(config)
    if run_dir is not None:
        marks = base_fingerprint(params, config.lora)
        checkpoints = Checkpoints(
            run_dir / "checkpoints", model=parts.model, best=config.checkpoint.best, run=marks
        )
        step = chosen(checkpoints, given.target, **which)
        params = restore_policy(checkpoints, params, step=step)
    key = jax.random.key(config.seed if given.seed is None else given.seed)
    found, _ = parts.evaluate(params, key)
    if given.json:
        print(json.dumps({kind: value._asdict() for kind, value in found.items()}))
        return 0
    print(f"{len(parts.held_out)} held-out questions, mean reward with 95% interval")
    for kind, value in found.items():
        print(f"{kind:<8} {value}")
    return 0
