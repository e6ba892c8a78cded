"""Draws one token from logits, with its log-probabilities."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.entropy import EntropyStats, signal_temperature
from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.largest import largest
from jaxrl_llm.core.kernels.vocabulary import log_normalizer
from jaxrl_llm.core.support import Support, pack_bits
from jaxrl_llm.rollout.sampling.filters import (
    GREEDY_BELOW,
    MAX_SORTED,
    filter_logits,
    is_number,
    is_off,
    per_row,
)
from jaxrl_llm.rollout.sampling.penalties import only_allowed, penalize_repetition

_BLOCK = 256


def sample_from(logits: Array, uniform: Array) -> Array:
    """Draws a token from ``softmax(logits)`` by inverting its cumulative distribution.

    One uniform number in [0, 1) a row and two levels of sums (blocks of 256, then inside one block)
    instead of random noise for every entry of the vocabulary. At least one logit of a row is
    finite; a token at -inf is never drawn. Returns int32 ``[...]``.

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

    # Without the barrier XLA would sum all weights once more for the sum of all blocks.
    blocks = jax.lax.optimization_barrier(jnp.sum(weights, axis=-1))
    target = uniform * jnp.sum(blocks, axis=-1)
    block = first_above(blocks, target)
    before = jnp.sum(jnp.where(jnp.arange(blocks.shape[-1]) < block[..., None], blocks, 0.0), -1)
    inside = jnp.take_along_axis(weights, block[..., None, None], axis=-2)[..., 0, :]
    # Rounding may leave the target just outside the block; below 0 it would draw a token of mass 0.
    within = first_above(inside, jnp.maximum(target - before, 0.0))
    return (block * _BLOCK + within).astype(jnp.int32)


class Drawn(NamedTuple):
    """One token a row with its statistics ``[...]``, as in :class:`~jaxrl_llm.rollout.Rollout`.

    An unused field costs nothing under ``jit``. ``behavior_logp`` has penalty, temperature and
    truncation applied; ``model_logp`` is non-finite where a logit of the row is NaN or +inf.
    ``entropy`` is float32 of the distribution really sampled, in nats. ``support`` holds the tokens
    that could have been drawn, as ids where ``top_k`` bounds their number, else as bits; it is None
    where no option truncates. ``runner_up`` is the most likely token of the plain model but the
    drawn one, with its log-probability ``runner_up_logp``.
    """

    tokens: Array
    behavior_logp: Array
    model_logp: Array
    log_kept: Array
    entropy: Array
    support: Support | None
    runner_up: Array
    runner_up_logp: Array


