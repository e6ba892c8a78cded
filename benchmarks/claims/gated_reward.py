"""Step rewards help behind a gate of the outcome, and draw the policy away if they just add up.

Episodes of six turns on 16 tasks; a policy has a logit for each task, turn and one of three acts: a
useful call of a tool, an empty one, or none. Any call earns a step reward of 0.25, and an episode
succeeds with probability 0.02 + 0.96 sigmoid(3 (useful calls - 4)). The policy begins with 0.15,
0.35 and 0.5 of the three. Groups of eight train by the turn rewards and the returns of the recipe
`gated_reward`: with the gate at 0, with a gate that is always open (direct accumulation), and
without step rewards; each at the learning rate of a grid that is best for it on a third of the
seeds, by the exact success after 200 steps.

The numbers are of the other seeds: the success with the gate less that with direct accumulation,
and less that of the outcome alone; 0 or below refutes the claim. The share of empty calls with
direct accumulation less that with the gate must be above 0, or nothing was drawn away.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "2508.10548"
TASKS, TURNS, GROUP, STEPS = 16, 6, 8, 200
STEP_REWARD, NEEDED = 0.25, 4
START = (0.15, 0.35, 0.5)
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
# Threshold and weight of each way.
WAYS = {
    "gated": (0.0, 1.0),
    "accumulated": (-math.inf, 1.0),
    "outcome alone": (0.0, 0.0),
}


def succeeds(useful):
    return 0.02 + 0.96 * jax.nn.sigmoid(3.0 * (useful - NEEDED))


def expectations(logits):
    """Exact success, and share of empty calls, as means over the tasks."""
    probs = jax.nn.softmax(logits)
    # Distribution of the number of useful calls, one turn after the other.
    counts = jnp.zeros((TASKS, TURNS + 1)).at[:, 0].set(1.0)
    for turn in range(TURNS):
        p = probs[:, turn, :1]
        counts = counts * (1.0 - p) + jnp.roll(counts, 1, axis=-1) * p
    success = jnp.mean(counts @ succeeds(jnp.arange(TURNS + 1.0)))
    return success, jnp.mean(probs[..., 1])


@functools.partial(jax.jit, static_argnames="way")
def train(keys, rate, *, way: str):
    """Exact success and share of empty calls ``[seeds, STEPS]`` after each step."""
    threshold, weight = WAYS[way]

    def step(logits, key):
        of_acts, of_outcome = jax.random.split(key)
        logp = jax.nn.log_softmax(logits)
        acts = jax.random.categorical(of_acts, logp[:, None], shape=(TASKS, GROUP, TURNS))
        useful = jnp.sum(acts == 0, axis=-1)
        solved = jax.random.bernoulli(of_outcome, succeeds(useful)).astype(jnp.float32)
        last = jnp.arange(TURNS) == TURNS - 1
        rewards = jr.advantages.gate_turn_rewards(
            solved,
            step_rewards=jnp.where(acts < 2, STEP_REWARD, 0.0),
            turn_rewards=jnp.where(last, solved[..., None], 0.0),
            threshold=threshold,
            weight=weight,
        )
        advantages = jr.advantages.mc_turns(rewards)

        def loss(logits):
            logp = jax.nn.log_softmax(logits)[:, None]
            taken = jnp.take_along_axis(logp, acts[..., None], axis=-1)[..., 0]
            mask = jnp.ones(taken.shape, bool)
            terms = jr.surrogates.reinforce(taken, None, advantages, mask)
            return TASKS * jr.aggregate.weighted_sum(terms, jr.aggregate.token_mean(mask))

        logits = logits - rate * jax.grad(loss)(logits)
        return logits, expectations(logits)

    def one(key):
        start = jnp.broadcast_to(jnp.log(jnp.array(START)), (TASKS, TURNS, len(START)))
        return jax.lax.scan(step, start, jax.random.split(key, STEPS))[1]

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The three ways at every learning rate, from the same seeds."""
    seeds, rates = (6, RATES[4:5]) if quick else (24, RATES)
    keys, taken = jax.random.split(jax.random.key(seed), seeds), _chosen.counted(seeds)
    success, empty, facts = {}, {}, {}
    for way in WAYS:
        found = [train(keys, rate, way=way) for rate in rates]
        solved, calls = (np.stack([np.asarray(x[i]) for x in found]) for i in (0, 1))
        place = _chosen.best(f"learning rate, {way}", rates, solved[..., -1], quick=quick)
        success[way], empty[way] = solved[place, taken], calls[place, taken]
        facts[f"best learning rate, {way}"] = rates[place]
        facts[f"success after {STEPS} steps, {way}"] = success[way][:, -1].mean()
        facts[f"share of empty calls, {way}"] = empty[way][:, -1].mean()
    gated, accumulated, alone = WAYS
    measures = [
        harness.Measure(
            f"success after {STEPS} steps, gated less {other}",
            harness.mean(success[gated][:, -1] - success[other][:, -1], "seeds"),
            "above",
            0.0,
        )
        for other in (accumulated, alone)
    ]
    measures.append(
        harness.Measure(
            "share of empty calls, accumulated less gated",
            harness.mean(empty[accumulated][:, -1] - empty[gated][:, -1], "seeds"),
            "above",
            0.0,
        )
    )
    places = np.arange(4, STEPS, 5)
    series = []
    for way, values in success.items():
        centers = [harness.mean(values[:, place], "seeds") for place in places]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(way, places + 1, value, low, high))
    return harness.Claim(measures, harness.Plot("step", "success", series), facts)
