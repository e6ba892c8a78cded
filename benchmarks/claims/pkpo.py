"""Training for pass@k reaches a higher pass@k than training for pass@1.

128 prompts of 32 answers, a linear softmax policy over random features that all prompts share, and
one right answer a prompt, which a hidden direction of the features and noise decide; so not all
prompts can be solved at once. Both methods train with the policy gradient on 16 rollouts of every
prompt a step, `pkpo` with k = 4 (times k, for the gradient of pass@4 itself) and `rloo`, 160 steps
from the uniform policy, each at the best of eight learning rates by its own aim, chosen on other
tasks. The number is the exact pass@4 at the end of `pkpo` less that of `rloo`, as a mean over
tasks; 0 or below refutes the claim. The same of pass@1 shows the price: it must be below 0, or
`pkpo` is just the better method. With `loo`, which is biased, it is listed beside.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "2505.15201"
PROMPTS, ANSWERS, WIDTH = 128, 32, 16
ROLLOUTS, K = 16, 4
STEPS, POINTS = 160, 8
RATES = tuple(4.0**power for power in range(8))
NOISE = 1.5


def pass_at_k(rewards, *, loo: bool):
    return K * jr.advantages.pkpo(rewards, k=K, loo=loo)


METHODS = {
    "pkpo": functools.partial(pass_at_k, loo=False),
    "pkpo, loo": functools.partial(pass_at_k, loo=True),
    "rloo": jr.advantages.rloo,
}
PASSES = (1, K)
AIMS = {"pkpo": K, "pkpo, loo": K, "rloo": 1}


@functools.partial(jax.jit, static_argnames="name")
def train(keys, rate, *, name: str):
    """Mean pass@1 and pass@k along the training, ``[tasks, points, 2]``."""

    def task(key):
        keys = jax.random.split(key, 4)
        features = jax.random.normal(keys[0], (PROMPTS, ANSWERS, WIDTH)) / jnp.sqrt(WIDTH)
        merit = features @ jax.random.normal(keys[1], (WIDTH,))
        merit = merit + NOISE * jax.random.normal(keys[2], merit.shape)
        right = jnp.argmax(merit, axis=-1)

        def step(params, key):
            logits = features @ params
            answers = jax.random.categorical(key, logits[:, None], shape=(PROMPTS, ROLLOUTS))
            rewards = (answers == right[:, None]).astype(jnp.float32)
            advantages = METHODS[name](rewards)

            def loss(params):
                logp = jax.nn.log_softmax(features @ params)
                logp = jnp.take_along_axis(logp, answers, axis=-1)[..., None]
                mask = jnp.ones(logp.shape, bool)
                tokens = jr.surrogates.reinforce(logp, None, advantages, mask)
                return jr.aggregate.weighted_sum(tokens, jr.aggregate.sequence_sum(mask))

            return params - rate * jax.grad(loss)(params), None

        def stretch(params, key):
            params, _ = jax.lax.scan(step, params, jax.random.split(key, STEPS // POINTS))
            chance = jax.nn.softmax(features @ params)[jnp.arange(PROMPTS), right]
            passes = jnp.stack([chance, 1.0 - (1.0 - chance) ** K])
            return params, jnp.mean(passes, axis=-1)

        return jax.lax.scan(stretch, jnp.zeros(WIDTH), jax.random.split(keys[3], POINTS))[1]

    return jax.lax.map(task, keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Trainings at every learning rate, which is chosen on a quarter of the tasks.

    The quick form takes one rate for all three.
    """
    tasks, rates = (4, RATES[2:3]) if quick else (20, RATES)
    keys = jax.random.split(jax.random.key(seed), tasks)
    found, facts = {}, {}
    for name in METHODS:
        curves = [np.asarray(train(keys, rate, name=name)) for rate in rates]
        aims = [curve[: tasks // 4, -1, PASSES.index(AIMS[name])].mean() for curve in curves]
        best = _chosen.highest(f"learning rate, {name}", rates, np.array(aims), quick=quick)
        found[name] = curves[best][tasks // 4 :]
        facts[f"learning rate, {name}"] = rates[best]
        for index, k in enumerate(PASSES):
            facts[f"pass@{k}, {name}"] = found[name][:, -1, index].mean()
    measures = []
    for index, side in ((1, "above"), (0, "below")):
        words = f"pass@{PASSES[index]}, pkpo less rloo"
        gain = found["pkpo"][:, -1, index] - found["rloo"][:, -1, index]
        measures.append(harness.Measure(words, harness.mean(gain, "tasks"), side, 0.0))
    series = []
    for name in METHODS:
        centers = [harness.mean(column, "tasks") for column in found[name][:, :, 1].T]
        value, low, high, _ = zip(*centers, strict=True)
        steps = [STEPS // POINTS * (point + 1) for point in range(POINTS)]
        series.append(harness.Series(name, steps, value, low, high))
    plot = harness.Plot("training step", f"pass@{K}", series)
    return harness.Claim(measures, plot, facts)
