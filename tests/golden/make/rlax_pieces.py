"""Writes estimators/rlax_pieces.*: the pieces of rlax that our functions reduce to.

rlax' functions take one sequence without a mask and average over its tokens, so each gets the kept
tokens of a sequence, or of all. A loss is a mean over tokens.
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


def surrogate(case, a):
    keep = a["mask"]

    def loss(logp):
        ratio = jnp.exp(logp - a["old_logp"])[keep]
        return rlax.clipped_surrogate_pg_loss(ratio, jnp.asarray(a["token_advantages"])[keep], 0.2)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(a["logp"]))
    return {"loss": np.asarray(value), "gradient": np.asarray(gradient)}


def policy_gradient(case, a):
    def loss(logits):
        flat = logits.reshape(-1, logits.shape[-1])
        actions, values = a["targets"].reshape(-1), a["advantages"].reshape(-1)
        return rlax.policy_gradient_loss(flat, actions, values, jnp.ones(flat.shape[0]))

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(a["logits"]))
    return {"loss": np.asarray(value), "gradient": np.asarray(gradient)}


def entropy(case, a):
    def loss(logits):
        flat = logits.reshape(-1, logits.shape[-1])
        return rlax.entropy_loss(flat, jnp.ones(flat.shape[0]))

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(a["logits"]))
    return {"loss": np.asarray(value), "gradient": np.asarray(gradient)}


def divergence(reverse):
    def compute(case, a):
        def loss(logits):
            pair = (logits, a["teacher_logits"])
            return rlax.categorical_kl_divergence(*(pair if reverse else pair[::-1])).sum()

        logits = jnp.asarray(a["logits"])
        pair = (logits, a["teacher_logits"])
        value = rlax.categorical_kl_divergence(*(pair if reverse else pair[::-1]))
        return {"loss": np.asarray(value), "gradient": np.asarray(jax.grad(loss)(logits))}

    return compute


def rows(a):
    """Each sequence with a kept token: its index, its mask, and its reward on the last token."""
    for index in np.ndindex(a["mask"].shape[:2]):
        keep = a["mask"][index]
        if keep.any():
            rewards = jnp.zeros(int(keep.sum())).at[-1].set(a["rewards"][index])
            yield index, keep, rewards


def gae(case, a):
    advantages, returns = np.zeros(a["mask"].shape), np.zeros(a["mask"].shape)
    for index, keep, rewards in rows(a):
        values = jnp.append(a["values"][index][keep], 0.0)
        discount = jnp.full(rewards.shape, 0.97)
        made = rlax.truncated_generalized_advantage_estimation(rewards, discount, 0.9, values)
        advantages[index][keep] = made
        returns[index][keep] = rlax.lambda_returns(rewards, discount, values[1:], 0.9)
    return {"advantages": advantages, "returns": returns}


def to_go(case, a):
    found = np.zeros(a["mask"].shape)
    for index, keep, rewards in rows(a):
        found[index][keep] = rlax.discounted_returns(rewards, jnp.full(rewards.shape, 0.9), 0.0)
    return {"returns": found}


def huber(case, a):
    keep = a["mask"]

    def loss(values):
        error = (values - a["token_advantages"])[keep]
        return jnp.mean(rlax.huber_loss(error, 0.5))

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(a["logp"]))
    return {"loss": np.asarray(value), "gradient": np.asarray(gradient)}


@written("rlax_pieces", "rlax", ["rlax", "jax", "distrax", "numpy"])
def main(writer):
    computes = {
        "ppo": surrogate,
        "reinforce": policy_gradient,
        "entropy": entropy,
        "kl_forward": divergence(False),
        "kl_reverse": divergence(True),
        "gae": gae,
        "to_go": to_go,
        "huber": huber,
    }
    for name, compute in computes.items():
        writer.add(name, compute)
