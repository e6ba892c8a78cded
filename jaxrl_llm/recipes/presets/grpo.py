"""GRPO: group z-scores, the clipped ratio, and a KL term in the loss."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, checks, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def grpo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    kl_coef: float = 1e-3,
    kl_estimator: str | None = None,
) -> Recipe:
    """Group relative policy optimization, as in DeepSeekMath.

        A = (r - mean_group r) / (std_group r + eps)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        dual clip, if given, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over sequences of the mean over tokens of (token loss + kl_coef KL)

    The variant: sample deviation with eps outside the root, groups without a spread get exactly 0,
    k3 to the reference added to the loss, sequence mean of token means.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.
      ddof: 1 divides by the sample deviation, as released trainers do; 0 by the population's.
      eps: Added to the deviation.
      kl_coef: Weight of the KL term. 0 leaves it out, and with it the reference model.
      kl_estimator: Estimator of the KL term, see ``regularizers.kl_to_reference``; None means "k3".

    Returns:
      A Recipe that needs ``ref_logp`` unless ``kl_coef`` is 0.

    Raises:
      ValueError: If an option is out of its range, or ``kl_estimator`` is given without a KL term.

    Example:
      >>> import jaxrl_llm as jr
      >>> [sorted(jr.recipes.grpo(kl_coef=c).required_fields) for c in (0.001, 0.0)]
      [['ref_logp'], []]

    References:
      Shao et al., DeepSeekMath (arXiv:2402.03300). The paper's KL weight is 0.04; 1e-3 is verl's,
      and TRL's default is none. verl and tunix use eps 1e-6, TRL 1e-4. verl 0.9 and TRL 1.16
      average over the tokens of the batch by default. verl gives a group of one its raw reward
      where ours gives 0.
    """
    checks.check_non_negative("grpo", kl_coef=kl_coef)
    if kl_coef == 0 and kl_estimator is not None:
        raise ValueError("grpo: kl_estimator has no effect with kl_coef=0.")
    term = bind(regularizers.kl_to_reference, estimator=kl_estimator or "k3", coef=kl_coef)
    recipe = Recipe(
        name="grpo",
        advantage=stateless(advantages.grpo, ddof=ddof, eps=eps),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.sequence_mean,
        regularizers=(term,) if kl_coef else (),
        paper="arXiv:2402.03300",
    )
    return validate(recipe)
