"""AMPO: answers of teachers where every rollout of a group fails."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def ampo(
    *,
    length: float,
    gamma: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 10.0,
    entropy_coef: float = 1e-3,
) -> Recipe:
    """Adaptive multi-guidance policy optimization.

        A = r - mean over the group's own rollouts of r
        token loss = PPO's with a dual clip for own rollouts, -A x / (x + gamma) for teachers'
        loss = sum over tokens of (token loss - entropy_coef entropy), over rollouts * length

    A batch brings ``steered``, True for the answers of teachers. Which rollouts they replace is
    decided where data are gathered: see ``curation.ampo_select``; their reward is at least 1.

    Args:
      length: The constant that replaces each length: the generation budget in tokens.
      gamma: The likelihood at which a teacher's token is pushed most.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.
      entropy_coef: Weight of the entropy bonus; 0 leaves it out.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.ampo(length=8192).required_fields)
      ['entropy', 'steered']

    References:
      Yuan et al., AMPO (arXiv:2510.02227), with the settings of the released scripts, in which
      the entropy is a mean over the tokens of the batch and not a sum over ``length``.
    """
    bonus = bind(regularizers.entropy_bonus, coef=entropy_coef)
    recipe = Recipe(
        name="ampo",
        advantage=stateless(advantages.grpo_split),
        surrogate=bind(
            surrogates.ampo, gamma=gamma, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=bind(aggregate.fixed_length, length=length),
        regularizers=(bonus,) if entropy_coef else (),
        paper="arXiv:2510.02227",
    )
    return validate(recipe)
