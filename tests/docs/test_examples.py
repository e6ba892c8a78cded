"""The examples of pages that no other test runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["quickstart", "own_method", "own_loop", "own_model", "scaling"])
def test_examples_run_as_pasted(name, capsys):
    text = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for code in blocks:
        exec(compile(code, f"{name}.md", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()
