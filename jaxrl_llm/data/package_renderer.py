"""The renderers of the package ``renderers``, which are hand-written for about thirty models.

They are for models whose turns :mod:`jaxrl_llm.data.parsing` cannot read, such as those that write
calls in XML. The package comes with ``jaxrl_llm[envs]`` and loads where it is used.
"""

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.core.reasoning import reasoning_end, split_reply
from jaxrl_llm.data.messages import Message, Parsed, ToolCall, ToolSpec
from jaxrl_llm.data.rendering import TurnReader, as_openai, checked_messages, encode_inside
from jaxrl_llm.data.tokenizer import Tokenizer

# Stands in a message that spells special tokens, so that the package's tokenizer reads plain text.
_PLAIN = "\ue000\ue003\ue000"
_BEFORE = ({"role": "user", "content": "Hi"},)


class PackageRenderer(TurnReader):
    """A renderer of the package as a ``data.Renderer``.

    A special token that is spelled in a message is plain text here too. If the package would render
    the conversation again, ``follow`` raises ValueError and ``rewritten`` is True. Calls are parsed
    with the tools of the last prompt: conversations with different tools need a renderer each.

    Args:
      tokenizer: A ``data.Tokenizer``.
      name: Name of the renderer in the package: "qwen3.5", "glm-5", ...
      system: A system message before every conversation.

    Raises:
      ImportError: If the package is not installed.
      ValueError: If it has no such renderer.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, system: str | None = None) -> None:
        try:
            import renderers
        except ImportError as error:
            raise ImportError(
                f"PackageRenderer: {name!r} needs the package renderers of jaxrl_llm[envs]: {error}"
            ) from error
        config = renderers.config_from_name(name)
        self._renderer = renderers.create_renderer(_PackageTokenizer(tokenizer), config)
        first, *others = self._renderer.get_stop_token_ids()
        super().__init__(tokenizer, system, first)
        self.stop_ids = tuple(dict.fromkeys((first, *others, *tokenizer.eos_ids)))
        self._start = self._renderer.render_ids(list(_BEFORE), add_generation_prompt=True)
        opening = tokenizer.decode(self._start, skip_special=False)
        self._thinking = reasoning_end(opening)
        # The tools of the last prompt, by whose types the package reads the arguments of calls.
        self._tools: list[dict[str, Any]] | None = None

    @property
    def rewrites(self) -> bool:
        """Whether the package reports that the template rewrites turns."""
        return not self._renderer.is_prefix_stable

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See :class:`Renderer`."""
        conversation = self._mark(self._begin(checked_messages(messages, "prompt"), ()))
        self._tools = [as_openai(tool) for tool in tools] or None
        ids = self._renderer.render_ids(conversation, tools=self._tools, add_generation_prompt=True)
        return list(ids)

    def follow(self, messages: Sequence[Message], *, stopped: bool) -> list[int]:
        """See :class:`Renderer`."""
        tokens = self._bridge(checked_messages(messages, "follow", answers=True), stopped)
        if tokens is None:
            raise ValueError(
                "follow: the conversation after this message must be rendered again, in a new "
                "branch"
            )
        return tokens

    def turn(self, text: str) -> list[int]:
        """See :class:`Renderer`."""
        thinking, final = split_reply(text)
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking is not None and final is not None:
            said |= {"content": final.lstrip("\n"), "reasoning_content": thinking.strip("\n")}
        talk = [*_BEFORE, *self._mark([said])]
        ids = list(self._renderer.render_ids(talk, add_generation_prompt=False))
        start, turn = ids[: len(self._start)], ids[len(self._start) :]
        end = next((n for n, i in enumerate(turn) if i in self.stop_ids), None)
        if not text or start != self._start or end is None:
            return super().turn(text)
        return turn[: end + 1]

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """See :class:`Renderer`."""
        ids = [int(i) for i in tokens]
        parsed = self._renderer.parse_response(ids, prompt_ids=self._start, tools=self._tools)
        calls = [c for c in parsed.tool_calls if c.name and isinstance(c.arguments, dict)]
        ended = parsed.reasoning_complete and parsed.reasoning_content is not None
        # The package gives None for an empty part, too.
        reasoned = bool(ended) or super().parse(tokens).reasoned
        bad = [c.status.value for c in parsed.tool_calls if c.status.value != "ok"]
        return Parsed(
            parsed.content.strip(),
            (parsed.reasoning_content or "").strip(),
            tuple(ToolCall(c.name, c.arguments) for c in calls if c.status.value == "ok"),
            f"A tool call cannot be read: {bad[0]}." if bad else None,
            bool(ids) and ids[-1] in self.stop_ids,
            reasoned,
        )

    def message(self, tokens: Sequence[int]) -> Message:
        """See :class:`Renderer`."""
        turn = self.parse(tokens)
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in turn.calls
            ]
        return message

    def rewritten(self, conversation: Sequence[Message]) -> bool:
        """See :class:`Renderer`; the package looks only at the last messages."""
        turns = [n for n, m in enumerate(conversation) if m["role"] == "assistant"]
        answers = list(conversation[turns[-1] + 1 :]) if turns else []
        return bool(answers) and self._bridge(answers, True) is None

    def _bridge(self, messages: Sequence[Message], stopped: bool) -> list[int] | None:
        turn = self._said("Yes.")
        turn += [self.stop_ids[0]] if stopped else []
        bridge = self._renderer.bridge_to_next_turn(
            self._start, turn, self._mark(messages), tools=self._tools
        )
        return None if bridge is None else list(bridge.token_ids)[len(self._start) + len(turn) :]

    def _mark(self, messages: Sequence[Message]) -> list[Message]:
        """Messages, those that spell special tokens with a mark after their first character."""
        encode, marked = self._tokenizer.encode, []
        for message in messages:
            text = message["content"]
            if encode(text) != encode(text, allow_special=False):
                first = len(text) - len(text.lstrip()) + 1
                message = {**message, "content": text[:first] + _PLAIN + text[first:]}
            marked.append(message)
        return marked


class _PackageTokenizer:
    """A tokenizer as the package calls one."""

    name_or_path, unk_token_id = "", None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_ids[0]

    def encode(self, text: str, **_: Any) -> list[int]:
        plain = text.replace(_PLAIN, "")
        return encode_inside(self._tokenizer, plain, allow_special=plain == text)

    def decode(self, ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        ids = encode_inside(self._tokenizer, tokens)
        return ids[0] if len(ids) == 1 else None
