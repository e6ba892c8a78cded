"""Soups, moving averages and resets of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.regularizers import ema_reference, reset_reference, soup


def tree(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "layers": [jax.random.normal(keys[0], (2, 3), dtype)],
        "head": jax.random.normal(keys[1], (4,), dtype),
        "count": jnp.int32(seed),
    }


def assert_same(a, b, **options):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), a, b)


def test_worked_numbers():
    mixed = soup(({"w": jnp.array([2.0, 4.0])}, {"w": jnp.array([0.0, 2.0])}), (0.5, 0.5))
    np.testing.assert_array_equal(mixed["w"], [1.0, 3.0])
    reference = {"w": jnp.zeros(1)}
    for _ in range(10):
        reference = ema_reference(reference, {"w": jnp.ones(1)})
    np.testing.assert_allclose(reference["w"], 0.401263, atol=1e-6)


def test_soup_of_one_side_and_of_equals():
    a, b = tree(1), tree(2)
    assert_same(soup((a, b), (1.0, 0.0)), a)
    assert_same(soup((a, a), (0.3, 0.7)), a, rtol=1e-6)
    assert_same(soup((a, b)), soup((b | {"count": a["count"]}, a), (0.5, 0.5)))


def test_soup_of_three_with_traced_weights():
    trees, weights = [tree(i) for i in range(3)], jnp.array([0.2, 0.3, 0.5])
    mixed = jax.jit(soup)(trees, weights)
    expected = sum(w * np.asarray(t["head"], np.float64) for w, t in zip(weights, trees))  # noqa: B905
    np.testing.assert_allclose(mixed["head"], expected, rtol=1e-5, atol=1e-6)
    assert mixed["count"] == 0


def test_averages_are_float32_and_cast_back():
    # 1 + 1/256 is no bfloat16, but three of them and a 1 average to one that is.
    a = {"w": jnp.full(2, 1.0, jnp.bfloat16)}
    b = {"w": jnp.full(2, 1.0 + 1 / 128, jnp.bfloat16)}
    mixed = soup([a, b, b, b])
    assert mixed["w"].dtype == jnp.bfloat16
    exact = np.float32(1 + 3 / 4 / 128)
    np.testing.assert_array_equal(mixed["w"], jnp.full(2, exact).astype(jnp.bfloat16))
    reference = ema_reference({"w": jnp.zeros(1)}, {"w": jnp.ones(1, jnp.bfloat16)}, rate=0.001)
    assert reference["w"].dtype == jnp.float32
    np.testing.assert_allclose(reference["w"], 0.001, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_moving_average(rate):
    a, b = tree(1), tree(2)
    moved = jax.jit(lambda a, b: ema_reference(a, b, rate=rate))(a, b)
    expected = (1 - rate) * np.asarray(a["head"]) + rate * np.asarray(b["head"])
    np.testing.assert_allclose(moved["head"], expected, rtol=1e-5, atol=1e-6)
    assert moved["count"] == 2  # what cannot be averaged follows the policy
    if rate == 1.0:
        assert_same(moved, b, rtol=1e-6, atol=1e-7)


def test_resets_come_at_multiples_but_not_at_the_start():
    a, b = tree(1, jnp.bfloat16), tree(2)
    step = jax.jit(lambda n: reset_reference(a, b, n, every=3))
    assert [int(step(n)["count"]) for n in range(7)] == [1, 1, 1, 2, 1, 1, 2]
    assert step(3)["head"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(step(3)["head"], b["head"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(step(4)["head"], a["head"])


TREE = tree(1)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "soup: there must be at least one tree": lambda: soup(()),
        "soup: 2 trees need 2 weights; got 3": lambda: soup((TREE, TREE), (0.2, 0.3, 0.5)),
        "soup: the weights must add up to 1; got 0.9": lambda: soup((TREE, TREE), (0.4, 0.5)),
        "soup: the trees must have one structure": lambda: soup((TREE, {"head": TREE["head"]})),
        r"ema_reference: .*layers/0 has \(2, 3\) and \(3, 2\)": lambda: ema_reference(
            TREE, {**TREE, "layers": [jnp.zeros((3, 2))]}
        ),
        r"ema_reference: rate must be in \[0, 1\]; got 1.5": lambda: ema_reference(
            TREE, TREE, rate=1.5
        ),
        "reset_reference: every must be above 0": lambda: reset_reference(TREE, TREE, 0, every=0),
    }.items(),
)
def test_bad_values_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()
