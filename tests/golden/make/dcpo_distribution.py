"""Writes estimators/dcpo_distribution.*: 597358816/DCPO's advantages.

python tests/golden/make/dcpo_distribution.py CHECKOUT COMMIT
"""

from types import SimpleNamespace

import numpy as np
from paper_code import array, passage, spread, start, take, tensor, token_inputs

TRAINER = "verl/trainer/ray_trainer.py"
ENTROPIES = {"below": 0.1, "just_below": 0.46, "above": 0.53, "far_above": 2.0}
TARGET = 0.5


class Batch(SimpleNamespace):
    def __len__(self):
        return 12


def entropy_cases():
    rng = np.random.default_rng(20)
    names = ("old_logp", "advantages", "mask")
    tokens = token_inputs(names, ["ragged"])["ragged"]
    cases = {}
    for name, entropy in ENTROPIES.items():
        tempered = [
            np.minimum(tokens["old_logp"] + 0.3 * rng.normal(size=(3, 4, 6)), -0.01)
            for _ in range(2)
        ]
        hot, cold = (x.astype(np.float32) for x in tempered)
        rewards = rng.integers(0, 2, (3, 4)).astype(np.float32)
        more = {"hot_logp": hot, "cold_logp": cold, "rewards": rewards}
        cases[name] = tokens | more | {"policy_entropy": np.float32(entropy)}
    return cases


def mixed(path):
    (label,) = take(path, "_compute_bool_reward_by_score")

    def compute(case, a):
        entropy = float(a["policy_entropy"])
        names = {"entropy": entropy, "entropy_base": TARGET}
        begin, end = "temperature = 1", "_compute_bool_reward_by_score"
        names = passage(path, begin, end, after='elif alg=="DCPO"', **names)
        tempered = a["hot_logp" if names["temperature"] > 1 else "cold_logp"]
        batch = Batch(
            batch={
                "token_level_scores": tensor(case, a["rewards"][..., None]),
                "advantages": spread(case, a),
                "old_log_probs": tensor(case, a["old_logp"]),
                "old_log_probs_t": tensor(case, tempered),
            }
        )
        label(batch, threshold=0.05, absolute=False)
        names |= {"batch": batch, "print": lambda *_: None}
        begin, end = "old_log_probs = batch.batch", "self._compute_ref_log_probs"
        passage(path, begin, end, after='elif alg=="DCPO"', **names)
        found = array(batch.batch["advantages"]).reshape(3, 4, 6)
        return {"advantages": np.where(a["mask"], found, 0.0)}

    return compute


def main():
    root, writer = start("dcpo_distribution", "DCPO (distribution-centric)", "597358816/DCPO")
    writer.inputs("entropies", entropy_cases())
    writer.add("advantages", mixed(root / TRAINER))
    writer.save()


if __name__ == "__main__":
    main()
