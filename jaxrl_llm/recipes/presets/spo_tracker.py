"""SPO: one rollout a prompt, against a success rate that is remembered for each prompt."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def spo_tracker(
    *,
    num_prompts: int,
    rho: float | None = 0.875,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """Single-stream policy optimization.

        v = the tracked success rate of the prompt, before this batch
        A = (r - v - mean(r - v)) / std(r - v)              over the batch
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        dual clip, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over tokens of token loss

    One rollout a prompt is enough, and several are allowed. Rewards lie in [0, 1]. No KL term. Draw
    the prompts with ``advantages.uncertainty_sampling_weights`` of the tracked rates.

    Args:
      num_prompts: How many prompts the data set has; each is remembered.
      rho: Share of a prompt's past that a visit keeps; None for one that adapts to
        ``policy_shift``, which the batch then brings.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.

    Returns:
      A Recipe; its batches hold ``prompt_ids``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.spo_tracker(num_prompts=100, rho=None).required_fields)
      ['policy_shift', 'prompt_ids']

    References:
      Xu and Ding, SPO (arXiv:2509.13232), and the setting of the released script, whose rho adapts.
      Its tracker starts from 8 rollouts a prompt: ``advantages.beta_tracker_init``.
    """
    recipe = Recipe(
        name="spo_tracker",
        advantage=advantages.spo_tracker(num_prompts=num_prompts, rho=rho),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.token_mean,
        paper="arXiv:2509.13232",
        group_relative=False,
    )
    return validate(recipe)
