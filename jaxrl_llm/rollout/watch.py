"""What looks at tokens as they come: stop strings, and who wants to be told."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rollout.requests import cut
from jaxrl_llm.rollout.slots import Tokens


class Watch:
    """Looks for stop strings, and tells of new tokens.

    Args:
      stop_strings: Texts that end a response.
      decode_text: ``decode_text(ids) -> str``; None without stop strings.
      on_tokens: ``on_tokens(group_id, request, start, out)``, or None.

    Raises:
      TypeError: If ``stop_strings`` is one string.
      ValueError: If one of the first two is given without the other, or a stop string is empty.
    """

    def __init__(
        self,
        stop_strings: Sequence[str],
        decode_text: Callable[[list[int]], str] | None,
        on_tokens: Callable[..., Any] | None,
    ):
        if isinstance(stop_strings, str):
            raise TypeError("Generation: stop_strings must be several; got one string.")
        if bool(stop_strings) != (decode_text is not None):
            raise ValueError("Generation: stop_strings and decode_text take each other.")
        if "" in stop_strings:
            raise ValueError("Generation: a stop string is empty.")
        self._stop_strings, self._decode_text = tuple(stop_strings), decode_text
        self._on_tokens = on_tokens
        self._news: deque[tuple] = deque()
        self.curious = bool(stop_strings) or on_tokens is not None

    def stop_place(self, out: Tokens, start: int, length: int) -> int | None:
        """After how many tokens a stop string is complete, or None; ``start`` hold none."""
        decode_text, tokens = self._decode_text, out.tokens[:length].tolist()

        def ends(n: int) -> bool:
            text = "" if decode_text is None else decode_text(tokens[:n])
            return any(stop in text for stop in self._stop_strings)

        if length == start or not ends(length):
            return None
        return next(n for n in range(start + 1, length + 1) if ends(n))

    def note(self, group: Any, request: int, out: Tokens, start: int, length: int) -> None:
        """Takes note of the tokens from one place to another, to be told."""
        if self._on_tokens is not None and length > start:
            self._news.append((group, request, start, cut(out, start, length)))

    def tell(self) -> None:
        """Tells of all that is noted, each once, even if a call fails or leads to more."""
        while self._news and self._on_tokens is not None:
            self._on_tokens(*self._news.popleft())
