"""Writes estimators/icpo.*: Celine-hxy/ICPO's loss and its bonus."""

from types import SimpleNamespace

import numpy as np
from guided_cases import guided_cases
from paper_code import loss_of, peer, spread, take, tensor

CORE, SCORE = "verl/recipe/icpo/utils/core_algos.py", "verl/recipe/icpo/utils/reward_score.py"
VERL = "verl/verl/trainer/ppo/core_algos.py"
FUNCTIONAL = "verl/verl/utils/torch_functional.py"


class Settings(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def loss(function, mode, **options):
    def compute(case, a, logp):
        return function(
            old_log_prob=tensor(case, a["old_logp"]),
            log_prob=logp,
            advantages=spread(case, a),
            response_mask=tensor(case, a["mask"]),
            hinted=a["steered"].reshape(-1),
            loss_agg_mode=mode,
            config=Settings(clip_ratio=0.2, **options),
        )[0]

    return loss_of(compute)


def answers():
    """Right and wrong answers, with and without a demonstration, at steps up to past the end."""
    step, correct, steered = np.meshgrid(np.arange(0, 481, 40), [0, 1], [False, True])
    return {
        "step": step.reshape(-1).astype(np.int32),
        "correct": correct.reshape(-1).astype(np.float32),
        "steered": steered.reshape(-1),
    }


def bonus(path):
    names = {"print": lambda *_: None, "last_boxed_only_string": str, "remove_boxed": str}
    names["is_equiv"] = str.__eq__
    _, function = take(path, "decay_by_step", "compute_score_icpo_bonus", **names)

    def each(step, correct, steered):
        info = {"current_step": int(step), "hinted": int(steered)}
        return function("7" if correct else "8", "7", info)[0]["score"]

    def compute(case, a):
        rows = zip(a["step"], a["correct"], a["steered"], strict=True)
        return {"rewards": np.array([each(*row) for row in rows])}

    return compute


@peer("icpo", "ICPO", "Celine-hxy/ICPO")
def main(root, writer):
    _, mean = take(root / FUNCTIONAL, "masked_sum", "masked_mean")
    library = SimpleNamespace(masked_mean=mean)
    (aggregate,) = take(root / VERL, "agg_loss", verl_F=library)
    given = {"verl_F": library, "AlgoConfig": type(None), "agg_loss": aggregate}
    name = "compute_icpo_policy_loss"
    (function,) = take(root / CORE, name, **given)
    writer.inputs("guided", guided_cases())
    for mode in ("token-mean", "seq-mean-token-mean"):
        options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
        writer.add(mode, loss(function, mode, **options))
    writer.inputs("answers", {"all": answers()})
    writer.add("bonus", bonus(root / SCORE))
