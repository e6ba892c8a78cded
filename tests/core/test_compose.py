"""bind, connect, Transform, stateless, chain and pipe.

- ``bind(f, a=1)`` is f with options: equal by value (1, 1.0 and True are three values), hashable,
  flat, and printed alike in every process. Misspelled or unhashable options are refused.
- ``stateless`` lifts a function into a transform that reads of the context only what it names.
- ``chain`` applies transforms in order, each with its state; ``pipe`` does so for functions.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import Transform, advantages, bind, chain, connect, pipe, stateless
from jaxrl_llm.core import Bound, accepted, call_with, functions_of, parts_of, traits_of
from jaxrl_llm.core.compose import prints_as_call, stable_repr


def gate(x, mask, *, tau_pos=1.0, tau_neg=1.05):
    return x * tau_pos + mask * tau_neg


def other(x, mask, *, tau_pos=1.0, tau_neg=1.05):
    return x


def open_ended(x, **options):
    return x, options


def combined(rewards, *, where=None, weights=None):
    return rewards, where, weights


def scaled(x, *, factor, offset=0.0):
    return x * factor + offset


def running_mean():
    """Subtracts the mean of all batches so far; the smallest transform with state."""

    def update(x, state, **_):
        total, count = state
        state = (total + x.mean(), count + 1)
        return x - state[0] / state[1], state

    return Transform(lambda: (jnp.zeros(()), jnp.zeros((), jnp.int32)), update)


def test_equal_by_value_whatever_the_order():
    one, two = bind(gate, tau_pos=2.0, tau_neg=3.0), bind(gate, tau_neg=3.0, tau_pos=2.0)
    assert one == two and hash(one) == hash(two) and len({one, two, bind(other)}) == 2
    assert one != bind(gate, tau_pos=2.0) != bind(gate, tau_pos=2.0, tau_neg=4.0)
    assert one != bind(other, tau_pos=2.0, tau_neg=3.0)
    with pytest.raises(AttributeError):
        one.function = other


@for_each(("a", "b"), [(1, 1.0), (1, True), (0.0, False), ((1, 2), (1.0, 2))])
def test_options_of_other_types_are_other_options(a, b):
    assert a == b
    assert bind(gate, tau_pos=a) != bind(gate, tau_pos=b)
    assert len({bind(gate, tau_pos=a), bind(gate, tau_pos=b), bind(gate, tau_pos=a)}) == 2


class Scaled:
    def __call__(self, x):
        return x


def test_what_it_prints_is_the_same_in_every_process():
    """A resumed run compares it, so no place in memory may be part of it."""
    assert repr(bind(gate, tau_pos=2.0, tau_neg=3)) == "gate(tau_neg=3, tau_pos=2.0)"
    assert repr(bind(gate)) == "gate()" and bind(gate, tau_pos=2.0).__name__ == "gate"
    assert repr(bind(open_ended, inner=gate)) == "open_ended(inner=gate)"
    assert repr(bind(open_ended, inner=jax.nn.relu)) == "open_ended(inner=relu)"
    partial = functools.partial(gate, tau_pos=2.0)
    shown = "functools.partial(<function gate>, tau_pos=2.0)"
    assert repr(bind(open_ended, inner=(partial,))) == f"open_ended(inner=({shown},))"
    assert repr(bind(partial, tau_neg=3.0)) == f"{shown}(tau_neg=3.0)"
    assert re.fullmatch(r"<[\w.]*Scaled object>\(\)", repr(bind(Scaled())))
    assert stable_repr(frozenset({"b", "c", "a"})) == "frozenset({'a', 'b', 'c'})"
    assert stable_repr({gate}) == "set({gate})" and stable_repr(set()) == "set()"


def test_binding_again_adds_and_replaces_and_stays_flat():
    twice = bind(bind(gate, tau_pos=2.0), tau_neg=3.0)
    assert twice == bind(gate, tau_pos=2.0, tau_neg=3.0) and twice.function is gate
    assert bind(twice, tau_pos=4.0) == bind(gate, tau_pos=4.0, tau_neg=3.0)
    assert twice(3.0, 1.0) == 9.0
    assert twice(3.0, 1.0, tau_pos=5.0) == 18.0  # an option at the call wins


@for_each(
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
    for function in (gate, bind(gate, tau_neg=2.0)):
        with pytest.raises(TypeError, match=message):
            bind(function, **options)


BAD = """
TypeError:
    bind(3.0, tau_pos=2.0)  # expected a function; got float 3.0
    bind(getattr, default=2.0)  # the signature of getattr cannot be read
    call_with(gate, 2.0, context={})  # !.*mask
    connect(combined, reward="columns")  # combined has no parameter 'reward'
    stateless(scaled).update(2.0, ())  # !.*factor
    stateless(scaled, facto=3.0)  # !.*Did you mean 'factor'
    stateless("grpo")  # expected a function; got str 'grpo'
    chain(stateless(scaled), advantages.rloo)  # !chain: argument 1 must be a Transf
    chain(bind(scaled, factor=2.0))  # got scaled.factor=2.0.. Lift a function
