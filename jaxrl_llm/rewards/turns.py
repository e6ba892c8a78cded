"""Steps of one response, for rewards that grade each step.

A reward returns ``turn_rewards`` (or ``test_passes``) with an entry per step and ``turn_ends``, the
number of characters of the response up to the end of each step.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np


def step_ends(text: str, *, separator: str = "\n\n") -> list[int]:
    r"""Where the steps of a response end, in characters from its start.

        a step = text up to and including a separator; the last step is the rest

    A run of only white space belongs to the step before it, and is a step only if there is none
    before.

    Args:
      text: The response.
      separator: Text between two steps.

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
      Lightman et al. (arXiv:2305.20050) and most process rewards use lines or paragraphs.
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
    """The turn of each token of a response, and -1 for tokens after the last turn.

        turn of t = number of ends that are at most len(decode(tokens before t))

    A token that spans an end belongs to the turn in which it begins. Tokens without text at the end
    of the response, such as a stop token, belong to the last turn if it extends to the end.

    Args:
      tokens: Tokens of the response.
      ends: Characters of the response up to the end of each turn, ascending.
      decode: Text of token ids; called about log2(t) times per end.

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
