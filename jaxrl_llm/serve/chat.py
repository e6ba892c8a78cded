"""OpenAI's chat completions over tokens: messages to a prompt, responses to messages.

The model's chat template formats the conversation, and ``data.Renderer`` converts it to tokens. An
assistant message with ``tool_calls`` is written as text: its ``reasoning_content``, then each call
as JSON between ``<tool_call>`` tags, whatever form the model has.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.runtime.files import parse_json
from jaxrl_llm.data import Renderer, Tokenizer
from jaxrl_llm.data.messages import Message, Parsed, ToolSpec
from jaxrl_llm.data.parsing import MARKUP
from jaxrl_llm.rollout import EngineSpec
from jaxrl_llm.serve.requests import (
    Fields,
    RequestError,
    SampleRequest,
    check_model,
    check_prompt,
    find_stop,
    read_sampling,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatRequest(NamedTuple):
    """A request of ``/v1/chat/completions``.

    Attributes:
      sample: The prompt and the sampling options.
      tools: Whether the response may contain tool calls.
      logprobs: Whether the response includes log-probabilities.
      stream: Whether the response is streamed while it is sampled.
      usage: Whether a stream ends with token counts.
      token_ids: Whether the response includes token ids of prompt and choices, in vLLM's format.
      tokens_as_ids: Whether log-probabilities name tokens by their ids.
      parallel: Whether a response may have several tool calls; else the first one counts.
    """

    sample: SampleRequest
    tools: bool
    logprobs: bool
    stream: bool
    usage: bool
    token_ids: bool
    tokens_as_ids: bool
    parallel: bool = True


def read_chat(
    body: Any, spec: EngineSpec, model: str, renderer: Renderer, system: str | None = None
) -> ChatRequest:
    """Parses a request of ``/v1/chat/completions`` for the model ``model``.

    ``system`` is the system message of a conversation that begins without one.
    """
    fields = Fields("The request", body)
    check_model(fields, model)
    messages = _read_messages(fields.take("messages", list, []))
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = []
    for number, value in enumerate(fields.take("tools", list, [])):
        entry = Fields(f"Tool {number}", value)
        entry.refuse("tools are functions", type="function")
        function = Fields(f"The function of tool {number}", entry.take_any("function", {}))
        name = function.take("name", str, "")
        parameters = function.take_any("parameters", {"type": "object", "properties": {}})
        if not name or not isinstance(parameters, Mapping):
            raise RequestError(f"Tool {number} needs a name, and a JSON schema as parameters.")
        tools.append(ToolSpec(name, function.take("description", str, ""), parameters))
        function.refuse("the calls of a model are not held to the schema", strict=False)
        function.end()
        entry.end()
    choice = fields.take_any("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            f'The request: tool_choice must be "auto" or "none"; got {str(choice)[:40]!r}.'
        )
    tools = [] if choice == "none" else tools
    try:
        tokens = renderer.prompt(messages, tools)
    except (TypeError, ValueError) as error:
        raise RequestError(f"The messages cannot be rendered: {error}") from error
    prompt = check_prompt("The prompt", tokens, spec)
    most = spec.max_new_tokens
    max_tokens = fields.take_integer("max_completion_tokens", None, 1, most)
    sample = read_sampling(fields, prompt, spec, max_tokens=max_tokens)
    if max_tokens is not None:
        fields.refuse("max_completion_tokens is there too", max_tokens=max_tokens)
    logprobs = fields.take("logprobs", bool, False)
    fields.refuse("only sampled tokens have log-probabilities", top_logprobs=0)
    stream = fields.take("stream", bool, False)
    options = Fields("stream_options", fields.take_any("stream_options", {}))
    usage = options.take("include_usage", bool, False)
    options.ignore("continuous_usage_stats")
    options.end()
    token_ids = fields.take("return_token_ids", bool, False)
    tokens_as_ids = fields.take("return_tokens_as_token_ids", bool, False)
    fields.refuse("the chat template takes no options", chat_template_kwargs={})
    fields.refuse("the response is text", response_format={"type": "text"})
    parallel = fields.take("parallel_tool_calls", bool, True)
    fields.ignore("user", "metadata", "store", "cache_salt")
    fields.end()
    return ChatRequest(
        sample, bool(tools), logprobs, stream, usage, token_ids, tokens_as_ids, parallel
    )


def _read_messages(values: Sequence[Any]) -> list[Message]:
    if not values:
        raise RequestError("The request needs messages, a list of at least one.")
    messages: list[Message] = []
    for number, value in enumerate(values):
        fields = Fields(f"Message {number}", value)
        role, content = fields.take("role", str, ""), fields.take_any("content", "")
        if role not in _ROLES:
            raise RequestError(
                f"Message {number} must have a role of {', '.join(_ROLES)}; got {role[:40]!r}."
            )
        if isinstance(content, list):
            parts = [Fields(f"A part of message {number}", part) for part in content]
            if any(part.take("type", str) != "text" for part in parts):
                raise RequestError(f"Message {number} has a part that is not of type text.")
            content = "".join(part.take("text", str, "") for part in parts)
            for part in parts:
                part.end()
        if not isinstance(content, str):
            raise RequestError(f"Message {number} must have a text or a list of parts as content.")
        calls = fields.take("tool_calls", list, [])
        if calls and role != "assistant":
            raise RequestError(f"Message {number} of role {role} has tool_calls.")
        content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
        # vLLM's newer name is `reasoning`.
        thoughts = [fields.take(key, str, "") for key in ("reasoning_content", "reasoning")]
        if any(thoughts) and role != "assistant":
            raise RequestError(f"Message {number} of role {role} has reasoning_content.")
        if any(thoughts):
            content = f"<think>\n{thoughts[0] or thoughts[1]}\n</think>\n\n{content}"
        fields.ignore("name", "tool_call_id", "refusal")
        fields.end()
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] == "assistant":
        raise RequestError("The last message is the assistant's; there is nothing to answer.")
    return messages


def _call_text(call: Any) -> str:
    """A tool call as a policy writes it."""
    call = Fields("A tool call", call)
    call.refuse("tools are functions", type="function")
    call.ignore("id", "index")
    function = Fields("The function of a tool call", call.take_any("function", {}))
    name, arguments = function.take("name", str, ""), function.take_any("arguments", "{}")
    function.end()
    call.end()
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise RequestError(f"The arguments of a call of {name[:40]!r} are not JSON.") from error
    value = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{value}\n</tool_call>"


def text_to_stop(
    tokens: Sequence[int], renderer: Renderer, stops: Sequence[str], least: int = 0
) -> tuple[str, bool]:
    """The text of a response up to the first stop text, and whether there is one.

    A stop text counts if it ends behind the text of the first ``least`` tokens.
    """
    text = renderer.message(tokens)["content"]
    behind = 0
    if stops and least:
        behind = len(renderer.message(tokens[:least])["content"].rstrip("\ufffd"))
    end = find_stop(text, stops, behind)
    return text[:end], end is not None


def to_message(
    tokens: Sequence[int], renderer: Renderer, request: ChatRequest, name: str
) -> dict[str, Any]:
    """A response as an assistant message, with its tool calls if there are any."""
    text, cut = text_to_stop(tokens, renderer, request.sample.stops, request.sample.least)
    parsed = renderer.parse(tokens) if request.tools else Parsed(text)
    if not parsed.calls or parsed.error is not None:
        return {"role": "assistant", "content": text}
    said = parsed.text
    if cut:  # by a stop after the calls, or between them
        last = max(said.rfind(stop) for stop in request.sample.stops)
        said = said[:last].rstrip() if last >= 0 else said
    message: dict[str, Any] = {"role": "assistant", "content": said or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    message["tool_calls"] = [
        {
            "id": f"{name}-call-{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(parsed.calls if request.parallel else parsed.calls[:1])
    ]
    return message


class TextStream:
    """The text of a growing response, in pieces that no later token changes."""

    def __init__(self, renderer: Renderer, stops: Sequence[str], least: int = 0):
        self._renderer, self._stops, self._least = renderer, stops, least
        self._tokens: list[int] = []
        self._sent = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that becomes final after new tokens."""
        self._tokens += tokens
        text = self._text().rstrip("\ufffd")
        # Text that may be the start of a stop text is held back.
        held = max((len(stop) for stop in self._stops), default=1) - 1
        return self._send(text[: max(len(text) - held, 0)])

    def rest(self) -> str:
        """The remaining text at the end of the response."""
        return self._send(self._text())

    def _text(self) -> str:
        return text_to_stop(self._tokens, self._renderer, self._stops, self._least)[0]

    def _send(self, text: str) -> str:
        if len(text) <= len(self._sent) or not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


