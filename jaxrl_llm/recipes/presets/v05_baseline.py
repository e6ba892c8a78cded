"""V_0.5: a value prior fused with the mean of a few rollouts."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def v05_baseline(
    *, var: str = "prior", scale: str = "none", eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """Clipped policy gradient with a baseline between a prior and the group mean.

        w = max(0, 1 - (s2 / n) / (mean_group r - prior)^2)
        A = r - w mean_group r - (1 - w) prior
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over sequences of mean over tokens of token loss

    The prior is the reward that a frozen value model expects of each prompt. It holds where the
    rollouts do not contradict it, which matters with as few as four, or one. Rewards lie in [0, 1].
    :func:`jaxrl_llm.advantages.osla_continue` says where more rollouts pay. No KL term.

    Args:
      var: Where s2 comes from: "prior", "sample" or "max".
      scale: "none", or "group" for a division by the group's deviation.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``prior``, which a training loop brings.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.v05_baseline()
      >>> sorted(recipe.required_fields), recipe.group_relative
      (['prior'], False)

    References:
      V_0.5 (arXiv:2603.10848). ABSTRACT reading: the equations, and all that is not the baseline,
      are ours.
    """
    recipe = Recipe(
        name="v05_baseline",
        advantage=stateless(advantages.v05_baseline, var=var, scale=scale),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2603.10848",
        group_relative=scale == "group",
    )
    return validate(recipe)
