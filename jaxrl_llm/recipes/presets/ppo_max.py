"""PPO-max: PPO with a critic and the tricks that were found to keep it stable."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, stateless
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def _returns(
    rewards: Array,
    mask: Array,
    *,
    score_std: Array,
    values: Array,
    where: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    score_clip: float | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Array:
    """What the critic is to predict: of the same scaled rewards as the advantages."""
    return advantages.gae_returns(
        advantages.scale_scores(rewards, score_std=score_std, where=where, clip=score_clip),
        mask,
        values=values,
        where=where,
        old_logp=old_logp,
        ref_logp=ref_logp,
        kl_coef=kl_coef,
        gamma=gamma,
        lam=lam,
    )


def ppo_max(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    value_eps: float = 0.2,
    kl_coef: float = 0.02,
    gamma: float = 1.0,
    lam: float = 0.95,
    score_clip: float | None = 10.0,
    whiten: bool = False,
    advantage_clip: float | None = None,
) -> Recipe:
    """PPO for language models with scaled scores, a KL penalty at every token and a clipped critic.

        s = r / std of all scores so far, clipped to +-score_clip
        R[t] = 1[t is last] s - kl_coef log(old[t] / ref[t])
        A = gae(R, V; gamma, lam), whitened and clipped if asked;  returns = gae + V
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        critic's token loss = max((V - returns)^2, (clipped V - returns)^2) / 2
        both averaged over tokens

    One response a prompt is enough. The critic starts best from a reward model, policy and
    reference from the same fine-tuned model.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      value_eps: Greatest change of a value that is rewarded.
      kl_coef: Penalty for a nat of divergence from the reference, in scaled reward. 0 leaves it
        out, and with it the reference model.
      gamma: Discount for a token, in [0, 1].
      lam: How far the estimate trusts rewards over values, in [0, 1].
      score_clip: Greatest size of a scaled score; None for none.
      whiten: Whether advantages are shifted and scaled over the tokens of the batch.
      advantage_clip: Greatest size of an advantage (0.5 in the paper's study); None for none.

    Returns:
      A Recipe with a critic.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.ppo_max()
      >>> sorted(recipe.required_fields), recipe.critic.loss
      (['old_logp', 'old_values', 'ref_logp', 'values'], value_loss(eps=0.2))

    References:
      Zheng et al., Secrets of RLHF, PPO-max (arXiv:2307.04964), as in MOSS-RLHF with its defaults.
      Its scripts set no clip of the scores and one of them a penalty of 0.1. Not here: the
      pretraining loss, the entropy term (its weight is 0 there), and the clip of the gradient's
      norm, which is the optimizer's.
    """
    checks.check_positive("ppo_max", value_eps=value_eps)
    options = {"kl_coef": kl_coef, "gamma": gamma, "lam": lam}
    if kl_coef == 0:
        options |= {"old_logp": None, "ref_logp": None}
    recipe = Recipe(
        name="ppo_max",
        advantage=chain(
            stateless(advantages.scale_scores, clip=score_clip),
            stateless(advantages.gae, whiten=whiten, clip=advantage_clip, **options),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        computed=(Computed("score_std", advantages.score_deviation(), "controller"),),
        critic=Critic(
            returns=bind(_returns, score_clip=score_clip, **options),
            loss=bind(surrogates.value_loss, eps=value_eps),
        ),
        paper="arXiv:2307.04964",
        group_relative=False,
    )
    return validate(recipe)
