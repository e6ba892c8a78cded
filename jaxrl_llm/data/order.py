"""The order in which prompts are visited, and the cursor that a checkpoint saves."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core import checks


class Cursor(NamedTuple):
    """The next position to read.

    Attributes:
      epoch: Number of the pass over the prompts, from 0.
      index: Position within that pass, from 0.
    """

    epoch: int = 0
    index: int = 0


def take(cursor: Cursor, n: int, *, size: int, seed: int) -> tuple[list[int], Cursor]:
    """The next n prompts of an endless order in which every epoch is a new permutation.

        order = permutation(seed, 0), permutation(seed, 1), ...

    The order depends only on size and seed, not on the division into batches, so a saved cursor
    continues exactly where the run stopped. A batch that crosses the end of an epoch, such as any
    batch larger than `size`, may contain a prompt twice.

    Args:
      cursor: Position to start from; `Cursor()` is the beginning.
      n: Number of prompts to take.
      size: Number of prompts in the set.
      seed: Any integer from 0; determines the order.

    Returns:
      n indices in `range(size)`, and the cursor after them.

    Raises:
      ValueError: If the cursor's index is not below size, so that it belongs to another set of
        prompts.

    Example:
      >>> from jaxrl_llm.data import Cursor, take
      >>> first, cursor = take(Cursor(), 3, size=4, seed=0)
      >>> rest, cursor = take(cursor, 1, size=4, seed=0)
      >>> sorted(first + rest), cursor
      ([0, 1, 2, 3], Cursor(epoch=1, index=0))
    """
    epoch, index = int(cursor[0]), int(cursor[1])
    if size < 1:
        raise ValueError(
            f"take: size must be above 0, since there are no prompts to take; got {size}."
        )
    checks.check_count("take", n=n)
    checks.check_seed("take", seed=seed)
    if epoch < 0:
        raise ValueError(f"take: epoch must not be negative, got {epoch}.")
    if not 0 <= index < size:
        raise ValueError(
            f"take: the cursor is at prompt {index} of {size}; it belongs to another prompt set."
        )
    indices: list[int] = []
    while len(indices) < n:
        part = permutation(seed, epoch, size)[index : index + n - len(indices)]
        indices.extend(part.tolist())
        index += len(part)
        if index == size:
            epoch, index = epoch + 1, 0
    return indices, Cursor(epoch, index)


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of the prompts in one epoch."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(size)
