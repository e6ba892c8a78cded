"""Evolution strategies of full rank: worked numbers, MeZO, and the limit of the low-rank ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cheap import close

from jaxrl_llm import evolution as es

KEY = jax.random.key(3)
PARAMS = {"w": jnp.zeros(2)}
CLASSES = es.leaf_classes(PARAMS, others="full")


def given(monkeypatch, eps):
    eps = jnp.asarray(eps, jnp.float32)
    monkeypatch.setattr(es.noise.Draws, "dense", lambda self, shape: eps[self.ids])


def test_worked_numbers_of_open_es(monkeypatch):
    given(monkeypatch, [[1, 0], [0, 2]])
    fitness, options = jnp.array([0.5, -0.5]), {"sigma": 0.1}
    alone = es.open_es_grad(PARAMS, CLASSES, KEY, 0, fitness, pairs=False, **options)["w"]
    close(-0.1 * alone, [0.25, -0.5], atol=1e-6)
    pair = es.open_es_grad(PARAMS, CLASSES, KEY, 0, fitness, **options)["w"]
    close(-0.1 * pair, [0.5, 0.0], atol=1e-6)


def test_worked_numbers_of_es_qiu(monkeypatch):
    given(monkeypatch, [[1, -1], [0.5, 2], [-1, 0]])
    fitness = es.zscore(jnp.array([0.2, 0.4, 0.9]), eps=0.0)
    grads = es.es_qiu_grad(PARAMS, CLASSES, KEY, 0, fitness)
    updates, _ = optax.sgd(5e-4).update(grads, optax.sgd(5e-4).init(PARAMS))
    close(updates["w"], [-4.246e-4, 5.66e-5], atol=1e-7)
    still = es.es_qiu_grad(PARAMS, CLASSES, KEY, 0, es.zscore(jnp.full(3, 0.7)))["w"]
    assert not np.any(still)


def test_a_pair_that_is_not_shaped_is_the_two_point_estimate():
    params = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([1.0])}
    classes = es.full_rank(es.leaf_classes(params, others="full"))

    def loss(params):
        return jnp.sum(params["w"] ** 2) + jnp.sum(params["b"] ** 3)

    up, down = (es.perturb(params, classes, KEY, 0, n, sigma=0.1) for n in (0, 1))
    slope = (loss(up) - loss(down)) / 0.2
    fitness = jnp.stack([-loss(up), -loss(down)])
    found = es.open_es_grad(params, classes, KEY, 0, fitness, sigma=0.1)
    expected = jax.tree.map(lambda x, y: slope * (x - y) / 0.1, up, params)
    jax.tree.map(lambda x, y: close(x, y, rtol=1e-3), found, expected)


def test_the_same_scale_as_noise_of_low_rank():
    params = {"w": jnp.zeros((30, 30))}
    classes = es.leaf_classes(params)
    fitness = es.zscore(jax.random.normal(jax.random.key(0), (256,)))
    for grad in (es.eggroll_grad, es.open_es_grad):
        update = jax.jit(partial(grad, params, classes, KEY, 0, sigma=0.01, scale="step"))
        found = update(fitness)["w"]
        assert abs(float(jnp.sqrt(jnp.mean(found**2))) / 0.01 - 1) < 0.12
    assert np.linalg.matrix_rank(found) == 30
