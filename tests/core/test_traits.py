"""traits: read through every wrapper, and never written on a function that others hold."""

import functools
import inspect

import jax
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import bind
from jaxrl_llm.core import Traits, accepted, traits, traits_of


def gate(x, mask, *, tau=1.0):
    """A docstring."""
    return x * tau + mask


@traits(level="sequence")
def sequence_gate(x, *, scale=1.0):
    return x * scale


@traits(has_ratio=False)
def no_ratio_gate(x, *, scale=1.0):
    return x * scale


WRAPPINGS = {
    "plain": lambda f: f,
    "bind": lambda f: bind(f, scale=2.0),
    "partial": lambda f: functools.partial(f, scale=2.0),
    "bind of partial": lambda f: bind(functools.partial(f), scale=2.0),
    "partial of bind": lambda f: functools.partial(bind(f, scale=2.0)),
    "three": lambda f: functools.partial(bind(functools.partial(f), scale=2.0)),
    "jit": jax.jit,
    "partial of jit": lambda f: functools.partial(jax.jit(f), scale=2.0),
    "another trait": lambda f: traits(has_ratio=False)(traits(level="sequence")(bind(f))),
}


@for_each("name", WRAPPINGS)
def test_traits_are_read_through_wrappers(name):
    wrap = WRAPPINGS[name]
    assert traits_of(wrap(sequence_gate)).level == "sequence"
    assert not traits_of(wrap(no_ratio_gate)).has_ratio
    if name != "another trait":
        assert traits_of(wrap(no_ratio_gate)).level == "token"
        assert traits_of(wrap(sequence_gate)).has_ratio


def test_defaults():
    assert traits_of(gate).level == traits_of(bind(gate, tau=2.0)).level == "token"
    assert traits_of(gate) == traits_of(len) == Traits()


def test_the_function_itself_stays_as_it_was():
    marked = traits(level="sequence")(jr.aggregate.token_mean)
    assert traits_of(marked).level == "sequence"
    assert traits_of(jr.aggregate.token_mean).level == "token"
    bound = bind(gate, tau=2.0)
    assert traits_of(traits(level="sequence")(bound)).level == "sequence"
    assert traits_of(bound).level == traits_of(gate).level == "token"
    other = traits(level="sequence")(functools.partial(gate, tau=2.0))
    assert traits_of(other).level == "sequence" and traits_of(gate).level == "token"


def test_a_copy_calls_and_describes_itself_like_the_original():
    copy = traits(level="sequence")(gate)
    assert copy(1.0, 2.0) == 3.0 and copy(1.0, 2.0, tau=3.0) == 5.0
    for name in ("__name__", "__doc__", "__module__", "__qualname__"):
        assert getattr(copy, name) == getattr(gate, name)
    assert inspect.signature(copy) == inspect.signature(gate)
    bound = traits(level="sequence")(bind(gate, tau=2.0))
    assert bound(1.0, 2.0) == 4.0
    assert repr(bound) == "gate(tau=2.0)" and bound.__name__ == "gate"
    assert list(accepted(bound)) == ["x", "mask"]
    assert bound == traits(level="sequence")(bind(gate, tau=2.0))
    assert hash(bound) == hash(traits(level="sequence")(bind(gate, tau=2.0)))
    with pytest.raises(TypeError, match="no option 'tua'"):
        bind(traits(level="sequence")(gate), tua=1.0)


def test_instances_of_a_class_have_its_traits():
    @traits(reward_range=(0.0, 1.0))
    class Update:
        def __call__(self, rewards, state):
            return rewards, state

    assert traits_of(Update()).reward_range == (0.0, 1.0)
    assert traits_of(functools.partial(Update(), state=())).reward_range == (0.0, 1.0)


def test_an_unknown_trait():
    with pytest.raises(TypeError, match="levle"):
        traits(levle="sequence")
