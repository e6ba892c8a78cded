"""Examples of one user in the prompt, so that a few examples convey the user's preference.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks

__all__ = ["FewShot", "sample_few_shot"]


class FewShot(NamedTuple):
    """Result of :func:`sample_few_shot`.

    Attributes:
      shots: int32 ``[M, K]``, rows of the examples of each query; -1 where there are too few.
      where: bool ``[M]``, True for queries whose user has enough other rows.
    """

    shots: Array
    where: Array


def sample_few_shot(
    key: Array, user_ids: Array, *, count: int, queries: Array | None = None
) -> FewShot:
    """Draws other rows of the same user as the examples of each query, without replacement.

    The context consists of the examples (question, preferred response, other response). A pairwise
    loss, such as ``preferences.ipo``, trains on the pair of the query alone. A query is not among
    its examples. The draw of a query depends on its row and on no other query. Memory grows with
    the number of queries times the number of rows.

    Args:
      key: Typed PRNG key.
      user_ids: integers ``[N]``, the user of each row; below 0 for rows that take no part.
      count: K, examples of a query; 0 for none.
      queries: integers ``[M]``, rows that are queries; None for all.

    Returns:
      A :class:`FewShot`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> users = jnp.array([7, 7, 8])
      >>> shots, where = jr.curation.sample_few_shot(jax.random.key(0), users, count=1)
      >>> shots.tolist(), where.tolist()
      ([[1], [0], [-1]], [True, True, False])

    References:
      Singh et al., FSPO (arXiv:2502.19312), with four examples in the released loaders.
    """
    function = "sample_few_shot"
    checks.check_integer(function, user_ids=user_ids, queries=queries)
    checks.check_rank(function, 1, user_ids=user_ids)
    size = jnp.shape(user_ids)[0]
    if count:
        checks.check_count(function, count=count, most=max(size - 1, 1))
    rows = jnp.arange(size) if queries is None else jnp.asarray(queries)
    checks.check_rank(function, 1, queries=rows)
    users = jnp.asarray(user_ids)

    def draw(row: Array) -> tuple[Array, Array]:
        others = (users == users[row]) & (jnp.arange(size) != row) & (users >= 0)
        noise = jax.random.uniform(jax.random.fold_in(key, row), (size,))
        _, shots = jax.lax.top_k(jnp.where(others, noise, -1.0), count)
        enough = (jnp.sum(others) >= count) & (users[row] >= 0)
        return jnp.where(enough, shots, -1).astype(jnp.int32), enough

    return FewShot(*jax.vmap(draw)(rows))
