"""MSSR: one rollout a prompt, kept from collapse by entropy inside the advantage."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, chain, checks, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def mssr(
    *,
    num_prompts: int,
    entropy: Literal["sampled", "policy"] = "sampled",
    rule: Literal["two_sided", "monotone"] = "two_sided",
    eps_low: float = 0.2,
    eps_high: float = 0.3,
    dual_clip: float | None = 3.0,
    kl_coef: float = 0.01,
) -> Recipe:
    """Stabilized single rollouts: a tracked baseline that forgets by the KL, and shaped advantages.

        A = (r - v - mean(r - v)) / std(r - v)              over the batch, v tracked
        A[t] = A + min(0.4 H[t], |A| / 2)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        dual clip, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over tokens of (token loss + kl_coef k3)

    Rewards lie in [0, 1]. H is the entropy of the policy that sampled, or of it the term of the
    sampled token.

    Args:
      num_prompts: How many prompts the data set has; each is remembered.
      entropy: "sampled" for ``-p log p`` of the token, as released; "policy" for the entropy, as
        the paper says.
      rule: How the tracker forgets: ``advantages.window_kl_discount``.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.
      kl_coef: Weight of the KL term. 0 leaves it out, and with it the reference model.

    Returns:
      A Recipe; its batches hold ``prompt_ids``.

    Raises:
      ValueError: If an option is unknown or out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.mssr(num_prompts=100, kl_coef=0.0).required_fields)
      ['old_logp', 'prompt_ids']

    References:
      Liu et al., MSSR (arXiv:2512.18215), and the released code with its settings. What it calls
      entropy there is the sampled token's term.
    """
    checks.check_option("mssr", "entropy", entropy, ("sampled", "policy"))
    checks.check_non_negative("mssr", kl_coef=kl_coef)
    shaping = {
        "sampled": advantages.sampled_entropy_shaping,
        "policy": advantages.entropy_shaping,
    }[entropy]
    recipe = Recipe(
        name="mssr",
        advantage=chain(
            advantages.mssr_tracker(num_prompts=num_prompts, rule=rule), stateless(shaping)
        ),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.token_mean,
        regularizers=(bind(regularizers.kl_to_reference, coef=kl_coef),) if kl_coef else (),
        paper="arXiv:2512.18215",
        group_relative=False,
    )
    return validate(recipe)
