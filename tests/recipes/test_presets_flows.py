"""The losses of presets of flow policies, against float64 NumPy from their papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
from preset_cases import batch_of, center, clip, z
from rows import for_each

import jaxrl_llm as jr

P, G, K, D = 2, 4, 3, 2
RNG = np.random.default_rng(0)
REWARDS = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.25]])
OLD, LOGP = (RNG.normal(-1.0, 4e-4, (P, G, K)) for _ in range(2))
MEAN, OLD_MEAN, REF_MEAN, V, REF_V = (RNG.normal(0.0, 0.5, (P, G, K, D)) for _ in range(5))
OLD_MEAN = MEAN + 0.02 * OLD_MEAN
TARGET, FIRST_V = (RNG.normal(0.0, 0.5, (P, G, K, D)) for _ in range(2))
LEVEL = np.broadcast_to(np.array([1.0, 2 / 3, 1 / 3]), (P, G, K))
STD = np.broadcast_to(np.array([2.0, 1.4, 0.7]), (P, G, K))
SCALE = 0.5 * STD
MASK = np.ones((P, G, K), bool)
WINDOW = MASK & (np.arange(K) < 2)
# A tree of four leaves, which splits at steps 0 and 1.
NODES = np.broadcast_to(np.array([[4, 8, 8], [4, 9, 9], [6, 10, 10], [6, 11, 11]]), (P, G, K))


PROMPTS = {"prompt_tokens": np.zeros((P, 1), int), "prompt_mask": np.ones((P, 1), bool)}


def prepared_of(recipe, mask=MASK):
    extras = {
        "latents": np.zeros((P, G, K, 2, D)),
        "old_step_mean": OLD_MEAN,
        "ref_step_mean": REF_MEAN,
        "ref_velocity": REF_V,
        "anchor_velocity": FIRST_V,
        "forward_noise": np.zeros((P, G, K, D)),
    }
    batch = batch_of(mask, REWARDS, **PROMPTS, old_logp=OLD, extras=extras | {"node_ids": NODES})
    return jax.jit(recipe.prepare)(batch, recipe.init())[0]


def flow_grpo():
    A = np.clip(center(REWARDS) / (REWARDS.std() + 1e-4), -5, 5)[..., None]
    kl = ((MEAN - REF_MEAN) ** 2).mean(-1) / (2 * STD**2)
    return (clip(np.exp(LOGP - OLD), A, 1 - 1e-4, 1 + 1e-4) + 0.04 * kl).mean()


def diffusion_nft(beta=1.0, kl_coef=1e-4):
    """REF_V is of the policy that sampled; the errors are those of the clean sample."""
    A = center(REWARDS) / (REWARDS.std() + 1e-4)
    r = 0.5 + np.clip(A / 5, -1, 1) / 2

    def error(u):
        e = LEVEL[..., None] * (u - TARGET)
        return (e**2).mean(-1) / np.maximum(np.abs(e).mean(-1), 1e-5)

    positive = error(beta * V + (1 - beta) * REF_V)
    negative = error((1 + beta) * REF_V - beta * V)
    loss = 5 / beta * (r[..., None] * positive + (1 - r[..., None]) * negative)
    return (loss + kl_coef * ((V - FIRST_V) ** 2).mean(-1)).mean()


def weak_nft():
    return diffusion_nft(beta=0.1, kl_coef=0.5)


def unigrpo():
    A = z(REWARDS)[..., None]
    shift = ((MEAN - OLD_MEAN) ** 2).mean(-1)
    ratio = np.exp(SCALE * (LOGP - OLD + shift / (2 * SCALE**2)))
    loss = clip(ratio, A, 1 - 1e-4, 1 + 1e-4) + 1.5e-5 * ((V - REF_V) ** 2).sum(-1)
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
    return clip(ratio, np.clip(A, -5, 5), 1 - 1e-3, 1 + 1e-3)[trains].mean()


REFERENCES = {
    "flow_grpo": (flow_grpo, {}, MASK),
    "diffusion_nft": (diffusion_nft, {}, MASK),
    "sol_rl_flow": (weak_nft, {"beta": 0.1, "kl_coef": 0.5}, MASK),
    "unigrpo": (unigrpo, {"steps": None}, WINDOW),
    "branch_grpo_flow": (branch_grpo_flow, {"splits": (0, 1), "ratio": 0.5}, MASK),
}


@for_each("name", REFERENCES)
def test_the_loss(name):
    reference, options, mask = REFERENCES[name]
    recipe = getattr(jr.recipes, name)(**options)
    prepared = prepared_of(recipe, mask)
    statistics = {"step_mean": MEAN, "step_scale": SCALE, "step_std": STD, "velocity": V}
    statistics |= {"target_velocity": TARGET, "level": LEVEL}
    statistics = {k: jnp.float32(x) for k, x in statistics.items()}
    loss = jax.jit(recipe.loss)(jnp.float32(LOGP), prepared, statistics=statistics)
    np.testing.assert_allclose(loss, reference(), rtol=1e-4, atol=1e-6)


def test_one_loss_of_a_text_and_of_the_steps_behind_it():
    """UniGRPO: two tokens of a text or one, then three steps, of which two train."""
    text = 2
    mask = np.ones((P, G, text), bool)
    mask[0, 1, 1] = mask[1, 3, 1] = False
    old, logp = (RNG.normal(-1.0, 0.3, mask.shape) for _ in range(2))
    recipe = jr.recipes.unigrpo(steps=K, text_eps=0.25, flow_coef=0.5, mse_coef=0.1)

    def behind(x, first=0.0):
        return jnp.concatenate([jnp.full((P, G, text, *x.shape[3:]), first), x], axis=2)

    extras = {
        "latents": behind(np.zeros((P, G, K, 2, D))),
        "old_step_mean": behind(OLD_MEAN),
        "ref_velocity": behind(REF_V),
    }
    trains = np.concatenate([mask, WINDOW], -1)
    extras |= {"written": trains}
    old_logp = np.concatenate([old, OLD], -1)
    batch = batch_of(trains, REWARDS, **PROMPTS, old_logp=old_logp, extras=extras)
    statistics = {"step_mean": behind(MEAN), "step_scale": behind(SCALE), "velocity": behind(V)}
    statistics = {name: jnp.float32(x) for name, x in statistics.items()}
    prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init())
    both = jnp.float32(np.concatenate([logp, LOGP], -1))
    loss = jax.jit(recipe.loss)(both, prepared, statistics=statistics)

    A = z(REWARDS)[..., None]
    tokens = clip(np.exp(logp - old), A, 1 - 0.25, 1 + 0.25) * mask
    of_text = (tokens.sum(-1) / mask.sum(-1)).mean()
    shift = ((MEAN - OLD_MEAN) ** 2).mean(-1)
    ratio = np.exp(SCALE * (LOGP - OLD + shift / (2 * SCALE**2)))
    of_flow = clip(ratio, A, 1 - 1e-4, 1 + 1e-4)[WINDOW].mean()
    penalty = ((V - REF_V) ** 2).sum(-1)[WINDOW].mean()
    np.testing.assert_allclose(loss, of_text + 0.5 * of_flow + 0.1 * penalty, rtol=1e-4)
    parts = [jnp.float32(x) for x in (of_text, of_flow, penalty)]
    together = jr.diffusion.joint_loss(*parts, gamma=0.1, lam=0.5)
    np.testing.assert_allclose(loss, together, rtol=1e-4)
