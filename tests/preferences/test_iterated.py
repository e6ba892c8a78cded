"""Losses of self-play: worked numbers, reductions, win rates against a mixture."""

import jax
import numpy as np
import pytest
from cheap import close, grad, value_and_grad

from jaxrl_llm import preferences
from jaxrl_llm.core import bind

STANDARD = [np.array([x]) for x in (-10.0, -14.0, -11.0, -13.0)]


def arrays(seed, *shape):
    return np.random.default_rng(seed).normal(-8.0, 3.0, shape).astype(np.float32)


def test_worked_numbers_of_inpo():
    previous = [np.array([-10.5]), np.array([-13.0])]
    loss = preferences.inpo(*STANDARD, *previous, eta=0.25, ratio=1 / 3)
    assert float(loss[0]) == pytest.approx(0.111111, abs=1e-6)


def test_inpo_between_two_references_is_ipo_at_the_ends():
    rows, previous = arrays(0, 4, 5), arrays(1, 2, 5)

    def inpo(*arrays, **options):
        return preferences.inpo(*arrays, eta=0.5, **options)

    ipo = bind(preferences.ipo, beta=0.5)
    close(inpo(*rows, *previous, ratio=1.0), ipo(*rows), rtol=1e-5)
    close(inpo(*rows, *previous, ratio=0.0), ipo(*rows[:2], *previous), rtol=1e-5)
    close(inpo(*rows, *rows[2:], ratio=0.4), ipo(*rows), rtol=1e-4)
    # Soft labels are least at h = (2 p - 1) / (2 eta), here 2 p - 1.
    same = [np.zeros(5)] * 5
    h = np.array([0.4, 0.4 + 1e-2, 0.4 - 1e-2, 1.0, -1.0])
    soft = inpo(h, *same, preference=0.7)
    assert soft[0] < min(soft[1:3])
    close(soft[3:], [0.3 * 4, 0.7 * 4], rtol=1e-5)
    labels = inpo(h, *same, preference=np.ones(5))
    close(labels, inpo(h, *same), rtol=1e-5, atol=1e-6)


def test_mnpo_weighs_the_policies_that_there_are():
    rows, history = arrays(2, 4, 5), arrays(3, 2, 5, 3)
    weights = np.array([1.0, 3.0, 4.0])
    there = np.array([True, True, False])
    history[..., 2] = np.nan
    w, l, rw, rl = np.float64(rows)  # noqa: E741
    past = np.float64(history[0] - history[1])
    for options, mean in (
        ({"weights": weights, "history_where": there}, past[:, 0] / 4 + past[:, 1] * 3 / 4),
        ({"history_where": there}, past[:, :2].mean(-1)),
        ({"history_where": np.zeros(3, bool)}, 0.0),
    ):
        ours = preferences.mnpo(*rows, *history, eta=0.5, ratio=0.3, **options)
        h = (w - l) - 0.3 * (rw - rl) - 0.7 * mean
        close(ours, (h - 1) ** 2, rtol=1e-5)
    slope = grad(
        lambda x: preferences.mnpo(*x[:4], x[4:5].T, x[5:].T, where=np.arange(5) < 3).sum()
    )(arrays(4, 6, 5))
    assert not slope[2:].any() and not slope[:, 3:].any() and slope[0, 0] == -slope[1, 0] != 0


def test_sppo_is_zero_at_its_target_alone():
    rows = arrays(5, 4, 3)
    rows[0] = rows[2] + 3.0  # (0.8 - 0.5) / 0.1
    rows[1] = rows[3] - 2.0
    win = {"chosen_win_rate": 0.8, "rejected_win_rate": np.full(3, 0.3), "beta": 0.1}
    close(preferences.sppo(*rows, **win), np.zeros(3), atol=1e-6)
    assert (np.asarray(preferences.sppo(rows[0] + 1, rows[1] + 1, *rows[2:], **win)) > 0.9).all()


def test_nash_md_is_reinforce_with_a_penalty():
    logp, ref = arrays(6, 2, 3, 4) / 8
    mask = np.arange(4) < np.array([4, 2, 0])[:, None]
    win = np.array([0.9, 0.2, np.nan], np.float32)
    junk = np.where(mask, logp, np.nan)
    run = value_and_grad(lambda x: preferences.nash_md(x, ref, mask, win, beta=0.3).sum())
    value, slope = run(junk)
    expected = np.where(mask, 0.3 * (logp - ref) - (win - 0.5)[:, None], 0.0)
    close(slope, expected, rtol=1e-5, atol=1e-6)
    close(value, (expected * np.where(mask, logp, 0)).sum(), rtol=1e-5)


