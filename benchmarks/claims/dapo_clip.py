"""A wider upper clip keeps a policy more diverse at the same accuracy, and costs none.

32 prompts of 16 answers, four of them right, with a logit each that begins normal with deviation 2.
In each step 16 rollouts a prompt, the advantages of `grpo` and eight updates of the same rollouts,
by `dapo_clip` (0.2 below, 0.28 above) or by `ppo_clip` (0.2 both ways), without dual clip; each at
the learning rate of a grid with which it is most accurate after 60 steps on a third of the seeds.

The numbers are of the other seeds, and exact for the policy: the entropy where the mean accuracy
first reaches 0.9, wider less even clip, in nats, where 0 or below refutes the claim; the entropy
after 60 steps, by the same comparison; and the accuracy after 60 steps, where -0.02 or below
refutes that it costs none. A run that never gets there counts with its last entropy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "2503.14476"
PROMPTS, ANSWERS, RIGHT, GROUP = 32, 16, 4, 16
UPDATES, STEPS, ACCURACY, SPREAD = 8, 60, 0.9, 2.0
RATES = (3.2, 12.8, 51.2, 204.8, 819.2, 3276.8, 13107.2)
CLIPS = {
    "dapo_clip": functools.partial(jr.surrogates.dapo_clip, dual_clip=None),
    "ppo_clip": jr.surrogates.ppo_clip,
}


@functools.partial(jax.jit, static_argnames="clip")
def train(keys, rate, *, clip: str):
    """Exact accuracy and entropy ``[seeds, STEPS]``, means over prompts, after each step."""

    def step(logits, key):
        answers = jax.random.categorical(key, logits[:, None], shape=(PROMPTS, GROUP))
        advantages = jr.advantages.grpo((answers < RIGHT).astype(jnp.float32))

        def taken(logits):
            logp = jax.nn.log_softmax(logits)
            return jnp.take_along_axis(logp, answers, axis=-1)[..., None]

        old_logp = taken(logits)
        mask = jnp.ones(old_logp.shape, bool)

        def loss(logits):
            terms = CLIPS[clip](taken(logits), old_logp, advantages, mask)
            return PROMPTS * jr.aggregate.weighted_sum(terms, jr.aggregate.token_mean(mask))

        def update(logits, _):
            return logits - rate * jax.grad(loss)(logits), None

        logits, _ = jax.lax.scan(update, logits, None, UPDATES)
        logp = jax.nn.log_softmax(logits)
        accuracy = jnp.mean(jnp.sum(jnp.exp(logp[:, :RIGHT]), axis=-1))
        return logits, (accuracy, -jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1)))

    def one(key):
        first, second = jax.random.split(key)
        start = SPREAD * jax.random.normal(first, (PROMPTS, ANSWERS))
        return jax.lax.scan(step, start, jax.random.split(second, STEPS))[1]

    return jax.vmap(one)(keys)


def where_accurate(accuracy, entropy) -> np.ndarray:
    """Entropy ``[seeds]`` at the first step of the accuracy; the last one if there is none."""
    reached = accuracy >= ACCURACY
    place = np.where(reached.any(-1), reached.argmax(-1), STEPS - 1)
    return np.take_along_axis(entropy, place[:, None], axis=-1)[:, 0]


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both clips at every learning rate, from the same seeds."""
    seeds, rates = (6, RATES[3:4]) if quick else (24, RATES)
    keys, taken = jax.random.split(jax.random.key(seed), seeds), _chosen.counted(seeds)
    accuracy, entropy, facts = {}, {}, {}
    for clip in CLIPS:
        found = [train(keys, rate, clip=clip) for rate in rates]
        right, nats = (np.stack([np.asarray(x[i], np.float64) for x in found]) for i in (0, 1))
        place = _chosen.best(f"learning rate, {clip}", rates, right[..., -1], quick=quick)
        accuracy[clip], entropy[clip] = right[place, taken], nats[place, taken]
        facts[f"best learning rate, {clip}"] = rates[place]
        facts[f"accuracy after {STEPS} steps, {clip}"] = accuracy[clip][:, -1].mean()
        facts[f"entropy after {STEPS} steps, {clip}, nats"] = entropy[clip][:, -1].mean()
        facts[f"runs that reach accuracy {ACCURACY:g}, {clip}"] = (
            (accuracy[clip] >= ACCURACY).any(-1).mean()
        )
    wide, even = CLIPS
    at = {clip: where_accurate(accuracy[clip], entropy[clip]) for clip in CLIPS}
    measures = [
        harness.Measure(
            f"{what}, wider less even clip", harness.mean(values, "seeds"), "above", low
        )
        for what, values, low in (
            (f"entropy at accuracy {ACCURACY:g}, nats", at[wide] - at[even], 0.0),
            (
                f"entropy after {STEPS} steps, nats",
                entropy[wide][:, -1] - entropy[even][:, -1],
                0.0,
            ),
            (
                f"accuracy after {STEPS} steps",
                accuracy[wide][:, -1] - accuracy[even][:, -1],
                -0.02,
            ),
        )
    ]
    series = [harness.Series(clip, accuracy[clip].mean(0), entropy[clip].mean(0)) for clip in CLIPS]
    return harness.Claim(measures, harness.Plot("accuracy", "entropy, nats", series), facts)
