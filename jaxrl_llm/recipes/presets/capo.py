"""CAPO: tokens whose step would change the policy or the objective too much are left out."""

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def capo(
    *,
    lr: float = 1.5e-5,
    hidden_sq: float | None = None,
    tau_h: float = 0.01,
    tau_f: float = 1e-4,
    symmetric: bool = True,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """GRPO without the tokens whose curvature makes a large step dangerous.

        u = A |h|^2 (onehot - pi), what a token's own step of plain ascent adds to its logits
        m_F = lr^2 / 2 ((onehot - pi).u)^2;  m_H = lr A (onehot - pi).u + lr^2 / 2 * curvature
        train on the tokens with m_F < tau_f and |m_H| < tau_h
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over responses of the mean over the tokens left of token loss

    It is made for a large learning rate, and to reject few tokens. The two sums over the vocabulary
    that the scores take are computed with the old log-probabilities.

    Args:
      lr: Learning rate of the optimizer, as the scores see it.
      hidden_sq: |h|^2, one number for all tokens; None takes each token's own, which the train step
        computes.
      tau_h: Bound of the change of the objective.
      tau_f: Bound of the change of the policy.
      symmetric: Whether a step that lowers the objective by less than ``tau_h`` is kept.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.capo().required_fields - jr.recipes.capo().step_fields)
      []

    References:
      CAPO (arXiv:2510.00819). The released trainer takes Adam's direction: see
      ``curation.capo_scores``. Bounds are those of its GRPO base; 5e-4 and 1e-3 go
      with Dr. GRPO.
    """
    selection = bind(
        curation.capo_selection,
        lr=lr,
        tau_h=tau_h,
        tau_f=tau_f,
        symmetric=symmetric,
    )
    if hidden_sq is not None:
        selection = bind(selection, hidden_sq=hidden_sq)
    recipe = Recipe(
        name="capo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        selection=selection,
        computed=(
            Computed("sum_pi_sq", advantages.sum_pi_squared, "old_policy"),
            Computed("sum_pi_cubed", curation.sum_pi_cubed, "old_policy"),
        ),
        paper="arXiv:2510.00819",
    )
    return validate(recipe)
