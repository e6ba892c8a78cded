r"""Rendering of multi-turn conversations as token ids, and parsing of the policy's turns.

    tokens = renderer.prompt(messages, tools)           # ... <|im_start|>assistant\n
    turn   = what the policy samples                    # ... <|im_end|>
    tokens = tokens + turn + renderer.follow(answer, stopped=True)
                                                        # \n<|im_start|>tool ... assistant\n
Token ids are only appended: earlier ids are never rendered or tokenized again, so a policy is
trained on the ids that it sampled. The text between turns comes from the model's chat template,
rendered on a short conversation in place of the earlier turns. Once per renderer this text is
compared, on several conversations, with the template's rendering of the full conversation. If a
template rewrites earlier turns, for example to drop their reasoning, ``rewrites`` is True, and
``rewritten(conversation)`` returns whether it does so for a conversation.

A special token that is spelled in a message is encoded as plain text: an observation cannot imitate
the end of a turn.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

from jaxrl_llm.core.reasoning import in_channels, split_reply
from jaxrl_llm.data.messages import Message, Parsed, ToolSpec
from jaxrl_llm.data.parsing import MARKUP, parse_turn
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.data.turns import REASONING, TurnWriter, encode_inside

_Specs = Sequence[Mapping[str, Any]]  # tools as chat templates take them


class Renderer(Protocol):
    """The interface that turns messages into tokens, and turns of a policy into actions.

    ``follow``, ``rewritten`` and ``parse`` take the tools of the last prompt, so two environments
    need two renderers, and so do two conversations with different tools; ``copy.copy`` makes one.

    Attributes:
      stop_ids: Tokens that end a turn of the policy; the first is the one to write.
    """

    stop_ids: tuple[int, ...]

    @property
    def rewrites(self) -> bool:
        """Whether the template sometimes rewrites earlier turns."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The tokens of a conversation, with the opening of the assistant's turn."""
        ...

    def follow(self, messages: Sequence[Message], *, stopped: bool) -> list[int]:
        """The tokens between a turn of the policy and its next one.

        Args:
          messages: The reply to the turn, of role "tool" or "user".
          stopped: Whether the turn ended with its stop token; else the tokens begin with it.
        """
        ...

    def turn(self, text: str) -> list[int]:
        """The tokens of a turn with this text after the prompt, including the token that ends it.

        They are those of the template, see :mod:`jaxrl_llm.data.turns`. If the template rewrites
        turns, and the prompt has opened the reasoning, the turn ends it before the text.
        """
        ...

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """Parses a turn of the policy, including its stop token if it has one."""
        ...

    def message(self, tokens: Sequence[int]) -> Message:
        """A turn of the policy as a message, for a new branch's prompt."""
        ...

    def rewritten(self, conversation: Sequence[Message]) -> bool:
        """Whether the template writes a conversation otherwise than by appending to it."""
        ...


def make_renderer(
    tokenizer: Tokenizer, *, chat: bool = True, system: str | None = None
) -> Renderer:
    r"""The renderer of a model.

    The chat template writes tools into the prompt. If it does not support tools, or there is no
    template, a section at the end of the system message lists them, to be called by
    ``<tool_call>{...}</tool_call>``. If the template has no role "tool", such messages become user
    messages between ``<tool_response>`` tags. A model that writes its calls in a form that
    :mod:`jaxrl_llm.data.parsing` does not support needs :class:`data.PackageRenderer`.

    Args:
      tokenizer: A ``data.Tokenizer``.
      chat: Whether to use its chat template. Else messages are lines of text, and EOS ends a turn.
      system: A system message before every conversation.

    Raises:
      ValueError: If there is no chat template, or it changes the text of messages.

    Example:
      >>> from jaxrl_llm.testing import ByteTokenizer
      >>> tokenizer = ByteTokenizer()
      >>> renderer = make_renderer(tokenizer)
      >>> tokens = renderer.prompt([{"role": "user", "content": "2+2?"}])
      >>> tokenizer.decode(tokens, skip_special=False)
      '<bos>user\n2+2?<eos><bos>assistant\n'
      >>> tokens = renderer.follow([{"role": "user", "content": "Sure?"}], stopped=True)
      >>> tokenizer.decode(tokens, skip_special=False)
      '<bos>user\nSure?<eos><bos>assistant\n'
    """
    return ChatRenderer(tokenizer, system) if chat else TextRenderer(tokenizer, system)


