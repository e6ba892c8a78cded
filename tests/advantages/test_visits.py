"""The shift of the policy since the last visit: worked numbers, and what is remembered."""

import jax
import numpy as np
import pytest
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.advantages import beta_tracker_init, kl_forgetting, last_visit, spo_tracker

Q, L = 4, 3
MEMORY = last_visit(num_prompts=Q, length=L)


def visit(*arguments):
    return jax.tree.map(np.asarray, compiled(*arguments))


@jax.jit
def compiled(state, ids, tokens, mask, where, logp):
    recalled = MEMORY.recall(state, prompt_ids=ids, tokens=tokens, mask=mask, where=where)
    shift, after = MEMORY.update(logp, state, recalled)
    return recalled, shift, after


def responses(ids, lengths, *, width=L, first=1):
    """Tokens counted up from ``first``, of these lengths."""
    lengths = np.array(lengths)
    tokens = first + np.arange(lengths.size * width).reshape(*lengths.shape, width)
    mask = np.arange(width) < lengths[..., None]
    return np.array(ids), tokens, mask, mask.any(-1)


def test_the_factor_of_a_shift_of_a_hundredth_as_worked_out():
    # One token of -1, then -1.02 and 0: D = (|.02| + 0) / 2 = .01 nats a token.
    batch = responses([2], [[2]])
    _, shift, state = visit(MEMORY.init(), *batch, np.array([[[0.0] * L, [-1.0, -2.0, 9.0]]]))
    assert shift.tolist() == [0.0]  # a first visit
    now = np.array([[[-1.02, -2.0, 7.0], [-3.0] * L]])
    _, shift, _ = visit(state, *batch, now)
    close(shift, [0.01], rtol=1e-4)
    close(kl_forgetting(shift), [0.890899], rtol=1e-5)
    # And from 8 rollouts of which 3 were right.
    track, rates = spo_tracker(num_prompts=1, rho=None), beta_tracker_init(np.array([3.0]), 8)
    for d, alpha, beta in ((0.0, 3.986667, 4.693333), (0.06, 3.722222, 4.277778)):
        _, after = track.update(
            np.ones((1, 1)), rates, prompt_ids=np.array([0]), policy_shift=np.array([d])
        )
        close(after.alpha, alpha, rtol=1e-6)
        close(after.beta, beta, rtol=1e-6)


def test_what_is_scored_is_the_last_response_and_the_new_one():
    ids, tokens, mask, where = responses([3, 1], [[2, 3, 1], [3, 0, 2]])
    where[0, 2] = False  # takes no part
    logp = -np.arange(12.0).reshape(2, 2, 3)
    recalled, shift, state = visit(MEMORY.init(), ids, tokens, mask, where, logp)
    assert not recalled.mask[:, 0].any() and shift.tolist() == [0, 0]
    equal(recalled.tokens[:, 1], [tokens[0, 1], tokens[1, 2]])
    equal(state.tokens[[3, 1]], recalled.tokens[:, 1])
    equal(state.mask[[3, 1]], [[1, 1, 1], [1, 1, 0]])
    equal(state.logp[[3, 1]], [[-3, -4, -5], [-9, -10, 0]])
    assert not state.mask[[0, 2]].any()
    other = responses([1, 0], [[1], [1]], first=50)
    recalled, shift, state = visit(state, *other, np.zeros((2, 2, 3)))
    equal(recalled.tokens[0, 0, :2], tokens[1, 2, :2])
    assert shift.tolist() == [9.5, 0.0]  # (9 + 10) / 2, and a first visit
    assert state.tokens[1].tolist()[0] == 50 and state.mask[1].sum() == 1


def test_responses_are_cut_or_padded_to_the_memory():
    for width, length in ((5, 5), (2, 2)):
        batch = responses([0], [[length]], width=width)
        recalled, _, state = visit(MEMORY.init(), *batch, -np.ones((1, 2, L)))
        assert recalled.tokens.shape == (1, 2, L)
        assert int(state.mask[0].sum()) == min(length, L)
        equal(state.logp[0], -1.0 * state.mask[0])


def test_of_several_rows_of_a_prompt_the_last_is_remembered():
    ids, tokens, mask, where = responses([2, 0, 2, 2], [[3], [3], [3], [3]])
    where[3] = False  # no visit
    logp = np.broadcast_to(-np.arange(4.0)[:, None, None], (4, 2, 3))
    recalled, _, state = visit(MEMORY.init(), ids, tokens, mask, where, logp)
    assert recalled.rows.tolist() == [Q, 0, 2, Q]
    equal(state.tokens[2], tokens[2, 0])
    assert state.logp[2].tolist() == [-2.0] * 3


def test_a_foreign_prompt_and_a_row_without_a_response_change_nothing():
    ids, tokens, mask, where = responses([Q, -1, 1], [[3], [3], [0]])
    junk = np.full((3, 2, L), np.nan)
    before = MEMORY.init()
    _, shift, after = visit(before, ids, tokens, mask, where, junk)
    assert shift.tolist() == [0.0] * 3
    jax.tree.map(equal, after, before)


@for_each("junk", [1e4, np.nan, np.inf])
def test_masked_cells_are_not_read(junk):
    batch = responses([1], [[2]])
    clean = -np.ones((1, 2, L))
    _, _, state = visit(MEMORY.init(), *batch, clean)
    _, want, after = visit(state, *batch, clean / 2)
    dirty = np.where(np.arange(L) < 2, clean / 2, junk)
    _, got, same = visit(state, *batch, dirty)
    assert got.tolist() == want.tolist() == [0.5]
    jax.tree.map(equal, same, after)


def test_bad_input_is_named():
    for options, words in (
        ({"num_prompts": 0, "length": 2}, "last_visit: num_prompts must be an integer of 1"),
        ({"num_prompts": 2, "length": 0}, "last_visit: length must be an integer of 1"),
    ):
        with pytest.raises(ValueError, match=words):
            last_visit(**options)
    ids, tokens, mask, where = responses([1], [[2]])
    with pytest.raises(ValueError, match="last_visit: prompt_ids must have shape"):
        MEMORY.recall(MEMORY.init(), prompt_ids=np.arange(2), tokens=tokens, mask=mask, where=where)
    with pytest.raises(ValueError, match="spo_tracker: rho adapts to stored responses"):
        jr.recipes.spo_tracker(num_prompts=3)
    with pytest.raises(
        TypeError, match=r"computed 'policy_shift' \(last_visit\) must have the fun"
    ):
        recipe = jr.recipes.spo_tracker(num_prompts=3, rho=0.5)
        recipe.replace(computed=(jr.recipes.Computed("policy_shift", spo_tracker, "last_visit"),))
