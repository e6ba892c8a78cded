"""The benchmark of evolution runs at a tiny size; its figures are those of their formulas."""

import json
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from benchmarks import evolution, harness
from benchmarks.accelerator import Timed


@pytest.mark.of_many
@pytest.mark.slow
def test_runs_at_a_tiny_size(ran, few_rounds, monkeypatch):
    done = {}

    def run(command, **options):
        way = json.loads(command[-1])[0]
        kind = "loaded" if way == "loaded" else "decodes"  # one process for both ways
        if kind not in done:
            done[kind] = subprocess.run(command, **options)
        return done[kind]

    found = SimpleNamespace(run=run, PIPE=subprocess.PIPE)
    monkeypatch.setattr(evolution, "subprocess", found)
    result = ran(evolution, "--rounds", 1)
    assert result["name"] == "evolution" and list(result["ours"]) == list(evolution.PARTS)
    layer, decoding, dense, memory = result["ours"].values()
    # 8 rows: the copies of 2 of them take four times as long for all.
    seconds = {name: found["median"] for name, found in layer["seconds"].items()}
    assert set(layer["share_of_plain"]) == {"premade", "redrawn", "dense_premade", "dense"}
    for name, times in (("premade", 1), ("dense_premade", 4), ("dense", 4)):
        share = seconds["plain"] / (times * seconds[name])
        assert layer["share_of_plain"][name] == pytest.approx(share, rel=0.02)
    assert set(decoding["share_of_plain"]) == {"premade", "redrawn"}
    seconds = {name: found["median"] for name, found in decoding["seconds"].items()}
    assert decoding["tokens_per_s"]["redrawn"]["median"] == pytest.approx(
        4 * 3 / seconds["redrawn"], rel=1e-2
    )
    share = seconds["update"] / seconds["redrawn"]
    assert decoding["update_of_evaluation"] == pytest.approx(share, rel=0.02)
    # Two of four members.
    seconds = {name: found["median"] for name, found in dense["seconds"].items()}
    share = seconds["plain"] / (2 * seconds["dense"])
    assert dense["share_of_plain"] == pytest.approx(share, rel=0.02)
    assert memory["peak_memory_bytes"]["loaded"] < memory["peak_memory_bytes"]["population"]
    assert memory["times_plain"] > 0.5


def test_ways_of_a_layer_are_those_of_its_members():
    size = {"width": 6, "rows": 4, "dense_rows": 2, "calls": 1}
    runs, times = evolution.layer_runs(size)
    assert times == {"dense_premade": 2.0, "dense": 2.0}
    ((plain,), (premade,), (redrawn,)) = (runs[name]() for name in ("plain", "premade", "redrawn"))
    # A pair moves the plain output by as much in both directions.
    w = jax.random.normal(jax.random.key(1), (6, 6))
    x = jax.random.normal(jax.random.key(2), (4, 1, 6))
    np.testing.assert_allclose(plain, x @ w, rtol=1e-5)
    made = jr.evolution.lowrank_noise(jax.random.key(0), 0, jnp.arange(4), (6, 6))
    moved = w + evolution.SIGMA * made.sign[:, None, None] * made.a @ jnp.swapaxes(made.b, 1, 2)
    np.testing.assert_allclose(premade, x @ moved, rtol=1e-4, atol=1e-5)
    assert jnp.abs(premade - redrawn).max() > 1e-4  # of another epoch
    ((copies,), copy) = (runs[name]() for name in ("dense_premade", "dense"))
    assert copies.shape == copy.shape == (2, 1, 6)
    assert 1e-4 < jnp.abs(copy - plain[:2]).max() < 0.1


def test_shares_count_what_was_left_out():
    found = {
        "plain": Timed(9.0, [1.0, 2.0, 3.0]),
        "half": Timed(9.0, [4.0, 4.0, 4.0]),
        "part": Timed(9.0, [1.0, 1.0, 1.0]),
    }
    assert evolution.shares(found, "plain", {"part": 8.0}) == {"half": 0.5, "part": 0.25}


def test_bytes_of_a_model_and_its_cache():
    model, _ = jr.testing.tiny_model()
    size = {"members": 3, "prompt_tokens": 5, "new_tokens": 2}
    found = evolution.model_and_cache(model, size)
    # Two layers, keys and values of two heads of eight numbers of four bytes.
    assert found["cache"] == 3 * 7 * 2 * 2 * 2 * 8 * 4
    assert found["model"] == 4 * jr.models.count_params(model)


def test_the_model_is_of_smollm2s_size():
    assert jr.models.count_params(evolution.make_model(tiny=False)) == 134_515_008


def test_a_part_is_saved_beside_the_others(tmp_path):
    def result(**ours):
        return {"name": "evolution", "device": "D", "ours": ours}

    assert evolution.with_saved(result(memory=1), tmp_path) == result(memory=1)
    harness.save(result(layer=1, memory=2), tmp_path)
    both = evolution.with_saved(result(decoding=3, memory=4), tmp_path)
    assert both == result(layer=1, decoding=3, memory=4)
    assert list(both["ours"]) == ["layer", "decoding", "memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--gguf", "x"], "there are no peers"), (["--part", "train"], "invalid choice: 'train'")],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        evolution.main(["--tiny", *arguments])
    assert message in capsys.readouterr().err
