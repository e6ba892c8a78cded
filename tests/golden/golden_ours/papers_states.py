"""Controllers, moments and trackers against the numbers of the papers' own released code."""

import jax
import jax.numpy as jnp
from golden_data import Ours

from golden_ours import graded
from jaxrl_llm import advantages, aggregate, regularizers, surrogates


def pid(a):
    _, found = jax.lax.scan(regularizers.pid_step, regularizers.pid_init(), a["reward"])
    return {"adjustment": found}


def controller(a):
    def step(state, x):
        state, control = regularizers.safe_step(state, x["kl"], x["entropy"], x["reward"])
        numbers = {"kl_short": state.kl_short, "kl_long": state.kl_long}
        return state, numbers | {
            name: getattr(control, name) for name in ("penalty", "threshold", "phase")
        }

    return jax.lax.scan(step, regularizers.safe_init(), dict(a))[1]


def asymmetric(a):
    init = regularizers.asymmetric_init(window=50)
    _, control = jax.lax.scan(regularizers.asymmetric_step, init, a["kl"])
    return {"penalty": control.penalty, "momentum": control.momentum}


def step_scale(a):
    return {"scale": jax.vmap(regularizers.step_scale)(a["kl"])}


def soft_min(alpha):
    def run(a):
        def total(first, second):
            values = surrogates.soft_min(jnp.stack([first, second], axis=-1), alpha=alpha)
            return values.sum(), values

        gradients, values = jax.grad(total, (0, 1), has_aux=True)(a["first"], a["second"])
        return {"values": values, "gradient_0": gradients[0], "gradient_1": gradients[1]}

    return Ours(run)


def scaled(**options):
    def run(a):
        scaler = advantages.score_scaler(**options)

        def step(state, scores):
            values, state = scaler.update(scores, state)
            numbers = {"mean": state.mean, "var": state.var, "std": state.std}
            return state, numbers | {"scores": values}

        return jax.lax.scan(step, scaler.init(), a["scores"])[1]

    return Ours(run)


def experiences(a):
    rows = (a["rewards"], a["mask"])
    shaped = {name: a[name] for name in ("old_logp", "ref_logp")} | {"kl_coef": 0.02}
    token_rewards = advantages.kl_shaped_rewards(*rows, **shaped)
    critic, options = (token_rewards, a["values"], a["mask"]), {"gamma": 0.98, "lam": 0.95}
    return {
        "token_rewards": token_rewards,
        "advantages": advantages.gae(*critic, **options),
        "returns": advantages.gae_returns(*critic, **options),
    }


def policy(bound=jnp.inf):
    def run(a):
        weight = aggregate.token_mean(a["mask"])
        values = jnp.clip(a["token_advantages"], -bound, bound)

        def total(logp):
            each = surrogates.ppo_clip(
                logp, a["old_logp"], values, a["mask"], eps_low=0.2, eps_high=0.2
            )
            return aggregate.weighted_sum(each, weight)

        return graded(total, a["logp"])

    return Ours(run)


def critic(a):
    weight = aggregate.token_mean(a["mask"])

    def total(values):
        each = surrogates.value_loss(values, a["old_values"], a["returns"], a["mask"])
        return aggregate.weighted_sum(each, weight)

    return graded(total, a["values"])


def tracker(a):
    """The factor is that of the time before a KL was measured."""
    rho = advantages.window_kl_discount(jnp.zeros(10), count=0)
    ids = jnp.arange(12)
    state = advantages.beta_tracker_init(a["outcomes"].sum(-1), 8, rho_min=0.875, smoothing=0.0)
    values = [advantages.beta_tracker_value(state, ids)]
    for rewards in a["rewards"]:
        state = advantages.beta_tracker_update(state, ids, rewards[:, None], rho)
        values.append(advantages.beta_tracker_value(state, ids))
    return {"values": jnp.stack(values)}


def forgetting(a):
    return {"rho": advantages.window_kl_discount(a["kl_window"])}


def shaping(**options):
    def run(a):
        rows = (a["token_advantages"], a["mask"])
        values = advantages.sampled_entropy_shaping(*rows, old_logp=a["old_logp"], **options)
        return {"advantages": values}

    return Ours(run)


TABLES = {
    "safe": {
        "pid": Ours(pid),
        "controller": Ours(controller),
        "step_scale": Ours(step_scale),
        "asymmetric": Ours(asymmetric),
        "soft_min_0.3": soft_min(0.3),
        "soft_min_0.01": soft_min(0.01),
        "soft_min_100": soft_min(100.0),
    },
    "moss_rlhf": {
        "scaled": scaled(),
        "centered": scaled(center=True, clip=0.8),
        "experiences": Ours(experiences),
        "policy": policy(),
        "clipped_advantages": policy(0.5),
        "critic": Ours(critic),
    },
    "mssr": {
        "tracker": Ours(tracker),
        "forgetting": Ours(forgetting),
        "shaping": shaping(),
        "tight": shaping(scale=2.0, cap=0.5),
    },
}
