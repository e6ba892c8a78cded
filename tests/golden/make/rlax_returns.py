"""Writes estimators/rlax_returns.*: the returns of rlax from samples off policy.

rlax' functions take one sequence without a mask, so each gets the kept tokens of a sequence. The
inputs `ref_logp` and `weight` stand for the policy that sampled, and for values of actions.
"""

from unittest import mock

import jax
import jax.interpreters.xla
import jax.numpy as jnp
import numpy as np
from estimator_cases import written

# tensorflow-probability still looks for a table that jax has given up.
jax.interpreters.xla.pytype_aval_mappings = mock.MagicMock()
import rlax  # noqa: E402
from rlax._src import multistep  # noqa: E402  what rlax does not list

GAMMA, LAM, LAST = 0.97, 0.9, 0.4


def rows(a):
    """Each sequence with a kept token: its place, mask, rewards, values before and after, ratio."""
    for index in np.ndindex(a["mask"].shape[:2]):
        keep = a["mask"][index]
        if keep.any():
            rewards = jnp.zeros(int(keep.sum())).at[-1].set(a["rewards"][index])
            values = jnp.append(a["values"][index][keep], LAST)
            rho = jnp.exp(a["old_logp"][index][keep] - a["ref_logp"][index][keep])
            yield index, keep, rewards, values, rho


def filled(a, function):
    """What a function of a sequence returns, by name, on the kept tokens."""
    out = {}
    for index, keep, *arrays in rows(a):
        for name, x in function(a, index, keep, *arrays).items():
            out.setdefault(name, np.zeros(a["mask"].shape))[index][keep] = x
    return out


def vtrace(rho_bound, pg_bound):
    def each(a, index, keep, rewards, values, rho):
        discount = jnp.full(rewards.shape, GAMMA)
        out = rlax.vtrace_td_error_and_advantage(
            values[:-1], values[1:], rewards, discount, rho, LAM, rho_bound, pg_bound
        )
        return {"advantages": out.pg_advantage, "returns": out.errors + values[:-1]}

    return lambda case, a: filled(a, each)


def retrace(case, a):
    def each(a, index, keep, rewards, values, rho):
        discount = jnp.full(rewards.shape, GAMMA)
        q = jnp.asarray(a["weight"][index][keep])
        trace = LAM * jnp.minimum(1.0, rho)
        returns = rlax.general_off_policy_returns_from_q_and_v(
            q[1:], values[1:], rewards, discount, trace[1:]
        )
        return {"returns": returns}

    return filled(a, each)


def errors(case, a):
    def each(a, index, keep, rewards, values, rho):
        discount = jnp.full(rewards.shape, GAMMA)
        out = multistep.importance_corrected_td_errors(rewards, discount, rho, LAM, values)
        return {"errors": out}

    return filled(a, each)


def steps(n, lam):
    def each(a, index, keep, rewards, values, rho):
        discount = jnp.full(rewards.shape, GAMMA)
        # rlax cannot take fewer tokens than steps; there the return is that of all tokens.
        count = min(n, len(rewards))
        out = rlax.n_step_bootstrapped_returns(rewards, discount, values[1:], count, lam)
        return {"returns": out}

    return lambda case, a: filled(a, each)


@written("rlax_returns", "rlax", ["rlax", "jax", "distrax", "numpy"])
def main(writer):
    writer.add("vtrace", vtrace(1.0, 1.0))
    writer.add("vtrace_1.2", vtrace(1.2, 0.9))
    writer.add("retrace", retrace)
    writer.add("errors", errors)
    writer.add("steps_3", steps(3, 1.0))
    writer.add("steps_2", steps(2, 0.6))
