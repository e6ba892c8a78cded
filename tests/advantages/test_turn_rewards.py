"""What turns earn: discounted outcomes, information, gates, places of tokens."""

import jax
import numpy as np
import pytest
from cheap import close, equal, put

import jaxrl_llm as jr
from jaxrl_llm.advantages import (
    gate_turn_rewards,
    gated_rewards,
    geometric_rewards,
    info_gain_rewards,
    place_turn_rewards,
    terminal_rewards,
    token_totals,
)


def test_outcomes_are_discounted_to_the_end():
    where = np.array([[True, True, True], [True, True, False], [True, True, True]])
    outcome = np.array([1.0, 1.0, 0.0])
    out = geometric_rewards(outcome, turn_where=where, gamma=0.9)
    expected = [[0.81, 0.9, 1.0], [0.9, 1.0, 0.0], [0.0, 0.0, 0.0]]
    close(out, expected, atol=1e-6)
    even = geometric_rewards(outcome, turn_where=where, gamma=1.0)
    equal(even, np.where(where, outcome[:, None], 0.0))
    last = geometric_rewards(outcome, turn_where=where, gamma=0.0)
    assert last.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    none = geometric_rewards(np.array([np.nan]), turn_where=np.zeros((1, 2), bool))
    assert none.tolist() == [[0.0, 0.0]]


def test_information_telescopes_and_the_last_turn_has_the_outcome():
    rng = np.random.default_rng(0)
    share = rng.uniform(0.05, 0.9, (3, 5)).astype(np.float32)
    where = np.arange(4) < np.array([4, 2, 1])[:, None]
    outcome = np.array([1.0, 0.0, 0.5], np.float32)
    logp = np.where(np.arange(5) <= np.array([4, 2, 1])[:, None], np.log(share), np.nan)
    out = np.asarray(info_gain_rewards(outcome, answer_logp=logp, turn_where=where))
    close(out[0, :3], np.diff(share[0])[:3], atol=1e-6)
    assert out[0, :3].sum() == pytest.approx(share[0, 3] - share[0, 0], abs=1e-6)
    assert out[0, 3] == 1.0 and out[1, 1] == 0.0 and not out[1, 2:].any()
    close(out[1, 0], share[1, 1] - share[1, 0], atol=1e-6)
    close(out[2], [0.5, 0.0, 0.0, 0.0])
    # All answers wrong, and yet turns differ.
    wrong = info_gain_rewards(np.zeros(3), answer_logp=np.log(share))
    assert np.asarray(jr.advantages.turn_grpo(wrong)).any()


def test_gates():
    step = {"step": np.array([0.3, 0.3]), "outcome": np.array([0.0, 1.0])}
    order = ("step", "outcome")
    out = gated_rewards(step, order=order, thresholds=(0.0,))
    close(out, [0.0, 1.3], atol=1e-6)
    direct = gated_rewards(step, order=order, thresholds=(-np.inf,))
    close(direct, [0.3, 1.3], atol=1e-6)
    three = {"a": np.array(0.2), "b": np.array(0.5), "c": np.array(1.0)}
    three = {name: x[None] for name, x in three.items()}
    out = gated_rewards(three, order=("a", "b", "c"), thresholds=(0.6, 0.0))
    close(out, [1.5], atol=1e-6)
    # The threshold itself does not pass; a weight scales.
    out = gated_rewards(three, order=("a", "b", "c"), thresholds=(0.5, 0.9), weights=(1, 2, 3))
    close(out, [4.0], atol=1e-6)
    loud = gated_rewards(
        {"step": np.array([0.3, np.nan]), "outcome": np.array([1.0, np.nan])},
        order=order, thresholds=(0.0,), where=np.array([True, False]),
    )  # fmt: skip
    close(loud, [1.3, 0.0], atol=1e-6)


def test_steps_count_only_behind_the_outcome():
    rng = np.random.default_rng(1)
    steps = rng.uniform(0, 1, (4, 3)).astype(np.float32)
    turn_rewards = np.zeros((4, 3), np.float32)
    turn_rewards[:, 2] = outcome = np.array([0.0, 1.0, 0.4, 0.6], np.float32)
    gate = jax.jit(gate_turn_rewards)
    out = gate(outcome, step_rewards=steps, turn_rewards=turn_rewards, threshold=0.4, weight=0.5)
    passed = np.array([0, 1, 0, 1])[:, None]
    close(out, turn_rewards + 0.5 * passed * steps, atol=1e-6)
    # A failed rollout never has more than its outcome.
    equal(np.asarray(out).sum(-1)[[0, 2]], outcome[[0, 2]])
    direct = gate(outcome, step_rewards=steps, threshold=-np.inf)
    close(direct, steps, atol=1e-6)
    where = np.arange(3) < np.array([3, 2, 1, 3])[:, None]
    junk = np.where(where, steps, np.nan)
    assert np.isfinite(gate(outcome, step_rewards=junk, turn_where=where)).all()


TURN_IDS = np.array([[0, 0, -1, 1, 2, -1], [0, -1, 1, 1, -1, 2], [0, 0, 1, 1, 1, 1]])
MASK = TURN_IDS >= 0
INTERM = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
FINAL = np.array([1.0, 0.0, 1.0])


def test_places_of_turn_rewards():
    place = jax.jit(place_turn_rewards, static_argnames="mode")
    out = place(FINAL, MASK, turn_ids=TURN_IDS, turn_rewards=INTERM, max_total=4.0)
    expected = np.zeros((3, 6))
    expected[0, [3, 4]] = 0.5  # won: shares of what was earned
    expected[1, [3, 5]] = 0.25  # lost: of what there was
    close(out, expected, atol=1e-6)
    single = place(FINAL, MASK, turn_ids=TURN_IDS, mode="single")
    equal(single, terminal_rewards(FINAL, MASK))
    # The third rollout's last turn lies beyond the tokens there are.
    where = np.ones((3, 3), bool)
    cut = place(FINAL, MASK, turn_ids=TURN_IDS, mode="single", turn_where=where)
    assert cut[0].tolist() == single[0].tolist() and not np.asarray(cut[2]).any()
    beyond = place(FINAL, MASK, turn_ids=TURN_IDS, turn_rewards=np.ones((3, 3)), max_total=4.0)
    close(beyond.sum(-1), [1.0, 0.75, 2 / 3], atol=1e-6)


def test_an_episode_is_won_where_the_environment_says_so():
    won = put(np.zeros((3, 3), bool), np.s_[1, 2], True)
    options = {"turn_ids": TURN_IDS, "turn_rewards": INTERM, "max_total": np.array([4.0, 4, 4])}
    out = place_turn_rewards(FINAL, MASK, won=won, **options)
    close(out.sum(-1), [0.5, 1.0, 0.0], atol=1e-6)
    junk = options | {"turn_rewards": put(INTERM, np.s_[1, 2], np.nan)}
    where = put(np.ones((3, 3), bool), np.s_[1, 2], False)
    assert np.isfinite(place_turn_rewards(FINAL, MASK, won=won, turn_where=where, **junk)).all()


def test_totals_are_over_the_tokens_of_the_mask():
    tokens = np.random.default_rng(2).normal(size=(3, 6)).astype(np.float32)
    expected = np.where(MASK, tokens, 0.0).sum(-1)
    junk = np.where(MASK, tokens, np.nan)
    close(token_totals(junk, MASK), expected, atol=1e-6)
