"""The training loop; read it from top to bottom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.core.runtime import processes
from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.evaluation.evaluate import Accuracy
from jaxrl_llm.train.profile import traced
from jaxrl_llm.train.run import Run, begin
from jaxrl_llm.train.state import TrainState


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      state: The state after the last step.
      run_dir: The folder of the run.
      history: The lines of metrics.jsonl.
      before: Held-out accuracy before the first step, by "greedy" and "sampled"; empty if a signal
        prevented this evaluation.
      after: Held-out accuracy after the last step; empty if the run was interrupted.
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
    """Trains a model: a loop of prompts, rollouts, rewards, updates, metrics and checkpoints.

    A run resumes exactly: with the same configuration on the same devices, it continues as if it
    had never stopped. Ctrl-C or SIGTERM ends the run after the current step with a checkpoint, and
    leaves any evaluation to the resumed run; a second Ctrl-C ends it at once. An error ends the run
    with a checkpoint of the last complete step. A step with a non-finite loss or gradient is
    skipped (see :func:`make_step`); after ``config.max_skipped`` such steps in a row the run ends
    with a checkpoint and saves the last batch in ``skipped_step_*.npz``. It also ends after as many
    batches in a row in which no rollout takes part, or no token trains. If
    rollouts are sampled ahead of their step (see :class:`AsyncConfig`), checkpoints include the
    finished rollouts. The weights that sample a batch then depend on timing, so a resumed run is
    not identical, but no question is lost or repeated.

    Args:
      config: Configuration of the run.
      resume: Whether to continue from the last readable checkpoint in ``config.run_dir``. Without
        any checkpoint, as after a crash before the first one, the run logs this and starts from
        step 0.
      allow_changed: Whether to resume even if settings that affect learning differ; sessions.jsonl
        records the old and new values. Those with which no checkpoint of the run can be read, such
        as another seed, are always refused.
      overwrite: Whether to replace the run in the folder; other files are never replaced.
      log: Called with lines for the user; None is silent and hides the progress bar.
      files: Texts to save in the run folder with its results, by file name.

    Returns:
      The final state and the measurements.

    Raises:
      ValueError: If the configuration does not match the model, the devices, the data or the
        resumed checkpoint; if its settings differ from those of the resumed run; or if an option
        has no effect.
      CheckpointError: If a checkpoint cannot be written, or checkpoints exist on resume but none
        can be read.
      InUseError: If another running process uses the run folder.
      OccupiedError: If the run folder holds files that do not belong to a run, or a run that is
        neither resumed nor replaced.
      TrainingError: If too many updates in a row are skipped, or a results file cannot be written
        by the end of the run.
      RewardError: If the reward fails; the error names the prompt.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> def model():  # or the name of a pretrained model
      ...     return *jr.testing.tiny_model(num_layers=1), jr.testing.ByteTokenizer()
      >>> def prompts():
      ...     return jr.data.PromptSet([jr.data.Prompt("1+1="), jr.data.Prompt("2+2=")])
      >>> def reward(prompt, completion, metadata):
      ...     return float("4" in completion)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     config = jr.train.TrainConfig(
      ...         model=model, data=jr.train.DataConfig(prompts=prompts, chat=False), reward=reward,
      ...         recipe="dr_grpo", steps=1, prompts_per_step=2, run_dir=f"{folder}/run",
      ...         sampling=jr.train.SamplingConfig(group_size=2, max_new_tokens=4),
      ...         evaluation=jr.train.EvaluationConfig(enabled=False),
      ...         checkpoint=jr.train.CheckpointConfig(every=0))
      ...     result = jr.train.train(config)
      >>> int(result.state.step), len(result.history)
      (1, 1)
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
        return run_to_end(run)


def run_to_end(run: Run) -> Result:
    """Runs the steps and evaluations of a run that has begun."""
    config, folder = run.config, run.folder
    with run.signals():
        run.evaluate_first()
        if not run.stopped():
            _train(run)
        if config.evaluation.enabled and not run.stopped():
            run.evaluate()
        state, enabled = run.state, config.evaluation.enabled
        before, after = folder.accuracy_at(0), folder.accuracy_at(int(state.step))
        finished = int(state.step) >= config.steps and bool(after or not enabled)
        signal = None if finished else processes.any_of(run.interrupt.signal)
        if not enabled:
            folder.show_samples()
        folder.end(interrupted=signal, seconds=run.clock.read())
    after = after if finished else {}
    return Result(state, folder.path, folder.history(), before, after, signal)


def _train(run: Run) -> None:
    """Runs the steps: each takes a batch of rollouts, scores it and makes one update."""
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
                    reward = rollouts.metrics.get("sampled_reward", float("nan"))
                    state, metrics = run.algorithm.without_update(state, reward)
                    batch, packing = rollouts.batch, {}
                else:
                    with run.clock("score"):
                        batch, packing = jax.block_until_ready(run.score(rollouts))
                    with run.clock("train"):
                        state, metrics = run.algorithm.step(state, batch)
                        jax.block_until_ready(metrics)
            if run.after_step(state, metrics, rollouts, batch, packing, bar):
                break
