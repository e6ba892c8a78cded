"""HBPO: rollouts that were told token budgets, rewarded and compared by them."""

from jaxrl_llm import advantages, aggregate, rewards, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def hbpo(
    *,
    length: float,
    intra_weight: float = 1.0,
    floor: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Hierarchical budget policy optimization.

        R = the reward of a right answer by its length and budget, 0 for a wrong one
        A = (R - mean R) / (std R + 1e-6) + intra_weight (mean of R at this budget - its ideal)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    Above 0 a reward of the batch says right, 0 wrong, below 0 that no answer could be read. The
    groups are split into rollouts that were told different budgets. No KL term.

    Args:
      length: The limit in tokens, 4096 in the paper; a longer right answer counts as wrong.
      intra_weight: Weight of the comparison with the ideal: 1 is the paper, 2 the released code.
      floor: Least reward of a right answer; None for none.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``budgets``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.hbpo(length=4096).required_fields)
      ['budgets']

    References:
      HBPO (arXiv:2507.15844), and the reward and advantage of the released code. The clip and the
      weighting are the defaults of the trainer that it is built on.
    """
    recipe = Recipe(
        name="hbpo",
        advantage=chain(
            stateless(rewards.hbpo_rewards, max_length=length, floor=floor),
            stateless(advantages.hbpo, max_length=length, intra_weight=intra_weight),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2507.15844",
    )
    return validate(recipe)
