"""Chat templates, rendered as transformers renders them."""

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

# Where transformers writes the chat templates that it chooses between.
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
# The date that templates write; of all threads, since those of a run's rollouts write prompts too.
_date: datetime | None = None


@contextlib.contextmanager
def dated(date: datetime | None) -> Iterator[None]:
    """Within this context, templates that write the date write this one; None for the present."""
    global _date
    before, _date = _date, date
    try:
        yield
    finally:
        _date = before


def date_written(tokenizer: Any) -> str:
    """A sentence for errors about other prompts, if the chat template writes the date; else empty.

    Example:
      >>> from jaxrl_llm.testing import ByteTokenizer
      >>> date_written(ByteTokenizer())
      ''
    """
    sources = (getattr(tokenizer, name, None) for name in ("template", "tool_template"))
    if not any("strftime_now" in source for source in sources if isinstance(source, str)):
        return ""
    date = _date or datetime.now()
    return (
        f" The chat template writes the date, here {date:%Y-%m-%d}, so a file that was made on "
        "another day has other prompts."
    )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
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
      options: Other variables for the template, such as `enable_thinking`.

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
        **(options or {}),
        **(special_tokens or {}),
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return templates.render(template, values, date=_date)
    except TemplateError as error:
        raise ValueError(f"render_chat: the chat template raised an error: {error}") from error


def with_template_options(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """The tokenizer with variables for its chat template, such as ``enable_thinking``.

    Args:
      tokenizer: A ``data.Tokenizer``.
      options: Values by name, in place of the tokenizer's; None or empty changes nothing.

    Raises:
      ValueError: If the chat template does not read a variable; the message has those it reads.

    Example:
      >>> from jaxrl_llm.data.chat import with_template_options
      >>> from jaxrl_llm.testing import ByteTokenizer
      >>> with_template_options(ByteTokenizer(), {"enable_thinking": False})
      Traceback (most recent call last):
      ...
      ValueError: data: template_options names enable_thinking, but ByteTokenizer has no template.
    """
    if not options:
        return tokenizer
    from jinja2 import TemplateError

    from jaxrl_llm.data import templates

    sources = [getattr(tokenizer, name, None) for name in ("template", "tool_template")]
    sources = [source for source in sources if isinstance(source, str)]
    names = ", ".join(options)
    if not sources or not hasattr(tokenizer, "template_options"):
        raise ValueError(
            f"data: template_options names {names}, but {type(tokenizer).__name__} has no template."
        )
    try:
        read = sorted({name for source in sources for name in templates.read_variables(source)})
    except TemplateError as error:
        raise ValueError(f"data: the chat template is broken: {error}") from error
    if unread := [name for name in options if name not in read]:
        reads = f"it reads {', '.join(read)}" if read else "it reads no variables"
        raise ValueError(
            f"data: template_options names {', '.join(unread)}, which the chat template does not "
            f"read; {reads}."
        )
    other = copy.copy(tokenizer)
    other.template_options = {**tokenizer.template_options, **options}
    return other


def read_template_options(words: Sequence[str]) -> dict[str, Any]:
    """Options for a template as they are written on a command line: ``name=value``.

    A value is JSON, such as ``false`` and ``2``, or else a text.

    Raises:
      ValueError: If a word has another form.

    Example:
      >>> read_template_options(["enable_thinking=false", "reasoning_effort=low"])
      {'enable_thinking': False, 'reasoning_effort': 'low'}
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(
                f"template-options: expected name=value, as in enable_thinking=false; got {word!r}"
            )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = {"False": False, "True": True, "None": None}.get(value, value)
    return options


def load_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model's folder by name, wherever transformers writes them.

    transformers renders a conversation with tools by "tool_use", if there is one, and any other by
    "default"; models may have more under names of their own, which are left out.

    Args:
      folder: Folder of the tokenizer; its .jinja files take precedence, all together.
      settings: The content of its tokenizer_config.json, with one template or several by name.

    Returns:
      jinja2 sources.

    Raises:
      ValueError: If one is not a text.
    """
    places = {name: folder / file for name, file in TEMPLATE_FILES.items()}
    files = {name: file for name, file in places.items() if file.is_file()}
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    held = settings.get("chat_template")
    if not isinstance(held, list):
        held = [] if held is None else [{"name": "default", "template": held}]
    templates: dict[str, str] = {}
    for entry in held:
        for name in TEMPLATE_FILES:
            if not isinstance(entry, Mapping) or entry.get("name") != name:
                continue
            template = entry.get("template")
            if not isinstance(template, str):
                path = folder / "tokenizer_config.json"
                raise ValueError(f"load_tokenizer: `chat_template` of {path} must be a string")
            templates[name] = template
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"load_tokenizer: {file} is not UTF-8 ({error.reason})") from error
