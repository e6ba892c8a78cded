"""Weights and rejection rules put together: what stands in the correction slot of a Recipe."""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits, traits_of
from jaxrl_llm.corrections import _inputs


def rollout_correction(
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    weights: Callable | None = None,
    reject: tuple[Callable, ...] = (),
    keep_denominator: bool = False,
) -> tuple[Array, Array]:
    """Weighs tokens by how far they are from what sampled them, and leaves out the farthest.

        keep[t] = mask[t] and rule[t] of every rule in ``reject``
        w[t] = weights(...)[t] where keep[t] (1 without ``weights``), 0 elsewhere

    Weights and rules are functions ``(old_logp, behavior_logp, mask) -> [..., T]`` with their
    options bound: :func:`importance_weights`, :func:`masked_importance_weights`,
    :func:`rejection_mask`, :func:`veto_mask`, :func:`m2_mask` or a custom function. Each gets the
    full mask, so a mean weight includes what a rule rejects. With a surrogate that has a ratio to
    ``old_logp`` this is the loss with three policies (decoupled). If instead ``old_logp`` is
    ``behavior_logp`` that ratio is the correction, and all weights here are 1.

    Args:
      old_logp: ``[..., T]`` log-probabilities (nats) under the proximal policy.
      behavior_logp: ``[..., T]`` under what sampled the tokens.
      mask: bool ``[..., T]``, True = keep.
      weights: Function that gives a float weight a token; None for 1.
      reject: Functions that return the tokens to keep, bool; a token must pass all.
      keep_denominator: If False, rejected tokens leave the mask, so the loss is an average over
        what is left (verl). If True they stay with weight 0 and count in it (AReaL).

    Returns:
      ``(weights, keep)``: float32 ``[..., T]``, 0 where masked or rejected, without a gradient; and
      bool ``[..., T]``, False where masked.

    Raises:
      ValueError: If shapes differ, a function returns another shape than ``mask`` has, or
        ``keep_denominator`` is set without a rule.
      TypeError: If an array has a wrong dtype or a function returns one, or ``weights`` or a rule
        is not a function.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> correction = jr.bind(
      ...     jr.corrections.rollout_correction,
      ...     weights=jr.bind(jr.corrections.importance_weights, cap=2.0),
      ...     reject=(jr.bind(jr.corrections.veto_mask, threshold=0.1),))
      >>> old_logp = jnp.log(jnp.array([[1.5, 3.0], [1.0, 0.05]]))
      >>> w, keep = correction(old_logp, jnp.zeros((2, 2)), jnp.ones((2, 2), bool))
      >>> w.tolist(), keep.tolist()
      ([[1.5, 2.0], [0.0, 0.0]], [[True, True], [False, False]])

    References:
      verl 0.9 (``rollout_corr_helper``) and AReaL (arXiv:2505.24298), CODE reading. Weights and
      masks agree with verl's on random data, but for the sign in the bounds of k1: see
      :func:`rejection_mask`.
    """
    function = "rollout_correction"
    return _correct(function, old_logp, behavior_logp, mask, weights, reject, keep_denominator)


@traits(level="sequence")
def sequence_rollout_correction(
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    weights: Callable | None = None,
    reject: tuple[Callable, ...] = (),
    keep_denominator: bool = False,
) -> tuple[Array, Array]:
    """:func:`rollout_correction` of sequences, for surrogates with one value a sequence.

        one weight and one verdict a sequence, repeated over its tokens

    It takes only weights and rules that do not tell the tokens of a sequence apart: those with a
    ``level`` other than "token" bound to them, and those with
    ``core.traits(level="sequence")``.

    Args:
      old_logp: ``[..., T]`` log-probabilities (nats) under the proximal policy.
      behavior_logp: ``[..., T]`` under what sampled the tokens.
      mask: bool ``[..., T]``, True = keep.
      weights: Function that gives a float weight a token, the same over a sequence; None for 1.
      reject: Functions that return the sequences to keep, bool; a sequence must pass all.
      keep_denominator: If False, rejected sequences leave the mask; if True they stay with weight
        0.

    Returns:
      ``(weights, keep)`` as of :func:`rollout_correction`.

    Raises:
      ValueError: As :func:`rollout_correction`, and if a function is of the token level.
      TypeError: As :func:`rollout_correction`.

    Example:
      >>> import jaxrl_llm as jr
      >>> correction = jr.bind(
      ...     jr.corrections.sequence_rollout_correction,
      ...     weights=jr.bind(jr.corrections.importance_weights, level="sequence", cap=5.0))
      >>> jr.recipes.gspo().replace(correction=correction).name
      'gspo'

    References:
      verl 0.9 (``rollout_corr_helper``), CODE reading.
    """
    function = "sequence_rollout_correction"
    for function_of in (*(() if weights is None else (weights,)), *reject):
        level = dict(getattr(function_of, "options", ())).get("level", "token")
        if level == "token" and traits_of(function_of).level != "sequence":
            raise ValueError(
                f"{function}: {function_of!r} is of the token level; bind a level of sequences, "
                "or decorate it with core.traits(level='sequence')."
            )
    return _correct(function, old_logp, behavior_logp, mask, weights, reject, keep_denominator)


def _correct(
    function: str,
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    weights: Callable | None,
    reject: tuple[Callable, ...],
    keep_denominator: bool,
) -> tuple[Array, Array]:
    _inputs.log_ratio(function, old_logp, behavior_logp, mask)  # for its checks
    if not isinstance(reject, tuple) or not all(map(callable, reject)):
        raise TypeError(
            f"{function}: reject must be a tuple of functions, such as (rule,); got {reject!r}."
        )
    if not (weights is None or callable(weights)):
        raise TypeError(f"{function}: weights must be a function or None; got {weights!r}.")
    if keep_denominator and not reject:
        raise ValueError(f"{function}: keep_denominator has no effect without a rule in reject.")
    keep, shape = mask, jnp.shape(mask)
    for rule in reject:
        passed = rule(old_logp, behavior_logp, mask)
        checks.check_bool(f"{function}, rule {rule!r}", keep=passed)
        checks.check_shape(f"{function}, rule {rule!r}", "keep", passed, shape)
        keep = keep & passed
    if weights is None:
        value = jnp.ones(shape, jnp.float32)
    else:
        value = weights(old_logp, behavior_logp, mask)
        checks.check_float(f"{function}, weights {weights!r}", weights=value)
        checks.check_shape(f"{function}, weights {weights!r}", "weights", value, shape)
    return masking.zero_masked(value, keep), mask if keep_denominator else keep
