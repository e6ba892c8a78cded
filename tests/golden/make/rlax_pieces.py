"""Writes estimators/rlax_pieces.*: the pieces of rlax that our functions reduce to.

Run from the repository root with a Python that has rlax with what it imports (chex, distrax,
tensorflow-probability, dm-env):

    python tests/golden/make/rlax_pieces.py

rlax' functions take one sequence without a mask and average over its tokens, so each gets the kept
tokens of a sequence, or of all. A loss is a mean over tokens.
"""

from unittest import mock

import jax
import jax.interpreters.xla
import jax.numpy as jnp
import numpy as np
from estimator_cases import Writer

# tensorflow-probability still looks for a table that jax has given up.
jax.interpreters.xla.pytype_aval_mappings = mock.MagicMock()
import rlax  # noqa: E402

CASES = ["full", "binary", "masked_row", "holes", "length_one"]
TOKENS = ["ragged", "on_policy", "holes", "masked_row", "one_sequence", "length_one"]
TOKENS += ["log_ratio_30", "zero_advantage"]


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


def main():
    writer = Writer("rlax_pieces", "rlax", ["rlax", "jax", "distrax", "numpy"], "rlax_pieces.py")
    words = ["normal", "peaked", "equal"]
    for name, keys, function, compute, inputs, cases, arguments in (
        ("ppo", ["ppo_clip"], "clipped_surrogate_pg_loss", surrogate, "tokens", TOKENS, [0.2]),
        (
            "reinforce",
            ["reinforce"],
            "policy_gradient_loss",
            policy_gradient,
            "vocabulary",
            words,
            [],
        ),
        ("entropy", ["entropy_bonus"], "entropy_loss", entropy, "vocabulary", words, []),
        (
            "kl_forward",
            ["sdpo"],
            "categorical_kl_divergence",
            divergence(False),
            "vocabulary",
            words,
            ["teacher", "student"],
        ),
        (
            "kl_reverse",
            ["sdpo"],
            "categorical_kl_divergence",
            divergence(True),
            "vocabulary",
            words,
            ["student", "teacher"],
        ),
        (
            "gae",
            ["gae"],
            "truncated_generalized_advantage_estimation",
            gae,
            "rewards",
            CASES,
            [0.97, 0.9],
        ),
        ("to_go", ["reinforce_pp"], "discounted_returns", to_go, "rewards", CASES, [0.9]),
        ("huber", ["value_loss"], "huber_loss", huber, "tokens", TOKENS, [0.5]),
    ):
        writer.add(
            name,
            keys,
            f"rlax.{function}",
            compute,
            inputs=inputs,
            cases=cases,
            arguments={"positional": arguments},
            tolerance={"float32": 2e-5 if inputs != "vocabulary" else 1e-4},
        )
    writer.save()


if __name__ == "__main__":
    main()
