"""`jaxrl-llm export`: a run's model as a folder that loads."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from rows import for_each
from test_cli import config_file, one_sentence, ran, refused, run
from tiny_run import CONFIG, model

import jaxrl_llm as jr
from jaxrl_llm.cli import export, options
from jaxrl_llm.models import load_model
from jaxrl_llm.testing import ByteTokenizer
from jaxrl_llm.train import (
    Adapted,
    AsyncConfig,
    Checkpoints,
    LoRAConfig,
    MeshConfig,
    init_lora,
    merge_lora,
)
from jaxrl_llm.train.checkpoint.record import digest_of_files, read_notes, replace_notes

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps, both kept, the first one because it is the best."""
    from jaxrl_llm.cli import main

    folder = tmp_path_factory.mktemp("export")
    changes = (
        "checkpoint=dataclasses.replace(config.checkpoint, every=1, best='reward'),"
        "evaluation=dataclasses.replace(config.evaluation, enabled=True, samples=2),"
        "optimizer=dataclasses.replace(config.optimizer, learning_rate=0.1)"
    )
    path = config_file(folder, changes)
    assert main(["train", path, "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


def params_of(run_dir, step):
    module, params, _ = model()
    checkpoints = Checkpoints(run_dir / "checkpoints", model=module)
    return checkpoints.restore_params(params, step=step)


def best_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    return max(rows, key=lambda row: (row["reward"], row["step"]))["step"]


@pytest.mark.parametrize("step", [None, 1])
def test_the_trained_model_is_what_loads(capsys, trained, tmp_path, step):
    target, words = tmp_path / "out", [] if step is None else ["--step", step]
    out = ran(capsys, "export", trained, target, *words)
    assert out.startswith(f"The model after step {step or 2} is in {target}, as float32.")
    assert "Its ByteTokenizer has no files" in out
    expected = params_of(trained, step or 2)
    _, found = load_model(target)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_best_one(capsys, trained, tmp_path):
    best = best_of(trained)
    code, out, _ = run(capsys, "export", trained, tmp_path / "out", "--best", "--dtype", "bfloat16")
    assert code == 0 and f"after step {best} is in" in out and "as bfloat16" in out
    assert load_model(tmp_path / "out")[0].config.num_layers == 1


def test_only_what_an_export_left_is_removed(capsys, trained, tmp_path):
    left = tmp_path / "out.unfinished"
    left.mkdir()
    (left / "thesis.txt").touch()
    code, _, err = run(capsys, "export", trained, tmp_path / "out")
    assert code == 2 and (left / "thesis.txt").exists()
    one_sentence(err, "out.unfinished'", "is not from an export that was ended")
    (left / ".jaxrl_llm.unfinished").touch()  # as a killed export leaves it
    ran(capsys, "export", trained, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "sample"])
def test_the_best_one_is_evaluated_and_sampled(capsys, trained, command):
    best = best_of(trained)
    assert best == 1  # not the last
    asked = ["1 + 1 =", "--temperature", 0, "--max-new-tokens", 8] if command == "sample" else []
    said = {}
    for words in (("--best",), ("--step", best), ("--step", 3 - best), ()):
        code, said[words], err = run(capsys, command, trained, *asked, "--json", *words)
        assert code == 0, err
    assert said["--best",] == said["--step", best]
    assert said[()] == said["--step", 2] != said["--step", 1]
    code, _, err = run(capsys, command, trained, *asked, "--best", "--step", 1)
    assert code == 2
    one_sentence(err, "--step has no effect with --best")


def test_only_runs_have_checkpoints(capsys, tmp_path):
    path = config_file(tmp_path)
    for words in (("evaluate", path, "--best"), ("sample", "nobody/nothing", "hi", "--step", 1)):
        refused(capsys, [*words], "has no effect on", "which is not a run")


@pytest.mark.slow
def test_an_adapter_is_merged(capsys, tmp_path):
    changes = "lora=__import__('jaxrl_llm').train.LoRAConfig(rank=2)"
    path = config_file(tmp_path, changes)
    assert run(capsys, "train", path, "--run-dir", tmp_path / "run")[0] == 0
    ran(capsys, "export", tmp_path / "run", tmp_path / "out")
    module, base, _ = model()
    lora = LoRAConfig(rank=2)
    like = init_lora(base, lora)
    adapter = Checkpoints(tmp_path / "run" / "checkpoints", model=module).restore_params(like)
    expected = merge_lora(Adapted(base, adapter), lora)
    _, found = load_model(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    kernel = found["layers"]["0"]["mlp"]["up"]["kernel"]
    assert not np.array_equal(kernel, base["layers"]["0"]["mlp"]["up"]["kernel"])


@pytest.mark.slow
def test_an_adapter_of_a_machine_with_another_precision(capsys, tmp_path, monkeypatch):
    """The run chose bfloat16, which this machine would not."""
    module, params, tokenizer = model()
    jr.models.save_safetensors(params, tmp_path / "model", config=module.config)
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda name: tokenizer)
    for dtype in ("bfloat16", "float32"):
        chosen = {"auto": dtype, "bfloat16": "bfloat16"}
        monkeypatch.setattr("jaxrl_llm.train.config.resolve_dtype", chosen.__getitem__)
        if dtype == "bfloat16":
            changes = f"model={str(tmp_path / 'model')!r}, dtype='auto',"
            changes += "evaluation=dataclasses.replace(config.evaluation, enabled=True),"
            path = config_file(
                tmp_path, changes + "lora=__import__('jaxrl_llm').train.LoRAConfig(rank=2)"
            )
            assert run(capsys, "train", path, "--run-dir", tmp_path / "run")[0] == 0
        assert run(capsys, "export", tmp_path / "run", tmp_path / dtype)[0] == 0
        assert run(capsys, "sample", tmp_path / "run", "q")[0] == 0
        assert run(capsys, "evaluate", tmp_path / "run")[0] == 0
    there, here = (load_model(tmp_path / dtype)[1] for dtype in ("bfloat16", "float32"))
    jax.tree.map(np.testing.assert_array_equal, there, here)


def test_what_cannot_be_done_is_one_sentence(capsys, trained, tmp_path):
    new, path = tmp_path / "new", config_file(tmp_path)
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    cases = [
        ([path, new], 2, "is a config file; give the folder of a run"),
        ([trained, tmp_path], 2, "exists already; name a folder that does not"),
        ([trained, link], 2, "exists already; name a folder that does not"),
        ([trained, f"{path}/a/b"], 2, "b' cannot be created: not a directory"),
        ([trained, new, "--best", "--step", 1], 2, "--step has no effect with --best"),
        ([trained, new, "--step", 7], 1, "There is no checkpoint of step 7"),
        ([tmp_path, new], 2, "is not a run of jaxrl-llm train"),
    ]
    for words, code, message in cases:
        found, _, err = run(capsys, "export", *words)
        assert found == code
        one_sentence(err, message)
        assert not new.exists()
    other = tmp_path / "other"
    assert run(capsys, "train", path, "--run-dir", other, "--steps", 1)[0] == 0
    _, _, err = run(capsys, "export", other, new, "--best")
    one_sentence(err, "saved no best checkpoint")


@pytest.mark.slow
def test_an_adapter_is_not_read_on_other_weights(capsys, tmp_path, monkeypatch):
    module, params, tokenizer = model()
    jr.models.save_safetensors(params, tmp_path / "model", config=module.config)
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda name: tokenizer)
    changes = f"model={str(tmp_path / 'model')!r}, "
    path = config_file(tmp_path, changes + "lora=__import__('jaxrl_llm').train.LoRAConfig(rank=2)")
    assert run(capsys, "train", path, "--run-dir", tmp_path / "run")[0] == 0
    for words in ((), ("--dtype", "bfloat16")):
        assert run(capsys, "sample", tmp_path / "run", "q", *words)[0] == 0
    other = jax.tree.map(lambda x: x + 1, params)
    shutil.rmtree(tmp_path / "model")
    jr.models.save_safetensors(other, tmp_path / "model", config=module.config)
    for words in ((), ("--dtype", "bfloat16")):
        code, _, err = run(capsys, "sample", tmp_path / "run", "q", *words)
        assert code == 2
        one_sentence(err, "belongs to an adapter of another model", "the frozen parameters differ")


