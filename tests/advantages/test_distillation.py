"""Advantages from a teacher: sums by hand, the gradient of the reverse KL, spans."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, grad, normal
from rows import for_each

from jaxrl_llm.advantages import prefix_weighted, rlsd, span_advantages, teacher_advantages

RNG = np.random.default_rng(0)
MASK = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
OLD, TEACHER = (np.where(MASK, -RNG.gamma(2.0, 0.5, MASK.shape), np.nan) for _ in range(2))
BEFORE = RNG.normal(size=3)


@for_each(("discount", "normalize"), [(0.0, False), (0.7, False), (1.0, True)])
def test_sums_of_the_rest(discount, normalize):
    out = jax.jit(
        lambda *x: teacher_advantages(
            x[0], x[1], old_logp=x[2], teacher_token_logp=x[3], coef=2.0, discount=discount,
            normalize=normalize,
        )
    )(BEFORE, MASK, OLD, TEACHER)  # fmt: skip
    want = np.zeros(MASK.shape)
    for i in range(3):
        places = np.flatnonzero(MASK[i])
        for k, t in enumerate(places):
            powers = discount ** np.arange(len(places) - k)
            total = np.sum(powers * (TEACHER - OLD)[i, places[k:]])
            want[i, t] = BEFORE[i] + 2.0 * total / (powers.sum() if normalize else 1.0)
    close(out, want, rtol=1e-5, atol=1e-6)


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Of all texts of two tokens from a vocabulary of three, the second one after the first."""
    shapes = [(3,), (3, 3)] * 2
    first, second, t_first, t_second = (normal(i, shape) for i, shape in enumerate(shapes))
    texts = np.array(list(itertools.product(range(3), repeat=2)))

    def logp(params):
        a, b = (jax.nn.log_softmax(x) for x in params)
        return jnp.stack([a[texts[:, 0]], b[texts[:, 0], texts[:, 1]]], -1)

    ours, theirs = (first, second), (t_first, t_second)
    old = np.asarray(jax.jit(logp)(ours))

    def surrogate(params, discount):
        advantages = teacher_advantages(
            np.zeros(9), np.ones((9, 2), bool), old_logp=old, teacher_token_logp=logp(theirs),
            discount=discount,
        )  # fmt: skip
        return -jnp.sum(jnp.exp(old.sum(-1)) * jnp.sum(advantages * logp(params), -1))

    def divergence(params, by_token):
        x = logp(params)
        if by_token:  # the prefixes are a constant: the divergence of each next token
            a, b, c, d = (jax.nn.log_softmax(y) for y in (*params, *theirs))
            of_second = jnp.sum(jnp.exp(b) * (b - d), -1)
            return jnp.sum(jnp.exp(a) * (a - c)) + jnp.sum(jax.nn.softmax(ours[0]) * of_second)
        return jnp.sum(jnp.exp(x.sum(-1)) * (x - logp(theirs)).sum(-1))

    for discount, by_token in ((0.0, True), (1.0, False)):
        a = grad(surrogate)(ours, discount)
        b = grad(divergence)(ours, by_token)
        for x, y in zip(a, b, strict=True):
            close(x, y, atol=2e-6)


def test_prefix_weights():
    advantages = np.where(MASK, RNG.normal(size=MASK.shape), np.nan)
    out = prefix_weighted(advantages, MASK, gamma=0.5)
    want = np.zeros(MASK.shape)
    for i in range(2):
        size = np.abs(np.where(MASK[i], advantages[i], 0.0))
        before = np.concatenate([[0.0], np.cumsum(size)[:-1]])
        weight = 1 + 0.5 * (1 - before / size.sum())
        want[i] = np.where(MASK[i], weight * np.nan_to_num(advantages[i]), 0.0)
    close(out, want, rtol=1e-5, atol=1e-6)
    same = prefix_weighted(advantages, MASK, gamma=0.0)
    equal(same, np.where(MASK, advantages, 0.0).astype(np.float32))


@for_each("negative_only", [False, True])
def test_a_teacher_weighs_what_speaks_for_the_reward(negative_only):
    signed = np.array([2.0, -3.0, 1.0])
    out = rlsd(
        signed, MASK, old_logp=OLD, teacher_token_logp=TEACHER, has_teacher=None, lam=0.7,
        eps=0.3, negative_only=negative_only,
    )  # fmt: skip
    want = np.zeros(MASK.shape)
    for i, t in np.argwhere(MASK):
        weight = np.clip(np.exp(np.sign(signed[i]) * (TEACHER - OLD)[i, t]), 0.7, 1.3)
        weight = 1.0 if negative_only and signed[i] > 0 else weight
        want[i, t] = signed[i] * (0.3 + 0.7 * weight)
    close(out, want, rtol=1e-5)
    assert ((np.asarray(out) * signed[:, None])[MASK] > 0).all()  # the reward has the direction


def test_without_a_teacher_or_a_share_the_advantages_stay():
    arrays = {"old_logp": OLD, "teacher_token_logp": TEACHER, "has_teacher": None}
    plain = np.where(MASK, BEFORE[:, None], 0.0)
    close(rlsd(BEFORE, MASK, lam=0.0, **arrays), plain, rtol=1e-6)
    close(rlsd(BEFORE, MASK, eps=0.0, **arrays), plain, rtol=1e-6)
    taught = np.array([True, False, True])
    some = {"teacher_token_logp": np.where(taught[:, None], TEACHER, np.nan), "has_teacher": taught}
    out = rlsd(BEFORE, MASK, **(arrays | some))
    close(out[1], plain[1], rtol=1e-6)
    assert np.abs(out[0] - plain[0]).max() > 0.01
    share = np.full((1, 1), 0.25)  # as an extra of a batch
    equal(rlsd(BEFORE, MASK, lam=share, **arrays), rlsd(BEFORE, MASK, lam=0.25, **arrays))
    certain = rlsd(
        np.ones(1), np.ones((1, 2), bool), has_teacher=None, lam=1.0,
        old_logp=np.array([[-np.inf, -1.0]]),
        teacher_token_logp=np.array([[-np.inf, -np.inf]]),
    )  # fmt: skip
    close(certain, [[1.0, 0.8]], rtol=1e-6)


def test_spans():
    ids = np.array([[0, 0, -1, 1, 1], [0, 1, -1, 0, 0], [0, 1, 2, 3, 4]])
    out = span_advantages(BEFORE, MASK, old_logp=OLD, teacher_span_logp=TEACHER, span_ids=ids)
    want = np.zeros(MASK.shape)
    for i, t in np.argwhere(MASK):
        there = MASK[i] & (ids[i] == ids[i, t])
        ratio = TEACHER[i, t] - OLD[i, there].sum() if ids[i, t] >= 0 else 0.0
        want[i, t] = BEFORE[i] + ratio
    close(out, want, rtol=1e-5, atol=1e-6)
    alone = np.broadcast_to(np.arange(5), MASK.shape)
    each = span_advantages(BEFORE, MASK, old_logp=OLD, teacher_span_logp=TEACHER, span_ids=alone)
    token = teacher_advantages(BEFORE, MASK, old_logp=OLD, teacher_token_logp=TEACHER)
    close(each, token, atol=1e-6)
