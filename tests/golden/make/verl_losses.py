"""Writes estimators/verl_losses.*: verl's losses and terms on the shared inputs.

Run from the repository root with a Python that has verl, torch, tensordict, omegaconf and what they
import:

    python tests/golden/make/verl_losses.py

A policy loss is stored with its gradient in log_prob and with its token losses as weighted by the
aggregation: the latter are the gradient in `rollout_is_weights` at ones, verl's own factor on every
token loss.
"""

import numpy as np
import torch
from estimator_cases import Writer
from verl_peer import (
    AGGREGATIONS,
    CORE,
    TORCH,
    VERSIONS,
    array,
    config,
    core_algos,
    tensor,
    tokens,
    torch_functional,
)


def policy_loss(name, mode, advantages="advantages", weighted=False, **options):
    function = core_algos.get_policy_loss_fn(name)

    def compute(case, a):
        settings = config(**options)
        mask = tensor(case, a["mask"])
        logp = tensor(case, a["logp"]).requires_grad_()
        weight = tensor(case, a["weight"])
        weight = (weight if weighted else torch.ones_like(weight)).requires_grad_()
        values = a[advantages]
        if advantages == "advantages":
            values = np.broadcast_to(values[..., None], a["logp"].shape)
        torch.manual_seed(0)
        loss, _ = function(
            old_log_prob=tensor(case, a["old_logp"]),
            log_prob=logp,
            advantages=tensor(case, values),
            response_mask=mask,
            loss_agg_mode=mode,
            config=settings,
            rollout_is_weights=weight,
        )
        gradient, token_loss = torch.autograd.grad(loss, [logp, weight])
        outputs = {"loss": array(loss), "gradient": tokens(gradient)}
        if not weighted:
            outputs["token_loss"] = tokens(token_loss)
        return outputs

    return compute


def add_losses(writer):
    def add(name, keys, mode, loss=None, *, advantages="advantages", weighted=False, **more):
        options = more.pop("options", {})
        loss = loss or name
        function = core_algos.get_policy_loss_fn(loss).__name__
        writer.add(
            name,
            keys,
            CORE + function,
            policy_loss(loss, mode, advantages, weighted, **options),
            inputs="tokens",
            arguments={"loss_agg_mode": mode, "advantages": advantages, "weighted": weighted}
            | options,
            **more,
        )

    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    higher = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}
    off = {"clip_ratio_c": 1e9}
    add("vanilla", ["ppo_clip"], "token-mean", options=clip | off)
    dual = ["ppo_dual_clip"]
    add("vanilla_dual", dual, "token-mean", "vanilla", options=clip | {"clip_ratio_c": 1.2})
    by_token = "token_advantages"
    add("vanilla_token", dual, AGGREGATIONS[1], "vanilla", advantages=by_token, options=clip)
    add("vanilla_weighted", dual, "token-mean", "vanilla", weighted=True, options=clip)
    add("dapo", ["dapo_clip"], "token-mean", "vanilla", options=higher)
    narrow = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
    add("gspo", ["gspo"], "seq-mean-token-mean", options=narrow)
    add(
        "gspo_token",
        ["gspo_token"],
        "seq-mean-token-mean",
        "gspo",
        advantages=by_token,
        options=narrow,
    )
    add("sapo", ["sapo"], "seq-mean-token-mean", options={"tau_pos": 1.0, "tau_neg": 1.05})
    sharp = {"tau_pos": 0.5, "tau_neg": 4.0}
    add("sapo_sharp", ["sapo"], "seq-mean-token-mean", "sapo", advantages=by_token, options=sharp)
    for divergence, bound in (("tv", 0.05), ("kl", 0.02)):
        bounds = {"clip_ratio_low": bound, "clip_ratio_high": 1.5 * bound, "clip_ratio_c": 1.2}
        name, key = f"dppo_{divergence}", [f"dppo_{divergence}"]
        more = {"options": bounds}
        if divergence == "kl":
            # Rounded to bfloat16 the divergence falls on either side of a bound.
            more["cases"] = [case for case in writer.inputs("tokens") if case != "bfloat16"]
        add(name, key, "token-mean", **more)
        add(f"{name}_token", key, AGGREGATIONS[1], name, advantages=by_token, **more)
    add("gpg_loss", ["gpg", "reinforce"], "token-mean", "gpg")
    add("reinforce_sum", ["reinforce"], "seq-mean-token-sum", "gpg", weighted=True)
    add("cispo", ["cispo"], "token-mean", options=clip)
    add("geo_mean", ["gmpo"], "token-mean", options={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4})
    add(
        "geo_mean_narrow",
        ["gmpo"],
        "token-mean",
        "geo_mean",
        options={"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    )
    # A ratio of 1 takes all candidates, so that torch's random choice has nothing to choose.
    covariance = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.0}
    add("clip_cov", ["clip_cov"], "token-mean", options=clip | {"policy_loss": covariance})
    for ratio, coef in ((0.2, 1.0), (0.01, 0.1)):
        add(
            f"kl_cov_{ratio}",
            ["kl_cov"],
            "token-mean",
            "kl_cov",
            options={"policy_loss": {"kl_cov_ratio": ratio, "ppo_kl_coef": coef}},
        )


def aggregate(mode, **options):
    def compute(case, a):
        loss = tensor(case, a["token_advantages"]).requires_grad_()
        total = core_algos.agg_loss(loss, tensor(case, a["mask"]), mode, **options)
        (weights,) = torch.autograd.grad(total, [loss])
        return {"loss": array(total), "gradient": tokens(weights)}

    return compute


def kl(kind):
    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        value = core_algos.kl_penalty(logp, tensor(case, a["ref_logp"]), kind)
        mask = tensor(case, a["mask"])
        (gradient,) = torch.autograd.grad((value * mask).sum(), [logp])
        return {"kl": tokens(value * mask), "gradient": tokens(gradient)}

    return compute


def value_loss(case, a):
    values = tensor(case, a["logp"]).requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        vpreds=values,
        returns=tensor(case, a["token_advantages"]),
        values=tensor(case, a["old_logp"]),
        response_mask=tensor(case, a["mask"]),
        cliprange_value=0.2,
        loss_agg_mode="token-mean",
    )
    (gradient,) = torch.autograd.grad(loss, [values])
    return {"loss": array(loss), "gradient": tokens(gradient)}


