"""OpenAI's chat completions over tokens: messages to a prompt, responses to messages.

The model's chat template formats the conversation, and ``data.Renderer`` converts it to tokens. An
assistant message with ``tool_calls`` is written as the text that a policy writes for these calls.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.runtime.files import parse_json
from jaxrl_llm.data import Renderer, Tokenizer
from jaxrl_llm.data.messages import Message, Parsed, ToolSpec
from jaxrl_llm.rollout import EngineSpec
from jaxrl_llm.serve.requests import (
    Fields,
    RequestError,
    SampleRequest,
    check_model,
    check_prompt,
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
    """

    sample: SampleRequest
    tools: bool
    logprobs: bool
    stream: bool
    usage: bool
    token_ids: bool
    tokens_as_ids: bool


def read_chat(body: Any, spec: EngineSpec, model: str, renderer: Renderer) -> ChatRequest:
    """Parses a request of ``/v1/chat/completions`` for the model ``model``."""
    fields = Fields("The request", body)
    check_model(fields, model)
    messages = _read_messages(fields.take("messages", list, []))
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
    fields.ignore("user", "metadata", "store", "parallel_tool_calls", "cache_salt")
    fields.end()
    return ChatRequest(sample, bool(tools), logprobs, stream, usage, token_ids, tokens_as_ids)


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
        if not isinstance(content, str):
            raise RequestError(f"Message {number} must have a text or a list of parts as content.")
        calls = fields.take("tool_calls", list, [])
        if calls and role != "assistant":
            raise RequestError(f"Message {number} of role {role} has tool_calls.")
        content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
        fields.ignore("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
        fields.end()
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] == "assistant":
        raise RequestError("The last message is the assistant's; there is nothing to answer.")
    return messages


def _call_text(call: Any) -> str:
    """A tool call as a policy writes it."""
    call = Fields("A tool call", call)
    function = Fields("The function of a tool call", call.take_any("function", {}))
    name, arguments = function.take("name", str, ""), function.take_any("arguments", "{}")
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise RequestError(f"The arguments of a call of {name[:40]!r} are not JSON.") from error
    value = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{value}\n</tool_call>"


def text_of(tokens: Sequence[int], renderer: Renderer, stops: Sequence[str]) -> str:
    """The text of a response, up to the first stop text."""
    text = renderer.message(tokens)["content"]
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def to_message(
    tokens: Sequence[int], renderer: Renderer, request: ChatRequest, name: str
) -> dict[str, Any]:
    """A response as an assistant message, with its tool calls if there are any."""
    text = text_of(tokens, renderer, request.sample.stops)
    parsed = renderer.parse(tokens) if request.tools else Parsed(text)
    if not parsed.calls or parsed.error is not None:
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    message["tool_calls"] = [
        {
            "id": f"{name}-call-{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(parsed.calls)
    ]
    return message


class TextStream:
    """The text of a growing response, in pieces that no later token changes."""

    def __init__(self, renderer: Renderer, stops: Sequence[str]):
        self._renderer, self._stops = renderer, stops
        self._tokens: list[int] = []
        self._sent = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that becomes final after new tokens."""
        self._tokens += tokens
        text = text_of(self._tokens, self._renderer, self._stops).rstrip("\ufffd")
        # Text that may be the start of a stop text is held back.
        held = max((len(stop) for stop in self._stops), default=1) - 1
        return self._send(text[: max(len(text) - held, 0)])

    def rest(self) -> str:
        """The remaining text at the end of the response."""
        return self._send(text_of(self._tokens, self._renderer, self._stops))

    def _send(self, text: str) -> str:
        if len(text) <= len(self._sent) or not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def token_entries(
    tokens: Sequence[int], logps: Sequence[float], tokenizer: Tokenizer, *, as_ids: bool
) -> dict[str, Any]:
    """Log-probabilities of sampled tokens in OpenAI's format, without alternatives."""
    texts = [
        f"token_id:{token}" if as_ids else tokenizer.decode([token], skip_special=False)
        for token in tokens
    ]
    return {
        "content": [
            {
                "token": text,
                "logprob": logp,
                "bytes": None if as_ids or "\ufffd" in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, logp in zip(texts, logps, strict=True)
        ]
    }
