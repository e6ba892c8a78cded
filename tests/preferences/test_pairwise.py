"""Losses of pairs: worked numbers, float64 values and gradients, masked pairs, and laws.

Of log-ratios x and y of the chosen and the rejected response to the reference, h = beta (x - y):

    dpo    -log sigmoid(h)             ipo       (x - y - 1 / (2 beta))^2
    hinge  max(0, margin - h)          bco       -log sigmoid(beta x - d) - log sigmoid(d - beta y)
    apo    1 - sigmoid(x) + sigmoid(y) sppo      half the squared distances to (p - 1/2) / beta

At x = 1, y = -1, beta = 0.1 they are 0.598139 (dpo), 9 (ipo) and 0.8 (hinge), and dpo has the slope
-+0.0450166. A constant of the prompt changes none of those that compare; the gradient stops at
the reference; an absent pair is not read; beta to 0 is log 2, and beta to infinity a hinge at 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad, value_and_grad
from rows import for_each

from jaxrl_llm import preferences
from jaxrl_llm.core import call_with

LN2 = np.log(2.0)
# Chosen and rejected under the policy, then under the reference: log-ratios 1 and -1.
STANDARD = [np.array([x]) for x in (-10.0, -14.0, -11.0, -13.0)]
LENGTHS = {"chosen_lengths": np.array([3, 7, 1, 12]), "rejected_lengths": np.array([4, 2, 9, 12])}
ARRAYS = ("chosen_logp", "rejected_logp", "chosen_ref_logp", "rejected_ref_logp")


def arrays(seed=0):
    return np.random.default_rng(seed).normal(-8.0, 3.0, (4, 4)).astype(np.float32)


def sp(x):
    return np.logaddexp(0.0, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def smoothed(z, e=0.1):
    return (1 - e) * sp(-z) + e * sp(z)


def log_odds(a):
    return a - np.log1p(-np.exp(a))


class Pair:
    """Float64 numbers of four pairs, with beta 0.5."""

    def __init__(self, rows):
        self.w, self.l, self.rw, self.rl = np.float64(rows)
        self.x, self.y = 0.5 * (self.w - self.rw), 0.5 * (self.l - self.rl)
        self.h, self.lengths = self.x - self.y, list(LENGTHS.values())
        self.a, self.b = self.w / self.lengths[0], self.l / self.lengths[1]

    @property
    def even(self):
        """The distance with a mean over tokens."""
        return self.x / self.lengths[0] - self.y / self.lengths[1]

    def through(self, g):
        """The distance after a transform of the log-ratios."""
        return 0.5 * (g(2 * self.x) - g(2 * self.y))


def delta(w, l, rw, rl):  # noqa: E741
    return (w - rw) - (l - rl)


def exo(p, e=0.1):
    q = sigmoid(p.h)
    return q * np.log(q / (1 - e)) + (1 - q) * np.log((1 - q) / e)


def discopop(p):
    blend = sigmoid(2 * p.h / 0.8)
    return (1 - blend) * sp(-p.h) + blend * np.exp(-p.h)


def classes(p, d=0.2):
    return sp(d - p.x) + sp(p.y - d)


def alphapo(p):
    a, b = ((1 - np.exp(-0.2 * x)) / 0.2 for x in (p.a, p.b))
    return smoothed(0.5 * (a - b) - 0.3)


def sppo(p):
    return (2 * p.x - 2 * (WIN - 0.5)) ** 2 / 2 + (2 * p.y + 0.4) ** 2 / 2


MARGIN, WIN = np.float32([0.1, 0.7, 0.0, 2.0]), np.float32([0.9, 0.6, 0.5, 1.0])
SMOOTH, LIKELY = {"label_smoothing": 0.1}, {"margin": 3.0, "likelihood": 0.3}
# A loss and what is special; its options, and the same in float64.
CASES = {
    "dpo": ({}, lambda p: sp(-p.h)),
    "dpo smoothed": (SMOOTH, lambda p: smoothed(p.h)),
    "dpo robust": ({**SMOOTH, "robust": True}, lambda p: (0.9 * sp(-p.h) - 0.1 * sp(p.h)) / 0.8),
    "dpo margin": ({"margin": MARGIN}, lambda p: sp(MARGIN - p.h)),
    "dpo likelihood": ({"likelihood": 0.7}, lambda p: sp(-p.h) - 0.7 * p.a),
    "dpo per token": ({"per_token": True}, lambda p: sp(-p.even)),
    "dpo forward": (
        {"divergence": "forward_kl"},
        lambda p: sp(-p.through(lambda x: 1 - np.exp(-x))),
    ),
    "dpo js": ({"divergence": "js"}, lambda p: sp(-p.through(lambda x: LN2 - sp(-x)))),
    "dpo alpha": (
        {"divergence": "alpha", "alpha": 0.3},
        lambda p: sp(-p.through(lambda x: (np.exp(-0.7 * x) - 1) / -0.7)),
    ),
    "ipo": ({}, lambda p: (2 * p.h - 1) ** 2),
    "ipo per token": ({"per_token": True}, lambda p: (2 * p.even - 1) ** 2),
    "hinge": ({"margin": 2.0}, lambda p: np.maximum(0, 2 - p.h)),
    "exo_pair": (SMOOTH, exo),
    "discopop": ({"tau": 0.4}, discopop),
    "bco": ({"center": 0.2}, classes),
    "nca_pair": ({}, lambda p: sp(-p.x) + sp(p.x) / 2 + sp(p.y) / 2),
    "apo_zero": ({}, lambda p: 1 - sigmoid(p.x) + sigmoid(p.y)),
    "apo_down": ({}, lambda p: sigmoid(p.x) + 1 - sigmoid(p.h)),
    "mpo": ({"center": 0.2}, lambda p: 0.8 * sp(-p.h) + 0.2 * classes(p) - p.a),
    "simpo": ({"gamma": 0.3, **SMOOTH}, lambda p: smoothed(0.5 * (p.a - p.b) - 0.3)),
    "simpo alpha": ({"gamma": 0.3, "alpha": 0.2, **SMOOTH}, alphapo),
    "cpo": ({**SMOOTH, "likelihood": 0.3}, lambda p: smoothed(0.5 * (p.w - p.l)) - 0.3 * p.a),
    "orpo": ({}, lambda p: 0.5 * sp(log_odds(p.b) - log_odds(p.a)) - p.a),
    "slic": (LIKELY, lambda p: np.maximum(0, 3 - (p.w - p.l)) - 0.3 * p.w),
    "slic per token": (
        {**LIKELY, "per_token": True},
        lambda p: np.maximum(0, 3 - (p.a - p.b)) - 0.3 * p.a,
    ),
    "sft": ({}, lambda p: -p.a),
    "sppo": ({"chosen_win_rate": WIN, "rejected_win_rate": 0.3}, sppo),
}


def expected(name, rows):
    return CASES[name][1](Pair(rows))


def call(name, rows, where=None):
    """A case on four rows, with what its loss names."""
    function = getattr(preferences, name.split()[0])
    context = dict(zip(ARRAYS, rows, strict=True)) | LENGTHS | CASES[name][0]
    context |= {"where": where, "beta": 0.5}
    return call_with(function, context=context)


@for_each("name", CASES)
def test_value_and_gradient_equal_float64_and_absent_pairs_are_not_read(name):
    def total(rows, where):
        value = call(name, rows, where)
        return value.sum(), value

    run, everywhere = value_and_grad(total, has_aux=True), np.ones(4, bool)
    for seed in range(3):
        rows = arrays(seed)
        if seed == 2:
            rows[:2] = rows[2:]  # a policy equal to its reference
        rows[:2] = np.minimum(rows[:2], -0.1)  # odds of a mean below 0
        (_, ours), slope = run(rows, everywhere)
        close(ours, expected(name, rows), rtol=3e-5, atol=3e-6)
        step = 1e-5
        for row in range(2):
            high, low = np.float64(rows), np.float64(rows)
            high[row] += step
            low[row] -= step
            difference = (expected(name, high) - expected(name, low)) / (2 * step)
            close(slope[row], difference, rtol=1e-3, atol=1e-4)
        assert not slope[2:].any()  # the gradient stops at the reference
    where = np.array([True, False, True, False])
    for junk in (np.nan, np.inf, -np.inf, 1e4):
        (_, loss), slope = run(np.where(where, rows, np.float32(junk)), where)
        close(loss, np.where(where, ours, 0.0), rtol=1e-5)
        assert np.isfinite(slope).all() and not slope[:, ~where].any()


@for_each("name", CASES)
def test_numbers_are_float32_whatever_comes_in(name):
    rows = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    loss = jax.eval_shape(lambda x: call(name, x), rows)
    assert loss.dtype == jnp.float32 and loss.shape == (4,)


def standard(name, **options):
    return float(getattr(preferences, name)(*STANDARD, **options)[0])


def test_worked_numbers():
    lengths = {"chosen_lengths": np.array([5]), "rejected_lengths": np.array([7])}
    assert standard("dpo") == pytest.approx(0.598139, abs=1e-6)
    assert standard("dpo", label_smoothing=0.1) == pytest.approx(0.618139, abs=1e-6)
    robust = standard("dpo", label_smoothing=0.1, robust=True)
    assert robust == pytest.approx(0.573139, abs=1e-6)
    assert standard("ipo") == pytest.approx(9.0)
    assert standard("ipo", per_token=True, **lengths) == pytest.approx(21.688980, abs=1e-5)
    assert standard("hinge") == pytest.approx(0.8)
    slope = grad(lambda x: preferences.dpo(*x).sum())(np.stack(STANDARD))
    close(slope[:, 0], [-0.0450166, 0.0450166, 0.0, 0.0], atol=1e-7)
    win = {"chosen_win_rate": 0.8, "rejected_win_rate": 0.3}
    assert standard("sppo", beta=1.0, **win) == pytest.approx(0.565, abs=1e-6)
    assert standard("sppo", beta=1e-3, **win) == pytest.approx(64501.0, rel=1e-6)
    assert standard("sppo", beta=1.0) == pytest.approx(0.25)
    pair = [np.array([-4.0]), np.array([-6.0])]
    lengths = {"chosen_lengths": np.array([4]), "rejected_lengths": np.array([4])}
    assert preferences.orpo(*pair, **lengths)[0] == pytest.approx(1.040114, abs=1e-6)
    assert preferences.simpo(*pair, **lengths)[0] == pytest.approx(LN2, abs=1e-6)
    calibrated = [preferences.slic(*STANDARD[:2], margin=m, likelihood=0.0)[0] for m in (1.0, 5.0)]
    assert calibrated == [0.0, 1.0]


def test_a_policy_equal_to_its_reference():
    logp = arrays()[0]
    same = [logp, logp, logp, logp]
    values = {
        "dpo": LN2,
        "ipo": 1.0,
        "hinge": 1.0,
        "bco": 2 * LN2,
        "nca_pair": 2 * LN2,
        "apo_zero": 1.0,
        "apo_down": 1.0,
        "discopop": (LN2 + 1) / 2,
        "exo_pair": -0.5 * np.log(4 * 0.001 * 0.999),
    }
    for name, value in values.items():
        loss = getattr(preferences, name)(*same, beta=0.5)
        close(loss, np.full(4, value), rtol=1e-6, err_msg=name)
    lengths = {"chosen_lengths": np.full(4, 6), "rejected_lengths": np.full(4, 6)}
    loss = preferences.orpo(logp, logp, beta=0.5, **lengths)
    close(loss, -logp / 6 + 0.5 * LN2, rtol=1e-6)


def test_limits_of_beta():
    rows = arrays(3)
    close(preferences.dpo(*rows, beta=1e-6), np.full(4, LN2), rtol=1e-4)
    h = delta(*np.float64(rows))
    # beta to infinity: a hinge at 0, in units of beta.
    close(preferences.dpo(*rows, beta=1e4) / 1e4, np.maximum(0, -h), rtol=1e-4, atol=1e-4)
    far = [np.array([x]) for x in (-1e3, -10.0, -10.0, -10.0)]
    for name in ("dpo", "exo_pair", "discopop", "bco", "apo_zero"):
        value, slope = value_and_grad(
            lambda x, name=name: getattr(preferences, name)(*x, beta=1.0).sum()
        )(np.stack(far))
        assert np.isfinite(value) and np.isfinite(slope).all(), name


def test_a_constant_of_a_prompt_changes_nothing_but_the_losses_of_one_response():
    w, l, rw, rl = arrays(5)  # noqa: E741
    for name in ("dpo", "ipo", "hinge", "exo_pair", "discopop"):
        function = getattr(preferences, name)
        one, other = function(w, l, rw, rl), function(w + 2, l + 2, rw - 1, rl - 1)
        close(one, other, rtol=1e-4, err_msg=name)
    for name in ("sppo", "bco", "apo_zero", "nca_pair"):
        function = getattr(preferences, name)
        one, other = (function(w + c, l + c, rw, rl, beta=0.5) for c in (0, 2))
        assert not np.allclose(one, other, rtol=1e-2), name


def test_relations_between_losses():
    rows = arrays(6)
    dpo = preferences.dpo(*rows)
    no_margin = np.zeros(4, np.float32)
    for options in ({"divergence": "alpha", "alpha": 1.0}, {"margin": no_margin}):
        close(preferences.dpo(*rows, **options), dpo, rtol=1e-6)
    close(
        preferences.dpo(*rows, divergence="alpha", alpha=0.0),
        preferences.dpo(*rows, divergence="forward_kl"),
        rtol=1e-6,
    )
    # SimPO without a margin is DPO without a reference, with beta / length.
    six = {"chosen_lengths": np.full(4, 6), "rejected_lengths": np.full(4, 6)}
    close(
        preferences.simpo(*rows[:2], gamma=0.0, **six),
        preferences.dpo(*rows[:2], *np.zeros((2, 4), np.float32), beta=2 / 6),
        rtol=1e-5,
    )
    # The same tokens twice.
    twelve = {name: 2 * x for name, x in six.items()}
    close(
        preferences.simpo(2 * rows[0], 2 * rows[1], **twelve),
        preferences.simpo(*rows[:2], **six),
        rtol=1e-5,
    )
    close(
        preferences.slic(*rows[:2], margin=2.0, likelihood=0.0),
        preferences.hinge(*rows[:2], *np.zeros((2, 4), np.float32), beta=1.0, margin=2.0),
        rtol=1e-6,
    )
    cpo = preferences.cpo(*rows[:2], likelihood=0.0, chosen_lengths=np.full(4, 6))
    close(cpo, preferences.dpo(*rows[:2], *np.zeros((2, 4), np.float32)), rtol=1e-6)
    target = rows[2]
    triple = preferences.tpo(*rows[:2], target, target_lengths=np.full(4, 6), beta=0.1)
    close(triple, cpo - target / 6, rtol=1e-6)
    long = preferences.tpo(
        *rows[:2], target, target_lengths=np.full(4, 6), beta=2.0, gamma=1.0, per_token=True, **six
    )
    simpo = preferences.simpo(*rows[:2], **six)
    close(long, simpo - target / 6, rtol=1e-5)
    close(
        preferences.orpo(*rows[:2], chosen_nll=-target, **six)
        - preferences.orpo(*rows[:2], chosen_nll=np.zeros(4, np.float32), **six),
        -target,
        rtol=1e-5,
    )
    gold = preferences.slic(*rows[:2], target, likelihood=0.5)
    plain = preferences.slic(*rows[:2], likelihood=0.0)
    close(gold - plain, -0.5 * target, rtol=1e-4, atol=1e-5)
    equal(preferences.sft(target, per_token=False), -target)


def test_odds_near_certainty_are_finite():
    logp = np.array([0.0, -1e-8, -0.6931, -0.6932, -50.0])
    lengths = {"chosen_lengths": np.ones(5), "rejected_lengths": np.ones(5)}
    run = value_and_grad(lambda x: preferences.orpo(x, -np.ones(5), **lengths).sum())
    value, slope = run(logp)
    assert np.isfinite(value) and np.isfinite(slope).all()


def test_a_response_that_the_policy_cannot_produce_is_a_pair_that_is_won():
    pair = [np.array([x]) for x in (-10.0, -np.inf, -10.0, -20.0)]
    values, gradients = value_and_grad(lambda *x: preferences.dpo(*x).sum(), argnums=(0, 1))(*pair)
    assert float(values) == 0.0 and [float(g[0]) for g in gradients] == [0.0, 0.0]
