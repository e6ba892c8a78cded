"""VERL's ranks of hidden states: worked numbers and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, put
from rows import for_each

from jaxrl_llm import advantages as adv


def numpy_rank(x):
    if len(x) < 2:
        return 0.0
    s = np.linalg.svd(x - x.mean(0), compute_uv=False)
    p = s / (s.sum() + 1e-8)
    return float(np.exp(-np.sum(p * np.log(p + 1e-8))))


def numpy_growth(x, stride, most):
    window = x[-most:]
    m = [numpy_rank(window[: t + 1]) for t in range(stride, len(window), stride)]
    d = [m[j] - np.mean(m[:j]) for j in range(1, len(m))]
    e = np.diff(d)
    return numpy_rank(x), np.mean(d) if d else 0.0, np.mean(e) if e.size else 0.0


CROSS = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]], np.float32)


@for_each(
    ("hidden", "rank"),
    [
        (CROSS, 2.0),
        (CROSS * np.array([1.0, 0.5], np.float32), 1.889882),
        (np.outer(np.arange(4.0), [1.0, 2.0]).astype(np.float32), 1.0),
        (CROSS[:1], 0.0),
    ],
)
def test_worked_ranks(hidden, rank):
    assert float(adv.effective_rank(hidden, np.ones(len(hidden), bool))) == pytest.approx(
        rank, abs=1e-4
    )


def test_a_rank_knows_no_origin_scale_or_direction():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(6, 4)).astype(np.float32)
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    moved = (3.0 * hidden @ turn + rng.normal(size=4)).astype(np.float32)
    mask = np.ones(6, bool)
    rank = adv.effective_rank(hidden, mask)
    close(adv.effective_rank(moved, mask), rank, rtol=1e-4)
    close(rank, numpy_rank(np.float64(hidden)), rtol=1e-4)
    assert 1.0 <= rank <= 4.0


@for_each("dimension", [3, 12])
def test_growth_equals_float64(dimension):
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(5, 11, dimension)).astype(np.float32)
    lengths = np.array([11, 9, 5, 3, 1])
    mask = np.stack([np.isin(np.arange(11), rng.permutation(11)[:n]) for n in lengths])
    junk = np.where(mask[..., None], hidden, np.nan)
    for stride, most in ((2, 512), (3, 8)):
        growth = adv.rank_growth(junk, mask, stride=stride, max_tokens=most)
        for i in range(5):
            expected = numpy_growth(np.float64(hidden[i][mask[i]]), stride, most)
            close([x[i] for x in growth], expected, atol=2e-3)


def test_the_worked_differences():
    """m = 2, 3, 5, 4 gives d = 1, 2.5, 2/3."""
    m = [2.0, 3.0, 5.0, 4.0]
    d = [m[j] - np.mean(m[:j]) for j in (1, 2, 3)]
    close([np.mean(d), np.mean(np.diff(d))], [1.388889, -0.166667], atol=1e-6)
    short = adv.rank_growth(np.asarray(CROSS), np.ones(4, bool), stride=2)
    assert float(short.velocity) == float(short.acceleration) == 0.0


def test_the_worked_bonus():
    growth = adv.RankGrowth(np.array(4.0), np.array(1.0), np.array(0.2))
    baseline = adv.RankBaseline(np.array(3.0), np.array(0.5), np.array(0.1), np.array(1))
    bonus = adv.rank_bonus(growth, baseline)
    close(bonus, 0.373972, atol=1e-5)
    raised = adv.bounded_bonus(
        np.array([1.0, -1.0, 0.2, 0.0]), np.ones((4, 1), bool), bonus=np.full(4, bonus)
    )
    close(raised, [1.373972, -0.626028, 0.3, 0.0], atol=1e-5)
    nothing = adv.bounded_bonus(np.ones(2), np.ones((2, 1), bool), bonus=-np.ones(2))
    assert nothing.tolist() == [1.0, 1.0]
    assert float(adv.rank_bonus(growth, adv.rank_baseline_init())) == 0.0


def test_the_baseline_starts_at_the_first_mean_and_moves():
    def growth(*values):
        return adv.RankGrowth(*(scale * np.array(values) for scale in (1.0, 0.1, -0.5)))

    state = adv.rank_baseline_init()
    empty = np.zeros(2, bool)
    assert int(adv.rank_baseline_update(state, growth(1.0, np.nan), where=empty).steps) == 0
    state = adv.rank_baseline_update(state, growth(1.0, 3.0, np.nan), where=np.arange(3) < 2)
    state = adv.rank_baseline_update(state, growth(4.0, 4.0))
    close(state[:3], [2.6, 0.26, -1.3], rtol=1e-6)
    assert int(state.steps) == 2


def test_rank_shaping_is_the_bounded_bonus_against_the_batches_before():
    rng = np.random.default_rng(0)
    shaping = adv.rank_shaping(rate=0.5, cap=2.0)
    mask, where = np.ones((2, 3, 4), bool), put(np.ones((2, 3), bool), np.s_[1, 2], False)
    advantages, state = np.asarray(rng.normal(size=(2, 3)), jnp.float32), shaping.init()
    baseline = adv.rank_baseline_init()
    for step in range(3):
        ranks = np.asarray(rng.random((2, 3, 3)), jnp.float32)
        growth = adv.RankGrowth(*np.moveaxis(ranks, -1, 0))
        out, state = shaping.update(advantages, state, mask=mask, where=where, hidden_rank=ranks)
        bonus = adv.rank_bonus(growth, baseline)
        want = adv.bounded_bonus(advantages, mask, bonus=bonus, where=where, cap=2.0)
        equal(out, want)
        assert bool(np.any(out > advantages)) == (step > 0)
        baseline = adv.rank_baseline_update(baseline, growth, where=where, rate=0.5)
        jax.tree.map(equal, state, baseline)
    with pytest.raises(ValueError, match="rank_shaping: cap must be at least 1; got 0.5"):
        adv.rank_shaping(cap=0.5)
