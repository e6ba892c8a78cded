"""What is asked of an engine and what it answers, as host data."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import FAILED, UNFINISHED, Rollout

if TYPE_CHECKING:
    from jaxrl_llm.rollout.engine.engine import Engine


@dataclass(frozen=True, eq=False)
class Completion:
    """One response, finished or not; its length is its number of tokens.

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


def nothing(request: int, blank: Tokens) -> Completion:
    """A response that has not begun, for outputs of one token like ``blank``."""
    out = jax.tree.map(lambda x: np.zeros((0, *x.shape), x.dtype), blank)
    return Completion(request, out, UNFINISHED)


def cut(out: Tokens, start: int, end: int) -> Tokens:
    """The tokens from one place to another, in arrays of their own."""
    return jax.tree.map(lambda x: x[start:end].copy(), out)


def limits_of(group: Group, most: int) -> dict[int, int]:
    """The longest response by request, where a slot holds ``most`` tokens."""
    asked = most if group.max_new_tokens is None else group.max_new_tokens
    each = asked if isinstance(asked, Sequence) else (asked,) * len(group.requests)
    return dict(zip(group.requests, each, strict=True))


def count_deltas(function: str, deltas: ArrayTree | None, *, pairs: bool = False) -> int:
    """How many low-rank deltas there are to choose from; one, that of nothing, for None.

    With ``pairs``, two that follow each other may have their factors in common.

    Raises:
      ValueError: If factors ``[N, in, r]`` and scales, one number or ``[N]``, differ in N.
    """
    if deltas is None:
        return 1
    entries = jax.tree.leaves(deltas, is_leaf=lambda x: isinstance(x, tuple))
    factors = jax.tree.leaves([x[:2] for x in entries if isinstance(x, tuple)])
    others = jax.tree.leaves([x[2:] if isinstance(x, tuple) else x for x in entries])
    held, own = ({np.shape(x)[0] for x in xs if np.ndim(x)} for xs in (factors, others))
    count = max(held | own, default=0)
    halves = pairs and own == {count} and held == {count // 2} and count % 2 == 0
    alike = len(held | own) == 1
    if not (alike or halves) or any(np.ndim(x) not in (0, 1, 3) for x in factors + others):
        shapes = ", ".join(str(np.shape(x)) for x in factors + others)
        raise ValueError(f"{function}: deltas must share one leading axis [N]; got {shapes}.")
    return count


def check_group(group: Group, engine: "Engine", *, known: Container[int], adapters: int) -> None:
    """Raises ValueError, naming the group, unless an engine can take it.

    Args:
      group: The group.
      engine: The engine.
      known: Requests that are already there.
      adapters: How many low-rank deltas there are.
    """
    start = f"submit: group {group.id!r}"
    _check_prompt(start, group.prompt, engine)
    _check_requests(start, group, known)
    _check_limits(start, group, engine.max_new_tokens)
    if group.expected is not None and not group.expected >= 0:
        raise ValueError(f"{start} expects {group.expected} tokens, which is no length.")
    if unknown := set(group.settings) - set(engine.draw.settings):
        vary = ", ".join(engine.draw.settings) or "none"
        raise ValueError(
            f"{start} sets {min(unknown)!r}; options that may vary with this engine: {vary}."
        )
    engine.draw.check(start, group.settings)
    if not 0 <= group.adapter < adapters:
        raise ValueError(f"{start} names adapter {group.adapter} of {adapters}.")
    outputs = jax.tree.structure(engine.draw.blank)
    for request, begun in group.partial.items():
        if jax.tree.structure(begun.out) != outputs:
            raise ValueError(
                f"{start}: the tokens of request {request} were sampled with other outputs "
                "(entropy, support) than this engine has."
            )


def _check_prompt(start: str, prompt: Sequence[int], engine: "Engine") -> None:
    if not len(prompt):
        raise ValueError(f"{start} has an empty prompt; it needs at least one token.")
    if len(prompt) > engine.prompt_length:
        raise ValueError(
            f"{start} has a prompt of {len(prompt)} tokens; the engine's slots hold prompt_length "
            f"{engine.prompt_length}."
        )
    size = engine.model.config.vocab_size
    if wrong := [t for t in prompt if not 0 <= t < size]:
        raise ValueError(f"{start} holds token {wrong[0]}, outside the vocabulary of {size}.")


def _check_requests(start: str, group: Group, known: Container[int]) -> None:
    requests = group.requests
    if not requests:
        raise ValueError(f"{start} has no requests.")
    if wrong := [r for r in requests if not (isinstance(r, Integral) and 0 <= r < 2**31)]:
        raise ValueError(f"{start}: request {wrong[0]!r} is no integer from 0 to 2**31 - 1.")
    if twice := [r for r in requests if r in known or requests.count(r) > 1]:
        raise ValueError(f"{start}: request {twice[0]} is there twice.")
    if unknown := set(group.partial) - set(requests):
        raise ValueError(f"{start} has a partial response of request {min(unknown)}, not its own.")


def _check_limits(start: str, group: Group, most: int) -> None:
    asked, count = group.max_new_tokens, len(group.requests)
    if isinstance(asked, Sequence) and len(asked) != count:
        raise ValueError(f"{start} has {count} requests and max_new_tokens for {len(asked)}.")
    for request, limit in limits_of(group, most).items():
        if not (isinstance(limit, Integral) and 1 <= limit <= most):
            raise ValueError(
                f"{start} asks for {limit} new tokens; the engine's slots hold between 1 and "
                f"max_new_tokens {most}."
            )
        begun = group.partial.get(request)
        if begun is not None and len(begun) > limit - (not has_ended(begun)):
            raise ValueError(
                f"{start}: request {request} has {len(begun)} tokens already, and {limit} at most."
            )


def to_rollout(
    groups: Sequence[FinishedGroup], *, max_new_tokens: int, prompt_width: int, pad_id: int = 0
) -> Rollout:
    """Finished groups of one size as the arrays of a :class:`~jaxrl_llm.rollout.Rollout`.

    Cancelled responses keep the tokens that they have; ``finish`` tells them from the others.

    Args:
      groups: P groups of G completions.
      max_new_tokens: T, the width of the responses.
      prompt_width: The width of the prompts.
      pad_id: Fills what is left of the tokens.

    Returns:
      A Rollout of NumPy arrays.

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
        _check_finished(done, G, T, prompt_width)
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
            for buffer, new in zip(*map(jax.tree.leaves, (out, completion.out)), strict=True):
                buffer[p, g, :n] = new
    return Rollout(
        prompt_tokens=prompts,
        prompt_mask=prompt_mask,
        tokens=out.tokens,
        mask=mask,
        behavior_logp=out.behavior_logp,
        model_logp=out.model_logp,
        log_kept=out.log_kept,
        finish=np.array([[c.finish for c in done.completions] for done in groups], np.int32),
        version=out.version,
        support=out.support,
    )


def _check_finished(done: FinishedGroup, size: int, most: int, prompt_width: int) -> None:
    """Raises ValueError unless a group can be part of a batch."""
    count, length = len(done.completions), len(done.group.prompt)
    if count != size:
        raise ValueError(
            f"to_rollout: group {done.id!r} has {count} completions, the first {size}."
        )
    if length > prompt_width:
        raise ValueError(
            f"to_rollout: the prompt of group {done.id!r} has {length} tokens, more than "
            f"prompt_width {prompt_width}."
        )
    for each in done.completions:
        start = f"to_rollout: request {each.request} of group {done.id!r}"
        if each.finish == FAILED:
            raise ValueError(f"{start} failed: the model's logits were no numbers.")
        if each.finish == UNFINISHED:
            raise ValueError(f"{start} is unfinished.")
        if len(each) > most:
            raise ValueError(f"{start} has {len(each)} tokens, more than max_new_tokens {most}.")
