"""The train step for accelerators runs at a tiny size; its figures are those of their formulas."""

import json
from types import SimpleNamespace

import jax
import pytest

import jaxrl_llm as jr
from benchmarks import accelerator, gpu, gpu_train
from jaxrl_llm.train.profile import Meter, model_size, train_flops


@pytest.mark.slow
def test_runs_at_a_tiny_size(capfd):
    gpu.main(["--tiny", "--part", "train", "--microbatches", "2", "--peak-flops", "1e12"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["name"], result["ours"], result["peers"]) == ("gpu", {}, {})
    train = result["train"]
    work, ours = train["workload"], train["ours"]
    assert list(ours) == ["full", "dots"]
    assert (work["dtype"], work["master_dtype"]) == ("bfloat16", "float32")
    assert (work["tokens"], work["microbatches"], work["runs"]) == (2 * (16 + 2 * 8), 2, 5)
    assert train["peak_flops_per_s"]["vendor"] == 1e12
    size = model_size(accelerator.make_model(tiny=True))
    flops = train_flops([16] * 2, [[8] * 2] * 2, size=size)
    for case in ours.values():
        seconds = case["seconds"]["median"]
        assert case["tokens_per_s"]["median"] == pytest.approx(work["tokens"] / seconds, rel=1e-3)
        assert case["flops_per_s"]["median"] == pytest.approx(flops / seconds, rel=1e-3)
        for name, peak in train["peak_flops_per_s"].items():
            share = flops / seconds / peak
            assert case["mfu"][name]["median"] == pytest.approx(share, rel=0.02)
        parts = case["parts_seconds"]
        assert list(parts) == ["forward", "backward", "vocabulary", "optimizer", "rest"]
        assert sum(parts.values()) == pytest.approx(seconds, rel=0.05, abs=1e-4)
        assert case["peak_memory_bytes"] > 0
        assert ("compile_seconds" in case) == (not jax.config.jax_compilation_cache_dir)
        # At least parameters and the two means of the optimizer, float32.
        weights = jr.models.count_params(accelerator.make_model(tiny=True))
        assert case["program_bytes"] > 3 * 4 * weights


def test_parts_of_a_step():
    medians = {"forward": 0.1, "vocabulary": 0.05, "optimizer": 0.2, "gradient dots": 0.4}
    found = {name: accelerator.Timed(9.0, [x, x, x]) for name, x in medians.items()}
    parts = gpu_train.parts_of(1.5, found, remat="dots", microbatches=2)
    # Two microbatches, one update.
    expected = {"forward": 0.2, "backward": 0.6, "vocabulary": 0.1, "optimizer": 0.2, "rest": 0.4}
    assert parts == pytest.approx(expected)


def test_speed_of_a_step():
    model = accelerator.make_model(tiny=True)
    size = {"prompts": 2, "rollouts": 3, "prompt_tokens": 4, "response_tokens": 5}
    batch = gpu_train.batch_of(size, model.config.vocab_size)
    flops = train_flops([4] * 2, [[5] * 3] * 2, size=model_size(model))
    peaks = {"measured": flops, "vendor": 2 * flops}
    meter = Meter(model, peak_flops=flops)
    found = gpu_train.speed(meter, batch, [2.0, 1.0, 4.0], peaks)
    assert found["seconds"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert found["tokens_per_s"] == {"median": 19.0, "min": 9.5, "max": 38.0}
    assert found["mfu"]["measured"] == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert found["mfu"]["vendor"] == {"median": 0.25, "min": 0.125, "max": 0.5}


def test_a_step_is_of_16k_tokens():
    size = gpu_train.SIZE
    responses = size["rollouts"] * size["response_tokens"]
    assert size["prompts"] * (size["prompt_tokens"] + responses) == 2**14
    # A layer of the 28; the last product, like the embedding, is one matrix.
    config = jr.models.ModelConfig(**accelerator.MODEL | {"num_layers": 1}, dtype="bfloat16")
    found = model_size(jr.models.make_model(config))
    assert found.projection == 151936 * 2048 and found.attention == 16 * 128
    assert found.matrices == 2048 * (2 * 16 + 2 * 8) * 128 + 3 * 2048 * 6144


def test_seconds_of_a_cache_are_none_of_compilation(monkeypatch):
    found = []
    for folder in (None, "programs"):
        config = SimpleNamespace(jax_compilation_cache_dir=folder)
        monkeypatch.setattr(accelerator, "jax", SimpleNamespace(config=config))
        found.append(accelerator.compile_time(1.234))
    assert found == [{"compile_seconds": 1.23}, {}]


def test_random_parameters_are_those_of_the_model_in_form():
    model = accelerator.make_model(tiny=True)
    params = accelerator.random_params(model, "float32")
    expected = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for leaf, shape in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, "float32")
        if leaf.ndim > 1:
            assert float(leaf.std()) == pytest.approx(0.02, rel=0.3)
        else:
            assert (leaf == 1).all()
    mlp = params["layers"]["0"]["mlp"]
    assert (mlp["gate"]["kernel"] != mlp["up"]["kernel"]).any()  # each has a key of its own
