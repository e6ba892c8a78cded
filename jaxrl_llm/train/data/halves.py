"""Groups with one half sampled by the policy and the other by the frozen reference.

A recipe asks for them by ``sampled_by=("policy", "reference")``: the model that is named first
samples the first half of each group, the other model the second half. Rollouts of the reference
have the role ``DEMONSTRATION``. A batch has them as ``steered``, and the reference's
log-probabilities as ``behavior_logp``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import DEMONSTRATION, OWN
from jaxrl_llm.rollout import Rollout


class Halves(NamedTuple):
    """Parameters of both samplers.

    Attributes:
      policy: Of the policy.
      reference: Of the frozen reference; a model with an adapter also takes them without it.
    """

    policy: ArrayTree
    reference: ArrayTree


def has_halves(recipe: Any) -> bool:
    """Whether policy and reference sample a half of each group."""
    return isinstance(recipe.needs.sampled_by, tuple)


def check_halves(config: Any, recipe: Any) -> None:
    """Raises ValueError if a run cannot sample the halves of its recipe, or they are unequal."""
    if not has_halves(recipe):
        return
    name, size = f"recipe {recipe.name!r}", config.sampling.group_size
    if size % 2:
        raise ValueError(
            f"sampling: policy and reference of {name} sample a half of each group, so group_size "
            f"must be even; got {size}."
        )
    in_slots = config.sampling.slots is not None or needs_of(recipe.collector).slots
    if in_slots or config.environment is not None:
        raise ValueError(
            f"config: the reference of {name} samples half of each group with other weights, which "
            "slots, an environment and a collector that needs slots do not support; leave them out."
        )
    if config.asynchrony.sampler_devices:
        raise ValueError(
            "asynchrony: sampler_devices would need a second copy of the reference, which samples "
            f"for {name}; leave it out (None)."
        )


def sample_halves(
    sample: Callable[..., Rollout],
    params: Halves,
    order: tuple[str, str],
    key: Array,
    prompts: list[list[int]],
    *,
    request_ids: np.ndarray,
    version: int,
) -> Rollout:
    """Rollouts ``[P, G]`` on the host; each sampler made half of every group.

    Args:
      sample: A sampler of G / 2 responses per prompt, as of ``rollout.make_sampler``.
      params: Parameters of both samplers.
      order: ``sampled_by`` of the recipe: which of them samples the first half, and the second.
      key: A typed key. A response depends on it, its request and its sampler alone.
      prompts: P lists of token ids.
      request_ids: int ``[P, G]``.
      version: Version of the policy's parameters.
    """
    halves = [
        processes.to_host(
            sample(getattr(params, name), key, prompts, request_ids=ids, version=version)
        )
        for name, ids in zip(order, np.split(request_ids, 2, axis=1), strict=True)
    ]
    alone = [part._replace(prompt_tokens=None, prompt_mask=None) for part in halves]
    joined = trees.zip_leaves(lambda x: np.concatenate(x, axis=1), alone)
    return joined._replace(prompt_tokens=halves[0].prompt_tokens, prompt_mask=halves[0].prompt_mask)


def with_roles(collected: Any, order: tuple[str, str], group_size: int) -> Any:
    """What was collected, in which rollouts of the reference have their role.

    A rollout is known by its number in its request, so a collector may drop and move rollouts.
    Responses that bring a role of their own keep it. The mean reward of what was sampled is that of
    the policy's rollouts in the batch.
    """
    half = collected.members[..., 1] % group_size // (group_size // 2)
    by_reference = np.array([name == "reference" for name in order])[half]
    sampled = collected.where & (collected.roles == OWN)
    roles = np.where(sampled & by_reference, DEMONSTRATION, collected.roles)
    graded = sampled & ~by_reference & ~np.reshape(collected.scores.failed, sampled.shape)
    rewards = np.reshape(collected.scores.rewards, sampled.shape)[graded]
    reward = float(rewards.mean()) if rewards.size else float("nan")
    return collected._replace(roles=roles, reward=reward)
