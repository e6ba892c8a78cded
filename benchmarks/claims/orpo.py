"""Imitation raises a rejected response that is much like the chosen one; odds ratios lower it.

64 prompts (`_preferred`) with 32 responses each and one pair: a random response and the one most
like it by features, the better one chosen. A log-linear policy makes 200 of Adam's steps on the
likelihood of the chosen responses (`sft`), or on `orpo` with beta 1, without a reference. Measured
is the change of the mean log-probability: of the rejected responses it must be above 0 with
imitation, which is what the paper sets out from, and with `orpo` less than with imitation; of the
chosen ones with `orpo` it must be above 0. A response is one token here, so that its odds are those
of a sequence's mean.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _preferred, harness

PAPER = "2403.07691"
STEPS, RESPONSES = (50, 200), 32


@functools.partial(jax.jit, static_argnames=("name", "steps"))
def outcome(keys, *, name: str, steps: int):
    """Changes of the log-probabilities of chosen and rejected responses ``[seeds]`` each."""

    def one(key):
        first, second = jax.random.split(key)
        task = _preferred.make_task(first, responses=RESPONSES)
        pairs = _preferred.similar_pairs(second, task)

        def objective(params):
            chosen, rejected, _, _ = _preferred.of_pairs(params, task, pairs)
            if name == "sft":
                return jnp.mean(jr.preferences.sft(chosen, per_token=False))
            one = jnp.ones_like(chosen)
            lengths = {"chosen_lengths": one, "rejected_lengths": one}
            return jnp.mean(jr.preferences.orpo(chosen, rejected, beta=1.0, **lengths))

        params = _preferred.train(objective, steps=steps)
        chosen, rejected, ref_chosen, ref_rejected = _preferred.of_pairs(params, task, pairs)
        return jnp.mean(chosen - ref_chosen), jnp.mean(rejected - ref_rejected)

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both on the same pairs."""
    keys = jax.random.split(jax.random.key(seed), 16 if quick else 96)
    steps = STEPS[-1:] if quick else STEPS
    results = {
        (name, n): list(map(np.asarray, outcome(keys, name=name, steps=n)))
        for name in ("sft", "orpo")
        for n in steps
    }
    (_, imitated), (chosen, rejected) = results["sft", STEPS[-1]], results["orpo", STEPS[-1]]
    measures = [
        harness.Measure(what, harness.mean(values, "tasks"), *side)
        for what, values, side in (
            (
                "change of the rejected responses' log-probability, orpo less sft, nats",
                rejected - imitated,
                ("below", 0.0),
            ),
            (
                "change of the rejected responses' log-probability, sft, nats",
                imitated,
                ("above", 0.0),
            ),
            (
                "change of the chosen responses' log-probability, orpo, nats",
                chosen,
                ("above", 0.0),
            ),
        )
    ]
    series = []
    for name in ("sft", "orpo"):
        for place, side in enumerate(("chosen", "rejected")):
            each = [harness.mean(results[name, n][place], "tasks") for n in steps]
            columns = zip(*(x[:3] for x in each), strict=True)
            series.append(harness.Series(f"{name}, {side}", list(steps), *columns))
    facts = {
        "change of the rejected responses' log-probability, orpo, nats": float(rejected.mean())
    }
    plot = harness.Plot("steps", "change of the log-probability, nats", series, line=0.0)
    return harness.Claim(measures, plot, facts)
