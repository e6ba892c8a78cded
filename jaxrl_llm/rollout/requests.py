"""What is asked of an engine and what it answers, as host data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.rollout.rollout import UNFINISHED, Rollout
from jaxrl_llm.rollout.slots import Tokens


class Completion(NamedTuple):
    """One response, finished or not.

    Attributes:
      request: The id of the request.
      out: What was sampled, arrays ``[t]``; see :class:`~jaxrl_llm.rollout.slots.Tokens`.
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


class Group(NamedTuple):
    """The rollouts that are wanted of one prompt.

    Attributes:
      id: Names the prompt in messages and results.
      prompt: Token ids.
      requests: Distinct integers, one a rollout: each names a stream of random numbers, so the same
        request gives the same response in any company.
      max_new_tokens: The longest response, of all or one a request; None for the engine's.
      expected: How many tokens a response is expected to take; the longest groups start first. None
        for the limit.
      settings: Options of the draw for this group, of those that the engine lets vary.
      adapter: Which low-rank delta is added to the weights.
      partial: Responses that have begun, or ended, before: by request.
    """

    id: Any
    prompt: Sequence[int]
    requests: tuple[int, ...]
    max_new_tokens: int | tuple[int, ...] | None = None
    expected: float | None = None
    settings: Mapping[str, float] = {}
    adapter: int = 0
    partial: Mapping[int, Completion] = {}


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


def limits(group: Group, max_new_tokens: int) -> dict[int, int]:
    """The longest response by request, where a slot holds ``max_new_tokens``."""
    most = max_new_tokens if group.max_new_tokens is None else group.max_new_tokens
    each = (most,) * len(group.requests) if isinstance(most, int) else most
    return dict(zip(group.requests, each, strict=False))


def expected_length(group: Group, max_new_tokens: int) -> float:
    """How many tokens each response of a group is expected to take."""
    if group.expected is not None:
        return group.expected
    return max(limits(group, max_new_tokens).values())


def check_group(
    group: Group,
    known: set[int],
    *,
    prompt_length: int,
    max_new_tokens: int,
    vocab_size: int,
    settings: Mapping[str, float],
    adapters: int,
) -> None:
    """Raises ValueError, naming the group, unless an engine of these sizes can take it.

    Args:
      group: The group.
      known: Requests that are already there.
      prompt_length: Room for a prompt.
      max_new_tokens: Room for a response.
      vocab_size: Ids lie below it.
      settings: Options that may vary.
      adapters: How many low-rank deltas there are.
    """
    start, prompt, requests = f"submit: group {group.id!r}", group.prompt, group.requests
    if not len(prompt):
        raise ValueError(f"{start} has an empty prompt; it needs at least one token.")
    if len(prompt) > prompt_length:
        raise ValueError(
            f"{start} has a prompt of {len(prompt)} tokens; the engine's slots hold prompt_length "
            f"{prompt_length}."
        )
    if wrong := [t for t in prompt if not 0 <= t < vocab_size]:
        raise ValueError(f"{start} holds token {wrong[0]}, outside the vocabulary of {vocab_size}.")
    if not requests:
        raise ValueError(f"{start} has no requests.")
    if twice := [r for r in requests if r in known or requests.count(r) > 1]:
        raise ValueError(f"{start}: request {twice[0]} is there twice.")
    limit = limits(group, max_new_tokens)
    if len(limit) != len(requests):
        raise ValueError(
            f"{start} has {len(requests)} requests and max_new_tokens for {len(limit)}."
        )
    for most in limit.values():
        if not 1 <= most <= max_new_tokens:
            raise ValueError(
                f"{start} asks for {most} new tokens; the engine's slots hold between 1 and "
                f"max_new_tokens {max_new_tokens}."
            )
    if unknown := set(group.settings) - set(settings):
        vary = ", ".join(settings) or "none"
        raise ValueError(
            f"{start} sets {min(unknown)!r}; options that may vary with this engine: {vary}."
        )
    if not 0 <= group.adapter < adapters:
        raise ValueError(f"{start} names adapter {group.adapter} of {adapters}.")
    if unknown := set(group.partial) - set(requests):
        raise ValueError(f"{start} has a partial response of request {min(unknown)}, not its own.")
    for request, begun in group.partial.items():
        most = limit[request]
        if len(begun) > most or (len(begun) == most and not has_ended(begun)):
            raise ValueError(
                f"{start}: request {request} has {len(begun)} tokens already, and {most} at most."
            )


def stop_place(
    tokens: list[int],
    known: int,
    stop_strings: Sequence[str],
    decode_text: Callable[[list[int]], str] | None,
) -> int | None:
    """After how many tokens a stop string is complete, or None; ``known`` of them hold none."""
    if decode_text is None or len(tokens) == known:
        return None

    def ends(n: int) -> bool:
        text = decode_text(tokens[:n])
        return any(stop in text for stop in stop_strings)

    if not ends(len(tokens)):
        return None
    return next(n for n in range(known + 1, len(tokens) + 1) if ends(n))


def to_rollout(
    groups: Sequence[FinishedGroup], *, max_new_tokens: int, prompt_width: int, pad_id: int = 0
) -> Rollout:
    """Finished groups of one size as the arrays of a :class:`~jaxrl_llm.rollout.Rollout`.

    Args:
      groups: P groups of G completions.
      max_new_tokens: T, the width of the responses.
      prompt_width: The width of the prompts.
      pad_id: Fills what is left.

    Raises:
      ValueError: If the groups differ in size, a response failed or is unfinished, or something is
        longer than its width; it names the group.
    """
    if not groups:
        raise ValueError("to_rollout: there are no groups.")
    P, G = len(groups), len(groups[0].completions)
    prompts = np.zeros((P, prompt_width), np.int32)
    kept = np.zeros((P, prompt_width), bool)
    first = groups[0].completions[0].out
    out = jax.tree.map(lambda x: np.zeros((P, G, max_new_tokens, *x.shape[1:]), x.dtype), first)
    out = out._replace(tokens=np.full((P, G, max_new_tokens), pad_id, np.int32))
    mask = np.zeros((P, G, max_new_tokens), bool)
    finish = np.zeros((P, G), np.int32)
    for p, done in enumerate(groups):
        prompt = done.group.prompt
        if len(done.completions) != G:
            raise ValueError(
                f"to_rollout: group {done.id!r} has {len(done.completions)} completions, the first "
                f"{G}."
            )
        if len(prompt) > prompt_width:
            raise ValueError(
                f"to_rollout: the prompt of group {done.id!r} has {len(prompt)} tokens, more than "
                f"prompt_width {prompt_width}."
            )
        prompts[p, : len(prompt)], kept[p, : len(prompt)] = prompt, True
        for g, completion in enumerate(done.completions):
            length = len(completion)
            if length > max_new_tokens:
                raise ValueError(
                    f"to_rollout: request {completion.request} of group {done.id!r} has {length} "
                    f"tokens, more than max_new_tokens {max_new_tokens}."
                )
            mask[p, g, :length], finish[p, g] = True, completion.finish
            jax.tree.map(
                lambda x, new, p=p, g=g, n=length: x[p, g].__setitem__(slice(0, n), new),
                out,
                completion.out,
            )
    return Rollout(
        prompt_tokens=prompts,
        prompt_mask=kept,
        tokens=out.tokens,
        mask=mask,
        behavior_logp=out.behavior_logp,
        model_logp=out.model_logp,
        log_kept=out.log_kept,
        finish=finish,
        version=out.version,
        **({} if out.support is None else {"support": out.support}),
    )
