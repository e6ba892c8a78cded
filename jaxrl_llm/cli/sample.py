"""``jaxrl-llm sample``: samples completions of prompts with an engine of the right size."""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.completions import (
    Live,
    OutFile,
    Printer,
    PromptRow,
    digest,
    digest_of_model,
    read_prompts,
    text_to_stop,
    to_row,
    typed_lines,
)
from jaxrl_llm.core.runtime.interrupt import deferred_interrupt
from jaxrl_llm.data.prompts import Prompt
from jaxrl_llm.data.questions import encode_prompts
from jaxrl_llm.data.rendering import response_ends
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.rollout import FinishedGroup, Generation, Group, make_engine
from jaxrl_llm.rollout.engine.requests import has_ended
from jaxrl_llm.rollout.sampler import bucket_of
from jaxrl_llm.rollout.sampling.filters import GREEDY_BELOW
from jaxrl_llm.rollout.types import FAILED
from jaxrl_llm.train import TrainConfig

# The request of a completion, which names its random numbers, is sample * MOST_PROMPTS + index: it
# does not depend on n, so a larger n only adds completions.
MOST_PROMPTS, MOST_SAMPLES = 2**20, 2**11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Samples completions of prompts from the command line, a file, a pipe or the terminal.

    Attributes:
      model: The name or path of a model, or the folder of a run for its last checkpoint.
      prompts: Prompts; with neither prompts nor a file, each line of the terminal is a prompt.
      file: A file with a prompt on each line; if it ends in .jsonl, an object on each line with a
        field "prompt", whose other fields are copied to the completions.
      out: Append the completions to this JSONL file, as they finish, instead of printing them. With
        the same options and the same file, only the missing and the failed completions are sampled.
        It may also be a device or a pipe.
      json: Print JSON objects, as --out writes them, instead of text.
      n: Completions per prompt.
      max_new_tokens: Maximum length of a completion, in tokens.
      min_new_tokens: Minimum length before the model may end a completion; ``--stop`` may end one
        sooner.
      temperature: 0 is greedy.
      top_k: Keep the k most likely tokens.
      top_p: Keep the most likely tokens up to this probability mass.
      min_p: Keep tokens at least this likely relative to the most likely one.
      repetition_penalty: Values above 1 make tokens that already occur less likely.
      stop: A text that ends a completion and is removed from it.
      seed: Seed of the sampling; by default 0. The same seed gives the same completions with any
        number of slots, except for rounding.
      slots: Maximum number of completions sampled at one time.
      step: The step of a run's checkpoint; by default the last.
      best: Use the checkpoint of a run that was saved as best.
      trust: Execute the config.py of a run that was not made here; read it first.
      dtype: Dtype of the model; by default float32, or that of the run.
      raw: Use the prompt without the chat template, as for a run trained without it.
      system: A system message before each prompt; by default that of the run.
      template_options: Variables of the chat template, such as enable_thinking=false; those of the
        run stay, unless they have the same name.
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
    trust: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    raw: bool = False
    system: str | None = None
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in ("n", "max_new_tokens", "min_new_tokens", "slots"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}.")
        if self.n > MOST_SAMPLES:
            raise ValueError(f"--n must be at most {MOST_SAMPLES}; got {self.n}.")
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(
                f"--min-new-tokens {self.min_new_tokens} is more than --max-new-tokens "
                f"{self.max_new_tokens}."
            )
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"--seed must not be negative; got {self.seed}.")
        for option in ("system", "template_options"):
            if getattr(self, option) not in (None, {}) and self.raw:
                name = option.replace("_", "-")
                raise ValueError(
                    f"--{name} has no effect with --raw, which leaves out the template."
                )
        if self.prompts and self.file is not None:
            raise ValueError("Give prompts or --file, not both.")
        if self.json and self.out is not None:
            raise ValueError("--json has no effect with --out, which writes JSON.")
        if "" in self.stop:
            raise ValueError("--stop must not be empty.")
        greedy = self.temperature < GREEDY_BELOW
        if greedy and self.seed is not None:
            raise ValueError("--seed has no effect at temperature 0, where nothing is drawn.")
        if greedy and self.n > 1:
            raise ValueError("--n has no effect at temperature 0, where all completions are alike.")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = options.parse(Sample, arguments, command="sample")
    with options.on_its_date(args.model):
        return _sample(args)


