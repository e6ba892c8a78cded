"""Writes estimators/moss_rlhf.*: OpenLMLab/MOSS-RLHF's PPO-max."""

from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import load_inputs
from paper_code import array, passage, peer, take, tensor, token_inputs

TRAINER, DATA, UTILS = "ppo/ppo_trainer.py", "ppo/ppo_datahelper.py", "utils.py"
CASES = ("ragged", "on_policy", "length_one", "zero_advantage")
OPTIONS = {"kl_penalty_weight": 0.02, "gamma": 0.98, "lam": 0.95}


def score_cases():
    rng = np.random.default_rng(26)
    scores = {"first": rng.normal(size=(3, 12)), "second": 3 + 2 * rng.normal(size=(3, 12))}
    return {name: {"scores": x.astype(np.float32)} for name, x in scores.items()}


def scaled(root, norm, clip):
    """Three batches of scores one after the other."""
    (moments,) = take(root / UTILS, "RunningMoments", Tuple=tuple)
    begin, end = "if self.use_reward_scaling:", "# Precompute logprobs, values"

    def compute(case, a):
        record = SimpleNamespace(record_metric=lambda *_: None)
        trainer = SimpleNamespace(
            running=moments(SimpleNamespace(use_distributed=False)),
            use_reward_scaling=True,
            use_reward_norm=norm,
            use_reward_clip=clip is not None,
            reward_clip=clip,
            train_metrics=record,
        )
        log = SimpleNamespace(info=lambda *_: None)
        found, numbers = [], []
        for batch in a["scores"]:
            names = {"self": trainer, "rewards": torch.from_numpy(batch.copy()), "logging": log}
            path = root / TRAINER
            names = passage(path, begin, end, after="def make_experiences", **names)
            found.append(array(names["rewards"]))
            running = trainer.running
            numbers.append([float(running.mean), float(running.var), float(running.std)])
        mean, var, std = np.array(numbers).T
        return {"scores": np.stack(found), "mean": mean, "var": var, "std": std}

    return compute


def experiences(root):
    """The rewards of tokens, and from them advantages and returns."""
    (estimate,) = take(root / DATA, "get_advantages_and_returns", List=list)
    settings = SimpleNamespace(**OPTIONS)
    path = root / TRAINER

    def compute(case, a):
        names = {"self": settings, "logprobs": tensor(case, a["old_logp"])}
        names |= {"ref_logprobs": tensor(case, a["ref_logp"])}
        names = passage(path, "kl_penalty = (-self.kl", "# compute train ppl", **names)
        shape = a["mask"].reshape(12, 6).shape
        found = {name: np.zeros(shape) for name in ("token_rewards", "advantages", "returns")}
        rows = zip(a["mask"].reshape(12, 6), a["rewards"].reshape(-1), strict=True)
        for i, (mask, reward) in enumerate(rows):
            length = int(mask.sum())
            given = {"kl_penalty": names["kl_penalty"][:, :length], "i": i}
            given["rewards"] = {i: float(reward)}
            begin, end = "penalized_rewards = kl_penalty[i]", "self.train_metrics"
            penalized = passage(path, begin, end, **given)["penalized_rewards"].tolist()
            values = a["values"].reshape(12, 6)[i, :length].tolist()
            advantages, returns = estimate(settings, penalized, values)
            found["token_rewards"][i, :length] = penalized
            found["advantages"][i, :length] = advantages
            found["returns"][i, :length] = returns
        return {name: x.reshape(3, 4, 6) for name, x in found.items()}

    return compute


def criterion(root, watched, clip_advantages=None):
    """The passage of the criterion between the model's outputs and the entropy."""
    settings = SimpleNamespace(
        value_clip=0.2,
        pg_clip=0.2,
        use_critic_loss_clip=True,
        use_policy_loss_clip=True,
        use_advantage_norm=False,
        use_advantage_clip=clip_advantages is not None,
        advantage_clip=clip_advantages,
    )
    path = root / TRAINER

    def compute(case, a):
        mask = tensor(case, a["mask"])
        logp, values = (tensor(case, a[n]).requires_grad_() for n in ("logp", "values"))
        names = {
            "self": settings,
            "loss_mask": mask,
            "advantages": tensor(case, a["token_advantages"]),
            "returns": tensor(case, a["returns"]),
            "old_values": tensor(case, a["old_values"]),
            "old_logprobs": tensor(case, a["old_logp"]) * mask,
            "values": values,
            "logprobs": logp * mask,
        }
        begin = "if self.use_advantage_norm:"
        names = passage(path, begin, "logprobs = logprobs_from_logits", **names)
        names = passage(path, "# vf loss", "# cal the entropy", **names)
        loss, x = {"policy": ("pg_loss", logp), "critic": ("vf_loss", values)}[watched]
        (gradient,) = torch.autograd.grad(names[loss], [x])
        return {"loss": array(names[loss]), "gradient": array(gradient).reshape(3, 4, 6)}

    return compute


def critic_cases():
    rng = np.random.default_rng(27)
    names = ("logp", "old_logp", "token_advantages", "mask")
    cases = token_inputs(names, CASES)
    for a in cases.values():
        old = rng.normal(size=(3, 4, 6))
        a["old_values"] = old.astype(np.float32)
        a["values"] = (old + 0.3 * rng.normal(size=old.shape)).astype(np.float32)
        a["returns"] = (old + rng.normal(size=old.shape)).astype(np.float32)
    return cases


@peer("moss_rlhf", "MOSS-RLHF", "OpenLMLab/MOSS-RLHF")
def main(root, writer):
    writer.inputs("scores", score_cases())
    for name, norm, clip in (("scaled", False, None), ("centered", True, 0.8)):
        writer.add(name, scaled(root, norm, clip))
    rewards = load_inputs("rewards")
    names = ("rewards", "mask", "old_logp", "ref_logp", "values")
    kept = ("full", "binary", "length_one")
    writer.inputs("experiences", {c: {n: rewards[c][n] for n in names} for c in kept})
    writer.add("experiences", experiences(root))
    writer.inputs("losses", critic_cases())
    for name, watched, clip in (
        ("policy", "policy", None),
        ("clipped_advantages", "policy", 0.5),
        ("critic", "critic", None),
    ):
        writer.add(name, criterion(root, watched, clip))
