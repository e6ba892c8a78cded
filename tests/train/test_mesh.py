"""Every split of eight devices over data, fsdp and tensor: the state is split, the step is one."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from helpers import make_batch
from rows import for_each
from step_makers import flat_step

import jaxrl_llm as jr
from jaxrl_llm.models.sharding import RULES, param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import (
    OptimizerConfig,
    init_critic,
    init_state,
    make_mesh,
    make_optimizer,
    make_step,
)
from jaxrl_llm.train.mesh import check_batch, place_batch
from jaxrl_llm.train.state import device_bytes
from jaxrl_llm.train.update.init import abstract_batch, abstract_state

# Each axis alone, two and three of them.
SPLITS = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 1, 4), (1, 4, 2), (2, 2, 2)]
QUICK = (2, 1, 4)  # the others show the same, a compilation each
SLOW = [pytest.mark.slow, pytest.mark.of_many]
RECIPE = jr.recipes.dr_grpo(length=5)


def mesh_of(split):
    return make_mesh(**dict(zip(("data", "fsdp", "tensor"), split, strict=True)))


def state_on(mesh, optimizer, model, params):
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
    return init_state(params, optimizer, RECIPE, key=jax.random.key(0), mesh=mesh)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1, tied=False, vocab_size=264)


def step_on(mesh, model, params):
    plain = optax.sgd(1.0)  # Adam would blow rounding up where a gradient is nearly zero
    step = make_step(model, RECIPE, plain, microbatches=2, mesh=mesh)
    state = state_on(mesh, plain, model, params)
    return jax.device_get(step(state, place_batch(make_batch(prompts=16), mesh)))


@pytest.fixture(scope="module")
def alone(model):
    return step_on(None, *model)


@pytest.mark.parametrize(
    "split", [s if s == QUICK else pytest.param(s, marks=SLOW) for s in SPLITS]
)
def test_a_step_is_that_of_one_device(split, model, alone):
    (state, metrics), (one, want) = step_on(mesh_of(split), *model), alone
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert metrics.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, atol=2e-5, rtol=1e-5, err_msg=name)


@for_each("split", SPLITS)
def test_what_the_optimizer_keeps_is_a_part_of_the_parameters(split, model):
    mesh, optimizer = mesh_of(split), make_optimizer(OptimizerConfig(warmup_steps=2))
    state = state_on(mesh, optimizer, *model)
    parts = jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    (moments,) = [x for x in parts if hasattr(x, "mu")]
    for kept in (moments.mu, moments.nu):
        # Each device keeps what belongs to numbers that it holds, and all devices keep it all.
        jax.tree.map(lies_within, kept, state.params)
        kernel = kept["layers"]["0"]["mlp"]["up"]["kernel"]
        assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert moments.count.sharding.is_fully_replicated

    shapes = abstract_state(jax.eval_shape(lambda: model[1]), optimizer, RECIPE, mesh=mesh)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    for tree, real in ((shapes.params, state.params), (shapes.opt_state, state.opt_state)):
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(real))
        assert device_bytes(tree) == device_bytes(real) == held


def lies_within(part, whole):
    """Fails unless each device's part of one array is inside its part of another."""
    held = whole.sharding.devices_indices_map(whole.shape)
    for device, index in part.sharding.devices_indices_map(part.shape).items():
        for inner, outer, size in zip(index, held[device], part.shape, strict=True):
            (a, b, _), (c, d, _) = inner.indices(size), outer.indices(size)
            assert c <= a and b <= d


def test_a_critic_has_an_optimizer_that_is_spread_too(model):
    (network, params), mesh = model, mesh_of((4, 2, 1))
    recipe, optimizer = jr.recipes.ppo_max(critic_warmup=0), optax.adamw(1e-3)
    placed = shard(params, param_shardings(params, mesh))
    critic = init_critic(network, placed, heads=recipe.critic.heads, key=jax.random.key(1))
    options = {"critic_optimizer": optimizer, "key": jax.random.key(0), "mesh": mesh}
    state = init_state(placed, optimizer, recipe, critic=critic, **options)
    moments = state.critic.opt_state[0].mu["model"]["layers"]["0"]["mlp"]["up"]["kernel"]
    assert moments.addressable_shards[0].data.size * 8 == moments.size
    del options["key"]
    given = jax.eval_shape(lambda: params)
    shapes = abstract_state(given, optimizer, recipe, critic=critic, **options)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("split", [(8, 1, 1), (1, 8, 1)])
