"""Writes estimators/istar.*: Tongyi-ConvAI/Qwen-Character's credit of two levels."""

import types

import numpy as np
import torch
from paper_code import peer, take

CORE, LOSS = "CharacterRL-iStar/istar/core_istar.py", "CharacterRL-iStar/istar/rm_utils.py"
P, G, K, T = 3, 4, 3, 5


def rollouts():
    """Turns of a rollout as rows of T tokens; a turn that is not there has none."""
    rng = np.random.default_rng(18)
    cases = {}
    for name in ("binary", "scores"):
        rewards = rng.integers(0, 2, (P, G)) if name == "binary" else rng.random((P, G))
        rewards = rewards.astype(np.float32)
        rewards[0] = 1.0
        turns = rng.integers(1, K + 1, (P, G, 1))
        lengths = rng.integers(1, T + 1, (P, G, K, 1))
        mask = (np.arange(T) < lengths) & (np.arange(K) < turns)[..., None]
        old = -rng.gamma(2.0, 0.5, mask.shape) - 0.02
        cases[name] = {
            "rewards": rewards,
            "turn_where": np.arange(K) < turns,
            "mask": mask,
            "old_logp": old.astype(np.float32),
            "prm_logp": (old + rng.normal(0, 0.5, mask.shape)).astype(np.float32),
        }
    return cases


@peer("istar", "iStar", "Tongyi-ConvAI/Qwen-Character")
def main(root, writer):
    writer.inputs("istar_rollouts", rollouts())
    names = ("episode_rloo_reward", "episode_grpo_reward")
    rloo, grpo = take(root / CORE, *names)

    def two_levels(function, **options):
        """Both levels by its rule for rollouts: that for turns takes the mean of first turns.

        Each turn of a group is a rollout for the second level, which is the paper's mean over all.
        """

        def run(case, a):
            there = a["turn_where"].reshape(-1)
            groups = np.repeat(np.arange(P), G * K)[there]
            rollouts = np.repeat(np.arange(P * G), K)[there]
            one = torch.ones(int(there.sum()), 1)
            outcome = np.repeat(a["rewards"].reshape(-1), K)[there]
            outcome = torch.from_numpy(outcome)[:, None].clone()
            ratio = np.where(a["mask"], a["prm_logp"] - a["old_logp"], 0.0).sum(-1)
            turns = torch.from_numpy(np.float32(0.05 * ratio.reshape(-1)[there]))[:, None]
            each = np.arange(int(there.sum()))
            whole = function(outcome, one, groups, rollouts, **options)
            step = function(turns, one, groups, each, **options)
            out = np.zeros(there.shape, np.float32)
            out[there] = (whole + 0.7 * step)[:, 0].numpy()
            return {"advantages": out.reshape(P, G, K)}

        return run

    for name, function, options in (
        ("rloo", rloo, {}),
        ("grpo", grpo, {"remove_std": False}),
        ("center", grpo, {"remove_std": True}),
    ):
        writer.add(name, two_levels(function, **options))
    (dpo,) = take(root / LOSS, "compute_eto_loss_rm", DataProto=object, verl=None)

    def loss(case, a):
        there = a["turn_where"].reshape(-1)
        mask = torch.from_numpy(a["mask"].reshape(-1, T)[there])
        prm = torch.from_numpy(a["prm_logp"].reshape(-1, T)[there]).requires_grad_()
        old = torch.from_numpy(a["old_logp"].reshape(-1, T)[there])
        data = types.SimpleNamespace(
            non_tensor_batch={
                "traj_uid": np.repeat(np.arange(P * G), K)[there],
                "uid": np.repeat(np.arange(P), G * K)[there],
                "active_masks": np.ones(int(there.sum()), bool),
            },
            batch={
                "acc": torch.from_numpy(np.repeat(a["rewards"].reshape(-1), K)[there]),
                "prompts": torch.zeros(len(mask), 0),
                "attention_mask": mask,
            },
        )
        value = dpo(data, prm - old, 0.05, "webshop")
        (gradient,) = torch.autograd.grad(value, [prm])
        full = np.zeros((len(there), T), np.float32)
        full[there] = gradient.numpy()
        return {"loss": value.detach().numpy(), "gradient": full.reshape(P, G, K, T)}

    writer.add("loss", loss)
