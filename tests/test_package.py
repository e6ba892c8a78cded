"""What the package promises as a whole: what it loads, what it declares, how files are kept."""

import ast
import dataclasses
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rows import for_each

import jaxrl_llm

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "jaxrl_llm").rglob("*.py"))
LAZY = [p for p in SOURCES if p.name == "__init__.py" and "__getattr__" in p.read_text()]
# Of the extras; with jax, numpy, optax and chex come a few that are lighter.
HEAVY = {
    "flax",
    "orbax",
    "datasets",
    "tokenizers",
    "transformers",
    "torch",
    "jinja2",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "reasoning_gym",
    "math_verify",
    "tyro",
    "tqdm",
    "matplotlib",
    "pandas",
    "qwix",
    "tensorboardX",
    "wandb",
    "trackio",
    "gymnasium",
    "textworld",
    "scienceworld",
    "openenv",
    "starlette",
    "uvicorn",
}


_FRESH = """
import json, sys
import jax, jaxrl_llm as jr

def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules})

notes = {"names": dir(jr), "imported": loaded()}
for name in sys.argv[1].split():
    getattr(jr, name)
notes["layer one"] = loaded()
jr.recipes.grpo()
from jax._src import xla_bridge
print(json.dumps({**notes, "devices": len(xla_bridge._backends), "names after use": dir(jr)}))
"""
_WITHOUT_FLAX = """
import sys
sys.modules["flax"] = None  # as where it is not installed
import jaxrl_llm as jr
for name in sys.argv[1:]:
    try:
        eval(f"jr.{name}")
    except ModuleNotFoundError as error:
        print(error)
"""


def _run(code: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_import_loads_nothing_heavy_and_starts_no_device():
    layer_one = (
        "advantages surrogates corrections regularizers curation evolution diffusion rewards "
        "aggregate logprobs diagnostics recipes"
    )
    notes = json.loads(_run(_FRESH, layer_one))
    assert not HEAVY & set(notes["imported"]) and not HEAVY & set(notes["layer one"])
    assert notes["devices"] == 0
    names = notes["names"]  # each public name once, and nothing else
    assert notes["names after use"] == names == sorted(jaxrl_llm.__all__)
    assert len(set(names)) == len(names)
    assert {"advantages", "recipes", "train", "bind"} <= set(names) and "importlib" not in names


def test_a_namespace_tells_which_extra_its_package_is_in():
    told = _run(_WITHOUT_FLAX, "train", "testing.tiny_model", "models.make_model").splitlines()
    ending = "needs the package flax: pip install 'jaxrl_llm[train]'."
    assert len(told) == 3 and all(line.endswith(ending) for line in told)


@for_each(
    ("namespace", "names"),
    [
        ("advantages", "ACTION SUBGOAL SWITCH"),
        ("models", "with_adapter with_head"),
        ("rollout", "LENGTH STOP FAILED CANCELLED UNFINISHED REMASKING make_uncover"),
        (
            "train",
            "ServerTeacher StoredTeacher AlignedTeacher ModelTeacher TokenTeacher TokenScores "
            "write_scores Sink RunInfo InUseError",
        ),
    ],
)
def test_what_users_write_against_is_public(namespace, names):
    module = getattr(jaxrl_llm, namespace)
    assert set(names.split()) <= set(module.__all__)
    assert all(getattr(module, name) is not None for name in names.split())


def test_namespaces_load_on_first_use():
    assert "advantages" in dir(jaxrl_llm)
    assert jaxrl_llm.advantages.grpo.__module__.startswith("jaxrl_llm.advantages")
    with pytest.raises(AttributeError, match="advantage"):
        _ = jaxrl_llm.advantage


def test_base_dependencies():
    names = {requirement.split(">=")[0] for requirement in PROJECT["dependencies"]}
    assert names == {"jax", "numpy", "optax", "chex"}


def test_jax_is_not_pinned_to_a_platform():
    extras = PROJECT["optional-dependencies"]
    named = {"train", "envs", "openenv", "serve", "sinks", "quant", "test", "docs", "dev"}
    assert set(extras) == named
    every = [requirement for extra in extras.values() for requirement in extra]
    assert not [requirement for requirement in every if requirement.startswith("jax[")]


def test_version_is_declared_once():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(dev|a|b|rc|post)\d*)?", jaxrl_llm.__version__)
    # Where the package is installed, its metadata was made from the same line. An editable
    # installation has the metadata of the day on which it was made.
    try:
        installed = importlib.metadata.distribution("jaxrl-llm")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the source tree
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        assert installed.version == jaxrl_llm.__version__


def test_every_place_has_the_same_version():
    version = jaxrl_llm.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation and f"license: {PROJECT['license']}" in citation
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version


@for_each("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_file(path):
    """Short enough to read; no bare assert; prints only at the command line."""
    text = path.read_text()
    assert len(text.splitlines()) <= 1100
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: assert vanishes under -O"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            assert "cli" in path.relative_to(ROOT).parts, f"line {node.lineno} prints"


def test_modules_have_docstrings():
    bare = [p.name for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not bare


def test_options_of_configs_that_texts_name_exist():
    """Such as ``SamplingConfig(top_p=)``; a config of another library stands after its module."""
    configs = {
        name: {field.name for field in dataclasses.fields(value)}
        for package in (jaxrl_llm.train, jaxrl_llm.models)
        for name in package.__all__
        if name.endswith("Config") and dataclasses.is_dataclass(value := getattr(package, name))
    }
    call = re.compile(r"(?<!vf\.)\b(\w+Config)\(((?:[^()]|\([^()]*\))*)\)")
    read = 0
    for path in [*SOURCES, *sorted((ROOT / "docs").rglob("*.md"))]:
        for name, words in call.findall(path.read_text(encoding="utf-8")):
            named = set(re.findall(r"\b(\w+)=", re.sub(r"\([^()]*\)", "", words)))
            if name in configs:
                assert named <= configs[name], f"{path.relative_to(ROOT)}: {name}({words})"
                read += len(named)
    assert read > 50


@for_each("path", LAZY, ids=lambda path: path.parent.name)
def test_the_stub_of_a_lazy_package_names_what_it_loads(path):
    """Editors and type checkers read the stub, since they do not run ``__getattr__``."""
    package = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    stub = ast.parse(path.with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    named = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert set(named) == set(package.__all__)
    for name, (module, original) in named.items():
        assert name == original  # only `import x as x` makes a name public
        assert getattr(importlib.import_module(module), name) is getattr(package, name)
