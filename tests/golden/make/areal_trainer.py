"""Writes estimators/areal_trainer.*: AReaL's losses, masks and normalization.

Run from the repository root with a Python that has torch, and a checkout of inclusionAI/AReaL:

    python tests/golden/make/areal_trainer.py CHECKOUT COMMIT
"""

import sys
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import Writer, load_inputs
from source_tree import load
from torch_arrays import array, tensor, tokens

VERSION = "1.0.4"
DATA, FUNCTIONAL, STALENESS, ACTOR = (
    "areal.utils.data",
    "areal.utils.functional.functional",
    "areal.infra.staleness_manager",
    "areal.trainer.ppo.actor",
)


def mask_of(a):
    return torch.from_numpy(a["mask"].reshape(12, 6).copy())


def actor_loss(functional, by, rejection=None, **options):
    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        values = a[by]
        if by == "advantages":
            values = np.broadcast_to(values[..., None], a["mask"].shape)
        config = None if rejection is None else SimpleNamespace(**rejection)
        loss, _ = functional.ppo_actor_loss_fn(
            logprobs=logp,
            proximal_logprobs=tensor(case, a["old_logp"]),
            old_logprobs=tensor(case, a["behavior_logp"]),
            advantages=tensor(case, values),
            loss_mask=mask_of(a),
            rejection_sampling=config,
            **options,
        )
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    return compute


def sapo(functional):
    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        loss, _ = functional.sapo_loss_fn(
            logprobs=logp,
            old_logprobs=tensor(case, a["old_logp"]),
            advantages=tensor(case, a["token_advantages"]),
            tau_pos=0.5,
            tau_neg=4.0,
            loss_mask=mask_of(a),
        )
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    return compute


def critic_loss(functional):
    def compute(case, a):
        values = tensor("", a["logp"]).requires_grad_()
        loss, _ = functional.ppo_critic_loss_fn(
            value=values,
            old_value=tensor("", a["old_logp"]),
            target_value=tensor("", a["token_advantages"]),
            value_eps_clip=0.2,
            loss_mask=mask_of(a),
        )
        (gradient,) = torch.autograd.grad(loss, [values])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    return compute


def add_losses(writer, functional):
    def add(name, keys, compute, function="ppo_actor_loss_fn", **arguments):
        where = f"{FUNCTIONAL}.{function}"
        writer.add(name, keys, where, compute, inputs="tokens", arguments=arguments)

    clip = {"eps_clip": 0.2}
    by = "token_advantages"
    add("ppo", ["ppo_clip"], actor_loss(functional, by, **clip), **clip)
    dual = clip | {"c_clip": 1.5}
    add("ppo_dual", ["ppo_dual_clip"], actor_loss(functional, by, **dual), **dual)
    higher = clip | {"eps_clip_higher": 0.28, "c_clip": 10.0}
    add("dapo", ["dapo_clip"], actor_loss(functional, by, **higher), **higher)
    narrow = {"eps_clip": 0.03, "eps_clip_higher": 0.04, "importance_sampling_level": "sequence"}
    add("gspo", ["gspo"], actor_loss(functional, "advantages", **narrow), **narrow)
    for name, key, rule in (
        ("decoupled", "areal", ("token", "clamp", "ratio", "mean", 1e9, None)),
        ("decoupled_clamp", "areal", ("token", "clamp", "ratio", "mean", 1.1, None)),
        ("decoupled_mask", "areal", ("token", "mask", "ratio", "mean", 1.1, None)),
        ("sequence_ratio", "rollout_correction", ("sequence", "mask", "ratio", "mean", 1.1, 0.9)),
        ("sequence_k3", "rollout_correction", ("sequence", "mask", "kl_k3", "mean", 0.02, None)),
        ("token_k2", "rollout_correction", ("token", "mask", "kl_k2", "mean", 0.02, None)),
    ):
        fields = ("level", "action", "metric", "agg", "upper", "lower")
        rejection = dict(zip(fields, rule, strict=True))
        compute = actor_loss(functional, by, rejection, **clip)
        add(name, [key], compute, **clip, rejection_sampling=rejection)
    taus = {"tau_pos": 0.5, "tau_neg": 4.0}
    add("sapo", ["sapo"], sapo(functional), "sapo_loss_fn", **taus)
    critic = critic_loss(functional)
    add("value_loss", ["value_loss"], critic, "ppo_critic_loss_fn", value_eps_clip=0.2)


def estimate(data, kind):
    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        mask = tensor(case, a["mask"])
        value = data.KLEstimator(kind)(logp, tensor(case, a["ref_logp"])) * mask
        (gradient,) = torch.autograd.grad(value.sum(), [logp])
        return {"kl": tokens(value), "gradient": tokens(gradient)}

    return compute


def normalization(data, **options):
    def compute(case, a):
        rewards = tensor(case, a["rewards"][..., None])[:, 0].float()
        made = data.Normalization(SimpleNamespace(group_size=4, **options))(rewards)
        return {"advantages": array(made).reshape(3, 4)}

    return compute


