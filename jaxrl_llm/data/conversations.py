"""Rows of preferences in conversational form: lists of messages in place of texts.

A prompt may be a list of messages that ends with the user's; a response, or each one of a list of
them, is then one message of the assistant. Without a prompt, ``chosen`` and ``rejected`` are
complete conversations, and their common prefix is the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

RESPONSES = ("chosen", "rejected", "completion", "reference", "demonstration")
LISTS = ("responses", "demonstration")
Messages = Sequence[Mapping[str, Any]]


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages with a role and a content.

    Example:
      >>> is_conversation([{"role": "user", "content": "hi"}]), is_conversation("hi")
      (True, False)
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        return False
    return all(isinstance(x, Mapping) and {"role", "content"} <= set(x) for x in value)


def with_texts(value: Any, name: str) -> Any:
    """A conversation whose contents are texts; any other value unchanged.

    Contents may be lists of texts or of parts of type "text", which are joined.

    Raises:
      ValueError: If a part is anything else.

    Example:
      >>> with_texts([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "row 0")
      [{'role': 'user', 'content': 'hi'}]
    """
    if not is_conversation(value):
        return value

    def joined(content: Any) -> Any:
        if isinstance(content, str) or not isinstance(content, Sequence):
            return content
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            text = part.get("text") if isinstance(part, Mapping) and kind == "text" else part
            if not isinstance(text, str):
                raise ValueError(
                    f"{name}: a message has a part of type {kind!r}; only text is read."
                )
            texts.append(text)
        return "".join(texts)

    return [{**message, "content": joined(message["content"])} for message in value]


def common_prompt(row: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The common prefix of two complete conversations.

    Args:
      row: A row with ``chosen`` and ``rejected``.
      name: Name of the row in error messages.

    Raises:
      ValueError: If one of them is not a conversation, or they have no common message.

    Example:
      >>> turns = [{"role": "user", "content": "2+2?"}]
      >>> row = {"chosen": [*turns, {"role": "assistant", "content": "4"}],
      ...        "rejected": [*turns, {"role": "assistant", "content": "5"}]}
      >>> common_prompt(row, "row 0") == turns
      True
    """
    for column in ("chosen", "rejected"):
        if not is_conversation(row.get(column)):
            raise ValueError(
                f"{name} has no prompt, so its {column!r} must be a list of messages; got "
                f"{row.get(column)!r:.80}."
            )
    same = []
    for one, other in zip(row["chosen"][:-1], row["rejected"][:-1], strict=False):
        if _with_values(one) != _with_values(other):
            break
        same.append(one)
    if not same:
        raise ValueError(
            f"{name}: 'chosen' and 'rejected' have no common first messages to be the prompt."
        )
    return same


def _with_values(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that a table adds to it because another message has them."""
    return {key: value for key, value in message.items() if value is not None}


def without_added_keys(row: Mapping[str, Any], prompt_field: str) -> dict[str, Any]:
    """A row without the keys that a table adds to its messages, and to the calls in them.

    Arrow has one type for all messages of a column, and one for the arguments of all calls, so each
    has the keys of all others, as None. A None that was written there is left out, too.

    Example:
      >>> call = {"name": "weather", "arguments": {"city": "Rome", "x": None}}
      >>> row = {"prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
      >>> without_added_keys(row, "prompt")["prompt"][0]["tool_calls"]
      [{'name': 'weather', 'arguments': {'city': 'Rome'}}]
    """

    def written(value: Any) -> Any:
        if isinstance(value, Mapping):  # a message has its content also where that is None
            kept = {"content"} if "role" in value else set()
            return {k: written(v) for k, v in value.items() if v is not None or k in kept}
        return [written(x) for x in value] if isinstance(value, list) else value

    def conversations(value: Any) -> Any:
        if is_conversation(value):
            return written(value)
        return [conversations(x) for x in value] if isinstance(value, list) else value

    columns = {prompt_field, *RESPONSES, *LISTS}
    return {k: conversations(v) if k in columns else v for k, v in row.items()}


def as_text(value: Messages, prompt: Messages, column: str, name: str) -> str:
    """The text of a response, which follows the messages of a prompt or begins with them.

    Raises:
      ValueError: If it is not one message of the assistant.

    Example:
      >>> as_text([{"role": "assistant", "content": "4"}], [], "chosen", "row 0")
      '4'
    """
    rest = list(value)
    begins = all(_with_values(x) == _with_values(y) for x, y in zip(rest, prompt, strict=False))
    if len(rest) > len(prompt) and begins:
        rest = rest[len(prompt) :]
    if len(rest) != 1 or rest[0]["role"] != "assistant" or not isinstance(rest[0]["content"], str):
        roles = [message["role"] for message in rest]
        raise ValueError(
            f"{name}: {column!r} must be one message of the assistant after the prompt; got the "
            f"roles {roles}."
        )
    return rest[0]["content"]


def plain_row(
    row: Mapping[str, Any], prompt_field: str, name: str, *, implicit: bool = False
) -> tuple[dict[str, Any], Messages | None]:
    """A row with texts in place of messages, and the conversation of its prompt if it has several.

    Args:
      row: A row of a table.
      prompt_field: The column of the prompt.
      name: Name of the row in error messages.
      implicit: Whether the prompt is the common prefix of ``chosen`` and ``rejected``.

    Raises:
      ValueError: If the prompt does not end with a text of the user, or a response is not one
        message of the assistant.

    Example:
      >>> user = {"role": "user", "content": "2+2?"}
      >>> plain_row({"prompt": [user]}, "prompt", "row 0")
      ({'prompt': '2+2?'}, None)
    """
    row = dict(row)
    for column in {prompt_field, *RESPONSES, *LISTS} & row.keys():
        row[column] = with_texts(row[column], name)
        if isinstance(row[column], list | tuple) and column in LISTS:
            row[column] = [with_texts(value, name) for value in row[column]]
    if implicit:
        row[prompt_field] = common_prompt(row, name)
    messages = row[prompt_field]
    if not is_conversation(messages):
        return row, None
    role, content = messages[-1]["role"], messages[-1]["content"]
    if role != "user" or not isinstance(content, str) or not content.strip():
        raise ValueError(
            f"{name}: the prompt must end with a text message of the user; got role {role!r}."
        )
    row[prompt_field] = content
    for column in RESPONSES:
        if is_conversation(row.get(column)):
            row[column] = as_text(row[column], messages, column, name)
    for column in LISTS:
        every = row.get(column)
        if isinstance(every, Sequence) and all(is_conversation(x) for x in every):
            row[column] = [as_text(x, messages, column, name) for x in every]
    return row, messages if len(messages) > 1 else None
