"""Everything around the steps of a run: metrics, skipped updates, evaluations, checkpoints."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.runtime import processes, watchdog
from jaxrl_llm.core.runtime.files import reason
from jaxrl_llm.core.runtime.interrupt import Interrupt, catch_interrupt
from jaxrl_llm.core.secrets import find_secrets, remember
from jaxrl_llm.data.chat import dated
from jaxrl_llm.recipes import Batch
from jaxrl_llm.recipes.wiring import UPDATE_SCALE
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.checkpoints import saved_on_error
from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.evaluation.evaluate import Accuracy
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.pairs import evaluate_pairs, make_logp
from jaxrl_llm.train.experiment.rollouts import (
    RolloutBatch,
    make_rollouts,
    pack_pending,
    restore_pending,
)
from jaxrl_llm.train.experiment.setup import init_experiment, with_mesh_sizes
from jaxrl_llm.train.logging.run_folder import RunFolder, TrainingError
from jaxrl_llm.train.logging.settings import settings, surroundings
from jaxrl_llm.train.memory.memory_plan import check_memory
from jaxrl_llm.train.metrics import ScoredItems, host_metrics, scored_items
from jaxrl_llm.train.optimizer import learning_rate, policy_optimizer
from jaxrl_llm.train.profile import Clock, Meter
from jaxrl_llm.train.state import TrainState


class Run:
    """One session of a run: everything except the algorithm.

    Args:
      experiment: Model, data and configuration.
      algorithm: The training algorithm.
      checkpoints, folder: The checkpoints and folder of the run.
      state: State at the start of the session.
      files: Texts to save in the run folder, by file name.
      changed: Settings that a resumed run changes; see :meth:`RunFolder.changed`.

    Attributes:
      state: State after the last complete step.
      rollouts: The source of batches.
      clock: Seconds that the loop spent, by phase.
      interrupt: The received signal, if any.
    """

    def __init__(
        self,
        experiment: Experiment,
        algorithm: Algorithm,
        checkpoints: Checkpoints,
        folder: RunFolder,
        state: TrainState,
        files: Mapping[str, str],
        changed: Mapping[str, tuple[Any, Any]],
    ):
        self.experiment, self.algorithm = experiment, algorithm
        self.checkpoints, self.folder, self.state = checkpoints, folder, state
        self.config, self.clock, self.interrupt = experiment.config, Clock(), Interrupt()
        recipe = experiment.recipe
        # Members that answer one prompt each share no prefix.
        shares = recipe.needs.shares_prefix
        self._meter = Meter(
            experiment.model,
            peak_flops=self.config.report.peak_flops,
            devices=1 if experiment.mesh is None else experiment.mesh.size,
            epochs=self.config.passes.epochs,
            shared_prefix_len=experiment.shared_prefix_len if shares else 0,
            frozen=self.config.lora.rank is not None,
            samples_members=recipe.needs.samples_members,
            likelihood=recipe.needs.likelihood,
        )
        # Before the folder has the new settings: a kill in between leaves no score of the old ones.
        best = self.config.checkpoint.best or "sampled"  # which all of the settings decide
        if differ := folder.changed_score(settings(self.config), best):
            checkpoints.forget_scores()
            if self.config.checkpoint.best is not None:
                names = ", ".join(differ)
                folder.log(f"The best checkpoint is found anew, by other settings: {names}.")
        about = surroundings() | self._meter.about() | experiment.left_out.about()
        folder.start(
            int(state.step),
            files,
            settings=settings(self.config),
            changed=changed,
            about=about,
            evaluates=self._evaluates_start(),
        )
        folder.log(experiment.describe(state.policy))
        if folder.resumes:
            folder.log(f"The run continues after step {int(state.step)} of {self.config.steps}.")
        pending = restore_pending(checkpoints, experiment, state, folder.log)
        self.rollouts = make_rollouts(experiment, state, pending)
        self._guard = UpdateGuard(
            folder,
            limit=self.config.max_skipped,
            tokenizer=experiment.tokenizer,
            inspect=algorithm.inspect,
            history=folder.history(),
        )
        self._zero_gradients = self._all_withheld = 0  # steps in a row
        self._scored: tuple[Batch, dict[str, float]] | None = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within this context, the first Ctrl-C or SIGTERM ends the run after the current step."""
        text = "\nStopping after this step; a second Ctrl-C stops at once.\n"
        notice = text if self.folder.talks else ""
        with catch_interrupt(notice=notice) as self.interrupt, watchdog.SHARED.hearing():
            yield

    @contextlib.contextmanager
    def steps(self) -> Iterator[Any]:
        """Makes rollouts and, on an error, saves the last complete step; yields a progress bar."""
        with (
            self.rollouts,  # closes last: the checkpoint does not wait for an unfinished batch
            saved_on_error(self.checkpoints, lambda: self.state, self.save, self.folder.log),
            self.folder.progress(int(self.state.step), self.config.steps) as bar,
        ):
            yield bar

    def stopped(self) -> bool:
        """Whether any process received a signal; all processes call this at the same points."""
        return processes.any_of(self.interrupt.signal) is not None

    def after_step(
        self,
        state: TrainState,
        metrics: Mapping[str, Array],
        rollouts: RolloutBatch,
        batch: Batch,
        packing: Mapping[str, float],
        bar: Any,
    ) -> bool:
        """Logs, checks, scores, publishes, evaluates and saves a step, in this order.

        Args:
          state: State after the step.
          metrics: Metrics that the step returned.
          rollouts: Rollouts that the step trained on, on the host.
          batch: The same rollouts on the devices.
          packing: Metrics from the algorithm's ``score``.
          bar: The progress bar.

        Returns:
          Whether the run ends here.

        Raises:
          TrainingError: If too many updates in a row were skipped, or parameters are non-finite.
        """
        seconds = rollouts.seconds | self.clock.read()
        host = rollouts.metrics | dict(packing) | self._meter(rollouts.batch, seconds)
        host["learning_rate"] = learning_rate(
            policy_optimizer(self.config), state.opt_state, updates=self.config.passes.updates
        )
        values = host_metrics(metrics, host, seconds=seconds)
        if not has_nonfinite_update(values):
            self.state = state
        step = int(state.step)
        self.checkpoints.poll()  # clears the remains of a failed save to make room for the metrics
        self.folder.step(step, values, rollouts.rows)
        self._guard(step, values, self.state, batch)
        if _idle(values):
            self._check_idle(step, values, rollouts)
        self._check_gradient(step, values)
        self._check_withheld(step, values)
        reward = values.get("sampled_reward", values["reward"])
        self.checkpoints.set_score(step, {"reward": reward})  # other scores are of evaluations
        self.rollouts.publish(self.state)
        speed = f"{values['tokens_per_second']:.0f} tok/s"
        bar.set_postfix_str(f"reward {reward:.3f}, {speed}")
        bar.update()
        # Evaluated once for both tests below: a signal may come at any time.
        stops = step == self.config.steps or self.stopped()
        if not stops and is_due(self.config.evaluation.every, step):
            self.evaluate()
            stops = self.stopped()
        if stops or is_due(self.config.checkpoint.every, step):
            self.save(self.state, required=stops)
        return stops

    def save(self, state: TrainState, *, required: bool = True) -> None:
        """Starts a checkpoint of a state, with the rollouts that no step has trained on."""
        with self.clock("save"):
            pending = pack_pending(self.experiment, self.rollouts.pending(int(state.step)))
            self.folder.sync_lines()
            self.checkpoints.save(state, extras=pending, required=required)

    def evaluate_first(self) -> None:
        """Evaluates before the first step of a session if an evaluation is due.

        A signal may have prevented it in the previous session. The first batch is made before the
        evaluation, so that the step's program is compiled meanwhile, and a reward that returns too
        little ends the run at once.
        """
        step = int(self.state.step)
        if self._evaluates_start() and step < self.config.steps:
            if not self.folder.accuracy_at(step) and self.experiment.recipe.needs.sums_gradients:
                self._prepare()
            self.evaluate()

    def _evaluates_start(self) -> bool:
        """Whether the state at the start of the session is evaluated, as the last one always is."""
        config, step = self.config.evaluation, int(self.state.step)
        due = not step or step >= self.config.steps or is_due(config.every, step)
        return config.enabled and due

    def _prepare(self) -> None:
        """Makes and scores the first batch, and begins to compile its step."""
        with self.clock("wait"):
            state = self.state
            self.experiment.compile_greedy(state.policy, state.key, state.collector_state)
            rollouts = self.rollouts.prepare()
        if not rollouts.metrics["no_signal"]:
            with self.clock("score"):
                self._scored = jax.block_until_ready(self.algorithm.score(rollouts.batch))
            self.algorithm.compile_ahead(self.state, self._scored[0])

    def score(self, rollouts: RolloutBatch) -> tuple[Batch, dict[str, float]]:
        """The batch on the devices, and the metrics of its packing; see :class:`Algorithm`."""
        scored, self._scored = self._scored, None  # of the first batch, if that was made ahead
        return self.algorithm.score(rollouts.batch) if scored is None else scored

    def evaluate(self) -> None:
        """Evaluates the state once, logs the result and sets the score of its checkpoint.

        A signal ends the evaluation without a result.
        """
        step, folder = int(self.state.step), self.folder

        def raise_if_stopped() -> None:
            if self.stopped():
                raise _Stopped

        if not folder.accuracy_at(step):  # a resumed run may already have it
            try:
                with self.clock("evaluate"):
                    accuracy, rows = self._measure(raise_if_stopped)
            except _Stopped:
                return
            folder.held_out(step, accuracy, rows[: self.config.samples_shown])
        means = {kind: accuracy.mean for kind, accuracy in folder.accuracy_at(step).items()}
        self.checkpoints.set_score(step, means)

    def _measure(self, check: Callable[[], None]) -> tuple[dict[str, Accuracy], list[dict]]:
        """The accuracy on held-out questions, and on held-out pairs if the data have them."""
        state, results, rows = self.state, {}, []
        # Training itself refuses such responses of a policy, but not broken members of a
        # population, and it samples none where the data have them.
        goes_on = self.experiment.recipe.needs.drops_failed or self.config.offline
        if self.config.samples_held_out:
            results, rows = self.experiment.evaluate(
                state.policy,
                state.key,
                collector_state=state.collector_state,
                check=check,
                subagent=state.subagent.params if state.subagent else None,
                on_non_finite="warn" if goes_on else "raise",
            )
        if self.config.compares_held_out:

            def score(batch: Batch) -> ScoredItems:
                scored, _ = self.algorithm.score(batch)
                recipe, ref_logp = self.experiment.recipe, None
                if recipe.needs.uses_reference:
                    ref_logp = scored.ref_logp  # of a frozen one
                    if recipe.needs.moves_reference:
                        ref_logp = self._logp(state.reference_policy, scored)
                return scored_items(recipe, self._logp(state.policy, scored), ref_logp, scored)

            results["pairs"] = evaluate_pairs(self.experiment, score, check=check)
        return results, rows

    @functools.cached_property
    def _logp(self) -> Callable:
        """Log-probabilities of held-out responses, compiled once for all evaluations."""
        return make_logp(self.experiment)

    def _check_idle(self, step: int, values: Mapping[str, float], rollouts: RolloutBatch) -> None:
        """Logs that a step had no signal, and ends the run after too many such steps in a row.

        Raises:
          TrainingError: If too many steps in a row had no signal or made no update.
        """
        in_a_row, limit = self._guard.in_a_row, self.config.max_skipped
        groups = int(rollouts.metrics["groups_sampled"])
        asked = f"the {groups} groups that {self.experiment.collector!r} asked for"
        what, why = "makes no update", f"the recipe trains no token of {asked}"
        if rollouts.metrics["no_signal"]:
            why = f"none of {asked} takes part"
        elif values["no_signal"] and _trains(values):
            what = "has no signal"
            why = f"each advantage of {asked} is 0; the mean reward is {values['reward']:g}"
        text = f"Step {step} {what}: {why}"
        if many := self._guard.without_signal:
            if not many & (many - 1):  # at each doubling
                self.folder.log(f"{text} ({many} in a row).")
            return
        if in_a_row < limit:
            self.folder.log(f"{text} ({in_a_row} in a row; {limit} end the run).")
            return
        raise TrainingError(
            f"{text}, and none of the last {limit} steps {'had' if 'has' in what else 'made'} one; "
            "use prompts that the policy solves sometimes but not always, another rule, or more "
            "rounds."
        )

    def _check_gradient(self, step: int, values: Mapping[str, float]) -> None:
        """Warns once if three steps in a row have a gradient of exactly zero though rewards differ.

        A single such step may be correct: a method may learn nothing from some rewards.
        """
        differs = values.get("informative", 0.0) > 0 and not values.get("flat", 0.0)
        waits = values.get("withheld") and not values["updates"]  # there may be no gradient
        if values["grad_norm"] != 0 or not differs or values["skipped"] or waits:
            self._zero_gradients = 0
            return
        self._zero_gradients += 1
        if self._zero_gradients != 3:
            return
        warnings.warn(
            f"The gradient of steps {step - 2} to {step} is exactly zero in every parameter, "
            "though rewards differ: nothing is learned. A model whose apply ignores delta, under "
            "LoRA, or a recipe that masks every token does this.",
            stacklevel=3,
        )

    def _check_withheld(self, step: int, values: Mapping[str, float]) -> None:
        """Warns once if a recipe's ``update_scale`` withholds all updates of three steps in a row.

        Steps in which the critic trains alone do not count, nor a method that trains no weights.
        """
        recipe, needs = self.experiment.recipe, self.experiment.recipe.needs
        scales = needs.computed_from("batch", "update")
        gates = UPDATE_SCALE in scales and recipe.trains_weights
        if not gates or step <= needs.waits or not values.get("withheld") or values["updates"]:
            self._all_withheld = 0
            return
        self._all_withheld += 1
        if self._all_withheld != 3:
            return
        warnings.warn(
            f"All updates of steps {step - 2} to {step} are withheld, since the update_scale of "
            f"recipe {recipe.name!r}, {stable_repr(scales[UPDATE_SCALE])}, is 0: the policy does "
            "not move. A bound below the divergence of a rounded sampler does this; see the metric "
            "withheld.",
            stacklevel=3,
        )