def _sample(args: Sample) -> int:
    prompts = read_prompts(args.prompts, args.file)
    out = None if args.out is None else OutFile(args.out)
    options.use_compilation_cache()
    _print_status(f"Loading {args.model} ...", progress=True)
    job = Job.load(args)
    if prompts is not None:
        return _answer(job, prompts, out)
    live = None
    if args.n == 1 and not args.json and sys.stdout.isatty():
        live = Live(job.tokenizer, args.stop)
    generation, room = None, 0
    _print_status("Each line is a prompt of its own. Ctrl-C ends an answer, Ctrl-D everything.")
    for index, line in enumerate(typed_lines()):
        prompts = [PromptRow(index, line, {})]
        try:
            groups = job.groups(prompts, _done(job, prompts, out))
        except UsageError as error:
            _print_status(str(error))
            continue
        if not groups:
            _print_status(f"{str(args.out)!r} has the completions of this line.")
            continue
        if generation is None or len(groups[0].prompt) > room:
            generation = None  # frees its slots
            # Twice the length, so that not every line that is longer compiles anew.
            longest = 2 * len(groups[0].prompt)
            try:
                generation = job.generation(longest=longest, prompts=1, on_tokens=live)
            except UsageError as error:
                _print_status(str(error))
                continue
            room = generation.engine.spec.prompt_length
            _print_status("Compiling ...", progress=True)
        sinks = [live or Printer([index], as_json=args.json), *([] if out is None else [out])]
        tally = Tally(job, prompts, generation, sinks)
        if not tally.run(groups, bar=False):
            _print_status(tally.summary())
    return 0


class Timed(Generation):
    """A generation that measures its compilation time, from :meth:`start_timing` on."""

    def start_timing(self) -> None:
        """Forgets the rounds so far."""
        self.steps: list[tuple[float, bool]] = []  # seconds of a round, and whether it compiled

    def step(self) -> None:
        """One round, timed."""
        known, start = self.engine.compiled(), time.perf_counter()
        super().step()
        self.steps.append((time.perf_counter() - start, self.engine.compiled() > known))

    def compiling(self) -> float | None:
        """Seconds that compiling rounds took beyond a normal one; None if every round compiled."""
        usual = [seconds for seconds, compiled in self.steps if not compiled]
        if not usual:
            return None if self.steps else 0.0
        typical = statistics.median(usual)
        return sum(max(s - typical, 0.0) for s, compiled in self.steps if compiled)


