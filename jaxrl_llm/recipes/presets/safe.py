"""SAFE: PPO with two pessimistic critics and a KL penalty that follows rewards and entropy."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, checks, given, stateless
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def safe(
    *,
    threshold: float = 0.3,
    scale: float = 0.1,
    entropy_floor: float = 2.0,
    kl_estimator: str = "k1+",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    entropy_coef: float = 0.01,
    alpha: float = 0.3,
    value_eps: float = 0.2,
    huber: float = 0.5,
    target_rate: float | None = None,
) -> Recipe:
    """Stable alignment fine-tuning with an entropy-aware controller of the KL penalty.

        V = soft minimum of two critics;  A = r - V, whitened over the tokens of the batch
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
                     + coef KL - entropy_coef entropy
        coef = slope of scale max(0, mean KL - moving threshold)^2 max(0.5, floor / entropy)
        loss = mean over tokens of token loss
        critic: mean over tokens of the mean of two Huber errors, one with a clipped value

    The coefficient is that of ``regularizers.safe_controller``; it is 0 while the KL is low.

    Args:
      threshold: KL, in nats a token, beyond which there is a penalty, before adjustments.
      scale: Penalty for a squared nat.
      entropy_floor: The lower the entropy is below about this, the greater the penalty.
      kl_estimator: Estimator of the KL term, see ``regularizers.kl_to_reference``.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      entropy_coef: Weight of the entropy bonus; 0 leaves it out.
      alpha: Temperature of the soft minimum, in units of reward.
      value_eps: Change of a value that is rewarded in one step.
      huber: Distance beyond which the critics' errors count linearly.
      target_rate: Share of a critic in its slow copy, which then gives the values; None for none.

    Returns:
      A Recipe with a critic of two heads.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.safe().critic.heads
      2

    References:
      Maity, SAFE (arXiv:2602.04651). In the released code the penalty has no gradient; the critic
      sees the whole response, here the part before each token; rewards are divided by a running
      deviation; and a slow copy of the critic (rate 0.05) is kept and not used.
    """
    checks.check_positive("safe", alpha=alpha, value_eps=value_eps, huber=huber)
    controller = regularizers.safe_controller(
        base=threshold, scale=scale, entropy_floor=entropy_floor
    )
    penalty = bind(regularizers.kl_to_reference, estimator=kl_estimator)
    bonus = (bind(regularizers.entropy_bonus, coef=entropy_coef),) if entropy_coef else ()
    recipe = Recipe(
        name="safe",
        computed=(Computed("penalty_coef", controller, "controller"),),
        advantage=stateless(advantages.gae, lam=1.0),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        regularizers=(given(penalty, coef="penalty_coef"), *bonus),
        critic=Critic(
            returns=bind(advantages.gae_returns, lam=1.0),
            loss=bind(surrogates.value_loss, eps=value_eps, huber=huber, combine="mean"),
            heads=2,
            combine=bind(surrogates.soft_min, alpha=alpha),
            target_rate=target_rate,
        ),
        paper="arXiv:2602.04651",
        group_relative=False,
    )
    return validate(recipe)
