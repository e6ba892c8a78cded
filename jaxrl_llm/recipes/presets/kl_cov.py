"""KL-Cov: the tokens that drive entropy down are held to the old policy."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def kl_cov(*, ratio: float = 2e-3, coef: float = 1.0) -> Recipe:
    """The plain ratio objective with a pull on the tokens of the highest covariance.

        cov = (A - mean A) (logp - mean logp)           means over the tokens of the batch
        selected = the ratio of all tokens with the largest cov
        token loss = -r A + coef |logp - old_logp| where selected
        loss = mean over tokens of token loss

    The selection is made once, on the whole batch, with the policy at the start of the step. The
    advantages are GRPO's; there is no clip and no KL to a reference. In the first update of a batch
    the policy is the old one and the pull has nothing to say: train several updates a batch.

    Args:
      ratio: Share of the tokens that is selected.
      coef: Penalty for a nat of difference.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.kl_cov(coef=0.5).surrogate
      kl_cov(coef=0.5)

    References:
      Cui et al. (arXiv:2505.22617). The defaults are those of the released script for 7B; the one
      for 32B selects a tenth of that. The scripts also sample on until no group's rewards agree:
      ``curation.informative_groups``. verl selects anew in each microbatch, with the
      log-probabilities of the moment.
    """
    selection = bind(surrogates.kl_cov_selection, ratio=ratio)
    recipe = Recipe(
        name="kl_cov",
        advantage=stateless(advantages.grpo),
        computed=(Computed("selected", selection, "batch"),),
        surrogate=bind(surrogates.kl_cov, coef=coef),
        weights=aggregate.token_mean,
        paper="arXiv:2505.22617",
    )
    return validate(recipe)
