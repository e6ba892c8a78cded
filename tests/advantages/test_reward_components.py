"""gdpo: several rewards by name, normalized one by one."""

import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.advantages import gate_rewards, gdpo, gdpo_token, grpo, sum_components
from jaxrl_llm.core import traits_of

SHAPE = (3, 4)
WEIGHTS = (("a", 1.0), ("b", 0.5), ("c", -2.0))
eighths = hnp.arrays(np.float32, (3, *SHAPE), elements=st.integers(-16, 16).map(lambda i: i / 8))
kept = hnp.arrays(np.bool_, SHAPE)
applies = hnp.arrays(np.bool_, (3, *SHAPE))


def components(values, there=None):
    values = values if there is None else np.where(there, values, np.float32(np.nan))
    return dict(zip("abc", values, strict=True))


def spread(x):
    return x.max() - x.min() if x.size else 0.0


def reference_sum(rewards, where, weights, eps, ddof):
    total, present = np.zeros(where.shape), np.zeros(where.shape, bool)
    for name, weight in weights:
        for p in range(len(where)):
            row = rewards[name][p].astype(np.float64)
            keep = where[p] & ~np.isnan(row)
            present[p] |= keep
            r = row[keep]
            if len(r) > 1 and r.max() > r.min():
                total[p, keep] += weight * (r - r.mean()) / (r.std(ddof=ddof) + eps)
    return total, present


def reference(rewards, where, weights=WEIGHTS, eps=1e-4, ddof=1, batch_norm="sequence"):
    total, present = reference_sum(rewards, where, weights, eps, ddof)
    a = total[present]
    if batch_norm == "none":
        return total
    out = np.zeros(where.shape)
    if len(a) > ddof and spread(a) > 1e-9:
        out[present] = (a - a.mean()) / (a.std(ddof=ddof) + eps)
    return out


def reference_token(rewards, mask, where, weights=WEIGHTS, eps=1e-6, norm_eps=1e-8):
    total, present = reference_sum(rewards, where, weights, eps, 1)
    out = np.zeros(mask.shape)
    cells = mask & present[..., None]
    flat = np.broadcast_to(total[..., None], mask.shape)[cells]
    if len(flat) > 1 and spread(flat) > 1e-9:
        out[cells] = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + norm_eps)
    return out


def test_worked_numbers():
    rewards = {
        "first": np.array([[0.0, 1.0], [0.0, 1.0]]),
        "second": np.array([[0.0, 1.0], [0.0, 0.0]]),
    }
    close(
        gdpo(rewards, batch_norm="none"), [[-1.414014, 1.414014], [-0.707007, 0.707007]], atol=1e-6
    )
    close(gdpo(rewards), [[-1.095360, 1.095360], [-0.547680, 0.547680]], atol=1e-6)
    # GRPO on the sum cannot tell two satisfied rewards from one.
    close(
        grpo(sum_components(rewards), eps=1e-4),
        [[-0.707057, 0.707057], [-0.707007, 0.707007]],
        atol=1e-6,
    )


@for_each("batch_norm", ["sequence", "none"])
@for_each("ddof", [0, 1])
@quick
@given(values=eighths, where=kept, there=applies)
def test_equals_the_float64_reference(batch_norm, ddof, values, where, there):
    rewards = components(values, there)
    options = {"weights": WEIGHTS, "batch_norm": batch_norm, "ddof": ddof}
    got = np.asarray(gdpo(rewards, where=where, **options))
    assert got.dtype == np.float32
    expected = reference(rewards, where, **options)
    # Sums that are equal but for rounding have no deviation to divide by.
    total, present = reference_sum(rewards, where, WEIGHTS, 1e-4, ddof)
    if batch_norm == "none" or spread(total[present]) > 1e-3:
        close(got, expected, rtol=2e-4, atol=2e-4)
    assert np.isfinite(got).all()
    assert not got[~where].any()


@quick
@given(
    values=eighths,
    where=kept,
    there=applies,
    lengths=hnp.arrays(int, SHAPE, elements=st.integers(0, 3)),
)
def test_the_token_form_equals_the_float64_reference(values, where, there, lengths):
    rewards, mask = components(values, there), np.arange(3) < lengths[..., None]
    got = np.asarray(gdpo_token(rewards, mask, where=where, weights=WEIGHTS))
    assert np.isfinite(got).all()
    assert not got[~(mask & where[..., None])].any()
    total, present = reference_sum(rewards, where, WEIGHTS, 1e-6, 1)
    used = np.broadcast_to(total[..., None], mask.shape)[mask & present[..., None]]
    if spread(used) > 1e-3:
        expected = reference_token(rewards, mask, where)
        close(got, expected, rtol=2e-4, atol=2e-4)


@for_each("size", [3, 12])
def test_equal_rewards_give_exactly_zero(size):
    def function(x):
        mask = np.ones((2, size, 2), bool)
        both = {"a": x, "b": 2 * x}
        return gdpo(both)[..., None] + gdpo_token(both, mask)

    assert not function(np.full((2, size), 0.1)).any()


def test_dtypes_and_weights():
    low = {"a": np.array([[1.0, 0.5, 0.25]], jnp.bfloat16), "b": np.array([[1.0, 0.0, 3.0]])}
    assert gdpo(low).dtype == jnp.float32
    assert sum_components(low).dtype == jnp.float32
    high = {name: x.astype(jnp.float32) for name, x in low.items()}
    equal(gdpo(low), gdpo(high))
    pairs, mapping = (("a", 1.0), ("b", 0.5)), {"b": 0.5, "a": 1.0}
    equal(gdpo(low, weights=pairs), gdpo(low, weights=mapping))
    bound = jr.bind(gdpo, weights=pairs)
    equal(bound(low), gdpo(low, weights=mapping))
    assert gdpo({"a": np.zeros((0, 4))}).shape == (0, 4)
    assert gdpo({"a": np.zeros((4, 0))}).shape == (4, 0)


def test_gate():
    nan = np.nan
    rewards = {
        "right": np.array([0.0, 1.0, nan, 0.5]),
        "short": np.array([0.75, 0.5, 0.25, nan]),
        "tidy": np.array([1.0, 1.0, 1.0, 1.0]),
    }
    gated = gate_rewards(rewards, by="right", threshold=0.5)
    equal(gated["right"], rewards["right"])
    equal(gated["short"], [0.0, 0.5, 0.0, nan])
    equal(gated["tidy"], [0.0, 1.0, 0.0, 1.0])
    some = gate_rewards(rewards, by="right", threshold=0.5, components=("short",))
    equal(some["tidy"], rewards["tidy"])
    equal(some["short"], gated["short"])


def test_a_gate_as_an_option():
    rng = np.random.default_rng(3)
    rewards = components(rng.uniform(0, 1, size=(3, *SHAPE)).astype(np.float32))
    shut = gate_rewards(rewards, by="b", threshold=0.5)
    equal(gdpo(rewards, gate=("b", 0.5)), gdpo(shut))
    mask = np.ones((*SHAPE, 2), bool)
    equal(gdpo_token(rewards, mask, gate=("b", 0.5)), gdpo_token(shut, mask))


def test_marks():
    assert traits_of(gdpo_token).token_values
    assert not traits_of(gdpo).token_values
