"""REINFORCE with a baseline: leave-one-out, greedy, per batch, per turn.

A token loss of ``-A logp`` has no ratio and no clip, so every batch has one update.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, preferences, regularizers, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.parts.process_reward import ProcessRewardModel
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, refilled
from jaxrl_llm.recipes.recipe import Recipe

__all__ = [
    "gpg",
    "prime",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "trloo",
    "verpo",
]


def rloo(*, kl_coef: float = 0.0) -> Recipe:
    """REINFORCE leave-one-out: the unbiased gradient of the expected reward.

        R_i = r_i - kl_coef (sum over tokens of log(old / reference))
        A_i = R_i - mean of the other R of the group
        loss = mean over sequences of the sum over tokens of -A logp

    Args:
      kl_coef: Penalty in the reward per nat of divergence from the reference (k1). 0 disables it
        and the reference model.

    References:
      Ahmadian et al., Back to Basics (arXiv:2402.14740), whose reward has the penalty; by default
      there is none here, as in verl. TRL's RLOOTrainer has a weight of 0.05, clips the ratio of
      sequences and may normalize the advantages. verl's ``rloo`` is only the advantage and trains
      with the clipped ratio and the configured aggregation.
    """
    checks.check_non_negative("rloo", kl_coef=kl_coef)
    advantage = stateless(advantages.rloo)
    if kl_coef:
        advantage = chain(stateless(penalized, kl_coef=kl_coef), advantage)
    return from_base(
        name="rloo",
        advantage=advantage,
        surrogate=surrogates.reinforce,
        weights=aggregate.sequence_sum,
        paper="arXiv:2402.14740",
    )


def penalized(
    rewards: Array, mask: Array, *, old_logp: Array, ref_logp: Array, kl_coef: float
) -> Array:
    """Rewards minus the divergence of each whole response, which an empty one does not have."""
    options = {"old_logp": old_logp, "ref_logp": ref_logp, "kl_coef": kl_coef}
    of_tokens = advantages.kl_shaped_rewards(jnp.zeros_like(rewards), mask, **options)
    return rewards + of_tokens.sum(-1)


def prime(
    *,
    beta: float = 0.05,
    alpha: float = 1.0,
    normalize: bool = True,
    reference: Literal["initial", "policy"] = "initial",
    dynamic_sampling: bool = True,
    entropy_coef: float = 1e-3,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Leave-one-out of the outcome, and of process rewards that a second model learns from it.

        q[t] = beta (prm_logp - ref_logp), 0 at the last token
        a[t] = rloo(r) + alpha sum over s >= t of (q[s] against the means of the group)
        A = (a - mean) / std                     over all tokens of the batch

    ``prm_logp`` are log-probabilities under a process reward model, which starts as a copy of the
    policy and first takes a step on ``preferences.outcome_cross_entropy`` of the same rollouts;
    ``config.critic`` is its optimizer. Rewards are outcomes from 0 to 1.

    Args:
      beta: Scale of the process reward, above 0; without effect on the advantage if ``normalize``.
      alpha: Weight of the process rewards, not negative.
      normalize: Whether process rewards are divided by the largest return of the batch.
      reference: "initial" for the model that the run starts with, or "policy" for the policy that
        sampled, without another model in memory.

    References:
      Cui et al., PRIME (arXiv:2502.01456), and the authors' recipe for verl: beta 0.05, equal
      weights of both rewards, groups of 4. It samples four times as many prompts as it trains on
      and prefers those with an accuracy from 0.2 to 0.8 whose responses all ended; here each group
      whose outcomes agree is replaced, the same accuracies for groups of up to 5. Its entropy bonus
      has the same weight. Its reward model's loss is this one by default; those that compare
      responses are not here. There the reward model has twice the policy's learning rate, 1e-6,
      and a bound of 10 on the norm of its gradient.
    """
    checks.check_option("prime", "reference", reference, ("initial", "policy"))
    credit = bind(advantages.prime, beta=beta, alpha=alpha, normalize=normalize)
    loss = bind(preferences.outcome_cross_entropy, beta=beta)
    if reference == "policy":
        credit, loss = connect(credit, ref_logp="old_logp"), bind(loss, ref_logp=None)
    recipe = from_base(
        name="prime",
        prm=ProcessRewardModel(loss=loss),
        advantage=chain(stateless(credit), stateless(advantages.whiten)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.entropy_bonus, coef=entropy_coef),
        paper="arXiv:2502.01456",
    )
    return refilled(recipe, dynamic_sampling)


