"""Sharding rules as data."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rows import for_each

from jaxrl_llm.models import (
    ExpertsConfig,
    LayerKind,
    LinearAttentionConfig,
    batch_sharding,
    param_shapes,
    param_shardings,
    with_adapter,
    with_head,
)
from jaxrl_llm.models.sharding import (
    RULES,
    _warn_unused,
    on_each_device,
    on_mesh,
    param_spec,
    spread_update,
    update_spec,
)
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import LoRAConfig, init_lora
from jaxrl_llm.train.mesh import make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


@for_each(
    ("path", "shape", "spec"),
    [
        ("layers/0/mlp/up/kernel", (32, 64), ("fsdp", "tensor")),
        ("layers/11/mlp/down/kernel", (64, 32), ("tensor", "fsdp")),
        ("layers/0/attention/o/kernel", (32, 32), ("tensor", "fsdp")),
        ("layers/0/attention/k/bias", (16,), ("tensor",)),
        ("layers/0/mlp/experts/up/kernel", (4, 32, 16), ("fsdp", None, "tensor")),
        # Too few or too many experts: another axis is split.
        ("layers/0/mlp/experts/down/kernel", (5, 16, 32), (None, "tensor", "fsdp")),
        ("layers/0/mlp/experts/up/kernel", (5, 32, 16), (None, "fsdp", "tensor")),
        ("layers/0/mlp/experts/up/kernel", (5, 31, 16), (None, None, "tensor")),
        ("layers/0/mlp/experts/down/bias", (5, 32), (None, "fsdp")),
        ("layers/0/mlp/experts/up/bias", (4, 16), ("fsdp", "tensor")),
        ("layers/0/mlp/experts/down/a", (4, 16, 2), ("fsdp", "tensor", None)),
        ("layers/0/mlp/experts/down/b", (4, 2, 32), ("fsdp", None, None)),
        ("layers/0/mlp/router/kernel", (32, 4), ("fsdp", None)),
        ("embed/embedding", (260, 32), ("tensor", "fsdp")),
        ("embed/embedding", (259, 32), (None, "fsdp")),  # What does not divide is kept whole.
        ("layers/0/mlp_norm/scale", (32,), ()),
    ],
)
def test_rules(mesh, path, shape, spec):
    assert param_spec(path, shape, mesh) == PartitionSpec(*spec)


@for_each(
    ("path", "shape", "spec"),
    [
        # The axis of fsdp is split further, so what a device updates it also holds.
        ("layers/0/mlp/up/kernel", (32, 64), (("fsdp", "data"), "tensor")),
        ("1/mu/layers/0/mlp/down/kernel", (64, 32), (("tensor", "data"), "fsdp")),
        ("embed/embedding", (262, 32), ("tensor", ("fsdp", "data"))),
        ("embed/embedding", (259, 30), (None, "fsdp")),
        ("embed/embedding", (260, 31), (("tensor", "data"), None)),
        ("some/other/matrix", (31, 6), (None, "data")),
        ("layers/0/mlp_norm/scale", (32,), ()),
        ("count", (), ()),
    ],
)
def test_rules_of_an_update(mesh, path, shape, spec):
    assert update_spec(path, shape, mesh) == PartitionSpec(*spec)


@for_each(
    ("path", "shape", "spec", "update"),
    [
        # Experts first over `expert`, so that only the devices of `fsdp` gather them.
        ("experts/up/kernel", (8, 32, 16), (("expert", "fsdp"), None, None), None),
        ("experts/up/kernel", (2, 32, 16), ("expert", "fsdp", None), None),
        ("experts/up/kernel", (3, 32, 16), (None, "fsdp", None), (None, ("fsdp", "expert"), None)),
        ("experts/down/bias", (8, 32), (("expert", "fsdp"), None), None),
        ("mlp/up/kernel", (32, 64), ("fsdp", None), (("fsdp", "expert"), None)),
    ],
)
def test_rules_of_experts_on_an_axis_of_their_own(path, shape, spec, update):
    mesh = make_mesh(fsdp=4, expert=2)
    assert param_spec(f"layers/0/mlp/{path}", shape, mesh) == PartitionSpec(*spec)
    expected = PartitionSpec(*(update or spec))
    assert update_spec(f"layers/0/mlp/{path}", shape, mesh) == expected


@for_each("shape", [(64, 32), (63, 32), (32,)])
def test_without_an_axis_data_an_update_is_split_as_its_parameter(shape):
    mesh = make_mesh(fsdp=4, tensor=2)
    path = "layers/0/mlp/down/kernel"
    assert update_spec(path, shape, mesh) == param_spec(path, shape, mesh)


def test_every_matrix_of_a_model_has_a_rule(mesh):
    model, _ = tiny_model(architecture="qwen2", attention_bias=True, tied=False, vocab_size=264)
    shardings = param_shardings(param_shapes(model), mesh)
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith(("kernel", "embedding")):
            assert sharding.spec == PartitionSpec("fsdp", "tensor") or sharding.spec == (
                PartitionSpec("tensor", "fsdp")
            ), name
    assert batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))


OWN = {"block": {"wq": jnp.zeros((16, 8))}, "out": {"kernel": jnp.zeros((8, 24))}}
OWN_RULES = (("block/wq", ("fsdp", None)), ("out/kernel", (None, "fsdp")))


@for_each(
    ("sizes", "rules", "message"),
    [
        ({"fsdp": 4}, RULES, "axis 'fsdp' splits no parameter: each of its 4 devices holds all"),
        ({"tensor": 8}, OWN_RULES, "axis 'tensor' splits no parameter.* Model.sharding_rules"),
        ({"dp": 8, "fsdp": 1}, OWN_RULES, "axis 'dp' splits nothing: only data, context, fsdp"),
    ],
)
def test_a_mesh_axis_that_splits_nothing_is_told_once(sizes, rules, message):
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=jax.devices()[: max(sizes.values())]
    )
    with pytest.warns(UserWarning, match=message):
        param_shardings(OWN, mesh, rules)
    param_shardings(OWN, mesh, rules)  # A second warning would be an error.


def test_what_is_added_to_a_model_is_placed_without_a_warning():
    """An axis may split the model and neither its head nor an adapter of few layers."""
    _warn_unused.cache_clear()
    model, params = tiny_model(num_layers=1)
    _, headed = with_head(model, params, key=jax.random.key(0), mesh=make_mesh(fsdp=8))
    assert headed["head"]["kernel"].sharding.mesh.shape["fsdp"] == 8
    experts = ExpertsConfig(count=4, active=2, width=16)
    model, params = tiny_model(num_layers=1, architecture="qwen3_moe", experts=experts)
    lora = LoRAConfig(rank=2, targets=("router",))
    _, adapted = with_adapter(model, params, lora, mesh=make_mesh(fsdp=4, tensor=2))
    a = adapted.adapter["layers"]["0"]["mlp"]["router"]["a"]
    assert a.sharding.spec == PartitionSpec("fsdp", None)


def test_a_model_brings_its_sharding_rules():
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    shardings = param_shardings(OWN, mesh, OWN_RULES)
    assert shardings["block"]["wq"].spec == PartitionSpec("fsdp", None)
    assert shardings["out"]["kernel"].spec == PartitionSpec(None, "fsdp")
    assert param_spec("out/a", (8, 2), mesh, OWN_RULES) == PartitionSpec(None, None)
    assert param_spec("out/b", (2, 24), mesh, OWN_RULES) == PartitionSpec(None, "fsdp")
    both = make_mesh(data=2, fsdp=4)
    assert update_spec("mu/out/kernel", (8, 24), both, OWN_RULES) == PartitionSpec("data", "fsdp")
    grads = jax.device_put(OWN, param_shardings(OWN, both, OWN_RULES))
    placed = jax.jit(on_mesh(spread_update, both, OWN_RULES))(grads)
    assert placed["out"]["kernel"].sharding.spec == PartitionSpec("data", "fsdp")


def paths_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def test_every_rule_names_a_parameter_that_exists():
    model, params = tiny_model(architecture="qwen2", attention_bias=True, mlp_bias=True, tied=False)
    paths = paths_of(param_shapes(model)) + paths_of(init_lora(params, LoRAConfig(rank=2)))
    experts = ExpertsConfig(count=4, active=2, width=8, bias=True)
    paths += paths_of(param_shapes(tiny_model(num_layers=1, experts=experts)[0]))
    experts = ExpertsConfig(count=4, active=2, width=8, shared=4)
    sizes = LinearAttentionConfig(key_heads=1, value_heads=2, key_dim=4, value_dim=4)
    linear = {"layers": (LayerKind(linear=True),), "linear_attention": sizes}
    paths += paths_of(param_shapes(tiny_model(num_layers=1, experts=experts, **linear)[0]))
    for end, _ in RULES:
        assert any(path.endswith(end) for path in paths), end


def in_loops(program):
    """Lines of a compiled program that stand in the body of a loop."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", program))
    lines, inside = [], False
    for line in program.splitlines():
        if line and not line.startswith(" "):
            inside = line.split()[0].lstrip("%") in bodies
        elif inside:
            lines.append(line)
    return "\n".join(lines)


