"""One-token rollouts: fine-tuning on demonstrations as a policy gradient."""

import jax.numpy as jnp

from jaxrl_llm import aggregate, surrogates
from jaxrl_llm.core import Array, bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def no_advantages(rewards: Array) -> Array:
    """Zeros, for a method that learns from something else than rewards."""
    return jnp.zeros(jnp.shape(rewards), jnp.float32)


def otr(*, beta: float = -0.1, tau: float = 1.3, samples: int | None = None) -> Recipe:
    """Each token of a demonstration is a bandit: the data's token has reward 1, another ``beta``.

        loss = mean over tokens of -(q[x] log p[x] + beta sum_{a != x} q[a] log p[a])
        q = softmax(logits / tau), a constant;  p = softmax(logits)

    The "rollouts" of a batch are demonstrations, one a group or more; their rewards count for
    nothing. Train at temperature 1.

    Args:
      beta: Reward of a token other than the data's.
      tau: Temperature of the sampling.
      samples: None for the expectation over all tokens; a number to draw so many at each position,
        as in the paper (256), which costs more and adds noise.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.otr().draws, jr.recipes.otr(samples=256).draws
      (False, True)

    References:
      Ming et al., One-Token Rollout (arXiv:2509.26313), PAPER reading; tau and the exact form are
      ours.
    """
    loss, seeds = bind(surrogates.otr_exact, beta=beta, tau=tau), ()
    if samples is not None:
        loss = bind(surrogates.otr_sampled, beta=beta, tau=tau, samples=samples)
        seeds = (Computed("token_seeds", surrogates.token_seeds, "batch"),)
    recipe = Recipe(
        name="otr",
        advantage=stateless(no_advantages),
        surrogate=surrogates.otr,
        weights=aggregate.token_mean,
        computed=(*seeds, Computed("one_token_loss", loss, "policy")),
        paper="arXiv:2509.26313",
        group_relative=False,
    )
    return validate(recipe)
