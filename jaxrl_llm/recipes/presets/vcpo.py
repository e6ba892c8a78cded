"""VCPO: weights of whole responses, the baseline that suits them, and a step that follows them."""

from jaxrl_llm import advantages, aggregate, corrections, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def vcpo(*, cap: float = 8.0, rho_base: float = 1.0, power: float = 0.5) -> Recipe:
    """Policy gradient on stale data with its variance kept down.

        w = product over the response of old / behavior;  b = sum w^2 n r / sum w^2 n in each group
        A = (r - b) / std_group r
        loss = mean over responses of the mean over tokens of -min(w, cap) A logp
        update = min(1, effective share of samples / rho_base)^power times the optimizer's

    ``n`` is the squared norm of the gradient of a response's log-probability, which the batch may
    bring as ``grad_sq_norms``; without it the length takes its place. Each batch serves one update.

    Args:
      cap: Greatest weight in the loss, at least 1; the baseline and the step take the whole weight.
      rho_base: Share of effective samples from which on the step is whole.
      power: 0.5 for optimizers that normalize the gradient, 1 for SGD.

    Returns:
      A Recipe; its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.vcpo(rho_base=0.8).computed[0].function
      ess_lr_scale(power=0.5, rho_base=0.8)

    References:
      VCPO, Stable Asynchrony (arXiv:2602.17616), CODE reading. The released code measures ``n`` in
      a first backward pass.
    """
    weights = bind(corrections.importance_weights, level="sequence", cap=cap)
    scale = bind(corrections.ess_lr_scale, rho_base=rho_base, power=power)
    recipe = Recipe(
        name="vcpo",
        advantage=stateless(advantages.vcpo_advantage),
        surrogate=surrogates.reinforce,
        weights=aggregate.sequence_mean,
        correction=bind(corrections.sequence_rollout_correction, weights=weights),
        computed=(Computed("update_scale", scale, "batch"),),
        paper="arXiv:2602.17616",
    )
    return validate(recipe)
