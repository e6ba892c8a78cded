"""The mesh axis ``expert`` divides the experts, and results are those of one device."""

import re
import shutil

import jax
import numpy as np
import pytest
from on_meshes import assert_update_of_one_device, mesh_of, step_on
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models import ExpertsConfig
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.sharding import batch_sharding, param_shardings, shard, update_shardings
from jaxrl_llm.rollout import Generation, Group, make_engine, to_rollout
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import CheckpointConfig, MeshConfig, SamplingConfig, train
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.memory.memory_plan import load_inputs, make_plan

SLOW = [pytest.mark.slow, pytest.mark.of_many]
# As gpt-oss has them.
PARTS = {
    "num_layers": 1,
    "sinks": True,
    "experts": ExpertsConfig(count=8, active=2, width=16, bias=True, limit=7.0),
}
SIX = {"experts": ExpertsConfig(count=6, active=2, width=16)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "packing", "changes", "options"),
    [
        ({"data": 2, "expert": 2, "tensor": 2}, "flat", {}, {"remat": "dots"}),
        pytest.param({"context": 2, "expert": 2, "tensor": 2}, "flat", {}, {}, marks=SLOW),
        pytest.param({"expert": 2}, "tree", {}, {"microbatches": 2}, marks=SLOW),
        # Which the axis does not divide, so each device has all; fsdp splits each one's matrix.
        pytest.param({"expert": 4}, "never", SIX, {}, marks=SLOW),
        pytest.param({"fsdp": 4}, "always", SIX, {}, marks=SLOW),
    ],
)
def test_an_update_is_that_of_one_device(sizes, packing, changes, options):
    assert_update_of_one_device(sizes, packing, parts=PARTS | changes, **options)


@pytest.mark.slow
def test_bfloat16_has_the_gradient_of_one_device():
    """XLA for CPUs would end the process on a sum of bfloat16 over devices."""
    sizes = {"data": 2, "expert": 2}
    assert_update_of_one_device(sizes, parts=PARTS | {"dtype": "bfloat16"}, tolerance=0.05)


def test_a_device_has_some_experts_and_their_moments():
    network, params = tiny_model(**PARTS)
    mesh = mesh_of({"data": 2, "expert": 4})
    places = param_shardings(params, mesh, network.sharding_rules)
    updates = update_shardings(params, mesh, network.sharding_rules)

    def parts(*path):
        """The whole, and what a device has of a parameter and of its moments."""
        leaf, place, update = params, places, updates
        for name in ("layers", "0", *path, "kernel"):
            leaf, place, update = leaf[name], place[name], update[name]
        return leaf.shape, place.shard_shape(leaf.shape), update.shard_shape(leaf.shape)

    assert parts("mlp", "experts", "up") == ((8, 32, 16), (2, 32, 16), (1, 32, 16))
    whole, held, updated = parts("attention", "q")
    assert held == whole and 8 * np.prod(updated) == np.prod(whole)


@pytest.mark.slow
def test_experts_stay_where_they_are():
    """A step moves tokens between the devices, and the weights of no expert, nor their gradient."""
    step, state, batch = step_on({"expert": 4}, "flat", parts=PARTS)
    text = step.lower(state, batch).compile().as_text()
    moved = re.findall(r" = \(?\w+\[([\d,]+)\]\S* (all-gather|all-reduce|all-to-all)\(", text)
    assert any(kind == "all-gather" for _, kind in moved)
    # Matrices of all eight, or of the two that a device has, are 32 x 16 or 16 x 32.
    matrices = {f"{n},{of}" for n in (2, 8) for of in ("32,16", "16,32")}
    assert not matrices & {shape for shape, _ in moved}


PROMPTS = [[5, 6, 7], [8], [5, 6, 9, 10], [11, 12]]


