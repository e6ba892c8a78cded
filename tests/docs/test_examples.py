"""The examples of pages that no other test runs."""

import re
from pathlib import Path

import pytest

import jaxrl_llm as jr

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["quickstart", "own_method", "own_loop", "own_model", "scaling"])
def test_examples_run_as_pasted(name, capsys):
    text = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"__name__": "__main__"}  # a later block goes on from those before
    for code in blocks:
        exec(compile(code, f"{name}.md", "exec"), names)
        assert capsys.readouterr().out.strip()


def test_a_loop_by_hand_is_told_how_minibatches_are_weighed():
    """Without it, their gradients are too small by their number."""
    rows = re.findall(r"^\| (.*) \|$", (DOCS / "own_loop.md").read_text(), re.MULTILINE)
    (row,) = [row for row in rows if row.startswith("`recipe.weigh(part)` | ")]
    assert "minibatch" in row
    assert callable(jr.recipes.Recipe.weigh)
