"""Replay of stored rollouts, and training on a selected part of the rollouts.

A stored rollout has the log-probabilities of the weights that sampled it: ``behavior_logp``. Shared
options:

    capacity: Number of stored groups.
    max_staleness: Groups older than this many versions of the weights are not drawn; None for no
      bound.
    eps_low, eps_high: See the package.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxrl_llm import corrections, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import bind, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.presets.critics import ppo_max
from jaxrl_llm.recipes.recipe import Recipe

__all__ = [
    "dart",
    "dots",
    "fading_replay",
    "grpo_roc",
    "llm_replay",
    "masa",
    "pf_ppo",
    "rollout_replay",
    "sapo_swarm",
    "sol_rl",
    "spark",
    "ssb",
]


def rollout_replay(
    *,
    share: float = 0.5,
    capacity: int = 512,
    max_staleness: int | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Half of each batch are groups of recent batches, with ratios to the policy that sampled them.

        stored: groups of unequal rewards
        token loss = max(-A r, -A clip(r, (1 - eps_low) c, (1 + eps_high) c))
        r = exp(logp - behavior_logp),   c = exp(old_logp - behavior_logp)

    Args:
      share: Share of stored groups, drawn uniformly; the last group of each prompt is stored.

    References:
      DOTS (arXiv:2506.05316), rollout replay, Algorithm 1, with 8 updates per batch; with its
      selection of prompts it is :func:`dots`. The released code has its filter commented out, so
      there groups of equal rewards are stored and replayed too.
    """
    return from_base(
        name="rollout_replay",
        surrogate=bind(surrogates.decoupled_ppo, eps_low=eps_low, eps_high=eps_high),
        collector=_recent_groups(share=share, capacity=capacity, max_staleness=max_staleness),
        minibatches=8,
        paper="arXiv:2506.05316",
    )


def _recent_groups(**options: Any) -> curation.Collector:
    """Replay of the last group of each prompt, if its rewards differ."""
    return curation.replayed(unique=True, store=curation.informative_groups, **options)


