"""GRPO on prompts that are chosen by estimates of their success rates.

Rewards lie in [0, 1]. Options that these presets share:

    candidates: Number of prompts that are scored per batch, in multiples of it; None for all.
    eps_low, eps_high, dual_clip, entropy_coef: See the package.
"""

from jaxrl_llm import curation, regularizers, surrogates
from jaxrl_llm.core import bind
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["insight", "learnability", "mopps", "vade"]


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
    """Selects the prompts of the largest gain p (1 - p)^2, with p sampled from their posteriors.

        p ~ Beta(alpha, beta), with two forgetting factors

    Args:
      retain: Forgetting factor of a prompt's posterior when the prompt is sampled.
      retain_rest: Forgetting factor of the other prompts.

    References:
      VADE (arXiv:2511.18902), PAPER reading; the two factors follow from the paper's figure.
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
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    entropy_coef: float = 1e-3,
) -> Recipe:
    """Selects the prompts nearest to a target success rate, with p sampled from their posteriors.

        p ~ Beta(alpha, beta);   the P smallest (p - target)^2

    Args:
      target: Target success rate, in [0, 1].
      retain: Forgetting factor of a prompt's posterior when the prompt is sampled.

    References:
      MoPPS (arXiv:2507.04632) and its released code, with the clip, the dual clip, the entropy
      bonus and the two minibatches of its scripts for mathematics; those for Countdown have four.
    """
    collector = curation.prioritized(
        bind(curation.nearest_target, target=target),
        choose="top",
        thompson=True,
        candidates=candidates,
        retain=retain,
    )
    return from_base(
        name="mopps",
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        regularizers=nonzero_term(regularizers.entropy_bonus, coef=entropy_coef),
        collector=collector,
        minibatches=2,
        paper="arXiv:2507.04632",
    )


def insight(
    *,
    target: float = 0.3,
    sharpness: float = 3.0,
    candidates: int | None = 16,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Selects the prompts whose next rollouts are most informative, weighted by difficulty.

        score = m (1 - m) exp(-sharpness (m - target)^2) I(S; p),   m = posterior mean

    Args:
      target: Preferred success rate, in [0, 1].
      sharpness: Strength of the preference; 0 for none.

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
    """Draws prompts in proportion to (p (1 - p))^power, where p is the expected success rate.

    Args:
      power: Exponent of the weights; values above 1 sharpen them.
      retain: Forgetting factor of a prompt's posterior when the prompt is sampled.

    References:
      A common baseline of curricula, ABSTRACT; the forgetting is ours.
    """
    collector = curation.prioritized(bind(curation.learnability, power=power), retain=retain)
    return _on_chosen_prompts("learnability", "", collector, eps_low, eps_high)
