r"""Formulas of docstrings as LaTeX.

A docstring writes a formula as indented plain text, which is what ``help()`` prints. This module
reads that text and writes the same formula as LaTeX for the site::

    A_i = (r_i - mean(r)) / (std(r) + eps)

becomes ``A_{i} = \frac{r_{i} - \operatorname{mean}(r)}{...}``. What it reads as mathematics:

- A letter or a Greek name, with ``_`` or brackets for a subscript: ``rho_i``, ``A[i, t]``.
- A name before a parenthesis is a function; all other words are text.
- ``sum_j``, ``sum over j of``, ``sqrt(x)``, ``|x|``, ``x^2``, ``1[x > 0]`` and relations.
- A division is a fraction where both sides are one factor, so that nothing else could be meant;
  elsewhere it stays a slash.

Every name and number of the text is in the LaTeX, in the same order, except for ``over`` and ``of``
of a sum.
"""

import dataclasses
import re
import textwrap
from collections.abc import Sequence

GREEK = {
    **{name: rf"\{name}" for name in [
        "alpha", "beta", "gamma", "delta", "zeta", "eta", "theta", "kappa", "mu", "nu", "xi", "pi",
        "rho", "sigma", "tau", "phi", "chi", "psi", "omega",
        "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega",
    ]},
    "eps": r"\varepsilon", "epsilon": r"\varepsilon", "lam": r"\lambda", "lambda": r"\lambda",
}  # fmt: skip
# Operators of LaTeX that stand before their argument, also without a parenthesis.
OPERATORS = {name: rf"\{name}" for name in ["exp", "log", "min", "max", "cos", "sin", "tanh"]}
OPERATORS |= {name: rf"\operatorname{{{name}}}" for name in ("argmax", "argmin", "softmax")}
BIG = {"sum": r"\sum", "prod": r"\prod"}
SYMBOLS = {
    "<-": r"\leftarrow ", "->": r"\to ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "==": "= ",
    "+-": r"\pm ", "//": r"\mathbin{/\!/} ", "...": r"\ldots ", "..": r"\ldots ", "~": r"\sim ",
    "*": r"\cdot ", "#": r"\#", "%": r"\%", "&": r"\&", "_": r"\_", "$": r"\$", "@": "@",
    "\\": r"\backslash ", "||": r"\Vert ",
}  # fmt: skip
RELATIONS = ("=", "<-", "->", "<=", ">=", "!=", "==", "<", ">", "~")
# LaTeX sets the space around these itself.
SPACED = (*RELATIONS, "+", "-", "*", "+-", "//", "/")
# Words that end what stands before them: a division on either side of one is complete.
BORDERS = ("where", "if", "for", "over", "else", "with", "and", "or", "on", "at", "in", "then")
# Brackets behind these hold no index: distributions, expectations, probabilities.
UNINDEXED = ("U", "E", "P")
OPENING, CLOSING = "([{", ")]}"

TOKEN = re.compile(
    r"""
    (?P<gap>[ ]{2,}) | (?P<space>[ ])
  | (?P<code>:\w+:`~?[^`]+` | ``[^`]+`` | `[^`]+` | "[^"]*" | [A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)
  | (?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<word>[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*(?:-[a-z]{2,}|'(?:s\b|t\b))*'*)
  | (?P<symbol><-|->|\|\||<=|>=|!=|==|\+-|\*\*|//|\.\.\.|\.\.|.)
    """,
    re.VERBOSE,
)


@dataclasses.dataclass
class Node:
    """A piece of a formula.

    Attributes:
      latex: What is written for it.
      kind: "factor" for what can be a side of a fraction, "text", "symbol", "gap" or "space".
      source: Its text, where it is one token.
      tall: Whether brackets around it must grow.
      subscript: Whether it has one, so that it takes no other.
      prefix: Whether it binds to what follows it, as ``log`` does.
    """

    latex: str
    kind: str
    source: str = ""
    tall: bool = False
    subscript: bool = False
    prefix: bool = False


def escaped(text: str) -> str:
    """Text for a ``text`` of LaTeX."""
    marks = {"\\": r"\textbackslash ", "^": r"\char`^", "~": r"\sim "}
    return "".join(marks.get(c, rf"\{c}" if c in "_#%&${}" else c) for c in text)