def response_ends(tokenizer: Tokenizer, *, chat: bool) -> tuple[int, ...]:
    """The tokens that end a response: EOS, and what ends a turn in the chat template.

    Base models often have a template whose turns end in another token than their EOS, and a
    response that does not end there goes on with a turn of the user.

    Args:
      tokenizer: A ``data.Tokenizer``.
      chat: Whether responses follow the chat template. Without one that renders, EOS ends them.
    """
    ids = tuple(tokenizer.eos_ids)
    if chat:
        with suppress(Exception):  # no template, or one that takes no such conversation
            ids += ChatRenderer(tokenizer).stop_ids
    return tuple(dict.fromkeys(ids))


def describe_tools(tools: Sequence[ToolSpec]) -> str:
    """The system message's section on tools, for templates that do not support them.

    Example:
      >>> from jaxrl_llm.environments import calculator
      >>> print(describe_tools([calculator]).splitlines()[-1])
      <tool_call>{"name": <its name>, "arguments": <a JSON object>}</tool_call>
    """
    lines = [json.dumps(as_openai(tool)["function"], ensure_ascii=False) for tool in tools]
    call = '<tool_call>{"name": <its name>, "arguments": <a JSON object>}</tool_call>'
    return "\n".join(["You can call these tools:", *lines, "To call one, write", call])


class TurnReader:
    """Shared code of renderers for the tokens of a turn and the start of a conversation."""

    stop_ids: tuple[int, ...]

    def __init__(self, tokenizer: Tokenizer, system: str | None, end: int) -> None:
        self._tokenizer, self._system = tokenizer, system
        self.stop_ids = tuple(dict.fromkeys((end, *tokenizer.eos_ids)))
        self._thinking = ""  # the tag that ends the reasoning, if the prompt has opened it

    def turn(self, text: str) -> list[int]:
        """See :class:`Renderer`."""
        return [*self._said(text), self.stop_ids[0]]

    def _said(self, text: str) -> list[int]:
        """The tokens of a text, behind the end of the reasoning that the prompt has opened."""
        said = encode_inside(self._tokenizer, text, allow_special=False)
        if self._thinking and text and split_reply(text).thinking is None:
            return [*encode_inside(self._tokenizer, f"\n{self._thinking}\n\n"), *said]
        return said

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """See :class:`Renderer`."""
        complete = len(tokens) > 0 and int(tokens[-1]) in self.stop_ids
        return parse_turn(self._text(tokens), complete=complete, thinking=bool(self._thinking))

    def message(self, tokens: Sequence[int]) -> Message:
        """See :class:`Renderer`."""
        text = self._text(tokens)
        if not in_channels(text):
            return {"role": "assistant", "content": text}
        thinking, final = split_reply(text)
        fields = {} if thinking is None else dict.fromkeys(REASONING, thinking)
        return {"role": "assistant", "content": final or "", **fields}

    def _text(self, tokens: Sequence[int]) -> str:
        ids = [int(i) for i in tokens]
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        plain = self._tokenizer.decode(ids)
        spelled = self._tokenizer.decode(ids, skip_special=False)
        return spelled if any(m in spelled and m not in plain for m in MARKUP) else plain

    def _begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """The conversation with the system message, which ends with ``tools``."""
        start = [m["content"] for m in messages[:1] if m["role"] == "system"]
        if start and self._system is not None:
            raise ValueError(
                "prompt: both the renderer and the conversation have a system message; leave one "
                "out"
            )
        rest = list(messages[len(start) :])
        start += [] if self._system is None else [self._system]
        start += [describe_tools(tools)] if tools else []
        text = "\n\n".join(start)
        return [{"role": "system", "content": text}, *rest] if start or tools else rest


