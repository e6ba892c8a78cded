"""TRLOO: leave one out at each turn of a rollout."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, chain, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def trloo(
    *,
    gamma: float = 1.0,
    singleton: Literal["zero", "raw"] = "raw",
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> Recipe:
    """Turn-level leave-one-out, for rollouts whose turns have rewards of their own.

        R[i, k] = sum over turns j >= k of gamma^(j - k) r[i, j]
        A[i, t] = R[i, k] - mean over the other rollouts of R[., k]     k the turn of token t
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        dual clip, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over sequences of the sum over tokens of token loss

    The rewards of the rollouts themselves are not read. No KL term.

    Args:
      gamma: Discount for a turn, in [0, 1].
      singleton: What the only rollout that has a turn gets: "raw" for its return, "zero" for 0.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is unknown or out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.trloo().required_fields)
      ['turn_ids', 'turn_rewards', 'turn_where']

    References:
      Dr. Kernel (arXiv:2602.05885), and the settings of the released script. There a turn is a row
      of the batch, so that its mean is over turns; the script adds a rejection of sequences and
      tokens by their mismatch, which is a correction here.
    """
    turns = bind(advantages.trloo, gamma=gamma, singleton=singleton)
    recipe = Recipe(
        name="trloo",
        advantage=chain(
            stateless(given(turns, rewards="turn_rewards", turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.sequence_sum,
        paper="arXiv:2602.05885",
    )
    return validate(recipe)
