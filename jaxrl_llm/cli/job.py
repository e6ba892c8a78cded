"""What ``jaxrl-llm sample`` does with prompts: an engine of the right size, and a tally."""

import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax

from jaxrl_llm.cli import UsageError
from jaxrl_llm.cli.completions import text_of, to_row
from jaxrl_llm.cli.prompts import Asked
from jaxrl_llm.core.runtime.interrupt import deferred_interrupt
from jaxrl_llm.data.questions import encode_prompts
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.rollout import FinishedGroup, Generation, Group, make_engine
from jaxrl_llm.rollout.engine.requests import has_ended
from jaxrl_llm.rollout.sampler import BUCKETS
from jaxrl_llm.rollout.types import FAILED

# The request of a completion, which names its random numbers, is sample * MOST_PROMPTS + index: it
# does not depend on n, so that a larger n only adds to what is there.
MOST_PROMPTS, MOST_SAMPLES = 2**20, 2**11


class Timed(Generation):
    """A generation that knows how long it compiled."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.steps: list[tuple[float, bool]] = []

    def step(self) -> None:
        """One round, timed."""
        known, start = self.engine.compiled(), time.perf_counter()
        super().step()
        self.steps.append((time.perf_counter() - start, self.engine.compiled() > known))

    def compiling(self) -> float | None:
        """Seconds by which rounds that compiled took longer than a usual one, if there was one."""
        usual = [seconds for seconds, compiled in self.steps if not compiled]
        if not usual:
            return None if self.steps else 0.0
        typical = statistics.median(usual)
        return sum(max(s - typical, 0.0) for s, compiled in self.steps if compiled)


class Job:
    """A model, and how completions of prompts are asked of it.

    Args:
      model: The model.
      params: Its parameters.
      tokenizer: Its ``data.Tokenizer``.
      chat: Options of ``encode_prompts``.
      name: Names all that a completion depends on, apart from its prompt.
      n: Completions of each prompt.
      slots: Completions at one time, at most.
      max_new_tokens: Longest completion.
      sampling: Options of the draw.
      stops: Stop strings.
      seed: Of the sampling.
    """

    def __init__(
        self,
        model: Model,
        params,
        tokenizer,
        *,
        chat: dict[str, Any],
        name: str,
        n: int,
        slots: int,
        max_new_tokens: int,
        sampling: dict[str, Any],
        stops: Sequence[str],
        seed: int,
    ):
        self.model, self.params, self.tokenizer, self.name = model, params, tokenizer, name
        self._chat, self._n, self._slots, self._seed = chat, n, slots, seed
        self._max_new_tokens, self._sampling, self.stops = max_new_tokens, sampling, tuple(stops)
        self._room = model.config.max_length - max_new_tokens
        if self._room < 1:
            raise UsageError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the model's "
                f"context of {model.config.max_length}."
            )

    def groups(self, asked: Sequence[Asked], done: set[tuple[int, int]]) -> list[Group]:
        """Prompts as groups, without the completions (index, sample) that are done.

        Raises:
          UsageError: If a prompt is too long, or there are too many.
        """
        if asked[-1].index >= MOST_PROMPTS:
            raise UsageError(f"There are more than {MOST_PROMPTS:,} prompts; give fewer at a time.")
        prompts = [SimpleNamespace(text=each.text, id="") for each in asked]
        try:
            found = encode_prompts(prompts, self.tokenizer, room=self._room, **self._chat)
        except ValueError as error:
            raise UsageError(str(error)) from error
        groups = []
        for each, question in zip(asked, found, strict=True):
            samples = [k for k in range(self._n) if (each.index, k) not in done]
            requests = tuple(k * MOST_PROMPTS + each.index for k in samples)
            groups += [Group(each.index, question.tokens, requests)] if requests else []
        return groups

    def generation(
        self, *, longest: int, prompts: int, on_tokens: Callable[..., Any] | None = None
    ) -> Timed:
        """An engine for this many prompts up to this length, ready to take them.

        Raises:
          UsageError: If an option of the draw does not fit, or the device is too small.
        """
        length = min(next((b for b in BUCKETS if b >= longest), longest), self._room)
        # Siblings share a row up to eight; more of them only where there are few prompts.
        width = min(self._n, self._slots, max(8, -(-self._slots // prompts)))
        rows = max(1, min(self._slots // width, prompts * -(-self._n // width)))
        try:
            engine = make_engine(
                self.model,
                rows=rows,
                width=width,
                prompt_length=length,
                max_new_tokens=self._max_new_tokens,
                stop_ids=self.tokenizer.eos_ids,
                pad_id=self.tokenizer.pad_id,
                chunk=16 if on_tokens is None else 1,
                **self._sampling,
            )
        except ValueError as error:
            raise UsageError(str(error).removeprefix("make_engine: ")) from error
        decode = {"stop_strings": self.stops, "decode_text": self.tokenizer.decode}
        key = jax.random.key(self._seed)
        try:
            return Timed(
                engine, self.params, key=key, on_tokens=on_tokens, **(decode if self.stops else {})
            )
        except MemoryError as error:
            raise UsageError(f"{error} Give fewer --slots or --max-new-tokens.") from error


class Tally:
    """Takes the completions of a generation as they finish, hands them on, and counts.

    Args:
      job: What was asked.
      asked: The prompts.
      generation: What answers.
      sinks: Each takes rows with ``write`` and ends with ``flush``.
    """

    def __init__(self, job: Job, asked: Sequence[Asked], generation: Timed, sinks: Sequence[Any]):
        self._job, self._generation, self._sinks = job, generation, sinks
        self._asked = {each.index: each for each in asked}
        self._start = time.perf_counter()
        generation.steps.clear()
        self.groups = self.completions = self.tokens = 0
        self.failed: set[int] = set()

    def run(self, groups: Sequence[Group], *, bar: bool) -> bool:
        """All of the groups; True if Ctrl-C came first, with what has ended by then."""
        from tqdm import tqdm

        self._generation.submit(*groups)
        options = {"total": len(groups), "unit": "prompt", "dynamic_ncols": True}
        with tqdm(**options, disable=None if bar else True) as progress:
            try:
                for done in self._generation:
                    self._take(done, complete=True)
                    progress.set_postfix_str(f"{self.rate():.0f} tokens/s", refresh=False)
                    progress.update()
            except KeyboardInterrupt:
                for group in self._generation.stop():
                    ended = tuple(c for c in group.partial.values() if has_ended(c))
                    if ended:
                        whole = len(ended) == len(group.requests)
                        self._take(FinishedGroup(group, ended), complete=whole)
                return True
            finally:
                for sink in self._sinks:
                    sink.flush()
        return False

    @deferred_interrupt()
    def _take(self, done: FinishedGroup, *, complete: bool) -> None:
        rows = []
        for each in done.completions:
            text = text_of(each.tokens.tolist(), self._job.tokenizer, self._job.stops)
            sample = each.request // MOST_PROMPTS
            rows.append(to_row(self._asked[done.id], sample, text, each, self._job.name))
            self.tokens += len(each)
            if each.finish == FAILED:
                self.failed.add(done.id)
        self.completions += len(rows)
        self.groups += complete
        for sink in self._sinks:
            sink.write(rows)

    def rate(self) -> float:
        """Tokens a second, compilation apart."""
        seconds = time.perf_counter() - self._start - (self._generation.compiling() or 0.0)
        return self.tokens / max(seconds, 1e-9)

    def summary(self) -> str:
        """One line: how much in how long."""
        compiling = self._generation.compiling()
        seconds = time.perf_counter() - self._start - (compiling or 0.0)
        text = f"{self.tokens:,} tokens in {seconds:.1f} s, {self.rate():.0f} tokens/s"
        if self.completions != 1:
            text = f"{self.completions:,} completions, {text}"
        if compiling is None:
            return f"[{text}, compilation included]"
        return f"[{text}{f', and {compiling:.1f} s to compile' if compiling >= 0.1 else ''}]"
