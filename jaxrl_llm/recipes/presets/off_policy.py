"""Methods for rollouts of another policy: a correction, or a ratio to the sampling policy.

Their batches hold ``behavior_logp`` (:func:`ulorl` only with ``old="sampled"``), but for
:func:`asymre`, which has neither. ``w`` below is a constant; tokens of weight 0 count in the mean
over tokens.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, corrections, curation, regularizers, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, connect, masking, stateless, traits
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, refilled
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = [
    "april",
    "areal",
    "asymre",
    "brorl",
    "icepop",
    "m2po",
    "remix",
    "rollout_correction",
    "topr",
    "ulorl",
    "vcpo",
    "vespo",
]


def rollout_correction(
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    cap: float | None = 2.0,
    normalize: bool = False,
    reject: tuple[Callable, ...] = (),
    keep_denominator: bool = False,
    off_policy_threshold: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """Three policies: the sampling policy, the proximal policy, the trained policy (TIS).

        w = min(old / behavior, cap);  token loss times w

    With ``off_policy_threshold``, rollouts with A < 0 whose distance from the sampling policy is
    larger are dropped (DeepSeek-V3.2).

    Args:
      level: Unit of a weight: "token", "sequence" or "geometric".
      cap: Largest weight; None for no cap.
      normalize: Whether the weights are divided by their mean over the batch.
      reject: Rules that drop tokens and sequences, such as
        ``bind(corrections.veto_mask, threshold=1e-4)``.
      keep_denominator: Whether dropped tokens still count in the mean over tokens.
      off_policy_threshold: In nats per token; None for no threshold.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.rollout_correction(cap=3.0).required_fields)
      ['behavior_logp', 'old_logp']

    References:
      The decoupled mode of verl 0.9's rollout correction; DeepSeek-V3.2 (arXiv:2512.02556), NOTES.
      verl's clip is the same on both sides by default; 0.28 above is DAPO's.
    """
    weights = bind(corrections.importance_weights, level=level, cap=cap, normalize=normalize)
    selection = None
    if off_policy_threshold is not None:
        selection = bind(corrections.off_policy_sequence_mask, threshold=off_policy_threshold)
    return from_base(
        name="rollout_correction",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        correction=bind(
            corrections.rollout_correction,
            weights=weights,
            reject=reject,
            keep_denominator=keep_denominator,
        ),
        selection=selection,
    )


def icepop(
    *, lower: float = 0.5, upper: float = 5.0, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """A clipped ratio, weighted by the mismatch ratio where it is near 1 and by zero elsewhere.

        w = old / behavior where that is within [lower, upper], else 0;  token loss times w

    Args:
      lower: Smallest ratio of a token to keep, at most 1.
      upper: Largest ratio of a token to keep, at least 1.

    References:
      Ling team, Every Step Evolves (arXiv:2510.18855), NOTES; the range is theirs. verl has the
      weights as the threshold "0.5_5.0", TRL as ``token_mask``.
    """
    weights = bind(corrections.masked_importance_weights, lower=lower, upper=upper)
    return from_base(
        name="icepop",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        correction=bind(corrections.rollout_correction, weights=weights),
        paper="arXiv:2510.18855",
    )


def areal(
    *,
    cap: float = 5.0,
    m2_threshold: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Recipe:
    """Decoupled PPO: the policy at the center of the clip is not the policy that sampled.

        w = old / behavior where that is at most cap, else 0;  token loss times w

    Each token has the log-probability of the version of the weights that sampled it, so an update
    may interrupt a response. ``corrections.staleness_capacity`` bounds the age of the data at
    sampling. The data are as old as the run's ``asynchrony.max_staleness`` allows, by default not
    older than the policy.

    Args:
      cap: Largest weight to keep, at least 1.
      m2_threshold: Tokens are dropped, those with the largest log ratios first, until the mean
        square of ``log(old / behavior)`` is below this (M2PO); None for none.

    References:
      Fu et al., AReaL (arXiv:2505.24298), with its four minibatches: a weight above the cap of 5
      removes a token from the loss but not from its denominator. The paper trains with a critic;
      the released example for math has none, clips at 0.4, and normalizes the advantages again over
      the batch. M2PO is arXiv:2510.01161.
    """
    reject = ()
    if m2_threshold is not None:
        reject = (bind(corrections.m2_mask, threshold=m2_threshold),)
    return from_base(
        name="areal",
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        correction=bind(
            corrections.rollout_correction,
            weights=bind(corrections.masked_importance_weights, lower=0.0, upper=cap),
            reject=reject,
        ),
        minibatches=4,
        paper="arXiv:2505.24298",
    )


def m2po(*, threshold: float = 0.04) -> Recipe:
    """No clip; tokens are dropped until the rest is near the policy that sampled them.

        r = exp(logp - behavior_logp);   loss = sum of -keep r A over the number of tokens
        keep = the most tokens, nearest first, whose mean square of log(old / behavior) is below
        the threshold

    The data are older than the policy only if the run sets ``asynchrony.max_staleness``.

    Args:
      threshold: Bound of the mean square, above 0.

    References:
      M2PO (arXiv:2510.01161), through AReaL's page on it. The mask uses the policy at the start of
      the step. AReaL's example also makes one update per batch; it normalizes the advantages again
      over the batch.
    """
    return from_base(
        name="m2po",
        surrogate=bind(surrogates.ppo_clip, eps_low=1.0, eps_high=1e6),  # never clipped
        correction=bind(
            corrections.rollout_correction,
            weights=bind(corrections.importance_weights, cap=None),
            reject=(bind(corrections.m2_mask, threshold=threshold),),
            keep_denominator=True,
        ),
        paper="arXiv:2510.01161",
    )


def topr(
    *, level: Literal["sequence", "token"] = "sequence", baseline: float | None = 0.5
) -> Recipe:
    """Tapered off-policy REINFORCE: imitate what is good, unlearn what is bad only so far.

        A = r - baseline;   R = probability of the response under the policy over that at sampling
        w = 1 where A > 0, else min(R, 1), a constant
        loss = mean over sequences of the sum over tokens of -w A logp

    On the samples of the policy itself all weights are 1. They are others if the run has older data
    (``asynchrony.max_staleness``) or several updates per batch: set its ``minibatches`` or
    ``epochs``.

    Args:
      level: Unit of R: the "sequence" or the "token".
      baseline: Between the rewards of bad and good responses; a higher one makes bad ones count
        more. None for the mean of the group.

    References:
      Le Roux et al. (arXiv:2503.14286), NOTES. There rewards are -1 and 1 and the baseline is 0,
      half of the range as here, and an iteration is a pass over samples of all prompts; their runs
      divide the loss of a sequence by its length, which is ``weights=aggregate.sequence_mean``.
      ROLL's ``pg_variant: topr`` is ``level="token"`` with the advantages and the weighting
      configured; ``loss_mode: topr`` of verl's newest code takes R to the power 1 / length.
    """
    if baseline is None:
        advantage = stateless(advantages.dr_grpo)
    else:
        checks.check_real("topr", finite=True, baseline=baseline)
        advantage = stateless(above, baseline=baseline)
    return from_base(
        name="topr",
        advantage=advantage,
        surrogate=connect(bind(surrogates.topr, level=level), old_logp="behavior_logp"),
        weights=aggregate.sequence_sum,
        paper="arXiv:2503.14286",
        group_relative=baseline is None,
    )


def above(rewards: Array, *, where: Array, baseline: float) -> Array:
    """Rewards minus a constant, 0 for rollouts that take no part."""
    return masking.zero_masked(rewards, where) - jnp.where(where, baseline, 0.0)


def asymre(*, shift: float = -0.1) -> Recipe:
    """Asymmetric REINFORCE: no ratio, and a baseline below the mean, for samples of any policy.

        A = r - (mean_group r + shift)
        loss = mean over sequences of the sum over tokens of -A logp

    On the samples of the policy itself the shift is noise. They are others if the run has older
    data (``asynchrony.max_staleness``) or several updates per batch: set its ``minibatches`` or
    ``epochs``.

    Args:
      shift: In units of reward; at 0 or above, the policy collapses on old enough data.

    References:
      Arnal et al. (arXiv:2506.20520), NOTES. Trinity-RFT's example has the same shift with groups
      of 8 and samples of weights up to 20 steps old; its mean is over tokens, and its ``tau``, 0
      there and 1 by default, divides the loss by ``1 + tau``.
    """
    return from_base(
        name="asymre",
        advantage=stateless(advantages.asymre, shift=shift),
        surrogate=_reinforce_off_policy,
        weights=aggregate.sequence_sum,
        paper="arXiv:2506.20520",
    )


@traits(has_ratio=False, off_policy=True)
def _reinforce_off_policy(
    logp: Array, old_logp: Array | None, advantages: Array, mask: Array
) -> Array:
    """The plain policy gradient, whichever policy sampled: no weight stands for the ratio.

    loss[t] = -A[t] * logp[t]
    """
    return surrogates.reinforce(logp, old_logp, advantages, mask)


def vespo(
    *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Recipe:
    """Policy gradient with a smooth weight that is largest at a sequence ratio of about 1.

        W = probability of the response under the policy over that at sampling
        phi = W^k exp(lambda (1 - W)), a constant; other k, lambda where A < 0
        loss = mean over tokens of -phi A logp

    Args:
      k_pos: Power where the advantage is not negative.
      lambda_pos: Rate where the advantage is not negative.
      k_neg: Power where the advantage is negative.
      lambda_neg: Rate where the advantage is negative.

    References:
      VESPO (arXiv:2602.10693), through TRL's loss type of that name, with the 8 updates per batch
      of a script of the authors (``vespo_N_8`` in FloyedShen/VESPO); others have 16, 32 and 64.
    """
    return from_base(
        name="vespo",
        minibatches=8,
        surrogate=bind(
            surrogates.vespo, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg
        ),
        paper="arXiv:2602.10693",
    )


def vcpo(
    *,
    cap: float = 8.0,
    rho_base: float = 1.0,
    power: float = 0.5,
    norms: Literal["exact", "length"] = "exact",
) -> Recipe:
    """Policy gradient on stale data with a bounded variance.

        w = product over the response of old / behavior;  b = sum w^2 n r / sum w^2 n in each group
        A = (r - b) / std_group r
        loss = mean over responses of the mean over tokens of -min(w, cap) A logp
        update = min(1, effective share of samples / rho_base)^power times the optimizer's

    ``n`` is the squared norm of the gradient of a response's log-probability under the policy at
    the start of the step. The train step computes it with one more backward pass, response by
    response (:func:`~jaxrl_llm.train.score_sq_norms`), of the groups whose rewards differ; others
    have advantage 0 whatever ``n`` is. Each batch has one update. The data are older than the
    policy only if the run sets ``asynchrony.max_staleness``.

    Args:
      cap: Largest weight in the loss, at least 1; the baseline and the step are uncapped.
      rho_base: Share of effective samples from which the step has full size.
      power: 0.5 for optimizers that normalize the gradient, 1 for SGD.
      norms: "length" takes the length of a response for ``n``, a proxy of ours without any backward
        pass.

    References:
      VCPO, Stable Asynchrony (arXiv:2602.17616). The released code reads one response at a time for
      the update too: it sums gradients with and without the reward and subtracts the baseline at
      the end, so ``n`` needs no pass of its own, but memory for a second gradient, and packing and
      larger microbatches are not possible. Its ``n`` has the truncated weight inside, which then
      counts twice; ours is the paper's.
    """
    weights = bind(corrections.importance_weights, level="sequence", cap=cap)
    scale = bind(corrections.ess_lr_scale, rho_base=rho_base, power=power)
    checks.check_option("vcpo", "norms", norms, ("exact", "length"))
    advantage: Callable = advantages.vcpo_advantage
    if norms == "length":
        advantage = bind(advantage, grad_sq_norms=None)
    return from_base(
        name="vcpo",
        advantage=stateless(advantage),
        surrogate=surrogates.reinforce,
        weights=aggregate.sequence_mean,
        correction=bind(corrections.sequence_rollout_correction, weights=weights),
        computed=(Computed("update_scale", scale, "batch"),),
        paper="arXiv:2602.17616",
    )


def remix(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 1e-3,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    share: float = 0.4,
    window: int = 2,
    capacity: int = 256,
    reset_at: int | None = 50,
) -> Recipe:
    """Off-policy PPO that becomes on-policy PPO.

        q = exp(logp - behavior_logp),   c = exp(old_logp - behavior_logp)
        token loss = -min(q A, clip(q, c - eps_low, c + eps_high) A)
                     + kl_coef (share KL(policy || base) + (1 - share) KL(policy || old))
                     - entropy_coef entropy
        share from 1 to 0.5, see regularizers.remix_lambda

    The base is the reference model. With a given probability, a group of a batch comes from one of
    the last few policies. At one step the base is reset to the policy; from then on all data are
    fresh: the sampler is the old policy, and the loss is PPO's. Each batch trains twice.

    Args:
      eps_low: Distance of the lower bound from c.
      eps_high: Distance of the upper bound from c.
      kl_coef: Weight of the two divergences.
      kl_estimator: Their estimator, see :func:`jaxrl_llm.regularizers.kl_token`.
      share: Probability that a group comes from a past policy.
      window: Maximum age of that policy, in versions of the weights.
      capacity: Number of stored groups; ``window`` times P are enough.
      reset_at: The step after which the base becomes the policy and replay ends; None for never.
        The paper has 50 or 100.

    References:
      ReMix (arXiv:2507.06892), PAPER; the coefficients and the estimator are ours. The optimizer's
      state is not reset here, which the paper may do.
    """
    penalty = bind(regularizers.kl_convex, coef=kl_coef, estimator=kl_estimator)
    bonus = nonzero_term(regularizers.entropy_bonus, coef=entropy_coef)
    reset = None
    if reset_at is not None:
        checks.check_positive("remix", reset_at=reset_at)
        reset = bind(regularizers.reset_reference, every=reset_at, times=1)
    return from_base(
        name="remix",
        computed=(Computed("kl_share", regularizers.remix_schedule(), "controller"),),
        surrogate=bind(surrogates.mix_ppg, eps_low=eps_low, eps_high=eps_high),
        regularizers=(connect(penalty, share="kl_share"), *bonus),
        reference=reset,
        collector=curation.replayed(
            share=share, draw="each", capacity=capacity, max_staleness=window, until=reset_at
        ),
        epochs=2,
        paper="arXiv:2507.06892",
    )


def brorl(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    cap: float = 2.0,
    kl_coef: float = 1e-4,
    reset_every: int | None = 500,
    dynamic_sampling: bool = True,
) -> Recipe:
    """The recipe that BroRL scales in the number of rollouts.

        a = r - mean_group r;  A = (a - mean a) / std a, over rollouts
        groups of equal rewards take no part
        token loss times w, + kl_coef KL;   w = min(old / behavior, cap)

    The contribution is outside of the loss: 512 rollouts of 128 prompts per step instead of 16 of
    512, the learning rate times the root of the batch ratio (:func:`jaxrl_llm.curation.sqrt_lr`),
    and the same number of updates per step. :func:`jaxrl_llm.diagnostics.mass_balance` explains
    why it helps.

    Args:
      cap: Largest importance weight of a token.
      reset_every: Steps between resets of the reference to the policy; None for never, as with
        ``kl_coef`` 0.

    References:
      BroRL (arXiv:2510.01180), PAPER; the cap, the weight of the divergence and the period of the
      reset are ours.
    """
    checks.check_positive("brorl", reset_every=reset_every)
    checks.check_non_negative("brorl", kl_coef=kl_coef)
    reset = None
    if kl_coef and reset_every is not None:
        reset = bind(regularizers.reset_reference, every=reset_every)
    weights = bind(corrections.importance_weights, cap=cap)
    recipe = from_base(
        name="brorl",
        advantage=stateless(advantages.reinforce_pp_baseline, norm="sequence"),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        correction=bind(corrections.rollout_correction, weights=weights),
        curation=stateless(curation.informative_groups),
        reference=reset,
        paper="arXiv:2510.01180",
    )
    return refilled(recipe, dynamic_sampling)


def ulorl(
    *,
    tau: float = 0.99,
    sigma: float = 0.2,
    old: Literal["recomputed", "sampled"] = "recomputed",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    segments: int | None = 8,
    oversample: float | None = None,
) -> Recipe:
    """PPO's clip without tokens of high probability in right responses of low entropy.

        drop = (r > 0) and (p >= tau) and (mean entropy of the response < sigma)
        token loss = 0 where dropped, which still count in the mean

    The tokens of a response may come from several versions of the weights, one per segment. The
    ratio is to the policy at the start of the step for all of them, or to the version that sampled
    each. If the run sets ``asynchrony.max_staleness``, it is always to the version that sampled.

    Args:
      tau: Probability from which a token counts as mastered.
      sigma: Mean entropy in nats below which mastered tokens of a response are dropped; 0 drops
        nothing.
      old: "recomputed" for the policy at the start of the step, so that with one update per batch
        no token is clipped (pseudo on-policy importance sampling); "sampled" for ``behavior_logp``,
        as each segment was sampled (segment-aware importance sampling).
      segments, oversample: See :func:`~jaxrl_llm.curation.partial_rollouts`, with 2 for
        ``oversample=None``; ``segments=None`` for responses that are sampled in one step.

    References:
      UloRL (arXiv:2507.19766), PAPER. The paper trains on rewards of 0 and 1 with 1024 rollouts and
      one update per step.
    """
    checks.check_option("ulorl", "old", old, ("recomputed", "sampled"))
    collector = None
    if segments is None:
        checks.check_no_effect("ulorl", "with segments=None", oversample=oversample)
    else:
        oversample = 2.0 if oversample is None else oversample
        collector = curation.partial_rollouts(segments=segments, oversample=oversample)
    surrogate = bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high)
    return from_base(
        name="ulorl",
        advantage=chain(
            stateless(advantages.grpo), stateless(curation.mpt_advantages, tau=tau, sigma=sigma)
        ),
        surrogate=surrogate
        if old == "recomputed"
        else connect(surrogate, old_logp="behavior_logp"),
        collector=collector,
        paper="arXiv:2507.19766",
    )


def april(
    *, segments: int = 8, oversample: float = 2.0, max_staleness: int | None = None
) -> Recipe:
    """GRPO whose batch is complete with the first P groups; the others continue in the next batch.

    Args:
      segments, oversample, max_staleness: See :func:`~jaxrl_llm.curation.partial_rollouts`.

    References:
      APRIL (arXiv:2509.18521), which does not change the loss: about 40% of its tokens were sampled
      by older weights.
    """
    collector = curation.partial_rollouts(
        segments=segments, oversample=oversample, max_staleness=max_staleness
    )
    return from_base(name="april", collector=collector, paper="arXiv:2509.18521")
