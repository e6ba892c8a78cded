"""A run that starts from the policy that another one left."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import refuses
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import CONFIG, tiny_run, wide_model

import jaxrl_llm as jr
from jaxrl_llm.cli import main
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.train import CheckpointError, Checkpoints, MeshConfig, train
from jaxrl_llm.train.experiment.run_models import load_model, load_reference
from jaxrl_llm.train.experiment.setup import load_experiment


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of two steps with both checkpoints."""
    folder = tmp_path_factory.mktemp("first")
    every = dataclasses.replace(CONFIG.checkpoint, every=1)
    train(tiny_run(folder, steps=2, checkpoint=every))
    return folder


def left_by(folder, *, step=None):
    model, params, _ = CONFIG.model()
    return Checkpoints(folder / "checkpoints", model=model).restore_policy(params, step=step)


def named(folder, monkeypatch):
    """The tiny model with other weights, as one that has a name."""
    model, params, tokenizer = CONFIG.model()
    zeros = jax.tree.map(jnp.zeros_like, params)
    jr.models.save_safetensors(zeros, folder / "model", config=model.config)
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda name: tokenizer)
    return str(folder / "model")


@pytest.mark.parametrize(
    ("mesh", "dtype"), [(MeshConfig(), None), (MeshConfig(data=2, fsdp=2, tensor=2), "bfloat16")]
)
def test_the_policy_is_the_one_that_the_run_left(first, tmp_path, monkeypatch, mesh, dtype):
    """Of a function or a name, whose weights are not those, on any mesh and in any precision."""
    changes = {} if dtype is None else {"model": named(tmp_path, monkeypatch), "dtype": dtype}
    config = tiny_run(tmp_path / "run", init_from=str(first), mesh=mesh, **changes)
    experiment, params = load_experiment(config)
    assert_same(params, left_by(first))
    assert experiment.model.config.dtype == (dtype or "float32")
    if experiment.mesh is None:  # programs that were compiled for new arrays take them
        assert not any(x.committed for x in jax.tree.leaves(params))
    else:
        assert len(params["layers"]["0"]["mlp"]["up"]["kernel"].sharding.device_set) == 8


def test_one_checkpoint_of_a_run(first, tmp_path):
    earlier = str(first / "checkpoints" / "step_00000001")
    _, params = load_experiment(tiny_run(tmp_path / "run", init_from=earlier))
    assert_same(params, left_by(first, step=1))


@pytest.mark.slow
def test_an_adapter_on_the_weights_that_a_run_left(first, tmp_path, monkeypatch):
    config = tiny_run(
        tmp_path / "run",
        model=named(tmp_path, monkeypatch),
        init_from=str(first),
        lora=LoRAConfig(rank=1),
        dtype="bfloat16",
    )
    _, params = load_experiment(config)
    left = left_by(first)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, left)
    assert_same(params.base, expected)


@pytest.mark.slow
def test_the_reference_is_the_policy_that_the_run_starts_from(first, tmp_path):
    train(tiny_run(tmp_path / "run", init_from=str(first), recipe="grpo", steps=1))
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["ref_kl"] == pytest.approx(0.0, abs=1e-6) and row["update_norm"] > 0


@for_each("by_name", [True, False])
def test_a_reference_that_computes_another_function_is_refused(tmp_path, monkeypatch, by_name):
    """The policy's model scores its weights, so equal shapes are not enough."""
    model, params, tokenizer = CONFIG.model()

    def load(**changes):
        other = jr.models.make_model(dataclasses.replace(model.config, **changes))
        jr.models.save_safetensors(params, tmp_path / "other", config=other.config)
        reference = str(tmp_path / "other") if by_name else lambda: (other, params, tokenizer)
        config = tiny_run(tmp_path / "run", recipe="grpo", reference=reference)
        return load_reference(config, model, params, None)

    scaling = jr.models.LinearScaling(factor=8.0)
    with pytest.raises(
        ValueError,
        match="config: policy and reference .* rope_theta is 10000.0 and 5.0, rope_scaling is None "
        r"and LinearScaling\(factor=8.0\); ",
    ):
        load(rope_theta=5.0, rope_scaling=scaling)
    assert_same(load(max_length=64), params)


