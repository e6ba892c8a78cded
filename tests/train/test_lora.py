"""Adapters: W + scale A B, where A and B alone train, and the base is its own reference.

[[1, 2], [3, 4], [5, 6]] + 0.5 [[1], [0], [2]] [[3, -1]] = [[2.5, 1.5], [3, 4], [8, 5]]
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from jax.sharding import PartitionSpec as P
from rows import for_each
from step_makers import arrays_of, assert_close, flat_step, moved
from test_checkpoint import assert_same
from tiny_run import low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.models import AttentionContext
from jaxrl_llm.models.lora import with_adapter
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import (
    Adapted,
    LoRAConfig,
    SamplingConfig,
    adapted_model,
    init_lora,
    init_state,
    make_mesh,
    make_scorer,
    merge_lora,
    train,
)
from jaxrl_llm.train.checkpoint.serialization import values_digest
from jaxrl_llm.train.experiment.setup import init_experiment
from jaxrl_llm.train.mesh import place_batch

SLOW = [pytest.mark.slow, pytest.mark.of_many]

pytestmark = pytest.mark.usefixtures("shared_programs")

CONFIG = LoRAConfig(rank=4)


@pytest.fixture(scope="module")
def tiny():
    model, params = tiny_model(num_layers=1)
    return model, params, adapted_model(model, CONFIG), moved(init_lora(params, CONFIG))


def hidden(model, params, **options):
    tokens = jnp.arange(6).reshape(1, 2, 3)
    places = jnp.broadcast_to(jnp.arange(3), tokens.shape)
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
    return model.apply(params, tokens, places, context, **options)[0]


def test_merged_by_hand():
    kernel = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    params = {"norm": jnp.ones(2), "up": {"kernel": kernel, "bias": jnp.ones(2)}}
    pair = {"a": jnp.array([[1.0], [0.0], [2.0]]), "b": jnp.array([[3.0, -1.0]])}
    merged = merge_lora(Adapted(params, {"up": pair}), LoRAConfig(rank=1, alpha=0.5))
    np.testing.assert_array_equal(merged["up"]["kernel"], [[2.5, 1.5], [3, 4], [8, 5]])
    assert merged["norm"] is params["norm"] and merged["up"]["bias"] is params["up"]["bias"]


def test_an_adapter_is_a_change_of_the_weights(tiny):
    # Begins as the model and moves away from it.
    model, params, policy, adapter = tiny
    plain = hidden(model, params)
    first = Adapted(params, init_lora(params, CONFIG))
    np.testing.assert_array_equal(hidden(policy, first), plain)
    np.testing.assert_array_equal(hidden(policy, params), plain)  # the reference: no adapter
    assert np.abs(hidden(policy, Adapted(params, adapter)) - plain).max() > 0.01

    # Merged parameters compute the same.
    merged = merge_lora(Adapted(params, adapter), CONFIG)
    assert_close(hidden(model, merged), hidden(policy, Adapted(params, adapter)))


def test_what_a_layer_gets_does_not_depend_on_the_other_targets(tiny):
    params = tiny[1]
    whole = init_lora(params, CONFIG)["layers"]["0"]
    part = init_lora(params, LoRAConfig(rank=4, targets=(r"mlp/(up|down)$",)))["layers"]["0"]
    assert set(part) == {"mlp"} and set(part["mlp"]) == {"up", "down"}
    assert_same(part["mlp"]["up"], whole["mlp"]["up"])
    other = init_lora(params, LoRAConfig(rank=4, seed=1))["layers"]["0"]
    assert not np.array_equal(other["mlp"]["up"]["a"], whole["mlp"]["up"]["a"])
    adapter = init_lora(tiny_model(num_layers=2)[1], LoRAConfig(rank=4, targets=("q$",)))
    first, second = (adapter["layers"][n]["attention"]["q"]["a"] for n in "01")
    assert not np.allclose(first, second)  # layers of equal shape
    a = init_lora({"x": {"kernel": jnp.zeros((400, 100))}}, LoRAConfig(rank=50, targets=("x",)))
    np.testing.assert_allclose(np.std(a["x"]["a"]), 400**-0.5, rtol=0.02)


@for_each(
    "options, message",
    [
        ({"rank": 4, "targets": ("mlp", "head")}, "'head' in targets matches no linear lay"),
        ({"rank": 17, "targets": ("attention",)}, "rank 17 is above the 16 that the matrix layer"),
        ({"rank": 33}, "rank 33 is above the 32 that the largest matrix of the default"),
        ({}, "init_lora: the configuration has no rank"),
    ],
)
def test_an_adapter_that_the_model_has_no_matrices_for_is_refused(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        init_lora(tiny[1], LoRAConfig(**options))


def test_the_default_targets_leave_out_matrices_that_are_smaller_than_the_rank(tiny):
    """Qwen3.5 has matrices of one output for each head, which common ranks exceed."""
    layer = init_lora(tiny[1], LoRAConfig(rank=17))["layers"]["0"]
    assert set(layer["attention"]) == {"q", "o"} and set(layer["mlp"]) == {"gate", "up", "down"}
    assert set(init_lora(tiny[1], LoRAConfig(rank=16))["layers"]["0"]["attention"]) == set("qkvo")


def two_layers(kind):
    """A small model's parameters, its layers in a dict by integers, as nnx has them, or a list."""
    layers = [{"up": {"kernel": jnp.full((3, 4), 1.0 + i), "bias": jnp.zeros(4)}} for i in (0, 1)]
    layers = dict(enumerate(layers)) if kind is dict else kind(layers)
    return {"layers": layers, "out": {"kernel": jnp.ones((4, 2))}}


