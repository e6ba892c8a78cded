"""Writes estimators/tunix_algorithms.*: tunix' algorithm core on the shared inputs.

Run from the repository root with a Python that has google-tunix and jax:

    python tests/golden/make/tunix_algorithms.py

tunix' losses call the model; here the one function that does returns the log-probabilities of the
case. A loss is stored with its gradient in them and, where the loss takes the weights of a sampler,
with its token losses as weighted by the aggregation: the gradient in those weights at ones. tunix
knows no ragged group, so every rollout takes part.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from estimator_cases import Writer
from flax import nnx
from tunix.rl import algo_core, common
from tunix.rl.grpo import dapo_learner

CORE = "tunix.rl.algo_core."
VERSIONS = ["google-tunix", "jax", "numpy"]
FULL = ["full", "binary", "masked_row", "holes", "length_one", "bfloat16"]


def array(case, x):
    x = jnp.asarray(np.reshape(x, (-1, *np.shape(x)[2:])))
    if x.dtype == bool:
        return x.astype(jnp.int32)
    return x.astype(jnp.bfloat16) if case == "bfloat16" else x


def tokens(x):
    return np.asarray(x, np.float32).reshape(3, 4, 6)


# --- advantages ----------------------------------------------------------------------------------


def advantage(function):
    def compute(case, a):
        rewards = array(case, a["rewards"][..., None])[:, 0]
        if function is algo_core.compute_advantages:
            rewards = np.asarray(rewards)
        return {"advantages": np.asarray(function(rewards, 4), np.float32).reshape(3, 4)}

    return compute


def gae(case, a):
    mask = array(case, a["mask"])
    last = (mask * jnp.arange(1, 7)).argmax(-1)
    rewards = jax.nn.one_hot(last, 6) * array(case, a["rewards"][..., None])
    values = array(case, a["values"])
    advantages, returns = algo_core.compute_gae_advantages(rewards, values, mask, 0.97, 0.9)
    return {"advantages": tokens(advantages * mask), "returns": tokens(returns * mask)}


def overlong(case, a):
    """One completion a rollout, as many characters as it has tokens in the mask."""
    lengths = a["mask"].sum(-1).reshape(-1)
    buffer = {
        "overlong_buffer_length": 3,
        "overlong_buffer_penalty": 0.5,
        "max_response_length": 6,
    }
    prompts, completions = [""] * 12, ["x" * int(n) for n in lengths]
    made = dapo_learner.reward_shaping(prompts, completions, None, overlong_buffer=buffer)
    return {"penalty": np.reshape(made, (3, 4))}


def add_advantages(writer):
    for name, key in (("advantages", "grpo"), ("drgrpo_advantages", "dr_grpo")):
        function = getattr(algo_core, f"compute_{name}")
        compute = advantage(function)
        writer.add(key, [key], CORE + function.__name__, compute, inputs="rewards", cases=FULL)
    function = algo_core.compute_rloo_advantages
    compute = advantage(function)
    writer.add("rloo", ["rloo"], CORE + function.__name__, compute, inputs="rewards", cases=FULL)
    writer.add(
        "gae",
        ["gae"],
        CORE + "compute_gae_advantages",
        gae,
        inputs="rewards",
        cases=FULL,
        arguments={"gamma": 0.97, "gae_lambda": 0.9},
    )


# --- losses --------------------------------------------------------------------------------------


def policy_loss(function, by, **settings):
    takes_weights = function is algo_core.grpo_loss_fn

    def compute(case, a):
        mask = array(case, a["mask"])
        # A reference only where it has a weight: the rest of the time it feeds a metric.
        ref_logp = None if not settings.get("beta") else array(case, a["ref_logp"])
        advantages = a[by]
        if by == "advantages" and not takes_weights:
            advantages = np.broadcast_to(advantages[..., None], a["mask"].shape)
        if by == "advantages" and takes_weights:
            advantages = array(case, advantages[..., None])[:, 0]
        else:
            advantages = array(case, advantages)

        def loss(logp, weights):
            example = SimpleNamespace(
                prompt_ids=jnp.zeros((12, 1), int),
                completion_ids=jnp.zeros((12, 6), int),
                completion_mask=mask,
                advantages=advantages,
                old_per_token_logps=array(case, a["old_logp"]),
                ref_per_token_logps=ref_logp,
                sampler_is_weights=weights,
            )
            logits = jnp.zeros((12, 6, 2))
            kept = common.compute_per_token_logps
            common.compute_per_token_logps = lambda *args, **kwargs: (logp, logits)
            try:
                value, _ = function(nnx.Module(), example, SimpleNamespace(**settings), 0, 1)
            finally:
                common.compute_per_token_logps = kept
            return value.astype(jnp.float32)

        logp, ones = array(case, a["logp"]), jnp.ones((12, 6))
        value, (gradient, each) = jax.value_and_grad(loss, (0, 1))(logp, ones)
        outputs = {"loss": np.asarray(value), "gradient": tokens(gradient)}
        return outputs | ({"token_loss": tokens(each)} if takes_weights else {})

    return compute


def add_losses(writer):
    common_settings = {
        "beta": None,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "loss_algo": "grpo",
        "loss_agg_mode": "token-mean",
        "temperature": 1.0,
        "kl_loss_mode": "low_var_kl",
        "kl_clamp_value": None,
    }

    def add(name, keys, by="advantages", **settings):
        settings = common_settings | settings
        compute = policy_loss(algo_core.grpo_loss_fn, by, **settings)
        function = CORE + "grpo_loss_fn"
        arguments = settings | {"advantages": by}
        writer.add(name, keys, function, compute, inputs="tokens", arguments=arguments)

    by_sequence = {"loss_agg_mode": "sequence-mean-token-mean"}
    add("grpo_loss", ["ppo_clip", "aggregate"], **by_sequence)
    add("grpo_loss_token", ["ppo_clip", "aggregate"])
    scaled = {"loss_agg_mode": "sequence-mean-token-scale"}
    add("grpo_loss_scaled", ["ppo_clip", "aggregate"], **scaled)
    add("grpo_loss_dual", ["ppo_dual_clip"], epsilon_c=1.5)
    add("dapo_loss", ["dapo_clip"], epsilon_high=0.28, epsilon_c=10.0)
    narrow = {"epsilon": 0.03, "epsilon_high": 0.04, "loss_algo": "gspo-token"}
    add("gspo_loss", ["gspo"], **narrow, **by_sequence)
    add("gspo_token_loss", ["gspo_token"], "token_advantages", **narrow, **by_sequence)
    add("grpo_loss_kl", ["kl_estimators"], beta=0.3, kl_clamp_value=10.0)
    settings = {"epsilon_low": 0.2, "epsilon_high": 0.2, "epsilon_c": 1.5, "entropy_coef": None}
    writer.add(
        "ppo_loss",
        ["ppo_dual_clip"],
        CORE + "ppo_policy_loss_fn",
        policy_loss(algo_core.ppo_policy_loss_fn, "token_advantages", **settings),
        inputs="tokens",
        arguments=settings | {"advantages": "token_advantages"},
    )


def value_loss(case, a):
    def loss(values):
        example = SimpleNamespace(
            prompt_ids=jnp.zeros((12, 1), int),
            completion_ids=jnp.zeros((12, 6), int),
            completion_mask=array(case, a["mask"]),
            old_values=array(case, a["old_logp"]),
            returns=array(case, a["token_advantages"]),
        )
        kept = common.compute_score
        # tunix reads the score of the position before each token.
        common.compute_score = lambda *args, **kwargs: jnp.pad(values, ((0, 0), (0, 1)))
        try:
            value, _ = algo_core.ppo_value_loss_fn(None, example, 0.2, 0, 1)
        finally:
            common.compute_score = kept
        return value.astype(jnp.float32)

    value, gradient = jax.value_and_grad(loss)(array(case, a["logp"]))
    return {"loss": np.asarray(value), "gradient": tokens(gradient)}


def kl(method, clamp):
    def compute(case, a):
        mask = array(case, a["mask"])

        def total(logp):
            ref_logp = array(case, a["ref_logp"])
            value = common.compute_kl_divergence(logp, ref_logp, method, clamp) * mask
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(array(case, a["logp"]))
        return {"kl": tokens(value), "gradient": tokens(gradient)}

    return compute


def aggregate(mode, **options):
    def compute(case, a):
        mask = array(case, a["mask"])
        each = array(case, a["token_advantages"])
        value, gradient = jax.value_and_grad(
            lambda x: common.aggregate_loss(x, mask, mode, **options)
        )(each)
        return {"loss": np.asarray(value), "gradient": tokens(gradient)}

    return compute


def entropy(case, a):
    logits = jnp.asarray(a["logits"], jnp.bfloat16 if case == "bfloat16" else jnp.float32)
    value, back = jax.vjp(algo_core.compute_entropy_from_logits, logits)
    gradient = back(jnp.ones_like(value))[0]
    return {"entropy": np.asarray(value, np.float32), "gradient": np.asarray(gradient, np.float32)}


def add_terms(writer):
    writer.add(
        "value_loss",
        ["value_loss"],
        CORE + "ppo_value_loss_fn",
        value_loss,
        inputs="tokens",
        arguments={
            "vpreds": "logp",
            "old_values": "old_logp",
            "returns": "token_advantages",
            "clip_range_value": 0.2,
        },
    )
    for method in ("kl", "mse_kl", "low_var_kl"):
        for clamp in (None, 10.0):
            writer.add(
                f"kl_{method}" + ("_clamped" if clamp else ""),
                ["kl_estimators"],
                "tunix.rl.common.compute_kl_divergence",
                kl(method, clamp),
                inputs="tokens",
                arguments={"method": method, "clamp_value": clamp},
            )
    for mode, options in (
        ("token-mean", {}),
        ("sequence-mean-token-mean", {}),
        ("sequence-mean-token-scale", {"norm": 10}),
        ("seq-mean-token-sum", {}),
        ("sequence-mean-token-sum-norm", {"norm": 10}),
    ):
        writer.add(
            f"agg_{mode}",
            ["aggregate"],
            "tunix.rl.common.aggregate_loss",
            aggregate(mode, **options),
            inputs="tokens",
            arguments={"loss_agg_mode": mode} | options,
        )
    writer.add(
        "entropy",
        ["entropy_bonus"],
        CORE + "compute_entropy_from_logits",
        entropy,
        inputs="vocabulary",
        tolerance={"float32": 1e-4},
    )


def main():
    writer = Writer("tunix_algorithms", "google-tunix", VERSIONS, "tunix_algorithms.py")
    add_advantages(writer)
    add_losses(writer)
    add_terms(writer)
    writer.add(
        "overlong",
        ["overlong_penalty"],
        "tunix.rl.grpo.dapo_learner.reward_shaping",
        overlong,
        inputs="rewards",
        cases=["full", "masked_row", "holes", "length_one"],
        arguments={
            "overlong_buffer_length": 3,
            "overlong_buffer_penalty": 0.5,
            "max_response_length": 6,
        },
    )
    writer.save()


if __name__ == "__main__":
    main()
