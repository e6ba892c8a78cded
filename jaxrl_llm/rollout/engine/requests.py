"""Groups of requests and their completions as host data: checked, and joined to a batch."""

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.rollout._inputs import check_tokens
from jaxrl_llm.rollout.engine.spec import EngineSpec
from jaxrl_llm.rollout.slots import Tokens, join_rollout
from jaxrl_llm.rollout.types import FAILED, UNFINISHED, Rollout


@dataclass(frozen=True, eq=False)
class Completion:
    """One response, finished or not; its length is its number of tokens.

    Attributes:
      request: The id of the request.
      out: The sampled tokens, arrays ``[t]``; see :class:`~jaxrl_llm.rollout.slots.Tokens`.
      finish: Why it ended; see :class:`~jaxrl_llm.rollout.Rollout`.
    """

    request: int
    out: Tokens
    finish: int

    @property
    def tokens(self) -> np.ndarray:
        """int32 ``[t]``."""
        return self.out.tokens

    def __len__(self) -> int:
        return len(self.out.tokens)


class NextTurn(NamedTuple):
    """The tokens between two turns of a response.

    Attributes:
      tokens: Token ids that the policy reads and did not sample; at least one.
      keep: Number of tokens of the response to keep before them; None for all.
    """

    tokens: Sequence[int]
    keep: int | None = None


Follow = Callable[[Completion], Future]
"""Called with a response after a turn; returns a :class:`NextTurn`, or None if the response
has ended."""


class Group(NamedTuple):
    """The responses requested for one prompt.

    Attributes:
      id: Names the prompt in messages and results.
      prompt: Token ids.
      requests: Distinct integers, one per response: each names a stream of random numbers, so the
        same request gives the same response next to any others.
      max_new_tokens: Maximum length of a response, one number for all or one per request; None for
        the engine's limit.
      expected: Expected tokens of a response; the longest groups start first. None for the limit.
      settings: Draw options of this group, among those that the engine can vary.
      adapter: Index of the low-rank delta that is added to the weights.
      partial: Responses that have begun, or ended, before, by request.
      follow: Returns the tokens after each turn, for responses of several turns.
      turn_limit: Maximum tokens of a turn; None for no limit.
      left: Number of tokens removed from partial responses between turns, by request.
    """

    id: Any
    prompt: Sequence[int]
    requests: tuple[int, ...]
    max_new_tokens: int | tuple[int, ...] | None = None
    expected: float | None = None
    settings: Mapping[str, float] = {}
    adapter: int = 0
    partial: Mapping[int, Completion] = {}
    follow: Follow | None = None
    turn_limit: int | None = None
    left: Mapping[int, int] = {}


class FinishedGroup(NamedTuple):
    """A group and its completions, in the order of its requests."""

    group: Group
    completions: tuple[Completion, ...]

    @property
    def id(self) -> Any:
        """The id of the group."""
        return self.group.id


def has_ended(completion: Completion | None) -> bool:
    """Whether there is nothing left to decode."""
    return completion is not None and completion.finish != UNFINISHED


def empty_completion(request: int, blank: Tokens) -> Completion:
    """A response without tokens, for outputs of one token like ``blank``."""
    out = jax.tree.map(lambda x: np.zeros((0, *x.shape), x.dtype), blank)
    return Completion(request, out, UNFINISHED)


def slice_tokens(out: Tokens, start: int, end: int) -> Tokens:
    """The tokens from ``start`` to ``end``, copied."""
    return jax.tree.map(lambda x: x[start:end].copy(), out)


def limits_of(group: Group, most: int) -> dict[int, int]:
    """The longest response by request, tokens that leave it included; a slot holds ``most``."""
    limit = most if group.max_new_tokens is None else group.max_new_tokens
    limits = limit if isinstance(limit, Sequence) else (limit,) * len(group.requests)
    return dict(zip(group.requests, limits, strict=True))