def test_no_device_keeps_whole_gradients_or_gathered_weights(split, model):
    """Of a model whose tables are small beside its layers."""
    config = dataclasses.replace(model[0].config, num_layers=8)
    network, mesh, plain = jr.models.make_model(config), mesh_of(split), optax.sgd(1.0)
    shapes = jr.models.param_shapes(network)
    batch = abstract_batch(8, 2, 2, prompt_length=2, mesh=mesh)
    step = make_step(network, RECIPE, plain, mesh=mesh)
    program = step.lower(abstract_state(shapes, plain, RECIPE, mesh=mesh), batch).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * device_bytes(shapes)


def test_a_batch_of_shapes_is_split_over_its_prompts():
    mesh = mesh_of((2, 2, 2))
    batch = abstract_batch(8, 3, 5, prompt_length=6, mesh=mesh)
    real = place_batch(make_batch(prompts=8).replace(behavior_logp=np.zeros((8, 3, 5))), mesh)
    assert device_bytes(batch) < device_bytes(abstract_batch(8, 3, 5, prompt_length=6))
    assert batch.tokens.sharding.is_equivalent_to(real.tokens.sharding, 3)
    assert jax.tree.map(lambda x: x.shape, batch) == jax.tree.map(lambda x: x.shape, real)


def compiled_text(model, mesh, **options):
    """The program of a step on 16 prompts of 6 tokens with 3 responses of 7."""
    plain = optax.sgd(1.0)
    shapes = abstract_state(jax.eval_shape(lambda: model[1]), plain, RECIPE, mesh=mesh)
    batch = abstract_batch(16, 3, 7, prompt_length=6, mesh=mesh)
    step = flat_step(model[0], RECIPE, plain, mesh=mesh, **options)
    return step.lower(shapes, batch).compile().as_text()


@pytest.mark.slow
def test_each_device_computes_its_own_prompts(model):
    """The axis fsdp splits the batch, in activations too, and not the width of all prompts."""
    text = compiled_text(model, mesh_of((1, 8, 1)), remat="none")
    width, hidden = model[0].config.width, model[0].config.mlp_width
    row = 6 + 3 * 7
    assert f"[2,1,{row},{width}]" in text and f"[2,1,{row},{hidden}]" in text
    assert not re.search(rf"\[16,1,{row},({width}|{hidden}|{hidden // 8})\]", text)


@pytest.mark.slow
def test_the_gradient_of_a_weight_is_summed_over_devices_once(model):
    """Of prompts and responses together, however the step recomputes."""
    network, params = model
    kernels = [layer["mlp"]["up"]["kernel"] for layer in params["layers"].values()]
    of_kernel = "f32[{},{}]".format(*kernels[0].shape)

    def sums(network):
        text = compiled_text((network, params), mesh_of((8, 1, 1)), remat="full")
        shapes = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
        return sum(shape.count(of_kernel) for shape in shapes)

    assert sums(network) == 2 * len(kernels)  # up and gate
    assert sums(network._replace(takes_prompts=False)) > 2 * len(kernels)


def gathered(text):
    """The shapes that a program gathers, in its order."""
    return re.findall(r"= \w+(\[[\d,]*\])\S* all-gather(?:-start)?\(", text)


@pytest.mark.slow
def test_weights_are_gathered_once_in_each_pass(model):
    kernel = model[1]["layers"]["0"]["mlp"]["up"]["kernel"]
    shapes = gathered(compiled_text(model, mesh_of((1, 8, 1)), remat="full"))
    each = 2 * len(model[1]["layers"])  # up and gate
    assert shapes.count("[{},{}]".format(*kernel.shape)) == 2 * each


