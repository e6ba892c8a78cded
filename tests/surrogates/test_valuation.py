"""ROVER: its worked numbers, its fixed point, and the statistic it needs."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.surrogates import mean_log_probs, rover

OLD, NEW = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])


def test_worked_numbers():
    # Worked q values.
    old = jnp.log(jnp.array([0.5, 0.25, 0.2]))
    new = jnp.log(jnp.array([0.55, 0.25, 0.15]))
    q = rover(
        new, old, jnp.zeros(()), jnp.ones(3, bool), mean_log_probs=old, old_mean_log_probs=old
    )
    close(np.sqrt(q), np.abs([0.09531, 0.0, -0.28768]), atol=1e-5)

    # Worked mean over the vocabulary.
    gap = mean_log_probs(jnp.log(NEW)) - mean_log_probs(jnp.log(OLD))
    close(gap, -0.170275, atol=1e-6)


@for_each("offset", [0.0, 1e4, -1e4])
def test_mean_log_probs_against_float64(offset):
    logits = np.random.default_rng(0).normal(0, 2, (3, 7))
    logits = (logits + offset).astype(np.float32)
    exact = logits.astype(np.float64)
    log_p = exact - exact.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    close(mean_log_probs(logits), log_p.mean(-1), rtol=1e-5)
    close(jax.jit(mean_log_probs)(logits), log_p.mean(-1), rtol=1e-5)
    gradient = jax.grad(lambda x: mean_log_probs(x).sum())(jnp.asarray(logits))
    close(gradient, 1 / 7 - np.exp(log_p), rtol=1e-4, atol=1e-6)


def test_mean_log_probs():
    # Mean log probs of a uniform distribution and of cut logits.
    close(mean_log_probs(jnp.full((2, 9), 3.0)), -np.log(9), rtol=1e-6)
    cut = jnp.array([1.0, -jnp.inf, 0.0, -jnp.inf])
    value, gradient = jax.value_and_grad(mean_log_probs)(cut)
    expected = jax.value_and_grad(mean_log_probs)(cut[::2])
    close(value, expected[0], rtol=1e-6)
    close(gradient[::2], expected[1], rtol=1e-6)
    assert not np.any(gradient[1::2])
    assert mean_log_probs(cut.astype(jnp.bfloat16)).dtype == jnp.float32

    # It takes targets like every statistic.
    logits = jax.random.normal(jax.random.key(0), (5, 4))
    equal(mean_log_probs(logits, jnp.zeros(5, int)), mean_log_probs(logits))


def test_rover():
    # Without a reward only a moved policy has a gradient.
    old, mask = jnp.array([-1.0, -2.0]), jnp.ones(2, bool)
    old_q = jnp.array([-4.0, -4.0])

    def gradient(logp, q):
        options = {"mean_log_probs": q, "old_mean_log_probs": old_q}
        loss = lambda x: rover(x, old, jnp.zeros(()), mask, **options).sum()  # noqa: E731
        return jax.grad(loss)(logp)

    assert not np.any(gradient(old, old_q))
    # Q is drawn to the continuation q of the next state: 2 (Q - q), and to 0 at the end.
    moved = gradient(old + 0.3, old_q - 0.1)
    close(moved, [2 * (0.3 + 0.1), 2 * 0.3], rtol=1e-5)

    # Continuation stops at the last token and at observations.
    mask = jnp.array([True, True, False, True, False])
    q, zeros = jnp.array([9.0, 1.0, 2.0, 3.0, 4.0]), jnp.zeros(5)
    loss = rover(zeros, zeros, jnp.zeros(()), mask, mean_log_probs=q, old_mean_log_probs=zeros)
    close(loss, [1.0, 0.0, 0.0, 0.0, 0.0])

    # The mean bellman solution has zero loss.
    # Two binary steps with a terminal reward: Q of the uniform policy, as log-ratios of a softmax
    # policy to the uniform one, up to the normalization that both sides of the equation share.
    rewards = np.array([[1.0, 0.0], [0.5, 0.25]])
    leaf = rewards  # Q of the last step
    root = leaf.mean(-1)  # Q of the first: the mean over the actions that follow
    for a in range(2):
        for b in range(2):
            q = jnp.array([root[a], leaf[a, b]], jnp.float32)
            # The reward comes with the last token alone; q[t + 1] is the mean of Q after a.
            gap = jnp.array([0.0, leaf[a].mean()], jnp.float32)
            loss = rover(
                q, jnp.zeros(2), jnp.array([0.0, rewards[a, b]], jnp.float32), jnp.ones(2, bool),
                mean_log_probs=gap, old_mean_log_probs=jnp.zeros(2),
            )  # fmt: skip
            close(loss, 0.0, atol=1e-10)
