"""SDPO: the model distills what it would say with feedback in its context."""

from jaxrl_llm import aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, given, stateless
from jaxrl_llm.recipes.presets.otr import no_advantages
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def sdpo(
    *,
    alpha: float = 0.5,
    top: int = 100,
    is_clip: float | None = 2.0,
    teacher_rate: float = 0.05,
) -> Recipe:
    """Self-distillation policy optimization.

        teacher = average of the policy's weights, after a prompt with a solution or feedback
        loss = mean over taught tokens of min(ratio, is_clip) divergence(student, teacher; alpha)

    The divergence is over the ``top`` tokens that the policy found most likely at the start of the
    step, and their tail. A batch brings ``has_teacher``, and the teacher's prompts as
    ``teacher_prompt_tokens`` and ``teacher_prompt_mask``, or else ``teacher_logp`` of ``top_ids``;
    who is shown what is decided from the rewards, outside. Rollouts without a teacher count
    nowhere.

    Args:
      alpha: 0 for KL(teacher || student), 1 for KL(student || teacher), between for mixtures.
      top: Size of the support.
      is_clip: Cap of the ratio that weighs each token; None for no such weight.
      teacher_rate: Share of the policy in the teacher's weights at each step.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> feedback = jr.recipes.sdpo(alpha=1.0, top=20, teacher_rate=0.01)
      >>> feedback.surrogate
      sdpo(alpha=1.0, is_clip=2.0)

    References:
      Hübotter et al., Reinforcement Learning via Self-Distillation (arXiv:2601.20802). The defaults
      are those for generalization from siblings' solutions; the example has those for rich
      feedback. The released configuration also weighs tokens for the mismatch of the sampler,
      capped at 2: give that as ``correction``. The teacher that interpolates logits with a
      reference is left out.
    """
    log_probs = given(surrogates.support_log_probs, support="top_ids")
    recipe = Recipe(
        name="sdpo",
        advantage=stateless(no_advantages),
        selection=surrogates.keep_taught,
        surrogate=bind(surrogates.sdpo, alpha=alpha, is_clip=is_clip),
        weights=aggregate.token_mean,
        computed=(
            Computed("student_logp", log_probs, "policy"),
            Computed("top_ids", bind(surrogates.top_tokens, count=top), "old_policy"),
            Computed("teacher_logp", log_probs, "teacher"),
        ),
        reference=bind(regularizers.ema_reference, rate=teacher_rate),
        paper="arXiv:2601.20802",
        group_relative=False,
    )
    return validate(recipe)
