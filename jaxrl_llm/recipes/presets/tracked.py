"""Methods that track statistics of prompts, or of the entropy, from step to step.

With ``num_prompts``, the batch holds ``prompt_ids``.
"""

from typing import Literal

from jaxrl_llm import advantages, aggregate, curation, regularizers, surrogates
from jaxrl_llm.core import bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import AlgoState, Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["dcpo_distribution", "dcpo_dynamic_clip", "mssr", "spo_tracker"]


def spo_tracker(
    *,
    num_prompts: int,
    length: int | None = None,
    rho: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    prioritized: bool = True,
    first: int | None = None,
) -> Recipe:
    """Single-stream policy optimization.

        v = the tracked success rate of the prompt, before this batch
        first visit: alpha = N0 (S + 1/2) / (n + 1), beta = N0 (n - S + 1/2) / (n + 1)
        A = (r - v - mean(r - v)) / std(r - v)              over the batch
        D = mean |logp at the prompt's last visit - logp now| of its last response
        rho = clip(2^(-D / 0.06), 0.875, 0.96), the forgetting factor of the tracker

    One rollout per prompt is enough, and several are allowed. Rewards lie in [0, 1]. Prompts are
    drawn by ``advantages.uncertainty_sampling_weights`` of their success rates.

    At the first visit of a prompt the collector samples n = ``first`` more rollouts, which do not
    train; S is the sum of their rewards and N0 = 1 / (1 - the smallest rho).

    The last response to each prompt is stored, and each step scores those of its prompts again
    under its initial policy: ``advantages.last_visit``.

    Args:
      length: The longest response, in tokens; with less, only its first tokens are stored.
      rho: Forgetting factor of a prompt at a visit; None for an adaptive factor.
      prioritized: Whether to draw prompts by these weights; else each comes once an epoch, and
        the tracker starts from a rate of 1/2.
      first: Rollouts from which a prompt's tracker starts, 0 for a rate of 1/2. None means 8, or 0
        without ``prioritized``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.spo_tracker(num_prompts=100, length=64).computed[0].function
      _LastVisit(num_prompts=100, length=64)

    References:
      Xu and Ding, SPO (arXiv:2509.13232), and the setting of the released script, whose rho adapts,
      with its 8 updates per batch. There the shift is measured after the update of the visit; in
      the paper, and here, before it. There all prompts have their first 8 rollouts before training,
      of the initial policy; here a prompt has them at its first visit, of the policy of that step,
      and until then is drawn as one of rate 1/2.
    """
    name = "spo_tracker"
    if not prioritized:
        checks.check_no_effect(name, "without prioritized", first=first)
    first = (8 if prioritized else 0) if first is None else first
    memory = ()
    if rho is not None:
        checks.check_no_effect(name, f"with rho={rho!r}", length=length)
    elif length is None:
        raise ValueError(
            f"{name}: rho adapts to stored responses; set length, the tokens of the longest "
            "response, or a constant rho."
        )
    else:
        visits = advantages.last_visit(num_prompts=num_prompts, length=length)
        memory = (Computed("policy_shift", visits, "last_visit"),)
    weights = connect(advantages.uncertainty_sampling_weights, values="rates")
    return from_base(
        name=name,
        advantage=advantages.spo_tracker(num_prompts=num_prompts, rho=rho, first=first),
        computed=memory,
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        minibatches=8,
        paper="arXiv:2509.13232",
        collector=curation.prioritized(
            weights,
            prior=(0.5, 0.5),
            retain=0.875 if rho is None else rho,
            follows=_tracked_rates,
            first=first,
        )
        if prioritized
        else None,
        group_relative=False,
    )


def _tracked_rates(algo_state: AlgoState) -> advantages.BetaTracker:
    return algo_state.advantage


