"""real against the paper's loss written group by group in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, compiled, equal
from rows import for_each
from surrogate_cases import numeric_gradient

from jaxrl_llm import aggregate
from jaxrl_llm.core import traits_of
from jaxrl_llm.surrogates import real

SHAPE = (4, 3, 5)
LENGTHS = np.array([[5, 3, 1], [0, 4, 2], [2, 2, 5], [1, 3, 3]])
MASK = np.arange(5) < LENGTHS[..., None]
# Groups of both kinds, with a right answer that has no token, of one kind, and with no side.
ADVANTAGES = np.array(
    [[1.0, 0.5, -2.0], [1.0, 0.3, -0.1], [1.0, 1.0, 2.0], [0.0, -1.0, 1.0]], np.float32
)
RNG = np.random.default_rng(0)
OLD = RNG.normal(-1.5, 0.8, SHAPE).astype(np.float32)
LOGP = (OLD + RNG.normal(0, 0.5, SHAPE)).astype(np.float32)


def loss(logp, old=OLD, advantages=ADVANTAGES, mask=MASK, **options):
    tokens = real(logp, old, jnp.asarray(advantages), mask, **options)
    return aggregate.weighted_sum(tokens, aggregate.group_mean(jnp.asarray(mask)))


value_and_gradient = compiled(jax.value_and_grad(loss))


def paper64(logp, old, advantages, mask, tau):
    total = 0.0
    for x, o, a, m in zip(logp, old, advantages, mask, strict=True):
        n = m.sum(-1)
        s = np.where(m, x - o, 0).sum(-1) / np.maximum(n, 1) / tau
        right, wrong = (a > 0) & (n > 0), (a < 0) & (n > 0)
        if right.any() and wrong.any():
            total += np.log(1 + np.exp(-s[right]).sum()) + np.log(1 + np.exp(s[wrong]).sum())
    return total / len(logp)


def test_worked_numbers():
    # Scores log 2 and log 4 of right answers, log 3 of a wrong one: 1 + 1/2 + 1/4, and 1 + 3.
    logp = jnp.log(jnp.array([[2.0, 2.0], [4.0, 4.0], [3.0, 3.0]]))
    advantages, mask = jnp.array([0.3, 0.3, -0.6]), jnp.ones((3, 2), bool)

    def group(x):
        return real(x, 0 * x, advantages, mask, tau=1.0)[0, 0]

    value, gradient = jax.value_and_grad(group)(logp)
    close(value, np.log(1.75) + np.log(4), rtol=1e-6)
    shares = np.array([-0.5 / 1.75, -0.25 / 1.75, 3 / 4])  # half of each at each of two tokens
    close(gradient, np.repeat(shares[:, None] / 2, 2, 1), rtol=1e-5)


@for_each("tau", [0.5, 2.0])
def test_value_and_gradient_match_float64(tau):
    value, gradient = value_and_gradient(LOGP, tau=tau)
    x, old = LOGP.astype(np.float64), OLD.astype(np.float64)
    close(value, paper64(x, old, ADVANTAGES, MASK, tau), rtol=1e-6)
    expected = numeric_gradient(lambda x: paper64(x, old, ADVANTAGES, MASK, tau), x)
    close(gradient, expected, rtol=1e-4, atol=1e-7)
    assert not np.any(gradient[2])  # a group that agrees
    assert not np.any(gradient[3, 0])  # an answer at the baseline


def test_shares_of_responses():
    # For the old policy a kind shares its weight equally.
    for old in (LOGP, None):
        gradient = value_and_gradient(LOGP, old)[1].sum(-1) * len(LOGP)
        close(gradient[0], [-2 / 3, -2 / 3, 2 / 2], rtol=1e-5)

    # The weight of a response is bounded and falls as it is learned.
    def weights(score):
        logp = jnp.array([[score], [0.0]])
        loss = lambda x: real(x, 0 * x, jnp.array([1.0, -1.0]), jnp.ones((2, 1), bool))[0, 0]  # noqa: E731
        return -float(jax.grad(loss)(logp)[0, 0])

    found = [weights(score) for score in (-15.0, -1.0, 0.0, 1.0, 15.0)]
    assert found == sorted(found, reverse=True)
    close([found[0], found[2], found[-1]], [2.0, 1.0, 0.0], atol=1e-6)

    # An impossible response is finite.
    logp = jnp.asarray(LOGP).at[0, 0, 0].set(-jnp.inf).at[0, 2, 0].set(-jnp.inf)
    value, gradient = value_and_gradient(logp)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_only_signs_of_advantages_count_and_masked_cells_are_not_read():
    expected = loss(LOGP)
    equal(loss(LOGP, advantages=np.sign(ADVANTAGES)), expected)
    for junk in (np.nan, np.inf, -np.inf):
        dirty = [np.where(MASK, x, np.float32(junk)) for x in (LOGP, OLD)]
        sides = np.where(MASK.any(-1), ADVANTAGES, np.float32(junk))
        equal(loss(*dirty, sides), expected)
        assert np.isfinite(value_and_gradient(*dirty, sides)[1]).all()
    assert np.isnan(loss(LOGP, advantages=np.where(ADVANTAGES == 0.5, np.nan, ADVANTAGES)))


def test_constants_and_traits():
    gradients = jax.grad(lambda o, a: loss(LOGP, o, a), argnums=(0, 1))(OLD, ADVANTAGES)
    assert not np.any(gradients[0]) and not np.any(gradients[1])
    assert traits_of(real).level == "sequence" and traits_of(real).has_ratio
    assert not traits_of(real).policy_gradient
    low = [jnp.asarray(x, jnp.bfloat16) for x in (LOGP, OLD, ADVANTAGES)]
    assert real(*low, MASK).dtype == jnp.float32
