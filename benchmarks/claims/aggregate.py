"""Means over a response's tokens favor longer wrong answers; a constant denominator is unbiased.

All answers of up to five words, one of which ends them, each right or wrong with even odds whatever
its length, under random policies that see the word before. For groups of two with the advantages of
`dr_grpo`, the expected update is computed exactly over all pairs of answers, with each way to
reduce the losses of tokens, and compared with the gradient of the success rate.

The number is the slope of the mean length of wrong answers along an update, with `sequence_mean`
less that with `fixed_length`, both updates of length 1; 0 or below refutes the claim. The mean
length of right answers should fall by the same comparison. The update with `fixed_length` must
point where the gradient does (largest angle below 0.1 degrees), and that with `sequence_mean` must
not (mean angle above 1 degree). `token_mean`, which divides by the tokens of the batch, is listed
beside.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2503.20783"
WORDS, LONGEST = 3, 5
TOKENS, MASK = _sequences.ending(WORDS, LONGEST)
PAIRS = np.array(list(itertools.product(range(len(TOKENS)), repeat=2)))
WAYS = {
    "sequence_mean": jr.aggregate.sequence_mean,
    "fixed_length": functools.partial(jr.aggregate.fixed_length, length=LONGEST),
    "token_mean": jr.aggregate.token_mean,
}


def slopes(key):
    """The gradient, the updates, and the slopes of both mean lengths, of one random policy."""
    first, second = jax.random.split(key)
    start = jax.random.normal(first, (WORDS + 1, WORDS))
    right = jax.random.bernoulli(second, 0.5, (len(TOKENS),)).astype(jnp.float32)
    lengths = MASK.sum(-1)
    advantages = jr.advantages.dr_grpo(right[PAIRS])

    def chance(logits):
        return jnp.exp(_sequences.logp(logits, TOKENS, MASK).sum(-1))

    odds = chance(start)[PAIRS].prod(-1)

    def objective(logits, weigh):
        logp = _sequences.logp(logits, TOKENS, MASK)

        def of_pair(pair, advantages):
            mask = jnp.asarray(MASK)[pair]
            loss = jr.surrogates.reinforce(logp[pair], None, advantages, mask)
            return jr.aggregate.weighted_sum(loss, weigh(mask))

        return -jnp.sum(odds * jax.vmap(of_pair)(PAIRS, advantages))

    def mean_length(logits, which):
        share = chance(logits) * which
        return jnp.sum(share * lengths) / jnp.sum(share)

    updates = {name: jax.grad(objective)(start, weigh) for name, weigh in WAYS.items()}
    ahead = {name: x / jnp.linalg.norm(x) for name, x in updates.items()}
    along = {
        answers: {
            name: jnp.sum(jax.grad(mean_length)(start, which) * x) for name, x in ahead.items()
        }
        for answers, which in (("wrong", 1.0 - right), ("right", right))
    }
    updates["gradient"] = jax.grad(lambda logits: jnp.sum(chance(logits) * right))(start)
    return updates, along


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Many random policies."""
    draws = 20 if quick else 400
    keys = jax.random.split(jax.random.key(seed), draws)
    updates, along = jax.jit(lambda keys: jax.lax.map(slopes, keys))(keys)
    flat = {name: np.asarray(x, np.float64).reshape(draws, -1) for name, x in updates.items()}
    true = flat.pop("gradient")
    angle = {}
    for name, x in flat.items():
        cosine = np.sum(x * true, -1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(true, axis=-1)
        angle[name] = np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0)))
    along = jax.tree.map(lambda x: np.asarray(x, np.float64), along)
    measures = [
        harness.Measure(
            f"slope of the mean length of {answers} answers, sequence_mean less fixed_length",
            harness.mean(
                along[answers]["sequence_mean"] - along[answers]["fixed_length"], "policies"
            ),
            side,
            0.0,
        )
        for answers, side in (("wrong", "above"), ("right", "below"))
    ]
    measures += [
        harness.Measure(
            "angle between the gradient and fixed_length, degrees, largest of the policies",
            harness.exact(angle["fixed_length"].max(), f"exact, by enumeration; {draws} policies"),
            "below",
            0.1,
        ),
        harness.Measure(
            "angle between the gradient and sequence_mean, degrees, mean of the policies",
            harness.mean(angle["sequence_mean"], "policies"),
            "above",
            1.0,
        ),
    ]
    facts = {"angle between the gradient and token_mean, degrees": angle["token_mean"].mean()}
    for answers, found in along.items():
        for name, values in found.items():
            facts[f"slope of the mean length of {answers} answers, {name}"] = values.mean()
    shares = np.arange(1, 100)
    series = [
        harness.Series(name, shares, np.maximum(np.percentile(x, shares), 1e-4))
        for name, x in angle.items()
    ]
    label = "angle to the policy gradient, degrees"
    plot = harness.Plot("percentile of the policies", label, series, log="y")
    return harness.Claim(measures, plot, facts)
