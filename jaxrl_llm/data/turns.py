r"""The tokens of an assistant's turn, as the chat template writes it after its own prompt.

    prompt + response = the template's conversation that ends with the turn, token for token

A template may write more than the text: an empty reasoning (Qwen 3), the end of the reasoning that
the prompt has opened (Qwen 3.5), a channel (gpt-oss). What it writes is rendered, not guessed: the
conversation with the turn must begin with the prompt, and the rest is the response. A text with a
reasoning of its own is written as the template writes a message with ``reasoning_content``, if it
reads that. A template that writes the turn otherwise than after its prompt is refused.
"""

import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jaxrl_llm.core.reasoning import CHANNEL_TOKENS, TAGS, reasoning_end, split_reply
from jaxrl_llm.data.messages import Message
from jaxrl_llm.data.tokenizer import Tokenizer

_USER: Message = {"role": "user", "content": "Hi"}
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message in which templates read its reasoning."""

# Of the private use area, so that no template holds or changes them.
_TURN, _THOUGHT = "\ue000\ue002\ue000", "\ue000\ue004\ue000"
_HELD = re.compile("\ue000\ue005+\ue000")


class TurnWriter:
    """Writes texts as the last turn of a conversation.

    Args:
      tokenizer: A ``data.Tokenizer`` with a chat template.
      stop_ids: Tokens that end a turn; the template may end it with another one.

    Raises:
      ValueError: If the template changes the text of a turn.

    Attributes:
      close: The tokens after the text of a turn, up to the one that ends it; empty if the template
        writes none.
      end: These, or else the first of ``stop_ids``.
      opened: The tag that ends the reasoning, if the prompt opens it; else empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._opening = self._render([_USER], opening=True)
        self._prompt = list(tokenizer.encode(self._opening))
        self.opened = reasoning_end(self._opening)
        _, place, self._after = self._render([_USER, _assistant(_TURN)]).partition(_TURN)
        if not place or _TURN in self._after:
            raise ValueError("the chat template changes the assistant's message")
        ids = encode_inside(tokenizer, self._after)
        ends = [n for n, i in enumerate(ids) if i in stop_ids or self._is_special(i)]
        last = ends[0] if ends else -1
        # A special token may stand right before the one that ends the turn (Cohere).
        eos = next((n for n in ends if ids[n] in tokenizer.eos_ids), last)
        last = eos if set(range(last, eos)) <= set(ends) else last
        self.close, self._trail = ids[: last + 1], len(ids) - last - 1
        self.end = self.close or list(stop_ids[:1])

    def tokens(self, text: str, *, ends: bool = True) -> list[int]:
        """The tokens of a turn after the prompt.

        Args:
          text: Its text. Special tokens that it spells are plain text, but for the tags of the
            reasoning that the template knows.
          ends: Whether the turn ends. One that does not may end within its reasoning, and has the
            white space at its end.

        Raises:
          ValueError: If the template does not write the turn after its prompt.
        """
        if not text:
            return list(self.end) if ends else []
        held: list[str] = []
        body = self._body(text, held, ends)
        if ends and self.close:
            whole = self._encode(self._opening + body + self._after, held)
            whole = whole[: len(whole) - self._trail]
            if self._continues(whole) and whole[-1] == self.close[-1]:
                return whole[len(self._prompt) :]
        whole = self._encode(self._opening + body, held)
        # A tokenizer may merge the end of the prompt with the text; the prompt's tokens stay.
        merged = not self._continues(whole)
        rest = self._encode(body, held, inside=True) if merged else whole[len(self._prompt) :]
        return [*rest, *self.end] if ends else rest

    def inside(self, text: str) -> list[int]:
        """The tokens of a text within a turn, such as the rest of one that is sampled in part."""
        held: list[str] = []
        tags = (*self._tags, *(CHANNEL_TOKENS if self._has_channels else ()))
        return self._encode(self._mask(text, held, tags), held, inside=True)

    def _continues(self, tokens: list[int]) -> bool:
        return tokens[: len(self._prompt)] == self._prompt

    def _body(self, text: str, held: list[str], ends: bool) -> str:
        """The text that the template writes between its prompt and the end of the turn.

        Parts that spell special tokens are marks in it; they are added to ``held``.
        """
        thinking, final = split_reply(text)
        masked = self._mask(text, held, self._tags)
        if thinking is not None and final is None:
            if ends:
                raise ValueError(
                    f"The response {text[:40]!r} opens its reasoning and does not end it, so the "
                    "chat template cannot write it as a turn."
                )
            return masked[self._overlap(masked) :]
        if thinking is not None and self.opened and not self._overlap(masked):
            masked = self._opening[self._opening.rfind(self._opened_by) :] + masked
        plain = self._written(_assistant(masked))
        parts = [x or "" for x in split_reply(masked)]
        chosen = plain if self._follows(plain, parts) else None
        if thinking is not None and self._reads_reasoning:
            parts = [self._mask(x or "", held, self._tags) for x in (thinking, final)]
            fields = dict.fromkeys(REASONING, parts[0].strip())
            known = self._written({**_assistant(parts[1].lstrip("\n")), **fields})
            # The text as it is, where the template reads the same from it.
            same = plain is not None and "".join(plain.split()) == "".join((known or "").split())
            if self._follows(known, parts) and (chosen is None or not same):
                chosen = known
        if chosen is None:
            raise ValueError(self._refusal(text, plain))
        body = chosen[len(self._opening) :]
        end = text[len(text.rstrip()) :]
        if not ends and not body.endswith(end):  # trimmed; but the text goes on
            body += end
        return body

    def _follows(self, written: str | None, parts: Sequence[str]) -> bool:
        """Whether a conversation goes on after the prompt with the reasoning and the final part.

        The template may begin a reasoning before the one of the text, which is then doubled.
        """
        if written is None or not written.startswith(self._opening):
            return False
        body = written[len(self._opening) :]
        if any(part.strip() not in body for part in parts):
            return False
        begun = int(bool(self.opened))
        return all(body.count(x) + begun <= 1 + "".join(parts).count(x) for x, _ in TAGS)

    def _written(self, message: Message) -> str | None:
        """The conversation up to the end of a turn; None if the template refuses it."""
        try:
            text = self._render([_USER, message])
        except ValueError:
            return None
        if not text.endswith(self._after):
            return None
        return text[: len(text) - len(self._after)]

    @cached_property
    def _opened_by(self) -> str:
        """The tag of reasoning with which the prompt ends, or empty."""
        return next((tag for tag, close in TAGS if close == self.opened), "")

    def _overlap(self, text: str) -> int:
        """How many characters of a text the prompt has written already: a tag of reasoning."""
        begun = len(text) - len(text.lstrip())
        if not self.opened or not text.startswith(self._opened_by, begun):
            return 0
        end = begun + len(self._opened_by)
        space = self._opening[len(self._opening.rstrip()) :]
        return end + len(space) if text.startswith(space, end) else end

    def _refusal(self, text: str, written: str | None) -> str:
        start = f"The chat template does not write the response {text[:40]!r} after its prompt"
        rest = (
            "so the two are not one conversation; use a template whose turns begin as its prompts "
            "end (chat_template.jinja in the model's folder)"
        )
        if "enable_thinking" in _sources(self._tokenizer):
            rest += ", or its switch (--data.template-options enable_thinking=false or true)"
        if written is None:
            return f"{start}, {rest}."
        written = _HELD.sub("...", written)
        same = len(os.path.commonprefix([self._opening, written]))
        same = self._opening.rfind("\n", 0, max(same - 1, 0)) + 1
        return (
            f"{start}: the prompt ends with {self._opening[same:][-60:]!r}, the conversation with "
            f"{written[same:][:60]!r}, {rest}."
        )

    @cached_property
    def _reads_reasoning(self) -> bool:
        fields = dict.fromkeys(REASONING, _THOUGHT)
        written = self._written({**_assistant(_TURN), **fields})
        return written is not None and _THOUGHT in written

    @cached_property
    def _writes(self) -> str:
        """The source of the template, and what it writes."""
        fields = dict.fromkeys(REASONING, _THOUGHT)
        text = _sources(self._tokenizer) + self._opening
        return text + (self._written({**_assistant(_TURN), **fields}) or "")

    @cached_property
    def _tags(self) -> tuple[str, ...]:
        """The tags of reasoning of the families whose tags the template writes or reads."""
        known = (pair for pair in TAGS if any(tag in self._writes for tag in pair))
        return tuple(tag for pair in known for tag in pair)

    @cached_property
    def _has_channels(self) -> bool:
        return all(token in self._writes for token in CHANNEL_TOKENS[:2])

    def _mask(self, text: str, held: list[str], tags: Sequence[str]) -> str:
        """A text with marks for its parts that spell other special tokens than tags.

        A part is the text between two tags, without the white space around it.
        """
        encode = self._tokenizer.encode
        if encode(text) == encode(text, allow_special=False) and not _HELD.search(text):
            return text
        parts = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
        for n in range(0, len(parts), 2):  # the others are tags
            core = parts[n].strip()
            if encode(core) != encode(core, allow_special=False) or _HELD.search(core):
                held += [] if core in held else [core]
                mark = "\ue000" + "\ue005" * (held.index(core) + 1) + "\ue000"
                parts[n] = parts[n].replace(core, mark, 1)
        return "".join(parts)

    def _encode(self, text: str, held: Sequence[str], *, inside: bool = False) -> list[int]:
        """The tokens of a text with marks, whose parts are plain text."""
        pieces, marks = _HELD.split(text), _HELD.findall(text)
        first = pieces.pop(0)
        tokens = encode_inside(self._tokenizer, first) if inside else self._tokenizer.encode(first)
        tokens = list(tokens)
        for mark, piece in zip(marks, pieces, strict=True):
            core = held[len(mark) - 3]
            tokens += encode_inside(self._tokenizer, core, allow_special=False)
            tokens += encode_inside(self._tokenizer, piece)
        return tokens

    def _is_special(self, token: int) -> bool:
        return not self._tokenizer.decode([token]) and bool(
            self._tokenizer.decode([token], skip_special=False)
        )

    def _render(self, messages: Sequence[Message], *, opening: bool = False) -> str:
        return self._tokenizer.chat(messages, add_generation_prompt=opening)


def encode_inside(tokenizer: Tokenizer, text: str, *, allow_special: bool = True) -> list[int]:
    """The tokens of a text within another text: without BOS at its start."""
    prefix = list(tokenizer.encode(""))
    if not allow_special:
        return list(tokenizer.encode(text, allow_special=False))[len(prefix) :]
    # A text that begins with BOS itself gets no other.
    start = tokenizer.decode(prefix, skip_special=False)
    return list(tokenizer.encode(start + text))[len(prefix) :]


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _sources(tokenizer: Any) -> str:
    """The source of a tokenizer's chat template, if it has one."""
    source = getattr(tokenizer, "template", None)
    return source if isinstance(source, str) else ""
