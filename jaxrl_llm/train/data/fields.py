"""The fields of a batch that the loop attaches on the host; the train step computes the rest.

Shared arguments: ``recipe``, the method; ``questions``, P of them. Every function raises ValueError
if the recipe cannot be trained with the data of the run.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxrl_llm.core import call_with
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    GRADED_BY_RUN,
    HINTED,
    TEXT,
    UNFINISHED,
)
from jaxrl_llm.data.questions import Question
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.recipes.wiring import ANSWER_TEXTS, TEACHER_TEXTS
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rewards.turns import turns_of_tokens
from jaxrl_llm.rollout.collect import Segments
from jaxrl_llm.rollout.episodes import EPISODES
from jaxrl_llm.train.data.episode_fields import episode_fields
from jaxrl_llm.train.data.reward_values import check_rewards

T = TypeVar("T")

_DTYPES = {"float": np.float32, "int": np.int32, "bool": np.bool_}
# Components of a reward that add up to 1 on paper may sum to the next larger float32.
# Fields that the loop knows without the reward or the data.
_KNOWN = (
    "prompt_ids",
    "truncated",
    "unfinished",
    "greedy_rewards",
    "versions",
    "current_version",
    "roles",
    "imitated",
    "texts",
    "hint_mask",
    "node_ids",
)
# Fields from the steps of a response that the reward grades one by one.
_TURNS = ("turn_rewards", "turn_where", "turn_ids", "test_passes", "test_where")
# Fields from a collector that values prefixes.
_PREFIXES = ("prefix_values", "segment_where", "segment_ids")
# Fields from a teacher with another tokenizer.
_SPANS = ("teacher_span_logp", "span_ids")
# Fields that only a reward can give. One that serves several recipes returns them to all of them.
_GRADED = ("answer_ids", "flawed", "satisfied")
# Fields from the messages that a recipe computes for its teacher.
_TAUGHT = ("teacher_prompt_tokens", "teacher_prompt_mask", "has_teacher")
# Fields from the texts of an environment's turns.
_PARTS = ("switches", "subgoal_ids", "token_roles")
# Fields from the reference answers.
_ANSWERED = ("ground_truth", "ground_truth_mask")
# Minimum length. Lengths that vary by batch are rounded up, so that few shapes are compiled.
_SHORTEST_ROW = 16


class Texts(NamedTuple):
    """The responses of a batch as text, and conversions between text and tokens.

    Attributes:
      responses: P lists of G.
      messages: The user message of each response, P lists of G; None for the question's message.
      encode: Returns the tokens of a prompt with a user message.
      decode: Returns the text of token ids.
      room: Maximum number of tokens of a prompt.
      write: Returns the tokens of a text within a response.
      context: Maximum number of tokens of a prompt and a reference answer together.
    """

    responses: Sequence[Sequence[str]]
    messages: Sequence[Sequence[str | None]]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    room: int
    write: Callable[[str], Sequence[int]]
    context: int


def host_fields(recipe: Recipe) -> frozenset[str]:
    """The extras that a batch must have before the train step computes the rest."""
    names = recipe.required_fields
    if recipe.has_teacher and not recipe.learns_from_model:
        names |= {"teacher_prompt_tokens", "teacher_prompt_mask"}
    if ANSWER_TEXTS in recipe.computed_from("responses"):
        names |= {*_ANSWERED, "turn_ids", "turn_where"}
    known = {*EXTRAS, *recipe.inputs, *recipe.computed_from("responses")}
    return (names - recipe.step_fields) & known


def _axes(name: str) -> str | None:
    """Axes of an extra; None for a name that only the recipe knows."""
    return EXTRAS[name].axes if name in EXTRAS else None


def needs_environment(recipe: Recipe) -> bool:
    """Whether a recipe reads turn data of an environment, or branches after turns.

    Example:
      >>> import jaxrl_llm as jr
      >>> needs_environment(jr.recipes.trloo())
      False
    """
    names = host_fields(recipe) - {*_TURNS, *_PREFIXES}
    asks = needs_of(recipe.collector).environment
    asks = asks or any(part.reads_turns for part in recipe.parts)
    return asks or any(_axes(name) == "PGK" for name in names)


def check_fields(
    recipe: Recipe, questions: Sequence[Question], *, environment: bool = False
) -> None:
    """Raises ValueError if a recipe needs arrays that no training run on these questions provides.

    Reward components and an environment's turn data are known only after the first call, so they
    are checked with the first batch.
    """
    needs = needs_of(recipe.collector)
    if not environment and needs.environment:
        raise ValueError(
            f"the collector of recipe {recipe.name!r} branches after the turns of an environment; "
            f"set config.environment, or replace the collector {recipe.collector!r}."
        )
    for part in recipe.parts:
        part.check_collector(recipe, needs)
    if needs.brings_texts and not any(part.trains_on_texts for part in recipe.parts):
        raise ValueError(
            f"recipe {recipe.name!r} has text_coef 0, so it would train on the texts of "
            f"{recipe.collector!r} as on responses; set text_coef above 0, or leave them out."
        )
    computed = recipe.computed_from("responses")
    for function in computed.values():
        if (check := getattr(function, "check", None)) is not None:
            for question in questions:
                check(question.prompt.metadata)
    made = set(computed)
    made |= {*_KNOWN, *_SPANS, *(_TAUGHT if TEACHER_TEXTS in made else ())}
    made |= set() if recipe.likelihood is None else {*recipe.likelihood.fields}
    made |= {*(_ANSWERED if ANSWER_TEXTS in made else ())} | {*(_PARTS if environment else ())}
    if needs_of(recipe.collector).values_prefixes:
        made |= {*_PREFIXES}
    if recipe.collector is not None or isinstance(recipe.sampled_by, tuple):
        made.add("steered")
    ungraded = not environment and needs_of(recipe.collector).lacks_components
    if not ungraded:
        made |= {*_TURNS}
    for name in sorted(host_fields(recipe) - made):
        axes = _axes(name)
        if environment and axes == "PGK":
            continue
        if name in _TURNS or (axes in (None, "PG") and name not in _TAUGHT):
            # A name of the recipe's own may also come from the data.
            in_data = axes is None and all(name in x.prompt.metadata for x in questions)
            if ungraded and not in_data:
                raise ValueError(
                    f"recipe {recipe.name!r} needs {name!r} from the run's reward, which does not "
                    f"grade all responses of {recipe.collector!r}. {GRADED_BY_RUN}"
                )
            continue
        if axes == "PGK" and name not in _PREFIXES:
            raise ValueError(
                f"recipe {recipe.name!r} needs {name!r} ({EXTRAS[name].about}) from an "
                "environment; set config.environment."
            )
        if axes != "P":
            raise ValueError(
                f"recipe {recipe.name!r} needs {name!r} ({EXTRAS[name].about}), which no training "
                "run provides; call train.make_step with batches that have it in extras."
            )
        _from_metadata(recipe, name, questions)


def attach_fields(
    batch: Batch,
    recipe: Recipe,
    *,
    scores: Scores,
    rollout,
    step: int,
    indices: Sequence[int],
    questions: Sequence[Question],
    texts: Texts,
    greedy: Callable[[], np.ndarray],
    roles: np.ndarray | None = None,
    nodes: np.ndarray | None = None,
    segments: Segments | None = None,
    draws: Mapping[str, np.ndarray] | None = None,
    sums: bool = False,
) -> Batch:
    """The batch with the extras and reward components that the recipe needs.

    A field with one number per rollout comes from the reward component of that name, and one with
    a number per prompt from the prompts' metadata. A name that only the recipe defines may come
    from either, or from what an environment returns for each turn. Turns and unit tests come from
    lists that the reward returns. Entries that the recipe computes from "responses" come from the
    texts of the responses.

    Args:
      batch: P groups of G.
      recipe, questions: See the module.
      scores: Rewards, with their components ``[P * G]``.
      rollout: The sampled rollouts.
      step: Number of updates before the batch is trained on, which is the version of the weights.
      indices: Indices of the prompts in the data set.
      texts: The responses as text.
      greedy: Returns the rewards ``[P]`` of the prompts' greedy responses; called only if needed.
      roles: int ``[P, G]``, the role of each rollout; None if all have the role ``OWN``.
      nodes: int ``[P, G, T']``, T' at least T, the rollout that sampled each token; None if no
        tokens are shared.
      segments: Segments of the responses, if the collector values prefixes.
      draws: Mask samples of the recipe's likelihood; see :func:`draw_masks`.
      sums: Whether the reward is a sum of its other components, so that it is none itself.

    Raises:
      ValueError: Also if a component that is used as a field would be added to the trained reward.
    """
    check_rewards(recipe, np.asarray(batch.rewards), questions)
    shape, names = batch.rewards.shape, host_fields(recipe)
    # The rollout that drew each token, if ``nodes`` is None.
    drawn = np.broadcast_to(np.arange(math.prod(shape)).reshape((*shape, 1)), batch.mask.shape)
    known = {
        "prompt_ids": lambda: np.asarray(indices),
        "truncated": lambda: np.asarray(rollout.finish) == 0,
        "unfinished": lambda: np.asarray(rollout.finish) == UNFINISHED,
        "versions": lambda: rollout.version,
        "current_version": lambda: np.full(shape[0], step),
        "greedy_rewards": greedy,
        "hint_mask": lambda: np.asarray(rollout.mask) & (np.asarray(rollout.version) < 0),
        "imitated": lambda: np.isin(np.zeros(shape) if roles is None else roles, DEMONSTRATION),
        "roles": lambda: np.zeros(shape, np.int32) if roles is None else roles,
        "texts": lambda: np.isin(np.zeros(shape) if roles is None else roles, TEXT),
        "node_ids": lambda: drawn if nodes is None else nodes[..., : batch.mask.shape[-1]],
        "latents": lambda: rollout.latents,
        "written": lambda: np.asarray(batch.mask),
    }
    if roles is not None and (recipe.collector is not None or isinstance(recipe.sampled_by, tuple)):
        known["steered"] = lambda: np.isin(roles, (HINTED, DEMONSTRATION))
    if segments is not None:
        known["prefix_values"] = lambda: segments.values
        known["segment_where"] = lambda: segments.where
        known["segment_ids"] = lambda: segments.ids[..., : batch.mask.shape[-1]]
    made = _from_texts(batch, recipe, scores, questions, texts) | dict(draws or {})
    if EPISODES in scores.details:
        of_turns = names - made.keys() - _own_elsewhere(names, scores, questions)
        made |= episode_fields(batch, of_turns, scores, decode=texts.decode)
    elif turns := names & set(_TURNS):
        made |= _from_turns(batch, recipe, turns, scores, questions, texts)
    made |= {name: known[name]() for name in names & known.keys()}
    if "reward_components" in recipe.required_fields:
        left_out = {*_GRADED, *(name for name in names - made.keys() if _may_be_component(name))}
        left_out |= {"reward"} if sums else set()
        batch = batch.replace(reward_components=_components(recipe, scores, left_out, shape))
    extras = {}
    for name in sorted(names - set(_SPANS)):
        value = made[name] if name in made else _from_scores(recipe, name, scores, questions)
        extras[name] = _checked(recipe, name, np.asarray(value), questions)
    return batch.with_extras(extras).check() if extras else batch


def _may_be_component(name: str) -> bool:
    """Whether the reward may give a field: one number a rollout, or a name of the recipe's own."""
    return _axes(name) in (None, "PG")


def _own_elsewhere(
    names: Collection[str], scores: Scores, questions: Sequence[Question]
) -> set[str]:
    """The names that only the recipe defines and that the reward or a prompt of the batch has."""
    available = set(scores.reward_components).union(*(x.prompt.metadata for x in questions))
    return {name for name in names if name not in EXTRAS} & available


def _from_scores(
    recipe: Recipe, name: str, scores: Scores, questions: Sequence[Question]
) -> np.ndarray:
    """A field from the reward component of its name, or from the prompts' metadata."""
    spec, components = EXTRAS.get(name), scores.reward_components
    if name in components and _may_be_component(name):
        if "reward" not in components:
            raise ValueError(
                f"recipe {recipe.name!r} reads {name!r} from the mapping that the reward returns, "
                "and the reward would be the sum of all entries; add an entry 'reward' to the "
                "mapping."
            )
        value = components[name]
        if name == "answer_ids":  # a failed call has no answer, whatever its reward is
            value = np.where(scores.unanswered, -1, value)
        return value.reshape(len(questions), -1)
    if spec is None or spec.axes == "P":
        return _from_metadata(recipe, name, questions)
    raise ValueError(
        f"recipe {recipe.name!r} needs {name!r} ({spec.about}), which is missing from the mapping "
        "that the reward returns."
    )


def _checked(
    recipe: Recipe, name: str, value: np.ndarray, questions: Sequence[Question]
) -> np.ndarray:
    """A field in its dtype; raises ValueError for NaN and for a number that would be rounded."""
    if value.dtype.kind == "f" and (absent := np.isnan(value)).any():
        prompt = questions[int(np.argmax(absent.reshape(len(questions), -1).any(1)))].prompt
        raise ValueError(
            f"recipe {recipe.name!r} needs a number in {name!r} for every response; the reward "
            f"gave NaN for prompt {prompt.name!r}."
        )
    if (spec := EXTRAS.get(name)) is None:
        return value
    field = value.astype(_DTYPES[spec.kind])
    if spec.kind != "float" and (wrong := value[field != value]).size:
        what = "0 and 1" if spec.kind == "bool" else "integers"
        raise ValueError(
            f"recipe {recipe.name!r} needs {what} in {name!r} ({spec.about}); got {wrong[0]:g}."
        )
    return field


def _from_texts(
    batch: Batch,
    recipe: Recipe,
    scores: Scores,
    questions: Sequence[Question],
    texts: Texts,
) -> dict[str, np.ndarray]:
    """Fields computed from the responses, with the teacher's prompts and the reference answers."""
    shape = batch.rewards.shape
    details = {name: _groups(entries, shape) for name, entries in scores.details.items()}
    context = details | {
        "rewards": np.asarray(batch.rewards),
        "where": np.asarray(batch.where),
        "prompts": [question.prompt.text for question in questions],
        "metadata": [question.prompt.metadata for question in questions],
        "messages": texts.messages,
    }
    made = {
        name: call_with(function, texts.responses, context=context)
        for name, function in recipe.computed_from("responses").items()
    }
    if ANSWER_TEXTS in made:
        read = np.asarray(batch.prompt_mask).sum(-1)
        made |= _answers(recipe, made.pop(ANSWER_TEXTS), questions, read, texts)
    if TEACHER_TEXTS not in made:
        return made
    messages = [message for row in made.pop(TEACHER_TEXTS) for message in row]
    if len(messages) != math.prod(shape):
        raise ValueError(
            f"recipe {recipe.name!r}: {TEACHER_TEXTS} has {len(messages)} messages, but the batch "
            f"has {shape[0]} x {shape[1]} responses."
        )
    P, G = shape
    prompts = [list(questions[i // G].tokens) for i in range(len(messages))]
    has_teacher = np.zeros(len(messages), bool)
    for i, message in enumerate(messages):
        # A prompt above the maximum length teaches nothing.
        if message is not None and len(tokens := list(texts.encode(message))) <= texts.room:
            prompts[i], has_teacher[i] = tokens, True
    width = max(_SHORTEST_ROW, power_of_two(max(map(len, prompts))))
    lengths = np.array([len(tokens) for tokens in prompts])[:, None]
    padded = np.array([tokens + [0] * (width - len(tokens)) for tokens in prompts], np.int32)
    return made | {
        "teacher_prompt_tokens": padded.reshape(P, G, width),
        "teacher_prompt_mask": (np.arange(width) < lengths).reshape(P, G, width),
        "has_teacher": has_teacher.reshape(shape),
    }


def _answers(
    recipe: Recipe,
    pairs: Sequence[tuple[str, str]],
    questions: Sequence[Question],
    read: np.ndarray,
    texts: Texts,
) -> dict[str, np.ndarray]:
    """Tokens ``[P, L]`` of the reference answers, each after its preceding text, and their mask.

    ``read`` ``[P]`` is the number of tokens of each prompt as the model reads it; with an
    environment, those of its first observation.
    """
    if len(pairs) != len(questions):
        raise ValueError(
            f"recipe {recipe.name!r}: {ANSWER_TEXTS} has {len(pairs)} pairs, but the batch has "
            f"{len(questions)} prompts."
        )
    every = [(list(texts.write(before)), list(texts.write(answer))) for before, answer in pairs]
    width = max(_SHORTEST_ROW, power_of_two(max(len(a) + len(b) for a, b in every)))
    tokens, mask = np.zeros((len(every), width), np.int32), np.zeros((len(every), width), bool)
    for row, answered, question, length, (before, answer) in zip(
        tokens, mask, questions, read, every, strict=True
    ):
        end, prompt = len(before) + len(answer), question.prompt
        name = f"prompt {prompt.name!r}"
        if not answer:
            raise ValueError(f"recipe {recipe.name!r}: the answer of {name} has no token.")
        if length + end > texts.context:
            raise ValueError(
                f"recipe {recipe.name!r}: {name} has {length} tokens and its answer "
                f"{end}, but the model's context leaves room for {texts.context} of both before "
                "and after a response."
            )
        row[:end], answered[len(before) : end] = before + answer, True
    return {"ground_truth": tokens, "ground_truth_mask": mask}


def _groups(entries: Sequence[T], shape: tuple[int, ...]) -> list[list[T]]:
    """``P G`` entries as P lists of G."""
    return [list(entries[p * shape[1] : (p + 1) * shape[1]]) for p in range(shape[0])]


def _from_turns(
    batch: Batch,
    recipe: Recipe,
    names: Collection[str],
    scores: Scores,
    questions: Sequence[Question],
    texts: Texts,
) -> dict[str, np.ndarray]:
    """Rewards or unit tests of the steps of each response, padded, and the step of each token."""
    shape = batch.rewards.shape
    source = "test_passes" if {"test_passes", "test_where"} & set(names) else "turn_rewards"
    if source not in scores.details:
        raise ValueError(
            f"recipe {recipe.name!r} needs {source!r} ({EXTRAS[source].about}); the reward returns "
            "no mapping with a list under this name."
        )
    entries = _groups(scores.details[source], shape)
    ends = _groups(scores.details.get("turn_ends", (None,) * math.prod(shape)), shape)
    steps: dict[tuple[int, int], np.ndarray] = {}
    turn_ids = np.full(batch.tokens.shape, -1, np.int32)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    for p, g in np.ndindex(shape):
        if (step := entries[p][g]) is None or not mask[p, g].any():
            continue
        response, prompt = texts.responses[p][g], questions[p].prompt
        start = f"recipe {recipe.name!r}: {source!r} of a response to prompt "
        start += f"{prompt.name!r}"
        if isinstance(step, str):
            raise ValueError(f"{start} is a text; it must be a list of numbers.")
        if source == "test_passes" and step.ndim == 1:
            step = step[None]
        if step.ndim != (2 if source == "test_passes" else 1):
            raise ValueError(f"{start} has {step.ndim} axes; it must have one number per step.")
        borders = [len(response)] if ends[p][g] is None else list(ends[p][g])
        if not len(step):
            raise ValueError(f"{start} is empty; a response has at least one step.")
        if len(borders) != len(step):
            raise ValueError(
                f"{start} has {len(step)} steps, but 'turn_ends' has {len(borders)}; the reward "
                "must return the characters up to the end of each step, as rewards.step_ends gives "
                "them."
            )
        in_order = all(a <= b for a, b in itertools.pairwise([0, *borders, len(response)]))
        if not in_order or any(end % 1 for end in borders):
            raise ValueError(
                f"{start} has the 'turn_ends' {[f'{e:g}' for e in borders]}, which must be "
                f"ascending integers up to the {len(response)} characters of the response."
            )
        steps[p, g] = step
        positions = np.flatnonzero(mask[p, g])
        trained = tokens[p, g, positions].tolist()
        # A response may begin with context, which does not train.
        before = max(len(response) - len(texts.decode(trained)), 0)
        borders = [max(end - before, 0) for end in borders]
        turn_ids[p, g, positions] = turns_of_tokens(trained, borders, decode=texts.decode)
    return _padded_turns(shape, source, steps) | {"turn_ids": turn_ids}


def _padded_turns(
    shape: tuple[int, int], source: str, steps: Mapping[tuple[int, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """Steps ``[k]`` or ``[k, u]`` of responses as arrays ``[P, G, K]`` or ``[P, G, K, U]``."""
    turns = power_of_two(max((len(step) for step in steps.values()), default=1))
    turn_where = np.zeros((*shape, turns), bool)
    if source == "turn_rewards":
        rewards = np.zeros((*shape, turns), np.float32)
        for place, step in steps.items():
            rewards[place][: len(step)] = step
            turn_where[place][: len(step)] = True
        return {"turn_rewards": rewards, "turn_where": turn_where}
    tests = power_of_two(max((step.shape[1] for step in steps.values()), default=1))
    passes = np.zeros((*shape, turns, tests), np.float32)
    test_where = np.zeros((shape[0], tests), bool)
    for place, step in steps.items():
        passes[place][: len(step), : step.shape[1]] = step
        turn_where[place][: len(step)] = True
        test_where[place[0], : step.shape[1]] = True
    return {"test_passes": passes, "test_where": test_where, "turn_where": turn_where}


def _components(
    recipe: Recipe, scores: Scores, left_out: Collection[str], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Reward components ``[P, G]`` by name, without those that are no rewards."""
    rewards = scores.reward_components.items()
    components = {k: np.float32(x).reshape(shape) for k, x in rewards if k not in left_out}
    if rewards and not components:
        names = ", ".join(map(repr, sorted(scores.reward_components)))
        raise ValueError(
            f"recipe {recipe.name!r} keeps several rewards apart, but the reward returns only "
            f"{names}, which methods read as fields and not as rewards; return the rewards under "
            "other names."
        )
    if not components:
        # Without a value, the names of the components are unknown.
        failed = f", or failed in all {scores.failures} calls" if scores.failures else ""
        raise ValueError(
            f"recipe {recipe.name!r} keeps several rewards apart, but the reward returns one "
            f"number{failed}; return a mapping of names to numbers."
        )
    return components


def _from_metadata(recipe: Recipe, name: str, questions: Sequence[Question]) -> np.ndarray:
    """Finite numbers ``[P, ...]`` from the prompts' metadata."""
    spec = EXTRAS.get(name)
    about = f" ({spec.about})" if spec else ""
    values = []
    for question in questions:
        prompt = question.prompt
        what = f"recipe {recipe.name!r} needs {name!r}{about}; prompt {prompt.name!r}"
        if name not in prompt.metadata:
            source = "" if spec else ", and the reward returns no mapping that has it"
            raise ValueError(f"{what} has none in its metadata{source}.")
        value = np.asarray(prompt.metadata[name])
        numeric = value.dtype.kind in "biuf" and (spec is None or value.shape == ())
        if not numeric or not np.isfinite(value).all():
            raise ValueError(f"{what} has {prompt.metadata[name]!r}, which is not a finite number.")
        if values and value.shape != values[0].shape:
            raise ValueError(
                f"{what} has a value of shape {value.shape}, but those before it have shape "
                f"{values[0].shape}."
            )
        values.append(value)
    return np.stack(values)
