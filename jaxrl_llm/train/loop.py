"""The training loop, to be read from top to bottom."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.collect import grade, records, texts_of, to_batch
from jaxrl_llm.train.config import TrainConfig, make_optimizer
from jaxrl_llm.train.evaluate import Accuracy
from jaxrl_llm.train.folder import RunFolder, TrainingError
from jaxrl_llm.train.interrupt import catch_interrupt
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.metrics import host_metrics
from jaxrl_llm.train.setup import load_parts
from jaxrl_llm.train.state import TrainState, init_state
from jaxrl_llm.train.step import make_scorer, make_step


@dataclass(frozen=True)
class Result:
    """What a run left.

    Attributes:
      state: The state after the last step.
      run_dir: The folder of the run.
      history: The lines of metrics.jsonl.
      before: Held-out accuracy before the first step, by "greedy" and "sampled".
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
    say: Callable[[str], Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Result:
    """Trains a model: prompts, rollouts, rewards, update, metrics, checkpoint, and again.

    A run is resumed exactly: with the same configuration on the same devices, it goes on as if it
    had not been stopped. Ctrl-C (or SIGTERM) ends it after the step under way, with a checkpoint;
    a second one ends it at once.

    Args:
      config: The run.
      resume: Go on from the last checkpoint in ``config.run_dir`` that can be read.
      say: Called with lines for the user; None keeps silent and hides the progress bar.
      files: Texts to keep in the run folder beside its results, by file name.

    Returns:
      The final state and what was measured.

    Raises:
      ValueError: If the configuration does not fit the model, the devices or the data.
      CheckpointError: If a checkpoint cannot be written, or none can be read on resume.
      TrainingError: If the run folder is taken, or the loss is no longer a number.
      RewardError: If the reward fails; it names the prompt.
    """
    from jaxrl_llm.data import Cursor, take

    folder = RunFolder(config.run_dir, resume=resume, say=say)
    parts, params = load_parts(config)
    model, recipe, mesh = parts.model, parts.recipe, parts.mesh
    optimizer = make_optimizer(config.optimizer)
    policy = {
        "microbatches": config.microbatches,
        "temperature": config.sampling.temperature,
    }
    scorer = make_scorer(model, **policy)
    update = make_step(
        model,
        recipe,
        optimizer,
        updates=config.updates_per_batch,
        mesh=mesh,
        remat=config.remat,
        **policy,
    )

    key = jax.random.key(config.seed)
    state = init_state(params, optimizer, recipe, key=key, data_cursor=Cursor(), mesh=mesh)
    reference = params if "ref_logp" in recipe.needs else None
    checkpoints = Checkpoints(folder.path / "checkpoints", model=model, keep=config.checkpoint.keep)
    if resume:
        state = checkpoints.restore(state)
    first = saved = int(state.step)
    folder.start(first, files or {})
    folder.say(parts.describe(params))
    del params

    def evaluate(step: int) -> None:
        found, rows = parts.evaluate(state.params, jax.random.fold_in(key, 0x7FFFFFFF))
        folder.held_out(step, found, rows[: config.samples_shown])

    if first == 0 and config.evaluation.enabled:
        evaluate(0)
    notice = "\nStopping after this step; once more stops at once.\n" if say else ""
    with catch_interrupt(notice=notice) as interrupt, folder.progress(first, config.steps) as bar:
        for step in range(first, config.steps):
            clock = [time.perf_counter()]
            indices, cursor = take(
                state.data_cursor,
                config.prompts_per_step,
                size=len(parts.train),
                seed=config.data.seed,
            )
            questions = [parts.train[i] for i in indices]
            rollout = parts.sampler(
                state.params,
                jax.random.fold_in(state.key, step),
                [question.tokens for question in questions],
                version=step,
            )
            completions = texts_of(rollout, parts.tokenizer)
            clock.append(time.perf_counter())

            scores = grade(questions, completions, config.reward, deadline=config.reward_deadline)
            batch = to_batch(rollout, scores.rewards, questions, vocab_size=model.config.vocab_size)
            clock.append(time.perf_counter())

            batch = place_batch(batch, mesh)
            if reference is not None:
                batch = batch.replace(ref_logp=scorer(reference, batch))
            if "old_logp" in recipe.needs:
                batch = batch.replace(old_logp=scorer(state.params, batch))
            state, metrics = update(state._replace(data_cursor=cursor), batch)
            jax.block_until_ready(metrics)
            clock.append(time.perf_counter())

            seconds = dict(zip(("rollout", "reward", "step"), np.diff(clock), strict=True))
            numbers = host_metrics(metrics, scores, rollout, seconds=seconds)
            if not np.isfinite(numbers["loss"] + numbers["grad_norm"]):
                raise TrainingError(
                    f"Step {step + 1} gave loss {numbers['loss']} and gradient norm "
                    f"{numbers['grad_norm']}; the last checkpoint is of step {saved}."
                )
            rows = records(questions, completions, scores.rewards)
            folder.step(step + 1, numbers, rows[: config.samples_shown])
            speed = f"{numbers['tokens_per_second']:.0f} tok/s"
            bar.set_postfix_str(f"reward {numbers['reward']:.3f}, {speed}")
            bar.update()

            last = step + 1 == config.steps or interrupt
            if last or every(config.checkpoint.every, step + 1):
                checkpoints.save(state)
                saved = step + 1
            if not last and every(config.evaluation.every, step + 1):
                evaluate(step + 1)
            if interrupt:
                break

    checkpoints.wait()
    if config.evaluation.enabled and not interrupt:
        evaluate(int(state.step))
    folder.plot()
    before, after = folder.accuracy_at(0), folder.accuracy_at(int(state.step))
    return Result(state, folder.path, folder.history(), before, after, interrupt.signal)


def every(period: int, step: int) -> bool:
    """Whether something that happens every ``period`` steps does after this one; 0 is never."""
    return period > 0 and step % period == 0
