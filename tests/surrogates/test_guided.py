"""Shaped likelihoods of guided rollouts: the numbers of LUFFY, AMPO and ICPO."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.surrogates import ampo, chord, icpo, luffy_shaping, shaped_likelihood


@for_each(
    ("likelihood", "shaped", "slope"),
    [(0.01, 0.0909, 0.0826), (0.1, 0.5, 0.25), (0.5, 0.8333, 0.1389), (0.9, 0.9, 0.09)],
)
def test_worked_numbers(likelihood, shaped, slope):
    value, gradient = jax.value_and_grad(shaped_likelihood)(jnp.log(likelihood))
    close([value, gradient], [shaped, slope], atol=5e-5)


def test_shaped_likelihood():
    # No overflow at impossible tokens.
    value, gradient = jax.value_and_grad(shaped_likelihood)(jnp.float32(-1e4))
    assert value == 0 and gradient == 0
    assert shaped_likelihood(jnp.bfloat16(-1.0)).dtype == jnp.float32


@for_each("surrogate", [ampo, chord])
@for_each("junk", [np.nan, np.inf, -np.inf, 1e4])
def test_the_old_policy_is_not_read_for_a_guide(junk, surrogate):
    mask, steered = jnp.ones((2, 3), bool), jnp.array([False, True])
    logp, advantages = jnp.full((2, 3), -1.2), jnp.array([1.0, -0.5])
    old = jnp.full((2, 3), -1.0)
    dirty = jnp.where(steered[:, None], junk, old)

    def both(old):
        loss = lambda x: surrogate(x, old, advantages, mask, steered=steered).sum()  # noqa: E731
        return jax.value_and_grad(loss)(logp)

    jax.tree.map(equal, both(dirty), both(old))


def test_guides_of_tokens():
    # Guides of single tokens.
    mask, logp = jnp.ones((1, 3), bool), jnp.log(jnp.full((1, 3), 0.1))
    steered = jnp.array([[True, False, True]])
    loss = luffy_shaping(logp, logp, jnp.ones(1), mask, steered=steered)
    close(loss, [[-0.5, -1.0, -0.5]], rtol=1e-6)

    # Guided gradient is less where the token is already likely.
    logp, mask = jnp.log(jnp.array([0.1, 0.9])), jnp.ones(2, bool)
    loss = lambda x: icpo(x, None, jnp.ones(()), mask, steered=mask).sum()  # noqa: E731
    close(jax.grad(loss)(logp), [-0.25, -0.09], rtol=1e-5)

    # Bad steered is named.
    logp, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)


@for_each(("phi", "gradient"), [(True, [-0.09, -0.25, -0.09]), (False, [-1.0, -1.0, -1.0])])
def test_an_expert_moves_most_what_the_policy_is_unsure_of(phi, gradient):
    logp, mask = jnp.log(jnp.array([[0.1, 0.5, 0.9]])), jnp.ones((1, 3), bool)
    steered = jnp.ones(1, bool)
    for advantage in (0.0, -2.0):  # an expert's response has none
        a = jnp.array([advantage])
        loss = lambda x, a=a: chord(x, None, a, mask, steered=steered, phi=phi).sum()  # noqa: E731
        close(jax.grad(loss)(logp)[0], gradient, rtol=1e-5)
    certain = lambda x: chord(x, None, a, mask, steered=steered).sum()  # noqa: E731
    assert not jax.grad(certain)(jnp.array([[0.0, -200.0, 0.0]])).any()
