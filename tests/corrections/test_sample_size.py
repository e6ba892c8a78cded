"""Effective sample size and the factor of the step."""

import numpy as np
import pytest
from cheap import quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_llm import diagnostics
from jaxrl_llm.corrections import ess, ess_lr_scale

W = np.array([1.0, 2.0, 0.5, 4.0], np.float32)
positive = hnp.arrays(np.float32, (5,), elements=st.floats(0.125, 8, width=32))


def scale(old, behavior, mask, **options):
    advantages = np.zeros(mask.shape[:-1])
    return ess_lr_scale(advantages, old_logp=old, behavior_logp=behavior, mask=mask, **options)


def test_worked_numbers():
    assert float(ess(np.asarray(W))) == pytest.approx(2.647059, abs=1e-6)
    old, mask = np.log(W)[:, None], np.ones((4, 1), bool)
    assert float(scale(old, 0 * old, mask)) == pytest.approx(0.813489, abs=1e-6)
    assert float(scale(old, 0 * old, mask, power=1.0)) == pytest.approx(0.661765, abs=1e-6)
    assert float(scale(old, 0 * old, mask, rho_base=0.5)) == 1.0


@quick
@given(weights=positive, factor=st.sampled_from([1e-12, 0.5, 3.0, 1e20]))
def test_ess_ignores_the_scale_and_lies_between_one_and_n(weights, factor):
    value = float(ess(weights))
    assert 1.0 - 1e-5 <= value <= 5.0 + 1e-5
    assert float(ess(weights * np.float32(factor))) == pytest.approx(value, rel=1e-4)


def test_ess_of_equal_one_hot_and_absent_weights():
    assert float(ess(np.full(7, 0.3))) == pytest.approx(7.0, rel=1e-6)
    assert float(ess(np.eye(7)[2])) == 1.0
    assert float(ess(np.zeros(3))) == 0.0
    assert float(ess(np.array([1.0, np.nan]), where=np.array([True, False]))) == 1.0
    assert float(ess(np.ones(3), where=np.zeros(3, bool))) == 0.0


def test_equal_weights_leave_the_step_whole():
    mask = np.array([[True, True], [True, False], [False, False]])
    shift = np.array([[0.35, 0.35], [0.7, 0.0], [0.0, 0.0]], np.float32)
    assert float(scale(shift, 0 * shift, mask)) == pytest.approx(1.0, rel=1e-6)
    assert float(scale(shift, 0 * shift, np.zeros_like(mask))) == 1.0


def test_it_is_the_root_of_the_share_that_the_diagnostics_report():
    rng = np.random.default_rng(0)
    old, mask = rng.normal(0, 0.5, (2, 4, 3)).astype(np.float32), rng.random((2, 4, 3)) < 0.7
    share = diagnostics.effective_sample_size(old, 0 * old, mask)
    assert float(scale(old, 0 * old, mask)) == pytest.approx(float(share) ** 0.5, rel=1e-5)


def test_long_sequences_do_not_overflow():
    old = np.full((2, 400), 0.5, np.float32)
    assert float(scale(old, 0 * old, np.ones(old.shape, bool))) == pytest.approx(1.0)
