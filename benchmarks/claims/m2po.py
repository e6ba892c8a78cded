"""On stale rollouts a bound on the batch's second moment drops fewer tokens and learns no worse.

The task of `_bandit`: 256 prompts of eight answers, one right, and features that all prompts share.
A step takes 32 prompts, eight answers each, of the policy of 32 steps ago, with the advantages of
`grpo`. `m2po` multiplies by the full importance ratio and drops the tokens of `m2_mask` (threshold
0.04); PPO clips the ratio to the sampler at 0.2. Each is trained for 200 steps at the learning rate
of a grid that is best for it on a third of the seeds, and so is `m2po` on fresh rollouts.

The numbers are of the other seeds: the accuracy with `m2po` less that with PPO, both on stale
rollouts, where 0 or below refutes the claim; the accuracy with `m2po` on stale rollouts less that
on fresh ones, where -0.05 or below refutes that staleness costs next to nothing; and the share of
tokens without a gradient, `m2po` over PPO, where 1/2 or above refutes that fewer tokens are lost.
Importance ratios alone, with nothing dropped, are listed beside.

At its best learning rate, four times that of PPO, `m2po` is more accurate, and its policy is so far
from the sampler that the mask drops more tokens than the clip. Fresh rollouts remain better.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _bandit, _chosen, harness

PAPER = "2510.01161"
STALE, STEPS = 32, 200
RATES = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
WAYS = {
    "m2po": ("m2po", STALE),
    "ppo": ("ppo", STALE),
    "ratios alone": ("ratios", STALE),
    "m2po, fresh rollouts": ("m2po", 0),
}


@functools.partial(jax.jit, static_argnames=("method", "stale"))
def train(tasks, keys, rate, *, method: str, stale: int):
    """Accuracy ``[seeds, STEPS]`` after each step, and the mean share of tokens that are lost."""

    def one(task, key):
        def success(params):
            logp = jax.nn.log_softmax(task.features @ params + task.offsets)
            return jnp.mean(jnp.exp(jnp.take_along_axis(logp, task.right[:, None], axis=-1)))

        def step(history, key):
            params = history[0]
            of_prompts, of_answers = jax.random.split(key)
            shape = (_bandit.GROUPS, _bandit.SIZE)
            prompts = jax.random.choice(of_prompts, _bandit.PROMPTS, shape[:1], replace=False)
            features, offsets = task.features[prompts], task.offsets[prompts]
            sampler = jax.nn.log_softmax(features @ history[-1] + offsets)
            answers = jax.random.categorical(of_answers, sampler[:, None], shape=shape)
            rewards = (answers == task.right[prompts][:, None]).astype(jnp.float32)
            advantages = jr.advantages.grpo(rewards)
            behavior = jnp.take_along_axis(sampler, answers, axis=-1)[..., None]
            mask = jnp.ones(behavior.shape, bool)

            def taken(params):
                logp = jax.nn.log_softmax(features @ params + offsets)
                return jnp.take_along_axis(logp, answers, axis=-1)[..., None]

            keep = mask
            if method == "m2po":
                keep = jr.corrections.m2_mask(taken(params), behavior, mask)
            bounds = {} if method == "ppo" else {"eps_low": 1.0, "eps_high": 1e6}

            def losses(logp):
                return jr.surrogates.ppo_clip(logp, behavior, advantages, keep, **bounds)

            def loss(params):
                # Dropped tokens stay in the denominator, as in the recipe.
                weights = jr.aggregate.token_mean(mask)
                return jr.aggregate.weighted_sum(losses(taken(params)), weights)

            moved = jax.grad(lambda logp: jnp.sum(losses(logp)))(taken(params)) != 0
            counts = advantages[..., None] != 0
            lost = jnp.sum(counts & ~moved) / jnp.maximum(jnp.sum(counts), 1)
            params = params - rate * jax.grad(loss)(params)
            history = jnp.concatenate([params[None], history[:-1]])
            return history, (success(params), lost)

        start = jnp.zeros((stale + 1, _bandit.WIDTH))
        accuracy, lost = jax.lax.scan(step, start, jax.random.split(key, STEPS))[1]
        return accuracy, lost.mean()

    return jax.vmap(one)(tasks, keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """All ways at every learning rate, from the same seeds."""
    seeds, rates = (4, RATES[3:4]) if quick else (18, RATES)
    tasks = [_bandit.make_task(1000 * seed + i) for i in range(seeds)]
    tasks = jax.tree.map(lambda *x: jnp.stack(x), *tasks)
    keys, taken = jax.random.split(jax.random.key(seed), seeds), _chosen.counted(seeds)
    curves, lost, facts = {}, {}, {}
    ways = {name: way for name, way in WAYS.items() if not (quick and way[0] == "ratios")}
    for name, (method, stale) in ways.items():
        found = [train(tasks, keys, rate, method=method, stale=stale) for rate in rates]
        accuracy = np.stack([np.asarray(x) for x, _ in found])
        place = _chosen.best(f"learning rate, {name}", rates, accuracy[..., -1], quick=quick)
        curves[name] = accuracy[place, taken]
        lost[name] = np.asarray(found[place][1])[taken]
        facts[f"best learning rate, {name}"] = rates[place]
        facts[f"accuracy after {STEPS} steps, {name}"] = curves[name][:, -1].mean()
        facts[f"share of tokens without a gradient, {name}"] = lost[name].mean()
    ours, ppo, _, fresh = WAYS

    def less(other):
        return harness.mean(curves[ours][:, -1] - curves[other][:, -1], "seeds")

    measures = [
        harness.Measure(
            f"accuracy on rollouts {STALE} steps old, m2po less ppo", less(ppo), "above", 0.0
        ),
        harness.Measure(
            f"accuracy of m2po, rollouts {STALE} steps old less fresh ones",
            less(fresh),
            "above",
            -0.05,
        ),
        harness.Measure(
            "share of tokens without a gradient, m2po over ppo",
            harness.ratio(lost[ours], lost[ppo], what="seeds"),
            "below",
            0.5,
        ),
    ]
    places = np.arange(4, STEPS, 5)
    series = []
    for name, accuracy in curves.items():
        centers = [harness.mean(accuracy[:, place], "seeds") for place in places]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, places + 1, value, low, high))
    return harness.Claim(measures, harness.Plot("step", "accuracy", series), facts)
