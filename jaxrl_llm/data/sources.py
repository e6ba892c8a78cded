"""Sources of prompts: reasoning-gym tasks, files, the Hugging Face hub.

Each function returns a `PromptSet`. Every row of a table is a prompt: ``prompt_field`` names the
field with the user's message, and ``answer_field`` the field with the right answer, which becomes a
text, or None if there is none; a list of texts, any of which is right, becomes a tuple, and so do
the answers of SQuAD, a mapping whose "text" is such a list; an empty one is no answer. If the
answer of every row is the position of one of its ``choices``, which are texts, it becomes the
letter of that choice; a warning tells if every answer could be the number that a choice states. A
prompt may be a list of messages that ends with the user's; then ``chosen``, ``rejected`` and
``completion`` may be messages of the assistant, or without a prompt complete conversations.
Values of JSON files are as they are written, whatever other rows have. Messages of other files are
without keys whose value is None, since Arrow adds to each the keys of all others. Every other
field is metadata; "id" names the prompt, otherwise its source and row do, of which the first is 0.
An error also names the line where a row of a JSON file begins. Empty or malformed data, a missing
field and an unknown name raise ValueError; a package that is not installed raises ImportError.
"""

import difflib
import functools
import importlib
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.core.runtime.files import with_home
from jaxrl_llm.data.conversations import is_conversation, plain_row, without_added_keys
from jaxrl_llm.data.json_rows import JsonError, Table, json_rows, table_of, unpacked
from jaxrl_llm.data.prompts import Prompt, PromptSet
from jaxrl_llm.rewards.answers import LETTERS, answer_text

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_EMPTY = "{}: {} is empty; it has no prompts."


def from_reasoning_gym(task: str, *, size: int, seed: int = 0, **options: Any) -> PromptSet:
    """Prompts that a reasoning-gym task generates.

    The metadata of each holds "task" and "entry", which `rewards.reasoning_gym(task)` reads.
    Question i comes from `random.Random(seed + i)`, so sets of nearby seeds share questions, and
    small tasks repeat questions: separate training from evaluation with `split_distinct`, not by
    seed.

    Args:
      task: Name of a reasoning-gym dataset.
      size: Number of questions to generate, including repeats.
      seed: Seed of the first question.
      **options: Options of the task, such as min_terms or max_digits.

    Example:
      >>> from jaxrl_llm.data import from_reasoning_gym
      >>> prompts = from_reasoning_gym("chain_sum", size=2, min_terms=2, max_terms=2,
      ...                              min_digits=1, max_digits=1)
      >>> prompts[0].text[-7:], prompts[0].answer
      ('0 - 4 =', '-4')

    References:
      Stojanovski et al., Reasoning Gym (arXiv:2505.24760).
    """
    gym = _optional("reasoning_gym", "reasoning-gym", "from_reasoning_gym")
    checks.check_count("from_reasoning_gym", size=size)
    checks.check_seed("from_reasoning_gym", seed=seed)
    known = gym.factory.DATASETS
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f", which has {len(known)} others."
        raise ValueError(f"from_reasoning_gym: reasoning-gym has no task {task!r}{hint}")
    fields = known[task][1].__dataclass_fields__
    for name in options:
        if name not in fields:
            raise ValueError(
                f"from_reasoning_gym: the task {task!r} has no option {name!r}; it has "
                f"{', '.join(sorted(set(fields) - {'seed', 'size'}))}."
            )
    try:
        dataset = gym.create_dataset(task, size=size, seed=seed, **options)
    except Exception as error:  # the package checks by assertions
        raise ValueError(
            f"from_reasoning_gym: the task {task!r} refuses the options {options}: {error}."
        ) from error
    source = f"reasoning-gym task {task!r}"
    return PromptSet(
        (
            Prompt(
                text=entry["question"],
                answer=None if entry.get("answer") is None else str(entry["answer"]),
                metadata={"task": task, "entry": _without_index(entry)},
                id=f"{task}-{seed + index}",
            )
            for index, entry in enumerate(dataset[i] for i in range(size))
        ),
        source=source,
    )


