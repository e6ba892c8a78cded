"""Writes estimators/ampo.*: SII-Enigma/AMPO's loss and advantages."""

from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import load_inputs
from guided_cases import STEERED, guided_cases, steered_tokens
from paper_code import (
    loss_of,
    outcome,
    passage,
    peer,
    spread,
    take,
    tensor,
    token_inputs,
)

CORE = "ampo/verl/verl/adaptive_mix_src/mix_core_alg.py"
VERL = "ampo/verl/verl/trainer/ppo/core_algos.py"
TRAINER = "ampo/verl/verl/adaptive_mix_src/mix_dapo_trainer.py"
FUNCTIONAL = "ampo/verl/verl/utils/torch_functional.py"
OFF = dict.fromkeys(("off_policy_max_clip", "off_policy_min_clip", "all_max_clip"), -1)


class Settings(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def loss(function, mode, **options):
    config = Settings(off_policy_normalize=False, clip_ratio=0.2, **OFF, **options)

    def compute(case, a, logp):
        return function(
            old_log_prob=tensor(case, a["old_logp"]),
            log_prob=logp,
            advantages=spread(case, a),
            eos_mask=tensor(case, a["mask"]),
            prefix_mask=torch.from_numpy(steered_tokens(a)),
            loss_agg_mode=mode,
            config=config,
        )["pg_loss"]

    return loss_of(compute)


def comprehension(path):
    def compute(case, a):
        begin, end = "scoreA = torch.mean(torch.exp(", "# mean log probs"
        rows = zip(a["logp"].reshape(12, 6), a["mask"].reshape(12, 6), strict=True)
        found = [
            passage(path, begin, end, old_log_probs_in_gt=torch.from_numpy(logp[kept]))["scoreA"]
            for logp, kept in rows
        ]
        return {"score": np.array(found).reshape(3, 4)}

    return compute


def reward_cases():
    """In one group of the ragged case a single own rollout is left."""
    shared = load_inputs("rewards")
    chosen = ("full", "binary", "all_equal", "ragged", "length_one", "bfloat16")
    names = ("rewards", "where", "mask")
    return {c: {n: shared[c][n] for n in names} | {"steered": STEERED} for c in chosen}


@peer("ampo", "AMPO", "SII-Enigma/AMPO")
def main(root, writer):
    _, mean = take(root / FUNCTIONAL, "masked_sum", "masked_mean")
    library = SimpleNamespace(masked_mean=mean)
    given = {"verl_F": library, "AlgoConfig": type(None), "print": lambda *_: None}
    (given["agg_loss"],) = take(root / VERL, "agg_loss", verl_F=library)
    writer.inputs("guided", guided_cases())
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 10.0}
    clip |= {"off_policy_reshape": "p_div_p_0.1"}
    for name in ("compute_token_on_off_policy_loss", "compute_token_on_seq_off_policy_loss"):
        (function,) = take(root / CORE, name, **given)
        for mode, changed in (
            ("token-mean", {}),
            ("seq-mean-token-mean", {}),
            ("constant", {"loss_remove_token_mean": True}),
            ("no_clip", {"loss_remove_clip": True}),
        ):
            options = clip | changed
            aggregation = mode if "mean" in mode else "token-mean"
            writer.add(
                f"{'sequences' if 'seq' in name else 'tokens'}_{mode}",
                loss(function, aggregation, **options),
            )
    name = "compute_grpo_outcome_advantage_split"
    (function,) = take(root / CORE, name, **given)

    def split(steered, response_mask, **more):
        own = [not bool(x) for x in steered]
        own = [SimpleNamespace(item=lambda x=x: x) for x in own]
        return function(eos_mask=response_mask, on_policy_mask=own, **more)

    scored = {"scored": token_inputs(["logp", "mask"], ["ragged"])["ragged"]}
    writer.inputs("scored", scored)
    writer.add("comprehension", comprehension(root / TRAINER))
    writer.inputs("groups", reward_cases())
    options = {"norm_adv_by_std_in_grpo": False}
    writer.add("split", outcome(split, needs=["steered"], **options))
