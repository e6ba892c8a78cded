"""What is asked of an engine and what it answers, as host data."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
      max_new_tokens: The longest response; None for the engine's.
      expected: How many tokens a response is expected to take; the longest groups start first. None
        for the limit.
      settings: Options of the draw for this group, of those that the engine lets vary.
      adapter: Which low-rank delta is added to the weights.
      partial: Responses that have begun, or ended, before: by request.
    """

    id: Any
    prompt: Sequence[int]
    requests: tuple[int, ...]
    max_new_tokens: int | None = None
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
    import jax

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
