"""Where right answers are longer or shorter, a baseline weighted by length lowers the variance.

Answers of up to eight words, one of which ends them, under a policy that sees the word before, with
its ending probability drawn for each task; an answer is right with a probability that depends on
its words and on its length, rising or falling. Many groups of eight give the variance of the policy
gradient over the squared length of its mean, so that what a baseline of its own rewards shrinks
does not count. The number is that with `opo` over that with the group mean (`dr_grpo`), as a
geometric mean over tasks; 1 or above refutes the claim. It is taken where long answers are right
more often, where short ones are, and where the length does not matter: there both baselines
estimate the same number, and nothing can be gained.

The assumption is measured as well: the correlation of an answer's length with the squared norm of
its score. The exact optimal baseline (rewards weighted by that squared norm, over all answers),
listed beside, shows what was to be had.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2505.23585"
WORDS, LONGEST = 3, 8
GROUP = 8
# How much the log-odds of being right change over the range of lengths.
SLOPES = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)
SLOPE = 4.0
KINDS = {SLOPE: "long answers right", -SLOPE: "short answers right", 0.0: "no relation"}
NAMES = {
    "opo": "length-weighted mean",
    "mean": "group mean",
    "known mean": "exact mean",
    "known length": "exact length-weighted mean",
    "known best": "exact optimal baseline",
}


def make_task(key, slope):
    """Log-probability, reward, score and length of all answers, and their mask."""
    first, second = jax.random.split(key)
    tokens, mask = _sequences.ending(WORDS, LONGEST)
    logits = jax.random.normal(first, (WORDS + 1, WORDS))
    # The mean length is from 1.5 to 8.
    logits = logits.at[:, 0].add(jax.random.uniform(second, (), minval=-3.0, maxval=1.0))
    logp = _sequences.logp(logits, tokens, mask)
    scores = _sequences.scores(logits, tokens) * mask[..., None, None]
    lengths = jnp.asarray(mask.sum(-1), jnp.float32)
    liked = jnp.sum((tokens == 1) * mask, axis=-1) - jnp.sum((tokens == 2) * mask, axis=-1)
    rewards = jax.nn.sigmoid(slope * (lengths / LONGEST - 0.5) + 3.0 * liked / lengths)
    return logp.sum(-1), rewards, scores.sum(1).reshape(len(tokens), -1), lengths, mask


def weighted(chance, rewards, weights):
    return jnp.sum(chance * weights * rewards) / jnp.sum(chance * weights)


@functools.partial(jax.jit, static_argnames="repeats")
def measure(keys, slope, *, repeats: int):
    """Relative variance by method, ``[tasks]``, and the correlation of length and squared norm."""

    def task(key):
        first, second, third = jax.random.split(key, 3)
        logp, odds, scores, lengths, mask = make_task(first, slope)
        chance, norms = jnp.exp(logp), jnp.sum(scores**2, axis=-1)
        drawn = _sequences.draw(second, logp, (repeats, GROUP))
        rewards = jax.random.bernoulli(third, odds[drawn]).astype(jnp.float32)
        advantages = {
            "opo": jr.advantages.opo(rewards, jnp.asarray(mask)[drawn]),
            "mean": jr.advantages.dr_grpo(rewards),
            "known mean": rewards - weighted(chance, odds, 1.0),
            "known length": rewards - weighted(chance, odds, lengths),
            "known best": rewards - weighted(chance, odds, norms),
        }

        def relative(advantage):
            each = jnp.mean(advantage[..., None] * scores[drawn], axis=1)
            mean = jnp.mean(each, axis=0)
            variance = jnp.sum(jnp.var(each, axis=0, ddof=1))
            return variance / (jnp.sum(mean**2) - variance / repeats)

        spread = jnp.stack([lengths, norms]) - jnp.stack([lengths, norms]) @ chance[:, None]
        moments = spread * chance @ spread.T
        correlation = moments[0, 1] / jnp.sqrt(moments[0, 0] * moments[1, 1])
        return {name: relative(value) for name, value in advantages.items()}, correlation

    return jax.lax.map(task, keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """All slopes."""
    tasks, repeats = (24, 512) if quick else (100, 2048)
    keys = jax.random.split(jax.random.key(seed), tasks)
    curves = {
        slope: jax.tree.map(np.asarray, measure(keys, slope, repeats=repeats)) for slope in SLOPES
    }

    def over(found, name):
        ratio = np.log(found[name] / found["mean"])
        center, low, high, how = harness.mean(ratio, "tasks")
        center, low, high = np.exp((center, low, high)).tolist()
        return harness.Estimate(center, low, high, f"{how}, of the logarithm")

    what = "relative variance over that of the group mean"
    measures, facts = [], {}
    for slope, kind in KINDS.items():
        words = f"{what}, {NAMES['opo']}, {kind}"
        found, _ = curves[slope]
        measures.append(harness.Measure(words, over(found, "opo"), "below", 1.0))
        for name in ("known mean", "known length", "known best"):
            facts[f"{what}, {NAMES[name]}, {kind}"] = over(found, name).value
    _, correlation = curves[0.0]
    facts["correlation of length and squared norm of the score, mean of tasks"] = correlation.mean()
    facts["tasks where that correlation is below 0.3"] = (correlation < 0.3).mean()
    series = []
    for name in ("opo", "known mean", "known length", "known best"):
        centers = [over(found, name) for found, _ in curves.values()]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(NAMES[name], SLOPES, value, low, high))
    label = "change of the log-odds from no words to eight"
    return harness.Claim(measures, harness.Plot(label, what, series, line=1.0), facts)
