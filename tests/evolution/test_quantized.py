"""int8 weights of a float model: the worked number, one unit at a time, and a fit by evolution."""

import jax.numpy as jnp
import numpy as np
from cheap import close
from rows import for_each

from jaxrl_llm import evolution as es

Q = jnp.array([5, -127, 127, 5], jnp.int8)
U = jnp.array([0.1, 0.2, -0.9, 0.05])


def test_worked_numbers():
    z = (U - U.mean()) / U.std()
    close(z, [0.535, 0.761, -1.719, 0.423], atol=2e-3)
    assert es.quantized_step(Q, U, tau=1.0).tolist() == [5, -127, 126, 5]
    assert es.quantized_step(Q, U, tau=0.5).tolist() == [6, -126, 126, 5]
    assert es.quantized_step(Q, -U, tau=0.0).tolist() == [4, -127, 127, 4]


def test_no_update_is_no_step():
    for value in (0.0, 0.3):
        assert es.quantized_step(Q, jnp.full(4, value), tau=0.0).tolist() == Q.tolist()


@for_each("axis", [-1, -2, 0, 1])
def test_quantizing_is_within_half_a_unit(axis):
    w = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    w[0] = 0.0
    w[:, 0] = 0.0
    q, scale = es.quantize_int8(jnp.asarray(w), axis=axis)
    assert q.dtype == jnp.int8 and scale.shape == ((1, 4) if axis in (-1, 1) else (6, 1))
    assert np.all(np.abs(q * scale - w) <= scale * 0.5001)
    assert (np.abs(q).max(0 if axis in (-1, 1) else 1) == 127).sum() >= 3


def test_distillation():
    rng = np.random.default_rng(0)
    logits, teacher = (rng.normal(size=(2, 3, 5)) for _ in range(2))
    p = np.exp(teacher) / np.exp(teacher).sum(-1, keepdims=True)
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    mask = np.array([[True, True, False], [True, False, False]])
    expected = -np.where(mask, (p * np.log(p / q)).sum(-1), 0).sum(-1)
    logits[0, 2] = np.nan
    arrays = [jnp.asarray(x, jnp.float32) for x in (logits, teacher)]
    found = es.distillation_fitness(*arrays, jnp.asarray(mask))
    close(found, expected, atol=1e-5)
    # A word that the teacher never says, such as padding of its vocabulary.
    teacher[..., 4] = -np.inf
    found = es.distillation_fitness(arrays[0], jnp.float32(teacher), jnp.asarray(mask))
    assert np.isfinite(found).all()


def test_updates_of_a_tree():
    """Integers move by what stands out, floats by their updates."""
    params = {"q": Q, "scale": jnp.ones(2)}
    new = es.apply_quantized(params, {"q": U, "scale": jnp.array([0.5, -0.25])}, tau=0.5)
    assert new["q"].tolist() == [6, -126, 126, 5] and new["q"].dtype == jnp.int8
    assert new["scale"].tolist() == [1.5, 0.75]
