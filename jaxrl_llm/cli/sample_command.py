"""``jaxrl-llm sample``."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.chosen import check_choice, chosen
from jaxrl_llm.cli.completions import FIELDS, Live, OutFile, Printer, digest
from jaxrl_llm.cli.job import MOST_SAMPLES, Job, Tally
from jaxrl_llm.cli.prompts import Asked, read_prompts
from jaxrl_llm.train import Checkpoints, TrainConfig

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Completions of prompts, which come from the command line, a file, a pipe or the terminal.

    Attributes:
      model: The name or path of a model, or the folder of a run for its last checkpoint.
      prompts: Prompts; without any and without a file, each line of the terminal is one.
      file: A file with a prompt on each line; if it ends in .jsonl, an object on each line whose
        field "prompt" is one, and whose other fields are kept.
      out: Append the completions to this JSONL file, as they finish, instead of printing them. With
        the same options and the same file, what is in it already is not sampled again.
      json: Print JSON objects as --out writes them instead of text.
      n: Completions of each prompt.
      max_new_tokens: Longest completion, in tokens.
      min_new_tokens: Shortest completion that the model may end by itself.
      temperature: 0 is greedy.
      top_k: Keep the k most likely tokens.
      top_p: Keep the most likely tokens up to this probability mass.
      min_p: Keep tokens at least this likely relative to the most likely one.
      repetition_penalty: Above 1 makes tokens less likely that the text holds already.
      stop: A text that ends a completion and is left out of it.
      seed: Of the sampling; by default 0. The same seed gives the same completions with any number
        of slots, but for rounding.
      slots: Completions that are sampled at one time, at most.
      step: Which checkpoint of a run; by default the last.
      best: The checkpoint of a run that was kept as the best.
      dtype: Of the model; by default float32, or that of the run.
      raw: Give the prompt as it is, without the chat template; so does a run that was trained so.
      system: A system message before each prompt; by default that of the run.
    """

    model: tyro.conf.Positional[str]
    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    file: Path | None = None
    out: Path | None = None
    json: bool = False
    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    seed: int | None = None
    slots: int = 32
    step: int | None = None
    best: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    raw: bool = False
    system: str | None = None

    def __post_init__(self):
        for name in ("n", "max_new_tokens", "slots"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}.")
        if self.n > MOST_SAMPLES:
            raise ValueError(f"--n must be at most {MOST_SAMPLES}; got {self.n}.")
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(
                f"--min-new-tokens {self.min_new_tokens} is more than --max-new-tokens "
                f"{self.max_new_tokens}."
            )
        if self.system is not None and self.raw:
            raise ValueError("--system has no effect with --raw, which leaves out the template.")
        if self.prompts and self.file is not None:
            raise ValueError("Give prompts or --file, not both.")
        if self.json and self.out is not None:
            raise ValueError("--json has no effect with --out, which writes JSON.")
        if "" in self.stop:
            raise ValueError("--stop must not be empty.")
        if self.temperature == 0 and self.seed is not None:
            raise ValueError("--seed has no effect at temperature 0, where nothing is drawn.")
        if self.temperature == 0 and self.n > 1:
            raise ValueError("--n has no effect at temperature 0, where all completions are alike.")

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of the draw that were given."""
        return {k: v for k in _SAMPLING if (v := getattr(self, k)) is not None}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    given = options.parse(Sample, arguments, command="sample")
    asked = read_prompts(given.prompts, given.file, taken=FIELDS)
    out = None if given.out is None else OutFile(given.out)
    options.use_compilation_cache()
    _say(f"Loading {given.model} ...", wait=True)
    job = _load(given)
    return _talk(job, given, out) if asked is None else _answer(job, given, asked, out)


def _load(given: Sample) -> Job:
    """The model of a name, or of a run, and how prompts are put to it."""
    from jaxrl_llm.train.frozen import restore_policy, with_adapter
    from jaxrl_llm.train.setup import load_model

    name, step = given.model, None
    chat: dict[str, Any] = {"chat": not given.raw, "system": given.system}
    if options.is_run(name):
        config, _ = options.load_target(name)
        check_choice(name, config, step=given.step, best=given.best)
        if not config.data.chat and given.system is not None:
            raise UsageError(
                "--system has no effect: the run was trained without the chat template."
            )
        chat["chat"] = config.data.chat and not given.raw
        if chat["chat"] and given.system is None:
            chat["system"] = config.data.system
        if given.dtype is not None:
            config = _with_dtype(config, given.dtype)
        model, params, tokenizer = load_model(config, None)
        model, params = with_adapter(model, params, config.lora)
        marks = {} if config.lora.rank is None else {"lora": repr(config.lora)}
        checkpoints = Checkpoints(
            Path(name) / "checkpoints", model=model, best=config.checkpoint.best, run=marks
        )
        step = chosen(checkpoints, name, step=given.step, best=given.best)
        params, step = restore_policy(checkpoints, params, step=step), checkpoints.last
    else:
        from jaxrl_llm import data, models

        check_choice(name, None, step=given.step, best=given.best)
        model, params = models.load_model(name, dtype=given.dtype or "float32")
        tokenizer = data.load_tokenizer(name)
    where = Path(name).resolve() if Path(name).exists() else name
    settings = {"model": where, "step": step, "seed": given.seed or 0, "stop": given.stop}
    settings["dtype"] = model.config.dtype
    settings |= {"max_new_tokens": given.max_new_tokens, **given.sampling, **chat}
    return Job(
        model,
        params,
        tokenizer,
        chat=chat,
        name=digest(settings),
        n=given.n,
        slots=given.slots,
        max_new_tokens=given.max_new_tokens,
        sampling=given.sampling,
        stops=given.stop,
        seed=given.seed or 0,
    )


def _with_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    try:
        return dataclasses.replace(config, dtype=dtype)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _answer(job: Job, given: Sample, asked: list[Asked], out: OutFile | None) -> int:
    """Completions of prompts that are all there."""
    done = set() if out is None else out.done(asked, job.name)
    if out is not None:
        _tell_of(out, len(asked) * given.n, len(done))
    groups = job.groups(asked, done)
    if not groups:
        return 0
    live = None
    if out is None and not given.json and given.n == len(asked) == 1 and sys.stdout.isatty():
        live = Live(job.tokenizer, given.stop)
    sink: Any = out if out is not None else live
    if sink is None:
        sink = Printer([group.id for group in groups], as_json=given.json)
    longest = max(len(group.prompt) for group in groups)
    generation = job.generation(longest=longest, prompts=len(groups), on_tokens=live)
    _say("Compiling ...", wait=True)
    tally = Tally(job, asked, generation, [sink])
    stopped = tally.run(groups, bar=out is not None)
    _say(tally.summary())
    if tally.failed:
        places = ", ".join(map(str, sorted(tally.failed)))
        _say(f"Failed, since the model's logits were no numbers: prompt {places} (from 0).")
    if stopped:
        left = len(groups) - tally.groups
        kept = "--out FILE would keep them" if out is None else "the same command does the rest"
        _say(f"Stopped: {len(asked) - left:,} of {len(asked):,} prompts are done; {kept}.")
        return 130
    return int(bool(tally.failed))


def _tell_of(out: OutFile, total: int, done: int) -> None:
    """Says what is made of completions that a file holds already."""
    if done:
        left = f"{total - done:,} are left" if total > done else "nothing is left to do"
        _say(f"{str(out.path)!r} holds {done:,} of {total:,} completions; {left}.")
    if len(out) > done:
        _say(f"{str(out.path)!r} holds {len(out) - done:,} of other prompts or options; they stay.")


def _talk(job: Job, given: Sample, out: OutFile | None) -> int:
    """Completions of lines as they are typed."""
    live = None
    if given.n == 1 and not given.json and sys.stdout.isatty():
        live = Live(job.tokenizer, given.stop)
    generation, room = None, 0
    _say("Each line is a prompt of its own. Ctrl-C ends an answer, Ctrl-D everything.")
    for index, line in enumerate(_typed()):
        asked = [Asked(index, line, {})]
        try:
            groups = job.groups(asked, set())
        except UsageError as error:
            _say(str(error))
            continue
        if generation is None or len(groups[0].prompt) > room:
            # Twice the length, so that not every line that is longer compiles anew.
            generation = job.generation(
                longest=2 * len(groups[0].prompt), prompts=1, on_tokens=live
            )
            room = generation.engine.prompt_length
            _say("Compiling ...", wait=True)
        sinks = [live or Printer([index], as_json=given.json), *([] if out is None else [out])]
        tally = Tally(job, asked, generation, sinks)
        if not tally.run(groups, bar=False):
            _say(tally.summary())
    return 0


def _typed() -> Iterator[str]:
    """Lines of the terminal."""
    import readline  # noqa: F401 (input() then knows the arrow keys)

    while True:
        try:
            if sys.stdout.isatty():
                line = input(">>> ")
            else:  # or the sign would be among the answers
                print(">>> ", end="", flush=True, file=sys.stderr)
                line = sys.stdin.readline()
                if not line:
                    return
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def _say(line: str, *, wait: bool = False) -> None:
    """A line on stderr; what only says why somebody waits is for terminals."""
    if not wait or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