def to_latex(line: str) -> str:
    """A line of a formula as LaTeX."""
    return _joined(_nodes(_tokens(line.strip())))


def block_to_latex(block: str) -> str | None:
    """Lines of a formula as one display, aligned where the text is.

    Returns:
      LaTeX for a display; None where the block is no formula: it has code, or no operator at all.
    """
    lines = [line.rstrip() for line in textwrap.dedent(block).strip("\n").split("\n")]
    lines = [line for line in lines if line]
    text = "\n".join(lines)
    if (
        ">>>" in text
        or "jnp." in text
        or re.search(r"^\s*(import|def|return|for .*:$)", text, re.M)
    ):
        return None
    if not re.search(r"[=<>^/~+*]|\w\(| - |\[", text):
        return None
    if len(lines) == 1:
        return to_latex(lines[0])
    column, label = _alignment(lines)
    rows = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if column is None:
            rows.append(r"& \qquad " * bool(indent) + "& " * (not indent) + to_latex(line))
        elif indent >= column:
            rows.append("& " + r"\qquad " * (indent > column) + to_latex(line))
        else:
            left, right = to_latex(line[:column]), to_latex(line[column:])
            rows.append(rf"{left} & \displaystyle {right}" if label else f"{left} & {right}")
    body = " \\\\\n".join(rows)
    if label and column is not None:
        return f"\\begin{{array}}{{@{{}}l@{{\\quad}}l@{{}}}}\n{body}\n\\end{{array}}"
    return f"\\begin{{aligned}}\n{body}\n\\end{{aligned}}"


def _alignment(lines: Sequence[str]) -> tuple[int | None, bool]:
    """The column at which all lines continue, and whether labels stand before it."""

    def points(line: str, pattern: str) -> set[int]:
        return {m.start() for m in re.finditer(pattern, line)}

    for pattern, label in ((r"(?<=\s)(=|<-)(?=\s)", False), (r"(?<=  )\S", True)):
        for column in sorted(set.union(*(points(line, pattern) for line in lines))):
            lefts = [line[:column].strip() for line in lines if column in points(line, pattern)]
            names = [left for left in lefts if left and (label or "  " not in left)]
            if label and any(re.search("[=<>]", left) and left[-1] != ":" for left in names):
                continue
            continued = sum(len(line) - len(line.lstrip()) >= column for line in lines)
            if names and len(names) + continued == len(lines):
                return column, label
    return None, False


def _tokens(line: str) -> list[tuple[str, str]]:
    return [(m.lastgroup or "", m.group()) for m in TOKEN.finditer(line)]


def _nodes(tokens: list[tuple[str, str]]) -> list[Node]:
    """Nodes of tokens, with groups, subscripts, powers and fractions put together."""
    nodes: list[Node] = []
    bars = sum(token == ("symbol", "|") for token in _level(tokens))
    i = 0
    while i < len(tokens):
        kind, text = tokens[i]
        before = nodes[-1] if nodes else None
        if kind in ("gap", "space"):
            wide = r"\qquad " if len(text) > 3 else r"\quad "
            nodes.append(Node(wide if kind == "gap" else " ", kind))
        elif kind == "code":
            name = re.sub(r"^:\w+:`~?|[`]", "", text)
            nodes.append(Node(rf"\texttt{{{escaped(name)}}}", "factor", text))
        elif kind == "number":
            nodes.append(Node(_number(text), "factor", text))
        elif kind == "word":
            count, node = _word(tokens, i, _last(nodes))
            nodes.append(node)
            i += count - 1
        elif text in ("^", "**"):
            i = _next(tokens, i)
            count, inner = _operand(tokens, i)
            base = nodes.pop() if nodes else Node("", "factor")
            while base.kind == "space" and nodes:
                base = nodes.pop()
            raised = base.latex if base.kind == "factor" else f"{{{base.latex}}}"
            nodes.append(Node(f"{raised}^{{{inner}}}", "factor", tall=base.tall))
            i += count - 1
        elif text == "_" and before is not None and i + 1 < len(tokens):
            count, inner = _operand(tokens, i + 1)
            before.latex, before.subscript = f"{before.latex}_{{{inner}}}", True
            i += count
        elif text in OPENING:
            end = _closing(tokens, i)
            inner = _nodes(tokens[i + 1 : end])
            close = tokens[end][1] if end < len(tokens) else ""
            _add_group(nodes, text, inner, close)
            i = end
        elif text == "|" and bars > 1 and ("symbol", "|") in tokens[i + 1 :]:
            end = tokens.index(("symbol", "|"), i + 1)
            inner = _nodes(tokens[i + 1 : end])
            tall = any(node.tall for node in inner)
            left, right = (r"\left|", r"\right|") if tall else (r"\lvert ", r"\rvert ")
            nodes.append(Node(f"{left}{_joined(inner)}{right}", "factor", tall=tall))
            bars, i = bars - 2, end
        else:
            mark = r"\mid " if text == "|" else SYMBOLS.get(text, text)
            nodes.append(Node(mark, "symbol", text))
        i += 1
    return _fractions(nodes)