ValueError:
    pipe()  # there must be at least one function
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_what_cannot_be_called_is_refused(error, call, message):
    raises(error, call, message, {"gate": gate, **globals()})


def test_accepted_leaves_out_what_is_bound():
    assert list(accepted(gate)) == ["x", "mask", "tau_pos", "tau_neg"]
    assert list(accepted(bind(gate, tau_pos=2.0))) == ["x", "mask", "tau_neg"]
    assert str(inspect.signature(bind(gate, tau_pos=2.0))) == "(x, mask, *, tau_neg=1.05)"
    assert list(inspect.signature(Bound).parameters) == ["function", "options"]


def test_call_with_passes_only_what_is_named():
    context = {"mask": 1.0, "tau_neg": 3.0, "step": 7, "x": 99.0}
    assert call_with(gate, 2.0, context=context) == 5.0
    assert call_with(bind(gate, tau_neg=10.0), 2.0, context=context) == 12.0
    rest = {"mask": 1.0, "tau_neg": 3.0, "step": 7}
    assert call_with(open_ended, 2.0, context=context) == (2.0, rest)
    # A positional-only parameter cannot be given by name.
    assert call_with(jnp.negative, 2.0, context=context) == -2.0
    assert call_with(lambda x, mask=5, /: (x, mask), 2.0, context=context) == (2.0, 5)


def test_connect_renames_a_parameter_which_the_context_then_must_have():
    read = connect(combined, rewards="columns")
    found, _ = stateless(read).update(5, (), columns={"a": 1}, where=3, other=2)
    assert found == ({"a": 1}, 3, None)
    assert list(inspect.signature(read).parameters) == ["_rewards", "where", "weights", "columns"]
    parameters = inspect.signature(connect(combined, weights="scales")).parameters
    assert parameters["scales"].default is inspect.Parameter.empty and "weights" not in parameters
    assert connect(combined, weights="scales")(1, scales=7) == (1, None, 7)
    # An entry may have the name of the place that it takes.
    assert connect(combined, rewards="rewards")(5, rewards=7) == (7, None, None)
    one, two = (connect(bind(combined, weights=3), rewards="columns") for _ in range(2))
    assert one == two and hash(one) == hash(two) and one.__name__ == "combined"
    assert repr(one) == "connect(combined(weights=3), rewards='columns')"
    assert repr(read) == "connect(combined, rewards='columns')"
    with pytest.warns(DeprecationWarning, match="use connect"):
        assert jr.given(combined, rewards="columns") == read


def test_stateless_hands_over_only_the_context_that_is_named():
    transform = stateless(scaled, factor=3.0)
    assert transform.update(2.0, transform.init(), offset=1.0, step=5, mask=None) == (7.0, ())
    assert transform.update(2.0, (), factor=100.0)[0] == 6.0  # what is bound stays
    assert stateless(scaled).update(2.0, (), factor=4.0)[0] == 8.0


def test_compare_by_value_and_do_not_trace_again():
    def make(factor=2.0):
        return chain(stateless(scaled, factor=factor), stateless(advantages.rloo))

    assert make() == make() and hash(make()) == hash(make()) and make() != make(3.0)
    assert stateless(scaled, factor=2.0) == stateless(bind(scaled, factor=2.0))
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(transform, x):
        traces.append(transform)
        return transform.update(x, transform.init())[0]

    for factor in (2.0, 2.0, 3.0):
        run(make(factor), jnp.ones((2, 3)))
    assert len(traces) == 2