def remax(*, kl_coef: float = 0.05) -> Recipe:
    """Policy gradient with the reward of the greedy response to the same prompt as the baseline.

        A[t] = r - r_greedy - kl_coef (sum over s >= t of log(old / reference))
        loss = mean over sequences of the sum over tokens of -A logp

    One sampled response per prompt is enough; a run also samples and grades the greedy response,
    for ``greedy_rewards``, and does not train on it. In an environment this is a greedy episode
    that begins as those of the group do.

    Args:
      kl_coef: Penalty in the reward per nat of divergence from the reference (k1). 0 disables it
        and the reference model.

    References:
      Li et al., ReMax (arXiv:2310.10505), with the penalty of the released scripts. In the released
      code a token gets its own divergence alone, ``r - r_greedy`` is within 5 of 0 and discounted
      by 0.99 per token, and the loss is a mean over tokens. verl's ``remax`` is only the advantage
      and trains with the clipped ratio and the configured aggregation.
    """
    checks.check_non_negative("remax", kl_coef=kl_coef)
    advantage = stateless(advantages.remax)
    if kl_coef:
        shaped = stateless(advantages.kl_shaped_rewards, kl_coef=kl_coef)
        advantage = chain(shaped, stateless(advantages.remax_token))
    return from_base(
        name="remax",
        advantage=advantage,
        surrogate=surrogates.reinforce,
        weights=aggregate.sequence_sum,
        paper="arXiv:2310.10505",
        group_relative=False,
    )


def gpg(
    *,
    scale: Literal["none", "group"] = "none",
    mode: Literal["informative", "nonzero_reward"] = "informative",
    dynamic_sampling: bool = True,
) -> Recipe:
    """Group policy gradient: no ratio, no clip, no KL term, no critic.

        A = alpha (r - mean_group r)             alpha = 1 / share of groups with a spread
        loss = mean over tokens of -A logp

    Args:
      scale: "group" also divides by the deviation of the group.
      mode: What alpha counts, see :func:`jaxrl_llm.advantages.gpg`; "nonzero_reward" is verl's.

    References:
      Chu et al., GPG (arXiv:2504.02546), whose released loop continues to sample until enough
      groups are informative.
    """
    recipe = from_base(
        name="gpg",
        advantage=stateless(advantages.gpg, scale=scale, mode=mode),
        surrogate=surrogates.reinforce,
        paper="arXiv:2504.02546",
    )
    return refilled(recipe, dynamic_sampling)


