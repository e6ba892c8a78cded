"""Writes estimators/wd1.*: xiaohangt/wd1's weighted likelihood of a group."""

from types import SimpleNamespace

import numpy as np
from denoisers import MASK_ID, batch_of, differentiated, rows, set_seed, trainer
from paper_code import peer, take

PATH = "wd1/trainers/rev_grpo_trainer.py"
METHODS = ("compute_loss", "forward_process", "get_logits", "_get_per_token_logps")


@peer("wd1", "wd1", "xiaohangt/wd1")
def main(root, writer):
    methods = take(root / PATH, *METHODS, set_seed=set_seed)
    rng = np.random.default_rng(44)
    writer.inputs("group", {name: rows(rng, 1, 6, 5) for name in ("one", "two")})

    def compute(case, a):
        args = SimpleNamespace(num_iterations=1, p_mask_prompt=0.15, mask_id=MASK_ID, cfg_scale=0.0)

        def loss(model):
            self = trainer(methods, args=args, _step=0)
            logits = lambda batch: SimpleNamespace(logits=model(batch))  # noqa: E731
            return self.compute_loss(logits, batch_of(a) | {"mask_seeds": [3]})

        return differentiated(loss, a)

    writer.add("loss", compute)
