"""PS-GRPO: answers that agree across the paraphrases of a question."""

from jaxrl_llm import advantages, aggregate, rewards, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def ps_grpo(
    *,
    agreement: float = 1.0,
    accuracy: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """GRPO on agreement with the other paraphrases, and on accuracy.

        R = agreement * mean similarity to the rollouts of the other paraphrases + accuracy * r
        A = (R - mean_group R) / (std_group R + 1e-6), in the rollouts of each paraphrase
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over responses of the mean over tokens of token loss

    The paraphrases of a question are consecutive prompts of the batch, which brings the
    similarities: see :func:`jaxrl_llm.rewards.paraphrase_rewards`.

    Args:
      agreement: Weight of the agreement.
      accuracy: Weight of the reward that the batch holds; 0 for long answers without one.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``similarity``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.ps_grpo(accuracy=0.0).required_fields)
      ['similarity']

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392), PAPER reading, with six paraphrases of four rollouts; the
      weights are ours.
    """
    shaped = stateless(rewards.paraphrase_rewards, agreement=agreement, accuracy=accuracy)
    recipe = Recipe(
        name="ps_grpo",
        advantage=chain(shaped, stateless(advantages.grpo)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2510.04392",
    )
    return validate(recipe)
