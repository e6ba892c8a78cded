"""What a vote teaches: the main job half trained, then trained on test questions without answers.

    python -m benchmarks.test_time_training --save

`configs/quickstart.py` is trained for `--half` steps. From there `ttrl_majority` trains for
`--steps` steps on the held-out questions, whose answers it is not shown: a vote of `--votes`
completions stands in for them (`rewards.majority_vote`). Beside it, from the same weights, runs
the same recipe on the questions of the first phase, also without their answers (`others`). Both are
evaluated on the held-out questions with their answers, greedy and sampled, with maj@votes: the
accuracy of the vote itself, which is what the first can teach.

Writes benchmarks/results/test_time_training-DEVICE.json. `--tiny` takes a small random model.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.quickstart import CONFIG, WAYS
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.data import Prompt, PromptSet, split_distinct
from jaxrl_llm.train import CheckpointConfig, DataConfig, EvaluationConfig, TrainConfig, train
from jaxrl_llm.train.config import find_prompts
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.optimizer import policy_optimizer

QUESTIONS = ("held out", "others")


def without_answers(prompts: PromptSet) -> PromptSet:
    """The texts alone: no answer, and no metadata that tells it."""
    return PromptSet((Prompt(x.text, id=x.id) for x in prompts), source="without answers")


def half_trained(config: TrainConfig, steps: int, folder: Path) -> tuple[Any, Any]:
    """Parameters after some steps of the main job, and its tokenizer."""
    others, _ = split(config)
    config = dataclasses.replace(
        config,
        steps=steps,
        run_dir=str(folder),
        evaluation=EvaluationConfig(enabled=False),
        checkpoint=CheckpointConfig(every=0),
        # The questions that stay out are the same ones.
        data=DataConfig(prompts=lambda: others, chat=config.data.chat),
    )
    state = train(config, log=_log).state
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return jax.device_get(state.params), load_experiment(config)[0].tokenizer


def split(config: TrainConfig) -> tuple[PromptSet, PromptSet]:
    """The questions of the main job, and those it holds out."""
    prompts = find_prompts(config.data.prompts)
    return split_distinct(prompts, held_out=config.data.held_out, seed=config.data.seed)


def adapt(
    config: TrainConfig, params, tokenizer, questions: str, options, folder: Path
) -> dict[str, Any]:
    """Trains on questions without answers; the figures before and after."""
    others, held_out = split(config)
    asked = without_answers(held_out if questions == "held out" else others)
    model = load_experiment(dataclasses.replace(config, run_dir=str(folder)))[0].model
    chat = config.data.chat
    with_answers = DataConfig(
        prompts=lambda: asked, evaluation=lambda: held_out, held_out=0, chat=chat
    )
    config = dataclasses.replace(
        config,
        model=lambda: (model, params, tokenizer),
        data=DataConfig(prompts=lambda: asked, chat=chat),
        reward=jr.rewards.majority_vote(config.reward),
        recipe=jr.recipes.ttrl_majority(votes=1).replace(minibatches=1),
        sampling=dataclasses.replace(config.sampling, group_size=options.votes),
        optimizer=dataclasses.replace(
            policy_optimizer(config), learning_rate=options.learning_rate, decay_steps=None
        ),
        checkpoint=CheckpointConfig(every=0),
        evaluation=EvaluationConfig(enabled=False),
        steps=options.steps,
        prompts_per_step=min(options.prompts, len(asked)),
        run_dir=str(folder),
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="data: .* are also trained on")
        graded = dataclasses.replace(config, data=with_answers, evaluation=EvaluationConfig())
        before = evaluated(graded, params, options.votes)
        result = train(config, log=_log)
        after = evaluated(graded, jax.device_get(result.state.params), options.votes)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    figures: dict[str, Any] = {"questions": questions, "trained_on": len(asked)}
    for when, found in (("before", before), ("after", after)):
        for name, (mean, low, high) in found.items():
            figures[f"{name}_{when}"] = round(mean, 4)
            figures[f"{name}_{when}_interval"] = [round(low, 4), round(high, 4)]
    for way in WAYS:
        gain = figures[f"{way}_after"] - figures[f"{way}_before"]
        figures[f"{way}_gain"] = round(gain, 4)
    figures["steps"] = int(result.state.step)
    return figures | {"minutes": round((time.perf_counter() - start) / 60, 2)}


def evaluated(config: TrainConfig, params, votes: int) -> dict[str, tuple[float, float, float]]:
    """Held-out accuracy and that of the vote, with intervals."""
    experiment, _ = load_experiment(config)
    results, _ = experiment.evaluate(params, jax.random.key(config.seed), k=(votes,))
    (majority,) = (x for x in results["sampled"].at_k if x.name == f"maj@{votes}")
    found = [*((way, results[way]) for way in WAYS), ("majority", majority)]
    return {name: (x.mean, x.low, x.high) for name, x in found}


def tiny() -> TrainConfig:
    """Sums of a small random model, which answers hardly any."""
    from jaxrl_llm.testing import ByteTokenizer, tiny_model

    prompts = PromptSet(
        (Prompt(f"{a}+{b}=", str(a + b), id=f"{a}+{b}") for a in range(4) for b in range(3)),
        source="tiny",
    )
    return TrainConfig(
        model=lambda: (*tiny_model(num_layers=1), ByteTokenizer()),
        data=DataConfig(prompts=lambda: prompts, held_out=0.25, chat=False),
        reward=jr.rewards.last_integer,
        sampling=jr.train.SamplingConfig(group_size=4, max_new_tokens=4),
        prompts_per_step=2,
        remat="none",
    )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the seeds and prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--half", type=int, default=10, help="steps of the main job before")
    parser.add_argument("--steps", type=int, default=20, help="steps without answers")
    parser.add_argument("--votes", type=int, default=16, help="completions of a question")
    parser.add_argument("--prompts", type=int, default=8, help="questions of a step")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--questions", nargs="+", default=list(QUESTIONS), choices=QUESTIONS)
    parser.add_argument("--tiny", action="store_true", help="a small random model, for tests")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    if options.tiny and options.save:
        raise SystemExit("benchmarks.test_time_training: --tiny is not saved")
    commit, runs = harness.commit(), []
    workload = {"config": CONFIG} | {
        name: getattr(options, name)
        for name in ("half", "steps", "votes", "prompts", "learning_rate")
    }
    for seed in options.seeds:
        config = tiny() if options.tiny else load_config(harness.ROOT / CONFIG)
        data = dataclasses.replace(config.data, seed=seed)
        config = dataclasses.replace(config, seed=seed, data=data)
        with tempfile.TemporaryDirectory() as scratch:
            params, tokenizer = half_trained(config, options.half, Path(scratch) / "half")
            for questions in options.questions:
                folder = Path(scratch) / questions.replace(" ", "_")
                figures = adapt(config, params, tokenizer, questions, options, folder)
                runs.append({"seed": seed, **figures})
                _log(json.dumps(runs[-1]))
    result = {
        "name": "test_time_training",
        "workload": workload,
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": commit,
        "runs": runs,
    }
    harness.finish(result, to_file=options.save)
    return result


if __name__ == "__main__":
    main()
