"""ICPO: some rollouts are written with demonstrations in the prompt, and trained without."""

from jaxrl_llm import advantages, aggregate, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import bind, chain, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def icpo(
    *,
    delta: float = 1.0,
    bonus: float = 1.0,
    anneal: int = 400,
    gamma: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
    kl_coef: float = 1e-3,
) -> Recipe:
    """In-context steered policy optimization.

        a steered rollout with reward >= delta takes the place of a random own one; others leave
        rewards of steered rollouts times 1 + bonus max(0, 1 - step / anneal)
        A = (r - mean_group r) / (std_group r + 1e-6)
        token loss = PPO's with a dual clip for own rollouts, -A x / (x + gamma) for steered ones
        loss = mean over tokens of (token loss + kl_coef KL)

    A batch brings ``steered``: 1 of 8 rollouts of a group in the paper.

    Args:
      delta: Least reward of a steered rollout that takes part.
      bonus: What is added to the factor of its reward at the first step.
      anneal: Steps over which the bonus falls to 0.
      gamma: The likelihood at which a steered token is pushed most.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.
      kl_coef: Weight of the KL term (k3); 0 leaves it out, and with it the reference model.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.icpo().required_fields)
      ['ref_logp', 'steered']

    References:
      In-context steered policy optimization (arXiv:2510.26519), PAPER reading but for the token
      loss, which is that of the released code.
    """
    factor = bind(curation.icpo_bonus, beta=bonus, anneal=anneal)
    penalty = bind(regularizers.kl_to_reference, estimator="k3", coef=kl_coef)
    recipe = Recipe(
        name="icpo",
        computed=(Computed("steered_factor", curation.scheduled(factor), "controller"),),
        curation=stateless(curation.icpo_merge, delta=delta),
        advantage=chain(
            stateless(given(rewards.steered_bonus, bonus="steered_factor")),
            stateless(advantages.grpo),
        ),
        surrogate=bind(
            surrogates.icpo, gamma=gamma, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.token_mean,
        regularizers=(penalty,) if kl_coef else (),
        paper="arXiv:2510.26519",
    )
    return validate(recipe)
