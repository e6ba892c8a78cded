"""Writes estimators/hiper.*: JonP07/HiPER-agent's hierarchical advantages."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take

PATH = "hiper_hae/core_hae.py"
ROLLOUTS, TURNS, TOKENS = 4, 5, 6


def turns():
    """Rollouts of one to five turns; each turn has a value of each kind, and tokens of parts."""
    cases = {}
    for seed, name in enumerate(("random", "no_switch", "every_switch")):
        rng = np.random.default_rng((12, seed))
        shape = (ROLLOUTS, TURNS)
        switches = rng.random(shape) < 0.4
        if name != "random":
            switches[:] = name == "every_switch"
        cases[name] = {
            "rewards": rng.normal(size=shape).astype(np.float32),
            "action_values": rng.normal(size=shape).astype(np.float32),
            "subgoal_values": rng.normal(size=shape).astype(np.float32),
            "switch_values": rng.normal(size=shape).astype(np.float32),
            "switches": switches,
            "where": np.arange(TURNS) < np.array([5, 3, 1, 4])[:, None],
            "truncated": np.array([False, True, False, True]),
            "roles": rng.integers(0, 4, (*shape, TOKENS)).astype(np.int32),
        }
    return cases


@peer("hiper", "HiPER", "JonP07/HiPER-agent")
def main(root, writer):
    writer.inputs("turns", turns())
    names = ("_as_torch_1d", "_group_indices_by_traj", "compute_hae_advantage")
    *_, credit = take(root / PATH, *names, print=lambda *_: None, DataProto=object)

    def compute(normalize, bootstrap):
        def run(case, a):
            where = a["where"]
            rollout, turn = np.nonzero(where)
            last = turn == where.sum(-1)[rollout] - 1
            ones = torch.ones((len(turn), TOKENS), dtype=torch.bool)
            first = torch.arange(TOKENS)[None] == torch.zeros((len(turn), 1))

            def at_first(name):
                return torch.tensor(a[name][where])[:, None] * first

            arrays = {"response_mask": ones, "responses": ones.long()}
            for kind, name in (("low", "action"), ("high", "subgoal"), ("term", "switch")):
                arrays[f"value_{kind}"] = at_first(f"{name}_values")
                arrays[f"value_mask_{kind}"] = first
            others = {
                "traj_uid": rollout,
                "turn_idx": turn,
                "dones": last & ~a["truncated"][rollout],
                "switch": a["switches"][where],
                "rewards": a["rewards"][where],
            }
            config = SimpleNamespace(
                gamma=0.9,
                lam_turn=0.8,
                lam_seg=0.5,
                value_key_low="value_low",
                value_key_high="value_high",
                value_key_term="value_term",
                assign_high_to_switch=False,
                assign_high_to_subgoal=True,
                assign_term_to_switch=True,
                norm_adv=normalize,
                bootstrap_truncated=bootstrap,
                keep_penalty=0.0,
                invalid_action_penalty_coef=0.0,
                keep_consistency_penalty=0.0,
            )
            roles = torch.tensor(a["roles"][where])
            batch = SimpleNamespace(batch=arrays, non_tensor_batch=others)
            made = credit(
                batch,
                config,
                action_mask=roles == 1,
                subgoal_mask=roles == 2,
                switch_mask=roles == 3,
            ).batch

            def spread(x, width):
                full = np.zeros((*where.shape, width), np.float32)
                full[where] = x.numpy()
                return full

            masks = [made[f"hae_{kind}_mask"] for kind in ("lo", "hi", "term")]
            returns = [made[f"returns_{kind}"][:, :1] for kind in ("low", "high", "term")]
            return {
                "advantages": spread(made["advantages"], TOKENS),
                "keep": spread(torch.stack(masks).any(0).float(), TOKENS) > 0,
                "returns": np.concatenate([spread(x, 1) for x in returns], -1),
            }

        return run

    for name, normalize, bootstrap in (("raw", False, True), ("normalized", True, False)):
        writer.add(name, compute(normalize, bootstrap))