def test_layers_that_are_numbered_have_an_adapter_that_is_merged():
    params, config = two_layers(dict), LoRAConfig(rank=1, targets=(".",))
    adapter = init_lora(params, config)
    assert set(adapter["layers"]) == {0, 1} and set(adapter["layers"][0]["up"]) == {"a", "b"}
    texts = {"layers": {str(i): layer for i, layer in params["layers"].items()}}
    same = init_lora(texts, config)["layers"]
    assert_same(adapter["layers"], {int(i): layer for i, layer in same.items()})
    adapter = moved(adapter)
    merged = merge_lora(Adapted(params, adapter), config)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    for i in (0, 1):
        a, b = (adapter["layers"][i]["up"][name] for name in "ab")
        expected = params["layers"][i]["up"]["kernel"] + config.scale * (a @ b)
        np.testing.assert_allclose(merged["layers"][i]["up"]["kernel"], expected, rtol=1e-6)
    other = {"layers": {"0": adapter["layers"][0]}}
    with pytest.raises(ValueError, match="merge_lora: the model has no 'layers/0' that the adapte"):
        merge_lora(Adapted(params, other), config)


@for_each("kind", [list, tuple])
def test_layers_in_a_list_have_no_adapter_and_none_is_left_out(kind):
    params = two_layers(kind)
    message = f"init_lora: layers is a {kind.__name__}; parameters with an adapter must be nested"
    for targets in ((".",), ("up$",)):
        with pytest.raises(ValueError, match=message):
            init_lora(params, LoRAConfig(rank=1, targets=targets))
    with pytest.raises(ValueError, match="'attention' in targets .*; each layer has out, up"):
        init_lora(params, LoRAConfig(rank=1))
    assert set(init_lora(params, LoRAConfig(rank=1, targets=("out",)))) == {"out"}
    with pytest.raises(ValueError, match="'attention' in targets matches .*; there is none with a"):
        init_lora({"embed": {"embedding": jnp.ones((2, 2))}}, LoRAConfig(rank=1))


