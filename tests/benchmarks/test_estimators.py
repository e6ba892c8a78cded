"""The benchmark of estimators runs on small sizes, and its page is current."""

import inspect

import jax.numpy as jnp
import pytest

import jaxrl_llm as jr
from benchmarks import estimators
from benchmarks.estimator_cases import ADVANTAGES, TERMS, inputs_of

ARRAYS = estimators.arrays_of(4, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ADVANTAGES, *TERMS], ids=lambda case: case.name)
def test_a_case_can_be_called(case):
    out = case.call(inputs_of(case, ARRAYS))
    for leaf in out if isinstance(out, tuple) else [out]:
        assert jnp.isfinite(leaf.astype(jnp.float32)).all()


def test_every_surrogate_is_timed():
    timed = {getattr(case.function, "__name__", "") for case in TERMS}
    places = ["logp", "old_logp", "advantages", "mask"]
    # Those left out take a vocabulary statistic as wide as its support.
    wide = {"gkd", "sdpo", "srpo"}
    for name in jr.surrogates.__all__:
        function = getattr(jr.surrogates, name)
        if (
            inspect.isfunction(function)
            and list(inspect.signature(function).parameters)[:4] == places
        ):
            assert name in timed | wide, name


def test_a_measurement_has_its_ratios():
    (case,) = (case for case in TERMS if case.name == "ppo_clip")
    found = estimators.measure(case, ARRAYS, rounds=2)
    names = {"floor_ms", "forward_ms", "forward_ratio", "gradient_ms", "gradient_ratio"}
    assert set(found) == names | {"gradient_own_ratio"}
    assert all(value > 0 for value in found.values())
    (case,) = (case for case in ADVANTAGES if case.name == "grpo")
    assert estimators.growth(case, lambda s: estimators.arrays_of(4 * s, 4, 2), rounds=1) > 0
