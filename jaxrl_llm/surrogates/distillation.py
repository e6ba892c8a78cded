"""Distillation, and self-distillation from the same model with more context in its prompt.

- ``student_logp``: ``[..., T, S]``, the statistic :func:`support_log_probs`.
- ``teacher_logp``: ``[..., T, S]`` of the same ids under the teacher, a constant.
- ``has_teacher``: bool ``[...]``, False for sequences without a teacher, whose teacher arrays are
  not read; None, where allowed, if all have one.
- ``teacher_entropy``: ``[..., T]``, entropy (nats) of the teacher's next-token distribution.
- ``rewards``: ``[...]``, one per rollout; ``success``: smallest reward of a correct rollout.
- ``alpha``: 0 for KL(teacher || student), 1 for KL(student || teacher), between for mixtures.
- ``rest``: Treatment of the tokens outside the support: "tail" makes them one event, "renormalize"
  makes the support, of two tokens or more, add up to 1, "none" is for a support of the full
  vocabulary.
- ``cap``: Largest ratio that weighs each token, above 0; None for no weights, so 1 each.

Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs
from jaxrl_llm.surrogates.divergence import Rest, taught, token_divergence


@traits(takes_correction=False, policy_gradient=False, supervised=True)
def gkd(
    logp: Array, old_logp: Array | None, advantages: Array, mask: Array, *, divergence: Array
) -> Array:
    """Generalized knowledge distillation: the divergence from the teacher at each token.

        loss[t] = divergence[t]

    The gradient flows only through the divergence, not through the sampling, so the responses may
    come from the policy, the teacher or the data.

    Args:
      logp, mask: See the package; only the shape of ``logp`` is used.
      old_logp, advantages: Checked and not used: every surrogate receives them.
      divergence: ``[..., T]``, the statistic :func:`teacher_divergence`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> s, t = jnp.log(jnp.array([[[0.7, 0.2, 0.1]], [[0.5, 0.3, 0.2]]]))
      >>> divergence = jr.surrogates.teacher_divergence(s, teacher_logits=t, alpha=1.0)
      >>> jr.surrogates.gkd(jnp.array([-0.3567]), None, 0.0, jnp.ones(1, bool),
      ...                   divergence=divergence).round(4)
      Array([0.0851], dtype=float32)

    References:
      Agarwal et al., GKD (arXiv:2306.13649).
    """
    _inputs.prepare("gkd", logp, old_logp, advantages, mask)
    checks.check_float("gkd", divergence=divergence)
    checks.check_same_shape("gkd", logp=logp, divergence=divergence)
    return masking.zero_masked(jnp.asarray(divergence, jnp.float32), mask)


@traits(policy_gradient=False)
def minillm(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    behavior_logp: Array,
    eps: float = 0.2,
) -> Array:
    """The clipped ratio to the sampling policy.

        loss[t] = max(-A r, -A clip(r, 1 - eps, 1 + eps)),  r = exp(logp - behavior_logp)

    If the tokens were sampled from a mixture of policy and teacher, the initial r is the importance
    weight of the policy relative to the mixture, and the clip bounds it as well.

    Args:
      logp, old_logp, advantages, mask: See the package; ``old_logp`` is checked and not used.
      behavior_logp: ``[..., T]`` under the sampling policy.
      eps: Distance of the clip bounds from 1, above 0.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> p = jnp.array([0.2])
      >>> jr.surrogates.minillm(
      ...     jnp.log(p), None, jnp.ones(1), jnp.ones(1, bool),
      ...     behavior_logp=jnp.log(0.8 * p + 0.2 * 0.7)).round(4)  # -0.2 / 0.3
      Array([-0.6667], dtype=float32)

    References:
      Gu et al., MiniLLM (arXiv:2306.08543), with the weight of the single token; in the released
      code the weight is inside the clip, as here.
    """
    name = "minillm"
    checks.check_positive(name, finite=True, eps=eps)
    masking.check_tokens(name, mask, logp=logp, old_logp=old_logp)
    masking.check_tokens(name, mask, behavior_logp=behavior_logp)
    x = _inputs.prepare(name, logp, behavior_logp, advantages, mask)
    return x.finish(_inputs.clipped_loss(x.ratio, x.advantages, eps, eps))


@traits(policy_gradient=False, supervised=True)
def sdpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    student_logp: Array,
    teacher_logp: Array,
    has_teacher: Array | None = None,
    alpha: float = 0.5,
    rest: Rest = "tail",
    cap: float | None = 2.0,
) -> Array:
    """Divergence of each token's distribution from that of the same model with more context.

        loss[t] = stop_gradient(min(r[t], cap)) * divergence(student[t], teacher[t]; alpha)

    The divergence (:func:`distillation_divergence`) is summed over the student's most probable
    tokens and their tail. The teacher is the model itself with a successful sibling or feedback in
    its context, under averaged weights (:func:`jaxrl_llm.regularizers.ema_reference`). Rewards
    affect only that context. A sequence without a teacher has loss 0; :func:`keep_taught` also
    takes it out of the denominators.

    Args:
      logp, old_logp, mask: See the package; only the ratio reads the log-probabilities.
      advantages: Checked and not used: every surrogate receives them.
      student_logp, teacher_logp, has_teacher, alpha, rest, cap: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> student, teacher = jnp.log(jnp.array([[[0.7, 0.2]], [[0.5, 0.3]]]))
      >>> jr.surrogates.sdpo(jnp.array([-0.3567]), None, jnp.zeros(()), jnp.ones(1, bool),
      ...                    student_logp=student, teacher_logp=teacher).round(4)
      Array([0.0219], dtype=float32)

    References:
      Hübotter et al., Reinforcement Learning via Self-Distillation (arXiv:2601.20802); the code has
      alpha 0.5 with the top 100 tokens for generalization, alpha 1 with the top 20 for rich
      feedback, and a cap of 2. It averages over the taught tokens.
    """
    x = _inputs.prepare("sdpo", logp, old_logp, advantages, mask)
    valid = _taught_mask("sdpo", mask, has_teacher)
    loss = token_divergence("sdpo", student_logp, teacher_logp, valid, alpha, rest)
    return masking.zero_masked(capped_ratio("sdpo", x, cap) * loss, valid)


@traits(policy_gradient=False, supervised=True)
def sdpo_sampled(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    teacher_token_logp: Array,
    has_teacher: Array | None = None,
    cap: float | None = 2.0,
) -> Array:
    """Self-distillation from the sampled tokens only, without the full distributions.

        loss[t] = stop_gradient(min(r[t], cap) * (logp[t] - teacher_token_logp[t])) * logp[t]

    On policy its expected gradient is that of KL(student || teacher) at each token: the log-ratio
    to the teacher is a cost in the policy gradient.

    Args:
      logp, old_logp, mask: See the package.
      advantages: Checked and not used: every surrogate receives them.
      teacher_token_logp: ``[..., T]`` of the same tokens under the teacher, a constant.
      has_teacher, cap: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> loss = lambda logp: jr.surrogates.sdpo_sampled(
      ...     logp, None, 0.0, jnp.ones(1, bool), teacher_token_logp=jnp.array([-0.5])).sum()
      >>> jax.grad(loss)(jnp.array([-1.5]))  # the teacher likes the token better
      Array([-1.], dtype=float32)

    References:
      SDPO (arXiv:2601.20802), the mode of the released code without full logits.
    """
    x = _inputs.prepare("sdpo_sampled", logp, old_logp, advantages, mask)
    valid = _taught_mask("sdpo_sampled", mask, has_teacher)
    checks.check_float("sdpo_sampled", teacher_token_logp=teacher_token_logp)
    checks.check_same_shape("sdpo_sampled", logp=logp, teacher_token_logp=teacher_token_logp)
    cost = masking.safe_log_ratio(x.logp, teacher_token_logp, valid)
    weight = jax.lax.stop_gradient(capped_ratio("sdpo_sampled", x, cap) * cost)
    return masking.zero_masked(masking.product(weight, x.logp), valid)


def _taught_mask(function: str, mask: Array, has_teacher: Array | None) -> Array:
    return mask if has_teacher is None else mask & taught(function, has_teacher, mask)[..., None]


def capped_ratio(function: str, x: _inputs.Inputs, cap: float | None) -> Array | float:
    """The constant weight ``min(r, cap)`` of each token, or 1."""
    checks.check_positive(function, cap=cap)
    return 1.0 if cap is None else jax.lax.stop_gradient(jnp.minimum(x.ratio, cap))


def srpo_route(rewards: Array, has_teacher: Array, *, success: float = 1.0) -> Array:
    """The rollouts that learn from their teacher: failed rollouts that have one.

        route[i] = rewards[i] < success and has_teacher[i]

    All others learn from their rewards.

    Args:
      rewards, has_teacher, success: See the module.

    Returns:
      bool ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, has_teacher = jnp.array([1.0, 0.0, 0.0]), jnp.array([True, True, False])
      >>> jr.surrogates.srpo_route(rewards, has_teacher).tolist()
      [False, True, False]

    References:
      SRPO (arXiv:2604.02288), PAPER reading.
    """
    checks.check_float("srpo_route", rewards=rewards)
    checks.check_bool("srpo_route", has_teacher=has_teacher)
    checks.check_same_shape("srpo_route", rewards=rewards, has_teacher=has_teacher)
    return (rewards < success) & has_teacher


def entropy_weights(teacher_entropy: Array, selected: Array, *, beta: float = 1.0) -> Array:
    """Weights of distilled tokens: higher where the teacher is certain, with mean 1.

        w[t] = exp(-beta H[t]) / mean over selected tokens of exp(-beta H)

    Args:
      teacher_entropy: See the module.
      selected: bool ``[..., T]``, the distilled tokens of the batch, the domain of the mean.
      beta: Strength in 1 / nat, not negative; 0 weighs all tokens equally.

    Returns:
      ``[..., T]`` float32, 0 where not selected.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy, selected = jnp.array([0.0, 1.0, 9.0]), jnp.array([True, True, False])
      >>> jr.surrogates.entropy_weights(entropy, selected).tolist()
      [1.462..., 0.537..., 0.0]

    References:
      SRPO (arXiv:2604.02288), PAPER reading.
    """
    name = "entropy_weights"
    checks.check_non_negative(name, finite=True, beta=beta)
    checks.check_float(name, teacher_entropy=teacher_entropy)
    checks.check_mask(name, selected, name="selected")
    checks.check_same_shape(name, teacher_entropy=teacher_entropy, selected=selected)
    entropy = masking.zero_masked(teacher_entropy, selected)
    # Relative to the surest token: far from certainty every exponential could vanish.
    least = jnp.min(entropy, where=selected, initial=jnp.inf)
    raw = jnp.exp(-beta * jnp.where(selected, entropy - least, 0.0))
    mean = masking.masked_mean(raw, selected)
    return masking.zero_masked(raw / jnp.where(mean > 0, mean, 1.0), selected)


def srpo_weights(
    advantages: Array,
    *,
    rewards: Array,
    has_teacher: Array,
    teacher_entropy: Array,
    mask: Array,
    beta: float = 1.0,
    success: float = 1.0,
) -> Array:
    """:func:`entropy_weights` of the tokens that :func:`srpo_route` assigns to the teacher.

    A Recipe computes it from the batch as ``distillation_weights``: its mean is over all prompts.

    Args:
      advantages: Not used: every function computed from the batch receives them.
      mask: See the package.
      rewards, has_teacher, teacher_entropy, success: See the module.
      beta: As in :func:`entropy_weights`.

    Returns:
      ``[..., T]`` float32, 0 where nothing is distilled.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.srpo_weights(
      ...     None, rewards=jnp.array([0.0, 1.0]), has_teacher=jnp.ones(2, bool),
      ...     teacher_entropy=jnp.ones((2, 1)), mask=jnp.ones((2, 1), bool)).tolist()
      [[1.0], [0.0]]

    References:
      SRPO (arXiv:2604.02288), PAPER reading.
    """
    checks.check_mask("srpo_weights", mask)
    checks.check_shape("srpo_weights", "rewards", rewards, jnp.shape(mask)[:-1])
    routed = srpo_route(rewards, has_teacher, success=success)
    return entropy_weights(teacher_entropy, mask & routed[..., None], beta=beta)


@traits(policy_gradient=False, supervised=True)
def srpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    has_teacher: Array,
    student_logp: Array,
    teacher_logp: Array,
    distillation_weights: Array,
    success: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    alpha: float = 0.5,
    rest: Rest = "tail",
    cap: float | None = 2.0,
) -> Array:
    """Failed rollouts that have a teacher learn from it, all others from their rewards.

        loss[t] = distillation_weights[t] * sdpo[t] if assigned to the teacher, else ppo_clip[t]

    With ``aggregate.token_mean`` both kinds share one denominator. If no rollout has a teacher, or
    none failed, it is GRPO's loss.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high: See the package.
      rewards, has_teacher, student_logp, teacher_logp, success, alpha, rest, cap: See the module.
      distillation_weights: ``[..., T]``, from :func:`srpo_weights`, a constant.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> student, teacher = jnp.log(jnp.array([[0.7, 0.2], [0.5, 0.3]]))[:, None, None]
      >>> ones = jnp.ones((2, 1, 1))
      >>> loss = jr.surrogates.srpo(
      ...     jnp.zeros((2, 1)), None, jnp.array([0.5, -0.5]), jnp.ones((2, 1), bool),
      ...     rewards=jnp.array([1.0, 0.0]), has_teacher=jnp.ones(2, bool),
      ...     student_logp=ones * student, teacher_logp=ones * teacher,
      ...     distillation_weights=jnp.ones((2, 1)))
      >>> [round(x, 4) for x in loss.ravel().tolist()]
      [-0.5, 0.0219]

    References:
      Unifying Group-Relative and Self-Distillation Policy Optimization via Sample Routing
      (arXiv:2604.02288), PAPER reading. PPO's clip for rollouts that learn from rewards is ours.
    """
    checks.check_non_negative("srpo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("srpo", logp, old_logp, advantages, mask)
    checks.check_float("srpo", rewards=rewards)
    checks.check_shape("srpo", "rewards", rewards, jnp.shape(mask)[:-1])
    routed = srpo_route(rewards, taught("srpo", has_teacher, mask), success=success)[..., None]
    weight = masking.spread("srpo", "distillation_weights", distillation_weights, mask & routed)
    distilled = token_divergence("srpo", student_logp, teacher_logp, mask & routed, alpha, rest)
    distilled = jax.lax.stop_gradient(weight) * capped_ratio("srpo", x, cap) * distilled
    rewarded = _inputs.clipped_loss(x.ratio, x.advantages, eps_low, eps_high)
    return x.finish(jnp.where(routed, distilled, rewarded))
