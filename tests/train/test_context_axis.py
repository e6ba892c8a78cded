"""The mesh axis ``context`` splits the tokens of rows, and results are those of one device."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import refuses
from on_meshes import assert_update_of_one_device, mesh_of, step_on

from jaxrl_llm.cli.options import load_config
from jaxrl_llm.models import AttentionContext, ExpertsConfig, LayerKind
from jaxrl_llm.models.context import Rows, collect_rows, spread_rows
from jaxrl_llm.models.protocol import PromptTree
from jaxrl_llm.models.sharding import on_mesh
from jaxrl_llm.testing import tiny_flow_model
from jaxrl_llm.train import EvaluationConfig, MeshConfig, train
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.mesh import AsyncConfig, sampling_mesh

ROOT = Path(__file__).parents[2]
SLOW = [pytest.mark.slow, pytest.mark.of_many]
MODELS = {
    "plain": {},
    # Which a mesh axis of two splits, as it does not that of the others, 259.
    "even vocabulary": {"vocab_size": 260},
    "windows": {"num_layers": 2, "layers": (LayerKind(window=4), LayerKind())},
    "experts": {"sinks": True, "experts": ExpertsConfig(count=4, active=2, width=16)},
}


@pytest.mark.parametrize(
    ("which", "packing", "sizes", "microbatches"),
    [
        pytest.param("plain", "tree", {"context": 8}, 1, marks=SLOW),
        pytest.param(
            "even vocabulary", "never", {"context": 2, "fsdp": 2, "tensor": 2}, 1, marks=SLOW
        ),
        pytest.param("windows", "always", {"data": 2, "context": 4}, 1, marks=SLOW),
        pytest.param("windows", "flat", {"context": 4, "tensor": 2}, 2, marks=SLOW),
        pytest.param("experts", "flat", {"data": 2, "context": 4}, 1, marks=SLOW),
    ],
)
def test_an_update_is_that_of_one_device(which, packing, sizes, microbatches):
    options = {"parts": MODELS[which], "microbatches": microbatches}
    assert_update_of_one_device(sizes, packing, **options)


@pytest.mark.slow
def test_bfloat16_has_the_gradient_of_one_device():
    """XLA for CPUs would end the process on a sum of bfloat16 over devices."""
    assert_update_of_one_device({"context": 2}, parts={"dtype": "bfloat16"}, tolerance=0.05)


@pytest.mark.slow
def test_a_denoiser_trains_as_on_one_device(tmp_path):
    denoiser = load_config(ROOT / "configs" / "tiny.py", name="denoiser")
    rows = []
    for name, split in (("one", MeshConfig()), ("eight", MeshConfig(context=8))):
        config = dataclasses.replace(denoiser, mesh=split, steps=1, run_dir=str(tmp_path / name))
        config = dataclasses.replace(config, evaluation=EvaluationConfig(enabled=False))
        rows.append(train(config).history[0])
    for name in ("loss", "grad_norm", "entropy", "update_norm"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-4, abs=1e-6), name


def test_what_lies_on_one_device_is_for_any_mesh():
    config = load_config(ROOT / "configs" / "tiny.py", name="config")
    config = dataclasses.replace(config, mesh=MeshConfig(data=4, context=2), prompts_per_step=8)
    experiment, params = load_experiment(config, trains=False)
    key = jax.random.key(0)
    placed, same = experiment.on_rollout_mesh((params, key))
    assert same is key and experiment.rollout_mesh != experiment.mesh
    assert {x.sharding.mesh for x in jax.tree.leaves(placed)} == {experiment.rollout_mesh}
    assert experiment.on_rollout_mesh((key, params))[0] is key


def test_devices_hold_a_part_of_the_prompt_and_of_each_response():
    tokens = jnp.array([[1, 2, 3, 4, 11, 12, 13, 21, 22, 23]])[:, None]
    mask = jnp.ones((1, 2, 3), bool)
    context = AttentionContext(
        mask,
        prefix_mask=jnp.ones((1, 4), bool),
        ends=jnp.full((1, 2, 3), 3),
        prompt_tree=PromptTree(jnp.full((1, 4), 4), jnp.zeros((1, 2, 3), int)),
    )

    def spread(tokens):
        rows, _, padded = spread_rows(tokens, tokens, context)
        of_prompt, of_responses = Rows.of(padded).split(rows, 2)
        back = collect_rows(rows, 2, context, padded)
        lengths = [padded.mask, padded.ends, *padded.prompt_tree]
        return rows, of_prompt, of_responses, back, [x.shape[-1] for x in lengths]

    rows, of_prompt, of_responses, back, lengths = on_mesh(spread, mesh_of({"context": 2}))(tokens)
    # Of two devices, the first has the first half of everything.
    assert rows[0, 0].tolist() == [1, 2, 11, 12, 21, 22, 3, 4, 13, 0, 23, 0]
    assert of_prompt[0, 0].tolist() == [1, 2, 3, 4]
    assert of_responses[0].tolist() == [[11, 12, 13, 0], [21, 22, 23, 0]]
    assert back.tolist() == tokens.tolist()
    assert lengths == [4, 4, 4, 4]
    rows, *_ = spread(tokens)  # without a mesh
    assert rows.tolist() == tokens.tolist()


@pytest.mark.slow
def test_layers_gather_nothing_but_keys_and_values():
    """What a layer receives from other devices is what its attention reads, however long it is."""
    step, state, batch = step_on({"data": 2, "context": 4}, "flat", parts={}, length=64)
    lines = step.lower(state, batch).compile().as_text().splitlines()
    moves = "all-gather|all-to-all|collective-permute"
    found = [line for line in lines if re.search(rf" = \(?f32.* ({moves})\(", line)]
    of_layers = [line for line in found if "jit(run)" in line]
    assert of_layers
    for line in of_layers:  # of prompts and of responses: [P, Hk, d, S] and [P, Hk, S, d]
        shape = [int(n) for n in re.search(r"f32\[([\d,]+)\]", line)[1].split(",")]
        assert " all-gather(" in line, line
        assert sorted(shape[-2:])[0] == 8, line
        assert shape[-3] == 2, line


@pytest.mark.slow
def test_memory_of_a_row_is_divided():
    def temporary(sizes):
        step, state, batch = step_on(sizes, "flat", parts={}, length=2400, remat="none")
        return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporary({"context": 8}) < 0.5 * temporary({})


def test_rollouts_take_prompts_on_every_device():
    mesh = mesh_of({"context": 2, "fsdp": 2, "tensor": 2})
    spread = sampling_mesh(mesh, 8)
    assert dict(spread.shape) == {"data": 2, "context": 1, "fsdp": 2, "expert": 1, "tensor": 2}
    assert list(spread.devices.flat) == list(mesh.devices.flat)
    assert sampling_mesh(mesh, 6) is mesh  # 4 parts do not divide it
    assert sampling_mesh(None, 8) is None


def test_where_tokens_are_not_split_it_says_so():
    config = load_config(ROOT / "configs" / "tiny.py", name="config")
    split = MeshConfig(context=2)
    with pytest.raises(ValueError, match="mesh: context has no effect with 'eggroll', which only"):
        dataclasses.replace(config, recipe="eggroll", mesh=split, remat="full")
    with pytest.raises(ValueError, match="asynchrony: context has no effect in sampler_mesh"):
        AsyncConfig(max_staleness=1, sampler_devices=4, sampler_mesh=MeshConfig(context=4))
    flow = load_config(ROOT / "configs" / "tiny.py", name="flow")
    flow = dataclasses.replace(flow, mesh=MeshConfig(context=8), run_dir="never made")
    refuses("mesh: context 8 has no effect with a flow model", train, flow)
    assert tiny_flow_model()[0].velocity is not None
