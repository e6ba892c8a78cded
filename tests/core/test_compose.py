"""bind, given, Transform, stateless and chain."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm import Transform, advantages, bind, chain, given, pipe, stateless
from jaxrl_llm.core import Bound, accepted, call_with, functions_of, parts_of, traits_of
from jaxrl_llm.core.compose import prints_as_call, stable_repr


def gate(x, mask, *, tau_pos=1.0, tau_neg=1.05):
    return x * tau_pos + mask * tau_neg


def other(x, mask, *, tau_pos=1.0, tau_neg=1.05):
    return x


def open_ended(x, **options):
    return x, options


def test_the_text_of_a_set_is_that_of_every_process():
    assert stable_repr(frozenset({"b", "c", "a"})) == "frozenset({'a', 'b', 'c'})"
    assert stable_repr({gate}) == "set({gate})" and stable_repr(set()) == "set()"


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


@for_each(("a", "b"), [(1, 1.0), (1, True), (0.0, False), ((1, 2), (1.0, 2))])
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
    with pytest.raises(TypeError, match=message):
        bind(gate, **options)
    with pytest.raises(TypeError, match=message):
        bind(bind(gate, tau_neg=2.0), **options)


@for_each(
    ("call", "message"),
    [
        (lambda: bind(3.0, tau_pos=2.0), "bind: expected a function; got float 3.0"),
        (lambda: bind(getattr, default=2.0), "bind: the signature of getattr cannot be read"),
        (lambda: call_with(gate, 2.0, context={}), "mask"),
        (lambda: given(combined, reward="columns"), "combined has no parameter 'reward'"),
        (lambda: stateless(scaled).update(2.0, ()), "factor"),
        (lambda: stateless(scaled, facto=3.0), "Did you mean 'factor'"),
        (lambda: stateless("grpo"), "stateless: expected a function; got str 'grpo'"),
        (lambda: chain(stateless(scaled), advantages.rloo), "chain: argument 1 must be a Transf"),
        (lambda: chain(bind(scaled, factor=2.0)), r"got scaled\(factor=2.0\). Lift a function"),
    ],
)
def test_what_cannot_be_called_is_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


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


def running_mean():
    """Subtracts the mean of all batches so far; the smallest transform with state."""

    def update(x, state, **_):
        total, count = state
        state = (total + x.mean(), count + 1)
        return x - state[0] / state[1], state

    return Transform(lambda: (jnp.zeros(()), jnp.zeros((), jnp.int32)), update)


def scaled(x, *, factor, offset=0.0):
    return x * factor + offset


def test_stateless_hands_over_only_the_context_that_is_named():
    transform = stateless(scaled, factor=3.0)
    out, state = transform.update(2.0, transform.init(), offset=1.0, step=5, mask=None)
    assert out == 7.0
    assert state == ()


def test_stateless_takes_needed_context():
    transform = stateless(scaled)
    assert transform.update(2.0, (), factor=4.0)[0] == 8.0


def test_a_bound_option_is_not_replaced_by_the_context():
    transform = stateless(scaled, factor=3.0)
    assert transform.update(2.0, (), factor=100.0)[0] == 6.0


def test_stateless_passes_where_to_an_advantage():
    transform = stateless(advantages.grpo, ddof=0)
    rewards, where = jnp.array([[1.0, 0.0, jnp.nan]]), jnp.array([[True, True, False]])
    out, _ = transform.update(rewards, transform.init(), where=where, mask=None)
    assert jnp.array_equal(out, advantages.grpo(rewards, where=where, ddof=0))


def test_compare_by_value_and_do_not_trace_again():
    def make():
        return chain(stateless(scaled, factor=2.0), stateless(advantages.rloo))

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != chain(stateless(scaled, factor=3.0), stateless(advantages.rloo))
    assert stateless(scaled, factor=2.0) == stateless(bind(scaled, factor=2.0))
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(transform, x):
        traces.append(transform)
        return transform.update(x, transform.init())[0]

    run(make(), jnp.ones((2, 3)))
    run(make(), jnp.ones((2, 3)))
    assert len(traces) == 1


def test_chain_applies_in_order_and_keeps_each_state():
    both = chain(running_mean(), stateless(scaled, factor=10.0))
    state = both.init()
    out, state = both.update(jnp.array([1.0, 3.0]), state, step=0)
    assert out.tolist() == [-10.0, 10.0]
    out, state = both.update(jnp.array([4.0, 4.0]), state, step=1)
    assert out.tolist() == [10.0, 10.0]
    assert int(state[0][1]) == 2
    reversed_ = chain(stateless(scaled, factor=10.0), running_mean())
    out, _ = reversed_.update(jnp.array([1.0, 3.0]), reversed_.init())
    assert out.tolist() == [-10.0, 10.0]


def test_chain_gives_the_context_to_all():
    both = chain(stateless(scaled, factor=1.0), stateless(scaled, factor=2.0))
    assert both.update(0.0, both.init(), offset=1.0)[0] == 3.0


def test_chains_nest_and_an_empty_one_does_nothing():
    nested = chain(chain(), chain(stateless(scaled, factor=2.0)))
    assert nested.init() == ((), ((),))
    assert nested.update(3.0, nested.init())[0] == 6.0


def test_state_rides_through_jit():
    both = chain(running_mean(), stateless(scaled, factor=1.0))
    out, state = jax.jit(both.update)(jnp.array([1.0, 3.0]), both.init())
    assert out.tolist() == [-1.0, 1.0]
    assert jax.tree.structure(state) == jax.tree.structure(both.init())


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
    with pytest.raises(ValueError, match="pipe: there must be at least one function"):
        pipe()


def test_what_goes_into_a_pipe_stays_under_its_name():
    def doubled(x):
        return 2.0 * x

    def compared(y, *, x, shift=0.0):
        return y - x + shift

    both = pipe(doubled, compared, compared)
    assert list(accepted(both)) == ["x", "shift"]
    assert both(3.0) == both(x=3.0) == 0.0 and both(3.0, shift=1.0) == 2.0


def test_traits_of_a_pipe():
    both = pipe(advantages.maxrl, advantages.terminal_rewards)
    assert traits_of(both).reward_range == (0.0, float("inf")) and traits_of(both).token_values


def test_a_chain_learns_where_its_transforms_do():
    def update(x, state):
        return x, state

    def learn(state, *, losses):
        return state + losses.sum()

    counts = Transform(lambda: jnp.zeros(()), update, learn)
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
