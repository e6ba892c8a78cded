"""Policy gradients of the probability that one of several answers is right."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["grpo_passk", "maxrl", "passk_training", "pkpo"]


def grpo_passk(*, scale: str = "group", eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Only the best rollout of a group trains, by its lead over the second best.

        A_best = (r_best - r_second) / (std_group r + 1e-6)        all others 0

    With right and wrong answers, only groups with exactly one right answer train. Rollouts without
    an advantage count in the mean.

    Args:
      scale: "group" divides by the deviation of the group's rewards, "none" does not.

    References:
      Tang et al. (arXiv:2503.19595); advantage, clip and mean as verl has them by default.
    """
    return from_base(
        name="grpo_passk",
        advantage=stateless(advantages.grpo_passk, scale=scale),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2503.19595",
    )


def passk_training(
    *, k: int = 4, threshold: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """GRPO on the pass@k reward, in closed form over all groups of k.

        rho = 1 - C(n - c, k) / C(n, k)        c right of n rollouts
        A_right = (1 - rho) / (sqrt(rho (1 - rho)) + 1e-6)
        A_wrong = (1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (the same)

    Groups in which all sets of k rollouts pass, or none, have advantage 0 and count in the mean.

    Args:
      k: Number of attempts of pass@k, at least 1; it has an effect only below the group's size.
      threshold: Rewards above it count as right, in units of reward.

    References:
      Pass@k training (arXiv:2508.10751) for the advantage, after the authors' code, which has no
      default of k. The clip and the mean are verl's defaults.
    """
    return from_base(
        name="passk_training",
        advantage=stateless(advantages.passk_training, k=k, threshold=threshold),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2508.10751",
    )


def pkpo(
    *,
    k: int = 4,
    loo: bool = False,
    threshold: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Policy gradient of the expected best of k rewards.

        A_i = mean over sets J of k - 1 others of the group of  max(0, r_i - max of r over J)
        loss = mean over sequences of the sum over tokens of token loss

    On policy, the expected gradient is exactly that of minus the expected maximum, divided by k;
    with rewards of 0 and 1 the maximum is pass@k, and only right answers train unless ``loo`` is
    set.

    Args:
      k: Number of attempts of pass@k, at least 1.
      loo: Whether the mean weight of the others is subtracted, which is biased for k above 1.
      threshold: A reward above it counts as 1, others as 0; None for rewards as they are.

    References:
      PKPO (arXiv:2505.15201), n / k times its estimator. The sum over tokens makes the estimate
      unbiased; the implementation by the authors of MaxRL has ``loo=True`` and verl's mean over
      tokens.
    """
    return from_base(
        name="pkpo",
        advantage=stateless(advantages.pkpo, k=k, loo=loo, threshold=threshold),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_sum,
        paper="arXiv:2505.15201",
    )


def maxrl(*, scale: str = "mean", eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Policy gradient of the log-probability of a right answer, with many rollouts.

        A = (r - mean_group r) / (mean_group r + 1e-6)

    Rewards must not be negative. The fewer answers of a prompt are right, the more each counts.

    Args:
      scale: "mean", or "root" to divide by the square root of the mean.

    References:
      MaxRL (arXiv:2602.02710); clip and mean as in the authors' scripts.
    """
    return from_base(
        name="maxrl",
        advantage=stateless(advantages.maxrl, scale=scale),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        paper="arXiv:2602.02710",
    )
