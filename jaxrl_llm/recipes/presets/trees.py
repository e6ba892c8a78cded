"""Methods whose rollouts fork, or end early.

Option that these presets share: ``eps_low``, ``eps_high``, see the package. ``packing="tree"`` of a
run trains on the unique tokens of responses that fork.
"""

from jaxrl_llm import advantages, curation, regularizers, rewards, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe


def ettrl(
    *,
    forks: int = 2,
    branches: int = 2,
    reshape: bool = True,
    bound: float = 2.0,
    kl_coef: float = 0.001,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The vote of trees that fork where entropy is high; less for answers that are uncertain.

        r = 1 for the most common answer of the leaves, else 0;   A = grpo(r)
        A' = A (2 - mean entropy of the response / that of the group);   or clip(A, -bound, bound)

    A group of G has ``G // (1 + forks branches)`` trees. The reward returns the answer of a rollout
    as ``answer_ids``, see ``ttrl_majority``.

    Args:
      forks: Of a root, at the tokens of greatest entropy.
      branches: Of a fork.
      reshape: Whether advantages are reshaped by entropy, which the paper prefers; else clipped.
      bound: Of the clipped advantages.
      kl_coef: Weight of the KL to the reference.

    References:
      ETTRL (arXiv:2508.11356), NOTES reading: 12 roots, 2 forks of 2 branches, 60 leaves, which is
      a group of 60 here. That the token at a fork is sampled again, and that the factor of an
      advantage is not below 0, are ours.
    """
    shaped = advantages.entropy_reshaping if reshape else bind(advantages.clip, bound=bound)
    return from_base(
        name="ettrl",
        advantage=chain(
            stateless(rewards.majority_rewards),
            stateless(advantages.grpo),
            stateless(shaped),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=(bind(regularizers.kl_to_reference, coef=kl_coef),) if kl_coef else (),
        collector=curation.forked(curation.top_entropy_forks, forks=forks, branches=branches),
        paper="arXiv:2508.11356",
    )


def arrol(
    *,
    share: float = 0.5,
    balance: float = 0.5,
    limit: int | None = None,
    first: int | None = None,
    warmup: int = 20,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """About half of the rollouts end early, so that right and wrong ones balance among the others.

    The advantage is that of GRPO over the survivors. See ``curation.quality_survivors``.

    Args:
      share: Share of a group that goes on.
      balance: Share of right ones among them that is wanted.
      limit: Tokens after which a rollout is scored; None for a quarter of the longest response.
      first: Rollouts of a group before any ends; None for G.
      warmup: Steps in which all go on.

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading: scored at token 512, shares of 0.5, a warm-up of
      20 steps. The formula of survival is ours, and so are the numbers that the score reads.
    """
    rule = curation.quality_survivors(share=share, balance=balance, warmup=warmup)
    return from_base(
        name="arrol",
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        collector=curation.pruned(rule, limit=limit, first=first),
        paper="arXiv:2603.24840",
    )
