"""Methods that value prefixes of responses by rollouts that continue from them; no critic.

Shared options:

    rollouts: Number of rollouts from each prefix (``curation.valued``).
    segments: Maximum segments of a response; None for no limit.
    kl_coef, eps_low, eps_high: See the package.
"""

from jaxrl_llm import advantages, curation, regularizers, surrogates
from jaxrl_llm.core import bind, chain, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["pav", "spo_chain", "vineppo"]

# One value a segment on its tokens.
_SPREAD = connect(advantages.turns_to_tokens, turn_ids="segment_ids")


def vineppo(
    *,
    rollouts: int = 9,
    step_length: int | None = None,
    segments: int | None = None,
    whiten: bool = True,
    kl_coef: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """PPO whose values are mean rewards of rollouts from the beginning of each line.

        V_k = mean reward of `rollouts` responses that continue the prefix before line k
        A_k = V_(k+1) - V_k, for the last line r - V_k;   on its tokens, whitened
        loss = mean over tokens of (token loss + kl_coef KL)

    Args:
      step_length: Tokens of a step, instead of lines; None for lines.
      whiten: Whether advantages are shifted and scaled over the tokens of the batch.

    References:
      VinePPO (arXiv:2410.01679), the released code: 9 rollouts, two passes over a batch in eight
      minibatches each, and a KL of 1e-4, there of the sum over a response, here of the mean over
      tokens. Steps end at tokens with a line break, so no text is tokenized again; equal prefixes
      of a group share rollouts. It clamps log-ratios to +-10, here to +-20.
    """
    rule = curation.line_starts
    if step_length is not None:
        rule = bind(curation.stretch_starts, length=step_length)
    return from_base(
        name="vineppo",
        advantage=chain(
            stateless(advantages.segment_advantages),
            stateless(_SPREAD),
            *([stateless(advantages.whiten)] if whiten else []),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        collector=curation.valued(rule, rollouts=rollouts, segments=segments),
        epochs=2,
        minibatches=8,
        paper="arXiv:2410.01679",
        group_relative=False,
    )


def spo_chain(
    *,
    rho: float = 0.9,
    interval: int = 5,
    rollouts: int = 9,
    segments: int | None = None,
    whiten: bool = True,
    kl_coef: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Segments of a fixed number of uncertain tokens; only these tokens train.

        uncertain = old probability < rho;   a segment begins at every interval-th of them
        A_k = V_(k+1) - V_k, for the last segment r - V_k;   V as in :func:`vineppo`
        loss = mean over uncertain tokens of (token loss + kl_coef KL), A whitened over them

    Args:
      rho: Probability from which a token counts as certain.
      interval: Number of uncertain tokens per segment.
      whiten: Whether advantages are shifted and scaled over the uncertain tokens of the batch.

    References:
      SPO-chain (arXiv:2505.23564), the released code for GSM8K: two passes over a batch in
      eight minibatches each, and a KL of 1e-4, there of the sum over a response, here of the mean
      over tokens. Its configs for Qwen make one pass in four, with 4 rollouts.
      It clamps log-ratios to +-10, here to +-20.
    """
    credit, spread = stateless(advantages.segment_advantages), stateless(_SPREAD)
    scaled = stateless(advantages.whiten_uncertain, rho=rho)
    rule = bind(curation.spo_cutpoints, rho=rho, interval=interval)
    return from_base(
        name="spo_chain",
        advantage=chain(credit, spread, scaled) if whiten else chain(credit, spread),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        selection=bind(curation.uncertain_tokens, rho=rho),
        collector=curation.valued(rule, rollouts=rollouts, segments=segments),
        epochs=2,
        minibatches=8,
        paper="arXiv:2505.23564",
        group_relative=False,
    )


def pav(
    *,
    alpha: float = 5.0,
    k: int = 4,
    baseline: bool = True,
    rollouts: int = 9,
    segments: int | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rewarding progress: the change in the policy's value over a line, plus that of a prover.

        A_k = V_(k+1) - V_k + alpha (mu_(k+1) - mu_k),   mu = 1 - (1 - V)^k
        the prover is the best of k rollouts of the policy;  V as in :func:`vineppo`

    Rewards are in [0, 1].

    Args:
      alpha: Weight of the progress.
      k: Attempts of the prover.
      baseline: Whether V_k is subtracted.

    References:
      Setlur et al., PAV (arXiv:2410.08146), ABSTRACT: there a verifier is trained to predict the
      progress; here it is measured by rollouts, as in the baseline of this name in the released
      code of SPO (arXiv:2505.23564), which has weight 5 and four attempts.
    """
    credit = bind(advantages.pav, alpha=alpha, k=k, baseline=baseline)
    return from_base(
        name="pav",
        advantage=chain(stateless(credit), stateless(_SPREAD)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.valued(curation.line_starts, rollouts=rollouts, segments=segments),
        paper="arXiv:2410.08146",
        group_relative=False,
    )
