"""The training batch: one pytree, leading axes [P, G], and the checks that need its values."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks
from jaxrl_llm.core.packing import Layout, check_packing, row_trees
from jaxrl_llm.core.support import Support, Temperature, check_support, in_support
from jaxrl_llm.recipes.inputs import check_extra
from jaxrl_llm.recipes.records import replace_fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The rollouts of a training step; groups lie along axis 1, and P is the sharded axis.

    A field that is None is absent from the pytree. ``Recipe.prepare`` fills ``advantages``,
    ``weights`` and ``correction``, and adds the recipe's computed numbers to ``extras``; numbers
    for the full batch have the shape ``[P, 1, 1]`` there, so that they can be divided into
    microbatches and shards.

    Attributes:
      tokens: int32 ``[P, G, T]``, the response.
      mask: bool ``[P, G, T]``, True for tokens that train. The others may hold anything.
      rewards: float32 ``[P, G]``; may be NaN only where ``where`` is False.
      where: bool ``[P, G]``, True for rollouts that take part (False: padding, or a failed grader).
      prompt_tokens: int32 ``[P, Lp]``.
      prompt_mask: bool ``[P, Lp]``.
      old_logp: float32 ``[P, G, T]``, under the proximal policy. None means the policy that is
        being trained, as in one update per batch.
      behavior_logp: float32 ``[P, G, T]``, under the policy that sampled, at its sampling
        temperature and over ``support``: a scorer of the same weights computes the same, so ratios
        may use it. That is ``Rollout.behavior_logp`` with ``Rollout.support``, and
        ``Rollout.tempered_logp`` without.
      ref_logp: float32 ``[P, G, T]``, under the frozen reference.
      support: The candidates from which each token was drawn, with leading axes ``[P, G, T]``. The
        trained policy, the proximal policy and the reference are renormalized over them, so that
        truncation in the sampler does not change ratios. None for the full vocabulary.
      packing: How models see the responses: several in a row, or with common prefixes once (a
        :class:`~jaxrl_llm.core.packing.Tree`, whose ``cells`` are the node of each token); results
        change only by rounding. None for one row per response.
      reward_components: Rewards by name, float32 ``[P, G]`` each, for methods that read several;
        NaN where one does not apply.
      extras: Arrays that only some methods need, by name, with leading axis P; see
        ``recipes.inputs.EXTRAS``.
      advantages: float32 ``[P, G]`` or ``[P, G, T]``.
      weights: float32 ``[P, G, T]``; the loss is the sum of token losses times these.
      correction: float32 ``[P, G, T]``, the weights of the correction slot for the surrogate.
      experts: int16 ``[P, G, T, L, k]``, the experts with which the sampler read the input of each
        token, as :attr:`Rollout.experts <jaxrl_llm.rollout.Rollout>` has them; the policy and the
        proximal policy take the same ones. None if each model chooses.
      sampled_at: The temperature of the sampler, with which a train step compares its own; see
        ``Rollout.sampled_at``. None if it is not known or the two may differ.
      called: The rows of a subagent that these rollouts called, a batch of their own; the main
        policy's step does not read them. None for a recipe without a subagent.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.ones((1, 2, 3), bool)
      >>> batch = jr.recipes.Batch(
      ...     tokens=jnp.zeros((1, 2, 3), jnp.int32), mask=mask, rewards=jnp.array([[1.0, 0.0]]),
      ...     where=mask[..., 0], prompt_tokens=jnp.zeros((1, 4), jnp.int32),
      ...     prompt_mask=jnp.ones((1, 4), bool))
      >>> batch.check().replace(old_logp=jnp.zeros((1, 2, 3))).rewards.shape
      (1, 2)
    """

    tokens: Array
    mask: Array
    rewards: Array
    where: Array
    prompt_tokens: Array
    prompt_mask: Array
    old_logp: Array | None = None
    behavior_logp: Array | None = None
    ref_logp: Array | None = None
    support: Support | None = None
    packing: Layout | None = None
    reward_components: Mapping[str, Array] | None = None
    extras: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    advantages: Array | None = None
    weights: Array | None = None
    correction: Array | None = None
    experts: Array | None = None
    sampled_at: Temperature | None = None
    called: "Batch | None" = None

    @classmethod
    def from_rollout(cls, rollout: Any, rewards: Array, *, where: Array | None = None) -> "Batch":
        """The batch of a ``rollout.Rollout`` and its rewards.

        Args:
          rollout: P groups of G; any record with its fields.
          rewards: ``[P, G]``, or flat ``[P G]``.
          where: bool ``[P, G]``, True for rollouts that take part; None for all.

        Raises:
          TypeError: If the rewards are not numbers.
          ValueError: If they have another shape.
        """
        shape = rollout.mask.shape[:2]
        if not hasattr(rewards, "reshape"):
            try:
                rewards = np.asarray(rewards, np.float32)
            except (TypeError, ValueError) as error:
                text = f"from_rollout: rewards must hold numbers; got {rewards!r:.80}."
                raise TypeError(text) from error
        if rewards.shape not in (shape, (math.prod(shape),)):
            raise ValueError(
                f"from_rollout: rewards must have shape {shape} or ({math.prod(shape)},); got "
                f"{rewards.shape}."
            )
        return cls(
            tokens=rollout.tokens,
            mask=rollout.mask,
            rewards=rewards.reshape(shape),
            where=jnp.ones(shape, bool) if where is None else where,
            prompt_tokens=rollout.prompt_tokens,
            prompt_mask=rollout.prompt_mask,
            # Like what a train step computes: tempered, over the support.
            behavior_logp=rollout.behavior_logp,
            support=rollout.support,
            experts=rollout.experts,
            packing=None if rollout.ends is None else row_trees(rollout.ends),
            sampled_at=getattr(
                rollout, "sampled_at", None
            ),  # a record of another sampler may lack it
        )

    def replace(self, **changes) -> "Batch":
        """A copy with some fields changed."""
        return replace_fields(self, changes)

    def with_extras(self, extras: Mapping[str, Array]) -> "Batch":
        """A copy with more extras, or others of these names."""
        return self.replace(extras={**self.extras, **extras})

    def check(self) -> "Batch":
        """Checks ranks, shapes and dtypes, at no cost under ``jit``, and returns the batch.

        Raises:
          ValueError: If two fields disagree about a shape.
          TypeError: If a mask is not bool, a token array not integer, a statistic not floating.
        """
        name = "Batch"
        checks.check_rank(name, 3, tokens=self.tokens)
        p, g, t = self.tokens.shape
        checks.check_integer(name, tokens=self.tokens, prompt_tokens=self.prompt_tokens)
        checks.check_bool(name, mask=self.mask, where=self.where, prompt_mask=self.prompt_mask)
        checks.check_float(name, rewards=self.rewards)
        for field in ("rewards", "where"):
            checks.check_shape(name, field, getattr(self, field), (p, g))
        checks.check_shape(name, "mask", self.mask, (p, g, t))
        checks.check_rank(name, 2, prompt_tokens=self.prompt_tokens)
        lp = self.prompt_tokens.shape[1]
        checks.check_shape(name, "prompt_tokens", self.prompt_tokens, (p, lp))
        checks.check_shape(name, "prompt_mask", self.prompt_mask, (p, lp))
        for field in ("old_logp", "behavior_logp", "ref_logp", "weights", "correction"):
            if (value := getattr(self, field)) is not None:
                checks.check_shape(name, field, value, (p, g, t))
                checks.check_float(name, **{field: value})
        check_support(name, self.support, (p, g, t))
        check_packing(name, self.packing, (p, g, t))
        if self.experts is not None:
            checks.check_rank(name, 5, experts=self.experts)
            checks.check_integer(name, experts=self.experts)
            checks.check_shape(name, "experts", self.experts, (p, g, t, *self.experts.shape[3:]))
        for column, value in (self.reward_components or {}).items():
            column = f"reward_components[{column!r}]"
            checks.check_shape(name, column, value, (p, g))
            checks.check_float(name, **{column: value})
        for extra, value in self.extras.items():
            check_extra(extra, value, {"P": p, "G": g, "T": t})
        checks.check_float(name, advantages=self.advantages)
        if self.advantages is not None and self.advantages.shape not in ((p, g), (p, g, t)):
            raise ValueError(
                f"{name}: advantages must have shape {(p, g)} or {(p, g, t)}; "
                f"got {self.advantages.shape}."
            )
        return self


