"""Learning outside of the weights: written experiences, and a policy over kinds of actions.

Experiences are a mapping of ids to texts that is part of the prompt. A language model compares the
rollouts of a group and proposes operations (:func:`apply_operations`, on the host). Latent
strategies are clusters of utterances. Regret matching solves a game over them, and preference pairs
train the language model toward the strategies of the solution.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

__all__ = [
    "Operation",
    "StrategyPair",
    "apply_operations",
    "k_means",
    "nearest_centroid",
    "regret_matching",
    "regret_update",
    "strategy_pair",
]

_KINDS = ("add", "update", "delete")


class Operation(NamedTuple):
    """A change of a library of experiences.

    Attributes:
      kind: "add", "update" or "delete".
      text: The new text. An operation without text is ignored, even "delete".
      id: Id of the experience to change; None with "add".
    """

    kind: str
    text: str
    id: str | None = None


def apply_operations(library: Mapping[str, str], operations: Iterable[Operation]) -> dict[str, str]:
    """Applies a batch of operations to a library of experiences, in order, and renumbers it.

        add      a new experience at the end
        update   the text of an experience; a new one if the id is unknown
        delete   out of the library; nothing if the id is unknown

    Runs on the host. The ids of the result are G0, G1, ... in order.

    Args:
      library: Texts by id.
      operations: :class:`Operation` values.

    Returns:
      A new dict; ``library`` is unchanged.

    Example:
      >>> import jaxrl_llm as jr
      >>> Operation = jr.curation.Operation
      >>> jr.curation.apply_operations(
      ...     {"G0": "check units", "G1": "guess"},
      ...     [Operation("delete", "guess", "G1"), Operation("add", "draw a figure")])
      {'G0': 'check units', 'G1': 'draw a figure'}

    References:
      Training-free GRPO (arXiv:2510.08191), the released code. Groups with a mean reward of 0 or 1
      propose nothing (:func:`informative_groups`).
    """
    function = "apply_operations"
    result = dict(library)
    # A key that no id can be, so that an id of the caller is never overwritten.
    new = 0
    for operation in operations:
        checks.check_option(function, "kind", operation.kind, _KINDS)
        if not operation.text:
            continue
        target = operation.id
        if operation.kind == "delete":
            result = {name: text for name, text in result.items() if name != target}
        elif operation.kind == "update" and target is not None and target in result:
            result[target] = operation.text
        else:
            while (name := f"new {new}") in result:
                new += 1
            result[name] = operation.text
    return {f"G{i}": text for i, text in enumerate(result.values())}


def nearest_centroid(embeddings: Array, centroids: Array) -> Array:
    """The latent strategy of an utterance: the nearest center of a cluster.

        argmin over k of |x - c_k|^2

    Args:
      embeddings: ``[..., D]``, floating point.
      centroids: ``[K, D]``, floating point.

    Returns:
      int32 ``[...]``; ties go to the first center.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> centroids = jnp.array([[0.0, 0.0], [1.0, 1.0]])
      >>> jr.curation.nearest_centroid(jnp.array([[0.9, 0.8], [0.1, 0.4]]), centroids).tolist()
      [1, 0]

    References:
      LSPO (arXiv:2502.04686), ABSTRACT reading; the clusters are those of :func:`k_means`.
    """
    function = "nearest_centroid"
    checks.check_min_rank(function, 1, embeddings=embeddings)
    checks.check_rank(function, 2, centroids=centroids)
    checks.check_float(function, embeddings=embeddings, centroids=centroids)
    size = jnp.shape(centroids)[-1]
    checks.check_shape(function, "embeddings", embeddings, (*jnp.shape(embeddings)[:-1], size))
    x, c = (jnp.asarray(a, jnp.float32) for a in (embeddings, centroids))
    distance = jnp.sum((x[..., None, :] - c) ** 2, axis=-1)
    return jnp.argmin(distance, axis=-1).astype(jnp.int32)


def k_means(
    embeddings: Array, key: Array, *, clusters: int, rounds: int = 20, where: Array | None = None
) -> Array:
    """The centers of clusters of utterances: k-means by Lloyd's algorithm.

    The initial centers are drawn one by one, with probabilities proportional to the squared
    distance from the previous centers (k-means++). A cluster that loses all its points keeps its
    center.

    Args:
      embeddings: ``[N, D]``, floating point.
      key: A typed key.
      clusters: K, at least 1.
      rounds: Number of iterations, at least 1.
      where: bool ``[N]``, True for utterances that exist; None for all.

    Returns:
      ``[K, D]`` float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x = jnp.array([[0.0], [1.0], [9.0], [10.0]])
      >>> jnp.sort(jr.curation.k_means(x, jax.random.key(0), clusters=2)[:, 0]).tolist()
      [0.5, 9.5]

    References:
      Lloyd (1982); Arthur and Vassilvitskii (2007) for the initial centers. LSPO (arXiv:2502.04686)
      clusters utterances by k-means, ABSTRACT reading.
    """
    function = "k_means"
    checks.check_rank(function, 2, embeddings=embeddings)
    checks.check_float(function, embeddings=embeddings)
    checks.check_bool(function, where=where)
    checks.check_count(function, clusters=clusters, rounds=rounds)
    size = jnp.shape(embeddings)[0]
    valid = jnp.ones(size, bool) if where is None else jnp.asarray(where)
    checks.check_shape(function, "where", valid, (size,))
    x = masking.zero_masked(embeddings, valid[:, None])

    def gaps(centers: Array) -> Array:
        return jnp.sum((x[:, None] - centers) ** 2, axis=-1)

    keys = jax.random.split(key, clusters)
    weights = valid.astype(jnp.float32)
    centers = jnp.zeros((clusters, x.shape[1]), jnp.float32)
    for k in range(clusters):
        # Where all points are centers already, any of them again.
        weights = jnp.where(jnp.any(weights > 0), weights, valid.astype(jnp.float32))
        drawn = jax.random.categorical(keys[k], jnp.log(weights))
        centers = centers.at[k].set(x[drawn])
        weights = jnp.where(valid, jnp.min(gaps(centers[: k + 1]), axis=-1), 0.0)

    def one(_, centers: Array) -> Array:
        nearest = jnp.where(valid, jnp.argmin(gaps(centers), axis=-1), clusters)
        total = jax.ops.segment_sum(x, nearest, clusters + 1)[:clusters]
        count = jax.ops.segment_sum(jnp.ones(size), nearest, clusters + 1)[:clusters, None]
        return jnp.where(count > 0, total / jnp.maximum(count, 1.0), centers)

    return jax.lax.fori_loop(0, rounds, one, centers)


class StrategyPair(NamedTuple):
    """Result of :func:`strategy_pair`.

    Attributes:
      chosen: int32 ``[...]``, the candidate whose strategy has the largest value.
      rejected: int32 ``[...]``, the candidate whose strategy has the smallest value.
      where: bool ``[...]``, False where all candidates have the same value.
    """

    chosen: Array
    rejected: Array
    where: Array


def strategy_pair(strategies: Array, values: Array, *, where: Array | None = None) -> StrategyPair:
    """A preference pair among candidate utterances of a state, by the value of their strategies.

        chosen = argmax over c of values[strategy of c],   rejected = argmin

    ``preferences.dpo`` then trains the language model toward the strategies of the solved policy.

    Args:
      strategies: integers ``[..., C]``, the strategy of each candidate, from 0.
      values: ``[..., A]``, floating point, value of each strategy: its probability in the solution
        of the game, or its payoff.
      where: bool ``[..., C]``, True for candidates that exist; None for all.

    Returns:
      :class:`StrategyPair`; ties go to the first candidate.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> pair = jr.curation.strategy_pair(jnp.array([2, 0, 1]), jnp.array([0.5, 0.1, 0.4]))
      >>> int(pair.chosen), int(pair.rejected), bool(pair.where)
      (1, 2, True)

    References:
      LSPO (arXiv:2502.04686), ABSTRACT reading.
    """
    function = "strategy_pair"
    checks.check_min_rank(function, 1, strategies=strategies, values=values)
    checks.check_integer(function, strategies=strategies)
    checks.check_float(function, values=values)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, strategies=strategies, where=where)
    lead = jnp.shape(strategies)[:-1]
    checks.check_shape(function, "values", values, (*lead, jnp.shape(values)[-1]))
    valid = jnp.ones(jnp.shape(strategies), bool) if where is None else jnp.asarray(where)
    each = jnp.take_along_axis(
        jnp.asarray(values, jnp.float32), jnp.where(valid, strategies, 0), axis=-1
    )
    best, worst = jnp.where(valid, each, -jnp.inf), jnp.where(valid, each, jnp.inf)
    differ = jnp.max(best, axis=-1) > jnp.min(worst, axis=-1)
    chosen, rejected = jnp.argmax(best, axis=-1), jnp.argmin(worst, axis=-1)
    return StrategyPair(chosen.astype(jnp.int32), rejected.astype(jnp.int32), differ)


def regret_matching(regrets: Array) -> Array:
    """A policy over actions in proportion to their positive regrets.

        p_a = max(R_a, 0) / sum over b of max(R_b, 0);   uniform where none is positive

    Args:
      regrets: ``[..., A]``, floating point, cumulative.

    Returns:
      ``[..., A]`` float32, adding up to 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.regret_matching(jnp.array([3.0, -1.0, 1.0])).tolist()
      [0.75, 0.0, 0.25]

    References:
      Hart and Mas-Colell (Econometrica 68, 2000). LSPO (arXiv:2502.04686) solves a game over latent
      strategies; the use of these regrets is an ABSTRACT reading.
    """
    checks.check_min_rank("regret_matching", 1, regrets=regrets)
    checks.check_float("regret_matching", regrets=regrets)
    positive = jnp.maximum(jnp.asarray(regrets, jnp.float32), 0.0)
    total = jnp.sum(positive, axis=-1, keepdims=True)
    even = jnp.full(jnp.shape(regrets), 1.0 / max(jnp.shape(regrets)[-1], 1))
    return jnp.where(total > 0, positive / jnp.where(total > 0, total, 1.0), even)


def regret_update(regrets: Array, utilities: Array, policy: Array) -> Array:
    """Cumulative regrets after a round.

        R_a += u_a - sum over b of p_b u_b

    Args:
      regrets: ``[..., A]``, floating point, before the round.
      utilities: ``[..., A]``, floating point, what each action would have earned.
      policy: ``[..., A]``, floating point, the policy of the round.

    Returns:
      ``[..., A]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.regret_update(
      ...     jnp.zeros(2), jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5])).tolist()
      [0.5, -0.5]

    References:
      As :func:`regret_matching`, for LSPO (arXiv:2502.04686). The average policy over the rounds is
      the solution.
    """
    function = "regret_update"
    arrays = {"regrets": regrets, "utilities": utilities, "policy": policy}
    checks.check_arrays(function, arrays)
    r, u, p = (jnp.asarray(x, jnp.float32) for x in (regrets, utilities, policy))
    return r + u - jnp.sum(p * u, axis=-1, keepdims=True)