def mssr(
    *,
    num_prompts: int,
    entropy: Literal["sampled", "policy"] = "sampled",
    rule: Literal["two_sided", "monotone"] = "two_sided",
    eps_low: float = 0.2,
    eps_high: float = 0.3,
    dual_clip: float | None = 3.0,
    kl_coef: float = 0.01,
) -> Recipe:
    """Stabilized single rollouts: a tracked baseline with KL-based forgetting, shaped advantages.

        A = (r - v - mean(r - v)) / std(r - v)              over the batch, v tracked
        A[t] = A + min(0.4 H[t], |A| / 2)
        loss = mean over tokens of (token loss + kl_coef KL)

    Rewards lie in [0, 1]. H is the entropy of the policy that sampled, or the sampled token's term
    of it.

    Args:
      entropy: "sampled" for ``-p log p`` of the token, as released; "policy" for the entropy, as
        in the paper.
      rule: Forgetting rule of the tracker: ``advantages.window_kl_discount``.

    References:
      Liu et al., MSSR (arXiv:2512.18215), and the released code with its settings, including 16
      minibatches. Its entropy is the sampled token's term.
    """
    checks.check_option("mssr", "entropy", entropy, ("sampled", "policy"))
    checks.check_non_negative("mssr", kl_coef=kl_coef)
    sampled = entropy == "sampled"
    shaping = advantages.sampled_entropy_shaping if sampled else advantages.entropy_shaping
    return from_base(
        name="mssr",
        advantage=chain(
            advantages.mssr_tracker(num_prompts=num_prompts, rule=rule), stateless(shaping)
        ),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        minibatches=16,
        paper="arXiv:2512.18215",
        group_relative=False,
    )


def dcpo_dynamic_clip(
    *,
    num_prompts: int,
    eps_low: float = 0.16,
    eps_high: float = 0.2,
    r_max: float = 10.0,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """Dynamic clipping and smooth advantage standardization.

        A = rewards standardized over this visit and over all visits to the prompt, blended
        (low, high) = surrogates.dcpo_bounds(old_logp), wider for rare tokens
        token loss = -min(ratio A, clip(ratio, low, high) A)
        loss = mean over sequences of the mean over tokens of token loss

    A group of equal rewards still trains if the prompt's earlier rewards were different.

    Args:
      eps_low: Width of the band below 1.
      eps_high: Width of the band above 1.
      r_max: Largest upper bound.

    References:
      Yang et al., DCPO (arXiv:2509.02333), with the 16 updates per batch of the base script,
      which has epsilons of 0.2 and 0.28.
    """
    return from_base(
        name="dcpo_dynamic_clip",
        advantage=advantages.smooth_standardization(num_prompts=num_prompts),
        surrogate=bind(
            surrogates.dcpo_dynamic_clip,
            eps_low=eps_low,
            eps_high=eps_high,
            r_max=r_max,
            dual_clip=dual_clip,
        ),
        weights=aggregate.sequence_mean,
        minibatches=16,
        paper="arXiv:2509.02333",
    )


def dcpo_distribution(
    *,
    target_entropy: float = 0.5,
    max_gap: float = 0.1,
    threshold: float = 0.05,
    hot: float = 1.2,
    cold: float = 0.8,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Recipe:
    """GRPO whose advantages keep the entropy near a target.

        A[t] = (1 - a) A + a 1[r > threshold] p_T'(token) / p(token)
        T' = hot while the entropy is at or below the target, else cold
        a = x / (1 + x),  x = min(|target_entropy - entropy|, max_gap) / share of good rollouts

    The entropy is that of the previous batch, estimated from its sampled tokens; it is 0 for the
    first batch. Both temperatures are relative to the sampler's; the train step computes their
    log-probabilities.

    Args:
      target_entropy: In nats per token.
      max_gap: Upper bound of the distance from the target.
      threshold: Rewards above this are good.
      hot: The temperature that flattens, above ``cold``.
      cold: The temperature that sharpens.

    References:
      DCPO (arXiv:2601.12730), and the released code with its four minibatches; the best reported
      target is 0.25.
    """
    checks.check_positive("dcpo_distribution", hot=hot, cold=cold)
    if not cold < hot:
        raise ValueError(f"dcpo_distribution: cold must be below hot; got {cold:g} and {hot:g}.")
    mix = stateless(
        advantages.dcpo_distribution,
        target_entropy=target_entropy,
        max_gap=max_gap,
        threshold=threshold,
    )
    tempered = advantages.temperature_logp
    return from_base(
        name="dcpo_distribution",
        advantage=chain(stateless(advantages.grpo), mix),
        computed=(
            Computed("policy_entropy", advantages.sampled_entropy(), "controller"),
            Computed("hot_logp", bind(tempered, temperature=hot), "old_policy"),
            Computed("cold_logp", bind(tempered, temperature=cold), "old_policy"),
        ),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        minibatches=4,
        paper="arXiv:2601.12730",
    )
