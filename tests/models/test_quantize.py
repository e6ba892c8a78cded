"""Products of rounded operands against plain NumPy, and one precision in sampling and training."""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from jax.sharding import NamedSharding, PartitionSpec
from models.forwards import hidden_of, scores_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.models import (
    cast_params,
    quantize_block,
    quantized_matmul,
    round_params,
)
from jaxrl_llm.models.quantize import RoundedWeights, round_weights
from jaxrl_llm.models.sharding import param_spec
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train.mesh import make_mesh
from jaxrl_llm.train.models.score import score

MODES = ("int8", "fp8")
RNG = np.random.default_rng(0)
# Neither 200 nor 150 is a number of whole blocks, and 130 tokens are one block and a rest.
X = RNG.normal(size=(2, 130, 200)).astype(np.float32)
W = RNG.normal(size=(200, 150)).astype(np.float32)
DY = RNG.normal(size=(2, 130, 150)).astype(np.float32)


def blocks(x, sizes):
    """Where each block over the last axes is, and a slice of it."""
    lead = x.ndim - len(sizes)
    axes = [(n, size or n) for n, size in zip(x.shape[lead:], sizes, strict=True)]
    for start in np.ndindex(*(-(-n // b) for n, b in axes)):
        cut = [slice(i * b, (i + 1) * b) for i, (_, b) in zip(start, axes, strict=True)]
        yield start, (..., *cut)


def rounded(x, sizes, mode):
    """NumPy: round with one scale a block, and back."""
    out, lead = np.zeros(x.shape, np.float32), x.ndim - len(sizes)
    axes = tuple(range(lead, x.ndim))
    for _, cut in blocks(x, sizes):
        part = x[cut].astype(np.float32)
        bound = np.float32(448 if mode == "fp8" else 127)
        scale = np.abs(part).max(axes, keepdims=True) / bound
        scale = np.where(scale < 1e-19, 1, scale).astype(np.float32)
        if mode == "fp8":
            q = np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        else:
            q = np.rint(part / scale)
        out[cut] = q.astype(np.float32) * scale
    return out


def expected(x, w, dy, mode):
    """Forward and both gradients in float64, of operands that NumPy rounded."""

    def f64(a, sizes):
        return rounded(a, sizes, mode).astype(np.float64)

    if mode == "int8":
        q_x, q_w, dy_x, x_w, dy_w = f64(x, (None,)), f64(w, (None, 1)), dy, None, dy
        x_w = q_x
    else:
        q_x, q_w, dy_x = f64(x, (128,)), f64(w, (128, 128)), f64(dy, (128,))
        x_w, dy_w = f64(x, (128, 1)), f64(dy, (128, 1))
    return q_x @ q_w, dy_x @ q_w.T, np.einsum("ptk,ptn->kn", x_w, dy_w)


def test_worked_numbers():
    # 17 lies between 16 and 18, the even one is 16; in the second block 448 / 14 = 32.
    q, scale = quantize_block(jnp.array([[448.0, 17.0, 0.0, -14.0, 3.0]]), (1, 3))
    assert q.dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float32
    assert q.astype(float).tolist() == [[448, 16, 0, -448, 96]]
    assert scale.tolist() == [[1, 1 / 32]]
    q, scale = quantize_block(jnp.array([[127.0, 2.4, -3.6, -127.0]]), (None,), mode="int8")
    assert q.dtype == jnp.int8 and q.tolist() == [[127, 2, -4, -127]]
    np.testing.assert_allclose(scale, [[1]], rtol=1e-6)


@for_each("mode", MODES)
@for_each("sizes", [(128, 128), (128,), (None, 1), (64, None), (7,)])
def test_rounding_is_that_of_numpy(mode, sizes):
    # Its own numbers: those of a shared generator depend on the tests before, and the last bit of a
    # scale may move a number across a tie.
    x = X[:1] * np.exp(np.random.default_rng(0).normal(size=X[:1].shape)).astype(np.float32)
    q, scale = quantize_block(jnp.asarray(x), sizes, mode=mode)
    assert q.shape == x.shape
    wide = np.zeros(x.shape, np.float32)
    for start, cut in blocks(x, sizes):
        lead = (slice(None),) * (x.ndim - len(sizes))
        one = np.asarray(scale)[(*lead, *start)]
        wide[cut] = one.reshape(*one.shape, *(1,) * len(sizes))
    # The last bit of a scale is the compiler's.
    ours, theirs = np.asarray(q, np.float32) * wide, rounded(x, sizes, mode)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@for_each("mode", MODES)
def test_zeros_stay_and_nan_stays_in_its_block(mode):
    x = jnp.zeros((3, 4)).at[1, 2].set(jnp.nan)
    q, scale = quantize_block(x, (2,), mode=mode)
    q, scale = np.asarray(q, np.float32), np.asarray(scale)
    assert scale[0].tolist() == [1, 1] and not q[0].any()
    values = q * np.repeat(scale, 2, -1)
    assert np.isnan(values[1, 2:]).all() and np.isfinite(values[1, :2]).all()
    assert np.isfinite(values[[0, 2]]).all()


@partial(jax.jit, static_argnums=0)
def run(mode, x, w, dy):
    """A product and its two gradients."""
    y, back = jax.vjp(lambda x, w: quantized_matmul(x, w, mode=mode), x, w)
    return y, *back(dy.astype(y.dtype))


@for_each("mode", MODES)
def test_product_and_gradients_are_those_of_numpy(mode):
    for ours, theirs in zip(run(mode, X, W, DY), expected(X, W, DY, mode), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())


@for_each("mode", MODES)
def test_a_row_depends_on_itself_alone(mode):
    """Decoding token by token rounds as scoring a response does."""
    y, dx, _ = run(mode, X, W, DY)
    other, scaled = X.copy(), DY.copy()
    other[1], other[0, 1:], scaled[1], scaled[0, 1:] = 1e4, 1e4, 1e4, 1e4
    alone, dx_alone, _ = run(mode, other, W, scaled)
    np.testing.assert_array_equal(alone[0, 0], y[0, 0])
    np.testing.assert_array_equal(dx_alone[0, 0], dx[0, 0])


@for_each("mode", MODES)
def test_what_has_no_gradient_widens_no_scale(mode):
    dy = DY.copy()
    dy[:, 100:] = 0
    junk = X.copy()
    junk[:, 100:] = 1e4
    np.testing.assert_array_equal(run(mode, junk, W, dy)[2], run(mode, X, W, dy)[2])


@for_each("mode", MODES)
def test_weights_rounded_before_give_the_same(mode):
    y, dx, _ = run(mode, X, W, DY)
    weights = round_weights(jnp.asarray(W), mode)
    assert weights.q.dtype.itemsize == 1
    ours, back = jax.jit(lambda x: jax.vjp(lambda x: quantized_matmul(x, weights, mode=mode), x))(X)
    np.testing.assert_allclose(ours, y, atol=1e-5 * np.abs(y).max())
    np.testing.assert_allclose(back(jnp.asarray(DY))[0], dx, atol=1e-5 * np.abs(dx).max())


@for_each("mode", MODES)
def test_bfloat16_in(mode):
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in (X, W, DY))
    plain = (np.asarray(a, np.float32) for a in (x, w, dy))
    for ours, theirs in zip(run(mode, x, w, dy), expected(*plain, mode), strict=True):
        assert ours.dtype == jnp.bfloat16
        # Such numbers often lie halfway between two of fp8: the last bit of a scale decides.
        error = np.asarray(ours, np.float32) - theirs
        assert np.abs(error).max() < 0.03 * np.abs(theirs).max()
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(theirs)


@for_each("mode", MODES)
def test_weights_split_over_devices(mode):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    split = run(mode, place(X, "data"), place(W, "fsdp", "tensor"), place(DY, "data"))
    for ours, theirs in zip(split, run(mode, X, W, DY), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_one_row():
    x = jnp.asarray(X[0, 0])
    np.testing.assert_array_equal(quantized_matmul(x, W), quantized_matmul(x[None], W)[0])


BAD = r"""
ValueError:
quantized_matmul(X, W, mode="fp16")  # mode must be one of 'int8', 'f
quantize_block(X, (1,), mode="int4")  # mode must be one of
quantized_matmul(X, W.T)  # x \(2, 130, 200\) must be the first of w
quantized_matmul(X, X)  # w must have 2 axes
quantized_matmul(X[0, 0, 0], W)  # x must have at least 1 axis
quantize_block(X, (1, 1, 1, 1))  # x must have at least 4 axes
quantize_block(X, (0,))  # block\[0\] must be above 0
tiny_model(quantization="fp4")  # !ModelConfig: quantization must be
TypeError:
quantized_matmul(X.astype(int), W)  # x must be floating
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, globals())


def test_without_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    assert tiny_model(num_layers=1)[0].config.quantization is None
    with pytest.raises(
        ImportError, match=r"ModelConfig needs the package qwix: pip install 'jaxrl"
    ):
        tiny_model(quantization="int8")
    with pytest.raises(ImportError, match="quantize_block needs the package qwix"):
        quantize_block(jnp.ones((2, 2)), (1,))


# One precision flow


@pytest.fixture(
    scope="module", params=[("int8", "float32"), ("fp8", "float32"), ("fp8", "bfloat16")]
)
def flow(request):
    """A quantized model, what it sampled, and what it and the plain model say of that."""
    mode, dtype = request.param
    model, params = tiny_model(num_layers=1, quantization=mode, dtype=dtype)
    plain, _ = tiny_model(num_layers=1)
    sample = jr.rollout.make_sampler(model, max_new_tokens=6, group_size=4)
    rollout = sample(params, jax.random.key(0), [[1, 2, 3], [4], [5, 6, 7, 8, 9]])

    def gap(scorer):
        logp = scores_of(scorer, params, rollout)
        assert logp.dtype == jnp.float32
        return jr.diagnostics.mismatch(logp, rollout.behavior_logp, rollout.mask)

    return model, params, rollout, gap(model), gap(plain)


@pytest.mark.slow
def test_the_policy_that_samples_is_the_policy_that_trains(flow):
    model, _, _, one, split = flow
    # In bfloat16 a sum in another order may round one activation otherwise.
    assert float(one.max_abs) < (1e-5 if model.config.dtype == "float32" else 0.03)
    assert float(split.mean_abs) > 5 * float(one.mean_abs) and float(split.mean_abs) > 1e-3


def test_weights_are_rounded_once_for_a_loop():
    """Of a model that computes in another dtype than that of its parameters."""
    model, params = tiny_model(num_layers=1, quantization="fp8", dtype="bfloat16")
    tokens = jnp.arange(12).reshape(1, 2, 6)
    run = jax.jit(lambda params: hidden_of(model, params, tokens))
    rounded = cast_params(model, params)
    again = cast_params(model, rounded)
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(again), strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())
    up = rounded["layers"]["0"]["mlp"]["up"]["kernel"]
    assert isinstance(up, RoundedWeights) and up.q.dtype.itemsize == 1
    assert not isinstance(rounded["embed"]["embedding"], tuple)
    np.testing.assert_allclose(run(rounded), run(params), atol=0.1)


@pytest.mark.of_many
@pytest.mark.parametrize(("mode", "slots"), [("int8", False), ("fp8", False), ("fp8", True)])
def test_a_sampler_with_an_adapter_is_the_policy_that_trains(mode, slots):
    model, params = tiny_model(num_layers=1, quantization=mode)
    config = jr.train.LoRAConfig(rank=2)
    adapter = jax.tree.map(lambda x: x + 0.05, jr.train.init_lora(params, config))
    policy, both = jr.train.adapted_model(model, config), jr.train.Adapted(params, adapter)
    if slots:
        engine = jr.rollout.make_engine(policy, rows=1, width=2, prompt_length=4, max_new_tokens=4)
        generation = jr.rollout.Generation(engine, both, key=jax.random.key(0))
        generation.submit(jr.rollout.Group(id=0, prompt=[1, 2, 3], requests=(0, 1)))
        rollout = jr.rollout.to_rollout(list(generation), max_new_tokens=4, prompt_width=4)
    else:
        sample = jr.rollout.make_sampler(policy, max_new_tokens=4, group_size=2)
        rollout = sample(both, jax.random.key(0), [[1, 2, 3]])
    np.testing.assert_allclose(rollout.behavior_logp, scores_of(policy, both, rollout), atol=1e-4)


@pytest.mark.slow
def test_a_sampler_of_a_population_is_its_members():
    model, params = tiny_model(num_layers=1, quantization="int8")
    noise = (params, jr.evolution.leaf_classes(params), jax.random.key(1), 0)
    sample = jr.rollout.make_population_sampler(model, max_new_tokens=4)
    deltas = jr.evolution.model_delta(*noise, jnp.arange(2), sigma=0.1)
    rollout = sample(params, deltas, jax.random.key(0), [[1, 2, 3]])
    for n in range(2):
        delta = jr.evolution.model_delta(*noise, n, sigma=0.1)
        expected = scores_of(model, params, rollout, delta=delta)
        np.testing.assert_allclose(rollout.model_logp[:, n], expected[:, n], atol=1e-4)


def test_a_prompt_and_its_responses_have_a_gradient_of_their_own():
    """Whatever other prompts are in the batch, and so in whatever microbatch it is."""
    model, params = tiny_model(num_layers=1, quantization="fp8")
    prompts = jnp.asarray(RNG.integers(1, 200, (2, 60)))
    tokens = jnp.asarray(RNG.integers(1, 200, (2, 2, 40)))  # 140 in a row: a block and a rest
    masks = jnp.ones(prompts.shape, bool), jnp.ones(tokens.shape, bool)

    @jax.jit
    def gradient(params, where):
        def loss(params):
            logp, _ = score(model, params, prompts, masks[0], tokens, masks[1])
            return jnp.sum(logp * where[:, None, None])

        return jax.grad(loss)(params)

    first, second, both = (gradient(params, jnp.array(x)) for x in ([1.0, 0], [0, 1.0], [1.0, 1]))
    for a, b, c in zip(*map(jax.tree.leaves, (first, second, both)), strict=True):
        np.testing.assert_allclose(a + b, c, atol=1e-5 * np.abs(c).max())


# Rounded parameters of a model that does not round


@pytest.mark.of_many
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_rounded_parameters_make_a_model_one_that_rounds(mode):
    """What a sampler reads in its loop is also what a plain model reads, adapter or not."""
    rounds, params = tiny_model(num_layers=1, quantization=mode)
    plain, _ = tiny_model(num_layers=1)
    rounded = round_params(plain, params, mode=mode)
    for a, b in zip(*map(jax.tree.leaves, (rounded, cast_params(rounds, params))), strict=True):
        np.testing.assert_array_equal(a, b)
    assert rounded["layers"]["0"]["mlp"]["up"]["kernel"].mode == mode
    again = round_params(plain, rounded, mode=mode)
    assert jax.tree.structure(again) == jax.tree.structure(rounded)
    tokens = jnp.arange(12).reshape(1, 2, 6)
    config = jr.train.LoRAConfig(rank=2)
    adapter = jax.tree.map(lambda x: x + 0.05, jr.train.init_lora(params, config))
    for with_adapter in (False, True):
        models, both = (plain, rounds), params
        if with_adapter:
            models = [jr.train.adapted_model(model, config) for model in models]
            both = jr.train.Adapted(params, adapter)
        read = round_params(models[0], both, mode=mode)
        got, full = (hidden_of(models[0], p, tokens) for p in (read, both))
        want = hidden_of(models[1], cast_params(models[1], both), tokens)
        np.testing.assert_array_equal(got, want)
        assert np.abs(got - full).max() > 1e-3


@pytest.mark.of_many
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_a_flow_model_rounds_its_hidden_layers(mode):
    plain, params = jr.testing.tiny_flow_model()
    config = dataclasses.replace(plain.config, quantization=mode)
    rounds = jr.models.make_flow_model(config)
    prompts = jnp.array([[65, 66]])
    x, sigma = jnp.full((1, 3, 2), 0.7), jnp.full((1, 3), 0.5)
    inputs = (x, sigma, prompts, prompts > 0)
    read = round_params(plain, params, mode=mode)
    assert not isinstance(read["head"]["kernel"], RoundedWeights)
    got = plain.velocity(read, *inputs)
    np.testing.assert_allclose(got, rounds.velocity(params, *inputs), atol=1e-6)
    assert np.abs(got - plain.velocity(params, *inputs)).max() > 1e-4
    with pytest.raises(ValueError, match="FlowConfig: quantization must be one of"):
        jr.models.FlowConfig(quantization="int4")


def test_rounded_weights_are_split_as_their_matrix():
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"))
    path, shape = "layers/0/mlp/up/kernel", (64, 128)
    assert param_spec(f"{path}/q", shape, mesh) == param_spec(path, shape, mesh)
    assert not any(param_spec(f"{path}/scale", (1, 128), mesh))