def test_what_is_whole_is_gathered_once_and_its_gradient_summed_once(mesh):
    rng = np.random.default_rng(0)
    batch, whole = rng.normal(size=(8, 6, 4)), rng.normal(size=(16, 4))
    batch, whole = (jnp.asarray(x, jnp.float32) for x in (batch, whole))

    def of_rows(batch, whole):
        def one(_, x):
            return None, jax.nn.logsumexp(x @ whole.T, axis=-1)

        # In every turn some of each row of the batch.
        return jnp.swapaxes(jax.lax.scan(one, None, jnp.swapaxes(batch, 0, 1))[1], 0, 1)

    def loss(spread, batch, whole):
        found = on_each_device(of_rows, batch, whole) if spread else of_rows(batch, whole)
        return jnp.sum(found**2), found

    wanted, found = jax.value_and_grad(partial(loss, False), (1, 0), has_aux=True)(batch, whole), {}
    placed = (
        jax.device_put(batch, batch_sharding(mesh)),
        jax.device_put(whole, NamedSharding(mesh, PartitionSpec(None, "fsdp"))),
    )
    for spread in (True, False):
        function = on_mesh(jax.value_and_grad(partial(loss, spread), (1, 0), has_aux=True), mesh)
        program = jax.jit(function).lower(*placed).compile()
        found[spread] = re.findall(
            r"(all-gather|all-reduce|reduce-scatter)\(", in_loops(program.as_text())
        )
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), program(*placed), wanted
        )
    assert found[False] and not found[True]


def test_rows_that_devices_do_not_divide_stay_together(mesh):
    function = on_mesh(lambda b, w: on_each_device(lambda b, w: b * w, b, w), mesh)
    assert function(jnp.ones((3, 2)), jnp.float32(2.0)).tolist() == [[2.0, 2.0]] * 3
    assert on_each_device(lambda b, w: b + w, jnp.ones(8), 1.0).tolist() == [2.0] * 8
