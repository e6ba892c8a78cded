"""Between text and arrays: rollouts to text, rewards to a batch."""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.core.runtime import processes
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import Batch, validate_batch
from jaxrl_llm.rewards import RewardError, Scores
from jaxrl_llm.rewards import score as score_completions
from jaxrl_llm.rollout.types import FAILED


def texts_of(rollout, tokenizer) -> list[list[str]]:
    """The responses as text: P lists of G."""
    tokens, mask = processes.to_host((rollout.tokens, rollout.mask))
    return [
        [tokenizer.decode(row[kept].tolist()) for row, kept in zip(group, keep, strict=True)]
        for group, keep in zip(tokens, mask, strict=True)
    ]


def grade(
    questions: Sequence[Question],
    completions: Sequence[Sequence[str]],
    reward,
    *,
    deadline: float | None,
) -> Scores:
    """Rewards ``[P * G]`` of P groups of completions; each of several processes grades its share.

    Raises:
      RewardError: If the reward fails; it names the prompt.
      ProcessError: If it failed in another process.
    """
    mine = processes.portion(len(questions))
    given = (questions[mine], completions[mine], reward)
    return join(processes.together(lambda: grade_here(*given, deadline=deadline)))


def grade_here(
    questions: Sequence[Question],
    completions: Sequence[Sequence[str]],
    reward,
    *,
    deadline: float | None,
) -> Scores:
    """The same, all of it by this process; nothing for no groups."""
    if not questions:
        return Scores(np.zeros(0, np.float32), {}, 0)
    asked = [q for q, group in zip(questions, completions, strict=True) for _ in group]
    return score_completions(
        reward,
        [q.prompt.text for q in asked],
        [text for group in completions for text in group],
        [q.prompt.metadata for q in asked],
        deadline=deadline,
    )


def join(parts: Sequence[Scores]) -> Scores:
    """Scores of several calls as those of one.

    A call all of whose verifiers failed has no components; it counts zero in those of the others.

    Raises:
      RewardError: If calls differ in the names of their components.
    """
    if len(parts) == 1:
        return parts[0]
    answered = [each for each in parts if each.failures < len(each.rewards)]
    names = answered[0].reward_components.keys() if answered else ()
    for each in answered:
        if each.reward_components.keys() != set(names):
            raise RewardError(
                f"The reward gave the names {sorted(each.reward_components)} for one prompt and "
                f"{sorted(names)} for another."
            )
    components = {
        name: np.concatenate(
            [x.reward_components.get(name, np.zeros_like(x.rewards)) for x in parts]
        )
        for name in names
    }
    rewards = np.concatenate([each.rewards for each in parts])
    return Scores(rewards, components, sum(each.failures for each in parts))


def to_batch(
    rollout,
    rewards: np.ndarray,
    questions: Sequence[Question],
    *,
    vocab_size: int,
    drop_failed: bool = False,
) -> Batch:
    """A checked training batch of graded rollouts, as host arrays.

    Args:
      rollout: P groups of G.
      rewards: float ``[P * G]`` or ``[P, G]``.
      questions: P, for the names in messages.
      vocab_size: Tokens lie below it.
      drop_failed: Leave out of ``where`` what has failed, a rollout or its reward, in place of an
        error: for a population, some members of which may be broken.

    Raises:
      ValueError: If a value is unusable; it names the prompt.
    """
    host = processes.to_host(rollout)
    shape = host.mask.shape[:2]
    ids = [q.prompt.id or q.prompt.text[:40] for q in questions]
    rewards, where = np.asarray(rewards, np.float32).reshape(shape), np.ones(shape, bool)
    if drop_failed:
        where = np.isfinite(rewards) & (host.finish != FAILED)
        rewards = np.where(where, rewards, 0.0)
    elif (failed := (host.finish == FAILED).any(axis=-1)).any():
        name = ids[int(np.argmax(failed))]
        raise ValueError(f"to_batch: the logits of a response to prompt {name!r} are no numbers.")
    batch = Batch(
        tokens=host.tokens,
        mask=host.mask,
        rewards=rewards,
        where=where,
        prompt_tokens=host.prompt_tokens,
        prompt_mask=host.prompt_mask,
        # Of the same kind as what the step computes: tempered, over the support.
        behavior_logp=host.behavior_logp,
        support=host.support,
    )
    return validate_batch(batch, vocab_size=vocab_size, prompt_ids=ids)


def records(
    questions: Sequence[Question], completions: Sequence[Sequence[str]], scores: Scores
) -> list[dict]:
    """One record a completion: id, prompt, completion, reward, and ``reward/NAME`` of each part."""
    texts = [
        (q.prompt, text) for q, group in zip(questions, completions, strict=True) for text in group
    ]
    rewards = {"reward": scores.rewards}
    rewards |= {f"reward/{name}": column for name, column in scores.reward_components.items()}
    return [
        {"id": prompt.id, "prompt": prompt.text, "completion": text}
        | {name: float(column[i]) for name, column in rewards.items()}
        for i, (prompt, text) in enumerate(texts)
    ]


def spread_rows(rows: Sequence[dict], groups: int, count: int) -> list[dict]:
    """So many records of a batch, of as many groups as possible, spread over it, in their order.

    Args:
      rows: From :func:`records`, group after group, all groups of one size.
      groups: How many groups they are.
      count: How many to take at most.

    Example:
      >>> spread_rows(["a0", "a1", "b0", "b1", "c0", "c1"], 3, 2)
      ['a0', 'b0']
      >>> spread_rows(["a0", "a1", "b0", "b1", "c0", "c1"], 3, 4)
      ['a0', 'a1', 'b0', 'c0']
    """
    size = len(rows) // groups
    whole, rest = divmod(min(count, len(rows)), groups)
    taken = {(group, member) for group in range(groups) for member in range(whole)}
    taken |= {(i * groups // rest, whole) for i in range(rest)}
    return [rows[group * size + member] for group, member in sorted(taken)]