@pytest.mark.slow
def test_activations_split_over_tensor_are_not_gathered(model):
    hidden = model[0].config.mlp_width
    shapes = gathered(compiled_text(model, mesh_of((1, 2, 4)), remat="full"))
    assert shapes  # of weights
    assert not [s for s in shapes if s.endswith(f",{hidden}]") and s.count(",") > 1]


NAMES = {"kernel": "matrix", "embedding": "table"}


def renamed(tree, names):
    if not isinstance(tree, dict):
        return tree
    return {names.get(name, name): renamed(value, names) for name, value in tree.items()}


def own_model():
    """The tiny model with other names for its matrices."""
    model, params = tiny_model(num_layers=1)
    back = {theirs: ours for ours, theirs in NAMES.items()}
    rules = tuple(
        ("/".join(NAMES.get(part, part) for part in end.split("/")), axes) for end, axes in RULES
    )
    return model._replace(
        apply=lambda params, *a, **k: model.apply(renamed(params, back), *a, **k),
        output_matrix=lambda params: model.output_matrix(renamed(params, back)),
        sharding_rules=rules,
    ), renamed(params, NAMES)


@pytest.mark.slow
def test_parameters_of_other_names_are_split_by_their_rules_and_train_alike():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    model, params = own_model()
    recipe, optimizer, batch = jr.recipes.rloo(), optax.adamw(1e-2), make_batch()
    results = {}
    for mesh in (None, make_mesh(**sizes)):
        placed = params
        if mesh is not None:
            placed = shard(params, param_shardings(params, mesh, model.sharding_rules))
        options = {"key": jax.random.key(0), "mesh": mesh, "rules": model.sharding_rules}
        state = init_state(placed, optimizer, recipe, **options)
        step = make_step(model, recipe, optimizer, mesh=mesh)
        for _ in range(2):
            state, _ = step(state, place_batch(batch, mesh))
        results[mesh] = state.params
        if mesh is not None:
            up = ("layers", "0", "mlp", "up", "matrix")
            for tree in (state.params, state.opt_state[0].mu):
                for key in up:
                    tree = tree[key]
                assert tree.addressable_shards[0].data.size <= tree.size // sizes["fsdp"]
    on_one, on_mesh = results.values()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), on_mesh, on_one)


def test_mesh_sizes():
    assert make_mesh() is None and make_mesh(devices=[object()], data=-1) is None
    assert tuple(make_mesh(data=-1, tensor=2).shape.values()) == (4, 1, 1, 1, 2)
    sizes = {"data": 1, "context": 1, "fsdp": 8, "expert": 1, "tensor": 1}
    assert dict(make_mesh(fsdp=8).shape) == sizes
    check_batch("f", 8, 2, 4)


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """A device of one of several slices, as far as a mesh asks."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "fake"


@for_each(
    "slices, sizes, spanned",
    [
        (2, {"data": 2, "fsdp": 2, "tensor": 2}, {"data"}),
        (4, {"data": 2, "fsdp": 4}, {"data", "fsdp"}),
        (2, {"fsdp": 4, "tensor": 2}, {"fsdp"}),
        (2, {"tensor": 8}, {"tensor"}),
        (1, {"data": 2, "fsdp": 4}, set()),
    ],
)
def test_the_first_axes_span_slices(slices, sizes, spanned):
    devices = [SliceDevice(i, i * slices // 8) for i in range(8)]
    mesh = make_mesh(**sizes, devices=devices)
    assert {name: size for name, size in mesh.shape.items() if size > 1} == sizes
    places = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    for axis, name in enumerate(mesh.axis_names):
        along = np.take(places, [0], axis) != places
        assert along.any() == (name in spanned)
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


@for_each(
    "call, message",
    [
        (lambda: make_mesh(data=2), "data 2 x context 1 x .* tensor 1 needs 2 devices, .* are 8"),
        (lambda: make_mesh(data=-1, tensor=3), "3 .* does not divide the 8 devices"),
        (lambda: make_mesh(fsdp=-2), "fsdp must be above 0"),
        (lambda: check_batch("f", 8, 2, 8), "f: a microbatch of 4 prompts .* over 8 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
