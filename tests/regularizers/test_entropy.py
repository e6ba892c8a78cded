"""The entropy of a softmax, the bonus for it, and its controller.

- n equal logits have the entropy log n; a shift of the logits changes nothing; tokens of no
  probability count as nothing.
- The bonus is -coef min(entropy, cap): 0.25, 0.75 and 4 with coef 0.5 and cap 1 give -0.125,
  -0.375 and -0.5, and the last has no gradient.
- The controller adds delta below its target and subtracts it above, where the bonus is off:
  (0.01, delta 0.005) becomes 0.015 and applies 0.01, or becomes 0.005 and applies 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.regularizers import entropy_bonus, entropy_controller, entropy_from_logits

LOGITS = np.random.default_rng(0).normal(0, 2, (3, 7)).astype(np.float32)


def probabilities(logits):
    p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@for_each("size", [2, 5, 1000])
def test_uniform_entropy_is_log_of_the_size(size):
    got = entropy_from_logits(jnp.full((2, size), 3.0))
    close(got, np.full(2, np.log(size)), rtol=1e-6)


@for_each("offset", [0.0, 1e4, -1e4])
def test_value_and_gradient_match_float64(offset):
    logits = (LOGITS + np.float32(offset)).astype(np.float32)
    p = probabilities(logits)
    entropy = -np.sum(p * np.log(p), axis=-1)
    close(entropy_from_logits(logits), entropy, rtol=1e-5)
    gradient = jax.grad(lambda x: entropy_from_logits(x).sum())(jnp.asarray(logits))
    expected = -p * (np.log(p) + entropy[:, None])
    close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_entropies():
    # Tokens of no probability count as nothing.
    cut = np.where(np.arange(7) < 4, LOGITS, -np.inf).astype(np.float32)
    both = jax.value_and_grad(lambda x: entropy_from_logits(x).sum())
    value, gradient = both(jnp.asarray(cut))
    expected_value, expected_gradient = both(jnp.asarray(LOGITS[:, :4]))
    close(value, expected_value, rtol=1e-6)
    close(gradient[:, :4], expected_gradient, rtol=1e-5, atol=1e-7)
    assert not np.any(gradient[:, 4:])
    certain = jnp.array([0.0, -jnp.inf, -jnp.inf])
    assert entropy_from_logits(certain) == 0
    assert not np.any(jax.grad(entropy_from_logits)(certain))

    # Bfloat16 logits give float32.
    low = jnp.asarray(LOGITS, jnp.bfloat16)
    out = entropy_from_logits(low)
    assert out.dtype == jnp.float32
    equal(out, entropy_from_logits(low.astype(jnp.float32)))
    close(jax.jit(entropy_from_logits)(LOGITS), entropy_from_logits(LOGITS))


def test_the_bonus():
    # Bonus rewards entropy.
    entropy, mask = jnp.array([[2.0, 0.5], [1.0, 3.0]]), jnp.array([[True, True], [True, False]])
    bonus = lambda x, **o: entropy_bonus(x, mask, **o)  # noqa: E731
    equal(bonus(entropy, coef=0.5), [[-1.0, -0.25], [-0.5, 0.0]])
    close(bonus(entropy), bonus(entropy, coef=1e-3))
    gradient = jax.grad(lambda x: bonus(x, coef=0.5).sum())(entropy)
    equal(gradient, [[-0.5, -0.5], [-0.5, 0.0]])
    value, gradient = jax.value_and_grad(lambda x: bonus(x, coef=0.0).sum())(entropy)
    assert value == 0
    assert not np.any(gradient)
    assert bonus(entropy.astype(jnp.bfloat16)).dtype == jnp.float32

    # A bonus ends at its cap. Above it, a token is neither rewarded further nor pushed.
    bonus = lambda x: entropy_bonus(x, jnp.ones(3, bool), coef=0.5, cap=1.0)  # noqa: E731
    entropy = jnp.array([0.25, 0.75, 4.0])
    equal(bonus(entropy), [-0.125, -0.375, -0.5])
    equal(jax.grad(lambda x: bonus(x).sum())(entropy), [-0.5, -0.5, 0.0])


@for_each("cap", [None, 2.0])
@for_each("junk", [1e4, np.nan, np.inf, -np.inf])
def test_masked_cells_are_never_read(junk, cap):
    mask = jnp.array([True, False])
    bonus = lambda x: entropy_bonus(x, mask, coef=2.0, cap=cap).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(bonus)(jnp.array([1.5, junk]))
    assert value == -3.0
    equal(gradient, [-2.0, 0.0])


def test_the_controller():
    # The controller below and above its target.
    control = entropy_controller(0.01, 0.1, target=0.2, delta=0.005)
    close(control, [0.015, 0.01], rtol=1e-6)
    control = entropy_controller(0.01, 0.3, target=0.2, delta=0.005)
    close(control, [0.005, 0.0], rtol=1e-6)
    # At the target itself the bonus is on.
    assert float(entropy_controller(0.01, 0.25, target=0.25).applied) > 0

    # The controller stays within its bounds and is compiled once.
    traces = []

    @jax.jit
    def step(coef, entropy):
        traces.append(coef)
        return entropy_controller(coef, entropy, target=0.2, delta=0.02, low=0.01, high=0.05)

    coef, seen = jnp.float32(0.01), []
    for entropy in [0.1] * 4 + [0.3] * 4:
        coef, applied = step(coef, jnp.float32(entropy))
        seen.append((round(float(coef), 4), round(float(applied), 4)))
    assert [c for c, _ in seen] == [0.03, 0.05, 0.05, 0.05, 0.03, 0.01, 0.01, 0.01]
    assert [a for _, a in seen] == [0.01, 0.03, 0.05, 0.05, 0.0, 0.0, 0.0, 0.0]
    assert coef.dtype == jnp.float32 and len(traces) == 1
