"""Collectors of responses in the data: demonstrations, pairs, triples, lists, labels, steps.

Nothing is sampled. A row of the data has a prompt and its responses, whose rewards rank them: a
pair is a group of two, the chosen response first, and a list is a group of K. Recipes compare the
rewards, for example with :func:`jaxrl_llm.preferences.paired`. The prompt of a user's pair may
contain other pairs of the same user.

Every collector raises ValueError, before the model is loaded, for a row that lacks a column, has an
empty response or another type than the column's, and names the prompt.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core import Array, ArrayTree, bind, checks
from jaxrl_llm.curation.collectors.demonstrations import demonstrations_of
from jaxrl_llm.curation.collectors.hints.hinted import (
    as_response,
    check_ended,
    check_template,
    prompt_name,
    read_column,
    read_text,
)
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    computed_once,
    in_order,
    on_host,
)
from jaxrl_llm.curation.collectors.visits import in_epochs
from jaxrl_llm.curation.few_shot import sample_few_shot

__all__ = [
    "few_shot_pairs",
    "offline_labels",
    "offline_lists",
    "offline_pairs",
    "offline_steps",
    "offline_triples",
    "only_demonstrations",
]

SHOT = "Question: {question}\nPreferred answer: {chosen}\nOther answer: {rejected}"
FEW_SHOT = "{shots}\n\nAnswer as the same user prefers.\n\nQuestion: {question}"


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the responses of a row, in the order of the group."""

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Demonstrations(_Reader):
    """Reads one demonstration or several."""

    column: str = "demonstration"
    reward: float | None = None

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        every = demonstrations_of("only_demonstrations", row, self.column)
        return tuple(Response(x, reward=self.reward) for x in every)


@dataclasses.dataclass(frozen=True)
class _Pair(_Reader):
    """Reads a chosen and a rejected response."""

    chosen: str = "chosen"
    rejected: str = "rejected"

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        name, columns = "offline_pairs", (self.chosen, self.rejected)
        both = [as_response(name, row, x, read_column(name, row, x)) for x in columns]
        if isinstance(both[0], str) != isinstance(both[1], str):
            raise ValueError(
                f"{name}: prompt {prompt_name(row)} has a text and token ids as "
                f"{columns[0]!r} and {columns[1]!r}; both are one or the other."
            )
        if list(both[0]) == list(both[1]):
            raise ValueError(
                f"{name}: {columns[0]!r} and {columns[1]!r} of prompt {prompt_name(row)} are equal."
            )
        return Response(both[0], reward=1.0), Response(both[1], reward=0.0)


@dataclasses.dataclass(frozen=True)
class _Triple(_Reader):
    """Reads a chosen, a rejected and a gold response."""

    chosen: str = "chosen"
    rejected: str = "rejected"
    gold: str = "reference"

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        pair = _Pair(self.chosen, self.rejected)(row)
        name = "offline_triples"
        gold = as_response(name, row, self.gold, read_column(name, row, self.gold))
        return *pair, Response(gold, reward=2.0)


@dataclasses.dataclass(frozen=True)
class _List(_Reader):
    """Reads several responses with a reward each."""

    size: int
    responses: str = "responses"
    rewards: str = "rewards"

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        name = "offline_lists"
        responses = read_column(name, row, self.responses)
        rewards = read_column(name, row, self.rewards)
        start = f"{name}: prompt {prompt_name(row)}"
        if isinstance(responses, str) or not 2 <= len(responses) <= self.size:
            count = "a text" if isinstance(responses, str) else f"{len(responses)}"
            raise ValueError(
                f"{start} has {count} as {self.responses!r}; a list has 2 to {self.size} responses."
            )
        if isinstance(rewards, str) or len(rewards) != len(responses):
            raise ValueError(
                f"{start} has {len(responses)} of {self.responses!r} and {rewards!r} as "
                f"{self.rewards!r}; each response has one reward."
            )
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in rewards):
            raise ValueError(f"{start}: {self.rewards!r} must be finite numbers; got {rewards!r}.")
        texts = [as_response(name, row, self.responses, x) for x in responses]
        pairs = zip(texts, rewards, strict=True)
        return tuple(Response(text, reward=float(reward)) for text, reward in pairs)


