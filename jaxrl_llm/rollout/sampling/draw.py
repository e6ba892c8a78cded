"""One token from logits: which one is drawn, and how likely it was."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.largest import largest
from jaxrl_llm.core.kernels.vocabulary import log_normalizer
from jaxrl_llm.core.support import Support, pack_bits
from jaxrl_llm.rollout.sampling.filters import (
    GREEDY_BELOW,
    MANY,
    filter_logits,
    is_number,
    is_off,
    per_row,
)
from jaxrl_llm.rollout.sampling.penalties import only_allowed, penalize_repetition

_BLOCK = 256


def sample_from(logits: Array, uniform: Array) -> Array:
    """Draws a token from ``softmax(logits)`` by inverting its cumulative distribution.

    One uniform number a row and two levels of sums (blocks of 256, then inside one block) instead
    of random noise for every entry of the vocabulary. A token at -inf is never drawn.

    Args:
      logits: ``[..., V]``, at least one finite a row.
      uniform: ``[...]`` in [0, 1).

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
      >>> [int(sample_from(logits, jnp.float32(u))) for u in (0.0, 0.4, 0.6, 0.99)]
      [0, 0, 1, 2]
    """
    checks.check_min_rank("sample_from", 1, logits=logits)
    checks.check_shape("sample_from", "uniform", uniform, jnp.shape(logits)[:-1])
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    pad = -weights.shape[-1] % _BLOCK
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, pad)])
    weights = weights.reshape(*weights.shape[:-1], -1, _BLOCK)

    def first_above(mass: Array, target: Array) -> Array:
        """Where the running sum first exceeds the target, at the latest the last with mass."""
        index = jnp.sum(jnp.cumsum(mass, axis=-1) <= target[..., None], axis=-1)
        last = mass.shape[-1] - 1 - jnp.argmax(mass[..., ::-1] > 0, axis=-1)
        return jnp.minimum(index, last)

    blocks = jnp.sum(weights, axis=-1)
    target = uniform * jnp.sum(blocks, axis=-1)
    block = first_above(blocks, target)
    before = jnp.sum(jnp.where(jnp.arange(blocks.shape[-1]) < block[..., None], blocks, 0.0), -1)
    inside = jnp.take_along_axis(weights, block[..., None, None], axis=-2)[..., 0, :]
    # Rounding may leave the target just below the block's own mass; below 0 it would draw a token
    # without any.
    within = first_above(inside, jnp.maximum(target - before, 0.0))
    return (block * _BLOCK + within).astype(jnp.int32)


class Drawn(NamedTuple):
    """One token a row, with what is recorded of it. What is not used costs nothing under ``jit``.

    Attributes:
      tokens: int32 ``[...]``.
      behavior_logp: float32 ``[...]``, log-probability under the distribution really sampled, with
        penalty, temperature and truncation applied; 0 for greedy rows.
      model_logp: float32 ``[...]``, under the plain model at temperature 1. No number where a logit
        of the row is none.
      log_kept: float32 ``[...]``, log of the tempered mass that truncation kept.
      entropy: float32 ``[...]`` of the distribution really sampled, in nats.
      support: The tokens that could have been drawn, or None where no option truncates: as ids
        where ``top_k`` bounds their number, else as bits.
    """

    tokens: Array
    behavior_logp: Array
    model_logp: Array
    log_kept: Array
    entropy: Array
    support: Support | None


def draw_tokens(
    logits: Array,
    uniform: Array,
    *,
    temperature=1.0,
    top_k=None,
    top_p=None,
    min_p=None,
    order: str = "hf",
    max_top_k: int | None = None,
    seen: Array | None = None,
    repetition_penalty=None,
    allowed: Array | None = None,
    stop_ids: Sequence[int] = (),
    too_short: Array | None = None,
) -> Drawn:
    """Draws one token a row: penalty, allowed tokens, temperature, filters, draw.

    Options that are None cost nothing. Each of temperature, top_k, top_p, min_p and
    repetition_penalty is a number, or an array ``[...]`` with one a row, in which 0 (for top_p and
    repetition_penalty 1) turns a filter off.

    Where the number of tokens that top-k keeps is known to be 1,024 at most, everything after it
    happens among that many, and of tokens that are equally likely at the threshold those of the
    lowest ids are kept, so that there are never more. Elsewhere the filters are those of
    :func:`filter_logits`, which keeps them all. What is recorded is always what was drawn from.

    Args:
      logits: ``[..., V]`` of the plain model.
      uniform: ``[...]`` in [0, 1).
      temperature: See :func:`filter_logits`, as for the next four.
      top_k: Likewise.
      top_p: Likewise.
      min_p: Likewise.
      order: Likewise.
      max_top_k: The greatest ``top_k`` of all rows, where that is an array. No row keeps more, not
        even one whose ``top_k`` is off.
      seen: Tokens that ``repetition_penalty`` makes less likely: see :func:`penalize_repetition`.
      repetition_penalty: Likewise.
      allowed: Which tokens may be drawn: see :func:`only_allowed`, as for the next two.
      stop_ids: Likewise.
      too_short: Likewise.

    Returns:
      A :class:`Drawn`.

    Raises:
      ValueError: If an option is out of range or has no effect.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
      >>> drawn = jr.rollout.draw_tokens(logits, jnp.float32(0.9), top_k=2)
      >>> int(drawn.tokens), drawn.support.ids.tolist(), round(float(drawn.behavior_logp), 4)
      (1, [0, 1], -1.0986)

    References:
      The order of transformers' logits processors, or vLLM's: see :func:`filter_logits`.
    """
    name = "draw_tokens"
    checks.check_min_rank(name, 1, logits=logits)
    checks.check_positive(name, max_top_k=max_top_k)
    if (seen is None) != (repetition_penalty is None):
        raise ValueError(f"{name}: seen and repetition_penalty go together; one of them is None.")
    if too_short is None and len(stop_ids):
        raise ValueError(f"{name}: stop_ids has no effect without too_short.")
    plain = penalized = jnp.asarray(logits, jnp.float32)
    if repetition_penalty is not None:
        penalized = penalize_repetition(plain, seen, penalty=repetition_penalty)
    among = only_allowed(penalized, allowed=allowed, stop_ids=stop_ids, too_short=too_short)
    size = plain.shape[-1]
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {k: x for k, x in options.items() if not is_off(k, x, size)}
    truncates = bool(options) or allowed is not None or too_short is not None
    bound = _bound(name, options.get("top_k"), max_top_k, size)
    ids = None
    if bound is not None:
        among, ids = largest(among, bound)
        if is_number(options["top_k"]):
            del options["top_k"]
    kept = filter_logits(among, temperature=temperature, order=order, **options)
    place = sample_from(kept, uniform)
    tokens = place if ids is None else _at(ids, place)
    logps = _logprobs(plain, penalized, kept, tokens, place, temperature)
    support = None
    if truncates:
        found = kept > -jnp.inf
        support = Support(bits=pack_bits(found))
        if ids is not None:
            support = Support(ids=jnp.where(found, ids, -1))
    return Drawn(tokens, *logps, _entropy(kept), support)


def _bound(name: str, top_k, max_top_k: int | None, vocab_size: int) -> int | None:
    """How many tokens any row keeps at most, if that is known and few."""
    if max_top_k is not None and (top_k is None or is_number(top_k)):
        raise ValueError(f"{name}: max_top_k has no effect without an array of top_k.")
    bound = int(top_k) if is_number(top_k) else max_top_k
    return bound if bound is not None and bound <= min(MANY, vocab_size) else None


def _entropy(kept: Array) -> Array:
    """Entropy of ``softmax(kept)``, in nats: ``[...]``."""
    below = kept - jnp.max(kept, axis=-1, keepdims=True)
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=-1)
    below = jnp.where(weights > 0, below, 0.0)
    return jnp.log(total) - jnp.sum(weights * below, axis=-1) / total


def _at(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def _logprobs(plain, logits, kept, tokens, places, temperature) -> tuple[Array, Array, Array]:
    """``(behavior_logp, model_logp, log_kept)``; ``places`` are those of the tokens in ``kept``."""
    greedy = per_row(temperature, logits) < GREEDY_BELOW
    divisor = jnp.where(greedy, 1.0, per_row(temperature, logits))
    tempered_top, tempered_total = log_normalizer(logits / divisor)
    kept_top, kept_total = log_normalizer(kept)
    plain_top, plain_total = log_normalizer(plain)
    behavior_logp = (_at(kept, places) - kept_top) - kept_total
    model_logp = (_at(plain, tokens) - plain_top) - plain_total
    log_kept = (kept_top - tempered_top) + (kept_total - tempered_total)
    return behavior_logp, model_logp, jnp.where(greedy[..., 0], 0.0, log_kept)


def sampled_logprobs(
    logits: Array, filtered: Array, tokens: Array, *, temperature=1.0
) -> tuple[Array, Array, Array]:
    """The log-probabilities of drawn tokens, under the names a :class:`Rollout` gives them.

    Args:
      logits: ``[..., V]`` of the plain model.
      filtered: ``[..., V]`` from :func:`filter_logits` of the same logits.
      tokens: Integers ``[...]``.
      temperature: The one given to :func:`filter_logits`.

    Returns:
      ``(behavior_logp, model_logp, log_kept)``, each ``[...]``: under the distribution really
      sampled, under the plain model, and the log of the tempered mass that truncation kept.
      ``behavior_logp + log_kept`` is the tempered log-probability. Greedy rows have ``behavior_logp
      = log_kept = 0``. Of a row in which a logit is no number, neither is ``model_logp``.
    """
    logits = jnp.asarray(logits, jnp.float32)
    return _logprobs(logits, logits, filtered, tokens, tokens, temperature)
