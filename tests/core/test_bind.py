"""bind: a value that compares, hashes, prints, and refuses unknown options when it is made."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import bind
from jaxrl_llm.core import Bound, accepted, call_with


def gate(x, mask, *, tau_pos=1.0, tau_neg=1.05):
    return x * tau_pos + mask * tau_neg


def other(x, mask, *, tau_pos=1.0, tau_neg=1.05):
    return x


def open_ended(x, **options):
    return x, options


def test_calls_the_function_with_the_options():
    assert bind(gate, tau_pos=2.0, tau_neg=10.0)(3.0, 1.0) == 16.0


def test_an_option_at_the_call_wins():
    assert bind(gate, tau_pos=2.0, tau_neg=0.0)(3.0, 1.0, tau_pos=5.0) == 15.0


def test_equal_by_value_whatever_the_order():
    one, two = bind(gate, tau_pos=2.0, tau_neg=3.0), bind(gate, tau_neg=3.0, tau_pos=2.0)
    assert one == two
    assert hash(one) == hash(two)
    assert one != bind(gate, tau_pos=2.0)
    assert one != bind(gate, tau_pos=2.0, tau_neg=4.0)
    assert one != bind(other, tau_pos=2.0, tau_neg=3.0)
    assert len({one, two, bind(other)}) == 2


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, False), ((1, 2), (1.0, 2))])
def test_options_of_other_types_are_other_options(a, b):
    assert a == b
    assert bind(gate, tau_pos=a) != bind(gate, tau_pos=b)
    assert len({bind(gate, tau_pos=a), bind(gate, tau_pos=b), bind(gate, tau_pos=a)}) == 2


def test_prints_itself():
    assert repr(bind(gate, tau_pos=2.0, tau_neg=3)) == "gate(tau_neg=3, tau_pos=2.0)"
    assert repr(bind(gate)) == "gate()"
    assert bind(gate, tau_pos=2.0).__name__ == "gate"


class Scaled:
    def __call__(self, x):
        return x


def test_what_it_prints_is_the_same_in_every_process():
    """A resumed run compares it, so no place in memory may be part of it."""
    assert repr(bind(open_ended, inner=gate)) == "open_ended(inner=gate)"
    assert repr(bind(open_ended, inner=jax.nn.relu)) == "open_ended(inner=relu)"
    partial = functools.partial(gate, tau_pos=2.0)
    shown = "functools.partial(<function gate>, tau_pos=2.0)"
    assert repr(bind(open_ended, inner=(partial,))) == f"open_ended(inner=({shown},))"
    assert repr(bind(partial, tau_neg=3.0)) == f"{shown}(tau_neg=3.0)"
    assert re.fullmatch(r"<[\w.]*Scaled object>\(\)", repr(bind(Scaled())))


def test_binding_again_adds_and_replaces_and_stays_flat():
    twice = bind(bind(gate, tau_pos=2.0), tau_neg=3.0)
    assert twice == bind(gate, tau_pos=2.0, tau_neg=3.0)
    assert bind(twice, tau_pos=4.0) == bind(gate, tau_pos=4.0, tau_neg=3.0)
    assert twice.function is gate


def test_may_hold_functions():
    nested = bind(open_ended, inner=bind(gate, tau_pos=2.0))
    assert nested == bind(open_ended, inner=bind(gate, tau_pos=2.0))
    assert nested(1)[1]["inner"](1.0, 0.0) == 2.0


def test_an_equal_bind_is_a_static_argument_that_does_not_trace_again():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, x):
        traces.append(function)
        return function(x, x)

    for _ in range(2):
        run(bind(gate, tau_pos=2.0), jnp.ones(3))
    assert len(traces) == 1
    run(bind(gate, tau_pos=3.0), jnp.ones(3))
    assert len(traces) == 2


def test_frozen():
    with pytest.raises(AttributeError):
        bind(gate, tau_pos=2.0).function = other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau_posi": 1.0}, r"bind: gate has no option 'tau_posi'. Did you mean 'tau_pos'\?"),
        ({"zzz": 1.0}, r"bind: gate has no option 'zzz'. It takes: x, mask, tau_pos, tau_neg\."),
        ({"tau_pos": [1.0]}, r"bind: option 'tau_pos' of gate must be hashable; got list"),
        ({"tau_pos": np.ones(2)}, "must be hashable; got ndarray. Arrays belong in state"),
        ({"tau_pos": jnp.ones(2)}, "must be hashable; got ArrayImpl"),
    ],
)
def test_refuses_when_it_is_made(options, message):
    with pytest.raises(TypeError, match=message):
        bind(gate, **options)
    with pytest.raises(TypeError, match=message):
        bind(bind(gate, tau_neg=2.0), **options)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="bind: expected a function; got float 3.0"):
        bind(3.0, tau_pos=2.0)
    with pytest.raises(TypeError, match="bind: the options of getattr cannot be read"):
        bind(getattr, default=2.0)


def test_accepted_leaves_out_what_is_bound():
    assert list(accepted(gate)) == ["x", "mask", "tau_pos", "tau_neg"]
    assert list(accepted(bind(gate, tau_pos=2.0))) == ["x", "mask", "tau_neg"]
    assert str(inspect.signature(bind(gate, tau_pos=2.0))) == "(x, mask, *, tau_neg=1.05)"
    assert list(inspect.signature(Bound).parameters) == ["function", "options"]


def test_call_with_passes_only_what_is_named():
    context = {"mask": 1.0, "tau_neg": 3.0, "step": 7, "x": 99.0}
    assert call_with(gate, 2.0, context=context) == 5.0
    assert call_with(bind(gate, tau_neg=10.0), 2.0, context=context) == 12.0
    assert call_with(open_ended, 2.0, context=context) == (
        2.0,
        {"mask": 1.0, "tau_neg": 3.0, "step": 7},
    )
    # A positional-only parameter cannot be given by name.
    assert call_with(jnp.negative, 2.0, context=context) == -2.0
    assert call_with(lambda x, mask=5, /: (x, mask), 2.0, context=context) == (2.0, 5)


def test_call_with_says_what_is_missing():
    with pytest.raises(TypeError, match="mask"):
        call_with(gate, 2.0, context={})
