"""Proposes one-line mutants of the library's code, and draws a table of them.

    python tests/mutants/sites.py --count 120 --seed 0 >tests/mutants/table.json

A site is an expression or statement on one line, and one change of it; the kinds are those of
`KINDS`. The draw takes turns over the kinds and the folders of the package, so that each has its
share. Mutants that change no result, such as a larger epsilon, are dropped by hand, and the table
is what counts: `__main__.py` plants it.
"""

import argparse
import ast
import collections
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("core", "advantages", "surrogates", "corrections", "regularizers", "preferences"),
    *("diffusion", "evolution", "curation", "rewards", "aggregate", "logprobs", "diagnostics"),
    *("recipes", "models", "data", "environments", "rollout", "train"),
)
# Files with few numbers, and those whose changes show only on other machines.
_UNREAD = re.compile(r"/__init__|/catalog/|/logging/|/adapters/|_seccomp|_inside|sandbox|memory_")


class Site(NamedTuple):
    """A change of one line: the text of columns `begin` to `end` becomes `text`."""

    kind: str
    path: str
    function: str
    line: int
    begin: int
    end: int
    text: str


def sites_of(path: Path) -> Iterator[Site]:
    """All sites of a file."""
    source = path.read_text(encoding="utf-8")
    tree, name, lines = ast.parse(source), str(path.relative_to(ROOT)), source.encode().split(b"\n")
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions |= {id(inner): node.name for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in functions or getattr(node, "lineno", 0) != getattr(
            node, "end_lineno", -1
        ):
            continue
        for kind, change in KINDS.items():
            for place, text in change(node, lines):
                if place.lineno == place.end_lineno:
                    yield Site(
                        kind,
                        name,
                        functions[id(node)],
                        place.lineno,
                        place.col_offset,
                        place.end_col_offset,
                        text,
                    )


def _text(node: ast.AST, lines: list[bytes]) -> str:
    """The source of a node, or no text if it is on several lines."""
    if getattr(node, "lineno", 0) != getattr(node, "end_lineno", 1):
        return ""
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _sign(node, lines):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if isinstance(node.left, ast.Constant | ast.JoinedStr) or "axis" in _text(node, lines):
            return
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield node, f"{_text(node.left, lines)} {sign} {_text(node.right, lines)}"
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and not isinstance(node.operand, ast.Constant)
        and "inf" not in _text(node, lines)
    ):
        yield node, _text(node.operand, lines)


def _mask(node, lines):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield node, _text(node.left, lines)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield node, _text(node.operand, lines)
    if _is_call(node, "zero_masked") and len(node.args) == 2:
        yield node, _text(node.args[0], lines)


def _denominator(node, lines):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        paths = re.search(r"folder|path|root", _text(node, lines), re.IGNORECASE)
        if isinstance(node.right, ast.Constant) or paths:
            return
        yield node, _text(node.left, lines)


def _stop_gradient(node, lines):
    shift = "jnp.max" in _text(node, lines)  # of a log-sum-exp, whose gradient cancels
    if _is_call(node, "stop_gradient") and len(node.args) == 1 and not shift:
        yield node, _text(node.args[0], lines)


def _clip_bound(node, lines):
    for before, after in (("minimum", "maximum"), ("maximum", "minimum")):
        if _is_call(node, before) and not any(_is_number(x) for x in node.args):
            yield node.func, _text(node.func, lines).replace(before, after)
    if _is_call(node, "clip") and len(node.args) == 3:
        yield node.args[2], _text(node.args[1], lines)
        yield node.args[1], "-jnp.inf"


def _off_by_one(node, lines):
    swap = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in swap:
        sign = swap[type(node.ops[0])]
        yield node, f"{_text(node.left, lines)} {sign} {_text(node.comparators[0], lines)}"
    if isinstance(node, ast.Slice) and _is_number(node.lower, 1):
        yield node.lower, "0"


def _axis(node, lines):
    if isinstance(node, ast.keyword) and node.arg == "axis" and _text(node.value, lines) == "-1":
        yield node.value, "0"


