"""Advantages by the depth of a tree's nodes have less gradient variance than those of its leaves.

A response has three words of four, each drawn by a softmax policy that sees the word before; its
logits are normal with deviation 0.7. A tree of eight responses divides before each word, so it
takes 14 words; eight responses apart take 24. Three rewards, each for right words that are drawn
for a policy: the share of right words, one if all of them are right, and one if the first is.

The number is the relative variance of a group's gradient in the logits (its variance over the
square of its mean along the exact gradient of the expected reward) under `branch_grpo` without
pruning, over that of `grpo` on the same trees, whose responses have one advantage each: a geometric
mean over 24 policies, of 4,096 groups each. 1 or above refutes the claim, for each reward. A second
number sets a price on words: the relative variance times the words of a group, with the pruning of
the preset, over that of `grpo` on responses apart, averaged over the rewards; 1 or above refutes
that a tree is worth its words.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _sequences, harness
from jaxrl_llm.recipes import Batch

PAPER = "2509.06040"
WORDS, LENGTH, SIZE = 4, 3, 8
ANSWERS = _sequences.fixed(WORDS, LENGTH)
# Which node of a level each of the eight responses has, and its number in the tree.
AT = np.arange(SIZE)[:, None] // 2 ** np.arange(LENGTH)[::-1]
NODES = AT + 2 ** np.arange(1, LENGTH + 1) - 2
PRICE = (int(NODES.max()) + 1) / (SIZE * LENGTH)  # words of a tree over those of eight responses
REWARDS = {
    "share of right words": lambda hits: hits.mean(-1),
    "all right": lambda hits: hits.prod(-1),
    "the first right": lambda hits: hits[..., 0],
}
GRPO = jr.recipes.grpo(kl_coef=0.0)
# Each with its recipe, and whether its responses are a tree.
WAYS = {
    "grpo, apart": (GRPO, False),
    "grpo on the tree": (GRPO, True),
    "branch_grpo": (jr.recipes.branch_grpo(prune=None), True),
    "branch_grpo with pruning": (jr.recipes.branch_grpo(), True),
}


def draw(key, logits, *, tree: bool):
    """A group ``[G, T]``: word by word, and of a tree one draw a node."""
    words = jnp.full((SIZE,), WORDS)
    found = []
    for level, each in enumerate(jax.random.split(key, LENGTH)):
        drawn = jax.random.categorical(each, logits[words])
        # The first response of a node draws for all that have it.
        first = AT[:, level] * 2 ** (LENGTH - 1 - level)
        words = drawn[first] if tree else drawn
        found.append(words)
    return jnp.stack(found, axis=-1)


@functools.partial(jax.jit, static_argnames="way")
def measure(key, node_ids, reward, *, way: str):
    """Relative variance of a group's gradient, and its mean's cosine with the exact gradient.

    `node_ids` are those of all groups, and `reward` the place of one in `REWARDS`.
    """
    recipe, tree = WAYS[way]
    groups = len(node_ids)
    of_policy, of_right, of_groups = jax.random.split(key, 3)
    logits = 0.7 * jax.random.normal(of_policy, (WORDS + 1, WORDS))
    right = jax.random.randint(of_right, (LENGTH,), 0, WORDS)

    def value(tokens):
        hits = (tokens == right).astype(jnp.float32)
        return jnp.stack([each(hits) for each in REWARDS.values()])[reward]

    keys = jax.random.split(of_groups, groups)
    tokens = jax.vmap(lambda k: draw(k, logits, tree=tree))(keys)
    logp, mask = _sequences.logp(logits, tokens), jnp.ones(tokens.shape, bool)
    batch = Batch(
        tokens=tokens,
        mask=mask,
        rewards=value(tokens),
        where=jnp.ones(tokens.shape[:-1], bool),
        prompt_tokens=jnp.ones((groups, 1), jnp.int32),
        prompt_mask=jnp.ones((groups, 1), bool),
        old_logp=logp,
        extras={"node_ids": node_ids},
    )
    ready, _ = recipe.prepare(batch, recipe.init())
    weights = jax.grad(recipe.loss)(logp, ready)
    scores = _sequences.scores(logits, tokens)
    each = -jnp.einsum("pgt,pgtsv->psv", weights, scores).reshape(groups, -1)
    mean = each.mean(0)
    variance = jnp.sum(each.var(0, ddof=1))

    def expected(logits):
        chance = jnp.exp(jnp.sum(_sequences.logp(logits, ANSWERS), axis=-1))
        return jnp.sum(chance * value(jnp.asarray(ANSWERS)))

    exact = jax.grad(expected)(logits).ravel()
    along = jnp.sum(mean * exact) / jnp.linalg.norm(exact)
    return variance / along**2, along / jnp.linalg.norm(mean)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Three rewards, on trees and on responses apart."""
    policies, groups = (3, 128) if quick else (24, 4096)
    keys = jax.random.split(jax.random.key(seed), policies)
    node_ids = jnp.tile(jnp.asarray(NODES), (groups, 1, 1))
    found = {}
    for way in WAYS:
        for place, reward in enumerate(REWARDS):
            each = [measure(key, node_ids, place, way=way) for key in keys]
            found[reward, way] = np.array(each, np.float64).T

    def logs(reward, way, other):
        """Of the relative variance over another's, ``[policies]``."""
        return np.log(found[reward, way][0] / found[reward, other][0])

    def geometric(values):
        center, low, high, how = harness.mean(values, "policies")
        center, low, high = np.exp((center, low, high)).tolist()
        return harness.Estimate(center, low, high, f"{how}, of the logarithm")

    def measured(what, values):
        return harness.Measure(what, geometric(values), "below", 1.0)

    apart, of_leaves, of_depth, pruned = WAYS
    words = "relative variance over that of grpo on the same trees"
    measures = [measured(f"{words}, {each}", logs(each, of_depth, of_leaves)) for each in REWARDS]
    price = np.mean([logs(each, pruned, apart) for each in REWARDS], axis=0) + np.log(PRICE)
    what = "relative variance times words over that of grpo apart, with pruning, mean of rewards"
    measures.append(measured(what, price))
    facts = {}
    for (reward, way), (variance, cosine) in found.items():
        facts[f"relative variance of a group, {reward}, {way}"] = np.exp(np.log(variance).mean())
        facts[f"cosine with the exact gradient, {reward}, {way}"] = cosine.mean()
    series = []
    for way in (of_depth, pruned):
        value, low, high, _ = zip(
            *(geometric(logs(each, way, of_leaves)) for each in REWARDS), strict=True
        )
        series.append(harness.Series(way, list(REWARDS), value, low, high))
    return harness.Claim(measures, harness.Plot("", words, series, kind="bars", line=1.0), facts)
