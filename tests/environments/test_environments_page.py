"""docs/environments.md tells the truth: its examples run."""

import doctest
import re
from pathlib import Path

import jaxrl_llm as jr
from jaxrl_llm.recipes.catalog import preset
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.rollout.episodes import ENDS
from jaxrl_llm.train.data.fields import host_fields

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_run_as_pasted():
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    names: dict = {}
    for block in blocks:
        if ">>>" not in block:
            exec(compile(block, PAGE.name, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, PAGE.name, str(PAGE), 0)
        runner = doctest.DocTestRunner()
        runner.run(test, clear_globs=False)
        names.update(test.globs)
        assert runner.summarize(verbose=False).failed == 0
    assert len(blocks) >= 3


def test_a_tool_has_five_lines():
    found = re.search(r"^@jr\.environments\.tool\n.*?^$", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None
    code = found[0]  # the first of the page
    assert len(code.strip().splitlines()) + len(["env = ..."]) == 5


def test_an_environment_has_25_lines():
    (code,) = re.findall(r"^import random\n.*?(?=^```$)", TEXT, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_names_of_the_page_exist():
    for module, name in re.findall(r"`?jr\.(environments|data|testing|rewards)\.(\w+)", TEXT):
        assert hasattr(getattr(jr, module), name)


def rows_of(header):
    """The rows of the table with this header, as the names in backticks of each cell."""
    _, _, table = TEXT.partition(header)
    for line in table.split("\n\n", 1)[0].splitlines()[2:]:
        yield [re.findall(r"`([\w.]+)`", cell) for cell in line.strip("|").split("|")]


def test_the_ends_are_those_of_episodes():
    assert tuple(cells[0][0] for cells in rows_of("| end | when |")) == ENDS


def test_presets_read_what_the_page_says():
    of_turns = {name for name, extra in EXTRAS.items() if extra.axes == "PGK"} - {"turn_where"}
    rows = list(rows_of("| preset | reads"))
    assert len(rows) >= 8
    for presets, reads, _ in rows:
        for name in presets[:1] if "rewards" in presets else presets:
            needed = host_fields(preset(name, length=8, num_prompts=4))
            assert needed & of_turns == set(reads), name