def reinforce_pp(
    *, kl_coef: float = 0.0, gamma: float = 1.0, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """Token returns that include the KL penalty, whitened over all tokens of the batch.

        G[t] = sum over s >= t of gamma^(s - t) (1[s is last] r - kl_coef log(old[s] / ref[s]))
        A = (G - mean) / std                     over all tokens of the batch

    One response per prompt is enough.

    Args:
      kl_coef: Penalty in the reward per nat of divergence from the reference. 0 disables it and the
        reference model.
      gamma: Discount per token, in [0, 1].

    Example:
      >>> import jaxrl_llm as jr
      >>> [sorted(jr.recipes.reinforce_pp(kl_coef=c).required_fields) for c in (0.01, 0.0)]
      [['old_logp', 'ref_logp'], []]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262). The defaults of the penalty and the clip are ours;
      verl trains its ``reinforce_plus_plus`` advantage with the configured loss.
    """
    advantage = bind(advantages.reinforce_pp, kl_coef=kl_coef, gamma=gamma)
    if kl_coef == 0:
        advantage = bind(advantage, old_logp=None, ref_logp=None)
    return from_base(
        name="reinforce_pp",
        advantage=stateless(advantage),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2501.03262",
        group_relative=False,
    )


def reinforce_pp_baseline(
    *,
    norm: Literal["token", "sequence"] = "token",
    kl_coef: float = 0.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rewards minus their group mean, scaled by one deviation for the full batch.

        a = r - mean_group r;  A = (a - mean a) / std a

    A group of nearly equal rewards is not divided by its tiny deviation; with ``norm="token"`` it
    gets a small advantage where lengths differ.

    Args:
      norm: Unit of mean and deviation: all tokens, or all rollouts.
      kl_coef: Weight of the KL to the reference model (k2), which is added to the token loss; 0
        disables both.

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262). ``norm="token"`` is verl's
      ``reinforce_plus_plus_baseline``, "sequence" the form of ProRL and BroRL. OpenRLHF's example
      script adds the KL with a weight of 1e-3; here the default is none, as in verl.
    """
    checks.check_non_negative("reinforce_pp_baseline", kl_coef=kl_coef)
    return from_base(
        name="reinforce_pp_baseline",
        advantage=stateless(advantages.reinforce_pp_baseline, norm=norm),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef, estimator="k2"),
        paper="arXiv:2501.03262",
    )


def trloo(
    *,
    gamma: float = 1.0,
    singleton: Literal["zero", "raw"] = "raw",
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> Recipe:
    """Turn-level leave-one-out, for rollouts with a reward per turn.

        R[i, k] = sum over turns j >= k of gamma^(j - k) r[i, j]
        A[i, t] = R[i, k] - mean over the other rollouts of R[., k]     k the turn of token t
        loss = mean over sequences of the sum over tokens of token loss

    The rewards are the batch's ``turn_rewards``, with ``turn_ids`` and ``turn_where``; those of the
    rollouts are not read.

    Args:
      gamma: Discount for a turn, in [0, 1].
      singleton: What the only rollout that has a turn gets: "raw" for its return, "zero" for 0.

    References:
      Dr. Kernel (arXiv:2602.05885), and the settings of the released script. There a turn is a row
      of the batch, so the mean is over turns; the script also rejects sequences and tokens by their
      mismatch, which is a correction here.
    """
    turns = bind(advantages.trloo, gamma=gamma, singleton=singleton)
    return from_base(
        name="trloo",
        advantage=chain(
            stateless(connect(turns, rewards="turn_rewards", turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.sequence_sum,
        paper="arXiv:2602.05885",
    )


def verpo(
    *,
    sigma: float = 0.1,
    difficulty: float = 2.0,
    gamma: float | None = None,
    turn_weight: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The outcome of a rollout plus the weighted unit tests of each of its attempts.

        A[i, k] = outcome_i gamma^turns_i - mean, plus
                  turn_weight (weighted tests passed at turn k - mean)
        loss = mean over sequences of the mean over tokens of token loss

    A test weighs more if fewer attempts pass it and fewer tests are similar to it
    (``advantages.density_weights``). The batch holds ``test_passes`` and ``test_where``,
    ``turn_ids`` and ``turn_where``.

    Args:
      sigma: Width within which pass rates count as similar.
      difficulty: How fast a test's weight decreases with its pass rate.
      gamma: Discount of the outcome for each attempt; None for 0.95, and 1 with a single turn.
      turn_weight: Weight of the unit tests.

    References:
      Wang et al., VeRPO (arXiv:2601.03525), PAPER; the constants, the clip and the weighting are
      ours.
    """
    attempts = bind(
        advantages.verpo, sigma=sigma, difficulty=difficulty, gamma=gamma, turn_weight=turn_weight
    )
    return from_base(
        name="verpo",
        advantage=chain(
            stateless(connect(attempts, test_where="test_where", turn_where="turn_where")),
            stateless(advantages.turns_to_tokens),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2601.03525",
    )
