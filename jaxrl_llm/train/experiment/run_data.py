"""The prompts of a run: how they are loaded, split and checked, and how long they may be."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jaxrl_llm.core import accepted, traits_of
from jaxrl_llm.curation.collectors.needs import needs_of, reads_all_of_rows
from jaxrl_llm.curation.collectors.protocol import (
    collector_parts,
    parts_with_sizes,
    width_of,
)
from jaxrl_llm.data.prompts import Prompt, row_text, texts_of_rows
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.data.rendering import make_renderer
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.rewards import overlong_rewards
from jaxrl_llm.rollout.collect import DataRows
from jaxrl_llm.rollout.episodes import rewrites_reasoning
from jaxrl_llm.rollout.sampler import prompt_room
from jaxrl_llm.train.config import SamplingConfig, TrainConfig, find_prompts
from jaxrl_llm.train.data.fields import check_fields
from jaxrl_llm.train.models.model_rewards import judge
from jaxrl_llm.train.update.part import Teacher

T = TypeVar("T")
# Default number of tokens by which a collector's text may exceed the longest prompt.
_TEXT_ROOM = 1024
# Default maximum number of tokens in the first observation of an environment.
_OBSERVATION_ROOM = 512


def load_prompts(config: TrainConfig) -> tuple[Sequence, Sequence, str]:
    """The training prompts, the held-out prompts, and a digest of all prompts.

    Raises:
      ValueError: If there are no prompts for training or for an evaluation.
    """
    from jaxrl_llm import data

    prompts, held_out = find_prompts(config.data.prompts), ()
    if config.data.evaluation is not None:
        held_out = find_prompts(config.data.evaluation)
        games: set[str] = set()  # texts of several games, which are different prompts
        if config.environment is not None:
            games = texts_of_rows(prompts) | texts_of_rows(held_out)

        def known_by(prompt: Any) -> str:
            return row_text(prompt) if prompt.content in games else prompt.content

        known = set(map(known_by, prompts))
        if both := sum(known_by(prompt) in known for prompt in held_out):
            warnings.warn(
                f"data: {both} of the {len(held_out)} evaluation prompts are also trained on.",
                stacklevel=2,
            )
    elif config.data.held_out and config.evaluation.enabled:
        prompts, held_out = data.split_distinct(
            prompts,
            held_out=config.data.held_out,
            seed=config.data.seed,
            keep_repeats=config.reads_columns,
            by_row=config.environment is not None,
        )
    if len(prompts) == 0:
        raise ValueError("data: there are no prompts to train on.")
    by_row = config.reads_columns or config.environment is not None
    texts = [[row_text(x) if by_row else x.content for x in part] for part in (prompts, held_out)]
    digest = hashlib.sha256(json.dumps([*texts, config.data.seed]).encode()).hexdigest()
    # The reference's scores are stored for all held-out prompts, whatever the limit of a run.
    if config.reference_logp is None:
        held_out = within_limit(config, held_out, held_out)
    if config.evaluation.enabled and not held_out:
        raise ValueError(
            "evaluation: there are no held-out questions; set data.held_out or data.evaluation, or "
            "turn the evaluation off."
        )
    return prompts, held_out, digest


def within_limit(config: TrainConfig, rows: Sequence[T], prompts: Sequence[Prompt]) -> Sequence[T]:
    """The held-out rows of the first ``evaluation.limit`` questions; ``prompts`` are theirs."""
    limit = config.evaluation.limit
    if limit is None:
        return rows
    if config.environment is not None or not config.reads_columns:
        return rows[:limit]
    # Several rows of one prompt are one question.
    first = set(list(dict.fromkeys(prompt.content for prompt in prompts))[:limit])
    return [row for row, prompt in zip(rows, prompts, strict=True) if prompt.content in first]


def check_data(
    config: TrainConfig,
    recipe: Any,
    prompts: Sequence,
    held_out: Sequence = (),
    *,
    trains: bool = True,
) -> None:
    """Raises ValueError if prompts lack data that a recipe or its collector reads.

    Held-out prompts need the responses that an evaluation compares. What decides training alone is
    checked only for a run that ``trains``, so a policy of before can still be evaluated.
    """
    other_text = needs_of(recipe.collector).sends_text
    other_text = other_text or recipe.needs.computed_from("responses")
    several = next((prompt for prompt in prompts if prompt.messages is not None), None)
    if several is not None and (other_text or config.environment is not None):
        raise ValueError(
            f"data: prompt {several.name!r} is a conversation, but recipe "
            f"{recipe.name!r} or the environment reads only the text of a prompt."
        )
    if trains:
        _check_graded_together(config, recipe)
        _check_text_column(config, recipe, itertools.chain(prompts, held_out))
    _warn_of_evaluation_text(config, recipe)
    rows = [Question(prompt, []) for prompt in prompts]
    if recipe.needs.reads_extras:
        check_fields(recipe, rows, environment=config.environment is not None)
    if trains:
        _check_tasks(recipe, prompts)
    compares = needs_of(recipe.collector).offline
    sizes = config.prompts_per_step, config.sampling.group_size
    for part, groups, group_size in parts_with_sizes(recipe.collector, *sizes):
        if not groups:
            raise ValueError(
                f"config: the share of {part!r} is no group of a batch of prompts_per_step "
                f"{config.prompts_per_step}, so it would never train; enlarge one of the two."
            )
        if hasattr(part, "check_data"):
            with _named(recipe):
                part.check_data(DataRows(rows))
        if trains and hasattr(part, "check_sizes"):
            with _named(recipe):
                part.check_sizes(DataRows(rows), group_size=group_size, num_groups=groups)
        if compares and reads_all_of_rows(part):
            others = [Question(prompt, []) for prompt in held_out]
            with _named(recipe):
                part.check_rows(DataRows(others))
            if recipe.needs.head == "step":  # whose evaluation reads the labels
                check_fields(recipe, others)


def _check_tasks(recipe: Any, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError if no prompt is of a task of the recipe, which would never train."""
    for function in recipe.needs.computed_from("responses").values():
        tasks = getattr(function, "tasks", ())
        there = {function.task_of(prompt.metadata) for prompt in prompts} if tasks else set()
        if absent := [task for place, task in enumerate(tasks) if place not in there]:
            raise ValueError(
                f"data: recipe {recipe.name!r} has the task {absent[0]!r}, but no prompt to train "
                "on is of it; leave the task out, or add prompts."
            )


