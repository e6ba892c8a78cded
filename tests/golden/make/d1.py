"""Writes estimators/d1.*: dllm-reasoning/d1's loss of diffu-GRPO."""

from types import SimpleNamespace

import numpy as np
import torch
from denoisers import MASK_ID, Model, batch_of, differentiated, rows, set_seed, trainer
from paper_code import peer, take

PATH = "diffu-grpo/diffu_grpo_trainer.py"
METHODS = ("compute_loss", "forward_process", "get_logits", "_get_per_token_logps")


@peer("d1", "d1", "dllm-reasoning/d1")
def main(root, writer):
    methods = take(root / PATH, *METHODS, set_seed=set_seed)
    rng = np.random.default_rng(40)
    writer.inputs("responses", {name: rows(rng, 1, 4, 6) for name in ("one", "two")})

    def compute(case, a):
        args = SimpleNamespace(num_iterations=2, p_mask_prompt=0.15, mask_id=MASK_ID, cfg_scale=0.0)

        def model(logits):
            return lambda batch: SimpleNamespace(logits=logits(batch))

        def loss(logits):
            self = trainer(methods, args=args, num_iterations=2, beta=0.04, epsilon=0.5, _step=0)
            inputs = batch_of(a)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[None]
            for name in ("old", "ref"):
                with torch.no_grad():
                    values = self._get_per_token_logps(
                        model(Model(torch.from_numpy(a[f"{name}_draws"]))), ids, 6, [7]
                    )
                inputs[f"{name}_per_token_logps"] = values[None]
            return self.compute_loss(model(logits), inputs | {"mask_seeds": [7, 8]})

        return differentiated(loss, a)

    writer.add("loss", compute)
