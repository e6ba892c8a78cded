"""Formulas of docstrings become the same formulas in LaTeX."""

import importlib
import inspect
import re
import sys
from pathlib import Path

from rows import for_each

import jaxrl_llm as jr

EXTENSIONS = Path(__file__).resolve().parents[2] / "docs" / "_extensions"
sys.path.insert(0, str(EXTENSIONS))
try:
    docstrings, formulas = map(importlib.import_module, ("docstrings", "formulas"))
finally:
    sys.path.remove(str(EXTENSIONS))


@for_each(
    ("text", "latex"),
    [
        # A fraction of one factor by one factor; a function by its name.
        (
            "A_i = (r_i - mean(r)) / (std(r) + eps)",
            r"A_{i} = \frac{r_{i} - \operatorname{mean}(r)}{\operatorname{std}(r) + \varepsilon}",
        ),
        ("w^2 / (2 sigma^2)", r"\frac{w^{2}}{2\, \sigma ^{2}}"),
        # Only log knows how far its argument goes, and only the reader what "mean" is of.
        ("log a / b", r"\log  a / b"),
        ("h / mean H", r"h / \text{mean}\ H"),
        ("w / mean over j of w_j", r"w / \text{mean over}\ j\ \text{of}\ w_{j}"),
        ("a / b / c", r"\frac{\frac{a}{b}}{c}"),
        ("a / b c", r"a / b\, c"),
        # Indices in brackets, but not intervals, distributions and slices of calls.
        ("A[i, t] = R[next]", r"A_{i, t} = R_{\text{next}}"),
        ("u ~ U[0, 1]", r"u \sim  U[0, 1]"),
        ("u in [0, 1)", r"u\ \text{in}\ [0, 1)"),
        ("A_turn[i]", r"A_{\text{turn}}[i]"),
        ("A0_i", r"A_{0, i}"),
        ("1[r > 0]", r"\mathbf{1}[r > 0]"),
        # A sum whose terms end where it says so; with a difference behind, the words stay.
        ("sum over j >= k of gamma^(j - k) r_j", r"\sum_{j \ge  k} \gamma ^{j - k}\, r_{j}"),
        ("sum over t of a - b", r"\text{sum over}\ t\ \text{of}\ a - b"),
        ("sum over tokens of d", r"\text{sum over tokens of}\ d"),
        ("sqrt(|x|) + 1e-8", r"\sqrt{\lvert x\rvert} + 10^{-8}"),
        ("2.5e-3 x", r"2.5 \times 10^{-3}\, x"),
        ("x dual_clip", r"x\ \text{dual\_clip}"),
        ("x 10", r"x \cdot 10"),
        ("a token, a x", r"\text{a token}, a\, x"),
        ('mode="std":  z', r'\text{mode}=\texttt{"std"}:\quad z'),
    ],
)
def test_worked_lines(text, latex):
    squeezed = [re.sub(r"\s+", " ", x) for x in (formulas.to_latex(text), latex)]
    assert squeezed[0] == squeezed[1]


def test_lines_are_aligned_where_the_text_is():
    assert formulas.block_to_latex("alpha = 1\nb     = 2") == (
        "\\begin{aligned}\n\\alpha & = 1 \\\\\nb & = 2\n\\end{aligned}"
    )
    labels = formulas.block_to_latex("soft:  r\nhard:  r^2")
    assert labels is not None and labels.startswith(r"\begin{array}{@{}l@{\quad}l@{}}")


def test_code_and_prose_are_no_formula():
    assert formulas.block_to_latex("x = jnp.zeros(3)") is None
    assert formulas.block_to_latex("all right   one answer, the first") is None


def blocks():
    """The formulas of all public docstrings."""
    found = {}

    def note(text, is_formula):
        found[text] = is_formula
        return []

    for name in jr._NAMESPACES:
        namespace = getattr(jr, name)
        for key, value in vars(namespace).items():
            if callable(value) and not key.startswith("_"):
                doc = inspect.getdoc(value) or ""
                docstrings.with_formulas(doc.split("\n"), note)
    return found


def test_every_formula_is_whole_in_latex():
    """Brackets and environments close, and hardly anything is left as code."""
    found = blocks()
    latex = [text for text, is_formula in found.items() if is_formula]
    assert len(latex) > 500 and len(latex) > 0.9 * len(found)
    for text in latex:
        plain = re.sub(r"\\[{}_#%&$]", "", text)
        assert plain.count("{") == plain.count("}"), text
        assert text.count(r"\left") - text.count(r"\leftarrow") == text.count(r"\right"), text
        assert text.count(r"\begin") == text.count(r"\end"), text
        assert not re.search(r"_\{[^{}]*\}'*_", text), text  # which LaTeX refuses


def test_names_and_numbers_are_all_there_in_order():
    for name in ("grpo", "gae", "jspo", "maclaurin", "turn_gae", "whiten_uncertain"):
        doc = inspect.getdoc(getattr(jr.advantages, name))
        block = re.search(r"\n\n((?:    .*\n)+)", doc)[1]
        latex = formulas.block_to_latex(block)
        shown = re.sub(r"\\(text|operatorname|texttt|mathbf|begin|end|frac|sqrt)\b", " ", latex)
        shown = re.sub(r"\{(aligned|array)\}", " ", shown.replace(r"\_", "_"))
        words = re.findall(r"[A-Za-z]+|\d+", shown)
        asked = re.findall(r"[A-Za-z]+|\d+", re.sub(r":func:|\be-\d+", " ", block))
        asked = [formulas.GREEK.get(word, word).strip("\\") for word in asked]
        rest = iter(words)
        missing = [
            w for w in asked if w not in ("over", "of", "sqrt", "sum", "e") and w not in rest
        ]
        assert not missing, (name, missing, latex)


def test_a_docstring_becomes_restructured_text():
    lines = ["Half of it.", "", "    y = x / 2", "", "For |x| < 1 (arXiv:2402.03300), of:",
             "  ``x``: A number,", "    any one.", "", "Args:", "  x: A number."]  # fmt: skip
    assert docstrings.with_formulas(lines) == [
        "Half of it.", "", ".. math::", "", r"    y = \frac{x}{2}", "",
        r"For \|x\| < 1 (`arXiv:2402.03300 <https://arxiv.org/abs/2402.03300>`__), of:", "",
        "- ``x``: A number,", "  any one.", "", "", "Args:", "  x: A number.",
    ]  # fmt: skip
