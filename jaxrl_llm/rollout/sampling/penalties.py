"""Changes to the logits before any filter: a repetition penalty, and disallowed tokens.

A disallowed token is only removed from the candidates, which the recorded support shows. A
repetition penalty changes the distribution itself, which the support does not show:
``behavior_logp`` is under the penalized distribution. Training does not penalize, so such rollouts
are off-policy and need a correction.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.support import pack_bits, unpack_bits
from jaxrl_llm.rollout.sampling.filters import per_row


def seen_tokens(tokens: Array, mask: Array, *, vocab_size: int) -> Array:
    """The set of tokens that a text holds, 32 to a word: uint32 ``[..., ceil(V / 32)]``.

    ``tokens`` are integers ``[..., L]``, ``mask`` is True for those that exist. The words are those
    of :func:`~jaxrl_llm.core.support.pack_bits`.

    Example:
      >>> import jax.numpy as jnp
      >>> seen_tokens(jnp.array([0, 2, 1]), jnp.array([True, True, False]), vocab_size=4).tolist()
      [5]
    """
    checks.check_integer("seen_tokens", tokens=tokens)
    checks.check_bool("seen_tokens", mask=mask)
    checks.check_same_shape("seen_tokens", tokens=tokens, mask=mask)
    tokens = jnp.asarray(tokens)
    ids = jnp.where(jnp.asarray(mask) & (tokens >= 0), tokens, vocab_size)
    flat = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    seen = jnp.zeros((len(flat), vocab_size), bool)
    seen = seen.at[jnp.arange(len(flat))[:, None], flat].set(True, mode="drop")
    return pack_bits(seen).reshape(*tokens.shape[:-1], -1)


def add_seen(seen: Array, token: Array, where: Array | bool = True) -> Array:
    """The sets of :func:`seen_tokens` with one more token ``[...]`` each, where ``where`` is True.

    Example:
      >>> import jax.numpy as jnp
      >>> add_seen(jnp.array([5], jnp.uint32), jnp.array(1)).tolist()
      [7]
    """
    token = jnp.asarray(token)[..., None]
    bit = jnp.uint32(1) << (token % 32).astype(jnp.uint32)
    hit = (jnp.arange(seen.shape[-1]) == token // 32) & jnp.asarray(where)[..., None]
    return jnp.where(hit, seen | bit, seen)


def penalize_repetition(logits: Array, seen: Array, *, penalty) -> Array:
    """Makes tokens that were seen less likely.

        z' = z / penalty where z > 0, else z * penalty, for a token seen; z for any other

    Args:
      logits: ``[..., V]``, before the temperature.
      seen: uint32 ``[..., ceil(V / 32)]`` from :func:`seen_tokens`: prompt and response so far.
      penalty: Above 0, scalar or ``[...]``; 1 changes nothing, below 1 encourages repetition.

    Returns:
      float32 ``[..., V]``.

    Raises:
      ValueError: If the penalty is not above 0 or the shape of ``seen`` is another.
      TypeError: If ``seen`` is not uint32.

    Example:
      >>> import jax.numpy as jnp
      >>> seen = seen_tokens(jnp.array([0, 1]), jnp.array([True, True]), vocab_size=3)
      >>> penalize_repetition(jnp.array([2.0, -2.0, 2.0]), seen, penalty=2.0).tolist()
      [1.0, -4.0, 2.0]

    References:
      CTRL (arXiv:1909.05858); with the sign of the logit as in transformers' code.
    """
    name = "penalize_repetition"
    checks.check_positive(name, penalty=penalty)
    logits = jnp.asarray(logits, jnp.float32)
    size = logits.shape[-1]
    if jnp.result_type(seen) != jnp.uint32:
        raise TypeError(f"{name}: seen must be uint32 words; got {jnp.result_type(seen)}.")
    checks.check_shape(name, "seen", seen, (*logits.shape[:-1], -(-size // 32)))
    penalty = per_row(penalty, logits)
    changed = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(unpack_bits(seen, size), changed, logits)


def only_allowed(
    logits: Array,
    *,
    allowed: Array | None = None,
    stop_ids: Sequence[int] = (),
    too_short: Array | None = None,
) -> Array:
    """Logits with disallowed tokens at -inf.

    Args:
      logits: ``[..., V]``.
      allowed: bool ``[V]`` or ``[..., V]``, True for tokens that may be drawn.
      stop_ids: Tokens that end a response.
      too_short: bool ``[...]``, True where a response must not end yet.

    Returns:
      float32 ``[..., V]``. A row without any token left has a non-finite log-probability.

    Raises:
      ValueError: If shapes differ or ``too_short`` has no stop tokens to hold back.
      TypeError: If one of the two masks is not bool.

    Example:
      >>> import jax.numpy as jnp
      >>> short = jnp.array([True, False])
      >>> only_allowed(jnp.zeros((2, 3)), stop_ids=[2], too_short=short).tolist()
      [[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]
    """
    name = "only_allowed"
    checks.check_bool(name, allowed=allowed, too_short=too_short)
    logits = jnp.asarray(logits, jnp.float32)
    size = logits.shape[-1]
    if allowed is not None:
        if jnp.shape(allowed) not in ((size,), logits.shape):
            raise ValueError(
                f"{name}: allowed must have shape {(size,)} or {logits.shape}; got "
                f"{jnp.shape(allowed)}."
            )
        logits = jnp.where(allowed, logits, -jnp.inf)
    if too_short is not None:
        if not len(stop_ids):
            raise ValueError(f"{name}: too_short has no effect without stop_ids.")
        checks.check_shape(name, "too_short", too_short, logits.shape[:-1])
        stops = np.isin(np.arange(size), np.asarray(stop_ids))
        logits = jnp.where(jnp.asarray(too_short)[..., None] & stops, -jnp.inf, logits)
    return logits