def test_a_run_of_many_devices_is_read_on_one(capsys, monkeypatch):
    config = dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(data=4, fsdp=4),
        prompts_per_step=16,
        asynchrony=AsyncConfig(max_staleness=1, sampler_devices=1),
        recipe="dapo",
    )
    found = options.on_these_devices(config)
    assert found.mesh == MeshConfig() and found.asynchrony == AsyncConfig()
    told = f"The run had a mesh of 16 devices; one of {jax.device_count()} is used.\n"
    assert capsys.readouterr().err == told
    # A mesh takes all devices: on more of them than it has, it is none either.
    devices = jax.devices()[:1]
    for count, mesh in ((2, MeshConfig(data=2)), (4, MeshConfig()), (2, MeshConfig(data=-1))):
        monkeypatch.setattr(jax, "devices", lambda count=count: devices * count)
        kept = dataclasses.replace(config, mesh=MeshConfig(data=2 if count == 4 else mesh.data))
        assert options.on_these_devices(kept).mesh == mesh
        told = f"The run had a mesh of 2 devices; one of {jax.device_count()} is used.\n"
        assert capsys.readouterr().err == (told if count == 4 else "")


class TwoEnds(ByteTokenizer):
    """As of Llama 3 Instruct, whose template ends a turn with another token than the first EOS."""

    def __init__(self, pad_id):
        self.eos_ids, self.pad_id = (0, 257), pad_id


@for_each(
    ("pad_id", "chat", "expected"),
    [(257, True, None), (0, True, 0), (258, True, 258), (257, False, 257), (0, False, None)],
)
def test_the_padding_of_a_reward_model_is_not_the_token_that_it_reads(pad_id, chat, expected):
    module, *_ = model()
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, chat=chat))
    assert export._pad_id(TwoEnds(pad_id), config, module.config) == expected


def test_what_a_server_computes_is_the_model_and_the_adapter():
    module, params, tokenizer = model()
    plain = options.Policy(module, params, tokenizer)
    assert plain.function() == plain._replace(config=CONFIG).function()
    half = module._replace(config=dataclasses.replace(module.config, dtype="bfloat16"))
    assert plain.function() == plain._replace(model=half).function()
    for changes in ({"rope_theta": 5.0}, {"norm_eps": 1e-3}):
        other = module._replace(config=dataclasses.replace(module.config, **changes))
        assert plain.function() != plain._replace(model=other).function()
    scales = [
        plain._replace(config=dataclasses.replace(CONFIG, lora=LoRAConfig(rank=2, alpha=alpha)))
        for alpha in (2.0, 4.0)
    ]
    assert scales[0].function() != scales[1].function()


def test_the_digest_of_a_checkpoint_is_that_of_its_files(trained):
    step = trained / "checkpoints" / "step_00000002"
    before = digest_of_files(step)
    notes = read_notes(step)
    replace_notes(step, notes | {"greedy": 0.5})
    assert digest_of_files(step) == before != digest_of_files(step.with_name("step_00000001"))
    replace_notes(step, notes)
