"""GRPO and close relatives: other baselines, scales and token weights."""

import numpy as np

from jaxrl_llm import advantages, aggregate, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, overlong, refilled
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = [
    "ace",
    "dapo",
    "dr_grpo",
    "gdpo",
    "grpo",
    "jspo",
    "mc_grpo",
    "opo",
    "otb",
    "ttrl_majority",
]


def grpo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    ddof: int = 1,
    scale_eps: float = 1e-6,
    kl_coef: float = 1e-3,
    kl_estimator: str | None = None,
) -> Recipe:
    """Group relative policy optimization, as in DeepSeekMath.

        A = (r - mean_group r) / (std_group r + scale_eps)
        loss = mean over sequences of the mean over tokens of (token loss + kl_coef KL)

    The deviation is the sample deviation, with ``scale_eps`` outside the root; a group of equal
    rewards gets exactly 0.

    Args:
      ddof: 1 divides by the sample deviation, as released trainers do; 0 by the population's.
      scale_eps: Added to the deviation; the clip range is ``eps_low`` and ``eps_high``.
      kl_estimator: See ``regularizers.kl_to_reference``; None means "k3".

    Example:
      >>> import jaxrl_llm as jr
      >>> [sorted(jr.recipes.grpo(kl_coef=c).required_fields) for c in (0.001, 0.0)]
      [['ref_logp'], []]

    References:
      Shao et al., DeepSeekMath (arXiv:2402.03300), where the KL weight is 0.04; 1e-3 is verl's, and
      TRL has no KL term by default. verl and tunix add 1e-6, TRL 1e-4. verl 0.9 and TRL 1.16
      average over the tokens of the batch by default. verl gives a group of one its raw reward;
      here it gets 0.
    """
    checks.check_non_negative("grpo", kl_coef=kl_coef)
    checks.check_positive("grpo", finite=True, scale_eps=scale_eps)
    if kl_coef == 0 and kl_estimator is not None:
        raise ValueError("grpo: kl_estimator has no effect with kl_coef=0.")
    return from_base(
        name="grpo",
        advantage=stateless(advantages.grpo, ddof=ddof, eps=scale_eps),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.sequence_mean,
        regularizers=nonzero_term(
            regularizers.kl_to_reference, coef=kl_coef, estimator=kl_estimator or "k3"
        ),
        paper="arXiv:2402.03300",
    )


