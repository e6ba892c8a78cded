"""Weighing shortness among right answers alone never pushes a right answer down for its length.

Random groups of eight, lengths from 1 to 32 tokens, right with a probability of the prompt's own.
The signal of a rollout is minus the gradient of the loss by its log-probability, summed over its
tokens. The number is the share of right rollouts whose signal is negative: with `drpo_len` any such
rollout refutes the claim (one in a thousand is the threshold of the interval), with `grpo` on
rewards that a length penalty lowers (`overlong_rewards` over the whole length, factor 0.5) it is
above 0 if there is anything to repair.

That follows from the objective, and says nothing of the accuracy that training with it keeps. So 16
prompts are trained, of which each needs its own number of tokens (2 to 12 of 16) for an answer to
be right more often than not; the policy has a logit of stopping for each prompt and place, and
starts with long answers. Both ways are compared where the exact mean length first falls to ten
tokens, each at the strength (`lam`, or the factor of the penalty) and the learning rate that keep
most accuracy on a third of the seeds; the others count. The least penalty of the grid is the best
one. The last number is the accuracy with `drpo_len` less that with `grpo` and its penalty; 0 or
below refutes that decoupling keeps accuracy.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2510.04474"
ROLLOUTS, LENGTH = 8, 32
# What float32 may leave of a signal of 0.
_ZERO = 1e-7
FACTORS = (0.0, 0.125, 0.25, 0.5, 1.0)
# Of the training.
PROMPTS, PLACES, STEPS, TARGET = 16, 16, 600, 10.0
STRENGTHS = {
    "drpo_len": (0.00625, 0.025, 0.1, 0.4),
    "grpo": (0.125, 0.25, 0.5, 1.0, 2.0),
}
RATES = (0.4, 1.6, 6.4, 25.6)
# About the best, for the quick form.
QUICK_STRENGTHS = {"drpo_len": (0.1,), "grpo": (0.125,)}
QUICK_RATES = (1.6, 6.4)


def sample(key, prompts: int):
    """Right or wrong, mask, and log-probabilities under an old and a slightly newer policy."""
    keys = jax.random.split(key, 5)
    shape = (prompts, ROLLOUTS)
    chance = jax.random.uniform(keys[0], (prompts, 1), minval=0.1, maxval=0.9)
    right = jax.random.bernoulli(keys[1], chance, shape).astype(jnp.float32)
    lengths = jax.random.randint(keys[2], shape, 1, LENGTH + 1)
    mask = jnp.arange(LENGTH) < lengths[..., None]
    old_logp = -jax.random.exponential(keys[3], mask.shape)
    logp = old_logp + 0.05 * jax.random.normal(keys[4], mask.shape)
    return right, mask, old_logp, logp


def signals(loss, logp):
    """How much the loss of its group raises the log-probability of each rollout."""
    return -jnp.sum(jax.grad(loss)(logp), axis=-1) * len(logp)


@jax.jit
def drpo_signals(right, mask, old_logp, logp):
    advantages = jr.advantages.dr_grpo(right)
    weights = jr.aggregate.group_mean(mask)

    def loss(logp):
        tokens = jr.surrogates.drpo_len(logp, old_logp, advantages, mask, length=LENGTH)
        return jr.aggregate.weighted_sum(tokens, weights)

    return signals(loss, logp)


@jax.jit
def grpo_signals(right, mask, old_logp, logp, factor):
    rewards = jr.rewards.overlong_rewards(
        right, mask, max_length=LENGTH, buffer=LENGTH, factor=factor
    )
    advantages = jr.advantages.grpo(rewards)
    weights = jr.aggregate.sequence_mean(mask)

    def loss(logp):
        tokens = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
        return jr.aggregate.weighted_sum(tokens, weights)

    return signals(loss, logp)


def tokens_of(logits):
    """Log-probabilities of each place of each answer ``[prompts, lengths, places]``."""
    place, last = jnp.arange(PLACES), jnp.arange(PLACES)[:, None]
    stop = jnp.where(place == PLACES - 1, 0.0, jax.nn.log_sigmoid(logits))[:, None]
    go_on = jax.nn.log_sigmoid(-logits)[:, None]
    return jnp.where(place < last, go_on, jnp.where(place == last, stop, 0.0))


def drpo_loss(logp, right, mask, *, strength):
    advantages = jr.advantages.dr_grpo(right)
    tokens = jr.surrogates.drpo_len(logp, logp, advantages, mask, length=PLACES, lam=strength)
    return jr.aggregate.weighted_sum(tokens, jr.aggregate.group_mean(mask))


def grpo_loss(logp, right, mask, *, strength):
    rewards = jr.rewards.overlong_rewards(
        right, mask, max_length=PLACES, buffer=PLACES, factor=strength
    )
    advantages = jr.advantages.grpo(rewards)
    old = jax.lax.stop_gradient(logp)
    tokens = jr.surrogates.ppo_clip(logp, old, advantages, mask)
    return jr.aggregate.weighted_sum(tokens, jr.aggregate.sequence_mean(mask))


LOSSES = {"drpo_len": drpo_loss, "grpo": grpo_loss}


@functools.partial(jax.jit, static_argnames="name")
def shorten(keys, rate, strength, *, name: str):
    """By seed: whether the mean length fell to the target, and the accuracy where it did."""

    def one(key):
        first, second = jax.random.split(key)
        needed = jax.random.randint(first, (PROMPTS, 1), 2, 13)
        right = 0.05 + 0.9 * jax.nn.sigmoid(1.5 * (jnp.arange(1, PLACES + 1) - needed + 0.5))

        def step(carry, key):
            logits, done, accuracy = carry
            keys = jax.random.split(key)
            chance = tokens_of(logits).sum(-1)
            last = jax.random.categorical(keys[0], chance[:, None], shape=(PROMPTS, ROLLOUTS))
            rows = jnp.arange(PROMPTS)[:, None]
            rewards = jax.random.bernoulli(keys[1], right[rows, last]).astype(jnp.float32)
            mask = jnp.arange(PLACES) <= last[..., None]

            def loss(logits):
                return LOSSES[name](tokens_of(logits)[rows, last], rewards, mask, strength=strength)

            # Of the mean over prompts each prompt's logits have a part.
            logits = logits - rate * PROMPTS * jax.grad(loss)(logits)
            share = jnp.exp(tokens_of(logits).sum(-1))
            length = jnp.mean(share @ jnp.arange(1.0, PLACES + 1))
            now = (length <= TARGET) & ~done
            accuracy = jnp.where(now, jnp.mean(jnp.sum(share * right, axis=-1)), accuracy)
            return (logits, done | now, accuracy), None

        start = (jnp.full((PROMPTS, PLACES), -4.0), False, 0.0)
        (_, done, accuracy), _ = jax.lax.scan(step, start, jax.random.split(second, STEPS))
        return done, accuracy

    return jax.vmap(one)(keys)


def at_equal_length(seed: int, *, quick: bool):
    """The measure, and facts: strengths, learning rates and accuracies."""
    seeds = 3 if quick else 24
    strengths, rates = (QUICK_STRENGTHS, QUICK_RATES) if quick else (STRENGTHS, RATES)
    keys = jax.random.split(jax.random.key(seed), seeds)
    tuning, counted = slice(0, seeds // 3), slice(seeds // 3, None)
    kept, facts = {}, {}
    for name in LOSSES:
        best = -1.0
        for strength, rate in itertools.product(strengths[name], rates):
            done, accuracy = map(np.asarray, shorten(keys, rate, strength, name=name))
            if done.all() and accuracy[tuning].mean() > best:
                best, kept[name] = accuracy[tuning].mean(), accuracy[counted]
                facts[f"strength, {name}"], facts[f"learning rate, {name}"] = strength, rate
        facts[f"accuracy at {TARGET:g} tokens, {name}"] = kept[name].mean()
    measure = harness.Measure(
        f"accuracy at {TARGET:g} tokens, drpo_len less grpo with a penalty",
        harness.mean(kept["drpo_len"] - kept["grpo"], "seeds"),
        "above",
        0.0,
    )
    return measure, facts


def pushed_down(signal, right) -> int:
    """Number of right rollouts of negative signal."""
    return int(jnp.sum((right > 0) & (signal < -_ZERO)))


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both objectives, the second at several penalties."""
    batch = sample(jax.random.key(seed), 1_000 if quick else 20_000)
    right, mask = batch[0], batch[1]
    total = int(right.sum())
    drpo = drpo_signals(*batch)
    down = {factor: pushed_down(grpo_signals(*batch, factor), right) for factor in FACTORS}
    penalized = grpo_signals(*batch, 0.5)
    measures = [
        harness.Measure(
            "right rollouts pushed down by drpo_len",
            harness.share(pushed_down(drpo, right), total, "right rollouts"),
            "below",
            1e-3,
        ),
        harness.Measure(
            "right rollouts pushed down by grpo with a penalty of 0.5",
            harness.share(down[0.5], total, "right rollouts"),
            "above",
            0.01,
        ),
    ]
    measure, trained = at_equal_length(seed, quick=quick)
    measures.append(measure)
    mixed = jnp.any(right > 0, -1, keepdims=True) & jnp.any(right == 0, -1, keepdims=True)
    facts = {
        "least signal of a right rollout in a mixed group, drpo_len": jnp.min(
            jnp.where((right > 0) & mixed, drpo, jnp.inf)
        )
    }
    for factor in FACTORS:
        facts[f"right rollouts pushed down by grpo, penalty {factor:g}"] = down[factor] / total
    facts |= trained
    lengths = jnp.sum(mask, axis=-1)
    edges = range(1, LENGTH + 1)
    series = [
        harness.Series(
            name,
            list(edges),
            [
                float(jnp.mean(signal < -_ZERO, where=(right > 0) & (lengths == length)))
                for length in edges
            ],
        )
        for name, signal in (("drpo_len", drpo), ("grpo, penalty 0.5", penalized))
    ]
    plot = harness.Plot("tokens of the right rollout", "share that is pushed down", series)
    return harness.Claim(measures, plot, facts)
