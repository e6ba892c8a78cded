"""Methods that score rollouts jointly: diverse sets, and failures by their similarity to successes.

Options that these presets share: ``kl_coef``, ``eps_low``, ``eps_high``, see the package.
"""

from typing import Literal

from jaxrl_llm import advantages, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, refilled
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["polychromic", "srpo_vla"]


def polychromic(
    *,
    size: int = 4,
    sets: Literal["all", "disjoint"] = "all",
    kl_coef: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Scores sets of rollouts by their reward and the diversity of their answers.

        f(set) = mean reward * (distinct answers / n)
        A_i = mean of f over the sets with i - mean of f over all sets

    The reward is not negative and returns the answer, or the kind of solution, of a rollout as
    ``answer_ids``.

    Args:
      size: n, members of a set.
      sets: "all" sets of a group, or "disjoint" ones of neighbors, so that advantages depend on the
        order of the rollouts.

    References:
      Polychromic objectives (arXiv:2509.25424), PAPER: states from which several rollouts start;
      here the prompt. An unofficial implementation has disjoint sets of 4, a window of 5 actions
      and a KL of 0.01; its critic for the other actions is omitted.
    """
    return from_base(
        name="polychromic",
        advantage=stateless(advantages.polychromic, size=size, sets=sets),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=nonzero_term(regularizers.kl_to_reference, coef=kl_coef),
        paper="arXiv:2509.25424",
    )


def srpo_vla(
    *,
    threshold: float = 0.5,
    cap: float = 0.6,
    steepness: float = 10.0,
    offset: float = 0.5,
    radius: float | None = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dynamic_sampling: bool = True,
) -> Recipe:
    """Rewards failures by their similarity to the successes of their group.

        r = 1 for a success, else cap sigmoid(steepness (offset - n)),   A = grpo(r)
        n = distance to the nearest cluster of successes, from 0 to 1 over the group's failures

    Distances are between embeddings of the responses (``curation.hashed_responses``), or between
    the ``embeddings`` of the batch. Groups of equal rewards are replaced.

    Args:
      threshold: A reward above it is a success.
      cap: Bound of a failure's reward.
      steepness, offset, radius: See ``rewards.progress_rewards``.

    References:
      Fei et al., SRPO for robots (arXiv:2511.15605), the released code (siiRL): embeddings of
      videos by V-JEPA 2, and statistics per task instead of per group. Embeddings of words are
      ours. The scripts keep groups of 8 with success rates of 0.1 to 0.9, which have both outcomes,
      and make 16 updates per batch.
    """
    progress = bind(
        rewards.progress_rewards,
        threshold=threshold,
        cap=cap,
        steepness=steepness,
        offset=offset,
        radius=radius,
    )
    recipe = from_base(
        name="srpo_vla",
        advantage=chain(stateless(progress), stateless(advantages.grpo)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        computed=(Computed("embeddings", curation.hashed_responses, "responses"),),
        minibatches=16,
        paper="arXiv:2511.15605",
    )
    return refilled(recipe, dynamic_sampling)
