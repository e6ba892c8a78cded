"""PPO with a KL penalty in the reward that holds the KL near a target."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, checks, given, stateless
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def adaptive_kl(
    *,
    initial: float = 1e-3,
    target: float = 0.1,
    horizon: float = 10_000.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    value_eps: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Recipe:
    """The first recipe of reinforcement learning from human preferences, with a critic.

        reward of a token = -beta (old_logp - ref_logp), on the last one plus r
        A = generalized advantage estimation, whitened over the tokens of the batch
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss;  the critic's: its clipped squared error
        beta' = beta (1 + clip(KL / target - 1, -0.2, 0.2) sequences / horizon), after each step

    Args:
      initial: beta of the first step, in units of reward for a nat.
      target: The divergence to hold, in nats a token.
      horizon: Sequences after which a constant error has moved beta by about a fifth.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      value_eps: Change of a value that is rewarded in one step.
      gamma: Discount for a token, in [0, 1].
      lam: How far the estimate trusts rewards over values, in [0, 1].

    Returns:
      A Recipe with a critic; it needs ``ref_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> [entry.name for entry in jr.recipes.adaptive_kl(target=0.05).computed]
      ['kl_coef']

    References:
      Ziegler et al. (arXiv:1909.08593); the controller and its numbers are verl's, with the mean
      over tokens where the paper sums over a response (target 6, beta 0.1 there).
    """
    checks.check_positive("adaptive_kl", value_eps=value_eps)
    controller = regularizers.adaptive_kl(initial=initial, target=target, horizon=horizon)
    estimate = {"gamma": gamma, "lam": lam}
    recipe = Recipe(
        name="adaptive_kl",
        computed=(Computed("kl_coef", controller, "controller"),),
        advantage=stateless(given(bind(advantages.gae, **estimate), kl_coef="kl_coef")),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        critic=Critic(
            returns=given(bind(advantages.gae_returns, **estimate), kl_coef="kl_coef"),
            loss=bind(surrogates.value_loss, eps=value_eps),
        ),
        paper="arXiv:1909.08593",
        group_relative=False,
    )
    return validate(recipe)