@dataclasses.dataclass(frozen=True)
class _Label(_Reader):
    """Reads one response and whether it is good."""

    completion: str = "completion"
    label: str = "label"

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        name = "offline_labels"
        text = as_response(name, row, self.completion, read_column(name, row, self.completion))
        check_ended(name, row, self.completion)
        label = read_column(name, row, self.label)
        if label not in (0, 1):
            raise ValueError(
                f"{name}: {self.label!r} of prompt {prompt_name(row)} must be true or false; got "
                f"{label!r}."
            )
        return (Response(text, reward=float(label)),)


@dataclasses.dataclass(frozen=True)
class _Steps(_Reader):
    """Reads the steps of one response, each right or wrong."""

    completions: str = "completions"
    labels: str = "labels"
    separator: str = dataclasses.field(default="\n\n", metadata={"column": False})

    def __call__(self, row: Mapping[str, Any]) -> tuple[Response, ...]:
        name, start = "offline_steps", f"offline_steps: prompt {prompt_name(row)}"
        steps = read_column(name, row, self.completions)
        labels = read_column(name, row, self.labels)
        if isinstance(steps, str) or not len(steps):
            raise ValueError(
                f"{start}: {self.completions!r} must be a list of steps; got {steps!r}."
            )
        if isinstance(labels, str) or len(labels) != len(steps):
            raise ValueError(
                f"{start} has {len(steps)} of {self.completions!r} and {labels!r} as "
                f"{self.labels!r}; each step has one label."
            )
        for step in steps:
            if not isinstance(step, str) or not step.strip() or self.separator in step:
                raise ValueError(
                    f"{start}: a step is a text that is not empty and holds no separator "
                    f"{self.separator!r}; got {step!r}."
                )
        if not all(isinstance(x, int | float) and 0 <= x <= 1 for x in labels):
            raise ValueError(
                f"{start}: {self.labels!r} must be true or false, or in [0, 1]; got {labels!r}."
            )
        text = self.separator.join(steps)
        ends = np.cumsum([len(step) + len(self.separator) for step in steps])
        ends[-1] = len(text)
        right = np.asarray(labels, np.float32)
        return (Response(text, reward=float(right.min()), turn_rewards=right, turn_ends=ends),)


