"""The critic's clipped loss and the soft minimum of two critics."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.surrogates import soft_min, value_loss

MASK = np.arange(4) < np.array([[4, 2], [0, 3]])[..., None]


def make(seed=0):
    rng = np.random.default_rng(seed)
    old = rng.normal(0, 1, MASK.shape)
    return [x.astype(np.float32) for x in (old + rng.normal(0, 0.4, MASK.shape), old, old + 0.3)]


def reference(v, old, returns, eps=0.2, huber=None, combine="max"):
    def h(d):
        if huber is None or abs(d) <= huber:
            return 0.5 * d * d
        return huber * (abs(d) - 0.5 * huber)

    out = np.zeros(v.shape)
    for i in np.ndindex(v.shape):
        near = old[i] + min(max(v[i] - old[i], -eps), eps)
        two = h(v[i] - returns[i]), h(near - returns[i])
        out[i] = max(two) if combine == "max" else sum(two) / 2
    return out


def test_worked_numbers():
    one = jnp.ones(1, bool)
    values, old, returns = jnp.array([[1.5], [1.0], [2.0]])
    close(value_loss(values, old, returns, one), 0.32, rtol=1e-5)
    close(value_loss(values, old, returns, one, eps=np.inf), 0.125)
    close(value_loss(values, None, returns, one), 0.125)
    close(value_loss(old, old, returns, one), 0.5)


def test_huber():
    # An infinite huber distance is the square.
    values, old, returns = make()

    def loss(x, huber):
        return value_loss(x, old, returns, MASK, huber=huber).sum()

    for huber in (np.inf, jnp.inf):
        got = jax.value_and_grad(loss)(values, huber)
        for ours, square in zip(got, jax.value_and_grad(loss)(values, None), strict=True):
            close(ours, square, rtol=1e-6)
    # On the distance itself the slope is that of both sides.
    edge = jax.grad(lambda x: value_loss(x, None, jnp.zeros(1), jnp.ones(1, bool), huber=0.5)[0])
    close(edge(jnp.array([0.5])), [0.5])

    # One return a sequence and bfloat16.
    values, old, _ = make(3)
    returns = np.array([[0.5, -1.0], [2.0, 0.0]], np.float32)
    whole = np.broadcast_to(returns[..., None], MASK.shape)
    equal(value_loss(values, old, returns, MASK), value_loss(values, old, whole, MASK))
    low = [jnp.asarray(x, jnp.bfloat16) for x in (values, old, whole)]
    assert value_loss(*low, MASK).dtype == jnp.float32


@for_each("eps", [0.1, 0.5])
@for_each("huber", [None, 0.3])
@for_each("combine", ["max", "mean"])
def test_value_and_gradient_match_float64(eps, huber, combine):
    values, old, returns = make()
    options = {"eps": eps, "huber": huber, "combine": combine}
    loss = lambda *x: value_loss(*x, MASK, **options)  # noqa: E731
    exact = [x.astype(np.float64) for x in (values, old, returns)]
    close(loss(values, old, returns), MASK * reference(*exact, **options), rtol=1e-5, atol=1e-6)
    gradients = jax.jit(jax.grad(lambda *x: loss(*x).sum(), argnums=(0, 1, 2)))
    gradient, *others = gradients(values, old, returns)
    assert not np.any(others[0]) and not np.any(others[1])
    expected = np.zeros(values.shape)
    for i in np.ndindex(expected.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = exact[0].copy()
            moved[i] += step
            ends.append(np.sum(MASK * reference(moved, *exact[1:], **options)))
        expected[i] = (ends[0] - ends[1]) / 2e-6
    close(gradient, expected, rtol=1e-3, atol=1e-5)


@for_each("junk", [1e4, np.nan, np.inf])
@for_each("combine", ["max", "mean"])
def test_masked_cells_are_never_read(junk, combine):
    arrays = make(1)
    options = {"huber": 0.5, "combine": combine}
    total = lambda *x: value_loss(*x, MASK, **options).sum()  # noqa: E731
    clean = jax.value_and_grad(total)(*map(jnp.asarray, arrays))
    dirty = jax.value_and_grad(total)(*(jnp.where(MASK, x, junk) for x in arrays))
    jax.tree.map(equal, dirty, clean)


@for_each(
    ("pair", "alpha", "expected"),
    [((1, 2), 0.3, 1.197428), ((1, 1), 0.3, 1), ((0, 1), 0.01, 0.006931), ((0, 1), 1e3, 0.499875)],
)
def test_worked_soft_minima(pair, alpha, expected):
    out = soft_min(jnp.array(pair, jnp.float32), alpha=alpha)
    close(out, expected, atol=1e-6)


@quick
@given(
    a=st.floats(-50, 50), b=st.floats(-50, 50), alpha=st.floats(0.01, 100), shift=st.floats(-9, 9)
)
def test_soft_min_lies_between_the_minimum_and_the_mean(a, b, alpha, shift):
    values = jnp.array([a, b], jnp.float32)
    v = soft_min(values, alpha=alpha)
    assert min(a, b) - 1e-4 <= v <= (a + b) / 2 + 1e-4
    close(soft_min(values[::-1], alpha=alpha), v, rtol=1e-5, atol=1e-5)
    close(soft_min(values + shift, alpha=alpha), v + shift, atol=2e-4)
    exact = np.array([a, b], np.float32).astype(np.float64)
    low = exact.min()
    expected = low - alpha * np.log(np.mean(np.exp((low - exact) / alpha)))
    close(v, expected, rtol=1e-4, atol=2e-4)


@for_each("alpha", [0.05, 0.3, 30.0])
def test_soft_min_gradient_is_a_distribution_over_the_critics(alpha):
    values = jnp.array([[0.2, 0.5, 0.1], [1.0, 1.0, 1.0], [5.0, -5.0, 0.0]])
    gradient = jax.jit(jax.grad(lambda x: soft_min(x, alpha=alpha).sum()))(values)
    close(gradient, jax.nn.softmax(-values / alpha), rtol=1e-4, atol=1e-6)
