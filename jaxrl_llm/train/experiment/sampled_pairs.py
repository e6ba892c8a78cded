"""Pairs of sampled and graded policy responses: data for preference losses."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.reasoning import split_reply
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.curation import right_over_wrong
from jaxrl_llm.data.prompts import Prompt
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.rewards.scoring import check_answered
from jaxrl_llm.rollout.backends import texts_of
from jaxrl_llm.rollout.types import STOP
from jaxrl_llm.train.data.grading import check_finite
from jaxrl_llm.train.experiment.experiment import Experiment

# Number of responses sampled at a time, unless one prompt has more.
_AT_ONCE = 64
# Fields that a new pair does not keep: they describe other responses, or repeat the prompt.
_NOT_KEPT = ("messages", "margin", "density", "completion", "label", "responses", "rewards")


class SampledPairs(NamedTuple):
    """The result of :func:`sample_pairs`.

    Attributes:
      rows: ``{"id", "prompt", "chosen", "rejected"}`` for each pair, with the answer and the other
        fields of the prompt, as :func:`~jaxrl_llm.data.from_file` reads them.
      prompts: Number of sampled prompts.
      no_right: Number of prompts without a correct response that ended.
      no_wrong: Number of prompts with only correct responses.
      responses: Number of sampled responses.
      unended: Number of responses that reached the maximum length.
      failed: Number of reward calls that failed.
    """

    rows: list[dict[str, Any]]
    prompts: int
    no_right: int
    no_wrong: int
    responses: int
    unended: int
    failed: int


def sample_pairs(
    experiment: Experiment,
    params: ArrayTree,
    key: Array,
    *,
    samples: int,
    pairs: int = 1,
    success: float = 1.0,
    prefer: Literal["short", "any"] = "short",
    limit: int | None = None,
    on_batch: Callable[[int, list[dict[str, Any]]], Any] = lambda prompts, rows: None,
) -> SampledPairs:
    """Pairs correct and wrong responses of a policy to the prompts that a run trains on.

    Of several responses with equal text only the first that was graded takes part. A response that
    did not end, or ended within its reasoning, is excluded: as data it would be followed by the
    stop token.

    Args:
      experiment: A run with a reward; its held-out questions are not sampled.
      params: Parameters of the policy.
      key: A typed key; the same key gives the same pairs.
      samples: Number of responses per prompt.
      pairs: Maximum number of pairs per prompt.
      success: The lowest reward of a correct response.
      prefer: "short" chooses the shortest correct response, "any" each correct response in turn.
      limit: Maximum number of prompts.
      on_batch: Called with the number of prompts and the rows of each batch.

    Raises:
      RewardError: If the reward fails, or every reward call fails.
      ValueError: If the logits of a response are non-finite; the message names the prompt.
    """
    distinct = {question.prompt.content: question for question in experiment.train}
    questions = list(distinct.values())[:limit]
    tokenizer, sampling = experiment.tokenizer, experiment.config.sampling
    params, key = experiment.on_rollout_mesh((params, key))
    shards = batch_shards(experiment.rollout_mesh)
    size = -(-max(_AT_ONCE // samples, 1) // shards) * shards
    sampler = experiment.sampler(samples)

    def encodes(text: str) -> bool:
        if split_reply(text).final is None:
            return False  # no turn of a chat template ends within its reasoning
        tokens = experiment.encoder.response(text, ends=True)
        return bool(text.strip()) and len(tokens) <= sampling.max_new_tokens

    rows, graded = [], []
    no_right = no_wrong = unended = 0
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        filled = part + [part[-1]] * (size - len(part))
        rollout = sampler(params, jax.random.fold_in(key, start), [q.tokens for q in filled])
        lengths, finish = processes.to_host((rollout.mask.sum(axis=-1), rollout.finish))
        check_finite("sample_pairs", finish[: len(part)], part)
        texts = texts_of(rollout, tokenizer.decode)[: len(part)]
        scores = experiment.grader(part, texts)
        graded.append(scores)
        ended, shape = finish[: len(part)] == STOP, (len(part), samples)
        # A reward of 0 in place of a failed call does not make a response wrong.
        answered = ~scores.unanswered.reshape(shape)
        where = ended & first_of_equal(texts, answered)
        where &= np.array([[encodes(text) for text in row] for row in texts])
        rewards = np.where(where, scores.rewards.reshape(shape), 0.0).astype(np.float32)
        right = (where & (rewards >= success)).any(axis=-1)
        wrong = (where & (rewards < success)).any(axis=-1)
        selected = right_over_wrong(
            rewards,
            pairs=pairs,
            success=success,
            lengths=lengths[: len(part)] if prefer == "short" else None,
            where=where,
        )
        indices, is_pair = np.asarray(selected.indices), np.asarray(selected.where)
        before = len(rows)
        for p, m in np.argwhere(is_pair):
            chosen, rejected = (texts[p][i] for i in indices[p, m])
            rows.append(pair_row(part[p].prompt, chosen, rejected))
        no_right += int((~right).sum())
        no_wrong += int((right & ~wrong).sum())
        unended += int((~ended).sum())
        on_batch(len(part), rows[before:])
    check_answered(graded, " that were sampled for pairs")
    failed = sum(scores.failures for scores in graded)
    responses = len(questions) * samples
    return SampledPairs(rows, len(questions), no_right, no_wrong, responses, unended, failed)


def first_of_equal(texts: Sequence[Sequence[str]], where: np.ndarray) -> np.ndarray:
    """Of the texts of each row with True in ``where``, those that equal none before them."""
    first = np.zeros(where.shape, bool)
    for p, row in enumerate(texts):
        places = {row[i]: i for i in reversed(np.flatnonzero(where[p]))}
        first[p, list(places.values())] = True
    return first


def pair_row(prompt: Prompt, chosen: str, rejected: str) -> dict[str, Any]:
    """A row of data with a pair and the other fields of its prompt, none of old responses."""
    messages: str | Sequence = prompt.text if prompt.messages is None else list(prompt.messages)
    row = {"id": prompt.id, "prompt": messages, "chosen": chosen, "rejected": rejected}
    others = {k: v for k, v in prompt.metadata.items() if k not in (*row, *_NOT_KEPT)}
    if others["answer"] is None:
        del others["answer"]
    return row | others
