"""Writes estimators/trl_advantages.*: TRL's advantages and importance weights.

Rows that take no part are rewards of NaN, TRL's mark for a completion that nobody could score.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import written
from trl import GRPOTrainer, RLOOTrainer
from trl_peer import SCORE, VERSIONS, array, tensor, tokens, trainer


def score(kind, case, a, rewards, *, old=None, sampled=None, **options):
    """What the trainer makes of completions with these rewards."""
    made = trainer(kind, **options)
    mask = a["mask"].reshape(12, 6)
    # A completion ends after its last kept token; what is masked before it is the tool's.
    lengths = [max(int(np.flatnonzero(row).max(initial=0)) + 1, 1) for row in mask]
    ids = [[7] * n for n in lengths]
    inside = [list(map(int, row[:n])) for row, n in zip(mask, lengths, strict=True)]
    logps = None
    if sampled is not None:
        logps = [list(map(float, row[:n])) for row, n in zip(sampled, lengths, strict=True)]
    width = max(lengths)
    names = [f"r{i}" for i in range(rewards.shape[1])]
    made._tokenizer = SimpleNamespace(pad_token_id=0)
    made._logs = {k: [] for k in ("prompt", "completion", "advantages", "images")}
    made._logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
    made._pending_extra_logs, made._pending_metrics = {}, {}
    made.reward_funcs, made.reward_func_names = names, names
    made.reward_weights = options.get("reward_weights", torch.ones(len(names)))
    made.eos_token_ids = [7]
    generated = ([[5]] * 12, ids, inside, ["x"] * 12, logps, {}, None, None)
    if kind is RLOOTrainer:
        generated = ([[5]] * 12, ids, ["x"] * 12)
    made._generate = lambda prompts, *args: generated
    made._calculate_rewards = lambda *args: rewards
    old = torch.zeros(12, 6) if old is None else old
    made._get_per_token_logps_and_entropies = lambda *_, **__: (old[:, :width], None, None)
    return made._generate_and_score_completions([{"prompt": "x"} for _ in range(12)])


def with_gaps(case, x, where):
    x = tensor(case, x[..., None]).float()
    x[~torch.from_numpy(where.reshape(-1))] = torch.nan
    return x.to(torch.bfloat16) if case == "bfloat16" else x


def advantage(kind=GRPOTrainer, **options):
    def compute(case, a):
        result = score(kind, case, a, with_gaps(case, a["rewards"], a["where"]), **options)
        return {"advantages": array(result["advantages"]).reshape(3, 4)}

    return compute


def gdpo(multi_objective_aggregation, reward_weights):
    def compute(case, a):
        columns = [with_gaps(case, x, a["where"]) for x in a["columns"]]
        result = score(
            GRPOTrainer,
            case,
            a,
            torch.cat(columns, dim=1),
            multi_objective_aggregation=multi_objective_aggregation,
            reward_weights=torch.tensor(reward_weights),
        )
        return {"advantages": array(result["advantages"]).reshape(3, 4)}

    return compute


def importance(**options):
    def compute(case, a):
        result = score(
            GRPOTrainer,
            case,
            a,
            torch.zeros(12, 1),
            old=tensor(case, a["old_logp"]),
            sampled=tensor(case, a["behavior_logp"]),
            use_vllm=True,
            **options,
        )
        ratio = result["importance_sampling_ratio"]
        full = torch.zeros(12, 6)
        mask = torch.from_numpy(a["mask"].reshape(12, 6))
        width = ratio.shape[1] if ratio.shape[1] > 1 else 6
        full[:, :width] = ratio.float().expand(12, width)
        return {"weights": tokens(full * mask)}

    return compute


def of_grpo(**arguments):
    if "reward_weights" in arguments:
        return gdpo(**arguments)
    return advantage(**arguments) if "scale_rewards" in arguments else importance(**arguments)


@written("trl_advantages", "trl", VERSIONS)
def main(writer):
    writer.add("rloo", advantage(RLOOTrainer))
    writer.each(SCORE, of_grpo)