def dr_grpo(*, length: float, eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """GRPO "done right": only the group mean, and a constant in place of the response length.

        A = r - mean_group r
        loss = sum over tokens of token loss / (B length)

    B counts every rollout of the batch, including masked ones.

    References:
      Liu et al., Understanding R1-Zero-Like Training (arXiv:2503.20783). The released scripts make
      8 updates per batch; here there is one, in which the clip has no effect, unless a config sets
      ``minibatches=8``. TRL divides by the rows of a microbatch times its
      ``max_completion_length``; verl's ``seq-mean-token-sum-norm`` divides by the number of
      non-empty sequences from 0.7.1 on, and by no number of sequences before.
    """
    return from_base(
        name="dr_grpo",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=bind(aggregate.fixed_length, length=length),
        paper="arXiv:2503.20783",
    )


def dapo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    dynamic_sampling: bool = True,
    max_rounds: int | None = None,
    metric: str | None = None,
    length: float | None = None,
    buffer_share: float = 0.2,
    overlong_factor: float = 1.0,
    overlong_filter: bool = False,
) -> Recipe:
    """Decoupled clip and dynamic sampling policy optimization.

        dynamic sampling:  groups of equal metric are replaced, see curation.refill
        overlong penalty:  r + clip(-factor (tokens - (length - buffer)) / buffer, -factor, 0),
                           buffer = buffer_share length

    Groups of equal rewards have advantage 0; without dynamic sampling they count in the
    denominator.

    Args:
      dynamic_sampling: Whether groups of equal rewards are dropped and replaced by others.
      max_rounds: Maximum number of sampled groups as a multiple of the batch; None for 10.
      metric: Name of the reward component that dynamic sampling compares, such as the accuracy;
        None for the reward before the overlong penalty.
      length: None for no penalty of long responses.
      overlong_filter: Whether truncated responses (``truncated``) do not train. They still count
        in the baselines.

    References:
      Yu et al. (arXiv:2503.14476), with their 16 updates per batch and their buffer of 4096 of
      20480 tokens. The dual clip of 10 and the bound of 10 rounds, after which the run ends, are
      from the released scripts (verl's recipe); the paper mentions neither.
    """
    if max_rounds is not None and not dynamic_sampling:
        raise ValueError(
            f"dapo: max_rounds={max_rounds} has no effect without dynamic_sampling=True."
        )
    if metric is not None and not dynamic_sampling:
        raise ValueError(f"dapo: metric={metric!r} has no effect without dynamic_sampling=True.")
    penalty = overlong(
        "dapo",
        length=length,
        buffer_share=buffer_share,
        usual=0.2,
        overlong_factor=overlong_factor,
    )
    grpo = stateless(advantages.grpo)
    informative = curation.informative_groups
    if metric is not None:
        informative = connect(bind(informative, name=metric), metric="reward_components")
    return from_base(
        name="dapo",
        advantage=chain(*penalty, grpo) if penalty else grpo,
        surrogate=bind(
            surrogates.dapo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        curation=stateless(informative) if dynamic_sampling else None,
        collector=curation.refill(informative, max_rounds=max_rounds or 10)
        if dynamic_sampling
        else None,
        selection=curation.truncation_mask if overlong_filter else None,
        minibatches=16,
        paper="arXiv:2503.14476",
    )


def mc_grpo(
    *,
    scale: str = "mad",
    scale_eps: float | None = None,
    rescale_nonzero: bool = False,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 0.04,
) -> Recipe:
    """Median-centered group relative policy optimization.

        A = (r - median_group r) / (mad_group r + scale_eps)
        loss = mean over sequences of the mean over tokens of (token loss + kl_coef KL)

    The rollout at the median of a group is sampled but does not train; among ties one is chosen at
    random. Sample one rollout more than should train, an odd number in total. The method is meant
    for small groups, where the mean gives many advantages the wrong sign.

    Args:
      scale: What the advantage is divided by: "mad", "std" or "none". With right and wrong answers
        mad is mostly 0, so the advantages are ``1 / scale_eps`` and only the clip and the optimizer
        bound the step.
      scale_eps: Added to the divisor, in units of reward. None means 1e-3.
      rescale_nonzero: Whether to scale up nonzero advantages to make up for the zeros of a group,
        as the authors do for GSM8K.

    References:
      MC-GRPO (arXiv:2601.22582). The defaults are those of the authors' scripts, with two passes
      over a batch; they do not define the choice among ties.
    """
    checks.check_non_negative("mc_grpo", kl_coef=kl_coef)
    if scale == "none":
        checks.check_no_effect("mc_grpo", "with scale='none'", scale_eps=scale_eps)
    elif scale_eps is not None:
        checks.check_positive("mc_grpo", finite=True, scale_eps=scale_eps)
    return from_base(
        name="mc_grpo",
        advantage=stateless(
            advantages.mc_grpo, scale=scale, eps=scale_eps, rescale_nonzero=rescale_nonzero
        ),
        selection=advantages.mc_grpo_keep,
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef, estimator="k3"),
        epochs=2,
        paper="arXiv:2601.22582",
    )


