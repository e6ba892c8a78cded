"""Writes estimators/spo.*: AIFrameResearch/SPO's values and advantages of a tree."""

import sys
import types

import numpy as np
import torch
from paper_code import peer, take

TREE = "src/treetune/episode_generators/tree_episode_generator.py"
UTILS = "src/treetune/trainers/utils.py"
PARENTS = np.array([-1, 0, 0, 0, 1, 1, 2, 2, 2, 4, 4])
DEPTH = np.array([0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3])


def trees():
    """A tree of three levels whose third branch ended early."""
    rng = np.random.default_rng(11)
    scores = {
        "binary": rng.integers(0, 2, 11),
        "shares": rng.integers(0, 5, 11) / 4,
        "equal": np.ones(11),
    }
    return {
        name: {"parents": PARENTS, "depth": DEPTH, "rewards": x.astype(np.float32)}
        for name, x in scores.items()
    }


def tokens():
    rng = np.random.default_rng(12)
    cases = {}
    for name in ("some", "all"):
        old = -rng.gamma(1.0, 0.4, (4, 6)) - (0.2 if name == "all" else 0.0)
        mask = np.arange(6) < rng.integers(2, 7, (4, 1))
        x = rng.normal(size=(4, 6))
        cases[name] = {
            "advantages": x.astype(np.float32),
            "old_logp": old.astype(np.float32),
            "mask": mask,
        }
    return cases


@peer("spo", "SPO", "AIFrameResearch/SPO")
def main(root, writer):
    writer.inputs("spo_trees", trees())
    writer.inputs("spo_tokens", tokens())
    score, edges = take(
        root / TREE,
        "compute_score",
        "extract_edges_from_tree",
        copy=__import__("copy"),
        json=__import__("json"),
    )

    def nodes_of(a):
        nodes = [{"text": str(i), "full_text": str(i)} for i in range(len(PARENTS))]
        for i, p in enumerate(PARENTS):
            if p >= 0:
                nodes[p].setdefault("children", []).append(nodes[i])
        for i, node in enumerate(nodes):
            if "children" not in node:
                node["answer"] = float(a["rewards"][i])
        return nodes

    task = types.SimpleNamespace(is_answer_correct=lambda task, node, gold: node["answer"])

    def values(case, a):
        nodes = nodes_of(a)
        score(task, None, nodes[0], None)
        return {"values": np.array([node["score"] for node in nodes])}

    writer.add("values", values)

    def advantages(method):
        def run(case, a):
            nodes = nodes_of(a)
            score(task, None, nodes[0], None)
            for node in nodes:
                node["reward"], node["leaf"] = float(node["score"]), "children" not in node
                # As hybrid_inference_strategy.py does.
                children = [c["score"] for c in node.get("children", [])]
                node["reward_std"] = float(np.std(children)) if children else 0.0
            nodes[0]["_request_object"] = {"_treetune__idx": 0}
            out = np.zeros(len(PARENTS))
            found = edges(None, nodes[0], adv_method=method, only_adv_greater_than_zero=False)
            for edge in found:
                out[int(edge["response_text"])] = edge["advantage"]
            return {"advantages": out}

        return run

    for method in ("rloo", "grpo"):
        writer.add(method, advantages(method))

    # Its statistics are over processes only where there are several.
    comm = types.ModuleType("deepspeed.comm")
    comm.is_initialized = lambda: False
    deepspeed = types.ModuleType("deepspeed")
    deepspeed.comm = comm
    sys.modules |= {"deepspeed": deepspeed, "deepspeed.comm": comm}
    whiten, *_ = take(root / UTILS, "masked_whiten", "masked_mean", "masked_var")

    def whitened(case, a):
        mask = torch.from_numpy(a["mask"])
        x, old = (torch.from_numpy(a[n]) for n in ("advantages", "old_logp"))
        out = whiten(x, mask, logprobs=old, distributed=True, unbiased_variance=True)
        keep = mask & (torch.exp(old) < 0.9)
        return {"advantages": torch.where(keep, out, 0.0).numpy(), "keep": keep.numpy()}

    writer.add("whiten", whitened)
