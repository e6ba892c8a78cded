"""Running moments and the score scaler that carries them."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm import chain, stateless
from jaxrl_llm.advantages import (
    RunningMoments,
    dr_grpo,
    scale_scores,
    score_deviation,
    score_scaler,
    update_moments,
)

FIRST = score_scaler().init()


def values(moments):
    return [float(moments.mean), float(moments.var), float(moments.std), float(moments.count)]


def test_worked_numbers():
    moments = update_moments(FIRST, np.array([1.0, 3.0]))
    close(values(moments), [2.0, 1.0, 1.414214, 2.0], atol=1e-6)
    moments = update_moments(moments, np.array([2.0, 6.0]))
    close(values(moments), [3.0, 3.5, 2.160247, 4.0], atol=1e-6)


@quick
@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=4),
            st.lists(st.booleans(), min_size=4, max_size=4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_it_is_as_if_all_scores_had_been_there_at_once(batches):
    moments, seen = FIRST, []
    for scores, where in batches:
        scores, where = np.float32(scores), np.array(where)
        moments = update_moments(moments, np.where(where, scores, np.nan), where=where)
        seen += scores[where].tolist()
    if not seen:
        assert values(moments) == [0.0, 1.0, 1.0, 0.0]
        return
    close(moments.mean, np.mean(seen), rtol=1e-4, atol=1e-4)
    close(moments.var, np.var(seen), rtol=1e-3, atol=1e-3)
    assert moments.count == len(seen)


@for_each("center", [False, True])
@for_each("clip", [None, 1.0])
def test_scores_are_scaled_by_moments_that_include_the_present_batch(center, clip):
    scaler = score_scaler(center=center, clip=clip)
    state, seen = scaler.init(), []
    for scores in ([[1.0, 3.0], [2.0, 6.0]], [[-4.0, 0.0], [0.5, 7.0]]):
        scaled, state = scaler.update(np.array(scores), state, step=1)
        seen += np.ravel(scores).tolist()
        expected = (np.array(scores) - center * np.mean(seen)) / np.std(seen, ddof=1)
        expected = expected if clip is None else np.clip(expected, -clip, clip)
        close(scaled, expected, rtol=1e-5)


@for_each("batches", [[[5.0]], [[0.1, 0.1, 0.1]] * 3, [[1000.1] * 7, [1000.1] * 3]])
def test_without_a_deviation_it_divides_by_one(batches):
    scaler = score_scaler()
    state = scaler.init()
    for scores in batches:
        scaled, state = scaler.update(np.array(scores), state)
        equal(scaled, np.float32(scores))


def test_dropped_scores_count_in_nothing():
    scaler, where = score_scaler(center=True), np.array([True, False, True])
    expected = scaler.update(np.array([1.0, 3.0]), scaler.init())
    for junk in (1e4, np.nan, np.inf):
        scaled, state = scaler.update(np.array([1.0, junk, 3.0]), scaler.init(), where=where)
        equal(scaled[np.array([0, 2])], expected[0])
        assert scaled[1] == 0.0
        assert values(state) == values(expected[1])
    none, state = scaler.update(np.array([np.nan]), expected[1], where=np.array([False]))
    assert none.tolist() == [0.0]
    assert values(state) == values(expected[1])


def test_in_a_chain_under_jit_with_a_state_of_arrays():
    method = chain(score_scaler(), stateless(dr_grpo))
    step = jax.jit(method.update)
    state = method.init()
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.float32 for x in jax.tree.leaves(state))
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)  # a train step donates them
    advantages, state = step(np.array([[1.0, 3.0]], jnp.bfloat16), state)
    close(advantages, [[-np.sqrt(0.5), np.sqrt(0.5)]], rtol=1e-6)
    assert advantages.dtype == jnp.float32
    assert isinstance(state[0], RunningMoments)


def test_equal_options_make_equal_transforms():
    assert score_scaler(clip=5.0) == score_scaler(clip=5.0)
    assert score_scaler(clip=5.0) != score_scaler()


@for_each("clip", [None, 0.75])
def test_the_controller_and_the_scaling_make_the_scaler(clip):
    scaler, controller = score_scaler(clip=clip), score_deviation()
    where = np.array([[True, True], [True, False]])
    state, other = scaler.init(), controller.init()
    for scores in ([[1.0, 3.0], [2.0, np.nan]], [[-4.0, 0.0], [0.5, np.inf]]):
        scores = np.array(scores)
        scaled, state = scaler.update(scores, state, where=where)
        std, other = controller.update(scores, other, where=where, mask=None)
        spread = np.broadcast_to(std, (2, 1, 1))
        for value in (std, spread):
            equal(scale_scores(scores, score_std=value, where=where, clip=clip), scaled)
    assert values(state) == values(other)
    assert score_deviation() == score_deviation()
