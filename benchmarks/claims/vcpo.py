"""On stale data the off-policy baseline and a step that follows the sample size vary less.

Answers of ten words out of two, under a policy that sees the word before, and samplers whose logits
differ by a normal error. An answer is right if it is among the best by a random score of its words,
as many as the sampler needs to be right in 0.3 of its answers or more. Batches of 8 groups of 8,
weights of whole answers up to 8, as the recipe `vcpo` has them. For each draw of task and policies,
many batches give the variance of the update and the distance of the update from the policy gradient
(root mean square).
The number is the variance with the baseline of `vcpo_advantage`, with exact norms of the scores,
over that with the group mean (`dr_grpo`), at an error of the logits of 0.5, as a geometric mean
over the draws; 1 or above refutes the claim. As a baseline that follows its own heaviest answer
also shrinks the update, the variance over the squared mean and the distance from the policy
gradient are compared too. Then `ess_lr_scale`, power 1: it must lower the variance over the squared
mean, for the sum of four updates of errors 0, 0.25, 0.5 and 1, and with the baseline it must keep
the variance of the update from exceeding that on policy, as it does without either.

Three more numbers do not. A single update of mixed errors counts what the factor itself
varies, which is more than it saves. Where all batches are as stale, the factor is nearly the same
for all: a smaller learning rate, which changes nothing relative to the mean. And with baseline and
factor together the update is so much shorter that it is farther from the policy gradient.

Whether the update is also nearer to the policy gradient depends on the task. In an earlier form of
it, with right answers of 0.3 of the policy's probability in place of the sampler's, the distance
was that with the group mean (1.02 times, 0.99 to 1.05), and the other ratios were alike.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness

PAPER = "2602.17616"
WORDS, LENGTH = 2, 10
GROUPS, GROUP = 8, 8
CAP = 8.0
ERRORS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
ERROR = 0.5
RIGHT = 0.3

_WEIGHTS = jr.bind(jr.corrections.importance_weights, level="sequence", cap=CAP)


def make_task(key, error):
    """Policy, sampler, all answers' rewards, and the policy gradient."""
    keys = jax.random.split(key, 3)
    tokens = _sequences.fixed(WORDS, LENGTH)
    logits = jax.random.normal(keys[0], (WORDS + 1, WORDS))
    stale = logits + error * jax.random.normal(keys[1], logits.shape)
    merit = _sequences.logp(jax.random.normal(keys[2], logits.shape), tokens).sum(-1)
    order = jnp.argsort(-merit)
    chance = jnp.exp(_sequences.logp(stale, tokens).sum(-1))[order]
    rewards = jnp.zeros(len(tokens)).at[order].set(jnp.cumsum(chance) - chance < RIGHT)

    def value(logits):
        return jnp.sum(jnp.exp(_sequences.logp(logits, tokens).sum(-1)) * rewards)

    return logits, stale, rewards, jax.grad(value)(logits).ravel()


def updates(key, age, logits, stale, rewards):
    """The update by each method from one batch, and its share of effective samples.

    The age is how far the sampler has moved from the policy, as a share of the whole way.
    """
    stale = logits + age * (stale - logits)
    tokens = _sequences.fixed(WORDS, LENGTH)
    chance = _sequences.logp(stale, tokens).sum(-1)
    drawn = _sequences.draw(key, chance, (GROUPS, GROUP))
    tokens, rewards = jnp.asarray(tokens)[drawn], rewards[drawn]
    mask = jnp.ones(tokens.shape, bool)
    logp, behavior_logp = _sequences.logp(logits, tokens), _sequences.logp(stale, tokens)
    scores = _sequences.scores(logits, tokens).sum(axis=2).reshape(GROUPS, GROUP, -1)
    weights = _WEIGHTS(logp, behavior_logp, mask)
    optimal = functools.partial(
        jr.advantages.vcpo_advantage,
        rewards,
        old_logp=logp,
        behavior_logp=behavior_logp,
        mask=mask,
        scale="none",
    )
    advantages = {
        "mean": jr.advantages.dr_grpo(rewards),
        "optimal": optimal(grad_sq_norms=jnp.sum(scores**2, axis=-1)),
        "optimal, lengths": optimal(grad_sq_norms=None),
    }
    found = {}
    for name, advantage in advantages.items():
        each = _sequences.weights(
            jr.surrogates.reinforce, logp, None, advantage, mask, weight=weights
        )
        # The weight is one a sequence, so is the advantage, and so is what multiplies the scores.
        found[name] = jnp.mean(each[..., :1] * scores, axis=(0, 1))
    scale = jr.corrections.ess_lr_scale(
        rewards, old_logp=logp, behavior_logp=behavior_logp, mask=mask, power=1.0
    )
    found["mean, scaled"] = scale * found["mean"]
    found["both"] = scale * found["optimal"]
    return found, scale