class Job:
    """A model with the options for completing prompts.

    ``chat`` is whether prompts go through the chat template; ``step`` is that of the run's
    checkpoint, None if the model is not a run's; ``files`` is a digest of the checkpoint's files or
    of the model's, None if they are not in a place that the user names.
    """

    def __init__(
        self,
        model: Model,
        params,
        tokenizer,
        *,
        args: Sample,
        chat: bool,
        system: str | None,
        step: int | None,
        files: str | None = None,
    ):
        self.model, self.params, self.tokenizer, self.args = model, params, tokenizer, args
        self._chat, self._system = chat, system
        self._room = model.config.max_length - args.max_new_tokens
        if self._room < 1:
            raise UsageError(
                f"--max-new-tokens {args.max_new_tokens} leaves no room for a prompt in the "
                f"model's context of {model.config.max_length}."
            )
        name = args.model
        settings = {
            "model": Path(name).resolve() if Path(name).exists() else name,
            "step": step,
            "seed": args.seed or 0,
            "stop": args.stop,
            "dtype": model.config.dtype,
            "max_new_tokens": args.max_new_tokens,
            "chat": chat,
            "system": system,
        }
        if files is not None:  # a run may have been made again, a model replaced
            settings["checkpoint"] = files
        if chat and (variables := getattr(tokenizer, "template_options", None)):
            settings["template_options"] = variables
        self._stop_ids = response_ends(tokenizer, chat=chat)
        if set(self._stop_ids) != set(tokenizer.eos_ids):
            settings["stop_ids"] = self._stop_ids
        settings |= {name: x for name in _DRAW if (x := getattr(args, name)) is not None}
        self.name = digest(settings)

    @classmethod
    def load(cls, args: Sample) -> "Job":
        """The model of a name, or of a run, and the format of its prompts."""
        chat, system = not args.raw, args.system
        choice = options.CheckpointChoice(args.model, args.step, args.best, args.trust)

        def check(config: TrainConfig) -> None:
            used = {"--system": system is not None, "--raw": args.raw}
            used["--template-options"] = bool(args.template_options)
            for option in filter(used.get, used):
                if not config.data.chat:
                    raise UsageError(
                        f"{option} has no effect: the run was trained without the chat template."
                    )

        # Before the model is read: files that are replaced meanwhile are another model's.
        files = digest_of_model(Path(args.model), args.out)
        policy = options.load_policy(
            choice, dtype=args.dtype, template_options=args.template_options, check=check
        )
        if policy.config is not None:
            data = policy.config.data
            chat = data.chat and chat
            system = data.system if chat and system is None else system
        return cls(
            policy.model,
            policy.params,
            policy.tokenizer,
            args=args,
            chat=chat,
            system=system,
            step=policy.step,
            files=policy.checkpoint or files,
        )

    def groups(self, prompts: Sequence[PromptRow], done: set[tuple[int, int]]) -> list[Group]:
        """Prompts as groups, without the completions (index, sample) that are done."""
        if prompts[-1].index >= MOST_PROMPTS:
            raise UsageError(f"There are more than {MOST_PROMPTS:,} prompts; give fewer at a time.")
        texts = [Prompt(each.text) for each in prompts]
        with options.usage_errors():
            questions = encode_prompts(
                texts, self.tokenizer, room=self._room, chat=self._chat, system=self._system
            )
        groups = []
        for each, question in zip(prompts, questions, strict=True):
            samples = [k for k in range(self.args.n) if (each.index, k) not in done]
            requests = tuple(k * MOST_PROMPTS + each.index for k in samples)
            groups += [Group(each.index, question.tokens, requests)] if requests else []
        return groups

    def generation(
        self, *, longest: int, prompts: int, on_tokens: Callable[..., Any] | None = None
    ) -> Timed:
        """A generation of an engine for this many prompts of up to ``longest`` tokens."""
        args, stops = self.args, self.args.stop
        length = min(bucket_of(longest), self._room)
        # Siblings share a row up to eight; more of them only where there are few prompts.
        width = min(args.n, args.slots, max(8, -(-args.slots // prompts)))
        rows = max(1, min(args.slots // width, prompts * -(-args.n // width)))
        with options.usage_errors("make_engine: "):
            engine = make_engine(
                self.model,
                rows=rows,
                width=width,
                prompt_length=length,
                max_new_tokens=args.max_new_tokens,
                stop_ids=self._stop_ids,
                pad_id=self.tokenizer.pad_id,
                chunk=16 if on_tokens is None else 1,
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                min_p=args.min_p,
                repetition_penalty=args.repetition_penalty,
                min_new_tokens=args.min_new_tokens or 0,
            )
        try:
            return Timed(
                engine,
                self.params,
                key=jax.random.key(args.seed or 0),
                on_tokens=on_tokens,
                stop_strings=stops,
                decode_text=self.tokenizer.decode if stops else None,
            )
        except MemoryError as error:
            raise UsageError(f"{error} Give fewer --slots or --max-new-tokens.") from error


_DRAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")


class Tally:
    """Writes the completions of a generation to sinks as they finish, and counts them.

    A sink takes rows with ``write`` and ends with ``flush``.
    """

    def __init__(
        self, job: Job, prompts: Sequence[PromptRow], generation: Timed, sinks: Sequence[Any]
    ):
        self._job, self._generation, self._sinks = job, generation, sinks
        self._prompts = {each.index: each for each in prompts}
        self._start = time.perf_counter()
        generation.start_timing()
        self.groups = self.completions = self.tokens = 0
        self.failed: set[int] = set()

    def run(self, groups: Sequence[Group], *, bar: bool) -> bool:
        """Samples the groups; True if Ctrl-C interrupted it, after writing finished completions."""
        from tqdm import tqdm

        for group in groups:
            self._generation.submit(group)
        disable = None if bar else True
        progress = tqdm(total=len(groups), unit="prompt", dynamic_ncols=True, disable=disable)
        with progress:
            try:
                for done in self._generation:
                    self._write(done, complete=True)
                    progress.set_postfix_str(f"{self.rate():.0f} tokens/s", refresh=False)
                    progress.update()
            except KeyboardInterrupt:
                for group in self._generation.stop():
                    ended = tuple(c for c in group.partial.values() if has_ended(c))
                    if ended:
                        complete = len(ended) == len(group.requests)
                        self._write(FinishedGroup(group, ended), complete=complete)
                return True
            finally:
                for sink in self._sinks:
                    sink.flush()
        return False

    @deferred_interrupt()
    def _write(self, done: FinishedGroup, *, complete: bool) -> None:
        rows = []
        for each in done.completions:
            text = text_to_stop(each.tokens.tolist(), self._job.tokenizer, self._job.args.stop)
            sample = each.request // MOST_PROMPTS
            rows.append(to_row(self._prompts[done.id], sample, text, each, self._job.name))
            self.tokens += len(each)
            if each.finish == FAILED:
                self.failed.add(done.id)
        self.completions += len(rows)
        self.groups += complete
        for sink in self._sinks:
            sink.write(rows)

    def rate(self) -> float:
        """Tokens per second, without compilation."""
        seconds = time.perf_counter() - self._start - (self._generation.compiling() or 0.0)
        return self.tokens / max(seconds, 1e-9)

    def summary(self) -> str:
        """Completions, tokens and seconds in one line."""
        compiling = self._generation.compiling()
        seconds = time.perf_counter() - self._start - (compiling or 0.0)
        text = f"{self.tokens:,} tokens in {seconds:.1f} s, {self.rate():.0f} tokens/s"
        if self.completions != 1:
            text = f"{self.completions:,} completions, {text}"
        if compiling is None:
            return f"[{text}, compilation included]"
        return f"[{text}{f', and {compiling:.1f} s to compile' if compiling >= 0.1 else ''}]"


def _done(job: Job, prompts: Sequence[PromptRow], out: OutFile | None) -> set[tuple[int, int]]:
    """The completions (index, sample) that a file holds; failed ones are dropped from it."""
    if out is None:
        return set()
    done = out.done(prompts, job.name)
    if failed := out.drop_failed(prompts, job.name, job.args.n):
        _print_status(f"Sampling failed completions again: {failed:,}.")
    return {(index, sample) for index, sample in done if sample < job.args.n}


def _answer(job: Job, prompts: list[PromptRow], out: OutFile | None) -> int:
    """Completions of prompts that are known before the first one is sampled."""
    args = job.args
    done = _done(job, prompts, out)
    if out is not None:
        total, stored = len(prompts) * args.n, len(done)
        if stored:
            left = f"{total - stored:,} are left" if total > stored else "nothing is left to do"
            _print_status(f"{str(out.path)!r} holds {stored:,} of {total:,} completions; {left}.")
        if len(out) > stored:
            _print_status(
                f"{str(out.path)!r} holds {len(out) - stored:,} of other prompts or options, or "
                "beyond --n; they stay."
            )
    groups = job.groups(prompts, done)
    if not groups:
        return 0
    live = None
    if out is None and not args.json and args.n == len(prompts) == 1 and sys.stdout.isatty():
        live = Live(job.tokenizer, args.stop)
    sink: Any = out if out is not None else live
    if sink is None:
        sink = Printer([group.id for group in groups], as_json=args.json)
    longest = max(len(group.prompt) for group in groups)
    generation = job.generation(longest=longest, prompts=len(groups), on_tokens=live)
    _print_status("Compiling ...", progress=True)
    tally = Tally(job, prompts, generation, [sink])
    stopped = tally.run(groups, bar=out is not None)
    _print_status(tally.summary())
    if tally.failed:
        indices = ", ".join(map(str, sorted(tally.failed)))
        _print_status(f"Failed with non-finite logits of the model: prompt {indices} (from 0).")
    if stopped:
        done = len(prompts) - len(groups) + tally.groups
        hint = "--out FILE would keep them" if out is None else "the same command does the rest"
        _print_status(f"Stopped: {done:,} of {len(prompts):,} prompts are done; {hint}.")
        return 130
    return int(bool(tally.failed))


def _print_status(line: str, *, progress: bool = False) -> None:
    """A line on stderr; a line about progress only where stderr is a terminal."""
    if not progress or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
