"""Of single responses with few good ones, KTO learns what pairs of them are too few for.

256 prompts (`_preferred`), two random responses of each with a label: good with probability
sigmoid(merit - 3), about one in eight. A log-linear policy is trained by `kto` on all 512
responses, with weights that make both classes count the same, and by `dpo` on the prompts that have
one good and one bad response, both with beta 1. Measured is the expected merit of a response after
600 of Adam's steps: of `kto` less `dpo`, and less `kto` with both weights 1; each must be above 0.
The divergence that `kto` compares with is computed exactly in place of the estimate from other
prompts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _preferred, harness

PAPER = "2402.01306"
PROMPTS, RARE, BALANCED = 256, 3.0, 0.0
METHODS = ("kto", "kto, weights 1", "dpo")


@functools.partial(jax.jit, static_argnames="name")
def outcome(keys, threshold, *, name: str):
    """Expected merits, shares of good responses and numbers of pairs ``[seeds]`` each."""

    def one(key):
        first, second, third = jax.random.split(key, 3)
        task = _preferred.make_task(first, prompts=PROMPTS)
        both = jax.random.split(second, PROMPTS)
        both = jax.vmap(lambda k: jax.random.choice(k, _preferred.RESPONSES, (2,), replace=False))(
            both
        )
        merit = jnp.take_along_axis(task.merit, both, axis=-1)
        good = jax.random.uniform(third, merit.shape) < jax.nn.sigmoid(merit - threshold)
        share = jnp.mean(good)
        mixed = good[:, 0] != good[:, 1]
        chosen = jnp.where(good[:, 0], both[:, 0], both[:, 1])
        rejected = jnp.where(good[:, 0], both[:, 1], both[:, 0])
        pairs = _preferred.Pairs(jnp.arange(PROMPTS), chosen, rejected)
        reference = jnp.full((PROMPTS, 2), -jnp.log(float(_preferred.RESPONSES)))

        def objective(params):
            if name == "dpo":
                loss = jr.bind(jr.preferences.dpo, beta=1.0)
                losses = loss(*_preferred.of_pairs(params, task, pairs), where=mixed)
                return jnp.sum(losses) / jnp.maximum(jnp.sum(mixed), 1)
            logp = _preferred.log_policy(params, task)
            kl = jnp.mean(jnp.sum(jnp.exp(logp) * (logp - reference[:, :1]), axis=-1))
            # The loss takes weights as numbers; those of a class multiply its losses.
            weights = jnp.ones(2) if name != "kto" else 0.5 / jnp.stack([1.0 - share, share])
            taken = jnp.take_along_axis(logp, both, axis=-1)
            losses = jr.preferences.kto(taken, reference, good, kl=kl, beta=1.0)
            return jnp.mean(weights[good.astype(int)] * losses)

        params = _preferred.train(objective)
        return _preferred.expected_merit(params, task), share, jnp.sum(mixed)

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The methods on the same labels, few good ones and as many as bad ones."""
    keys = jax.random.split(jax.random.key(seed), 8 if quick else 96)
    results = {
        (name, threshold): list(map(np.asarray, outcome(keys, threshold, name=name)))
        for name in METHODS
        for threshold in (RARE, BALANCED)
    }
    merit = {key: value[0] for key, value in results.items()}
    measures = [
        harness.Measure(
            f"expected merit, kto less {other}, few good responses",
            harness.mean(merit["kto", RARE] - merit[other, RARE], "tasks"),
            "above",
            0.0,
        )
        for other in ("dpo", "kto, weights 1")
    ]
    _, share, pairs = results["dpo", RARE]
    facts = {
        "share of good responses": float(share.mean()),
        "pairs of one good and one bad response, of 256 prompts": float(pairs.mean()),
        "expected merit, kto less dpo, labels in balance": float(
            np.mean(merit["kto", BALANCED] - merit["dpo", BALANCED])
        ),
    }
    series = []
    for name in METHODS:
        each = [harness.mean(merit[name, x], "tasks") for x in (RARE, BALANCED)]
        columns = zip(*(x[:3] for x in each), strict=True)
        series.append(harness.Series(name, ["few good", "in balance"], *columns))
    plot = harness.Plot("", "expected merit over the reference's", series, kind="bars")
    return harness.Claim(measures, plot, facts)
