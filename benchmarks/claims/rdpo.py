"""With labels flipped at a known rate, the debiased loss finds a better policy than DPO's.

512 pairs of two of eight responses to 64 prompts (`_preferred`), whose labels are flipped with
probability 0.3. A log-linear policy is trained by `dpo` with beta 1, by its robust form and by its
label smoothing (cDPO), the last two told the rate. Measured is the expected merit of the policy's
responses: of the robust form less that of `dpo`, and less that of cDPO; 0 or below refutes the
claim. The third number is the mean squared error of the implicit rewards' differences, over that of
`dpo`; it must be below 1. Intervals are over tasks, each of which all three see.

The policy can express the merits and the rate is known exactly, which favors the robust form; with
few pairs its variance, which the flips raise, works against it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _preferred, harness

PAPER = "2403.00409"
PAIRS, FLIPPED, RATES = 512, 0.3, (0.0, 0.3)
LOSSES = ("dpo", "robust dpo", "cdpo")


@functools.partial(jax.jit, static_argnames=("name", "flipped"))
def outcome(keys, *, name: str, flipped: float):
    """Expected merit and squared error ``[seeds]`` each."""

    def one(key):
        first, second = jax.random.split(key)
        task = _preferred.make_task(first)
        pairs = _preferred.draw_pairs(second, task, PAIRS, flipped=flipped)
        options = {"beta": 1.0, "robust": name == "robust dpo" and flipped > 0}
        options["label_smoothing"] = 0.0 if name == "dpo" else flipped

        def objective(params):
            logps = _preferred.of_pairs(params, task, pairs)
            return jnp.mean(jr.preferences.dpo(*logps, **options))

        params = _preferred.train(objective)
        implicit = task.features @ params
        error = (implicit - implicit.mean(-1, keepdims=True)) - (
            task.merit - task.merit.mean(-1, keepdims=True)
        )
        return _preferred.expected_merit(params, task), jnp.mean(error**2)

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The three losses on the same pairs, at each rate of flips."""
    seeds, rates = (12, (FLIPPED,)) if quick else (64, RATES)
    keys = jax.random.split(jax.random.key(seed), seeds)
    results = {
        (name, rate): [np.asarray(x) for x in outcome(keys, name=name, flipped=rate)]
        for name in LOSSES
        for rate in rates
    }
    merit = {name: results[name, FLIPPED][0] for name in LOSSES}
    error = {name: results[name, FLIPPED][1] for name in LOSSES}
    measures = [
        harness.Measure(
            f"expected merit, robust dpo less {other}, 0.3 of the labels flipped",
            harness.mean(merit["robust dpo"] - merit[other], "tasks"),
            "above",
            0.0,
        )
        for other in ("dpo", "cdpo")
    ]
    ratio = harness.ratio(error["robust dpo"], error["dpo"], what="tasks")
    what = "squared error of implicit rewards, robust dpo over dpo"
    measures.append(harness.Measure(what, ratio, "below", 1.0))
    series = []
    for name in LOSSES:
        each = [harness.mean(results[name, rate][0], "tasks") for rate in rates]
        columns = zip(*(x[:3] for x in each), strict=True)
        series.append(harness.Series(name, rates, *columns))
    plot = harness.Plot("share of labels flipped", "expected merit over the reference's", series)
    facts = {f"expected merit, {name}": float(value.mean()) for name, value in merit.items()}
    return harness.Claim(measures, plot, facts)
