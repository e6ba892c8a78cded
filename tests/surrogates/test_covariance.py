"""Clip-Cov and KL-Cov: the covariance of advantage and log-probability, token by token.

    cov_t = (A_t - mean A) (log pi_t - mean log pi)

over the tokens of the batch. A = (1, 1, -1, -1) and log pi = (-0.1, -3, -0.1, -3) have
(1.45, -1.45, -1.45, 1.45).

- KL-Cov adds coef |log pi - log old| to the share of tokens with the highest, at least one.
- Clip-Cov takes a random share of those between two bounds out of the loss.
- The selection is a constant, and one of the whole batch, not of its parts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, compiled, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.surrogates import (
    clip_cov,
    clip_cov_selection,
    kl_cov,
    kl_cov_selection,
    ppo_clip,
    token_covariance,
)

ADVANTAGES = jnp.array([1.0, 1.0, -1.0, -1.0])
LOGP = jnp.array([-0.1, -3.0, -0.1, -3.0])
FULL = jnp.ones(4, bool)
KEY = jax.random.key(0)

RNG = np.random.default_rng(0)
SHAPE = (3, 4, 6)
OLD = RNG.normal(-2, 1, SHAPE).astype(np.float32)
NEW = OLD + RNG.normal(0, 0.3, SHAPE).astype(np.float32)
TOKENS = RNG.normal(0, 1.5, SHAPE).astype(np.float32)
MASK = RNG.random(SHAPE) < 0.7


def reference_covariance(advantages, logp, mask):
    a, x = advantages.astype(np.float64), logp.astype(np.float64)
    return np.where(mask, (a - a[mask].mean()) * (x - x[mask].mean()), 0)


def test_token_covariance():
    # Worked covariance.
    close(token_covariance(ADVANTAGES, LOGP, FULL), [1.45, -1.45, -1.45, 1.45], rtol=1e-6)

    # Covariance of one advantage a sequence.
    a = TOKENS[..., 0]
    spread = np.broadcast_to(a[..., None], SHAPE)
    equal(token_covariance(a, NEW, MASK), token_covariance(spread, NEW, MASK))


@for_each("junk", [0.0, 1e4, np.nan, np.inf])
def test_covariance_equals_float64_and_never_reads_masked_cells(junk):
    advantages, logp = np.where(MASK, TOKENS, junk), np.where(MASK, NEW, junk)
    got = token_covariance(advantages.astype(np.float32), logp.astype(np.float32), MASK)
    close(got, reference_covariance(TOKENS, NEW, MASK), rtol=1e-5, atol=1e-6)


def test_kl_cov_selection():
    # Kl cov selects the worked tokens.
    selected = kl_cov_selection(ADVANTAGES, LOGP, FULL, ratio=0.5)
    assert selected.tolist() == [True, False, False, True]

    # At least one token and no more than there are.
    assert kl_cov_selection(ADVANTAGES, LOGP, FULL).sum() == 1  # 2e-4 of four is none
    assert kl_cov_selection(ADVANTAGES, LOGP, FULL, ratio=1.0).all()
    assert kl_cov_selection(ADVANTAGES, LOGP, FULL, ratio=9.0).all()
    assert not kl_cov_selection(ADVANTAGES, LOGP, ~FULL).any()

    # A share that is a whole number is not rounded down.
    # 5000 * float32(2e-4) may be below 1, and 15000 times it below 3.
    mask = jnp.ones(15000, bool)
    x = jnp.arange(15000.0)
    assert kl_cov_selection(x, x, mask, ratio=2e-4).sum() == 3


select_kl = jax.jit(kl_cov_selection)
select_clip = jax.jit(clip_cov_selection)


@quick
@given(st.integers(0, 1000), st.floats(1e-4, 1.0))
def test_kl_cov_selects_the_highest(seed, ratio):
    rng = np.random.default_rng(seed)
    advantages, mask = rng.normal(size=SHAPE).astype(np.float32), rng.random(SHAPE) < 0.6
    selected = np.asarray(select_kl(advantages, NEW, mask, ratio=ratio))
    count = max(int(np.float32(ratio) * mask.sum() * (1 + 1e-6)), 1)
    assert selected.sum() == count
    assert not (selected & ~mask).any()
    covariance = np.asarray(token_covariance(advantages, NEW, mask))
    others = covariance[mask & ~selected]
    assert others.size == 0 or covariance[selected].min() >= others.max()


def test_clip_cov_selection():
    # Clip cov selects among those between the bounds.
    covariance = reference_covariance(TOKENS, NEW, MASK)
    candidates = MASK & (covariance > 0.3) & (covariance < 2.0)
    bounds = {"lower": 0.3, "upper": 2.0}
    everything = select_clip(TOKENS, NEW, MASK, KEY, ratio=1.0, **bounds)
    equal(everything, candidates)
    count = int(0.1 * MASK.sum())
    assert 0 < count < candidates.sum()
    picks = [
        np.asarray(select_clip(TOKENS, NEW, MASK, jax.random.key(i), ratio=0.1, **bounds))
        for i in range(30)
    ]
    assert all(p.sum() == count and not (p & ~candidates).any() for p in picks)
    assert (sum(picks)[candidates] > 0).mean() > 0.8  # at random, not always the same
    excluded = select_clip(TOKENS, NEW, MASK, KEY, ratio=1.0, exclude=picks[0], **bounds)
    equal(excluded, candidates & ~picks[0])

    # The choice is uniform.
    x = jnp.array([1.0, -1.0, 2.0, -2.0])  # covariances 1, 1, 4, 4
    picks = jax.vmap(lambda key: select_clip(x, x, FULL, key, lower=0.5))(
        jax.random.split(KEY, 2000)
    )
    assert (picks.sum(-1) == 1).all()
    close(picks.mean(0), 0.25, atol=4 * np.sqrt(0.25 * 0.75 / 2000))

    # Padding changes no choice.
    chosen = {"ratio": 0.1, "lower": 0.3, "upper": 2.0}
    plain = clip_cov_selection(TOKENS, NEW, MASK, KEY, **chosen)
    tokens, new, mask = (np.pad(x, ((0, 0), (0, 0), (0, 3))) for x in (TOKENS, NEW, MASK))
    padded = clip_cov_selection(tokens, new, mask, KEY, **chosen)
    equal(padded[..., :-3], plain)
    assert not padded[..., -3:].any()

    # Selection takes the names of a batch.
    got = clip_cov_selection(TOKENS, old_logp=NEW, mask=MASK, key=KEY)
    equal(got, clip_cov_selection(TOKENS, NEW, MASK, KEY))


@compiled
def loss_and_gradient(function, *, old=OLD, advantages=TOKENS, **options):
    if function.__name__ in ("clip_cov", "kl_cov"):
        options = {"selected": None} | options
    loss = lambda x: function(x, old, advantages, MASK, **options)  # noqa: E731
    return loss(NEW), jax.grad(lambda x: loss(x).sum())(NEW)


def test_clip_cov():
    # Clip cov without candidates is ppo.
    advantages = np.full(SHAPE[:-1], 1.5, np.float32)  # no covariance
    got = loss_and_gradient(clip_cov, advantages=advantages, key=KEY)
    plain = loss_and_gradient(ppo_clip, advantages=advantages)
    for x, expected in zip(got, plain, strict=True):
        equal(x, expected)

    # Clip cov spares tokens that the ratio clip stops.
    chosen = {"ratio": 1.0, "lower": -np.inf, "upper": np.inf}
    loss, _ = loss_and_gradient(clip_cov, key=KEY, **chosen)
    r = np.exp(NEW - OLD)
    stopped = -TOKENS * np.clip(r, 0.8, 1.2) > -TOKENS * r
    equal(np.asarray(loss) != 0, stopped & MASK)

    # A selection made here is the one of the selection function.
    selected = kl_cov_selection(TOKENS, NEW, MASK, ratio=0.2)
    close(
        loss_and_gradient(kl_cov, ratio=0.2),
        loss_and_gradient(kl_cov, selected=selected),
        rtol=1e-6,
    )
    old = np.where(TOKENS > 0, NEW + 1, NEW - 1)  # the ratio clip stops nothing
    bounds = {"ratio": 0.1, "lower": 0.1, "upper": 3.0}
    selected = clip_cov_selection(TOKENS, NEW, MASK, KEY, **bounds)
    close(
        loss_and_gradient(clip_cov, old=old, key=KEY, **bounds),
        loss_and_gradient(clip_cov, old=old, selected=selected),
        rtol=1e-6,
    )


def test_kl_cov():
    # Kl cov without a coefficient leaves impossible tokens out.
    logp, selected = jnp.array([-jnp.inf, -1.0]), jnp.ones(2, bool)

    def loss(x):
        return kl_cov(
            x, jnp.full(2, -1.0), jnp.zeros(2), jnp.ones(2, bool), selected=selected, coef=0.0
        )

    assert not np.any(loss(logp))
    assert not np.any(jax.grad(lambda x: loss(x).sum())(logp))


@for_each("function", [clip_cov, kl_cov])
def test_a_recipe_has_to_be_given_a_selection_of_the_whole_batch(function):
    recipe = jr.recipes.grpo(kl_coef=0.0).replace(surrogate=function)
    assert "selected" in recipe.required_fields
    named = recipe.replace(computed=(jr.recipes.Computed("selected", kl_cov_selection, "batch"),))
    assert "selected" not in named.required_fields


def test_a_covariance_is_a_constant():
    logp, mask = jnp.array([[-1.0, -2.0, -0.5]]), jnp.ones((1, 3), bool)
    slope = jax.grad(
        lambda x: jr.surrogates.token_covariance(jnp.array([[1.0, -1.0, 2.0]]), x, mask).sum()
    )
    equal(slope(logp), 0)
