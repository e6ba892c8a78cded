"""Batches of graded rollouts, collected when the loop asks for them or ahead of it in a thread.

With ``max_staleness=0`` the loop samples and trains in turns (:class:`SyncRollouts`). Above it, a
thread samples and grades while the loop trains (:class:`AsyncRollouts`). Batch n trains the weights
of version n; it may start once version n - max_staleness is published and takes the newest. Batches
are trained on in order, so no token is older than that, and each question is used once, in the
order of the cursor::

    sampler   0 | 1 |   2   | 3 | ...        max_staleness=1: batch 2 waits for version 1
    trainer       0 | 1 |     2 | 3 | ...

Shared arguments: ``experiment``, the run; ``state``, where it begins; ``questions``, P of them;
``pending``, batches from a checkpoint, from ``state.step`` on.
"""

import atexit
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.support import Support
from jaxrl_llm.data import Cursor, take
from jaxrl_llm.data.questions import Question
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.sharding import param_shardings
from jaxrl_llm.recipes import Batch, validate_batch
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rewards.scoring import name_of
from jaxrl_llm.rollout import Generation, Group, Rollout, to_rollout, trim
from jaxrl_llm.rollout.types import FAILED
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.serialization import Extras
from jaxrl_llm.train.fields import attach_fields
from jaxrl_llm.train.grading import join_scores, sample_rows, spread_rows, texts_of
from jaxrl_llm.train.mesh import replicated
from jaxrl_llm.train.metrics import rollout_metrics
from jaxrl_llm.train.setup import Experiment
from jaxrl_llm.train.state import TrainState

# Seconds for which a run that ends early waits for the batch under way, which no step will use; the
# shorter one after a second Ctrl-C.
_PATIENCE, _AT_ONCE = 5.0, 1.0
_THREAD = "rollouts"


class RolloutBatch(NamedTuple):
    """A batch of graded rollouts, all of it on the host."""

    number: int  # which of the run, from 0: it trains the weights of that version
    cursor: Cursor  # where the questions of the next batch begin
    batch: Batch  # what the algorithm trains on
    metrics: dict[str, float]  # what the host knows of it, by the names of metrics.jsonl
    rows: list[dict]  # the completions that are shown, one record each
    seconds: dict[str, float]  # time spent, by the names "sample" and "reward"


class Graded(NamedTuple):
    """Rollouts with their texts and rewards."""

    rollout: Rollout  # [P, G]
    completions: list[list[str]]  # P groups of G
    scores: Scores  # [P * G]
    sampled: float  # time.perf_counter() when the last response was sampled


def next_questions(experiment: Experiment, cursor: Cursor) -> tuple[list[int], Cursor]:
    """The questions of a batch by their places, and where those of the next one begin."""
    config, size = experiment.config, len(experiment.train)
    return take(cursor, config.prompts_per_step, size=size, seed=config.data.seed)


def collect_rollouts(
    experiment: Experiment,
    params: ArrayTree,
    key: Array,
    cursor: Cursor,
    *,
    number: int,
    version: int,
) -> RolloutBatch:
    """Samples and grades a batch; it depends on the key, its number and the weights alone.

    Args:
      experiment: See the module.
      params: The weights that sample.
      key: That of the run's state.
      cursor: Where its questions begin.
      number: Which batch it is, from 0.
      version: Of the weights.

    Raises:
      ValueError: If something in it cannot be trained on; it names the prompt.
      RewardError: If the reward fails; it names the prompt.
    """
    start = time.perf_counter()
    indices, cursor = next_questions(experiment, cursor)
    questions = [experiment.train[i] for i in indices]
    recipe = experiment.recipe
    if not recipe.forward_only:  # the noise of a population is drawn from the run's key itself
        key = jax.random.fold_in(key, number)
    graded = sample_and_grade(experiment, params, key, questions, version=version)
    graded = graded._replace(rollout=trim(graded.rollout))
    rollout, scores = graded.rollout, graded.scores
    batch = to_batch(
        rollout,
        scores.rewards,
        questions,
        vocab_size=experiment.model.config.vocab_size,
        drop_failed=recipe.forward_only,
    )

    def greedy_rewards() -> np.ndarray:
        tokens = [question.tokens for question in questions]
        likely = experiment.samplers.baseline(params, key, tokens)
        return experiment.grader(questions, texts_of(likely, experiment.tokenizer)).rewards

    if not recipe.forward_only:
        batch = attach_fields(
            batch,
            recipe,
            scores=scores,
            rollout=rollout,
            step=number,
            indices=indices,
            questions=questions,
            greedy=greedy_rewards,
        )
    end = time.perf_counter()
    ages = number - np.asarray(rollout.version)[batch.mask]
    rows = []
    if number % experiment.config.samples_every == 0:
        rows = sample_rows(questions, graded.completions, scores)
        rows = spread_rows(rows, len(questions), experiment.config.samples_shown)
    return RolloutBatch(
        number,
        cursor,
        batch,
        rollout_metrics(scores, rollout, ages),
        rows,
        {"sample": graded.sampled - start, "reward": end - graded.sampled},
    )


