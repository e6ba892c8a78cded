r"""Parses the text of a judge: one of two words, or a number.

Both functions read the text after the last ``</think>``, and return None if they find no verdict.
"""

import math
import re

from jaxrl_llm.rewards.answers import without_thinking

# Possessive, and from the first digit of a number, so that a long text takes linear time.
_RANGE = r"(?<!\d)\d++\s*+(?:-|\u2013|to)\s*+\d+"
# What follows a number, as /10 and out of 10, and a range with the word scale or in parentheses.
_SCALES = re.compile(
    rf"""
    (?<=[\d*_$\])}}]) \s*+ (?: / | (?: \( \s*+ )? out\s++of ) \s*+ [*_$({{\[]*+ \s*+ \d+ (?:\.\d+)?
    | scale\s*+(?::\s*+)?(?:of\s++|from\s++)? {_RANGE}
    | {_RANGE} \s*+ (?:-?\s*+point\s++)? scale
    | (?<!\d) \d++ -? \s? point\s++scale
    | \( \s*+ {_RANGE} \s*+ \)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_RATING = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")


def verdict(text: str, *, words: tuple[str, str] = ("no", "yes")) -> float | None:
    """0 or 1, by which of two words comes last.

    Args:
      text: Text of the judge; words match in any case, but not within other words.
      words: The word for 0 and the word for 1.

    Returns:
      0.0, 1.0, or None if neither word occurs.

    Raises:
      ValueError: If the words are not two different words.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rewards.verdict("No, wait. Yes."), jr.rewards.verdict("I know nothing")
      (1.0, None)
      >>> jr.rewards.verdict("The second is better", words=("first", "second"))
      1.0

    References:
      Zheng et al. (arXiv:2306.05685), a model as a judge; GenRM (arXiv:2408.15240), with yes and
      no.
    """
    if len(words) != 2 or not all(words) or words[0].lower() == words[1].lower():
        raise ValueError(f"verdict: words must be two that differ; got {words!r}.")
    read, last = without_thinking(text).lower(), [-1, -1]
    for i, word in enumerate(words):
        for match in re.finditer(rf"(?<!\w){re.escape(word.lower())}(?!\w)", read):
            last[i] = match.start()
    return None if max(last) < 0 else float(last[1] > last[0])


def rating(text: str, *, low: float = 0.0, high: float = 10.0) -> float | None:
    """The last number of a text on the scale of a judge, as a number in [0, 1].

        reward = (number - low) / (high - low)

    Args:
      text: Text of the judge; in "7/10" and "7 out of 10" the number is 7.
      low: The worst rating.
      high: The best, above ``low``.

    Returns:
      A number in [0, 1]; None if there is no number, or it is outside of the scale.

    Raises:
      ValueError: If the scale is empty.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rewards.rating("Two flaws. Rating: 7/10"), jr.rewards.rating("Rating: 70")
      (0.7, None)

    References:
      Zheng et al. (arXiv:2306.05685), grading of a single answer.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"rating: low must be below high; got {low:g} and {high:g}.")
    numbers = _RATING.findall(_SCALES.sub(" ", without_thinking(text)))
    if not numbers:
        return None
    share = (float(numbers[-1]) - low) / (high - low)
    return share if 0 <= share <= 1 else None
