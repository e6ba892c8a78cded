"""Writes tests/golden/rewards.json: what peers' rewards give for texts, token ids and lengths.

python tests/golden/make/reward_texts.py SLIME TRL OPEN_R1 VERL PRIME_RL

Each argument is CHECKOUT=COMMIT; VERL is its installed package=VERSION. Single functions are run
out of their files' text, with math-verify, sympy and pylatexenc installed. Nothing of it is stored.
"""

import __future__

import ast
import importlib.metadata
import json
import logging
import math
import re
import string
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Optional

import latex2sympy2_extended
import math_verify
import pylatexenc.latex2text
import sympy
from sympy.parsing import sympy_parser

OUT = Path(__file__).parents[1] / "rewards.json"
REPOSITORIES = {
    "slime": "THUDM/slime",
    "TRL": "huggingface/trl",
    "open-r1": "huggingface/open-r1",
    "verl": "verl-project/verl",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
}

BOXED = [
    (r"so \boxed{4}", "4"),
    (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"$\boxed{\frac{2}{4}}$", r"\frac{1}{2}"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{3}", "4"),
    (r"\boxed{x^2 + 1}", "x^2+1"),
    (r"\boxed{1 + x^2}", "x^2+1"),
    (r"\boxed{\sqrt{2}}", r"\sqrt{2}"),
    (r"\boxed{(1, 2)}", "(1, 2)"),
    (r"\boxed{(2, 1)}", "(1, 2)"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{-7}", "-7"),
    (r"\boxed{7}", "-7"),
    (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}"),
    (r"\boxed{2\pi}", r"2\pi"),
    (r"\boxed{50\%}", r"50\%"),
    (r"\boxed{\text{12 cm}}", "12"),
    (r"\boxed{12", "12"),
    ("no box, 12", "12"),
    (r"\boxed{}", "12"),
]
DAPO = [
    ("Answer: 18", "18"),
    ("so\nAnswer: $18$", "18"),
    ("answer :  18.", "18"),
    ("Answer: 17\nAnswer: 18", "18"),
    ("Answer: 18\nAnswer: 17", "18"),
    ("Answer: x = 18", "18"),
    ("Answer: 1,000", "1000"),
    ("Answer: 18 dollars", "18"),
    (r"Answer: \text{18}", "18"),
    (r"Answer: \boxed{18}", "18"),
    (r"Answer: $18^\circ$", "18"),
    ("Answer: 18 degrees", "18"),
    ("Answer: 018", "18"),
    ("Answer: -18", "-18"),
    ("Answer: 18 and 19", "18"),
    ("**Answer:** 18", "18"),
    ("The answer is 18", "18"),
    ("", "18"),
    ("Answer: 18" + " " * 290, "18"),
    ("Answer: 18" + "." * 300, "18"),
]
NORMALIZED = [
    r"\frac12",
    r"\frac{1}{2}",
    r"\sqrt2",
    r"\sqrt23",
    "x=5",
    "5 \\text{ m}",
    "a dog",
    "an apple",
    "$5.$",
    r"\$5",
    "1,234,567",
    "1,2",
    r"3\text{ and }4",
    r"\mbox{five}",
    "5 mph",
    r"\overline{AB}",
    r"\textbf{7}",
    r"7^{\circ}",
    r"5\,\!000",
    "{,}5",
    '"5"',
    r"\dots",
    "12 square meters",
    r"\frac{a}{b}=\frac{1}{3}",
    "$x$ and $y$",
]
WORDS = [
    ("the Eiffel Tower, Paris", "Eiffel Tower"),
    ("The Eiffel Tower!", "eiffel tower"),
    ("a man a plan", "man plan canal"),
    ("London", "Paris"),
    ("", "Paris"),
    ("yes", "yes"),
    ("yes indeed", "yes"),
    ("no", "no idea"),
    ("noanswer", "Paris"),
    ("one one two", "one two two"),
    ("U.S.A.", "USA"),
    ("well-known", "well known"),
    ("don't", "dont"),
]
CHOICES = [
    ("The answer is C", "C"),
    ("The answer is (C).", "C"),
    ("Answer: B", "B"),
    ("Answer: A", "B"),
    ("I would say B.", "B"),
    ("<think>Answer: A</think> The answer is D", "D"),
    ("(D)", "D"),
    ("So B is the correct one", "B"),
    ("Final answer: C", "C"),
    ("correct option: D", "D"),
    ("nothing", "A"),
    ("Between A and B, I take B", "B"),
    # Where ours differs, since a match within a word is none and the last statement counts.
    ("The choice because of heat. The answer is D", "D"),
    ("Option A is wrong. The answer is C", "C"),
    ("The answer is B? No, the answer is C", "C"),
    (r"The answer is $\boxed{\text{A}}$", "A"),
]
THINKING = [
    "<think>a</think>b",
    "<think>\na\n</think>\nb",
    "<think></think>",
    "<think>a",
    "a</think>b",
    " <think>a</think>",
    "<think>a<think>b</think>c",
    "<think>a</think>b<think>c</think>",
    "<think>a</think>b</think>",
    "b<think>a</think>",
    "",
]
REASONING = [
    (r"<think> a </think> \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"<think> a </think> \boxed{\frac{1}{2}}", r"\frac{1}{3}"),
    (r"<think> \boxed{\frac{1}{3}} and no end", r"\frac{1}{3}"),
    (r"<think> \boxed{2} </think> \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"<think> \boxed{\frac{1}{3}} </think> \boxed{2}", r"\frac{1}{3}"),
    (r"</think> a </think> $4$", "4"),
]
TOKENS = [
    [],
    [1],
    [1, 2],
    [1, 2, 3],
    [5, 5, 5, 5, 5],
    [1, 2, 1, 2, 1, 2, 1],
    [1, 2, 3, 1, 2, 3, 4],
    [0, 0, 1, 0, 0, 1, 0],
    list(range(20)),
]
REPEATED = ["", "one two", "a b c", "no no no no no", "The cat sat the cat sat", "a b c d a b c"]
LENGTHS = [0, 1, 25, 50, 99, 100]


def take(path, *wanted, **names):
    """Names of a file: functions, classes and constants, run without its imports."""
    body = []
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = getattr(node.targets[0], "id", None)
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        if not imports and (not wanted or name in wanted):
            body.append(node)
    space = {"math": math, "re": re, "string": string, "Counter": Counter, "Iterable": Iterable}
    space |= {"Callable": Callable, "Optional": Optional, "logging": logging, **names}
    flag = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), str(path), "exec", flag), space)
    return space


def chat(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def slime(root):
    """Boxes, the DAPO rule, F1 and multiple choice."""
    hub = root / "slime" / "rollout" / "rm_hub"
    names = {
        "latex2text": pylatexenc.latex2text,
        "sympy": sympy,
        "sympy_parser": sympy_parser,
    }
    maths = take(hub / "math_utils.py", **names)
    dapo, words = take(hub / "math_dapo_utils.py", signal=None), take(hub / "f1.py")
    choices = take(hub / "gpqa.py")
    yield "extract_answer", [(text, maths["extract_answer"](text)) for text, _ in BOXED]
    graded = [(text, gold, int(maths["grade_answer_verl"](text, gold))) for text, gold in BOXED]
    yield "grade_answer_verl", graded
    yield (
        "math_dapo compute_score",
        [(text, gold, dapo["compute_score"](text, gold)["score"]) for text, gold in DAPO],
    )
    yield "normalize_final_answer", [(x, dapo["normalize_final_answer"](x)) for x in NORMALIZED]
    yield "f1_score", [(text, gold, words["f1_score"](text, gold)[0]) for text, gold in WORDS]
    options = {"valid_letters": ["A", "B", "C", "D"]}
    yield (
        "compute_gpqa_reward",
        [
            (text, gold, choices["compute_gpqa_reward"](text, gold, dict(options)))
            for text, gold in CHOICES
        ],
    )


def trl(root):
    """Accuracy by math-verify, the format of thinking, repetition, cosine and overlong."""
    folder = root / "trl" / "rewards"
    accuracy = take(
        folder / "accuracy_rewards.py",
        *("accuracy_reward", "reasoning_accuracy_reward", "_CosineScaledReward"),
        is_math_verify_available=lambda: True,
        threading=threading,
        parse=math_verify.parse,
        verify=math_verify.verify,
        LatexExtractionConfig=math_verify.LatexExtractionConfig,
        NormalizationConfig=latex2sympy2_extended.NormalizationConfig,
    )
    for name, cases in (("accuracy_reward", BOXED), ("reasoning_accuracy_reward", REASONING)):
        texts, golds = zip(*cases, strict=True)
        values = accuracy[name](chat(texts), [f"${gold}$" for gold in golds])
        yield name, list(zip(texts, golds, values, strict=True))
    form = take(folder / "format_rewards.py")["think_format_reward"]
    yield "think_format_reward", list(zip(THINKING, form(chat(THINKING)), strict=True))
    other = take(folder / "other_rewards.py")
    rows = []
    for ngram, most in ((1, -1.0), (2, -1.0), (3, -0.5)):
        values = other["get_repetition_penalty_reward"](ngram, most)(TOKENS)
        rows += [(ids, ngram, most, value) for ids, value in zip(TOKENS, values, strict=True)]
    yield "get_repetition_penalty_reward", rows
    cosine = accuracy["_CosineScaledReward"](100, -1.0, -0.5, 0.5, 1.0)
    rows, lengths = [], [*LENGTHS, 150]
    for right in (True, False):
        texts = chat([r"\boxed{4}" if right else r"\boxed{3}"] * len(lengths))
        values = cosine(texts, ["$4$"] * len(lengths), [[1] * n for n in lengths])
        rows += [(right, n, value) for n, value in zip(lengths, values, strict=True)]
    yield "get_cosine_scaled_reward", rows
    overlong = other["get_soft_overlong_punishment"](100, 20)
    lengths = [0, 80, 81, 90, 100, 101]
    values = overlong([[1] * n for n in lengths])
    yield "get_soft_overlong_punishment", list(zip(lengths, values, strict=True))


def open_r1(root):
    """The bonus for short responses of a group, and repeated words."""
    names = take(
        root / "src" / "open_r1" / "rewards.py",
        *("len_reward", "get_repetition_penalty_reward"),
        parse=lambda text, **_: [text],
        verify=lambda ours, theirs: ours[0].strip("x") == theirs[0],
        LatexExtractionConfig=lambda **_: None,
        NormalizationConfig=lambda **_: None,
    )
    rows = []
    for lengths, right in (
        ([2, 8, 4, 2], [1, 1, 0, 0]),
        ([3, 3, 3], [1, 0, 1]),
        ([1, 2, 9, 5], [0, 0, 0, 0]),
    ):
        texts = [("4" if ok else "5") + "x" * (n - 1) for n, ok in zip(lengths, right, strict=True)]
        values = names["len_reward"](chat(texts), ["4"] * len(texts))
        rows.append((lengths, right, values))
    yield "len_reward", rows
    values = names["get_repetition_penalty_reward"](3, -1.0)(chat(REPEATED))
    yield "get_repetition_penalty_reward", list(zip(REPEATED, values, strict=True))


def verl(root):
    """The DAPO rule."""
    dapo = take(root / "utils" / "reward_score" / "math_dapo.py")
    rows = [(text, gold, dapo["compute_score"](text, gold)["score"]) for text, gold in DAPO]
    yield "math_dapo compute_score", rows


def prime_rl(root):
    """Length penalties by the distance to a target."""

    class Record(dict):
        __getattr__ = dict.__getitem__

        def __init__(self, **values):
            super().__init__(values)

    compute = take(
        root / "src" / "zeroband" / "inference" / "rewards.py",
        "_compute_completion_reward",
        get_reward_function=lambda task: lambda text, info: float(text),
        CompletionReward=Record,
    )["_compute_completion_reward"]
    rows = []
    for form in ("exact", "max", "clip"):
        for reward, target, length in ((1, 6, 4), (1, 6, 9), (0, 6, 9), (1, 6, 6), (1, 0, 9)):
            config = Record(
                len_reward=Record(reward_type=form, reward_coef=0.1, max_reward_delta=0.5)
            )
            output = Record(index=0, text=str(reward), token_ids=[1] * length)
            value = compute(output, {"target_length": target}, None, config).reward
            rows.append((form, reward, target, length, value))
    yield "_compute_completion_reward", rows


def main():
    makers = (slime, trl, open_r1, verl, prime_rl)
    data = {"made_by": Path(__file__).name}
    data["packages"] = {x: importlib.metadata.version(x) for x in ("math-verify", "sympy")}
    for maker, name, argument in zip(makers, REPOSITORIES, sys.argv[1:], strict=True):
        root, _, commit = argument.partition("=")
        functions = {key: rows for key, rows in maker(Path(root))}
        data[name] = {"repository": REPOSITORIES[name], "commit": commit, "functions": functions}
    OUT.write_text(json.dumps(data, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
