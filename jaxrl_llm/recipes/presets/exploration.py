"""GRPO that rewards exploration, in its advantages or by its entropy."""

from typing import Literal

from jaxrl_llm import advantages, curation, regularizers, surrogates
from jaxrl_llm.core import Array, bind, chain, given, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed


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


def _phase(step: Array, *, steps: int) -> Array:
    """The weight of EPO's band at a step."""
    return regularizers.epo_phase_weight(curation.training_progress(step, steps=steps))


def epo(
    *,
    coef: float = 0.001,
    low: float = 0.0,
    high: float = 2.0,
    alpha: float = 0.1,
    turns: int = 50,
    steps: int = 150,
    form: Literal["hinge", "indicator"] = "indicator",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """An entropy bonus, less a penalty of tokens outside a band around the history of their turn.

        loss = mean over tokens of (clipped loss - coef (H - w P))
        P = alpha [not low h < H < high h]
        h = mean over the steps so far, this one included, of the mean entropy of the token's turn
        w falls over ``steps``

    Args:
      coef: Worth of a nat, in units of the policy loss.
      low: The band begins at this share of the history.
      high: And ends at this one.
      alpha: Size of the penalty.
      turns: The most turns with a history; later ones have no penalty. With 1 a response is one
        turn and the batch needs none.
      steps: Updates over which its weight falls.
      form: "indicator", whose gradient is 0, so that what acts is the bonus; "hinge" has one.

    References:
      EPO (arXiv:2509.22576) and its released code, which penalizes in batches that have a turn in
      the second half of the most; here all turns are alike. It counts a turn that did not occur as
      entropy 0; here it is no step of its history. "hinge" is ours. ``alpha`` is that of ALFWorld.
    """
    band = bind(
        regularizers.entropy_band,
        turn_ids=None,
        coef=coef,
        low=low,
        high=high,
        alpha=alpha,
        form=form,
    )
    return from_base(
        name="epo",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=(
            Computed("entropy_history", regularizers.entropy_history(turns=turns), "controller"),
            Computed("band_weight", curation.scheduled(_phase, steps=steps), "controller"),
        ),
        regularizers=(given(band, history="entropy_history", weight="band_weight"),),
        paper="arXiv:2509.22576",
    )
