"""The configs of a pod and of a node at the size of Qwen3-8B, on meshes that are not there."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from rows import for_each

from benchmarks import pods
from jaxrl_llm.models import ModelConfig, make_model, param_shapes
from jaxrl_llm.models.sharding import AXES, batch_shards
from jaxrl_llm.train import make_optimizer
from jaxrl_llm.train.config import find_recipe
from jaxrl_llm.train.memory.memory_plan import PlanInputs, make_plan
from jaxrl_llm.train.state import device_bytes
from jaxrl_llm.train.update.init import abstract_batch, abstract_state

ROOT = Path(__file__).parents[2]
# By config: devices, and the bytes of memory that each has.
SIZES = {"tpu_v5e_64": (64, 16e9), "gpu_8": (8, 80e9)}


def pod_of(name):
    config = pods.load(str(ROOT / "configs" / f"{name}.py"))
    sizes = dataclasses.astuple(config.mesh)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return config, mesh, *SIZES[name]


@pytest.mark.slow
@for_each("name", SIZES)
def test_the_state_is_split_over_all_devices_and_the_run_fits_them(name):
    config, mesh, devices, memory = pod_of(name)
    assert mesh.size == devices
    size = ModelConfig.from_hf(pods.QWEN3_8B, dtype=config.dtype)
    model, sampling = make_model(size), config.sampling
    optimizer, recipe = make_optimizer(config.optimizer), find_recipe(config.recipe, sampling)
    state = abstract_state(param_shapes(model), optimizer, recipe, mesh=mesh)
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    assert parameters == 8_190_735_360  # as the model's card says: 8.2 billion
    # Weights and two moments in float32, of which each device has its part and little besides.
    held = device_bytes((state.params, state.opt_state))
    assert held == pytest.approx(12 * parameters / devices, rel=5e-3)
    for x in jax.tree.leaves((state.params, state.opt_state)):
        if math.prod(x.shape) > size.width:
            assert math.prod(x.sharding.shard_shape(x.shape)) * devices == math.prod(x.shape)

    inputs = PlanInputs(model, param_shapes(model), longest_prompt=256, num_held_out=256)
    plan = make_plan(config, inputs, accelerator=True)
    assert plan.resident == held
    assert plan.peak < 0.8 * memory
    # As the page says, in GB.
    gradients = plan.step["gradients"]
    rest, sampler = sum(plan.step.values()) - gradients, sum(plan.sampling.values())
    numbers = (plan.resident, gradients, rest, sampler, plan.peak)
    row = " | ".join([f"{memory / 1e9:.0f}", *(f"{x / 1e9:.1f}" for x in numbers)])
    assert f"| {row} |" in (ROOT / "docs" / "pods.md").read_text()


@for_each("name", SIZES)
def test_devices_have_prompts_each_and_the_tensor_axis_stays_within_a_host(name):
    config, mesh, _, _ = pod_of(name)
    part = config.prompts_per_step // config.microbatches
    assert part % batch_shards(mesh) == 0
    shape = (config.prompts_per_step, config.sampling.group_size, config.sampling.max_new_tokens)
    batch = abstract_batch(*shape, prompt_length=256, mesh=mesh)
    rows = batch.tokens.sharding.shard_shape(batch.tokens.shape)[0]
    assert rows * batch_shards(mesh) == config.prompts_per_step

    hosts = 4 if mesh.size == 64 else 8  # devices of one
    assert hosts % dict(mesh.shape)["tensor"] == 0


@pytest.mark.slow
def test_the_step_compiles_for_sixty_four_devices():
    words = ["-m", "benchmarks.pods", "configs/tpu_v5e_64.py", "--layers", "2"]
    words += ["--prompt-length", "16", "--response-length", "16"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["devices"] == 64
    state = found["params_bytes"] + found["optimizer_bytes"]
    assert found["arguments_bytes"] == pytest.approx(state + found["batch_bytes"], rel=1e-3)
    assert found["aliased_bytes"] == pytest.approx(state, rel=1e-3)  # donated, so there once
    # No device has a whole model, and none computes what another does: forward, again, backward.
    # The loops over microbatches and over blocks of the vocabulary count once.
    assert found["temporary_bytes"] < 4 * found["parameters"]
    layers, tokens = found["parameters"] - 2 * 151936 * 4096, 16 * (16 + 8 * 16)
    assert 0.9 < found["flops"] / (8 * layers * tokens / 64) < 1.5
