"""Methods of episodes with several turns: credit by turn, state and step.

The batch holds ``turn_rewards``, ``turn_where`` and ``turn_ids``, as an environment's episodes have
them; the rewards of the rollouts are the sums of the turn rewards. Shared options:

    gamma: Discount per turn, in [0, 1].
    scale: "group" divides by a standard deviation, "none" does not.
"""

from typing import Literal

from jaxrl_llm import advantages, curation, regularizers, surrogates
from jaxrl_llm.advantages.turn_rewards import turn_totals
from jaxrl_llm.core import bind, chain, checks, connect, pipe, stateless
from jaxrl_llm.curation.teachers import BEFORE_ANSWER
from jaxrl_llm.recipes.parts.critic import Critic
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.presets.reinforce_family import penalized
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import ANSWER_TEXTS, Computed

__all__ = [
    "eapo",
    "gated_reward",
    "gigpo",
    "hgpo",
    "igpo",
    "mc_return",
    "mua_rl",
    "practitioner_recipe",
    "salt",
    "ui_s1",
]


def mc_return(
    *,
    gamma: float = 1.0,
    baseline: Literal["turn", "group", "none"] = "turn",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Monte-Carlo returns of turns minus a baseline.

        A[i, k] = sum over j >= k of gamma^(j - k) r[i, j] - b

    Args:
      baseline: b: the mean return at the same "turn", over all turns of the "group", or "none".

    References:
      Sutton and Barto, Reinforcement Learning, chapter 13.4. With a critic for a baseline it is
      ``gae`` with lam 1.
    """
    credit = bind(advantages.mc_turns, gamma=gamma, baseline=baseline)
    return from_base(
        name="mc_return",
        advantage=chain(
            stateless(connect(credit, rewards="turn_rewards", turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
    )


def gigpo(
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: Literal["group", "none"] = "none",
    episode: Literal["rollouts", "turns"] = "rollouts",
    kl_coef: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """GRPO over episodes, plus the same among the turns of a group that start from the same state.

        A[i, k] = episode_i + omega (R[i, k] - mean of R over the turns from the same state)

    The batch holds ``state_ids``. See ``advantages.gigpo``.

    Args:
      omega: Weight of the step.
      episode: Unit of the mean of the episode: "rollouts" (the paper) or "turns" (the code).

    References:
      Feng et al., GiGPO (arXiv:2505.10978), and the settings of the released scripts. There a step
      is a separate row with a history of a few steps, and an invalid action costs 0.1, which here
      is part of the environment's reward. A minibatch there is a number of rows, so long episodes
      have up to some thirty updates per batch; here there is one, in which the clip has no effect,
      unless a config sets ``minibatches``.
    """
    credit = bind(advantages.gigpo, gamma=gamma, omega=omega, scale=scale, episode=episode)
    return _with_states("gigpo", credit, kl_coef, eps_low, eps_high, "arXiv:2505.10978")


def hgpo(
    *,
    history: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["group", "none"] = "group",
    episode: Literal["turns", "rollouts"] | None = None,
    kl_coef: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Returns among turns from the same state with the same history, averaged over history lengths.

    The batch holds ``state_ids``. See ``advantages.hgpo``.

    Args:
      history: Largest number of earlier states that are compared.
      alpha: How much more a longer history counts.
      episode: Adds the advantage of the episode as another level; None for none.

    References:
      HGPO (arXiv:2602.22817), the recipe in verl-agent. There the agent sees only the last
      ``history`` steps; here it sees all of them. Rows, updates per batch and the penalty of an
      invalid action differ as in :func:`gigpo`.
    """
    credit = bind(
        advantages.hgpo, history=history, alpha=alpha, gamma=gamma, scale=scale, episode=episode
    )
    return _with_states("hgpo", credit, kl_coef, eps_low, eps_high, "arXiv:2602.22817")


def salt(
    *,
    base: Literal["grpo", "rloo"] = "grpo",
    history: int = 1,
    include_next_state: bool = True,
    count: Literal["rollout", "turn"] = "rollout",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The advantages of a group's rollouts, averaged at the turns that rollouts share.

    The batch holds ``state_ids``, ``next_state_ids`` and ``action_ids``. See ``advantages.salt``.

    Args:
      base: The advantage of a rollout.
      history: Number of earlier turns that must also be shared.
      include_next_state: Whether a shared turn must lead to the same state.
      count: Unit of the mean: each "rollout" once, or each "turn".

    References:
      SALT (arXiv:2510.20022), ABSTRACT reading; see ``advantages.salt``.
    """
    checks.check_option("salt", "base", base, ("grpo", "rloo"))
    shared = bind(
        advantages.salt, history=history, include_next_state=include_next_state, count=count
    )
    return from_base(
        name="salt",
        advantage=chain(
            stateless(advantages.grpo if base == "grpo" else advantages.rloo),
            stateless(connect(shared, turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2510.20022",
    )


def ui_s1(
    *,
    gamma: float = 0.5,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    scale: Literal["group", "none"] = "group",
    episode: Literal["turns", "rollouts"] = "turns",
    threshold: float | None = 0.3,
    kl_coef: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Training along recorded expert episodes: returns end where the policy deviates.

    The batch holds ``expert_match``, whether a turn matched the expert. See
    ``advantages.ui_s1``; the environment continues from the expert's action after a deviation
    (``curation.patch_decision``).

    Args:
      step_weight: Weight of the returns, compared turn by turn.
      episode_weight: Weight of the episode term.
      episode: What the episode term compares: rewards of "turns" (the code) or sums of "rollouts".
      threshold: A group whose rewards deviate less than this is replaced by another, up to 10 times
        the batch; None for never.

    References:
      UI-S1 (arXiv:2509.11543), and the settings of the released script with its four minibatches,
      whose threshold is on the returns of first steps; here it is on the rewards of rollouts.
    """
    credit = bind(
        advantages.ui_s1,
        gamma=gamma,
        step_weight=step_weight,
        episode_weight=episode_weight,
        scale=scale,
        episode=episode,
    )
    collector = None
    if threshold is not None:
        collector = curation.refill(bind(curation.spread_groups, threshold=threshold))
    credit = connect(
        credit, rewards="turn_rewards", turn_where="turn_where", matches="expert_match"
    )
    return from_base(
        name="ui_s1",
        advantage=chain(stateless(credit), stateless(advantages.turns_to_tokens)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        collector=collector,
        minibatches=4,
        paper="arXiv:2509.11543",
    )


def eapo(
    *,
    gamma: float = 0.99,
    multiple: int | None = None,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Recipe:
    """The outcome at every turn, discounted from the end, compared over all turns of the group.

        r[i, k] = gamma^(turns after k) R_i;   A = (r - mean) / (std + eps) over all turns
        loss = mean over turns of the clipped loss with one ratio per turn

    Turns are weighted once, over the full batch. If ``multiple`` drops some, or minibatches divide
    the batch, the loss is that mean times a factor of the tokens that remain.

    Args:
      gamma: Discount per turn, in [0, 1].
      multiple: Turns are dropped at random down to a multiple of this; None to keep all.

    References:
      EAPO, IterResearch (arXiv:2511.07327), ABSTRACT reading. The clip is that of GSPO. There turns
      are rows of a batch that is divided over devices, which requires a multiple; here rollouts are
      the rows.
    """
    selection = None
    if multiple is not None:
        checks.check_count("eapo", multiple=multiple)
        selection = bind(curation.downsample_turns, multiple=multiple)
    return from_base(
        name="eapo",
        advantage=chain(
            stateless(advantages.geometric_rewards, gamma=gamma),
            stateless(connect(bind(advantages.turn_grpo, gamma=0.0), turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
            stateless(advantages.equal_turns),
        ),
        surrogate=bind(surrogates.gspo_turns, eps_low=eps_low, eps_high=eps_high),
        selection=selection,
        paper="arXiv:2511.07327",
    )


def gated_reward(
    *,
    threshold: float = 0.0,
    weight: float = 1.0,
    gamma: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Step rewards count only in rollouts whose outcome passed a threshold; then turn returns.

        r[i, k] = turn_rewards[i, k] + weight 1[R_i > threshold] step_rewards[i, k]
        A[i, k] = return from k on - its mean over the rollouts of the group

    The batch holds ``step_rewards``, which the environment reports for each turn under that name.

    Args:
      threshold: Outcomes up to this value do not pass.
      weight: Weight of the step rewards.

    References:
      G-RA (arXiv:2508.10548), PAPER; returns of turns after the gate are ours.
    """
    gate = bind(advantages.gate_turn_rewards, threshold=threshold, weight=weight)
    credit = bind(advantages.mc_turns, gamma=gamma)
    return from_base(
        name="gated_reward",
        advantage=chain(
            stateless(connect(gate, turn_rewards="turn_rewards", turn_where="turn_where")),
            stateless(connect(credit, turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2508.10548",
    )


def practitioner_recipe(
    *,
    estimator: Literal["rloo", "grpo", "ppo"] = "rloo",
    dense: bool = True,
    max_total: float | None = None,
    kl_coef: float | None = None,
    lam: float | None = None,
    value_eps: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Normalized rewards at the ends of turns, and a KL penalty in the reward.

        reward of the last token of turn k = turn_rewards_k / N, see advantages.place_turn_rewards
        reward of a token, minus kl_coef log(old / reference)
        rloo, grpo: the advantage of the sum over tokens;   ppo: gae over tokens, with a critic

    A rollout that a correction rejects keeps its reward in that sum.

    With ``dense`` the batch holds ``won``, the turn at which an episode was won.

    Args:
      estimator: "rloo", which is unbiased for dense rewards, "grpo" or "ppo".
      dense: Whether turns are rewarded; else the last turn gets the sum.
      max_total: How many rewards an episode can earn; only with ``dense``. None means 1.
      kl_coef: Penalty per nat. None means 0.01, and 0.001 with "rloo"; 0 disables it.
      lam: How much gae relies on rewards over values; only with "ppo". None means 1.
      value_eps: Largest change of a value in one step before clipping; only with "ppo". None means
        0.5.

    References:
      A Practitioner's Guide to multi-turn agentic RL (arXiv:2510.01132), and the settings of the
      released recipes. A short supervised warm-up and a curriculum are up to the run.
    """
    checks.check_option("practitioner_recipe", "estimator", estimator, ("rloo", "grpo", "ppo"))
    if estimator != "ppo":
        because = f"with estimator={estimator!r}"
        checks.check_no_effect("practitioner_recipe", because, lam=lam, value_eps=value_eps)
    rewards = turn_totals if estimator != "ppo" else advantages.place_turn_rewards
    if dense:
        rewards = bind(rewards, max_total=max_total)
        rewards = connect(rewards, turn_rewards="turn_rewards", turn_where="turn_where", won="won")
    else:
        checks.check_no_effect("practitioner_recipe", "without dense", max_total=max_total)
        rewards = bind(rewards, mode="single", turn_rewards=None, won=None)
    coef = (0.001 if estimator == "rloo" else 0.01) if kl_coef is None else kl_coef
    surrogate = bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high)
    if estimator != "ppo":
        credit = advantages.rloo if estimator == "rloo" else advantages.grpo
        penalty = (stateless(penalized, kl_coef=coef),) if coef else ()
        return from_base(
            name="practitioner_recipe",
            advantage=chain(stateless(rewards), *penalty, stateless(credit)),
            surrogate=surrogate,
            paper="arXiv:2510.01132",
        )
    token_rewards = rewards
    if coef:
        token_rewards = pipe(rewards, bind(advantages.kl_shaped_rewards, kl_coef=coef))
    value_eps, lam = 0.5 if value_eps is None else value_eps, 1.0 if lam is None else lam
    checks.check_positive("practitioner_recipe", value_eps=value_eps)
    return from_base(
        name="practitioner_recipe",
        advantage=chain(
            stateless(token_rewards),
            stateless(advantages.gae, lam=lam),
            stateless(advantages.whiten),
        ),
        surrogate=surrogate,
        critic=Critic(
            returns=pipe(token_rewards, bind(advantages.gae_returns, lam=lam)),
            loss=bind(surrogates.value_loss, eps=value_eps),
        ),
        paper="arXiv:2510.01132",
        group_relative=False,
    )


def mua_rl(*, kl_coef: float = 0.001, eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """GRPO on episodes with a simulated user, training only the agent's tokens.

    An episode's mask is that of ``curation.role_loss_mask``: tool calls, messages and the ends of
    turns train; tokens of the user, the tools and headers do not. The reward is 1 if the final
    state of the environment and the requested information are right, else 0.

    References:
      MUA-RL (arXiv:2508.18669), the mask and settings of the released code; the reward is that of
      the abstract.
    """
    return from_base(
        name="mua_rl",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        paper="arXiv:2508.18669",
    )


def igpo(
    *,
    gamma: float = 1.0,
    before: str = BEFORE_ANSWER,
    kl_coef: float = 0.001,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rewards turns by the increase in the answer's probability, the last turn by the outcome.

        r[i, k] = P_k - P_(k-1), the last R_i;   a = (r - mean) / (std + eps) over all turns
        A[i, k] = sum over j >= k of gamma^(j - k) a[i, j]

    P_k is the probability of the prompt's ``answer`` under the policy at the start of the step,
    after the response up to the beginning of turn k + 1, including the tokens of the environment.

    Args:
      before: Text between the response and the answer.

    References:
      IGPO (arXiv:2510.14967): the rewards of the released code, the advantage of the paper; see
      ``advantages.turn_grpo``. The outcome there is the F1 of words.
    """
    return from_base(
        name="igpo",
        advantage=chain(
            stateless(connect(advantages.info_gain_rewards, turn_where="turn_where")),
            stateless(connect(bind(advantages.turn_grpo, gamma=gamma), turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=(Computed(ANSWER_TEXTS, bind(curation.answer_texts, before=before), "responses"),),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        paper="arXiv:2510.14967",
    )


def _with_states(name, credit, kl_coef, eps_low, eps_high, paper) -> Recipe:
    """A recipe whose advantage compares turns by their states."""
    return from_base(
        name=name,
        advantage=chain(
            stateless(connect(credit, turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        paper=paper,
    )