def gdpo(
    *,
    weights: tuple[tuple[str, float], ...] | None = None,
    gate: tuple[str, float] | None = None,
    batch_norm: str = "sequence",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Group reward-decoupled normalization policy optimization.

        z_k = (r_k - mean_group r_k) / (std_group r_k + eps)
        a = sum_k w_k z_k
        A = (a - mean_batch a) / (std_batch a + eps)

    The rewards are the batch's ``reward_components``, NaN where one does not apply. The batch's
    reward, their sum, is not read.

    Args:
      weights: Pairs of the name of a reward and its weight, one for every component. None means 1
        for each.
      gate: Name of a reward and its smallest value at which the others count; None for no gate.
      batch_norm: Unit of the last normalization: "sequence", "token" (a long response counts more),
        or "none" to omit it.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.gdpo(weights=(("correct", 1.0), ("format", 0.5)))
      >>> sorted(recipe.required_fields)
      ['reward_components']

    References:
      GDPO (arXiv:2601.05242). "sequence" is the authors' TRL (eps 1e-4), "token" their verl (eps
      1e-6). The mean over tokens and the clip are verl's defaults; other settings of their scripts
      differ by task.
    """
    checks.check_option("gdpo", "batch_norm", batch_norm, ("sequence", "token", "none"))
    function = bind(advantages.gdpo_token, weights=weights, gate=gate)
    if batch_norm != "token":
        function = bind(advantages.gdpo, batch_norm=batch_norm, weights=weights, gate=gate)
    return from_base(
        name="gdpo",
        advantage=stateless(connect(function, rewards="reward_components")),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2601.05242",
    )


def ace(
    *,
    alpha: float = 1.0,
    length_normalize: bool = False,
    c_max: float | None = 10.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    dynamic_sampling: bool = True,
) -> Recipe:
    """:func:`dapo` with the asymmetric confidence-aware error penalty.

        A' = A (1 + alpha softplus(min(c, c_max)))          where A < 0
        c = sum over tokens of the log-ratio of policy to reference

    The reference is used only in the advantages.

    Args:
      alpha: Strength of the penalty; 0 for none.
      length_normalize: Whether c is the mean over the tokens.
      c_max: Upper bound of c, in nats; None for no bound.

    References:
      Xu et al., ACE (arXiv:2602.21420), ABSTRACT, as ACE-DAPO: the paper also pairs it with GRPO.
      The dynamic sampling and the 16 updates per batch are those of :func:`dapo`; there is no
      penalty of long responses.
    """
    penalty = stateless(advantages.ace, alpha=alpha, length_normalize=length_normalize, c_max=c_max)
    recipe = from_base(
        name="ace",
        advantage=chain(stateless(advantages.grpo), penalty),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        minibatches=16,
        paper="arXiv:2602.21420",
    )
    return refilled(recipe, dynamic_sampling)


def jspo(*, eps_low: float = 0.2, eps_high: float = 0.28) -> Recipe:
    """Clipped policy gradient with the James-Stein baseline.

        A_i = r_i - (1 - l) mean(others of the group) - l mean(rollouts of the other groups)

    The share l increases with the noise of the group means relative to the spread between prompts;
    the gradient is unbiased on policy. A batch needs several prompts.

    References:
      Zeng et al., Shrinkage baselines (arXiv:2511.03710); advantage, clip, mean and 8 updates per
      batch as in the authors' code and its script for mathematics.
    """
    return from_base(
        name="jspo",
        advantage=stateless(advantages.jspo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        minibatches=8,
        paper="arXiv:2511.03710",
    )


def opo() -> Recipe:
    """On-policy policy gradient with the baseline of least variance, if gradients grow with length.

        A_i = r_i - sum_j len_j r_j / sum_j len_j       over the group
        loss = mean over tokens of -A logp

    There is no ratio: each batch has one update.

    References:
      Hao et al., OPO (arXiv:2505.23585), without an entropy bonus. In verl it is the ``opo``
      advantage with a minibatch as large as the batch, where the clipped ratio is 1; the mean over
      tokens is verl's default.
    """
    return from_base(
        name="opo",
        advantage=stateless(advantages.opo),
        surrogate=surrogates.reinforce,
        paper="arXiv:2505.23585",
    )


def otb(
    *, zero_tail: bool = False, compact: bool = False, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """The optimal token baseline: rewards averaged by the gradient norm of the tokens so far.

        A[i, t] = r_i - sum_j r_j W[j, t] / sum_j W[j, t]
        W[j, t] = sum over s <= t of |onehot - pi|^2 at token s of rollout j

    The sum of squared probabilities in ``W`` is computed with the old log-probabilities.

    Args:
      zero_tail: Whether the longest rollout of a group has no baseline where it is alone.
      compact: Whether positions count only trained tokens, for several turns.

    References:
      Li et al., The Optimal Token Baseline (arXiv:2602.07078), trained on policy there. The clip is
      verl's default loss and has no effect in the first update on a batch.
    """
    return from_base(
        name="otb",
        advantage=stateless(advantages.otb, zero_tail=zero_tail, compact=compact),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=(Computed("sum_pi_sq", advantages.sum_pi_squared, "old_policy"),),
        paper="arXiv:2602.07078",
    )


def ttrl_majority(
    *, votes: int = 2, kl_coef: float = 0.001, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """Test-time reinforcement learning: agreement with the majority in place of a label.

        votes G rollouts of a prompt; the first G of them train
        r = 1 for the most common answer of the votes G, else 0;   A = grpo(r) over the G

    The reward returns the answer of a rollout as ``answer_ids``, such as
    ``rewards.majority_vote(verifier)``; the verifier's score is only reported. Questions need no
    known answer.

    The collector counts the votes, since most voters are not in the batch: in a loop without it,
    ``rewards`` of the batch must be the agreement. With ``votes=1`` the step counts them.

    Args:
      votes: Rollouts that vote, as a multiple of G; with 1, all of them train.

    References:
      TTRL (arXiv:2504.16084), with the 8 updates per batch of the released scripts, where 64
      rollouts vote and the first 32 of them train. Its KL weight is the trainer's default.
    """
    checks.check_count("ttrl_majority", votes=votes)
    in_step = chain(stateless(rewards.majority_rewards), stateless(advantages.grpo))
    first = curation.first_rollouts
    return from_base(
        name="ttrl_majority",
        advantage=in_step if votes == 1 else stateless(advantages.grpo),
        collector=None
        if votes == 1
        else curation.downsampled(first, oversample=votes, regrade=_agreement),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        minibatches=8,
        paper="arXiv:2504.16084",
    )


def _agreement(*, answer_ids: np.ndarray, where: np.ndarray) -> Array:
    """1 for the answer of the majority, else 0, of answers as components of a reward."""
    ids = np.where(np.isnan(answer_ids), -1, answer_ids)  # a failed call has no answer
    if (wrong := ids[where & (ids != np.round(ids))]).size:
        raise ValueError(
            f"ttrl_majority: answer_ids of the reward must be integers; got {wrong[0]:g}."
        )
    zeros = np.zeros(where.shape, np.float32)
    return rewards.majority_rewards(zeros, answer_ids=ids.astype(np.int32), where=where)
