"""`jaxrl-llm train --plan`: what a run would take, and nothing else."""

import json

import pytest
from test_cli import config_file, one_sentence, ran, refused, run


def test_a_plan_does_nothing_else(capsys, tmp_path):
    path = config_file(tmp_path)
    out = ran(capsys, "train", path, "--plan", "--run-dir", tmp_path / "run")
    assert out.rstrip().endswith("It fits.") and "while the policy samples" in out
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_the_model_cannot_train_has_no_plan(capsys, tmp_path):
    for recipe, needs in {"wd1": "a denoising model", "flow_grpo": "a flow model"}.items():
        code, out, err = run(capsys, "train", config_file(tmp_path), "--plan", "--recipe", recipe)
        assert code == 2 and "It fits." not in out
        one_sentence(err, f"recipe '{recipe}'", f"needs {needs}")


def test_what_does_not_fit_is_refused(capsys, tmp_path):
    path, words = config_file(tmp_path), ["--plan", "--plan-memory", "1e-4"]
    code, out, err = run(capsys, "train", path, *words)
    assert code == 2 and "--microbatches 2" in out and "--lora.rank 16" in out
    one_sentence(err, "does not fit the memory of its devices")
    code, out, _ = run(capsys, "train", path, *words[:2], "1", "--lora.rank", "4")
    assert code == 0 and "It fits." in out
    code, out, err = run(capsys, "train", path, *words[:2], "1", "--mesh.fsdp", "-1")
    assert code == 2 and "It fits." not in out
    one_sentence(err, "set fsdp to a size instead of -1 (--mesh.fsdp)")


def test_options_without_effect(capsys, tmp_path):
    path = config_file(tmp_path)
    refused(capsys, f"train {path} --plan-memory 16", "--plan-memory has no effect without --plan")
    refused(capsys, f"train {path} --plan --plan-memory 0", "--plan-memory must be above 0")
    for option in ("--resume", "--allow-changed", "--overwrite"):
        refused(capsys, f"train {path} --plan {option}", f"{option} has no effect with --plan")
    code, _, err = run(capsys, "train", path, "--plan", "--distributed.detect")
    assert code == 2
    one_sentence(err, "the options of --distributed have no effect with --plan")
    code, _, err = run(capsys, "train", path, "--lora.alpha", "8")
    assert code == 2
    assert "lora: alpha has no effect without a rank" in err and "Traceback" not in err
    refused(capsys, f"train {path} --lora.rank 99 --run-dir {tmp_path / 'run'}", "rank 99 is above")


@pytest.mark.slow
def test_an_adapter_from_the_command_line(capsys, tmp_path):
    path, folder = config_file(tmp_path), tmp_path / "run"
    words = ["--lora.rank", "4", "--lora.targets", "q$", "v$", "--run-dir", folder]
    out = ran(capsys, "train", path, *words)
    assert "of an adapter" in out
    code, out, err = run(capsys, "export", folder, tmp_path / "out", "--adapter")
    assert code == 0 and out.startswith("The adapter after step 2 is in"), err
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    kinds = json.loads((tmp_path / "out" / names[0]).read_text())["target_modules"]
    assert kinds == ["q_proj", "v_proj"]
    code, _, err = run(capsys, "export", folder, tmp_path / "o", "--adapter", "--dtype", "bfloat16")
    assert code == 2
    one_sentence(err, "--dtype has no effect with --adapter")
    ran(capsys, "sample", folder, "hello", "--max-new-tokens", "2")
