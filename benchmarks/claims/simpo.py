"""Where judges lean to long answers, likelihoods a token lengthen a policy less than their sums.

Answers are of good words, bad words and a stop, at most 24 tokens; a policy has three logits at
each place and begins with a stop in 0.15 of cases and good and bad words alike. 1,024 pairs of its
answers are labeled by Bradley and Terry of 4 times the share of good words plus 0.15 a token: the
lean. `simpo` (beta 4, gamma 1) compares means over tokens. The other form of the same loss compares
sums, with beta divided by the mean length, so that both begin at one scale. After 200 of Adam's
steps the expected length of an answer is computed exactly. It must have grown with the sums, by
more than 0.5 tokens, and the growth with the means less that with the sums must be below 0. The
share of good words must rise with the means as much as with the sums: the difference above -0.02.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2405.14734"
LENGTH, PAIRS, STEPS, STOP = 24, 1024, 200, 2
LEAN, QUALITY, BETA, GAMMA = 0.15, 4.0, 4.0, 1.0
START = jnp.log(jnp.array([0.425, 0.425, 0.15]))


def sample(key, logits):
    """Tokens ``[T]`` and which of them belong to the answer, the stop among them."""
    tokens = jax.random.categorical(key, logits)
    before = jnp.cumsum(tokens == STOP) - (tokens == STOP)
    return tokens, before == 0


def expectations(logits):
    """Expected length, and expected good words over expected words."""
    probs = jax.nn.softmax(logits, axis=-1)
    alive = jnp.cumprod(jnp.concatenate([jnp.ones(1), 1.0 - probs[:-1, STOP]]))
    words = jnp.sum(alive * (1.0 - probs[:, STOP]))
    return jnp.sum(alive), jnp.sum(alive * probs[:, 0]) / words


@functools.partial(jax.jit, static_argnames="per_token")
def train(keys, *, per_token: bool):
    """Expected lengths and shares of good words ``[seeds, STEPS + 1]`` on the way."""

    def one(key):
        start = jnp.broadcast_to(START, (LENGTH, 3))
        draws, labels = jax.random.split(key)
        tokens, mask = jax.vmap(lambda k: sample(k, start))(jax.random.split(draws, 2 * PAIRS))
        lengths = mask.sum(-1).astype(jnp.float32)
        words = jnp.maximum((mask & (tokens != STOP)).sum(-1), 1)
        score = QUALITY * (mask & (tokens == 0)).sum(-1) / words + LEAN * lengths
        first, second = score[:PAIRS], score[PAIRS:]
        wins = jax.random.uniform(labels, (PAIRS,)) < jax.nn.sigmoid(first - second)
        left, right = jnp.arange(PAIRS), jnp.arange(PAIRS) + PAIRS
        chosen, rejected = jnp.where(wins, left, right), jnp.where(wins, right, left)
        # Sums over tokens are means over one.
        scale = lengths if per_token else jnp.ones_like(lengths)
        loss = jr.bind(jr.preferences.simpo, beta=BETA, gamma=GAMMA)
        weight = 1.0 if per_token else 1.0 / lengths.mean()

        def objective(logits):
            logp = jax.nn.log_softmax(logits, axis=-1)
            each = jnp.take_along_axis(logp[None], tokens[..., None], axis=-1)[..., 0]
            sums = weight * jnp.sum(jnp.where(mask, each, 0.0), axis=-1)
            sides = {"chosen_lengths": scale[chosen], "rejected_lengths": scale[rejected]}
            return jnp.mean(loss(sums[chosen], sums[rejected], **sides))

        optimizer = optax.adam(0.02)

        def step(carry, _):
            logits, state = carry
            updates, state = optimizer.update(jax.grad(objective)(logits), state)
            return (optax.apply_updates(logits, updates), state), expectations(logits)

        (last, _), path = jax.lax.scan(step, (start, optimizer.init(start)), None, STEPS)
        return jax.tree.map(lambda x, y: jnp.append(x, y), path, expectations(last))

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Means and sums on the same pairs."""
    keys = jax.random.split(jax.random.key(seed), 4 if quick else 32)
    length, good = {}, {}
    for name, per_token in (("means", True), ("sums", False)):
        length[name], good[name] = map(np.asarray, train(keys, per_token=per_token))
    grown = {name: value[:, -1] - value[:, 0] for name, value in length.items()}
    measures = [
        harness.Measure(what, harness.mean(values, "sets of pairs"), *side)
        for what, values, side in (
            (
                "tokens that an answer grew by, means less sums",
                grown["means"] - grown["sums"],
                ("below", 0.0),
            ),
            ("tokens that an answer grew by, sums", grown["sums"], ("above", 0.5)),
            (
                "share of good words, means less sums",
                good["means"][:, -1] - good["sums"][:, -1],
                ("above", -0.02),
            ),
        )
    ]
    facts = {f"expected length after training, {x}": float(length[x][:, -1].mean()) for x in length}
    facts |= {f"share of good words, {x}": float(good[x][:, -1].mean()) for x in good}
    every = range(0, STEPS + 1, 10)
    series = []
    for name, values in length.items():
        each = [harness.mean(values[:, step], "sets of pairs") for step in every]
        series.append(harness.Series(name, list(every), *zip(*(x[:3] for x in each), strict=True)))
    plot = harness.Plot("steps", "expected tokens of an answer", series)
    return harness.Claim(measures, plot, facts)
