"""One rollout a prompt against a tracked value has a gradient of less variance than groups.

256 prompts and a linear softmax policy over random features that all prompts share, trained with
`spo_tracker`, 64 prompts a step, each visited every four steps; so the tracked values lag behind a
policy that improves. At points of the training the policy gradient is estimated many times from 64
rollouts: of 64 prompts with `spo` and the tracked values, or of 8 prompts with `grpo` of 8.
Compared is the variance of the estimate over the squared length of its mean, so that the scale of
the advantages does not matter. The number is that of `spo` over that of `grpo`; 1 or above refutes
the claim. There are two tasks: of 8 answers one is right, or of 32 answers 1 to 31 are.

More prompts from as many rollouts are a part of it. What the tracker itself adds is the variance
over that of `spo` with the same value for all prompts. With many right answers it takes a third
away. With one it adds an eighth, and so would the exact success rates: where the policy is sure of
the one right answer the gradient of its log-probability is nearly 0, and so there is nothing left
for a baseline to take away, while a rare wrong answer counts more. This second task was added when
the first had shown no gain from the tracker.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2509.13232"
PROMPTS, WIDTH = 256, 32
# Answers of a prompt, and the most of them that are right; padded to the greatest number.
KINDS = {"one right answer": (8, 1), "many right answers": (32, 31)}
PADDED = 32
BATCH, GROUP = 64, 8
# Training steps between two points, and points.
STEPS, POINTS = 24, 8
LEARNING_RATE = 1.0

_TRACK = jr.advantages.spo_tracker(num_prompts=PROMPTS)


class Task(NamedTuple):
    """Of each prompt: features of its answers, 0 or minus infinity for padding, who is right."""

    features: jax.Array
    bias: jax.Array
    right: jax.Array


def make_task(key, answers, most) -> Task:
    """From 1 to ``most`` answers of a prompt are right: the best by a noisy linear judgment."""
    keys = jax.random.split(key, 4)
    shape = (PROMPTS, PADDED)
    features = jax.random.normal(keys[0], (*shape, WIDTH)) / jnp.sqrt(WIDTH)
    bias = jnp.where(jnp.arange(PADDED) < answers, 0.0, -jnp.inf)
    truth = jax.random.normal(keys[1], (WIDTH,))
    merit = features @ truth + 0.5 * jax.random.normal(keys[2], shape) + bias
    number = jax.random.randint(keys[3], (PROMPTS, 1), 1, most + 1)
    rank = jnp.argsort(jnp.argsort(-merit, axis=-1), axis=-1)
    return Task(features, jnp.broadcast_to(bias, shape), rank < number)


def sample(key, params, task: Task, ids, rollouts: int):
    """Rewards ``[P, rollouts]`` of some prompts, and the gradient of each log-probability."""
    features, bias, right = (x[ids] for x in task)
    logits = features @ params + bias
    answers = jax.random.categorical(key, logits[:, None], shape=(len(ids), rollouts))
    expected = jnp.einsum("pa,paw->pw", jax.nn.softmax(logits), features)
    taken = jnp.take_along_axis(features, answers[..., None], axis=1)
    rewards = jnp.take_along_axis(right, answers, axis=1).astype(jnp.float32)
    return rewards, taken - expected[:, None]


def success(params, task: Task):
    """The exact success rate of each prompt."""
    chances = jax.nn.softmax(task.features @ params + task.bias)
    return jnp.sum(chances, axis=-1, where=task.right)


def gradient(advantages, scores):
    return jnp.mean(advantages[..., None] * scores, axis=(0, 1))


def train(key, params, state, task: Task):
    """One pass over a part of the prompts for each step."""

    def step(carry, key):
        params, state, order = carry
        ids, order = order[:BATCH], jnp.roll(order, -BATCH)
        rewards, scores = sample(key, params, task, ids, 1)
        advantages, state = _TRACK.update(rewards, state, prompt_ids=ids)
        return (params + LEARNING_RATE * gradient(advantages, scores), state, order), None

    first, second = jax.random.split(key)
    start = (params, state, jax.random.permutation(first, PROMPTS))
    (params, state, _), _ = jax.lax.scan(step, start, jax.random.split(second, STEPS))
    return params, state


def estimates(key, params, state, task: Task):
    """One gradient by each method, from as many rollouts."""
    first, second, third = jax.random.split(key, 3)
    ids = jax.random.permutation(first, PROMPTS)[:BATCH]
    rewards, scores = sample(second, params, task, ids, 1)
    values = jr.advantages.beta_tracker_value(state, ids)
    single = jr.advantages.spo(rewards, values)
    known = jr.advantages.spo(rewards, success(params, task)[ids])
    blind = jr.advantages.spo(rewards, jnp.full_like(values, 0.5))
    few = ids[: BATCH // GROUP]
    group_rewards, group_scores = sample(third, params, task, few, GROUP)
    return {
        "spo": gradient(single, scores),
        "spo of the exact rates": gradient(known, scores),
        "spo without a tracker": gradient(blind, scores),
        "grpo": gradient(jr.advantages.grpo(group_rewards), group_scores),
        "rloo": gradient(jr.advantages.rloo(group_rewards), group_scores),
    }


def relative_variance(gradients):
    """Variance over the squared mean of gradients ``[n, width]``."""
    mean = jnp.mean(gradients, axis=0)
    variance = jnp.sum(jnp.var(gradients, axis=0, ddof=1))
    # The square of an estimated mean has its variance in it.
    return variance / (jnp.sum(mean**2) - variance / len(gradients))


@functools.partial(jax.jit, static_argnames="repeats")
def measure(key, answers, most, *, repeats: int):
    """Relative variances at each point of one training, and the success rate there."""
    first, second = jax.random.split(key)
    task = make_task(first, answers, most)

    def point(carry, key):
        params, state = carry
        first, second = jax.random.split(key)
        params, state = train(first, params, state, task)
        draw = functools.partial(estimates, params=params, state=state, task=task)
        found = jax.vmap(draw)(jax.random.split(second, repeats))
        found = {name: relative_variance(value) for name, value in found.items()}
        return (params, state), {**found, "success": jnp.mean(success(params, task))}

    start = (jnp.zeros(WIDTH), _TRACK.init())
    return jax.lax.scan(point, start, jax.random.split(second, POINTS))[1]


def trainings(kind: str, *, seed: int, quick: bool) -> dict[str, np.ndarray]:
    """What `measure` finds in several tasks, ``[tasks, points]``."""
    tasks, repeats = (3, 32) if quick else (16, 512)
    keys = jax.random.split(jax.random.key(seed), tasks)
    # One after the other, which is as fast on a few cores and takes less memory.
    found = [measure(key, *KINDS[kind], repeats=repeats) for key in keys]
    return {name: np.stack([task[name] for task in found], dtype=np.float64) for name in found[0]}


def over(found, name: str, other: str, point: int) -> harness.Estimate:
    """One method's relative variance over another's."""
    pair = (found[key][:, point] for key in (name, other))
    return harness.ratio(*pair, what="tasks")


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both kinds of tasks."""
    steps = [STEPS * (point + 1) for point in range(POINTS)]
    measures, facts, series = [], {}, []
    for kind in KINDS:
        found = trainings(kind, seed=seed, quick=quick)
        for name, other, point in (
            ("spo", "grpo", 0),
            ("spo", "grpo", POINTS - 1),
            ("spo", "spo without a tracker", POINTS - 1),
        ):
            what = f"relative variance, {name} over {other}, {kind}, {steps[point]} steps"
            measures.append(harness.Measure(what, over(found, name, other, point), "below", 1.0))
        for point in (0, POINTS - 1):
            when = f"{kind}, {steps[point]} steps"
            facts[f"success rate, {when}"] = found["success"][:, point].mean()
            for name, other in (
                ("spo", "rloo"),
                ("spo of the exact rates", "spo without a tracker"),
            ):
                value = over(found, name, other, point).value
                facts[f"relative variance, {name} over {other}, {when}"] = value
        for name in ("spo", "spo without a tracker", "grpo"):
            centers = [harness.mean(column, "tasks") for column in found[name].T]
            value, low, high, _ = zip(*centers, strict=True)
            series.append(harness.Series(f"{name}, {kind}", steps, value, low, high))
    label = "variance over squared mean of the gradient"
    return harness.Claim(measures, harness.Plot("training step", label, series, log="y"), facts)
