"""The vote of a group: labels, shares, ties, weights, and the rewards of agreeing."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from cheap import quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import grpo
from jaxrl_llm.rewards import majority_label, majority_rewards

vote = jax.jit(majority_label)
rewards_of = jax.jit(lambda ids, where: majority_rewards(0.0 * ids, answer_ids=ids, where=where))


@for_each(
    ("answers", "label", "share", "rewards"),
    [
        ([3, 3, 5, 7], 3, 0.5, [1, 1, 0, 0]),
        ([4, 2, 9, 7], 4, 0.25, [1, 0, 0, 0]),
        ([6, 6, 6, 6], 6, 1.0, [1, 1, 1, 1]),
        ([-1, -1, -1, 8], 8, 0.25, [0, 0, 0, 1]),
        ([-1, -1, -1, -1], -1, 0.0, [0, 0, 0, 0]),
        ([5, 3, 3, 5], 5, 0.5, [1, 0, 0, 1]),  # of equal votes the first
    ],
)
def test_worked_votes(answers, label, share, rewards):
    found = vote(jnp.array(answers))
    assert (int(found.label), float(found.share)) == (label, share)
    ours = rewards_of(jnp.array(answers), jnp.ones(4, bool))
    assert ours.tolist() == rewards
    if len(set(rewards)) == 1:
        assert not grpo(ours).any()


@quick
@given(
    answers=hnp.arrays(np.int32, (2, 6), elements=st.integers(-1, 3)),
    where=hnp.arrays(np.bool_, (2, 6)),
)
def test_equals_a_counter(answers, where):
    found, rewards = vote(answers, where=where), rewards_of(answers, where)
    for p in range(2):
        counts = Counter(answers[p][where[p] & (answers[p] >= 0)].tolist())
        if not counts:
            assert int(found.label[p]) == -1 and not rewards[p].any()
            continue
        label, most = counts.most_common(1)[0]  # ties by the order of insertion
        assert int(found.label[p]) == label
        np.testing.assert_allclose(found.share[p], most / where[p].sum(), rtol=1e-6)
        np.testing.assert_array_equal(rewards[p], where[p] & (answers[p] == label))


def test_weighted_votes():
    answers, weights = jnp.array([1, 1, 2, 3]), jnp.array([0.2, 0.2, 0.7, 0.1])
    found = majority_label(answers, weights=weights)
    assert int(found.label) == 2
    np.testing.assert_allclose(found.share, 0.7 / 1.2, rtol=1e-6)
    junk = jnp.array([0.2, 0.2, jnp.nan, 0.1])
    dropped = majority_label(answers, weights=junk, where=jnp.array([True, True, False, True]))
    assert int(dropped.label) == 1
    assert float(majority_label(answers, weights=jnp.zeros(4)).share) == 0.0


def test_an_empty_group_has_no_label():
    found = majority_label(jnp.zeros((2, 0), jnp.int32))
    assert found.label.tolist() == [-1, -1] and found.share.tolist() == [0.0, 0.0]
    assert found.share.dtype == jnp.float32


@for_each(
    ("error", "call", "message"),
    bad_calls(r"""
TypeError:
    majority_label(jnp.zeros(3))  # answer_ids must hold integers
ValueError:
    majority_label(jnp.zeros(3, int), where=jnp.ones(2, bool))  # these must have the same shape
    majority_rewards(jnp.zeros(2), answer_ids=jnp.zeros(3, int))  # rewards must have shape \(3,\)
"""),
)
def test_bad_input_is_one_sentence(error, call, message):
    raises(error, call, message, globals())
