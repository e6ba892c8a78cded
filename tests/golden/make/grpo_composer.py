"""Writes estimators/grpo_composer.*: Wodlfvllf/grpo-composer's reading of XRPO."""

import torch
from estimator_cases import load_inputs
from paper_code import array, peer, take

PATH = "grpo_composer/core/advantages/novelty_sharpening.py"
NAME = "NoveltySharpeningAdvantageFunction"


def sharpened(base, **options):
    def compute(case, a):
        inputs = (torch.from_numpy(a["rewards"]), torch.from_numpy(a["old_logp"]))
        return {"advantages": array(base(**options).compute_advantages(*inputs))}

    return compute


@peer("grpo_composer", "grpo-composer", "Wodlfvllf/grpo-composer")
def main(root, writer):
    (function,) = take(root / PATH, NAME, AdvantageFunction=object)
    shared = load_inputs("rewards")
    cases = {c: {n: shared[c][n] for n in ("rewards", "old_logp")} for c in ("full", "binary")}
    writer.inputs("unmasked", cases)
    for name, options in (
        ("paper", {"lambda_novelty": 2.5, "kappa_clip": 0.5}),
        ("free", {"lambda_novelty": 1.0, "kappa_clip": 100.0}),
    ):
        writer.add(name, sharpened(function, **options))
