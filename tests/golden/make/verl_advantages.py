"""Writes estimators/verl_advantages.*: verl's advantages on the shared inputs.

Run from the repository root with a Python that has verl, torch, tensordict, omegaconf and what they
import:

    python tests/golden/make/verl_advantages.py
"""

import types

import numpy as np
import torch
from estimator_cases import Writer
from verl_peer import CORE, TORCH, VERSIONS, array, core_algos, tensor, tokens, torch_functional


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


def gdpo(weights):
    def compute(case, a):
        where = a["where"].reshape(-1)
        mask = tensor(case, a["mask"])[where]
        names = ["first", "second", "third"]
        columns = {n: x.reshape(-1)[where] for n, x in zip(names, a["columns"], strict=True)}
        # verl puts each reward on the last valid token: the mask's count, from one prompt token on.
        attention = torch.cat([torch.ones(len(mask), 1, dtype=torch.long), mask], dim=1)
        settings = {"gdpo_reward_keys": names, "gdpo_reward_weights": weights}
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


def add_advantages(writer):
    full = ["full", "binary", "all_equal", "masked_row", "holes", "length_one", "bfloat16"]

    def add(name, keys, function, takes=("index",), *, arguments=None, compute=None, **more):
        arguments = arguments or {}
        shown = {k: vars(v) if isinstance(v, Settings) else v for k, v in arguments.items()}
        compute = compute or advantage(
            getattr(core_algos, function),
            takes=takes,
            with_returns=more.pop("with_returns", False),
            **arguments,
        )
        writer.add(name, keys, CORE + function, compute, inputs="rewards", arguments=shown, **more)

    class Settings(types.SimpleNamespace):
        def get(self, key, default=None):
            return getattr(self, key, default)

    for norm in (True, False):
        arguments = {"norm_adv_by_std_in_grpo": norm}
        key = "grpo" if norm else "dr_grpo"
        function = "compute_grpo_outcome_advantage"
        add(key, [key], function, arguments=arguments)
        add(
            f"{key}_vectorized",
            [key],
            "compute_grpo_vectorized_outcome_advantage",
            arguments=arguments,
        )
        add(
            "grpo_passk" if norm else "grpo_passk_no_std",
            ["grpo_passk"],
            "compute_grpo_passk_outcome_advantage",
            arguments={"config": Settings(norm_adv_by_std_in_grpo=norm)},
            cases=full,
            note="raises for a group of one",
        )
    add("rloo", ["rloo"], "compute_rloo_outcome_advantage")
    add(
        "rloo_vectorized",
        ["rloo"],
        "compute_rloo_vectorized_outcome_advantage",
        cases=[*full[:-1], "ragged", "singleton"],
        note="refuses bfloat16",
    )
    add("opo", ["opo"], "compute_opo_outcome_advantage")
    add("gpg", ["gpg"], "compute_gpg_outcome_advantage")
    add("remax", ["remax"], "compute_remax_outcome_advantage", ("greedy", "last"))
    add(
        "reinforce_pp_baseline",
        ["reinforce_pp_baseline"],
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
    )
    for gamma in (1.0, 0.9):
        add(
            "reinforce_pp" if gamma == 1.0 else "reinforce_pp_discounted",
            ["reinforce_pp"],
            "compute_reinforce_plus_plus_outcome_advantage",
            ("last",),
            arguments={"config": Settings(gamma=gamma)},
        )
    for tail in (True, False):
        for prefix, function in (
            ("otb", "compute_optimal_token_baseline_advantage"),
            ("otb_tir", "compute_multi_turn_optimal_token_baseline_advantage"),
        ):
            suffix = "" if tail else "_no_tail"
            arguments = {"handle_zero_tail": tail}
            add(prefix + suffix, ["otb"], function, ("index", "last", "otb"), arguments=arguments)
            if tail:
                takes = ("index", "last", "otb", "weight")
                add(f"{prefix}_weighted", ["otb"], function, takes, arguments=arguments)
    for name, weights in (("gdpo", None), ("gdpo_weighted", [1.0, 0.5, 2.0])):
        add(
            name,
            ["gdpo"],
            "compute_gdpo_outcome_advantage",
            compute=gdpo(weights),
            arguments={"gdpo_reward_weights": weights},
        )
    add(
        "gae",
        ["gae"],
        "compute_gae_advantage_return",
        ("last", "values"),
        arguments={"gamma": 0.97, "lam": 0.9},
        with_returns=True,
    )
    writer.add(
        "rewards_with_kl",
        ["ppo_max"],
        CORE + "compute_rewards",
        shaped,
        inputs="rewards",
        cases=[case for case in full if case != "all_equal"],
        arguments={"kl_ratio": 0.1},
    )
    for name, shift in (("whiten", True), ("whiten_keep_mean", False)):
        writer.add(
            name,
            ["reinforce_pp"],
            TORCH + "masked_whiten",
            whiten(shift),
            inputs="rewards",
            arguments={"shift_mean": shift},
        )
    writer.add("variance", ["reinforce_pp"], TORCH + "masked_var", variance, inputs="rewards")


def main():
    writer = Writer("verl_advantages", "verl", VERSIONS, "verl_advantages.py")
    add_advantages(writer)
    writer.save()


if __name__ == "__main__":
    main()
