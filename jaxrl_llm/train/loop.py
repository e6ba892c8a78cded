"""The training loop, to be read from top to bottom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.core.runtime import processes
from jaxrl_llm.train.algorithm import without_update
from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.evaluate import Accuracy
from jaxrl_llm.train.profile import traced
from jaxrl_llm.train.run import Run, begin
from jaxrl_llm.train.state import TrainState


@dataclass(frozen=True)
class Result:
    """What a run left.

    Attributes:
      state: The state after the last step.
      run_dir: The folder of the run.
      history: The lines of metrics.jsonl.
      before: Held-out accuracy before the first step, by "greedy" and "sampled"; empty if a signal
        came before it was known.
      after: The same after the last step; empty if the run was interrupted.
      interrupted: The number of the signal that ended the run early, or None.
    """

    state: TrainState = field(repr=False)
    run_dir: Path
    history: list[dict] = field(repr=False)
    before: dict[str, Accuracy]
    after: dict[str, Accuracy]
    interrupted: int | None = None


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    allow_changed: bool = False,
    overwrite: bool = False,
    log: Callable[[str], Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Result:
    """Trains a model: prompts, rollouts, rewards, update, metrics, checkpoint, and again.

    A run is resumed exactly: with the same configuration on the same devices, it goes on as if it
    had not been stopped. Ctrl-C (or SIGTERM) ends it after the step under way, with a checkpoint,
    and leaves an evaluation to the resumed run; a second Ctrl-C ends it at once. An error ends it
    with a checkpoint of the last complete step. A step whose loss or gradient is non-finite changes
    nothing (see :func:`make_step`); after ``config.max_skipped`` of them in a row the run ends,
    with a checkpoint, and the batch of the last one is in ``skipped_step_*.npz``. Where rollouts
    are sampled ahead of their step (see :class:`AsyncConfig`), a checkpoint has those that are
    finished; which weights sampled a batch then depends on how long things take, so a resumed run
    is another one of the same kind, without losing or repeating a question.

    Args:
      config: The run.
      resume: Go on from the last checkpoint in ``config.run_dir`` that can be read; where there is
        none at all, as after a kill before the first one, start from step 0 and log that.
      allow_changed: Resume even where settings differ that change what is learned; sessions.jsonl
        has them, old and new.
      overwrite: Replace the run that the folder holds. Files that are not of a run never are.
      log: Called with lines for the user; None is silent and hides the progress bar.
      files: Texts to save in the run folder with its results, by file name.

    Returns:
      The final state and what was measured.

    Raises:
      ValueError: If the configuration does not fit the model, the devices, the data, or the
        checkpoint that it resumes, or has other settings than the run that it resumes; or if an
        option has no effect.
      CheckpointError: If a checkpoint cannot be written, or none of those there can be read on
        resume.
      InUseError: If a process under way has the run folder.
      OccupiedError: If the run folder holds files that are not of a run, or a run that is neither
        resumed nor replaced.
      TrainingError: If too many updates in a row are skipped, or a file of results cannot be
        written by the end of the run.
      RewardError: If the reward fails; it names the prompt.
    """
    begun = begin(
        config,
        resume=resume,
        allow_changed=allow_changed,
        overwrite=overwrite,
        log=log,
        files=files or {},
    )
    with begun as run:
        return finish(run)


def finish(run: Run) -> Result:
    """Makes the steps and evaluations of a run that has begun."""
    config, folder = run.config, run.folder
    with run.signals():
        run.evaluate_first()
        if not run.stopped():
            _train(run)
        if config.evaluation.enabled and not run.stopped():
            run.evaluate()
    state, enabled = run.state, config.evaluation.enabled
    before, after = folder.accuracy_at(0), folder.accuracy_at(int(state.step))
    finished = int(state.step) == config.steps and bool(after or not enabled)
    signal = None if finished else processes.any_of(run.interrupt.signal)
    if not enabled:
        folder.show_samples()
    folder.end(interrupted=signal, seconds=run.clock.read())
    after = after if finished else {}
    return Result(state, folder.path, folder.history(), before, after, signal)


def _train(run: Run) -> None:
    """The steps: a batch of rollouts, its scores, one update."""
    config = run.config
    with run.steps() as bar:
        for step in range(int(run.state.step) + 1, config.steps + 1):
            with traced(step, config.report.profile, run.folder.path / "profile"):
                with run.clock("wait"):
                    rollouts = run.rollouts.next()
                state = run.state._replace(
                    data_cursor=rollouts.cursor, collector_state=rollouts.collector_state
                )
                if rollouts.metrics["no_signal"]:
                    state, metrics = without_update(state, rollouts.metrics["sampled_reward"])
                    batch, packing = rollouts.batch, {}
                else:
                    with run.clock("score"):
                        scored = run.algorithm.score(rollouts.batch)
                        batch, packing = jax.block_until_ready(scored)
                    with run.clock("train"):
                        state, metrics = run.algorithm.step(state, batch)
                        jax.block_until_ready(metrics)
            if run.after_step(state, metrics, rollouts, batch, packing, bar):
                break
