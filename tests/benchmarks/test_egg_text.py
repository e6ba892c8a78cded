"""The integer language model on text: what is measured, and that it learns from it."""

import json

import jax
import numpy as np
import pytest

from benchmarks import egg_text


def test_entropies():
    data, letters = egg_text.symbols(b"abab" * 64)
    assert letters == b"ab" and data[:4].tolist() == [0, 1, 0, 1]
    assert egg_text.order_0(data) == 1.0
    # What follows is known but for the pairs that the end cuts off.
    assert abs(egg_text.order_1(data)) < 0.01
    assert abs(egg_text.order_0(np.array([0, 0, 0, 2])) - 0.811278) < 1e-6


def test_held_out_text_is_not_trained_on():
    data = np.arange(4000)
    seen, held_out = egg_text.split(data, length=100)
    assert held_out.shape == (4, 100) and held_out[0, 0] == 900
    assert not set(seen) & set(held_out.reshape(-1))
    assert len(seen) + held_out.size == len(data)


@pytest.mark.slow
def test_a_tiny_run(capfd):
    egg_text.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["name"], result["workload"]["steps"]) == ("egg_text", 4)
    ours = result["ours"]
    assert [row["step"] for row in ours["curve"]] == [2, 4]
    assert 0 < ours["order_1"]["train"] < ours["order_0"]["train"] < ours["uniform"]
    assert ours["bits_per_byte"] == ours["curve"][-1]["held_out"]


def test_a_tiny_run_is_not_saved():
    with pytest.raises(SystemExit, match="--tiny would not be the run to save"):
        egg_text.main(["--tiny", "--save"])


@pytest.mark.of_many
@pytest.mark.slow
def test_it_predicts_text_that_it_never_saw(optimized):
    """Words in small letters: bits a letter fall below what its frequency alone gives."""
    text = egg_text.reference_text().decode().lower()[:200_000]
    words = "".join(x if x.isascii() and x.isalpha() else " " for x in text).split()
    data, letters = egg_text.symbols(" ".join(words).encode())
    seen, held_out = egg_text.split(data)
    setting = egg_text.Setting(width=24, members=1024, streams=512, window=12, steps=90, decay=0.06)
    found = {}

    def report(step, params, mean):
        if step in (10, setting.steps):
            found[step] = egg_text.bits(params, held_out)

    params = egg_text.train(seen, len(letters), setting, report)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"int8"}
    order_0 = egg_text.order_0(held_out.reshape(-1))
    assert found[setting.steps] < order_0 - 0.1 < order_0 < found[10]
