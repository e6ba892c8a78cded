"""Common token boundaries of two tokenizations of a text."""

from collections.abc import Callable, Sequence

import numpy as np

# What decoders write for bytes that are no character, such as the first of several.
_BROKEN = "\ufffd"


def token_ends(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[int | None]:
    """Characters of the text up to the end of each token; None inside a character.

    A token is decoded together with the last one that ended a character, so that a decoder with
    special rules for the beginning of a text does not apply them in its middle.

    Args:
      tokens: Tokens of one text.
      decode: Text of token ids.

    Returns:
      One number per token, ascending except for None.

    Example:
      >>> decode = lambda ids: bytes(ids).decode(errors="replace")
      >>> token_ends(list("aé".encode()), decode)
      [1, None, 2]
    """
    tokens = list(tokens)
    ends: list[int | None] = []
    before = start = length = 0  # the tokens before:start end a character, and so does all before
    for stop in range(1, len(tokens) + 1):
        lead = decode(tokens[before:start])
        text = decode(tokens[before:stop])
        whole = text.startswith(lead) and not text[len(lead) :].endswith(_BROKEN)
        if not whole:
            ends.append(None)
            continue
        length += len(text) - len(lead)
        ends.append(length)
        before, start = start, stop
    return ends


def align_spans(
    ends: Sequence[int | None], other_ends: Sequence[int | None]
) -> tuple[np.ndarray, np.ndarray]:
    """The shortest spans of a text that end at token boundaries of both tokenizations.

        span k = the text between the k-th and the next common token boundary

    Args:
      ends: From :func:`token_ends`.
      other_ends: The same for the other tokenizer's tokens.

    Returns:
      The span of each token of the two: int32, from 0; -1 after the last common boundary.

    Example:
      >>> import jaxrl_llm as jr
      >>> ours, theirs = jr.data.align_spans([1, 2, 4, 5], [2, 3, 5])
      >>> ours.tolist(), theirs.tolist()  # they meet at 2 and at 5
      ([0, 0, 1, 1], [0, 1, 1])

    References:
      The alignment by byte offsets of TRL's GOLD trainer, where a remainder without a common
      boundary is also a span.
    """
    common = sorted({x for x in ends if x} & {x for x in other_ends if x})

    def spans(ends: Sequence[int | None]) -> np.ndarray:
        out, span = np.full(len(ends), -1, np.int32), 0
        for i, end in enumerate(ends):
            if span < len(common):
                out[i] = span
            elif i and end is not None and end == ends[i - 1]:
                out[i] = out[i - 1]  # a token without text
            if end is not None and span < len(common) and end == common[span]:
                span += 1
        return out

    return spans(ends), spans(other_ends)
