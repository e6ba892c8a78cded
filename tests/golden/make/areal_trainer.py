"""Writes estimators/areal_trainer.*: AReaL's losses, masks and normalization."""

import functools
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


def actor_loss(functional, rejection_sampling=None, importance_sampling_level="token", **options):
    by = "advantages" if importance_sampling_level == "sequence" else "token_advantages"
    rejection = rejection_sampling
    if importance_sampling_level != "token":
        options["importance_sampling_level"] = importance_sampling_level

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
    writer.add("loglinear_prox", prox)
    writer.add("m2_mask", m2)
    writer.add("capacity", room)


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
    writer.each(".ppo_actor_loss_fn", functools.partial(actor_loss, functional))
    writer.add("sapo", sapo(functional))
    writer.add("value_loss", critic_loss(functional))
    for kind in ("k1", "k2", "k3"):
        writer.add(f"kl_{kind}", estimate(data, kind))
    writer.each("data.Normalization", functools.partial(normalization, data))
    writer.add("overlong", overlong(functional))
    add_staleness(writer, actor, staleness)
    writer.save()


if __name__ == "__main__":
    main()
