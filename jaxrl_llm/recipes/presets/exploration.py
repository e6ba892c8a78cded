"""GRPO that rewards exploration, by its advantages or by its entropy."""

from typing import Literal

from jaxrl_llm import advantages, curation, regularizers, surrogates
from jaxrl_llm.core import Array, bind, chain, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["epo", "verl_erank"]


def verl_erank(
    *,
    gain: float = 2.0,
    weight: float = 1.0,
    cap: float = 2.0,
    rate: float = 0.3,
    kl_coef: float = 0.001,
    entropy_coef: float = 0.001,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """A bonus for responses whose hidden states have a higher effective rank than on average.

    The bonus is relative to averages over earlier batches; see ``advantages.rank_shaping``.

    Args:
      gain: How sharply the acceleration of the rank decides between rank and velocity.
      weight: Weight of the bonus.
      cap: The bonus is at most ``|A| / cap``.
      rate: Update rate of the averages.
      kl_coef, entropy_coef, eps_low, eps_high: See the package.

    References:
      VERL (arXiv:2509.23808) and its released code: prefixes of 40 tokens in the last 512, and the
      KL, the entropy bonus and the two minibatches of its script. It adds the bonus for the rank to
      the last token; here it is part of the advantage of all tokens.
    """
    penalty = nonzero_term(regularizers.kl_to_reference, coef=kl_coef)
    bonus = nonzero_term(regularizers.entropy_bonus, coef=entropy_coef)
    shaping = advantages.rank_shaping(gain=gain, weight=weight, cap=cap, rate=rate)
    return from_base(
        name="verl_erank",
        advantage=chain(stateless(advantages.grpo), shaping),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=(*penalty, *bonus),
        minibatches=2,
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
    kl_coef: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """An entropy bonus minus a penalty for tokens outside a band around their turn's history.

        loss = mean over tokens of (clipped loss - coef (H - w P) + kl_coef KL)
        P = alpha [not low h < H < high h]
        h = mean over the steps so far, including this one, of the mean entropy of the token's turn
        w decreases over ``steps``

    Args:
      coef: Bonus per nat, in units of the policy loss.
      low: Lower end of the band as a share of the history.
      high: Upper end of the band as a share of the history.
      alpha: Size of the penalty.
      turns: Number of turns with a history; later turns have no penalty. With 1 a response is one
        turn and the batch needs no turns.
      steps: Batches over which the weight of the penalty decreases.
      form: "indicator", whose gradient is 0, so that only the bonus acts; "hinge" has a gradient.
      kl_coef, eps_low, eps_high: See the package.

    References:
      EPO (arXiv:2509.22576) and its released code with the KL of its scripts. It applies the
      penalty in batches with a turn in the second half of the maximum; here all turns are treated
      alike. It counts a turn that did not occur as entropy 0; here such a step is not part of its
      history. "hinge" is ours. ``alpha`` is that of ALFWorld. There a step is a separate row, and
      the mean and the deviation of a group are over these rows, here over its rollouts. An invalid
      action costs 0.1 there, which here is part of the environment's reward. A minibatch there is
      256 rows, so long episodes have many updates per batch; here there is one, in which the clip
      has no effect, unless a config sets ``minibatches``.
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
    penalty = nonzero_term(regularizers.kl_to_reference, coef=kl_coef)
    return from_base(
        name="epo",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=(
            Computed("entropy_history", regularizers.entropy_history(turns=turns), "controller"),
            Computed("band_weight", curation.scheduled(_phase, steps=steps), "controller"),
        ),
        regularizers=(connect(band, history="entropy_history", weight="band_weight"), *penalty),
        paper="arXiv:2509.22576",
    )
