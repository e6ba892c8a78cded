"""What is said and kept of steps whose update was left out, and when they end the run."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.files import reason
from jaxrl_llm.train.logging.run_folder import RunFolder, TrainingError
from jaxrl_llm.train.state import TrainState

Look = Callable[[TrainState, Batch], tuple[Batch, Array]]
"""What the step prepared of a batch, and the policy's log-probabilities of it ``[P, G, T]``."""


def spoiled(numbers: Mapping[str, float]) -> bool:
    """Whether a step put what is no number into the parameters.

    Its loss and gradient were finite, so only what the optimizer made of them can be at fault.
    """
    norms = [numbers.get(name, 0.0) for name in ("update_norm", "critic_update_norm")]
    return not np.isfinite(norms).all()


class Skips:
    """Counts the updates that were left out, and ends the run after too many in a row.

    Args:
      folder: Of the run; the batch of the last one is kept in it.
      most: How many in a row end the run.
      tokenizer: A ``data.Tokenizer``, for the texts of that batch.
      look: What else there is to know of a batch.
      history: The lines of metrics.jsonl of the steps before, which a resumed run has.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        most: int,
        tokenizer: Any,
        look: Look,
        history: Sequence[Mapping[str, Any]] = (),
    ):
        self._folder, self._most, self._tokenizer, self._look = folder, most, tokenizer, look
        steps = [_skipped(row) for row in history if "skipped" in row]
        self._in_a_row = steps[::-1].index(False) if False in steps else len(steps)

    def __call__(
        self, step: int, numbers: Mapping[str, float], state: TrainState, batch: Batch
    ) -> None:
        """Takes note of a step.

        Args:
          step: Which one, from 1.
          numbers: Its metrics.
          state: The one after it.
          batch: What it was given.

        Raises:
          TrainingError: If it is the last one that is borne, or has spoiled the parameters.
        """
        told = f"Step {step} gave {_told(numbers)}"
        if spoiled(numbers):
            raise TrainingError(
                f"{told} but an update that is no number, which the optimizer or its learning rate "
                "made; the parameters are lost and the last checkpoint stands."
            )
        if not _skipped(numbers):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        whose = "its update" if numbers["skipped"] else "the critic's update"
        told = f"{told}, so {whose} is left out"
        if self._in_a_row < self._most:
            self._folder.say(f"{told} ({self._in_a_row} in a row; {self._most} end the run).")
            return
        row = f", as in each of the last {self._most} steps" if self._most > 1 else ""
        raise TrainingError(f"{told}{row}; {self._keep(step, state, batch)}.")

    def _keep(self, step: int, state: TrainState, batch: Batch) -> str:
        """Writes all there is to know of a batch; returns where it is."""
        found = {"sampled_mask": batch.mask}
        try:
            prepared, logp = self._look(state, batch)
            found |= _arrays(prepared) | {"logp": logp}
        except Exception:  # such as no memory; the batch as it was sampled says much by itself
            found |= _arrays(batch)
        arrays = {name: _plain(x) for name, x in processes.to_host(found).items()}
        arrays["prompts"] = self._texts(arrays["prompt_tokens"], arrays["prompt_mask"])
        arrays["completions"] = self._texts(arrays["tokens"], arrays["sampled_mask"])
        path = self._folder.path / f"skipped_step_{step:08d}.npz"
        return processes.from_first(lambda: _write(path, arrays))

    def _texts(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        width = tokens.shape[-1]
        rows = zip(tokens.reshape(-1, width), mask.reshape(-1, width), strict=True)
        texts = [self._tokenizer.decode(row[kept].tolist()) for row, kept in rows]
        return np.array(texts, dtype=np.str_).reshape(tokens.shape[:-1])


def _skipped(numbers: Mapping[str, Any]) -> bool:
    """Whether an update of a step was left out."""
    return bool(numbers["skipped"] or numbers.get("critic_skipped"))


def _told(numbers: Mapping[str, float]) -> str:
    """Loss and gradient, or what else is no number."""
    values = [numbers["loss"], numbers["grad_norm"]]
    text = f"loss {values[0]:g} and gradient norm {values[1]:g}"
    if "critic_loss" in numbers:
        more = [numbers["critic_loss"], numbers["critic_grad_norm"]]
        values, text = values + more, f"{text}, of the critic {more[0]:g} and {more[1]:g}"
    if np.isfinite(values).all() and numbers["skipped"]:
        text += " but a state or a scale of the method that is no number"
    return text


def _arrays(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch by their names, those inside others with a dot."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    leaves = jax.tree_util.tree_leaves_with_path(fields)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _plain(x: Any) -> np.ndarray:
    """A dtype that NumPy reads back without help."""
    x = np.asarray(x)
    return x if x.dtype.kind in "biufU" else x.astype(np.float32)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    try:
        np.savez_compressed(path, **arrays)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return f"its batch cannot be written to {str(path)!r}: {reason(error)}"
    return f"its batch is in {str(path)!r}"
