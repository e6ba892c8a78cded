"""Batches of responses from the data, and a file of their log-probabilities under a reference.

In a run on responses from the data, a frozen reference returns the same numbers in every epoch.
With ``config.reference_logp`` the first run computes them once and writes them to a file, and later
runs read the file: no step runs the reference, and a run does not hold its parameters. The key of
an entry is a digest of the tokens of prompt and response, so order, split and batches may differ
between runs.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.files import reason, write_whole
from jaxrl_llm.curation import Collector, in_epochs
from jaxrl_llm.curation.collectors.needs import needs_of, reads_all_of_rows
from jaxrl_llm.curation.collectors.protocol import collector_parts
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import Batch, validate_batch
from jaxrl_llm.rollout.backends import SamplerBackend
from jaxrl_llm.rollout.collect import Collected, DataRows, Limits, collect
from jaxrl_llm.rollout.denoising import DenoisingOptions
from jaxrl_llm.train.checkpoint.config_text import comparable

_FORMAT = 1


class OfflineRows(NamedTuple):
    """A batch of responses from the data: row indices, the host batch, the collected rollouts.

    ``part`` is the number of the offline collector, of several in a mixture, that read them.
    """

    places: list[int]
    batch: Batch
    collected: Collected
    part: int = 0


def offline_batches(
    collector: Collector,
    questions: Sequence[Question],
    *,
    examples: Sequence[Question] = (),
    num_groups: int,
    group_size: int,
    limits: Limits,
    pad_id: int,
) -> Iterator[OfflineRows]:
    """Batches of equal size that cover every row of the data; the last may repeat some rows.

    Each offline part of the collector reads every row, one part after the other.

    Args:
      collector: A collector with parts that are ``offline``, at least one.
      questions: The rows of the data.
      examples: Other rows, from which a collector may draw examples.
      num_groups, group_size: Size of a batch.
      limits, pad_id: See :func:`~jaxrl_llm.rollout.collect.collect`.
    """
    parts = [part for part in collector_parts(collector) if reads_all_of_rows(part)]
    known = [*questions, *examples]
    backend = SamplerBackend(
        _unavailable,
        known,
        decode=limits.encoder.tokenizer.decode,
        grade=_unavailable,
        num_groups=num_groups,
        group_size=group_size,
    )
    rows = DataRows(known)
    for number, part in enumerate(parts):
        every = dataclasses.replace(part, source=in_epochs())
        state, seen = every.init(len(questions)), set()
        while len(seen) < len(questions):
            collected = collect(
                every,
                state,
                jax.random.key(0),
                backend,
                known,
                next_places=lambda count: [],
                num_groups=num_groups,
                group_size=group_size,
                step=0,
                limits=limits,
                pad_id=pad_id,
                rows=rows,
            )
            state = collected.state
            rewards = collected.scores.rewards.reshape(collected.where.shape)
            batch = Batch.from_rollout(collected.rollout, rewards, where=collected.where)
            ids = [x.prompt.name for x in collected.questions]
            batch = validate_batch(batch, vocab_size=limits.vocab_size, prompt_ids=ids)
            seen.update(collected.places)
            yield OfflineRows(collected.places, batch, collected, number)


def _unavailable(*args):
    raise ValueError("An offline collector has all responses and rewards; nothing is sampled.")


class ReferenceLogp:
    """Log-probabilities of responses under one reference, keyed by their tokens.

    Args:
      about: Everything besides the tokens that the log-probabilities depend on, by name.
      values: float32 ``[T]`` for each response, keyed by its digest in :func:`response_names`.
    """

    def __init__(self, about: Mapping[str, Any], values: Mapping[bytes, np.ndarray]):
        self.about, self._values = dict(about), dict(values)

    def __len__(self) -> int:
        return len(self._values)

    def absent(self, batch: Batch) -> list[tuple[int, int]]:
        """Row and member of each response of a host batch that has no entry."""
        return [place for place, name in response_names(batch).items() if name not in self._values]

    def attach(self, batch: Batch) -> Batch:
        """The host batch with ``ref_logp``.

        Raises:
          ValueError: If a response has no entry.
        """
        ref_logp = np.zeros(batch.tokens.shape, np.float32)
        mask = np.asarray(batch.mask)
        for place, name in response_names(batch).items():
            if name not in self._values:
                raise ValueError(
                    f"reference_logp: the response {place[1]} of row {place[0]} of a batch is not "
                    "among the responses that were scored."
                )
            ref_logp[place][mask[place]] = self._values[name]
        return batch.replace(ref_logp=ref_logp)

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        names = sorted(self._values)
        rows = [self._values[name] for name in names]
        data = hashlib.sha256(b"".join(names)).hexdigest()[:16]
        header = json.dumps({"format": _FORMAT, **self.about, "data": data})
        buffer = io.BytesIO()
        np.savez(
            buffer,
            header=np.array(header),
            names=np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1),
            lengths=np.array([len(row) for row in rows], np.int64),
            logp=np.concatenate(rows),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> "ReferenceLogp":
        """Reads the file.

        Raises:
          ValueError: If :meth:`save` did not write the file.
        """
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                about = json.loads(str(file["header"]))
                names, lengths, logp = file["names"], file["lengths"], file["logp"]
            if about.pop("format") != _FORMAT or lengths.sum() != len(logp):
                raise ValueError("another version of this package wrote it")
        except Exception as error:  # zip files fail in many ways
            raise ValueError(
                f"reference_logp: {str(path)!r} is not a file of log-probabilities "
                f"({reason(error)}); name another one."
            ) from error
        rows = np.split(logp, np.cumsum(lengths)[:-1])
        values = {name.tobytes(): row for name, row in zip(names, rows, strict=True)}
        del about["data"]
        return cls(about, values)


def response_names(batch: Batch) -> dict[tuple[int, int], bytes]:
    """A digest of the prompt and response tokens of each response that takes part.

    The keys are the row and member in a host batch.
    """
    tokens, mask = np.asarray(batch.tokens, np.int32), np.asarray(batch.mask)
    prompts, prompt_mask = np.asarray(batch.prompt_tokens, np.int32), np.asarray(batch.prompt_mask)
    names = {}
    for p, g in np.argwhere(np.asarray(batch.where) & mask.any(axis=-1)).tolist():
        prompt = prompts[p][prompt_mask[p]]
        text = f"{prompt.size} ".encode() + prompt.tobytes() + tokens[p, g][mask[p, g]].tobytes()
        names[p, g] = hashlib.sha256(text).digest()[:16]
    return names


def reference_logp(
    path: Path,
    batches: Callable[[], Iterator[OfflineRows]],
    score: Callable[[Batch], Array],
    *,
    about: Mapping[str, Any],
    questions: Sequence[Question],
    note: str = "",
) -> ReferenceLogp:
    """Reads the log-probabilities from a file that matches this run, or computes and writes them.

    Args:
      path: The file.
      batches: Function that returns the batches of the run.
      score: Returns log-probabilities ``[P, G, T]`` of a host batch under the reference.
      about: As for ``ReferenceLogp``; errors use these names.
      questions: The rows of the batches.
      note: What the error about other data says as well.

    Raises:
      ValueError: If the file belongs to another reference, or lacks responses of the run.
    """
    if not processes.from_first(path.exists):
        values: dict[bytes, np.ndarray] = {}
        for rows in batches():
            logp, mask = processes.to_host(score(rows.batch)), np.asarray(rows.batch.mask)
            names = response_names(rows.batch)
            values |= {name: np.asarray(logp[at])[mask[at]] for at, name in names.items()}
        table = ReferenceLogp(about, values)
        processes.from_first(lambda: table.save(path))
        return table
    table = ReferenceLogp.load(path)
    for name, value in about.items():
        stored = table.about.get(name)
        if isinstance(value, str):
            value, stored = comparable(value), comparable(str(stored))
        if stored != value:
            raise ValueError(
                f"reference_logp: {str(path)!r} was made with another {name}: "
                f"{stored}, but this run has {value}; name another file."
            )
    absent = {}
    for rows in batches():
        absent |= {(rows.places[p], rows.part, g): None for p, g in table.absent(rows.batch)}
    if absent:
        prompt = questions[min(absent)[0]].prompt
        raise ValueError(
            f"reference_logp: {str(path)!r} was made from other data: it lacks {len(absent)} of "
            f"the responses of this run, the first to prompt {prompt.name!r}. "
            f"Name another file, or use the same rows, tokenizer and chat template.{note}"
        )
    return table


def check_offline(config: Any) -> None:
    """Raises ValueError for options of sampling where the data have the responses."""
    if not config.samples_nothing:
        return
    if config.sampling.slots is not None:
        raise ValueError("sampling: slots has no effect if the data contain the responses.")
    if config.asynchrony.sampler_devices is not None:
        raise ValueError(
            "asynchrony: sampler_devices has no effect if the data contain the responses."
        )
    if config.samples_held_out and config.evaluation.enabled:
        return
    if config.evaluation.samples is not None:
        raise ValueError("evaluation: samples has no effect without a reward that grades them.")
    for option in ("top_k", "top_p", "min_p"):
        if getattr(config.sampling, option) is not None:
            raise ValueError(f"sampling: {option} has no effect if nothing is sampled.")
    if config.sampling.denoising != DenoisingOptions():
        raise ValueError("sampling: denoising has no effect if nothing is sampled.")


def check_reference(config: Any, recipe: Any) -> None:
    """Raises ValueError for a reference, or stored scores of one, that a recipe does not read."""
    if config.reference is not None and not recipe.needs.uses_reference:
        raise ValueError(f"config: reference has no effect: recipe {recipe.name!r} reads none.")
    if config.reference_logp is not None:
        _check_stored(config, recipe)
    moves = recipe.needs.moves_reference
    if config.reference is not None and moves and config.lora.rank is not None:
        raise ValueError(
            f"config: reference has no effect on {recipe.name!r} with an adapter, since its "
            "moving reference is an adapter as well."
        )


def _check_stored(config: Any, recipe: Any) -> None:
    """Raises ValueError unless a frozen reference reads responses that the data have."""
    because, needs = None, recipe.needs
    if "ref_logp" not in needs.fields:
        because = f"recipe {recipe.name!r} reads none"
    elif needs.moves_reference:
        because = f"the reference of recipe {recipe.name!r} moves"
    elif needs.likelihood is not None:
        because = f"the likelihood of recipe {recipe.name!r} depends on the masks of a batch"
    elif not config.offline:
        because = f"recipe {recipe.name!r} samples its responses"
    elif needs_of(recipe.collector).sends_text:
        because = f"the prompts of recipe {recipe.name!r} change with each batch"
    if because is not None:
        raise ValueError(f"config: reference_logp has no effect: {because}.")
    if Path(str(config.reference_logp)).suffix != ".npz":
        raise ValueError(f"config: reference_logp must end in .npz; got {config.reference_logp!r}.")
