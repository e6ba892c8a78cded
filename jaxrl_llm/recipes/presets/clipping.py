"""Other objectives of the ratio: sequence ratios, soft gates, bounded weights, squared errors.

``s = exp(mean over tokens of (logp - old_logp))`` is the ratio of a sequence. Its objectives are
averaged over non-empty sequences; TRL and verl's trainer also count empty rows.
"""

from collections.abc import Callable

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, overlong, refilled
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = [
    "cispo",
    "clip_cov",
    "dispo",
    "dppo_kl",
    "dppo_tv",
    "drpo_len",
    "fipo",
    "gbpo",
    "gmpo",
    "gspo",
    "gvpo",
    "hapo",
    "kl_cov",
    "luspo",
    "minpro",
    "real",
    "rover",
    "sapo",
]


def gspo(*, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Recipe:
    """Group sequence policy optimization.

        loss = mean over sequences of -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)

    s is a mean, so the clip range is narrow. The Recipe accepts only sequence weightings.

    References:
      Zheng et al. (arXiv:2507.18071), whose batches have four minibatches. In verl from 0.9.1 on
      the aggregation is a setting, and token-mean there is a different loss.
    """
    return from_base(
        name="gspo",
        surrogate=bind(surrogates.gspo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        minibatches=4,
        paper="arXiv:2507.18071",
    )


def luspo(*, eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> Recipe:
    """Length-unbiased sequence policy optimization: :func:`gspo` times the length.

        loss = mean over sequences of -length min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)

    References:
      LUSPO (arXiv:2602.05261); formula and epsilons as TRL has them.
    """
    return from_base(
        name="luspo",
        surrogate=bind(surrogates.luspo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2602.05261",
    )


def gmpo(*, eps_low: float = 0.4, eps_high: float = 0.4) -> Recipe:
    """Geometric-mean policy optimization.

        z = the pessimistic choice of d and clip(d, -eps_low, eps_high),   d = logp - old_logp
        loss = mean over sequences of -A exp(mean over tokens of z)

    Args:
      eps_low: The log ratio is clipped at ``-eps_low``, in nats.
      eps_high: The log ratio is clipped at ``eps_high``, in nats.

    References:
      Zhao et al., GMPO (arXiv:2507.20673), with the 8 updates per batch of the released scripts;
      verl's loss is ``geo_mean``.
    """
    return from_base(
        name="gmpo",
        surrogate=bind(surrogates.gmpo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        minibatches=8,
        paper="arXiv:2507.20673",
    )


def cispo(
    *,
    w_min: float = 0.0,
    w_max: float = 5.0,
    dynamic_sampling: bool = True,
    length: float | None = None,
    buffer_share: float = 0.2,
    overlong_factor: float = 1.0,
) -> Recipe:
    """Clipped importance-weighted policy gradient: every token has a gradient.

        w = stop_gradient(clip(ratio, w_min, w_max))
        loss = mean over tokens of -w A logp
        rewards += overlong_penalty               over the last tokens of the budget

    Groups of equal rewards, before the penalty, are replaced.

    Args:
      w_min: Smallest weight, absolute (1 - eps in verl's terms).
      w_max: Largest weight, absolute (1 + eps in verl's terms).
      length: None for no penalty of long responses.

    References:
      MiniMax-M1 (arXiv:2506.13585), with its 16 updates per batch, and the dynamic sampling and the
      length penalty that it takes from DAPO; its numbers are not given, so they are DAPO's: 4096 of
      20480 tokens. The bounds are those of TRL and ScaleRL: a cap of 5, no lower bound. verl's
      setting of that name is a distance from 1 and defaults to 0.2. Where only the loss has this
      name, it is ``cispo(dynamic_sampling=False)``.
    """
    penalty = overlong(
        "cispo",
        length=length,
        buffer_share=buffer_share,
        usual=0.2,
        overlong_factor=overlong_factor,
    )
    grpo = stateless(advantages.grpo)
    recipe = from_base(
        name="cispo",
        advantage=chain(*penalty, grpo) if penalty else grpo,
        surrogate=bind(surrogates.cispo, w_min=w_min, w_max=w_max),
        minibatches=16,
        paper="arXiv:2506.13585",
    )
    return refilled(recipe, dynamic_sampling)


def dispo(
    *,
    eps_pos: tuple[float, float] = (0.2, 10.0),
    eps_neg: tuple[float, float] = (1.0, 100.0),
    dynamic_sampling: bool = True,
) -> Recipe:
    """Importance-weighted policy gradient with four bounds.

        (low, high) = eps_pos where A > 0, else eps_neg
        w = stop_gradient(clip(ratio, 1 - low, 1 + high))
        loss = mean over tokens of -w A logp

    Args:
      eps_pos: Distances of the lower and of the upper bound from 1 where A > 0.
      eps_neg: The same elsewhere.

    References:
      DISPO (arXiv:2602.00983), PAPER. The paper drops groups of equal rewards; replacing them is
      DAPO's form.
    """
    recipe = from_base(
        name="dispo",
        surrogate=bind(surrogates.dispo, eps_pos=eps_pos, eps_neg=eps_neg),
        paper="arXiv:2602.00983",
    )
    return refilled(recipe, dynamic_sampling)


def minpro(*, w_min: float = 0.0, w_max: float = 5.0, cap_one: bool = False) -> Recipe:
    """Off-policy policy gradient with the smallest prefix ratio.

        r = exp(logp - behavior_logp),   m = smallest r of the tokens before, 1 for the first
        loss = mean over tokens of -stop_gradient(clip(m r, w_min, w_max)) A logp

    The ratios are to the policy that sampled, whatever its age. It is the policy of the step unless
    the run sets ``asynchrony.max_staleness``.

    Args:
      w_min: Smallest weight, absolute.
      w_max: Largest weight, absolute.
      cap_one: Whether to cap the prefix ratio at 1, so that it can only reduce a weight.

    References:
      MinPRO (arXiv:2601.22718), NOTES; the bounds are ours.
    """
    surrogate = bind(surrogates.minpro, w_min=w_min, w_max=w_max, cap_one=cap_one)
    return from_base(
        name="minpro",
        surrogate=connect(surrogate, old_logp="behavior_logp"),
        paper="arXiv:2601.22718",
    )


def dppo_tv(
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    w_max: float = 1e4,
    length: float | None = None,
) -> Recipe:
    """Divergence proximal policy optimization: a bound on the change of a token's probability.

        A = r - mean_group r,   ratio = exp(logp - behavior_logp)
        token loss = -stop_gradient(min(ratio, w_max)) A logp,   0 where the probability has risen
        by more than delta_high (A > 0), or fallen by more than delta_low (A <= 0)
        loss = mean over sequences of the sum over tokens of token loss / length

    The ratio is to the policy that sampled.

    Args:
      delta_low: Largest decrease of probability.
      delta_high: Largest increase of probability.
      w_max: Upper bound of the ratio.
      length: None for the mean over the tokens of the batch in place of the sums.

    References:
      DPPO (arXiv:2602.04879), Binary-TV, with verl's formula and the settings of the example there
      that the authors' repository names, 8 updates per batch among them. That example's ratio is to
      the old policy; the authors' own code has the sampler, as here.
    """
    surrogate = bind(surrogates.dppo_tv, delta_low=delta_low, delta_high=delta_high, w_max=w_max)
    return _dppo("dppo_tv", surrogate, length)


def dppo_kl(
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    w_max: float = 1e4,
    length: float | None = None,
) -> Recipe:
    """:func:`dppo_tv` with a bound on the KL divergence of a token's probability.

    Args:
      delta_low: Largest divergence where A is not positive.
      delta_high: Largest divergence where A is positive.
      w_max: Upper bound of the ratio.
      length: As in ``dppo_tv``.

    References:
      DPPO (arXiv:2602.04879), Binary-KL; otherwise as for :func:`dppo_tv`.
    """
    surrogate = bind(surrogates.dppo_kl, delta_low=delta_low, delta_high=delta_high, w_max=w_max)
    return _dppo("dppo_kl", surrogate, length)


def _dppo(name: str, surrogate: Callable, length: float | None) -> Recipe:
    of_length = None if length is None else bind(aggregate.sequence_sum_norm, length=length)
    return from_base(
        name=name,
        advantage=stateless(advantages.dr_grpo),
        surrogate=connect(surrogate, old_logp="behavior_logp"),
        weights=of_length or aggregate.token_mean,
        minibatches=8,
        paper="arXiv:2602.04879",
    )


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Recipe:
    """Soft adaptive policy optimization (Qwen).

        tau = tau_pos where A > 0, else tau_neg
        loss = mean over sequences of the mean over tokens of -(4 / tau) sigmoid(tau (ratio - 1)) A

    On policy the gradient is that of the plain policy gradient.

    Args:
      tau_pos: Sharpness of the gate for A > 0.
      tau_neg: Sharpness elsewhere; larger, so that the gradient of lowered tokens decays sooner.

    References:
      Gao et al. (arXiv:2511.20347), whose batches have four minibatches; formula and defaults of
      verl and TRL, which agree.
    """
    return from_base(
        name="sapo",
        surrogate=bind(surrogates.sapo, tau_pos=tau_pos, tau_neg=tau_neg),
        weights=aggregate.sequence_mean,
        minibatches=4,
        paper="arXiv:2511.20347",
    )


def gbpo(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Group bounded policy optimization.

        A = (r - mean r) / (std r + 1e-6),   M = (r - median r) / std r      over the group
        target = 1 + eps_high where M > 0,  1 - eps_low where M < 0,  1 where M = 0
        loss = mean over sequences of the mean over tokens of |A| |ratio - target|

    The deviations divide by n. If most rollouts of a group have equal rewards, these are the
    median: their target is 1, and only the others move.

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER; the weighting is our reading.
    """
    # The rewards, in place of the advantages that an entry computed from the batch gets.
    median = connect(surrogates.median_advantage, rewards="rewards")
    return from_base(
        name="gbpo",
        advantage=stateless(advantages.grpo, ddof=0),
        computed=(Computed("median_advantages", median, "batch"),),
        surrogate=bind(surrogates.gbpo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2604.18578",
    )


def hapo(
    *,
    quantile: float = 0.8,
    alpha: float = 1.0,
    beta: float = 1.0,
    tau: float = 0.05,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    length: float | None = None,
    buffer_share: float = 0.4,
    overlong_factor: float = 1.0,
) -> Recipe:
    """Adapts temperature, clip and advantage of each token to its entropy; token-level group mean.

        h = entropy of the token, normalized over the batch to [-1, 1]: advantages.entropy_signal
        r += overlong_penalty over the last tokens of the budget
        A = (r - mean) / std over the tokens of the group: advantages.token_grpo
        token loss = surrogates.hapo
        sampling temperature = base (1 + tau h), h with the statistics of the last batch

    The signal is computed once, from the policy at the start of the step. Rollouts decode in slots,
    with ``curation.entropy_temperature``. The policy and its ratio are evaluated at the base
    temperature.

    Args:
      quantile: Share of tokens that count as certain.
      alpha: How much the signal changes the clip bounds.
      beta: How much the signal changes the advantage.
      tau: How much the signal changes the sampling temperature; 0 for a constant temperature.
      length: None for no penalty of long responses.

    References:
      HAPO (arXiv:2509.16591), and the released code with its 16 minibatches; its scripts have
      ``eps_high=0.2``, the paper a tau of 0.1. Those for Qwen penalize the last 4096 tokens of
      10240 or 12288, those for Llama none. The code computes the signal in each microbatch. By
      the sign of its signal, its temperature also rises where the policy is certain; ours falls
      there, as in the paper.
    """
    checks.check_share("hapo", one=False, tau=tau)
    measure = bind(_entropy_stats, quantile=quantile)
    surrogate = bind(
        surrogates.hapo,
        alpha=alpha,
        beta=beta,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
    )
    penalty = overlong(
        "hapo",
        length=length,
        buffer_share=buffer_share,
        usual=0.4,
        overlong_factor=overlong_factor,
    )
    credit = stateless(advantages.token_grpo)
    return from_base(
        name="hapo",
        advantage=chain(*penalty, credit) if penalty else credit,
        computed=(Computed("entropy_signal", bind(_entropy_signal, quantile=quantile), "batch"),),
        surrogate=connect(surrogate, signal="entropy_signal"),
        collector=curation.entropy_temperature(measure, tau=tau) if tau else None,
        minibatches=16,
        paper="arXiv:2509.16591",
    )


def fipo(
    *,
    half_life: float = 32.0,
    w_min: float = 1.0,
    w_max: float = 1.2,
    safe_ratio: float | None = 10.0,
    max_clipped: int | None = 1,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    dynamic_sampling: bool = True,
    length: float | None = None,
    buffer_share: float = 0.2,
    overlong_factor: float = 1.0,
) -> Recipe:
    """DAPO where a token counts more if the policy has come to prefer what followed it.

        d = logp - old_logp
        F[t] = sum over tokens u from t on of 2^(-(u - t) / half_life) d[u]
        A[t] = clip(exp(F[t]), w_min, w_max) (r - mean_group r) / std_group r
        token loss = surrogates.fipo,   rewards and groups as in dapo

    The weights are constants of each update; in the first one on a batch, F is 0 and the loss is
    that of DAPO.

    Args:
      half_life: Tokens after which a later token counts half.
      w_min: Smallest weight of a token.
      w_max: Largest weight of a token.
      safe_ratio: Ratio above which a token of negative advantage has at most weight 1.
      max_clipped: Dual-clipped tokens of a response that still trains; None for any number.
      dynamic_sampling: Whether groups of equal rewards are dropped and replaced by others.
      length: None for no penalty of long responses.

    References:
      FIPO (arXiv:2603.19835), with the settings of the released run with 32B parameters, 8 updates
      per batch among them; for smaller models its code suggests ``w_min=0.8``. See
      ``surrogates.fipo`` for the differences.
    """
    penalty = overlong(
        "fipo",
        length=length,
        buffer_share=buffer_share,
        usual=0.2,
        overlong_factor=overlong_factor,
    )
    grpo = stateless(advantages.grpo)
    surrogate = bind(
        surrogates.fipo,
        half_life=half_life,
        w_min=w_min,
        w_max=w_max,
        safe_ratio=safe_ratio,
        max_clipped=max_clipped,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
    )
    recipe = from_base(
        name="fipo",
        advantage=chain(*penalty, grpo) if penalty else grpo,
        surrogate=surrogate,
        minibatches=8,
        paper="arXiv:2603.19835",
    )
    return refilled(recipe, dynamic_sampling)


def _entropy_stats(entropy: Array, mask: Array, *, quantile: float) -> advantages.EntropyStats:
    return advantages.entropy_signal(entropy, mask, quantile=quantile).stats


def _entropy_signal(
    advantages_: Array, *, old_entropy: Array, mask: Array, quantile: float = 0.8
) -> Array:
    del advantages_  # which every entry computed from the batch gets
    return advantages.entropy_signal(old_entropy, mask, quantile=quantile).signal


def clip_cov(
    *,
    ratio: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    eps_low: float = 1.0,
    eps_high: float = 1.0,
    dynamic_sampling: bool = True,
) -> Recipe:
    """PPO's clip without some of the tokens of high covariance of advantage and log-probability.

        cov = (A - mean A) (logp - mean logp)           means over the tokens of the batch
        selected = ratio of all tokens, at random among those with lower < cov < upper
        token loss = 0 where selected, which still count in the mean

    The selection is made once, on the full batch, with the policy at the start of the step.

    Args:
      ratio: Share of the tokens that is selected.
      lower: Selected tokens have a covariance above this.
      upper: Selected tokens have a covariance below this.

    References:
      Cui et al. (arXiv:2505.22617), with their 8 updates per batch. The defaults are those of the
      released script for 7B, whose epsilons of 1 leave little of the ratio clip. verl selects in
      each microbatch, with the current log-probabilities, and excludes tokens whose ratio is
      clipped.
    """
    selection = bind(surrogates.clip_cov_selection, ratio=ratio, lower=lower, upper=upper)
    recipe = from_base(
        name="clip_cov",
        computed=(Computed("selected", selection, "batch"),),
        surrogate=bind(surrogates.clip_cov, eps_low=eps_low, eps_high=eps_high),
        minibatches=8,
        paper="arXiv:2505.22617",
    )
    return refilled(recipe, dynamic_sampling)


def kl_cov(*, ratio: float = 2e-3, coef: float = 1.0, dynamic_sampling: bool = True) -> Recipe:
    """The unclipped ratio, with a penalty on the tokens of the highest covariance.

        selected = the ratio of all tokens with the largest cov of :func:`clip_cov`
        token loss = -r A + coef |logp - old_logp| where selected

    In the first optimizer step on a batch the policy is the old one and the penalty 0.

    Args:
      ratio: Share of the tokens that is selected.
      coef: Penalty per nat of difference.

    References:
      Cui et al. (arXiv:2505.22617), with their 8 updates per batch. The defaults are those of the
      released script for 7B; the script for 32B selects a tenth of that. Otherwise as for
      :func:`clip_cov`.
    """
    selection = bind(surrogates.kl_cov_selection, ratio=ratio)
    recipe = from_base(
        name="kl_cov",
        computed=(Computed("selected", selection, "batch"),),
        surrogate=bind(surrogates.kl_cov, coef=coef),
        minibatches=8,
        paper="arXiv:2505.22617",
    )
    return refilled(recipe, dynamic_sampling)


def rover(*, rho: float = 1.0, beta: float = 1.0) -> Recipe:
    """Random policy valuation: a squared Bellman error in place of a policy gradient.

        A = r - mean_group r
        Q[t] = rho (logp - old_logp),   q[t] = mean over the vocabulary of the same difference
        loss = mean over tokens of (Q[t] - A - beta rho q[t + 1])^2

    The means over the vocabulary are computed in chunks of tokens, under the policy being trained
    and under the one at the start of the step.

    Args:
      rho: Temperature of the Q-values.
      beta: Weight of the continuation.

    References:
      He et al., Random Policy Valuation is Enough (arXiv:2509.24981), with minibatches of 32 of 128
      prompts. The released script for countdown centers the rewards as here; the one for
      mathematics uses GRPO's advantages.
    """
    return from_base(
        name="rover",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.rover, rho=rho, beta=beta),
        computed=(
            Computed("mean_log_probs", surrogates.mean_log_probs, "policy"),
            Computed("old_mean_log_probs", surrogates.mean_log_probs, "old_policy"),
        ),
        minibatches=4,
        paper="arXiv:2509.24981",
    )


def gvpo(*, beta: float = 0.1) -> Recipe:
    """Group variance policy optimization: log-ratios fitted to rewards, both around their mean.

        d_i = beta sum over tokens of (logp_i - old_logp_i)
        e_i = (d_i - mean_group d) - (r_i - mean_group r)
        loss = mean over groups of the sum of e_i^2 / 2 over n - 1      n responses in the group

    In the first update of a batch it is a policy gradient with a leave-one-out baseline, times
    beta; in the later ones, and on older data (``asynchrony.max_staleness``), a response whose
    probability has already changed enough is held there.

    Args:
      beta: Weight of the KL divergence from the policy that sampled, above 0, in units of reward.

    References:
      Zhang et al. (arXiv:2504.19599), and the authors' script and verl's recipe, which are the
      same: beta 0.1, groups of 4, minibatches of 256 of 1024 prompts. There the loss is the sum
      over the prompts of a device's microbatch of 16 responses, here the mean over all prompts.
    """
    return from_base(
        name="gvpo",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.gvpo, beta=beta),
        weights=aggregate.group_mean,
        minibatches=4,
        paper="arXiv:2504.19599",
    )


def drpo_len(
    *,
    length: float,
    lam: float = 0.1,
    tau: float = 10.0,
    beta: float = 1e3,
    delta: float = 1e-4,
    kl_estimator: str = "k1",
) -> Recipe:
    """Decoupled reward policy optimization for short answers.

        s = mean over tokens of logp
        J = sum over right of w s - tau log(mean over wrong of exp(s / tau))
        w = softmax over right of (1 - tokens / length) / lam
        loss = -mean over groups of J + max(beta (kl - delta), 0) kl
        kl = mean over all tokens of the minibatch of old_logp - logp

    A long right answer is raised less than a short one and never lowered. An answer is right if its
    reward is above the group's mean, so rewards are 0 and 1. Only the KL term limits the change of
    the policy within a batch; it is 0 in the first update.

    Args:
      lam: Temperature of the shares of right answers; the smaller, the more short answers count.
      tau: Temperature of the wrong answers, in nats per token.
      beta: Increase of the KL coefficient per nat of excess. 0 removes the term from the gradient.
      delta: Divergence without a penalty, in nats per token.
      kl_estimator: "k1" or "k3".

    References:
      DRPO (arXiv:2510.04474), defaults of the authors' scripts, four minibatches among them.
    """
    barrier = bind(surrogates.drpo_kl_coef, beta=beta, delta=delta, estimator=kl_estimator)
    kl = connect(bind(surrogates.kl_from_old, estimator=kl_estimator), coef="kl_coef")
    return from_base(
        name="drpo_len",
        advantage=stateless(advantages.dr_grpo),
        computed=(Computed("kl_coef", barrier, "update"),),
        surrogate=bind(surrogates.drpo_len, length=length, lam=lam, tau=tau),
        weights=aggregate.group_mean,
        regularizers=(kl,),
        minibatches=4,
        paper="arXiv:2510.04474",
    )


def real(*, tau: float = 0.5) -> Recipe:
    """Rewards as labels: tells right responses from wrong ones by their log ratio.

        s = mean over tokens of (logp - old_logp)
        L = log(1 + sum over right of exp(-s / tau)) + log(1 + sum over wrong of exp(s / tau))
        loss = mean over groups of L, 0 in a group without both kinds

    A response is right if its reward is above the group's mean, so rewards are 0 and 1. Nothing
    clips the ratio: the weight of a response falls as it comes to the side of its label.

    Args:
      tau: Temperature, in nats per token; the weight of a response is at most ``1 / tau``.

    References:
      Zhai et al., Rewards as Labels (arXiv:2602.05630), with the tau and the four minibatches of
      the released scripts, whose groups of equal rewards also stay in the mean. See
      ``surrogates.real`` for the differences.
    """
    return from_base(
        name="real",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.real, tau=tau),
        weights=aggregate.group_mean,
        minibatches=4,
        paper="arXiv:2602.05630",
    )
