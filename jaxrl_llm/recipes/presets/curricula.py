"""GRPO on prompts that are chosen by what is believed of their success rates.

Rewards lie in [0, 1]. Options that these presets share:

    candidates: Prompts that are scored for a batch, in multiples of it; None for all.
    eps_low, eps_high: See the package.
"""

from jaxrl_llm import curation, surrogates
from jaxrl_llm.core import bind
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe


def _on_chosen_prompts(
    name: str, paper: str, collector: curation.Collector, eps_low: float, eps_high: float
) -> Recipe:
    """GRPO's clip on the prompts that a collector chooses."""
    return from_base(
        name=name,
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=collector,
        paper=paper,
    )


def vade(
    *,
    retain: float = 0.2,
    retain_rest: float = 0.999,
    candidates: int | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The prompts of the greatest gain p (1 - p)^2 at a success rate drawn from their beliefs.

        p ~ Beta(alpha, beta), which forget at two speeds

    Args:
      retain: Share of its past that the belief of a prompt keeps where it was asked for.
      retain_rest: The same of the others.

    References:
      VADE (arXiv:2511.18902), PAPER reading; the two speeds follow from the paper's figure.
    """
    collector = curation.prioritized(
        curation.vade_information_gain,
        choose="top",
        thompson=True,
        candidates=candidates,
        retain=retain,
        retain_rest=retain_rest,
    )
    return _on_chosen_prompts("vade", "arXiv:2511.18902", collector, eps_low, eps_high)


def mopps(
    *,
    target: float = 0.5,
    retain: float = 1.0,
    candidates: int | None = 16,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The prompts nearest to a target success rate, by a rate drawn from their beliefs.

        p ~ Beta(alpha, beta);   the P smallest (p - target)^2

    Args:
      target: Success rate that is wanted, in [0, 1].
      retain: Share of its past that the belief of a prompt keeps where it was asked for.

    References:
      MoPPS (arXiv:2507.04632) and its released code.
    """
    collector = curation.prioritized(
        bind(curation.nearest_target, target=target),
        choose="top",
        thompson=True,
        candidates=candidates,
        retain=retain,
    )
    return _on_chosen_prompts("mopps", "arXiv:2507.04632", collector, eps_low, eps_high)


def insight(
    *,
    target: float = 0.3,
    sharpness: float = 3.0,
    candidates: int | None = 16,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The prompts whose next rollouts will tell most, weighted by difficulty.

        score = m (1 - m) exp(-sharpness (m - target)^2) I(S; p),   m = mean of the belief

    Args:
      target: Preferred success rate, in [0, 1].
      sharpness: How strongly it is preferred; 0 for not at all.

    References:
      InSight (arXiv:2603.01907), PAPER; see :func:`jaxrl_llm.curation.insight_scores`.
    """
    collector = curation.prioritized(
        bind(curation.insight_scores, target=target, sharpness=sharpness),
        choose="top",
        candidates=candidates,
    )
    return _on_chosen_prompts("insight", "arXiv:2603.01907", collector, eps_low, eps_high)


def learnability(
    *, power: float = 1.0, retain: float = 0.9, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """Prompts drawn by the variance of their outcome, (p (1 - p))^power, p the expected rate.

    Args:
      power: Sharpens the weights above 1.
      retain: Share of its past that the belief of a prompt keeps where it was asked for.

    References:
      A common baseline of curricula, ABSTRACT; the forgetting is ours.
    """
    collector = curation.prioritized(bind(curation.learnability, power=power), retain=retain)
    return _on_chosen_prompts("learnability", "", collector, eps_low, eps_high)
