"""D3S: the rollouts whose advantages vary most, and their most telling tokens."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def d3s(
    *,
    steps: int = 1000,
    rollouts: tuple[float, float] = (0.25, 0.75),
    tokens: tuple[float, float] = (0.2, 1.0),
    scope: Literal["batch", "group"] = "batch",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Trains on a part of what was sampled, a small one first.

        A = (r - mean_group r) / (std_group r + 1e-6)
        train on the share N of the rollouts with the greatest variance of A, and in those on the
        share K of the tokens with the greatest |A| entropy;  N, K linear in the step
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over those tokens of token loss

    The entropy is that of the policy at the start of the step, which the train step computes.

    Args:
      steps: Updates over which the shares go from the first to the second value.
      rollouts: Shares of the rollouts kept.
      tokens: Shares of their tokens kept.
      scope: What the variance is taken over: the "batch", or each "group" for itself.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.d3s(steps=200, scope="group").selection
      d3s_selection(rollouts=(0.25, 0.75), scope='group', tokens=(0.2, 1.0))

    References:
      D3S (arXiv:2509.22115), PAPER reading, from a note. The shares and the steps are ours.
    """
    progress = curation.scheduled(curation.training_progress, steps=steps)
    recipe = Recipe(
        name="d3s",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        computed=(Computed("progress", progress, "controller"),),
        selection=bind(curation.d3s_selection, rollouts=rollouts, tokens=tokens, scope=scope),
        paper="arXiv:2509.22115",
    )
    return validate(recipe)
