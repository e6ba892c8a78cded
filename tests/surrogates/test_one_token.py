"""One-token rollouts: the closed form, the sampled form, and that one tends to the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.surrogates import otr_exact, otr_sampled, token_seeds

LOGITS, TARGET = jnp.array([1.0, 0.0, -1.0]), jnp.array(0)


def seeds(count, key=0):
    return jax.random.bits(jax.random.key(key), (count,), jnp.uint32)


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def reference(logits, target, beta, tau, fixed=None):
    q = softmax((logits if fixed is None else fixed) / tau)
    log_p = np.log(softmax(logits))
    rewards = np.where(np.arange(len(logits)) == target, 1.0, beta)
    return -np.sum(rewards * q * log_p)


def test_worked_numbers():
    # Worked numbers.
    loss = lambda x: otr_exact(x, TARGET, tau=1.0)  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(LOGITS)
    close(value, 0.215032, atol=1e-6)
    close(gradient, [-0.244965, 0.179084, 0.065881], atol=1e-6)

    # Equal rewards leave no gradient.
    gradient = jax.grad(lambda x: otr_exact(x, TARGET, beta=1.0, tau=1.0))(LOGITS)
    close(gradient, 0.0, atol=1e-7)


@for_each("tau", [0.7, 1.0, 1.3])
@for_each("beta", [-0.1, 0.3])
def test_exact_form_against_float64(tau, beta):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(0, 2, (4, 6)).astype(np.float32), rng.integers(0, 6, 4)
    loss = lambda x: otr_exact(x, targets, beta=beta, tau=tau)  # noqa: E731
    exact = logits.astype(np.float64)
    expected = [reference(x, t, beta, tau) for x, t in zip(exact, targets, strict=True)]
    close(jax.jit(loss)(logits), expected, rtol=1e-5)
    gradient = jax.grad(lambda x: loss(x).sum())(jnp.asarray(logits))
    for row in range(4):
        for v in range(6):
            ends = []
            for step in (1e-6, -1e-6):
                moved = exact[row].copy()
                moved[v] += step
                ends.append(reference(moved, targets[row], beta, tau, fixed=exact[row]))
            slope = (ends[0] - ends[1]) / 2e-6
            close(gradient[row, v], slope, rtol=1e-3, atol=1e-5)


@for_each("tau", [1.0, 1.3])
def test_samples_tend_to_the_exact_form(tau):
    count = 4000
    logits = jnp.broadcast_to(LOGITS, (count, 3))
    targets = jnp.zeros(count, int)
    options = {"beta": -0.1, "tau": tau}

    @jax.jit
    def sampled(x):
        many = jnp.broadcast_to(x, logits.shape)
        return otr_sampled(many, targets, token_seeds=seeds(count), samples=8, **options).mean()

    value, gradient = jax.value_and_grad(sampled)(LOGITS)
    exact = jax.value_and_grad(lambda x: otr_exact(x, TARGET, **options))(LOGITS)
    # 32000 draws of a variable whose deviation is about 1.
    close(value, exact[0], atol=0.015)
    close(gradient, exact[1], atol=0.015)


@functools.partial(jax.jit, static_argnames="samples")
def drawn(logits, token_seeds, samples=16):
    """How often each token was drawn: with beta 0, the loss counts the draws of one target."""

    def loss(token):
        targets = jnp.full(token_seeds.shape, token)
        return otr_sampled(logits, targets, token_seeds=token_seeds, samples=samples, beta=0.0)

    losses = jnp.moveaxis(jax.vmap(loss)(jnp.arange(logits.shape[-1])), 0, -1)
    # Counts are integers, so that the rounding of a program does not matter.
    return jnp.rint(-samples * losses / jax.nn.log_softmax(logits))


def test_samples_depend_on_the_seed_alone():
    logits, s = jax.random.normal(jax.random.key(1), (6, 9)), seeds(6)
    whole = drawn(logits, s)
    assert (whole.sum(axis=-1) == 16).all()
    equal(drawn(logits[2:4], s[2:4]), whole[2:4])
    assert (drawn(logits, seeds(6, key=2)) != whole).any(axis=-1).all()
    square = drawn(logits.reshape(2, 3, 9), s.reshape(2, 3))
    equal(square.reshape(6, 9), whole)


@for_each("cut", [(3,), (0, 2), (1, 2, 3)])
def test_impossible_tokens_are_never_drawn_and_count_as_nothing(cut):
    logits = np.array([0.5, 1.0, -1.0, 0.0], np.float32)
    logits[list(cut)] = -np.inf
    kept = [i for i in range(4) if i not in cut]
    target, short = jnp.array(kept[0]), jnp.array(0)
    exact = lambda x: otr_exact(x, target)  # noqa: E731
    value, gradient = jax.value_and_grad(exact)(jnp.asarray(logits))
    expected = jax.value_and_grad(lambda x: otr_exact(x, short))(jnp.asarray(logits[kept]))
    close(value, expected[0], rtol=1e-5, atol=1e-7)
    close(gradient[np.array(kept)], expected[1], rtol=1e-4, atol=1e-7)
    assert not np.any(gradient[np.array(cut)])
    many = jnp.broadcast_to(logits, (200, 4))
    drawn = jax.value_and_grad(
        lambda x: otr_sampled(x, jnp.full(200, kept[0]), token_seeds=seeds(200), samples=4).sum()
    )(many)
    assert np.isfinite(drawn[0]) and np.isfinite(drawn[1]).all()


def test_seeds_and_dtypes():
    # Bfloat16 logits give float32.
    low = jax.random.normal(jax.random.key(0), (3, 5), jnp.bfloat16)
    targets = jnp.arange(3)
    for out, full in (
        (otr_exact(low, targets), otr_exact(low.astype(jnp.float32), targets)),
        (
            otr_sampled(low, targets, token_seeds=seeds(3)),
            otr_sampled(low.astype(jnp.float32), targets, token_seeds=seeds(3)),
        ),
    ):
        assert out.dtype == jnp.float32
        equal(out, full)

    # Token seeds come from the key.
    mask = jnp.ones((2, 3), bool)
    one = token_seeds(None, key=jax.random.key(0), mask=mask)
    again = token_seeds(None, key=jax.random.key(0), mask=mask)
    other = token_seeds(None, key=jax.random.key(1), mask=mask)
    equal(one, again)
    assert len(np.unique(np.concatenate([one, other]))) == 12
    wide = token_seeds(None, key=jax.random.key(0), mask=jnp.ones((2, 5), bool))
    equal(wide[:, :3], one)  # padding changes no draw
