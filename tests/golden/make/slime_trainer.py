"""Writes estimators/slime_trainer.*: slime's losses, returns and filters.

slime's functions give one loss a token and sum later: stored are the sum over the mask and the
gradient of it.
"""

import sys
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import Writer
from source_tree import load
from torch_arrays import array, tensor, tokens

VERSION = "0.3.1"
UTILS, FILTERS, LOSS = (
    "slime.utils.ppo_utils",
    "slime.rollout.filter_hub.dynamic_sampling_filters",
    "slime.backends.megatron_utils.loss",
)


def summed(each):
    """The sum of the token losses over the mask, its gradient, and the losses."""

    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        mask = tensor(case, a["mask"])
        value = each(case, a, logp, mask) * mask
        (gradient,) = torch.autograd.grad(value.float().sum(), [logp])
        return {
            "loss": array(value.float().sum()),
            "gradient": tokens(gradient),
            "token_loss": tokens(value),
        }

    return compute


def by_token(case, a, by):
    values = a[by]
    return tensor(
        case, np.broadcast_to(values[..., None], a["mask"].shape) if values.ndim == 2 else values
    )


def add_losses(writer, utils, loss):
    def ppo(by, *options):
        def each(case, a, logp, mask):
            kl = tensor(case, a["old_logp"]) - logp
            return utils.compute_policy_loss(kl, by_token(case, a, by), *options)[0]

        return summed(each)

    def cispo(case, a, logp, mask):
        kl = tensor(case, a["old_logp"]) - logp
        values = by_token(case, a, "token_advantages")
        return utils.compute_cispo_loss(kl, logp, values, 0.2, 0.2)[0]

    def gspo(case, a, logp, mask):
        rows = list(logp), list(tensor(case, a["old_logp"])), list(logp), list(mask)
        kl = utils.compute_gspo_kl(*rows).reshape(12, 6)
        values = by_token(case, a, "advantages")
        return utils.compute_policy_loss(kl, values, 0.03, 0.04)[0]

    by = "token_advantages"
    writer.add("ppo", ppo(by, 0.2, 0.2))
    writer.add("dapo", ppo("advantages", 0.2, 0.28, 10.0))
    writer.add("ppo_dual", ppo(by, 0.2, 0.2, 1.5))
    writer.add("cispo", summed(cispo))
    writer.add("gspo", summed(gspo))

    def opsm(case, a):
        rows = [list(tensor(case, a[n])) for n in ("logp", "behavior_logp")]
        values, mask = list(by_token(case, a, "advantages")), list(tensor(case, a["mask"]))
        made, _ = utils.compute_opsm_mask(SimpleNamespace(opsm_delta=0.1), *rows, values, mask)
        return {"keep": (tokens(made) > 0.5) & a["mask"]}

    writer.add("opsm", opsm)

    def weights(function, low, high):
        def compute(case, a):
            settings = SimpleNamespace(tis_clip_low=low, tis_clip=high)
            names = ("old_logp", "behavior_logp")
            train, rollout = (list(tensor(case, a[n])) for n in names)
            ones = torch.ones(72)
            made, _, _ = function(
                settings,
                pg_loss=ones,
                train_log_probs=train,
                rollout_log_probs=rollout,
                loss_masks=None,
            )
            return {"weights": tokens(made) * a["mask"]}

        return compute

    writer.add("tis", weights(loss.vanilla_tis_function, 0.0, 1.25))
    writer.add("icepop", weights(loss.icepop_function, 0.8, 1.25))


def add_kl(writer, utils):
    def kl(kl_loss_type, importance_ratio):
        def compute(case, a):
            logp = tensor(case, a["logp"]).requires_grad_()
            mask = tensor(case, a["mask"])
            ratio = torch.exp(logp - tensor(case, a["old_logp"])) if importance_ratio else None
            ref_logp = tensor(case, a["ref_logp"])
            value = utils.compute_approx_kl(logp, ref_logp, kl_loss_type, ratio) * mask
            (gradient,) = torch.autograd.grad(value.sum(), [logp])
            return {"kl": tokens(value), "gradient": tokens(gradient)}

        return compute

    writer.each("compute_approx_kl", kl)


def add_returns(writer, utils, filters):

    def terminal(case, a):
        mask = tensor(case, a["mask"])
        rewards = tensor(case, a["rewards"][..., None])[:, 0]
        lengths = (mask * torch.arange(1, 7)).argmax(-1) + 1
        return mask, rewards, lengths.tolist()

    def gae(gamma, lambd, chunked):
        def compute(case, a):
            mask, rewards, lengths = terminal(case, a)
            values = tensor(case, a["values"])
            token_rewards = torch.zeros_like(values)
            for row, n in enumerate(lengths):
                token_rewards[row, n - 1] = rewards[row]
            made = utils.get_advantages_and_returns_batch(
                lengths,
                lengths,
                [row[:n] for row, n in zip(values, lengths, strict=True)],
                [row[:n] for row, n in zip(token_rewards, lengths, strict=True)],
                gamma,
                lambd,
                chunked,
            )
            padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in made]
            full = [torch.nn.functional.pad(x, (0, 6 - x.shape[1])) * mask for x in padded]
            return {"advantages": tokens(full[0]), "returns": tokens(full[1])}

        return compute

    def reinforce_pp(kl_coef, gamma):
        def compute(case, a):
            mask, rewards, _ = terminal(case, a)
            kl = tensor(case, a["old_logp"]) - tensor(case, a["ref_logp"])
            made = utils.get_reinforce_plus_plus_returns(
                rewards, list(kl), list(mask), [6] * 12, [6] * 12, kl_coef, gamma
            )
            return {"returns": tokens(torch.stack(made) * mask)}

        return compute

    sizes = sys.modules["megatron.core"].mpu
    sizes.get_context_parallel_world_size = lambda: 1
    writer.each("get_advantages_and_returns_batch", gae)
    writer.each("get_reinforce_plus_plus_returns", reinforce_pp)

    def informative(case, a):
        kept = []
        for group, where in zip(a["rewards"], a["where"], strict=True):
            samples = [
                SimpleNamespace(get_reward_value=lambda args, x=x: float(x)) for x in group[where]
            ]
            kept.append(bool(filters.check_reward_nonzero_std(None, samples).keep))
        return {"keep": np.array(kept)}

    writer.add("informative", informative)


def main():
    root, commit = sys.argv[1:]
    utils, filters, loss = load(root, "slime", [UTILS, FILTERS, LOSS], ["megatron"])
    filters.DynamicFilterOutput = SimpleNamespace
    writer = Writer(
        "slime_trainer",
        "slime",
        ["torch", "numpy"],
        "slime_trainer.py",
        version=VERSION,
        commit=commit,
    )
    add_losses(writer, utils, loss)
    add_kl(writer, utils)
    add_returns(writer, utils, filters)
    writer.save()


if __name__ == "__main__":
    main()
