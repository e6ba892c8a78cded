"""GRPO on groups of different sizes: more rollouts where they are expected to help most.

Options that these presets share:

    first: Rollouts of each prompt before any is allocated; below G where P G are allocated in all.
    max_rollouts: Maximum rollouts of a prompt, which is also the width of a batch; above G there.
    kl_coef, eps_low, eps_high: See the package.
"""

from typing import Literal

from jaxrl_llm import advantages, aggregate, curation, regularizers, surrogates
from jaxrl_llm.core import bind, chain, checks, connect, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["rollout_gdro", "v05_baseline", "v0_budget", "xrpo"]


def v0_budget(
    *,
    first: int = 2,
    max_rollouts: int = 32,
    exact: bool = False,
    prior: Literal["tracked", "data"] = "tracked",
    retain: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Allocates rollouts by the expected signal of a group, from a success rate known beforehand.

        P G rollouts in all, one by one to the largest gain of b (1 - p) [1 - (1 - p)^(b - 1)]

    Rewards lie in [0, 1].

    Args:
      exact: Whether to use the optimal allocation; the paper's greedy allocation starves hard
        prompts.
      prior: Source of p: "tracked", from the prompt's earlier rewards, or "data", the column
        ``prior`` of the prompts, such as the predictions of a value model.
      retain: Forgetting factor of a prompt's tracked rate at a visit; None for 0.9.

    References:
      V0 (arXiv:2602.03584), PAPER, which predicts p with a frozen value model (``prior="data"``)
      and allows up to 128 rollouts; here that would be the width of the batch.
    """
    checks.check_option("v0_budget", "prior", prior, ("tracked", "data"))
    memory = None
    if prior == "data":
        checks.check_no_effect("v0_budget", "with prior='data'", retain=retain)
    else:
        memory = curation.remembered_rates(retain=0.9 if retain is None else retain)
    allocate = bind(curation.v0_extra_rollouts, exact=exact)
    return from_base(
        name="v0_budget",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.two_phase(
            connect(allocate, rates="prior") if prior == "data" else allocate,
            first=first,
            max_rollouts=max_rollouts,
            memory=memory,
        ),
        paper="arXiv:2602.03584",
    )


def v05_baseline(
    *,
    first: int = 4,
    max_rollouts: int = 16,
    cost: float = 1 / 1024,
    var: str = "bound",
    scale: str = "none",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """A baseline between a prior and the group mean, and more rollouts while they are worth it.

        w = max(0, 1 - (s2 / n) / (mean_group r - prior)^2)
        A = r - w mean_group r - (1 - w) prior
        one more rollout while the expected error of the baseline falls by more than cost
        loss = mean over sequences of the mean over tokens of token loss

    The prior is a column of the prompts, in the batch as ``prior``: the reward that a frozen value
    model predicts for each. It is used where the rollouts do not contradict it. Rewards lie in [0,
    1].

    Args:
      cost: Price of a rollout, in squared units of reward; see
        :func:`jaxrl_llm.advantages.osla_continue`.
      var: Source of s2: "bound" (1/4), "prior", "sample" or "max".
      scale: "none", or "group" for a division by the group's deviation.

    References:
      V_0.5 (arXiv:2603.10848), NOTES: 4 to 16 rollouts and the cost, 1/256 for rewards of -1 and 1.
      The weighting and the clip are ours.
    """
    goes_on = bind(advantages.osla_continue, cost=cost, least=first, most=max_rollouts, var=var)
    return from_base(
        name="v05_baseline",
        advantage=stateless(advantages.v05_baseline, var=var, scale=scale),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        collector=curation.two_phase(
            connect(goes_on, mean="accuracy", count="counts", prior="prior"),
            first=first,
            max_rollouts=max_rollouts,
            rounds=max_rollouts - first,
        ),
        paper="arXiv:2603.10848",
        group_relative=scale == "group",
    )


def rollout_gdro(
    *,
    arms: tuple[int, ...] = tuple(range(2, 13)),
    edges: tuple[float, ...] = (0.4, 0.75),
    eta: float = 0.65,
    explore: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    kl_coef: float = 0.001,
) -> Recipe:
    """A bandit for each bin of difficulty chooses the rollouts of its prompts, G on average.

        arms of all bins: the most probable ones with P G rollouts in all
        score of an arm <- score + failure rate - price (rollouts - G)
        loss = mean over tokens of (token loss + kl_coef KL)

    Args:
      arms: Numbers of rollouts to choose from, in ascending order, the first below G and the last
        above. The paper has from 2 to three times the mean of 4.
      edges: Edges of the bins: ``curation.difficulty_bins``.
      eta: Sharpness of the choice: ``curation.exponential_weights``.
      explore: Uniform share of the choice.

    References:
      Rollout-GDRO (arXiv:2601.19280), and the settings of the released script for three bins,
      including two minibatches and the KL. See ``curation.rollout_gdro_memory`` for the score of an
      arm.
    """
    allocate = bind(curation.gdro_extra_rollouts, arms=tuple(arms), eta=eta, explore=explore)
    return from_base(
        name="rollout_gdro",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        collector=curation.two_phase(
            allocate,
            first=arms[0],
            max_rollouts=arms[-1],
            memory=curation.rollout_gdro_memory(arms=tuple(arms), edges=edges),
        ),
        minibatches=2,
        paper="arXiv:2601.19280",
    )


def xrpo(
    *,
    first: int = 4,
    max_rollouts: int = 32,
    rounds: int = 2,
    level: float = 0.05,
    explore: float = 1.0,
    examples: int = 2,
    bonus: float = 2.5,
    cap: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """More rollouts where the mean reward is uncertain, solved examples, and a novelty bonus.

        rounds of rollouts to the largest rollout_priority, P G in all
        a prompt that has only failed is sampled again after its nearest solved examples
        A+ = A + min(max(bonus (1 - eta), 0), cap A)        where A > 0
        eta = exp(mean logp of the rollout - the group's mean of that)
        loss = mean over sequences of the mean over tokens of token loss

    Args:
      rounds: Number of rounds after the first.
      level: 1 minus the confidence of the interval, in (0, 1).
      explore: Weight of the exploration bonus in the priority.
      examples: Number of solved examples in a message, ``curation.seeded_message``; 0 for none.
      bonus: Bonus of a right rollout of vanishing probability.
      cap: Largest bonus, as a share of the advantage.

    References:
      XRPO (arXiv:2510.06672), PAPER, three rounds in all; its repository is not available, and clip
      and weighting are GRPO's.
    """
    sharpen = stateless(advantages.novelty_sharpening, bonus=bonus, cap=cap)
    return from_base(
        name="xrpo",
        advantage=chain(stateless(advantages.grpo), sharpen),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        collector=curation.two_phase(
            bind(curation.xrpo_extra_rollouts, level=level, bonus=explore),
            first=first,
            max_rollouts=max_rollouts,
            rounds=rounds,
            memory=curation.solved_examples() if examples else None,
            text=curation.seeded_message(count=examples) if examples else None,
        ),
        paper="arXiv:2510.06672",
    )
