"""``jaxrl-llm sample``."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.train import Checkpoints
from jaxrl_llm.train.collect import encode_prompts, texts_of

_BATCH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Completions of prompts, which come from the command line, a file, or the terminal.

    Attributes:
      model: The name or path of a model, or the folder of a run for its last checkpoint.
      prompts: Prompts; without any and without a file, each line of the terminal is one.
      file: A file with a prompt on each line.
      n: Completions of each prompt.
      max_new_tokens: Longest completion.
      temperature: 0 is greedy.
      top_k: Keep the k most likely tokens.
      top_p: Keep the most likely tokens up to this probability mass.
      min_p: Keep tokens at least this likely relative to the most likely one.
      raw: Give the prompt as it is, without the chat template; so does a run that was trained so.
      system: A system message before each prompt; by default that of the run.
      seed: Of the sampling; by default 0.
      out: Also append the completions to this JSONL file.
    """

    model: tyro.conf.Positional[str]
    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    file: Path | None = None
    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    raw: bool = False
    system: str | None = None
    seed: int | None = None
    out: Path | None = None

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"--n must be at least 1; got {self.n}.")
        if self.system is not None and self.raw:
            raise ValueError("--system has no effect with --raw, which leaves out the template.")
        if self.prompts and self.file is not None:
            raise ValueError("Give prompts or --file, not both.")
        if self.temperature == 0 and self.seed is not None:
            raise ValueError("--seed has no effect at temperature 0, where nothing is drawn.")
        if self.temperature == 0 and self.n > 1:
            raise ValueError("--n has no effect at temperature 0, where all completions are alike.")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    from jaxrl_llm.rollout import make_sampler

    given = options.parse(Sample, arguments, command="sample")
    batches = _batches(given)
    options.use_compilation_cache()
    model, params, tokenizer, chat = _load(given)
    try:
        sampler = make_sampler(
            model,
            max_new_tokens=given.max_new_tokens,
            group_size=given.n,
            stop_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    key, room = jax.random.key(given.seed or 0), model.config.max_length - given.max_new_tokens
    for number, texts in enumerate(batches):
        prompts = [SimpleNamespace(text=text, id="") for text in texts]
        questions = encode_prompts(prompts, tokenizer, room=room, **chat)
        started = time.perf_counter()
        rollout = sampler(params, jax.random.fold_in(key, number), [q.tokens for q in questions])
        completions = texts_of(rollout, tokenizer)
        seconds = time.perf_counter() - started
        tokens = int(rollout.mask.sum())
        _show(texts, completions, given)
        print(
            f"[{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s"
            f"{', compilation included' if number == 0 else ''}]",
            file=sys.stderr,
        )
    return 0


def _load(given: Sample):
    """Model, parameters, tokenizer, and how prompts are put: of a name, or of a run."""
    from jaxrl_llm.train.setup import load_model

    name, chat = given.model, dict[str, Any](chat=not given.raw, system=given.system)
    if not options.is_run(name):
        from jaxrl_llm import data, models

        return *models.load_model(name), data.load_tokenizer(name), chat
    config, _ = options.load_target(name)
    if not config.data.chat and given.system is not None:
        raise UsageError("--system has no effect: the run was trained without the chat template.")
    chat["chat"] = config.data.chat and not given.raw
    if chat["chat"] and given.system is None:
        chat["system"] = config.data.system
    model, params, tokenizer = load_model(config, None)
    checkpoints = Checkpoints(Path(name) / "checkpoints", model=model)
    return model, checkpoints.restore_params(params), tokenizer, chat


def _batches(given: Sample) -> Iterable[list[str]]:
    """The prompts, some at a time; from the terminal one at a time, as they are typed."""
    if given.file is None and not given.prompts:
        return ([text] for text in _typed())
    texts = list(given.prompts)
    if given.file is not None:
        try:
            texts = [line for line in given.file.read_text().splitlines() if line.strip()]
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"The file {str(given.file)!r} cannot be read: {reason}.") from error
        if not texts:
            raise UsageError(f"The file {str(given.file)!r} holds no prompt.")
    return [texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH)]


def _typed() -> Iterator[str]:
    """Lines of the terminal, or of a pipe."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print(">>> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _show(texts: list[str], completions: list[list[str]], given: Sample) -> None:
    """Prints completions, and appends them to a file if one is named."""
    for text, group in zip(texts, completions, strict=True):
        if len(texts) > 1:
            print(f"# {text}")
        for number, completion in enumerate(group, 1):
            print(f"{number}. {completion}" if len(group) > 1 else completion, flush=True)
    if given.out is not None:
        with given.out.open("a") as file:
            for text, group in zip(texts, completions, strict=True):
                for completion in group:
                    file.write(json.dumps({"prompt": text, "completion": completion}) + "\n")
