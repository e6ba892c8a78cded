"""Slots by hand: what each function writes, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.models import prefill
from jaxrl_llm.rollout import Group
from jaxrl_llm.rollout.engine.request_arrays import prompt_arrays, row_arrays
from jaxrl_llm.rollout.slots import (
    Requests,
    Tokens,
    clear_cache,
    copy_slot,
    end_slots,
    resume,
    start,
)
from jaxrl_llm.rollout.types import CANCELLED, FAILED, LENGTH, UNFINISHED

KEY = jax.random.key(0)
PROMPTS = {0: list(range(65, 76)), 1: [200]}
# Two rows of three slots.
ALL, IDLE = np.ones((2, 3), bool), np.zeros((2, 3), bool)
IDS = np.arange(6, dtype=np.int32).reshape(2, 3)


@pytest.fixture(scope="module")
def fill(tiny, engine):
    """``fill(prompts, take, ids)``: slots of the engine in which these requests have started."""

    def fill(prompts, take, ids, limit=24):
        slots = engine.init()
        groups = {row: Group(row, prompt, (0,)) for row, prompt in prompts.items()}
        slots = engine.call("put_prompts", slots, *prompt_arrays(engine.spec, groups))
        (rows,) = row_arrays(engine.spec, groups, engine.row_counts)
        slots = engine.call("fill_prompts", tiny[1], slots, rows, None)
        asked = Requests(ids, np.full_like(ids, limit), np.zeros_like(ids), {})
        return engine.call("start", slots, take, asked)

    return fill


@pytest.fixture(scope="module")
def decode(tiny, engine):
    def decode(slots, steps, leave_at=0):
        limits = (np.int32(0), np.int32(steps), np.int32(leave_at))
        return engine.call("decode", tiny[1], slots, KEY, *limits, None)

    return decode


def copied(tree):
    """On the host: the slots themselves are given away by the next call."""
    return jax.tree.map(np.array, tree)


def test_prompts_read_in_blocks_have_the_keys_and_values_of_one_pass(tiny, fill, engine):
    model, params = tiny
    slots = fill(PROMPTS, ALL, IDS)
    assert slots.prompts.length.tolist() == [11, 1]
    tokens, mask = slots.prompts.tokens, np.arange(16) < np.array([[10], [0]])
    # All prompt tokens but the last, which is the first input of each response.
    reference = jax.jit(prefill, static_argnums=0)(model, params, tokens, jnp.asarray(mask))
    for ours, theirs in zip(slots.prompts.prefix, reference, strict=True):
        np.testing.assert_allclose(ours.keys[0, ..., :10], theirs.keys[0, ..., :10], atol=1e-5)
        np.testing.assert_allclose(ours.values[0, :, :10], theirs.values[0, :, :10], atol=1e-5)
        # Ten tokens are two blocks of seven; nothing is written behind them.
        assert not ours.keys[..., 14:].any() and not ours.values[..., 14:, :].any()


def test_inactive_slots_are_unchanged(fill, decode):
    take = np.array([[False, True, False], [True, False, False]])
    slots = fill(PROMPTS, take, IDS)
    slots = slots._replace(
        out=jax.tree.map(lambda x: jnp.full_like(x, 7), slots.out),
        length=jnp.where(take, 0, 5),
        finish=jnp.where(take, UNFINISHED, CANCELLED),
    )
    before = copied(slots)
    after = copied(decode(slots, 9))
    assert (after.length[take] > 0).all() and (after.length[~take] == 5).all()
    assert (after.finish[~take] == CANCELLED).all()
    for old, new in zip(jax.tree.leaves(before.out), jax.tree.leaves(after.out), strict=True):
        np.testing.assert_array_equal(old[~take], new[~take])
        # And active ones have nothing behind their last token.
        for place in np.argwhere(take):
            assert (new[tuple(place)][after.length[tuple(place)] :] == 7).all()


def test_chunks_of_any_size_give_the_same_bits(fill, decode):
    reference = copied(decode(fill(PROMPTS, ALL, IDS), 24))
    slots = fill(PROMPTS, ALL, IDS)
    for steps in (1, 2, 3, 5, 13):
        slots = decode(slots, steps)
    jax.tree.map(np.testing.assert_array_equal, copied(slots), reference)
    assert not reference.active.any()


def test_decoding_ends_by_steps_or_active_slots(fill, decode):
    slots = decode(fill(PROMPTS, ALL, IDS, limit=3), 2)
    assert slots.length.max() == 2
    slots = fill(PROMPTS, ALL, IDS)
    limit = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    slots = slots._replace(requests=slots.requests._replace(limit=jnp.array(limit)))
    stopped = copied(decode(slots, 24, leave_at=3))
    assert stopped.active.sum() <= 3 and stopped.length.max() <= 3
    ended = ~stopped.active
    assert (stopped.length[ended] <= limit[ended]).all()
    # Zero active slots: nothing happens at all.
    idle = fill(PROMPTS, IDLE, IDS)
    before = copied(idle)
    jax.tree.map(np.testing.assert_array_equal, copied(decode(idle, 24)), before)


def test_refilled_responses_have_the_keys_and_values_of_decoding(tiny, engine, fill, decode):
    slots = decode(fill(PROMPTS, ALL, IDS), 11)
    before = copied(slots)
    slots = slots._replace(cache=jax.tree.map(lambda x: jnp.full_like(x, 9.0), slots.cache))
    where = np.array([[True, False, True], [False, False, True]])
    (rows,) = row_arrays(engine.spec, [1, 0], (2,))
    given = (slots, rows, np.int32(2), where, None)
    after = copied(engine.call("fill_responses", tiny[1], *given))
    assert before.length.min() < before.length.max() == 11
    for row, column in np.argwhere(where):
        n = before.length[row, column]
        for old, new in zip(before.cache, after.cache, strict=True):
            old_keys, new_keys = old.keys[row, column, ..., :n], new.keys[row, column, ..., :n]
            np.testing.assert_allclose(new_keys, old_keys, atol=1e-5)
            old_values, new_values = old.values[row, column, :, :n], new.values[row, column, :, :n]
            np.testing.assert_allclose(new_values, old_values, atol=1e-5)
    assert all((x[~where] == 9).all() for x in jax.tree.leaves(after.cache))
    jax.tree.map(np.testing.assert_array_equal, after.out, before.out)


def test_start_resume_and_end_by_hand(engine):
    slots = engine.init()
    take = np.array([[True, False, False], [False, True, True]])
    slots = start(slots, take, Requests(IDS, IDS + 10, 0 * IDS, {}))
    assert slots.active.tolist() == take.tolist()
    assert slots.requests.id.tolist() == [[0, 0, 0], [0, 4, 5]]
    assert slots.requests.limit.tolist() == [[10, 0, 0], [0, 14, 15]]
    assert (np.asarray(slots.finish)[take] == UNFINISHED).all()

    out = jax.tree.map(lambda x: np.full(x.shape, 3, x.dtype), slots.out)
    where = np.array([[False, False, False], [False, False, True]])
    slots = resume(slots, where, out, np.full((2, 3), 2, np.int32))
    assert slots.length.tolist() == [[0, 0, 0], [0, 0, 2]]
    assert (slots.out.tokens[1, 2] == 3).all() and not slots.out.tokens[1, 1].any()
    assert (slots.out.entropy[1, 2] == 3).all() and not slots.out.entropy[0].any()

    slots = end_slots(slots, np.array([[True, True, True], [False, True, False]]), LENGTH)
    assert slots.active.tolist() == [[False] * 3, [False, False, True]]
    # Those that were not active keep why they ended.
    assert slots.finish.tolist() == [[LENGTH, 0, 0], [0, LENGTH, UNFINISHED]]
    again = start(slots, take, Requests(IDS, IDS + 10, 0 * IDS, {}))
    assert again.length.tolist() == [[0] * 3] * 2 and again.finish[0, 0] == UNFINISHED


@for_each("target", [(0, 1), (1, 0)])
def test_a_copy_differs_in_the_request_only(fill, decode, target):
    take = np.array([[True, False, False], [False, False, False]])
    slots = decode(fill({0: PROMPTS[0]}, take, IDS), 5)
    assert slots.active[0, 0]
    before = copied(slots)
    after = copied(copy_slot(slots, jnp.array([[0, 0]]), jnp.array([target]), 77))
    assert after.requests.id[target] == 77 and after.requests.id[0, 0] == 0
    assert after.active[target] and after.length[target] == 5
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[target], y[0, 0]),
                 (after.cache, after.out, after.requests.limit, after.finish),
                 (before.cache, before.out, before.requests.limit, before.finish))  # fmt: skip
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[target[0]], x[0]), after.prompts)
    # Nothing else has changed.
    others = np.ones((2, 3), bool)
    others[target] = False
    old, new = tuple(before)[1:], tuple(after)[1:]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), old, new)


def test_nonfinite_numbers_are_marked_and_cleared(tiny, engine, fill, decode):
    params = tiny[1]
    take = np.array([[True, True, False], [True, False, False]])
    slots = decode(fill(PROMPTS, take, IDS), 2)
    length = np.array(slots.length)
    bad = jax.tree.map(lambda x: x * jnp.nan, params)
    limits = (np.int32(0), np.int32(3), np.int32(0), None)
    slots = engine.call("decode", bad, slots, KEY, *limits)
    # Those that were active fail and keep their tokens; all that were computed are non-finite.
    assert (np.asarray(slots.finish)[take] == FAILED).all() and not slots.active.any()
    assert (slots.finish[~take] == 0).all() and slots.nonfinite.all()
    np.testing.assert_array_equal(slots.length, length)
    where = np.array([[True, False, True], [False, False, False]])
    cleared = clear_cache(slots, where)
    np.testing.assert_array_equal(cleared.nonfinite, ~where)
    for x in map(np.asarray, jax.tree.leaves(cleared.cache)):
        assert not x[where].any() and np.isnan(x[~where]).any()


def test_tokens_of_a_slot_are_those_of_the_engine(engine):
    assert set(jax.tree.map(lambda x: x.shape, engine.init().out)) == {(2, 3, 24), None}
    assert isinstance(engine.spec.draw.blank, Tokens) and engine.spec.draw.blank.support is None
