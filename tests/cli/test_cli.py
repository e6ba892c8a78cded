"""The command line: help, wrong usage in one sentence, and whole runs."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm import cli, rewards
from jaxrl_llm.cli import COMMANDS, evaluate, main, train, trust
from jaxrl_llm.cli.options import load_config, load_target, parse_config, use_compilation_cache
from jaxrl_llm.cli.rewards import find_reward
from jaxrl_llm.core.runtime.locks import FolderLock
from jaxrl_llm.data.questions import encode_prompts
from jaxrl_llm.rewards import VerifierPool
from jaxrl_llm.rewards.scoring import name_of
from jaxrl_llm.train import DataConfig, TrainConfig, accuracy
from jaxrl_llm.train.evaluation.at_k import at_k

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.usefixtures("shared_programs")
CONFIG = """
from tiny_run import CONFIG as config, low_bytes
import dataclasses
import os
import signal
import sys
import threading
import numpy as np
import jaxrl_llm as jr
from jaxrl_llm.rewards import VerifierPool

def bad(prompt, completion, metadata):
    return None

def leaves(prompt, completion, metadata):
    sys.exit(0)

def in_numpy(rewards):
    return np.asarray(rewards)

def interrupts(prompt, completion, metadata):
    signal.raise_signal(signal.SIGINT)
    return 1.0

def hangs(prompt, completion, metadata):
    threading.Event().wait(30)

config = dataclasses.replace(config, steps=2, CHANGES)
"""
# A worker that imports a config needs its reward alone; all the rest would make it import JAX.
LIGHT = """
import os

def FUNCTION

if os.getpid() == PROCESS:
    import dataclasses
    from tiny_run import CONFIG as config
    from jaxrl_llm.rewards import VerifierPool

    config = dataclasses.replace(config, CHANGES)
"""


def light_config(path, function, changes):
    text = LIGHT.replace("FUNCTION", function).replace("CHANGES", changes)
    path.write_text(text.replace("PROCESS", str(os.getpid())))
    return path


def config_file(folder, changes="", name="my_run.py"):
    path = folder / name
    path.write_text(CONFIG.replace("CHANGES", changes))
    return str(path)


def own_folder(tmp_path):
    """A folder for one row of a table."""
    folder = tmp_path / f"row{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return folder


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def ran(capsys, *arguments):
    """What a command writes that must not fail."""
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys, words, *parts, code=2):
    """A command, as a text or a list of words, ends with an error that has these parts."""
    found, _, err = run(capsys, *(words.split() if isinstance(words, str) else words))
    assert found == code, err
    one_sentence(err, *parts)


def one_sentence(err, *parts):
    """The last line is the error, and there is no traceback."""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if ": error: " in line]
    assert len(lines) == 1 and err.rstrip().endswith(lines[0]), err
    for part in parts:
        assert part in lines[0], lines[0]


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"  {name} " in out for name in COMMANDS)
    assert run(capsys)[0] == 2
    for name in COMMANDS:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0 and out.startswith(f"usage: jaxrl-llm {name}")


LIGHTLY = """
import runpy, sys

HEAVY = {"datasets", "flax", "math_verify", "matplotlib", "orbax", "reasoning_gym", "sympy"}

def check():
    found = (HEAVY | {"tokenizers", "tyro"}) & set(sys.modules)
    assert not found, found

