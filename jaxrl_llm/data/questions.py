"""Questions: prompts with their token ids."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Stands for the user's message while the template is rendered: of the private use area, so that no
# template holds or changes it.
_PLACE = "\ue000\ue001\ue000"


class Question(NamedTuple):
    """A prompt and its token ids, chat template included."""

    prompt: Any
    tokens: list[int]


@dataclass(frozen=True)
class TextEncoder:
    """Text as the tokens that a run trains on.

    A special token that is spelled in a message, such as the end of a turn, is encoded as plain
    text: a question cannot imitate the template.

    Attributes:
      tokenizer: A ``data.Tokenizer``.
      room: Tokens that there are for a prompt.
      chat: Through the chat template, as the user's message; else as plain text.
      system: A system message before it.
    """

    tokenizer: Any
    room: int
    chat: bool = True
    system: str | None = None

    def prompt(self, text: str, name: str) -> list[int]:
        """The prompt of a message.

        Args:
          text: The user's message.
          name: What errors call the prompt.

        Raises:
          ValueError: If it is longer than ``room`` or has no token.
        """
        tokens = self._encode(text)
        if not tokens:
            raise ValueError(f"Prompt {name} has no tokens.")
        if len(tokens) > self.room:
            raise ValueError(
                f"Prompt {name} has {len(tokens)} tokens, but the model's context leaves room for "
                f"{self.room} before the response."
            )
        return tokens

    def takes_text(self, text: str) -> bool:
        """Whether a message is a prompt that there is room for."""
        return 0 < len(self._encode(text)) <= self.room

    def response(self, text: str, *, ends: bool = False) -> list[int]:
        """A response, with the stop token if it ``ends``."""
        first = len(self.tokenizer.encode(""))
        tokens = self.tokenizer.encode(text, allow_special=False)[first:]
        return tokens + list(self.tokenizer.eos_ids[:1]) if ends else tokens

    def _encode(self, text: str) -> list[int]:
        tokenizer = self.tokenizer
        literal = list(tokenizer.encode(text, allow_special=False))
        if not self.chat:
            return literal
        if literal == list(tokenizer.encode(text)):
            return list(tokenizer.encode(self._render(text)))
        # In three pieces only where needed: a tokenizer may merge characters across their borders.
        before, place, after = self._render(_PLACE).partition(_PLACE)
        if not place or _PLACE in after:
            raise ValueError(
                f"The question {text[:40]!r} spells a special token, and the chat template does "
                "not take the user's message as it is, so the two cannot be told apart; leave it "
                "out."
            )
        first = len(tokenizer.encode(""))  # what the tokenizer puts before every text
        return [*tokenizer.encode(before), *literal[first:], *tokenizer.encode(after)[first:]]

    def _render(self, content: str) -> str:
        start = [{"role": "system", "content": self.system}] if self.system is not None else []
        return self.tokenizer.chat([*start, {"role": "user", "content": content}])


def encode_prompts(
    prompts: Iterable, tokenizer, *, room: int, chat: bool = True, system: str | None = None
) -> list[Question]:
    """Prompts with their token ids, the input of the model.

    Args:
      prompts: ``data.Prompt`` each.
      tokenizer, room, chat, system: See :class:`TextEncoder`.

    Raises:
      ValueError: If a prompt is longer than ``room`` or has no token; it names the prompt.
    """
    encoder = TextEncoder(tokenizer, room, chat, system)
    return [
        Question(prompt, encoder.prompt(prompt.text, repr(prompt.id or prompt.text[:40])))
        for prompt in prompts
    ]