@contextlib.contextmanager
def begin(
    config: TrainConfig,
    *,
    resume: bool,
    allow_changed: bool,
    overwrite: bool,
    log: Callable[[str], Any] | None,
    files: Mapping[str, str],
) -> Iterator[Run]:
    """Yields a run before its first step and locks its folder; see :func:`train` for the arguments.

    An error in the configuration is raised on entry and leaves no new folder.
    """
    if allow_changed and not resume:
        raise ValueError("train: allow_changed has no effect without resume.")
    remember(find_secrets(config))
    config = with_mesh_sizes(config)  # on which it depends how many minibatches a batch has
    opened = RunFolder(
        config.run_dir, resume=resume, overwrite=overwrite, log=log, sinks=config.report.sinks
    )
    # Fix the date: some chat templates write it into the prompt.
    with opened as folder, dated(folder.date):
        changed = folder.changed(settings(config), allowed=allow_changed)
        check_memory(config)
        experiment, algorithm, checkpoints, state = init_experiment(
            config, folder.checkpoints, resume=folder.resumes, allow_changed=allow_changed
        )
        yield Run(experiment, algorithm, checkpoints, folder, state, files, changed)


class _Stopped(Exception):
    """A signal arrived during an evaluation."""


def has_nonfinite_update(values: Mapping[str, float]) -> bool:
    """Whether a step made parameters non-finite.

    The loss and gradient of such a step were finite, so the optimizer must be at fault.
    """
    names = ("update_norm", "critic_update_norm", "subagent_update_norm")
    norms = [values.get(name, 0.0) for name in names]
    return not np.isfinite(norms).all()