def test_xpo_adds_the_likelihood_of_the_sample_of_the_reference():
    rows = arrays(7, 4, 3)
    ours, where = np.array([True, False, True]), np.array([True, True, False])
    rows[:, 2] = np.nan
    loss = preferences.xpo(*rows, ours, alpha=0.2, where=where)
    dpo = preferences.dpo(*rows, where=where)
    close(loss - dpo, [0.2 * rows[1, 0], 0.2 * rows[0, 1], 0], rtol=1e-5)
    ipo = bind(preferences.ipo, beta=0.3)
    close(
        preferences.xpo(*rows, ours, alpha=0.0, loss=ipo, where=where),
        ipo(*rows, where=where),
        rtol=1e-6,
    )


def test_seppo():
    errors = [-np.array([x]) for x in (0.30, 0.50, 0.40, 0.45)]
    loss = preferences.seppo(*errors, beta=1.0)
    assert float(loss[0]) == pytest.approx(0.620957, abs=1e-6)
    scaled = preferences.seppo(*errors, beta=0.5, scale=np.array([2.0]))
    close(scaled, loss, rtol=1e-6)
    # A reference that is better at the chosen response: both are learned.
    worse = [-np.array([x]) for x in (0.40, 0.50, 0.30, 0.45)]
    assert float(preferences.seppo_sign(worse[0], worse[2])[0]) == -1
    expected = np.logaddexp(0, 0.10 + 0.05)
    assert float(preferences.seppo(*worse, beta=1.0)[0]) == pytest.approx(expected, abs=1e-6)
    slope = grad(lambda x: preferences.seppo(*x, beta=1.0).sum())(np.stack(worse))
    assert (slope[:2] < 0).all() and not slope[2:].any()
    # A policy equal to its reference is a tie, and where the sign is +1 it is DPO.
    logp = arrays(8, 2, 4)
    equal = preferences.seppo(*logp, *logp)
    close(equal, np.full(4, np.log(2.0)), rtol=1e-6)
    assert (np.asarray(preferences.seppo_sign(logp[0], logp[0])) == 1).all()
    # Equal policies whose numbers two programs rounded, of sequences and of squared errors.
    for scale in (1e3, 1e-3):
        above, below = np.float32(-scale) * np.float32([1 - 1e-6, 1 + 1e-6])[:, None]
        assert float(preferences.seppo_sign(below, above)[0]) == 1
        assert float(preferences.seppo_sign(below * np.float32(1.001), above)[0]) == -1
        assert float(preferences.seppo_sign(below, above, tolerance=0.0)[0]) == -1
    better = arrays(9, 4, 4)
    better[0] = better[2] + 1
    close(preferences.seppo(*better), preferences.dpo(*better), rtol=1e-6)
    where = np.array([True, True, False, True])
    junk = np.where(where, better, np.nan)
    masked = preferences.seppo(*junk, where=where)
    close(masked, np.where(where, preferences.dpo(*better), 0), rtol=1e-6)


def test_a_mixture_is_reached_by_weights_of_the_policys_samples():
    """Of many samples, the win rate is that against the mixture, by enumeration."""
    game = np.array([[0.5, 0.9, 0.2], [0.1, 0.5, 0.7], [0.8, 0.3, 0.5]])
    policy, ref = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
    drawn = np.repeat(np.arange(3), np.int32(policy * 100))
    logp, ref_logp = (np.float32(np.log(x[drawn])) for x in (policy, ref))
    for mixture in (0.0, 0.3, 1.0):
        opponent = policy ** (1 - mixture) * ref**mixture
        opponent /= opponent.sum()
        rates = preferences.mixture_win_rates(
            game[np.ix_(drawn, drawn)], logp, ref_logp, mixture=mixture
        )
        for kind in range(3):
            rate = np.float64(rates)[drawn == kind][0]
            assert rate == pytest.approx(game[kind] @ opponent, abs=0.02)


def test_win_rates_of_a_mixture_read_no_masked_sample_and_not_the_sample_itself():
    wins = np.full((4, 4), 0.25, np.float32)
    wins[:, 3] = wins[3] = np.nan
    np.fill_diagonal(wins, 9.0)
    logp = np.array([-1.0, -2.0, -3.0, np.nan], np.float32)
    where = np.array([True, True, True, False])
    rates = preferences.mixture_win_rates(wins, logp, logp, where=where)
    close(rates, [0.25, 0.25, 0.25, 0.0], rtol=1e-6)
    alone = preferences.mixture_win_rates(wins, logp, logp, where=np.arange(4) == 1)
    close(alone, [0.0, 0.5, 0.0, 0.0])


def test_nash_md_of_a_token_that_neither_policy_can_produce():
    logp, mask = np.array([[-1.0, -np.inf]]), np.ones((1, 2), bool)
    even, beta = np.array([0.5]), 0.1
    loss, gradient = value_and_grad(
        lambda x: preferences.nash_md(x, logp, mask, even, beta=beta).sum()
    )(logp)
    assert float(loss) == 0.0 and np.isfinite(gradient).all()


def test_references_are_drawn_with_one_probability():
    draw = jax.jit(jax.vmap(lambda key: preferences.sample_reference(key, 4)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    close(np.bincount(drawn, minlength=4) / 4000, np.full(4, 0.25), atol=0.03)
