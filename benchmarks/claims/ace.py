"""Punishing wrong answers the more the policy has come to favor them keeps more of pass@k.

64 prompts with 32 answers each, one right, and a softmax policy with a logit for every answer and
one that all prompts share: for the answer of a shortcut, which is right for three prompts of four.
Its logit grows from the prompts where it is right, ten times as fast as the others, and so the
policy becomes sure of a wrong answer on the rest. After 200 steps with groups of eight, pass@k is
computed exactly from the probability of the right answer.

Each method has the learning rate of its highest pass@32 on a third of the seeds, and the others
count. The number is pass@32 with `ace` on the advantages of `grpo` less that with `grpo` alone; 0
or below refutes the claim. So it does for pass@1, and for the comparison with wrong answers
weighted by the factor 1 + log 2 that `ace` gives where policy and reference agree, so that what
counts is the confidence and not the weight. Then pass@256 is compared with that of the policy
before the training, which to keep in full would be the claim by word. The last two are pass@32 and
pass@1 at one learning rate of 0.2 for both, where the policy has become sure of the shortcut.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "2602.21420"
PROMPTS, ANSWERS, GROUP, STEPS = 64, 32, 8, 200
# The shortcut is answer 0; where it is wrong, answer 1 is right.
RIGHT = (np.arange(PROMPTS) >= PROMPTS * 3 // 4).astype(int)
# Of a prompt's own logits, and of the shared one, as a multiple of it.
RATES = tuple(0.2 * 2.0**power for power in range(-6, 3))
ONE, SHARED = 0.2, 10.0


def plain(advantages, old_logp, ref_logp):
    return advantages


def confident(advantages, old_logp, ref_logp):
    mask = jnp.ones(old_logp.shape, bool)
    return jr.advantages.ace(advantages, mask, old_logp=old_logp, ref_logp=ref_logp)


def constant(advantages, old_logp, ref_logp):
    return jnp.where(advantages < 0, advantages * (1.0 + np.log(2.0)), advantages)


METHODS = {"grpo": plain, "grpo and ace": confident, "grpo, wrong times 1.69": constant}


def log_policy(params):
    shortcut = params["shared"] * (jnp.arange(ANSWERS) == 0)
    return jax.nn.log_softmax(params["own"] + shortcut)


def chance_of_right(params):
    return jnp.exp(log_policy(params))[jnp.arange(PROMPTS), RIGHT]


@functools.partial(jax.jit, static_argnames="method")
def train(keys, rate, *, method: str):
    """Probability of the right answer ``[seeds, prompts]`` before and after, for each key."""

    def step(params, key, reference):
        logp = log_policy(params)
        answers = jax.random.categorical(key, logp[:, None], shape=(PROMPTS, GROUP))

        def taken(logp):
            return jnp.take_along_axis(logp, answers, axis=1)[..., None]

        advantages = jr.advantages.grpo((answers == RIGHT[:, None]).astype(jnp.float32))
        advantages = METHODS[method](advantages, taken(logp), taken(reference))

        def objective(params):
            return jnp.mean(jnp.sum(advantages[..., None] * taken(log_policy(params)), axis=0))

        slope = jax.grad(objective)(params)
        own = params["own"] + rate * slope["own"]
        shared = params["shared"] + SHARED * rate / PROMPTS * slope["shared"]
        return {"own": own, "shared": shared}

    def one(key):
        first, second = jax.random.split(key)
        start = {"own": jax.random.normal(first, (PROMPTS, ANSWERS)), "shared": jnp.zeros(())}
        reference = log_policy(start)
        params, _ = jax.lax.scan(
            lambda params, key: (step(params, key, reference), None),
            start,
            jax.random.split(second, STEPS),
        )
        return chance_of_right(start), chance_of_right(params)

    return jax.vmap(one)(keys)


def pass_at(chance, draws: int) -> np.ndarray:
    """Probability that one of so many answers is right, a mean over prompts, for each seed."""
    return np.mean(1.0 - (1.0 - np.asarray(chance, np.float64)) ** draws, axis=-1)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The three ways from the same starts, at every learning rate, or at the best and at one."""
    seeds, rates = (6, RATES[2:7:4]) if quick else (96, RATES)
    keys = jax.random.split(jax.random.key(seed), seeds)
    runs = {
        method: [jax.tree.map(np.asarray, train(keys, rate, method=method)) for rate in rates]
        for method in METHODS
    }
    trained = {method: np.stack([after for _, after in each]) for method, each in runs.items()}
    before = runs["grpo"][0][0]
    counted = _chosen.counted(seeds)
    chosen = {
        method: _chosen.best(f"learning rate, {method}", rates, pass_at(chance, 32), quick=quick)
        for method, chance in trained.items()
    }
    at_best = {method: trained[method][rate, counted] for method, rate in chosen.items()}
    at_one = {method: chance[rates.index(ONE), counted] for method, chance in trained.items()}
    at_best["before training"] = before[counted]
    grpo, ace, weighted, reference = at_best

    def less(policies, other, draws, words=""):
        difference = pass_at(policies[ace], draws) - pass_at(policies[other], draws)
        what = f"pass@{draws}, {ace} less {other}{words}"
        return harness.Measure(what, harness.mean(difference, "seeds"), "above", 0.0)

    one = f", both at learning rate {ONE:g}"
    measures = [
        less(at_best, grpo, 32),
        less(at_best, grpo, 1),
        less(at_best, weighted, 32),
        less(at_best, reference, 256),
        less(at_one, grpo, 32, one),
        less(at_one, grpo, 1, one),
    ]
    facts = {f"learning rate, {method}": rates[rate] for method, rate in chosen.items()}
    for method, chance in at_best.items():
        for draws in (1, 32, 256):
            facts[f"pass@{draws}, {method}"] = pass_at(chance, draws).mean()
    series = [
        harness.Series(method, rates, pass_at(chance[:, counted], 32).mean(-1).tolist())
        for method, chance in trained.items()
    ]
    plot = harness.Plot("learning rate", "pass@32", series, log="x")
    return harness.Claim(measures, plot, facts)
