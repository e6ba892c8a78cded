"""The losses of presets with a likelihood, against float64 NumPy from their papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of, center, clip, k3, z
from rows import for_each

import jaxrl_llm as jr

P, G, T, J = 2, 4, 3, 2
RNG = np.random.default_rng(0)
MASK = np.arange(T) < np.array([[3, 1, 2, 3], [2, 3, 3, 1]])[..., None]
REWARDS = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.25]])
OLD, LOGP, REF = (RNG.normal(-1.0, 0.4, (P, G, T)) for _ in range(3))
OLD_DRAWS, DRAWS = (RNG.normal(-1.0, 0.4, (P, G, T, J)) for _ in range(2))


def drawn():
    extras = {
        "masked": np.ones((P, G, T, J), bool),
        "masked_prompt": np.zeros((P, G, 1, J), bool),
        "noise": np.ones((P, G, J)),
        "written": MASK,
        "old_draw_logp": OLD_DRAWS,
        "old_entropy": ENTROPY,
        "hint_mask": HINT,
    }
    prompts = {"prompt_tokens": np.zeros((P, 1), int), "prompt_mask": np.ones((P, 1), bool)}
    return batch_of(MASK, REWARDS, old_logp=OLD, ref_logp=REF, extras=extras, **prompts)


def total(x):
    return np.where(MASK, x, 0).sum(-1)


def of_tokens(advantages, eps, coef):
    loss = clip(np.exp(LOGP - OLD), advantages[..., None], 1 - eps, 1 + eps) + coef * k3(LOGP, REF)
    return loss[MASK].mean()


def of_sequences(advantages, eps):
    ratio = np.exp(total(LOGP - OLD) / MASK.sum(-1))
    return clip(ratio, advantages, 1 - eps, 1 + eps)


def diffu_grpo():
    return of_tokens(center(REWARDS), 0.5, 0.04)


def coupled_grpo():
    return of_tokens(center(REWARDS) * G / (G - 1), 0.5, 0.01)


def espo():
    loss = of_sequences(center(REWARDS) * G / (G - 1), 0.2)
    return (loss + 3e-3 * total(LOGP - REF) ** 2 / (2 * MASK.sum(-1))).mean()


def elbo_grpo():
    return of_sequences(z(REWARDS), 0.2).mean()


def gdpo_elbo(coef=0.0):
    loss = of_sequences(center(REWARDS), 0.5)
    return (loss + coef * total(LOGP - REF) ** 2 / (2 * MASK.sum(-1))).mean()


def spg():
    return -(center(REWARDS)[..., None] * LOGP)[MASK].mean()


def wd1():
    good, bad = (np.exp(s * center(REWARDS)) for s in (1, -1))
    weights = good / good.sum(-1, keepdims=True) - bad / bad.sum(-1, keepdims=True)
    return -(weights * total(LOGP)).sum(-1).mean() / G


def bgpo():
    d = np.where(MASK[..., None], DRAWS - OLD_DRAWS, 0).sum(-2)
    a = z(REWARDS)[..., None]
    return -np.where(a >= 0, a * (1 + d), a * np.exp(d)).mean(-1).mean()


HINT = np.zeros((P, G, T), bool)
HINT[0, 0], HINT[1, 1] = True, [True, False, True]
ENTROPY = RNG.uniform(0.5, 2.0, (P, G, T))


def igpo_inpainting():
    """Of three hint tokens and of two, a fifth is none, so the most uncertain one each trains."""
    trains = MASK & ~HINT
    trains[0, 0, np.argmax(ENTROPY[0, 0])] = True
    trains[1, 1, np.where(HINT[1, 1], ENTROPY[1, 1], -1).argmax()] = True
    ratio = np.exp(total(LOGP - OLD) / MASK.sum(-1))  # of all tokens
    loss = clip(ratio, center(REWARDS), 1 - 0.2, 1 + 0.2)[..., None] + 0.01 * k3(LOGP, REF)
    return loss[trains].mean()


REFERENCES = {
    "bgpo": bgpo,
    "coupled_grpo": coupled_grpo,
    "diffu_grpo": diffu_grpo,
    "elbo_grpo": elbo_grpo,
    "espo": espo,
    "gdpo_elbo": gdpo_elbo,
    "igpo_inpainting": igpo_inpainting,
    "spg": spg,
    "wd1": wd1,
}


@for_each("name", REFERENCES)
def test_the_loss(name):
    several = ("coupled_grpo", "diffu_grpo", "espo", "gdpo_elbo", "spg", "wd1")
    recipe = getattr(jr.recipes, name)(**({"epochs": 1} if name in several else {}))
    prepared, _ = recipe.prepare(drawn(), recipe.init())
    statistics = {"draw_logp": jnp.float32(DRAWS)} if name == "bgpo" else {}
    loss = recipe.loss(jnp.float32(LOGP), prepared, statistics=statistics)
    np.testing.assert_allclose(loss, REFERENCES[name](), rtol=1e-5)


def test_the_passes_of_the_released_code():
    """The prompt is visible in those of IGPO, so there is nothing to draw for each."""
    igpo, shares = jr.recipes.igpo_inpainting(), jr.recipes.igpo_inpainting(p=0.15)
    assert (igpo.epochs, igpo.likelihood.passes) == (4, 1)
    assert (shares.epochs, shares.likelihood.passes) == (4, 4)
    prompt = jnp.ones((4, 50), bool)
    draws = igpo.likelihood.draw(jax.random.key(0), jnp.ones((4, 6), bool), prompt)
    assert draws.masked.all() and not draws.prompt.any()
    assert igpo == jr.recipes.igpo_inpainting() and " at 0x" not in repr(igpo)
    for name, passes in (("gdpo_elbo", 12), ("wd1", 12), ("spg", 4)):
        recipe = getattr(jr.recipes, name)()
        assert (recipe.epochs, recipe.likelihood.passes) == (passes, passes)
        recipe.check_passes(passes, 1)
    for recipe in (jr.recipes.wd1(), jr.recipes.spg()):
        assert not recipe.uses_ratio and not recipe.compares_old
        with pytest.raises(
            ValueError, match="draws masks for .* passes over a batch; got epochs 8"
        ):
            recipe.check_passes(8, 1)
        with pytest.raises(ValueError, match="without a ratio to old_logp"):
            recipe.replace(surrogate=jr.surrogates.reinforce).check_passes(recipe.epochs, 1)


@for_each("block", [None, 4])
def test_spg_hides_a_share_of_the_prompt(block):
    """And of the blocks before the one that is denoised, whose tokens are estimated too."""
    valid, prompt = jnp.ones((3000, 12), bool), jnp.ones((3000, 4), bool)
    key = jax.random.key(1)
    draws, plain = (
        jr.recipes.spg(block=block, epochs=1, **options).likelihood.draw(key, valid, prompt)
        for options in ({}, {"p": 0.0})
    )
    np.testing.assert_allclose(draws.prompt.mean((0, 1)), 0.15, atol=0.02)
    assert not plain.prompt.any() and (draws.prompt[0] != draws.prompt[1]).any()
    np.testing.assert_allclose(draws.t, draws.masked.mean(-1), rtol=1e-6)
    before = np.asarray(draws.masked & ~plain.masked)
    assert not (plain.masked & ~draws.masked).any()
    if block is None:
        assert not before.any()
        return
    blocks = np.asarray(plain.masked).reshape(2, 3000, 3, 4)
    first = blocks.any(-1).argmax(-1)  # the block that is denoised
    clean = np.arange(12) < 4 * first[..., None]
    assert not (before & ~clean).any()
    np.testing.assert_allclose(before[clean].mean(), 0.15, atol=0.02)


@pytest.mark.of_many
@pytest.mark.parametrize(
    ("make", "advantages"),
    [
        (jr.recipes.coupled_grpo, None),
        (jr.bind(jr.recipes.espo, samples=1), None),
        (jr.bind(jr.recipes.spg, samples=3), jnp.array([1.0, -1.0])),
        (jr.bind(jr.recipes.spg, block=4), jnp.array([1.0, -1.0])),
    ],
)
def test_each_pass_has_masks_of_its_own(make, advantages):
    """The draws of a pass follow one another, and are as those of a single pass."""
    passes = 3
    one, several = (make(epochs=n).likelihood for n in (1, passes))
    valid, prompt = jnp.ones((2, 12), bool), jnp.ones((2, 4), bool)
    key = jax.random.key(0)
    count = one.draw(key, valid, prompt).masked.shape[0]
    draws = several.draw(key, valid, prompt)
    assert draws.t.shape == (passes * count, 2) and draws.prompt.shape == (passes * count, 2, 4)
    logp = jnp.asarray(RNG.normal(-1.0, 0.4, (count, 2, 12)), jnp.float32)
    masks, estimates, alone = [], [], jax.random.split(key, passes)
    for number in range(passes):
        part = jax.tree.map(lambda x, n=number: x[n * count : (n + 1) * count], draws)
        expected = one.draw(alone[number], valid, prompt)
        for a, b in zip(part, expected, strict=True):
            np.testing.assert_array_equal(a, b)
        same = [x.estimate(logp, part, valid, advantages=advantages) for x in (one, several)]
        np.testing.assert_array_equal(*same)
        estimates.append(same[0])
        masks.append(np.asarray(part.masked[-2:]))
        if advantages is None:
            np.testing.assert_array_equal(masks[-1].sum(0), 1)  # a mask and its complement
    whole = several.estimate(jnp.tile(logp, (passes, 1, 1)), draws, valid, advantages=advantages)
    np.testing.assert_allclose(whole, np.mean(estimates, axis=0), rtol=1e-5)
    assert (masks[0] != masks[1]).any() and (masks[1] != masks[2]).any()
    assert make(epochs=passes) == make(epochs=passes)
    assert (several.passes, one.passes) == (passes, 1)
    with pytest.raises(ValueError, match="draws masks for 3 passes over a batch; got epochs 2"):
        make(epochs=passes).check_passes(2, 1)


def test_the_reference_of_coupled_grpo_moves_to_a_mixture():
    reference, params = {"w": jnp.zeros(2)}, {"w": jnp.full(2, 5.0)}
    rule = jr.recipes.coupled_grpo(sync_every=3).reference
    moved = [float(rule(reference, params, step)["w"][0]) for step in range(1, 7)]
    assert moved == pytest.approx([0.0, 0.0, 3.0, 0.0, 0.0, 3.0])
    assert dict(jr.recipes.coupled_grpo().reference.options)["every"] == 32
    for options in ({"sync_every": None}, {"kl_coef": 0.0}):
        assert jr.recipes.coupled_grpo(**options).reference is None
    with pytest.raises(ValueError, match="coupled_grpo: sync_every must be above 0"):
        jr.recipes.coupled_grpo(sync_every=0)
