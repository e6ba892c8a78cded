"""Divergences between a student and its teacher, and the statistics that they need.

``support`` holds the chosen ids: integers ``[..., S]``, distinct at each position. Other shared
arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.core.kernels.largest import largest
from jaxrl_llm.core.kernels.vocabulary import log_normalizer

# The least mass of the tail, so that its logarithm and the gradient of that stay finite.
_TAIL_FLOOR = 1e-7


def top_tokens(logits: Array, targets: Array | None = None, *, count: int) -> Array:
    """The most probable tokens at each position, the support of a distillation.

    Args:
      logits, targets: See the package.
      count: How many, S, above 0; capped at V.

    Returns:
      int32 ``[..., S]``, the most probable first.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.top_tokens(jnp.array([0.1, 3.0, 2.0]), count=2)
      Array([1, 2], dtype=int32)

    References:
      The code of SDPO (arXiv:2601.20802): 100, or 20 with rich feedback, of the student.
    """
    checks.check_min_rank("top_tokens", 1, logits=logits)
    checks.check_float("top_tokens", logits=logits)
    checks.check_positive("top_tokens", count=count)
    size = min(count, jnp.shape(logits)[-1])
    return largest(jax.lax.stop_gradient(logits), size)[1].astype(jnp.int32)


def support_log_probs(logits: Array, targets: Array | None = None, *, support: Array) -> Array:
    """Log-probabilities of chosen tokens at each position, the statistic of :func:`sdpo`.

        out[s] = logits[support[s]] - logsumexp(logits)

    Args:
      logits, targets: See the package.
      support: See the module; usually the student's most probable tokens when the teacher was
        evaluated.

    Returns:
      ``[..., S]`` float32, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits, support = jnp.zeros(4), jnp.array([0, 2])
      >>> jr.surrogates.support_log_probs(logits, support=support).tolist()  # log 1/4
      [-1.386..., -1.386...]

    References:
      The code of SDPO (arXiv:2601.20802) takes the student's top k.
    """
    name = "support_log_probs"
    checks.check_min_rank(name, 1, logits=logits, support=support)
    checks.check_float(name, logits=logits)
    checks.check_integer(name, support=support)
    checks.check_shape(name, "support", support, (*jnp.shape(logits)[:-1], jnp.shape(support)[-1]))
    logits = jnp.asarray(logits, jnp.float32)
    chosen = jnp.take_along_axis(logits, support, axis=-1)
    top, log_total = log_normalizer(logits)
    return (chosen - top[..., None]) - log_total[..., None]


def top_log_probs(logits: Array, targets: Array | None = None, *, count: int) -> Array:
    """Log-probabilities of the :func:`top_tokens` of the same logits, as teacher servers send them.

    Args:
      logits, targets: See the package.
      count: How many, S, above 0; capped at V.

    Returns:
      ``[..., S]`` float32, in nats, in descending order.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.top_log_probs(jnp.log(jnp.array([0.1, 0.6, 0.3])), count=2).round(4)
      Array([-0.5108, -1.204 ], dtype=float32)

    References:
      The servers of teachers in TRL's ServerDistillationTrainer and vLLM's prompt_logprobs.
    """
    return support_log_probs(logits, support=top_tokens(logits, count=count))


def target_log_probs(logits: Array, targets: Array) -> Array:
    """Log-probability of each token, the statistic ``teacher_token_logp`` of a teacher.

        out = logits[target] - logsumexp(logits)

    Args:
      logits, targets: See the package.

    Returns:
      ``[...]`` float32, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.target_log_probs(jnp.zeros((1, 4)), jnp.array([2])).round(4)  # log 1/4
      Array([-1.3863], dtype=float32)

    References:
      On-policy distillation, such as MiniLLM (arXiv:2306.08543).
    """
    checks.check_integer("target_log_probs", targets=targets)
    return support_log_probs(logits, support=targets[..., None])[..., 0]


def teacher_divergence(
    logits: Array, targets: Array | None = None, *, teacher_logits: Array, alpha: float = 0.5
) -> Array:
    """Divergence from a teacher over the full vocabulary, the statistic of :func:`gkd`.

        out = distillation_divergence(log softmax(logits), log softmax(teacher_logits); alpha)

    As a statistic of a Recipe from "policy" it is computed in chunks of tokens, so the logits of
    all tokens never exist at once, for either model.

    Args:
      logits, targets: See the package.
      teacher_logits: ``[..., V]`` of the teacher after the same tokens; the gradient stops at it.
      alpha: 0 for KL(teacher || student), 1 for KL(student || teacher), between for mixtures.

    Returns:
      ``[...]`` float32, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> s, t = jnp.log(jnp.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]))
      >>> divergence = jr.surrogates.teacher_divergence
      >>> [divergence(s, teacher_logits=t, alpha=alpha).round(4).item() for alpha in (0, 0.5, 1)]
      [0.092..., 0.021..., 0.085...]

    References:
      Agarwal et al., GKD (arXiv:2306.13649); ``alpha`` is the ``beta`` of TRL's GKD and
      distillation trainers.
    """
    name = "teacher_divergence"
    checks.check_min_rank(name, 1, logits=logits)
    checks.check_float(name, logits=logits, teacher_logits=teacher_logits)
    checks.check_same_shape(name, logits=logits, teacher_logits=teacher_logits)

    def log_probs(x: Array) -> Array:
        x = jnp.asarray(x, jnp.float32)
        top, log_total = log_normalizer(x)
        return (x - top[..., None]) - log_total[..., None]

    return distillation_divergence(log_probs(logits), log_probs(teacher_logits), alpha=alpha)


def add_tail(log_probs: Array) -> Array:
    """Appends the log-probability of everything outside the support.

        tail = log(1 - sum_s p[s])

    The tail's mass is at least 1e-7, with gradient 0 at that bound, so a support of all V tokens
    gives the divergences over the full vocabulary. Tokens that cannot be sampled may have -inf.

    Args:
      log_probs: ``[..., S]`` log-probabilities (nats) of distinct tokens.

    Returns:
      ``[..., S + 1]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.add_tail(jnp.log(jnp.array([0.7, 0.2])))[-1].round(4)  # log 0.1
      Array(-2.3026, dtype=float32)

    References:
      The code of SDPO (arXiv:2601.20802), which clamps in the same way.
    """
    checks.check_min_rank("add_tail", 1, log_probs=log_probs)
    checks.check_float("add_tail", log_probs=log_probs)
    log_probs = jnp.asarray(log_probs, jnp.float32)
    # Where none of the tokens is possible the tail is all there is, and has no gradient.
    possible = jnp.any(log_probs > -jnp.inf, axis=-1, keepdims=True)
    total = jax.nn.logsumexp(jnp.where(possible, log_probs, 0.0), axis=-1, keepdims=True)
    total = jnp.where(possible, jnp.minimum(total, -_TAIL_FLOOR), -jnp.inf)
    return jnp.concatenate([log_probs, jnp.log(-jnp.expm1(total))], axis=-1)


def topk_with_tail(logits: Array, support: Array) -> Array:
    """Log-probabilities of chosen tokens and of all other tokens together.

    :func:`support_log_probs`, then :func:`add_tail`. Use it to pass full logits of a student and a
    teacher to :func:`distillation_divergence`, for example in a notebook.

    Args:
      logits: See the package.
      support: See the module.

    Returns:
      ``[..., S + 1]`` float32, in nats; the probabilities add up to 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits, support = jnp.log(jnp.array([0.7, 0.2, 0.1])), jnp.array([0, 1])
      >>> jr.surrogates.topk_with_tail(logits, support).round(4).tolist()
      [-0.356..., -1.609..., -2.302...]

    References:
      The code of SDPO (arXiv:2601.20802).
    """
    return add_tail(support_log_probs(logits, support=support))


def distillation_divergence(
    student_logp: Array, teacher_logp: Array, *, alpha: float = 0.5
) -> Array:
    """Divergence between the next-token distributions of a student and a teacher.

        alpha = 0:  KL(t || s)        alpha = 1:  KL(s || t)
        between:    (1 - alpha) KL(s || m) + alpha KL(t || m),   m = (1 - alpha) s + alpha t

    ``alpha=0.5`` is the Jensen-Shannon divergence. At 0 and 1 it is not the limit of the mixture
    form, which vanishes there. Events of probability 0 contribute nothing.

    Args:
      student_logp: ``[..., S]`` log-probabilities (nats) that add up to 1 along the last axis.
      teacher_logp: ``[..., S]`` of the same events; the gradient stops at it.
      alpha: Between 0 and 1.

    Returns:
      ``[...]`` float32, in nats, not negative up to rounding.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> s, t = jnp.log(jnp.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]))
      >>> divergence = jr.surrogates.distillation_divergence
      >>> [divergence(s, t, alpha=alpha).item() for alpha in (0, 0.5, 1)]
      [0.0920..., 0.0219..., 0.0851...]

    References:
      Agarwal et al., GKD (arXiv:2306.13649), whose mixture swaps the two weights. This is the form
      of the SDPO code (arXiv:2601.20802).
    """
    name = "distillation_divergence"
    checks.check_min_rank(name, 1, student_logp=student_logp)
    checks.check_float(name, student_logp=student_logp, teacher_logp=teacher_logp)
    checks.check_same_shape(name, student_logp=student_logp, teacher_logp=teacher_logp)
    _check_alpha(name, alpha)
    student = jnp.asarray(student_logp, jnp.float32)
    teacher = jax.lax.stop_gradient(jnp.asarray(teacher_logp, jnp.float32))
    if alpha == 0:
        return _kl(teacher, student)
    if alpha == 1:
        return _kl(student, teacher)
    # Where both are -inf the sum of exponentials has no logarithm and nothing to count.
    possible = (student > -jnp.inf) | (teacher > -jnp.inf)
    mixture = jnp.logaddexp(
        jnp.where(possible, student, 0.0) + jnp.log1p(-alpha),
        jnp.where(possible, teacher, 0.0) + jnp.log(alpha),
    )
    return (1.0 - alpha) * _kl(student, mixture) + alpha * _kl(teacher, mixture)


def keep_taught(advantages: Array, mask: Array, *, has_teacher: Array) -> Array:
    """The tokens that have a teacher, for a Recipe's ``selection``.

    Sequences without a teacher (no successful sibling and no feedback) then count in no
    denominator.

    Args:
      advantages: Not used: every selection receives them.
      mask: See the package.
      has_teacher: bool ``[...]``, one per sequence.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, has_teacher = jnp.ones((2, 2), bool), jnp.array([True, False])
      >>> jr.surrogates.keep_taught(None, mask, has_teacher=has_teacher).tolist()
      [[True, True], [False, False]]

    References:
      The code of SDPO (arXiv:2601.20802), which multiplies the loss mask in the same way.
    """
    checks.check_mask("keep_taught", mask)
    return mask & taught("keep_taught", has_teacher, mask)[..., None]


def taught(function: str, has_teacher: Array, mask: Array) -> Array:
    """``has_teacher``, checked to be bool with one value per sequence of ``mask``."""
    checks.check_bool(function, has_teacher=has_teacher)
    checks.check_shape(function, "has_teacher", has_teacher, jnp.shape(mask)[:-1])
    return has_teacher


Rest = Literal["tail", "renormalize", "none"]


def token_divergence(
    function: str, student_logp: Array, teacher_logp: Array, mask: Array, alpha, rest: Rest
) -> Array:
    """The divergence of each token ``[..., T]`` on the support ``[..., T, S]``, 0 where masked."""
    checks.check_option(function, "rest", rest, ("tail", "renormalize", "none"))
    _check_alpha(function, alpha)
    checks.check_float(function, student_logp=student_logp, teacher_logp=teacher_logp)
    checks.check_same_shape(function, student_logp=student_logp, teacher_logp=teacher_logp)
    shape = jnp.shape(mask)
    if jnp.shape(student_logp)[:-1] != shape:
        raise ValueError(
            f"{function}: student_logp must have the shape of mask {shape} and one more axis, the "
            f"support; got {jnp.shape(student_logp)}."
        )
    # Any distribution will do where the mask is False; zeros would be one with mass S.
    count = jnp.shape(student_logp)[-1]
    if rest == "renormalize" and count == 1:
        raise ValueError(
            f"{function}: rest='renormalize' gives the one token of the support probability 1 in "
            "both models, so their divergence is 0; take rest='tail' or a larger support."
        )
    filler = -jnp.log(jnp.float32(count + 1))

    def distribution(x: Array) -> Array:
        x = jnp.where(mask[..., None], jnp.asarray(x, jnp.float32), filler)
        if rest == "tail":
            return add_tail(x)
        return x - jax.nn.logsumexp(x, axis=-1, keepdims=True) if rest == "renormalize" else x

    student, teacher = distribution(student_logp), distribution(teacher_logp)
    return masking.zero_masked(distillation_divergence(student, teacher, alpha=alpha), mask)


def _check_alpha(function: str, alpha) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"{function}: alpha must be between 0 and 1; got {alpha:g}.")


def _kl(p: Array, q: Array) -> Array:
    """``sum exp(p) (p - q)`` over the last axis; where exp(p) is 0 nothing is counted."""
    possible = jnp.exp(p) > 0
    p, q = jnp.where(possible, p, 0.0), jnp.where(possible, q, 0.0)
    return jnp.sum(jnp.where(possible, jnp.exp(p) * (p - q), 0.0), axis=-1)
