"""Built-in rewards: the last integer, math-verify."""

import importlib
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.core.compose import in_full
from jaxrl_llm.rewards.answers import (
    after_thinking,
    answer_of,
    answer_text,
    boxed_answer,
    checks_rows,
    extracts,
    row_check,
    without_thinking,
)
from jaxrl_llm.rewards.formulas import replied, right_answers
from jaxrl_llm.rewards.mathematics import equal, vote_text
from jaxrl_llm.rewards.pool import VerifierPool
from jaxrl_llm.rewards.scoring import Reward, RewardError, name_of

_MINUS = "-\u2212\u2010\u2011\u2013\ufe63\uff0d"  # hyphen, minus, and what models write for them
_NUMBER = re.compile(
    r"""
    (?<![0-9]) (?:
      # 1,234,567 and 1{,}234 and 1\,234, but not 1,2,345
      (?<![0-9],) [0-9]{1,3} (?: (?: , | \{,\} | \\, ) [0-9]{3} )+ (?! [0-9] | ,[0-9] )
      | [0-9]+
    )
    (?P<fraction> (?: \. [0-9]+ )* )
    """,
    re.VERBOSE,
)
_CURRENCY = re.compile(r"(\\?\$|[£€¥])[ \t]*$")
_OPENS_A_NUMBER = "=≈(:[{"  # a minus set apart from its number is a sign after these only
_MOST_DIGITS = 4000  # Python refuses to read longer ones


def last_integer_text(text: str) -> str | None:
    """The last number of a text if it is an integer, as :func:`last_integer` reads it."""
    number = _last_integer(without_thinking(text))
    return None if number is None else str(number)


def _check_integer(metadata: Mapping[str, Any]) -> None:
    """Raises RewardError for a row that :func:`last_integer` cannot grade."""
    try:
        last_integer("", "", metadata)
    except ValueError as error:
        raise RewardError(str(error).removesuffix(".")) from error


def _check_known_integer(metadata: Mapping[str, Any]) -> None:
    if metadata.get("answer") is not None:
        _check_integer(metadata)


