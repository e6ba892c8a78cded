"""Writes estimators/slime_trainer.*: slime's losses, returns and filters.

Run from the repository root with a Python that has torch, and a checkout of THUDM/slime:

    TORCHDYNAMO_DISABLE=1 python tests/golden/make/slime_trainer.py CHECKOUT COMMIT

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

    def add(name, keys, compute, function, **arguments):
        where = f"{UTILS}.{function}"
        writer.add(name, keys, where, compute, inputs="tokens", arguments=arguments)

    by = "token_advantages"
    name = "compute_policy_loss"
    add("ppo", ["ppo_clip"], ppo(by, 0.2, 0.2), name, eps_clip=0.2, eps_clip_high=0.2)
    dual = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 10.0}
    add("dapo", ["dapo_clip"], ppo("advantages", *dual.values()), name, **dual)
    dual = dual | {"eps_clip_high": 0.2, "eps_clip_c": 1.5}
    add("ppo_dual", ["ppo_dual_clip"], ppo(by, *dual.values()), name, **dual)
    add("cispo", ["cispo"], summed(cispo), "compute_cispo_loss", eps_clip=0.2, eps_clip_high=0.2)
    add("gspo", ["gspo"], summed(gspo), "compute_gspo_kl", eps_clip=0.03, eps_clip_high=0.04)

    def opsm(case, a):
        rows = [list(tensor(case, a[n])) for n in ("logp", "behavior_logp")]
        values, mask = list(by_token(case, a, "advantages")), list(tensor(case, a["mask"]))
        made, _ = utils.compute_opsm_mask(SimpleNamespace(opsm_delta=0.1), *rows, values, mask)
        return {"keep": (tokens(made) > 0.5) & a["mask"]}

    add("opsm", ["rollout_correction"], opsm, "compute_opsm_mask", opsm_delta=0.1)

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

    for name, key, function, low in (
        ("tis", "rollout_correction", loss.vanilla_tis_function, 0.0),
        ("icepop", "icepop", loss.icepop_function, 0.8),
    ):
        writer.add(
            name,
            [key],
            f"{LOSS}.{function.__name__}",
            weights(function, low, 1.25),
            inputs="tokens",
            arguments={"tis_clip_low": low, "tis_clip": 1.25},
        )


def add_kl(writer, utils):
    def kl(kind, corrected):
        def compute(case, a):
            logp = tensor(case, a["logp"]).requires_grad_()
            mask = tensor(case, a["mask"])
            ratio = torch.exp(logp - tensor(case, a["old_logp"])) if corrected else None
            value = utils.compute_approx_kl(logp, tensor(case, a["ref_logp"]), kind, ratio) * mask
            (gradient,) = torch.autograd.grad(value.sum(), [logp])
            return {"kl": tokens(value), "gradient": tokens(gradient)}

        return compute

    for kind in ("k1", "k2", "k3", "low_var_kl"):
        for corrected in (False, True) if kind in ("k1", "k3") else (False,):
            writer.add(
                f"kl_{kind}" + ("_corrected" if corrected else ""),
                ["kl_estimators"],
                f"{UTILS}.compute_approx_kl",
                kl(kind, corrected),
                inputs="tokens",
                arguments={"kl_loss_type": kind, "importance_ratio": corrected},
            )


def add_returns(writer, utils, filters):
    cases = ["full", "binary", "holes", "length_one", "bfloat16"]

    def terminal(case, a):
        mask = tensor(case, a["mask"])
        rewards = tensor(case, a["rewards"][..., None])[:, 0]
        lengths = (mask * torch.arange(1, 7)).argmax(-1) + 1
        return mask, rewards, lengths.tolist()

    def gae(chunked):
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
                0.97,
                0.9,
                chunked,
            )
            padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in made]
            full = [torch.nn.functional.pad(x, (0, 6 - x.shape[1])) * mask for x in padded]
            return {"advantages": tokens(full[0]), "returns": tokens(full[1])}

        return compute

    def reinforce_pp(gamma):
        def compute(case, a):
            mask, rewards, _ = terminal(case, a)
            kl = tensor(case, a["old_logp"]) - tensor(case, a["ref_logp"])
            made = utils.get_reinforce_plus_plus_returns(
                rewards, list(kl), list(mask), [6] * 12, [6] * 12, 0.1, gamma
            )
            return {"returns": tokens(torch.stack(made) * mask)}

        return compute

    sizes = sys.modules["megatron.core"].mpu
    sizes.get_context_parallel_world_size = lambda: 1
    for chunked in (False, True):
        writer.add(
            "gae_chunked" if chunked else "gae",
            ["gae"],
            f"{UTILS}.get_advantages_and_returns_batch",
            gae(chunked),
            inputs="rewards",
            cases=["full", "binary", "length_one", "bfloat16"],
            arguments={"gamma": 0.97, "lambd": 0.9, "chunked": chunked},
        )
    for gamma in (1.0, 0.9):
        writer.add(
            "reinforce_pp" if gamma == 1.0 else "reinforce_pp_discounted",
            ["reinforce_pp"],
            f"{UTILS}.get_reinforce_plus_plus_returns",
            reinforce_pp(gamma),
            inputs="rewards",
            cases=cases,
            arguments={"kl_coef": 0.1, "gamma": gamma},
        )

    def informative(case, a):
        kept = []
        for group, where in zip(a["rewards"], a["where"], strict=True):
            samples = [
                SimpleNamespace(get_reward_value=lambda args, x=x: float(x)) for x in group[where]
            ]
            kept.append(bool(filters.check_reward_nonzero_std(None, samples).keep))
        return {"keep": np.array(kept)}

    writer.add(
        "informative",
        ["dynamic_sampling"],
        f"{FILTERS}.check_reward_nonzero_std",
        informative,
        inputs="rewards",
    )


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
