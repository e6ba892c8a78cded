"""Losses of lists: worked numbers, float64 values, laws, gradients, bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, grad, put, value_and_grad
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import preferences

S, Y = np.array([0.2, 0.4, -0.1]), np.array([1.0, 0.5, 0.0])
LOSSES = {
    "lipo_lambda": preferences.lipo_lambda,
    "pair_logistic": preferences.pair_logistic,
    "pair_hinge": preferences.pair_hinge,
    "list_softmax": preferences.list_softmax,
    "plackett_luce": preferences.plackett_luce,
}


def lists(seed=0, size=5):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.linspace(0, 1, size)).astype(np.float32)
    return jnp.asarray(rng.normal(size=size), jnp.float32), jnp.asarray(labels)


def by_hand(name, s, y):
    """float64, pair by pair and place by place."""
    s, y = np.float64(s), np.float64(y)
    pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if y[i] > y[j]]
    if name == "lipo_lambda":
        rank = np.argsort(np.argsort(-s, kind="stable"), kind="stable") + 1
        gain = lambda i, j: abs(2 ** y[i] - 2 ** y[j])  # noqa: E731
        place = lambda i, j: abs(1 / np.log(1 + rank[i]) - 1 / np.log(1 + rank[j]))  # noqa: E731
        return sum(gain(i, j) * place(i, j) * np.log1p(np.exp(s[j] - s[i])) for i, j in pairs)
    if name == "pair_logistic":
        return sum(np.log1p(np.exp(s[j] - s[i])) for i, j in pairs)
    if name == "pair_hinge":
        return sum(max(0.0, 1.0 - s[i] + s[j]) for i, j in pairs)
    if name == "list_softmax":
        soft = lambda x: np.exp(x) / np.exp(x).sum()  # noqa: E731
        return -np.sum(soft(y) * np.log(soft(s)))
    t = s[np.argsort(-y, kind="stable")]
    return sum(np.log(np.exp(t[k:]).sum()) - t[k] for k in range(len(t) - 1))


def test_the_worked_numbers_of_lists():
    close(preferences.lipo_lambda(S, Y), 0.495307, atol=1e-6)
    close(preferences.list_softmax(S, Y), 1.080397, atol=1e-6)
    close(preferences.plackett_luce(S, Y), 1.560016, atol=1e-6)
    two = np.array([0.2, 0.4]), np.array([1.0, 0.0])
    close(preferences.plackett_luce(*two), 0.798139, atol=1e-6)
    weighted = 0.532456 * preferences.pair_logistic(*two)
    close(preferences.lipo_lambda(*two), weighted, rtol=1e-5)


@for_each("name", LOSSES)
def test_value_and_gradient_equal_float64_and_the_order_of_a_list_is_free(name):
    loss = LOSSES[name]
    for seed in range(2):
        s, y = lists(seed)
        value, slope = value_and_grad(loss)(s, y)
        close(value, by_hand(name, s, y), rtol=1e-5)
        for i in range(len(s)):  # away from ties, so that no rank changes
            up, down = np.float64(s), np.float64(s)
            up[i] += 1e-6
            down[i] -= 1e-6
            difference = (by_hand(name, up, y) - by_hand(name, down, y)) / 2e-6
            close(slope[i], difference, atol=1e-4)
        order = np.random.default_rng(seed).permutation(len(s))
        close(loss(s[order], y[order]), value, rtol=1e-5)
        close(loss(s + 3.0, y), value, rtol=1e-5)


@for_each("name", LOSSES)
def test_what_is_absent_is_not_read_and_short_lists_have_no_loss(name):
    s, y = lists(3)
    where = np.array([[True, True, False, True, False], [False] * 4 + [True], [False] * 5])
    clean = LOSSES[name](s[np.array([0, 1, 3])], y[np.array([0, 1, 3])])
    for junk in (np.nan, np.inf, 1e4):
        dirty, labels = (np.where(where, np.broadcast_to(x, (3, 5)), junk) for x in (s, y))
        loss, slope = value_and_grad(
            lambda s, y: (v := LOSSES[name](s, y, where=where)).sum() + 0 * v[0]
        )(dirty, labels)
        close(loss, clean, rtol=1e-5)
        assert np.isfinite(slope).all() and not slope[~where].any() and not slope[1:].any()
    assert np.isnan(LOSSES[name](s, put(y, 1, np.nan)))
    assert np.isnan(LOSSES[name](put(s, 1, np.nan), y))


def test_equal_labels_are_no_pair_and_a_mean_is_over_the_pairs():
    for loss in (preferences.lipo_lambda, preferences.pair_logistic, preferences.pair_hinge):
        assert loss(S, np.ones(3)) == 0
        assert grad(loss)(S, np.ones(3)).tolist() == [0, 0, 0]
        tied = np.array([1, 1, 0])
        pairs = [loss(S[np.array([i, 2])], tied[np.array([i, 2])]) for i in (0, 1)]
        if loss is not preferences.lipo_lambda:  # whose weights hang on the rank in the list
            close(loss(S, tied), sum(pairs), rtol=1e-5)
        close(loss(S, tied, reduce="mean"), loss(S, tied) / 2, rtol=1e-6)


def test_plackett_luce_of_equals_and_of_the_first_places():
    close(preferences.plackett_luce(np.zeros(5), np.arange(5)), math.log(120), rtol=1e-6)
    s, y = lists(1)
    ranked = s[np.argsort(-y)]
    first = jax.nn.logsumexp(ranked) - ranked[0]
    close(preferences.plackett_luce(s, y, top_m=1), first, rtol=1e-5)
    every = preferences.plackett_luce(s, y)
    assert preferences.plackett_luce(s, y, top_m=9) == every
    # The probabilities of all rankings add up to 1.
    ranks = np.array([[2, 1, 0], [2, 0, 1], [1, 2, 0], [0, 2, 1], [1, 0, 2], [0, 1, 2]])
    losses = preferences.plackett_luce(np.broadcast_to(S, (6, 3)), ranks)
    close(np.exp(-losses).sum(), 1.0, rtol=1e-6)


def test_a_gain_that_overflows_has_no_part_in_ties():
    slope = grad(preferences.lipo_lambda)(np.zeros(3), np.array([200.0, 200.0, 200.0]))
    equal(slope, 0.0)
    slope = grad(preferences.lipo_lambda)(np.zeros(2), np.array([130.0, 1.0]))
    assert not np.isnan(slope).any()


def test_list_softmax_is_least_where_the_scores_are_the_labels():
    slope = grad(preferences.list_softmax)(Y + 2.0, Y)
    close(slope, np.zeros(3), atol=1e-6)


LP = np.array([-4.8, -6.1, -4.2, -7.0])
PRIOR, PROPOSAL = np.array([-5.0, -6, -4, -7]), np.array([-5.2, -5.5, -4, -7.5])
R = np.array([2.0, 1, 0, -1])


def test_brain_has_the_worked_numbers_and_its_gradient_is_the_difference_of_the_weights():
    two = np.array([-5.0, -6.0])
    loss, slope = value_and_grad(preferences.brain)(
        np.array([-4.5, -6.2]), two, two, np.array([1.0, 0.0])
    )
    close(loss, 0.009242, atol=1e-6)
    close(slope, [-0.062871, 0.062871], atol=1e-6)
    loss, slope = value_and_grad(preferences.brain)(LP, PRIOR, PROPOSAL, R)
    close(loss, 0.435315, atol=1e-5)
    close(slope, [-0.403998, -0.012518, 0.100182, 0.316334], atol=1e-5)
    a = preferences.snis_weights(PRIOR + R - PROPOSAL)
    close(a, [0.734920, 0.134258, 0.081431, 0.049391], atol=1e-6)
    plain = grad(lambda x: preferences.brain(x, PRIOR, PROPOSAL, R, baseline=False))(LP)
    close(plain, -a, rtol=1e-6)
    frozen = grad(preferences.brain, argnums=(1, 2, 3))(LP, PRIOR, PROPOSAL, R)
    assert not any(x.any() for x in frozen)


def test_brain_laws():
    loss = preferences.brain(LP, PRIOR, PROPOSAL, R)
    close(preferences.brain(LP, PRIOR, PROPOSAL, R + 5), loss, rtol=1e-5)
    # Rewards far apart: DPO with beta 1 against what sampled.
    far = np.array([1000.0, 0.0])
    dpo = preferences.dpo(LP[0], LP[1], PROPOSAL[0], PROPOSAL[1], beta=1.0)
    ours = preferences.brain(LP[:2], PRIOR[:2], PROPOSAL[:2], far)
    close(ours, dpo, rtol=1e-5)
    # The policy that sampled is the prior, and no reward tells the samples apart.
    same = grad(preferences.brain)(PRIOR, PRIOR, PRIOR, np.ones(4))
    close(same, np.zeros(4), atol=1e-7)
    where = np.array([[True, False, True, True], [True, False, False, False], [False] * 4])
    dirty = np.where(where, LP, np.nan)
    value, slope = value_and_grad(
        lambda x: preferences.brain(
            x, np.broadcast_to(PRIOR, (3, 4)), np.broadcast_to(PROPOSAL, (3, 4)),
            jnp.where(where, R, np.inf), where=where,
        ).sum()
    )(dirty)  # fmt: skip
    three = np.array([0, 2, 3])
    alone = preferences.brain(LP[three], PRIOR[three], PROPOSAL[three], R[three])
    close(value, alone, rtol=1e-5)
    assert np.isfinite(slope).all() and not slope[1:].any() and slope[0, 1] == 0


def test_scores_are_implicit_rewards():
    close(preferences.implicit_rewards(LP, PRIOR, beta=0.5), 0.5 * (LP - PRIOR), rtol=1e-6)
    pair = [LP[0], LP[1], PRIOR[0], PRIOR[1]]
    scores = preferences.implicit_rewards(LP[:2], PRIOR[:2], beta=0.3)
    close(
        preferences.pair_logistic(scores, np.array([1, 0])),
        preferences.dpo(*pair, beta=0.3),
        rtol=1e-6,
    )
    assert not grad(lambda r: preferences.implicit_rewards(LP, r).sum())(PRIOR).any()


def test_a_list_of_two_is_its_pair():
    pair = np.array([0.2, 0.4]), np.array([1.0, 0.0])
    expected = preferences.bradley_terry(np.array(0.2), np.array(0.4))
    for loss in (preferences.pair_logistic, preferences.plackett_luce):
        close(loss(*pair), expected, rtol=1e-6)
    hinge = jr.preferences.pair_hinge(*pair)
    close(hinge, 1.2, rtol=1e-6)
