"""Starts of the segments whose prefixes are valued, and selections of training tokens.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

__all__ = ["line_starts", "spo_cutpoints", "stretch_starts", "uncertain_tokens"]


def line_starts(breaks: Array, mask: Array, *, count: int) -> Array:
    """The first token of each line: the first of the response, and those after a line break.

    Empty lines, and lines of one token that ends with a break, belong to the line before.

    Args:
      breaks: bool ``[..., T]``, True for tokens whose text has a line break.
      mask: bool ``[..., T]``, True for the tokens of the response.
      count: C, maximum number of lines, at least 1; the last line includes the rest.

    Returns:
      int32 ``[..., C]``, increasing positions; -1 where there are fewer lines.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> breaks = jnp.array([False, True, True, False, True])
      >>> jr.curation.line_starts(breaks, jnp.ones(5, bool), count=3).tolist()
      [0, 3, -1]

    References:
      VinePPO (arXiv:2410.01679), the released code, whose steps are lines of the text.
    """
    name = "line_starts"
    checks.check_mask(name, mask)
    checks.check_bool(name, breaks=breaks)
    checks.check_same_shape(name, breaks=breaks, mask=mask)
    breaks, mask = jnp.asarray(breaks), jnp.asarray(mask)
    start = jnp.ones_like(breaks[..., :1])
    after = jnp.concatenate([start, breaks[..., :-1] & ~breaks[..., 1:]], axis=-1)
    first = masking.last_token(mask[..., ::-1])[..., ::-1]
    return _places(name, (after | first) & mask, count)


def stretch_starts(mask: Array, *, count: int, length: int) -> Array:
    """The first token of each segment of ``length`` tokens.

    Args:
      mask: bool ``[..., T]``, True for the tokens of the response.
      count: C, maximum number of segments, at least 1; the last segment includes the rest.
      length: Tokens of a segment, at least 1.

    Returns:
      int32 ``[..., C]``, increasing positions; -1 where there are fewer.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.stretch_starts(jnp.ones(5, bool), count=4, length=2).tolist()
      [0, 2, 4, -1]

    References:
      VinePPO (arXiv:2410.01679) with steps of equal length, which are ours.
    """
    name = "stretch_starts"
    checks.check_mask(name, mask)
    checks.check_count(name, length=length)
    number = jnp.cumsum(mask, axis=-1) - 1
    return _places(name, mask & (number % length == 0), count)


def spo_cutpoints(
    old_logp: Array, mask: Array, *, count: int, rho: float = 0.9, interval: int = 5
) -> Array:
    """Segments with a fixed number of uncertain tokens; each begins with an uncertain token.

        uncertain = exp(old_logp) < rho;   every interval-th of them, the first included

    Args:
      old_logp: ``[..., T]`` log-probabilities (nats) of the policy that sampled.
      mask: bool ``[..., T]``, True for the tokens of the response.
      count: C, maximum number of segments, at least 1; the last segment includes the rest.
      rho: Probability from which a token counts as certain, above 0.
      interval: Uncertain tokens of a segment, at least 1.

    Returns:
      int32 ``[..., C]``, increasing positions of the first tokens; -1 where there are fewer. Tokens
      before the first position belong to no segment.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp = jnp.log(jnp.array([0.5, 0.95, 0.6, 0.99, 0.3, 0.97]))
      >>> mask = jnp.ones(6, bool)
      >>> jr.curation.spo_cutpoints(old_logp, mask, count=4, interval=1).tolist()
      [0, 2, 4, -1]

    References:
      SPO-chain (arXiv:2505.23564), the released code, whose cut is the last token before the
      position.
    """
    name = "spo_cutpoints"
    masking.check_tokens(name, mask, old_logp=old_logp)
    checks.check_positive(name, rho=rho)
    checks.check_count(name, interval=interval)
    unlikely = masking.unlikely(old_logp, mask, rho)
    number = jnp.cumsum(unlikely, axis=-1) - 1
    return _places(name, unlikely & (number % interval == 0), count)


def _places(function: str, flags: Array, count: int) -> Array:
    """The first ``count`` places that are True, -1 where there are fewer."""
    checks.check_count(function, count=count)
    order = jnp.argsort(~flags, axis=-1, stable=True)[..., :count]
    missing = count - order.shape[-1]
    order = jnp.pad(order, [(0, 0)] * (order.ndim - 1) + [(0, missing)])
    there = jnp.arange(count) < jnp.sum(flags, axis=-1, keepdims=True)
    return jnp.where(there, order, -1).astype(jnp.int32)


def uncertain_tokens(advantages: Array, mask: Array, *, old_logp: Array, rho: float = 0.9) -> Array:
    """A selection: the tokens of which the sampling policy was uncertain.

        keep = exp(old_logp) < rho

    Args:
      advantages: Not read.
      mask: bool ``[..., T]``.
      old_logp: ``[..., T]`` log-probabilities (nats).
      rho: Probability from which a token counts as certain, above 0.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp = jnp.log(jnp.array([0.5, 0.95]))
      >>> jr.curation.uncertain_tokens(jnp.zeros(2), jnp.ones(2, bool), old_logp=old_logp).tolist()
      [True, False]

    References:
      SPO-chain (arXiv:2505.23564), the released code, whose KL term also excludes the other tokens.
    """
    del advantages
    name = "uncertain_tokens"
    masking.check_tokens(name, mask, old_logp=old_logp)
    checks.check_positive(name, rho=rho)
    return masking.unlikely(old_logp, mask, rho)
