"""DAPO: a higher upper clip, token mean, no KL; dynamic sampling and care of long responses."""

from jaxrl_llm import advantages, aggregate, curation, rewards, surrogates
from jaxrl_llm.core import bind, chain, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def dapo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    dynamic_sampling: bool = False,
    metric: str | None = None,
    max_length: int | None = None,
    overlong_buffer: int | None = None,
    overlong_factor: float = 1.0,
    overlong_filter: bool = False,
) -> Recipe:
    """Decoupled clip and dynamic sampling policy optimization.

        A = (r - mean_group r) / (std_group r + 1e-6)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        dual clip, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over tokens of token loss
        dynamic sampling:  groups whose metric agrees take no part
        overlong buffer:   r + clip(-factor (length - (max_length - buffer)) / buffer, -factor, 0)

    By default it is the loss half. Groups whose rewards agree have advantage 0; without dynamic
    sampling they count in the denominator. What the batch loses by it is sampled anew by the
    paper's loop, see :func:`jaxrl_llm.curation.compact_groups`.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.
      dynamic_sampling: Whether groups that agree are dropped.
      metric: Name of the reward column that dynamic sampling compares, such as the accuracy; None
        for the reward as it is before the overlong penalty.
      max_length: The generation budget in tokens; with ``overlong_buffer`` only.
      overlong_buffer: Width in tokens of the zone below the budget where the reward falls (4096 of
        20480 in the paper); None for no penalty.
      overlong_factor: What a response at the budget loses, in units of reward.
      overlong_filter: Whether responses that were cut off do not train. They stay in the baselines.

    Returns:
      A Recipe; with ``overlong_filter``, its batches hold ``truncated``.

    Raises:
      ValueError: If an option is out of its range or has no effect.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.dapo(dual_clip=None).surrogate
      dapo_clip(dual_clip=None, eps_high=0.28, eps_low=0.2)

    References:
      Yu et al. (arXiv:2503.14476). The dual clip of 10 is that of the released scripts (verl's
      recipe); the paper does not mention it.
    """
    _check_effect(dynamic_sampling, metric, max_length, overlong_buffer, overlong_factor)
    advantage = stateless(advantages.grpo)
    if overlong_buffer is not None:
        shaped = stateless(
            rewards.overlong_rewards,
            max_length=max_length,
            buffer=overlong_buffer,
            factor=overlong_factor,
        )
        advantage = chain(shaped, advantage)
    informative = curation.informative_groups
    if metric is not None:
        informative = given(bind(informative, name=metric), metric="reward_components")
    recipe = Recipe(
        name="dapo",
        advantage=advantage,
        surrogate=bind(
            surrogates.dapo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.token_mean,
        curation=stateless(informative) if dynamic_sampling else None,
        selection=curation.truncation_mask if overlong_filter else None,
        paper="arXiv:2503.14476",
    )
    return validate(recipe)


def _check_effect(dynamic_sampling, metric, max_length, overlong_buffer, overlong_factor) -> None:
    """Raises ValueError if an option would be ignored, or one that it takes is missing."""
    if metric is not None and not dynamic_sampling:
        raise ValueError(f"dapo: metric={metric!r} has no effect without dynamic_sampling=True.")
    if (max_length is None) != (overlong_buffer is None):
        raise ValueError(
            "dapo: max_length and overlong_buffer go together; got "
            f"{max_length} and {overlong_buffer}."
        )
    if overlong_buffer is None and overlong_factor != 1.0:
        raise ValueError(
            f"dapo: overlong_factor={overlong_factor:g} has no effect without overlong_buffer."
        )
