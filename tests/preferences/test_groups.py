"""Losses of pairs on groups: which rollouts pair, float64 values and gradients, the center."""

import jax.numpy as jnp
import numpy as np
from cheap import close, grad, put, value_and_grad
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import preferences
from jaxrl_llm.core import bind

P, G, T = 3, 4, 5
LENGTHS = np.array([[5, 2, 3, 1], [4, 4, 1, 2], [5, 0, 2, 3]])
MASK = np.arange(T) < LENGTHS[..., None]
ADVANTAGES = np.float32([[0.5, -1, 1, 1], [0, 0, 0, 0], [0.25, 9, -0.5, -0.5]])
# The best and the worst of each group; one without a token is neither.
PAIRS = [[(2, 1), (3, 1)], [], [(0, 2), (0, 3)]]


def arrays():
    rng = np.random.default_rng(5)
    return rng.normal(-1.5, 0.7, (2, P, G, T)).astype(np.float32)


def softplus(x):
    return np.logaddexp(0.0, x)


def expected(logp, ref, center=0.0, weights=(0.8, 0.2, 1.0), beta=0.1):
    logp, ref = np.float64(logp), np.float64(ref)
    losses = np.zeros(P)
    for p, pairs in enumerate(PAIRS):
        for pair in pairs:
            w, l = ((logp[p, g] - ref[p, g])[MASK[p, g]].sum() * beta for g in pair)  # noqa: E741
            likelihood = logp[p, pair[0]][MASK[p, pair[0]]].mean()
            classes = softplus(center - w) + softplus(l - center)
            losses[p] += np.dot(weights, (softplus(l - w), classes, -likelihood)) / len(pairs)
    return losses


@for_each("center", [None, 0.3])
def test_the_loss_of_a_group_is_that_of_its_best_and_worst(center):
    logp, ref = arrays()
    loss = preferences.paired(logp, None, ADVANTAGES, MASK, ref_logp=ref, center=center)
    value = expected(logp, ref, center or 0.0)
    close(loss, np.where(MASK, value[:, None, None], 0.0), rtol=2e-5)


@for_each(("loss", "weights"), [(preferences.dpo, (1, 0, 0)), (preferences.bco, (0, 1, 0))])
def test_any_loss_of_pairs_serves(loss, weights):
    logp, ref = arrays()
    surrogate = bind(preferences.paired, loss=bind(loss, beta=0.5))
    got = surrogate(logp, None, ADVANTAGES, MASK, ref_logp=ref)
    close(got[:, 0, 0], expected(logp, ref, weights=weights, beta=0.5), rtol=2e-5)


def test_only_the_pair_has_a_gradient_and_junk_changes_nothing():
    logp, ref = arrays()

    def total(x, y):
        loss = preferences.paired(x, None, ADVANTAGES, MASK, ref_logp=y)
        return jnp.sum(loss * jr.aggregate.group_mean(MASK))

    gradient, of_reference = grad(total, argnums=(0, 1))(logp, ref)
    pairs = np.zeros((P, G, T), bool)
    for p, members in enumerate(PAIRS):
        pairs[p, sorted({g for pair in members for g in pair})] = True
    assert ((np.asarray(gradient) != 0) == (pairs & MASK)).all()
    assert not np.asarray(of_reference).any()
    step = 1e-3
    for place in [(0, 2, 1), (0, 1, 0), (2, 2, 1)]:
        up, down = np.float64(logp), np.float64(logp)
        up[place] += step
        down[place] -= step
        slope = (expected(up, ref) - expected(down, ref)).sum() / (2 * step) / P
        close(gradient[place], slope, rtol=1e-4)
    junk = np.where(MASK, logp, np.nan)
    assert float(total(junk, np.where(MASK, ref, np.inf))) == float(total(logp, ref))
    assert np.isfinite(np.asarray(grad(total)(junk, ref))).all()


@for_each("cap", [None, 1.0])
def test_a_pair_counts_by_the_alignment_of_both(cap):
    logp, ref = arrays()
    alignment = np.random.default_rng(6).uniform(0.2, 2.0, (P, G)).astype(np.float32)
    pairs = [(p, *pair) for p, of in enumerate(PAIRS) for pair in of]
    products = [alignment[p, good] * alignment[p, bad] for p, good, bad in pairs]
    assert min(products) < 1 < max(products)
    surrogate = bind(preferences.paired, loss=bind(preferences.dpo, beta=0.1))
    options = {"ref_logp": ref, "alignment": alignment, "max_alignment": cap}
    each = surrogate(logp, None, ADVANTAGES, MASK, **options)
    want = np.zeros(P)
    for (p, *pair), weight in zip(pairs, products, strict=True):
        good, bad = (np.float64(logp - ref)[p, g][MASK[p, g]].sum() * 0.1 for g in pair)
        want[p] += min(weight, cap or np.inf) * softplus(bad - good) / len(PAIRS[p])
    close(each[:, 0, 0], want, rtol=2e-5)


