"""PPO with a critic for rollouts of several turns.

The batch has ``turn_ids``, ``turn_rewards`` and ``turn_where``; the rewards of the rollouts are not
read. The tokens of an environment are skipped: they are masked, their values are not read and they
cost no discount.

Shared options:

    gamma: Discount, in [0, 1]; per token, or per turn if the estimate is over turns.
    lam: How much the estimate relies on rewards over values, in [0, 1].
    value_eps: Largest change of a value in one step before clipping.
    whiten: Whether advantages are shifted and scaled over the tokens of the batch.
"""

from collections.abc import Callable
from typing import Literal

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.advantages.turn_critics import Combine
from jaxrl_llm.core import bind, chain, checks, connect, pipe, stateless
from jaxrl_llm.recipes.parts.critic import Critic, means_of_heads
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.presets.critics import actor_critic, whitened
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["gae_token", "gae_turn", "hiper_hae", "pdppo", "poad"]


def _of_turns(function: Callable) -> Callable:
    """The function with the rewards of turns in the place of those of rollouts."""
    return connect(function, turn_rewards="turn_rewards", turn_where="turn_where")


def _ppo_of_turns(
    *,
    name: str,
    paper: str,
    credit: Callable,
    returns: Callable,
    trained: Callable,
    whiten: bool,
    value_eps: float,
    eps_low: float,
    eps_high: float,
) -> Recipe:
    """PPO of turns; its critic learns ``returns`` at the tokens of ``trained``."""
    checks.check_positive(name, value_eps=value_eps)
    return from_base(
        name=name,
        advantage=chain(
            stateless(_of_turns(credit)),
            stateless(advantages.turns_to_tokens),
            *whitened(whiten),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        critic=Critic(
            returns=_of_turns(returns),
            loss=bind(surrogates.value_loss, eps=value_eps),
            weights=pipe(trained, aggregate.token_mean),
        ),
        paper=paper,
        group_relative=False,
    )


def gae_token(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl_coef: float = 0.0,
    whiten: bool = True,
    value_eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Advantages of tokens, with the reward of each turn on its last token.

        R[t] = r_k at the last token of turn k, minus kl_coef (old_logp - ref_logp) at every token
        A = gae(R, V; gamma, lam), whitened;   returns = gae + V

    Args:
      kl_coef: Penalty per nat of divergence from the reference, in units of reward; 0 disables it
        and the reference model.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.gae_token().required_fields)
      ['old_values', 'turn_ids', 'turn_rewards', 'turn_where', 'values']

    References:
      Schulman et al., GAE (arXiv:1506.02438), skipping observations as in the released code of
      arXiv:2510.01132, whose penalty is 0.01.
    """
    checks.check_non_negative("gae_token", kl_coef=kl_coef)
    token_rewards = _of_turns(advantages.turn_end_rewards)
    if kl_coef:
        penalized = bind(advantages.kl_shaped_rewards, kl_coef=kl_coef)
        token_rewards = pipe(token_rewards, penalized)
    return actor_critic(
        name="gae_token",
        paper="arXiv:1506.02438",
        token_rewards=token_rewards,
        credit=bind(advantages.gae, gamma=gamma, lam=lam),
        returns=bind(advantages.gae_returns, gamma=gamma, lam=lam),
        after=whitened(whiten),
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
    )


def gae_turn(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    value_eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Advantages of turns; the critic is read and trained at the first token of each.

        A_k = turn_gae(r, V; gamma, lam), for every token of the turn, whitened
        critic: mean over turns of its clipped squared error from A_k + V_k

    References:
      Schulman et al., GAE (arXiv:1506.02438), with a turn as a step. One ratio per token.
    """
    return _ppo_of_turns(
        name="gae_turn",
        paper="arXiv:1506.02438",
        credit=bind(advantages.turn_gae, gamma=gamma, lam=lam),
        returns=bind(advantages.turn_gae_returns, gamma=gamma, lam=lam),
        trained=advantages.turn_starts,
        whiten=whiten,
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
    )


def poad(
    *,
    gamma: float = 0.95,
    intra_gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    value_eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    entropy_coef: float = 0.01,
    max_kl: float | None = 0.02,
) -> Recipe:
    """Advantages of tokens with a discount between turns and none within one.

        A = gae(R, V) with the discount gamma at the last token of a turn, intra_gamma elsewhere
        no update of the policy on a minibatch whose KL(old || policy) is above max_kl

    Args:
      intra_gamma: Discount within a turn; ``gamma`` gives plain GAE (the paper's NTPO).
      entropy_coef: Weight of an entropy bonus; 0 disables it.
      max_kl: Largest divergence, in nats per token, at which the policy is updated; the critic
        always is. None for no bound.

    References:
      POAD (arXiv:2405.15821), the released code, with four minibatches. That code standardizes
      over the nonzero advantages of each minibatch.
    """
    checks.check_non_negative("poad", entropy_coef=entropy_coef)
    checks.check_positive("poad", finite=True, max_kl=max_kl)
    gate = bind(regularizers.kl_gate, max_kl=max_kl)
    recipe = actor_critic(
        name="poad",
        paper="arXiv:2405.15821",
        token_rewards=_of_turns(advantages.turn_end_rewards),
        credit=bind(advantages.poad, gamma=gamma, intra_gamma=intra_gamma, lam=lam),
        returns=bind(advantages.poad_returns, gamma=gamma, intra_gamma=intra_gamma, lam=lam),
        after=whitened(whiten),
        computed=() if max_kl is None else (Computed("update_scale", gate, "update"),),
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
    )
    return recipe.replace(
        regularizers=nonzero_term(regularizers.entropy_bonus, coef=entropy_coef), minibatches=4
    )


def pdppo(
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    combine: Combine = "max",
    whiten: bool = False,
    value_eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Advantages of turns from two values: before the action, and before the environment responds.

        A_k = max(turn_gae(r, V)_k, r_k + W_k - V_k),   V at the first and W at the last token
        critic: at the first token A + V of turn_gae, at the last gamma times that of the next turn

    Args:
      combine: "max" of the two advantages, their "mean", or "before" for only the first.

    References:
      PDPPO (arXiv:2504.05150), ABSTRACT; the maximum of both is from memory of the paper. Here one
      critic gives both values; there they are separate networks.
    """
    return _ppo_of_turns(
        name="pdppo",
        paper="arXiv:2504.05150",
        credit=bind(advantages.pdppo, gamma=gamma, lam=lam, combine=combine),
        returns=bind(advantages.pdppo_returns, gamma=gamma, lam=lam),
        trained=advantages.turn_borders,
        whiten=whiten,
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
    )


def hiper_hae(
    *,
    gamma: float = 1.0,
    action_lam: float = 1.0,
    subgoal_lam: float = 0.95,
    keep_penalty: float = 0.3,
    per: Literal["rollout", "turn"] = "rollout",
    change_penalty: float = 0.3,
    normalize: bool = True,
    kl_coef: float = 0.01,
    value_eps: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Hierarchical advantages of turns that write a switch, a subgoal and an action.

        action tokens: GAE within a subgoal;  subgoal tokens: GAE across subgoals
        switch tokens: return within the subgoal minus its value;  all others do not train
        three heads of one critic, each read and trained at one token of a turn

    The batch holds ``token_roles``, ``switches``, ``subgoal_ids`` and ``truncated``, which the loop
    parses from the texts of turns (``environments.turn_parts``); ``environments.Subgoals`` asks the
    policy for them. See ``advantages.hiper``, and ``advantages.hiper_rewards`` for the penalties.

    Args:
      action_lam, subgoal_lam: lam within a subgoal and across subgoals.
      keep_penalty, per, change_penalty: Penalties of turns that do not switch, see
        ``hiper_rewards``.
      normalize: Whether each of the three kinds of advantages is shifted and scaled.

    References:
      HiPER (arXiv:2602.16165), and the settings of the released scripts. There a turn is a separate
      row with a history of a few turns, and an invalid action costs 0.1, which here is part of the
      environment's reward; its critic's error has no factor 1/2. A minibatch there is 256 rows, so
      128 episodes have up to 25 updates; here there is one, in which the clip has no effect, unless
      a config sets ``minibatches``.
    """
    checks.check_positive("hiper_hae", value_eps=value_eps)
    checks.check_non_negative("hiper_hae", kl_coef=kl_coef)
    rewards = _of_turns(
        bind(
            advantages.hiper_rewards,
            keep_penalty=keep_penalty,
            per=per,
            change_penalty=change_penalty,
        )
    )
    credit, returns = (
        connect(
            bind(function, gamma=gamma, action_lam=action_lam, subgoal_lam=subgoal_lam),
            truncated="truncated",
        )
        for function in (bind(advantages.hiper, normalize=normalize), advantages.hiper_returns)
    )
    return from_base(
        name="hiper_hae",
        advantage=chain(stateless(rewards), stateless(connect(credit, truncated="truncated"))),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=pipe(advantages.hiper_tokens, aggregate.token_mean),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        critic=Critic(
            returns=pipe(rewards, returns),
            loss=bind(surrogates.value_loss, eps=value_eps),
            heads=3,
            weights=pipe(advantages.hiper_places, means_of_heads),
        ),
        paper="arXiv:2602.16165",
        group_relative=False,
    )
