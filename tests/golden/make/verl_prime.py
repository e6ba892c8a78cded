"""Writes estimators/verl_prime.*: PRIME's token rewards in the authors' verl recipe."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, passage, peer, take, tensor

CORE, MODEL = "prime/prime_core_algos.py", "prime/prime_dp_rm.py"
P, G, T = 3, 4, 6


class Options(dict):
    """A dict that is read as omegaconf's are."""

    __getattr__ = dict.__getitem__


def rollouts():
    rng = np.random.default_rng(31)
    cases = {}
    for name in ("binary", "graded"):
        rewards = rng.integers(0, 2, (P, G)) if name == "binary" else rng.random((P, G))
        rewards = rewards.astype(np.float32)
        rewards[0] = 1.0
        lengths = rng.integers(1, T + 1, (P, G, 1))
        ref = -rng.gamma(2.0, 0.5, (P, G, T)) - 0.02
        cases[name] = {
            "rewards": rewards,
            "mask": np.arange(T) < lengths,
            "ref_logp": ref.astype(np.float32),
            "prm_logp": (ref + rng.normal(0, 0.5, ref.shape)).astype(np.float32),
        }
    return cases


@peer("verl_prime", "verl-recipe", "verl-project/verl-recipe")
def main(root, writer):
    writer.inputs("prime_rollouts", rollouts())
    # Ours whitens in a function of its own.
    whiten = SimpleNamespace(masked_whiten=lambda values, mask: values)
    credit, cross_entropy = take(
        root / CORE,
        "compute_rloo_advantage_return",
        "compute_ce_dpo_loss_rm",
        verl_F=whiten,
        verl=None,
    )
    (norm,) = take(root / MODEL, "prime_norm")

    def scores(a, normalizer):
        """What the reward model's worker returns, from log-probabilities on."""
        mask = tensor("", a["mask"])
        config = Options(
            model=Options(beta_train=0.05), prime_granularity="token", prime_norm=normalizer
        )
        q = tensor("", a["prm_logp"]) - tensor("", a["ref_logp"])
        worker = SimpleNamespace(config=config)
        names = passage(
            root / MODEL,
            "# trim unnecessary logprobs here",
            "return token_level_score, q",
            self=worker,
            q=q,
            micro_batch={"input_ids": mask},
            max_positions=mask.sum(-1),
            num_actions=T,
        )
        return norm(worker, names["token_level_score"])

    def advantages(normalizer):
        def run(case, a):
            mask = tensor(case, a["mask"])
            data = SimpleNamespace(
                batch={
                    "rm_scores": scores(a, normalizer),
                    "acc": tensor(case, a["rewards"][..., None])[:, 0],
                    "prompts": torch.zeros(len(mask), 0),
                    "attention_mask": mask,
                }
            )
            config = Options(algorithm=Options(reward_dpo_coef=0.7, reward_gt_coef=1.0))
            found, _ = credit(data, mask, G, config)
            return {"advantages": array(found).reshape(P, G, T)}

        return run

    def loss(case, a):
        prm = tensor(case, a["prm_logp"]).requires_grad_()
        q = prm - tensor(case, a["ref_logp"])
        rewards = tensor(case, a["rewards"][..., None])[:, 0]
        value = cross_entropy(q, rewards, tensor(case, a["mask"]), 0.05)
        (gradient,) = torch.autograd.grad(value, [prm])
        return {"loss": array(value), "gradient": array(gradient).reshape(P, G, T)}

    for normalizer in ("batch_norm", "none"):
        writer.add(normalizer, advantages(normalizer))
    writer.add("loss", loss)
