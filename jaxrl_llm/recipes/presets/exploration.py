"""GRPO whose advantages reward exploration."""

from jaxrl_llm import advantages, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe


def verl_erank(
    *,
    gain: float = 2.0,
    weight: float = 1.0,
    cap: float = 2.0,
    rate: float = 0.3,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """A bonus for responses whose hidden states spread over more directions than usual.

    The bonus is measured against averages of the batches before; see ``advantages.rank_shaping``.

    Args:
      gain: How sharply the acceleration of the rank decides between rank and velocity.
      weight: Of the bonus.
      cap: The bonus is at most ``|A| / cap``.
      rate: Of the averages.
      eps_low, eps_high: See the package.

    References:
      VERL (arXiv:2509.23808) and its released code: prefixes of 40 tokens in the last 512. It adds
      the bonus to the last token; here it is part of the advantage of all.
    """
    shaping = advantages.rank_shaping(gain=gain, weight=weight, cap=cap, rate=rate)
    return from_base(
        name="verl_erank",
        advantage=chain(stateless(advantages.grpo), shaping),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2509.23808",
    )
