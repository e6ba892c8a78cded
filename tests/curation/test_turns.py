"""Which tokens train by their role, when an expert steps in, and how many turns are left."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal

from jaxrl_llm.curation import ROLES

SYSTEM, USER, ASSISTANT, TOOL, HEADER = (ROLES.index(x) for x in ROLES)


def test_roles():
    # Only what the assistant wrote trains.
    one = [SYSTEM, USER, HEADER, ASSISTANT, ASSISTANT, TOOL, HEADER, ASSISTANT]
    roles = jnp.array([one, [SYSTEM, USER] + [USER] * 6])
    mask = jax.jit(cur.role_loss_mask)(roles)
    assert mask.tolist() == [[r == ASSISTANT for r in one], [False] * 8]
    there = jnp.arange(8) < 4
    cut = cur.role_loss_mask(roles, where=jnp.broadcast_to(there, (2, 8)))
    equal(cut, mask & there)
    both = cur.role_loss_mask(roles, trainable=("assistant", "generation_prompt"))
    assert int(both.sum()) == 5

    # The expert steps in as often as it may.
    matches = jnp.array([True, False, False, False])
    used = jnp.array([0, 0, 1, 2])
    patch, stop = cur.patch_decision(matches, used)
    assert patch.tolist() == [False, True, True, False]
    assert stop.tolist() == [False, False, False, True]
    patch, stop = cur.patch_decision(matches, used, limit=None)
    assert patch.tolist() == [False, True, True, True] and not stop.any()
    patch, stop = cur.patch_decision(matches, used, limit=0)
    assert not patch.any() and stop.tolist() == [False, True, True, True]


def test_turns():
    # Samples down to a multiple.
    where = jnp.arange(40).reshape(5, 8) < 37
    masks = [cur.downsample_mask(jax.random.key(i), where, multiple=8) for i in range(3)]
    assert [int(m.sum()) for m in masks] == [32, 32, 32]
    assert all(not (m & ~where).any() for m in masks) and (masks[0] != masks[1]).any()
    assert not cur.downsample_mask(jax.random.key(0), where, multiple=38).any()
    assert (cur.downsample_mask(jax.random.key(0), where, multiple=1) == where).all()
    drawn = jax.vmap(lambda k: cur.downsample_mask(k, jnp.ones(3, bool), multiple=2))
    share = drawn(jax.random.split(jax.random.key(1), 3000)).mean(0)
    close(share, 2 / 3, atol=0.04)

    # Turns are dropped in full.
    turn_ids = jnp.array([[0, 0, -1, 1, 1, 1], [0, 1, 1, 2, 2, 2]])
    mask = turn_ids >= 0
    keep = jax.jit(cur.downsample_turns, static_argnames="multiple")(
        jnp.zeros((2, 6)), mask, turn_ids=turn_ids, key=jax.random.key(3), multiple=4
    )
    turns = [(g, k) for g in range(2) for k in range(3) if (turn_ids[g] == k).any()]
    left = [np.asarray(keep[g])[np.asarray(turn_ids[g]) == k] for g, k in turns]
    assert all(x.all() or not x.any() for x in left) and sum(x.all() for x in left) == 4
    assert not np.asarray(keep)[~np.asarray(mask)].any()

    # Groups that vary enough.
    rewards = jnp.array([[1.0, 0.0, np.nan], [0.5, 0.0, np.nan], [0.7, 0.0, 0.0]])
    where = jnp.array([[True, True, False], [True, True, False], [True, False, False]])
    keep = cur.spread_groups(rewards, where=where)
    assert keep.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert not cur.spread_groups(rewards, where=where, keep_singletons=False)[2].any()
