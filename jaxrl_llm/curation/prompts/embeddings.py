"""Embeddings of texts that need no model."""

import functools
import re
import zlib
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.core import checks

__all__ = ["hashed_magnitudes", "hashed_responses", "hashed_words"]

# An integer or a decimal number, whose thousands may be separated by commas.
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def hashed_words(text: str, *, size: int = 256) -> np.ndarray:
    """The word counts of a text, hashed to a fixed length and scaled to norm 1.

        e_j = sum over words w with hash(w) mod size = j of sign(w);   e / |e|

    Texts that share words have a cosine above 0. It replaces an encoder in a run without one.
    Words are lower case; numbers and symbols count as words.

    Args:
      text: Any text.
      size: D, above 0.

    Returns:
      ``[D]`` float32, read-only; all 0 for a text without words.

    Raises:
      ValueError: If ``size`` is not a positive integer.

    Example:
      >>> import jaxrl_llm as jr
      >>> add, sum_, sky = map(jr.curation.hashed_words, ("Add 2 and 3", "add 4 and 5", "blue sky"))
      >>> bool(add @ sum_ > 0.4), abs(float(add @ sky)) < 0.3
      (True, True)

    References:
      Weinberger et al. (arXiv:0902.2206), feature hashing with signs.
    """
    checks.check_count("hashed_words", size=size)
    return _hashed_words(text, size)


def hashed_magnitudes(text: str, *, size: int = 256) -> np.ndarray:
    """The words of a text and the magnitudes of its numbers, each part scaled to norm 1.

        first size entries:  hashed_words of the text with 0 for every number
        then m / |m|,   m_j = sum over numbers x of exp(-((log10(1 + x) - j / 4) / 0.5)^2),  j < 25

    Texts with the same words and with numbers of about the same size are near each other. It sees
    no sign, no order of numbers and no digits; numbers above 1e6 count as 1e6.

    Args:
      text: Any text.
      size: Length of the part of the words, above 0.

    Returns:
      ``[size + 25]`` float32, read-only; a part without words or numbers is 0.

    Raises:
      ValueError: If ``size`` is not a positive integer.

    Example:
      >>> import jaxrl_llm as jr
      >>> texts = "What is 21 + 38?", "What is 45 + 17?", "What is 5000 + 7000?"
      >>> small, other, large = map(jr.curation.hashed_magnitudes, texts)
      >>> bool(small @ other > 1.9), bool(small @ large < 1.1)  # of 2 at most
      (True, True)

    References:
      As :func:`hashed_words`; the magnitudes are ours.
    """
    checks.check_count("hashed_magnitudes", size=size)
    words = _hashed_words(_NUMBER.sub("0", text), size)
    numbers = np.array([float(x.replace(",", "")) for x in _NUMBER.findall(text)])
    logs = np.log10(1 + np.minimum(numbers, 1e6))
    parts = np.exp(-(((logs[:, None] - np.arange(25) / 4) / 0.5) ** 2)).sum(axis=0)
    norm = float(np.linalg.norm(parts))
    vector = np.concatenate([words, np.float32(parts / norm if norm else parts)])
    vector.flags.writeable = False
    return vector


def hashed_responses(texts: Sequence[Sequence[str]], *, size: int = 256) -> np.ndarray:
    """:func:`hashed_words` of each response of a batch.

    For ``Computed("embeddings", hashed_responses, "responses")``.

    Args:
      texts: P lists of G responses.
      size: D, above 0.

    Returns:
      ``[P, G, D]`` float32; all 0 for a response without words.

    Raises:
      ValueError: If ``size`` is not a positive integer.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.hashed_responses([["a b", "c"]], size=8).shape
      (1, 2, 8)

    References:
      As :func:`hashed_words`.
    """
    checks.check_count("hashed_responses", size=size)
    return np.stack([[_hashed_words(text, size) for text in group] for group in texts])


@functools.lru_cache(maxsize=65536)
def _hashed_words(text: str, size: int) -> np.ndarray:
    vector = np.zeros(size, np.float32)
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        code = zlib.crc32(word.encode())
        vector[(code >> 1) % size] += 1.0 if code & 1 else -1.0
    norm = float(np.linalg.norm(vector))
    vector = vector / norm if norm else vector
    vector.flags.writeable = False
    return vector