def overlong(functional):
    def compute(case, a):
        penalties = functional.reward_overlong_penalty(
            {
                "rewards": torch.zeros(12),
                "input_ids": torch.zeros(12, 6),
                "loss_mask": tensor(case, a["mask"]),
            },
            overlong_tokens=3,
            overlong_penalty_factor=0.5,
            max_response_length=6,
        )
        return {"penalty": array(penalties["rewards"]).reshape(3, 4)}

    return compute


def add_pieces(writer, data, functional):
    full = ["full", "binary", "masked_row", "holes", "length_one", "bfloat16"]
    for kind in ("k1", "k2", "k3"):
        writer.add(
            f"kl_{kind}",
            ["kl_estimators"],
            f"{DATA}.KLEstimator",
            estimate(data, kind),
            inputs="tokens",
            arguments={"kl_estimator": kind, "apply_clamp": True},
        )
    group = {"mean_level": "group", "mean_leave1out": False, "std_unbiased": True, "eps": 1e-5}
    for name, key, options in (
        ("group_norm", "grpo", group | {"std_level": "group"}),
        ("group_norm_biased", "grpo", group | {"std_level": "group", "std_unbiased": False}),
        ("group_mean_batch_std", "grpo", group | {"std_level": "batch"}),
        ("group_mean", "dr_grpo", group | {"std_level": None}),
        ("leave_one_out", "rloo", group | {"std_level": None, "mean_leave1out": True}),
    ):
        writer.add(
            name,
            [key],
            f"{DATA}.Normalization",
            normalization(data, **options),
            inputs="rewards",
            cases=full,
            arguments=options,
        )
    writer.add(
        "overlong",
        ["overlong_penalty"],
        f"{FUNCTIONAL}.reward_overlong_penalty",
        overlong(functional),
        inputs="rewards",
        cases=["full", "masked_row", "holes", "length_one"],
        arguments={
            "overlong_tokens": 3,
            "overlong_penalty_factor": 0.5,
            "max_response_length": 6,
        },
    )


def versions():
    """Tokens of several versions of the weights, -1 where none sampled."""
    rng = np.random.default_rng(4)
    names = ("logp", "old_logp", "behavior_logp", "mask")
    return {
        case: {name: arrays[name] for name in names}
        | {"versions": rng.integers(-1, 7, (3, 4, 6)).astype(np.int32)}
        for case, arrays in load_inputs("tokens").items()
        if case != "bfloat16"
    }


def capacity():
    rng = np.random.default_rng(5)
    draw = {"version": 5, "accepted": 60, "running": 20}
    return {
        "random": {k: rng.integers(0, high, 12).astype(np.int32) for k, high in draw.items()},
        "start": {k: np.arange(12, dtype=np.int32) * (k == "running") for k in draw},
    }


def add_staleness(writer, actor, staleness):
    def prox(case, a):
        made = actor.compute_prox_logp_approximations(
            old_logp=tensor(case, a["behavior_logp"]),
            logprobs=tensor(case, a["logp"]),
            versions=torch.from_numpy(a["versions"].reshape(12, 6)),
            current_version=5,
            method=actor.PROX_APPROX_METHOD_LOGLINEAR,
        )
        return {"prox": tokens(made[actor.PROX_APPROX_METHOD_LOGLINEAR]) * a["mask"]}

    def m2(case, a):
        logps = tensor(case, a["behavior_logp"]), tensor(case, a["old_logp"])
        kept = actor._apply_m2po_masking(*logps, mask_of(a), 0.01)
        return {"keep": kept.numpy().reshape(3, 4, 6)}

    def room(case, a):
        found = []
        for version, accepted, running in zip(*a.values(), strict=True):
            provider = SimpleNamespace(get_version=lambda version=version: int(version))
            manager = staleness.StalenessManager(provider, 16, 4, 3)
            manager.rollout_stat = SimpleNamespace(accepted=int(accepted), running=int(running))
            found.append(manager.get_capacity())
        return {"capacity": np.array(found)}

    writer.inputs("versions", versions())
    writer.inputs("capacity", capacity())
    writer.add(
        "loglinear_prox",
        ["areal"],
        f"{ACTOR}.compute_prox_logp_approximations",
        prox,
        inputs="versions",
        arguments={"current_version": 5, "method": "loglinear"},
    )
    arguments = {"m2_threshold": 0.01}
    function = f"{ACTOR}._apply_m2po_masking"
    writer.add("m2_mask", ["m2po"], function, m2, inputs="versions", arguments=arguments)
    writer.add(
        "capacity",
        ["areal"],
        f"{STALENESS}.StalenessManager.get_capacity",
        room,
        inputs="capacity",
        arguments={"max_concurrent": 16, "consumer_batch_size": 4, "max_staleness": 3},
    )


def main():
    root, commit = sys.argv[1:]
    chosen = [DATA, FUNCTIONAL, STALENESS, ACTOR]
    data, functional, staleness, actor = load(root, "areal", chosen)
    writer = Writer(
        "areal_trainer",
        "AReaL",
        ["torch", "numpy"],
        "areal_trainer.py",
        version=VERSION,
        commit=commit,
    )
    # `from areal.utils.constants import ...` gave an empty name.
    actor.PROX_APPROX_METHOD_LOGLINEAR = "loglinear"
    add_losses(writer, functional)
    add_pieces(writer, data, functional)
    add_staleness(writer, actor, staleness)
    writer.save()


if __name__ == "__main__":
    main()