def test_the_adapter_alone_trains_and_takes_no_other(tiny):
    # The optimizer has the adapter alone.
    model, params, policy, adapter = tiny
    adapted, key = Adapted(params, adapter), jax.random.key(0)
    state = init_state(adapted, optax.adamw(1e-3), jr.recipes.rloo(), key=key)
    numbers = sum(x.size for x in jax.tree.leaves(adapter))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * numbers + 1
    assert jax.tree.structure(state.policy) == jax.tree.structure(Adapted(params, adapter))

    # A model with an adapter has no other.
    with pytest.raises(ValueError, match="takes no further delta"):
        hidden(policy, Adapted(params, adapter), delta={})
    with pytest.raises(ValueError, match="without a rank there is no adapter"):
        adapted_model(model, LoRAConfig())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_what_samples_is_what_is_trained(dtype):
    model, params = tiny_model(num_layers=1, dtype=dtype)
    policy, params = with_adapter(model, params, CONFIG)
    # At a size of 0.3 one token is ill-conditioned: rounding of the weights moves it by 7e-5, and
    # at 0.2 by 1.2e-5 on processors without AVX-512.
    params = params._replace(adapter=moved(params.adapter, size=0.1))
    sample = jr.rollout.make_sampler(policy, max_new_tokens=6, group_size=4)
    rollout = sample(params, jax.random.key(0), [[1, 2, 3], [4], [5, 6]])
    arrays = arrays_of(rollout)
    logp, _ = jax.jit(lambda p: jr.train.score(policy, p, *arrays))(params)
    gap = np.abs(logp - rollout.behavior_logp).max()
    assert gap < (1e-5 if dtype == "float32" else 0.1)
    plain, _ = jax.jit(lambda p: jr.train.score(policy, p, *arrays))(params.base)
    assert np.abs(plain - rollout.behavior_logp).max() > 10 * gap


def one_step(tiny, *, mesh=None, **options):
    _, params, policy, adapter = tiny
    recipe, optimizer = jr.recipes.rloo(), optax.sgd(1.0)
    if mesh is not None:
        params, adapter = (shard(x, param_shardings(x, mesh)) for x in (params, adapter))
    state = init_state(
        Adapted(params, adapter), optimizer, recipe, key=jax.random.key(0), mesh=mesh
    )
    step = flat_step(policy, recipe, optimizer, mesh=mesh, **options)
    return state, *step(state, place_batch(make_batch(), mesh))


@pytest.mark.slow
def test_one_step_is_the_gradient_of_the_factors(tiny):
    model, params, _, adapter = tiny
    recipe, batch = jr.recipes.rloo(), make_batch()
    before, state, metrics = one_step(tiny, microbatches=2)

    def loss(adapter):  # through the weights, which the step never makes
        merged = merge_lora(Adapted(params, adapter), CONFIG)
        logp, _ = jr.train.score(model, merged, *arrays_of(batch))
        return recipe.loss(logp, recipe.prepare(batch, recipe.init())[0])

    gradient = jax.jit(jax.grad(loss))(adapter)
    assert_close(state.params, jax.tree.map(lambda p, g: p - g, adapter, gradient))
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-4)
    # The base is handed on: the same arrays, neither copied nor given away nor in the optimizer.
    same = jax.tree.map(lambda x, y: x is y, state.base, params)
    assert all(jax.tree.leaves(same)) and not any(x.is_deleted() for x in jax.tree.leaves(params))
    assert before.base is params and before.params["layers"]["0"]["mlp"]["up"]["a"].is_deleted()


@pytest.mark.slow
def test_a_mesh_changes_nothing(tiny):
    _, one, metrics = one_step(tiny)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    _, many, mesh_metrics = one_step(tiny, mesh=mesh)
    assert_close(one.params, jax.device_get(many.params))
    np.testing.assert_allclose(metrics["loss"], mesh_metrics["loss"], atol=1e-6)
    up = many.params["layers"]["0"]["mlp"]["up"]
    assert (up["a"].sharding.spec, up["b"].sharding.spec) == (P("fsdp", None), P(None, "tensor"))
    assert values_digest(many.base) == values_digest(tiny[1])


