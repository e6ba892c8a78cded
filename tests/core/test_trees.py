"""Helpers over pytrees."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees

TREE = {"layers": {"0": {"kernel": jnp.ones((2, 3)), "ids": jnp.arange(4)}}, "list": [jnp.ones(2)]}


def test_map_with_path_names_each_leaf():
    paths = []
    out = trees.map_with_path(lambda p, x: paths.append(p) or x + x, TREE)
    assert sorted(paths) == ["layers/0/ids", "layers/0/kernel", "list/0"]
    assert out["layers"]["0"]["ids"].tolist() == [0, 2, 4, 6]


def test_cast_leaves_integers_alone():
    out = trees.cast(TREE, jnp.bfloat16)
    assert out["layers"]["0"]["kernel"].dtype == jnp.bfloat16
    assert out["layers"]["0"]["ids"].dtype == TREE["layers"]["0"]["ids"].dtype
    key = jax.random.key(0)
    assert trees.cast({"key": key}, jnp.bfloat16)["key"] is key


def test_norm_and_size():
    tree = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]], jnp.bfloat16)}
    assert float(trees.norm(tree)) == 5.0
    assert trees.norm(tree).dtype == jnp.float32
    assert float(trees.norm({})) == 0.0
    assert trees.size(TREE) == 12
    # 300 squares of one in bfloat16 would stop at 256.
    assert float(trees.norm(jnp.ones(400, jnp.bfloat16))) == 20.0
