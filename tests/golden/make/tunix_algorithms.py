"""Writes estimators/tunix_algorithms.*: tunix' algorithm core on the shared inputs.

tunix' losses call the model; here the one function that does returns the log-probabilities of the
case. A loss is stored with its gradient in them and, where the loss takes the weights of a sampler,
with its token losses as weighted by the aggregation: the gradient in those weights at ones. tunix
knows no ragged group, so every rollout takes part.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from estimator_cases import written
from flax import nnx
from tunix.rl import algo_core, common
from tunix.rl.grpo import dapo_learner

VERSIONS = ["google-tunix", "jax", "numpy"]


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


# --- losses --------------------------------------------------------------------------------------


def policy_loss(function, advantages, **settings):
    by = advantages
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


def kl(method, clamp_value):
    def compute(case, a):
        mask = array(case, a["mask"])

        def total(logp):
            ref_logp = array(case, a["ref_logp"])
            value = common.compute_kl_divergence(logp, ref_logp, method, clamp_value) * mask
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(array(case, a["logp"]))
        return {"kl": tokens(value), "gradient": tokens(gradient)}

    return compute


def aggregate(loss_agg_mode, **options):
    def compute(case, a):
        mask = array(case, a["mask"])
        each = array(case, a["token_advantages"])
        value, gradient = jax.value_and_grad(
            lambda x: common.aggregate_loss(x, mask, loss_agg_mode, **options)
        )(each)
        return {"loss": np.asarray(value), "gradient": tokens(gradient)}

    return compute


def entropy(case, a):
    logits = jnp.asarray(a["logits"], jnp.bfloat16 if case == "bfloat16" else jnp.float32)
    value, back = jax.vjp(algo_core.compute_entropy_from_logits, logits)
    gradient = back(jnp.ones_like(value))[0]
    return {"entropy": np.asarray(value, np.float32), "gradient": np.asarray(gradient, np.float32)}


@written("tunix_algorithms", "google-tunix", VERSIONS)
def main(writer):
    writer.add("grpo", advantage(algo_core.compute_advantages))
    writer.add("dr_grpo", advantage(algo_core.compute_drgrpo_advantages))
    writer.add("rloo", advantage(algo_core.compute_rloo_advantages))
    writer.add("gae", gae)
    for function in (algo_core.grpo_loss_fn, algo_core.ppo_policy_loss_fn):
        writer.each(f".{function.__name__}", functools.partial(policy_loss, function))
    writer.add("value_loss", value_loss)
    writer.each("compute_kl_divergence", kl)
    writer.each("aggregate_loss", aggregate)
    writer.add("entropy", entropy)
    writer.add("overlong", overlong)