def sample_and_grade(
    experiment: Experiment,
    params: ArrayTree,
    key: Array,
    questions: Sequence[Question],
    *,
    version: int,
) -> Graded:
    """All rollouts of a batch in one program, then their rewards.

    The engine samples the same rollouts in slots: a group is graded once it finishes, while others
    decode.
    """
    engine = experiment.samplers.engine
    if engine is None:
        tokens = [question.tokens for question in questions]
        sampler = experiment.samplers.rollouts
        rollout = processes.to_host(sampler(params, key, tokens, version=version))
        completions = texts_of(rollout, experiment.tokenizer)
        sampled = time.perf_counter()
        return Graded(rollout, completions, experiment.grader(questions, completions), sampled)

    sampling = experiment.config.sampling
    size, texts = sampling.group_size, {}
    generation = Generation(engine, params, key=key, version=version)
    for i, question in enumerate(questions):
        requests = tuple(range(i * size, (i + 1) * size))
        generation.submit(Group(id=i, prompt=question.tokens, requests=requests))
    groups, graded = {}, {}
    share = range(len(questions))[processes.portion(len(questions))]
    pool = ThreadPoolExecutor(1, thread_name_prefix="rewards")
    try:
        for done in generation:
            groups[done.id] = done
            decode = experiment.tokenizer.decode
            texts[done.id] = [decode(c.tokens.tolist()) for c in done.completions]
            if done.id in share:
                grade = experiment.grader.local
                graded[done.id] = pool.submit(grade, [questions[done.id]], [texts[done.id]])
        sampled = time.perf_counter()
        scores = processes.together(lambda: [graded[i].result() for i in share])
    finally:
        # Where one call fails the others may too, each after its deadline.
        pool.shutdown(wait=False, cancel_futures=True)
    for i, question in enumerate(questions):
        name = question.prompt.id or question.prompt.text[:40]
        groups[i] = groups[i]._replace(group=groups[i].group._replace(id=name))
    places = range(len(questions))
    rollout = to_rollout(
        [groups[i] for i in places],
        max_new_tokens=sampling.max_new_tokens,
        prompt_width=engine.spec.prompt_length,
        pad_id=experiment.tokenizer.pad_id,
    )
    return Graded(rollout, [texts[i] for i in places], join_scores(sum(scores, [])), sampled)