@contextlib.contextmanager
def _named(recipe: Any) -> Iterator[None]:
    """Names the recipe in what its collector says about the data."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"recipe {recipe.name!r}: {error}") from error


def check_classes(recipe: Any, encoder: TextEncoder) -> None:
    """Raises ValueError if a statistic trains a token that ends a response as one of its classes.

    It is read where a response ends, so training it would move where the policy stops.
    """
    for function in recipe.needs.computed_from("policy").values():
        if (option := traits_of(function).class_ids) is None:
            continue
        bound = dict(getattr(function, "options", ()))
        default = getattr(accepted(function).get(option), "default", ())
        classes = bound.get(option, default)
        if ends := [each for each in classes if each in encoder.stop_ids]:
            raise ValueError(
                f"config: {option}={classes} of recipe {recipe.name!r} holds {ends}, at which a "
                "response ends, so training these classes would move where the policy stops; "
                "choose tokens that are rare in responses."
            )


def why_no_rewrites(config: TrainConfig, recipe: Any, model: Model, teacher: Any = None) -> str:
    """Why a run cannot train on episodes whose earlier turns are rewritten; empty where it can."""
    needs = recipe.needs
    if not model.reads_trees:
        return "the model, whose reads_trees is False as with linear attention, cannot read that"
    if isinstance(teacher, Teacher) and not teacher.model.reads_trees:
        return "the teacher, whose reads_trees is False as with linear attention, cannot read that"
    if teacher is not None and not isinstance(teacher, Teacher):
        return "the teacher reads a response as one text; use a model as the teacher"
    if "answer_logp" in needs.fields or needs.computed_from("last_visit"):
        return f"recipe {recipe.name!r} cannot read that"
    if config.tokens_per_microbatch is not None:
        return "tokens_per_microbatch cannot be used with that; use microbatches"
    return ""


def _warn_of_evaluation_text(config: TrainConfig, recipe: Any) -> None:
    """Warns if an evaluation lacks the messages of a part of the collector."""
    collector = recipe.collector
    if not (config.evaluation.enabled and config.samples_held_out):
        return
    for part in collector_parts(collector):
        lost = hasattr(part, "evaluation_text") and not hasattr(collector, "evaluation_text")
        # With responses of the data alone, the evaluation has the prompts of the collector.
        examples = reads_all_of_rows(part) and needs_of(part).sends_text
        if lost or examples and not config.offline:
            warnings.warn(
                f"evaluation: its prompts lack what {part!r} puts into those of training, since "
                f"{collector!r} does not pass that on.",
                stacklevel=3,
            )


def _check_graded_together(config: TrainConfig, recipe: Any) -> None:
    """Raises ValueError if a judge that compares would get the responses of a group in parts."""
    compares = isinstance(config.reward, judge) and config.reward.compare
    if compares and needs_of(recipe.collector).grades_apart:
        raise ValueError(
            "config: a judge that compares needs several responses to a prompt, but "
            f"{recipe.collector!r} has responses of a group graded apart from the others."
        )


def _check_text_column(config: TrainConfig, recipe: Any, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError, or warns, if a column is hidden by the prompt, which rows name text."""
    reads = any(map(_names_text, collector_parts(recipe.collector)))
    if not reads and config.environment is None:
        return
    for prompt in prompts:
        text = prompt.metadata.get("text")
        if text is None or isinstance(text, str) and text == prompt.text:
            continue
        what = f"data: prompt {prompt.name!r} has a column 'text', which"
        if reads:
            raise ValueError(f"{what} collectors read as the prompt itself; rename the column.")
        warnings.warn(f"{what} the environment gets as the prompt itself.", stacklevel=3)
        return


