"""Divergences on a support, self-distillation and the routing between it and rewards."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.surrogates import (
    add_tail,
    distillation_divergence,
    entropy_weights,
    gkd,
    keep_taught,
    ppo_clip,
    sdpo,
    sdpo_sampled,
    srpo,
    srpo_route,
    srpo_weights,
    support_log_probs,
    target_log_probs,
    teacher_divergence,
    top_log_probs,
    top_tokens,
    topk_with_tail,
)

S, T = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])


def divergence(s, t, alpha):
    s, t = np.asarray(s, np.float64), np.asarray(t, np.float64)
    kl = lambda p, q: float(np.sum(p * np.log(p / q)))  # noqa: E731
    if alpha in (0, 1):
        return kl(s, t) if alpha else kl(t, s)
    m = (1 - alpha) * s + alpha * t
    return (1 - alpha) * kl(s, m) + alpha * kl(t, m)


@for_each(("alpha", "expected"), [(0, 0.092033), (1, 0.085123), (0.5, 0.021901)])
def test_worked_divergences(alpha, expected):
    out = distillation_divergence(jnp.log(S), jnp.log(T), alpha=alpha)
    close(out, expected, atol=1e-6)


def test_a_support_and_its_tail():
    # Worked tails.
    for p, tail in ((S, -2.302585), (T, -1.609438)):
        log_probs = topk_with_tail(jnp.log(p) + 3.0, jnp.array([0, 1]))
        close(log_probs, [*np.log(p[:2]), tail], rtol=1e-5)

    # Merging tokens into a tail can only lower the divergence.
    rng = np.random.default_rng(0)
    s, t = np.log(rng.dirichlet(np.ones(8), (2, 20))).astype(np.float32)
    support = top_tokens(jnp.asarray(s), count=3)
    for alpha in (0, 0.5, 1):
        merged = distillation_divergence(
            topk_with_tail(s, support), topk_with_tail(t, support), alpha=alpha
        )
        assert np.all(merged <= distillation_divergence(s, t, alpha=alpha) + 1e-6)

    # A sure student has a finite tail and gradient.
    logits = jnp.array([40.0, 0.0, -5.0])
    support = jnp.array([0, 1])
    tail = lambda x: topk_with_tail(x, support)[-1]  # noqa: E731
    value, gradient = jax.value_and_grad(tail)(logits)
    close(value, np.log(1e-7), rtol=1e-3)
    assert not np.any(gradient)

    # Statistics are rows of the softmax and jit.
    logits = jax.random.normal(jax.random.key(3), (5, 9), jnp.bfloat16)
    targets = jnp.zeros(5, int)
    support = top_tokens(logits, targets, count=4)
    assert support.dtype == jnp.int32
    chosen = jax.jit(support_log_probs)(logits, targets, support=support)
    assert chosen.dtype == jnp.float32
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    close(chosen, -np.sort(-log_p, axis=-1)[:, :4], rtol=1e-5)
    close(np.exp(add_tail(chosen)).sum(-1), 1.0, rtol=1e-5)
    assert top_tokens(logits, count=100).shape == (5, 9)


@quick
@given(seed=st.integers(0, 1000), alpha=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
def test_divergence_against_float64(seed, alpha):
    s, t = np.random.default_rng(seed).dirichlet(np.ones(6), 2).astype(np.float32)
    out = distillation_divergence(jnp.log(s), jnp.log(t), alpha=alpha)
    close(out, divergence(s, t, alpha), rtol=1e-3, atol=1e-5)
    assert out >= -1e-6
    if alpha == 0.5:
        back = distillation_divergence(jnp.log(t), jnp.log(s), alpha=alpha)
        close(out, back, rtol=1e-3, atol=1e-6)


def test_impossible_events():
    # An event whose probability rounds to zero contributes nothing.
    student = jnp.array([0.0, -110.0])
    teacher = jnp.array([0.0, -jnp.inf])
    value, gradient = jax.value_and_grad(lambda s: distillation_divergence(s, teacher, alpha=1.0))(
        student
    )
    assert float(value) == 0.0 and np.isfinite(gradient).all()

    # One sided zeros.
    s = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    t = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    close(distillation_divergence(s, t, alpha=1), 0.5 * np.log(2), rtol=1e-6)
    assert distillation_divergence(s, t, alpha=0) == np.inf
    value, gradient = jax.value_and_grad(distillation_divergence)(s, t)
    m = np.array([0.5, 0.375, 0.125])
    expected = 0.5 * 0.5 * np.log(0.5 / 0.375) + 0.5 * (
        0.25 * np.log(0.25 / 0.375) + 0.25 * np.log(0.25 / m[2])
    )
    close(value, expected, rtol=1e-5)
    assert np.isfinite(gradient).all()

    # A token that neither student nor teacher can produce is not learned.
    logp, teacher = jnp.array([-jnp.inf, -1.5]), jnp.array([-jnp.inf, -0.5])

    def loss(x):
        return sdpo_sampled(x, None, 0.0, jnp.ones(2, bool), teacher_token_logp=teacher)

    equal(loss(logp), [0.0, 1.5])
    equal(jax.grad(lambda x: loss(x).sum())(logp), [0.0, -1.0])


@for_each("alpha", [0, 0.4, 1])
def test_events_of_probability_zero_count_as_nothing(alpha):
    s, t = np.log(S).astype(np.float32), np.log(T).astype(np.float32)
    loss = lambda x, y: distillation_divergence(x, y, alpha=alpha)  # noqa: E731
    padded = [jnp.append(x, -jnp.inf) for x in (s, t)]
    value, gradient = jax.value_and_grad(loss)(*padded)
    expected = jax.value_and_grad(loss)(s, t)
    close(value, expected[0], rtol=1e-6)
    close(gradient[:3], expected[1], rtol=1e-6)
    assert gradient[3] == 0


def single(x):
    return jnp.log(jnp.asarray(x, jnp.float32))[None]


def test_sdpo():
    # The rest of the support.
    mask, logp, zero = jnp.ones(1, bool), jnp.zeros(1), jnp.zeros(())
    full = {"student_logp": single(S), "teacher_logp": single(T)}
    top = {"student_logp": single(S[:2]), "teacher_logp": single(T[:2])}
    call = lambda arrays, rest: sdpo(logp, None, zero, mask, **arrays, rest=rest)[0]  # noqa: E731
    close(call(full, "none"), 0.021901, atol=1e-6)
    close(call(full, "tail"), 0.021901, atol=1e-6)
    close(call(top, "tail"), 0.021901, atol=1e-6)
    expected = divergence(S[:2] / 0.9, T[:2] / 0.8, 0.5)
    close(call(top, "renormalize"), expected, rtol=1e-4)
    one = {"student_logp": single(S[:1]), "teacher_logp": single(T[:1])}
    close(call(one, "tail"), divergence(*([x[0], 1 - x[0]] for x in (S, T)), 0.5), rtol=1e-4)

    # The ratio weighs up to its cap.
    mask, zero = jnp.ones(3, bool), jnp.zeros(())
    arrays = {
        "student_logp": jnp.repeat(single(S[:2]), 3, 0),
        "teacher_logp": jnp.repeat(single(T[:2]), 3, 0),
    }
    logp = jnp.log(jnp.array([0.5, 1.5, 8.0]))
    plain = sdpo(logp, jnp.zeros(3), zero, mask, **arrays, cap=None)
    capped = sdpo(logp, jnp.zeros(3), zero, mask, **arrays)
    close(capped / plain, [0.5, 1.5, 2.0], rtol=1e-5)

    # The sampled mode has the expected gradient of the reverse divergence.
    logits, teacher = jnp.array([0.3, -0.2, 0.5]), jnp.log(jnp.asarray(T, jnp.float32))

    def sampled(x):
        log_p = jax.nn.log_softmax(x)
        loss = sdpo_sampled(
            log_p, None, jnp.zeros(()), jnp.ones(3, bool), teacher_token_logp=teacher
        )
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_p)) * loss)

    def exact(x):
        return distillation_divergence(jax.nn.log_softmax(x), teacher, alpha=1)

    close(jax.grad(sampled)(logits), jax.grad(exact)(logits), atol=1e-6)

    # Without a teacher nothing is learned or counted.
    mask, has_teacher = jnp.ones((2, 1), bool), jnp.array([True, False])
    teacher = jnp.array([np.log(T[:2]), [np.nan, np.nan]], jnp.float32)[:, None]
    student = jnp.repeat(single(S[:2])[None], 2, 0)
    loss = lambda x: sdpo(  # noqa: E731
        jnp.zeros((2, 1)), None, jnp.zeros(2), mask,
        student_logp=x, teacher_logp=teacher, has_teacher=has_teacher,
    )  # fmt: skip
    close(loss(student).ravel(), [0.021901, 0.0], atol=1e-6)
    gradient = jax.grad(lambda x: loss(x).sum())(student)
    assert np.any(gradient[0]) and not np.any(gradient[1])
    equal(keep_taught(None, mask, has_teacher=has_teacher)[:, 0], [1, 0])


def test_worked_entropy_weights():
    entropy = jnp.array([[0.0, 1.0, 2.0]])
    out = entropy_weights(entropy, jnp.ones((1, 3), bool))
    close(out, [[1.995723, 0.734185, 0.270092]], atol=1e-6)
    close(out.mean(), 1.0, rtol=1e-6)
    flat = entropy_weights(entropy, jnp.array([[True, False, True]]), beta=0.0)
    equal(flat, [[1.0, 0.0, 1.0]])
    assert not np.any(entropy_weights(entropy, jnp.zeros((1, 3), bool)))


@quick
@given(shift=st.floats(0, 500), seed=st.integers(0, 100))
def test_entropy_weights_ignore_a_common_uncertainty(shift, seed):
    rng = np.random.default_rng(seed)
    entropy = rng.uniform(0, 3, (2, 4)).astype(np.float32)
    selected = rng.random((2, 4)) < 0.6
    junk = np.where(selected, entropy + np.float32(shift), np.nan)
    out = entropy_weights(jnp.asarray(junk), jnp.asarray(selected))
    expected = entropy_weights(jnp.asarray(entropy), jnp.asarray(selected))
    close(out, expected, rtol=1e-3, atol=1e-6)


def routed_arrays():
    student = jnp.broadcast_to(single(S[:2]), (3, 2, 2))
    teacher = jnp.broadcast_to(single(T[:2]), (3, 2, 2))
    return {"student_logp": student, "teacher_logp": teacher}


def test_srpo():
    # Routes.
    rewards, has_teacher = jnp.array([1.0, 0.0, 0.0]), jnp.array([True, True, False])
    equal(srpo_route(rewards, has_teacher), [False, True, False])
    equal(srpo_route(rewards, has_teacher, success=2.0), [True, True, False])
    weights = srpo_weights(
        None,
        rewards=rewards,
        has_teacher=has_teacher,
        teacher_entropy=jnp.array([[5.0, 5.0], [0.0, 1.0], [5.0, 5.0]]),
        mask=jnp.ones((3, 2), bool),
    )
    expected = np.exp([0.0, -1.0]) / np.exp([0.0, -1.0]).mean()
    close(weights, [[0, 0], expected, [0, 0]], rtol=1e-6)

    # The routed do not read advantages nor the others a teacher.
    mask, logp = jnp.ones((3, 2), bool), jnp.full((3, 2), -1.0)
    rewards, has_teacher = jnp.array([1.0, 0.0, 0.0]), jnp.array([False, True, False])
    arrays = routed_arrays()
    arrays["teacher_logp"] = jnp.where(has_teacher[:, None, None], arrays["teacher_logp"], jnp.nan)

    def both(advantages):
        loss = lambda x: srpo(  # noqa: E731
            x, logp, advantages, mask, **arrays, rewards=rewards, has_teacher=has_teacher,
            distillation_weights=jnp.ones((3, 2)),
        ).sum()  # fmt: skip
        return jax.value_and_grad(loss)(logp)

    for one, other in zip(
        both(jnp.array([0.5, 9.0, -0.5])), both(jnp.array([0.5, 0.0, -0.5])), strict=True
    ):
        equal(one, other)
        assert np.isfinite(one).all()


@for_each("why", ["no teacher", "all correct"])
def test_without_a_failure_or_a_teacher_it_is_grpo(why):
    rng = np.random.default_rng(0)
    logp, old = (rng.normal(-1, 0.4, (3, 2)).astype(np.float32) for _ in range(2))
    advantages, mask = rng.normal(size=3).astype(np.float32), np.ones((3, 2), bool)
    loss = srpo(
        logp, old, advantages, mask, **routed_arrays(),
        rewards=jnp.full(3, float(why == "all correct")),
        has_teacher=jnp.full(3, why == "all correct"),
        distillation_weights=jnp.full((3, 2), jnp.nan),
    )  # fmt: skip
    equal(loss, ppo_clip(logp, old, advantages, mask))


def test_the_full_vocabulary_and_the_top_of_a_teacher():
    logits, others = (jax.random.normal(jax.random.key(i), (4, 6)) for i in range(2))
    s, t = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in (logits, others))
    for alpha in (0.0, 0.3, 1.0):
        out = teacher_divergence(logits, teacher_logits=others, alpha=alpha)
        want = [divergence(np.exp(a), np.exp(b), alpha) for a, b in zip(s, t, strict=True)]
        close(out, want, rtol=1e-4, atol=1e-6)
    # A token that neither can sample counts as nothing, and has no gradient.
    cut = lambda x: jnp.where(jnp.arange(6) < 4, x, -jnp.inf)  # noqa: E731
    loss = lambda x: teacher_divergence(cut(x), teacher_logits=cut(others), alpha=0.3).sum()  # noqa: E731
    gradient = jax.grad(loss)(logits)
    assert np.isfinite(gradient).all() and not gradient[:, 4:].any() and gradient[:, :4].any()
    targets = jnp.array([0, 5, 2, 2])
    close(target_log_probs(others, targets), t[np.arange(4), targets], rtol=1e-5)
    close(top_log_probs(others, count=2), -np.sort(-t)[:, :2], rtol=1e-5)
    mask = jnp.array([True, False, True, True])
    values = jnp.array([1.0, jnp.nan, 2.0, 3.0])
    out = gkd(jnp.zeros(4), None, jnp.zeros(()), mask, divergence=values)
    assert out.tolist() == [1.0, 0.0, 2.0, 3.0]
