"""The game of numbers: hints, rewards, names of states."""

import pytest
from rows import for_each

from jaxrl_llm.environments import NumberGuess, Parsed
from jaxrl_llm.testing import check_env


def play(env, replies, secret):
    state, seen = env.reset({"secret": secret}, 0)
    observations = [seen]
    for reply in replies:
        state, seen = env.step(state, Parsed(reply))
        observations.append(seen)
    return observations


def test_obeys_the_laws_of_an_environment():
    check_env(NumberGuess(), [{}, {"secret": 1}], ["4", "hm", "9" * 5000, "-2 or 3"])


def test_bisection_wins_within_three_turns():
    env = NumberGuess()
    for secret in range(1, 8):
        low, high, seen = 1, 7, None
        state, _ = env.reset({"secret": secret}, 0)
        while seen is None or not seen.done:
            state, seen = env.step(state, Parsed(f"({(low + high) // 2})"))
            low, high = map(int, seen.state.split("-"))
        assert seen.reward == 1.0 and seen.info["right"] == 1.0 and low == high == secret


def test_rewards_hints_and_ends_by_hand():
    seen = play(NumberGuess(), ["well", "1", "not 2 but 6"], 4)[1:]
    assert [one.messages[0]["content"] for one in seen] == ["a number?", "low", "high"]
    assert [one.reward for one in seen] == pytest.approx([0.0, 0.125, 1 / 6])
    assert [one.done for one in seen] == [False, False, True]
    assert [one.info["number"] for one in seen] == [0.0, 1.0, 1.0]
    assert [one.state for one in seen] == ["1-7", "2-7", "2-5"]


def test_a_hyphen_between_words_or_numbers_is_no_minus():
    seen = play(NumberGuess(), ["between 3-5", "guess-5", "(2)-4"], 4)[1:]
    assert [one.messages[0]["content"] for one in seen[:2]] == ["high", "high"]
    assert seen[2].info["right"] == 1.0


def test_a_number_outside_earns_nothing_below_zero_and_widens_nothing():
    seen = play(NumberGuess(), ["99", "-99"], 4)[1:]
    assert [one.reward for one in seen] == [0.0, 0.0]
    assert [one.state for one in seen] == ["1-7", "1-7"]


def test_the_seed_draws_every_number():
    env = NumberGuess()
    assert {env.reset({}, seed)[0].secret for seed in range(100)} == set(range(1, 8))


@for_each("options", [{"high": 1}, {"turns": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="high must be at least 2 and turns at least 1"):
        NumberGuess(**options)


def test_a_bad_secret_is_refused():
    with pytest.raises(ValueError, match="'secret' must be from 1 to 7, got 8"):
        NumberGuess().reset({"secret": 8}, 0)
