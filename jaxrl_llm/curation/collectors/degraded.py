"""A collector of pairs of the data with degraded copies of the chosen response."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.offline import Offline, offline_pairs
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Request,
    Response,
    on_host,
)

__all__ = ["degraded_pairs"]


@dataclasses.dataclass(frozen=True, repr=False)
class _Degraded(Offline):
    """Made by :func:`degraded_pairs`."""

    remove: Callable
    degrees: int

    def read(self, request: Request, collection: Collection) -> Request:
        request = super().read(request, collection)
        chosen, rejected = request.responses
        copies = self._copies(chosen, collection)
        responses = (chosen, rejected, *copies)
        return request._replace(rollouts=len(responses), responses=responses)

    def _copies(self, chosen: Response, collection: Collection) -> list[Response]:
        """Shortened copies of the response, one per new length; its stop token stays."""
        tokens = chosen.tokens
        tokens = collection.encode(tokens, ends=True) if isinstance(tokens, str) else tokens
        tokens = np.asarray(tokens, np.int32)
        length = len(tokens) - int(tokens[-1] in collection.stop_ids)
        size = power_of_two(length)
        salience, there = np.zeros(size, np.float32), np.arange(size) < length
        salience[:length] = [len(collection.decode([int(x)]).strip()) for x in tokens[:length]]
        shares = np.arange(1, self.degrees, dtype=np.float32) / self.degrees
        with on_host():
            # The copies of a response are the same whenever it comes.
            key = jax.random.key(zlib.crc32(tokens.tobytes()))
            remain = np.asarray(_remove(key, salience, there, shares, remove=self.remove))
        copies, longest = [], length
        for share, mask in zip(shares.tolist(), remain[:, :length], strict=True):
            if 0 < (count := int(mask.sum())) < longest:
                rest = np.append(mask, np.ones(len(tokens) - length, bool))
                copies.append(Response(tokens[rest], reward=1.0 - share))
                longest = count
        return copies

    def __repr__(self) -> str:
        options = [stable_repr(self.remove), f"degrees={self.degrees}", *self.options()]
        return f"degraded_pairs({', '.join(options)})"


def _removed(key, salience, mask, shares, *, remove: Callable):
    return jax.vmap(lambda share: remove(key, salience, mask, fraction=share))(shares)


_remove = jax.jit(_removed, static_argnames="remove")


def degraded_pairs(
    remove: Callable,
    *,
    degrees: int = 4,
    chosen: str = "chosen",
    rejected: str = "rejected",
    source: Collector | None = None,
) -> Collector:
    """Pairs of the data, and increasingly degraded copies of the chosen response.

        group = (chosen, rejected, copy 1, ..., copy M - 1)
        rewards = (1, 0, 1 - 1 / M, ..., 1 / M);   copy k lost the share k / M of its tokens

    The reward of a copy is the remaining share of its tokens, and a pairwise loss compares the
    chosen response with the rejected one, the best and the worst. The tokens of the longest texts,
    which carry the content, are removed first. A response that is too short for M different copies
    has fewer copies.

    Args:
      remove: ``(key, salience [T], mask [T], *, fraction) -> bool [T]``, the tokens that remain,
        such as ``preferences.degrade_mask``.
      degrees: M, at least 2, including the response itself.
      chosen, rejected, source: As in :func:`offline_pairs`.

    Returns:
      A collector of groups of M + 1; its state is that of ``source``.

    Raises:
      TypeError: If ``remove`` is not a function or ``degrees`` not an integer.
      ValueError: If ``degrees`` is below 2, and as in :func:`offline_pairs`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.degraded_pairs(jr.preferences.degrade_mask).width(8)
      5

    References:
      Self-supervised preference optimization (arXiv:2409.17791), which removes key content at
      several strengths. Confidence: ABSTRACT; which tokens are key content is ours.
    """
    name = "degraded_pairs"
    if not callable(remove):
        raise TypeError(f"{name}: remove must be a function; got {remove!r}.")
    checks.check_count(name, degrees=degrees)
    if degrees < 2:
        raise ValueError(f"{name}: degrees must be at least 2; got {degrees}.")
    pairs: Any = offline_pairs(chosen=chosen, rejected=rejected, source=source)
    return _Degraded(name, pairs.reader, degrees + 1, pairs.source, remove, degrees)
