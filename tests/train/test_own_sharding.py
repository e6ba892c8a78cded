"""A model with parameters of its own names, which brings the rules that split them."""

import jax
import numpy as np
import optax
import pytest
from helpers import make_batch

import jaxrl_llm as jr
from jaxrl_llm.models.sharding import RULES, param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import init_state, make_mesh, make_step
from jaxrl_llm.train.mesh import place_batch

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


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_its_parameters_and_moments_are_split_and_train_alike(sizes):
    model, params = own_model()
    recipe, optimizer, batch = jr.recipes.rloo(), optax.adamw(1e-2), make_batch()
    results = {}
    for mesh in (None, make_mesh(**sizes)):
        placed = params
        if mesh is not None:
            placed = shard(params, param_shardings(params, mesh, model.sharding_rules))
        state = init_state(
            placed,
            optimizer,
            recipe,
            key=jax.random.key(0),
            mesh=mesh,
            rules=model.sharding_rules,
        )
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
