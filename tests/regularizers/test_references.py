"""Moving averages and resets of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.core import bind
from jaxrl_llm.regularizers import (
    Anchored,
    anchored,
    ema_reference,
    extrapolated,
    ramped_reference,
    random_reference,
    reset_reference,
)


def tree(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "layers": [jax.random.normal(keys[0], (2, 3), dtype)],
        "head": jax.random.normal(keys[1], (4,), dtype),
        "count": jnp.int32(seed),
    }


def assert_same(a, b, **options):
    jax.tree.map(lambda x, y: close(x, y, **options), a, b)


def test_moving_averages():
    # Worked numbers.
    reference = {"w": jnp.zeros(1)}
    for _ in range(10):
        reference = ema_reference(reference, {"w": jnp.ones(1)})
    close(reference["w"], 0.401263, atol=1e-6)

    # A moving average is float32.
    reference = ema_reference({"w": jnp.zeros(1)}, {"w": jnp.ones(1, jnp.bfloat16)}, rate=0.001)
    assert reference["w"].dtype == jnp.float32
    close(reference["w"], 0.001, rtol=1e-6)

    # A moving average moves at multiples of its steps alone.
    a, b = tree(1, jnp.bfloat16), tree(2)
    step = jax.jit(lambda n: ema_reference(a, b, n, rate=0.3, every=3))
    moved = ema_reference(a, b, rate=0.3)
    for n in range(7):
        assert_same(step(n), moved if n in (3, 6) else a)
        assert step(n)["head"].dtype == jnp.bfloat16
    # Every step is the default, whatever the step, and needs none.
    for n in (None, 0, 1, 3):
        assert_same(ema_reference(a, b, n, rate=0.3, every=1), moved)

    # Two moves in eight steps are those of trl. TRL moves where the count of optimizer steps is a
    # multiple, after the step: 4 and 8.
    reference, expected = {"w": jnp.zeros(2)}, np.zeros(2)
    for n in range(1, 9):
        params = np.array([n, -n / 2])
        reference = ema_reference(reference, {"w": jnp.asarray(params)}, n, rate=0.6, every=4)
        if n % 4 == 0:
            expected = expected * (1 - 0.6) + params * 0.6
    close(reference["w"], expected, rtol=1e-6)


@for_each("rate", [0.0, 0.3, 1.0])
def test_moving_average(rate):
    a, b = tree(1), tree(2)
    moved = jax.jit(lambda a, b: ema_reference(a, b, rate=rate))(a, b)
    expected = (1 - rate) * np.asarray(a["head"]) + rate * np.asarray(b["head"])
    close(moved["head"], expected, rtol=1e-5, atol=1e-6)
    assert moved["count"] == 2  # what cannot be averaged follows the policy
    if rate == 1.0:
        assert_same(moved, b, rtol=1e-6, atol=1e-7)


def test_the_memory_of_a_ramped_average_grows():
    a, b = tree(1, jnp.bfloat16), tree(2)
    step = jax.jit(lambda n: ramped_reference(a, b, n, slope=0.25, most=0.6, flat=1))
    for n, decay in enumerate((0.0, 0.0, 0.25, 0.5, 0.6, 0.6)):
        assert_same(step(n), ema_reference(a, b, rate=1 - decay), rtol=1e-2, atol=1e-2)
        assert step(n)["head"].dtype == jnp.bfloat16 and step(n)["count"] == 2
    assert_same(ramped_reference(tree(1), b, 7, slope=0.0), b, rtol=1e-6)  # on policy
    assert_same(ramped_reference(tree(1), b, 100), ema_reference(tree(1), b, rate=0.9), rtol=1e-5)
    reference, want = {"w": jnp.ones(())}, 1.0
    for n in range(1, 6):
        reference = ramped_reference(reference, {"w": jnp.zeros(())}, n, slope=0.2, most=0.7)
        want *= min(0.2 * n, 0.7)
    close(reference["w"], want, rtol=1e-6)
    for n in (37, 38, 60, 200):  # the count of two updates on a batch, and of batches
        updates = ramped_reference(tree(1), b, 2 * n, slope=0.0075, flat=75, most=0.999)
        batches = ramped_reference(tree(1), b, n, slope=0.015, flat=37.5, most=0.999)
        assert_same(updates, batches, rtol=1e-5, atol=1e-6)


def test_an_anchored_reference_keeps_what_it_began_with():
    rule = anchored(bind(ema_reference, rate=0.5))
    assert rule == anchored(bind(ema_reference, rate=0.5)) != anchored(ema_reference)
    state = rule.init(tree(1))
    for n in (1, 2):
        state = jax.jit(rule)(state, tree(2), n)
    assert isinstance(state, Anchored)
    assert_same(state.anchor, tree(1))
    twice = ema_reference(tree(1), tree(2), rate=0.75)
    assert_same(state.reference, twice, rtol=1e-6, atol=1e-6)


def test_resets_come_at_multiples_but_not_at_the_start():
    a, b = tree(1, jnp.bfloat16), tree(2)
    step = jax.jit(lambda n: reset_reference(a, b, n, every=3))
    assert [int(step(n)["count"]) for n in range(7)] == [1, 1, 1, 2, 1, 1, 2]
    assert step(3)["head"].dtype == jnp.bfloat16
    equal(step(3)["head"], b["head"].astype(jnp.bfloat16))
    equal(step(4)["head"], a["head"])


def drawn_references(*, iterations, stored, seeds=4000, every=2):
    """``[seeds, iterations + 1]``: which policy is the reference of each iteration.

    The policy at the beginning of iteration k is k.
    """
    rule = random_reference(every=every, stored=stored)

    def of_seed(seed):
        key = jax.random.key(seed)

        def advance(state, step):
            after = rule(state, step.astype(jnp.float32) / every, step, key=key)
            return after, after.reference

        steps = jnp.arange(1, every * iterations + 1)
        state = rule.init(jnp.float32(0.0))
        _, references = jax.lax.scan(advance, state, steps)
        # An iteration begins at the steps that are multiples of ``every``.
        return jnp.concatenate([state.reference[None], references[every - 1 :: every]])

    return np.asarray(jax.jit(jax.vmap(of_seed))(jnp.arange(seeds)))


@for_each(
    ("stored", "changes", "returns"),
    [
        (7, sum(k / (k + 1) for k in range(1, 7)), True),  # 4.41, independent draws
        (3, None, True),
        (1, sum(1 / (k + 1) for k in range(1, 7)), False),  # 1.59
    ],
)
def test_a_random_reference_is_each_policy_so_far_and_drawn_anew(stored, changes, returns):
    drawn = drawn_references(iterations=6, stored=stored)
    shares = np.bincount(drawn[:, 5].astype(int), minlength=6) / len(drawn)
    close(shares, 1 / 6, atol=0.025)
    if changes is not None:
        close((np.diff(drawn) != 0).sum(-1).mean(), changes, atol=0.06)
    assert (np.diff(drawn) < 0).any() == returns
    assert (drawn <= np.arange(7)).all() and (drawn[:, 0] == 0).all()


def test_a_random_reference_moves_at_the_start_of_an_iteration_alone():
    rule, key = random_reference(every=3, stored=2), jax.random.key(0)
    assert rule == random_reference(every=3, stored=2) != random_reference(every=3)
    state = rule.init(tree(1))
    for n in (0, 1, 2, 4):
        assert_same(rule(state, tree(2), n, key=key), state)
    assert_same(rule(state, tree(2), 3, key=key).policies[1], tree(2))


def test_an_iteration_begins_beyond_the_policy_of_the_last_one():
    rule = extrapolated(every=2, alpha=0.5)
    state, step = rule.init(tree(1)), jax.jit(rule)
    same, params = step(state, tree(2), 1)
    assert_same((same, params), (state, tree(2)))
    state, params = step(state, tree(2), 2)
    a, b = tree(1)["head"], tree(2)["head"]
    close(params["head"], b + 0.5 * (b - a), rtol=1e-6)
    assert_same(state.reference, params)
    assert_same(state.previous, tree(2))
    # The next step is measured from where the policy was, and not from beyond.
    c = tree(3)["head"]
    _, params = step(state, tree(3), 4)
    close(params["head"], c + 0.5 * (c - b), rtol=1e-6)
    state, params = extrapolated(every=1, alpha=0.0)(rule.init(tree(1)), tree(2), 1)
    assert_same(state.reference, reset_reference(tree(1), tree(2), 1, every=1))
    assert_same(params, tree(2))
