"""Transform, stateless and chain."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import Transform, advantages, bind, chain, stateless
from jaxrl_llm.core import functions_of, parts_of


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
    with pytest.raises(TypeError, match="factor"):
        transform.update(2.0, ())


def test_a_bound_option_is_not_replaced_by_the_context():
    transform = stateless(scaled, factor=3.0)
    assert transform.update(2.0, (), factor=100.0)[0] == 6.0


def test_stateless_passes_where_to_an_advantage():
    transform = stateless(advantages.grpo, ddof=0)
    rewards, where = jnp.array([[1.0, 0.0, jnp.nan]]), jnp.array([[True, True, False]])
    out, _ = transform.update(rewards, transform.init(), where=where, mask=None)
    assert jnp.array_equal(out, advantages.grpo(rewards, where=where, ddof=0))


def test_stateless_refuses_unknown_options_when_made():
    with pytest.raises(TypeError, match="Did you mean 'factor'"):
        stateless(scaled, facto=3.0)


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


@pytest.mark.parametrize("state", [((),), ((), (), ()), jnp.zeros(())])
def test_a_state_of_another_chain_is_refused(state):
    both = chain(stateless(scaled, factor=1.0), stateless(scaled, factor=2.0))
    with pytest.raises(ValueError, match="chain: 2 transforms but [13] states"):
        both.update(1.0, state)
