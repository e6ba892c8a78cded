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


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy():
    code = "import sys, jaxrl_llm; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    assert not HEAVY & set(_run(code).split())


def test_layer_one_loads_nothing_heavy():
    names = (
        "advantages surrogates corrections regularizers curation evolution diffusion rewards "
        "aggregate logprobs diagnostics recipes"
    )
    code = (
        "import sys, jaxrl_llm as jr\n"
        f"for name in {names.split()!r}: getattr(jr, name)\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    assert not HEAVY & set(_run(code).split())


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


@pytest.mark.parametrize("name", ["train", "testing.tiny_model", "models.make_model"])
def test_a_namespace_tells_which_extra_its_package_is_in(name):
    code = f"""
import sys
sys.modules["flax"] = None  # as where it is not installed
import jaxrl_llm as jr
try:
    jr.{name}
except ModuleNotFoundError as error:
    print(error)
"""
    assert _run(code).endswith("needs the package flax: pip install 'jaxrl_llm[train]'.")


def test_import_starts_no_device():
    code = (
        "import jax, jaxrl_llm as jr\n"
        "jr.recipes.grpo()\n"
        "from jax._src import xla_bridge\n"
        "print(len(xla_bridge._backends))"
    )
    assert _run(code) == "0"


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


def test_dir_lists_the_public_names_once_and_nothing_else():
    code = """
import jaxrl_llm as jr
before = dir(jr)
jr.recipes.grpo()
assert dir(jr) == before == sorted(jr.__all__)
assert len(set(before)) == len(before)
assert {"advantages", "recipes", "train", "bind"} <= set(before) and "importlib" not in before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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
