"""given: parameters under other names."""

import inspect

import pytest

from jaxrl_llm import bind, given, stateless


def combined(rewards, *, where=None, weights=None):
    return rewards, where, weights


def test_the_first_parameter_may_come_from_the_context():
    read = given(combined, rewards="columns")
    assert stateless(read).update(5, (), columns={"a": 1}, where=3, other=2)[0] == (
        {"a": 1},
        3,
        None,
    )
    assert list(inspect.signature(read).parameters) == ["_rewards", "where", "weights", "columns"]


def test_a_renamed_parameter_is_required_and_the_rest_stay():
    read = given(combined, weights="scales")
    parameters = inspect.signature(read).parameters
    assert parameters["scales"].default is inspect.Parameter.empty
    assert "weights" not in parameters
    assert read(1, scales=7) == (1, None, 7)


def test_an_entry_may_have_the_name_of_the_place_it_takes():
    read = given(combined, rewards="rewards")
    assert read(5, rewards=7) == (7, None, None)


def test_it_compares_by_value_and_prints_itself():
    one, two = (given(bind(combined, weights=3), rewards="columns") for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert repr(one) == "given(combined(weights=3), rewards='columns')"
    assert one.__name__ == "combined"
    assert repr(given(combined, rewards="columns")) == "given(combined, rewards='columns')"


def test_an_unknown_parameter_is_told():
    with pytest.raises(TypeError, match="combined has no parameter 'reward'"):
        given(combined, reward="columns")
