"""Writes estimators/branch_grpo.*: Fredreic1849/BranchGRPO's credit of a tree's nodes."""

import numpy as np
import torch
from paper_code import peer, take

PATH = "fastvideo/train_branchgrpo_flux.py"


def trees():
    """Two trees in one table: one splits twice, the other has a chain."""
    parents = np.array([-1, 0, 0, 1, 1, 2, 2, -1, 7, 7, 8, 9, 9])
    depth = np.array([0, 1, 1, 2, 2, 2, 2, 0, 1, 1, 2, 2, 2])
    tree = np.array([0] * 7 + [1] * 6)
    rng = np.random.default_rng(8)
    cases = {
        "random": rng.normal(size=13),
        "binary": rng.integers(0, 2, 13),
        "equal": np.ones(13),
    }
    shared = {"parents": parents, "depth": depth, "tree": tree}
    return {
        name: shared
        | {"rewards": x.astype(np.float32), "logp": rng.normal(size=13).astype(np.float32)}
        for name, x in cases.items()
    }


@peer("branch_grpo", "BranchGRPO", "Fredreic1849/BranchGRPO")
def main(root, writer):
    writer.inputs("trees", trees())
    given = {"main_print": lambda *_: None, "Dict": dict, "List": list}
    (Node,) = take(root / PATH, "TreeNode", **given)
    credit, normalize = take(
        root / PATH,
        "compute_node_rewards_from_leaves",
        "compute_hierarchical_advantages_by_depth",
        TreeNode=Node,
        **given,
    )

    def nodes_of(a):
        nodes = []
        for i, p in enumerate(a["parents"]):
            node = Node(
                str(i), torch.zeros(1), parent=nodes[p] if p >= 0 else None, step=int(a["depth"][i])
            )
            node.log_prob = torch.tensor(float(a["logp"][i]))
            if p >= 0 and node not in nodes[p].children:
                nodes[p].add_child(node)
            nodes.append(node)
        return nodes

    def compute(weighted):
        def run(case, a):
            nodes = nodes_of(a)
            advantages = np.zeros(13)
            for start_of in (0, 7):
                inside = [n for i, n in enumerate(nodes) if a["tree"][i] == a["tree"][start_of]]
                leaves = [n for n in inside if n.is_leaf()]
                rewards = torch.tensor([float(a["rewards"][int(n.node_id)]) for n in leaves])
                _, by_depth = credit(nodes[start_of], rewards, leaves, use_prob_weighted=weighted)
                for name, x in normalize(by_depth).items():
                    advantages[int(name)] = float(x)
            return {"rewards": np.array([float(n.reward) for n in nodes]), "advantages": advantages}

        return run

    for weighted in (False, True):
        writer.add("weighted" if weighted else "mean", compute(weighted))