class UpdateGuard:
    """Counts steps without an update or a signal, and ends the run after too many in a row.

    ``in_a_row`` is how many the last steps were: skipped, without a signal, or without a token that
    the recipe trains. The guard ends a run only at a skipped one.

    Args:
      folder: The run folder; the batch of the last skipped step is written there.
      limit: Number of steps without an update in a row that ends the run.
      tokenizer: A ``data.Tokenizer``, which decodes the texts of that batch.
      inspect: The algorithm's ``inspect``.
      history: The lines of metrics.jsonl from earlier steps, if the run is resumed.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        limit: int,
        tokenizer: Any,
        inspect: Callable,
        history: Sequence[Mapping[str, Any]] = (),
    ):
        self._folder, self._limit = folder, limit
        self._tokenizer, self._inspect = tokenizer, inspect
        self.in_a_row, self.without_signal, self._had_signal = 0, 0, False
        for row in history:
            if "skipped" in row:
                self._count(row)

    def _count(self, values: Mapping[str, Any]) -> None:
        """Counts a step that trains nothing.

        A step without a signal in which rollouts take part counts only until a step of the run has
        had a signal: later prompts may be those that the policy always solves, or never.
        """
        takes_part = bool(values.get("no_signal")) and _not_skipped(values, "") > 0
        solved = self._had_signal and takes_part and not _all_skipped(values)
        idle = not solved and (_all_skipped(values) or _idle(values))
        self.in_a_row = self.in_a_row + 1 if idle else 0
        self.without_signal = self.without_signal + 1 if solved else 0
        self._had_signal |= not (idle or solved)

    def __call__(
        self, step: int, values: Mapping[str, float], state: TrainState, batch: Batch
    ) -> None:
        """Checks a step, numbered from 1: its metrics, the state after it and its batch.

        Raises:
          TrainingError: If too many steps in a row were skipped, or parameters are non-finite.
        """
        norms = [values["loss"], values["grad_norm"]]
        text = f"Step {step} gave loss {norms[0]:g} and gradient norm {norms[1]:g}"
        if "critic_loss" in values:
            critic = [values["critic_loss"], values["critic_grad_norm"]]
            norms, text = norms + critic, f"{text}, of the critic {critic[0]:g} and {critic[1]:g}"
        if "subagent_loss" in values:
            loss, norm = values["subagent_loss"], values["subagent_grad_norm"]
            norms, text = [*norms, loss, norm], f"{text}, of the subagent {loss:g} and {norm:g}"
        if np.isfinite(norms).all() and values["skipped"]:
            text += " but a non-finite state or scale of the method"
        if has_nonfinite_update(values):
            raise TrainingError(
                f"{text} but a non-finite update, because of the optimizer or its learning rate; "
                "the parameters are lost, but the last checkpoint is intact."
            )
        skipped = [who for who in _TRAINED if values.get(f"{who}skipped")]
        self._count(values)
        if not _all_skipped(values):
            for who in skipped:
                not_made = values[f"{who}skipped"]
                some = f"{not_made:g} of {_not_skipped(values, who) + not_made:g} updates"
                self._folder.log(f"{text}, so {some} of {_TRAINED[who]} are skipped.")
            return
        first = next(who for who in skipped if not _not_skipped(values, who))
        whose = f"{_TRAINED[first]}'s" if first else "its"
        text = f"{text}, so {whose} update is skipped"
        if self.in_a_row < self._limit:
            self._folder.log(f"{text} ({self.in_a_row} in a row; {self._limit} end the run).")
            return
        row = f", and none of the last {self._limit} steps made one" if self._limit > 1 else ""
        raise TrainingError(f"{text}{row}; {self._write(step, state, batch)}.")

    def _write(self, step: int, state: TrainState, batch: Batch) -> str:
        """Writes the arrays and texts of a batch; returns a clause that names the file."""
        arrays = {"sampled_mask": batch.mask}
        try:
            prepared, logp = self._inspect(state, batch)
            arrays |= _arrays(prepared) | {"logp": logp}
        except Exception:  # such as out of memory; the batch as sampled is still informative
            arrays |= _arrays(batch)
        plain = {name: np.asarray(x) for name, x in processes.to_host(arrays).items()}
        for name, x in plain.items():
            if x.dtype.kind not in "biufU":  # such as bfloat16, which plain NumPy cannot read back
                plain[name] = x.astype(np.float32)
        plain["prompts"] = self._texts(plain["prompt_tokens"], plain["prompt_mask"])
        plain["completions"] = self._texts(plain["tokens"], plain["sampled_mask"])
        path = self._folder.path / f"skipped_step_{step:08d}.npz"

        def write() -> str:
            try:
                with path.open("wb") as file:
                    np.savez_compressed(file, **plain)
            except OSError as error:
                with contextlib.suppress(OSError):
                    path.unlink()
                return f"its batch cannot be written to {str(path)!r}: {reason(error)}"
            return f"its batch is in {str(path)!r}"

        return processes.from_first(write)

    def _texts(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        width = tokens.shape[-1]
        rows = zip(tokens.reshape(-1, width), mask.reshape(-1, width), strict=True)
        texts = [self._tokenizer.decode(row[keep].tolist()) for row, keep in rows]
        return np.array(texts, dtype=np.str_).reshape(tokens.shape[:-1])


# What a step trains, by the prefixes of its metrics.
_TRAINED = {"": "the policy", "critic_": "the critic", "subagent_": "the subagent"}


def _all_skipped(values: Mapping[str, Any]) -> bool:
    """Whether all updates of a step were skipped, of the policy or of another that it trains."""
    return any(values.get(f"{x}skipped") and not _not_skipped(values, x) for x in _TRAINED)


def _not_skipped(values: Mapping[str, Any], who: str) -> float:
    """Updates that were made, or that the recipe withheld."""
    return (values.get(f"{who}updates") or 0) + (values.get(f"{who}withheld") or 0)


def _idle(values: Mapping[str, Any]) -> bool:
    """Whether a step had nothing to train on. Rows of earlier versions have no ``updates``."""
    return bool(values.get("no_signal")) or not (_trains(values) or values.get("updates") is None)


def _trains(values: Mapping[str, Any]) -> bool:
    """Whether some token of a step trains a model, even if the update was skipped."""
    return any(_not_skipped(values, who) or values.get(f"{who}skipped") for who in _TRAINED)


def _arrays(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch by name; a dot joins the parts of a nested name."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    leaves = jax.tree_util.tree_leaves_with_path(fields)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def is_due(period: int, step: int) -> bool:
    """Whether an event that happens every ``period`` steps is due after this step; 0 is never."""
    return period > 0 and step % period == 0
