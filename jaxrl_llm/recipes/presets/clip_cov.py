"""Clip-Cov: a few tokens that drive entropy down do not train."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def clip_cov(
    *,
    ratio: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    eps_low: float = 1.0,
    eps_high: float = 1.0,
) -> Recipe:
    """PPO's clip without some of the tokens whose advantage and log-probability covary.

        cov = (A - mean A) (logp - mean logp)           means over the tokens of the batch
        selected = ratio of all tokens, at random among those with lower < cov < upper
        token loss = 0 where selected, else -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss; the selected count in the mean

    The selection is made once, on the whole batch, with the policy at the start of the step. The
    advantages are GRPO's; no KL term.

    Args:
      ratio: Share of the tokens that is selected.
      lower: Covariance above which a token may be selected.
      upper: Covariance below which it may be.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe. It draws random numbers.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.clip_cov().required_fields)
      ['old_logp']

    References:
      Cui et al. (arXiv:2505.22617). The defaults are those of the released script for 7B, whose
      epsilons of 1 leave little of the ratio clip. The scripts also sample on until no group's
      rewards agree: ``curation.informative_groups``. verl selects anew in each microbatch, with the
      log-probabilities of the moment, and leaves out tokens that the ratio clip stops.
    """
    selection = bind(surrogates.clip_cov_selection, ratio=ratio, lower=lower, upper=upper)
    recipe = Recipe(
        name="clip_cov",
        advantage=stateless(advantages.grpo),
        computed=(Computed("selected", selection, "batch"),),
        surrogate=bind(surrogates.clip_cov, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2505.22617",
    )
    return validate(recipe)
