"""Groups of which half teach nothing, asked for again: in slots, and in rounds with a barrier.

python -m benchmarks.refill --save

The quickstart's model, questions and reward at its first weights, in groups of ``--group-size``,
about half of which have rewards that all agree. Replies may have ``--max-new-tokens``: at the
quickstart's 16 nearly all are as long as they may be, and slots have nothing to gain. Three ways
collect the same batches of informative groups, in turns:

- ``barrier``: the sampler makes P groups; once all are graded, P more, until P are informative.
- ``rounds``: ``refill`` on the sampler, whose empty rows sample what may be asked for next.
- ``slots``: ``refill`` on the engine, which takes a new group while others decode, and begins with
  1.5 P groups.

``tokens`` are those sampled for an informative group, over those of the groups up to the last that
the batch needs: what no way avoids that learns of rewards once a group has finished.
"""

import argparse
import collections
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.curation import Collection, Collector, Decision
from jaxrl_llm.data import Cursor
from jaxrl_llm.train import EvaluationConfig, TrainConfig
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment

CONFIG = "configs/quickstart.py"
REFILL = jr.curation.refill(jr.curation.informative_groups, max_rounds=10)
# The same batch, whose first requests are as many as half a batch more.
OVERSAMPLED = jr.curation.refill(jr.curation.informative_groups, max_rounds=10, oversample=1.5)


@dataclasses.dataclass
class Recorder:
    """A collector, and what it has seen when the last batch was complete."""

    collector: Collector
    seen: Collection = Collection(1, 1)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.collector.init(num_prompts)

    def propose(self, state, key, collection, count):
        return self.collector.propose(state, key, collection, count)

    def observe(self, state, collection):
        self.seen = collection
        return self.collector.observe(state, collection)


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Refills in rounds of P groups, each of which waits for the one before."""

    def init(self, num_prompts: int) -> ArrayTree:
        del num_prompts
        return ()

    def propose(self, state, key, collection, count):
        return REFILL.propose(state, key, collection, count)

    def observe(self, state, collection):
        if collection.waiting:
            return Decision(), state
        decision, state = REFILL.observe(state, collection)
        return decision._replace(ask=collection.num_groups if decision.ask else 0), state


class Way:
    """One way to collect batches.

    Attributes:
      sampled: Tokens that the whole-batch sampler has made.
    """

    def __init__(self, experiment: Experiment, collector: Collector, *, slots: bool):
        self.recorder, self.sampled = Recorder(collector), 0
        samplers = experiment.samplers

        def sample(*args, **options):
            rollout = samplers.rollouts(*args, **options)
            self.sampled += int(np.asarray(rollout.mask).sum())
            return rollout

        self.experiment = dataclasses.replace(
            experiment,
            recipe=experiment.recipe.replace(collector=self.recorder),
            samplers=samplers._replace(rollouts=sample, engine=samplers.engine if slots else None),
        )

    def run(self, params: ArrayTree, number: int) -> dict[str, Any]:
        """Collects a batch: seconds, groups and tokens, and the batch itself."""
        self.sampled, begin = 0, time.perf_counter()
        batch = collect_rollouts(
            self.experiment,
            params,
            jax.random.key(0),
            Cursor(0, number * self.experiment.config.prompts_per_step),
            number=number,
            version=0,
        )
        seconds, outcomes = time.perf_counter() - begin, self.recorder.seen.outcomes
        lengths = [int(outcome.lengths.sum()) for outcome in outcomes if outcome is not None]
        spread = [np.ptp(x.rewards[x.where]) > 0 for x in outcomes if x is not None]
        last = np.flatnonzero(spread)[self.recorder.seen.num_groups - 1]
        return {
            "seconds": seconds,
            "groups": len(lengths),
            "tokens": self.sampled or sum(lengths),
            "unavoidable": sum(lengths[: last + 1]),
            "informative": float(np.mean(spread)),
            "mean_length": sum(lengths) / sum(len(x.lengths) for x in outcomes if x is not None),
            "rewards": by_prompt(batch.batch),
        }


def by_prompt(batch: jr.recipes.Batch) -> dict[tuple[bytes, int], np.ndarray]:
    """The rewards of a batch's groups, by their prompts, and by the place among equal prompts."""
    mask, rewards = np.asarray(batch.prompt_mask), np.asarray(batch.rewards)
    groups: dict[tuple[bytes, int], np.ndarray] = {}
    seen: collections.Counter[bytes] = collections.Counter()
    for prompt, there, group in zip(np.asarray(batch.prompt_tokens), mask, rewards, strict=True):
        name = prompt[there].tobytes()
        groups[name, seen[name]] = group
        seen[name] += 1
    return groups


