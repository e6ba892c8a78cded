"""Whole runs on trees: unique tokens train as rows do."""

import jax
import numpy as np
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.train import SamplingConfig, train

pytestmark = pytest.mark.usefixtures("shared_programs")

SAMPLING = SamplingConfig(group_size=6, max_new_tokens=8)


def first_byte(prompt, completion, metadata):
    return {"reward": float(ord(completion[:1] or "a") % 2), "answer_ids": len(completion) % 3}


def before_the_last(lengths):
    return np.maximum(lengths - 2, 0)[:, None]


def run(folder, **changes):
    options = {"reward": first_byte, "sampling": SAMPLING, "steps": 2} | changes
    return tiny_run(folder, **options)


FORKED = jr.recipes.ettrl(forks=1, branches=2).replace(
    collector=jr.curation.forked(before_the_last, forks=1, branches=2)
)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [FORKED, jr.recipes.branch_grpo(splits=(6,))], ids=lambda recipe: recipe.name
)
def test_a_tree_of_the_loop_trains_as_flattened_rows(tmp_path, recipe):
    lines = {
        packing: train(run(tmp_path / packing, recipe=recipe, packing=packing))
        for packing in ("tree", "never")
    }
    tree, rows = lines["tree"].history, lines["never"].history
    for a, b in zip(tree, rows, strict=True):
        assert a["rollouts_sampled"] == b["rollouts_sampled"]
        assert a["packed"] < 0.8 and b["packed"] == 1.0
        assert a.keys() == b.keys()
        for name in {"loss", "grad_norm", "reward", "entropy", "sampler_gap", "ref_kl"} & b.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5)
    for a, b in zip(*(jax.tree.leaves(x.state.params) for x in lines.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
