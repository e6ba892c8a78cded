"""Environments in JAX: many episodes in one call, and what is known of them exactly."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from rows import for_each

from jaxrl_llm.environments import Gridworld, MemoryBandit, Parsed, stack
from jaxrl_llm.testing import check_env

MAZE = Gridworld("S.#.\n..#G\nS...", cost=0.0625)
BANDIT = MemoryBandit(arms=3, turns=4, flip=0.25)


@for_each("env", [MAZE, BANDIT])
def test_obeys_the_laws_of_an_environment(env):
    check_env(env, [{}], ["a", "east, then b", "hm", "north"], turns=5)


@pytest.mark.parametrize("env", [MAZE, BANDIT])
def test_4096_episodes_in_one_call_equal_each_alone(env):
    """Texts, rewards and ends of 4,096 episodes at once equal those of 32 of them alone."""
    count, alone, turns = 4096, 32, 5
    rng = np.random.default_rng(0)
    actions = rng.integers(-1, 5, (turns, count)).astype(np.int32)
    replies = {-1: "hm", 4: "hm"}
    words = ("north", "east", "south", "west") if env is MAZE else ("a", "b", "c", "d")
    replies |= dict(enumerate(words))
    singles = [env.reset({}, seed) for seed in range(alone)]
    # Many seeds, repeated: what differs between the copies are the actions.
    states = stack([singles[i % alone][0] for i in range(count)])
    traces = []

    @jax.jit
    def step(*arguments):
        traces.append(arguments)
        return env.step_batch(*arguments)

    alive = [state for state, _ in singles]
    for k in range(turns):
        active = jnp.asarray(rng.random(count) < 0.9)
        before = states
        states, seen, rewards, done = step(states, actions[k], active)
        for i in range(alone):
            if not active[i] or alive[i].ended:
                assert float(rewards[i]) == 0.0
                one = [np.array_equal(a[i], b[i]) for a, b in zip(before, states, strict=True)]
                assert all(one) and bool(done[i]) == bool(alive[i].ended)
                continue
            alive[i], observation = env.step(alive[i], Parsed(replies[int(actions[k, i])]))
            assert float(rewards[i]) == observation.reward
            assert bool(done[i]) == observation.done
            text, name = env.describe(np.asarray(seen[i]), False)
            assert (text, name) == (observation.messages[0]["content"], observation.state)
            for ours, theirs in zip(alive[i], states, strict=True):
                equal(ours, theirs[i])
    assert len(traces) == 1


def test_the_gridworld_by_hand():
    env = Gridworld()  # S.. / .#. / ..G
    state, seen = env.reset({}, 0)
    walk = [("S", "1,0"), ("north", "0,0"), ("no idea", "0,0"), ("west or south", "1,0")]
    walk += [("go EAST", "1,0"), ("s", "2,0"), ("east", "2,1"), ("e", "2,2")]
    for reply, name in walk:
        state, seen = env.step(state, Parsed(reply))
        assert seen.state == name
        assert seen.reward == pytest.approx(0.9 if name == "2,2" else -0.1)
    assert seen.done and seen.messages[0]["content"] == "You are at 2,2, the goal."
    with pytest.raises(ValueError, match=r"Gridworld.step: the episode has ended\."):
        env.step(state, Parsed("east"))


@for_each(
    ("reply", "action"),
    [
        ("Let's go east", 1),
        ("let's see", -1),
        ("let’s see", -1),
        ("I'd say 'north'", 0),
        ("‘south’", 2),
        ("e, that's it", 1),
    ],
)
def test_what_follows_an_apostrophe_is_no_direction(reply, action):
    assert Gridworld().parse(reply) == action


def test_the_optimum_of_the_gridworld_is_that_of_all_walks():
    """Value iteration agrees with the best of all walks of at most six moves."""
    env, gamma = MAZE, 0.9
    values, tables = env.optimal_values(gamma), env.tables()
    for cell in np.flatnonzero(~tables.ended):
        best = np.full(4, -np.inf)
        for walk in itertools.product(range(4), repeat=6):
            here, total = cell, 0.0
            for k, action in enumerate(walk):
                total += gamma**k * tables.reward[here, action]
                here = tables.next_cell[here, action]
                if tables.ended[here]:
                    best[walk[0]] = max(best[walk[0]], total)
                    break
        reached = np.isfinite(best)
        close(values[cell][reached], best[reached], atol=1e-6)
        assert reached.any()
    assert env.optimal_actions(gamma)["0,1"] == ("south",)


def test_following_the_best_actions_earns_the_value():
    best, values, tables = MAZE.optimal_actions(), MAZE.optimal_values(), MAZE.tables()
    for start in ((0, 0), (2, 0)):
        state, seen = MAZE.reset({"start": start}, 0)
        total = 0.0
        while not seen.done:
            state, seen = MAZE.step(state, Parsed(best[seen.state][0]))
            total += seen.reward
        cell = np.flatnonzero((tables.places == start).all(-1))[0]
        assert total == pytest.approx(values[cell].max())


def test_starts_come_from_the_seed_or_the_row():
    names = {MAZE.reset({}, seed)[1].state for seed in range(20)}
    assert names == {"0,0", "2,0"}
    assert MAZE.reset({"start": [2, 2]}, 0)[1].state == "2,2"
    for start in ((0, 2), (1, 3), (9, 9)):
        with pytest.raises(ValueError, match="is no free cell"):
            MAZE.reset({"start": start}, 0)


def test_the_best_policy_of_a_bandit_earns_what_is_said():
    """Try in turn, then stay: the mean over the arms of what is left after the tries."""
    for arms, turns in ((2, 3), (3, 4), (4, 2)):
        env, totals = MemoryBandit(arms=arms, turns=turns), []
        for best in "abcd"[:arms]:
            state, seen = env.reset({"best": best}, 7)
            tried, total = 0, 0.0
            while not seen.done:
                state, seen = env.step(state, Parsed(f"arm {'abcd'[tried]}."))
                total += seen.reward
                tried = tried if seen.reward else tried + 1
            totals.append(total)
        assert np.mean(totals) == np.mean([max(turns - j, 0) for j in range(arms)])


def test_flips_come_from_seed_and_turn_alone_at_their_rate():
    env = MemoryBandit(arms=2, turns=1, flip=0.25)
    states = stack([env.reset({"best": "a"}, seed)[0] for seed in range(2000)])
    _, _, right, _ = env.step_batch(states, jnp.zeros(2000, jnp.int32), jnp.ones(2000, bool))
    _, _, wrong, _ = env.step_batch(states, jnp.ones(2000, jnp.int32), jnp.ones(2000, bool))
    equal(np.asarray(right), 1 - np.asarray(wrong))
    # Four standard errors of a share of 2,000 draws.
    assert abs(float(np.mean(right)) - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 2000)


def test_a_bandit_names_the_history():
    env = MemoryBandit(arms=2, turns=3)
    state, seen = env.reset({"best": "b"}, 0)
    assert seen.messages[0]["content"] == "One of a, b pays. Choose, 3 times." and seen.state == ""
    for reply, text, name in (("c", "Answer with one of a, b", "-"), ("B", "b paid 1", "- b1")):
        state, seen = env.step(state, Parsed(reply))
        assert (seen.messages[0]["content"], seen.state) == (text, name)


@for_each(
    ("make", "message"),
    [
        (lambda: Gridworld("S.\nG"), "rows of equal length"),
        (lambda: Gridworld("SxG"), "characters S, G, # and"),
        (lambda: Gridworld("S."), "has no goal, 'G'"),
        (lambda: Gridworld("G."), "has no start, 'S'"),
        (lambda: MemoryBandit(arms=1), "arms must be from 2 to 26, got 1"),
        (lambda: MemoryBandit(turns=0), "turns must be at least 1, got 0"),
        (lambda: MemoryBandit(flip=1.5), "flip must be from 0 to 1, got 1.5"),
        (lambda: MemoryBandit().reset({"best": "ab"}, 0), "'best' must be one of abc, got 'ab'"),
        (lambda: MemoryBandit().reset({"best": ""}, 0), "'best' must be one of abc, got ''"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
