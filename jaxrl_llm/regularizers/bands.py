"""EPO: keeps the entropy of each turn in a band around its history.

Shared arguments:
  ``turn_ids``: int ``[..., T]``, the turn of each token; below 0 for tokens of an environment.
  ``mask``: bool ``[..., T]``, True = keep.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, bind, checks, masking, prints_as_call


class EntropyHistory(NamedTuple):
    """The mean entropy of each turn over the steps so far.

    Attributes:
      total: float32 ``[S]``, sum over the steps of the mean entropy of the turn's tokens.
      steps: float32 ``[S]``, steps in which the turn occurred.
    """

    total: Array
    steps: Array

    @property
    def mean(self) -> Array:
        """float32 ``[S]``; 0 for turns that never occurred."""
        return self.total / jnp.maximum(self.steps, 1.0)


def entropy_history_init(*, turns: int) -> EntropyHistory:
    """The history before the first step.

    Args:
      turns: S, the maximum number of turns of a rollout, at least 1.

    Returns:
      :class:`EntropyHistory` of zeros.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.entropy_history_init(turns=2).mean.tolist()
      [0.0, 0.0]

    References:
      EPO (arXiv:2509.22576).
    """
    checks.check_positive("entropy_history_init", finite=True, turns=turns)
    return EntropyHistory(jnp.zeros(turns, jnp.float32), jnp.zeros(turns, jnp.float32))


def entropy_history_update(
    state: EntropyHistory, old_entropy: Array, mask: Array, *, turn_ids: Array
) -> EntropyHistory:
    """The history after one more step.

        total[s] += mean entropy of the tokens of turn s,  steps[s] += 1    where turn s occurred

    Args:
      state: The history before.
      old_entropy: ``[..., T]`` entropy (nats) of the policy that sampled.
      mask, turn_ids: See the module.

    Returns:
      :class:`EntropyHistory`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.regularizers.entropy_history_init(turns=2)
      >>> state = jr.regularizers.entropy_history_update(
      ...     state, jnp.array([1.0, 3.0]), jnp.ones(2, bool), turn_ids=jnp.array([0, 0]))
      >>> state.mean.tolist(), state.steps.tolist()
      ([2.0, 0.0], [1.0, 0.0])

    References:
      EPO (arXiv:2509.22576). The released code counts a turn that did not occur as entropy 0.
    """
    function = "entropy_history_update"
    masking.check_tokens(function, mask, old_entropy=old_entropy)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    turns = state.total.shape[0]
    counted = mask & (jnp.asarray(turn_ids) >= 0) & (jnp.asarray(turn_ids) < turns)
    rows = (math.prod(jnp.shape(mask)[:-1]), jnp.shape(mask)[-1])
    place = jnp.where(counted, turn_ids, turns).reshape(rows)
    entropy = masking.zero_masked(old_entropy, counted).reshape(rows)

    def of_row(x: Array, place: Array) -> Array:
        return jnp.zeros(turns).at[place].add(x, mode="drop")

    # Row by row: one by one, float32 counts no further than 2^24.
    sums = jnp.sum(jax.vmap(of_row)(entropy, place), axis=0)
    tokens = jnp.sum(jax.vmap(of_row)(jnp.ones_like(entropy), place), axis=0)
    there = (tokens > 0).astype(jnp.float32)
    return EntropyHistory(state.total + sums / jnp.maximum(tokens, 1.0), state.steps + there)


@dataclasses.dataclass(frozen=True)
class _History:
    """The update half of :func:`entropy_history` of one turn."""

    def __call__(self, rewards, state, *, old_entropy, mask, where=None, **context):
        tokens = mask if where is None else mask & where[..., None]
        turn_ids = jnp.zeros(jnp.shape(mask), jnp.int32)
        state = entropy_history_update(state, old_entropy, tokens, turn_ids=turn_ids)
        return state.mean[0], state


@dataclasses.dataclass(frozen=True)
class _Histories:
    """The same of several turns."""

    def __call__(self, rewards, state, *, old_entropy, mask, turn_ids, where=None, **context):
        tokens = mask if where is None else mask & where[..., None]
        state = entropy_history_update(state, old_entropy, tokens, turn_ids=turn_ids)
        turns = state.total.shape[0]
        of_tokens = state.mean[jnp.clip(turn_ids, 0, turns - 1)]
        return masking.zero_masked(of_tokens, (turn_ids >= 0) & (turn_ids < turns)), state


@prints_as_call
def entropy_history(*, turns: int = 1) -> Transform:
    """A controller whose value is the mean entropy of the steps so far, including this one.

        value of a token = mean over the steps in which its turn occurred
                           of the mean entropy of the tokens of that turn

    Each step counts the same, whatever its number of tokens.

    Args:
      turns: Number of turns with a history; later turns have the value 0. With 1 a response is one
        turn.

    Returns:
      A Transform ``rewards -> history`` for a recipe's ``computed`` "controller": a float32 scalar
      with one turn and ``[..., T]`` with several. Its state is an :class:`EntropyHistory`. It reads
      ``old_entropy``, ``mask``, with several turns ``turn_ids``, and, if present, ``where`` of the
      global batch.

    Raises:
      ValueError: If ``turns`` is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> history = jr.regularizers.entropy_history()
      >>> state, mask = history.init(), jnp.ones((1, 1, 2), bool)
      >>> for entropy in (1.0, 2.0):
      ...     value, state = history.update(
      ...         jnp.ones((1, 1)), state, old_entropy=jnp.full((1, 1, 2), entropy), mask=mask)
      >>> float(value)
      1.5

    References:
      EPO (arXiv:2509.22576).
    """
    checks.check_positive("entropy_history", finite=True, turns=turns)
    init = bind(entropy_history_init, turns=turns)
    return Transform(init, _History() if turns == 1 else _Histories())


def epo_phase_weight(progress: float | Array) -> Array:
    """The weight of the band over training: it decreases slowly, then fast.

        p <= 1/2:   1 - 0.2 (1 - exp(-4 p))
        p > 1/2:    0.8 exp(-6 (p - 1/2))

    It jumps from 0.827 to 0.8 in the middle and ends at 0.040.

    Args:
      progress: ``[...]``, completed share of the training, in [0, 1].

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jaxrl_llm as jr
      >>> [round(float(jr.regularizers.epo_phase_weight(p)), 3) for p in (0.0, 0.5, 1.0)]
      [1.0, 0.827, 0.04]

    References:
      EPO (arXiv:2509.22576), the released code. In the abstract of its second version the weight
      increases instead.
    """
    checks.check_min_rank("epo_phase_weight", 0, progress=progress)
    p = jnp.clip(jnp.asarray(progress, jnp.float32), 0.0, 1.0)
    slow = 1.0 - 0.2 * (1.0 - jnp.exp(-4.0 * p))
    return jnp.where(p <= 0.5, slow, 0.8 * jnp.exp(-6.0 * (p - 0.5)))


def entropy_band(
    entropy: Array,
    mask: Array,
    *,
    history: Array,
    turn_ids: Array | None = None,
    coef: float = 1e-3,
    low: float = 0.0,
    high: float = 2.0,
    alpha: float = 0.1,
    weight: float | Array = 1.0,
    from_turn: int = 0,
    form: Literal["hinge", "indicator"] = "hinge",
) -> Array:
    """An entropy bonus minus a penalty for tokens outside a band around their turn's history.

        loss[t] = -coef (H[t] - weight P[t])
        "indicator"  P = alpha [not low h < H < high h],              h = history of the turn
        "hinge"      P = alpha (max(low h - H, 0) + max(H - high h, 0)) / h

    Args:
      entropy: ``[..., T]`` entropy (nats) under the policy being trained.
      mask: See the module.
      history: ``[S]``, floating point: ``EntropyHistory.mean``. Without ``turn_ids``, the value of
        :func:`entropy_history`: ``[]``, or an array with the axes of ``[..., T]``, each full or 1.
      turn_ids: See the module; None where a response is one turn.
      coef: Bonus per nat, in units of the policy loss, not negative.
      low: Lower end of the band as a share of the history, not negative.
      high: Upper end of the band as a share of the history, not below ``low``.
      alpha: Size of the penalty, not negative.
      weight: ``[]``, such as :func:`epo_phase_weight`, or an array with the axes of ``[..., T]``,
        each full or 1.
      from_turn: First turn that is penalized; the released code starts at half of the turns.
      form: "indicator" is the released form, whose gradient is 0: it changes the reported loss but
        not the update. "hinge" is 0 inside the band and has a gradient outside.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked. Turns without a history have no penalty.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> loss = jr.regularizers.entropy_band(
      ...     jnp.array([0.4, 1.0, 2.0]), jnp.ones(3, bool), turn_ids=jnp.zeros(3, int),
      ...     history=jnp.array([1.0]), coef=1.0, low=0.5, high=1.5)
      >>> loss.round(3).tolist()
      [-0.39..., -1.0, -1.95...]

    References:
      EPO (arXiv:2509.22576), the released code; the hinge is ours.
    """
    function = "entropy_band"
    masking.check_tokens(function, mask, entropy=entropy)
    checks.check_float(function, history=history)
    checks.check_non_negative(function, finite=True, coef=coef, low=low, alpha=alpha)
    checks.check_option(function, "form", form, ("hinge", "indicator"))
    if not low <= high:
        raise ValueError(f"{function}: low must not be above high; got {low:g} and {high:g}.")
    checks.check_coefficients(function, "the token loss", jnp.shape(mask), weight=weight)
    mean = jnp.asarray(history, jnp.float32)
    if turn_ids is None:
        checks.check_no_effect(function, "without turn_ids", from_turn=from_turn or None)
        checks.check_coefficients(function, "the token loss", jnp.shape(mask), history=history)
        known = mask & (mean > 0)
    else:
        checks.check_integer(function, turn_ids=turn_ids)
        checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
        checks.check_rank(function, 1, history=history)
        turns = jnp.shape(history)[0]
        turn = jnp.asarray(turn_ids)
        mean = mean[jnp.clip(turn, 0, turns - 1)]
        known = mask & (turn >= from_turn) & (turn >= 0) & (turn < turns) & (mean > 0)
    mean = jnp.where(known, mean, 1.0)
    entropy = masking.zero_masked(entropy, mask)
    if form == "indicator":
        penalty = alpha * ~((entropy > low * mean) & (entropy < high * mean))
    else:
        below, above = low * mean - entropy, entropy - high * mean
        penalty = alpha * (jnp.maximum(below, 0.0) + jnp.maximum(above, 0.0)) / mean
    return masking.zero_masked(-coef * (entropy - weight * jnp.where(known, penalty, 0.0)), mask)
