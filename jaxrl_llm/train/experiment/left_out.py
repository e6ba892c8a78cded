"""Rows of the data that a run refuses, cuts or leaves out before its first step.

A row whose answer the reward cannot grade, or whose prompt or response is too long, would otherwise
end the run when its turn comes, and again each time that the run is resumed.
"""

import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import (
    collector_parts,
    width_of,
)
from jaxrl_llm.data.prompts import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder, encode_prompts
from jaxrl_llm.models.denoising import is_causal
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.rewards.answers import row_check
from jaxrl_llm.rewards.scoring import RewardError, name_of, one_line
from jaxrl_llm.rollout.collect import DataRows
from jaxrl_llm.rollout.sampler import prompt_room
from jaxrl_llm.train.config import TrainConfig

# When a run says that it is still reading the answers of the data.
_SLOW_SECONDS = 20.0


class LeftOut(NamedTuple):
    """Numbers of rows, to train on and held out, that a run leaves out or cuts.

    Attributes:
      unreadable: Rows left out since the reward cannot grade them.
      too_long: Rows left out since their prompt or a response is too long.
      truncated: Rows whose prompt or response was cut.
      digest: Of their names, which a resumed run compares; empty for none.
    """

    unreadable: int = 0
    too_long: int = 0
    truncated: int = 0
    digest: str = ""

    @classmethod
    def of(
        cls, *, unreadable: Iterable[str], too_long: Iterable[str], truncated: Iterable[str]
    ) -> "LeftOut":
        """The record of rows by their names."""
        names = [sorted(each) for each in (unreadable, too_long, truncated)]
        digest = hashlib.sha256(repr(names).encode()).hexdigest() if any(names) else ""
        counts = [len(each) for each in names]
        return cls(counts[0], counts[1], counts[2], digest)

    def __str__(self) -> str:
        clauses = [
            f"{self.unreadable} rows left out that the reward cannot grade",
            f"{self.too_long} left out that are too long",
            f"{self.truncated} cut that are too long",
        ]
        counts = self[:3]
        return ", ".join(part for part, count in zip(clauses, counts, strict=True) if count)

    def about(self) -> dict[str, str]:
        """The numbers for the records of a run; empty for none."""
        return {"rows left out or cut": str(self)} if any(self[:3]) else {}