def _swapped(node, lines):
    if isinstance(node, ast.Call) and len(node.args) in (2, 3) and not node.keywords:
        name = _text(node.func, lines).rpartition(".")[2]
        first, second = (_text(x, lines) for x in node.args[:2])
        same = {"maximum", "minimum", "logaddexp", "logical_and", "logical_or"}
        crash = {"isinstance", "asarray", "finalize", "__init__", "map", "getattr", "astype"}
        same |= crash  # any call of those would see it
        plain = all(isinstance(x, ast.Name | ast.Attribute) for x in node.args[:2])
        if plain and name not in same and node.args[0].lineno == node.args[1].end_lineno:
            rest = "".join(f", {_text(x, lines)}" for x in node.args[2:])
            yield node, f"{_text(node.func, lines)}({second}, {first}{rest})"


def _key_reused(node, lines):
    if _is_call(node, "fold_in") and len(node.args) == 2:
        yield node, _text(node.args[0], lines)


def _dtype(node, lines):
    if isinstance(node, ast.Attribute) and _text(node, lines) == "jnp.float32":
        yield node, "jnp.bfloat16"


def _check(node, lines):
    if isinstance(node, ast.Expr) and _text(node, lines).startswith(("checks.", "stats.check")):
        yield node, "pass"
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield node, "pass"


KINDS = {
    "sign": _sign,
    "mask": _mask,
    "denominator": _denominator,
    "stop_gradient": _stop_gradient,
    "clip bound": _clip_bound,
    "off by one": _off_by_one,
    "wrong axis": _axis,
    "swapped arguments": _swapped,
    "key reused": _key_reused,
    "dtype": _dtype,
    "dropped check": _check,
}


def _is_call(node: ast.AST, name: str) -> bool:
    called = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return name in (getattr(called, "attr", None), getattr(called, "id", None))


def _is_number(node: ast.AST | None, value: float | None = None) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return is_constant and value in (None, node.value)


def draw(count: int, seed: int) -> list[Site]:
    """Sites in turn over folders and kinds, at most two of a file."""

    def rank(site: Site) -> str:
        return hashlib.sha256(f"{seed} {site}".encode()).hexdigest()

    cells = collections.defaultdict(list)
    for path in sorted((ROOT / "jaxrl_llm").rglob("*.py")):
        parts = path.relative_to(ROOT / "jaxrl_llm").parts
        folder = parts[0].removesuffix(".py")
        if folder in FOLDERS and not _UNREAD.search(str(path)):
            for site in sites_of(path):
                cells[site.kind, folder].append(site)
    for cell in cells.values():
        cell.sort(key=rank, reverse=True)
    drawn, files, order = [], collections.Counter(), sorted(cells, key=lambda c: (c[0], c[1]))
    order.sort(key=lambda cell: hashlib.sha256(f"{seed} {cell}".encode()).hexdigest())
    while len(drawn) < count and any(cells.values()):
        by_kind = collections.Counter(site.kind for site in drawn)
        by_folder = collections.Counter(site.path.split("/")[1] for site in drawn)
        left = [cell for cell in order if cells[cell]]
        kind, folder = min(left, key=lambda c: by_kind[c[0]] + by_folder[c[1]])
        site = cells[kind, folder].pop()
        if files[site.path] < 2:
            files[site.path] += 1
            drawn.append(site)
    return drawn


def row(site: Site) -> dict[str, str]:
    """The row of the table: the line before and after, which stay valid where lines move."""
    before = (ROOT / site.path).read_text(encoding="utf-8").splitlines()[site.line - 1]
    raw = before.encode()
    after = (raw[: site.begin] + site.text.encode() + raw[site.end :]).decode()
    return {
        "kind": site.kind,
        "path": site.path,
        "function": site.function,
        "before": before.strip(),
        "after": after.strip(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [row(site) for site in draw(options.count, options.seed)]
    print(json.dumps(rows, indent=1, ensure_ascii=False))
