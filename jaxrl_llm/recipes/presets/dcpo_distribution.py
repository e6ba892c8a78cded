"""DCPO (distribution-centric): good rollouts pull the policy to another temperature."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, chain, checks, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def dcpo_distribution(
    *,
    target_entropy: float = 0.5,
    max_gap: float = 0.1,
    good_above: float = 0.05,
    hot: float = 1.2,
    cold: float = 0.8,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Recipe:
    """GRPO whose advantages hold the entropy near a target.

        A = (r - mean_group r) / (std_group r + 1e-6)
        A[t] = (1 - a) A + a 1[r > good_above] p_T'(token) / p(token)
        T' = hot while the entropy is at or below the target, else cold
        a = x / (1 + x),  x = min(|target_entropy - entropy|, max_gap) / share of good rollouts
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        dual clip, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over tokens of token loss

    The entropy is that of the batch before, estimated from its sampled tokens; the first batch
    counts as entropy 0. Both temperatures are relative to the sampler's. No KL term.

    Args:
      target_entropy: In nats a token.
      max_gap: Greatest distance from the target that counts.
      good_above: Rewards above this are good.
      hot: The temperature that flattens, above ``cold``.
      cold: The temperature that sharpens.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.

    Returns:
      A Recipe; the train step computes the two other log-probabilities itself.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.dcpo_distribution()
      >>> sorted(recipe.required_fields - recipe.step_fields)
      []

    References:
      DCPO (arXiv:2601.12730), and the released code; the best reported target is 0.25.
    """
    checks.check_positive("dcpo_distribution", hot=hot, cold=cold)
    if not cold < hot:
        raise ValueError(f"dcpo_distribution: cold must be below hot; got {cold:g} and {hot:g}.")
    mix = stateless(
        advantages.dcpo_distribution,
        target_entropy=target_entropy,
        max_gap=max_gap,
        good_above=good_above,
    )
    tempered = advantages.temperature_logp
    recipe = Recipe(
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
        weights=aggregate.token_mean,
        paper="arXiv:2601.12730",
    )
    return validate(recipe)