class TextRenderer(TurnReader):
    r"""Conversations as plain text: a line for each message, EOS after each turn of the policy.

    See :func:`make_renderer`; it has no template that could rewrite a turn.
    """

    rewrites = False

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        super().__init__(tokenizer, system, tokenizer.eos_ids[0])

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See :class:`Renderer`."""
        conversation = self._begin(checked_messages(messages, "prompt"), tools)
        return [*self._tokenizer.encode(""), *self._lines(conversation)]

    def follow(self, messages: Sequence[Message], *, stopped: bool) -> list[int]:
        """See :class:`Renderer`."""
        tokens = self._lines(checked_messages(messages, "follow", answers=True))
        return tokens if stopped else [self.stop_ids[0], *tokens]

    def rewritten(self, conversation: Sequence[Message]) -> bool:
        """Never."""
        return False

    def _lines(self, messages: Sequence[Message]) -> list[int]:
        tokens: list[int] = []
        for message in messages:
            turn = message["role"] == "assistant"
            text = message["content"] + ("" if turn else "\n")
            tokens += encode_inside(self._tokenizer, text, allow_special=False)
            tokens += [self.stop_ids[0]] if turn else []
        return tokens


class QuestionRenderer(TextRenderer):
    """Single questions as plain text: the prompts of a run without a chat template or environment.

    They are those of :class:`~jaxrl_llm.data.questions.TextEncoder`.
    """

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See :class:`Renderer`."""
        conversation = checked_messages(messages, "prompt")
        if tools or [message["role"] for message in conversation] != ["user"]:
            raise ValueError(
                "the model was trained on plain questions without a chat template, so it takes one "
                "message of the user, without tools"
            )
        return list(self._tokenizer.encode(conversation[0]["content"], allow_special=False))


# They stand for the content of a message while a template is rendered: of the private use area, so
# that no template holds or changes them.
_PLACE, _TURN = "\ue000\ue001\ue000", "\ue000\ue002\ue000"
_BEFORE: tuple[Message, ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": _TURN},
)