import jaxrl_llm.rewards
check()
import jaxrl_llm.data as data
data.take, data.from_file
check()
assert set(data.__all__) <= set(dir(data))
from jaxrl_llm.cli import main
main(["--help"])
check()
sys.argv = ["jaxrl-llm", "--version"]
runpy.run_module("jaxrl_llm", run_name="__main__")
"""


def test_nothing_heavy_is_imported_until_it_is_used():
    """By the rewards, the data and the help of the command; and the module is the command."""
    words = [sys.executable, "-c", LIGHTLY]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\njaxrl-llm \d+\.\d+\.\d+\n$", done.stdout)


@for_each(("command", "keeps"), [("train", True), ("sample", False)])
def test_what_a_command_sets_for_its_own_process(command, keeps, monkeypatch, capsys):
    """Functions copied late, and if it trains the memory of its steps is kept."""
    calls = []
    for name in ("keep_freed_memory", "copy_functions_late"):
        monkeypatch.setattr(cli, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(cli, "end_within", lambda seconds, code: None)
    monkeypatch.setattr(sys, "argv", ["jaxrl-llm", command, "--nothing"])
    expected = ["copy_functions_late", *["keep_freed_memory"] * keeps]
    assert cli.main() == 2 and sorted(calls) == expected
    assert cli.main([command, "--nothing"]) == 2 and sorted(calls) == expected  # of the caller


@for_each(
    ("arguments", "part"),
    [
        (["trian"], "no command 'trian'. Did you mean 'train'?"),
        (["train"], "A config file, or the name of one, is needed"),
        (["train", "quickstrat"], "no config of that name comes with the package"),
        (["train", "nowhere.py"], "no config file 'nowhere.py'"),
        (["evaluate", "nowhere"], "no config file 'nowhere'"),
        (["evaluate", "."], "not a run of jaxrl-llm train"),
        (["evaluate", ""], "must not be empty"),
        (["evaluate", ".", "--seed", "-1"], "--seed must not be negative; got -1"),
        (["evaluate", ".", "--k", "0"], "--k must be above 0; got 0"),
        (["evaluate", ".", "--k", "2", "2"], "--k names one twice: 2 2"),
        (["evaluate", ".", "--success", "0.5"], "--success has no effect without --k"),
        (["export", "", "new"], "must not be empty"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, arguments, part):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and part in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_mistyped_run_is_not_a_model_of_the_hub(capsys, tmp_path, monkeypatch):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "runs/frist", "hi"]) == 2
    assert "There is no run 'runs/frist'." in capsys.readouterr().err
    for words in (
        ("evaluate", "runs/frist"),
        ("export", "runs/frist", "new"),
        ("merge", "runs/frist@4", "runs/first", "--out", "new"),
    ):
        assert main(list(words)) == 2
        assert "There is no run 'runs/frist" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "runs")  # where a name alone may be that of a model
    assert main(["sample", "nobody-made-this", "hi"]) == 2
    assert "There is no run" not in capsys.readouterr().err


def test_unknown_options_come_with_a_suggestion(capsys, tmp_path):
    path = config_file(tmp_path)
    code, _, err = run(capsys, "train", path, "--optimizer.lerning-rate", "1e-3")
    assert code == 2 and "--optimizer.learning-rate" in err
    assert run(capsys, "methods", "--jsno")[0] == 2
    code, _, err = run(capsys, "train", path, "--recipe", "gspa")
    assert code == 2 and "no preset 'gspa'" in err
    code, _, err = run(capsys, "train", path, "--steps", "many")
    assert code == 2 and "--steps" in err


@for_each(
    ("options", "part"),
    [
        (["--sampling.group-size", "1"], "group_size must be at least 2; got 1"),
        (["--microbatches", "3"], "4 prompts do not split into 3 microbatches"),
        (["--mesh.data", "8"], "does not divide over 8 devices"),
        (["--evaluation.every", "2"], "no effect if not enabled"),
        (["--seed", "-1"], "seed must not be negative; got -1"),
        (["--run-dir", ""], "run_dir must name a folder"),
        (["--data.system", "hi"], "system has no effect without the chat template"),
    ],
)
def test_options_that_do_not_fit_are_exit_code_2(capsys, tmp_path, options, part):
    run_dir = tmp_path / "run"
    code, _, err = run(capsys, "train", config_file(tmp_path), "--run-dir", run_dir, *options)
    assert code == 2 and part in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and not run_dir.exists()


@for_each(
    ("text", "part"),
    [
        ("config = 3", "it defines it as 3"),
        ("x = 1", "it does not define `config`"),
        ("import json\njson.loads('{')", "fails: "),
        ("1 / 0", "fails: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(0)", "fails: SystemExit: 0"),
        ("raise ValueError('\x1b[2J\x9b')", "fails: \\x1b[2J\\x9b"),
    ],
)
def test_config_files_without_a_config(capsys, tmp_path, text, part):
    path = tmp_path / "bad.py"
    path.write_text(text)
    refused(capsys, f"train {path}", part, "bad.py")


@for_each(
    ("changes", "options", "code", "parts"),
    [
        ("reward=bad", [], 1, ["gave None", "prompt 0 (id 'q"]),
        ("reward=hangs, reward_deadline=0.2", [], 1, ["gave nothing", "within 0.2 s"]),
        ("", ["--sampling.max-new-tokens", "254"], 2, ["Prompt 'q", "room for 2"]),
        ("", ["--sampling.max-new-tokens", "256"], 2, ["leaves no room for a prompt"]),
        ("", ["--run-dir", "my_run.py/run"], 2, ["The run folder", "cannot be written"]),
        ("", ["--run-dir", "x" * 300], 2, ["The run folder", "File name too long"]),
        ("", ["--run-dir", "."], 2, ["has files that do not belong to a run", "'my_run.py'"]),
        ("", ["--data.prompts", "empty.jsonl"], 2, ["empty.jsonl is empty"]),
        ("", ["--data.prompts", "nowhere.jsonl"], 2, ["nowhere.jsonl"]),
        ("", ["--data.prompts", "gym:chain_smu"], 2, ["no task 'chain_smu'", "chain_sum"]),
        ("", ["--mesh.data", "2"], 2, ["needs 2 devices, but there are 8"]),
        ("", ["--model", "nowhere.gguf"], 2, ["nowhere.gguf"]),
        ("", ["--model", "./nowhere"], 2, ["nowhere"]),
        ("", ["--lora.rank", "99"], 2, ["rank 99 is above"]),
        ("model=sys.exit", [], 2, ["the config ends the program"]),
        ("reward=leaves", [], 1, ["raised SystemExit on prompt 0"]),
        (
            "recipe=jr.recipes.dr_grpo(length=4).replace(advantage=jr.stateless(in_numpy))",
            [],
            1,
            ["error: in_numpy (line ", "my_run.py) reads the values of an array", "use jax.numpy"],
        ),
    ],
)
def test_what_is_wrong_with_a_command_is_exit_code_2(
    capsys, tmp_path, monkeypatch, changes, options, code, parts
):
    tmp_path = own_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    path = config_file(tmp_path, changes)
    before = sorted(p.name for p in tmp_path.iterdir())
    ended, _, err = run(capsys, "train", path, "--run-dir", "run", *options)
    assert ended == code
    one_sentence(err, "jaxrl-llm train: error: ", *parts)
    assert not (tmp_path / "run" / "checkpoints").exists()
    after = sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__")
    assert after == (before if code == 2 else sorted([*before, "run"]))


def test_debug_shows_where(capsys, tmp_path):
    path = config_file(tmp_path, "reward=bad")
    code, _, err = run(capsys, "train", path, "--run-dir", tmp_path / "run", "--debug")
    assert code == 1 and "Traceback" in err and "scoring.py" in err and "gave None" in err
    code, _, err = run(capsys, "train", tmp_path / "gone.py", "--debug")
    assert code == 2 and "Traceback" in err


@pytest.mark.slow
def test_a_config_is_utf8_whatever_the_locale(tmp_path):
    path = Path(config_file(tmp_path))
    path.write_text(path.read_text("utf-8") + "# \u00e9\u4e2d\n", "utf-8")
    words = ["train", str(path), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    code = f"import sys; from jaxrl_llm.cli import main; sys.exit(main({words!r}))"
    places = [str(ROOT), str(ROOT / "tests" / "train"), *sys.path]
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "config.py").read_bytes() == path.read_bytes()


def test_a_config_of_another_encoding_is_refused(capsys, tmp_path):
    path = tmp_path / "my_run.py"
    path.write_bytes("# coding: latin-1\nx = '\u00e9'\n".encode("latin-1"))
    refused(capsys, f"train {path}", "my_run.py' fails: ")


@for_each(
    ("text", "part"),
    [
        ('{\n"config": ', "is damaged: line 2: "),
        ("[]", "is damaged: it lacks 'config'"),
        ('{"config": "a.py", "overrides": 3}', "is damaged: it lacks 'overrides'"),
        ('{"config": "a.py", "overrides": [3]}', "'overrides' are not all texts"),
        ("[" * 100_000, "is damaged: "),
    ],
)
def test_a_damaged_record_of_a_run_is_one_sentence(capsys, tmp_path, text, part):
    (tmp_path / "run.json").write_text(text)
    refused(capsys, f"evaluate {tmp_path}", "run.json' ", part)


def test_which_process_this_is_is_no_setting_of_the_run():
    words = ["a.py", "--steps", "3", "--distributed.no-detect", "--seed", "1", "--resume"]
    words += ["--allow-changed", "--allow_changed"]  # tyro takes both
    words += ["--distributed.process", "0", "--distributed.coordinator=a:1", "--mesh.fsdp", "2"]
    kept = ["--steps", "3", "--seed", "1", "--mesh.fsdp", "2"]
    assert train.config_words(words, "a.py") == kept


@for_each(("config", "told"), [("config", True), ("game", False)])
def test_only_a_reward_is_asked_how_an_answer_is_extracted(capsys, monkeypatch, config, told):
    right = np.eye(4)
    found = accuracy(right)._replace(at_k=at_k(right > 0, [1]))
    experiment = SimpleNamespace(collector=None, evaluate=lambda *x, **y: ({"sampled": found}, []))
    monkeypatch.setattr(evaluate, "load_experiment", lambda config, trains: (experiment, None))
    out = ran(capsys, "evaluate", f"{ROOT}/configs/tiny.py:{config}", "--k", "1")
    assert "pass@1   0.250 [" in out and ("maj@k: the reward does not" in out) is told


@pytest.mark.slow
def test_train_evaluate_sample_and_resume(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = config_file(tmp_path)
    options = ["--run-dir", "run", "--optimizer.learning-rate", "3e-3"]
    options += ["--evaluation.enabled", "--evaluation.samples", "2"]
    code, out, err = run(capsys, "train", path, *options)
    assert code == 0, err
    assert re.search(r"held out, greedy +before 0\.\d+ \[.*after", out)
    assert "The checkpoint of step 2" in out and "reward" in err  # the bar
    record = json.loads(Path("run/run.json").read_text())
    assert (
        record["overrides"] == options
        and Path("run/config.py").read_text() == Path(path).read_text()
    )

    after = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["held_out"]
    code, out, _ = run(capsys, "evaluate", "run", "--json")
    assert code == 0 and json.loads(out) == after
    code, out, _ = run(capsys, "evaluate", path, "--samples", "2")
    assert code == 0 and re.search(r"^2 held-out .*\ngreedy +0\.\d{3} \[", out)
    wide = ("--samples", "2", "--success", "0.5", "--k", "1", "2")
    code, out, _ = run(capsys, "evaluate", path, *wide)
    assert code == 0 and re.search(
        r"^pass@2 +\d\.\d{3} \[.*\nmaj@k: the reward does not name", out, re.M
    )
    code, out, _ = run(capsys, "evaluate", path, *wide, "--json")
    sampled = json.loads(out)["sampled"]
    assert sampled["failed"] == 0 and sampled["pass@1"]["mean"] <= sampled["pass@2"]["mean"]
    code, _, err = run(capsys, "evaluate", path, "--samples", "2", "--k", "3")
    assert code == 2
    one_sentence(err, "--k 3 needs as many completions of each question; there are 2")
    refused(capsys, "evaluate run --step 7", "no checkpoint of step 7", "there are 2", code=1)
    refused(capsys, f"evaluate {path} --step 1", "--step has no effect on", "which is not a run")

    code, out, err = run(
        capsys, "sample", "run", "one", "two", "--n", "2", "--max-new-tokens", "4",
        "--json",
    )  # fmt: skip
    assert code == 0 and "tokens/s" in err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "one", "two", "two"]

    code, _, err = run(capsys, "train", path, *options)
    assert code == 2
    one_sentence(err, "already holds a run; continue it (--resume)", "(--run-dir)", "(--overwrite)")
    lock = FolderLock("run")
    for words in ([], ["--resume"]):
        code, _, err = run(capsys, "train", path, *options, "--steps", "3", *words)
        assert code == 2
        one_sentence(err, "is in use by process", "since")
    lock.release()
    code, out, err = run(capsys, "train", path, *options, "--steps", "3", "--resume")
    assert code == 0 and "The checkpoint of step 3" in out, err
    assert "The run continues after step 2 of 3." in out

    other = [*options, "--optimizer.learning-rate", "1e-3", "--steps", "4"]
    code, _, err = run(capsys, "train", path, *other, "--resume")
    assert code == 2
    one_sentence(err, "optimizer.learning_rate was 0.003, is 0.001", "--allow-changed")
    code, _, err = run(capsys, "train", path, *other, "--allow-changed")
    assert code == 2
    one_sentence(err, "--allow-changed has no effect without --resume")
    code, out, err = run(capsys, "train", path, *other, "--resume", "--allow-changed")
    assert code == 0 and "The checkpoint of step 4" in out, err
    row = json.loads(Path("run/sessions.jsonl").read_text().splitlines()[-2])
    assert row["changed"] == {"optimizer.learning_rate": [0.003, 0.001]}
    code, _, err = run(capsys, "train", path, *other, "--resume", "--overwrite")
    assert code == 2
    one_sentence(err, "--overwrite has no effect with --resume")
    code, out, err = run(capsys, "train", path, *other, "--overwrite", "--steps", "1")
    assert code == 0 and "The checkpoint of step 1" in out, err
    assert "--overwrite" not in Path("run/run.json").read_text()


def test_booleans_of_a_config_are_set_by_a_flag_of_either_name(capsys, tmp_path):
    path = config_file(tmp_path)
    _, out, _ = run(capsys, "train", path, "--help")
    text = " ".join(out.replace("│", " ").split())
    assert "--data.chat, --data.no-chat Render each question with the model's chat template" in text
    assert "--evaluation.enabled, --evaluation.no-enabled " in text
    assert "--resume " in text and "--no-resume" not in text and "--no-plan" not in text
    config = load_config(path)
    for words, chat in ((["--data.chat"], True), (["--data.no-chat"], False), ([], False)):
        assert parse_config(config, words).data.chat is chat


def test_a_run_imports_a_module_that_is_called_as_its_copy_of_the_config(tmp_path, monkeypatch):
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir(), folder.mkdir()
    (home / "config.py").write_text("STEPS = 5\ndef worth(*_):\n    return 0.25\n")
    path = light_config(
        folder / "config.py",
        "worth(*_):\n    return sibling.worth()\n",
        "steps=sibling.STEPS, reward=VerifierPool(worth, workers=1)",
    )
    path.write_text("import config as sibling\n" + path.read_text())
    record = {"config": "my_run.py", "folder": str(home), "overrides": ["--seed", "3"]}
    (folder / "run.json").write_text(json.dumps(record))
    trust.note(trust.digest_of((folder / "config.py").read_bytes(), record))
    # Runs that other tests have read in this process have left their folders in the path, some with
    # a config.py.
    others = [each for each in sys.path if not Path(each, "config.py").is_file()]
    monkeypatch.setattr(sys, "path", others)
    monkeypatch.delitem(sys.modules, "config", raising=False)
    config, run_dir = load_target(str(folder))
    monkeypatch.delitem(sys.modules, "config")
    assert (config.steps, config.seed, run_dir) == (5, 3, folder)
    with config.reward as reward:
        assert rewards.score(reward, ["p"], ["c"], [{}]).rewards.tolist() == [0.25]


def test_a_config_with_the_name_of_a_module_that_it_uses_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    red = "red(*_):\n    import colorsys\n    return colorsys.hls_to_rgb(0.0, 0.25, 1.0)[0]\n"
    path = tmp_path / "colorsys.py"
    light_config(path, red, "reward=VerifierPool(red, workers=1)")
    with load_config(path).reward as reward:
        assert rewards.score(reward, ["p"], ["c"], [{}]).rewards.tolist() == [0.5]


@pytest.fixture
def own_programs(tmp_path):
    """A cache of compiled programs for this test alone."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_program_that_another_process_is_still_writing_is_compiled(own_programs):
    def compute():
        return jax.jit(lambda x: 3 * x + 1)(jax.numpy.arange(3)).tolist()

    compute()
    (program,) = own_programs.glob("jit__lambda*-cache")
    program.write_bytes(program.read_bytes()[:40])
    for prepare, count in ((lambda: None, 1), (use_compilation_cache, 0)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            prepare()
            assert compute() == [1, 4, 7]
        assert (
            sum("compilation cache entry for 'jit__lambda'" in str(x.message) for x in told)
            == count
        )


@pytest.mark.slow
def test_a_run_is_sampled_as_it_was_trained(capsys, tmp_path, monkeypatch):
    asked = []

    def encode(prompts, tokenizer, **options):
        asked.append((options["chat"], options["system"]))
        return encode_prompts(prompts, tokenizer, **options)

    monkeypatch.setattr("jaxrl_llm.cli.sample.encode_prompts", encode)
    changes = "data=dataclasses.replace(config.data, chat=True, system='Be brief.')"
    path = config_file(tmp_path, changes)
    for folder, options in (("chat", []), ("plain", ["--data.no-chat"])):
        if folder == "plain":
            options += ["--data.system", "None"]
        options += ["--run-dir", tmp_path / folder, "--steps", "1"]
        ran(capsys, "train", path, *options)
    for arguments in (["chat"], ["chat", "--raw"], ["chat", "--system", "Be long."], ["plain"]):
        folder, *options = arguments
        arguments = [tmp_path / folder, "one", "--max-new-tokens", "2", *options]
        assert run(capsys, "sample", *arguments)[0] == 0
    assert asked == [(True, "Be brief."), (False, None), (True, "Be long."), (False, None)]
    code, _, err = run(capsys, "sample", tmp_path / "plain", "one", "--system", "Be long.")
    assert code == 2
    one_sentence(err, "--system has no effect: the run was trained without the chat template")
    code, _, err = run(capsys, "sample", tmp_path / "plain", "one", "--raw")
    assert code == 2
    one_sentence(err, "--raw has no effect: the run was trained without the chat template")
    code, _, err = run(capsys, "sample", tmp_path / "plain", "one", "--dtype", "bfloat16")
    assert code == 2
    one_sentence(err, "dtype has no effect on a model that a function returns")
    # Nor are there questions that such a run never saw.
    refused(capsys, f"evaluate {tmp_path / 'plain'}", "holds no questions out")


@pytest.fixture
def light_reward(tmp_path, monkeypatch):
    """A module whose reward a worker imports at once, without the library."""
    text = "def right(prompt, completion, metadata):\n    return float(completion == '4')\n"
    (tmp_path / "light_reward.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_options_start_no_processes(monkeypatch, light_reward):
    started = []

    def pool(reward):
        started.append(reward)
        return VerifierPool("light_reward:right", workers=1)

    monkeypatch.setattr(rewards, "math_verify_pool", pool)
    reward = find_reward("math_verify")
    assert not started and isinstance(reward, rewards.BatchReward)
    for _ in range(2):
        assert rewards.score(reward, ["p"], ["4"], [{"answer": "4"}]).rewards.tolist() == [1.0]
    assert reward("p", "5", {"answer": "4"}) == 0.0 and started == [rewards.math_verify]


def test_programs_run_in_processes_too(monkeypatch, light_reward):
    """Else one that loops would hold up all the others, and end the run at its deadline."""
    pools = []

    class Pool(VerifierPool):
        def __init__(self, reward, *, workers, deadline):
            pools.append((reward, workers, deadline))
            super().__init__("light_reward:right", workers=1)

    monkeypatch.setattr(rewards, "VerifierPool", Pool)
    reward = find_reward("code_stdio")
    assert isinstance(reward, rewards.BatchReward)
    assert reward("p", "4", {"answer": "4"}) == 1.0
    assert pools == [(rewards.code_stdio, os.cpu_count(), 60.0)]


def test_a_sum_in_processes_tells_its_weights_and_its_name():
    name = "math_verify + 0.2*think_format"
    reward = find_reward(name)
    assert reward.weights_of_sum == {"math_verify": 1.0, "think_format": 0.2}
    assert name_of(reward) == repr(reward) == name
    assert find_reward("math_verify").weights_of_sum is None
    with pytest.raises(ValueError, match="'gdpo' reads each reward apart, and not the weights of "):
        TrainConfig(reward=reward, recipe="gdpo", model="tiny", data=DataConfig(prompts=["a"]))


@for_each(
    ("name", "text", "value"),
    [
        ("dapo_math", "Answer: 4", 1.0),
        ("multiple_choice", "Answer: D", 0.0),
        ("word_repetition", "a a a a", 0.5),
        ("majority_vote:dapo_math", "Answer: 4", 1.0),
        ("last_integer+0.5*think_format", "<think></think> 4", 1.5),
        ("2*last_integer + -1*word_repetition", "4 4 4 4", 1.5),
    ],
)
def test_rewards_by_name(name, text, value):
    reward = find_reward(name)("", text, {"answer": "A" if "choice" in name else "4"})
    assert (reward if isinstance(reward, float) else reward["reward"]) == value


@for_each(
    ("name", "message"),
    [
        ("boxed_maths", "no reward 'boxed_maths'; there are last_integer"),
        ("majority_vote:think_format", "think_format names none"),
        ("f1+x*think_format", "the weight of think_format must be a number, got 'x'"),
        ("f1+0.5*f1", "names f1 twice"),
        ("f1+", "no reward ''"),
        ("f1+float_match", "no reward 'float_match'"),
        ("0*f1", "the weight of 'f1' must be finite and not 0"),
    ],
)
def test_wrong_names_of_rewards(name, message):
    with pytest.raises(ValueError) as caught:
        find_reward(name)
    assert message in str(caught.value)


def test_ctrl_c_is_130_and_saves(capsys, tmp_path):
    path = config_file(tmp_path, "reward=interrupts")
    before = signal.getsignal(signal.SIGINT)
    # The reward interrupts at each call; only the first is caught, so it must be the last call.
    options = ["--sampling.group-size", "2", "--prompts-per-step", "4"]
    text = Path(path).read_text().replace("signal.raise_signal", "once(signal.raise_signal)")
    once = "\ncalls = []\ndef once(f):\n    calls.append(1)\n"
    once += "    return f if len(calls) == 1 else (lambda number: None)\n"
    Path(path).write_text(text.replace("def bad", once + "\ndef bad"))
    code, out, err = run(capsys, "train", path, "--run-dir", tmp_path / "run", *options)
    assert (
        code == 130 and "Interrupted after step 1; go on with the same command and --resume" in out
    )
    assert signal.getsignal(signal.SIGINT) is before
    folders = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert folders == ["step_00000001"]
