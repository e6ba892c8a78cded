"""LUFFY: rollouts of a stronger model in the group, with shaped likelihoods."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def luffy_shaping(*, length: float, gamma: float = 0.1, entropy_coef: float = 1e-3) -> Recipe:
    """Learning under off-policy guidance: the ratio for own rollouts, a shaped likelihood for some.

        A = r - mean_group r
        token loss = -A ratio for own rollouts, -A x / (x + gamma), x = exp(logp), for guided ones
        loss = sum over tokens of (token loss - entropy_coef entropy), over rollouts * length

    No clip, no KL term. A batch brings ``steered``, True for the rollouts of the guide.

    Args:
      length: The constant that replaces each length: the generation budget in tokens.
      gamma: The likelihood at which a guided token is pushed most.
      entropy_coef: Weight of the entropy bonus; 0 leaves it out.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.luffy_shaping(length=8192).surrogate
      luffy_shaping(gamma=0.1)

    References:
      Yan et al., LUFFY (arXiv:2504.14945), with the settings of the released scripts, in which
      the entropy is a mean over the tokens of the batch and not a sum over ``length``.
    """
    bonus = bind(regularizers.entropy_bonus, coef=entropy_coef)
    recipe = Recipe(
        name="luffy_shaping",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.luffy_shaping, gamma=gamma),
        weights=bind(aggregate.fixed_length, length=length),
        regularizers=(bonus,) if entropy_coef else (),
        paper="arXiv:2504.14945",
    )
    return validate(recipe)
