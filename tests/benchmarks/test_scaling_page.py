"""docs/scaling.md: its tables are those of the scripts, and the scripts count right."""

import json

import numpy as np
import pytest

from benchmarks import asynchrony, scaling
from benchmarks.scaling import DEVICES, Device, Layout, Shape, Work
from jaxrl_llm.train.experiment.rollouts import may_start

RESULT = json.loads(scaling.RESULT.read_text())
# As the models' cards have them.
PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.3-70B": 70_553_706_496,
}


def test_saved_models_have_the_sizes_of_their_cards_and_saved_layouts_fit():
    assert list(RESULT["models"]) == list(scaling.MODELS) == list(PARAMETERS)
    for name, found in RESULT["models"].items():
        assert found["shape"]["parameters"] == PARAMETERS[name]
        for kind, layout in found["layouts"].items():
            assert layout is None or layout["most_bytes"] <= 0.95 * DEVICES[kind].memory


@pytest.mark.slow
def test_the_saved_shape_and_bytes_are_those_of_the_library():
    model, found = scaling.model_of("SmolLM2-135M"), RESULT["models"]["SmolLM2-135M"]
    assert scaling.shape_of(model)._asdict() == found["shape"]
    saved = found["layouts"]["v5e"]
    layout = Layout(*(saved[name] for name in Layout._fields))
    work = Work(**RESULT["workload"])
    assert scaling.planned_bytes(model, layout, work) == saved["most_bytes"]


def test_a_step_by_hand():
    shape = Shape(
        parameters=1000, matrices=700, projection=100, attention=6, layers=2, width=5, cache=8
    )
    work = Work(prompts=2, group_size=3, prompt_length=4, length=5)
    # Tokens 2 * 4 + 30; pairs 2 * 10 of prompts and 6 * (5 * 4 + 15) of responses.
    forward = 2 * 700 * 38 + 2 * 100 * 30 + 4 * 6 * (20 + 210)
    assert scaling.forward_flops(shape, work) == pytest.approx(forward)
    cost = scaling.step_cost(shape, work, Layout(fsdp=2, tensor=2, microbatches=1))
    assert cost.train_flops == pytest.approx(forward) and cost.sample_flops == forward / 4
    assert cost.decode_bytes == 5 * 2 * 800 / 2 + 2 * 8 * (2 * 4 * 5 + 6 * 15) / 4
    assert cost.decode_gathered == 5 * 2 * 800 / 4  # half of each device's half
    assert cost.train_gathered == 8 * 1000 / 4
    assert cost.train_reduced == 2 * 0.5 * 6 * 2 * 2 * 5 * 38 / 2
    alone = scaling.step_cost(shape, work, Layout(1, 1, 4))
    assert alone.decode_gathered == alone.train_gathered == alone.train_reduced == 0
    assert scaling.between_slices(shape, Layout(2, 2, 1)) == 4 * 1000 / 4

    device = Device(1e3, 1.0, 10.0, 100.0, 1.0, 4, 2, "")
    near = scaling.seconds(cost, device, Layout(2, 2, 1))
    assert near.train == cost.train_flops / 1e3 and near.sample == cost.decode_bytes / 10
    assert near.sample_links == cost.decode_gathered / 100
    assert near.least == max(near.train, near.train_links) + near.sample


def test_weights_of_another_node_come_into_a_node_once():
    cost = scaling.Cost(0.0, 0.0, 0.0, 700.0, 0.0, 0.0)  # of 800 bytes, 7 of 8 devices have 700
    device = Device(1.0, 1.0, 1.0, 100.0, 1.0, 4, 1, "")
    # 400 bytes of the other node over the network of 4 devices, 700 over the links of each.
    assert scaling.seconds(cost, device, Layout(8, 1, 1)).sample_links == pytest.approx(100.0)
    fast = device._replace(network=1000.0)
    assert scaling.seconds(cost, fast, Layout(8, 1, 1)).sample_links == 7.0


def test_batches_begin_when_the_loop_lets_them():
    sample, train = np.array([2.0, 2.0, 2.0]), np.array([3.0, 3.0, 3.0])
    turns = asynchrony.simulate(sample, train, max_staleness=0)
    assert turns.trained.tolist() == [5, 10, 15] and turns.version.tolist() == [0, 1, 2]
    ahead = asynchrony.simulate(sample, train, max_staleness=1)
    # Batch 2 waits for the first update, at 5, though the sampler is free at 4.
    assert ahead.begin.tolist() == [0, 2, 5] and ahead.trained.tolist() == [5, 8, 11]
    assert ahead.version.tolist() == [0, 0, 1]

    drawn = asynchrony.durations(1.0, 0.8, 60, seed=3)
    for limit in (0, 1, 3):
        found = asynchrony.simulate(drawn, np.ones(60), max_staleness=limit)
        for n in range(60):
            assert may_start(n, int(found.version[n]), max_staleness=limit)
            # It began as early as it could: once the sampler was free, or a version came.
            free = found.sampled[n - 1] if n else 0.0
            came = found.trained[n - limit - 1] if n > limit else 0.0
            assert found.begin[n] == max(free, came)


def test_equal_batches_need_one_update_of_staleness_and_the_saved_table_is_simulated():
    work = json.loads(asynchrony.RESULT.read_text())
    equal = [row for row in work["rows"] if row["spread"] == 0]
    assert [round(row["trainer"], 2) for row in equal[:3]] == [0.5, 1.0, 1.0]
    options = work["workload"] | {"spreads": [0.5]}
    saved = [row for row in work["rows"] if row["spread"] == 0.5]
    for again, row in zip(asynchrony.sweep(**options), saved, strict=True):
        assert again == pytest.approx(row, abs=2e-4)


def test_devices_are_split_so_that_both_take_as_long():
    assert asynchrony.best_split(64, sample=60, train=60, fixed=0.0) == (32, 120.0)
    count, took = asynchrony.best_split(64, sample=60, train=20, fixed=0.0)
    assert (count, took) == (48, 80.0)
    # What more devices do not shorten needs fewer of them.
    assert asynchrony.best_split(64, sample=60, train=60, fixed=0.9)[0] < 32


def test_durations_have_their_mean_and_spread():
    drawn = asynchrony.durations(60.0, 0.5, 100_000, seed=1)
    assert drawn.mean() == pytest.approx(60, rel=0.01)
    assert drawn.std() == pytest.approx(30, rel=0.03)
