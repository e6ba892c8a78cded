"""The perturbed forward pass: thin products equal dense weights, pairs, rows of a table, trees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from rows import for_each

from jaxrl_llm import evolution as es

KEY = jax.random.key(1)
W = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
A, B = jnp.array([[1.0], [0.0], [-1.0]]), jnp.array([[2.0], [1.0]])


def dense(noise: es.LowRank, sigma):
    """``sign sigma A B^T / sqrt(r)`` of one member or of several."""
    product = noise.a @ jnp.swapaxes(noise.b, -1, -2)
    return noise.sign[..., None, None] * sigma * product / noise.a.shape[-1] ** 0.5


def test_worked_numbers():
    x = jnp.array([[1.0, -1.0]])
    for sign, expected in ((1.0, [-0.9, -1.0, -1.1]), (-1.0, [-1.1, -1.0, -0.9])):
        noise = es.LowRank(A, B, jnp.array(sign))
        found = es.eggroll_matmul(x, W, noise, sigma=0.1, transpose=True)
        close(found[0], expected, atol=1e-6)
        close(x @ (W + dense(noise, 0.1)).T, found, atol=1e-6)
        # The same leaf as [in, out].
        found = es.eggroll_matmul(x, W.T, es.LowRank(B, A, jnp.array(sign)), sigma=0.1)
        close(found[0], expected, atol=1e-6)


@for_each("rank", [1, 4])
@for_each("transpose", [False, True])
def test_low_rank_equals_dense_and_pairs_cancel(rank, transpose):
    rng = np.random.default_rng(rank)
    w = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(3, 2, 5, 4 if transpose else 6)), jnp.float32)
    product = jax.jit(partial(es.eggroll_matmul, transpose=transpose))
    noise = es.lowrank_noise(KEY, 0, jnp.arange(6).reshape(3, 2), w.shape, rank=rank)
    found = product(x, w, noise, sigma=0.3)
    perturbed = w + dense(noise, 0.3)
    if transpose:
        perturbed = jnp.swapaxes(perturbed, -1, -2)
    close(found, x @ perturbed, atol=1e-5)
    same = jnp.broadcast_to(x[:, :1], x.shape)
    found = product(same, w, noise, sigma=0.3)
    plain = es.eggroll_matmul(same[:, 0], w, None, sigma=0.3, transpose=transpose)
    close(found.mean(1), plain, atol=1e-5)
    # With no noise there is nothing left of the second product.
    still = product(same, w, noise, sigma=0.0)
    close(still[:, 0], plain, atol=1e-6)


def test_rows_of_an_embedding():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(9, 4)), jnp.float32)
    tokens = jnp.array([[0, 3, 8], [1, 1, 2], [0, 3, 8], [5, 6, 7]])
    noise = es.lowrank_noise(KEY, 2, jnp.arange(4), w.shape, rank=2)
    expected = jnp.take_along_axis(w + dense(noise, 0.5), tokens[..., None], axis=1)
    close(es.eggroll_embed(tokens, w, noise, sigma=0.5), expected, atol=1e-6)
    equal(es.eggroll_embed(tokens, w, None, sigma=0.5), w[tokens])
    one = jax.tree.map(lambda x: x[1], noise)
    found = es.eggroll_embed(tokens[1], w, one, sigma=0.5)
    close(found, expected[1], atol=1e-6)


def test_half_precision_stays():
    noise = es.lowrank_noise(KEY, 0, jnp.arange(2), (4, 3))
    x, w = jnp.ones((2, 1, 4), jnp.bfloat16), jnp.ones((4, 3))
    assert es.eggroll_matmul(x, w, noise, sigma=0.1).dtype == jnp.bfloat16
    table = jnp.ones((4, 3), jnp.bfloat16)
    assert es.eggroll_embed(jnp.ones((2, 1), int), table, noise, sigma=0.1).dtype == jnp.bfloat16


PARAMS = {
    "embed": {"embedding": jnp.ones((7, 4))},
    "up": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
    "norm": {"scale": jnp.ones(4)},
}
RULES = [("embed/*", "embedding"), ("*bias", "full"), ("*scale", "full")]
CLASSES = es.leaf_classes(PARAMS, rules=RULES)


def test_a_tree_of_one_member():
    @jax.jit
    def member(n, sigma):
        return es.perturb(PARAMS, CLASSES, KEY, 5, n, sigma=sigma, rank=2)

    up, down = member(6, 0.2), member(7, 0.2)
    for x, y, w in zip(*map(jax.tree.leaves, (up, down, PARAMS)), strict=True):
        assert np.abs(x - w).max() > 0.01 and x.dtype == w.dtype
        close((x + y) / 2, w, atol=1e-6)
    noise = es.lowrank_noise(es.leaf_key(KEY, "up/kernel"), 5, jnp.array(6), (4, 3), rank=2)
    expected = PARAMS["up"]["kernel"] + dense(noise, 0.2)
    close(up["up"]["kernel"], expected, atol=1e-6)
    jax.tree.map(equal, member(6, 0.0), PARAMS)
    # A leaf keeps its noise in another tree.
    alone = {"up": {"kernel": PARAMS["up"]["kernel"]}}
    found = jax.jit(
        lambda n: es.perturb(alone, es.leaf_classes(alone), KEY, 5, n, sigma=0.2, rank=2)
    )(6)
    close(found["up"]["kernel"], expected, atol=1e-6)
    many = jax.jit(jax.vmap(lambda n: member(n, 0.2)))(jnp.arange(8))
    jax.tree.map(lambda x, y: close(x[7], y, atol=1e-6), many, down)


def test_baseline_members_and_members_without_pairs():
    def member(n, **options):
        return es.perturb(PARAMS, CLASSES, KEY, 0, n, sigma=0.2, **options)

    of_baseline = jax.jit(partial(member, baseline=2))
    for n in (0, 1):
        jax.tree.map(equal, of_baseline(n), PARAMS)
    assert np.abs(of_baseline(2)["up"]["kernel"] - 1).max() > 0.01
    one, other = map(jax.jit(partial(member, pairs=False)), (0, 1))
    assert np.abs(one["norm"]["scale"] + other["norm"]["scale"] - 2).max() > 0.01


def test_integer_weights_become_numbers():
    params = {"w": jnp.array([[3, -4], [5, 6]], jnp.int8)}
    classes = es.leaf_classes(params, rules=[("w", "lowrank")])
    up, down = (es.perturb(params, classes, KEY, 0, n, sigma=0.4)["w"] for n in (0, 1))
    assert up.dtype == jnp.float32
    close((up + down) / 2, params["w"], atol=1e-6)


def test_a_delta_has_the_noise_of_the_trees():
    members = jnp.arange(6).reshape(3, 2)
    delta = jax.jit(lambda: es.model_delta(PARAMS, CLASSES, KEY, 3, members, sigma=0.2, rank=2))()
    member = jax.jit(lambda n: es.perturb(PARAMS, CLASSES, KEY, 3, n, sigma=0.2, rank=2))
    assert set(delta) == {"embed", "up", "norm"}
    for place in np.ndindex(members.shape):
        expected = member(members[place])
        kernels = ((delta["up"], expected["up"]["kernel"]), (delta["embed"], expected["embed"]))
        for entry, weights in kernels:
            a, b, scale = (x[place] for x in entry[:3])
            found = 1 + scale * (a @ b)
            close(found, *jax.tree.leaves(weights), atol=1e-6)
        close(1 + delta["up"][3][place][0], expected["up"]["bias"], atol=1e-6)
        close(1 + delta["norm"][place][0], expected["norm"]["scale"], atol=1e-6)


def test_a_delta_leaves_out_what_is_frozen():
    classes = es.leaf_classes(PARAMS)
    delta = es.model_delta(PARAMS, classes, KEY, 3, jnp.arange(2), sigma=0.2)
    assert set(delta) == {"up"} and len(delta["up"]) == 3
    classes = es.leaf_classes(PARAMS, rules=[("up/kernel", "frozen"), ("up/bias", "full")])
    delta = es.model_delta(PARAMS, classes, KEY, 3, jnp.arange(2), sigma=0.2)
    assert delta["up"][:3] == (None, None, None) and delta["up"][3].shape == (2, 1, 3)


def test_a_delta_has_the_keys_of_the_parameters():
    """As nnx has them, numbers; a list has none."""
    layers = [{"up": {"kernel": jnp.ones((4, 3))}} for _ in range(2)]
    params = {"layers": dict(enumerate(layers))}
    delta = es.model_delta(params, es.leaf_classes(params), KEY, 3, jnp.arange(2), sigma=0.2)
    assert set(delta["layers"]) == {0, 1} and len(delta["layers"][0]["up"]) == 3
    params = {"layers": layers, "up": layers[0]["up"]}
    message = "parameters that take a delta must be nested dicts; 'layers/0/up/kernel' is not in d"
    with pytest.raises(ValueError, match=f"model_delta: {message}"):
        es.model_delta(params, es.leaf_classes(params), KEY, 3, jnp.arange(2), sigma=0.2)
    classes = es.leaf_classes(params, rules=[("layers/*", "frozen")])
    assert set(es.model_delta(params, classes, KEY, 3, jnp.arange(2), sigma=0.2)) == {"up"}