class TokenTexts:
    """The text that each token adds to a growing response; together they are its whole text.

    A token decodes differently behind others: a piece of SentencePiece loses the space before it
    where it comes first, and a character may have several tokens, of which the last one gets it.
    Only the last tokens are decoded, so that a long response costs no more for each of them.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens, of which the first begins a character
        self._whole = 0  # how many of them had their text when no character was open
        self._given = 0  # characters of their text that tokens before the next one have

    def add(self, token: int) -> tuple[str, bool]:
        """The text of the next token, and whether the response contains it.

        It does not contain the name of a special token.
        """
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        end, most = len(text.rstrip("\ufffd")), len(self._ids) > _MOST_DECODED
        if most:  # These are hardly one character: only the last three may belong to an open one.
            end = max(end, len(text) - 3)
        piece, held = text[self._given : end], len(text) - end
        self._given = max(self._given, end)
        if most or not held:
            rest = self._ids[-_MOST_DECODED // 2 :] if most else self._ids[self._whole :]
            known = len(self._tokenizer.decode(rest)) - held
            if most or known > 0:  # Without text before it, the next token would come first.
                self._ids, self._given = rest, max(known, 0)
                self._whole = 0 if held else len(rest)
        if not piece and not self._tokenizer.decode([token]):
            name = self._tokenizer.decode([token], skip_special=False)
            return name, name in MARKUP  # which a response with calls spells out
        return piece, True


# Tokens that are decoded at one time: more than one only where characters stay open.
_MOST_DECODED = 32


def token_entries(
    tokens: Sequence[int], logps: Sequence[float], texts: TokenTexts, *, as_ids: bool
) -> dict[str, Any]:
    """Log-probabilities of the next tokens of a response in OpenAI's format, no alternatives."""
    pieces = [(f"token_id:{x}", False) if as_ids else texts.add(x) for x in tokens]
    return {
        "content": [
            {
                "token": text,
                "logprob": logp,
                "bytes": list(text.encode()) if contained else None,
                "top_logprobs": [],
            }
            for (text, contained), logp in zip(pieces, logps, strict=True)
        ]
    }