def _last(nodes: Sequence[Node]) -> Node | None:
    """The last node that is no space."""
    return next((node for node in reversed(nodes) if node.kind != "space"), None)


def _level(tokens: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The tokens outside of brackets."""
    outside, depth = [], 0
    for kind, text in tokens:
        depth += kind == "symbol" and text in OPENING
        if depth == 0:
            outside.append((kind, text))
        depth -= kind == "symbol" and text in CLOSING and depth > 0
    return outside


def _next(tokens: Sequence[tuple[str, str]], i: int) -> int:
    """The index after i, past a space."""
    return i + 2 if tokens[i + 1 : i + 2] and tokens[i + 1][0] == "space" else i + 1


def _closing(tokens: Sequence[tuple[str, str]], i: int) -> int:
    """Index of the bracket that closes the one at i; intervals may mix the two kinds."""
    depth = 0
    for j in range(i, len(tokens)):
        kind, text = tokens[j]
        depth += kind == "symbol" and text in OPENING
        depth -= kind == "symbol" and text in CLOSING
        if depth == 0:
            return j
    return len(tokens)


def _operand(tokens: list[tuple[str, str]], i: int) -> tuple[int, str]:
    """How many tokens a power or a subscript takes, and its LaTeX without brackets around it."""
    if i >= len(tokens):
        return 0, ""
    if tokens[i][1] in OPENING:
        end = _closing(tokens, i)
        return end - i + 1, _joined(_nodes(tokens[i + 1 : end]))
    if tokens[i][1] in "+-":
        count, inner = _operand(tokens, i + 1)
        return count + 1, tokens[i][1] + inner
    after = i + 1
    if tokens[i][0] == "word" and after < len(tokens) and tokens[after][1] in ("(", "["):
        after = _closing(tokens, after) + 1
    return after - i, _joined(_nodes(tokens[i:after]))


def _number(text: str) -> str:
    """A number, with a power of ten for an exponent."""
    mantissa, _, exponent = text.replace(",", "{,}").partition("e")
    if not exponent:
        return mantissa
    power = rf"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \times {power}"


def _atom(name: str) -> str | None:
    """A letter or a Greek name, with its primes; None for other words."""
    bare = name.rstrip("'")
    primes = "'" * (len(name) - len(bare))
    if bare in GREEK:
        return GREEK[bare] + (primes or " ")
    if len(bare) == 1 or re.fullmatch(r"[A-Za-z]\d", bare):
        return (bare if len(bare) == 1 else f"{bare[0]}_{{{bare[1]}}}") + primes
    return None


def _word(tokens: list[tuple[str, str]], i: int, before: Node | None) -> tuple[int, Node]:
    """A word: how many tokens it takes, and its node."""
    text = tokens[i][1]
    called = i + 1 < len(tokens) and tokens[i + 1][1] == "("
    base, _, index = text.rpartition("_")
    if text in BIG and not called:
        return _big(tokens, i)
    if text == "sqrt" and called:
        end = _closing(tokens, i + 1)
        inner = _joined(_nodes(tokens[i + 2 : end]))
        return end - i + 1, Node(rf"\sqrt{{{inner}}}", "factor", tall=True)
    if base in BIG:
        return 1, Node(rf"{BIG[base]}_{{{_index(index)}}}", "symbol", text, tall=True, prefix=True)
    if text in OPERATORS:
        return 1, Node(OPERATORS[text] + " ", "symbol", text, prefix=True)
    if text == "a" and _is_article(tokens, i, before):
        return 1, Node(r"\text{a}", "text", text)
    atom = _atom(text)
    if atom is not None:
        return 1, Node(atom, "factor", text, subscript=bool(re.fullmatch(r"[A-Za-z]\d'*", text)))
    primes = len(index) - len(index.rstrip("'"))
    index = index.rstrip("'")
    statistic = base in ("mean", "std") and index in ("group", "batch")
    short = base and (statistic or _atom(base) or len(index) == 1 or index.isdigit())
    if short and (_atom(base) is None or "_" not in base):
        known = (_atom(base) or OPERATORS.get(base) or _named(base, called)).strip()
        index = _index(index)
        if re.fullmatch(r"[A-Za-z]\d", base):  # LaTeX refuses a second subscript
            known, index = base[0], f"{base[1]}, {index}"
        mark = f"{known}{chr(39) * primes}_{{{index}}}"
        return 1, Node(mark, "factor", text, subscript=True, prefix=called)
    if called or "_" in text:
        return 1, Node(_named(text, called), "factor", text, prefix=called)
    return 1, Node(rf"\text{{{escaped(text)}}}", "text", text)


def _named(name: str, called: bool) -> str:
    """A function or an array by its name."""
    return rf"\operatorname{{{escaped(name)}}}" if called else rf"\text{{{escaped(name)}}}"


def _index(name: str) -> str:
    """A subscript that was written behind an underscore."""
    if name.isdigit() or re.fullmatch("[ijkbgt]{2}", name):
        return name
    return (_atom(name) or rf"\text{{{escaped(name)}}}").strip()


def _is_article(tokens: list[tuple[str, str]], i: int, before: Node | None) -> bool:
    """Whether the letter a stands before a noun."""
    if [kind for kind, _ in tokens[i + 1 : i + 3]] != ["space", "word"]:
        return False
    noun = tokens[i + 2][1]
    if "_" in noun or _atom(noun) is not None or (before is not None and before.source in SPACED):
        return False
    return noun not in {*OPERATORS, *BIG, *BORDERS, "sqrt", "of"}


def _big(tokens: list[tuple[str, str]], i: int) -> tuple[int, Node]:
    """A sum or product, with what it goes over below the sign."""
    sign, rest = BIG[tokens[i][1]], tokens[i + 1 :]
    if rest[:1] == [("symbol", "_")]:
        count, inner = _operand(tokens, i + 2)
        return count + 2, Node(f"{sign}_{{{inner}}}", "symbol", tall=True, prefix=True)
    if [text for _, text in rest[:1]] == [" "] and _over(rest):
        end = next(j for j, token in enumerate(rest) if token == ("word", "of"))
        inner = _joined(_nodes(rest[3 : end - 1]))
        return end + 2, Node(f"{sign}_{{{inner}}}", "symbol", tall=True, prefix=True)
    if rest[:1] and [text for _, text in rest[1:2]] in (["over"], ["of"]):
        return 1, Node(rf"\text{{{tokens[i][1]}}}", "text", tokens[i][1])
    return 1, Node(sign + " ", "symbol", tall=True, prefix=True)


def _over(rest: list[tuple[str, str]]) -> bool:
    """Whether ``over X of Y`` has an index for X and one product for Y.

    Elsewhere the words stay: a sign would not say how far the sum goes.
    """
    if rest[1:2] != [("word", "over")] or ("word", "of") not in rest:
        return False
    end = rest.index(("word", "of"))
    index = [text for kind, text in rest[2:end] if kind == "word"]
    if not index or any(_atom(name) is None for name in index):
        return False
    depth = 0
    for kind, text in rest[end + 2 :]:
        depth += (kind == "symbol" and text in OPENING) - (kind == "symbol" and text in CLOSING)
        if depth < 0 or (depth == 0 and (kind == "gap" or text in (",", ";", *RELATIONS))):
            return True
        if depth == 0 and (text in ("+", "-") or text in ("of", "over")):
            return False
    return True


def _add_group(nodes: list[Node], opening: str, inner: list[Node], close: str) -> None:
    """Adds a group in brackets: an index or an argument of what stands right before it."""
    before = nodes[-1] if nodes else None
    content, tall = _joined(inner), any(node.tall for node in inner)
    attached = before is not None and before.kind in ("factor", "text") and before.latex != " "
    if attached and before.source == "1" and opening == "[":
        before.latex = r"\mathbf{1}"
    elif (
        attached
        and (opening, close) == ("[", "]")
        and not before.subscript
        and before.source not in (")", *UNINDEXED)
    ):
        before.latex, before.subscript = f"{before.latex}_{{{content}}}", True
        before.kind = "factor"
        return
    left, right = (rf"\{c}" if c in "{}" else c for c in (opening, close))
    if tall and close:
        left, right = rf"\left{left}", rf"\right{right}"
    group = f"{left}{content}{right}"
    if before is not None and before.kind != "space" and (attached or before.prefix):
        before.latex += group
        before.kind, before.tall, before.prefix = "factor", before.tall or tall, False
        before.source = ")"
    else:
        nodes.append(Node(group, "factor", "()", tall=tall))


def _fractions(nodes: list[Node]) -> list[Node]:
    """Divisions of one factor by one factor as fractions; all others stay slashes."""
    i = 0
    while i < len(nodes):
        if nodes[i].kind == "symbol" and nodes[i].source == "/":
            left, right = i - 1, i + 1
            left -= left >= 0 and nodes[left].kind == "space"
            right += right < len(nodes) and nodes[right].kind == "space"
            if _divides(nodes, left, right):
                top, bottom = (_bare(nodes[j]) for j in (left, right))
                nodes[left : right + 1] = [
                    Node(rf"\frac{{{top}}}{{{bottom}}}", "factor", "frac", tall=True)
                ]
                i = left
        i += 1
    return nodes


def _divides(nodes: Sequence[Node], left: int, right: int) -> bool:
    """Whether nothing but the factors at left and right can be the sides of a division."""
    if left < 0 or right >= len(nodes):
        return False
    if any(nodes[side].kind not in ("factor", "text") for side in (left, right)):
        return False
    earlier = [node for node in nodes[:left] if node.kind != "space"][-1:]
    later = [node for node in nodes[right + 1 :] if node.kind != "space"][:1]
    for node in earlier:
        product = node.kind == "factor" and nodes[left].kind == "factor"
        border = node.kind in ("symbol", "gap") or node.source in BORDERS
        if node.prefix or node.source == "/" or not (product or border):
            return False
    for node in later:
        border = node.source in BORDERS and nodes[right].kind == "factor"
        if node.prefix or not (border or node.kind in ("symbol", "gap")):
            return False
    return True


def _bare(node: Node) -> str:
    """A side of a fraction, without the brackets that a fraction makes needless."""
    if node.source != "()" or not node.latex.endswith(")"):
        return node.latex
    inner = node.latex.removeprefix(r"\left").removeprefix("(")
    return inner.removesuffix(")").removesuffix(r"\right")


def _joined(nodes: Sequence[Node]) -> str:
    """LaTeX of nodes; spaces next to text are kept, those of mathematics are left to LaTeX."""
    parts: list[str] = []
    for i, node in enumerate(nodes):
        if node.kind != "space":
            parts.append(node.latex)
            continue
        sides = nodes[max(i - 1, 0)], nodes[min(i + 1, len(nodes) - 1)]
        text = any(side.kind == "text" or side.latex.startswith(r"\text") for side in sides)
        spaced = any(side.kind == "symbol" and side.source in SPACED for side in sides)
        factors = all(side.kind == "factor" for side in sides)
        times = factors and sides[1].source[:1].isdigit()  # a number behind a factor
        parts.append(
            " "
            if spaced
            else r"\ "
            if text
            else r" \cdot "
            if times
            else r"\, "
            if factors
            else " "
        )
    return _merge_text("".join(parts)).strip()


def _merge_text(latex: str) -> str:
    """Neighboring words as one text."""
    pattern = re.compile(r"\\text\{([^{}]*)\}\\ \\text\{([^{}]*)\}")
    while (merged := pattern.sub(r"\\text{\1 \2}", latex)) != latex:
        latex = merged
    return latex
