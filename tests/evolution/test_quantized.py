"""int8 weights of a float model: the worked number, one unit at a time, and a fit by evolution."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def test_int8_weights_follow_a_teacher():
    """Adam proposes from the gradient of evolution; what stands out moves the integers."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 8), (8, 4)))
    q, scale = es.quantize_int8(w + 0.1 * jnp.asarray(rng.normal(size=w.shape), jnp.float32))
    # A float leaf that moved as much as these integers would drown them in noise.
    params = {"q": q, "scale": scale}
    classes = es.leaf_classes(params, rules=[("q", "lowrank"), ("scale", "frozen")])
    optimizer, key = optax.adam(0.02), jax.random.key(0)

    def score(params):
        return -jnp.mean((x @ (params["q"] * params["scale"] - w)) ** 2)

    @jax.jit
    def step(params, state, epoch):
        def member(n):
            return score(es.perturb(params, classes, key, epoch, n, sigma=0.4))

        fitness = es.zscore(jax.vmap(member)(jnp.arange(256)))
        grads = es.eggroll_grad(params, classes, key, epoch, fitness, sigma=0.4, chunk=128)
        updates, state = optimizer.update(grads, state)
        return es.apply_quantized(params, updates, tau=1.0), state

    floats = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    new, state = params, optimizer.init(floats)
    for epoch in range(16):
        before = new["q"].astype(int)
        new, state = step(new, state, epoch)
        assert new["q"].dtype == jnp.int8 and int(abs(new["q"] - before).max()) <= 1
    assert score(new) > 0.3 * score(params)