def test_chain_applies_in_order_and_keeps_each_state():
    both = chain(running_mean(), stateless(scaled, factor=10.0))
    out, state = jax.jit(both.update)(jnp.array([1.0, 3.0]), both.init(), step=0)
    assert out.tolist() == [-10.0, 10.0]
    out, state = both.update(jnp.array([4.0, 4.0]), state, step=1)
    assert out.tolist() == [10.0, 10.0] and int(state[0][1]) == 2
    reversed_ = chain(stateless(scaled, factor=10.0), running_mean())
    out, _ = reversed_.update(jnp.array([1.0, 3.0]), reversed_.init())
    assert out.tolist() == [-10.0, 10.0]
    # All have the context; chains nest, and an empty one does nothing.
    both = chain(chain(), chain(stateless(scaled, factor=1.0)), stateless(scaled, factor=2.0))
    assert both.init() == ((), ((),), ()) and both.update(0.0, both.init(), offset=1.0)[0] == 3.0


def test_functions_of_looks_into_chains():
    bound = bind(scaled, factor=2.0)
    assert functions_of(stateless(scaled, factor=2.0)) == (bound,)
    nested = chain(chain(), running_mean(), chain(stateless(advantages.rloo), stateless(bound)))
    assert functions_of(nested) == (advantages.rloo, bound)
    assert functions_of(running_mean()) == functions_of(None) == ()
    assert parts_of(running_mean()) is None
    assert parts_of(chain(nested, nested)) == (nested, nested)


@for_each("state", [((),), ((), (), ()), jnp.zeros(())])
def test_a_state_of_another_chain_is_refused(state):
    both = chain(stateless(scaled, factor=1.0), stateless(scaled, factor=2.0))
    with pytest.raises(ValueError, match="chain: 2 transforms but [13] states"):
        both.update(1.0, state)


def test_pipe_hands_each_function_what_it_names():
    def first(x, *, scale=2.0):
        return scale * x

    def second(x, *, shift, scale):
        return x * scale + shift

    both = pipe(first, second)
    assert both(3.0, scale=10.0, shift=1.0) == both(x=3.0, scale=10.0, shift=1.0) == 301.0
    assert both == pipe(first, second) and hash(both) == hash(pipe(first, second))
    parameters = accepted(both)
    assert list(parameters) == ["x", "scale", "shift"]
    assert parameters["scale"].default is inspect.Parameter.empty  # the second requires it
    bound = pipe(first, bind(second, scale=1.0))
    assert accepted(bound)["scale"].default == 2.0 and bound(3.0, shift=1.0) == 7.0
    assert repr(bound).endswith("second(scale=1.0))")
    assert stateless(both).update(1.0, (), scale=1.0, shift=0.5, other=9) == (1.5, ())
    # What goes into a pipe stays under its name.
    compared = lambda y, *, x, shift=0.0: y - x + shift  # noqa: E731
    both = pipe(lambda x: 2.0 * x, compared, compared)
    assert list(accepted(both)) == ["x", "shift"]
    assert both(3.0) == both(x=3.0) == 0.0 and both(3.0, shift=1.0) == 2.0
    both = pipe(advantages.maxrl, advantages.terminal_rewards)
    assert traits_of(both).reward_range == (0.0, float("inf")) and traits_of(both).token_values


def test_a_chain_learns_where_its_transforms_do():
    learn = lambda state, *, losses: state + losses.sum()  # noqa: E731
    counts = Transform(lambda: jnp.zeros(()), lambda x, state: (x, state), learn)
    both = chain(stateless(jnp.negative), counts)
    assert both.learn(both.init(), losses=jnp.ones(3), logp=None) == ((), 3.0)
    assert chain(stateless(jnp.negative)).learn is None
    assert both == chain(stateless(jnp.negative), counts)


def test_a_transform_prints_options_that_are_arrays_or_traced():
    @prints_as_call
    def shifted(by=0.0, *, scale=1.0):
        return Transform(lambda: (), lambda x, state: (x * scale + by, state))

    assert shifted(scale=2.0).call == "shifted(scale=2.0)"
    assert "by=" in shifted(np.arange(2.0)).call

    @jax.jit
    def add(by):
        transform = shifted(by)
        assert "by=" in transform.call and "scale" not in transform.call
        return transform.update(1.0, ())[0]

    assert float(add(2.0)) == 3.0
