"""Parsing and rewards of predictions that a policy writes about its own rollouts.

Text in, NumPy out; they run on the host. An option out of its range raises ValueError.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rewards.meta import Prediction, meta_rewards

_NAMES = ("math_notion", "pass_rate", "solution_length")
_DECODE = json.JSONDecoder().raw_decode
_LINE = re.compile(r"math_notion\s*:\s*\[([^\]]*)\]")


class MetaAnswer(NamedTuple):
    """The prediction of one response.

    Attributes:
      length: Tokens of a right solution; NaN if missing.
      rate: The pass rate; NaN if missing.
      notions: Concepts that right solutions use; empty if missing.
    """

    length: float
    rate: float
    notions: tuple[str, ...]


def parse_meta_answer(text: str, *, scale: int = 8) -> MetaAnswer:
    """Reads the prediction in a response.

        rate = pass_rate / scale

    It is the last JSON object with a key "math_notion" (a list of texts, or texts divided by
    commas), "pass_rate" or "solution_length" (integers); without one, the notions of a line
    ``math_notion: [...]``. Plural notions become singular. An entry that is missing or has another
    type does not affect the others.

    Args:
      text: The response.
      scale: Number of attempts that ``pass_rate`` counts, at least 1.

    Returns:
      A :class:`MetaAnswer`.

    Raises:
      ValueError: If ``scale`` is below 1.

    Example:
      >>> import jaxrl_llm as jr
      >>> text = 'So: {"math_notion": ["medians"], "pass_rate": 6, "solution_length": 120}'
      >>> jr.rewards.parse_meta_answer(text)
      MetaAnswer(length=120.0, rate=0.75, notions=('median',))
      >>> jr.rewards.parse_meta_answer("about six of eight")
      MetaAnswer(length=nan, rate=nan, notions=())

    References:
      MASA (arXiv:2510.03259), the released code, whose object must begin with "math_notion".
    """
    checks.check_count("parse_meta_answer", scale=scale)
    record: dict[str, Any] = {}
    place = text.rfind("{")
    while place >= 0:
        try:
            value, _ = _DECODE(text, place)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and any(name in value for name in _NAMES):
            record = value
            break
        place = text.rfind("{", 0, place)
    words = record.get("math_notion", ())
    if not record and (line := _LINE.search(text)):
        words = line.group(1).replace('"', "").replace("'", "")
    if isinstance(words, str):
        words = [word.strip().strip("[").strip("]") for word in words.split(",")]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        words = []
    words = [word for word in words if word]
    rate, length = _integer(record.get("pass_rate")), _integer(record.get("solution_length"))
    notions: dict[str, None] = {}
    for word in words:  # a regular English plural as its singular
        lower = word.lower()
        singular = word[:-1] if lower.endswith("s") else word
        if lower == "series" or lower.endswith("ss"):
            singular = word
        elif lower.endswith("ies"):
            singular = word[:-3] + "y"
        elif lower.endswith(("ches", "shes", "xes", "zes", "oes")):
            singular = word[:-2]
        notions[singular] = None
    return MetaAnswer(length, rate / scale, tuple(notions))


def meta_answer_rewards(
    answers: Sequence[MetaAnswer],
    *,
    problem: str,
    texts: Sequence[str],
    rewards: np.ndarray,
    lengths: np.ndarray,
    where: np.ndarray | None = None,
    base: float = 0.01,
    inclusive: bool = False,
) -> np.ndarray:
    """:func:`meta_rewards` of parsed text predictions.

        notion n counts if it occurs in more right solutions than wrong ones

    A notion that occurs in the problem is not counted. An answer without any prediction gets 0.

    Args:
      answers: K, from :func:`parse_meta_answer`.
      problem: The question.
      texts: G, the solutions.
      rewards: ``[G]``, of the solutions; above 0 for a right one.
      lengths: ``[G]``, their tokens.
      where: bool ``[G]``, True for solutions that take part.
      base, inclusive: See :func:`meta_rewards`.

    Returns:
      ``[K]`` float32 in [0, 1].

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> answer = jr.rewards.MetaAnswer(150.0, 0.5, ("median", "circle"))
      >>> reward = jr.rewards.meta_answer_rewards(
      ...     [answer], problem="The triangle", texts=["the median", "a median", "circle", ""],
      ...     rewards=np.float32([1, 1, 0, 0]), lengths=np.array([100, 200, 50, 60]))
      >>> reward.round(4).tolist()  # (1 + 1 + 1/2) / 3
      [0.833...]

    References:
      MASA (arXiv:2510.03259), the released code, which uses the prompt of the prediction, including
      its instructions, as the problem.
    """
    rewards = np.asarray(rewards, np.float32)
    there = np.ones(rewards.shape, bool) if where is None else np.asarray(where)
    right, wrong = there & (rewards > 0), there & ~(rewards > 0)
    width = max((len(answer.notions) for answer in answers), default=0)
    notions = np.zeros((len(answers), max(width, 1)), np.int32)
    notion_where = np.zeros(notions.shape, bool)
    for k, answer in enumerate(answers):
        for n, notion in enumerate(answer.notions):
            has = np.array([notion in text for text in texts], bool)
            notions[k, n] = np.sum(has & right) - np.sum(has & wrong)
            notion_where[k, n] = notion not in problem
    prediction = Prediction(
        length=np.array([answer.length for answer in answers], np.float32),
        rate=np.array([answer.rate for answer in answers], np.float32),
        notions=notions,
        notion_where=notion_where,
    )
    result = meta_rewards(
        prediction, rewards, np.asarray(lengths), where=there, base=base, inclusive=inclusive
    )
    return np.asarray(result)


def _integer(value: Any) -> float:
    """The number, or NaN for what is no integer."""
    exact = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if exact and abs(value) < 2**31 else math.nan
