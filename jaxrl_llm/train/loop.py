"""The training loop, to be read from top to bottom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.interrupt import Interrupt, catch_interrupt
from jaxrl_llm.recipes import Batch, EvolutionRecipe
from jaxrl_llm.train.asynchronous import batches
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.rescue import saved_on_error
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.evaluate import Accuracy
from jaxrl_llm.train.evolution import make_evolution_step, moving_only
from jaxrl_llm.train.logging.run_folder import RunFolder
from jaxrl_llm.train.logging.settings import settings, surroundings
from jaxrl_llm.train.memory_plan import check_memory
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.metrics import host_metrics
from jaxrl_llm.train.optimizer import learning_rate, make_optimizer
from jaxrl_llm.train.packing import pack_batch
from jaxrl_llm.train.profile import Clock, Meter, traced
from jaxrl_llm.train.setup import Parts, begin
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.step import make_scorer, make_step
from jaxrl_llm.train.study import Skips, spoiled
from jaxrl_llm.train.waiting import pack, restored


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
    say: Callable[[str], Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Result:
    """Trains a model: prompts, rollouts, rewards, update, metrics, checkpoint, and again.

    A run is resumed exactly: with the same configuration on the same devices, it goes on as if it
    had not been stopped. Ctrl-C (or SIGTERM) ends it after the step under way, with a checkpoint,
    and leaves an evaluation to the resumed run; a second Ctrl-C ends it at once. An error ends it
    with a checkpoint of the last whole step. A step whose loss or gradient is no finite number
    changes nothing (see :func:`make_step`); after ``config.max_skipped`` of them in a row the run
    ends, with a checkpoint, and the batch of the last one is in ``skipped_step_*.npz``. Where
    rollouts are sampled ahead of their step (see :class:`AsyncConfig`), a checkpoint keeps those
    that are finished; which weights sampled a batch then depends on how long things take, so a
    resumed run is another one of the same kind, without losing or repeating a question.

    Args:
      config: The run.
      resume: Go on from the last checkpoint in ``config.run_dir`` that can be read; where there is
        none at all, as after a kill before the first one, start from step 0 and say so.
      allow_changed: Resume even where settings differ that change what is learned.
      say: Called with lines for the user; None keeps silent and hides the progress bar.
      files: Texts to keep in the run folder beside its results, by file name.

    Returns:
      The final state and what was measured.

    Raises:
      ValueError: If the configuration does not fit the model, the devices, the data, or the
        checkpoint that it resumes, or has other settings than the run that it resumes.
      CheckpointError: If a checkpoint cannot be written, or none of those there can be read on
        resume.
      TrainingError: If the run folder is taken, too many updates in a row are left out, or a file
        of results cannot be written by the end of the run.
      RewardError: If the reward fails; it names the prompt.
    """
    options = {"resume": resume, "say": say, "sinks": config.report.sinks}
    with RunFolder(config.run_dir, **options) as folder:
        check_memory(config)
        return _train(config, folder, files or {}, allow_changed=allow_changed)


def _train(
    config: TrainConfig, folder: RunFolder, files: Mapping[str, str], *, allow_changed: bool
) -> Result:
    """The run, in a folder that is open."""
    method = find_recipe(config.recipe, config.sampling)
    optimizer = moving_only(method, make_optimizer(config.optimizer))
    parts, checkpoints, state, reference = begin(
        config, optimizer, folder.checkpoints, resume=folder.resumes
    )
    if folder.resumes and not allow_changed:
        folder.check_unchanged(settings(config))
    ready, update, look = _compiled(parts, optimizer)
    first, steps = int(state.step), config.steps
    meter, clock = _meter(parts), Clock()
    about = surroundings() | meter.about()
    folder.start(first, files, settings=settings(config), about=about)
    folder.say(parts.describe(state.policy))
    rollouts = batches(parts, state, restored(checkpoints, parts, state, folder.say))

    def save(state: TrainState, *, required: bool = True) -> None:
        with clock("save"):
            beside = pack(parts, rollouts.waiting(int(state.step)))
            checkpoints.save(state, extras=beside, required=required)

    kept = {"tokenizer": parts.tokenizer, "look": look, "history": folder.history()}
    skips = Skips(folder, most=config.max_skipped, **kept)
    notice = "\nStopping after this step; a second Ctrl-C stops at once.\n" if folder.talks else ""
    with catch_interrupt(notice=notice) as interrupt:
        evaluate = _Evaluations(parts, folder, checkpoints, clock, interrupt)
        if first < steps and evaluate.due(first):  # a signal may have kept the run before from it
            evaluate(state)
        if not evaluate.stopped():
            with (
                rollouts,  # the checkpoint does not wait for a batch that is under way
                saved_on_error(checkpoints, lambda: state, save, folder.say),
                folder.progress(first, steps) as bar,
            ):
                for step in range(first + 1, steps + 1):
                    with traced(step, config.report.profile, folder.path / "profile"):
                        with clock("wait"):
                            found = rollouts.take()
                        with clock("score"):
                            batch, filled = jax.block_until_ready(ready(reference, found.batch))
                        with clock("train"):
                            given = state._replace(data_cursor=found.cursor)
                            after, metrics = update(given, batch)
                            jax.block_until_ready(metrics)

                    seconds = found.seconds | clock.read()
                    speed = meter(found.batch, seconds)
                    known = found.numbers | filled | speed
                    known["learning_rate"] = learning_rate(config.optimizer, after.opt_state)
                    numbers = host_metrics(metrics, known, seconds=seconds)
                    state = state if spoiled(numbers) else after
                    checkpoints.poll()  # what a save that failed left makes room for the metrics
                    folder.step(step, numbers, found.rows)
                    skips(step, numbers, state, batch)
                    checkpoints.set_score(step, numbers)
                    rollouts.publish(state)
                    tokens = f"{numbers['tokens_per_second']:.0f} tok/s"
                    bar.set_postfix_str(f"reward {numbers['reward']:.3f}, {tokens}")
                    bar.update()

                    # Not asked again below: a signal may come at any time.
                    stops = step == steps or evaluate.stopped()
                    if not stops and every(config.evaluation.every, step):
                        evaluate(state)
                        stops = evaluate.stopped()
                    if stops or every(config.checkpoint.every, step):
                        save(state, required=stops)
                    if stops:
                        break
        if config.evaluation.enabled and not evaluate.stopped():
            evaluate(state)

    before, after = folder.accuracy_at(0), folder.accuracy_at(int(state.step))
    whole = int(state.step) == steps and bool(after or not config.evaluation.enabled)
    signal = None if whole else processes.any_of(interrupt.signal)
    if not config.evaluation.enabled:
        folder.show_samples()
    folder.end(interrupted=signal, seconds=clock.read())
    return Result(state, folder.path, folder.history(), before, after if whole else {}, signal)


class _Stopped(Exception):
    """A signal came in the middle of an evaluation."""


class _Evaluations:
    """The evaluations of a run: each is made once, and none goes on after a signal."""

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        checkpoints: Checkpoints,
        clock: Clock,
        interrupt: Interrupt,
    ):
        self._parts, self._folder, self._checkpoints = parts, folder, checkpoints
        self._clock, self._interrupt = clock, interrupt

    def due(self, step: int) -> bool:
        """Whether there is one after a step that is not the last."""
        config = self._parts.config.evaluation
        return every(config.every, step) or (config.enabled and step == 0)

    def stopped(self) -> bool:
        """Whether a signal came to any process; all of them ask at the same places."""
        return processes.any_of(self._interrupt.signal) is not None

    def _check(self) -> None:
        if self.stopped():
            raise _Stopped

    def __call__(self, state: TrainState) -> None:
        """Evaluates a state, tells what it found and rates the checkpoint of the step."""
        step, folder = int(state.step), self._folder
        if not folder.accuracy_at(step):  # a run that is resumed may have it
            try:
                with self._clock("evaluate"):
                    given = (state.policy, state.key)
                    found, rows = self._parts.evaluate(*given, check=self._check)
            except _Stopped:
                return
            folder.held_out(step, found, rows[: self._parts.config.samples_shown])
        means = {kind: found.mean for kind, found in folder.accuracy_at(step).items()}
        self._checkpoints.set_score(step, means)


def _meter(parts: Parts) -> Meter:
    """What counts the operations of a step."""
    config, recipe = parts.config, parts.recipe
    evolves = isinstance(recipe, EvolutionRecipe)
    # Members that are dealt out read one prompt each, and share nothing.
    alone = isinstance(recipe, EvolutionRecipe) and not recipe.shared
    return Meter(
        parts.model,
        peak_flops=config.report.peak_flops,
        devices=1 if parts.mesh is None else parts.mesh.size,
        updates=config.updates_per_batch,
        shared_prefix_len=0 if alone else parts.shared_prefix_len,
        frozen=config.lora.rank is not None,
        evolves=evolves,
    )


def _compiled(parts: Parts, optimizer) -> tuple[Callable, Callable, Callable]:
    """What readies a batch for the step, the step, and what it would say of a batch again.

    A batch is packed, placed on the mesh and scored by a frozen reference, if there is one.
    """
    config, model, recipe = parts.config, parts.model, parts.recipe
    if isinstance(recipe, EvolutionRecipe):
        return _compiled_evolution(recipe, optimizer, parts.mesh)
    policy = {
        "microbatches": config.microbatches,
        "temperature": config.sampling.temperature,
        "shared_prefix_len": parts.shared_prefix_len,
    }
    scorer = make_scorer(model, mesh=parts.mesh, **policy)
    options = {"updates": config.updates_per_batch, "remat": config.remat, "mesh": parts.mesh}
    if config.critic is not None:
        options["critic_optimizer"] = make_optimizer(config.critic)
    update: Any = make_step(model, recipe, optimizer, **options, **policy)

    def ready(reference: ArrayTree | None, batch: Batch) -> tuple[Batch, dict[str, float]]:
        rows, filled = pack_batch(batch, config.packing, model=model)
        placed = place_batch(rows, parts.mesh)
        if reference is not None:
            placed = placed.replace(ref_logp=scorer(reference, placed))
        return placed, filled

    def look(state: TrainState, batch: Batch) -> tuple[Batch, Array]:
        before = state._replace(step=state.step - 1)
        return update.prepared(before, batch), scorer(state.policy, batch)

    return ready, update, look


def _compiled_evolution(
    recipe: EvolutionRecipe, optimizer, mesh
) -> tuple[Callable, Callable, Callable]:
    """The same for a population, whose scores every device has."""
    update = make_evolution_step(recipe, optimizer, mesh=mesh)

    def ready(reference: None, batch: Batch) -> tuple[Batch, dict[str, float]]:
        del reference
        return batch, {}

    def look(state: TrainState, batch: Batch) -> tuple[Batch, Array]:
        del state
        return batch, batch.behavior_logp

    return ready, update, look


def every(period: int, step: int) -> bool:
    """Whether something that happens every ``period`` steps does after this one; 0 is never."""
    return period > 0 and step % period == 0
