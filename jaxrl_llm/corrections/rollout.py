"""Weights and rejection rules together, for the ``correction`` slot of a Recipe.

``weights`` is a function that returns a weight per token, None for 1; ``reject`` are functions that
return the tokens to keep, bool; a token must pass all. With neither it has no effect, and
without a rule ``keep_denominator`` has none: both raise ValueError.
A function that returns another shape raises ValueError, one of another dtype TypeError. Other
shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.corrections`.
"""

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
    """Weighs tokens by their ratio to the policy that sampled them, and drops outliers.

        keep[t] = mask[t] and rule[t] of every rule in ``reject``
        w[t] = weights(...)[t] where keep[t] (1 without ``weights``), 0 elsewhere

    Weights and rules are functions ``(old_logp, behavior_logp, mask) -> [..., T]`` with their
    options bound, from this package or custom. Each gets the full mask, so a mean weight includes
    rejected tokens. With a surrogate that has a ratio to ``old_logp`` this is the decoupled loss
    with three policies. If instead ``old_logp`` is ``behavior_logp``, that ratio is the correction,
    and all weights here are 1.

    Args:
      old_logp, behavior_logp, mask: See the package.
      weights, reject: See the module.
      keep_denominator: If False, rejected tokens leave the mask, so the loss is an average over the
        other tokens (verl). If True they have weight 0 and still count in the average (AReaL).

    Returns:
      ``(weights, keep)``, as in the package; a rejected token has weight 0.

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
      masks agree with verl's on random data, except for the sign in :func:`rejection_mask`.
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
    """:func:`rollout_correction` of sequences, for surrogates with one value per sequence.

        one weight and one decision per sequence, repeated over its tokens

    A function whose result differs between tokens of a sequence raises ValueError: each function
    must have a ``level`` other than "token" bound, or ``core.traits(level="sequence")``.

    Args:
      old_logp, behavior_logp, mask: See the package.
      weights, reject: See the module.
      keep_denominator: As in :func:`rollout_correction`, of sequences.

    Returns:
      ``(weights, keep)`` as of :func:`rollout_correction`.

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
    if weights is None and not reject:
        raise ValueError(f"{function}: it has no effect without weights or a rule in reject.")
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
