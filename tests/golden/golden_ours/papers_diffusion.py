"""Our diffusion policies against the numbers and gradients of the authors' own code."""

import jax
import jax.numpy as jnp
from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import aggregate, diffusion, regularizers, surrogates

token_mean, sequence_mean = aggregate.token_mean, aggregate.sequence_mean


def differentiated(total):
    """The value of a loss of the inputs and its gradient in ``logp``."""

    def run(a):
        return graded(lambda logp: total(a, logp), a["logp"])

    return run


def clipped(estimate, a, logp, beta):
    """GRPO of tokens with an estimate in the place of log-probabilities."""
    valid = a["valid"]
    tokens, old, ref = (estimate(a, x) for x in (logp, a["old_draws"], a["ref_draws"]))
    each = surrogates.ppo_clip(tokens, old, a["advantages"], valid, eps_low=0.5, eps_high=0.5)
    each += regularizers.kl_to_reference(tokens, ref, valid, coef=beta)
    return aggregate.weighted_sum(each, token_mean(valid))


def one_step(a, logp):
    return diffusion.mean_field(logp, a["valid"])


def coupled(a, logp):
    # The first forward masks everything, the others are complements.
    masked = a["masked"][1:] & a["valid"]
    return diffusion.coupled(logp[0], logp[1:], masked, a["t"][1:], a["valid"])


def bound(a, logp):
    t = diffusion.count_levels(a["masked"], a["valid"], least=0)
    return diffusion.elbo(logp, a["masked"], t)


def espo(a, logp):
    valid = a["valid"]
    tokens, old, ref = (bound(a, x) for x in (logp, a["old_draws"], a["ref_draws"]))
    each = surrogates.gspo(tokens, old, a["advantages"], valid, eps_low=0.05, eps_high=0.05)
    each += diffusion.elbo_kl(tokens, ref, valid, coef=0.3)
    return aggregate.weighted_sum(each, sequence_mean(valid))


def spg(**options):
    def total(a, logp):
        valid, masked, A = a["valid"], a["masked"], a["advantages"]
        t = diffusion.count_levels(masked, valid)
        tokens = diffusion.sandwiched(logp, masked, t, A, valid, **options)
        each = surrogates.reinforce(tokens, None, A, valid)
        return aggregate.weighted_sum(each, token_mean(valid))

    return differentiated(total)


def wd1(a, logp):
    each = diffusion.wd1(one_step(a, logp), None, a["advantages"], a["valid"])
    return jnp.sum(each)


def flow(noise):
    def run(a):
        def step(v):
            made = diffusion.flow_sde_step(
                a["x"],
                v,
                a["sigma"],
                a["sigma_next"],
                sigma_1=0.9,
                noise=noise,
                x_next=a["x_next"],
            )
            return made.logp.sum(), made

        gradient, made = jax.grad(step, has_aux=True)(a["v"])
        return {"logp": made.logp, "mean": made.mean, "std": made.std, "gradient": gradient}

    return run


def branch(a):
    def step(v):
        levels = a["sigmas"][0], a["sigmas"][1]
        made = diffusion.branch_sde_step(a["x"], v, *levels, eta=0.3, x_next=a["x_next"])
        return made.logp.sum(), made.logp

    gradient, logp = jax.grad(step, has_aux=True)(a["v"])
    return {"logp": logp, "gradient": gradient}


def nft(beta):
    """The loss of six samples at one level each."""

    def run(a):
        def loss(v):
            mask = jnp.ones((6, 1), bool)
            v, old, first = (x[:, None] for x in (v, a["ref_velocity"], a["anchor_velocity"]))
            each = diffusion.diffusion_nft(
                jnp.zeros((6, 1)),
                None,
                a["advantages"],
                mask,
                velocity=v,
                ref_velocity=old,
                target_velocity=(a["noise"] - a["clean"])[:, None],
                level=a["level"][:, None],
                beta=beta,
            )
            each += diffusion.flow_mse(v, first, mask, coef=0.01, reduce="mean")
            return each.mean()

        return graded(loss, a["velocity"])

    return run


def decay(**options):
    """A reference of ones that moves to a policy of zeros keeps the decay."""

    def run(a):
        def moved(step):
            return regularizers.ramped_reference(
                {"w": jnp.ones(())}, {"w": jnp.zeros(())}, step, **options
            )["w"]

        return {"decay": jax.vmap(moved)(a["steps"])}

    return run


TABLES = {
    "d1": {"loss": Ours(differentiated(lambda a, logp: clipped(one_step, a, logp, 0.04)))},
    "diffucoder": {"loss": Ours(differentiated(lambda a, logp: clipped(coupled, a, logp, 0.01)))},
    "espo": {
        "elbo": Ours(lambda a: {"elbo": bound(a, a["logp"]).sum(-1)}),
        "loss": Ours(differentiated(espo)),
    },
    "spg": {
        "mix": Ours(spg(beta=1.5, mix=0.5)),
        "upper": Ours(spg(beta=2.0, mix=1.0)),
        "lower": Ours(spg(mix=0.0)),
    },
    "wd1": {"loss": Ours(differentiated(wd1))},
    "flow_grpo": {"step": Ours(flow(0.7)), "more_noise": Ours(flow(1.0))},
    "branch_flow": {"step": Ours(branch)},
    "diffusion_nft": {
        "loss": Ours(nft(1.0)),
        "weaker": Ours(nft(0.1)),
        "decay_1": Ours(decay()),
        "decay_2": Ours(decay(slope=0.0075, most=0.999, flat=75)),
    },
}
