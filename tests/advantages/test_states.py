"""Turns from one state (gigpo), with one history (hgpo), with one action (salt).

- gigpo adds to grpo of the rollouts the returns of turns from one state minus their mean. Rollout A
  earns 10 at its third turn, B nothing in two, from the same states, discounted by 0.95: A's turns
  have 5 + (4.5125, 4.75, 0), B's -5 - (4.5125, 4.75).
- hgpo averages the comparisons of turns with one, two, ... states before in common.
- salt gives turns with the same state, action and next state the mean of their advantages: base
  advantages (1, -1, 0.5) share a second turn and get 0.5 / 3 there.

Only the equality of ids counts, and only within a group; -1 is a state of its own.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad
from rows import for_each

from jaxrl_llm.advantages import gigpo, grpo, hgpo, rloo, salt, similar_states

# Two rollouts of the specification: A [0, 1, 2] earns 10 at the end, B [0, 1] nothing.
WORKED = {
    "turn_rewards": np.array([[0.0, 0.0, 10.0], [0.0, 0.0, np.nan]]),
    "state_ids": np.array([[0, 1, 2], [0, 1, 2]]),
    "turn_where": np.array([[True, True, True], [True, True, False]]),
}


def sample(seed, shape=(3, 4, 4)):
    rng = np.random.default_rng(seed)
    turn_where = np.arange(shape[-1]) < rng.integers(0, shape[-1] + 1, shape[:-1])[..., None]
    turn_rewards = rng.normal(size=shape).astype(np.float32)
    batch = {
        "turn_rewards": turn_rewards,
        "state_ids": rng.integers(-1, 3, shape),
        "turn_where": turn_where,
        "where": rng.random(shape[:-1]) < 0.8,
    }
    return np.where(turn_where, turn_rewards, 0.0).sum(-1), batch


def table(batch, gamma):
    """Per prompt, the turns (g, k) that take part and their returns."""
    taken = batch["turn_where"] & batch["where"][..., None]
    for p in range(len(taken)):
        turns = [tuple(i) for i in np.argwhere(taken[p])]
        rewards = np.float64(batch["turn_rewards"][p])
        returns = {
            (g, k): sum(gamma ** (j - k) * rewards[g, j] for h, j in turns if h == g and j >= k)
            for g, k in turns
        }
        yield p, turns, returns


def centered(values, member, scale, ddof=1):
    values = np.array(values, np.float64)
    if values.max() == values.min():
        return 0.0
    gap = member - values.mean()
    return gap / (values.std(ddof=ddof) + 1e-6) if scale == "group" else gap


def reference_gigpo(rewards, batch, scale, episode, omega, gamma=0.9):
    out, states = np.zeros(batch["state_ids"].shape), batch["state_ids"]
    for p, turns, returns in table(batch, gamma):
        members = np.flatnonzero(batch["where"][p])
        if episode == "turns":
            members = [g for g, _ in turns]
        for g, k in turns:
            peers = [returns[t] for t in turns if states[p][t] == states[p, g, k]]
            peers = peers if states[p, g, k] >= 0 else [returns[g, k]]
            base = centered(rewards[p, members], rewards[p, g], scale)
            out[p, g, k] = base + omega * centered(peers, returns[g, k], scale)
    return out


def reference_hgpo(batch, history, alpha, scale, gamma=0.9):
    out, states = np.zeros(batch["state_ids"].shape), batch["state_ids"]
    for p, turns, returns in table(batch, gamma):

        def key(g, k, level, p=p):
            if k < level - 1 or min(states[p, g, k - level + 1 : k + 1]) < 0:
                return None
            return tuple(states[p, g, k - level + 1 : k + 1])

        for g, k in turns:
            total = weight = 0.0
            for level in range(1, history + 2):
                if (mine := key(g, k, level)) is None:
                    continue
                peers = [returns[t] for t in turns if key(*t, level) == mine]
                credit = centered(peers, returns[g, k], scale, ddof=0)
                if abs(returns[g, k] - np.mean(peers)) > 1e-6:
                    total += (level + 1) ** alpha * credit
                    weight += (level + 1) ** alpha
            out[p, g, k] = total / (weight + 1e-6)
    return out


def test_worked_numbers_of_gigpo():
    rewards = np.array([10.0, 0.0])
    by_turns = gigpo(rewards, episode="turns", **WORKED)
    by_rollouts = gigpo(rewards, **WORKED)
    step = np.array([[4.5125, 4.75, 0.0], [-4.5125, -4.75, 0.0]])
    base = np.array([[4.0, 4.0, 4.0], [-6.0, -6.0, 0.0]])
    close(by_turns, base + step, rtol=1e-6)
    expected = [[9.5125, 9.75, 5.0], [-9.5125, -9.75, 0.0]]
    close(by_rollouts, expected, rtol=1e-6)
    scaled = gigpo(rewards, episode="turns", scale="group", **WORKED)
    step = np.array([[0.7071, 0.7071, 0.0], [-0.7071, -0.7071, 0.0]])
    base = np.array([[0.7303, 0.7303, 0.7303], [-1.0954, -1.0954, 0.0]])
    close(scaled, base + step, atol=2e-4)


def test_worked_numbers_of_hgpo():
    returns = np.array([[0.9, 0.95, 1.0], [0.0, 0.0, 0.0], [0.4, 0.5, 0.6]])
    states = np.array([[0, 1, 2], [0, 1, 2], [0, 4, 2]])
    out = hgpo(returns[:, 0], turn_rewards=returns, state_ids=states, gamma=0.0, scale="none")
    expected = [[0.4667, 0.475, 0.4926], [-0.4333, -0.475, -0.5074], [-0.0333, 0.0, 0.0667]]
    close(out, expected, atol=6e-5)


@for_each(("scale", "episode"), [("none", "rollouts"), ("group", "turns")])
def test_gigpo_equals_the_step_table(scale, episode):
    for seed in range(3):
        rewards, batch = sample(seed)
        out = gigpo(rewards, gamma=0.9, omega=0.7, scale=scale, episode=episode, **batch)
        expected = reference_gigpo(rewards, batch, scale, episode, 0.7)
        close(out, expected, atol=2e-5)


@for_each(("history", "scale"), [(2, "group"), (1, "none")])
def test_hgpo_equals_the_step_table(history, scale):
    for seed in range(3):
        rewards, batch = sample(seed)
        out = hgpo(rewards, gamma=0.9, history=history, alpha=0.5, scale=scale, **batch)
        expected = reference_hgpo(batch, history, 0.5, scale)
        close(out, expected, atol=2e-5)


def test_without_shared_states_gigpo_is_grpo_and_hgpo_has_only_the_episode():
    rewards, batch = sample(5)
    apart = batch | {"state_ids": np.arange(48).reshape(3, 4, 4)}
    taken = batch["turn_where"] & batch["where"][..., None]
    group = np.where(taken, np.asarray(grpo(rewards, where=batch["where"]))[..., None], 0.0)
    close(gigpo(rewards, scale="group", **apart), group, atol=1e-6)
    close(gigpo(rewards, scale="group", omega=0.0, **batch), group, atol=1e-6)
    assert not hgpo(rewards, **apart).any()
    with_episode = hgpo(rewards, episode="rollouts", **apart)
    close(with_episode, group, atol=1e-5)


def test_a_lone_rollout_is_zero_or_raw():
    batch = {"turn_rewards": np.array([[1.0, 2.0]]), "state_ids": np.array([[0, 1]])}
    assert not gigpo(np.array([3.0]), **batch).any()
    raw = gigpo(np.array([3.0]), singleton="raw", **batch)
    assert raw.tolist() == [[3.0, 3.0]]


def test_ids_only_have_to_be_equal():
    rewards, batch = sample(7)
    named = np.array([-5, 900, 2**31 - 1, 17])[batch["state_ids"] + 1]
    for function in (gigpo, hgpo):
        out = function(rewards, **batch)
        close(function(rewards, **batch | {"state_ids": named}), out, atol=1e-6)
    order = [2, 0, 3, 1]
    moved = {name: x[:, order] for name, x in batch.items()}
    close(hgpo(rewards[:, order], **moved), np.asarray(out)[:, order], atol=1e-5)


def test_junk_of_dropped_turns_is_never_read_and_one_group_is_alone():
    rewards, batch = sample(8)
    taken = batch["turn_where"] & batch["where"][..., None]
    junk = batch | {
        "turn_rewards": np.where(taken, batch["turn_rewards"], np.nan),
        "state_ids": np.where(taken, batch["state_ids"], 2**31 - 1),
    }
    loud = np.where(batch["where"], rewards, np.nan)
    for function in (gigpo, hgpo):
        out = function(rewards, **batch)
        equal(function(loud, **junk), out)
        one = function(rewards[1], **{name: x[1] for name, x in batch.items()})
        close(one, out[1], atol=1e-6)

    def total(r):
        return jnp.sum(gigpo(rewards, **junk | {"turn_rewards": r}, scale="group") ** 2)

    slope = grad(total)(junk["turn_rewards"])
    assert np.isfinite(slope).all() and not np.asarray(slope)[~taken].any()


# Salt: rollouts 0 and 1 share a first turn, all three a second one.
EDGES = {
    "state_ids": np.array([[0, 1], [0, 1], [5, 1]]),
    "action_ids": np.array([[3, 4], [3, 4], [3, 4]]),
    "next_state_ids": np.array([[1, -1], [1, -1], [1, -1]]),
}
BASE = np.array([1.0, -1.0, 0.5])


def test_worked_numbers_of_salt():
    out = salt(BASE, history=0, **EDGES)
    third = 0.5 / 3
    close(out, [[0.0, third], [0.0, third], [0.5, third]], atol=1e-6)
    # What came before the second turn of the third rollout was another turn.
    assert salt(BASE, history=1, **EDGES).tolist() == [[0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]


def test_salt_leaves_what_is_not_shared_and_averages_what_is():
    apart = EDGES | {"action_ids": np.arange(6).reshape(3, 2)}
    out = salt(BASE, history=0, **apart)
    equal(out, np.broadcast_to(BASE[:, None], (3, 2)))
    for base in (grpo, rloo):
        advantages = base(np.array([1.0, 0.0, 0.25]))
        same = {name: np.zeros((3, 2), jnp.int32) for name in EDGES}
        close(salt(advantages, history=0, **same), 0.0, atol=1e-6)
    none = EDGES | {"state_ids": np.full((3, 2), -1)}
    equal(salt(BASE, **none), np.broadcast_to(BASE[:, None], (3, 2)))


def test_salt_may_ignore_the_next_state():
    leads = EDGES | {"next_state_ids": np.array([[1, -1], [2, -1], [1, -1]])}
    assert salt(BASE, history=0, **leads)[:, 0].tolist() == [1.0, -1.0, 0.5]
    out = salt(BASE, history=0, include_next_state=False, **leads)
    assert out[:, 0].tolist() == [0.0, 0.0, 0.5]


def test_salt_counts_rollouts_or_turns():
    twice = {name: np.zeros((2, 2), jnp.int32) for name in EDGES}
    where = np.array([[True, True], [True, False]])
    base = np.array([1.0, -0.5])
    by_rollout = salt(base, history=0, turn_where=where, **twice)
    close(by_rollout, [[0.25, 0.25], [0.25, 0.0]], atol=1e-6)
    by_turn = salt(base, history=0, turn_where=where, count="turn", **twice)
    close(by_turn, [[0.5, 0.5], [0.5, 0.0]], atol=1e-6)
    rng = np.random.default_rng(9)
    ids = {name: rng.integers(0, 2, (2, 5, 4)) for name in EDGES}
    advantages = rng.normal(size=(2, 5)).astype(np.float32)
    for history in (0, 2):
        merged = salt(advantages, history=history, count="turn", **ids)
        close(merged.sum((-1, -2)), 4 * advantages.sum(-1), atol=1e-5)


def test_salt_with_a_full_history_shares_common_beginnings_alone():
    states = np.array([[0, 1, 2], [0, 1, 2], [3, 1, 2]])
    ids = {"state_ids": states, "action_ids": states, "next_state_ids": states}
    out = salt(BASE, history=3, **ids)
    close(out, [[0.0] * 3, [0.0] * 3, [0.5] * 3], atol=1e-6)
    # One edge before is not enough to tell the third turns apart.
    assert float(salt(BASE, history=1, **ids)[2, 2]) == pytest.approx(0.5 / 3)


def test_an_unknown_turn_before_is_no_beginning():
    ids = {
        "state_ids": np.array([[-1, 5, 6], [-1, 5, 6]]),
        "action_ids": np.array([[0, 7, 8], [3, 7, 8]]),
        "next_state_ids": np.array([[5, 6, 1], [5, 6, 1]]),
    }
    base = np.array([1.0, -1.0])
    for history, shared in ((0, [1.0, 0.0, 0.0]), (1, [1.0, 1.0, 0.0]), (2, [1.0, 1.0, 1.0])):
        assert salt(base, history=history, **ids)[0].tolist() == shared
    # A turn that did not happen is none: what follows begins the episode.
    where = np.array([[False, True, True], [False, True, True]])
    out = salt(base, history=2, turn_where=where, **ids)
    assert not np.asarray(out).any()


def test_similar_states_are_clustered_in_order():
    texts = ["go north door", "go north door!", "a lamp", "go north door", "a lamp."]
    assert similar_states(texts, threshold=0.9).tolist() == [0, 0, 1, 0, 1]
    assert similar_states([], threshold=0.9).tolist() == []