def to_batch(
    rollout: Rollout,
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
      questions: See the module.
      vocab_size: Tokens lie below it.
      drop_failed: Clear ``where`` of rollouts that failed or have no finite reward, instead of
        raising: for a population, some members of which may be broken.

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
        raise ValueError(f"to_batch: the logits of a response to prompt {name!r} are non-finite.")
    batch = Batch.from_rollout(host, rewards, where=where)
    return validate_batch(batch, vocab_size=vocab_size, prompt_ids=ids)


def may_start(number: int, version: int, *, max_staleness: int) -> bool:
    """Whether a batch may be sampled by weights of a version.

    It is :func:`~jaxrl_llm.corrections.staleness_capacity` in batches, one of which is under way at
    a time, in integers of the host: a thread that asks must not wait for the device.
    """
    return number <= version + max_staleness


class SyncRollouts:
    """Batches that are sampled when they are asked for, by the weights that they train."""

    def __init__(self, experiment: Experiment, state: TrainState):
        self._experiment, self._state = experiment, state

    def __enter__(self) -> "SyncRollouts":
        return self

    def __exit__(self, *error) -> None:
        return None

    def next(self) -> RolloutBatch:
        """The batch that the newest state trains on."""
        state, number = self._state, int(self._state.step)
        return collect_rollouts(
            self._experiment,
            state.policy,
            state.key,
            state.data_cursor,
            number=number,
            version=number,
        )

    def publish(self, state: TrainState) -> None:
        """Hands over the state after a step."""
        self._state = state

    def pending(self, step: int) -> list[RolloutBatch]:
        """Finished batches that no step has trained on: none."""
        del step
        return []


class AsyncRollouts:
    """Batches that a thread samples and grades while others are trained on.

    Enter it before the first ``next``. An error in the thread is raised by ``next``, after the
    batches before it.
    """

    def __init__(
        self, experiment: Experiment, state: TrainState, pending: Sequence[RolloutBatch] = ()
    ):
        self._experiment, self._mesh = experiment, experiment.sampler_mesh
        self._key, self._base = state.key, state.base
        if self._mesh is not None:
            self._key = jax.device_put(state.key, replicated(self._mesh))
            self._base = self._copy(state.base)
        self._finished = deque(pending)  # in order; a batch stays until it has been trained on
        self._number = int(state.step) + len(pending)
        self._cursor = pending[-1].cursor if pending else state.data_cursor
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self.publish(state)

    def __enter__(self) -> "AsyncRollouts":
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        at_once = kind is not None and not issubclass(kind, Exception)
        self._thread.join(_AT_ONCE if at_once else _PATIENCE)
        if self._thread.is_alive() and not at_once:
            # A device call cannot be stopped, and Python aborts when it ends in the middle of one.
            atexit.register(self._thread.join)

    def next(self) -> RolloutBatch:
        """The batch that the newest state trains on, as soon as it is finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error is not None)
            if not self._finished and self._error is not None:
                raise self._error
            return self._finished[0]

    def publish(self, state: TrainState) -> None:
        """Hands the weights after a step to the sampler, and drops what the step trained on."""
        version = int(state.step)
        params = merge_adapter(self._base, self._copy(state.params))
        with self._changed:
            self._weights = (version, params)
            self._finished = deque(self._from(version))
            self._changed.notify_all()

    def pending(self, step: int) -> list[RolloutBatch]:
        """Finished batches that no step up to ``step`` has trained on; a checkpoint saves them."""
        with self._changed:
            return self._from(step)

    def _from(self, step: int) -> list[RolloutBatch]:
        return [batch for batch in self._finished if batch.number >= step]

    def _copy(self, params: ArrayTree) -> ArrayTree:
        """A copy of the weights for the sampler: the next step donates its input."""
        if self._mesh is None:
            return jax.tree.map(jnp.copy, params)
        rules = self._experiment.model.sharding_rules
        return jax.device_put(params, param_shardings(params, self._mesh, rules))

    def _run(self) -> None:
        """The thread: batch after batch, as soon as each may start."""
        try:
            while (weights := self._admitted()) is not None:
                version, params = weights
                batch = collect_rollouts(
                    self._experiment,
                    params,
                    self._key,
                    self._cursor,
                    number=self._number,
                    version=version,
                )
                del weights, params  # nothing holds old weights while it waits for new ones
                with self._changed:
                    self._finished.append(batch)
                    self._number, self._cursor = batch.number + 1, batch.cursor
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _admitted(self) -> tuple[int, ArrayTree] | None:
        """The newest weights, once the next batch may start; None if there is none to come."""
        if self._number >= self._experiment.config.steps:
            return None
        most = self._experiment.config.asynchrony.max_staleness

        def may_go_on() -> bool:
            return self._stopped or may_start(self._number, self._weights[0], max_staleness=most)

        with self._changed:
            self._changed.wait_for(may_go_on)
            return None if self._stopped else self._weights


def make_rollouts(
    experiment: Experiment, state: TrainState, pending: Sequence[RolloutBatch] = ()
) -> SyncRollouts | AsyncRollouts:
    """The rollouts of a run, as configured."""
    for thread in threading.enumerate():
        # Of a run that ended early in this process, in the middle of a batch: two that sample at
        # once take twice the memory, and on several devices wait for each other.
        if thread.name == _THREAD:
            thread.join()
    if not experiment.config.asynchrony.max_staleness:
        return SyncRollouts(experiment, state)
    return AsyncRollouts(experiment, state, pending)


def pack_pending(experiment: Experiment, batches: Sequence[RolloutBatch]) -> Extras | None:
    """Pending batches as a checkpoint stores them; None if there are none."""
    if not batches:
        return None
    arrays, notes = [], []
    for each in batches:
        fields = {f.name: getattr(each.batch, f.name) for f in dataclasses.fields(Batch)}
        arrays.append(_without_none(fields))
        notes.append({k: x for k, x in each._asdict().items() if k != "batch"})
    return Extras(arrays, {"run": _conditions(experiment), "batches": notes})


def unpack_pending(arrays: dict[str, Any], notes: dict[str, Any]) -> RolloutBatch:
    """The inverse of :func:`pack_pending`, of one batch.

    Raises:
      LookupError: If a field is absent.
      ValueError: If shapes disagree.
      TypeError: If a field is unknown or of a wrong dtype.
    """
    arrays = dict(arrays)
    if "support" in arrays:
        arrays["support"] = Support(**arrays["support"])
    return RolloutBatch(
        number=notes["number"],
        cursor=Cursor(*notes["cursor"]),
        batch=Batch(**arrays).check(),
        metrics=notes["metrics"],
        rows=notes["rows"],
        seconds=notes["seconds"],
    )


def restore_pending(
    checkpoints: Checkpoints, experiment: Experiment, state: TrainState, log: Callable[[str], Any]
) -> list[RolloutBatch]:
    """The batches that the checkpoint of a state stored, if this run would have made them.

    The first that it would not have made is dropped with all behind it: their questions are sampled
    anew. It may be of another recipe or of weights that are now too old.

    Args:
      checkpoints: The one that was restored last; nothing if none was.
      experiment, state: See the module.
      log: Told how many are dropped.
    """
    stored = checkpoints.restore_extras()
    if stored is None:
        return []
    total = len(stored.notes["batches"])
    most = experiment.config.asynchrony.max_staleness
    same_run = stored.notes["run"] == _conditions(experiment) and most > 0
    pending: list[RolloutBatch] = []
    cursor = state.data_cursor
    for arrays, notes in zip(stored.arrays, stored.notes["batches"], strict=True):
        try:
            batch = unpack_pending(arrays, notes)
        except (LookupError, TypeError, ValueError):
            break
        _, cursor = next_questions(experiment, cursor)
        expected = (int(state.step) + len(pending), cursor)
        fresh = batch.metrics["staleness_max"] <= most
        if (batch.number, batch.cursor) != expected or not same_run or not fresh:
            break
        pending.append(batch)
    if dropped := total - len(pending):
        log(
            f"{dropped} of {total} batches of rollouts in the checkpoint do not fit this "
            "configuration; their questions are sampled anew."
        )
    return pending


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that are not None, a support as the dict that it is read back as."""
    plain = {
        k: _without_none(x._asdict()) if isinstance(x, Support) else x for k, x in fields.items()
    }
    return {name: x for name, x in plain.items() if x is not None}


def _conditions(experiment: Experiment) -> dict[str, str]:
    """What a batch depends on besides its questions and the weights."""
    config = experiment.config
    return {
        "recipe": repr(experiment.recipe),
        "reward": name_of(config.reward),
        "sampling": repr(config.sampling),
    }
