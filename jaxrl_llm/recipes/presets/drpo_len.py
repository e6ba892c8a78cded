"""DRPO: shortness weighed among the right answers alone."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def drpo_len(
    *,
    length: float,
    lam: float = 0.1,
    tau: float = 10.0,
    beta: float = 1e3,
    delta: float = 1e-4,
    kl_estimator: str = "k1",
) -> Recipe:
    """Decoupled reward policy optimization for short answers.

        s = mean over tokens of logp
        J = sum over right of w s - tau log(mean over wrong of exp(s / tau))
        w = softmax over right of (1 - tokens / length) / lam
        loss = -mean over groups of J + kl_coef KL(old || policy)
        kl_coef = max(beta (kl - delta), 0)        kl of the last update

    A long right answer is raised less than a short one and never lowered. An answer is right if its
    reward is above the group's mean, so rewards are 0 and 1. Nothing holds the policy within a
    batch but the KL term, whose coefficient comes from the divergence that the last update made.

    Args:
      length: The generation budget in tokens (the sampler's ``max_new_tokens``).
      lam: Temperature of the shares of right answers; the smaller, the more shortness counts.
      tau: Temperature of the wrong answers, in nats a token.
      beta: Growth of the KL coefficient a nat of excess. 0 leaves the term out of the gradient.
      delta: Divergence that is free, in nats a token.
      kl_estimator: "k1" or "k3".

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.drpo_len(length=16).surrogate
      drpo_len(lam=0.1, length=16, tau=10.0)

    References:
      DRPO (arXiv:2510.04474), defaults of the authors' scripts. There the coefficient is that of
      the very minibatch and the KL a mean over its tokens; here it lags by one update and the KL
      counts every answer of a group alike, so that the loss adds up over microbatches.
    """
    barrier = given(bind(surrogates.kl_barrier, beta=beta, delta=delta), kl="last_kl")
    kl = given(bind(surrogates.kl_from_old, estimator=kl_estimator), coef="kl_coef")
    recipe = Recipe(
        name="drpo_len",
        advantage=stateless(advantages.dr_grpo),
        computed=(Computed("kl_coef", stateless(barrier), "controller"),),
        surrogate=bind(surrogates.drpo_len, length=length, lam=lam, tau=tau),
        weights=aggregate.group_mean,
        regularizers=(kl,),
        paper="arXiv:2510.04474",
    )
    return validate(recipe)