def _without_index(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of reasoning-gym, equal to another one with the same question."""
    metadata = {k: v for k, v in entry.get("metadata", {}).items() if k != "source_index"}
    return {**entry, "metadata": metadata}


def from_file(
    path: str | Path,
    *,
    prompt_field: str = "prompt",
    answer_field: str | None = "answer",
    needs_answer: bool = True,
) -> PromptSet:
    """Prompts of a JSON-lines, JSON or Parquet file, one per row.

    Args:
      path: A file that ends in .jsonl, .json or .parquet. Nothing is cached or downloaded.
      prompt_field, answer_field: See the module.
      needs_answer: Whether a row without an answer is an error.

    Raises:
      FileNotFoundError: If there is no such file.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxrl_llm.data import from_file
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "sums.jsonl")
      ...     _ = path.write_text('{"prompt": "1 + 1 =", "answer": 2}')
      ...     from_file(path)[0].answer
      '2'
    """
    path = with_home(path)
    reader = _READERS.get(path.suffix.lower())
    if not path.is_file():
        raise FileNotFoundError(f"from_file: there is no file {str(path)!r}.")
    if reader is None:
        raise ValueError(
            f"from_file: {str(path)!r} must end in one of {', '.join(sorted(_READERS))}."
        )
    datasets = _optional("datasets", "datasets", "from_file")

    def failure(error: Exception) -> str:
        return f"{str(path)!r} cannot be read as {reader}: {_one_line(error.__cause__ or error)}"

    with (
        tempfile.TemporaryDirectory() as folder,
        _reading(datasets, "from_file", str(path), failure),
    ):
        if reader == "json":
            table = json_rows(datasets, [str(path)])
        else:
            split = datasets.load_dataset(
                reader, data_files=str(path), split="train", cache_dir=folder, keep_in_memory=True
            )
            table = _table_of_arrow(split, prompt_field)
    names = prompt_field, answer_field
    return _from_table(table, "from_file", str(path), path.name, *names, needs_answer)


def from_hub(
    name: str,
    *,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    prompt_field: str = "prompt",
    answer_field: str | None = "answer",
    needs_answer: bool = True,
) -> PromptSet:
    """Prompts of a Hugging Face dataset.

    Args:
      name: A repository of the hub, or a local folder laid out as one.
      split: The split to read, such as "train" or "test[:100]".
      config: The configuration of a dataset that has several.
      revision: The commit, tag or branch to read.
      prompt_field, answer_field: See the module.
      needs_answer: Whether the answer field must exist, and each row have an answer.

    Example:
      >>> from jaxrl_llm.data import from_hub
      >>> prompts = from_hub("openai/gsm8k", config="main", split="train",
      ...                    prompt_field="question")  # doctest: +SKIP
    """
    datasets, source = _optional("datasets", "datasets", "from_hub"), f"{name} ({split})"

    def failure(error: Exception) -> str:
        return f"the split {split!r} of the dataset {name!r} cannot be loaded: {_one_line(error)}"

    with _reading(datasets, "from_hub", source, failure):
        builder = _untyped_builder(datasets, name, config, revision)
        read = None if builder is None else _reader_of_files(datasets, builder.name, builder.config)
        if builder is not None and read is not None:
            table = _table_of_split(datasets, builder.config.data_files, split, read)
        else:
            try:
                rows = datasets.load_dataset(name, config, split=split, revision=revision)
                table = _table_of_arrow(rows, prompt_field)
            except datasets.exceptions.DatasetGenerationError:
                if builder is None or builder.name != "parquet":
                    raise
                # Each file of a split may have types of its own, such as null for an empty column.
                read = functools.partial(_parquet_rows, datasets, prompt_field)
                table = _table_of_split(datasets, builder.config.data_files, split, read)
    names = prompt_field, answer_field
    return _from_table(table, "from_hub", source, f"{name}/{split}", *names, needs_answer)


def _from_table(
    table: Table,
    function: str,
    source: str,
    label: str,
    prompt_field: str,
    answer_field: str | None,
    needs_answer: bool = True,
) -> PromptSet:
    rows, fields, _ = table
    if not rows:
        raise ValueError(_EMPTY.format(function, source))
    if not needs_answer and answer_field not in fields:
        answer_field = None
    implicit = prompt_field not in fields and all(
        is_conversation(rows[0].get(name)) for name in ("chosen", "rejected")
    )
    for name in filter(None, (prompt_field, answer_field)):
        if name not in fields and not (implicit and name == prompt_field):
            raise ValueError(
                f"{function}: {source} has no field {name!r}; its fields are {', '.join(fields)}. "
                "Name its own with prompt_field and answer_field."
            )

    positions = answer_field is not None and all(_is_position(row, answer_field) for row in rows)
    if positions and all(str(row[answer_field]) in row["choices"] for row in rows):
        warnings.warn(
            f"{function}: every answer of {source} is the position of a choice, and also a choice: "
            "they are read as positions, of which 0 is the first. If they are choices, write them "
            "as texts.",
            stacklevel=3,
        )

    answers = [row[answer_field] for row in rows] if answer_field else []
    # Beside lists of numbers, an empty list is one of them; else it has no right text.
    json_lists = any(isinstance(x, list | tuple) and _texts(x) is None for x in answers)

    def prompt(position: int, row: Mapping[str, Any]) -> Prompt:
        place = table.places[position] if table.places else f"row {position} of {source}"
        row, messages = plain_row(row, prompt_field, f"{function}: {place}", implicit=implicit)
        text = row[prompt_field]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"{function}: the field {prompt_field!r} of {place} must be a non-empty string, "
                f"got {text!r:.80}."
            )
        answer = row[answer_field] if answer_field else None
        texts = _texts(answer)
        if texts == () and not (json_lists and isinstance(answer, list | tuple)):
            answer = None
        if answer_field and answer is None and needs_answer:
            raise ValueError(
                f"{function}: the field {answer_field!r} of {place} is missing or has no answer; "
                "needs_answer=False takes such rows."
            )
        if positions and isinstance(answer, int):  # as a text, it would look like a choice
            answer = LETTERS[answer]
        if texts:
            answer = texts
        elif isinstance(answer, float) and math.isfinite(answer):
            answer = answer_text(answer)
        elif answer is not None and not isinstance(answer, str):
            answer = json.dumps(answer, default=str)
        others = {k: v for k, v in row.items() if k not in (prompt_field, answer_field)}
        identity = row.get("id")
        identity = f"{label}:{position}" if identity is None else str(identity)
        return Prompt(text, answer, others, identity, messages, place)

    return PromptSet((prompt(n, row) for n, row in enumerate(rows)), source=source)


def _texts(answer: Any) -> tuple[str, ...] | None:
    """The texts of an answer that is a list of them, any of which is right; None for others."""
    texts = answer.get("text") if isinstance(answer, Mapping) else answer  # as SQuAD has them
    is_list = isinstance(texts, list | tuple) and all(isinstance(x, str) for x in texts)
    return tuple(texts) if is_list else None


def _is_position(row: Mapping[str, Any], answer_field: str) -> bool:
    """Whether the answer of a row is the position of one of its choices, which are texts."""
    answer, choices = row.get(answer_field), row.get("choices")
    texts = isinstance(choices, list | tuple) and all(isinstance(x, str) for x in choices)
    return texts and type(answer) is int and 0 <= answer < min(len(choices), len(LETTERS))


def _table_of_arrow(rows: Any, prompt_field: str) -> Table:
    """The rows and columns of an Arrow table."""
    return Table(
        [without_added_keys(row, prompt_field) for row in rows], list(rows.features or ()), []
    )


def _untyped_builder(
    datasets: Any, name: str, config: str | None, revision: str | None
) -> Any | None:
    """The builder of a data set whose types nobody has stated; None for others."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # where no types of an earlier use are cached
            builder = datasets.load_dataset_builder(
                name, config, revision=revision, cache_dir=folder
            )
    except Exception:  # load_dataset says why, or has the data of an earlier use
        return None
    return builder if builder.info.features is None else None


