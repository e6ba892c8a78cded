"""Rollouts that are graded as they finish, while others still decode."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.data.questions import Question
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout import Generation, Group, Rollout, to_rollout
from jaxrl_llm.train.collect import join
from jaxrl_llm.train.setup import Parts


def stream(
    parts: Parts,
    params: ArrayTree,
    key: Array,
    questions: Sequence[Question],
    *,
    version: int,
    sampled: Callable[[], None] = lambda: None,
) -> tuple[Rollout, list[list[str]], Scores]:
    """Samples in slots and grades each group as soon as it is finished.

    The rollouts are those of the whole-batch sampler, whatever the slots.

    Args:
      parts: Of the run.
      params: The weights that sample.
      key: Of the batch.
      questions: P questions.
      version: Of the weights.
      sampled: Called when all have been sampled, while the last are still graded.

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
    mine = range(len(questions))[processes.portion(len(questions))]
    pool = ThreadPoolExecutor(1, thread_name_prefix="rewards")
    try:
        for done in generation:
            found[done.id] = done
            shown[done.id] = [parts.tokenizer.decode(c.tokens.tolist()) for c in done.completions]
            if done.id in mine:
                asked = ([questions[done.id]], [shown[done.id]])
                graded[done.id] = pool.submit(parts.grade_here, *asked)
        sampled()
        scores = processes.together(lambda: [graded[i].result() for i in mine])
    finally:
        # Where one fails the others may, too, and each would take its time to.
        pool.shutdown(wait=False, cancel_futures=True)
    for i, question in enumerate(questions):
        found[i] = found[i]._replace(
            group=found[i].group._replace(id=question.prompt.id or question.prompt.text[:40])
        )
    rollout = to_rollout(
        [found[i] for i in range(len(questions))],
        max_new_tokens=sampling.max_new_tokens,
        prompt_width=engine.spec.prompt_length,
        pad_id=parts.tokenizer.pad_id,
    )
    return rollout, [shown[i] for i in range(len(questions))], join(sum(scores, []))
