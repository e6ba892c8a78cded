"""What `benchmarks.credit` scores: every rule of credit that can act on turns, on one record.

A rule returns advantages of rollouts ``[n, G]``, of turns ``[n, G, K]`` or of tokens
``[n, G, 2 K]``. Options are the defaults of the functions, which are those of the papers, unless
the name says otherwise.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

import jaxrl_llm as jr
from jaxrl_llm.advantages.hierarchy import ACTION, SUBGOAL

A = jr.advantages


class Record(NamedTuple):
    """Groups of episodes and what is known of them: arrays ``[n, G, ...]`` of K turns, T tokens.

    The critic is exact, ``values [.., K]``, ``token_values [.., T]``, or errs, ``noisy_values``.
    ``prefix_values`` and ``vine_values`` (Monte Carlo) count what was earned before.
    """

    rewards: Any
    turn_rewards: Any
    turn_where: Any
    state_ids: Any
    next_state_ids: Any
    action_ids: Any
    mask: Any
    turn_ids: Any
    node_ids: Any
    values: Any
    action_values: Any
    token_values: Any
    noisy_values: Any
    prefix_values: Any
    vine_values: Any
    following_values: Any
    token_advantages: Any
    turn_advantages: Any
    matches: Any
    old_logp: Any
    behavior_logp: Any


class Rule(NamedTuple):
    """A rule and what it reads.

    Attributes:
      name: Of the row.
      function: ``Record -> advantages``.
      data: "episodes" of independent rollouts, "trees", or "stale": those of an older policy.
      outcome: Whether the rule takes an outcome in [0, 1] and no rewards of turns.
    """

    name: str
    function: Callable[[Record], Any]
    data: Literal["episodes", "trees", "stale"] = "episodes"
    outcome: bool = False


def _on_turns(function: Callable, **options) -> Callable:
    """A rule of turn rewards alone."""
    return lambda r: function(r.turn_rewards, turn_where=r.turn_where, **options)


def _gae(source: str, lam: float) -> Callable:
    return lambda r: A.turn_gae(
        r.turn_rewards,
        getattr(r, source),
        r.mask,
        turn_ids=r.turn_ids,
        turn_where=r.turn_where,
        lam=lam,
    )


def _token_rewards(r: Record):
    return A.turn_end_rewards(r.turn_rewards, r.mask, turn_ids=r.turn_ids, turn_where=r.turn_where)


def _gigpo(**options) -> Callable:
    return lambda r: A.gigpo(
        r.rewards,
        turn_rewards=r.turn_rewards,
        state_ids=r.state_ids,
        turn_where=r.turn_where,
        **options,
    )


def _hgpo(r: Record):
    return A.hgpo(
        r.rewards, turn_rewards=r.turn_rewards, state_ids=r.state_ids, turn_where=r.turn_where
    )


def _salt(r: Record):
    return A.salt(
        A.grpo(r.rewards),
        state_ids=r.state_ids,
        action_ids=r.action_ids,
        next_state_ids=r.next_state_ids,
        turn_where=r.turn_where,
    )


def _eapo(r: Record):
    earned = A.geometric_rewards(r.rewards, turn_where=r.turn_where)
    return A.turn_grpo(earned, turn_where=r.turn_where, gamma=0.0)


def _ui_s1(r: Record):
    return A.ui_s1(r.turn_rewards, matches=r.matches, turn_where=r.turn_where)


def _gated(r: Record):
    """A step that the expert would take earns 0.1, in episodes that pass."""
    earned = A.gate_turn_rewards(
        r.rewards,
        step_rewards=0.1 * r.matches.astype(jnp.float32),
        turn_rewards=r.turn_rewards,
        turn_where=r.turn_where,
    )
    return A.mc_turns(earned, turn_where=r.turn_where)


def _igpo(r: Record):
    """The value, which is the chance of success, in place of the probability of the answer."""
    chance = jnp.concatenate([r.values[..., :1], r.following_values], axis=-1)
    gain = A.info_gain_rewards(
        r.rewards, answer_logp=jnp.log(jnp.maximum(chance, 1e-6)), turn_where=r.turn_where
    )
    return A.turn_grpo(gain, turn_where=r.turn_where)


def _oprl(r: Record):
    """A process reward model whose implicit reward is the true advantage."""
    return A.oprl(
        r.rewards,
        prm_logp=r.old_logp + r.token_advantages / 0.05,
        old_logp=r.old_logp,
        mask=r.mask,
        turn_ids=r.turn_ids,
        turn_where=r.turn_where,
    )


def _gae_token(r: Record):
    return A.gae(_token_rewards(r), r.token_values, r.mask, gamma=1.0, lam=0.95)


def _poad(**options) -> Callable:
    return lambda r: A.poad(
        _token_rewards(r), r.token_values, r.mask, turn_ids=r.turn_ids, **options
    )


def _pdppo(r: Record):
    return A.pdppo(
        r.turn_rewards, r.token_values, r.mask, turn_ids=r.turn_ids, turn_where=r.turn_where
    )


def _hae(r: Record):
    """The axis is the subgoal of a turn, the direction its action."""
    subgoal_read = r.token_values[..., 1::2]
    credit = A.hae(
        r.turn_rewards,
        subgoal_read,
        r.values,
        r.values,
        jnp.ones(jnp.shape(r.turn_where), bool),
        turn_where=r.turn_where,
    )
    first = jnp.arange(jnp.shape(r.mask)[-1]) % 2 == 0
    roles = jnp.broadcast_to(jnp.where(first, SUBGOAL, ACTION), jnp.shape(r.mask))
    return A.hae_tokens(credit, r.mask, turn_ids=r.turn_ids, roles=roles).advantages


def _two_steps(r: Record):
    returns = A.n_step_returns(r.turn_rewards, r.values, r.turn_where, n=2)
    return returns - r.values


def _vineppo(r: Record):
    return A.segment_advantages(r.rewards, r.vine_values, r.turn_where)


def _spo_chain(r: Record):
    """Two turns are a segment, and tokens of a probability under 0.9 train."""
    segments = A.segment_advantages(r.rewards, r.vine_values[..., ::2], r.turn_where[..., ::2])
    tokens = A.turns_to_tokens(segments, r.mask, turn_ids=r.turn_ids // 2)
    return A.whiten_uncertain(tokens, r.mask, old_logp=r.old_logp)


def _pav(r: Record):
    return A.pav(r.rewards, r.prefix_values, r.turn_where)


def _polychromic(r: Record):
    """Rollouts differ where their first actions do."""
    return A.polychromic(r.rewards, answer_ids=r.action_ids[..., 0])


def _portool(r: Record):
    return A.portool(
        r.rewards, node_ids=r.node_ids, mask=r.mask, turn_ids=r.turn_ids, turn_where=r.turn_where
    )


def _on_tree(function: Callable) -> Callable:
    return lambda r: function(r.rewards, r.node_ids, r.mask)


def _arpo(r: Record):
    return A.shared_prefix_advantages(A.grpo(r.rewards), r.node_ids, r.mask)


def _turn_logps(r: Record):
    turns = jnp.shape(r.turn_where)[-1]
    return tuple(
        A.turn_sums(x, r.mask, turn_ids=r.turn_ids, turns=turns)
        for x in (r.old_logp, r.behavior_logp)
    )


def _vtrace(**options) -> Callable:
    def rule(r: Record):
        old, behavior = _turn_logps(r)
        return A.vtrace(
            r.turn_rewards, r.values, r.turn_where, old_logp=old, behavior_logp=behavior, **options
        )

    return rule


def _retrace(r: Record):
    """The target of the action's value minus the value, times the ratio of the turn."""
    old, behavior = _turn_logps(r)
    target = A.retrace_returns(
        r.turn_rewards,
        r.values,
        r.turn_where,
        action_values=r.action_values,
        old_logp=old,
        behavior_logp=behavior,
    )
    return jnp.exp(old - behavior) * (target - r.values)


