"""Writes estimators/latr.*: starreeze/latr's candidates and its limit of branches."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, peer, take

FILTER, GENERATION = "model/sample_filter.py", "model/generation.py"
METRICS = "model/metrics.py"


def rows():
    rng = np.random.default_rng(9)
    probs = rng.dirichlet(np.full(6, 0.6), 12).astype(np.float32)
    return {"random": {"probs": probs, "roots": rng.integers(0, 3, 12)}}


@peer("latr", "LATR", "starreeze/latr")
def main(root, writer):
    writer.inputs("rows", rows())
    (ProbFilter,) = take(
        root / FILTER, "ProbFilter", KeyTokenFilter=object, PreTrainedTokenizer=object
    )

    def candidates(a, low, gap):
        top, ids = torch.from_numpy(a["probs"]).topk(3, dim=-1)
        rule = SimpleNamespace(prob_filter_abs_thres=low, prob_filter_rel_thres=gap)
        found = ProbFilter.__call__(rule, None, ids, top)
        return torch.cat([torch.ones(len(found), 1, dtype=torch.bool), found], 1), ids

    def branches(low, gap):
        def compute(case, a):
            keep, ids = candidates(a, low, gap)
            return {"keep": keep.numpy(), "tokens": ids.numpy()}

        return compute

    for low, gap in ((0.25, 0.15), (0.15, 0.25)):
        writer.add(f"branches_{low:g}", branches(low, gap))

    def limit(most):
        def compute(case, a):
            keep, _ = candidates(a, 0.05, 0.5)
            groups = {r: np.flatnonzero(a["roots"] == r).tolist() for r in range(3)}
            made = passage(
                root / GENERATION,
                "groups = branch_info.group_by_root()",
                "assert (sample_masks == 0).sum() <=",
                branch_info=SimpleNamespace(group_by_root=lambda: groups),
                sample_masks=1 - keep.to(torch.int8),
                num_return_sequences=most,
                device="cpu",
            )
            return {"keep": (made["sample_masks"] == 0).numpy()}

        return compute

    for most in (6, 8):
        writer.add(f"limit_{most}", limit(most))
    pairs = np.random.default_rng(17).integers(0, 3, (2, 40, 8))
    writer.inputs("pairs", {"random": {"a": pairs[0], "b": pairs[1]}})
    names = ("longest_prefix_in_text", "suffix_match_score", "lcs_len", "rouge_l_score")
    functions = dict(zip(names, take(root / METRICS, *names), strict=True))
    for function in functions.values():
        function.__globals__.update(functions)
    for name, output in (("suffix_match_score", "suffix"), ("rouge_l_score", "overlap")):

        def similarity(case, a, function=functions[name], output=output):
            rows = zip(a["a"].tolist(), a["b"].tolist(), strict=True)
            return {output: np.array([function(x, y) for x, y in rows])}

        writer.add(output, similarity)