def entropy(case, a):
    logits = tensor(case, a["logits"], flat=False).requires_grad_()
    value = torch_functional.entropy_from_logits(logits)
    (gradient,) = torch.autograd.grad(value.sum(), [logits])
    return {"entropy": array(value), "gradient": array(gradient)}


def adaptive_kl(case, a):
    """The coefficient after each of twelve updates, with sizes of advantages for the KL."""
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.1, target_kl=0.8, horizon=1000)
    coefficients = []
    for value in np.abs(a["advantages"]).reshape(-1):
        controller.update(float(value), 64)
        coefficients.append(controller.value)
    return {"coef": np.array(coefficients)}


def add_terms(writer):
    for mode, options in (
        *((mode, {}) for mode in AGGREGATIONS),
        ("seq-mean-token-sum-norm", {}),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 10}),
    ):
        writer.add(
            f"agg_{mode}" + ("_10" if options else ""),
            ["aggregate"],
            CORE + "agg_loss",
            aggregate(mode, **options),
            inputs="tokens",
            arguments={"loss_agg_mode": mode} | options,
        )
    for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        writer.add(
            f"kl_{kind}",
            ["kl_estimators"],
            CORE + "kl_penalty",
            kl(kind),
            inputs="tokens",
            arguments={"kl_penalty": kind},
        )
    writer.add(
        "value_loss",
        ["value_loss"],
        CORE + "compute_value_loss",
        value_loss,
        inputs="tokens",
        arguments={
            "vpreds": "logp",
            "values": "old_logp",
            "returns": "token_advantages",
            "cliprange_value": 0.2,
        },
    )
    writer.add(
        "entropy",
        ["entropy_bonus"],
        TORCH + "entropy_from_logits",
        entropy,
        inputs="vocabulary",
        tolerance={"float32": 1e-4},
    )
    writer.add(
        "adaptive_kl",
        ["adaptive_kl"],
        CORE + "AdaptiveKLController.update",
        adaptive_kl,
        inputs="tokens",
        cases=["ragged", "zero_advantage"],
        arguments={"init_kl_coef": 0.1, "target_kl": 0.8, "horizon": 1000, "n_steps": 64},
    )


def main():
    writer = Writer("verl_losses", "verl", VERSIONS, "verl_losses.py")
    add_losses(writer)
    add_terms(writer)
    writer.save()


if __name__ == "__main__":
    main()