def test_the_digest_sees_every_value_and_its_place():
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
    near, turned = x.copy(), x.copy()
    near[1, 1] = np.nextafter(near[1, 1], np.inf)
    turned[0] = x[0, ::-1]
    cases = [{"x": x, "y": y}, {"x": near, "y": y}, {"x": turned, "y": y}, {"x": x, "z": y}]
    cases += [{"x": y, "y": x}, {"x": x, "y": y.astype(jnp.bfloat16)}]
    trees = [jax.tree.map(jnp.asarray, case) for case in cases]
    found = {values_digest(tree) for tree in trees}
    assert len(found) == 6 and values_digest(trees[0]) in found


LORA = LoRAConfig(rank=4, alpha=16.0)
SLOTS = SamplingConfig(group_size=2, max_new_tokens=4, slots=4)


def logged_run(folder):
    """A run whose reward logs what it grades."""
    log = []

    def reward(*given):
        log.append(given[:2])
        return low_bytes(*given)

    return tiny_run(folder, lora=LORA, recipe="grpo", reward=reward, sampling=SLOTS), log


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    lines, (config, log) = [], logged_run(tmp_path_factory.mktemp("lora"))
    return train(config, log=lines.append), log, lines


@pytest.mark.slow
def test_a_run_moves_the_adapter_alone(whole_run):
    result, _, lines = whole_run
    model, params = tiny_model(num_layers=1)
    assert_same(result.state.base, params)
    assert "17,600 frozen parameters and 2,048 of an adapter" in lines[0]
    assert all(abs(row["sampler_gap"]) < 1e-5 for row in result.history)
    assert np.abs(result.state.params["layers"]["0"]["mlp"]["up"]["b"]).max() > 1e-3


def test_the_reference_is_the_base_itself(tmp_path):
    config = tiny_run(tmp_path, lora=LORA, recipe="grpo")
    experiment, algorithm, _, state = init_experiment(config, tmp_path, resume=False)
    assert state.reference == ()
    batch = make_batch(prompts=4)
    score = make_scorer(experiment.model)
    start = algorithm.score(batch)[0].ref_logp
    np.testing.assert_array_equal(start, score(state.policy, batch))
    away = state._replace(params=moved(state.params, size=0.3))
    assert np.abs(score(away.policy, batch) - start).max() > 0.01


@pytest.mark.slow
def test_resume_is_exact_and_the_checkpoint_has_the_adapter_alone(whole_run, tmp_path):
    expected, expected_log, _ = whole_run
    config, log = logged_run(tmp_path)
    train(dataclasses.replace(config, steps=3))
    done = train(config, resume=True)
    assert_same(done.state, expected.state)
    assert log == expected_log
    written = (tmp_path / "checkpoints" / "step_00000006").rglob("_METADATA")
    names = "".join(path.read_text() for path in written)
    assert "'up'" in names and "embedding" not in names  # the base is not in it
    other = dataclasses.replace(LORA, alpha=8.0)

    def refused(told, **changes):
        with pytest.raises(ValueError, match=told):
            changed = dataclasses.replace(config, steps=7, **changes)
            train(changed, resume=True, allow_changed=True)

    def other_model():
        model, params, tokenizer = config.model()
        return model, jax.tree.map(lambda x: 1.001 * x, params), tokenizer

    refused("a resumed run cannot change lora.alpha", lora=other)
    (tmp_path / "sessions.jsonl").unlink()  # then the checkpoint tells
    refused("was made with lora .*alpha=16.0.*alpha=8.0", lora=other)
    refused("belongs to another model or adapter", lora=LoRAConfig())
    refused("the frozen parameters differ", model=other_model)