def _names_text(option: Any) -> bool:
    """Whether an option, or one inside of it, is the name of the column text."""
    if dataclasses.is_dataclass(option):
        return any(_names_text(getattr(option, each.name)) for each in dataclasses.fields(option))
    if isinstance(option, tuple):
        return any(map(_names_text, option))
    return isinstance(option, str) and option == "text"


def warn_of_rewrites(
    config: TrainConfig, recipe: Any, model: Model, tokenizer, teacher: Any = None
) -> None:
    """Warns if the chat template drops reasoning from earlier turns, and the run would end then.

    It is no error: the policy may never reason. What an environment rewrites is not known here.
    """
    if config.environment is None or config.episodes.max_turns == 1:
        return
    if not (why := why_no_rewrites(config, recipe, model, teacher)):
        return
    renderer = make_renderer(tokenizer, chat=config.data.chat, system=config.data.system)
    if rewrites_reasoning(renderer, tokenizer, tuple(config.environment.tools)):
        warnings.warn(
            f"config: the chat template drops the reasoning of earlier turns, but {why}. The run "
            "ends at the first turn that is rewritten in this way.",
            stacklevel=2,
        )


def warn_of_warmup(config: TrainConfig, recipe: Any) -> None:
    """Warns if a run ends before its policy trains, or a collector or its help has an effect."""
    if (waits := recipe.needs.waits) >= config.steps:
        warnings.warn(
            f"config: the critic of {recipe.name!r} trains alone in the first {waits} "
            f"steps, and the run has {config.steps}, so the policy does not train; set a smaller "
            "warmup of the critic (critic_warmup of a preset), or more steps.",
            stacklevel=2,
        )
    for part in collector_parts(recipe.collector):
        policy = getattr(part, "policy", None)
        for each, does, how in (
            (part, "has no effect", "let it begin earlier"),
            (policy, "gives no help", "set a smaller warmup"),
        ):
            if (first := getattr(each, "first_help", 0)) >= config.steps:
                warnings.warn(
                    f"config: {each!r} {does} in the first {first} steps, and the run has "
                    f"{config.steps}; {how}.",
                    stacklevel=2,
                )


