"""Losses of preferences on pairs of the policy's rollouts."""

from jaxrl_llm import advantages, aggregate, curation, preferences
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed


def mpo(
    *,
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    likelihood: float = 1.0,
) -> Recipe:
    """Mixed preference optimization on the best and the worst rollouts of each group.

        x = beta (logp - ref_logp), summed over a rollout
        loss = -preference log sigmoid(x_w - x_l)
               -quality (log sigmoid(x_w - d) + log sigmoid(d - x_l))
               -likelihood (mean over tokens of logp_w)
        d = mean of (x_w + x_l) / 2 over all pairs so far, before each update

    The mean is over the groups whose rewards differ; the others do not train.

    Args:
      beta: Scale of the implicit rewards.
      preference: Weight of the first term; likewise ``quality`` and ``likelihood``.

    References:
      Wang et al. (arXiv:2411.10442), with the weights of TRL's documentation; the mix with which
      Skywork R1V2 (arXiv:2504.16656) trains beside GRPO, whose buffer is :func:`ssb`. The papers
      sample their pairs beforehand.
    """
    loss = bind(
        preferences.mpo,
        beta=beta,
        preference=preference,
        quality=quality,
        likelihood=likelihood,
    )
    return from_base(
        name="mpo",
        advantage=stateless(advantages.dr_grpo),
        computed=(Computed("center", preferences.running_center(beta=beta), "controller"),),
        surrogate=bind(preferences.paired, loss=loss),
        weights=aggregate.group_mean,
        curation=stateless(curation.informative_groups),
        paper="arXiv:2504.16656",
    )
