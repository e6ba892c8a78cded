"""ROVER: regression on the value of the uniform policy."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def rover(*, rho: float = 1.0, beta: float = 1.0) -> Recipe:
    """Random policy valuation: a squared Bellman error in place of a policy gradient.

        A = r - mean_group r
        Q[t] = rho (logp - old_logp),   q[t] = mean over the vocabulary of the same difference
        loss = mean over tokens of (Q[t] - A - beta rho q[t + 1])^2

    No clip, no KL term. The means over the vocabulary are computed in chunks of tokens, under the
    policy being trained and under the one at the start of the step.

    Args:
      rho: Temperature of the Q-values.
      beta: Weight of the continuation.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.rover(beta=0.5).surrogate
      rover(beta=0.5, rho=1.0)

    References:
      He et al., Random Policy Valuation is Enough (arXiv:2509.24981). The released script for
      countdown centers the rewards as here, the one for mathematics feeds GRPO's advantages.
    """
    recipe = Recipe(
        name="rover",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.rover, rho=rho, beta=beta),
        weights=aggregate.token_mean,
        computed=(
            Computed("mean_log_probs", surrogates.mean_log_probs, "policy"),
            Computed("old_mean_log_probs", surrogates.mean_log_probs, "old_policy"),
        ),
        paper="arXiv:2509.24981",
    )
    return validate(recipe)
