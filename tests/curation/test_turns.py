"""Which tokens train by their role, when an expert steps in, and how many turns are left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_curation import (
    downsample_mask,
    downsample_turns,
    patch_decision,
    role_loss_mask,
    spread_groups,
)
from rows import for_each

from jaxrl_llm import aggregate, surrogates
from jaxrl_llm.curation import ROLES

SYSTEM, USER, ASSISTANT, TOOL, HEADER = (ROLES.index(x) for x in ROLES)


def test_roles():
    # Only what the assistant wrote trains.
    one = [SYSTEM, USER, HEADER, ASSISTANT, ASSISTANT, TOOL, HEADER, ASSISTANT]
    roles = jnp.array([one, [SYSTEM, USER] + [USER] * 6])
    mask = jax.jit(role_loss_mask)(roles)
    assert mask.tolist() == [[r == ASSISTANT for r in one], [False] * 8]
    there = jnp.arange(8) < 4
    cut = role_loss_mask(roles, where=jnp.broadcast_to(there, (2, 8)))
    np.testing.assert_array_equal(cut, mask & there)
    both = role_loss_mask(roles, trainable=("assistant", "generation_prompt"))
    assert int(both.sum()) == 5

    # Text of others changes no loss.
    roles = jnp.array([[USER, ASSISTANT, TOOL, ASSISTANT], [USER] * 4])
    mask = role_loss_mask(roles)
    logp = jnp.array([[-1.0, -0.5, -2.0, -0.25], [-1.0] * 4])
    other = jnp.where(mask, logp, jnp.nan)
    advantages = jnp.array([1.0, -1.0])

    def loss(logp):
        tokens = surrogates.ppo_clip(logp, logp - 0.1, advantages, mask)
        return aggregate.weighted_sum(tokens, aggregate.token_mean(mask))

    assert float(loss(logp)) == float(loss(other)) != 0.0
    assert np.isfinite(jax.grad(loss)(other)).all()

    # The expert steps in as often as it may.
    matches = jnp.array([True, False, False, False])
    used = jnp.array([0, 0, 1, 2])
    patch, stop = patch_decision(matches, used)
    assert patch.tolist() == [False, True, True, False]
    assert stop.tolist() == [False, False, False, True]
    patch, stop = patch_decision(matches, used, limit=None)
    assert patch.tolist() == [False, True, True, True] and not stop.any()
    patch, stop = patch_decision(matches, used, limit=0)
    assert not patch.any() and stop.tolist() == [False, True, True, True]


def test_turns():
    # Samples down to a multiple.
    where = jnp.arange(40).reshape(5, 8) < 37
    masks = [downsample_mask(jax.random.key(i), where, multiple=8) for i in range(3)]
    assert [int(m.sum()) for m in masks] == [32, 32, 32]
    assert all(not (m & ~where).any() for m in masks) and (masks[0] != masks[1]).any()
    assert not downsample_mask(jax.random.key(0), where, multiple=38).any()
    assert (downsample_mask(jax.random.key(0), where, multiple=1) == where).all()
    drawn = jax.vmap(lambda k: downsample_mask(k, jnp.ones(3, bool), multiple=2))
    share = drawn(jax.random.split(jax.random.key(1), 3000)).mean(0)
    np.testing.assert_allclose(share, 2 / 3, atol=0.04)

    # Turns are dropped in full.
    turn_ids = jnp.array([[0, 0, -1, 1, 1, 1], [0, 1, 1, 2, 2, 2]])
    mask = turn_ids >= 0
    keep = jax.jit(downsample_turns, static_argnames="multiple")(
        jnp.zeros((2, 6)), mask, turn_ids=turn_ids, key=jax.random.key(3), multiple=4
    )
    turns = [(g, k) for g in range(2) for k in range(3) if (turn_ids[g] == k).any()]
    left = [np.asarray(keep[g])[np.asarray(turn_ids[g]) == k] for g, k in turns]
    assert all(x.all() or not x.any() for x in left) and sum(x.all() for x in left) == 4
    assert not np.asarray(keep)[~np.asarray(mask)].any()

    # Groups that vary enough.
    rewards = jnp.array([[1.0, 0.0, np.nan], [0.5, 0.0, np.nan], [0.7, 0.0, 0.0]])
    where = jnp.array([[True, True, False], [True, True, False], [True, False, False]])
    keep = spread_groups(rewards, where=where)
    assert keep.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert not spread_groups(rewards, where=where, keep_singletons=False)[2].any()


@for_each(
    ("make", "error", "words"),
    [
        (lambda x: role_loss_mask(x, trainable=("agent",)), ValueError, "trainable must be one of"),
        (lambda x: role_loss_mask(x > 0), TypeError, "role_ids must hold integers"),
        (lambda x: patch_decision(x > 0, x, limit=-1), ValueError, "limit must not be negative"),
        (lambda x: patch_decision(x > 0, x[:2]), ValueError, "these must have the same shape"),
        (lambda x: downsample_mask(jax.random.key(0), x > 0, multiple=0), ValueError, "multiple"),
        (lambda x: spread_groups(x + 0.5, threshold=-1.0), ValueError, "threshold must not be"),
    ],
)
def test_bad_input(make, error, words):
    with pytest.raises(error, match=words):
        make(jnp.arange(4))
