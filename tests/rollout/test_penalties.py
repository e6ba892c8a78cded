"""Repetition penalty and tokens that are not allowed: worked numbers, laws, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm.rollout.sampling.penalties import (
    add_seen,
    only_allowed,
    penalize_repetition,
    seen_tokens,
)


def test_seen_tokens_are_penalized_by_the_sign_of_their_logit():
    seen = seen_tokens(jnp.array([0, 1, 3]), jnp.array([True, True, False]), vocab_size=4)
    out = penalize_repetition(jnp.array([3.0, -3.0, 3.0, -3.0]), seen, penalty=1.5)
    np.testing.assert_allclose(out, [2.0, -4.5, 3.0, -3.0])


def test_a_penalty_may_differ_by_row():
    seen = seen_tokens(jnp.zeros((2, 1), int), jnp.ones((2, 1), bool), vocab_size=2)
    out = penalize_repetition(jnp.full((2, 2), 2.0), seen, penalty=jnp.array([1.0, 2.0]))
    assert out.tolist() == [[2.0, 2.0], [1.0, 2.0]]


def test_adding_tokens_one_by_one_gives_the_set_of_all():
    tokens = np.random.default_rng(0).integers(0, 70, (3, 9))
    mask = np.arange(9) < [[9], [4], [0]]

    def add(seen, column):
        return add_seen(seen, *column), None

    first = seen_tokens(tokens[:, :0], mask[:, :0], vocab_size=70)
    assert first.shape == (3, 3) and not first.any()
    one_by_one, _ = jax.lax.scan(add, first, (tokens.T, mask.T))
    np.testing.assert_array_equal(one_by_one, seen_tokens(tokens, mask, vocab_size=70))


def test_tokens_that_do_not_exist_are_not_seen():
    tokens = jnp.array([-1, 70, 5])
    assert seen_tokens(tokens, jnp.ones(3, bool), vocab_size=70).tolist() == [32, 0, 0]


def test_allowed_and_stop_tokens():
    short = jnp.array([True, False])
    out = only_allowed(
        jnp.zeros((2, 4)),
        allowed=jnp.array([True, True, False, True]),
        stop_ids=(3,),
        too_short=short,
    )
    assert jnp.isfinite(out).tolist() == [[True, True, False, False], [True, True, False, True]]
    by_row = only_allowed(jnp.zeros((2, 2)), allowed=jnp.array([[True, False], [False, True]]))
    assert jnp.isfinite(by_row).tolist() == [[True, False], [False, True]]


LOGITS, SEEN, SHORT = jnp.zeros((2, 3)), jnp.zeros(1, jnp.uint32), jnp.ones(2, bool)


BAD = r"""
ValueError:
penalize_repetition(LOGITS[0], SEEN, penalty=0.0)  # penalty must be above 0
penalize_repetition(jnp.zeros(40), SEEN, penalty=2.0)  # seen must have shape \(2,\)
only_allowed(LOGITS, allowed=SHORT)  # allowed must have shape \(3,\) or \(2, 3\); got \(2,\)
only_allowed(LOGITS, too_short=SHORT)  # too_short has no effect without stop_ids
TypeError:
penalize_repetition(LOGITS[0], jnp.zeros(1, int), penalty=2.0)  # seen must be uint32
only_allowed(LOGITS, allowed=jnp.ones(3))  # allowed must be bool
seen_tokens(jnp.zeros(3), jnp.ones(3, bool), vocab_size=4)  # tokens must hold integers
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_bad_input_is_named(error, call, message):
    raises(error, call, message, globals())
