"""Losses of single responses and of sorted rewards: worked numbers, enumeration, laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad, put, value_and_grad
from rows import for_each

from jaxrl_llm import preferences

GOOD = np.array([True, False, True, False])
LOGP = np.array([1.0, -1.0, 0.5, -2.0])
ZERO = np.zeros(4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_worked_numbers_of_kto():
    loss = preferences.kto(LOGP, ZERO, GOOD, kl=0.2)
    close(loss, [0.480011, 0.470036, 0.492501, 0.445221], atol=1e-6)
    clamped = preferences.kto(LOGP, ZERO, GOOD, kl=-0.3)
    equal(clamped, preferences.kto(LOGP, ZERO, GOOD, kl=0.0))
    close(clamped, preferences.apo_zero_unpaired(LOGP, ZERO, GOOD), rtol=1e-6)
    assert float(grad(lambda kl: preferences.kto(LOGP, ZERO, GOOD, kl=kl).sum())(0.2)) == 0
    weighted = preferences.kto(LOGP, ZERO, GOOD, kl=0.2, desirable_weight=2.0)
    close(weighted / loss, [2, 1, 2, 1], rtol=1e-6)
    one_class = preferences.kto(LOGP, ZERO, np.ones(4, bool), kl=0.2)
    assert np.isfinite(one_class).all() and one_class[0] == loss[0]


def test_a_class_of_weight_zero_has_no_infinite_loss():
    logp = put(LOGP, 0, -np.inf)  # a good response that the policy cannot produce
    options = {"center": 0.0, "desirable_weight": 0.0}

    def loss(logp):
        return preferences.bco_unpaired(logp, ZERO, GOOD, **options)

    assert (loss(logp)[::2] == 0).all() and (loss(logp)[1::2] > 0).all()
    assert np.isfinite(grad(lambda x: loss(x).sum())(logp)).all()


def test_kto_pushes_a_policy_as_its_enumerated_objective_says():
    """Three responses, two of them good, a policy over them: the gradient by finite differences."""
    logits = np.array([0.3, -0.2, 0.1])
    ref = np.log(np.full(3, 1 / 3))
    good = np.array([True, True, False])
    share = np.array([0.5, 0.2, 0.3])  # how often the data have each response

    def objective(logits, kl=None):
        logp = logits - np.log(np.exp(logits).sum())
        # The responses of the data at other prompts are the same three.
        kl = max(0.0, (share * (logp - ref)).sum()) if kl is None else kl
        x = 0.4 * (logp - ref)
        value = np.where(good, 1 - sigmoid(x - 0.4 * kl), 1 - sigmoid(0.4 * kl - x))
        return (share * value).sum(), kl

    value, kl = objective(logits)
    counts = np.repeat(np.arange(3), [5, 2, 3])

    def ours(logits):
        logp = jax.nn.log_softmax(logits)[counts]
        kl = preferences.kto_kl(jnp.roll(logp, 1), jnp.asarray(ref)[counts])
        return preferences.kto(logp, jnp.asarray(ref)[counts], good[counts], kl=kl, beta=0.4).mean()

    loss, slope = value_and_grad(ours)(np.asarray(logits))
    assert float(loss) == pytest.approx(value, rel=1e-5)
    steps = 1e-5 * np.eye(3)
    expected = [(objective(logits + d, kl)[0] - objective(logits - d, kl)[0]) / 2e-5 for d in steps]
    close(slope, expected, rtol=1e-3, atol=1e-6)


def test_a_pair_is_two_responses():
    rows = np.random.default_rng(0).normal(-8, 3, (4, 3)).astype(np.float32)
    w, l, rw, rl = rows  # noqa: E741
    good = np.array([[True] * 3, [False] * 3])
    for single, pair, options in (
        (preferences.bco_unpaired, preferences.bco, {"center": 0.3}),
        (preferences.apo_zero_unpaired, preferences.apo_zero, {}),
    ):
        ours = single(np.stack([w, l]), np.stack([rw, rl]), good, **options).sum(0)
        close(ours, pair(w, l, rw, rl, **options), rtol=1e-5)


@for_each(
    ("name", "options"), [("kto", {"kl": 0.1}), ("bco_unpaired", {}), ("apo_zero_unpaired", {})]
)
def test_absent_responses_are_not_read(name, options):
    where = np.array([True, False, True, True])
    function = getattr(preferences, name)
    clean = np.where(where, function(LOGP, ZERO, GOOD, **options), 0.0)
    run = value_and_grad(
        lambda x: (y := function(x[0], x[1], GOOD, where=where, **options)).sum() + 0 * y[0]
    )
    for junk in (np.nan, np.inf, -np.inf):
        loss, slope = run(np.where(where, np.stack([LOGP, ZERO]), junk))
        close(loss, clean.sum(), rtol=1e-5)
        assert np.isfinite(slope).all() and not slope[:, 1].any() and not slope[1].any()
        assert slope[0, 0] < 0 < slope[0, 3]


def test_the_running_reward_is_the_mean_of_all_responses():
    rng = np.random.default_rng(1)
    transform = preferences.running_reward(beta=0.5)
    update, state, every = jax.jit(transform.update), transform.init(), []
    for _ in range(3):
        old, ref = rng.normal(-1, 0.5, (2, 2, 3, 4)).astype(np.float32)
        mask = np.arange(4) < rng.integers(0, 5, (2, 3, 1))
        where = rng.random((2, 3)) < 0.7
        every += list(np.where(mask, old - ref, 0).sum(-1)[where & mask.any(-1)] * 0.5)
        old[~(mask & where[..., None])] = np.nan
        mean, state = update(
            np.zeros((2, 3)), state, where=where, old_logp=old, ref_logp=ref, mask=mask
        )
        assert float(mean) == pytest.approx(np.mean(every), rel=1e-5)
    assert float(state.count) == len(every)


def transported(x, y, beta, e):
    z = beta * (np.sort(x) - np.sort(y))
    value = (1 - e) * np.logaddexp(0, -z) + e * np.logaddexp(0, z)
    return value[np.argsort(np.argsort(x))]


def test_transport_compares_ranks():
    w, l, rw, rl = rows = np.random.default_rng(2).normal(-8, 3, (4, 6)).astype(np.float32)  # noqa: E741
    options = {"beta": 0.5, "label_smoothing": 0.1}
    pairs = preferences.aot(*rows, **options)
    close(pairs, transported(w - l, rw - rl, 0.5, 0.1), rtol=1e-5)
    alone = preferences.aot_unpaired(*rows, **options)
    close(alone, transported(w - rw, l - rl, 0.5, 0.1), rtol=1e-5)
    # Any partners do, the ranks are over all axes, and one pair is DPO.
    shuffled = rows.copy()
    shuffled[1::2] = rows[1::2][:, ::-1]
    close(preferences.aot_unpaired(*shuffled, **options), alone, rtol=1e-5)
    folded = preferences.aot(*rows.reshape(4, 2, 3), **options)
    close(folded.reshape(6), pairs, rtol=1e-6)
    one = preferences.aot(*rows[:, :1], **options)
    close(one, preferences.dpo(*rows[:, :1], **options), rtol=1e-5)


@for_each("name", ["aot", "aot_unpaired"])
def test_transport_of_the_pairs_that_there_are(name):
    function = getattr(preferences, name)
    rows = np.random.default_rng(3).normal(-8, 3, (4, 6)).astype(np.float32)
    where = np.array([True, True, False, True, False, True])
    clean = function(*rows[:, where], beta=0.5)

    def total(x):
        value = function(*x, beta=0.5, where=where)
        return value.sum(), value

    run = value_and_grad(total, has_aux=True)
    for junk in (np.nan, np.inf, -1e4):
        (_, loss), slope = run(np.where(where, rows, np.float32(junk)))
        close(np.asarray(loss)[where], clean, rtol=1e-5)
        assert not np.asarray(loss)[~where].any() and not np.asarray(slope)[:, ~where].any()

    def value(rows):
        w, l, rw, rl = rows[:, where]  # noqa: E741
        pairs = (w - l, rw - rl) if name == "aot" else (w - rw, l - rl)
        return transported(*pairs, 0.5, 0.0).sum()

    direction = np.random.default_rng(4).normal(size=rows.shape) * (np.arange(4) < 2)[:, None]
    ends = (value(np.float64(rows) + sign * 1e-4 * direction) for sign in (1, -1))
    close((slope * direction).sum(), np.subtract(*ends) / 2e-4, rtol=1e-3)
    assert not np.asarray(slope)[2:].any()
