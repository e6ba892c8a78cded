"""The losses of presets of flow policies, against float64 NumPy from their papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr

P, G, K, D = 2, 4, 3, 2
RNG = np.random.default_rng(0)
REWARDS = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.25]])
OLD, LOGP = (RNG.normal(-1.0, 4e-4, (P, G, K)) for _ in range(2))
MEAN, OLD_MEAN, REF_MEAN, V, REF_V = (RNG.normal(0.0, 0.5, (P, G, K, D)) for _ in range(5))
OLD_MEAN = MEAN + 0.02 * OLD_MEAN
STD = np.broadcast_to(np.array([2.0, 1.4, 0.7]), (P, G, K))
SCALE = 0.5 * STD
MASK = np.ones((P, G, K), bool)
WINDOW = MASK & (np.arange(K) < 2)
# A tree of four leaves, which splits at steps 0 and 1.
NODES = np.broadcast_to(np.array([[4, 8, 8], [4, 9, 9], [6, 10, 10], [6, 11, 11]]), (P, G, K))


def prepared_of(recipe, mask=MASK):
    extras = {
        "latents": np.zeros((P, G, K, 2, D)),
        "old_step_mean": OLD_MEAN,
        "ref_step_mean": REF_MEAN,
        "ref_velocity": REF_V,
    }
    extras = {name: jnp.float32(x) for name, x in extras.items()} | {"node_ids": jnp.array(NODES)}
    batch = jr.recipes.Batch(
        tokens=jnp.zeros((P, G, K), int),
        mask=jnp.asarray(mask),
        rewards=jnp.float32(REWARDS),
        where=jnp.ones((P, G), bool),
        prompt_tokens=jnp.zeros((P, 1), int),
        prompt_mask=jnp.ones((P, 1), bool),
        old_logp=jnp.float32(OLD),
        extras=extras,
    )
    return recipe.prepare(batch, recipe.init())[0]


def clipped(ratio, advantage, eps):
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - eps, 1 + eps) * advantage)


def centered(r):
    return r - r.mean(-1, keepdims=True)


def flow_grpo():
    A = np.clip(centered(REWARDS) / (REWARDS.std() + 1e-4), -5, 5)[..., None]
    kl = ((MEAN - REF_MEAN) ** 2).mean(-1) / (2 * STD**2)
    return (clipped(np.exp(LOGP - OLD), A, 1e-4) + 0.04 * kl).mean()


def unigrpo():
    A = (centered(REWARDS) / (REWARDS.std(-1, ddof=1, keepdims=True) + 1e-6))[..., None]
    shift = ((MEAN - OLD_MEAN) ** 2).mean(-1)
    ratio = np.exp(SCALE * (LOGP - OLD + shift / (2 * SCALE**2)))
    loss = clipped(ratio, A, 1e-4) + 1.5e-5 * ((V - REF_V) ** 2).sum(-1)
    return loss[WINDOW].mean()


def branch_grpo_flow():
    """Edges of depth 1 are the two halves of a group; of the last split half the leaves train."""
    halves = REWARDS.reshape(P, 2, 2).mean(-1)
    A, ratio = np.zeros((P, G, K)), np.exp(LOGP - OLD)
    trains = np.zeros((P, G, K), bool)
    for p in range(P):
        for values, steps in ((np.repeat(halves[p], 2), [0]), (REWARDS[p], [1, 2])):
            each = values[::2] if steps == [0] else values
            A[p][:, steps] = ((values - each.mean()) / (each.std(ddof=1) + 1e-8))[:, None]
        trains[p, ::2, 0] = True
        order = np.argsort(-REWARDS[p], kind="stable")
        trains[p, order[[0, 3]], 1:] = True  # the best of two that train, and the worst
    return clipped(ratio, np.clip(A, -5, 5), 1e-3)[trains].mean()


REFERENCES = {
    "flow_grpo": (flow_grpo, {}, MASK),
    "sol_rl_flow": (flow_grpo, {}, MASK),
    "unigrpo": (unigrpo, {}, WINDOW),
    "branch_grpo_flow": (branch_grpo_flow, {"splits": (0, 1)}, MASK),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_loss(name):
    reference, options, mask = REFERENCES[name]
    recipe = getattr(jr.recipes, name)(**options)
    prepared = prepared_of(recipe, mask)
    statistics = {"step_mean": MEAN, "step_scale": SCALE, "step_std": STD, "velocity": V}
    statistics = {k: jnp.float32(x) for k, x in statistics.items()}
    loss = recipe.loss(jnp.float32(LOGP), prepared, statistics=statistics)
    np.testing.assert_allclose(loss, reference(), rtol=1e-4, atol=1e-6)


def test_a_normed_ratio_moves_the_policy_along_its_noise():
    """The gradient in the mean at the old policy is -A eps / D, whatever the scale of a step."""
    eps = RNG.normal(size=(K, D))
    scale = jnp.array([0.1, 1.0, 10.0])
    old, mask = jnp.float32(OLD_MEAN[0, 0]), jnp.ones(K, bool)
    x = old + scale[:, None] * jnp.float32(eps)

    def loss(mean):
        logp, old_logp = (jr.diffusion.gaussian_logprob(x, m, scale) for m in (mean, old))
        terms = jr.diffusion.flow_clip(
            logp, old_logp, jnp.array(0.5), mask, step_mean=mean, old_step_mean=old,
            step_scale=scale, eps=0.2,
        )  # fmt: skip
        return terms.sum()

    np.testing.assert_allclose(jax.grad(loss)(old), -0.5 * eps / D, rtol=1e-3, atol=1e-4)


def test_options_that_leave_out_the_reference():
    assert not jr.recipes.flow_grpo(kl_coef=0.0).uses_reference
    assert not jr.recipes.unigrpo(mse_coef=0.0).uses_reference
    assert jr.recipes.unigrpo().uses_reference
    every = jr.recipes.branch_grpo_flow(ratio=None, splits=(0, 1))
    assert int(prepared_of(every).mask.sum()) == P * (2 + 4 * 2)  # each step of a tree once
