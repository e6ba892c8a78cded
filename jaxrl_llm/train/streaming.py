"""Rollouts that are graded as they finish, while others still decode."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.rewards import RewardError, Scores
from jaxrl_llm.rollout import Generation, Group, Rollout, to_rollout
from jaxrl_llm.train.collect import Question
from jaxrl_llm.train.setup import Parts


def stream(
    parts: Parts, params: ArrayTree, key: Array, questions: Sequence[Question], *, version: int
) -> tuple[Rollout, list[list[str]], Scores]:
    """Samples in slots and grades each group as soon as it is finished.

    The rollouts are those of the whole-batch sampler, whatever the slots.

    Args:
      parts: Of the run.
      params: The weights that sample.
      key: Of the batch.
      questions: P questions.
      version: Of the weights.

    Returns:
      The rollouts ``[P, G]``, their texts, and their scores ``[P * G]``.

    Raises:
      ValueError: If a response failed; it names the question.
      RewardError: If the reward fails; it names the prompt.
    """
    sampling, engine = parts.config.sampling, parts.engine
    if engine is None:
        raise ValueError("stream: the run has no slots; set sampling.slots.")
    size, shown = sampling.group_size, {}
    generation = Generation(engine, params, key=key, version=version)
    for i, question in enumerate(questions):
        requests = tuple(range(i * size, (i + 1) * size))
        generation.submit(Group(id=i, prompt=question.tokens, requests=requests))
    found, graded = {}, {}
    with ThreadPoolExecutor(1, thread_name_prefix="rewards") as pool:
        for done in generation:
            found[done.id] = done
            shown[done.id] = [parts.tokenizer.decode(c.tokens.tolist()) for c in done.completions]
            graded[done.id] = pool.submit(parts.grade, [questions[done.id]], [shown[done.id]])
        scores = [graded[i].result() for i in range(len(questions))]
    for i, question in enumerate(questions):
        found[i] = found[i]._replace(
            group=found[i].group._replace(id=question.prompt.id or question.prompt.text[:40])
        )
    rollout = to_rollout(
        [found[i] for i in range(len(questions))],
        max_new_tokens=sampling.max_new_tokens,
        prompt_width=engine.prompt_length,
        pad_id=parts.tokenizer.pad_id,
    )
    return rollout, [shown[i] for i in range(len(questions))], join(scores)


def join(parts: Sequence[Scores]) -> Scores:
    """Scores of several calls as those of one.

    A call all of whose verifiers failed has no columns; it counts zero in those of the others.

    Raises:
      RewardError: If calls differ in the names of their columns.
    """
    answered = [each for each in parts if each.failures < len(each.rewards)]
    names = answered[0].columns.keys() if answered else ()
    for each in answered:
        if each.columns.keys() != set(names):
            raise RewardError(
                f"The reward gave the names {sorted(each.columns)} for one prompt and "
                f"{sorted(names)} for another."
            )
    columns = {
        name: np.concatenate([x.columns.get(name, np.zeros_like(x.rewards)) for x in parts])
        for name in names
    }
    rewards = np.concatenate([each.rewards for each in parts])
    return Scores(rewards, columns, sum(each.failures for each in parts))
