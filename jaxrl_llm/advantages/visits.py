"""How much the policy has changed since it last answered a prompt.

For each prompt of the dataset the last response is stored with its log-probabilities, so that the
policy of a later visit can score it again. The caller that has the model computes the scores; see
``recipes.Computed``, source "last_visit".

- P rows of a batch, G rollouts, T tokens, Q prompts of the dataset, L tokens of a memory.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import dataclasses
import numbers
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import tracker
from jaxrl_llm.core import Array, checks, masking

__all__ = ["Recalled", "Visits", "last_visit"]


class Visits(NamedTuple):
    """State of :func:`last_visit`: one response of each prompt, its first L tokens.

    Attributes:
      tokens: int32 ``[Q, L]``.
      mask: bool ``[Q, L]``, tokens that count; all False for a prompt that was never visited.
      logp: float32 ``[Q, L]``, under the policy of that visit; 0 where masked.
    """

    tokens: Array
    mask: Array
    logp: Array


class Recalled(NamedTuple):
    """Responses for the policy of a step to score, two for each row of its batch.

    Attributes:
      tokens: int32 ``[P, 2, L]``: the stored response, and the one to store next.
      mask: bool ``[P, 2, L]``, tokens that count.
      rows: int32 ``[P]``, the prompt for which each row's response will be stored; Q for none.
      prompt_ids: int32 ``[P]``.
    """

    tokens: Array
    mask: Array
    rows: Array
    prompt_ids: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LastVisit:
    """Made by :func:`last_visit`."""

    num_prompts: int
    length: int

    def init(self) -> Visits:
        shape = (self.num_prompts, self.length)
        return Visits(
            tokens=jnp.zeros(shape, jnp.int32),
            mask=jnp.zeros(shape, bool),
            logp=jnp.zeros(shape, jnp.float32),
        )

    def recall(
        self, state: Visits, *, prompt_ids: Array, tokens: Array, mask: Array, where: Array
    ) -> Recalled:
        name = "last_visit"
        checks.check_integer(name, prompt_ids=prompt_ids, tokens=tokens)
        checks.check_rank(name, 3, tokens=tokens)
        checks.check_mask(name, mask)
        checks.check_same_shape(name, tokens=tokens, mask=mask)
        checks.check_shape(name, "where", where, tokens.shape[:2])
        checks.check_shape(name, "prompt_ids", prompt_ids, tokens.shape[:1])
        size, last = self.num_prompts, tokens.shape[1] - 1
        there = where & jnp.any(mask, axis=-1)
        newest = (last - jnp.argmax(there[:, ::-1], axis=-1))[:, None, None]
        now = []  # the first L tokens, padded where there are fewer
        for x in (tokens, mask):
            x = jnp.take_along_axis(x, newest, axis=1)[..., : self.length]
            now.append(jnp.pad(x, [(0, 0), (0, 0), (0, self.length - x.shape[-1])]))
        rows = tracker.rows_of(prompt_ids, size, there.any(axis=-1))
        # Of several rows of a prompt the last one, whatever the order in which they are written.
        index = jnp.arange(len(rows))
        again = (rows == rows[:, None]) & (index > index[:, None])
        rows = jnp.where(again.any(axis=-1), size, rows).astype(jnp.int32)
        known = (prompt_ids >= 0) & (prompt_ids < size)
        place = jnp.where(known, prompt_ids, 0)
        past = state.tokens[place][:, None], (state.mask[place] & known[:, None])[:, None]
        return Recalled(
            tokens=jnp.concatenate([past[0], now[0].astype(jnp.int32)], axis=1),
            mask=jnp.concatenate([past[1], now[1]], axis=1),
            rows=rows,
            prompt_ids=place,
        )

    def update(self, logp: Array, state: Visits, recalled: Recalled) -> tuple[Array, Visits]:
        checks.check_same_shape("last_visit", logp=logp, mask=recalled.mask)
        logp = jnp.asarray(logp, jnp.float32)
        change = jnp.abs(logp[:, 0] - state.logp[recalled.prompt_ids])
        shift = masking.masked_mean(change, recalled.mask[:, 0], axis=-1)
        now, mask = recalled.rows, recalled.mask[:, 1]
        return shift, Visits(
            tokens=state.tokens.at[now].set(recalled.tokens[:, 1], mode="drop"),
            mask=state.mask.at[now].set(mask, mode="drop"),
            logp=state.logp.at[now].set(masking.zero_masked(logp[:, 1], mask), mode="drop"),
        )


def last_visit(*, num_prompts: int, length: int) -> _LastVisit:
    """A memory of each prompt's last response, to measure the shift of the policy since then.

        D = mean over tokens of |logp at the last visit - logp now|         0 at a first visit

    Both log-probabilities are of the same response, without truncation, under the sampling
    policies: at the start of the last visit's step and at the start of this step. ``init() ->
    Visits``; ``recall(state, prompt_ids=, tokens=, mask=, where=) -> Recalled`` selects the
    responses to score; and ``update(logp [P, 2, L], state, recalled) -> (shift [P], state)``
    measures the shift and stores the responses. In a recipe it is ``Computed("policy_shift",
    last_visit(...), "last_visit")``.

    The last rollout of a group that takes part is stored; if a prompt has several rows, the last
    row counts. A row without such a rollout is not a visit. The state takes 9 bytes for each of Q L
    tokens, on every device; each step scores 2 P more responses, without a gradient.

    Args:
      num_prompts: Q, at least 1.
      length: L, at least 1: the longest response, or less, to score only the first L tokens.

    Returns:
      An object with the three functions; two of equal options are equal.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> memory = jr.advantages.last_visit(num_prompts=5, length=2)
      >>> tokens, where = jnp.array([[[7, 8]]]), jnp.ones((1, 1), bool)
      >>> state, shifts = memory.init(), []
      >>> for logp in (-1.0, -1.25):  # of both tokens, under the policy of each visit
      ...     recalled = memory.recall(state, prompt_ids=jnp.array([3]), tokens=tokens,
      ...                              mask=tokens > 0, where=where)
      ...     shift, state = memory.update(jnp.full((1, 2, 2), logp), state, recalled)
      ...     shifts.append(shift.tolist())
      >>> shifts, state.tokens[3].tolist()
      ([[0.0], [0.25]], [7, 8])

    References:
      Xu and Ding, SPO (arXiv:2509.13232): the KL between the current policy and the last policy
      that acted on the prompt, before the update (its Algorithm 1). The released code measures both
      one update later, after the visit's own update. As here, it uses the absolute log-ratio as the
      KL.
    """
    name = "last_visit"
    tracker.check_num_prompts(name, num_prompts)
    if not isinstance(length, numbers.Integral) or length < 1:
        raise ValueError(f"{name}: length must be an integer of 1 or more; got {length!r}.")
    return _LastVisit(num_prompts=int(num_prompts), length=int(length))