def test_an_infinite_loss_of_weight_zero_is_zero():
    """Of a response with a token that the policy cannot produce."""
    logp = put(np.zeros((2, 2)), np.s_[0, 1], -np.inf)
    mask, signs, zeros = np.ones((2, 2), bool), np.array([1.0, -1.0]), np.zeros((2, 2))

    def pair(logp, loss=preferences.dpo):
        options = {"ref_logp": zeros, "loss": loss, "alignment": np.array([0.0, 1.0])}
        return preferences.paired(logp, None, signs, mask, **options)

    def squared(logp):
        return pair(logp, preferences.ipo)

    def undesirable(logp):
        options = {"ref_logp": zeros, "density": jnp.float32(0.0), "loss": infinite}
        return preferences.single(logp, None, signs, mask, rewards=np.zeros(2), **options)

    def infinite(logp, where):
        return -logp

    for loss in (pair, squared, undesirable):
        assert (loss(logp) == 0).all()
        assert np.isfinite(grad(lambda x, loss=loss: loss(x).sum())(logp)).all()


def test_pairs_that_are_not_there_do_not_reach_a_loss_of_ones_own():
    """Of a pair the wrong way round, the loss below is infinite."""

    def exponential(chosen_logp, rejected_logp):
        return jnp.exp(0.1 * (rejected_logp - chosen_logp)) - 0.01 * chosen_logp

    def total(logp):
        mask, signs = np.ones((2, 1), bool), np.array([1.0, -1.0])
        options = {"ref_logp": None, "loss": exponential}
        return preferences.paired(logp[:, None], None, signs, mask, **options)[0, 0]

    sums = np.array([-60.0, -1200.0])
    value, slope = value_and_grad(total)(sums)
    close(value, exponential(*sums), rtol=1e-6)
    close(slope, grad(lambda x: exponential(*x))(sums), rtol=1e-6)


def test_the_center_is_the_mean_of_all_pairs():
    transform = preferences.running_center(beta=0.5)
    state, middles = transform.init(), []
    for seed in range(3):
        old, ref = np.random.default_rng(seed).normal(-1, 1, (2, P, G, T)).astype(np.float32)
        rewards = np.random.default_rng(seed).integers(0, 2, (P, G)).astype(np.float32)
        where = np.ones((P, G), bool)
        rewards[0], where[1, 1] = 1.0, False
        x = 0.5 * np.where(MASK, np.float64(old) - ref, 0.0).sum(-1)
        for p in range(P):
            able = [g for g in range(G) if where[p, g] and LENGTHS[p, g]]
            right = [x[p, g] for g in able if rewards[p, g]]
            wrong = [x[p, g] for g in able if not rewards[p, g]]
            if right and wrong:
                middles.append((np.mean(right) + np.mean(wrong)) / 2)
        context = {"where": where, "old_logp": old, "ref_logp": ref, "mask": MASK}
        center, state = transform.update(rewards, state, **context)
        close(center, np.mean(middles), rtol=1e-4)
        assert float(state.count) == len(middles)
    assert len(middles) > 3


def test_an_advantage_that_is_no_number_is_seen_in_its_group():
    logp, ref = arrays()
    unknown = ADVANTAGES.copy()
    unknown[0, 0] = np.nan
    loss = preferences.paired(logp, None, unknown, MASK, ref_logp=ref)
    assert np.isnan(loss[0, 0, 0]) and np.isfinite(loss[1:]).all()


def test_the_center_stays_finite_with_a_token_that_neither_policy_can_produce():
    center = preferences.running_center(beta=0.1)
    logp = put(np.full((1, 2, 3), -1.0), np.s_[0, 1, 2], -np.inf)
    mean, _ = center.update(
        np.array([[1.0, 0.0]]),
        center.init(),
        where=np.ones((1, 2), bool),
        old_logp=logp,
        ref_logp=logp,
        mask=np.ones((1, 2, 3), bool),
    )
    assert float(mean) == 0.0