def _corrected(r: Record):
    old, behavior = _turn_logps(r)
    return A.corrected_td_errors(
        r.turn_rewards, r.values, r.turn_where, old_logp=old, behavior_logp=behavior
    )


def _weighted(r: Record):
    """Leave one out, times the ratio of the episode."""
    old, behavior = _turn_logps(r)
    return jnp.exp(jnp.sum(old - behavior, axis=-1)) * A.rloo(r.rewards)


RULES = (
    Rule("REINFORCE", lambda r: r.rewards),
    Rule("rloo", lambda r: A.rloo(r.rewards)),
    Rule("dr_grpo", lambda r: A.dr_grpo(r.rewards)),
    Rule("grpo", lambda r: A.grpo(r.rewards)),
    Rule("mc_turns, no baseline", _on_turns(A.mc_turns, baseline="none")),
    Rule("mc_turns (mc_return)", _on_turns(A.mc_turns)),
    Rule("trloo", _on_turns(A.trloo)),
    Rule("turn_grpo", _on_turns(A.turn_grpo)),
    Rule("gigpo", _gigpo()),
    Rule("gigpo, gamma 1", _gigpo(gamma=1.0)),
    Rule("gigpo, gamma 1, scaled", _gigpo(gamma=1.0, scale="group")),
    Rule("hgpo", _hgpo),
    Rule("salt", _salt),
    Rule("eapo", _eapo),
    Rule("ui_s1", _ui_s1),
    Rule("gated_reward", _gated),
    Rule("igpo", _igpo, outcome=True),
    Rule("oprl, exact process rewards", _oprl),
    Rule("polychromic", _polychromic, outcome=True),
    Rule("turn_gae, exact, lam 1", _gae("token_values", 1.0)),
    Rule("turn_gae, exact, lam 0.95", _gae("token_values", 0.95)),
    Rule("turn_gae, exact, lam 0", _gae("token_values", 0.0)),
    Rule("turn_gae, noisy, lam 1", _gae("noisy_values", 1.0)),
    Rule("turn_gae, noisy, lam 0.95", _gae("noisy_values", 0.95)),
    Rule("turn_gae, noisy, lam 0", _gae("noisy_values", 0.0)),
    Rule("gae of tokens, exact, lam 0.95", _gae_token),
    Rule("n_step_returns, exact, n 2", _two_steps),
    Rule("poad, exact", _poad()),
    Rule("poad, exact, gamma 1", _poad(gamma=1.0)),
    Rule("pdppo, exact", _pdppo),
    Rule("hae, exact", _hae),
    Rule("vineppo, 9 rollouts", _vineppo),
    Rule("spo_chain, 9 rollouts", _spo_chain),
    Rule("pav, exact", _pav, outcome=True),
    Rule("grpo on trees", lambda r: A.grpo(r.rewards), "trees"),
    Rule("shared_prefix_advantages (arpo)", _arpo, "trees"),
    Rule("branch_advantages", _on_tree(A.branch_advantages), "trees"),
    Rule("spo_tree", _on_tree(A.spo_tree), "trees"),
    Rule("portool", _portool, "trees"),
    Rule("rloo, stale", lambda r: A.rloo(r.rewards), "stale"),
    Rule("rloo, stale, ratio of the episode", _weighted, "stale"),
    Rule("turn_gae, stale, exact, lam 1", _gae("token_values", 1.0), "stale"),
    Rule("vtrace, stale, exact", _vtrace(), "stale"),
    Rule(
        "vtrace, stale, exact, no bounds",
        _vtrace(clip_rho=None, clip_trace=None, clip_advantage=None),
        "stale",
    ),
    Rule("retrace, stale, exact", _retrace, "stale"),
    Rule("corrected_td_errors, stale, exact", _corrected, "stale"),
)
