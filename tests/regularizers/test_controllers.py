"""Coefficients that follow a measured divergence or entropy."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core import call_with
from jaxrl_llm.regularizers import (
    adaptive_entropy,
    adaptive_kl,
    adaptive_kl_update,
    entropy_controller,
    fixed,
)

REWARDS = jnp.zeros((2, 2))
MASK = jnp.array([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]]], bool)
WHERE = jnp.array([[True, True], [False, True]])


def context(difference, entropy=0.1, junk=0.0):
    """What a Recipe offers; `difference` stands at every token that counts."""
    ref = jnp.full(MASK.shape, -1.0)
    kept = MASK & WHERE[..., None]
    return {
        "old_logp": jnp.where(kept, ref + difference, junk),
        "ref_logp": jnp.where(kept, ref, junk),
        "old_entropy": jnp.where(kept, entropy, junk),
        "mask": MASK,
        "where": WHERE,
        "key": None,
    }


def run(controller, contexts):
    state, values = controller.init(), []
    step = jax.jit(
        lambda state, c: call_with(controller.update, REWARDS, state, context=c | {"key": None})
    )
    for c in contexts:
        c.pop("key")
        value, state = step(state, c)
        assert value.dtype == jnp.float32 and value.shape == ()
        values.append(float(value))
    return values, state


def test_the_kl_controller():
    # Worked numbers.
    coef = adaptive_kl_update(0.1, 0.02, target=0.01, samples=64, horizon=1000.0)
    close(coef, 0.10128, rtol=1e-6)
    same = adaptive_kl_update(0.1, 0.01, target=0.01, samples=64, horizon=1000.0)
    close(same, 0.1, rtol=1e-6)
    none = adaptive_kl_update(1.0, 0.0, target=0.01, samples=64, horizon=1000.0)
    close(none, 1 - 0.2 * 0.064, rtol=1e-6)

    # Sequences count alike whatever their length.
    c = context(0.0)
    # 0.3 at the three tokens of one sequence, 0.9 at the only one of the other: the mean is 0.6.
    c["old_logp"] = c["ref_logp"] + jnp.array([[[0.3] * 3, [0.9, 5, 5]], [[5.0] * 3] * 2])
    _, state = run(adaptive_kl(initial=1.0, target=0.6, horizon=2.0), [c])
    close(state, 1.0, rtol=1e-5)

    # An estimator that is never negative.
    controller = adaptive_kl(initial=1.0, target=0.125, horizon=2.0, estimator="k2")
    _, state = run(controller, [context(-0.5)])
    close(state, 1.0, rtol=1e-5)


@for_each("kl", [0.0, 0.09, 0.1, 0.11, 5.0])
def test_the_change_is_clipped_to_a_fifth(kl):
    coef = adaptive_kl_update(0.5, kl, target=0.1, samples=jnp.float32(100), horizon=1000.0)
    error = min(max(kl / 0.1 - 1, -0.2), 0.2)
    close(coef, 0.5 * (1 + error * 0.1), rtol=1e-5)
    assert coef.dtype == jnp.float32


@for_each("junk", [0.0, np.nan, np.inf, -1e4])
def test_the_kl_controller_measures_the_kept_sequences(junk):
    # Three of four rollouts take part, one of them without a token: two sequences.
    controller = adaptive_kl(initial=0.1, target=0.5, horizon=10.0)
    values, state = run(controller, [context(d, junk=junk) for d in (0.55, 0.55, 0.0)])
    up, down = 1 + 0.1 * 2 / 10, 1 - 0.2 * 2 / 10
    close(values, [0.1, 0.1 * up, 0.1 * up**2], rtol=1e-4)
    close(state, 0.1 * up**2 * down, rtol=1e-4)


@for_each(
    ("horizon", "after"),
    [
        (None, 1e-3 * 1.02**30),  # the paper's gain, whatever the size of a batch
        (10_000.0, 1e-3 * (1 + 0.2 * 2 / 10_000) ** 30),  # two sequences count: it does not move
    ],
)
def test_the_gain_of_a_batch(horizon, after):
    preset = jr.recipes.adaptive_kl(**({} if horizon is None else {"horizon": horizon}))
    (entry,) = preset.computed
    _, state = run(entry.function, [context(0.55) for _ in range(30)])
    close(state, after, rtol=1e-4)
    # A batch in which nobody takes part has measured nothing.
    empty = context(0.55) | {"mask": jnp.zeros_like(context(0.55)["mask"])}
    _, same = run(entry.function, [empty])
    close(same, 1e-3, rtol=1e-6)


@for_each("junk", [0.0, np.nan])
def test_the_entropy_controller_follows_its_function(junk):
    controller = adaptive_entropy(initial=0.01, target=0.2, delta=0.005, high=0.02)
    entropies = [0.1, 0.1, 0.1, 0.3, 0.2]
    values, state = run(controller, [context(0.0, e, junk) for e in entropies])
    coef = jnp.float32(0.01)
    for entropy, value in zip(entropies, values, strict=True):
        coef, applied = entropy_controller(coef, entropy, target=0.2, delta=0.005, high=0.02)
        close(value, applied, rtol=1e-6)
    close(state, coef, rtol=1e-6)
    assert values[3] == 0.0


def test_what_changes_nothing():
    # A batch without a token changes nothing.
    for controller in (adaptive_entropy(initial=0.01), adaptive_kl(initial=0.1)):
        c = context(0.0) | {"mask": jnp.zeros_like(MASK)}
        _, state = run(controller, [c])
        equal(state, controller.init())

    # A fixed coefficient.
    values, _ = run(fixed(0.25), [context(1.0), context(9.0)])
    assert values == [0.25, 0.25]

    # Controllers compare by value.
    for make, options in ((adaptive_kl, {"target": 0.3}), (adaptive_entropy, {"delta": 0.01})):
        assert make(**options) == make(**options) != make()
        assert hash(make()) == hash(make())
    assert fixed(0.1) == fixed(0.1) != fixed(0.2)
