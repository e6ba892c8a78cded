"""Writes estimators/p3o_joint.* or p3o_separate.*: the losses of P3O's first author.

python tests/golden/make/p3o.py CHECKOUT COMMIT    (of thwu1/trlx, or of thwu1/rlhf_sac)
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from paper_code import start, take

PATH = "trlx/models/modeling_p3o.py"


def cases():
    made = {}
    for seed, (name, step) in enumerate((("near", 0.15), ("far", 1.5), ("same", 0.0))):
        rng = np.random.default_rng(90 + seed)
        old, ref, rewards = rng.normal(size=(3, 6, 2))
        logp = -5.0 + old + step * rng.normal(size=(6, 2))
        rows = {"logp": logp, "old_logp": old - 5.0, "ref_logp": ref - 5.0, "rewards": rewards}
        made[name] = {key: x.astype(np.float32) for key, x in rows.items()}
    return made


def main():
    joint = "old_logratio: List" in (Path(sys.argv[1]) / PATH).read_text(encoding="utf-8")
    name, where = ("joint", "trlx") if joint else ("separate", "rlhf_sac")
    root, writer = start(f"p3o_{name}", f"P3O ({where})", f"thwu1/{where}")
    writer.head["script"] = "tests/golden/make/p3o.py"
    writer.inputs("pairs", cases())
    (loss,) = take(root / PATH, "loss")
    settings = SimpleNamespace(kl_coef=0.05, cliprange=0.2, cliprange_ratio=10.0)

    def run(case, a):
        x = {key: torch.from_numpy(np.array(rows)).T for key, rows in a.items()}
        logp = x["logp"].clone().requires_grad_()
        now, before = logp - x["ref_logp"], x["old_logp"] - x["ref_logp"]
        if joint:
            value, _ = loss(settings, list(now), list(x["rewards"]), list(before))
        else:
            value, _ = loss(settings, *now, *x["rewards"], *before)
        (gradient,) = torch.autograd.grad(value, [logp])
        # The joint one has another value, since it does not take out what was before.
        return {"gradient": gradient.T.numpy()} | (
            {} if joint else {"loss": value.detach().numpy()}
        )

    writer.add(name, run)
    writer.save()


if __name__ == "__main__":
    main()