def gradable(
    config: TrainConfig, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> tuple[Sequence[Prompt], Sequence[Prompt], list[str]]:
    """Prompts that the reward can grade, and the names of the others.

    A reward says so by ``check_row(metadata)``, which raises RewardError for a row that no
    completion can be graded against. All rows that it will grade are read.

    Raises:
      ValueError: If a row cannot be graded and ``data.unreadable`` is "refuse", or if no row
        remains to train on or to evaluate on.
    """
    check = row_check(config.reward)
    if check is None:
        return prompts, held_out, []
    faults: list[tuple[Prompt, str, str]] = []
    splits, begun = [], time.monotonic()
    for part, graded in ((prompts, not config.has_rewards), (held_out, config.evaluation.enabled)):
        good = []
        for position, prompt in enumerate(part):
            if (reason := _fault(check, prompt) if graded else None) is None:
                good.append(prompt)
            else:
                faults.append((prompt, getattr(part, "source", "the data"), reason))
            if begun is not None and time.monotonic() - begun > _SLOW_SECONDS:
                warnings.warn(
                    f"data: {name_of(config.reward)}.check_row has read {position + 1} of "
                    f"{len(part)} rows in {_SLOW_SECONDS:g} s; the first step waits for all of "
                    "them.",
                    stacklevel=2,
                )
                begun = None
        splits.append(good if len(good) < len(part) else part)
    lost = _lost(config, held_out, splits)
    if faults and (config.data.unreadable == "refuse" or lost):
        prompt, source, reason = faults[0]
        others = f" and {len(faults) - 1} others" if len(faults) > 1 else ""
        remedy = '; set data.unreadable to "drop" to leave such rows out'
        remedy = f", and no row {lost} remains" if lost else remedy
        where = prompt.where if prompt.place else f"{prompt.where} of {source}"
        raise ValueError(
            f"data: the reward {name_of(config.reward)} cannot grade row {where}{others}: "
            f"{reason}{remedy}."
        )
    return *splits, [prompt.name for prompt, _, _ in faults]


def _lost(config: TrainConfig, held_out: Sequence, left: Sequence[Sequence]) -> str:
    """The rows that a run needs and does not have: "to train on", "held out", or none."""
    if not left[0]:
        return "to train on"
    return "held out" if held_out and not left[1] and config.evaluation.enabled else ""


def _fault(check: Callable[[Mapping[str, Any]], None], prompt: Prompt) -> str | None:
    """Why the reward cannot grade a row; None if it can."""
    try:
        check(prompt.metadata)
    except RewardError as error:
        return one_line(str(error))
    except Exception as error:  # of a reward of the user's
        raise RewardError(
            f"The check_row of the reward raised {type(error).__name__} on row {prompt.where}: "
            f"{one_line(str(error))}."
        ) from error
    return None


class Fitted(NamedTuple):
    """Questions that are short enough, and the names of the rows that were not."""

    train: list[Question]
    held_out: list[Question]
    dropped: list[str]
    truncated: list[str]


def fitted(
    config: TrainConfig,
    recipe: Any,
    model: Model,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    *,
    trains: bool = True,
) -> Fitted:
    """The questions with their tokens; those that are too long by the rule ``data.too_long``.

    A prompt is too long if it leaves no room for a response in the context, or exceeds
    ``sampling.prompt_length`` where that has an effect on the data's prompts; a response of the
    data if it exceeds ``sampling.max_new_tokens``. Responses of rows that nothing trains on or
    compares are not read.

    Raises:
      ValueError: By the rule "refuse", for the first one; if none remains to train on or to
        evaluate on; or if a prompt contains a denoiser's mask id.
    """
    rule, most = config.data.too_long, config.sampling.max_new_tokens
    room = prompt_room("sampling", model, most)
    if rule != "refuse" and config.environment is None:
        room = min(room, config.sampling.prompt_length or room)
    chat, system = config.data.chat, config.data.system
    encoder = TextEncoder(tokenizer, room, chat, system)
    splits: list[list[Question]] = []
    dropped, truncated = list[str](), dict[str, None]()
    for part, read in ((prompts, True), (held_out, config.offline)):
        questions = encode_prompts(
            part,
            tokenizer,
            room=room if rule == "refuse" else sys.maxsize,
            chat=chat,
            system=system,
        )
        long = {i for i, each in enumerate(questions) if len(each.tokens) > room}
        if rule == "truncate":
            truncated |= dict.fromkeys(questions[i].prompt.name for i in long)
            questions = [x._replace(tokens=x.tokens[-room:]) for x in questions]
            long = set()
        if read and (trains or rule != "refuse"):
            for i, length in _long_responses(config, recipe, questions, encoder):
                prompt = questions[i].prompt
                if rule == "refuse":
                    raise ValueError(
                        f"data: a response to prompt {prompt.where} has {length} tokens, but "
                        f"sampling.max_new_tokens is {most}."
                    )
                if rule == "truncate":
                    truncated[prompt.name] = None
                else:
                    long.add(i)
        dropped += [questions[i].prompt.name for i in sorted(long)]
        splits.append([each for i, each in enumerate(questions) if i not in long])
    if lost := _lost(config, held_out, splits):
        raise ValueError(
            f"data: all rows {lost} are too long; a prompt may have {room} tokens and a response "
            f"{most}."
        )
    _check_mask_id(model, splits)
    return Fitted(splits[0], splits[1], dropped, list(truncated))


def _check_mask_id(model: Model, splits: Sequence[Sequence[Question]]) -> None:
    mask_id = None if is_causal(model) else model.config.mask_id
    for prompt, tokens in (question for part in splits for question in part):
        if mask_id is not None and mask_id in tokens:
            raise ValueError(
                f"data: prompt {prompt.where} holds the mask id {mask_id}, "
                "which is reserved for masked positions."
            )


def _long_responses(
    config: TrainConfig, recipe: Any, questions: Sequence[Question], encoder: TextEncoder
) -> Iterator[tuple[int, int]]:
    """The place and length of each response that is longer than a run's responses."""
    most = config.sampling.max_new_tokens
    places = {id(question): i for i, question in enumerate(questions)}
    for question, tokens in data_responses(config, recipe, questions):
        if isinstance(tokens, str):
            if encoder.is_short(tokens, most):
                continue
            tokens = encoder.response(tokens, ends=True)
        if len(tokens) > most:
            yield places[id(question)], len(tokens)


def data_responses(
    config: TrainConfig, recipe: Any, questions: Sequence[Question]
) -> Iterator[tuple[Question, Any]]:
    """The responses of the data that a run reads, texts or token ids, each with its question."""
    for part in collector_parts(recipe.collector):
        policy = getattr(part, "policy", part)  # of a collector that helps groups
        reader = getattr(policy, "reader", None)
        if not needs_of(policy).brings_responses or reader is None:
            continue
        width = width_of(part, config.sampling.group_size)
        for row, question in zip(DataRows(questions), questions, strict=True):
            for response in reader(row)[:width]:
                yield question, response.tokens
