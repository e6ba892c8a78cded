"""Writes estimators/jspo.*: guanning03/JSPO-Official's advantages."""

from einops import rearrange
from paper_code import outcome, peer, take
from passk_cases import binary_cases

CORE = "code/verl/trainer/ppo/core_algos.py"


@peer("jspo", "JSPO-Official", "guanning03/JSPO-Official")
def main(root, writer):
    given = {"rearrange": rearrange, "score_tensor_to_pass_at_k": lambda _: {}}
    (function,) = take(root / CORE, "compute_jspo_outcome_advantage", **given)
    writer.inputs("binary", binary_cases())
    for name in ("binary", "rewards"):
        writer.add(name, outcome(function))
