"""Writes estimators/verl_losses.*: verl's losses and terms on the shared inputs.

A policy loss is stored with its gradient in log_prob and with its token losses as weighted by the
aggregation: the latter are the gradient in `rollout_is_weights` at ones, verl's own factor on every
token loss.
"""

import functools

import numpy as np
import torch
from estimator_cases import written
from verl_peer import (
    VERSIONS,
    array,
    config,
    core_algos,
    tensor,
    tokens,
    torch_functional,
)


def policy_loss(name, loss_agg_mode, advantages, weighted, **options):
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
            loss_agg_mode=loss_agg_mode,
            config=settings,
            rollout_is_weights=weight,
        )
        gradient, token_loss = torch.autograd.grad(loss, [logp, weight])
        outputs = {"loss": array(loss), "gradient": tokens(gradient)}
        if not weighted:
            outputs["token_loss"] = tokens(token_loss)
        return outputs

    return compute


LOSSES = ("vanilla", "gspo", "sapo", "dppo_tv", "dppo_kl", "gpg", "cispo", "geo_mean")
# A ratio of 1 takes all candidates, so that torch's random choice has nothing to choose.
LOSSES += ("clip_cov", "kl_cov")


def aggregate(loss_agg_mode, **options):
    def compute(case, a):
        loss = tensor(case, a["token_advantages"]).requires_grad_()
        total = core_algos.agg_loss(loss, tensor(case, a["mask"]), loss_agg_mode, **options)
        (weights,) = torch.autograd.grad(total, [loss])
        return {"loss": array(total), "gradient": tokens(weights)}

    return compute


def kl(kl_penalty):
    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        value = core_algos.kl_penalty(logp, tensor(case, a["ref_logp"]), kl_penalty)
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


@written("verl_losses", "verl", VERSIONS)
def main(writer):
    for name in LOSSES:
        writer.each(f"compute_policy_loss_{name}", functools.partial(policy_loss, name))
    writer.each("agg_loss", aggregate)
    writer.each("kl_penalty", kl)
    writer.add("value_loss", value_loss)
    writer.add("entropy", entropy)
    writer.add("adaptive_kl", adaptive_kl)
