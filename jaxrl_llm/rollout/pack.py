"""From finished groups to the arrays of a batch."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm.rollout.requests import FinishedGroup
from jaxrl_llm.rollout.rollout import FAILED, UNFINISHED, Rollout


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
        _check(done, G, T, prompt_width)
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


def _check(done: FinishedGroup, size: int, most: int, prompt_width: int) -> None:
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
