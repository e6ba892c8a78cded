"""Divergences of the sampler and statistics of weights, against float64 references."""

import jax
import numpy as np
import pytest
from cheap import close, equal

from jaxrl_llm.corrections import importance_weights
from jaxrl_llm.diagnostics import (
    effective_sample_size,
    mismatch_metrics,
    rejection_metrics,
    weight_metrics,
)

RNG = np.random.default_rng(0)
LOGP = RNG.normal(-2, 1, (3, 4, 5)).astype(np.float32)
BEHAVIOR = (LOGP + RNG.normal(0, 0.4, LOGP.shape)).astype(np.float32)
MASK = RNG.random(LOGP.shape) < 0.7
MASK[0, 0] = False


def test_mismatch_equals_the_float64_reference():
    d = LOGP.astype(np.float64) - BEHAVIOR
    rows = [r[k] for r, k in zip(d.reshape(-1, 5), MASK.reshape(-1, 5), strict=True) if k.any()]
    tokens = np.concatenate(rows)
    sums, means = np.array([r.sum() for r in rows]), np.array([r.mean() for r in rows])
    ess = lambda w: 1 / np.mean((w / w.mean()) ** 2)  # noqa: E731
    expected = {
        "kl": np.mean(-tokens),
        "k3": np.mean(np.exp(tokens) - 1 - tokens),
        "log_perplexity_gap": np.mean(-means),
        "perplexity_ratio": np.mean(np.exp(-means)),
        "chi2_token": np.mean(np.exp(tokens) ** 2) - 1,
        "chi2_sequence": np.mean(np.exp(sums) ** 2) - 1,
        "ess_token": ess(np.exp(tokens)),
        "ess_sequence": ess(np.exp(sums)),
    }
    ours = jax.jit(mismatch_metrics)(LOGP, BEHAVIOR, MASK)
    assert set(expected) == set(ours._fields)
    for name, value in expected.items():
        assert float(getattr(ours, name)) == pytest.approx(value, rel=1e-5), name


def test_worked_numbers():
    d = np.array([[0.1, -0.3, 0.9, 0.0]])
    ours = mismatch_metrics(d, np.zeros((1, 4)), np.ones((1, 4), bool))
    assert float(ours.k3) == pytest.approx(0.151398, abs=1e-6)
    assert float(ours.perplexity_ratio) == pytest.approx(1 / 1.191246, rel=1e-5)
    assert float(ours.chi2_sequence) == pytest.approx(2.013753**2 - 1, rel=1e-5)


def test_the_same_policy_and_nothing_kept():
    same = mismatch_metrics(LOGP, LOGP, MASK)
    assert [float(x) for x in same] == [0, 0, 0, 1, 0, 0, 1, 1]
    none = mismatch_metrics(LOGP, BEHAVIOR, np.zeros_like(MASK))
    assert [float(x) for x in none] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_small_divergences_survive_float32():
    d = np.full((1, 4), 1e-5)
    ours = mismatch_metrics(d, np.zeros((1, 4)), np.ones((1, 4), bool))
    assert float(ours.chi2_token) == pytest.approx(2e-5, rel=1e-4)


def test_masked_cells_are_never_read_and_far_tokens_stay_finite():
    clean = mismatch_metrics(LOGP, BEHAVIOR, MASK)
    for junk in (1e4, np.nan, np.inf):
        other = mismatch_metrics(np.where(MASK, LOGP, np.float32(junk)), BEHAVIOR, MASK)
        equal(other, clean)
    far = mismatch_metrics(LOGP + 500.0, BEHAVIOR, MASK)
    assert np.isfinite(far).all()


def test_weights_equal_the_float64_reference():
    weights = np.asarray(importance_weights(LOGP, BEHAVIOR, MASK, cap=1.3)).copy()
    weights[1, 1] = 0.0
    kept = weights[MASK].astype(np.float64)
    ours = weight_metrics(weights, MASK)
    expected = [kept.mean(), kept.std(), kept.min(), kept.max()]
    expected += [1 / np.mean((kept / kept.mean()) ** 2), np.mean(kept == 0)]
    close(ours, expected, rtol=1e-5)
    raw = importance_weights(LOGP, BEHAVIOR, MASK, cap=None)
    close(
        weight_metrics(raw, MASK).ess,
        effective_sample_size(LOGP, BEHAVIOR, MASK, level="token"),
        rtol=1e-5,
    )


def test_weights_of_nothing_and_all_zero():
    assert [float(x) for x in weight_metrics(np.full(3, np.nan), np.zeros(3, bool))] == [0] * 6
    assert [float(x) for x in weight_metrics(np.zeros(3), np.ones(3, bool))] == [0, 0, 0, 0, 0, 1]


def test_rejection_metrics_count_what_each_rule_rejects():
    keep = np.array([[[1, 0, 1], [1, 1, 1]], [[1, 1, 1], [0, 1, 1]]], bool)
    rules = tuple((lambda old_logp, behavior_logp, mask, k=k: mask & k) for k in keep)
    mask = np.array([[True, True, True], [True, True, False]])
    shares = rejection_metrics(np.full((2, 3), -1.0), np.full((2, 3), np.nan), mask, rules=rules)
    close(shares.tokens, [0.2, 0.2])
    close(shares.sequences, [0.5, 0.5])
    close([shares.any_tokens, shares.any_sequences], [0.4, 1.0])
    empty = rejection_metrics(np.zeros((2, 3)), np.zeros((2, 3)), mask & False, rules=rules)
    assert not np.concatenate([np.ravel(x) for x in empty]).any()
