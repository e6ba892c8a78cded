"""Which help a failed group gets, and what its row is made of: the policies of ``hinted``.

====================  =========================  ===========================  =====================
policy                asks again                 with                         the row
====================  =========================  ===========================  =====================
ladder                while no rollout is right  one message after another    the last group
self_hints            the same                   hints that the model writes  the last group
scaffold              if no rollout is right     one rollout a message        one success swapped in
hint_share            always                     the start of a solution      plain and hinted
examples_in_prompt    always                     other prompts' solutions     plain and steered
rethink               while no rollout is right  two templates                the last group
repair                if a rollout is wrong      its right steps              it, put right
====================  =========================  ===========================  =====================

Options that policies share:

- ``messages``: ``row -> (message, ...)``, from the weakest help to the strongest.
- ``threshold``: Greatest reward of a failure.
- ``metric``: Name of the part of the reward that is compared; None for the reward.

A wrong kind of thing raises TypeError, an option that is unknown or out of its range ValueError.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.hinted import (
    HINT,
    GuidedGroup,
    HintPolicy,
    check_template,
    prompt_name,
    read_column,
    solution_of,
)
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    HINTED,
    JUDGE,
    Outcome,
    Request,
    Response,
    on_host,
)
from jaxrl_llm.curation.hints import (
    adhint_ratio,
    distilled_where,
    first_bad_step,
    hint_slots,
    minimal_hint,
    needs_hint,
    prefix_length,
    scaffold_slots,
)

Messages = Callable[[Mapping[str, Any]], Sequence[str]]

ASK_FOR_HINTS = (
    "{question}\n\nSolution: {solution}\n\nWrite three hints, each more detailed, none with the "
    "answer, as JSON with the keys level_1, level_2 and level_3."
)
DECOMPOSE = (
    "{question}\n\nDivide this problem into smaller problems, solve each of them, and put the "
    "results together."
)
REFINE = (
    "{question}\n\nThis solution is wrong:\n{answer}\n\nExplain what is wrong with it, and solve "
    "the problem."
)
FINISH = "{question}\n\nThis is a solution:\n{solution}\n\nWrite it in words of yours."
EXAMPLE = "Question: {question}\nAnswer: {solution}"


def no_reward(texts: Sequence[str]) -> list[float]:
    """Zero for each text: the reward of a question that the model is asked besides."""
    return [0.0] * len(texts)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class HintedPolicy:
    """What the policies share."""

    threshold: float = 0.0
    metric: str | None = None

    name: ClassVar[str]
    sends_text: ClassVar[bool] = True
    needs_slots: ClassVar[bool] = False

    def first(self, group_size: int) -> int:
        """Rollouts of the plain group."""
        return group_size

    def rewards(self, outcome: Outcome) -> np.ndarray:
        """Of a group: float32 ``[n]``."""
        if self.metric is None:
            return np.asarray(outcome.rewards, np.float32)
        if self.metric not in outcome.reward_components:
            names = ", ".join(sorted(outcome.reward_components)) or "none"
            raise ValueError(
                f"{self!r}: the reward has no part {self.metric!r}; its parts are: {names}."
            )
        return np.asarray(outcome.reward_components[self.metric], np.float32)

    def failed(self, outcome: Outcome) -> bool:
        """Whether no rollout of a group is right."""
        with on_host():
            rewards, where = self.rewards(outcome), np.asarray(outcome.where)
            return bool(needs_hint(rewards, where=where, threshold=self.threshold))

    def __repr__(self) -> str:
        first, options = [], []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING:
                first.append(stable_repr(value))
            elif value != field.default:
                options.append(f"{field.name}={stable_repr(value)}")
        return f"{self.name}({', '.join(first + options)})"


def _check_policy(name: str, threshold: float, metric: str | None) -> None:
    if not np.isfinite(threshold):
        raise ValueError(f"{name}: threshold must be finite; got {threshold!r}.")
    if metric is not None and not isinstance(metric, str):
        raise TypeError(f"{name}: metric must be the name of a part of the reward; got {metric!r}.")


def of_role(group: GuidedGroup, role: int) -> list[tuple[int, Outcome]]:
    """The requests of a role by their numbers, with what came of them."""
    every = zip(group.numbers, group.requests, group.outcomes, strict=True)
    return [(number, outcome) for number, request, outcome in every if request.role == role]


def rows_of(group: GuidedGroup) -> list[tuple[int, int]]:
    """All rollouts of a group, in the order of its requests."""
    every = zip(group.numbers, group.requests, strict=True)
    return [(number, member) for number, x in every for member in range(x.rollouts)]


# One message after another


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Ladder(HintedPolicy):
    """Made by :func:`ladder`."""

    messages: Messages
    plain: int = 0

    name = "ladder"

    def check(self, row: Mapping[str, Any]) -> None:
        self.messages(row)

    def texts(self, group: GuidedGroup) -> Sequence[str]:
        """The messages that there are for a group."""
        return self.messages(group.row)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        hinted = of_role(group, HINTED)
        latest = hinted[-1][1] if hinted else group.outcomes[0]
        if self.plain >= group.group_size or not self.failed(latest):
            return ()
        texts = self.texts(group)[len(hinted) : len(hinted) + 1]
        size = group.group_size - self.plain
        return [Request(size, text=text, role=HINTED) for text in texts]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        hinted, size = of_role(group, HINTED), group.group_size
        plain = min(self.plain, size)
        with on_host():
            trigger = np.asarray(bool(hinted))
            slots = np.asarray(hint_slots(trigger, group_size=size, plain=plain))
        first, last = group.numbers[0], hinted[-1][0] if hinted else group.numbers[0]
        return [(last, g - plain) if slots[g] else (first, g) for g in range(size)]


def ladder(
    messages: Messages, *, plain: int = 0, threshold: float = 0.0, metric: str | None = None
) -> HintPolicy:
    """One message after another, until a rollout is right; the last group is the row.

    Args:
      messages: See the module.
      plain: Rollouts of the plain group that stay in the row; the rest are sampled again.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``messages`` is no function.
      ValueError: If ``plain`` is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.ladder(jr.bind(jr.curation.tier_messages, most=1), plain=1)  # NuRL
      ladder(tier_messages(most=1), plain=1)

    References:
      NuRL (arXiv:2509.25666) with one message and ``plain=1``; GHPO (arXiv:2507.10628) with
      :func:`~jaxrl_llm.curation.share_messages`, which compares the accuracy alone.
    """
    if not callable(messages):
        raise TypeError(f"ladder: messages must be a function; got {messages!r}.")
    checks.check_non_negative("ladder", finite=True, plain=plain)
    _check_policy("ladder", threshold, metric)
    return _Ladder(messages=messages, plain=int(plain), threshold=threshold, metric=metric)


# Hints that the model writes


def parse_hints(text: str, *, levels: int = 3) -> tuple[str, ...]:
    """Hints of a JSON object with the keys ``level_1``, ``level_2`` and so on; none if it has not.

    The object may stand anywhere in the text.

    Args:
      text: What the model wrote.
      levels: How many keys are read.

    Returns:
      The hints, weakest first, less those that are empty.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.parse_hints('Here: {"level_1": "add", "level_2": "6 + 36"}')
      ('add', '6 + 36')

    References:
      The format is that of SAGE (arXiv:2602.03143), whose code also reads JSON with comments.
    """
    start, end = text.find("{"), text.rfind("}")
    if not 0 <= start < end:
        return ()
    try:
        value = json.loads(text[start : end + 1])
    except ValueError:
        return ()
    if not isinstance(value, dict):
        return ()
    hints = [value.get(f"level_{level + 1}") for level in range(levels)]
    return tuple(hint.strip() for hint in hints if isinstance(hint, str) and hint.strip())


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _SelfHints(_Ladder):
    """Made by :func:`self_hints`."""

    messages: Messages = ()  # type: ignore[assignment]
    parse: Callable[[str], Sequence[str]] = parse_hints
    column: str = "demonstration"
    question: str = ASK_FOR_HINTS
    template: str = HINT
    attempts: int = 3

    name = "self_hints"

    def check(self, row: Mapping[str, Any]) -> None:
        read_column(self.name, row, self.column)

    def texts(self, group: GuidedGroup) -> Sequence[str]:
        written = [self.parse(outcome.texts[0]) for _, outcome in of_role(group, JUDGE)]
        hints = next((tuple(each) for each in written if each), ())
        return [self.template.format(question=group.row["text"], hint=hint) for hint in hints]

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        asked = len(of_role(group, JUDGE))
        if self.texts(group) or not self.failed(group.outcomes[0]) or asked == self.attempts:
            return super().ask(group)
        row = group.row
        text = self.question.format(question=row["text"], solution=row[self.column])
        return [Request(1, text=text, role=JUDGE, reward=no_reward)]


def self_hints(
    *,
    parse: Callable[[str], Sequence[str]] = parse_hints,
    column: str = "demonstration",
    question: str = ASK_FOR_HINTS,
    template: str = HINT,
    attempts: int = 3,
    plain: int = 0,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """:func:`ladder` with hints that the policy itself writes when a group has failed.

    It sees the solution and writes all levels at once; if they cannot be read, it is asked again.
    A group without hints stays as it is.

    Args:
      parse: ``text -> hints``, weakest first; none if they cannot be read.
      column: The column with the solution.
      question: What the model is asked, with ``{question}`` and ``{solution}``.
      template: The message with a hint, with ``{question}`` and ``{hint}``.
      attempts: How often it is asked at most.
      plain, threshold, metric: As in :func:`ladder`.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``parse`` is no function.
      ValueError: If a template or a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.self_hints(attempts=1)
      self_hints(attempts=1)

    References:
      SAGE (arXiv:2602.03143) and its released code; the wording of the messages is ours.
    """
    name = "self_hints"
    if not callable(parse):
        raise TypeError(f"{name}: parse must be a function; got {parse!r}.")
    check_template(name, question, "question", "solution")
    check_template(name, template, "question", "hint")
    checks.check_count(name, attempts=attempts)
    checks.check_non_negative(name, finite=True, plain=plain)
    _check_policy(name, threshold, metric)
    return _SelfHints(
        parse=parse,
        column=column,
        question=question,
        template=template,
        attempts=attempts,
        plain=int(plain),
        threshold=threshold,
        metric=metric,
    )


# The least help that leads to a right answer


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Scaffold(HintedPolicy):
    """Made by :func:`scaffold`."""

    messages: Messages
    after: str = "hint"
    warmup: int = 0

    name = "scaffold"

    def check(self, row: Mapping[str, Any]) -> None:
        self.messages(row)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        hinted = of_role(group, HINTED)
        if not hinted:
            if group.step < self.warmup or not self.failed(group.outcomes[0]):
                return ()
            return [Request(1, text=text, role=HINTED) for text in self.messages(group.row)]
        level = self._level(hinted)
        if level < 0 or self.after == "hint" or of_role(group, DEMONSTRATION):
            return ()
        outcome = hinted[level][1]
        plain = Response(outcome.responses[0].tokens, reward=float(outcome.rewards[0]))
        return [Request(1, responses=(plain,), sampled=False, role=DEMONSTRATION)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        hinted, first = of_role(group, HINTED), group.numbers[0]
        row = [(first, member) for member in range(group.group_size)]
        if not hinted or (level := self._level(hinted)) < 0:
            return row
        new = [(number, 0) for number, _ in of_role(group, DEMONSTRATION)]
        new += [(hinted[level][0], 0)] if self.after != "plain" else []
        with on_host():
            slots = scaffold_slots(
                np.int32(level),
                group_size=group.group_size,
                where=np.asarray(group.outcomes[0].where),
                count=len(new),
            )
        for place, member in zip(np.flatnonzero(slots), new, strict=False):
            row[place] = member
        return row

    def _level(self, hinted: list[tuple[int, Outcome]]) -> int:
        """The first message whose rollout is right; -1 for none."""
        rewards = np.concatenate([self.rewards(outcome) for _, outcome in hinted])
        where = np.concatenate([np.asarray(outcome.where) for _, outcome in hinted])
        with on_host():
            return int(minimal_hint(rewards, where=where, threshold=self.threshold))


def scaffold(
    messages: Messages,
    *,
    after: Literal["hint", "plain", "both"] = "hint",
    warmup: int = 0,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """One rollout with each message; the right one of least help takes the place of a wrong one.

    Args:
      messages: See the module; all of them are asked at once.
      after: What the right response trains after: the message with the hint, the plain message,
        which makes it off-policy (a demonstration), or one of each in the place of two.
      warmup: Batches before the first hint.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``messages`` is no function.
      ValueError: If an option is unknown or out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.scaffold(jr.curation.tier_messages, warmup=50)
      scaffold(tier_messages, warmup=50)

    References:
      Scaf-GRPO (arXiv:2510.19807) and its released code; ``after="both"`` is its "6+1+1".
    """
    name = "scaffold"
    if not callable(messages):
        raise TypeError(f"{name}: messages must be a function; got {messages!r}.")
    checks.check_option(name, "after", after, ("hint", "plain", "both"))
    checks.check_non_negative(name, finite=True, warmup=warmup)
    _check_policy(name, threshold, metric)
    return _Scaffold(
        messages=messages, after=after, warmup=int(warmup), threshold=threshold, metric=metric
    )


# The start of a solution, as the start of the response


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _HintShare(HintedPolicy):
    """Made by :func:`hint_share`."""

    column: str = "demonstration"
    plain: float = 0.5
    low: float = 0.0
    high: float = 0.8
    noise: float = 0.05
    seed: int = 0

    name = "hint_share"
    sends_text = False
    needs_slots = True

    def first(self, group_size: int) -> int:
        return min(max(round(self.plain * group_size), 1), group_size)

    def check(self, row: Mapping[str, Any]) -> None:
        solution_of(self.name, row, self.column)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        if (size := group.group_size - self.first(group.group_size)) == 0 or len(
            group.requests
        ) > 1:
            return ()
        solution = solution_of(self.name, group.row, self.column)
        outcome = group.outcomes[0]
        with on_host():
            key = jax.random.fold_in(jax.random.key(self.seed), group.step)
            ratio = adhint_ratio(
                np.clip(self.rewards(outcome), 0.0, 1.0),
                where=np.asarray(outcome.where),
                key=jax.random.fold_in(key, group.place) if self.noise else None,
                low=self.low,
                high=self.high,
                noise=self.noise or None,
            )
            shown = int(prefix_length(np.int32(len(solution)), ratio))
        responses = (Response(solution[:shown]),) * size if shown else ()
        return [Request(size, responses=responses, role=HINTED)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        return rows_of(group)


def hint_share(
    *,
    column: str = "demonstration",
    plain: float = 0.5,
    low: float = 0.0,
    high: float = 0.8,
    noise: float = 0.05,
    seed: int = 0,
    metric: str | None = None,
) -> HintPolicy:
    """Some rollouts begin with a part of a solution, the longer the harder the prompt is without.

        w = clip(low + (high - low) (1 - mean reward of the plain rollouts) + u, 0, 1)
        u uniform in [-noise, noise];   hint = solution[: round(w length)]

    The hint is the start of the response and is trained with it; its tokens have version -1.

    Args:
      column: The column with the solution, a text, which is cut between characters, or token ids.
      plain: Share of the group without a hint, above 0; half of G is rounded to even.
      low, high: Of the share that is shown, see :func:`~jaxrl_llm.curation.adhint_ratio`.
      noise: Half width of its noise; 0 for none.
      seed: Of the noise.
      metric: See the module. The part, in [0, 1], by which difficulty is measured.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.hint_share(high=0.9)
      hint_share(high=0.9)

    References:
      ADHint (arXiv:2512.13095), PAPER reading of the ratio; its constants are ours.
    """
    name = "hint_share"
    checks.check_share(name, zero=False, plain=plain)
    checks.check_share(name, low=low, high=high)
    checks.check_non_negative(name, finite=True, noise=noise)
    if low > high:
        raise ValueError(f"{name}: low must not be above high; got {low:g} and {high:g}.")
    _check_policy(name, 0.0, metric)
    return _HintShare(
        column=column, plain=plain, low=low, high=high, noise=noise, seed=seed, metric=metric
    )


# Examples in the prompt


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _ExamplesInPrompt(HintedPolicy):
    """Made by :func:`examples_in_prompt`."""

    count: int = 1
    shots: int = 1
    column: str = "demonstration"
    examples: tuple[tuple[str, str], ...] | None = None
    seed: int = 0

    name = "examples_in_prompt"

    def first(self, group_size: int) -> int:
        if self.count >= group_size:
            raise ValueError(
                f"{self!r}: count must be below the group's size {group_size}; got {self.count}."
            )
        return group_size - self.count

    def check(self, row: Mapping[str, Any]) -> None:
        if self.examples is None and not isinstance(read_column(self.name, row, self.column), str):
            raise ValueError(
                f"{self.name}: {self.column!r} of prompt {prompt_name(row)} must be a text."
            )

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        if len(group.requests) > 1:
            return ()
        draw = np.random.default_rng((self.seed, group.step, group.place))
        # Examples, none of which is the group's prompt.
        others, rows = len(group.data) - 1, group.data
        requests = []
        for _ in range(self.count):
            if self.examples is not None:
                most = min(self.shots, len(self.examples))
                places = draw.choice(len(self.examples), most, replace=False)
                drawn = [self.examples[i] for i in places]
            else:
                places = draw.choice(others, min(self.shots, others), replace=False)
                places = places + (places >= group.prompt)
                drawn = [(rows[i]["text"], rows[i][self.column]) for i in places]
            shown = [EXAMPLE.format(question=q, solution=solution) for q, solution in drawn]
            text = "\n\n".join([*shown, f"Question: {group.row['text']}"])
            requests.append(Request(1, text=text, train_as_prompt=True, role=HINTED))
        return requests

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        return rows_of(group)


def examples_in_prompt(
    *,
    count: int = 1,
    shots: int = 1,
    column: str = "demonstration",
    examples: tuple[tuple[str, str], ...] | None = None,
    seed: int = 0,
) -> HintPolicy:
    """Some rollouts see other questions with their solutions, and train after the plain prompt.

    Args:
      count: How many of a group, below G.
      shots: Examples in a message, drawn anew for each rollout.
      column: The column with the solutions of the data set, whose other prompts are the examples.
      examples: Pairs of question and solution to draw from instead; None for the data set's.
      seed: Of the draw.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.examples_in_prompt(shots=2)
      examples_in_prompt(shots=2)

    References:
      ICPO (arXiv:2510.26519): one rollout of eight, one example, drawn at random from another data
      set; the wording is ours.
    """
    name = "examples_in_prompt"
    checks.check_count(name, count=count, shots=shots)
    return _ExamplesInPrompt(count=count, shots=shots, column=column, examples=examples, seed=seed)


# Two ways of thinking again


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Rethink(_Ladder):
    """Made by :func:`rethink`."""

    messages: Messages = ()  # type: ignore[assignment]
    decompose: str = DECOMPOSE
    refine: str = REFINE
    distill: bool = True

    name = "rethink"

    def width(self, group_size: int) -> int:
        return 2 * group_size if self.distill else group_size

    def check(self, row: Mapping[str, Any]) -> None:
        """Every row will do."""

    def texts(self, group: GuidedGroup) -> Sequence[str]:
        question, outcome = group.row["text"], group.outcomes[-1]
        present = np.flatnonzero(outcome.where)
        answer = outcome.texts[present[0]] if present.size else ""
        return (
            self.decompose.format(question=question),
            self.refine.format(question=question, answer=answer),
        )

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        hinted = of_role(group, HINTED)
        if (asked := super().ask(group)) or not self.distill or not hinted:
            return asked
        if of_role(group, DEMONSTRATION):
            return ()
        outcome = hinted[-1][1]
        with on_host():
            right = distilled_where(
                self.rewards(outcome),
                np.int32(len(hinted)),
                where=np.asarray(outcome.where),
                threshold=self.threshold,
            )
        chosen = tuple(
            Response(outcome.responses[i].tokens, reward=float(outcome.rewards[i]))
            for i in np.flatnonzero(right)
        )
        if not chosen:
            return ()
        return [Request(len(chosen), responses=chosen, sampled=False, role=DEMONSTRATION)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        row = list(super().members(group))
        for number, outcome in of_role(group, DEMONSTRATION):
            row += [(number, member) for member in range(len(outcome.rewards))]
        return row


def rethink(
    *,
    decompose: str = DECOMPOSE,
    refine: str = REFINE,
    distill: bool = True,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """Failed groups are asked to divide the problem; if they fail again, to mend a wrong answer.

    Args:
      decompose: The first message, with ``{question}``.
      refine: The second, with ``{question}`` and ``{answer}``, the first rollout that is there.
      distill: Whether the right answers of the two also join the row after the plain prompt, as
        demonstrations; the row may then have 2 G members.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      ValueError: If a template has not its fields.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.rethink(distill=False)
      rethink(distill=False)

    References:
      Cog-Rethinker (arXiv:2510.15979), ABSTRACT reading: one wrong answer serves its whole group;
      the paper's memory of past decompositions is left out, and the wording is ours.
    """
    check_template("rethink", decompose, "question")
    check_template("rethink", refine, "question", "answer")
    _check_policy("rethink", threshold, metric)
    return _Rethink(
        decompose=decompose, refine=refine, distill=distill, threshold=threshold, metric=metric
    )


# The right steps of a wrong rollout, continued


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Repair(HintedPolicy):
    """Made by :func:`repair`."""

    judge: Callable[[str, Sequence[str]], Sequence[float]] | None = None
    teacher: Callable[[str, str], str] | None = None
    steps: str = "right_steps"
    separator: str = "\n\n"
    score: float = 0.5
    least: int = 0
    most: int = 1
    column: str = "demonstration"

    name = "repair"
    needs_slots = True

    def check(self, row: Mapping[str, Any]) -> None:
        if self.teacher is None and not isinstance(read_column(self.name, row, self.column), str):
            raise ValueError(
                f"{self.name}: {self.column!r} of prompt {prompt_name(row)} must be a text."
            )

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        judged, plain = of_role(group, JUDGE), group.outcomes[0]
        if of_role(group, DEMONSTRATION):
            return ()
        if judged:
            # What was continued with the solution in the prompt trains after the plain one.
            new = zip(self._chosen(group), (x for _, x in judged if self._right(x)), strict=False)
            done = []
            for (i, length), outcome in new:
                end, reward = outcome.responses[0], float(outcome.rewards[0])
                joined = _joined(_part(plain.responses[i], length), end.tokens[length:])
                done.append(
                    joined._replace(finish=end.finish, reward=None if self.metric else reward)
                )
            return [Request(1, responses=(x,), sampled=False, role=DEMONSTRATION) for x in done]
        requests = []
        for i, length in self._chosen(group):
            begins = _part(plain.responses[i], length)
            if self.teacher is None:
                text = FINISH.format(question=group.row["text"], solution=group.row[self.column])
                responses = (begins,) if length else ()
                requests.append(Request(1, text=text, responses=responses, role=JUDGE))
                continue
            beginning = group.decode([int(x) for x in begins.tokens])
            end = group.encode(self.teacher(group.row["text"], beginning), ends=True)
            response = _joined(begins, np.int32(end))
            requests.append(Request(1, responses=(response,), sampled=False, role=DEMONSTRATION))
        return requests

    def _right(self, outcome: Outcome) -> bool:
        return bool(outcome.where[0] and self.rewards(outcome)[0] > self.threshold)

    def _chosen(self, group: GuidedGroup) -> list[tuple[int, int]]:
        """The rollouts that are repaired, with how many of their tokens stay.

        Once their continuations are known, those whose continuation is right.
        """
        plain = group.outcomes[0]
        wrong = np.flatnonzero(plain.where & (self.rewards(plain) <= self.threshold))
        places = []
        for i in wrong:
            parts = plain.texts[i].split(self.separator)
            right = self._right_steps(group, int(i), parts)
            if self.least <= right < len(parts):
                before = self.separator.join(parts[:right]) + (self.separator if right else "")
                places.append((-right, int(i), len(before)))
        best = sorted(places)[: self.most]
        chosen = [(i, _tokens_within(group, plain.responses[i], n)) for _, i, n in best]
        if judged := of_role(group, JUDGE):
            pairs = zip(chosen, judged, strict=True)
            chosen = [place for place, (_, outcome) in pairs if self._right(outcome)]
        return chosen

    def _right_steps(self, group: GuidedGroup, i: int, parts: list[str]) -> int:
        """How many steps of a rollout there are before its first wrong one."""
        if self.judge is not None:
            scores = np.asarray(self.judge(group.row["text"], parts), np.float32)
            if scores.shape != (len(parts),):
                raise ValueError(
                    f"{self!r}: the judge must return {len(parts)} scores; got shape "
                    f"{scores.shape}."
                )
            with on_host():
                return int(first_bad_step(scores, threshold=self.score))
        known = group.outcomes[0].reward_components
        if self.steps not in known:
            raise ValueError(
                f"{self!r}: the reward must return a mapping with {self.steps!r}, how many steps "
                "come before the first wrong one, or the policy have a judge."
            )
        return max(int(known[self.steps][i]), 0) if np.isfinite(known[self.steps][i]) else 0

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        row = [(group.numbers[0], member) for member in range(group.group_size)]
        pairs = zip(self._chosen(group), of_role(group, DEMONSTRATION), strict=False)
        for (i, _), (number, outcome) in pairs:
            if self._right(outcome):
                row[i] = (number, 0)
        return row


def _part(response: Response, length: int) -> Response:
    """The first tokens of a response, with what is known of them."""

    def first(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x[:length]

    return Response(
        np.asarray(response.tokens[:length], np.int32),
        behavior_logp=first(response.behavior_logp),
        model_logp=first(response.model_logp),
        version=first(response.version),
        trains=first(response.trains),
        entropy=first(response.entropy),
    )


def _joined(first: Response, tokens: np.ndarray) -> Response:
    """A response and tokens of another writer after it, of which nothing is known."""
    n, m = len(first.tokens), len(tokens)

    def known(name: str, absent: Any, dtype: Any) -> np.ndarray:
        x = getattr(first, name)
        x = np.full(n, absent, dtype) if x is None else x
        return np.concatenate([np.asarray(x, dtype), np.full(m, absent, dtype)])

    return Response(
        np.concatenate([first.tokens, tokens]).astype(np.int32),
        behavior_logp=known("behavior_logp", np.nan, np.float32),
        model_logp=known("model_logp", np.nan, np.float32),
        version=known("version", -1, np.int32),
    )


def _tokens_within(group: GuidedGroup, response: Response, characters: int) -> int:
    """How many first tokens of a response are at most so many characters."""
    low, high = 0, len(response.tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if len(group.decode([int(x) for x in response.tokens[:middle]])) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def repair(
    *,
    judge: Callable[[str, Sequence[str]], Sequence[float]] | None = None,
    teacher: Callable[[str, str], str] | None = None,
    steps: str = "right_steps",
    separator: str = "\n\n",
    score: float = 0.5,
    least: int = 0,
    most: int = 1,
    column: str = "demonstration",
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """A wrong rollout stays up to its first wrong step, another writes the rest; if it is right.

        repaired = tokens before the first wrong step + continuation, in the place of the rollout

    What the policy wrote has its log-probabilities; the continuation has none and version -1. The
    continuation is the teacher's, or the policy's with the solution in its prompt.

    Args:
      judge: ``(question, steps) -> scores``, of a process reward model; None to read ``steps``. It
        is called several times with the same arguments and must answer alike.
      teacher: ``(question, beginning) -> continuation``; None for the policy itself.
      steps: The part of the reward that counts the steps before the first wrong one.
      separator: Between steps.
      score: Least score of a right step; only with a judge.
      least: Right steps of a rollout that is repaired at least.
      most: Repairs of a group, those with the most right steps.
      column: The column with the solution that the policy sees.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``judge`` or ``teacher`` is no function.
      ValueError: If a number is out of its range; in a run, if the reward has no such part.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.repair(most=2)
      repair(most=2)

    References:
      SCOPE (arXiv:2602.24110), ABSTRACT reading: which rollouts are repaired and how many is ours,
      and so is a policy that continues with the solution in its prompt.
    """
    name = "repair"
    for option, function in {"judge": judge, "teacher": teacher}.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name}: {option} must be a function; got {function!r}.")
    checks.check_non_negative(name, finite=True, least=least)
    checks.check_positive(name, finite=True, most=most)
    if not separator:
        raise ValueError(f"{name}: separator must not be empty.")
    _check_policy(name, threshold, metric)
    return _Repair(
        judge=judge,
        teacher=teacher,
        steps=steps,
        separator=separator,
        score=score,
        least=int(least),
        most=int(most),
        column=column,
        threshold=threshold,
        metric=metric,
    )
