"""Averages and merges of parameters: worked numbers, laws, dtypes, bad input."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm.models import (
    average_lora,
    average_params,
    dare,
    extrapolate,
    iso_c,
    metric_weights,
    model_stock,
    slerp,
    task_arithmetic,
    task_vector,
    ties_merge,
)
from jaxrl_llm.models.lora import Adapted, LoRAConfig, init_lora, merge_lora
from jaxrl_llm.testing import tiny_model


def tree(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "layers": [jax.random.normal(keys[0], (2, 3), dtype)],
        "head": jax.random.normal(keys[1], (4,), dtype),
        "count": jnp.int32(seed),
    }


A, B, C = tree(1), tree(2), tree(3)


def assert_same(a, b, **options):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), a, b)


def one(*numbers):
    return {"w": jnp.array(numbers, jnp.float32)}


def test_the_worked_numbers():
    np.testing.assert_allclose(average_params([one(2, 4), one(0, 2)])["w"], [1, 3])
    beyond = extrapolate(one(1.5, 1), one(1, 2), alpha=0.3)
    np.testing.assert_allclose(beyond["w"], [1.65, 0.7], rtol=1e-6)
    taus = one(1, -0.2, 0.5, 0.05), one(0.8, 0.6, -0.1, -0.3)
    merged = ties_merge(one(0, 0, 0, 0), taus, density=0.5)
    np.testing.assert_allclose(merged["w"], [0.9, 0.6, 0.5, 0], rtol=1e-6)
    arc = slerp(one(1, 0), one(0, 2), t=0.5)
    np.testing.assert_allclose(arc["w"], [0.707107, 1.414214], rtol=1e-6)
    losses, steps = jnp.array([0.5, 0.4, 0.25]), jnp.array([100, 200, 300])
    for power, low, high in (
        (1, [0.235294, 0.294118, 0.470588], [1 / 6, 1 / 3, 1 / 2]),
        (2, [0.152381, 0.238095, 0.609524], [0.071429, 0.285714, 0.642857]),
        (0, [1 / 3] * 3, [1 / 3] * 3),
        (400, [0, 0, 1], [0, 0, 1]),
    ):
        np.testing.assert_allclose(metric_weights(losses, power=power), low, atol=1e-6)
        late = metric_weights(steps, power=power, lower_is_better=False)
        np.testing.assert_allclose(late, high, atol=1e-6)
    np.testing.assert_allclose(metric_weights(7 * losses), metric_weights(losses), rtol=1e-5)
    assert metric_weights(jnp.array([0.0, 1.0])).tolist() == pytest.approx([1, 1e-8], rel=1e-4)


def test_an_average_is_linear_and_leaves_integers_alone():
    assert_same(average_params([A, B], [1.0, 0.0]), A)
    assert_same(average_params([A, A], [0.3, 0.7]), A, rtol=1e-6)
    mixed = jax.jit(average_params)([A, B, C], jnp.array([0.2, 0.3, 0.5]))
    exact = [np.asarray(t["head"], np.float64) for t in (A, B, C)]
    np.testing.assert_allclose(mixed["head"], np.dot([0.2, 0.3, 0.5], exact), rtol=1e-5, atol=1e-6)
    assert mixed["count"] == 1
    # 1 + 1/256 is no bfloat16, but three of them and a 1 average to one that is.
    a = {"w": jnp.full(2, 1.0, jnp.bfloat16)}
    b = {"w": jnp.full(2, 1.0 + 1 / 128, jnp.bfloat16)}
    mixed = average_params([a, b, b, b])
    assert mixed["w"].dtype == jnp.bfloat16
    exact = np.float32(1 + 3 / 4 / 128)
    np.testing.assert_array_equal(mixed["w"], jnp.full(2, exact).astype(jnp.bfloat16))


def test_extrapolation_in_parameters_is_one_of_policies():
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.3, 0.1])
    logits = extrapolate({"w": jnp.log(q)}, {"w": jnp.log(p)}, alpha=0.3)["w"]
    np.testing.assert_allclose(jax.nn.softmax(logits), [0.624393, 0.295579, 0.080028], atol=1e-6)
    assert_same(extrapolate(A, B, alpha=0.0), A)
    assert_same(extrapolate(A, A, alpha=0.7), A)


def test_task_vectors_add_up():
    tau = [task_vector(x, C) for x in (A, B)]
    assert_same(task_arithmetic(C, tau[:1]), {**A, "count": C["count"]}, rtol=1e-5, atol=1e-6)
    average = {**average_params([A, B]), "count": C["count"]}
    assert_same(task_arithmetic(C, tau, scale=0.5), average, rtol=1e-5, atol=1e-6)
    assert_same(task_arithmetic(C, tau, scale=(1.0, 0.0)), task_arithmetic(C, tau[:1]))
    assert_same(task_arithmetic(C, tau, scale=np.array([1.0, 0.0])), task_arithmetic(C, tau[:1]))
    assert task_vector(tree(1, jnp.bfloat16), tree(2, jnp.bfloat16))["head"].dtype == jnp.float32


def test_ties_by_hand():
    rng = np.random.default_rng(0)
    taus = rng.normal(size=(3, 10)).round(1)
    weights, density = (0.5, 0.3, 0.2), 0.45
    merged = np.zeros(10)
    trimmed = np.zeros_like(taus)
    for t, out in zip(taus, trimmed, strict=True):
        for i in sorted(range(10), key=lambda i, t=t: (-abs(np.float32(t[i])), i))[:4]:
            out[i] = t[i]
    for j in range(10):
        sign = np.sign(np.dot(weights, trimmed[:, j]))
        agree = [i for i in range(3) if sign and np.sign(trimmed[i, j]) == sign]
        total = sum(weights[i] * trimmed[i, j] for i in agree)
        merged[j] = total / sum(weights[i] for i in agree) if agree else 0.0
    base = one(*rng.normal(size=10))
    ours = ties_merge(base, [one(*t) for t in taus], density=density, scale=0.7, weights=weights)
    np.testing.assert_allclose(ours["w"], base["w"] + 0.7 * merged, rtol=1e-5, atol=1e-6)
    whole = ties_merge(base, [one(*taus[0])], density=1.0)
    np.testing.assert_allclose(whole["w"], base["w"] + taus[0], rtol=1e-5)
    equal = ties_merge(one(*[0] * 4), [one(1, 1, 1, 1)], density=0.5)
    assert equal["w"].tolist() == [1, 1, 0, 0]  # the first of those equally large
    assert ties_merge(one(0, 0), [one(1, 1), one(-1, 2)], density=1.0)["w"].tolist() == [0, 1.5]


def test_dare_is_unbiased_and_each_leaf_draws_by_its_path():
    vector = {"a": jnp.full(4000, 2.0), "b": jnp.full(4000, 2.0), "n": jnp.int32(3)}
    sparse = dare(jax.random.key(0), vector, drop=0.6)
    assert set(sparse["a"].tolist()) == {0.0, 5.0} and sparse["n"] == 3
    assert abs(float(sparse["a"].mean()) - 2) < 0.15
    assert (sparse["a"] != sparse["b"]).any()
    alone = dare(jax.random.key(0), {"b": vector["b"]}, drop=0.6)
    assert (alone["b"] == sparse["b"]).all()
    assert_same(dare(jax.random.key(0), vector, drop=0.0), vector)


def test_an_arc_has_its_ends_and_is_a_line_between_parallels():
    assert_same(slerp(A, B, t=0.0), A, rtol=1e-5, atol=1e-6)
    assert_same(slerp(A, B, t=1.0), {**B, "count": A["count"]}, rtol=1e-5, atol=1e-6)
    unit = [x / np.linalg.norm(x) for x in (A["head"], B["head"])]
    middle = slerp({"w": jnp.array(unit[0])}, {"w": jnp.array(unit[1])}, t=0.3)["w"]
    np.testing.assert_allclose(np.linalg.norm(middle), 1.0, rtol=1e-6)
    for other in (one(2, 4), one(-1, -2), one(0, 0)):
        line = average_params([one(1, 2), other], [0.75, 0.25])
        assert_same(slerp(one(1, 2), other, t=0.25), line, rtol=1e-6)
    # Two trainings of one base lie 1e-4 apart, where the arc cosine of a float32 is noise.
    near = np.float64(A["head"]) + 1e-4 * np.float64(B["head"])
    arc = slerp({"w": A["head"]}, {"w": jnp.asarray(near, jnp.float32)}, t=0.5)["w"]
    np.testing.assert_allclose(arc, (np.float64(A["head"]) + near) / 2, rtol=1e-6)


def test_model_stock_is_between_the_base_and_the_average():
    base = one(1, 1)
    merged = model_stock(base, [one(2, 1), one(1.5, 1 + 0.75**0.5)])  # a cosine of 1/2
    ratio = (np.asarray(merged["w"]) - 1) / (np.array([1.75, 1 + 0.75**0.5 / 2]) - 1)
    np.testing.assert_allclose(ratio, [2 / 3, 2 / 3], rtol=1e-5)
    assert_same(model_stock(base, [one(2, 3), one(3, 5)]), one(2.5, 4), rtol=1e-5)  # alike
    assert_same(model_stock(base, [one(2, 1), one(1, 2)]), base, rtol=1e-5)  # at right angles
    assert_same(model_stock(base, [one(2, 1), one(0, 1)]), base)  # opposite
    assert_same(model_stock(base, [base, base]), base)


def test_iso_c_makes_singular_values_equal():
    vectors = [task_vector(x, C) for x in (A, B)]
    merged = task_vector(iso_c(C, vectors, scale=0.5), C)
    total = np.float64(vectors[0]["layers"][0]) + np.float64(vectors[1]["layers"][0])
    values = np.linalg.svd(total, compute_uv=False)
    np.testing.assert_allclose(
        np.linalg.svd(np.float64(merged["layers"][0]), compute_uv=False),
        [values.mean() / 2] * 2,
        rtol=1e-4,
    )
    np.testing.assert_allclose(
        merged["head"], (vectors[0]["head"] + vectors[1]["head"]) / 4, rtol=1e-4, atol=1e-6
    )


def test_iso_c_takes_the_matrices_of_experts_one_by_one_and_no_bias_as_a_matrix():
    def params(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        up = {"kernel": jax.random.normal(keys[0], (2, 4, 3))}
        up["bias"] = jax.random.normal(keys[1], (2, 3))
        return {"experts": {"up": up}, "conv": jax.random.normal(keys[2], (2, 1, 3))}

    base, vectors = params(0), [params(1), params(2)]
    merged = iso_c(base, vectors, scale=0.5)
    for i in range(2):
        one, *others = ({"w": x["experts"]["up"]["kernel"][i]} for x in (base, *vectors))
        alone = iso_c(one, others, scale=0.5)["w"]
        np.testing.assert_allclose(merged["experts"]["up"]["kernel"][i], alone, atol=1e-5)
    mean = task_arithmetic(base, vectors, scale=0.25)
    assert_same(merged["experts"]["up"]["bias"], mean["experts"]["up"]["bias"], atol=1e-6)
    assert_same(merged["conv"], mean["conv"], atol=1e-6)


def test_adapters_are_averaged_as_products():
    _, base = tiny_model(num_layers=1)
    config = LoRAConfig(rank=2, alpha=3.0, targets=("q$",))
    adapters = []
    for seed in (0, 1):
        adapter = init_lora(base, LoRAConfig(rank=2, alpha=3.0, targets=("q$",), seed=seed))
        noise = jax.random.normal(
            jax.random.key(seed), adapter["layers"]["0"]["attention"]["q"]["b"].shape
        )
        adapter["layers"]["0"]["attention"]["q"]["b"] = noise
        adapters.append(adapter)
    merged, wide = average_lora(adapters, [0.25, 0.75], config=config)
    expected = average_params(
        [merge_lora(Adapted(base, x), config) for x in adapters], [0.25, 0.75]
    )
    assert_same(merge_lora(Adapted(base, merged), wide), expected, rtol=1e-4, atol=1e-6)
    factors = average_params(adapters, [0.25, 0.75])
    apart = merge_lora(Adapted(base, factors), config)["layers"]["0"]["attention"]["q"]["kernel"]
    assert not np.allclose(apart, expected["layers"]["0"]["attention"]["q"]["kernel"], atol=1e-3)


def test_an_adapter_of_another_rank_is_not_merged():
    """Its scale would be that of another adapter; experts have their own axis before the rank."""
    base = {"q": {"kernel": jnp.ones((4, 5))}, "experts": {"up": {"kernel": jnp.ones((3, 4, 5))}}}
    for target, path in (("q", "q"), ("up", "experts/up")):
        config = LoRAConfig(rank=2, targets=(target,))
        adapter = init_lora(base, config)
        assert_same(merge_lora(Adapted(base, adapter), config), base)
        _, wide = average_lora([adapter, adapter], config=config)
        message = f"merge_lora: .* has rank 4, but the adapter of '{path}' has rank 2"
        with pytest.raises(ValueError, match=message):
            merge_lora(Adapted(base, adapter), wide)


OTHER, TURNED = {name: A[name] for name in ("head", "count")}, {**A, "layers": [jnp.zeros((3, 2))]}
RANK_3 = {"q": {"a": jnp.ones((4, 3)), "b": jnp.ones((3, 4))}}
BAD = """
ValueError:
average_params([])  # the trees must be at least one; got none
average_params([A, B], [0.2, 0.3, 0.5])  # 2 trees need 2 weights; got 3
average_params([A, B], [0.4, 0.5])  # the weights must add up to 1; got 0.9
average_params([A, B, OTHER])  # the same structure; 'layers/0' is only in the first
slerp(A, TURNED, t=0.5)  # same shapes; layers/0 has \\(2, 3\\) and \\(3, 2\\)
task_arithmetic(OTHER, [A])  # base and vectors must have the same structure
task_arithmetic(A, [A], scale=(1, 2))  # 1 vectors need as many scales; got 2
ties_merge(A, [B], density=0.0)  # density must be in \\(0, 1\\]; got 0
dare(jax.random.key(0), A, drop=1.0)  # !dare: drop must be in \\[0, 1\\); got 1
model_stock(A, [B])  # there must be at least two models; got 1
metric_weights(jnp.ones(2), power=-1.0)  # power must not be negative
average_lora([RANK_3], config=LoRAConfig(rank=2))  # has rank 2, but an adapter has rank 3
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_bad_values_are_named(error, call, message):
    raises(error, call, message, globals())


def test_trees_of_other_containers_are_refused():
    for a, b in itertools.permutations(({"x": [A["head"]]}, {"x": (A["head"],)})):
        with pytest.raises(ValueError, match="their containers differ"):
            average_params([a, b])
