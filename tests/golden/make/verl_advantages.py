"""Writes estimators/verl_advantages.*: verl's advantages on the shared inputs."""

import types

import numpy as np
import torch
from estimator_cases import written
from verl_peer import VERSIONS, array, core_algos, tensor, tokens, torch_functional


def advantage(function, *, takes=(), with_returns=False, **arguments):
    """Calls an estimator on the rows that take part, with each reward on the last token."""

    def compute(case, a):
        where = a["where"].reshape(-1)
        mask = tensor(case, a["mask"])[where]
        index = np.repeat(np.arange(3), 4)[where]
        rewards = tensor(case, a["rewards"][..., None]).squeeze(-1)[where]
        token_rewards = torch.zeros(mask.shape, dtype=rewards.dtype)
        # On the first position: the estimators sum over it, and a masked row keeps its reward.
        position = torch.zeros(len(mask), dtype=torch.long)
        if "last" in takes:
            position = (mask * torch.arange(1, 7)).argmax(-1)
        token_rewards[torch.arange(len(mask)), position] = rewards
        more = {}
        if "index" in takes:
            more["index"] = index
        if "greedy" in takes:
            baseline = torch.tensor(np.repeat(a["greedy_rewards"], 4)).to(rewards.dtype)
            more["reward_baselines"] = baseline[where]
        if "otb" in takes:
            more["old_log_probs"] = tensor(case, a["old_logp"])[where]
            more["sum_pi_squared"] = tensor(case, a["sum_pi_sq"])[where]
        if "weight" in takes:
            more["rollout_is_weights"] = tensor(case, a["weight"])[where]
        if "values" in takes:
            more["values"] = tensor(case, a["values"])[where]
        result = function(
            token_level_rewards=token_rewards, response_mask=mask, **more, **arguments
        )
        outputs = {}
        for name, x in zip(("advantages", "returns"), result, strict=True):
            if name == "returns" and not with_returns:
                continue
            full = np.zeros((12, 6), np.float32)
            # The critic's estimates are stored where they are trained; elsewhere verl carries them.
            full[where] = array(x * mask if "values" in takes else x)
            outputs[name] = full.reshape(3, 4, 6)
        return outputs

    return compute


def gdpo(gdpo_reward_weights):
    def compute(case, a):
        where = a["where"].reshape(-1)
        mask = tensor(case, a["mask"])[where]
        names = ["first", "second", "third"]
        columns = {n: x.reshape(-1)[where] for n, x in zip(names, a["columns"], strict=True)}
        # verl puts each reward on the last valid token: the mask's count, from one prompt token on.
        attention = torch.cat([torch.ones(len(mask), 1, dtype=torch.long), mask], dim=1)
        settings = {"gdpo_reward_keys": names, "gdpo_reward_weights": gdpo_reward_weights}
        result, _ = core_algos.compute_gdpo_outcome_advantage(
            token_level_rewards=torch.zeros(mask.shape),
            response_mask=mask,
            index=np.repeat(np.arange(3), 4)[where],
            config=settings,
            non_tensor_batch=columns,
            batch={"prompts": torch.zeros(len(mask), 1), "attention_mask": attention},
        )
        full = np.zeros((12, 6), np.float32)
        full[where] = array(result)
        return {"advantages": full.reshape(3, 4, 6)}

    return compute


def whiten(shift_mean):
    def compute(case, a):
        x = tensor(case, a["values"])
        mask = tensor(case, a["mask"])
        result = torch_functional.masked_whiten(x, mask, shift_mean=shift_mean)
        return {"whitened": tokens(result * mask)}

    return compute


def variance(case, a):
    x, mask = tensor(case, a["values"]), tensor(case, a["mask"])
    return {
        "unbiased": array(torch_functional.masked_var(x, mask)),
        "biased": array(torch_functional.masked_var(x, mask, unbiased=False)),
        "mean": array(torch_functional.masked_mean(x, mask)),
    }


def shaped(case, a):
    """The reward on the last token, less the penalty for leaving the reference."""
    mask = tensor(case, a["mask"])
    rewards = tensor(case, a["rewards"][..., None]).squeeze(-1)
    scores = torch.zeros(mask.shape, dtype=rewards.dtype)
    scores[torch.arange(12), (mask * torch.arange(1, 7)).argmax(-1)] = rewards
    logps = tensor(case, a["old_logp"]), tensor(case, a["ref_logp"])
    return {"rewards": tokens(core_algos.compute_rewards(scores, *logps, 0.1) * mask)}


class Settings(types.SimpleNamespace):
    def get(self, key, default=None):
        return getattr(self, key, default)


TAKES = {
    "remax_outcome": ("greedy", "last"),
    "reinforce_plus_plus_outcome": ("last",),
    "optimal_token_baseline": ("index", "last", "otb"),
    "multi_turn_optimal_token_baseline": ("index", "last", "otb"),
    "gae": ("last", "values"),
} | {
    f"{name}_outcome": ("index",)
    for name in ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg")
    + ("reinforce_plus_plus_baseline",)
}


@written("verl_advantages", "verl", VERSIONS)
def main(writer):
    for name, takes in TAKES.items():
        ending = "_return" if name == "gae" else ""
        function = getattr(core_algos, f"compute_{name}_advantage{ending}")

        def make(function=function, takes=takes, **arguments):
            if "config" in arguments:
                arguments["config"] = Settings(**arguments["config"])
            return advantage(function, takes=takes, with_returns="values" in takes, **arguments)

        if "otb" in takes:
            entry = "otb_tir_weighted" if name.startswith("multi") else "otb_weighted"
            writer.add(entry, make(takes=(*takes, "weight"), handle_zero_tail=True))
        writer.each(f".compute_{name}_advantage{ending}", make)
    writer.each("compute_gdpo_outcome_advantage", gdpo)
    writer.add("rewards_with_kl", shaped)
    writer.each("masked_whiten", whiten)
    writer.add("variance", variance)
