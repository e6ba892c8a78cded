"""Questions: prompts with their token ids."""

from collections.abc import Iterable
from typing import Any, NamedTuple

# Stands for the user's message while the template is rendered: of the private use area, so that no
# template holds or changes it.
_PLACE = "\ue000\ue001\ue000"


class Question(NamedTuple):
    """A prompt and its token ids, chat template included."""

    prompt: Any
    tokens: list[int]


def encode_prompts(
    prompts: Iterable, tokenizer, *, room: int, chat: bool = True, system: str | None = None
) -> list[Question]:
    """Prompts with their token ids, the input of the model.

    A special token that is spelled in a question, such as the end of a turn, is encoded as plain
    text: a question cannot imitate the template.

    Args:
      prompts: ``data.Prompt`` each.
      tokenizer: A ``data.Tokenizer``.
      room: Tokens that the model's context leaves for a prompt.
      chat: Through the chat template, as the user's message; else as plain text.
      system: A system message before it.

    Raises:
      ValueError: If a prompt is longer than ``room`` or has no token; it names the prompt.
    """
    start = [{"role": "system", "content": system}] if system is not None else []

    def render(content: str) -> str:
        return tokenizer.chat([*start, {"role": "user", "content": content}])

    def encode(text: str) -> list[int]:
        literal = tokenizer.encode(text, allow_special=False)
        if not chat:
            return literal
        if literal == tokenizer.encode(text):
            return tokenizer.encode(render(text))
        # In three pieces only where needed: a tokenizer may merge characters across their borders.
        before, place, after = render(_PLACE).partition(_PLACE)
        if not place or _PLACE in after:
            raise ValueError(
                f"The question {text[:40]!r} spells a special token, and the chat template does "
                "not take the user's message as it is, so the two cannot be told apart; leave it "
                "out."
            )
        first = len(tokenizer.encode(""))  # what the tokenizer puts before every text
        return tokenizer.encode(before) + literal[first:] + tokenizer.encode(after)[first:]

    questions = []
    for prompt in prompts:
        tokens = encode(prompt.text)
        name = repr(prompt.id or prompt.text[:40])
        if not tokens:
            raise ValueError(f"Prompt {name} has no tokens.")
        if len(tokens) > room:
            raise ValueError(
                f"Prompt {name} has {len(tokens)} tokens, but the model's context leaves room for "
                f"{room} before the response."
            )
        questions.append(Question(prompt, list(tokens)))
    return questions