def agreement(one: Mapping[Any, np.ndarray], other: Mapping[Any, np.ndarray]) -> float:
    """Share of equal rewards, of the groups that both batches have."""
    return float(np.mean([one[prompt] == other[prompt] for prompt in one.keys() & other.keys()]))


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=32, help="informative groups of a batch")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="configs/tiny.py instead, for tests")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    source = "configs/tiny.py" if options.tiny else CONFIG
    config = load_config(source, options)
    experiment, params = load_experiment(config)
    ways = {
        "barrier": Way(experiment, Barrier(), slots=False),
        "rounds": Way(experiment, REFILL, slots=False),
        "slots": Way(experiment, OVERSAMPLED, slots=True),
    }
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number in range(-1, options.batches):
        for name, way in ways.items():
            row = way.run(params, max(number, 0))  # the first turn compiles and does not count
            if number >= 0:
                rows[name].append(row)
                print(f"{name}: {row['seconds']:.4g} s, {row['groups']} groups", file=sys.stderr)
    # One token in thousands differs where two programs round a tie differently.
    same = min(
        agreement(batch["rewards"], batches[0]["rewards"])
        for batches in zip(*rows.values(), strict=True)
        for batch in batches
    )
    if same < 0.9:
        raise SystemExit(f"benchmarks.refill: only {same:.0%} of the rewards of the ways agree")
    groups = config.prompts_per_step
    seconds = {name: [row["seconds"] / groups for row in each] for name, each in rows.items()}
    result = {
        "name": "refill",
        "workload": {
            "config": source,
            "groups": groups,
            "group_size": config.sampling.group_size,
            "slots": options.slots,
            "max_new_tokens": options.max_new_tokens,
            "batches": options.batches,
            "mean_length": round(float(np.mean([row["mean_length"] for row in rows["slots"]])), 1),
            "informative": round(float(np.mean([row["informative"] for row in rows["slots"]])), 3),
        },
        "same_rewards": round(same, 4),
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": harness.commit(),
        "ours": {
            name: {
                "seconds_per_informative_group": harness.summary(seconds[name]),
                "tokens": round(
                    sum(row["tokens"] for row in each) / sum(row["unavoidable"] for row in each), 3
                ),
            }
            for name, each in rows.items()
        },
        "ratios": {
            f"{name}/barrier": round(
                statistics.median(
                    a / b for a, b in zip(seconds[name], seconds["barrier"], strict=True)
                ),
                3,
            )
            for name in ("rounds", "slots")
        },
    }
    harness.finish(result, to_file=options.save)


def load_config(source: str, options: argparse.Namespace) -> TrainConfig:
    """The configuration of a file in the sizes of the options, without an evaluation."""
    from jaxrl_llm.cli.options import load_config as load

    config = load(source)
    return dataclasses.replace(
        config,
        recipe=(
            config.recipe if not isinstance(config.recipe, str) else jr.recipes.dr_grpo(length=8)
        ),
        prompts_per_step=options.groups,
        sampling=dataclasses.replace(
            config.sampling,
            slots=options.slots,
            group_size=options.group_size,
            max_new_tokens=options.max_new_tokens,
        ),
        evaluation=EvaluationConfig(enabled=False),
    )


if __name__ == "__main__":
    main()
