"""Which leaf gets which noise: the rule, its exceptions, the table, and rules that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.evolution import eggroll_grad, full_rank, leaf_classes, leaf_table, moving
from jaxrl_llm.testing import tiny_model

KEY = jax.random.key(0)


def tree(**leaves):
    layer = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    return {"embed": {"embedding": jnp.ones((7, 4))}, "layers": {"0": layer, "1": layer}, **leaves}


def test_the_rule():
    params = tree(
        norm={"scale": jnp.ones(4)}, steps=jnp.zeros((2, 2), int), cube=jnp.ones((2,) * 3)
    )
    classes = leaf_classes(params)
    assert classes["layers"]["1"] == {"kernel": "lowrank", "bias": "frozen"}
    assert classes["embed"]["embedding"] == classes["norm"]["scale"] == classes["steps"] == "frozen"
    assert classes["cube"] == "frozen"
    classes = leaf_classes(params, others="full")
    assert classes["layers"]["1"] == {"kernel": "lowrank", "bias": "full"}
    assert classes["cube"] == classes["norm"]["scale"] == "full" and classes["steps"] == "frozen"


def test_a_stack_of_kernels_has_noise_of_its_own_for_each():
    params = tree(experts={"kernel": jnp.ones((5, 4, 3)), "bias": jnp.ones((5, 3))})
    classes = leaf_classes(params)
    assert classes["experts"] == {"kernel": "lowrank", "bias": "frozen"}
    lines = [line.split() for line in leaf_table(params, classes, rank=2).splitlines()]
    # Five matrices of (4 + 3) x 2 values.
    assert ["experts/kernel", "lowrank", *"5x4x3", "1", "60", "70"] in lines
    grads = eggroll_grad(params, classes, KEY, 0, jnp.array([1.0, -1.0]), sigma=0.1, rank=2)
    assert np.linalg.matrix_rank(grads["experts"]["kernel"]).tolist() == [2] * 5
    assert not np.allclose(grads["experts"]["kernel"][0], grads["experts"]["kernel"][1])
    # Elsewhere three axes may mean anything.
    assert leaf_classes(tree(conv={"kernel": jnp.ones((5, 4, 3))}))["conv"]["kernel"] == "frozen"
    cube = leaf_classes(tree(cube=jnp.ones((2, 4, 3))), rules=[("cube", "lowrank")])
    assert cube["cube"] == "lowrank"
    for name, leaf in (
        ("embedding", jnp.ones((2, 4, 3))),
        ("lowrank", jnp.ones((2, 4, 3), "int8")),
    ):
        with pytest.raises(ValueError, match=f"'cube' has shape .2, 4, 3.*cannot be '{name}'"):
            leaf_classes(tree(cube=leaf), rules=[("cube", name)])


def test_the_first_rule_that_matches_holds():
    rules = [("layers/1/*", "frozen"), ("*/bias", "full"), ("embed/*", "embedding")]
    classes = leaf_classes(tree(), rules=rules)
    assert classes["layers"]["0"] == {"kernel": "lowrank", "bias": "full"}
    assert classes["layers"]["1"] == {"kernel": "frozen", "bias": "frozen"}
    assert classes["embed"]["embedding"] == "embedding"
    # Shapes alone will do.
    assert leaf_classes(jax.eval_shape(tree), rules=rules) == classes


def test_the_built_in_model():
    for options in ({}, {"architecture": "qwen3", "qk_norm": True, "tied": False}):
        _, params = tiny_model(**options)
        names = leaf_classes(params)
        kernels = sum(name == "lowrank" for name in jax.tree.leaves(names))
        assert kernels == 2 * 7
        assert names["embed"]["embedding"] == names["norm"]["scale"] == "frozen"
        assert options == {} or names["head"]["kernel"] == "frozen"


def test_the_table():
    params = tree()
    classes = leaf_classes(params, rules=[("embed/*", "embedding"), ("layers/0/bias", "full")])
    lines = leaf_table(params, classes, rank=2).splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = [line.split() for line in lines]
    assert cells[0] == ["leaf", "class", "shape", "leaves", "parameters", "drawn"]
    assert ["embed/embedding", "embedding", "7", "x", "4", "1", "28", "22"] in cells
    assert ["layers/*/kernel", "lowrank", "4", "x", "3", "2", "24", "28"] in cells
    assert ["layers/*/bias", "full", "3", "1", "3", "3"] in cells
    assert ["layers/*/bias", "frozen", "3", "1", "3", "0"] in cells
    assert cells[-1] == ["total", "5", "58", "53"]


def test_a_frozen_leaf_keeps_its_bits_whatever_the_optimizer_does():
    params = tree(steps=jnp.array([3, 4]))
    params = jax.tree.map(lambda x: x * 0.1 if x.dtype == jnp.float32 else x, params)
    classes = leaf_classes(params)
    optimizer = optax.masked(optax.adamw(0.1, weight_decay=0.1), moving(classes))
    fitness = jnp.array([1.0, -1.0, 0.5, -0.5])

    @jax.jit
    def step(params, state, epoch):
        grads = eggroll_grad(params, classes, KEY, epoch, fitness, sigma=0.1)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, state = params, optimizer.init(params)
    for epoch in range(100):
        new, state = step(new, state, epoch)
    jax.tree.map(
        lambda name, old, x: np.testing.assert_equal(
            np.array_equal(old, x), name == "frozen", err_msg=name
        ),
        classes,
        params,
        new,
    )
    # Nor is there state for it: two moments of two kernels, and a count.
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * 2 * 12 + 1


def test_full_rank_moves_the_same_leaves():
    classes = leaf_classes(tree(), rules=[("embed/*", "embedding")])
    assert moving(full_rank(classes)) == moving(classes)
    assert set(jax.tree.leaves(full_rank(classes))) == {"full", "frozen"}
