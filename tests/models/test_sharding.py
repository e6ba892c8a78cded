"""Sharding rules as data."""

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.models import batch_sharding, param_shapes, param_shardings
from jaxrl_llm.models.sharding import LOGICAL, param_spec, update_spec
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import LoRAConfig, init_lora
from jaxrl_llm.train.mesh import make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layers/0/mlp/up/kernel", (32, 64), ("fsdp", "tensor")),
        ("layers/11/mlp/down/kernel", (64, 32), ("tensor", "fsdp")),
        ("layers/0/attention/o/kernel", (32, 32), ("tensor", "fsdp")),
        ("layers/0/attention/k/bias", (16,), ("tensor",)),
        ("embed/embedding", (260, 32), ("tensor", "fsdp")),
        ("embed/embedding", (259, 32), (None, "fsdp")),  # What does not divide is kept whole.
        ("layers/0/mlp_norm/scale", (32,), ()),
    ],
)
def test_rules(mesh, path, shape, spec):
    assert param_spec(path, shape, mesh) == PartitionSpec(*spec)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("shape", [(64, 32), (63, 32), (32,)])
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


def paths_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def test_every_rule_names_a_parameter_that_exists():
    model, params = tiny_model(architecture="qwen2", attention_bias=True, mlp_bias=True, tied=False)
    paths = paths_of(param_shapes(model)) + paths_of(init_lora(params, LoRAConfig(rank=2)))
    for end, _ in LOGICAL:
        assert any(path.endswith(end) for path in paths), end