class RowOptions(NamedTuple):
    """The options of :func:`draw_tokens`, where they are described."""

    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    order: str = "hf"
    max_top_k: int | None = None
    seen: Array | None = None
    repetition_penalty: Any = None
    allowed: Any = None
    stop_ids: Sequence[int] = ()
    too_short: Array | None = None
    entropy_tau: float | None = None
    entropy_stats: EntropyStats | None = None


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
    entropy_tau: float | None = None,
    entropy_stats: EntropyStats | None = None,
) -> Drawn:
    """Draws one token per row: penalty, allowed tokens, temperature, filters, draw.

    Options that are None cost nothing. Each of temperature, top_k, top_p, min_p and
    repetition_penalty is a number, or an array ``[...]`` with one per row, in which 0 (for top_p
    and repetition_penalty 1) turns a filter off.

    If ``top_k`` or ``max_top_k`` is known at compile time and at most 1,024, all later steps see
    only that many tokens, and among ties at the threshold the lowest ids survive. Otherwise the
    filters are those of :func:`filter_logits`, where all ties survive. The statistics are always
    those of the sampling distribution.

    Args:
      logits: ``[..., V]`` of the plain model.
      uniform: ``[...]`` in [0, 1).
      temperature, top_k, top_p, min_p, order: See :func:`filter_logits`.
      max_top_k: The largest ``top_k`` of all rows, if that is an array. It bounds every row, even
        one whose ``top_k`` is off.
      seen, repetition_penalty: ``seen`` and ``penalty`` of :func:`penalize_repetition`.
      allowed, stop_ids, too_short: See :func:`only_allowed`.
      entropy_tau, entropy_stats: ``tau`` and ``stats`` of
        :func:`~jaxrl_llm.advantages.signal_temperature`, by which the temperature of each row
        follows the entropy of the plain model; four numbers, or ``[...]`` each.

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
    options = RowOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=order,
        max_top_k=max_top_k,
        seen=seen,
        repetition_penalty=repetition_penalty,
        allowed=allowed,
        stop_ids=stop_ids,
        too_short=too_short,
        entropy_tau=entropy_tau,
        entropy_stats=entropy_stats,
    )
    return draw_rows(logits, uniform, options)


def draw_rows(logits: Array, uniform: Array, options: RowOptions) -> Drawn:
    """:func:`draw_tokens` with its options in one record."""
    name = "draw_tokens"
    checks.check_min_rank(name, 1, logits=logits)
    checks.check_positive(name, max_top_k=options.max_top_k)
    if (options.seen is None) != (options.repetition_penalty is None):
        raise ValueError(f"{name}: seen and repetition_penalty go together; one of them is None.")
    if options.too_short is None and len(options.stop_ids):
        raise ValueError(f"{name}: stop_ids has no effect without too_short.")
    if (options.entropy_tau is None) != (options.entropy_stats is None):
        raise ValueError(f"{name}: entropy_tau and entropy_stats go together; one of them is None.")
    plain = penalized = jnp.asarray(logits, jnp.float32)
    if options.repetition_penalty is not None and options.seen is not None:
        penalized = penalize_repetition(plain, options.seen, penalty=options.repetition_penalty)
    candidates = only_allowed(
        penalized, allowed=options.allowed, stop_ids=options.stop_ids, too_short=options.too_short
    )
    temperature = options.temperature
    if options.entropy_tau is not None and options.entropy_stats is not None:
        factor = signal_temperature(
            entropy_of(plain), EntropyStats(*options.entropy_stats), tau=options.entropy_tau
        )
        temperature = temperature * factor
    size = plain.shape[-1]
    top_k, top_p, min_p = (
        None if is_off(option, value := getattr(options, option), size) else value
        for option in ("top_k", "top_p", "min_p")
    )
    truncates = any(
        x is not None for x in (top_k, top_p, min_p, options.allowed, options.too_short)
    )
    if options.max_top_k is not None and (top_k is None or is_number(top_k)):
        raise ValueError(f"{name}: max_top_k has no effect without an array of top_k.")
    most, ids = int(top_k) if is_number(top_k) else options.max_top_k, None
    if most is not None and most <= min(MAX_SORTED, size):
        candidates, ids = largest(candidates, most)
        top_k = None if is_number(top_k) else top_k
    filtered = filter_logits(
        candidates,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=options.order,
    )
    index = sample_from(filtered, uniform)
    tokens = index if ids is None else _at(ids, index)
    tempered = penalized if truncates else None
    behavior_logp, model_logp, log_kept = _logprobs(
        plain, tempered, filtered, tokens, index, temperature
    )
    support = None
    if truncates:
        in_support = filtered > -jnp.inf
        support = (
            Support(bits=pack_bits(in_support))
            if ids is None
            else Support(ids=jnp.where(in_support, ids, -1))
        )
    others = jnp.where(jnp.arange(size) == tokens[..., None], -jnp.inf, plain)
    runner_up = jnp.argmax(others, axis=-1).astype(jnp.int32)
    runner_up_logp = _at(others, runner_up) - _at(plain, tokens) + model_logp
    return Drawn(
        tokens,
        behavior_logp,
        model_logp,
        log_kept,
        entropy_of(filtered),
        support,
        runner_up,
        runner_up_logp,
    )


def entropy_of(logits: Array) -> Array:
    """Entropy (nats) of ``softmax(logits)``, float32 ``[...]``; tokens at -inf have none."""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    shifted = jnp.where(weights > 0, shifted, 0.0)
    return jnp.log(total) - jnp.sum(weights * shifted, axis=-1) / total


def _at(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def _logprobs(plain, logits, filtered, tokens, index, temperature) -> tuple[Array, Array, Array]:
    """``(behavior_logp, model_logp, log_kept)``; ``index`` is where ``filtered`` has the tokens.

    ``logits`` are those that a filter truncated; None if none did.
    """
    kept_top, kept_total = log_normalizer(filtered)
    plain_top, plain_total = log_normalizer(plain)
    behavior_logp = (_at(filtered, index) - kept_top) - kept_total
    model_logp = (_at(plain, tokens) - plain_top) - plain_total
    if logits is None:
        return behavior_logp, model_logp, jnp.zeros_like(behavior_logp)
    greedy = per_row(temperature, logits) < GREEDY_BELOW
    divisor = jnp.where(greedy, 1.0, per_row(temperature, logits))
    tempered_top, tempered_total = log_normalizer(logits / divisor)
    log_kept = (kept_top - tempered_top) + (kept_total - tempered_total)
    return behavior_logp, model_logp, jnp.where(greedy[..., 0], 0.0, log_kept)


def sampled_logprobs(
    logits: Array, filtered: Array, tokens: Array, *, temperature=1.0
) -> tuple[Array, Array, Array]:
    """Log-probabilities of drawn tokens: see :class:`Drawn`.

        behavior_logp = log softmax(filtered)[token]      of the distribution that was sampled
        model_logp = log softmax(logits)[token]           without temperature and filters
        log_kept = log of the probability that the filters kept, at the temperature

    Args:
      logits: ``[..., V]``, of the plain model.
      filtered: ``[..., V]``, from :func:`filter_logits` of the same logits and temperature.
      tokens: int32 ``[...]``.
      temperature: Scalar or ``[...]``.

    Returns:
      ``(behavior_logp, model_logp, log_kept)``, each float32 ``[...]`` in nats. Greedy rows have
      ``behavior_logp = log_kept = 0``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
      >>> filtered = jr.rollout.filter_logits(logits, top_k=2)
      >>> logprobs = jr.rollout.sampled_logprobs(logits, filtered, jnp.array(1))
      >>> [round(float(jnp.exp(x)), 3) for x in logprobs]
      [0.333, 0.25, 0.75]
    """
    logits = jnp.asarray(logits, jnp.float32)
    return _logprobs(logits, logits, filtered, tokens, tokens, temperature)
