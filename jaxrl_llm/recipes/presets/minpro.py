"""MinPRO: stale data, weighted by the least ratio of the prefix."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def minpro(*, w_min: float = 0.0, w_max: float = 5.0, cap_one: bool = False) -> Recipe:
    """Off-policy policy gradient with the least prefix ratio.

        r = exp(logp - behavior_logp),   m = least r of the tokens before, 1 for the first
        loss = mean over tokens of -stop_gradient(clip(m r, w_min, w_max)) A logp

    The ratios are to the policy that sampled, however old. The advantages are GRPO's; no KL term.

    Args:
      w_min: Least weight, absolute.
      w_max: Greatest weight, absolute.
      cap_one: Whether the prefix may only shrink a weight.

    Returns:
      A Recipe; its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.minpro(w_max=2.0).surrogate
      given(minpro(cap_one=False, w_max=2.0, w_min=0.0), old_logp='behavior_logp')

    References:
      MinPRO (arXiv:2601.22718), NOTES reading; the bounds are ours.
    """
    surrogate = bind(surrogates.minpro, w_min=w_min, w_max=w_max, cap_one=cap_one)
    recipe = Recipe(
        name="minpro",
        advantage=stateless(advantages.grpo),
        surrogate=given(surrogate, old_logp="behavior_logp"),
        weights=aggregate.token_mean,
        paper="arXiv:2601.22718",
    )
    return validate(recipe)
