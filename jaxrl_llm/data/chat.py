"""Chat templates, rendered as transformers renders them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    r"""The text of a conversation by the chat template of a model, special tokens spelled out.

    The template comes with the model and is not trusted: it runs in a sandbox of jinja2, with
    limits on its steps, its time and the length of its output, see `data.templates`.

    Args:
      template: jinja2 source.
      messages: Mappings with "role" and "content".
      add_generation_prompt: Whether to end with the opening of the assistant's turn.
      tools: Specifications as in OpenAI's API; many templates do not read them.
      special_tokens: Names the template may use, such as `bos_token`.

    Raises:
      TypeError: If a message is not a mapping with a role.
      ValueError: If the template is broken, exceeds a limit, or rejects the conversation.

    Example:
      >>> render_chat("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
      ...     [{"role": "user", "content": "2 + 2?"}])
      '[user] 2 + 2?\n'
    """
    from jinja2 import TemplateError

    from jaxrl_llm.data import templates

    if isinstance(messages, str | Mapping):
        raise TypeError("render_chat: `messages` must be a sequence of messages, not one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise TypeError(
                f"render_chat: message {number} must be a mapping with 'role' and 'content', got "
                f"{message!r}"
            )
    values = {
        **(special_tokens or {}),
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return templates.render(template, values)
    except TemplateError as error:
        raise ValueError(f"render_chat: the chat template raised an error: {error}") from error


def load_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template of a model's folder, in either place where transformers writes it.

    Args:
      folder: Folder of the tokenizer; its chat_template.jinja takes precedence.
      settings: The content of its tokenizer_config.json, with one template or several by name.

    Returns:
      jinja2 source, or None.

    Raises:
      ValueError: If it is not a text.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"load_tokenizer: {file} is not UTF-8 ({error.reason})") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {x.get("name"): x for x in template if isinstance(x, Mapping)}
        template = named["default"].get("template", "") if "default" in named else None
    if template is not None and not isinstance(template, str):
        path = folder / "tokenizer_config.json"
        raise ValueError(f"load_tokenizer: `chat_template` of {path} must be a string")
    return template
