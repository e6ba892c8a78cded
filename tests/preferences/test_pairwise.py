"""Losses of pairs: worked numbers, float64 values and gradients, masked pairs, and laws."""

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


def smoothed(z, e):
    return (1 - e) * sp(-z) + e * sp(z)


def log_odds(a):
    return a - np.log1p(-np.exp(a))


def scores(g):
    """h for a transform of the log-ratios, in float64."""
    return lambda w, l, rw, rl: g(w - rw) - g(l - rl)  # noqa: E741


def per_token(w, l):  # noqa: E741
    return w / LENGTHS["chosen_lengths"], l / LENGTHS["rejected_lengths"]


def mpo(w, l, rw, rl, weights=(0.8, 0.2, 1.0), d=0.2):  # noqa: E741
    x, y = 0.5 * (w - rw), 0.5 * (l - rl)
    value = weights[0] * sp(y - x) + weights[1] * (sp(d - x) + sp(y - d))
    return value - weights[2] * w / LENGTHS["chosen_lengths"]


def exo(z, e=0.1):
    q = sigmoid(z)
    return q * np.log(q / (1 - e)) + (1 - q) * np.log((1 - q) / e)


def orpo(w, l, rw, rl):  # noqa: E741
    a, b = per_token(w, l)
    return -a + 0.5 * sp(log_odds(b) - log_odds(a))


def simpo(alpha):
    def value(w, l, rw, rl):  # noqa: E741
        a, b = (x if not alpha else (1 - np.exp(-alpha * x)) / alpha for x in per_token(w, l))
        return smoothed(0.5 * (a - b) - 0.3, 0.1)

    return value


def sppo(w, l, rw, rl):  # noqa: E741
    chosen = (w - rw - (np.array([0.9, 0.6, 0.5, 1.0]) - 0.5) * 2) ** 2
    return (chosen + (l - rl + 0.4) ** 2) / 2


def normalized(w, l, rw, rl):  # noqa: E741
    return np.subtract(*per_token(w - rw, l - rl))


delta = scores(lambda x: x)

# Options, and the same in float64 of (w, l, rw, rl); beta is 0.5 everywhere.
CASES = {
    "dpo": ("dpo", {}, lambda *a: sp(-0.5 * delta(*a))),
    "cdpo": ("dpo", {"label_smoothing": 0.1}, lambda *a: smoothed(0.5 * delta(*a), 0.1)),
    "robust": (
        "dpo",
        {"label_smoothing": 0.1, "robust": True},
        lambda *a: (0.9 * sp(-0.5 * delta(*a)) - 0.1 * sp(0.5 * delta(*a))) / 0.8,
    ),
    "margin": (
        "dpo",
        {"margin": np.array([0.1, 0.7, 0.0, 2.0], np.float32)},
        lambda *a: sp(np.array([0.1, 0.7, 0.0, 2.0]) - 0.5 * delta(*a)),
    ),
    "rpo": (
        "dpo",
        {"likelihood": 0.7},
        lambda *a: sp(-0.5 * delta(*a)) - 0.7 * a[0] / LENGTHS["chosen_lengths"],
    ),
    "sigmoid_norm": ("dpo", {"per_token": True}, lambda *a: sp(-0.5 * normalized(*a))),
    "forward_kl": (
        "dpo",
        {"divergence": "forward_kl"},
        lambda *a: sp(-0.5 * scores(lambda x: 1 - np.exp(-x))(*a)),
    ),
    "js": ("dpo", {"divergence": "js"}, lambda *a: sp(-0.5 * scores(lambda x: LN2 - sp(-x))(*a))),
    "alpha": (
        "dpo",
        {"divergence": "alpha", "alpha": 0.3},
        lambda *a: sp(-0.5 * scores(lambda x: (np.exp(-0.7 * x) - 1) / -0.7)(*a)),
    ),
    "ipo": ("ipo", {}, lambda *a: (delta(*a) - 1) ** 2),
    "ipo_norm": ("ipo", {"per_token": True}, lambda *a: (normalized(*a) - 1) ** 2),
    "hinge": ("hinge", {"margin": 2.0}, lambda *a: np.maximum(0, 2 - 0.5 * delta(*a))),
    "exo_pair": ("exo_pair", {"label_smoothing": 0.1}, lambda *a: exo(0.5 * delta(*a))),
    "discopop": (
        "discopop",
        {"tau": 0.4},
        lambda *a: (
            (1 - sigmoid(delta(*a) / 0.8)) * sp(-0.5 * delta(*a))
            + sigmoid(delta(*a) / 0.8) * np.exp(-0.5 * delta(*a))
        ),
    ),
    "bco": (
        "bco",
        {"center": 0.2},
        lambda w, l, rw, rl: sp(0.2 - 0.5 * (w - rw)) + sp(0.5 * (l - rl) - 0.2),  # noqa: E741
    ),
    "nca_pair": (
        "nca_pair",
        {},
        lambda w, l, rw, rl: (  # noqa: E741
            sp(-0.5 * (w - rw)) + sp(0.5 * (w - rw)) / 2 + sp(0.5 * (l - rl)) / 2
        ),
    ),
    "apo_zero": (
        "apo_zero",
        {},
        lambda w, l, rw, rl: 1 - sigmoid(0.5 * (w - rw)) + sigmoid(0.5 * (l - rl)),  # noqa: E741
    ),
    "apo_down": (
        "apo_down",
        {},
        lambda *a: sigmoid(0.5 * (a[0] - a[2])) + 1 - sigmoid(0.5 * delta(*a)),
    ),
    "mpo": ("mpo", {"center": 0.2}, mpo),
    "simpo": ("simpo", {"gamma": 0.3, "label_smoothing": 0.1}, simpo(0.0)),
    "alphapo": ("simpo", {"gamma": 0.3, "label_smoothing": 0.1, "alpha": 0.2}, simpo(0.2)),
    "cpo": (
        "cpo",
        {"label_smoothing": 0.1, "likelihood": 0.3},
        lambda w, l, rw, rl: (  # noqa: E741
            smoothed(0.5 * (w - l), 0.1) - 0.3 * w / LENGTHS["chosen_lengths"]
        ),
    ),
    "orpo": ("orpo", {}, orpo),
    "slic": (
        "slic",
        {"margin": 3.0, "likelihood": 0.3},
        lambda w, l, rw, rl: np.maximum(0, 3 - (w - l)) - 0.3 * w,  # noqa: E741
    ),
    "slic_norm": (
        "slic",
        {"margin": 3.0, "likelihood": 0.3, "per_token": True},
        lambda w, l, rw, rl: (  # noqa: E741
            np.maximum(0, 3 - np.subtract(*per_token(w, l))) - 0.3 * w / LENGTHS["chosen_lengths"]
        ),
    ),
    "sft": ("sft", {}, lambda w, l, rw, rl: -w / LENGTHS["chosen_lengths"]),  # noqa: E741
    "sppo": (
        "sppo",
        {"chosen_win_rate": np.array([0.9, 0.6, 0.5, 1.0], np.float32), "rejected_win_rate": 0.3},
        sppo,
    ),
}


