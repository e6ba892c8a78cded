"""Writes tests/golden/masa_texts.json: what akatigre/MASA-RL reads of texts, and its rewards.

python tests/golden/make/masa_texts.py CHECKOUT COMMIT
"""

import json
import random
import re
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "masa_texts.json"
PROBLEM = "A triangle has the sides 3, 4 and 5."
SOLUTIONS = ["the median and an identity", "identity, circle", "a median", "sum of axes"]
SCORES, LENGTHS = [1, 1, 0, 0], [100, 200, 50, 60]
TEXTS = [
    '<meta>hm</meta>{"math_notion": ["medians"], "pass_rate": 4, "solution_length": 150}',
    '{"math_notion": ["identities", "circle"], "pass_rate": 8, "solution_length": 100}',
    '{"math_notion": ["triangle"], "pass_rate": 0, "solution_length": 199}',
    '{"math_notion": "[identity, circle]", "pass_rate": 4, "solution_length": 150}',
    '{"math_notion": "identity", "pass_rate": 3, "solution_length": 10}',
    '{"math_notion": [], "pass_rate": 20, "solution_length": -1}',
    '{"math_notion": ["axes", "sum"], "pass_rate": "4", "solution_length": 150.0}',
    '{"math_notion": ["median", "medians"], "pass_rate": 4.0, "solution_length": null}',
    '{"math_notion": [1, 2], "pass_rate": 4, "solution_length": 101}',
    '{"math_notion": ["circle"], "pass_rate": 1} then {"math_notion": ["sum"], "pass_rate": 4}',
    '{"math_notion": ["circle"], "pass_rate": 4,',
    "nothing",
    "",
    "math_notion: [circle]",
]


def names(path, *wanted):
    """Functions of a file, by its text alone."""
    space = {"re": re, "json": json, "random": random}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return [space[name] for name in wanted]


def main():
    root, commit = Path(sys.argv[1]), sys.argv[2]
    folder = root / "verl/utils/reward_score"
    (read,) = names(folder / "utils.py", "extract_last_json_object")
    (score,) = names(folder / "meta_cog.py", "compute_score")
    truth = {"problem": PROBLEM, "response": SOLUTIONS, "score": SCORES, "length": LENGTHS}
    rows = [[text, score(read(text), truth)["score"]] for text in TEXTS]
    record = {
        "made_by": Path(__file__).name,
        "repository": "akatigre/MASA-RL",
        "commit": commit,
        "problem": PROBLEM,
        "solutions": SOLUTIONS,
        "rewards": SCORES,
        "lengths": LENGTHS,
        "texts": rows,
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
