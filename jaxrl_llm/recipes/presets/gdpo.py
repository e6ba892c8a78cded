"""GDPO: several rewards, each normalized in its group before they are added."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, checks, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def gdpo(
    *,
    weights: tuple[tuple[str, float], ...] | None = None,
    gate: tuple[str, float] | None = None,
    batch_norm: str = "sequence",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Group reward-decoupled normalization policy optimization.

        z_k = (r_k - mean_group r_k) / (std_group r_k + eps)
        a = sum_k w_k z_k
        A = (a - mean_batch a) / (std_batch a + eps)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    The rewards are the batch's ``reward_components``; NaN where one does not apply. Their sum, the
    batch's reward, is not looked at. No KL term.

    Args:
      weights: Pairs of the name of a reward and its weight, one for every column. None weighs each
        1.
      gate: Name of a reward and the least value of it at which the others count; None opens all.
      batch_norm: What the last step counts: "sequence", "token" (a long response counts more), or
        "none" to leave it out.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``reward_components``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.gdpo(weights=(("correct", 1.0), ("format", 0.5)))
      >>> sorted(recipe.required_fields)
      ['reward_components']

    References:
      GDPO (arXiv:2601.05242). "sequence" is the authors' TRL (eps 1e-4), "token" their verl (eps
      1e-6). The mean over tokens and the clip are verl's defaults; the rest of their scripts
      differs from task to task.
    """
    checks.check_option("gdpo", "batch_norm", batch_norm, ("sequence", "token", "none"))
    options = {"weights": weights, "gate": gate}
    if batch_norm == "token":
        function = bind(advantages.gdpo_token, **options)
    else:
        function = bind(advantages.gdpo, batch_norm=batch_norm, **options)
    recipe = Recipe(
        name="gdpo",
        advantage=stateless(given(function, rewards="reward_components")),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2601.05242",
    )
    return validate(recipe)
