"""Marks of functions: seen through every wrapping, and never written on what others hold."""

import functools
import inspect

import jax
import pytest

import jaxrl_llm as jr
from jaxrl_llm import bind
from jaxrl_llm.core import accepted, has_ratio, level_of, no_ratio, sequence_level


def gate(x, mask, *, tau=1.0):
    """A docstring."""
    return x * tau + mask


@sequence_level
def whole(x, *, scale=1.0):
    return x * scale


@no_ratio
def blind(x, *, scale=1.0):
    return x * scale


WRAPPINGS = {
    "plain": lambda f: f,
    "bind": lambda f: bind(f, scale=2.0),
    "partial": lambda f: functools.partial(f, scale=2.0),
    "bind of partial": lambda f: bind(functools.partial(f), scale=2.0),
    "partial of bind": lambda f: functools.partial(bind(f, scale=2.0)),
    "partial of bind of partial": lambda f: functools.partial(
        bind(functools.partial(f), scale=2.0)
    ),
    "jit": jax.jit,
    "partial of jit": lambda f: functools.partial(jax.jit(f), scale=2.0),
    "the other mark": lambda f: no_ratio(sequence_level(bind(f, scale=2.0))),
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_marks_are_seen_through(name):
    wrap = WRAPPINGS[name]
    assert level_of(wrap(whole)) == "sequence"
    assert not has_ratio(wrap(blind))
    if name != "the other mark":
        assert level_of(wrap(blind)) == "token"
        assert has_ratio(wrap(whole))


def test_unmarked():
    assert level_of(gate) == level_of(bind(gate, tau=2.0)) == "token"
    assert has_ratio(gate)


def test_marking_leaves_the_function_as_it_was():
    marked = sequence_level(jr.aggregate.token_mean)
    assert level_of(marked) == "sequence"
    assert level_of(jr.aggregate.token_mean) == "token"
    bound = bind(gate, tau=2.0)
    assert level_of(sequence_level(bound)) == "sequence"
    assert level_of(bound) == level_of(gate) == "token"
    other = sequence_level(functools.partial(gate, tau=2.0))
    assert level_of(other) == "sequence" and level_of(gate) == "token"


def test_what_is_marked_calls_and_describes_itself_like_the_original():
    copy = sequence_level(gate)
    assert copy(1.0, 2.0) == 3.0 and copy(1.0, 2.0, tau=3.0) == 5.0
    for name in ("__name__", "__doc__", "__module__", "__qualname__"):
        assert getattr(copy, name) == getattr(gate, name)
    assert inspect.signature(copy) == inspect.signature(gate)
    bound = sequence_level(bind(gate, tau=2.0))
    assert bound(1.0, 2.0) == 4.0
    assert repr(bound) == "gate(tau=2.0)" and bound.__name__ == "gate"
    assert list(accepted(bound)) == ["x", "mask"]
    assert bound == sequence_level(bind(gate, tau=2.0))
    assert hash(bound) == hash(sequence_level(bind(gate, tau=2.0)))
    with pytest.raises(TypeError, match="no option 'tua'"):
        bind(sequence_level(gate), tua=1.0)


def test_a_closure_keeps_what_it_closes_over():
    factor = 3.0

    def scaled(x):
        return factor * x

    assert sequence_level(scaled)(2.0) == 6.0
