"""UloRL: very long responses, made in segments; mastered tokens of right ones do not train."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import bind, chain, checks, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def ulorl(
    *,
    tau: float = 0.99,
    sigma: float = 0.2,
    old: Literal["recomputed", "sampled"] = "recomputed",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """PPO's clip without the tokens that a policy of low entropy has mastered.

        A = (r - mean_group r) / (std_group r + 1e-6)
        drop = (r > 0) and (p >= tau) and (mean entropy of the response < sigma)
        token loss = 0 where dropped, else -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over all tokens of token loss; those dropped count in the mean

    The tokens of a response may be of several versions of the weights, one a segment. The ratio is
    to the policy at the start of the step for all of them, or to the version that sampled each.

    Args:
      tau: Probability from which a token is mastered.
      sigma: Mean entropy in nats below which a response is watched; 0 drops nothing.
      old: "recomputed" for the policy at the start of the step, so that with one update a batch no
        token is clipped (pseudo on-policy importance sampling); "sampled" for ``behavior_logp``, as
        each segment was sampled (segment-aware importance sampling).
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; with ``old="sampled"``, its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is unknown or out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.ulorl().required_fields)
      ['old_entropy', 'old_logp']

    References:
      UloRL (arXiv:2507.19766), PAPER reading. The paper trains on rewards of 0 and 1 with 1024
      rollouts and one update a step. How a step samples its segment: ``rollout.resume_budget`` and
      ``rollout.segment_status``.
    """
    checks.check_option("ulorl", "old", old, ("recomputed", "sampled"))
    surrogate = bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high)
    recipe = Recipe(
        name="ulorl",
        advantage=chain(
            stateless(advantages.grpo),
            stateless(curation.mpt_advantages, tau=tau, sigma=sigma),
        ),
        surrogate=surrogate if old == "recomputed" else given(surrogate, old_logp="behavior_logp"),
        weights=aggregate.token_mean,
        paper="arXiv:2507.19766",
    )
    return validate(recipe)