@dataclasses.dataclass(frozen=True, repr=False)
class Offline:
    """Made by the functions below; ``size`` None is the group's size of the run."""

    name: str
    reader: _Reader
    size: int | None
    source: Collector

    @property
    def needs(self) -> Needs:
        """Those of responses of the data, whose rewards it may have as well."""
        offline = self.size is not None
        rewards = offline or getattr(self.reader, "reward", None) is not None
        return needs_of_sources(self.source) | Needs(
            brings_responses=True,
            samples_nothing=True,
            helps_every_group=True,
            offline=offline,
            has_rewards=rewards,
            # Those of steps bring more than one number as their reward.
            lacks_components=rewards and not isinstance(self.reader, _Steps),
        )

    def width(self, group_size: int) -> int:
        """Responses of a group."""
        return group_size if self.size is None else self.size

    def check_rows(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row lacks a field that the collector reads."""
        for row in data:
            self.reader(row)

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """The same of the rows that train."""
        self.check_rows(data)

    def init(self, num_prompts: int) -> ArrayTree:
        """The place in the data; this and what follows as of any collector."""
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        """Rows of the data, with their responses."""
        proposed, _ = self.source.propose(state, key, collection, count)
        return tuple(self.read(request, collection) for request in proposed), state

    def read(self, request: Request, collection: Collection) -> Request:
        """The request with the responses of its row."""
        if request.prompt is None:
            raise ValueError(f"{self!r}: the source must name its prompts, as in_epochs does.")
        most = self.width(collection.group_size)
        responses = self.reader(collection.data[request.prompt])[:most]
        return request._replace(
            rollouts=len(responses), responses=responses, sampled=False, role=DEMONSTRATION
        )

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        """All rows that were asked for."""
        decision, _ = in_order().observe((), collection)
        if decision.rows is None:
            return decision, state
        return decision, self.source.observe(state, collection)[1]

    def options(self) -> list[str]:
        """Columns and source that are not the defaults, as arguments."""
        defaults = {x.name: x.default for x in dataclasses.fields(self.reader)}
        options = [f"{k}={v!r}" for k, v in vars(self.reader).items() if v != defaults[k]]
        return options + ([] if self.source == in_epochs() else [f"source={self.source!r}"])

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.options())})"


def _user_ids(data: Sequence[Mapping[str, Any]], *, column: str) -> np.ndarray:
    """int32 ``[N]``, equal numbers for the rows of one user."""
    names: dict[Any, int] = {}
    return np.array([names.setdefault(row[column], len(names)) for row in data], np.int32)


@dataclasses.dataclass(frozen=True, repr=False)
class _FewShot(Offline):
    """Made by :func:`few_shot_pairs`."""

    columns: tuple[str, str]  # with the chosen and the rejected response
    shots: int
    user: str
    shot: str
    template: str

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(sends_text=True)

    def check_rows(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row lacks a field that the collector reads."""
        for row in data:
            self.reader(row)
            for column in self.columns:
                read_text(self.name, row, column)
            user = read_column(self.name, row, self.user)
            if not isinstance(user, str | int | float):
                raise ValueError(
                    f"{self.name}: {self.user!r} of prompt {prompt_name(row)} must be a string or "
                    f"a number; got {user!r}."
                )

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """The same of the rows that train; and if no user has two of them."""
        self.check_rows(data)
        users = _user_ids(data, column=self.user)
        if self.shots and len(set(users.tolist())) == len(users):
            raise ValueError(
                f"{self.name}: each of the {len(users)} rows has another {self.user!r}, so that no "
                "row has examples; a user needs two rows at least."
            )

    def propose(self, state, key, collection: Collection, count: int):
        requests, state = super().propose(state, key, collection, count)
        places = [request.prompt for request in requests if request.prompt is not None]
        drawn = self._draw(key, places, collection.data)
        messages = (
            self._message(collection, place, shots)
            for place, shots in zip(places, drawn, strict=True)
        )
        pairs = zip(requests, messages, strict=True)
        return tuple(request._replace(text=text) for request, text in pairs), state

    def _draw(self, key: Array, places: Sequence[int], data: Sequence) -> list[list[int]]:
        """Of each place, rows of the same user."""
        users = computed_once(data, bind(_user_ids, column=self.user))
        counts = np.minimum(np.bincount(users)[users[np.array(places)]] - 1, self.shots)
        drawn: list[list[int]] = [[] for _ in places]
        for count in sorted({*counts.tolist()} - {0}):
            which = np.flatnonzero(counts == count)
            with on_host():
                rows = sample_few_shot(
                    key, users, count=count, queries=np.array(places, np.int32)[which]
                )
            for i, shots in zip(which.tolist(), np.asarray(rows.shots).tolist(), strict=True):
                drawn[i] = shots
        return drawn

    def _message(self, collection: Collection, place: int, shots: Sequence[int]) -> str | None:
        """The question behind as many examples as there is room for; None for none."""
        row, data, (chosen, rejected) = collection.data[place], collection.data, self.columns
        for count in range(len(shots), 0, -1):
            texts = [
                self.shot.format(
                    question=data[i]["text"],
                    chosen=data[i][chosen],
                    rejected=data[i][rejected],
                )
                for i in shots[:count]
            ]
            text = self.template.format(shots="\n\n".join(texts), question=row["text"])
            if collection.takes_text(text):
                return text
        return None

    def options(self) -> list[str]:
        """Also the number of examples, the column of users, and templates of one's own."""
        own = [f"shots={self.shots}", f"user={self.user!r}", *super().options()]
        own += [] if self.shot == SHOT else [f"shot={self.shot!r}"]
        return own + ([] if self.template == FEW_SHOT else [f"template={self.template!r}"])


def only_demonstrations(
    *,
    column: str = "demonstration",
    reward: float | None = None,
    source: Collector | None = None,
) -> Collector:
    """Batches of only demonstrations: nothing is sampled.

    A group has as many members as its prompt has demonstrations, at most G; with one each, use a
    group of 1.

    Args:
      column: The column with them: a text or token ids, or a list of several.
      reward: Reward of each, as in :func:`~jaxrl_llm.curation.demonstrations`.
      source: A collector that names its prompts; None for :func:`in_epochs`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      ValueError: In a run, if a row has no demonstration, or the source names no prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.only_demonstrations()
      only_demonstrations()

    References:
      One-Token Rollout (arXiv:2509.26313), which trains on demonstrations token by token.
    """
    return _offline("only_demonstrations", _Demonstrations(column, reward), None, source)


def offline_pairs(
    *, chosen: str = "chosen", rejected: str = "rejected", source: Collector | None = None
) -> Collector:
    """Pairs of the data: a preferred response and a rejected one.

        group = (chosen, rejected) with rewards (1, 0)

    Args:
      chosen, rejected: Columns of the data, each a text or token ids. A text ends with the stop
        token.
      source: A collector that names its prompts; None for
        :func:`~jaxrl_llm.curation.in_epochs`.

    Returns:
      A collector of groups of two; its state is that of ``source``.

    Raises:
      ValueError: If the columns do not differ; in a run, for a row as above, or if the source names
        no prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> collector = jr.curation.offline_pairs()
      >>> collector.check_data([{"id": "a", "chosen": "4", "rejected": "4"}])
      Traceback (most recent call last):
      ...
      ValueError: offline_pairs: 'chosen' and 'rejected' of prompt 'a' are equal.

    References:
      Rafailov et al., DPO (arXiv:2305.18290); the columns are those of TRL's preference data sets.
    """
    return _offline("offline_pairs", _Pair(chosen, rejected), 2, source)


def offline_triples(
    *,
    chosen: str = "chosen",
    rejected: str = "rejected",
    gold: str = "reference",
    source: Collector | None = None,
) -> Collector:
    """Pairs of the data with a third response, which is better than both.

        group = (chosen, rejected, gold) with rewards (1, 0, 2)

    Args:
      chosen, rejected, gold: Columns of the data, each a text or token ids.
      source: As in :func:`offline_pairs`.

    Returns:
      A collector of groups of three; its state is that of ``source``.

    Raises:
      ValueError: If the columns do not differ; in a run, for a row as above, or if the source names
        no prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.offline_triples().width(8)
      3

    References:
      Saeidi et al., TPO (arXiv:2405.16681); the columns are those of TRL's TPO trainer.
    """
    return _offline("offline_triples", _Triple(chosen, rejected, gold), 3, source)


def few_shot_pairs(
    *,
    shots: int = 4,
    user: str = "user",
    chosen: str = "chosen",
    rejected: str = "rejected",
    shot: str = SHOT,
    template: str = FEW_SHOT,
    source: Collector | None = None,
) -> Collector:
    """Pairs of a user, with other pairs of the same user as examples in the prompt.

        prompt = the examples (question, chosen, rejected), then the question of the row
        group = (chosen, rejected) of the row with rewards (1, 0)

    The examples are drawn for each batch and are never the row itself; only the two responses
    train. A row has fewer examples if its user has fewer other rows or the prompt would be too
    long, and none if it is the user's only row. An evaluation that samples answers has
    examples before its questions as well, the same each time.

    Args:
      shots: K, maximum number of examples, not negative; 0 is :func:`offline_pairs`.
      user: The column with the user, a text or a number.
      chosen, rejected: Columns of the data, each a text.
      shot: Template of an example, with ``{question}``, ``{chosen}`` and ``{rejected}``.
      template: Template of the message, with ``{shots}`` and ``{question}``.
      source: As in :func:`offline_pairs`.

    Returns:
      A collector of groups of two; its state is that of ``source``.

    Raises:
      TypeError: If ``shots`` is not an integer.
      ValueError: If an option is out of its range; in a run, for a row as above, one without a
        user, or if no user has two rows.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.few_shot_pairs(shots=2)
      few_shot_pairs(shots=2, user='user')

    References:
      Singh et al., FSPO (arXiv:2502.19312): four examples. The words around them are ours.
    """
    name = "few_shot_pairs"
    if isinstance(shots, bool) or not isinstance(shots, int):
        raise TypeError(f"{name}: shots must be an integer; got {shots!r}.")
    checks.check_non_negative(name, shots=shots)
    check_template(name, shot, "question", "chosen", "rejected")
    check_template(name, template, "shots", "question")
    made = _offline(name, _Pair(chosen, rejected), 2, source)
    if user in ("", chosen, rejected):
        raise ValueError(f"{name}: columns must have names that differ; user is {user!r}.")
    columns = (chosen, rejected)
    return _FewShot(name, made.reader, 2, made.source, columns, shots, user, shot, template)


def offline_lists(
    size: int,
    *,
    responses: str = "responses",
    rewards: str = "rewards",
    source: Collector | None = None,
) -> Collector:
    """Lists of the data: several responses to a prompt, each with a reward.

    Args:
      size: K, maximum responses of a list, at least 2; a shorter list leaves cells of its group
        empty.
      responses: The column with the responses, each a text or token ids.
      rewards: The column with a finite number for each; the greater one is better.
      source: As in :func:`offline_pairs`.

    Returns:
      A collector of groups of K; its state is that of ``source``.

    Raises:
      TypeError: If ``size`` is not an integer.
      ValueError: If ``size`` is below 2, and as in :func:`offline_pairs`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.offline_lists(4).width(8)
      4

    References:
      Liu et al., LiPO (arXiv:2402.01878), preference optimization as learning to rank.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"offline_lists: size must be an integer; got {size!r}.")
    if size < 2:
        raise ValueError(f"offline_lists: size must be at least 2; got {size}.")
    return _offline("offline_lists", _List(size, responses, rewards), size, source)


def offline_labels(
    *, completion: str = "completion", label: str = "label", source: Collector | None = None
) -> Collector:
    """Responses of the data, each with a label: good or bad.

        group = (completion,) with reward 1 where the label is true, else 0

    Args:
      completion: The column with a text or token ids.
      label: The column with true or false.
      source: As in :func:`offline_pairs`.

    Returns:
      A collector of groups of one; its state is that of ``source``.

    Raises:
      ValueError: If the columns do not differ; in a run, for a row as above, or if the source names
        no prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.offline_labels()
      offline_labels()

    References:
      Ethayarajh et al., KTO (arXiv:2402.01306); the columns are those of TRL's unpaired data sets.
    """
    return _offline("offline_labels", _Label(completion, label), 1, source)


def offline_steps(
    *,
    completions: str = "completions",
    labels: str = "labels",
    separator: str = "\n\n",
    source: Collector | None = None,
) -> Collector:
    r"""Responses of the data in steps, each with a label: right or wrong.

        group = (the steps with the separator between them,);   turn_rewards = labels
        reward = the smallest label

    Args:
      completions: The column with a list of steps, texts.
      labels: The column with true or false for each, or a number in [0, 1].
      separator: Text between two steps; it is part of the step before it.
      source: As in :func:`offline_pairs`.

    Returns:
      A collector of groups of one; its state is that of ``source``.

    Raises:
      ValueError: If the separator is empty, or the columns do not differ; in a run, for a row as
        above, or if the source names no prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.offline_steps(separator="\n")
      offline_steps(separator='\n')

    References:
      Lightman et al. (arXiv:2305.20050); the columns are those of TRL's stepwise data sets.
    """
    if not separator:
        raise ValueError("offline_steps: separator must not be empty.")
    return _offline("offline_steps", _Steps(completions, labels, separator), 1, source)


def _offline(name: str, reader: _Reader, size: int | None, source: Collector | None) -> Offline:
    fields = [x.name for x in dataclasses.fields(reader) if x.metadata.get("column", True)]
    columns = [x for name in fields if isinstance(x := getattr(reader, name), str)]
    if "" in columns or len(set(columns)) < len(columns):
        raise ValueError(f"{name}: columns must have names that differ; got {columns}.")
    source = prompt_source(name, in_epochs() if source is None else source)
    return Offline(name, reader, size, source)