def warn_of_one_update(config: TrainConfig, recipe: Any) -> None:
    """Warns if a batch has one update, in which a part of the recipe has no effect."""
    if not recipe.needs.needs_updates:
        return
    if config.passes.updates > 1 or recipe.needs.divides_batch:
        return
    if config.samples_off_policy and not recipe.needs.reads_behavior:
        return  # the ratio is to the policy that sampled, which differs
    warnings.warn(
        f"config: {recipe.name!r} makes one update on a batch, where its own term, or its distance "
        "from the policy of the batch, is 0; choose prompts_per_step that divides into minibatches "
        "of at least two groups, or set minibatches or epochs.",
        stacklevel=2,
    )


def warn_of_length(config: TrainConfig, recipe: Any) -> None:
    """Warns if a penalty of long responses begins beyond the longest one of a run."""
    most = config.sampling.max_new_tokens
    for function in recipe.needs.reward_functions:
        if getattr(function, "function", None) is not overlong_rewards:
            continue
        options = dict(getattr(function, "options", ()))
        if most <= (free := options["max_length"] - options["buffer"]):
            warnings.warn(
                f"config: {recipe.name!r} penalizes responses of more than {free:g} tokens, and "
                f"sampling.max_new_tokens is {most}, so the penalty has no effect; let it end at "
                f"{most} tokens (length of a preset), or sample longer responses.",
                stacklevel=2,
            )


def warn_of_group_size(config: TrainConfig, recipe: Any) -> None:
    """Warns if the data have the groups, and no evaluation samples as many responses.

    It is no error: configurations that differ in their recipes alone share a group size.
    """
    size, evaluation = config.sampling.group_size, config.evaluation
    reads = config.samples_held_out and evaluation.enabled and evaluation.samples is None
    if not config.offline or reads or size == SamplingConfig.group_size:
        return
    warnings.warn(
        f"sampling: group_size {size} has no effect: the groups of {recipe.name!r} are "
        f"{width_of(recipe.collector, size)} responses of the data, and no evaluation samples any.",
        stacklevel=2,
    )


def text_room(config: TrainConfig, recipe: Any, model: Model, longest: int) -> int:
    """Maximum tokens of a prompt in a run; the prompts of the data have at most ``longest``.

    Raises:
      ValueError: If ``sampling.prompt_length`` has no effect, exceeds the context, or is too small
        for the prompts of the data.
    """
    wanted = config.sampling.prompt_length
    if config.environment is not None:
        return _prompt_length(config, model, _OBSERVATION_ROOM)
    sends = needs_of(recipe.collector).sends_text
    teaches = recipe.needs.has_teacher and not recipe.needs.learns_from_model
    if wanted is not None and not sends and not teaches:
        raise ValueError(
            f"sampling: prompt_length has no effect with recipe {recipe.name!r}, whose collector "
            "sends no text and which has no teacher."
        )
    if wanted is not None and wanted < longest:
        raise ValueError(
            f"sampling: prompt_length is {wanted}, but the longest prompt of the data has "
            f"{longest} tokens."
        )
    if sends:
        return max(longest, _prompt_length(config, model, longest + _TEXT_ROOM))
    if wanted is not None:
        # The room of the teacher's prompt is needed later; refuse a wrong one before sampling.
        _prompt_length(config, model, longest)
    return longest


def teacher_room(config: TrainConfig, model: Model, longest: int) -> int:
    """Maximum tokens of a teacher's prompt, which also contains a response and a text.

    ``longest`` is the number of tokens of the longest prompt.
    """
    sampling = config.sampling
    room = prompt_room("the teacher", model, sampling.max_new_tokens)
    wanted = sampling.prompt_length or longest + sampling.max_new_tokens + _TEXT_ROOM
    return min(room, wanted)


def _prompt_length(config: TrainConfig, model: Model, default: int) -> int:
    """``sampling.prompt_length``; for None ``default``, up to the limit of the context."""
    wanted = config.sampling.prompt_length
    room = prompt_room("sampling", model, config.sampling.max_new_tokens)
    if wanted is None:
        return min(room, default)
    if wanted > room:
        raise ValueError(
            f"sampling: prompt_length is {wanted}, but a context of {model.config.max_length} "
            f"leaves {room} tokens before a response of {config.sampling.max_new_tokens}."
        )
    return wanted