@extracts(last_integer_text)
@checks_rows(_check_integer)
def last_integer(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """One if the last number of the completion is the integer `metadata["answer"]`, else zero.

        reward = 1[last(completion) = last(answer)]

    A minus is part of the number unless it subtracts: "5 - 3", "5 -3" and "3-4" end in 3, 3 and 4,
    while "= -4", "is -4", "5 - -4" and "= - 4" end in -4. Unicode minus signs count as a minus,
    "1,234" is one number, a period may follow, and "7.00" is 7. A completion whose last number is
    not an integer, such as "7.5", scores zero.

    Args:
      prompt: Not read.
      completion: The reply.
      metadata: Has "answer", an integer or a text that ends in one (such as "#### 18"); or a list
        of them, any of which is right.

    Returns:
      1.0 or 0.0.

    Raises:
      ValueError: If metadata has no "answer", or an answer contains no integer.

    Example:
      >>> from jaxrl_llm.rewards import last_integer
      >>> last_integer("5 - 9 =", "5 - 9 = -4.", {"answer": "-4"})
      1.0
      >>> last_integer("5 - 2 =", "5 - 3", {"answer": "-3"})
      0.0
    """
    del prompt
    answer = metadata.get("answer")
    answers = answer if isinstance(answer, list | tuple) else [answer]
    wanted = [_last_integer(answer_text(x)) for x in answers]
    if not wanted or None in wanted:
        raise ValueError(f"last_integer: metadata['answer'] must hold an integer, got {answer!r}.")
    return float(_last_integer(without_thinking(completion)) in wanted)


@extracts(last_integer_text)
@checks_rows(_check_known_integer)
def last_integer_vote(
    prompt: str, completion: str, metadata: Mapping[str, Any]
) -> dict[str, float]:
    """The last number of the completion as a vote, for questions without a known answer.

        reward = last_integer where metadata has "answer", else 0
        answer_ids = a number for each integer, -1 for none

    ``recipes.ttrl_majority`` trains only on agreement, so the reward is only reported.

    Args:
      prompt: Not read.
      completion: The reply.
      metadata: May have "answer".

    Returns:
      ``{"reward": 0.0 or 1.0, "answer_ids": ...}``; integers that differ by a multiple of 2^23 get
      the same id.

    Example:
      >>> from jaxrl_llm.rewards import last_integer_vote
      >>> last_integer_vote("5 - 9 =", "5 - 9 = -4.", {})
      {'reward': 0.0, 'answer_ids': 8388604.0}
    """
    known = metadata.get("answer") is not None
    reward = last_integer(prompt, completion, metadata) if known else 0.0
    number = _last_integer(without_thinking(completion))
    # A component is float32, which holds integers below 2^24 exactly.
    return {"reward": reward, "answer_ids": float(-1 if number is None else number % 2**23)}


def _last_integer(text: str) -> int | None:
    """The last number of the text, or None if there is none or it is no integer."""
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None or last["fraction"].strip(".0"):
        return None
    before = text[max(0, last.start() - 2) : last.start()]
    if before.endswith(".") and not (before[0].isalnum() or before == ".."):
        return None  # the digits of a number like .5, not those after a sentence or dots
    digits = re.sub("[^0-9]", "", text[last.start() : last.start("fraction")]).lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        return None
    before = text[max(0, last.start() - 40) : last.start()].rpartition("\n")[2]
    before = _CURRENCY.sub("", before)  # the minus of -$5 stands before it

    def is_negative() -> bool:
        """Whether the characters before the number make it negative."""
        sign = before.rstrip(" \t")
        if not sign or sign[-1] not in _MINUS:
            return False
        left = sign[:-1].rstrip(" \t")
        if len(sign) < len(before):  # "- 4"
            return bool(left) and left[-1] in _OPENS_A_NUMBER
        if not left:
            return True
        if left[-1].isdigit():  # "5 -3" subtracts
            return False
        touches = len(left) == len(sign) - 1  # "is -4" and "a) -4", but "step-4" and "(2)-3"
        return not (touches and (left[-1].isalpha() or left[-1] in ")]}"))

    return -int(digits) if is_negative() else int(digits)


def _check_mathematics(function: str) -> Callable[[Mapping[str, Any]], None]:
    """The check of a row by a reward that compares with :func:`mathematics.equal`."""

    def check(metadata: Mapping[str, Any]) -> None:
        right_answers(function, metadata)

    return check


def _vote(answer: str | None) -> str | None:
    return None if answer is None else vote_text(answer)


def _replied_vote(completion: str) -> str | None:
    return _vote(replied(without_thinking(completion)))


def _boxed_vote(completion: str) -> str | None:
    return _vote(boxed_answer(completion))


def _reasoned_vote(completion: str) -> str | None:
    answer = after_thinking(completion)
    return None if answer is None else _vote(replied(answer))


@extracts(_replied_vote)
@checks_rows(_check_mathematics("math_verify"))
def math_verify(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    r"""One if the completion's mathematical answer equals `metadata["answer"]`, else zero.

        reward = 1[answer in completion = answer]   (:func:`mathematics.equal`)

    The number notation of both is normalized first: mixed numbers, groups of digits, percent,
    units, repeating decimals, scientific notation, Unicode. Rational numbers are compared exactly;
    a decimal of six digits or more may be rounded, and below 0.001 differ by a thousandth. Formulas
    are read by the parser of the package math-verify, and only if it reads the whole text. What it
    does not read, such as ``\text{no solution}``, is compared as text. An answer 2e-1 may also be
    2e - 1, with Euler's number.

    Comparing formulas can take long for some texts, and the package's time limits work only in the
    main thread, so they are off here: use `math_verify_pool` in training.

    Args:
      prompt: Not read.
      completion: The reply; a boxed formula counts, otherwise the one after "answer is" or the last
        formula or number.
      metadata: Has "answer": LaTeX with or without dollar signs, or a number; or a list of them,
        any of which is right.

    Returns:
      1.0 or 0.0.

    Raises:
      RewardError: If metadata has no "answer", or one that is not mathematics: an empty text, NaN,
        or prose without ``\text``. ``math_verify.check_row(metadata)`` raises it without a reply.
      ImportError: If math-verify is not installed.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.math_verify("Half of one?", r"It is $\frac{2}{4}$.", {"answer": "1/2"})
      1.0

    References:
      Kydlíček, Math-Verify (the package math-verify; there is no paper), which also counts a part
        of a text that it cannot read. docs/rewards.md has the differences in numbers.
    """
    del prompt
    return _equals("math_verify", replied(without_thinking(completion)), metadata)


@extracts(_boxed_vote)
@checks_rows(_check_mathematics("boxed_math"))
def boxed_math(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    r"""One if the last ``\boxed{...}`` equals `metadata["answer"]` as mathematics, else zero.

        reward = 1[last box = answer]   (:func:`mathematics.equal`)

    The box ends at its closing brace. A completion without a box, or cut off in its last box,
    scores zero, whatever numbers it contains. Use ``math_verify_pool(boxed_math)`` in training.

    Args:
      prompt, completion, metadata: As of :func:`math_verify`.

    Returns:
      1.0 or 0.0.

    Raises:
      RewardError, ImportError: As :func:`math_verify`.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.boxed_math("", r"\boxed{\frac{2}{4}}", {"answer": "1/2"})
      1.0
      >>> rewards.boxed_math("", "It is 1/2.", {"answer": "1/2"})
      0.0

    References:
      slime's `math` and TRL's `accuracy_reward` also grade boxes; slime compares by other rules,
      and TRL falls back to another formula if there is no box.
    """
    del prompt
    return _equals("boxed_math", boxed_answer(completion), metadata)


@extracts(_reasoned_vote)
@checks_rows(_check_mathematics("reasoning_accuracy"))
def reasoning_accuracy(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    r""":func:`math_verify` of the reply after its thinking; zero if no thinking has ended.

    Numbers within the thinking do not count, and a completion that never ends its thinking is
    wrong; see :func:`after_thinking`. Use ``math_verify_pool(reasoning_accuracy)`` in training.

    Args:
      prompt, completion, metadata: As of :func:`math_verify`.

    Returns:
      1.0 or 0.0.

    Raises:
      RewardError, ImportError: As :func:`math_verify`.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.reasoning_accuracy("", "<think> 3? </think> It is $4$.", {"answer": "4"})
      1.0
      >>> rewards.reasoning_accuracy("", "<think> It is $4$.", {"answer": "4"})
      0.0

    References:
      TRL's `reasoning_accuracy_reward`, which reads only LaTeX; here a plain number also counts.
    """
    del prompt
    answer = after_thinking(completion)
    return _equals("reasoning_accuracy", None if answer is None else replied(answer), metadata)


def _equals(function: str, reply: str | None, metadata: Mapping[str, Any]) -> float:
    """Whether the answer of a reply, None for none, is the right one as mathematics."""
    _optional("math_verify", "math-verify", function)
    answers = right_answers(function, metadata)
    return float(reply is not None and any(equal(reply, answer) for answer in answers))


def math_verify_pool(
    reward: Reward = math_verify, *, workers: int = 2, deadline: float = 5.0
) -> VerifierPool:
    """`math_verify` in worker processes under a hard deadline; see :class:`VerifierPool`.

    An answer that `math_verify` rejects ends the scoring with an error; a completion that takes
    longer than ``deadline`` seconds is a failed call. Close the pool, or use it in a `with`
    statement.

    Args:
      reward: `math_verify` or another reward based on it: `boxed_math`, `reasoning_accuracy`, or a
        `weighted_sum` or `majority_vote` of them.
      workers, deadline: As of :class:`VerifierPool`.

    Raises:
      ImportError: If math-verify is not installed.
      ValueError: If workers or deadline is not positive.

    Example:
      >>> from jaxrl_llm import rewards
      >>> with rewards.math_verify_pool(workers=1, deadline=20.0) as pool:
      ...     rewards.score(pool, ["1/2 + 1/2 ="], ["$1$"], [{"answer": "1"}]).rewards.tolist()
      [1.0]
    """
    _optional("math_verify", "math-verify", "math_verify_pool")
    return VerifierPool(_Warm(reward), workers=workers, deadline=deadline)


class _Warm:
    """Becomes a reward in a worker, with sympy imported before the first deadline runs."""

    def __init__(self, reward: Reward):
        self.reward, self.answer = reward, answer_of(reward)
        self.check_row = row_check(reward)
        self.weights_of_sum = getattr(reward, "weights_of_sum", None)
        self.told_absent = getattr(reward, "told_absent", None)
        self.__qualname__, self.in_full = name_of(reward), in_full(reward)

    def __call__(self, prompt: str, completion: str, metadata: Mapping[str, Any]) -> Any:
        return self.reward(prompt, completion, metadata)

    def __reduce__(self):
        return _warm, (self.reward,)


def _warm(reward: Reward) -> Reward:
    math_verify("", "$1$", {"answer": "1"})
    return reward


def _optional(module: str, package: str, function: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{function} needs the package {package}: pip install 'jaxrl_llm[train]'."
        ) from error
