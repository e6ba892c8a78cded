"""The least prefix ratio varies less than the prefix product, and errs less than a token's ratio.

Answers of ten words out of two, under a policy that sees the word before, and stale samplers whose
logits differ by a normal error; rewards of 0 to 1 drawn at random for each answer, advantages of
the sampler's exact value. For each draw the gradient of one answer has its mean and its variance
over all answers computed exactly, with the weights of the recipe `minpro`, which end at 5, with the
product of all ratios so far, and with each token's own ratio alone (the recipe `cispo`, with the
same cap); the product has none. The
bias is the distance from the policy gradient, all errors are relative to its length, and the
numbers are ratios of medians over the draws, at an error of the logits of 0.5; 1 or above refutes
the claim. They are the variance over that with the product, and the bias over that with the token's
ratio. As small weights make a small gradient, the variance over the squared length of the mean is
compared too; and the root of bias squared plus variance over 64, the error of a batch of 64.

The product is not exact either: an advantage sees what comes after the token, which the sampler
wrote, and only the product over the whole answer, listed beside, corrects for that. The token's
ratio has no less bias than no weights at all, here, where the reward comes at the end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2601.22718"
WORDS, LENGTH = 2, 10
ERRORS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
ERROR = 0.5
BATCH = 64
NAMES = {
    "minpro": "least prefix ratio",
    "product": "prefix product",
    "token": "token ratio",
    "answer": "product over the answer",
    "none": "no weights",
}

_MINPRO, _TOKEN = jr.recipes.minpro().surrogate, jr.recipes.cispo().surrogate


class Errors(NamedTuple):
    """Of one way to correct, relative to the length of the policy gradient."""

    bias: jax.Array
    variance: jax.Array  # for one answer
    length: jax.Array  # of the mean
    cosine: jax.Array  # of the mean and the policy gradient


def token_weights(name: str, logp, old_logp, advantages, mask):
    """What each token's score is multiplied with, ``[answers, T]``."""
    if name in ("minpro", "token"):
        surrogate = _MINPRO if name == "minpro" else _TOKEN
        return _sequences.weights(surrogate, logp, old_logp, advantages, mask)
    if name == "none":
        return _sequences.weights(jr.surrogates.reinforce, logp, None, advantages, mask)
    total = jnp.cumsum(logp - old_logp, axis=-1)
    weight = jnp.exp(total if name == "product" else jnp.broadcast_to(total[:, -1:], total.shape))
    surrogate = jr.surrogates.reinforce
    return _sequences.weights(surrogate, logp, None, advantages, mask, weight=weight)


def errors_of(key, error):
    """The errors of each way to correct, for one draw of policies and rewards."""
    keys = jax.random.split(key, 3)
    tokens = _sequences.fixed(WORDS, LENGTH)
    mask = jnp.ones(tokens.shape, bool)
    logits = jax.random.normal(keys[0], (WORDS + 1, WORDS))
    stale = logits + error * jax.random.normal(keys[1], logits.shape)
    rewards = jax.random.uniform(keys[2], (len(tokens),))
    logp, old_logp = _sequences.logp(logits, tokens), _sequences.logp(stale, tokens)
    chance = jnp.exp(old_logp.sum(-1))
    advantages = rewards - jnp.sum(chance * rewards)
    scores = _sequences.scores(logits, tokens).reshape(*tokens.shape, -1)
    true = jnp.exp(logp.sum(-1)) * rewards @ scores.sum(1)
    size = jnp.sum(true**2)
    found = {}
    for name in NAMES:
        weights = token_weights(name, logp, old_logp, advantages, mask)
        each = jnp.einsum("at,atd->ad", weights, scores)
        mean = chance @ each
        variance = chance @ jnp.sum((each - mean) ** 2, axis=-1)
        length = jnp.sqrt(jnp.sum(mean**2) / size)
        cosine = jnp.sum(mean * true) / size / length
        found[name] = Errors(
            jnp.sqrt(jnp.sum((mean - true) ** 2) / size), variance / size, length, cosine
        )
    return found


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Many draws at every staleness."""
    draws = 40 if quick else 1000
    keys = jax.random.split(jax.random.key(seed), draws)

    @jax.jit
    def at(error):
        return jax.lax.map(lambda key: errors_of(key, error), keys, batch_size=20)

    curves = [jax.tree.map(np.asarray, at(error)) for error in ERRORS]
    found = curves[ERRORS.index(ERROR)]

    def over(other, statistic):
        pair = (statistic(found[name]) for name in ("minpro", other))
        return harness.bootstrap(ratio_of_medians, *pair, what="draws", resamples=500)

    measures = []
    for what, statistic, others in (
        ("variance", lambda x: x.variance, ("product", "token")),
        ("bias", lambda x: x.bias, ("token",)),
        ("variance over squared mean", lambda x: x.variance / x.length**2, ("product", "token")),
        (f"error of a batch of {BATCH}", batch_error, ("product", "token")),
    ):
        for other in others:
            words = f"{what}, minpro over {NAMES[other]}, sampler's error {ERROR:g}"
            measures.append(harness.Measure(words, over(other, statistic), "below", 1.0))
    facts, series = {}, []
    for name, label in NAMES.items():
        here = {
            "bias": found[name].bias,
            "length of the mean": found[name].length,
            "cosine of the mean and the policy gradient": found[name].cosine,
            f"error of a batch of {BATCH}": batch_error(found[name]),
        }
        for what, values in here.items():
            facts[f"{what}, {label}"] = np.median(values)
        shown = [np.median(batch_error(curve[name])) for curve in curves]
        series.append(harness.Series(label, ERRORS, shown))
    label = f"error of a batch of {BATCH}, over the gradient's length"
    plot = harness.Plot("error of the sampler's logits", label, series, log="y")
    return harness.Claim(measures, plot, facts)


def batch_error(errors: Errors):
    return np.sqrt(errors.bias**2 + errors.variance / BATCH)


def ratio_of_medians(first, second) -> float:
    """Means are ruled by the draws whose policy gradient is nearly 0."""
    return float(np.median(first) / np.median(second))
