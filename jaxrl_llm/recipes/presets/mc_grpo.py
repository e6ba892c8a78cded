"""MC-GRPO: the group median for a baseline; the median rollout does not train."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, checks, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def mc_grpo(
    *,
    scale: str = "mad",
    eps: float | None = None,
    rescale_nonzero: bool = False,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 0.04,
) -> Recipe:
    """Median-centered group relative policy optimization.

        A = (r - median_group r) / (mad_group r + eps)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A) + kl_coef * k3
        loss = mean over sequences of mean over tokens of token loss

    Of each group the rollout that holds the median is sampled and not trained on, one drawn at
    random among several: ask for one rollout more than are to be trained, an odd number in all. It
    is meant for small groups, where the mean turns the sign of many advantages.

    Args:
      scale: What the advantage is divided by: "mad", "std" or "none". With right and wrong answers
        mad is mostly 0, so that the advantages are ``1 / eps``; the step is then bounded by the
        clip and the optimizer alone.
      eps: Added to the divisor, in units of reward. None means 1e-3.
      rescale_nonzero: Whether the rollouts of a group whose advantage is not 0 make up for the
        others, as the authors do for GSM8K.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      kl_coef: Penalty for a nat of divergence from the reference (k3). 0 leaves it out, and with
        it the reference model.

    Returns:
      A Recipe. It draws random numbers.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.mc_grpo(kl_coef=0.0).selection
      <function mc_grpo_keep at ...>

    References:
      MC-GRPO (arXiv:2601.22582). The defaults are those of the authors' scripts, whose choice among
      equal medians is not defined.
    """
    checks.check_non_negative("mc_grpo", kl_coef=kl_coef)
    kl = bind(regularizers.kl_to_reference, estimator="k3", coef=kl_coef)
    recipe = Recipe(
        name="mc_grpo",
        advantage=stateless(
            advantages.mc_grpo, scale=scale, eps=eps, rescale_nonzero=rescale_nonzero
        ),
        selection=advantages.mc_grpo_keep,
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        regularizers=(kl,) if kl_coef else (),
        paper="arXiv:2601.22582",
    )
    return validate(recipe)