def check_group(group: Group, spec: EngineSpec, *, known: Container[int], num_deltas: int) -> None:
    """Raises ValueError, naming the group, unless an engine with ``num_deltas`` deltas can run it.

    ``known`` are the requests that the engine already has.
    """
    start = f"submit: group {group.id!r}"
    check_tokens(f"{start}: its prompt", group.prompt, spec.vocab_size)
    if not len(group.prompt):
        raise ValueError(f"{start} has an empty prompt; it needs at least one token.")
    if len(group.prompt) > spec.prompt_length:
        raise ValueError(
            f"{start} has a prompt of {len(group.prompt)} tokens; the engine's slots hold "
            f"prompt_length {spec.prompt_length}."
        )
    requests, limits = group.requests, group.max_new_tokens
    if not requests:
        raise ValueError(f"{start} has no requests.")
    if wrong := [r for r in requests if not (isinstance(r, Integral) and 0 <= r < 2**31)]:
        raise ValueError(f"{start}: request {wrong[0]!r} must be an integer from 0 to 2**31 - 1.")
    if twice := [r for r in requests if r in known or requests.count(r) > 1]:
        raise ValueError(f"{start}: request {twice[0]} is listed twice.")
    if unknown := set(group.partial) - set(requests):
        raise ValueError(
            f"{start} has a partial response of request {min(unknown)}, which it does not list."
        )
    if isinstance(limits, Sequence) and len(limits) != len(requests):
        raise ValueError(
            f"{start} has {len(requests)} requests and max_new_tokens for {len(limits)}."
        )
    for request, limit in limits_of(group, spec.max_new_tokens).items():
        if not (isinstance(limit, Integral) and 1 <= limit <= spec.max_new_tokens):
            raise ValueError(
                f"{start} asks for {limit} new tokens; the engine's slots hold between 1 and "
                f"max_new_tokens {spec.max_new_tokens}."
            )
        partial = group.partial.get(request)
        begun = 0 if partial is None else len(partial) + group.left.get(request, 0)
        if partial is not None and begun > limit - (not has_ended(partial)):
            raise ValueError(
                f"{start}: request {request} already has {begun} tokens; its maximum is {limit}."
            )
    if group.turn_limit is not None and (group.follow is None or group.turn_limit < 1):
        raise ValueError(
            f"{start} has turn_limit {group.turn_limit}; it must be above 0, and needs `follow`."
        )
    if group.expected is not None and not group.expected >= 0:
        raise ValueError(f"{start} expects {group.expected} tokens; it must be 0 or more.")
    if unknown := set(group.settings) - set(spec.draw.settings):
        vary = ", ".join(spec.draw.settings) or "none"
        raise ValueError(
            f"{start} sets {min(unknown)!r}; options that may vary with this engine: {vary}."
        )
    spec.draw.check(start, group.settings)
    if not (isinstance(group.adapter, Integral) and 0 <= group.adapter < num_deltas):
        raise ValueError(f"{start} names adapter {group.adapter} of {num_deltas}.")
    blank, outputs = jax.tree.flatten(spec.draw.blank)
    shapes = [x.shape for x in blank]
    for request, partial in group.partial.items():
        leaves, structure = jax.tree.flatten(partial.out)
        if structure != outputs or [x.shape[1:] for x in leaves] != shapes:
            raise ValueError(
                f"{start}: the tokens of request {request} were sampled with other outputs "
                "(entropy, runner-up, support) than this engine has."
            )


def check_finite(done: FinishedGroup) -> None:
    """Raises ValueError if the model failed on a response of a group."""
    for each in done.completions:
        if each.finish == FAILED:
            raise ValueError(
                f"to_rollout: request {each.request} of group {done.id!r} failed: the model's "
                "logits were non-finite."
            )


def to_rollout(
    groups: Sequence[FinishedGroup], *, max_new_tokens: int, prompt_width: int, pad_id: int = 0
) -> Rollout:
    """Finished groups of one size as a :class:`~jaxrl_llm.rollout.Rollout` of NumPy arrays.

    Cancelled responses keep their tokens; ``finish`` tells them from the others.

    Args:
      groups: P groups of G completions.
      max_new_tokens: T, the width of the responses.
      prompt_width: The width of the prompts.
      pad_id: Fills ``tokens`` after the end of a response.

    Raises:
      ValueError: If there are no groups, they differ in size, a response failed or is unfinished,
        or something is longer than its width; it names the group.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=1, width=2, prompt_length=8, max_new_tokens=4)
      >>> generation = jr.rollout.Generation(engine, params, key=jax.random.key(0))
      >>> generation.submit(jr.rollout.Group(id="a", prompt=[1, 2, 3], requests=(0, 1)))
      >>> rollout = jr.rollout.to_rollout(list(generation), max_new_tokens=4, prompt_width=8)
      >>> rollout.tokens.shape
      (1, 2, 4)
    """
    if not groups:
        raise ValueError("to_rollout: there are no groups.")
    P, G, T = len(groups), len(groups[0].completions), max_new_tokens
    for done in groups:
        count, length = len(done.completions), len(done.group.prompt)
        if count != G:
            raise ValueError(
                f"to_rollout: group {done.id!r} has {count} completions, but the first group has "
                f"{G}."
            )
        if length > prompt_width:
            raise ValueError(
                f"to_rollout: the prompt of group {done.id!r} has {length} tokens, more than "
                f"prompt_width {prompt_width}."
            )
        check_finite(done)
        for each in done.completions:
            start = f"to_rollout: request {each.request} of group {done.id!r}"
            if each.finish == UNFINISHED:
                raise ValueError(f"{start} is unfinished.")
            if len(each) > T:
                raise ValueError(f"{start} has {len(each)} tokens, more than max_new_tokens {T}.")
    prompts = np.full((P, prompt_width), 0, np.int32)
    prompt_mask, mask = np.zeros((P, prompt_width), bool), np.zeros((P, G, T), bool)
    out = jax.tree.map(
        lambda x: np.zeros((P, G, T, *x.shape[1:]), x.dtype), groups[0].completions[0].out
    )
    out.tokens.fill(pad_id)
    for p, done in enumerate(groups):
        prompts[p, : len(done.group.prompt)] = done.group.prompt
        prompt_mask[p, : len(done.group.prompt)] = True
        for g, completion in enumerate(done.completions):
            n = len(completion)
            mask[p, g, :n] = True
            leaves = jax.tree.leaves(completion.out)
            for buffer, new in zip(jax.tree.leaves(out), leaves, strict=True):
                buffer[p, g, :n] = new
    finish = np.array([[c.finish for c in done.completions] for done in groups], np.int32)
    return join_rollout(prompts, prompt_mask, out, mask, finish)
