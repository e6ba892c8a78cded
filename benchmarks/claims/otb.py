"""A baseline for each token, by how much gradient came before it, lowers the gradient's variance.

Answers of up to eight words, one of which ends them, under a policy that sees the word before, some
words of which are sure and others not; an answer is right with a probability that depends on its
words and its length. Many groups of eight give the variance of the policy gradient over the squared
length of its mean, so that what a baseline of its own rewards shrinks does not count. The number is
that with `otb` over that with the group mean (`dr_grpo`), as a geometric mean over tasks; 1 or
above refutes the claim. It is taken for logits that all places share, as in the tasks of the other
baselines, and for logits of each place alone, where the scores of two tokens have no common part.
Then against `opo`, which has one weight an answer, on shared logits.

With eight rollouts a baseline a token is estimated from few, and `opo` is as good or better; the
plot shows that it gains on `opo` as the groups grow, and most where places share nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2602.07078"
WORDS, LONGEST = 3, 8
SIZES = (2, 4, 8, 16)
GROUP = 8
KINDS = {"shared": "shared logits", "own": "logits of each place"}
NAMES = {
    "otb": "token baseline",
    "tail": "token baseline, zero tail",
    "opo": "length-weighted mean",
}


def make_task(key):
    """Policy, odds of being right, all answers and their mask."""
    keys = jax.random.split(key, 4)
    tokens, mask = _sequences.ending(WORDS, LONGEST)
    # After some words the policy is sure of the next, after others it is not.
    scale = jnp.exp(jax.random.uniform(keys[0], (WORDS + 1, 1), minval=-1.5, maxval=1.5))
    logits = scale * jax.random.normal(keys[1], (WORDS + 1, WORDS))
    logits = logits.at[:, 0].add(jax.random.uniform(keys[2], (), minval=-3.0, maxval=0.0))
    merit = jax.random.normal(keys[3], (WORDS + 1,))
    lengths = mask.sum(-1)
    liked = jnp.sum(merit[tokens] * mask, axis=-1) / lengths
    odds = jax.nn.sigmoid(3.0 * liked + 3.0 * merit[WORDS] * (lengths / LONGEST - 0.5))
    return logits, odds, tokens, mask


@functools.partial(jax.jit, static_argnames=("group", "repeats"))
def measure(keys, *, group: int, repeats: int):
    """Relative variance by kind of logits and method, ``[tasks]``."""

    def task(key):
        first, second, third = jax.random.split(key, 3)
        logits, odds, tokens, mask = make_task(first)
        logp = _sequences.logp(logits, tokens, mask)
        chance = logp.sum(-1)
        # Score of each token, [answers, T, D].
        scores = (_sequences.scores(logits, tokens) * mask[..., None, None]).reshape(
            *mask.shape, -1
        )
        spread = jr.advantages.sum_pi_squared(logits)[_sequences.states(tokens, WORDS)]
        drawn = _sequences.draw(second, chance, (repeats, group))
        rewards = jax.random.bernoulli(third, odds[drawn]).astype(jnp.float32)
        kept = jnp.asarray(mask)[drawn]
        token = functools.partial(
            jr.advantages.otb, rewards, kept, old_logp=logp[drawn], sum_pi_sq=spread[drawn]
        )
        advantages = {
            "otb": token(),
            "tail": token(zero_tail=True),
            "mean": jr.advantages.dr_grpo(rewards)[..., None] * kept,
            "opo": jr.advantages.opo(rewards, kept)[..., None] * kept,
        }

        def relative(each):
            mean = jnp.mean(each, axis=0)
            variance = jnp.sum(jnp.var(each, axis=0, ddof=1))
            # Not below its own error, where a task has next to no gradient.
            return variance / jnp.maximum(jnp.sum(mean**2) - variance / repeats, variance / repeats)

        def gradient(advantage, kind):
            sums = "rgt,rgtd->rd" if kind == "shared" else "rgt,rgtd->rtd"
            each = jnp.einsum(sums, advantage, scores[drawn]) / group
            return relative(each.reshape(repeats, -1))

        return {
            kind: {name: gradient(value, kind) for name, value in advantages.items()}
            for kind in KINDS
        }

    return jax.lax.map(task, keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both kinds of logits, and several sizes of groups."""
    tasks, repeats = (12, 128) if quick else (160, 512)
    keys = jax.random.split(jax.random.key(seed), tasks)
    curves = {
        size: jax.tree.map(np.asarray, measure(keys, group=size, repeats=repeats * GROUP // size))
        for size in SIZES
    }
    found = curves[GROUP]

    def over(found, name, other="mean"):
        ratio = np.log(found[name] / found[other])
        center, low, high, how = harness.mean(ratio, "tasks")
        center, low, high = np.exp((center, low, high)).tolist()
        return harness.Estimate(center, low, high, f"{how}, of the logarithm")

    what = "relative variance over that of the group mean"
    measures = [
        harness.Measure(f"{what}, otb, {label}", over(found[kind], "otb"), "below", 1.0)
        for kind, label in KINDS.items()
    ]
    words = "relative variance over that of opo, otb, shared logits"
    measures.append(harness.Measure(words, over(found["shared"], "otb", "opo"), "below", 1.0))
    facts = {}
    for kind, label in KINDS.items():
        for name in ("tail", "opo"):
            facts[f"{what}, {NAMES[name]}, {label}"] = over(found[kind], name).value
    series = []
    for kind, label in KINDS.items():
        for name in ("otb", "opo"):
            centers = [over(curve[kind], name) for curve in curves.values()]
            value, low, high, _ = zip(*centers, strict=True)
            series.append(harness.Series(f"{NAMES[name]}, {label}", SIZES, value, low, high))
    plot = harness.Plot("rollouts in a group", what, series, log="x", line=1.0)
    return harness.Claim(measures, plot, facts)