@functools.partial(jax.jit, static_argnames="repeats")
def measure(keys, error, ages, *, repeats: int):
    """From batches of each age: moments of the update by method and draw, and effective samples.

    The moments are variance (within an age, and in all), squared mean and mean squared distance
    from the policy gradient.
    """

    def draw(key):
        first, second = jax.random.split(key)
        logits, stale, rewards, true = make_task(first, error)
        batch = functools.partial(updates, logits=logits, stale=stale, rewards=rewards)
        batch = jax.vmap(jax.vmap(batch, in_axes=(0, None)))
        found, scale = batch(jax.random.split(second, (len(ages), repeats)), ages)
        size = jnp.sum(true**2)

        def moments(x):
            within = jnp.sum(jnp.var(x, axis=1, ddof=1)) / len(ages)
            mean = jnp.mean(x, axis=(0, 1))
            # The square of an estimated mean has its variance in it.
            square = jnp.sum(mean**2) - within / (len(ages) * repeats)
            distance = jnp.mean(jnp.sum((x - true) ** 2, axis=-1))
            return jnp.stack([within, square, distance, jnp.sum(jnp.var(x, axis=(0, 1)))]) / size

        return jax.tree.map(moments, found), jnp.mean(scale)

    return jax.lax.map(draw, keys)


def relative(x):
    """Variance over squared mean, ``[draws]``."""
    return x[:, 0] / np.maximum(x[:, 1], 0.01 * x[:, 0] + 1e-9)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Draws at every staleness."""
    draws, repeats = (16, 128) if quick else (400, 256)
    keys = jax.random.split(jax.random.key(seed), draws)
    draw = functools.partial(measure, keys)
    same = [draw(error, jnp.ones(1), repeats=repeats) for error in ERRORS]
    curves = jax.tree.map(np.asarray, same)
    found, _ = curves[ERRORS.index(ERROR)]
    ages = jnp.array([0.0, 0.5, 1.0, 2.0])
    mixed, _ = jax.tree.map(np.asarray, draw(ERROR, ages, repeats=repeats // 4))

    fresh, _ = curves[0]

    def over(first, second, statistic):
        ratio = np.log(statistic(first) / statistic(second))
        center, low, high, how = harness.mean(ratio, "draws")
        center, low, high = np.exp((center, low, high)).tolist()
        return harness.Estimate(center, low, high, f"{how}, of the logarithm")

    when = f"sampler's error {ERROR:g}"
    measures = []
    for what, statistic, name, other in (
        ("variance", variance, "optimal", "mean"),
        ("variance over squared mean", relative, "optimal", "mean"),
        ("distance from the policy gradient", distance, "optimal", "mean"),
    ):
        words = f"{what}, {LABELS[name]} over {LABELS[other]}, {when}"
        estimate = over(found[name], found[other], statistic)
        measures.append(harness.Measure(words, estimate, "below", 1.0))
    for name, side in (("mean", "above"), ("both", "below")):
        words = f"variance, {LABELS[name]}, {when} over that on policy"
        estimate = over(found[name], fresh["mean"], variance)
        measures.append(harness.Measure(words, estimate, side, 1.0))
    words = (
        f"variance over squared mean, {LABELS['mean, scaled']} over {LABELS['mean']}, mixed errors"
    )
    estimate = over(mixed["mean, scaled"], mixed["mean"], relative)
    measures.append(harness.Measure(words, estimate, "below", 1.0))
    single = over(mixed["mean, scaled"], mixed["mean"], lambda x: x[:, 3] / x[:, 1])
    alike = over(found["mean, scaled"], found["mean"], relative)
    far = over(found["both"], found["mean"], distance)
    for what, estimate in (
        (f"{words}, with what the factor itself varies", single),
        (words.replace("mixed errors", when), alike),
        (f"distance from the policy gradient, {LABELS['both']} over {LABELS['mean']}, {when}", far),
    ):
        measures.append(harness.Measure(what, estimate, "below", 1.0))
    facts, series = {}, []
    for other in ("optimal, lengths", "both"):
        for what, statistic in (
            ("variance", variance),
            ("variance over squared mean", relative),
            ("distance from the policy gradient", distance),
        ):
            if (other, what) == ("both", "distance from the policy gradient"):
                continue  # measured above
            value = over(found[other], found["mean"], statistic).value
            facts[f"{what}, {LABELS[other]} over {LABELS['mean']}, {when}"] = value
    for error, (_, scale) in zip(ERRORS, curves, strict=True):
        facts[f"share of effective samples, sampler's error {error:g}"] = np.mean(scale)
    for name in ("mean", "optimal", "mean, scaled", "both"):
        shown = [np.median(relative(curve[name])) for curve, _ in curves]
        series.append(harness.Series(LABELS[name], ERRORS, shown))
    label = "variance over squared mean of the update"
    plot = harness.Plot("error of the sampler's logits", label, series, log="y")
    return harness.Claim(measures, plot, facts)


LABELS = {
    "mean": "group mean",
    "optimal": "off-policy baseline",
    "optimal, lengths": "off-policy baseline of lengths",
    "mean, scaled": "group mean with scaled step",
    "both": "off-policy baseline with scaled step",
}


def variance(x):
    return x[:, 0]


def distance(x):
    return np.sqrt(x[:, 2])
