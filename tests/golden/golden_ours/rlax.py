"""Our functions against the numbers of rlax, where they reduce to its."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import graded, plain_gae
from jaxrl_llm import advantages, aggregate, regularizers, surrogates

token_mean = aggregate.token_mean


def of_tokens(each):
    """The mean of a token loss over the kept tokens, with its gradient."""

    def run(a):
        def total(x):
            return aggregate.weighted_sum(each(x, a), token_mean(a["mask"]))

        return graded(total, a["logp"])

    return run


def of_logits(each, reduce):
    def run(a):
        def total(logits):
            value = each(logits, a)
            return reduce(value), value

        (mean, value), gradient = jax.value_and_grad(total, has_aux=True)(a["logits"])
        return {"loss": mean if reduce is jnp.mean else value, "gradient": gradient}

    return run


def ppo(logp, a):
    return surrogates.ppo_clip(logp, a["old_logp"], a["token_advantages"], a["mask"])


def huber(values, a):
    return surrogates.value_loss(values, None, a["token_advantages"], a["mask"], huber=0.5)


def reinforce(logits, a):
    logp = jax.nn.log_softmax(logits)
    logp = jnp.take_along_axis(logp, a["targets"][..., None], axis=-1)[..., 0]
    return surrogates.reinforce(logp, None, a["advantages"], jnp.ones(logp.shape, bool))


def entropy(logits, a):
    return -regularizers.entropy_from_logits(logits)


def divergence(alpha):
    def each(logits, a):
        pair = jax.nn.log_softmax(logits), jax.nn.log_softmax(a["teacher_logits"])
        return surrogates.distillation_divergence(*pair, alpha=alpha)

    return each


def to_go(a):
    token_rewards = advantages.terminal_rewards(a["rewards"], a["mask"])
    return {"returns": advantages.reward_to_go(token_rewards, a["mask"], gamma=0.9)}


def clamped(inputs, theirs):
    d = np.where(inputs["mask"], inputs["logp"] - inputs["old_logp"], 0.0)
    gradient = np.where(np.abs(d) > 20, 0.0, theirs["gradient"])
    return {"loss": theirs["loss"] * np.exp(-10.0), "gradient": gradient}


TABLE = {
    "ppo": Ours(
        of_tokens(ppo),
        {"log_ratio_30": Difference("rlax is given the ratio, ours is clamped to e^20", clamped)},
    ),
    "reinforce": Ours(of_logits(reinforce, jnp.mean)),
    "entropy": Ours(of_logits(entropy, jnp.mean)),
    "kl_forward": Ours(of_logits(divergence(0.0), jnp.sum)),
    "kl_reverse": Ours(of_logits(divergence(1.0), jnp.sum)),
    "gae": Ours(plain_gae),
    "to_go": Ours(to_go),
    "huber": Ours(of_tokens(huber)),
}
TABLES = {"rlax_pieces": TABLE}
