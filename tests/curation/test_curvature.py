"""CAPO: worked numbers, the exact KL of a step, and Adam's direction against optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled_curation import capo_mask, capo_scores, capo_selection, sum_pi_cubed
from rows import for_each

from jaxrl_llm.curation import CapoMoments, CapoScores

H, PI = np.array([1.0, 2.0]), np.array([0.7, 0.2, 0.1])


def worked(**options):
    lead = {"learning_rate": 0.01} | options
    scores = capo_scores(
        jnp.array([H], jnp.float32),
        jnp.array([PI], jnp.float32),
        jnp.array([0]),
        jnp.array([1.5]),
        jnp.ones(1, bool),
        **lead,
    )
    return float(scores.objective[0]), float(scores.policy[0])


def test_worked_numbers():
    # Worked numbers.
    objective, policy = worked()
    np.testing.assert_allclose(policy, 5.5125e-5, rtol=1e-5)
    np.testing.assert_allclose(objective, 0.0156369, rtol=1e-5)
    np.testing.assert_allclose(worked(fisher="full")[1], 1.305e-4, rtol=1e-4)
    np.testing.assert_allclose(worked(learning_rate=0.02)[1], 4 * policy, rtol=1e-5)

    # Full fisher is the kl of the step.
    u = 1.5 * (H @ H) * (np.eye(3)[0] - PI)
    new = PI * np.exp(0.01 * u)
    new /= new.sum()
    exact = np.sum(PI * np.log(PI / new))
    np.testing.assert_allclose(exact, 1.2985e-4, rtol=1e-3)
    np.testing.assert_allclose(worked(fisher="full")[1], exact, rtol=1e-2)

    # Sum of cubes.
    logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]])) + 3.0
    np.testing.assert_allclose(
        sum_pi_cubed(logits.astype(jnp.float32), jnp.array([1])), [0.352], rtol=1e-5
    )
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
    moments = state() if optimizer == "adam" else None
    function = jax.jit(
        lambda *x: capo_scores(*x, learning_rate=0.03, fisher=fisher, moments=moments)
    )
    scores = function(*arrays)
    step = (
        (lambda g: g)
        if moments is None
        else adam(np.float64(moments.mu), np.float64(moments.nu), 7)
    )
    for place in np.ndindex(mask.shape):
        expected = (0.0, 0.0)
        if mask[place]:
            token = (np.float64(hidden[place]), np.float64(probs[place]), actions[place])
            expected = reference(*token, np.float64(advantages[place[0]]), 0.03, step, fisher)
        found = scores.objective[place], scores.policy[place]
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-7)


def test_scores():
    # The prospective step is that of optax.
    hidden, probs, actions, advantages, _ = (x[0, :1] if x.ndim > 1 else x[:1] for x in batch(2))
    weights, optimizer = jnp.zeros((5, 4)), optax.scale_by_adam()
    optimizer_state = optimizer.init(weights)
    for seed in range(3):  # moments that are not zero
        gradient = jax.random.normal(jax.random.key(seed), weights.shape)
        _, optimizer_state = optimizer.update(gradient, optimizer_state)
    moments = CapoMoments(optimizer_state.mu, optimizer_state.nu, optimizer_state.count)
    scores = capo_scores(
        hidden, probs, actions, advantages, jnp.ones(1, bool), learning_rate=0.1, moments=moments
    )

    def step(gradient):
        return np.float64(optimizer.update(jnp.asarray(gradient), optimizer_state)[0])

    token = (np.float64(hidden[0]), np.float64(probs[0]), actions[0], np.float64(advantages[0]))
    expected = reference(*token, 0.1, step)
    np.testing.assert_allclose((scores.objective[0], scores.policy[0]), expected, rtol=1e-4)

    # A support takes its rows of the moments.
    hidden, probs, actions, advantages, mask = batch(3)
    moments = state(vocabulary=9)
    support = np.broadcast_to([8, 2, 5, 0, 3], probs.shape)
    out = capo_scores(
        hidden,
        probs,
        actions,
        advantages,
        mask,
        learning_rate=0.1,
        moments=moments,
        support=support,
    )
    rows = CapoMoments(moments.mu[support[0, 0]], moments.nu[support[0, 0]], moments.count)
    expected = capo_scores(
        hidden, probs, actions, advantages, mask, learning_rate=0.1, moments=rows
    )
    np.testing.assert_allclose(out.objective, expected.objective, rtol=1e-5)
    np.testing.assert_allclose(out.policy, expected.policy, rtol=1e-5)

    # No advantage no step.
    hidden, probs, actions, _, mask = batch(4)
    scores = capo_scores(hidden, probs, actions, jnp.zeros(2), mask, learning_rate=1.0)
    assert not scores.objective.any() and not scores.policy.any()
    np.testing.assert_array_equal(capo_mask(scores, mask, tau_h=1e-9, tau_f=1e-9), mask)


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
    np.testing.assert_array_equal(infinite, mask)
    # A NaN is left for the loss to show, unless it is masked.
    unknown = CapoScores(jnp.array([jnp.nan, 0.0, jnp.nan]), jnp.array([0.0, jnp.nan, jnp.nan]))
    for symmetric in (True, False):
        kept = capo_mask(unknown, jnp.array([True, True, False]), symmetric=symmetric, **options)
        assert kept.tolist() == [True, True, False]

    # Masked cells are never read.
    hidden, probs, actions, advantages, mask = batch(5)
    clean = capo_scores(hidden, probs, actions, advantages, mask, learning_rate=0.1)
    moments = state()
    clean_adam = capo_scores(
        hidden, probs, actions, advantages, mask, learning_rate=0.1, moments=moments
    )
    for junk in (np.nan, np.inf, 1e4):
        dirty = (
            np.where(mask[..., None], hidden, np.float32(junk)),
            np.where(mask[..., None], probs, np.float32(junk)),
            np.where(mask, actions, -(10**6)),
        )
        for moment, expected in ((None, clean), (moments, clean_adam)):
            found = capo_scores(*dirty, advantages, mask, learning_rate=0.1, moments=moment)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(a, b)

    # The selection of a recipe needs four numbers a token.
    hidden, probs, actions, advantages, mask = batch(6, lead=(2, 4, 3))
    scores = capo_scores(hidden, probs, actions, advantages, mask, learning_rate=0.05)
    options = {"tau_h": 0.1, "tau_f": 0.002, "symmetric": False}
    expected = capo_mask(scores, mask, **options)
    kept = np.asarray(expected)[mask].mean()
    assert 0.1 < kept < 0.9
    p = np.take_along_axis(probs, actions[..., None], -1)[..., 0]
    select = jax.jit(
        lambda a, m, lr: capo_selection(
            a,
            m,
            old_logp=jnp.where(m, jnp.log(p), jnp.nan),
            sum_pi_sq=jnp.where(m, (probs**2).sum(-1), jnp.inf),
            sum_pi_cubed=jnp.asarray((probs**3).sum(-1)),
            hidden_sq=jnp.asarray((hidden**2).sum(-1)),
            learning_rate=lr,
            **options,
        )
    )
    found = select(advantages, mask, jnp.full((2, 1, 1), 0.05))
    np.testing.assert_array_equal(found, expected)
