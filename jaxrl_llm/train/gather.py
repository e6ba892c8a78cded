"""A batch of rollouts from questions to numbers: sampled, graded, checked, ready to train on."""

import time
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.data import Cursor, take
from jaxrl_llm.recipes import Batch, EvolutionRecipe, Recipe
from jaxrl_llm.rollout import trim
from jaxrl_llm.train.collect import records, spread_rows, texts_of, to_batch
from jaxrl_llm.train.metrics import rollout_metrics
from jaxrl_llm.train.provide import graded_greedily, provide
from jaxrl_llm.train.setup import Parts
from jaxrl_llm.train.streaming import stream


class Gathered(NamedTuple):
    """A batch of graded rollouts, all of it on the host.

    Attributes:
      number: Which batch of the run it is, from 0: it trains the weights of that version.
      cursor: Where the questions of the next batch begin.
      batch: What the train step gets.
      numbers: What the host knows of it, by the names of metrics.jsonl.
      rows: The completions that are shown, one record each.
      seconds: What it took, by the names "sample" and "reward".
    """

    number: int
    cursor: Cursor
    batch: Batch
    numbers: dict[str, float]
    rows: list[dict]
    seconds: dict[str, float]


def next_questions(parts: Parts, cursor: Cursor) -> tuple[list[int], Cursor]:
    """The questions of a batch by their places, and where those of the next one begin."""
    config = parts.config
    size, seed = len(parts.train), config.data.seed
    return take(cursor, config.prompts_per_step, size=size, seed=seed)


def gather(
    parts: Parts, params: ArrayTree, key: Array, cursor: Cursor, *, number: int, version: int
) -> Gathered:
    """Samples and grades a batch; it depends on the key, its number and the weights alone.

    Args:
      parts: Of the run.
      params: The weights that sample.
      key: That of the run's state.
      cursor: Where its questions begin.
      number: Which batch it is, from 0.
      version: Of the weights.

    Raises:
      ValueError: If something in it cannot be trained on; it names the prompt.
      RewardError: If the reward fails.
    """
    clock = [time.perf_counter()]

    def sampled() -> None:
        clock.append(time.perf_counter())

    indices, cursor = next_questions(parts, cursor)
    questions = [parts.train[i] for i in indices]
    recipe = parts.recipe
    evolves = isinstance(recipe, EvolutionRecipe)
    if not evolves:  # the noise of members is drawn from the key of the run
        key = jax.random.fold_in(key, number)
    if parts.engine is None:
        tokens = [question.tokens for question in questions]
        rollout = processes.to_host(parts.sampler(params, key, tokens, version=version))
        completions = texts_of(rollout, parts.tokenizer)
        sampled()
        scores = parts.grade(questions, completions)
    else:
        given = (parts, params, key, questions)
        rollout, completions, scores = stream(*given, version=version, sampled=sampled)
    rollout = trim(rollout)
    vocab_size = parts.model.config.vocab_size
    given = (rollout, scores.rewards, questions)
    batch = to_batch(*given, vocab_size=vocab_size, drop_failed=evolves)
    if isinstance(recipe, Recipe):
        batch = provide(
            batch,
            recipe,
            scores=scores,
            rollout=rollout,
            step=number,
            indices=indices,
            questions=questions,
            greedy=lambda: graded_greedily(parts, params, key, questions),
        )
    if parts.config.asynchrony.max_staleness and not recipe.reads_behavior:
        # What sampled is no longer what is trained, and nothing else would make up for it.
        batch = batch.replace(old_logp=batch.behavior_logp)
    clock.append(time.perf_counter())

    ages = number - np.asarray(rollout.version)[batch.mask]
    rows = []
    if number % parts.config.samples_every == 0:
        rows = records(questions, completions, scores)
        rows = spread_rows(rows, len(questions), parts.config.samples_shown)
    seconds = dict(zip(("sample", "reward"), np.diff(clock).tolist(), strict=True))
    return Gathered(number, cursor, batch, rollout_metrics(scores, rollout, ages), rows, seconds)
