"""The mean reward on held-out questions with a 95% interval, greedy and sampled; pass@k, maj@k."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.curation.collectors.protocol import Request
from jaxrl_llm.data.questions import Question
from jaxrl_llm.rewards.answers import answer_of
from jaxrl_llm.rewards.scoring import OnError, Scores, check_answered
from jaxrl_llm.rollout.backends import Asked, EngineBackend, Graded, texts_of
from jaxrl_llm.rollout.collect import DataRows
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.train.data.grading import Grader, OnNonFinite, check_finite, sample_rows
from jaxrl_llm.train.evaluation.at_k import AtK, at_k, check_k
from jaxrl_llm.train.evaluation.intervals import t_quantile, wilson


class Accuracy(NamedTuple):
    """A mean reward and its 95% interval, whose ends are NaN if there is none."""

    mean: float  # over all graded completions
    low: float
    high: float
    questions: int  # those with a graded completion
    samples: int  # completions of each question
    binary: bool = False  # whether every reward is 0 or 1, so that the mean is an accuracy
    failed: int = 0  # completions whose reward call failed; excluded from the mean
    at_k: tuple[AtK, ...] = ()  # pass@k and maj@k, if requested
    # For pairs of a reward model, see diagnostics.pair_calibration; else None.
    calibration_error: float | None = None
    brier: float | None = None

    def record(self) -> dict:
        """A mapping for JSON, with any pass@k and maj@k by name; no interval is null."""
        values = self._replace(at_k=())._asdict() | {
            x.name: {k: v for k, v in x._asdict().items() if k != "name"} for x in self.at_k
        }
        del values["at_k"]
        known = {name: value for name, value in values.items() if value is not None}
        ends = {name: None for name in ("low", "high") if math.isnan(known[name])}
        return known | ends

    def __str__(self) -> str:
        ends = f"{self.low:.3f}, {self.high:.3f}"
        text = f"{self.mean:.3f} [{'no interval' if math.isnan(self.low) else ends}]"
        if self.calibration_error is None:
            return text
        return f"{text}, calibration error {self.calibration_error:.3f}, Brier {self.brier:.3f}"


def accuracy(rewards: np.ndarray, where: np.ndarray | None = None) -> Accuracy:
    """Mean reward of Q questions with S completions each, with a 95% interval.

    Completions of one question are correlated, so the data are not Q S independent trials.
    Rewards within [0, 1] use Wilson's interval with the effective number of trials

        n = p (1 - p) / Var(mean),   Var(mean) = var(means of questions) / Q,   Q <= n <= Q S

    Other rewards use Student's t of the question means, with Q - 1 degrees of freedom; one question
    has no interval, nor have equal means, such as those of rewards that are all -1. If completions
    are missing, each question is weighted by its number of graded completions, N_q of N in total:

        Var(mean) = Q / (Q - 1) sum of (N_q (mean_q - mean))^2 / N^2,   Q' <= n <= N

    with Q' = N^2 / sum of N_q^2, which is Q if all questions have equally many.

    Args:
      rewards: float ``[Q, S]``.
      where: bool ``[Q, S]``, True for graded completions; None for all. Rewards of the others are
        not read, and these completions count as ``failed``.

    Raises:
      ValueError: If there are no rewards.

    Example:
      >>> import numpy as np
      >>> print(accuracy(np.array([[1.0], [0.0], [1.0], [1.0]])))
      0.750 [0.301, 0.954]
    """
    checks.check_rank("accuracy", 2, rewards=rewards)
    S = rewards.shape[1]
    where = np.ones(rewards.shape, bool) if where is None else np.asarray(where)
    checks.check_bool("accuracy", where=where)
    checks.check_same_shape("accuracy", rewards=rewards, where=where)
    if not where.any():
        raise ValueError(
            f"accuracy: there are no rewards; got shape {rewards.shape}, of which "
            f"{int(where.sum())} are graded."
        )
    graded = where.any(axis=-1)
    failed, Q = int(where.size - where.sum()), int(graded.sum())
    rewards, where = np.asarray(rewards, np.float64)[graded], where[graded]
    values, sizes = rewards[where], where.sum(axis=-1)
    N, mean = len(values), float(values.mean())
    spread = np.where(where, rewards, 0.0).sum(axis=-1) - mean * sizes
    variance = float((spread**2).sum()) / N**2 * Q / (Q - 1) if Q > 1 else 0.0
    if values.min() >= 0 and values.max() <= 1:
        least = N**2 / float((sizes.astype(np.float64) ** 2).sum())
        n = mean * (1 - mean) / variance if variance > 0 else least
        low, high = wilson(mean, min(max(n, least), N))
    else:
        half = t_quantile(Q) * math.sqrt(variance)
        low, high = (mean - half, mean + half) if variance > 0 else (math.nan, math.nan)
    return Accuracy(mean, low, high, Q, S, bool(np.isin(values, (0.0, 1.0)).all()), failed)


def evaluate(
    sampler: Callable,
    params: ArrayTree,
    key: Array,
    questions: Sequence[Question],
    *,
    reward,
    tokenizer,
    batch_size: int,
    deadline: float | None = None,
    on_error: OnError = "drop",
    k: Sequence[int] = (),
    success: float = 1.0,
    on_non_finite: OnNonFinite = "raise",
) -> tuple[Accuracy, list[dict]]:
    """Mean reward of a policy on questions, and its pass@k and maj@k.

    Args:
      sampler: From ``rollout.make_sampler``; its group size is the number of completions.
      params: Parameters of the policy.
      key: A typed key; the same key gives the same evaluation.
      questions: From :func:`~jaxrl_llm.data.encode_prompts`.
      reward: As in training.
      tokenizer: Tokenizer of the model.
      batch_size: Questions sampled at a time; the last batch is padded, so that all batches have
        the same shape.
      deadline: Seconds that one reward call may take, as in :func:`~jaxrl_llm.rewards.score`.
      on_error: As there; unless it is "zero", a response whose call failed is excluded and counted.
      k: Values of k for pass@k, at most the group size; also for maj@k if the reward returns
        ``answer_ids`` or defines how to extract answers (:func:`~jaxrl_llm.rewards.answer_of`). A k
        for which no question has enough graded completions is left out, with a warning.
      success: The lowest reward of a correct completion.
      on_non_finite: "raise" for an error if the logits of a completion are non-finite; "warn" to
        grade the tokens before them.

    Returns:
      The mean reward, and one record per completion: prompt, completion, reward, id.

    Raises:
      RewardError: If the reward fails, or every reward call fails.
      ValueError: If there are no questions, a k is above the group size, or logits are non-finite;
        the message names the prompt.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> tokenizer = jr.testing.ByteTokenizer()
      >>> prompts = [jr.data.Prompt("1+1="), jr.data.Prompt("2+2=")]
      >>> questions = jr.data.encode_prompts(prompts, tokenizer, room=32, chat=False)
      >>> def reward(prompt, completion, metadata):
      ...     return float("1" in prompt)
      >>> sample = jr.rollout.make_sampler(model, max_new_tokens=2, group_size=2)
      >>> result, rows = jr.train.evaluate(
      ...     sample, params, jax.random.key(0), questions, reward=reward, tokenizer=tokenizer,
      ...     batch_size=2)
      >>> result.mean, result.questions, len(rows)
      (0.5, 2, 4)
    """
    checks.check_positive("evaluate", batch_size=batch_size)
    if not questions:
        raise ValueError("evaluate: there are no questions.")
    rows, graded, answers, answered = [], [], [], False
    finish: list[np.ndarray] = []
    for start in range(0, len(questions), batch_size):
        part = list(questions[start : start + batch_size])
        filled = part + [part[-1]] * (batch_size - len(part))
        rollout = sampler(params, jax.random.fold_in(key, start), [q.tokens for q in filled])
        finish.append(processes.to_host(rollout.finish)[: len(part)])
        check_k(k, finish[-1].shape[-1])
        if on_non_finite == "raise":
            check_finite("evaluate", finish[-1], part)
        completions = texts_of(rollout, tokenizer.decode)[: len(part)]
        scores = Grader(reward, deadline, on_error)(part, completions)
        graded.append(scores)
        ids = answer_ids(reward, completions, scores) if k else []
        answered |= bool(ids)
        if scores.unanswered.all():  # a reward that reports answers then reports none
            ids = [np.full(len(texts), -1) for texts in completions]
        answers += ids
        rows += sample_rows(part, completions, scores)
    check_finite("evaluate", np.concatenate(finish), questions, on_non_finite=on_non_finite)
    check_answered(graded, " of the evaluation")
    rewards, failed = (
        np.concatenate([getattr(x, name) for x in graded]).reshape(len(questions), -1)
        for name in ("rewards", "failed")
    )
    result = accuracy(rewards, ~failed)
    if k:
        table = np.stack(answers) if answered and len(answers) == len(questions) else None
        result = result._replace(at_k=at_k(rewards >= success, k, answers=table, where=~failed))
    return result, rows


def play_groups(
    engine: Engine,
    params: ArrayTree,
    key: Array,
    tasks: Sequence[Question],
    episodes: Episodes,
    *,
    places: Sequence[int],
    decode: Callable[[list[int]], str],
    samples: int,
    temperature: float | None,
    max_new_tokens: int,
    pad_id: int,
    check: Callable[[], None] = lambda: None,
) -> list[Graded]:
    """The episodes of the tasks at some places, a group each; see :func:`play_tasks`."""
    backend = EngineBackend(
        engine,
        params,
        key,
        tasks,
        version=0,
        decode=decode,
        grade=lambda *_: Scores(np.zeros(0, np.float32), {}, np.zeros(0, bool)),
        max_new_tokens=max_new_tokens,
        pad_id=pad_id,
        episodes=episodes,
    )
    graded: dict[Asked, Graded] = {}
    try:
        asked, data = [], DataRows(tasks)
        for i, place in enumerate(places):
            check()
            name, room = repr(tasks[place].prompt.id or place), engine.spec.prompt_length
            prompt = episodes.prompt(place, data[place], name, room)
            numbers = tuple(range(i * samples, (i + 1) * samples))
            request = Request(samples, temperature=temperature)
            asked.append(Asked(place, numbers, request, prompt))
        backend.submit(asked)
        while len(graded) < len(asked):
            check()
            graded |= backend.wait()
    finally:
        backend.close()
    return [graded[each] for each in asked]


def play_tasks(
    engine: Engine,
    params: ArrayTree,
    key: Array,
    tasks: Sequence[Question],
    episodes: Episodes,
    *,
    decode: Callable[[list[int]], str],
    samples: int,
    temperature: float | None,
    max_new_tokens: int,
    pad_id: int,
    check: Callable[[], None] = lambda: None,
    k: Sequence[int] = (),
    success: float = 1.0,
) -> tuple[Accuracy, list[dict]]:
    """Mean return of a policy on the tasks of an environment, and its pass@k.

    Args:
      engine: The engine that decodes, with a temperature that requests can set.
      params: Parameters of the policy.
      key: A typed key; the same key gives the same evaluation.
      tasks: From :func:`~jaxrl_llm.data.encode_prompts`.
      episodes: Plays the environment.
      decode: Text of token ids.
      samples: Episodes of each task.
      temperature: Sampling temperature; None for that of the engine.
      max_new_tokens, pad_id: As for the engine.
      check: Called before each reset and while episodes are played; an exception from it ends the
        evaluation.
      k, success: As in :func:`evaluate`.

    Returns:
      The mean return, and one record per episode: prompt, completion, reward, id.

    Raises:
      RewardError: If every episode fails.
      ValueError: If a k is above the number of samples.
    """
    check_k(k, samples)
    groups = play_groups(
        engine,
        params,
        key,
        tasks,
        episodes,
        places=range(len(tasks)),
        decode=decode,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        pad_id=pad_id,
        check=check,
    )
    check_answered([group.scores for group in groups], " of the evaluation")
    rewards = np.stack([group.scores.rewards for group in groups])
    failed = np.stack([group.scores.failed for group in groups])
    result = accuracy(rewards, ~failed)
    if k:
        result = result._replace(at_k=at_k(rewards >= success, k, where=~failed))
    return result, [
        row
        for task, group in zip(tasks, groups, strict=True)
        for row in sample_rows([task], [group.texts], group.scores._replace(details={}))
    ]


def answer_ids(reward, completions: Sequence[Sequence[str]], scores: Scores) -> list[np.ndarray]:
    """The answers to each question as integers, for example for :func:`majority_at_k`.

    Args:
      reward: Returns ``answer_ids``, or defines how to extract answers
        (:func:`~jaxrl_llm.rewards.answer_of`).
      completions: S texts for each question.
      scores: The scores of these completions.

    Returns:
      int ``[S]`` for each question, below 0 for no answer, such as an empty text or one whose call
      failed; empty if the reward does neither.
    """
    if "answer_ids" in scores.reward_components:
        votes = scores.reward_components["answer_ids"].astype(np.int64)
    else:
        extract = answer_of(reward)
        if extract is None:
            return []
        numbered = []
        for texts in completions:
            ids: dict[str | None, int] = {None: -1}
            numbered.append([ids.setdefault(extract(x) or None, len(ids) - 1) for x in texts])
        votes = np.concatenate(numbered)
    # A failed call has no answer, whatever its reward is.
    return list(np.where(scores.unanswered, -1, votes).reshape(len(completions), -1))


def check_evaluation(config: Any) -> None:
    """Raises ValueError for an evaluation that measures too little, or nothing, for a run."""
    best, every, evaluation = config.checkpoint.best, config.checkpoint.every, config.evaluation
    evaluated = evaluation.enabled and evaluation.every and every % evaluation.every == 0
    if best not in (None, "reward") and not evaluated:
        raise ValueError(
            f"checkpoint: best={best!r} needs an evaluation at each checkpoint: set "
            f"evaluation.every to {every} or a divisor of it."
        )
    kinds = ("greedy", "sampled") if config.samples_held_out else ()
    kinds += ("pairs",) if config.compares_held_out else ()
    if best not in (None, "reward", *kinds):
        raise ValueError(
            f"checkpoint: best={best!r} is not measured by the evaluation of this run, which has "
            f"{', '.join(kinds)}."
        )
    if config.data.evaluation is not None and not evaluation.enabled:
        raise ValueError("data: evaluation has no effect if the evaluation is not enabled.")
    if kinds or not evaluation.enabled:
        return
    what = "one response a row" if config.offline else "no rows with better and worse responses"
    raise ValueError(
        f"evaluation: {config.resolved_recipe.collector!r} has {what}, so there are no pairs to "
        "compare; set a reward, which grades sampled answers, or turn the evaluation off."
    )