def call(name, rows, where=None):
    """A case on four rows, with what its loss names."""
    function, options, _ = CASES[name]
    function = getattr(preferences, function)
    context = dict(zip(ARRAYS, rows, strict=True)) | LENGTHS | options
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
        expected = CASES[name][2](*np.float64(rows))
        close(ours, expected, rtol=3e-5, atol=3e-6)
        step = 1e-5
        for row in range(2):
            high, low = np.float64(rows), np.float64(rows)
            high[row] += step
            low[row] -= step
            difference = (CASES[name][2](*high) - CASES[name][2](*low)) / (2 * step)
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


def test_swapped_responses():
    w, l, rw, rl = arrays(2)  # noqa: E741
    z = 0.5 * delta(*np.float64([w, l, rw, rl]))
    dpo, ipo, hinge = preferences.dpo, preferences.ipo, preferences.hinge
    for function, difference in ((dpo, -z), (ipo, -8 * z), (hinge, None)):
        one = function(w, l, rw, rl, beta=0.5)
        other = function(l, w, rl, rw, beta=0.5)
        if difference is None:
            assert (np.asarray(one + other) >= 2 - 1e-5).all()
        else:
            # log sigmoid(z) - log sigmoid(-z) = z, and (h - 1)^2 - (h + 1)^2 = -4 h
            close(one - other, difference, rtol=1e-4, atol=1e-4)


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


def test_the_fixed_point_of_ipo_is_its_margin():
    slope = grad(lambda x: preferences.ipo(*x, beta=0.5).sum())
    logp = arrays(4)
    for _ in range(60):
        logp = logp - np.float32(0.2) * slope(logp)
    close(delta(*np.float64(logp)), np.full(4, 1.0), atol=1e-4)


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


def test_codpo_is_mpo_with_its_weights():
    rows = arrays(5)
    lengths = LENGTHS["chosen_lengths"]
    ours = preferences.mpo(
        *rows, beta=0.5, preference=1.0, quality=0.0, likelihood=5.0, chosen_lengths=lengths
    )
    close(ours, mpo(*np.float64(rows), weights=(1, 0, 5)), rtol=1e-5)
    rpo = preferences.dpo(*rows, beta=0.5, likelihood=5.0, chosen_lengths=lengths)
    close(rpo, ours, rtol=1e-6)


def test_a_response_that_the_policy_cannot_produce_is_a_pair_that_is_won():
    pair = [np.array([x]) for x in (-10.0, -np.inf, -10.0, -20.0)]
    values, gradients = value_and_grad(lambda *x: preferences.dpo(*x).sum(), argnums=(0, 1))(*pair)
    assert float(values) == 0.0 and [float(g[0]) for g in gradients] == [0.0, 0.0]
