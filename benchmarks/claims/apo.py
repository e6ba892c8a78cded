"""DPO may win its margin by lowering the chosen response too; anchored, it rises.

64 prompts (`_preferred`) with 32 responses each and one pair: a random response and the one most
like it by features, the better one chosen. A log-linear policy makes 200 of Adam's steps on `dpo`
or on `apo_zero`, both with beta 1 against the uniform reference. Measured is the share of the
prompts whose chosen response is less likely than under the reference: with `apo_zero` less than
with `dpo`, so below 0; with `dpo` it must be above 0.05, or nothing is to be mended. The mean
change of the chosen responses' log-probability, `apo_zero` less `dpo`, must be above 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _preferred, harness

PAPER = "2408.06266"
STEPS, RESPONSES = (50, 200), 32
LOSSES = {"dpo": jr.preferences.dpo, "apo_zero": jr.preferences.apo_zero}


@functools.partial(jax.jit, static_argnames=("name", "steps"))
def outcome(keys, *, name: str, steps: int):
    """Share of chosen responses that fell, and mean changes of both sides ``[seeds]`` each."""

    def one(key):
        first, second = jax.random.split(key)
        task = _preferred.make_task(first, responses=RESPONSES)
        pairs = _preferred.similar_pairs(second, task)
        loss = jr.bind(LOSSES[name], beta=1.0)
        params = _preferred.train(
            lambda params: jnp.mean(loss(*_preferred.of_pairs(params, task, pairs))), steps=steps
        )
        chosen, rejected, ref_chosen, ref_rejected = _preferred.of_pairs(params, task, pairs)
        change = chosen - ref_chosen
        return jnp.mean(change < 0), jnp.mean(change), jnp.mean(rejected - ref_rejected)

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both on the same pairs."""
    keys = jax.random.split(jax.random.key(seed), 16 if quick else 96)
    steps = STEPS[-1:] if quick else STEPS
    results = {
        (name, n): list(map(np.asarray, outcome(keys, name=name, steps=n)))
        for name in LOSSES
        for n in steps
    }
    dpo, apo = (results[name, STEPS[-1]] for name in LOSSES)
    measures = [
        harness.Measure(what, harness.mean(values, "tasks"), *side)
        for what, values, side in (
            (
                "share of chosen responses that fell, apo_zero less dpo",
                apo[0] - dpo[0],
                ("below", 0.0),
            ),
            ("share of chosen responses that fell, dpo", dpo[0], ("above", 0.05)),
            (
                "change of the chosen responses' log-probability, apo_zero less dpo, nats",
                apo[1] - dpo[1],
                ("above", 0.0),
            ),
        )
    ]
    series = []
    for name in LOSSES:
        for place, side in ((1, "chosen"), (2, "rejected")):
            each = [harness.mean(results[name, n][place], "tasks") for n in steps]
            columns = zip(*(x[:3] for x in each), strict=True)
            series.append(harness.Series(f"{name}, {side}", list(steps), *columns))
    facts = {"share of chosen responses that fell, apo_zero": float(apo[0].mean())}
    plot = harness.Plot("steps", "change of the log-probability, nats", series, line=0.0)
    return harness.Claim(measures, plot, facts)
