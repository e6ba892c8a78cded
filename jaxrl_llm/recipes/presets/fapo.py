"""FAPO: right answers with flawed reasoning count for less."""

from jaxrl_llm import advantages, aggregate, rewards, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def fapo(*, lam: float = 1.0, eps_low: float = 0.2, eps_high: float = 0.28) -> Recipe:
    """Flawed positives help while right answers are rare, and are pushed down later.

        R = 1 for a right answer, 1 - lam for a right one with a flaw, -1 for a wrong one
        A = (R - mean_group R) / (std_group R + 1e-6)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    An answer is right if its reward is above 0. The flaws are a judge's verdict, which the batch
    brings as ``flawed``; the judge's own training reward is ``rewards.genrm_step_reward``.

    Args:
      lam: What a flaw costs.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``flawed``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.fapo().required_fields)
      ['flawed']

    References:
      Flawed-aware policy optimization (arXiv:2510.22543) and its released script (verl-recipe),
      which adds an overlong penalty, see ``rewards.overlong_rewards``.
    """
    recipe = Recipe(
        name="fapo",
        advantage=chain(stateless(rewards.fapo_reward, lam=lam), stateless(advantages.grpo)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2510.22543",
    )
    return validate(recipe)
