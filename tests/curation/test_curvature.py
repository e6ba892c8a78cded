"""CAPO: worked numbers, the exact KL of a step, and Adam's direction against optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from compiled_curation import capo_mask, capo_scores, capo_selection, sum_pi_cubed
from rows import for_each

from jaxrl_llm.curation import CapoMoments, CapoScores

H, PI = np.array([1.0, 2.0]), np.array([0.7, 0.2, 0.1])


def worked(**options):
    token = (jnp.array([H]), jnp.array([PI]), jnp.array([0]), jnp.array([1.5]), jnp.ones(1, bool))
    scores = capo_scores(*token, **{"learning_rate": 0.01} | options)
    return float(scores.objective[0]), float(scores.policy[0])


def test_worked_numbers():
    objective, policy = worked()
    close(policy, 5.5125e-5, rtol=1e-5)
    close(objective, 0.0156369, rtol=1e-5)
    close(worked(fisher="full")[1], 1.305e-4, rtol=1e-4)
    close(worked(learning_rate=0.02)[1], 4 * policy, rtol=1e-5)

    # Full fisher is the kl of the step.
    new = PI * np.exp(0.01 * 1.5 * (H @ H) * (np.eye(3)[0] - PI))
    exact = np.sum(PI * np.log(PI / (new / new.sum())))
    close(exact, 1.2985e-4, rtol=1e-3)
    close(worked(fisher="full")[1], exact, rtol=1e-2)

    # Sum of cubes.
    logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]])) + 3.0
    close(sum_pi_cubed(logits, jnp.array([1])), [0.352], rtol=1e-5)
    assert sum_pi_cubed(logits.astype(jnp.bfloat16), jnp.array([1])).dtype == jnp.float32


def reference(h, pi, action, advantage, lr, step, fisher="sample"):
    """One token in float64, with the matrices written out; ``step`` maps a gradient to G."""
    v = np.eye(len(pi))[action] - pi
    g = advantage * np.outer(v, h)
    direction = step(g)
    u = direction @ h
    variance = u @ (np.diag(pi) - np.outer(pi, pi)) @ u
    fisher_term = variance if fisher == "full" else (v @ u) ** 2
    hessian = advantage * ((v @ u) ** 2 - variance)
    return lr * np.sum(g * direction) + 0.5 * lr**2 * hessian, 0.5 * lr**2 * fisher_term


def batch(seed=0, lead=(2, 3), width=4, vocabulary=5):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(*lead, width)).astype(np.float32)
    probs = jax.nn.softmax(2 * rng.normal(size=(*lead, vocabulary)), axis=-1)
    probs = np.asarray(probs, np.float32)
    actions = rng.integers(0, vocabulary, lead)
    advantages = rng.normal(size=lead[:-1]).astype(np.float32)
    mask = np.ones(lead, bool)
    mask[0, 1] = False
    return hidden, probs, actions, advantages, mask


def adam(mu, nu, count, betas=(0.9, 0.999), eps=1e-8):
    def step(gradient):
        m = betas[0] * mu + (1 - betas[0]) * gradient
        n = betas[1] * nu + (1 - betas[1]) * gradient**2
        m, n = m / (1 - betas[0] ** (count + 1)), n / (1 - betas[1] ** (count + 1))
        return m / (np.sqrt(n) + eps)

    return step


def state(seed=1, vocabulary=5, width=4, count=7):
    rng = np.random.default_rng(seed)
    mu = 0.1 * rng.normal(size=(vocabulary, width)).astype(np.float32)
    nu = (0.1 * rng.random((vocabulary, width)) + 0.01).astype(np.float32)
    return CapoMoments(mu, nu, jnp.int32(count))


@for_each("optimizer", ["sgd", "adam"])
@for_each("fisher", ["sample", "full"])
def test_equals_the_float64_reference(optimizer, fisher):
    arrays = batch()
    hidden, probs, actions, advantages, mask = arrays
    moments, step = None, lambda g: g
    if optimizer == "adam":
        moments = state()
        step = adam(np.float64(moments.mu), np.float64(moments.nu), 7)
    scores = capo_scores(*arrays, learning_rate=0.03, fisher=fisher, moments=moments)
    for place in np.ndindex(mask.shape):
        expected = (0.0, 0.0)
        if mask[place]:
            token = (np.float64(hidden[place]), np.float64(probs[place]), actions[place])
            expected = reference(*token, np.float64(advantages[place[0]]), 0.03, step, fisher)
        found = scores.objective[place], scores.policy[place]
        close(found, expected, rtol=2e-4, atol=1e-7)


def test_a_support_takes_its_rows_of_the_moments():
    arrays, moments = batch(3), state(vocabulary=9)
    support = np.broadcast_to([8, 2, 5, 0, 3], arrays[1].shape)
    out = capo_scores(*arrays, learning_rate=0.1, moments=moments, support=support)
    rows = CapoMoments(moments.mu[support[0, 0]], moments.nu[support[0, 0]], moments.count)
    expected = capo_scores(*arrays, learning_rate=0.1, moments=rows)
    jax.tree.map(functools.partial(close, rtol=1e-5), out, expected)


def test_the_mask():
    # The mask and its two forms.
    scores = CapoScores(jnp.array([0.02, 0.005, -0.005, -0.02, 0.0]), jnp.zeros(5))
    mask = jnp.array([True, True, True, True, True])
    options = {"tau_h": 0.01, "tau_f": 1e-4}
    assert capo_mask(scores, mask, **options).tolist() == [False, True, True, False, True]
    one_sided = capo_mask(scores, mask, symmetric=False, **options)
    assert one_sided.tolist() == [False, True, False, False, True]
    policy = CapoScores(jnp.zeros(2), jnp.array([1e-4, 0.9e-4]))
    assert capo_mask(policy, mask[:2], **options).tolist() == [False, True]
    infinite = capo_mask(scores, mask, tau_h=np.inf, tau_f=np.inf)
    equal(infinite, mask)
    # A NaN is left for the loss to show, unless it is masked.
    unknown = CapoScores(jnp.array([jnp.nan, 0.0, jnp.nan]), jnp.array([0.0, jnp.nan, jnp.nan]))
    for symmetric in (True, False):
        kept = capo_mask(unknown, jnp.array([True, True, False]), symmetric=symmetric, **options)
        assert kept.tolist() == [True, True, False]

    # Masked cells are never read.
    hidden, probs, actions, advantages, mask = batch(5)
    there = mask[..., None]
    for moments in (None, state()):
        scores = functools.partial(capo_scores, learning_rate=0.1, moments=moments)
        clean = scores(hidden, probs, actions, advantages, mask)
        for junk in np.float32([np.nan, np.inf, 1e4]):
            dirty = np.where(there, hidden, junk), np.where(there, probs, junk)
            found = scores(*dirty, np.where(mask, actions, -(10**6)), advantages, mask)
            jax.tree.map(equal, found, clean)

    # The selection of a recipe needs four numbers a token.
    hidden, probs, actions, advantages, mask = batch(6, lead=(2, 4, 3))
    scores = capo_scores(hidden, probs, actions, advantages, mask, learning_rate=0.05)
    options = {"tau_h": 0.1, "tau_f": 0.002, "symmetric": False}
    expected = capo_mask(scores, mask, **options)
    kept = np.asarray(expected)[mask].mean()
    assert 0.1 < kept < 0.9
    p = np.take_along_axis(probs, actions[..., None], -1)[..., 0]
    sums = {
        "old_logp": jnp.where(mask, jnp.log(p), jnp.nan),
        "sum_pi_sq": jnp.where(mask, (probs**2).sum(-1), jnp.inf),
        "sum_pi_cubed": jnp.asarray((probs**3).sum(-1)),
        "hidden_sq": jnp.asarray((hidden**2).sum(-1)),
    }
    rate = jnp.full((2, 1, 1), 0.05)
    equal(capo_selection(advantages, mask, **sums, learning_rate=rate, **options), expected)
