"""VeRPO: unit tests weighted by difficulty, for each attempt at a program."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, chain, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def verpo(
    *,
    sigma: float = 0.1,
    difficulty: float = 2.0,
    gamma: float | None = None,
    turn_weight: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The outcome of a rollout plus the weighted unit tests of each of its attempts.

        A[i, k] = outcome_i gamma^turns_i - mean, plus
                  turn_weight (weighted tests passed at turn k - mean)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over sequences of the mean over tokens of token loss

    A test weighs more the fewer attempts pass it and the fewer tests are like it
    (``advantages.density_weights``). No division by a deviation, no KL term.

    Args:
      sigma: Width within which pass rates count as alike.
      difficulty: How fast a test's weight falls with its pass rate.
      gamma: Discount of the outcome for each attempt; None for 0.95, and 1 with a single turn.
      turn_weight: Weight of the unit tests.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.verpo().required_fields)
      ['test_passes', 'test_where', 'turn_ids', 'turn_where']

    References:
      Wang et al., VeRPO (arXiv:2601.03525), PAPER reading; the constants, the clip and the
      weighting are ours.
    """
    attempts = bind(
        advantages.verpo,
        sigma=sigma,
        difficulty=difficulty,
        gamma=gamma,
        turn_weight=turn_weight,
    )
    recipe = Recipe(
        name="verpo",
        advantage=chain(
            stateless(given(attempts, test_where="test_where", turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2601.03525",
    )
    return validate(recipe)