class ChatRenderer(TurnReader):
    """Conversations by the model's chat template; see :func:`make_renderer`."""

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        super().__init__(tokenizer, system, tokenizer.eos_ids[0])
        # The tools of the last prompt, with which its conversation goes on: a model may have
        # another template for conversations with tools.
        self._tools: _Specs = ()
        self._tool_roles: dict[bool, bool] = {}
        self._rewrites: dict[bool, bool] = {}
        self.writer = TurnWriter(tokenizer, self.stop_ids)
        # What the template puts after the policy's text up to the token that ends its turn. Where
        # it puts none, the policy ends with EOS, which then stays.
        self._close = self.writer.close
        if self._close:
            self.stop_ids = tuple(dict.fromkeys((self._close[-1], *self.stop_ids)))
        self._thinking = self.writer.opened

    @property
    def rewrites(self) -> bool:
        """Whether the template rewrites earlier turns in one of a few test conversations."""
        tools = self._tools
        if bool(tools) not in self._rewrites:
            self._rewrites[bool(tools)] = self._rewrites_any(tools)
        return self._rewrites[bool(tools)]

    def _rewrites_any(self, tools: _Specs) -> bool:
        user, tool = ({"role": role, "content": "And now?"} for role in ("user", "tool"))
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        call, reply, thought = (
            {"role": "assistant", "content": text}
            for text in (call, "Yes.", "<think>\nHm.\n</think>\n\nYes.")
        )
        conversations = (
            [user, reply, user, reply, user],
            [user, call, tool, reply, user, call, tool, tool, reply, user],
            [user, thought, user],
            [user, thought, tool, thought, tool],
        )
        return any(
            self._appended(c, tools) != self._render(self._take(c, tools), tools)
            for c in conversations
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See :class:`Renderer`."""
        conversation = checked_messages(messages, "prompt")
        specs = [as_openai(tool) for tool in tools] if tools and self._reads_tools else ()
        self._tools = specs
        conversation = self._take(self._begin(conversation, () if specs else tools), specs)
        return encode_chat(self._tokenizer, lambda m: self._render(m, specs), conversation)

    def follow(self, messages: Sequence[Message], *, stopped: bool) -> list[int]:
        """See :class:`Renderer`."""
        tools = self._tools
        answers = self._take(checked_messages(messages, "follow", answers=True), tools)
        conversation = [*_BEFORE, *answers]
        tokens = encode_chat(
            self._tokenizer, lambda m: self._render(m, tools), conversation, after=_TURN
        )
        closed = len(self._close)
        if tokens[:closed] != self._close:
            raise ValueError("follow: the chat template ends a turn differently if messages follow")
        if stopped:
            return tokens[closed:]
        return tokens if closed else [self.stop_ids[0], *tokens]

    def turn(self, text: str) -> list[int]:
        """See :class:`Renderer`."""
        try:
            return self.writer.tokens(text)
        except ValueError:
            return [*self._said(text), *self.writer.end]

    def rewritten(self, conversation: Sequence[Message]) -> bool:
        """Whether the template writes a conversation otherwise than by appending to it.

        White space is ignored, since many templates trim messages.

        Args:
          conversation: Messages, with the policy's turns as returned by :meth:`message`; the last
            is a reply to the policy.
        """
        checked, tools = self._begin(checked_messages(conversation, "rewritten"), ()), self._tools
        text = self._render(self._take(checked, tools), tools)
        return "".join(self._appended(checked, tools).split()) != "".join(text.split())

    def _appended(self, conversation: Sequence[Message], tools: _Specs) -> str:
        """The text of a conversation as :meth:`prompt` and :meth:`follow` make it."""
        turns = [n for n, m in enumerate(conversation) if m["role"] == "assistant"]
        begun = conversation[: turns[0]] if turns else conversation
        text = self._render(self._take(begun, tools), tools)
        for turn, following in zip(turns, [*turns[1:], len(conversation)], strict=True):
            answers = self._take(conversation[turn + 1 : following], tools)
            text += conversation[turn]["content"] + self._after(answers, tools)
        return text

    def _after(
        self, messages: Sequence[Message], tools: _Specs = (), *, opening: bool = True
    ) -> str:
        """What the template writes after a turn of the policy."""
        text = self._render([*_BEFORE, *messages], tools, opening=opening)
        _, place, after = text.partition(_TURN)
        if not place or _TURN in after:
            raise ValueError("make_renderer: the chat template changes the assistant's message")
        return after

    @cached_property
    def _reads_tools(self) -> bool:
        if "tools" not in inspect.signature(self._tokenizer.chat).parameters:
            return False
        spec = as_openai(ToolSpec(_PLACE, "", {"type": "object", "properties": {}}))
        return _PLACE in self._render(_BEFORE[:1], [spec])

    def _has_tool_role(self, tools: _Specs) -> bool:
        if bool(tools) not in self._tool_roles:
            try:
                text = self._after([{"role": "tool", "content": _PLACE}], tools)
                self._tool_roles[bool(tools)] = _PLACE in text
            except ValueError:
                self._tool_roles[bool(tools)] = False
        return self._tool_roles[bool(tools)]

    def _take(self, messages: Sequence[Message], tools: _Specs) -> list[Message]:
        """Messages of roles that the template has; answers of tools in a row are one message."""
        if self._has_tool_role(tools):
            return list(messages)
        taken: list[Message] = []
        for before, message in zip([None, *messages], messages, strict=False):
            if message["role"] != "tool":
                taken.append(message)
                continue
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before is not None and before["role"] == "tool":
                text = f"{taken.pop()['content']}\n{text}"
            taken.append({"role": "user", "content": text})
        return taken

    def _render(
        self, messages: Sequence[Message], tools: _Specs = (), *, opening: bool = True
    ) -> str:
        chat = self._tokenizer.chat
        if tools:
            return chat(messages, add_generation_prompt=opening, tools=tools)
        return chat(messages, add_generation_prompt=opening)


def _other_texts(value: Any, *, key: str | None = None) -> Iterator[str]:
    """The texts in a message, such as its parts and calls, but for its role and plain content."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            content = name == "content" and isinstance(inner, str)
            if key is not None or not (name == "role" or content):
                yield from _other_texts(inner, key=name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _other_texts(inner, key=key)
    elif isinstance(value, str):
        yield value


def encode_chat(
    tokenizer: Tokenizer,
    render: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    *,
    after: str | None = None,
) -> list[int]:
    """The tokens of a rendered conversation; special tokens spelled in messages are plain text.

    Templates do not see a key of a message whose value is None, such as those that a table adds to
    each message of a column.

    Args:
      tokenizer: A ``data.Tokenizer``.
      render: The chat template: messages to text.
      messages: The conversation.
      after: Returns only the tokens after this text.

    Raises:
      ValueError: If a message spells a special token and the template does not write it once, or
        in something else than the text of the message.
    """
    messages = [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]
    text = render(messages)
    at = 0 if after is None else text.index(after) + len(after)
    pieces: list[tuple[str, bool]] = []  # texts, and whether special tokens may be spelled in them
    for number, message in enumerate(messages):
        content = message["content"]
        for leaf in _other_texts(message):
            if tokenizer.encode(leaf) != tokenizer.encode(leaf, allow_special=False):
                raise ValueError(
                    f"The message {leaf[:40]!r} spells a special token outside of a plain text, "
                    "where it cannot be told from special tokens; leave it out."
                )
        if not isinstance(content, str):  # such as that of a message which only calls tools
            continue
        if tokenizer.encode(content) == tokenizer.encode(content, allow_special=False):
            continue
        # The rest of the text, rendered with another content, shows where this one stands.
        place = _PLACE
        while place in text:
            place += "\ue000"
        other = [*messages[:number], {**message, "content": place}, *messages[number + 1 :]]
        head, *tails = render(other).split(place)
        tail = tails[0] if len(tails) == 1 else None
        if tail is None or not (text.startswith(head) and text.endswith(tail)):
            raise ValueError(
                f"The message {content[:40]!r} spells a special token, and the chat template does "
                "not write the message exactly once and unchanged, so its text cannot be told from "
                "special tokens; leave it out."
            )
        end = len(text) - len(tail)
        pieces += [(text[at : len(head)], True), (text[len(head) : end], False)]
        at = end
    pieces.append((text[at:], True))
    tokens = list(tokenizer.encode(pieces.pop(0)[0])) if after is None else []
    for piece, special in pieces:
        tokens += encode_inside(tokenizer, piece, allow_special=special)
    return tokens


def as_openai(tool: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI's API and chat templates take it."""
    parameters = dict(tool.parameters)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def checked_messages(
    messages: Sequence[Message], name: str, *, answers: bool = False
) -> list[Message]:
    """Messages with a role and a text; ``answers`` are of role "tool" or "user"."""
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(
                f"{name}: message {number} must have a role and a string as its content, got "
                f"{dict(message)!r}"
            )
        if answers and role not in ("tool", "user"):
            raise ValueError(
                f"{name}: message {number} must be of role 'tool' or 'user', got {role!r}: an "
                "environment does not speak for the policy"
            )
    return list(messages)
