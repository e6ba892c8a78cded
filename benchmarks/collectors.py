"""Milliseconds that collectors take on the host, at the sizes of the quickstart.

    python -m benchmarks.collectors --save

Trains a tiny model of configs/tiny.py:hard with presets of all collectors that sample text, on
batches of the quickstart's size. Measured is the time in which the loop waits for a batch and does
not sample it: proposing, observing, encoding, decoding, grading by a cheap reward, and putting the
batch together. ``grpo`` has no collector. The shares are those of a step of the quickstart, of
which a few are made first; at most 2% is asked.
"""

import dataclasses
import tempfile
from typing import Any

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.cli.options import load_target
from jaxrl_llm.train import CheckpointConfig, EvaluationConfig, TrainConfig, train
from jaxrl_llm.train.optimizer import policy_optimizer

SIZES = {"prompts": 8, "rollouts": 8, "tokens": 16, "steps": 12, "warmup": 4}
TINY = {"prompts": 4, "rollouts": 6, "tokens": 4, "steps": 3, "warmup": 1}
CONFIG, QUICKSTART = "configs/tiny.py:hard", "configs/quickstart.py"
STEPS, FIRST = 7, 2  # of the quickstart, and how many of them are left out
PRESETS = (
    "grpo",
    "dapo",  # refill
    "learnability",  # prioritized
    "vade",  # and by samples of what is believed
    "dots",  # targeted
    "hapo",  # entropy_temperature
    "april",  # partial_rollouts
    "t_ppo",  # windowed
    "hbpo",  # budgeted
    "ps_grpo",  # paraphrased
    "xrpo",  # two_phase
    "ettrl",  # forked
    "vineppo",  # valued
    "branch_grpo",  # branched
    "latr",  # lookahead
    "arrol",  # pruned
    "nurl",  # hinted, by the data
    "sage",  # hinted, by the policy
    "adhint",  # hinted, by a part of a solution
    "cog_rethinker",  # hinted, by decomposition
    "prefix_rl",  # prefixed
    "luffy_shaping",  # demonstrations
    "rollout_replay",  # replayed
    "sapo_swarm",  # replayed, of others
    "grpo_roc",  # downsampled
    "spark",  # judged
    "masa",  # predicted
    "training_free_grpo",  # experienced
)


def steps(config: TrainConfig, warmup: int) -> list[dict[str, Any]]:
    """What is recorded of each step after the first ones, which compile."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-collectors-") as folder:
        alone = dataclasses.replace(
            config,
            checkpoint=CheckpointConfig(every=0),
            evaluation=EvaluationConfig(enabled=False),
            run_dir=folder,
        )
        rows = train(alone).history
    return [row for row in rows if row["step"] > warmup]


def milliseconds(config: TrainConfig, preset: str, warmup: int) -> list[float]:
    """On the host, of each step of a preset."""
    rows = steps(dataclasses.replace(config, recipe=preset), warmup)
    return [1e3 * (row["seconds_wait"] - row["seconds_sample"]) for row in rows]


def quickstart_seconds() -> list[float]:
    """Of each step of the quickstart."""
    config, _ = load_target(str(harness.ROOT / QUICKSTART))
    rows = steps(dataclasses.replace(config, steps=STEPS), FIRST)
    return [sum(row[f"seconds_{phase}"] for phase in ("wait", "score", "train")) for row in rows]


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.collectors measures ours alone, with a tiny model.")
    size = TINY if options.tiny else SIZES
    config, _ = load_target(CONFIG)
    sampling = dataclasses.replace(
        config.sampling, group_size=size["rollouts"], max_new_tokens=size["tokens"]
    )
    config = dataclasses.replace(
        config,
        sampling=sampling,
        prompts_per_step=size["prompts"],
        steps=size["steps"],
        # So slow that some groups agree and some do not, from the first step to the last.
        optimizer=dataclasses.replace(policy_optimizer(config), learning_rate=1e-7),
    )
    presets = PRESETS[:2] if options.tiny else PRESETS
    step = harness.summary([1.0] if options.tiny else quickstart_seconds())
    host = {name: milliseconds(config, name, size["warmup"]) for name in presets}
    medians = {name: harness.summary(values)["median"] for name, values in host.items()}
    result = {
        "name": "collectors",
        "workload": {"config": CONFIG, **size},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "quickstart_seconds": step,
        "milliseconds": {name: harness.summary(values) for name, values in host.items()},
        "share": {
            name: round(value / (1e3 * step["median"]), 5) for name, value in medians.items()
        },
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
