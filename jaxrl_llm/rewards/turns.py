"""Steps of one response, for rewards that grade each of them.

A reward returns ``turn_rewards`` (or ``test_passes``) with an entry a step and ``turn_ends``, the
number of characters of the response up to the end of each step.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np


def step_ends(text: str, *, separator: str = "\n\n") -> list[int]:
    r"""Where the steps of a response end, in characters from its start.

        a step = a stretch up to and with a separator; the last one is what follows

    A stretch of white space alone belongs to the step before it, and is a step only if there is
    none.

    Args:
      text: The response.
      separator: What stands between two steps.

    Returns:
      Ends in ascending order, at least one; the last is the length of the text.

    Raises:
      ValueError: If the separator is empty.

    Example:
      >>> import jaxrl_llm as jr
      >>> text = "2 + 2 = 4\n\n4 + 1 = 5\n\n5"
      >>> ends = jr.rewards.step_ends(text)
      >>> ends, [text[a:b].strip() for a, b in zip([0, *ends], ends)]
      ([11, 22, 23], ['2 + 2 = 4', '4 + 1 = 5', '5'])

    References:
      Lightman et al. (arXiv:2305.20050) and most process rewards take lines or paragraphs.
    """
    if not separator:
        raise ValueError("step_ends: separator must not be empty.")
    ends, start = [], 0
    while (at := text.find(separator, start)) >= 0:
        ends.append(at + len(separator))
        start = ends[-1]
    ends.append(len(text))
    steps: list[int] = []
    for begin, end in zip([0, *ends], ends, strict=False):
        if steps and not text[begin:end].strip():
            steps[-1] = end
        else:
            steps.append(end)
    return steps


def turns_of_tokens(
    tokens: Sequence[int], ends: Sequence[float], *, decode: Callable[[list[int]], str]
) -> np.ndarray:
    """The turn of each token of a response, and -1 for tokens behind the last turn.

        turn of t = how many ends are at most len(decode(tokens before t))

    A token that lies across an end belongs to the turn in which it begins; tokens without text at
    the end of the response, such as a stop token, to a last turn that goes up to there.

    Args:
      tokens: Of the response.
      ends: Characters of the response up to the end of each turn, ascending.
      decode: Text of token ids; called about log2(t) times an end.

    Returns:
      int32 ``[t]``.

    Raises:
      ValueError: If the ends are not ascending.

    Example:
      >>> import jaxrl_llm as jr
      >>> tokens = list(b"ab cd e")
      >>> jr.rewards.turns_of_tokens(tokens, [3, 6], decode=lambda x: bytes(x).decode()).tolist()
      [0, 0, 0, 1, 1, 1, -1]

    References:
      Dr. Kernel (arXiv:2602.05885) and VeRPO (arXiv:2601.03525), whose turns are messages of a
      conversation; in one response they are its steps.
    """
    if any(b < a for a, b in itertools.pairwise(ends)):
        raise ValueError(f"turns_of_tokens: ends must be ascending; got {list(ends)}.")
    tokens, places = list(tokens), range(len(tokens) + 1)

    def length(count: int) -> int:
        return len(decode(tokens[:count]))

    firsts = [bisect.bisect_left(places, end, key=length) for end in ends]
    if firsts and ends[-1] >= length(len(tokens)):
        firsts[-1] = len(tokens)  # with what has no text, such as a stop token
    turns = np.searchsorted(np.asarray(firsts, int), np.arange(len(tokens)), side="right")
    return np.where(turns < len(firsts), turns, -1).astype(np.int32)