def dots(
    *,
    references: int = 256,
    every: int = 2,
    target: float = 0.5,
    temperature: float = 1e-3,
    embed: Callable[[str], np.ndarray] = curation.hashed_magnitudes,
    adapter: curation.RateAdapter | None = None,
    predict: Callable | None = None,
    share: float = 0.5,
    capacity: int = 512,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Prompts near a predicted target success rate, and half of each batch replayed.

        rate_i = attention of prompt i to references with rollouts, then a linear fit
        prompts ~ softmax(-|rate - target| / temperature)
        replay and token loss as of :func:`rollout_replay`

    Rewards lie in [0, 1].

    Args:
      references: Number of prompts that are rolled out only to predict the others.
      every: Number of steps that share the references; the first have no stored groups.
      target: Target success rate, in [0, 1].
      temperature: Temperature of the choice; 0.001 almost sorts by the distance to the target.
      embed: ``text -> [D]``; the paper has a language model. The default tells prompts apart by
        their words and the magnitudes of their numbers: see :func:`jaxrl_llm.curation.targeted`.
      adapter: The paper's adapter, fitted beforehand by
        :func:`jaxrl_llm.curation.rate_adapter_fit`; None for attention between the embeddings.
      predict: A predictor of another form; see :func:`jaxrl_llm.curation.targeted`.
      share: Share of stored groups.

    References:
      DOTS (arXiv:2506.05316), which trains an adapter of a language model's embeddings beforehand,
      on success rates of other prompts under several policies; by default there is neither.
    """
    replay = _recent_groups(share=share, capacity=capacity, start=every)
    collector = curation.targeted(
        references=references,
        every=every,
        target=target,
        temperature=temperature,
        embed=embed,
        adapter=adapter,
        predict=predict,
        source=replay,
    )
    return rollout_replay(eps_low=eps_low, eps_high=eps_high).replace(
        name="dots", collector=collector
    )


def llm_replay(
    *,
    capacity: int = 64,
    power: float = 1.0,
    max_staleness: int | None = 8,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Groups of equal rewards are replaced by stored groups, drawn by their scores.

        score = sum |A| std r;   P(group) ~ score^power;   the best are stored
        token loss = w max(-A ratio, -A clip(ratio, 1 - eps_low, 1 + eps_high)),  w = old / behavior

    Args:
      power: Exponent of the scores; 0 draws uniformly.

    References:
      TRL's GRPO with a replay buffer, which does not bound the age; prioritized experience replay
      (arXiv:1511.05952). The weight is AReaL's (arXiv:2505.24298).
    """
    return from_base(
        name="llm_replay",
        surrogate=bind(surrogates.decoupled_ppo, eps_low=eps_low, eps_high=eps_high),
        collector=curation.replayed(
            replace=curation.informative_groups,
            store=curation.informative_groups,
            score=curation.replay_scores,
            priority=bind(curation.replay_priorities, power=power),
            evict="lowest",
            capacity=capacity,
            max_staleness=max_staleness,
        ),
        paper="arXiv:1511.05952",
    )


def ssb(
    *,
    capacity: int = 64,
    power: float = 1.0,
    max_staleness: int | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Groups with nonzero advantages are stored and replace groups without any.

        P(group) ~ (mean |A|)^power
        token loss = max(-A q, -A clip(q, 1 - eps_low, 1 + eps_high)),  q = policy / behavior

    Args:
      power: Exponent of the scores; 0 draws uniformly.

    References:
      Skywork R1V2 (arXiv:2504.16656), ABSTRACT. Storing complete groups is ours: it retains their
      baselines. VL-Rethinker's released code (arXiv:2504.08837) stores rollouts, and also draws
      fresh ones with replacement (:func:`jaxrl_llm.curation.ssb_sample`).
    """
    clip = bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high)
    return from_base(
        name="ssb",
        surrogate=connect(clip, old_logp="behavior_logp"),
        collector=curation.replayed(
            replace=curation.informative_groups,
            store=curation.informative_groups,
            score=curation.advantage_sizes,
            priority=bind(curation.replay_priorities, power=power),
            capacity=capacity,
            max_staleness=max_staleness,
        ),
        paper="arXiv:2504.16656",
    )


def fading_replay(
    *,
    share: float = 0.5,
    capacity: int = 512,
    factor: float = 7.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Stored groups are drawn only by age: older groups are less likely.

        P(i-th oldest of L) ~ tanh(factor (i / L)^2)
        token loss as of :func:`rollout_replay`

    Args:
      share: Share of stored groups in a batch.
      factor: With 1 the probability is nearly quadratic in age, with 100 nearly uniform.

    References:
      Symphony (arXiv:2512.10477), only the rule of its buffer; its actor and critic are for robots,
      and the loss here is that of rollout replay.
    """
    return from_base(
        name="fading_replay",
        surrogate=bind(surrogates.decoupled_ppo, eps_low=eps_low, eps_high=eps_high),
        collector=curation.replayed(
            share=share, capacity=capacity, priority=bind(curation.fading_probs, factor=factor)
        ),
        paper="arXiv:2512.10477",
    )


def grpo_roc(
    *,
    oversample: int = 2,
    min_wrong: int = 2,
    min_right: int = 2,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """Samples twice as many rollouts; clean right ones and the first wrong ones train.

    The reward component "penalty" measures errors in a trace
    (:func:`jaxrl_llm.curation.trace_penalty`); without it the first right ones train. Groups of
    equal rewards take no part.

    Args:
      oversample: Sampled rollouts as a multiple of G.
      min_wrong: Minimum number of wrong rollouts, if there are as many; likewise ``min_right``.

    References:
      rStar2-Agent (arXiv:2508.20722), 16 of 32; see :func:`jaxrl_llm.curation.resample_on_correct`.
    """
    rule = bind(curation.resample_on_correct, min_wrong=min_wrong, min_right=min_right)
    return from_base(
        name="grpo_roc",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        curation=stateless(curation.informative_groups),
        collector=curation.downsampled(rule, oversample=oversample),
        paper="arXiv:2508.20722",
    )


def sol_rl(
    *,
    oversample: int = 4,
    cap: float = 2.0,
    quantization: Literal["int8", "fp8"] | None = "int8",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The best and the worst of many low-precision rollouts train, weighted by old / behavior.

        behavior: the policy with linear layers in 8 bits;   old: the policy in full precision
        w = min(old / behavior, cap);   A over the rollouts that train

    Args:
      oversample: Sampled rollouts as a multiple of G; half of G are the best, half the worst.
      cap: Largest weight of a token.
      quantization: How the sampler rounds; None for a sampler as precise as the trainer.

    References:
      Sol-RL (arXiv:2604.06916), CODE reading, for diffusion models: 24 of 96 seeds, which are
      drawn in 4 bits (NVFP4) and sampled again in full precision. Here it is 8 bits, and a response
      is scored in full precision, not sampled again; the weights, which are ours, correct for it.
    """
    weights = bind(corrections.importance_weights, cap=cap)
    return from_base(
        name="sol_rl",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        correction=bind(corrections.rollout_correction, weights=weights),
        collector=curation.downsampled(curation.contrasts, oversample=oversample),
        sampler_quantization=quantization,
        paper="arXiv:2604.06916",
    )


def pf_ppo(
    *,
    rule: Literal["best", "best_random", "best_worst", "power"] = "best_worst",
    oversample: int = 1,
    kl_coef: float = 0.02,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """PPO on rollouts with reliable rewards, some of them repeated.

        rollouts of a group ~ weights of the rule, with replacement
        loss: ppo_max, without its critic_warmup

    Args:
      rule: See :func:`jaxrl_llm.curation.filtration_weights`.
      oversample: Sampled rollouts as a multiple of G.
      kl_coef: As in ``ppo_max``.

    References:
      PF-PPO (arXiv:2409.06957), with the four updates per batch of its script, each of which draws
      over the batch; here each group has G draws. The PPO there, OpenRLHF's, whitens the
      advantages, and the script has a penalty of 0.01.
    """
    collector = curation.downsampled(
        bind(curation.resample_groups, rule=rule), oversample=oversample
    )
    recipe = ppo_max(kl_coef=kl_coef, critic_warmup=0, eps_low=eps_low, eps_high=eps_high)
    return recipe.replace(
        name="pf_ppo", collector=collector, minibatches=4, paper="arXiv:2409.06957"
    )


def sapo_swarm(
    *,
    swarm: curation.Swarm | None = None,
    share: float = 0.5,
    capacity: int | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """Half of each batch are groups of other trainers, treated as the policy's own.

        ratio = exp(logp - old_logp),   old_logp of this policy, for every rollout

    If the run sets ``asynchrony.max_staleness``, old_logp is of the policy that sampled.

    Args:
      swarm: The store through which trainers share groups, such as
        ``curation.shared_folder("runs/swarm", node="first")``. None for a single trainer, which
        draws past groups of this run instead, from a pool of ``capacity``.
      share: Share of groups of others with unequal rewards, drawn uniformly.
      capacity: Size of the pool without a swarm; None for 64.

    References:
      SAPO, swarm sampling policy optimization (arXiv:2509.08721), NOTES: 4 of 8 groups come from
      other trainers. A single trainer has no such groups there.
    """
    if swarm is not None:
        checks.check_no_effect("sapo_swarm", "with a swarm", capacity=capacity)
        collector = curation.shared(swarm, share=share)
    else:
        collector = curation.replayed(
            share=share,
            capacity=64 if capacity is None else capacity,
            store=curation.informative_groups,
        )
    return from_base(
        name="sapo_swarm",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=collector,
        paper="arXiv:2509.08721",
    )


def spark(
    *,
    judges: float = 0.25,
    refines: float = 0.25,
    point: float = 0.3,
    kl_coef: float = 1e-3,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rollouts with known rewards become judging and refining tasks, which also train.

        loss = mean over tokens of (token loss + kl_coef KL)

    Rewards are above 0 for right answers and at most 0 for wrong ones.

    Args:
      judges: Share of a batch's groups that judge; likewise ``refines``.
      point: See :func:`jaxrl_llm.curation.judged`.

    References:
      SPARK (arXiv:2509.22624), with the KL and the 8 updates per batch of the released scripts.
    """
    return from_base(
        name="spark",
        minibatches=8,
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        collector=curation.judged(judges=judges, refines=refines, point=point),
        paper="arXiv:2509.22624",
    )


def masa(
    *,
    efficient: bool = False,
    base: float = 0.01,
    inclusive: bool = False,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """The policy also predicts properties of its solutions, and is rewarded for accuracy.

        reward of a prediction = (length + base^|predicted - true pass rate| + notions) / 3

    Half of a batch's groups are predictions, so ``prompts_per_step`` is twice the questions.
    Rewards of solutions are above 0 for right ones.

    Args:
      efficient: Whether predictions come first; questions predicted to be hopeless or mastered are
        then not solved, and solutions end at twice the predicted length.
      base, inclusive: See :func:`jaxrl_llm.rewards.meta_rewards`.

    References:
      MASA (arXiv:2510.03259) and its released code, 128 questions, 16 solutions and 16 predictions
      each. The efficient form (NOTES) also imitates the best predictions after inserting the true
      numbers, which is not included here.
    """
    return from_base(
        name="masa",
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        collector=curation.predicted(
            rewards.parse_meta_answer,
            bind(rewards.meta_answer_rewards, base=base, inclusive=inclusive),
            gate=curation.predictive_gate if efficient else None,
            cutoff=curation.length_cutoff if efficient else None,
        ),
        paper="arXiv:2510.03259",
    )


def dart(
    *,
    capacity: int = 1024,
    low: int = 1,
    high: int | None = None,
    threshold: float = 0.6,
    keep: float = 0.8,
    turns: int = 32,
    cap: float = 1.0,
    kl_coef: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """Fewer rollouts of easy prompts, a stored success if all fail, training on uncertain steps.

        rollouts of a prompt = high below a success rate of threshold, then int(9 / rate - 7)
        trained: steps whose mean entropy is in the top share keep of their group
        token loss = min(old / behavior, cap) clip loss + kl_coef KL

    Steps are the turns of an environment, limited to the number of turns of the task's longest
    success; all training episodes of a task begin with the same seed. Without an environment the
    reward returns the ends of steps ("turn_ends", "turn_rewards"). Rewards are above 0 for right
    answers and at most 0 for wrong ones.

    Args:
      capacity: Number of prompts with a stored success.
      low: Minimum rollouts of a prompt; ``high`` is the maximum, None for G.
      threshold: Success rate from which a prompt gets fewer rollouts.
      keep: Share of the steps that train.
      turns: Maximum steps of a rollout; later ones count as one step with the last of these.
      cap: Largest importance weight of a token.

    References:
      DART (arXiv:2509.23866), for agents that see a screen, which is text here. The selection of
      steps is NOTES, since it is commented out in the released code, and the limit of turns is
      ABSTRACT. The weight is on the ratio of a token and the mean over tokens, with the clip of
      DAPO; the released script has it on GSPO's loss, with a clip of 0.1 and 0.28 and the mean over
      sequences. See :func:`jaxrl_llm.curation.pooled`.
    """
    weights = bind(corrections.importance_weights, cap=cap)
    return from_base(
        name="dart",
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        correction=bind(corrections.rollout_correction, weights=weights),
        selection=bind(curation.top_entropy_steps, turns=turns, keep=keep),
        collector=curation.pooled(capacity=capacity, low=low, high=high, threshold=threshold),
        paper="arXiv:2509.23866",
    )
