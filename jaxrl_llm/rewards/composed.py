"""Composed rewards: a weighted sum of several, and a vote for questions without answers.

Both can be pickled if their rewards can, so `VerifierPool` and `math_verify_pool` accept them.
"""

import hashlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.core.compose import in_full
from jaxrl_llm.rewards._worker import NOTE
from jaxrl_llm.rewards.answers import Extract, answer_of, row_check
from jaxrl_llm.rewards.scoring import Reward, RewardError, check_arguments, name_of


class weighted_sum:  # noqa: N801 (used as a function: `reward = weighted_sum({...})`)
    """The weighted sum of several rewards of one completion.

        reward = sum of weight_n term_n

    It returns a mapping: "reward", and each term by its name, without its weight. A term that is
    NaN or None does not apply, and the sum is that of the others; a warning says once if it does
    not apply to most responses of a batch, and the metric ``reward_absent/NAME`` to how many. Other
    entries of a term's mapping, such as ``answer_ids``, are passed on under their names. The error
    of a term names the term.

    Args:
      terms: Maps a name to a reward and its weight. The terms are called one after another. A
        reward that scores batches, such as a `VerifierPool`, cannot be a term: put the sum into the
        pool.

    Raises:
      ValueError: If there are no terms, one is named "reward", or a weight is not finite or 0.
      TypeError: If a term is not a reward of one completion, or takes other arguments.

    Example:
      >>> from jaxrl_llm import rewards
      >>> reward = rewards.weighted_sum(
      ...     {"right": (rewards.last_integer, 1.0), "format": (rewards.think_format, 0.2)}
      ... )
      >>> reward("2 + 2 =", "<think></think> 4", {"answer": "4"})
      {'reward': 1.2, 'right': 1.0, 'format': 1.0}
    """

    def __init__(self, terms: Mapping[str, tuple[Reward, float]]):
        if not terms:
            raise ValueError("weighted_sum: there are no terms.")
        for name, (term, weight) in terms.items():
            if name == "reward":
                raise ValueError("weighted_sum: no term may have the name 'reward' of the sum.")
            if not math.isfinite(weight) or not weight:
                raise ValueError(
                    f"weighted_sum: the weight of {name!r} must be finite and not 0, got {weight}."
                )
            if not callable(term) or hasattr(term, "score_batch"):
                raise TypeError(
                    f"weighted_sum: {name!r} must be a reward of one completion, got "
                    f"{name_of(term)}; put the sum into a VerifierPool, not a pool into the sum."
                )
            check_arguments("weighted_sum", term)
        self.terms, self.told_absent = dict(terms), set[str]()
        named = [
            (f"{weight:g} {name}" if weight != 1 else name, in_full(term))
            for name, (term, weight) in self.terms.items()
        ]
        self.__qualname__ = " + ".join(name for name, _ in named)
        self.in_full = " + ".join(f"{name}={term}" for name, term in named)

    def __repr__(self) -> str:
        return f"weighted_sum({self.__qualname__})"

    @property
    def weights_of_sum(self) -> dict[str, float]:
        """The weight of each term."""
        return {name: weight for name, (_, weight) in self.terms.items()}

    @property
    def answer(self) -> Extract | None:
        """The extractor of the first term that has one; see :func:`answer_of`."""
        return next((x for term, _ in self.terms.values() if (x := answer_of(term))), None)

    def check_row(self, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError for a row that one of the terms cannot grade; see `row_check`."""
        for term, _ in self.terms.values():
            if (check := row_check(term)) is not None:
                check(metadata)

    def __call__(
        self, prompt: str, completion: str, metadata: Mapping[str, Any]
    ) -> dict[str, float]:
        """All terms of one completion, and their sum."""
        values: dict[str, float] = {"reward": 0.0}
        more: dict[str, float] = {}
        for name, (term, weight) in self.terms.items():
            try:
                value: Any = term(prompt, completion, metadata)
            except Exception as error:
                error.add_note(f"{NOTE}{name!r}")
                raise
            if inspect.isawaitable(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise TypeError(f"weighted_sum: the term {name!r} is async, which no sum awaits.")
            if isinstance(value, Mapping):
                more |= {key: x for key, x in value.items() if key != "reward"}
            value = math.nan if value is None else value
            values[name] = number = _number("weighted_sum", name, value)
            if not math.isnan(number):
                values["reward"] += weight * number
        if all(math.isnan(values[name]) for name in self.terms):
            values["reward"] = math.nan
        return {**values, **{key: x for key, x in more.items() if key not in values}}


class majority_vote:  # noqa: N801 (used as a function: `reward = majority_vote(boxed_math)`)
    """The answer of a completion as a vote, for questions without a known answer.

        answer_ids = a number for each answer, -1 for none or an empty one
        reward     = the verifier's where metadata has "answer", else 0

    Answers are one vote if their texts are equal. Those of ``math_verify``, ``boxed_math`` and
    ``reasoning_accuracy`` have the value of a number, in any notation, without its unit, as their
    text; two forms of another formula, such as 2 + x and x + 2, are two votes.

    ``recipes.ttrl_majority`` trains only on agreement: the reward is only reported, so held-out
    questions with answers measure the progress.

    Args:
      verifier: Grades the questions whose answers are known; its attribute ``answer`` extracts the
        answer, see :func:`answer_of`. None for no grades.
      answer: Another extractor, from a completion to a text or None.

    Raises:
      ValueError: If neither provides an extractor.

    Example:
      >>> from jaxrl_llm import rewards
      >>> vote = rewards.majority_vote(rewards.dapo_math)
      >>> first, second = (vote("", f"Answer: {x}", {}) for x in ("1,000", "$1000$"))
      >>> first == second, first["reward"], vote("", "I do not know", {})["answer_ids"]
      (True, 0.0, -1.0)

    References:
      TTRL (arXiv:2504.16084). Two different answers of a group get the same number with a
      probability of 2^-23.
    """

    def __init__(self, verifier: Reward | None = None, *, answer: Extract | None = None):
        extract = answer_of(verifier) if answer is None else answer
        if extract is None:
            what = "there is no verifier" if verifier is None else f"{name_of(verifier)} names none"
            raise ValueError(
                f"majority_vote: answer must say how the answer of a completion is extracted; "
                f"{what}."
            )
        if hasattr(verifier, "score_batch"):
            raise TypeError(
                f"majority_vote: the verifier must grade one completion, got {name_of(verifier)}; "
                "put the vote into a VerifierPool, not a pool into the vote."
            )
        self.verifier, self.answer = verifier, extract
        self.__qualname__ = f"majority_vote({name_of(verifier or extract)})"
        parts = (in_full(x) for x in (verifier, answer) if x is not None)
        self.in_full = f"majority_vote({', '.join(parts)})"

    def __repr__(self) -> str:
        return self.__qualname__

    def check_row(self, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError for a row with an answer that the verifier cannot grade."""
        check = row_check(self.verifier)
        if check is not None and metadata.get("answer") is not None:
            check(metadata)

    def __call__(
        self, prompt: str, completion: str, metadata: Mapping[str, Any]
    ) -> dict[str, float]:
        """The reward and the vote of one completion."""
        text, reward = self.answer(completion), 0.0
        if self.verifier is not None and metadata.get("answer") is not None:
            value: Any = self.verifier(prompt, completion, metadata)
            reward = _number("majority_vote", name_of(self.verifier), value)
        if not text:  # an empty box is no answer
            return {"reward": reward, "answer_ids": -1.0}
        # A component is float32, which holds integers below 2^24 exactly.
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=4).digest()
        return {"reward": reward, "answer_ids": float(int.from_bytes(digest) % 2**23)}


def _number(function: str, name: str, value: Any) -> float:
    """The number that a reward returned, or the entry "reward" of its mapping."""
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise RewardError(f"{function}: {name!r} returns a mapping without an entry 'reward'")
        value = value["reward"]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{function}: {name!r} returns {value!r:.80}, not a number") from error
