"""Commands of pages: configs on several hosts parse and fit, benchmarks get what they require."""

import ast
import dataclasses
import math
import re
import shlex
from pathlib import Path

from rows import for_each

from jaxrl_llm.cli import options
from jaxrl_llm.cli.train import config_words
from jaxrl_llm.train.mesh import check_batch

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r'jaxrl-llm train (configs/\S+\.py)([^\n"]*)')
BENCHMARK = re.compile(r"`python -m benchmarks\.([a-z_.]+)([^`]*)`")
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if BENCHMARK.search(page.read_text(encoding="utf-8"))
]
# By page: a command's config, and the devices of all hosts.
DEVICES = {"pods": [64, 64, 8, 32, 32], "scaling": [128]}


@for_each("page", DEVICES)
def test_commands_lay_out_all_devices(page):
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / f"{page}.md").read_text())
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    found = COMMAND.findall(blocks)
    assert len(found) == len(DEVICES[page])
    for (path, rest), devices in zip(found, DEVICES[page], strict=True):
        words = ["0" if word == "I" else word for word in shlex.split(rest)]
        config = options.load_config(ROOT / path)
        config = options.parse_config(config, config_words(words, path))
        mesh = config.mesh
        assert math.prod(dataclasses.astuple(mesh)) == devices
        check_batch(path, config.prompts_per_step, config.microbatches, mesh.shards)


def required_arguments(path: Path) -> tuple[list[str], int]:
    """The options that a benchmark's command line requires, and the number of its positionals."""
    required, positionals = [], 0
    for call in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
            continue
        keywords = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
        name = call.args[0].value
        if not name.startswith("-"):
            positionals += keywords.get("nargs") not in ("?", "*")
        elif keywords.get("required"):
            required.append(name)
    return required, positionals


@for_each("page", PAGES, ids=lambda path: path.stem)
def test_commands_of_benchmarks_have_the_arguments_that_they_require(page):
    for name, rest in BENCHMARK.findall(page.read_text(encoding="utf-8")):
        path = ROOT.joinpath("benchmarks", *name.split("."))
        path = (
            path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"
        )
        required, positionals = required_arguments(path)
        words = shlex.split(rest)
        bare = [w for i, w in enumerate(words) if w[0] != "-" and (not i or words[i - 1][0] != "-")]
        assert set(required) <= set(words), f"{name} {rest}"
        assert len(bare) >= positionals, f"{name} {rest}"