@pytest.mark.slow
def test_samplers_draw_what_one_device_draws():
    network, params = tiny_model(**PARTS)
    options = {"max_new_tokens": 6, "stop_ids": range(90), "record_experts": True}
    want = jr.rollout.make_sampler(network, group_size=2, **options)(
        params, jax.random.key(0), PROMPTS
    )
    mesh = mesh_of({"expert": 2, "tensor": 2})
    placed = shard(params, param_shardings(params, mesh, network.sharding_rules))
    sample = jr.rollout.make_sampler(network, group_size=2, mesh=mesh, **options)
    got = sample(placed, jax.random.key(0), PROMPTS)
    engine = make_engine(network, rows=2, width=2, prompt_length=4, chunk=3, mesh=mesh, **options)
    generation = Generation(engine, placed, key=jax.random.key(0))
    for i, prompt in enumerate(PROMPTS):
        generation.submit(Group(id=i, prompt=prompt, requests=(2 * i, 2 * i + 1)))
    done = sorted(generation, key=lambda x: x.id)
    slots = to_rollout(done, max_new_tokens=6, prompt_width=4)
    mask = np.asarray(want.mask)
    for rollout in (got, slots):
        np.testing.assert_array_equal(rollout.mask, mask)
        for name in ("tokens", "experts"):
            a, b = (np.asarray(getattr(x, name)) for x in (rollout, want))
            np.testing.assert_array_equal(a[mask], b[mask])
    # Of no decoded token does a device receive the experts of another.
    text = sample.compiled.lower(*_call(mesh, placed)).compile().as_text()
    gathered = re.findall(r" = \w+\[([\d,]+)\]\S* all-gather\(", text)
    assert gathered and not {x for x in gathered if re.fullmatch(r"8,\d+,\d+", x)}


def _call(mesh, params):
    """The arguments of a compiled sampler."""
    width = max(map(len, PROMPTS))
    tokens = np.array([x + [0] * (width - len(x)) for x in PROMPTS], np.int32)
    mask = np.arange(width) < np.array([[len(x)] for x in PROMPTS])
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    rows = processes.place((tokens, mask, ids), batch_sharding(mesh))
    return params, jax.random.key(0), *rows, np.int32(0)


def model():
    return *tiny_model(**PARTS), ByteTokenizer()


def dense_model():
    return *tiny_model(num_layers=1), ByteTokenizer()


def run_of(folder, size, **changes):
    mesh = MeshConfig(data=1, expert=2, tensor=size // 2) if size > 1 else MeshConfig()
    return tiny_run(folder, **{"model": model, "mesh": mesh, "steps": 2} | changes)


@pytest.mark.slow
def test_a_run_is_that_of_one_device(tmp_path, monkeypatch):
    """Sampled in slots, trained with an adapter, saved, and resumed on one device."""
    every, results = jax.devices(), {}
    changes = {
        "recipe": "grpo",
        "minibatches": 2,
        "router_replay": True,
        "lora": LoRAConfig(rank=2),
        "sampling": SamplingConfig(group_size=2, max_new_tokens=4, slots=4),
        "checkpoint": CheckpointConfig(every=1),
    }
    for size in (1, 4):
        monkeypatch.setattr(jax, "devices", lambda *_, size=size: every[:size])
        results[size] = train(run_of(tmp_path / str(size), size, **changes))
    one, four = (results[size] for size in (1, 4))
    for a, b in zip(one.history, four.history, strict=True):
        for name in ("reward", "loss", "grad_norm", "entropy"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])
    shutil.rmtree(tmp_path / "4" / "checkpoints" / "step_00000002")
    ended = train(run_of(tmp_path / "4", 1, **changes), resume=True)
    for a, b in zip(*(jax.tree.leaves(x.state.params) for x in (ended, one)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_a_plan_has_a_part_of_the_experts(tmp_path):
    def held(size):
        config = run_of(tmp_path, 1, mesh=MeshConfig(data=4 // size, expert=size))
        plan = make_plan(config, load_inputs(config))
        return plan.resident, plan.step["activations"]

    (whole, alone), (part, exchanging) = held(1), held(4)
    _, params = tiny_model(**PARTS)
    experts = params["layers"]["0"]["mlp"]["experts"]
    of_experts = sum(x.nbytes for x in jax.tree.leaves(experts))
    assert whole - part == of_experts * 3 // 4  # the moments are divided in both
    assert exchanging > alone


@for_each(
    ("changes", "message"),
    [
        ({"model": dense_model}, "mesh: expert 4 has no effect: the model has no experts"),
        ({"recipe": "eggroll", "remat": "full"}, "mesh: expert has no effect with 'eggroll'"),
        ({"prompts_per_step": 6}, "6 prompts .* does not divide over 4 devices.*expert"),
    ],
)
def test_what_it_cannot_split_is_refused(tmp_path, changes, message, monkeypatch):
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:4])
    with pytest.raises(ValueError, match=message):
        load_experiment(
            tiny_run(tmp_path, **{"model": model, "mesh": MeshConfig(expert=4)} | changes)
        )
