"""Labels of steps train a reward model that chooses better among many solutions than outcomes do.

Solutions of six steps; a step is a normal vector of 16 numbers and correct with a probability that
is logistic in them. A solution of correct steps has the right answer, one with a mistake has it in
a tenth of cases. Two models score a solution by the product of its steps' logistic scores, linear
in the vectors, so that they differ in their labels alone: `step_rewards` on the steps up to the
first mistake, and `process_reward` of the product on the answer. Both train on the same solutions
by 300 of Adam's steps, with a ridge of 0.01.

The number is the share of right answers among the best of 64 new solutions, with labels of steps
less that with outcomes, from 64 training solutions; 0 or below refutes the claim, and likewise from
256. The share of choices whose answer is right although a step is wrong must be smaller too, from
256 solutions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2305.20050"
STEPS, WIDTH, LUCK, RIDGE = 6, 16, 0.1, 0.01
SLOPE, OFFSET = 3.0, 1.5
SIZES = (32, 64, 256)
FEW, MANY = 64, 256
PROMPTS, CHOICES, UPDATES = 64, 64, 300


def draw(key, direction, shape):
    """Vectors ``[*shape, STEPS, WIDTH]``, whether each step is correct, and each answer right."""
    of_vectors, of_steps, of_luck = jax.random.split(key, 3)
    vectors = jax.random.normal(of_vectors, (*shape, STEPS, WIDTH))
    correct = jax.random.bernoulli(of_steps, jax.nn.sigmoid(vectors @ direction + OFFSET))
    right = jnp.all(correct, axis=-1) | jax.random.bernoulli(of_luck, LUCK, shape)
    return vectors, correct, right


def scores(params, vectors):
    """Logit of each step."""
    return vectors @ params[:-1] + params[-1]


def log_product(logits):
    return jnp.sum(jax.nn.log_sigmoid(logits), axis=-1)


def of_steps(params, vectors, correct, right):
    """The mean loss of the steps up to the first mistake."""
    logits = scores(params, vectors)
    ids = jnp.broadcast_to(jnp.arange(STEPS), logits.shape)
    mistakes = jnp.cumsum(~correct, axis=-1)
    there = mistakes - ~correct == 0
    loss = jr.preferences.step_rewards(
        logits, None, jnp.zeros(len(logits)), jnp.ones(logits.shape, bool),
        turn_rewards=correct.astype(jnp.float32), turn_where=there, turn_ids=ids,
    )  # fmt: skip
    return jnp.sum(loss) / jnp.sum(there)


def of_outcomes(params, vectors, correct, right):
    """The mean loss of the answers."""
    log_right = jnp.minimum(log_product(scores(params, vectors)), -1e-6)
    logit = log_right - jnp.log(-jnp.expm1(log_right))
    labels = right.astype(jnp.float32)
    marks = jnp.ones((len(labels), 1), bool)
    return jnp.mean(jr.preferences.process_reward(logit[:, None], labels[:, None], marks))


LABELS = {"steps": of_steps, "outcomes": of_outcomes}


@functools.partial(jax.jit, static_argnames=("labels", "size", "updates"))
def choose(keys, *, labels: str, size: int, updates: int):
    """Shares ``[seeds]`` of right answers among the choices, and of those right by luck."""

    def one(key):
        of_direction, of_training, of_choices = jax.random.split(key, 3)
        direction = jax.random.normal(of_direction, (WIDTH,))
        direction = SLOPE * direction / jnp.linalg.norm(direction)
        data = draw(of_training, direction, (size,))

        def objective(params):
            return LABELS[labels](params, *data) + RIDGE * jnp.sum(params**2)

        optimizer = optax.adam(0.05)

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(objective)(params), state)
            return (optax.apply_updates(params, updates), state), None

        start = jnp.zeros(WIDTH + 1)
        (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), None, updates)
        vectors, correct, right = draw(of_choices, direction, (PROMPTS, CHOICES))
        chosen = jnp.argmax(log_product(scores(params, vectors)), axis=-1)[:, None]
        answer = jnp.take_along_axis(right, chosen, axis=-1)
        sound = jnp.take_along_axis(jnp.all(correct, axis=-1), chosen, axis=-1)
        return jnp.mean(answer), jnp.mean(answer & ~sound)

    return jax.lax.map(one, keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both labels on the same solutions."""
    seeds, updates = (3, UPDATES // 3) if quick else (24, UPDATES)
    keys = jax.random.split(jax.random.key(seed), seeds)
    sizes = (FEW, MANY) if quick else SIZES

    def measured(labels, size):
        shares = choose(keys, labels=labels, size=size, updates=updates)
        return [np.asarray(x, np.float64) for x in shares]

    found = {labels: {size: measured(labels, size) for size in sizes} for labels in LABELS}

    def less(size, which):
        values = (found[labels][size][which] for labels in LABELS)
        return harness.mean(np.subtract(*values), "seeds")

    what = f"right answers among the best of {CHOICES}, steps less outcomes"
    measures = [
        harness.Measure(f"{what}, {size} training solutions", less(size, 0), "above", 0.0)
        for size in (FEW, MANY)
    ]
    words = f"choices right by luck, steps less outcomes, {MANY} training solutions"
    measures.append(harness.Measure(words, less(MANY, 1), "below", 0.0))
    facts = {
        f"right answers among the best of {CHOICES}, {labels}, {size} training solutions": values[
            0
        ].mean()
        for labels, by_size in found.items()
        for size, values in by_size.items()
    }
    series = []
    for labels, by_size in found.items():
        centers = [harness.mean(by_size[size][0], "seeds") for size in sizes]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(labels, sizes, value, low, high))
    label = f"right answers among the best of {CHOICES}"
    return harness.Claim(
        measures, harness.Plot("training solutions", label, series, log="x"), facts
    )
