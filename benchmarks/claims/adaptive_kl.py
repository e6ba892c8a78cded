"""A coefficient that follows the measured KL holds it at a target, from any start and after shifts.

16 prompts of eight answers with normal rewards and a logit each, the reference uniform; in each
step eight rollouts a prompt, the advantages of `dr_grpo` and a penalty `kl_to_reference` (k2) whose
coefficient is that of the controller `adaptive_kl`, target 0.5 nats, horizon 512 sequences. It
starts at 0.01, 0.1, 1 or 10. After 400 steps all rewards are multiplied by four, for 400 more. The
exact KL is averaged over the last 100 steps of each half.

The number is the absolute logarithm of that KL over the target, at the end of the first half, the
largest over the four starts: log 1.25 or above refutes the claim. The same holds for the second
half. For comparison a fixed coefficient, of a grid the one whose KL in the first half is nearest to
the target on a third of the seeds: where it is not off by more than log 1.25 in the second half,
there is nothing to adapt to.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "1909.08593"
PROMPTS, ANSWERS, GROUP = 16, 8, 8
TARGET, HORIZON = 0.5, 512.0
STARTS = (0.01, 0.1, 1.0, 10.0)
FIXED = (0.1, 0.2, 0.4, 0.6, 0.8, 1.2, 1.6)
HALF, LAST, FACTOR, RATE = 400, 100, 4.0, 0.25
OFF = math.log(1.25)
WAYS = {
    "adaptive": functools.partial(jr.regularizers.adaptive_kl, target=TARGET, horizon=HORIZON),
    "fixed": jr.regularizers.fixed,
}


@functools.partial(jax.jit, static_argnames="way")
def train(keys, coef, *, way: str):
    """Exact mean KL to the reference ``[seeds, 2 HALF]`` before each step."""
    name = "initial" if way == "adaptive" else "coef"
    controller = WAYS[way](**{name: coef})
    ref_logp = jnp.full((PROMPTS, GROUP, 1), -math.log(ANSWERS))
    mask = jnp.ones(ref_logp.shape, bool)

    def one(key):
        first, second = jax.random.split(key)
        merit = jax.random.normal(first, (PROMPTS, ANSWERS))

        def step(carry, now):
            (logits, state), (number, key) = carry, now
            table = jax.nn.log_softmax(logits)
            answers = jax.random.categorical(key, table[:, None], shape=(PROMPTS, GROUP))
            rewards = jnp.take_along_axis(merit, answers, axis=-1)
            rewards = rewards * jnp.where(number < HALF, 1.0, FACTOR)
            advantages = jr.advantages.dr_grpo(rewards)

            def taken(logits):
                logp = jax.nn.log_softmax(logits)
                return jnp.take_along_axis(logp, answers, axis=-1)[..., None]

            old_logp = taken(logits)
            context = {}
            if way == "adaptive":
                context = {"old_logp": old_logp, "ref_logp": ref_logp, "mask": mask}
            coefficient, state = controller.update(rewards, state, **context)

            def loss(logits):
                logp = taken(logits)
                terms = jr.surrogates.reinforce(logp, None, advantages, mask)
                terms += jr.regularizers.kl_to_reference(
                    logp, ref_logp, mask, estimator="k2", coef=coefficient
                )
                return PROMPTS * jr.aggregate.weighted_sum(terms, jr.aggregate.token_mean(mask))

            # Steps of a length that does not grow with rewards and coefficient.
            slope = jax.grad(loss)(logits)
            norm = jnp.linalg.norm(slope, axis=-1, keepdims=True)
            kl = jnp.mean(jnp.sum(jnp.exp(table) * table, axis=-1) + math.log(ANSWERS))
            return (logits - RATE * slope / jnp.maximum(norm, 1.0), state), kl

        start = (jnp.zeros((PROMPTS, ANSWERS)), controller.init())
        keys = jax.random.split(second, 2 * HALF)
        return jax.lax.scan(step, start, (jnp.arange(2 * HALF), keys))[1]

    return jax.vmap(one)(keys)


def off(kl) -> np.ndarray:
    """The absolute logarithm of KL over target at the end of both halves, ``[2, seeds]``."""
    ends = kl[:, HALF - LAST : HALF].mean(-1), kl[:, -LAST:].mean(-1)
    return np.abs(np.log(np.maximum(np.stack(ends), 1e-6) / TARGET))


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The controller from all starts, and fixed coefficients."""
    seeds = 3 if quick else 24
    starts, grid = (STARTS[::3], (0.6,)) if quick else (STARTS, FIXED)
    keys, taken = jax.random.split(jax.random.key(seed), seeds), _chosen.counted(seeds)

    def curves(way, coefs):
        return np.stack([np.asarray(train(keys, c, way=way), np.float64) for c in coefs])

    adaptive, fixed = curves("adaptive", starts), curves("fixed", grid)
    errors = np.stack([off(kl) for kl in adaptive]).max(0)[:, taken]
    missed = np.stack([off(kl) for kl in fixed])
    place = _chosen.best("fixed coefficient", grid, -missed[:, 0], quick=quick)
    what = "|log(KL / target)|"
    measures = [
        harness.Measure(
            f"{what}, adaptive, largest over starts, {when}",
            harness.mean(error, "seeds"),
            "below",
            OFF,
        )
        for when, error in zip(("first half", "after rewards grew fourfold"), errors, strict=True)
    ]
    measures.append(
        harness.Measure(
            f"{what}, the best fixed coefficient, after rewards grew fourfold",
            harness.mean(missed[place, 1, taken], "seeds"),
            "above",
            OFF,
        )
    )
    facts = {
        "best fixed coefficient": grid[place],
        f"{what}, the best fixed coefficient, first half": missed[place, 0, taken].mean(),
    }
    every = np.arange(0, 2 * HALF, 20)
    series = [
        harness.Series(f"adaptive from {start:g}", every, kl[taken][:, every].mean(0))
        for start, kl in zip(starts, adaptive, strict=True)
    ]
    name = f"fixed at {grid[place]:g}"
    series.append(harness.Series(name, every, fixed[place][taken][:, every].mean(0)))
    plot = harness.Plot("step", "KL to the reference, nats", series, line=TARGET)
    return harness.Claim(measures, plot, facts)