def validate_batch(
    batch: Batch, *, vocab_size: int, prompt_ids: Sequence[str] | None = None
) -> Batch:
    """Checks the values of a batch on the host, before it reaches the device, and returns it.

    Inside ``jit`` a bad value cannot raise an error, so this check runs where rollouts become a
    training batch. Masked values are not read.

    Args:
      batch: Concrete arrays (NumPy or this process's part of a jax array).
      vocab_size: V; tokens are in ``[0, V)``.
      prompt_ids: P names of prompts for the messages; None for row numbers.

    Raises:
      ValueError: For a non-finite reward, a token outside the vocabulary or outside its support, a
        non-finite log-probability, experts that no token can take, or a prompt without tokens or
        without any trainable token, with the name of the prompt; or for a batch that is empty or
        has nothing to train on.
      TypeError: As :meth:`Batch.check`.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> mask = np.ones((1, 2, 3), bool)
      >>> batch = jr.recipes.Batch(
      ...     tokens=np.zeros((1, 2, 3), np.int32), mask=mask, where=mask[..., 0],
      ...     rewards=np.array([[1.0, np.nan]], np.float32),
      ...     prompt_tokens=np.zeros((1, 4), np.int32), prompt_mask=np.ones((1, 4), bool))
      >>> jr.recipes.validate_batch(batch, vocab_size=10, prompt_ids=["sum-17"])
      Traceback (most recent call last):
      ...
      ValueError: validate_batch: the reward of prompt 'sum-17', rollout 1, is nan; ...
    """
    name = "validate_batch"
    batch.check()
    p, g, t = batch.tokens.shape
    if 0 in (p, g, t):
        raise ValueError(f"{name}: the batch is empty: tokens [P, G, T] has shape {(p, g, t)}.")
    if prompt_ids is not None and len(prompt_ids) != p:
        raise ValueError(f"{name}: prompt_ids has {len(prompt_ids)} names for {p} prompts.")

    def prompt(row):
        return f"prompt {row}" if prompt_ids is None else f"prompt {prompt_ids[row]!r}"

    where = np.asarray(batch.where)
    if not where.any():
        raise ValueError(f"{name}: no rollout takes part: where is False everywhere.")
    rewards = np.asarray(batch.rewards)
    for row, member in np.argwhere(where & ~np.isfinite(rewards))[:1]:
        raise ValueError(
            f"{name}: the reward of {prompt(row)}, rollout {member}, is {rewards[row, member]}; "
            "set where=False for a rollout that could not be graded."
        )
    mask, prompt_mask = np.asarray(batch.mask) & where[..., None], np.asarray(batch.prompt_mask)
    for (row,) in np.argwhere(where.any(-1) & ~mask.any((-2, -1)))[:1]:
        raise ValueError(f"{name}: all tokens of {prompt(row)} are masked, but its where is True.")
    for (row,) in np.argwhere(where.any(-1) & ~prompt_mask.any(-1))[:1]:
        raise ValueError(f"{name}: {prompt(row)} has no tokens.")
    texts = (("the text", batch.prompt_tokens, prompt_mask), ("a response", batch.tokens, mask))
    for what, tokens, read in texts:
        tokens = np.asarray(tokens)
        for place in np.argwhere(read & ((tokens < 0) | (tokens >= vocab_size)))[:1]:
            raise ValueError(
                f"{name}: {what} of {prompt(place[0])} holds token {tokens[tuple(place)]} at "
                f"{place[1:].tolist()}, outside the vocabulary of {vocab_size}."
            )
    for field in ("old_logp", "behavior_logp", "ref_logp"):
        value = np.asarray(mask if getattr(batch, field) is None else getattr(batch, field))
        for row, member, token in np.argwhere(mask & ~np.isfinite(value))[:1]:
            raise ValueError(
                f"{name}: {field} of {prompt(row)}, rollout {member}, token {token} is "
                f"{value[row, member, token]}."
            )
    if batch.support is not None:
        check_support(name, batch.support, (p, g, t), vocab_size)
        outside = mask & ~in_support(batch.support, np.where(mask, batch.tokens, 0))
        for row, member, token in np.argwhere(outside)[:1]:
            raise ValueError(
                f"{name}: token {token} of {prompt(row)}, rollout {member}, is not in its support."
            )
    if batch.experts is not None:
        experts = np.asarray(batch.experts)
        least, most = experts.min(-1), experts.max(-1)
        ordered = np.sort(experts, axis=-1)
        doubled = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        wrong = (least < 0) | ((least == 0) & (most > 0)) | ((least > 0) & doubled)
        for row, member, token in np.argwhere(mask & wrong.any(-1))[:1]:
            raise ValueError(
                f"{name}: the experts of token {token} of {prompt(row)}, rollout {member}, are "
                f"{experts[row, member, token].tolist()}; those of a layer must be different and "
                "counted from 1, or all be 0."
            )
    return batch
