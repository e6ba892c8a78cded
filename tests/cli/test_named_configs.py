"""One config file with several configurations: FILE.py:NAME on every command."""

import importlib.util
import json
import os
import tomllib
from pathlib import Path

import pytest
from rows import for_each
from test_cli import config_file, one_sentence, refused, run

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.train import TrainConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

ROOT = Path(__file__).parents[2]

MORE = """
from jaxrl_llm.train import EvaluationConfig
short = dataclasses.replace(
    config, steps=1, evaluation=EvaluationConfig(samples=2), run_dir="runs/short"
)
number = 3
"""


def load_module(path):
    """The module of a file, by a name of its own."""
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file that defines `config`, of two steps, and `short`, of one."""
    monkeypatch.chdir(tmp_path)
    name = os.path.basename(config_file(tmp_path, name="several.py"))
    Path(name).write_text(Path(name).read_text() + MORE)
    return name


@for_each(
    ("word", "parts"),
    [
        ("a.py", ("a.py", "config")),
        ("a.py:short", ("a.py", "short")),
        ("/x/a.py:short", ("/x/a.py", "short")),
        ("C:\\x\\a.py", ("C:\\x\\a.py", "config")),
        ("C:\\x\\a.py:short", ("C:\\x\\a.py", "short")),
        ("a.py:1", ("a.py:1", "config")),
        ("a.py:", ("a.py:", "config")),
        ("x:y/a.py", ("x:y/a.py", "config")),
        ("gym:chain_sum", ("gym:chain_sum", "config")),
        ("runs/short", ("runs/short", "config")),
    ],
)
def test_a_file_and_a_name(word, parts):
    assert options.split_config(word) == parts


def test_targets(path):
    assert options.load_target(path).config.steps == 2
    found = options.load_target(f"{path}:short")
    assert (found.config.steps, found.run_dir) == (1, None)
    with pytest.raises(UsageError, match="no config file 'nowhere.py'"):
        options.load_target("nowhere.py:short")


def test_a_named_configuration_trains_and_is_recorded(capsys, path):
    named, words = f"{path}:short", ["--optimizer.learning-rate", "3e-3"]
    code, out, err = run(capsys, "train", named, *words)
    assert code == 0 and "The checkpoint of step 1" in out, err
    assert "dr_grpo, 4 prompts x 2 rollouts a step" in out
    record = json.loads(Path("runs/short/run.json").read_text())
    assert record["config"] == named
    assert record["overrides"] == words
    # A run knows which of the configurations it is of.
    config = options.load_target("runs/short").config
    assert (config.steps, config.optimizer.learning_rate) == (1, 3e-3)


@for_each("command", ["train", "evaluate"])
@for_each(
    ("name", "parts"),
    [
        ("long", ["must define `long`", "it does not define `long`"]),
        ("number", ["must define `number`", "it defines it as 3"]),
    ],
)
def test_a_name_that_is_no_configuration(capsys, path, command, name, parts):
    refused(
        capsys, f"{command} {path}:{name}", *parts, f"There is `config`, `short`: {path}:config"
    )


def test_a_file_without_any_configuration(capsys, path):
    Path("empty.py").write_text("number = 3\n")
    code, _, err = run(capsys, "train", "empty.py:short")
    assert code == 2
    one_sentence(err, "empty.py", "it does not define `short`.")
    assert "There is" not in err


def test_the_quickstart_of_evolution_has_both_methods():
    path = ROOT / "configs" / "es_quickstart.py"
    evolved, trained = (
        options.load_config(path, name=name) for name in ("config", "policy_gradient")
    )
    assert evolved.recipe.population(evolved.prompts_per_step, evolved.sampling.group_size) == 64
    assert trained.recipe.name == "dr_grpo_token_mean"
    for shared in ("model", "data", "reward", "evaluation", "prompts_per_step"):
        assert getattr(evolved, shared) == getattr(trained, shared), shared


@for_each("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_each_configuration_of_the_repository_takes_words(monkeypatch, path):
    monkeypatch.syspath_prepend(path.parent)  # one imports another
    named = {n: c for n, c in vars(load_module(path)).items() if isinstance(c, TrainConfig)}
    assert "config" in named
    for config in named.values():
        changed = options.parse(TrainConfig, ["--steps", "3"], command="train", default=config)
        assert changed.steps == 3 and changed.environment is config.environment


def test_a_bare_name_is_a_config_of_the_package(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shipped = options.shipped_configs()
    assert {path.name for path in shipped.values()} == set(os.listdir(ROOT / "configs")) - {
        "__pycache__"
    }
    assert options.named_config("quickstart") == str(ROOT / "configs" / "quickstart.py")
    assert options.named_config("tiny:flow") == f"{ROOT / 'configs' / 'tiny.py'}:flow"
    for word in ("tiny.py", "a/tiny", "a/tiny.py:flow", "tiny-2"):
        assert options.named_config(word) == word
    code, out, _ = run(capsys, "train", "tiny:scorer", "--help")
    assert code == 0 and "(default: runs/tiny_scorer)" in " ".join(out.split())
    assert options.load_target("tiny:scorer").config.run_dir == "runs/tiny_scorer"
    code, out, _ = run(capsys, "train", "--help")
    assert code == 0 and all(name in out for name in shipped)
    code, _, err = run(capsys, "train", "quickstrat", "--steps", "1")
    assert code == 2
    one_sentence(err, "'quickstrat'", "calculator", "quickstart", "tiny")
    for word in ("configs/tiny.py:flow", "tiny.py:flow"):
        code, _, err = run(capsys, "train", word, "--steps", "1")
        assert code == 2
        one_sentence(err, "There is no config file", "comes with the package is tiny:flow.")
    # A file or a run of one's own goes first.
    Path("tiny").write_text("number = 3\n")
    assert options.named_config("tiny") == "tiny"
    Path("quickstart").mkdir()
    with pytest.raises(UsageError, match="is not a run of jaxrl-llm train"):
        options.load_target("quickstart")


def test_the_wheel_has_the_configs():
    """Where the wheel is built, `.ci/run` trains one of them from an empty folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "jaxrl_llm/configs"}
    assert "train tiny " in (ROOT / ".ci" / "run").read_text()


def test_an_environment_is_no_word(capsys, path):
    code, _, err = run(capsys, "train", str(ROOT / "configs/tiny.py:game"), "--environment", "Nim")
    assert code == 2 and "chosen in the config file" in " ".join(err.replace("│", " ").split())
