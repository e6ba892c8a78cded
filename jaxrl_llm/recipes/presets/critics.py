"""Methods with a critic, and controllers of the KL penalty. One response per prompt is enough.

The critic of a run starts from the policy's first weights, with a new head, also where a paper
starts it from a reward model; see ``train.init_critic`` for a loop with another one.

Shared options:

    value_eps: Largest change of a value in one step before clipping.
    gamma: Discount per token, in [0, 1].
    lam: How much the estimate relies on rewards over values, in [0, 1].
    critic_lam: The same in the critic's targets.
    critic_warmup: Number of first steps of a run in which the critic alone trains, on rollouts of
        the first policy; 0 for none.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, curation, regularizers, surrogates
from jaxrl_llm.advantages.returns import Estimator
from jaxrl_llm.core import Array, Transform, bind, chain, checks, connect, pipe, stateless, traits
from jaxrl_llm.recipes.parts.critic import Critic
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term, with_texts
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed

__all__ = ["adaptive_kl", "ppo", "ppo_max", "safe", "t_ppo", "vapo", "vc_ppo", "vtrace"]


def actor_critic(
    *,
    name: str,
    paper: str,
    token_rewards: Callable,
    credit: Callable,
    returns: Callable,
    value_eps: float,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    after: Sequence[Transform] = (),
    regularizers: Sequence[Callable] = (),
    computed: Sequence[Computed] = (),
    critic_warmup: int = 0,
) -> Recipe:
    """The base of PPO presets: advantages and targets of a critic from token rewards.

    Args:
      name, paper: Name and reference of the preset.
      token_rewards: Function of the batch that returns the token rewards.
      credit, returns: Functions of token rewards and values: the advantages, the critic's targets.
      after: Functions applied to the advantages, such as whitening.
      regularizers, computed: As in a Recipe.
      critic_warmup: Number of first steps in which the critic alone trains.
    """
    checks.check_positive(name, value_eps=value_eps)
    checks.check_non_negative(name, critic_warmup=critic_warmup)
    surrogate = bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high)
    return from_base(
        name=name,
        computed=tuple(computed),
        advantage=chain(stateless(token_rewards), stateless(credit), *after),
        surrogate=surrogate if dual_clip is None else bind(surrogate, dual_clip=dual_clip),
        regularizers=tuple(regularizers),
        critic=Critic(
            returns=pipe(token_rewards, returns),
            loss=bind(surrogates.value_loss, eps=value_eps),
            warmup=critic_warmup,
        ),
        paper=paper,
        group_relative=False,
    )


def whitened(whiten: bool) -> list[Transform]:
    """Advantages shifted and scaled over the tokens of the batch, or unchanged."""
    return [stateless(advantages.whiten)] if whiten else []


def ppo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    value_eps: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: Estimator = "k1",
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float | None = None,
    whiten: bool = True,
    critic_warmup: int = 0,
) -> Recipe:
    """Proximal policy optimization with a critic.

        R[t] = 1[t is last] r - kl_coef k(old_logp - ref_logp)
        A = gae(R, V; gamma, lam), whitened over the tokens of the batch
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        critic's token loss = max((V - returns)^2, (clipped V - returns)^2) / 2
        returns = gae(R, V; gamma, critic_lam) + V

    It makes four passes over each batch.

    Args:
      dual_clip: Largest loss of a token with a negative advantage, in units of that advantage's
        magnitude; None for none.
      kl_coef: Penalty per nat of divergence from the reference, in units of reward. 0 disables it
        and the reference model.
      kl_estimator: "k1", "k2", "k3" or "abs", see ``advantages.kl_shaped_rewards``.
      critic_lam: None for ``lam``.
      whiten: Whether advantages are shifted and scaled over the tokens of the batch.

    Example:
      >>> import jaxrl_llm as jr
      >>> verl = jr.recipes.ppo(lam=1.0, value_eps=0.5, dual_clip=3.0)
      >>> sorted(verl.required_fields), sorted(jr.recipes.ppo(kl_coef=0.05).required_fields)
      (['old_values', 'values'], ['old_logp', 'old_values', 'ref_logp', 'values'])

    References:
      Schulman et al., PPO (arXiv:1707.06347), with the clipped values of its released code. For
      language models as in Ouyang et al., InstructGPT (arXiv:2203.02155), whose penalty is 0.02.
      The numbers, and four passes over a batch, are those of the PPOTrainer of TRL 0.29 (1.16 has
      none), but for its penalty of 0.05. verl has the options of the example, no penalty, and one
      pass in four minibatches; with ``use_kl_in_reward`` its penalty is 0.001.
    """
    checks.check_non_negative("ppo", finite=True, kl_coef=kl_coef)
    token_rewards: Callable = advantages.terminal_rewards
    if kl_coef:
        token_rewards = bind(advantages.kl_shaped_rewards, kl_coef=kl_coef, estimator=kl_estimator)
    elif kl_estimator != "k1":
        raise ValueError(f"ppo: kl_estimator={kl_estimator!r} has no effect with kl_coef 0.")
    targets = lam if critic_lam is None else critic_lam
    recipe = actor_critic(
        name="ppo",
        paper="arXiv:1707.06347",
        token_rewards=token_rewards,
        credit=bind(advantages.gae, gamma=gamma, lam=lam),
        returns=bind(advantages.gae_returns, gamma=gamma, lam=targets),
        after=whitened(whiten),
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        critic_warmup=critic_warmup,
    )
    return recipe.replace(epochs=4)


def vc_ppo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    value_eps: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float = 1.0,
    whiten: bool = True,
    critic_warmup: int = 50,
) -> Recipe:
    """Value-calibrated PPO, for long responses with a reward at the end.

        A = gae(R, V; gamma, lam), whitened;   returns = gae(R, V; gamma, critic_lam) + V
        the first critic_warmup steps train the critic alone

    A critic that starts from a reward model is biased at early tokens, and targets with a lambda
    below 1 hardly carry the last token's reward to them. So the critic first learns the returns of
    the first policy, and its targets are returns without values.

    Args:
      whiten: Whether advantages are shifted and scaled over the tokens of the batch.

    References:
      Yuan et al., VC-PPO (arXiv:2503.01491), NOTES: it trains the critic until its loss and
      explained variance have settled. The 50 steps and the 16 minibatches are those of
      :func:`vapo`, whitening is verl's.
    """
    recipe = actor_critic(
        name="vc_ppo",
        paper="arXiv:2503.01491",
        token_rewards=advantages.terminal_rewards,
        credit=bind(advantages.gae, gamma=gamma, lam=lam),
        returns=bind(advantages.gae_returns, gamma=gamma, lam=critic_lam),
        after=whitened(whiten),
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
        critic_warmup=critic_warmup,
    )
    return recipe.replace(minibatches=16)


def vapo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    value_eps: float = 0.2,
    gamma: float = 1.0,
    alpha: float = 0.05,
    critic_lam: float = 1.0,
    whiten: bool = True,
    imitation_coef: float = 0.1,
    above: float = 0.0,
    critic_warmup: int = 50,
) -> Recipe:
    """Value-based augmented PPO: a lambda by length, a higher upper clip, right answers imitated.

        A = gae(R, V; gamma, lam), whitened,   lam = max(0, 1 - 1 / (alpha length))
        loss = mean over tokens of the clipped loss
               - imitation_coef mean over the tokens of right responses of logp
        returns = gae(R, V; gamma, critic_lam) + V
        the first critic_warmup steps train the critic alone

    Args:
      alpha: Share of a response over which errors of the critic are added up; see
        ``advantages.length_adaptive_gae``.
      whiten: Whether advantages are shifted and scaled over the tokens of the batch.
      imitation_coef: Weight of the likelihood of right responses; 0 for none.
      above: A response is right if its reward is above this.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.vapo()
      >>> recipe.critic.warmup, recipe.minibatches
      (50, 16)

    References:
      Yue et al., VAPO (arXiv:2504.05118), NOTES: 16 rollouts of each of 512 prompts train in 16
      minibatches, and the critic starts from a reward model. A minibatch divides the likelihood by
      the share of right responses' tokens in the batch. Whitening is verl's.
    """
    checks.check_non_negative("vapo", finite=True, imitation_coef=imitation_coef)
    if not imitation_coef and above != 0.0:
        raise ValueError(f"vapo: above={above:g} has no effect with imitation_coef 0.")
    terms: tuple[Callable, ...] = ()
    shares: tuple[Computed, ...] = ()
    if imitation_coef:
        terms = (bind(imitation_of_right, coef=imitation_coef, above=above),)
        shares = (Computed("right_share", bind(share_of_right, above=above), "batch"),)
    recipe = actor_critic(
        name="vapo",
        paper="arXiv:2504.05118",
        token_rewards=advantages.terminal_rewards,
        credit=bind(advantages.length_adaptive_gae, gamma=gamma, alpha=alpha),
        returns=bind(advantages.gae_returns, gamma=gamma, lam=critic_lam),
        after=whitened(whiten),
        regularizers=terms,
        computed=shares,
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
        critic_warmup=critic_warmup,
    )
    return recipe.replace(minibatches=16)


def adaptive_kl(
    *,
    initial: float = 1e-3,
    target: float = 0.1,
    horizon: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    value_eps: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten_rewards: bool = True,
) -> Recipe:
    """PPO of the first work on language models and human preferences, with an adaptive KL penalty.

        reward of a token = -beta (old_logp - ref_logp), plus r on the last token
        scaled around their mean to variance 1 over the tokens of the batch
        A = generalized advantage estimation, whitened over the tokens of the batch
        critic's loss: its clipped squared error
        beta' = beta (1 + 0.1 clip(KL / target - 1, -0.2, 0.2)), after each step

    Args:
      initial: beta of the first step, in units of reward per nat.
      target: The target divergence, in nats per token.
      horizon: Number of sequences after which a constant error has changed beta by about a fifth,
        which replaces 0.1 by sequences / horizon; None for ten batches.
      whiten_rewards: Whether the token rewards are scaled.

    References:
      Ziegler et al. (arXiv:1909.08593), with the four passes over a batch and the scaled rewards of
      the released code, whose variances divide by n, and the paper's gain of 0.1 per batch; the
      code has a horizon of 10,000 sequences and batches of 512. The target and the first beta are
      verl's, with a mean over tokens instead of the sum over a response: there the target is 6
      nats and the first beta 0.15 in the experiments that adapt it. verl's horizon is 10,000.
    """
    controller = regularizers.adaptive_kl(initial=initial, target=target, horizon=horizon)
    shaped = connect(advantages.kl_shaped_rewards, kl_coef="kl_coef")
    scaled = pipe(shaped, bind(advantages.whiten, shift_mean=False))
    recipe = actor_critic(
        name="adaptive_kl",
        paper="arXiv:1909.08593",
        token_rewards=scaled if whiten_rewards else shaped,
        credit=bind(advantages.gae, gamma=gamma, lam=lam),
        returns=bind(advantages.gae_returns, gamma=gamma, lam=lam),
        after=whitened(True),
        computed=(Computed("kl_coef", controller, "controller"),),
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
    )
    return recipe.replace(epochs=4)


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
    critic_warmup: int = 50,
    text_coef: float = 0.0,
    text_share: float = 0.5,
    column: str = "pretraining",
) -> Recipe:
    """PPO for language models with scaled scores, a KL penalty at every token and a clipped critic.

        s = r / std of all scores so far, clipped to +-score_clip
        R[t] = 1[t is last] s - kl_coef log(old[t] / ref[t])
        A = gae(R, V; gamma, lam), optionally whitened and clipped;  returns = gae + V
        critic's token loss = max((V - returns)^2, (clipped V - returns)^2) / 2
        policy's loss = mean of its token loss - text_coef mean of logp over tokens of texts
        the first critic_warmup steps of a run train the critic alone

    It is best to start the critic from a reward model, and policy and reference from one model.
    Texts have no rewards and values: they are in no score, advantage or target.

    Args:
      kl_coef: Penalty per nat of divergence from the reference, in scaled reward. 0 disables it and
        the reference model.
      score_clip: Largest magnitude of a scaled score; None for no bound.
      whiten: Whether advantages are shifted and scaled over the tokens of the batch.
      advantage_clip: Largest magnitude of an advantage (0.5 in the paper's study); None for none.
      text_coef: Weight of the loss on texts of the pretraining (PPO-ptx); 0 for no texts.
      text_share: Share of the groups of a batch that are texts.
      column: Column of the data with a text in each row.

    Example:
      >>> import jaxrl_llm as jr
      >>> recipe = jr.recipes.ppo_max()
      >>> sorted(recipe.required_fields), recipe.critic.loss
      (['old_logp', 'old_values', 'ref_logp', 'values'], value_loss(eps=0.2))

    References:
      Zheng et al., Secrets of RLHF, PPO-max (arXiv:2307.04964), as in MOSS-RLHF. The numbers are
      the defaults of its options. Its scripts scale the scores without clipping them, have a
      penalty of 0.1 (Chinese) or 0.01 (English), and make one update per batch, as here, in which
      the clips of the ratio and the values have no effect. The paper trains the critic on rollouts
      of a fixed policy before PPO and gives no number of steps; the released code has no such phase
      (``critic_warmup=0``). The 50 steps are those of VAPO (arXiv:2504.05118), whose targets in
      them are plain returns (lam 1); here they are those of every step. The paper adds the loss on
      texts of InstructGPT (arXiv:2203.02155, whose weight is 27.8) and gives no weight; the scripts
      have the weight 0, and one text per response, dialogues of which only the replies train. Here
      all tokens of a text train, up to the maximum length of a response. Not included: the entropy
      term (its weight is 0 there), and gradient clipping, which belongs to the optimizer.
    """
    scaled = bind(advantages.scale_scores, clip=score_clip)
    shaped = bind(advantages.kl_shaped_rewards, kl_coef=kl_coef)
    token_rewards = pipe(scaled, shaped if kl_coef else advantages.terminal_rewards)
    after = whitened(whiten)
    if advantage_clip is not None:
        after.append(stateless(advantages.clip, bound=advantage_clip))
    texts = with_texts("ppo_max", text_coef=text_coef, text_share=text_share, column=column)
    recipe = actor_critic(
        name="ppo_max",
        paper="arXiv:2307.04964",
        token_rewards=token_rewards,
        credit=bind(advantages.gae, gamma=gamma, lam=lam),
        returns=bind(advantages.gae_returns, gamma=gamma, lam=lam),
        after=after,
        computed=(Computed("score_std", advantages.score_deviation(), "controller"),),
        value_eps=value_eps,
        eps_low=eps_low,
        eps_high=eps_high,
        critic_warmup=critic_warmup,
    )
    return recipe.replace(text_coef=text_coef, collector=texts)


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
        loss = mean over tokens of (token loss + coef KL - entropy_coef entropy)
        coef = slope of scale max(0, mean KL - moving threshold)^2 max(0.5, floor / entropy)
        critic: mean over tokens of the mean of two Huber errors, one with a clipped value

    The coefficient is that of ``regularizers.safe_controller``; it is 0 while the KL is low.

    Args:
      threshold: KL, in nats per token, beyond which there is a penalty, before adjustments.
      scale: Penalty per squared nat.
      entropy_floor: The further the entropy is below about this value, the larger the penalty.
      kl_estimator: See ``regularizers.kl_to_reference``.
      alpha: Temperature of the soft minimum, in units of reward.
      huber: Distance beyond which the critics' errors are linear.
      target_rate: Update rate of a critic's slow copy, which then gives the values; None for none.

    References:
      Maity, SAFE (arXiv:2602.04651), with the two passes over a batch of the released code. There
      the controller moves in each pass, here once per batch; the penalty has no gradient; the
      critic sees the full response, while here it sees the part before each token; rewards are
      divided by a running deviation; a slow copy of the critic (rate 0.05) and the scale of a step
      by its previewed divergence (``regularizers.step_scale``) are computed but not used.
    """
    checks.check_positive("safe", alpha=alpha, value_eps=value_eps, huber=huber)
    controller = regularizers.safe_controller(
        base=threshold, scale=scale, entropy_floor=entropy_floor
    )
    penalty = bind(regularizers.kl_to_reference, estimator=kl_estimator)
    bonus = nonzero_term(regularizers.entropy_bonus, coef=entropy_coef)
    return from_base(
        name="safe",
        epochs=2,
        computed=(Computed("penalty_coef", controller, "controller"),),
        advantage=chain(
            stateless(advantages.terminal_rewards),
            stateless(advantages.gae, lam=1.0),
            stateless(advantages.whiten),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        regularizers=(connect(penalty, coef="penalty_coef"), *bonus),
        critic=Critic(
            returns=pipe(advantages.terminal_rewards, bind(advantages.gae_returns, lam=1.0)),
            loss=bind(surrogates.value_loss, eps=value_eps, huber=huber, combine="mean"),
            heads=2,
            combine=bind(surrogates.soft_min, alpha=alpha),
            target_rate=target_rate,
        ),
        paper="arXiv:2602.04651",
        group_relative=False,
    )


def vtrace(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_rho: float | None = 1.0,
    clip_trace: float | None = 1.0,
    clip_advantage: float | None = 1.0,
    entropy_coef: float = 0.0,
    value_eps: float = 0.2,
) -> Recipe:
    """Actor-critic training on samples of older weights or of another sampler.

        rho = exp(old_logp - behavior_logp)
        A[t] = min(rho, clip_advantage) (R + gamma vs[next] - V),   token loss = -A[t] logp[t]
        critic: its clipped squared error from vs, the V-trace targets

    Args:
      clip_rho: Upper bound of the rho that multiplies a critic's error; None for none.
      clip_trace: Upper bound of rho in the products over later tokens; None for none.
      clip_advantage: Upper bound of the rho that multiplies an advantage; None for none.

    References:
      Espeholt et al., IMPALA (arXiv:1802.01561); lambda as in rlax. Its critic's error has no clip.
    """
    checks.check_positive("vtrace", value_eps=value_eps)
    checks.check_non_negative("vtrace", entropy_coef=entropy_coef)
    targets = bind(
        advantages.vtrace_returns, gamma=gamma, lam=lam, clip_rho=clip_rho, clip_trace=clip_trace
    )
    credit = bind(
        advantages.vtrace,
        gamma=gamma,
        lam=lam,
        clip_rho=clip_rho,
        clip_trace=clip_trace,
        clip_advantage=clip_advantage,
    )
    return from_base(
        name="vtrace",
        advantage=chain(stateless(advantages.terminal_rewards), stateless(credit)),
        surrogate=surrogates.reinforce,
        regularizers=nonzero_term(regularizers.entropy_bonus, coef=entropy_coef),
        critic=Critic(
            returns=pipe(advantages.terminal_rewards, targets),
            loss=bind(surrogates.value_loss, eps=value_eps),
        ),
        paper="arXiv:1802.01561",
        group_relative=False,
    )


def t_ppo(
    *,
    windows: int = 3,
    gamma: float = 1.0,
    lam: float = 0.95,
    drop_tail: int = 0,
    value_eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """PPO that trains on windows of responses before they end.

        A = egae(R, V): the bootstrap value of an unfinished response is its last value
        the loss covers the tokens sampled in this batch, each once
        critic: full returns (lam 1) only of the responses that ended in this batch

    Args:
      windows: Number of windows of a response of maximum length.
      drop_tail: Number of last tokens of unfinished responses that do not train.

    References:
      T-PPO (arXiv:2506.15050), PAPER, read through a note: windows of 8k of 24k tokens; the tail
      is our reading. A group is replaced by another when all of its responses have ended.
    """
    checks.check_positive("t_ppo", value_eps=value_eps)
    return from_base(
        name="t_ppo",
        advantage=chain(
            stateless(advantages.terminal_rewards),
            stateless(advantages.egae, gamma=gamma, lam=lam),
        ),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=pipe(bind(curation.window_tokens, drop_tail=drop_tail), aggregate.token_mean),
        critic=Critic(
            returns=pipe(
                advantages.terminal_rewards, bind(advantages.gae_returns, gamma=gamma, lam=1.0)
            ),
            loss=bind(surrogates.value_loss, eps=value_eps),
            weights=pipe(curation.ended_tokens, aggregate.token_mean),
        ),
        collector=curation.windowed(segments=windows),
        paper="arXiv:2506.15050",
        group_relative=False,
    )


# What the slots hold


@traits(supervised=True)
def imitation_of_right(
    logp: Array, mask: Array, *, rewards: Array, right_share: Array, coef: float, above: float
) -> Array:
    """The negative log-likelihood of right responses, for a mean over their tokens alone.

    The mean of the loss is over all tokens of the batch, so it is divided by their share.
    """
    scale = coef / jnp.where(right_share > 0, right_share, 1.0)  # without one it multiplies 0
    return regularizers.imitation(logp, mask, imitated=rewards > above, coef=scale)


def share_of_right(advantages: Array, *, rewards: Array, mask: Array, above: float) -> Array:
    """The share of the batch's tokens that right responses have; a scalar."""
    right = mask & (rewards > above)[..., None]
    return jnp.sum(right) / jnp.maximum(jnp.sum(mask), 1)
