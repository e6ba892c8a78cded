"""SRPO: failures learn from a better informed self, the others from their rewards."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def srpo(
    *,
    correct_at: float = 1.0,
    beta: float = 1.0,
    alpha: float = 0.5,
    top: int = 100,
    is_clip: float | None = 2.0,
    teacher_rate: float = 0.05,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Sample-routed policy optimization: GRPO and SDPO, each for the rollouts it can teach.

        routed = reward < correct_at and there is a teacher
        token loss = w sdpo where routed, else -min(ratio A, clip(ratio, ...) A)
        w = exp(-beta H_teacher) over its mean over the routed tokens
        loss = mean over tokens of token loss

    The advantages are GRPO's, over the whole group. What a batch brings is as in :func:`sdpo`.

    Args:
      correct_at: Least reward of a correct rollout.
      beta: How much more a sure teacher counts; 0 for all alike.
      alpha: As in :func:`sdpo`.
      top: As in :func:`sdpo`.
      is_clip: As in :func:`sdpo`.
      teacher_rate: As in :func:`sdpo`.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.srpo().required_fields - jr.recipes.srpo().step_fields)
      ['has_teacher']

    References:
      Unifying Group-Relative and Self-Distillation Policy Optimization via Sample Routing
      (arXiv:2604.02288), PAPER reading; the clip is ours.
    """
    weights = bind(surrogates.srpo_weights, beta=beta, correct_at=correct_at)
    log_probs = given(surrogates.support_log_probs, support="top_ids")
    recipe = Recipe(
        name="srpo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(
            surrogates.srpo,
            correct_at=correct_at,
            eps_low=eps_low,
            eps_high=eps_high,
            alpha=alpha,
            is_clip=is_clip,
        ),
        weights=aggregate.token_mean,
        computed=(
            Computed("distillation_weights", weights, "batch"),
            Computed("student_logp", log_probs, "policy"),
            Computed("top_ids", bind(surrogates.top_tokens, count=top), "old_policy"),
            Computed("teacher_logp", log_probs, "teacher"),
            Computed("teacher_entropy", regularizers.entropy_from_logits, "teacher"),
        ),
        reference=bind(regularizers.ema_reference, rate=teacher_rate),
        paper="arXiv:2604.02288",
    )
    return validate(recipe)
