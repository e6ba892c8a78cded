"""docs/glossary.md defines every metric that a run writes, and no others."""

import ast
import re
from pathlib import Path

from jaxrl_llm.diagnostics.preferences import PairOrder
from jaxrl_llm.recipes import catalog
from jaxrl_llm.train.evaluation.evaluate import Accuracy
from jaxrl_llm.train.profile import PHASES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "glossary.md").read_text()
# What the modules of training call a mapping of metrics.
MAPPINGS = {"metrics", "values", "host", "numbers"}
# Here `values` and `numbers` are arrays of a batch.
FIELDS = {"score.py", "teachers.py", "episode_fields.py"}
# Names that the source makes in a loop.
OPTIMIZER = ("loss", "grad_norm", "update_norm", "updates", "skipped")
EXPANDED = {
    "pair_*": [f"pair_{name}" for name in PairOrder._fields if name != "pairs"],
    "critic_*": [f"critic_{name}" for name in OPTIMIZER],
    "subagent_*": ["subagent_NAME"],
    "seconds_*": [f"seconds_{name}" for name in ("sample", "reward", *PHASES, "total")],
}


def key_of(node):
    """The text of a key, with * for what is only known when the code runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else "*" for p in node.values)
    return None


def mapping_keys(node):
    """Keys of the literal mappings in an expression."""
    keys = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            keys |= {key_of(key) for key in part.keys if key is not None}
        elif isinstance(part, ast.DictComp):
            keys.add(key_of(part.key))
    return keys


def is_mapping(node):
    return isinstance(node, ast.Name) and node.id in MAPPINGS


def metric_names(source):
    """Names that a module puts into a mapping of metrics: by key, by merging or by returning."""
    keys = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Subscript) and is_mapping(each.value):
                        keys.add(key_of(each.slice))
                    elif is_mapping(each):
                        keys |= mapping_keys(node.value)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.BinOp):
            keys |= mapping_keys(node.value.right) if is_mapping(node.value.left) else set()
    return {name for key in keys - {None} for name in EXPANDED.get(key, [key])}


def defined():
    """Names of the metrics on the page; a part in capitals, as in reward/NAME, is a *."""
    metrics = TEXT.split("## Evaluation")[0]
    names = re.findall(r"^\| `([\w/]+)` \|", metrics, re.MULTILINE)
    assert len(names) == len(set(names))
    return {re.sub(r"/[A-Z]+$", "/*", name) for name in names}


def test_every_metric_of_the_source_is_defined():
    package = ROOT / "jaxrl_llm"
    files = [*(package / "train").rglob("*.py"), package / "recipes" / "parts" / "texts.py"]
    # What an environment reports is a metric; the other mappings of that file are arrays.
    found = {"end/*", "info/*", "turns"}
    for path in files:
        if path.name not in FIELDS:
            found |= metric_names(path.read_text())
    assert found == defined()


def test_a_new_metric_is_seen():
    source = """
def f(metrics, x):
    metrics["a"], metrics["b/c"] = x
    metrics |= {"d": x, f"pair_{x}": x}
    values = {f"e/{n}": n for n in x} | {"g": x}
    other = {"h": 1}
    return metrics | {"i": other}
"""
    names = {"a", "b/c", "d", "e/*", "g", "i", *EXPANDED["pair_*"]}
    assert metric_names(source) == names


def test_every_row_of_a_metric_is_complete():
    rows = re.findall(r"^\| `[\w/]+` \|.*$", TEXT.split("## Evaluation")[0], re.MULTILINE)
    assert all(all(cell.strip() for cell in row.strip("|").split("|")) for row in rows)
    assert all(row.count("|") == 5 for row in rows)


def test_fields_of_an_evaluation_are_defined():
    part = TEXT.split("## Evaluation")[1].split("## Confidence")[0]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)))
    assert names == [name for name in Accuracy._fields if name != "at_k"]


def test_words_of_confidence_are_defined():
    words = re.findall(r"^\| ([A-Z]+) \|", TEXT.split("## Confidence")[1], re.MULTILINE)
    assert set(words) == {method.confidence for method in catalog.CATALOG} and len(words) == 4
