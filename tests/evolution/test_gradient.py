"""The update: worked numbers, and the laws that make it a gradient, whatever the rank or chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import equal
from jax.sharding import NamedSharding, PartitionSpec
from rows import for_each

from jaxrl_llm import evolution as es

KEY = jax.random.key(2)
F = jnp.array([1.0, -1.0, 0.5, -0.5])
PARAMS = {"up": {"kernel": jnp.ones((6, 4)), "bias": jnp.ones(4)}, "norm": {"scale": jnp.ones(6)}}
CLASSES = es.leaf_classes(PARAMS, rules=[("*scale", "full")])
FITNESS = jnp.asarray(np.random.default_rng(0).normal(size=12), jnp.float32)


def close(found, expected, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), found, expected)


def grad(fitness=FITNESS, params=PARAMS, classes=CLASSES, epoch=3, sigma=0.1, **options):
    return es.eggroll_grad(params, classes, KEY, epoch, fitness, sigma=sigma, **options)


def test_worked_numbers(monkeypatch):
    a = jnp.array([[1.0, 0, -1], [0, 1, 1]])[..., None]
    b = jnp.array([[2.0, 1], [1, -1]])[..., None]
    monkeypatch.setattr(es.noise.Draws, "factors", lambda self, *_: (a[self.ids], b[self.ids]))
    params = {"w": jnp.zeros((3, 2))}
    classes = es.leaf_classes(params)
    d = np.array([[0.1, 0.05], [0.025, -0.025], [-0.075, -0.075]])
    close(grad(F, params, classes)["w"], -2 * d)
    close(grad(F, params, classes, sigma=None, scale="mean")["w"], -10 * d)
    close(grad(F, params, classes, scale="gradient")["w"], -100 * d)
    signs = np.sign(a[:, :, 0])[:, :, None] * np.sign(b[:, :, 0])[:, None]
    expected = -0.1 / 2 * (2 * signs[0] + signs[1])
    close(grad(F, params, classes, sign=True)["w"], expected)


@for_each(("pairs", "rank"), [(True, 1), (True, 3), (False, 1)])
def test_the_sum_over_members_written_out(pairs, rank):
    members = jnp.arange(12)
    options = {"rank": rank, "pairs": pairs}
    kernel = es.lowrank_noise(es.leaf_key(KEY, "up/kernel"), 3, members, (6, 4), **options)
    signed = FITNESS * kernel.sign
    expected = -0.1 / (12 * rank) ** 0.5 * jnp.einsum("n,nir,njr->ij", signed, kernel.a, kernel.b)
    found = grad(**options)
    close(found["up"]["kernel"], expected)
    assert not np.any(found["up"]["bias"])
    eps = es.noise.full_noise(es.leaf_key(KEY, "norm/scale"), 3, members, (6,), pairs=pairs).eps
    close(found["norm"]["scale"], -0.1 / 12**0.5 * signed @ eps)
    # Groups in order are the population.
    close(grad(FITNESS.reshape(3, 4), **options), found, atol=0)


def test_pairs():
    # Equal fitness within each pair: exactly nothing. The sides exchanged: the other direction.
    jax.tree.map(lambda x: equal(x, 0), grad(jnp.repeat(FITNESS, 2)))
    swapped = FITNESS.reshape(-1, 2)[:, ::-1].reshape(-1)
    close(grad(swapped), jax.tree.map(jnp.negative, grad()), atol=0)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    permuted = FITNESS.reshape(-1, 2)[order].reshape(-1)
    close(grad(permuted, draws=order), grad())


@for_each("chunk", [1, 5, 100])
def test_the_chunk_is_only_memory(chunk):
    close(grad(chunk=chunk, rank=2), grad(rank=2))


@pytest.mark.of_many
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_expected_update_is_the_gradient_of_a_linear_fitness(rank):
    params = {"w": jnp.zeros((4, 5))}
    classes = es.leaf_classes(params)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5)), jnp.float32)

    @jax.jit
    def estimate(epoch):
        def score(n):
            member = es.perturb(params, classes, KEY, epoch, n, sigma=0.5, rank=rank)
            return jnp.sum(g * member["w"])

        fitness = jax.vmap(score)(jnp.arange(40000))
        options = {"sigma": 0.5, "rank": rank, "scale": "gradient", "chunk": 20000}
        return es.eggroll_grad(params, classes, KEY, epoch, fitness, **options)["w"]

    # The deviation of an entry is at most |g| sqrt(kurtosis / draws), about 0.1.
    assert np.abs(estimate(0) + g).max() < 0.12
    assert abs(np.vdot(estimate(0), g) / np.vdot(g, g) + 1) < 0.05


def test_dtypes():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    found = grad(params=half)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    close(jax.tree.map(lambda x: x.astype(jnp.float32), found), grad(), atol=1e-3)
    # Noise of another dtype is other noise, the same in both passes.
    members = jnp.arange(12)
    key = es.leaf_key(KEY, "up/kernel")
    e = es.lowrank_noise(key, 3, members, (6, 4), dtype=jnp.bfloat16)
    a, b = e.a.astype(jnp.float32), e.b.astype(jnp.float32)
    expected = -0.1 / 12**0.5 * jnp.einsum("n,nir,njr->ij", FITNESS * e.sign, a, b)
    close(grad(dtype=jnp.bfloat16)["up"]["kernel"], expected)
    params = {"w": jnp.ones((4, 3), jnp.int8)}
    classes = es.leaf_classes(params, rules=[("w", "lowrank")])
    assert grad(params=params, classes=classes)["w"].dtype == jnp.float32


def test_one_program_for_all_epochs_and_scales():
    traced = []

    @jax.jit
    def step(fitness, epoch, sigma):
        traced.append(epoch)
        return grad(fitness, epoch=epoch, sigma=sigma, chunk=4)

    for epoch, sigma in ((0, 0.1), (3, 0.2)):
        close(step(FITNESS, epoch, sigma), grad(epoch=epoch, sigma=sigma))
    assert len(traced) == 1


@pytest.mark.slow
def test_sharded_is_unsharded():
    """Parameters over one axis of a mesh, members over the other: the same noise everywhere."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    params = {"up": {"kernel": jnp.ones((16, 8))}, "norm": {"scale": jnp.ones(8)}}
    classes = es.leaf_classes(params, others="full")
    split = {
        "up": {"kernel": NamedSharding(mesh, PartitionSpec("fsdp"))},
        "norm": {"scale": NamedSharding(mesh, PartitionSpec())},
    }
    over = NamedSharding(mesh, PartitionSpec("data"))

    def update(params, fitness):
        return es.eggroll_grad(params, classes, KEY, 3, fitness, sigma=0.1, chunk=2)

    def draw(params, members):
        return es.model_delta(params, classes, KEY, 3, members, sigma=0.1, rank=2)

    placed = jax.device_put(params, split)
    found = jax.jit(update, out_shardings=split)(placed, jax.device_put(FITNESS, over))
    assert found["up"]["kernel"].sharding.is_equivalent_to(split["up"]["kernel"], 2)
    close(found, update(params, FITNESS))
    members = jnp.arange(8).reshape(4, 2)
    found = jax.jit(draw, out_shardings=over)(placed, jax.device_put(members, over))
    jax.tree.map(equal, found, jax.jit(draw)(params, members))
