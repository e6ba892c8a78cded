"""Credit of turns from critics against released code, and returns off policy against rlax."""

import jax.numpy as jnp
from golden_data import Ours

from jaxrl_llm import advantages


def hierarchy(normalize, bootstrap):
    def run(a):
        credit = advantages.hae(
            a["rewards"],
            a["action_values"],
            a["subgoal_values"],
            a["switch_values"],
            a["switches"],
            turn_where=a["where"],
            truncated=a["truncated"] if bootstrap else None,
            gamma=0.9,
            action_lam=0.8,
            subgoal_lam=0.5,
        )
        shape = a["roles"].shape
        mask = jnp.broadcast_to(a["where"][..., None], shape).reshape(shape[0], -1)
        ids = jnp.broadcast_to(jnp.arange(shape[1])[:, None], shape).reshape(shape[0], -1)
        tokens = advantages.hae_tokens(
            credit,
            mask,
            turn_ids=ids,
            roles=a["roles"].reshape(shape[0], -1),
            normalize=normalize,
        )
        returns = (credit.action_returns, credit.subgoal_returns, credit.switch_returns)
        return {
            "advantages": tokens.advantages.reshape(shape),
            "keep": tokens.keep.reshape(shape),
            "returns": jnp.stack(returns, axis=-1),
        }

    return Ours(run)


def actions(intra):
    def run(a):
        rollouts, turns, tokens = a["mask"].shape
        mask = a["mask"].reshape(rollouts, -1)
        ids = jnp.broadcast_to(jnp.repeat(jnp.arange(turns), tokens), mask.shape)
        placed = advantages.turn_end_rewards(a["rewards"], mask, turn_ids=ids)
        arrays = (placed, a["values"].reshape(rollouts, -1), mask)
        options = {"turn_ids": ids, "gamma": 0.9, "intra_gamma": intra, "lam": 0.95}
        out = {
            "advantages": advantages.poad(*arrays, **options),
            "returns": advantages.poad_returns(*arrays, **options),
        }
        return {name: x.reshape(a["mask"].shape) for name, x in out.items()}

    return Ours(run)


def of_rlax(function, name="returns", **options):
    """A function of token rewards, with the options that all entries share."""

    def run(a):
        rewards = advantages.terminal_rewards(a["rewards"], a["mask"])
        last = jnp.full(a["mask"].shape[:-1], 0.4)
        out = function(
            rewards,
            a["values"],
            a["mask"],
            gamma=0.97,
            bootstrap_value=last,
            **{key: a[x] if isinstance(x, str) else x for key, x in options.items()},
        )
        return {name: out}

    return run


RATIO = {"old_logp": "old_logp", "behavior_logp": "ref_logp", "lam": 0.9}


def both(rho, most):
    returns = of_rlax(advantages.vtrace_returns, **RATIO, clip_rho=rho)
    credit = of_rlax(advantages.vtrace, "advantages", **RATIO, clip_rho=rho, clip_advantage=most)
    return Ours(lambda a: returns(a) | credit(a))


def steps(n, lam):
    return Ours(of_rlax(advantages.n_step_returns, n=n, lam=lam))


TABLES = {
    "hiper": {"raw": hierarchy(False, True), "normalized": hierarchy(True, False)},
    "poad": {"poad": actions(1.0), "ntpo": actions(0.9)},
    "rlax_returns": {
        "vtrace": both(1.0, 1.0),
        "vtrace_1.2": both(1.2, 0.9),
        "retrace": Ours(of_rlax(advantages.retrace_returns, **RATIO, action_values="weight")),
        "errors": Ours(of_rlax(advantages.corrected_td_errors, "errors", **RATIO)),
        "steps_3": steps(3, 1.0),
        "steps_2": steps(2, 0.6),
    },
}
