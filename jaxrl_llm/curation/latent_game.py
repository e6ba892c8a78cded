"""A policy over latent strategies of utterances, solved by regret matching during the run.

A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call
from jaxrl_llm.curation.strategies import (
    k_means,
    nearest_centroid,
    regret_matching,
    regret_update,
)

__all__ = ["LatentGame", "differing_values", "latent_policy"]


class LatentGame(NamedTuple):
    """State of :func:`latent_policy`.

    Attributes:
      centers: ``[K, S]`` float32, centers of the clusters of utterances.
      regrets: ``[Q, K]`` float32, cumulative regret of each strategy at each state of the game.
      policies: ``[Q, K]`` float32, sum of the policies so far.
      batches: int32 scalar, number of batches so far.
    """

    centers: Array
    regrets: Array
    policies: Array
    batches: Array


@dataclasses.dataclass(frozen=True)
class _Init:
    num_prompts: int
    clusters: int
    size: int

    def __call__(self) -> LatentGame:
        return LatentGame(
            jnp.zeros((self.clusters, self.size), jnp.float32),
            jnp.zeros((self.num_prompts, self.clusters), jnp.float32),
            jnp.zeros((self.num_prompts, self.clusters), jnp.float32),
            jnp.int32(0),
        )


@dataclasses.dataclass(frozen=True)
class _Update:
    clusters: int
    size: int
    every: int

    def __call__(
        self,
        rewards: Array,
        state: LatentGame,
        *,
        embeddings: Array,
        prompt_ids: Array,
        key: Array,
        where: Array | None = None,
        **context,
    ) -> tuple[Array, LatentGame]:
        name = "latent_policy"
        checks.check_rank(name, 2, rewards=rewards)
        checks.check_float(name, rewards=rewards, embeddings=embeddings)
        checks.check_integer(name, prompt_ids=prompt_ids)
        checks.check_bool(name, where=where)
        groups, size = jnp.shape(rewards), jnp.shape(embeddings)[-1:]
        checks.check_shape(name, "embeddings", embeddings, groups + size)
        checks.check_shape(name, "prompt_ids", prompt_ids, groups[:1])
        taken = jnp.ones(groups, bool) if where is None else where
        checks.check_shape(name, "where", taken, groups)
        axes = jax.random.normal(jax.random.key(0), (*size, self.size)) / self.size**0.5
        points = masking.zero_masked(embeddings, taken[..., None]) @ axes

        def clustered() -> Array:
            flat = points.reshape(-1, self.size)
            return k_means(flat, key, clusters=self.clusters, where=taken.reshape(-1))

        begins = state.batches % self.every == 0
        centers = jax.lax.cond(begins, clustered, lambda: state.centers)
        regrets, policies = (jnp.where(begins, 0.0, x) for x in (state.regrets, state.policies))
        strategies = nearest_centroid(points, centers)
        mine = taken[..., None] & (strategies[..., None] == jnp.arange(self.clusters))
        count = jnp.sum(mine, axis=1)
        earned = jnp.sum(jnp.where(mine, masking.zero_masked(rewards, taken)[..., None], 0), axis=1)
        played = count > 0
        utility = jnp.where(played, earned / jnp.maximum(count, 1), 0.0)
        before = regrets[prompt_ids]
        policy = regret_matching(jnp.where(played, before, -jnp.inf))
        policy = jnp.where(played, policy, 0.0)
        policy = policy / jnp.maximum(jnp.sum(policy, axis=-1, keepdims=True), 1e-30)
        after = jnp.where(played, regret_update(before, utility, policy), before)
        visited = jnp.any(played, axis=-1, keepdims=True)
        following = jnp.where(visited, regret_matching(after), 0.0)
        regrets = regrets.at[prompt_ids].add(after - before, mode="drop")
        policies = policies.at[prompt_ids].add(following, mode="drop")
        total = policies[prompt_ids]
        average = total / jnp.maximum(jnp.sum(total, axis=-1, keepdims=True), 1e-30)
        values = masking.zero_masked(jnp.take_along_axis(average, strategies, axis=-1), taken)
        return values, LatentGame(centers, regrets, policies, state.batches + 1)


@prints_as_call
def latent_policy(
    *, num_prompts: int, clusters: int = 4, size: int = 32, every: int = 100
) -> Transform:
    """The probability of each utterance's strategy in a policy computed by regret matching.

        strategy = the nearest of K centers, of k-means over the first batch of an iteration
        u_a = mean reward of the utterances of strategy a at a state;  p by the regrets R so far
        R_a += u_a - sum over b of p_b u_b     for the strategies that were played
        value of an utterance = mean over the visits so far of the policy of its strategy

    A state of the game is a prompt. An iteration begins every ``every`` batches with new clusters
    and zero regrets. p is over the strategies that were played; the policy of a visit includes its
    rewards.

    Args:
      num_prompts: Q, states of the game.
      clusters: K, number of strategies.
      size: S, dimension of the random projection of the embeddings.
      every: Batches per iteration.

    Returns:
      A Transform ``rewards [P, G] -> values [P, G]`` over a :class:`LatentGame`, which reads
      ``embeddings [P, G, D]``, ``prompt_ids [P]``, ``key`` and ``where``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> game = jr.curation.latent_policy(num_prompts=1, clusters=2)
      >>> kinds = jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
      >>> values, _ = game.update(jnp.array([[1.0, 0.0, 0.5]]), game.init(), embeddings=kinds,
      ...     prompt_ids=jnp.array([0]), key=jax.random.key(0))
      >>> values.tolist()
      [[1.0, 0.0, 1.0]]

    References:
      LSPO (arXiv:2502.04686), ABSTRACT reading: there the game is solved by counterfactual regrets
      over its states; here a state has one decision, and its reward is what an utterance earns
      against the others as they play.
    """
    name = "latent_policy"
    checks.check_count(name, num_prompts=num_prompts, clusters=clusters, size=size, every=every)
    return Transform(_Init(num_prompts, clusters, size), _Update(clusters, size, every))


def differing_values(advantages: Array, mask: Array) -> Array:
    """The tokens of groups whose values differ, which have a better and a worse utterance.

    Args:
      advantages: ``[..., G]``, floating point.
      mask: bool ``[..., G, T]``; a rollout without a token does not count.

    Returns:
      bool ``[..., G, T]``, at most ``mask``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([[0.5, 0.5], [0.5, 0.25]])
      >>> jr.curation.differing_values(values, jnp.ones((2, 2, 1), bool))[..., 0].tolist()
      [[False, False], [True, True]]

    References:
      The ``where`` of :func:`strategy_pair`, for the groups of a batch.
    """
    name = "differing_values"
    checks.check_mask(name, mask)
    checks.check_float(name, advantages=advantages)
    checks.check_shape(name, "advantages", advantages, jnp.shape(mask)[:-1])
    there = jnp.any(mask, axis=-1)
    most = jnp.max(jnp.where(there, advantages, -jnp.inf), axis=-1, keepdims=True)
    least = jnp.min(jnp.where(there, advantages, jnp.inf), axis=-1, keepdims=True)
    return mask & (most > least)[..., None]
