"""Methods for agents: sequential updates of turns, turns that fork, implicit rewards, subagents.

Except for ``arpo`` and ``m_grpo``, the batch holds ``turn_ids`` and ``turn_where``. Options that
these presets share: ``kl_coef``, ``eps_low``, ``eps_high``, see the package.
"""

from typing import Literal

from jaxrl_llm import (
    advantages,
    aggregate,
    curation,
    preferences,
    regularizers,
    rewards,
    surrogates,
)
from jaxrl_llm.core import bind, chain, checks, stateless
from jaxrl_llm.corrections.sequential import Order
from jaxrl_llm.recipes.parts.process_reward import ProcessRewardModel
from jaxrl_llm.recipes.parts.subagent import Subagent
from jaxrl_llm.recipes.parts.turn_updates import TurnUpdates
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["arpo", "m_grpo", "oprl", "portool", "seeupo"]


def arpo(
    *,
    credit: Literal["soft", "hard"] = "soft",
    first: int | None = None,
    segment: int | None = None,
    prob: float = 0.5,
    weight: float = 0.2,
    tokens: int = 20,
    scale: float = 11.9,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rollouts branch where entropy has risen; shared tokens have the mean of their advantages.

        "soft": A = grpo(r) of each rollout;   "hard": its mean over the rollouts with the token

    With a mean over tokens as the weighting, both have the same gradient if the ratio is the same
    for all copies of a token.

    Args:
      credit: "soft" or "hard".
      segment: Number of tokens after which the response to a single-turn task may branch; None for
        branches after the replies of an environment.
      first, prob, weight, tokens, scale: See ``curation.turn_branched``.

    References:
      ARPO (arXiv:2507.19849): the released code starts with 8 of 16 rollouts, uses soft credit and
      makes 8 updates per batch. "hard" is PAPER, and ``segment`` is ours.
    """
    checks.check_option("arpo", "credit", credit, ("soft", "hard"))
    advantage = stateless(advantages.grpo)
    if credit == "hard":
        advantage = chain(advantage, stateless(advantages.shared_prefix_advantages))
    collector = curation.turn_branched(
        first=first, prob=prob, weight=weight, tokens=tokens, scale=scale
    )
    if segment is not None:
        collector = curation.entropy_branched(
            first=first, segment=segment, prob=prob, weight=weight, tokens=tokens, scale=scale
        )
    return from_base(
        name="arpo",
        advantage=advantage,
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=collector,
        minibatches=8,
        paper="arXiv:2507.19849",
    )


def portool(
    *,
    gamma: float = 0.95,
    trajectory_weight: float = 1.0,
    fork_weight: float = 1.0,
    scale: Literal["std"] | None = None,
    first: int | None = None,
    prob: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The advantage of the rollout plus that of each turn among its siblings.

        R(turn) = mean over the rollouts with it of gamma^(turns to come) r, plus its form
        A = trajectory_weight grpo(r) + fork_weight (R(turn) - mean over its siblings of R)

    Half of a group starts from the beginning; any turn after a reply of the environment may fork.
    The batch holds ``node_ids``, which identify shared tokens, and may hold ``turn_formats``.

    Args:
      gamma: Discount per turn, in [0, 1].
      trajectory_weight, fork_weight: Weights of the two terms, not negative.
      scale: "std" to divide the second by the deviation of the siblings, None for no division.
      first: Rollouts before any fork; None for half of the group.
      prob: Probability that a turn forks.

    References:
      PORTool (arXiv:2510.26020), ABSTRACT reading: gamma 0.95, both weights 1. Its clip is not
      known. There each unfinished rollout proposes forks after each turn, some of which are used;
      here turns of finished rollouts fork at random.
    """
    credit = bind(
        advantages.portool,
        gamma=gamma,
        trajectory_weight=trajectory_weight,
        fork_weight=fork_weight,
        scale=scale,
    )
    return from_base(
        name="portool",
        advantage=chain(stateless(credit), stateless(advantages.turns_to_tokens)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.turn_branched(first=first, prob=prob, weight=0.0),
        paper="arXiv:2510.26020",
    )


def m_grpo(
    *,
    count: int = 2,
    form: Literal["weighted", "steps"] = "steps",
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """GRPO for a main agent and, with other weights, for the subagent that it calls.

        main:      A = grpo(r) over the rollouts of a query
        subagent:  A = grpo(r_call) over its aligned answers to all rollouts of the query,
                   r_call = 0 without the form, 0.1 where the main agent failed, else 1   ("steps")

    The environment asks by ``environments.ask``. Both policies have the loss of GRPO and an
    optimizer of their own; only rewards pass from one to the other.

    Args:
      count: Number of answers of each rollout that train; see ``curation.align_calls``.
      form: See ``rewards.call_rewards``.

    References:
      M-GRPO (arXiv:2511.13288), ABSTRACT reading; rewards of the released code (MrlX). ``count`` is
      ours, the paper's is not known to us. The released code takes answers from a queue instead of
      aligning them, and runs the two trainers as separate jobs.
    """
    clipped = bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high)
    of_answers = from_base(
        name="m_grpo_subagent",
        advantage=stateless(advantages.of_calls),
        surrogate=clipped,
        weights=aggregate.sequence_mean,
        paper="arXiv:2511.13288",
        group_relative=False,
    )
    return from_base(
        name="m_grpo",
        surrogate=clipped,
        weights=aggregate.sequence_mean,
        subagent=Subagent(
            recipe=of_answers,
            rewards=bind(rewards.call_rewards, form=form),
            advantage=advantages.m_grpo,
            count=count,
        ),
        paper="arXiv:2511.13288",
    )


def oprl(
    *,
    beta: float = 0.05,
    alpha: float = 1.0,
    base: Literal["rloo", "grpo", "center"] = "rloo",
    combine: Literal["mean", "sum"] = "mean",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The advantage of the rollout plus that of each turn by an implicit process reward.

        r[i, k] = beta * sum over tokens of turn k of (prm_logp - old_logp)
        A[i, k] = base(r)_i + alpha base(r[i, k] over all turns of the group)

    ``prm_logp`` are log-probabilities under a process reward model, which starts as a copy of the
    policy and first takes a step on ``preferences.trajectory_dpo`` of the same rollouts;
    ``config.critic`` is its optimizer.

    Args:
      beta: Scale of the process reward, above 0.
      alpha: Weight of the turns, not negative.
      base: "rloo", "grpo" or "center".
      combine: The reward model's score of a rollout: the "mean" or the "sum" of its turns.

    References:
      OPRL or iStar (arXiv:2509.19199), and its released code: beta 0.05, alpha 1, "rloo". The paper
      has a ratio per step, the code per token, as here; the paper sums over turns. Here the reward
      model takes one step per batch; there it takes one per minibatch, at twice the policy's
      learning rate. A minibatch there is 64 turns, so a batch has many updates (up to 20 for
      WebShop); here there is one, in which the clip has no effect, unless a config sets
      ``minibatches``.
    """
    checks.check_option("oprl", "combine", combine, ("mean", "sum"))
    credit = bind(advantages.oprl, beta=beta, alpha=alpha, base=base)
    loss = bind(preferences.trajectory_dpo, beta=beta)
    loss = loss if combine == "mean" else bind(loss, turn_ids=None)
    return from_base(
        name="oprl",
        prm=ProcessRewardModel(loss=loss),
        advantage=chain(stateless(credit), stateless(advantages.turns_to_tokens)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2509.19199",
    )


def seeupo(
    *,
    order: Order = "backward",
    factor_eps: float = 0.2,
    bound: float = 3.0,
    kl_coef: float = 0.002,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Turns are updated one after another, the last turn first.

        a = r - mean_group r;   A = clip((a - mean a) / std a, -bound, bound)
        for each turn k from the last to the first, an optimizer step on its tokens with
            old_logp of the policy now,  A_k = A factor,  and the ratio of the turn (GSPO)
            factor = clip(factor ratio, 1 - factor_eps, 1 + factor_eps)   of the turns before

    With one turn it is GSPO with advantages normalized over the batch.

    Args:
      order: "backward", "forward" or "random".
      factor_eps: Largest distance of the factor from 1, in [0, 1].
      bound: Bound of the advantages.

    References:
      SeeUPO (arXiv:2602.06554), and its released code: both bounds 0.2, advantages within 3, a KL
      of 0.002. A group of one gets its reward, as there. Its mean over sequences counts those
      without the turn; ours does not.
    """
    return from_base(
        name="seeupo",
        advantage=chain(
            stateless(advantages.dr_grpo, singleton="raw"),
            stateless(advantages.batch_normalize),
            stateless(advantages.clip, bound=bound),
        ),
        surrogate=bind(surrogates.gspo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        turn_updates=TurnUpdates(order=order, eps_low=factor_eps, eps_high=factor_eps),
        paper="arXiv:2602.06554",
    )
