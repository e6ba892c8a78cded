"""Valuing a random policy finds more of the right answers than a policy gradient as successful.

A tree of four choices at four levels, of whose 256 leaves 24 are right, with a logit for each
choice at each node. Both methods get the same rollouts, a batch of 32 a step, and make four updates
of each: `rover` with rewards minus their mean, and `ppo_clip` with the advantages of `grpo`. They
are compared where the exact success rate first reaches 0.9, so at equal success, for each of
several learning rates. Diversity is the exponential of the entropy over the right leaves, computed
exactly: how many right answers the policy has in effect. The number is that with `rover` over that
with `grpo`, as a geometric mean over trees, each method at the learning rate that gives it most
diversity on other trees; 1 or below refutes the claim. The distinct right leaves in 64 answers are
compared as well, and one learning rate for both.

Last, without sampling: the softmax of the uniform policy's exact values, at the temperature of that
success, against gradient ascent on the exact success. This is what the idea promises, nearly all
right leaves, and the trained form keeps a small part of it: its values come from rollouts of the
policy, which soon has few of the leaves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "2509.24981"
BRANCHES, DEPTH, RIGHT = 4, 4, 24
ROLLOUTS, UPDATES = 32, 4
SUCCESS = 0.9
STEPS = 200
DRAWN = 64
RATES = tuple(2.0**power for power in range(-4, 6))
LEAVES = BRANCHES**DEPTH

# The node at which a leaf's path makes each choice, over all levels, and the choice.
_DIGITS = np.stack(np.unravel_index(np.arange(LEAVES), (BRANCHES,) * DEPTH), axis=-1)
_FIRST = np.cumsum([0] + [BRANCHES**level for level in range(DEPTH)])
_NODES = np.stack(
    [
        _FIRST[level] + _DIGITS[:, :level] @ BRANCHES ** np.arange(level)[::-1].astype(int)
        for level in range(DEPTH)
    ],
    axis=-1,
)


def logp_of(logits, leaves):
    """Log-probability of each choice on the way to the leaves, ``[..., levels]``."""
    return jax.nn.log_softmax(logits)[jnp.asarray(_NODES)[leaves], jnp.asarray(_DIGITS)[leaves]]


def mean_log_probs(logits, leaves):
    return jr.surrogates.mean_log_probs(logits)[jnp.asarray(_NODES)[leaves]]


def rover_loss(logits, old, leaves, rewards, mask):
    return jr.surrogates.rover(
        logp_of(logits, leaves),
        logp_of(old, leaves),
        jr.advantages.dr_grpo(rewards),
        mask,
        mean_log_probs=mean_log_probs(logits, leaves),
        old_mean_log_probs=mean_log_probs(old, leaves),
    )


def policy_gradient_loss(logits, old, leaves, rewards, mask, *, advantage):
    return jr.surrogates.ppo_clip(
        logp_of(logits, leaves), logp_of(old, leaves), advantage(rewards), mask
    )


LOSSES = {
    "rover": rover_loss,
    "grpo": functools.partial(policy_gradient_loss, advantage=jr.advantages.grpo),
    "dr_grpo": functools.partial(policy_gradient_loss, advantage=jr.advantages.dr_grpo),
}


def success_and_number(logits, right):
    """Probability of a right leaf, and right leaves in effect and expected in some draws."""
    chance = jnp.where(right, jnp.exp(logp_of(logits, jnp.arange(LEAVES)).sum(-1)), 0.0)
    total = jnp.sum(chance)
    share = chance / total
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0)))
    distinct = jnp.sum(1.0 - (1.0 - chance) ** DRAWN)
    return total, jnp.exp(entropy), distinct


@functools.partial(jax.jit, static_argnames="name")
def train(keys, rate, *, name: str):
    """Trees one by one: whether success was reached, and the two numbers at that step."""

    def tree(key):
        first, second = jax.random.split(key)
        right = jax.random.permutation(first, LEAVES) < RIGHT

        def step(carry, key):
            logits, done, found, steps = carry
            old = logits
            chance = logp_of(old, jnp.arange(LEAVES)).sum(-1)
            leaves = jax.random.categorical(key, chance, shape=(ROLLOUTS,))
            rewards = right[leaves].astype(jnp.float32)
            mask = jnp.ones((ROLLOUTS, DEPTH), bool)

            def loss(logits):
                tokens = LOSSES[name](logits, old, leaves, rewards, mask)
                return jr.aggregate.weighted_sum(tokens, jr.aggregate.token_mean(mask))

            def update(logits, _):
                return logits - rate * DEPTH * jax.grad(loss)(logits), None

            logits, _ = jax.lax.scan(update, logits, length=UPDATES)
            total, *numbers = success_and_number(logits, right)
            now = (total >= SUCCESS) & ~done
            found = jnp.where(now, jnp.stack(numbers), found)
            return (logits, done | now, found, steps + ~(done | now)), None

        start = (jnp.zeros((int(_FIRST[-1]), BRANCHES)), False, jnp.zeros(2), 0)
        (_, done, found, steps), _ = jax.lax.scan(step, start, jax.random.split(second, STEPS))
        return done, found, steps

    return jax.vmap(tree)(keys)


@jax.jit
def exact(keys):
    """Without sampling: `success_and_number` of both ways, at the success that is compared.

    The first is a softmax of the uniform policy's values, at the temperature for that success.
    """

    def tree(key):
        right = jax.random.permutation(key, LEAVES) < RIGHT
        values, rows = right.astype(jnp.float32), []
        for _ in range(DEPTH):
            rows.append(values.reshape(-1, BRANCHES))
            values = rows[-1].mean(-1)
        values = jnp.concatenate(rows[::-1])

        def sharper(bounds, _):
            middle = jnp.mean(bounds)
            enough = success_and_number(values * middle, right)[0] >= SUCCESS
            return jnp.where(enough, bounds.at[1].set(middle), bounds.at[0].set(middle)), None

        bounds, _ = jax.lax.scan(sharper, jnp.array([0.0, 100.0]), length=30)

        def ascend(logits):
            gradient = jax.grad(lambda x: success_and_number(x, right)[0])(logits)
            return logits + gradient

        def below(logits):
            return success_and_number(logits, right)[0] < SUCCESS

        climbed = jax.lax.while_loop(below, ascend, jnp.zeros_like(values))
        return success_and_number(values * bounds[1], right), success_and_number(climbed, right)

    return jax.vmap(tree)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Exact values first, then trainings at every learning rate, or at some near the best."""
    trees, rates = (6, RATES[2:7:2]) if quick else (60, RATES)
    keys = jax.random.split(jax.random.key(seed), trees)
    valued, climbed = (np.asarray(x[1], np.float64) for x in exact(keys))
    trained = {
        name: [jax.tree.map(np.asarray, train(keys, rate, name=name)) for rate in rates]
        for name in LOSSES
    }
    # The learning rate is chosen on a third of the trees, and the rest is what counts.
    chosen = {
        name: _chosen.highest(
            f"learning rate, {name}", rates, diversity(found, slice(0, trees // 3)), quick=quick
        )
        for name, found in trained.items()
    }

    def over(column, other, places):
        parts = (trained[name][i] for name, i in places.items() if name in ("rover", other))
        (done, first, _), (done_too, second, _) = parts
        both = done & done_too & (np.arange(trees) >= trees // 3)
        return geometric(first[both, column], second[both, column])

    what = "right answers in effect"
    same = dict.fromkeys(LOSSES, rates.index(1.0))
    measures = [
        harness.Measure(f"{what}, rover over grpo", over(0, "grpo", chosen), "above", 1.0),
        harness.Measure(f"{what}, rover over dr_grpo", over(0, "dr_grpo", chosen), "above", 1.0),
        harness.Measure(
            f"distinct right answers in {DRAWN}, rover over grpo",
            over(1, "grpo", chosen),
            "above",
            1.0,
        ),
        harness.Measure(
            f"{what}, rover over grpo, both at learning rate 1", over(0, "grpo", same), "above", 1.0
        ),
        harness.Measure(
            f"{what}, softmax of exact values over exact gradient ascent",
            geometric(valued, climbed),
            "above",
            1.0,
        ),
    ]
    facts = {
        f"{what}, softmax of exact values": valued.mean(),
        f"{what}, exact gradient ascent": climbed.mean(),
    }
    series = []
    for name, found in trained.items():
        facts[f"learning rate, {name}"] = rates[chosen[name]]
        done, numbers, steps = found[chosen[name]]
        facts[f"{what}, {name}"] = numbers[done, 0].mean()
        facts[f"steps until the success, {name}"] = steps[done].mean()
        # Where most trees do not get there, those that do are no fair sample.
        shown = [i for i in range(len(rates)) if found[i][0].mean() >= 0.9]
        centers = [harness.mean(found[i][1][found[i][0], 0], "trees") for i in shown]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, [rates[i] for i in shown], value, low, high))
    plot = harness.Plot("learning rate", f"{what}, at success {SUCCESS:g}", series, log="x")
    return harness.Claim(measures, plot, facts)


def diversity(found, part: slice) -> np.ndarray:
    """Of each learning rate at which nearly all trees get there; minus infinity of the others."""
    return np.array(
        [
            np.log(numbers[part, 0][done[part]]).mean() if done[part].mean() >= 0.75 else -np.inf
            for done, numbers, _ in found
        ]
    )


def geometric(first, second) -> harness.Estimate:
    """Geometric mean of the ratios of the trees."""
    center, low, high, how = harness.mean(np.log(first / second), "trees")
    center, low, high = np.exp((center, low, high)).tolist()
    return harness.Estimate(center, low, high, f"{how}, of the logarithm")
