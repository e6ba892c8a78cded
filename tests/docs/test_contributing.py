"""CONTRIBUTING.md says what the packages say of themselves."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_guide_for_contributors_numbers_layers_as_the_packages_do():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    numbers = {
        name: number
        for number, modules in re.findall(r"^\| (\d)[^|]*\| ([^|]+) \|$", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", modules.partition(", which")[0])
    }
    said = {}
    for path in (ROOT / "jaxrl_llm").glob("*/__init__.py"):
        if layer := re.match(r'"""Layer (\d):', path.read_text(encoding="utf-8")):
            said[path.parent.name] = layer[1]
    assert len(said) > 5
    assert {name: numbers[name] for name in said} == said