def _reader_of_files(datasets: Any, kind: str, config: Any) -> Callable | None:
    """``paths -> Table`` for JSON and CSV without types; None for other data sets.

    datasets would infer the types from the first part of a file, and refuse other values after it.
    """
    if kind == "json" and config.field is None and config.encoding == "utf-8":
        return functools.partial(json_rows, datasets)
    if kind == "csv" and config.engine is None and len(config.sep or "") == 1:
        return functools.partial(_csv_rows, datasets, config.pd_read_csv_kwargs)
    return None


def _csv_rows(datasets: Any, options: Mapping[str, Any], paths: Sequence[str]) -> Table:
    """The rows of CSV files, in which a column has the type that all values of a file allow."""
    import pandas

    rows: list[dict] = []
    options = {**options, "chunksize": None, "low_memory": False}
    for file, _ in unpacked(datasets, paths):
        table = pandas.read_csv(file, **options)
        rows += datasets.Dataset.from_pandas(table, preserve_index=False)
    return table_of(rows)


def _parquet_rows(datasets: Any, prompt_field: str, paths: Sequence[str]) -> Table:
    """The rows of Parquet files, each with its own types."""
    from pyarrow import parquet

    rows: list[dict] = []
    for file, _ in unpacked(datasets, paths):
        table = datasets.Dataset(datasets.table.InMemoryTable(parquet.read_table(file)))
        rows += _table_of_arrow(table, prompt_field).rows
    return table_of(rows)


