"""Questions: prompts with their token ids."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jaxrl_llm.core.reasoning import TAGS, Continuation, split_reply
from jaxrl_llm.data.rendering import encode_chat, response_ends
from jaxrl_llm.data.turns import TurnWriter, encode_inside

# At least the tokens that a template writes around the text of a response.
_AROUND = 64


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
      room: Maximum tokens of a prompt.
      chat: Whether to apply the chat template to the user's message; else it is plain text.
      system: A system message before it.
      cuts: Whether a complete response of the data that is too long for a run loses its end,
        instead of an error.
    """

    tokenizer: Any
    room: int
    chat: bool = True
    system: str | None = None
    cuts: bool = False

    def prompt(self, text: str, name: str) -> list[int]:
        """The prompt of a message.

        Args:
          text: The user's message.
          name: Name of the prompt in error messages.

        Raises:
          ValueError: If it is longer than ``room`` or has no token.
        """
        return self._fits(self._encode(text), name)

    def conversation(self, messages: Sequence[Mapping[str, Any]], name: str) -> list[int]:
        """The prompt of a conversation that ends with the user's message, in the chat template.

        The system message of the run is added to a conversation without one. Raises as
        :meth:`prompt`, and ValueError without a chat template.
        """
        if not self.chat:
            raise ValueError(
                f"Prompt {name} is a list of messages, which needs the chat template (chat=True)."
            )
        start = self._system if messages[0]["role"] != "system" else []
        return self._fits(
            encode_chat(self.tokenizer, self.tokenizer.chat, [*start, *messages]), name
        )

    def _fits(self, tokens: list[int], name: str) -> list[int]:
        if not tokens:
            raise ValueError(f"Prompt {name} has no tokens.")
        if len(tokens) > self.room:
            raise ValueError(
                f"Prompt {name} has {len(tokens)} tokens, but the model's context leaves room for "
                f"{self.room} before the response."
            )
        return tokens

    def takes_text(self, text: str) -> bool:
        """Whether the prompt of a message fits into ``room``."""
        return 0 < len(self._encode(text)) <= self.room

    def response(self, text: str, *, ends: bool = False) -> list[int]:
        """The tokens of a response, after those of its prompt.

        They are the chat template's rendering of the turn, see :mod:`jaxrl_llm.data.turns`: it may
        write a reasoning or a channel before the text. Without a template they are the text.

        Args:
          text: The text. A ``core.reasoning.Continuation`` is encoded as it is.
          ends: Whether it ends: as the template ends a turn; without one, with EOS.

        Raises:
          ValueError: If the template does not write the turn after its prompt.
        """
        writer = self._writer
        if writer is not None and not isinstance(text, Continuation):
            return writer.tokens(text, ends=ends)
        if writer is None:
            tokens = encode_inside(self.tokenizer, text, allow_special=False)
        else:
            tokens = writer.inside(text)
        return [*tokens, *self.end_ids] if ends else tokens

    def is_short(self, text: str, most: int) -> bool:
        """Whether a response has clearly at most so many tokens, without encoding each text.

        Raises ValueError, as :meth:`response`, if the template does not write texts of this kind
        after its prompt: one text with the same parts is rendered.
        """
        thinking, final = split_reply(text)
        begun = next((tag for tag, _ in TAGS if text.lstrip().startswith(tag)), None)
        kind = begun, thinking is None, final is None
        if kind not in self._checked:
            self.response(text, ends=True)
            self._checked.add(kind)
        return len(text.encode()) + _AROUND <= most  # no token is less than a byte

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return response_ends(self.tokenizer, chat=self.chat)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a response; the last one stops the sampler."""
        return tuple(self._writer.end if self._writer else self.tokenizer.eos_ids[:1])

    @cached_property
    def _checked(self) -> set[tuple]:
        return set()

    @cached_property
    def _writer(self) -> TurnWriter | None:
        """The writer of responses; None without a chat template, or with one of prompts alone."""
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        if not self.chat:
            return None
        try:
            render = functools.partial(self.tokenizer.chat, add_generation_prompt=False)
            asked = render(talk[:1])
        except Exception:  # no template
            return None
        try:
            ends = self.tokenizer.eos_ids
            return None if render(talk) == asked else TurnWriter(self.tokenizer, ends)
        except Exception as error:
            raise ValueError(
                f"The chat template cannot write a response: {error}; use a template that writes "
                "text messages of the assistant (chat_template.jinja in the model's folder)."
            ) from error

    def _encode(self, text: str) -> list[int]:
        if not self.chat:
            return list(self.tokenizer.encode(text, allow_special=False))
        messages = [*self._system, {"role": "user", "content": text}]
        return encode_chat(self.tokenizer, self.tokenizer.chat, messages)

    @property
    def _system(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def encode_prompts(
    prompts: Iterable, tokenizer, *, room: int, chat: bool = True, system: str | None = None
) -> list[Question]:
    """Prompts with their token ids, the input of the model.

    Args:
      prompts: A sequence of ``data.Prompt``.
      tokenizer, room, chat, system: See :class:`TextEncoder`.

    Raises:
      ValueError: If a prompt is longer than ``room`` or has no token; it names the prompt.

    Example:
      >>> import jaxrl_llm as jr
      >>> prompts = [jr.data.Prompt("2+2=", "4"), jr.data.Prompt("1+1=", "2")]
      >>> tokenizer = jr.testing.ByteTokenizer()
      >>> questions = jr.data.encode_prompts(prompts, tokenizer, room=16, chat=False)
      >>> questions[0].tokens, questions[0].prompt.answer
      ([50, 43, 50, 61], '4')
    """
    encoder = TextEncoder(tokenizer, room, chat, system)
    questions = []
    for prompt in prompts:
        name, messages = prompt.where, prompt.messages
        tokens = (
            encoder.conversation(messages, name) if messages else encoder.prompt(prompt.text, name)
        )
        questions.append(Question(prompt, tokens))
    return questions