CONFIG_FILE = """
import dataclasses, sys
sys.path.insert(0, {folder!r})
from tiny_run import CONFIG
from jaxrl_llm.train import EvaluationConfig
config = dataclasses.replace(CONFIG, steps=1, evaluation=EvaluationConfig(samples=1))
"""


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "brorl"])
def test_the_first_run_may_go_unless_it_is_needed(first, tmp_path, capsys, recipe):
    """All commands need only the checkpoint of the run, but for a resume with a reference."""
    start = shutil.copytree(first, tmp_path / "start")
    (tmp_path / "config.py").write_text(CONFIG_FILE.format(folder=str(Path(__file__).parent)))
    run, pairs = tmp_path / "run", tmp_path / "pairs.jsonl"
    words = [str(tmp_path / "config.py"), "--init-from", str(start), "--run-dir", str(run)]
    assert main(["train", *words, "--recipe", recipe]) == 0
    shutil.rmtree(start)
    assert main(["evaluate", str(run)]) == 0
    assert main(["sample", str(run), "q"]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["pairs", str(run), "--out", str(pairs), "--limit", "1", "--samples", "2"]) == 2
    assert "no prompt has both a right and a wrong answer" in capsys.readouterr().err
    code = main(["train", *words, "--recipe", recipe, "--steps", "2", "--resume"])
    assert code == (2 if recipe == "grpo" else 0)
    if recipe == "grpo":
        told = f"config: init_from {str(start)!r}: There is no checkpoint in '{start}/checkpoints'."
        assert capsys.readouterr().err.splitlines()[-1] == f"jaxrl-llm train: error: {told}"


def test_what_a_run_cannot_start_from(first, tmp_path):
    def load(start, **changes):
        return load_model(tiny_run(tmp_path / "run", init_from=start, **changes), None)

    missing = "init_from '.*nowhere': There is no checkpoint in '.*'"
    refuses(missing, load, str(tmp_path / "nowhere"))
    seventh = str(first / "checkpoints" / "step_00000007")
    refuses("no checkpoint of step 7 in .*; there are 1, 2", load, seventh)
    other = "init_from .* belongs to another model or adapter: .* export the model and name it"
    refuses(other, load, str(first), model=wide_model)
    broken = shutil.copytree(first, tmp_path / "broken")
    for file in broken.rglob("record.json"):
        file.write_text("{}")
    with pytest.warns(UserWarning):
        refuses("config: init_from '.*b", load, str(broken), error=CheckpointError)
    refuses("config: init_from must be a string; got 3", load, 3, error=TypeError)
    refuses("config: init_from must name a folder; got ' '", load, " ")
    own = str(tmp_path / "run/checkpoints/step_00000001")
    refuses("init_from '.*' must be another run than run_dir", load, own)


def test_weights_in_numpy(first, tmp_path):
    def on_the_host():
        model, params, tokenizer = CONFIG.model()
        return model, jax.device_get(params), tokenizer

    config = tiny_run(tmp_path / "run", model=on_the_host, init_from=str(first))
    assert_same(load_model(config, None)[1], left_by(first))


@pytest.mark.slow
def test_an_exported_adapter_names_no_model_that_it_was_not_trained_on(first, tmp_path, capsys):
    config = CONFIG_FILE.format(folder=str(Path(__file__).parent))
    config += "from jaxrl_llm.train import LoRAConfig\n"
    config += "config = dataclasses.replace(config, lora=LoRAConfig(rank=1))\n"
    (tmp_path / "config.py").write_text(config)
    words = [str(tmp_path / "config.py"), "--init-from", str(first)]
    assert main(["train", *words, "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter"]) == 0
    stored = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert not stored["base_model_name_or_path"]


def test_another_model_of_the_run_starts_from_its_own_weights(first, tmp_path):
    config = tiny_run(tmp_path / "run", init_from=str(first))
    assert config.with_model(wide_model).init_from is None