def _table_of_split(
    datasets: Any, files: Mapping[str, Sequence[Any]], split: str, read: Callable[..., Table]
) -> Table:
    """The table of a split such as "test[:100]"; splits are lists of files."""
    split = "+".join(map(str, files)) if split == "all" else split
    parts = datasets.ReadInstruction.from_spec(split)
    # The names of the splits that it reads are known before their sizes.
    named = {part.splitname for part in parts.to_absolute(dict.fromkeys(files, sys.maxsize))}
    tables = {each: read([str(path) for path in files[each]]) for each in named}
    sizes = {each: len(table.rows) for each, table in tables.items()}
    rows, places = list[dict](), list[str]()
    for part in parts.to_absolute(sizes):
        table, of = tables[part.splitname], slice(part.from_, part.to)
        rows += table.rows[of]
        places += table.places[of]
    return table_of(rows, places)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")[:300]
    return text or type(error).__name__


def _optional(module: str, package: str, function: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{function} needs the package {package}: pip install 'jaxrl_llm[train]'."
        ) from error


@contextmanager
def _reading(datasets: Any, function: str, source: str, failure: Callable[[Exception], str]):
    """Without the progress bars of datasets, and with its errors as ValueError of a function.

    An error that names the function already passes.
    """
    were_on = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    logger = datasets.logging.get_logger("datasets")
    level = logger.level
    logger.setLevel(datasets.logging.CRITICAL)  # its message is in our error
    try:
        yield
    except Exception as error:
        if str(error).startswith(f"{function}: "):
            raise
        if isinstance(error, JsonError):
            raise ValueError(f"{function}: {error}.") from error
        if "corresponds to no data" in str(error):
            raise ValueError(_EMPTY.format(function, source)) from error
        raise ValueError(f"{function}: {failure(error)}.") from error
    finally:
        logger.setLevel(level)
        if were_on:
            datasets.utils.enable_progress_bars()
