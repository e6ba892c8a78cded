r"""Replies of models that reason: their reasoning and their final part.

Every reader of a reply (rewards, collectors, parsers of turns) uses :func:`split_reply`, which has
the markers of each family:

    <think> ... </think>                        Qwen, DeepSeek, GLM, Nemotron, Kimi K2, LFM, Hunyuan
    [THINK] ... [/THINK]                        Magistral
    <seed:think> ... </seed:think>              Seed-OSS
    <|START_THINKING|> ... <|END_THINKING|>     Cohere
    <|channel>thought ... <channel|>            Gemma 4
    <thought> ... </thought>                    EXAONE Deep
    <|inner_prefix|> ... <|inner_suffix|>       Apertus
    <|thought_start|> ... <|thought_end|>       MiniCPM
    ◁think▷ ... ◁/think▷                        Kimi-VL
    <|channel|>analysis<|message|> ... <|channel|>final<|message|> ...     gpt-oss
    to=self<|message|> ... to=user<|message|> ...                          Muse
"""

from typing import NamedTuple

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<thought>", "</thought>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|thought_start|>", "<|thought_end|>"),
    ("◁think▷", "◁/think▷"),
)
"""The tags that open and close the reasoning, by family."""

CHANNEL_TOKENS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|eom|>")
"""The special tokens of replies in channels; the first two are those of each family."""

_START, _MESSAGE, _CHANNEL, _END, _MORE = CHANNEL_TOKENS
# What ends a message of a reply in channels, if its tokenizer shows it.
_ENDS = (_END, _MORE, "<|call|>", "<|return|>", "<|eot|>", _START)
# Tokens of tags; the tag of Gemma is a token and a word.
_TAG_TOKENS = ("<|channel>", *(tag for pair in TAGS for tag in pair))


class Continuation(str):
    """A text that goes on with a response, or a response as it was sampled.

    A tokenizer of responses encodes it as it is, where it would write another text as the chat
    template writes a turn.
    """


class Reply(NamedTuple):
    """The parts of a reply.

    Attributes:
      thinking: Its reasoning without markers; None if it has none.
      final: The text after the reasoning; None if the reasoning has not ended.
    """

    thinking: str | None
    final: str | None


def split_reply(text: str, *, opened: bool | None = None) -> Reply:
    """The reasoning and the final part of a reply.

    Args:
      text: The reply, with the markers of its reasoning.
      opened: Whether the prompt has opened the reasoning. Such a reply has no opening tag, and its
        reasoning ends at the first closing tag; without an opening tag and ``opened``, a reply is
        all final. None if that is not known: a closing tag then also ends the reasoning of a reply
        without an opening tag, and the last closing tag counts.

    Example:
      >>> from jaxrl_llm.core.reasoning import split_reply
      >>> split_reply("2 and 2.</think> 4")
      Reply(thinking='2 and 2.', final=' 4')
      >>> split_reply("<|channel|>analysis<|message|>2?<|end|><|start|>assistant<|channel|>final"
      ...             "<|message|>4")
      Reply(thinking='2?', final='4')
      >>> split_reply("[THINK]2 and"), split_reply("4")
      (Reply(thinking='2 and', final=None), Reply(thinking=None, final='4'))
    """
    if messages := _messages(text):
        final = [body for ends, body in messages if ends]
        thinking = [body for ends, body in messages if not ends]
        return Reply("\n".join(thinking) if thinking else None, final[-1] if final else None)
    begun = text.lstrip()
    tags = next(((o, c) for o, c in TAGS if begun.startswith(o)), None)
    if tags is None and not opened and opened is not None:
        return Reply(None, text)
    rest = text if tags is None else begun.removeprefix(tags[0])
    closes = [c for _, c in TAGS if c in rest] if tags is None else [tags[1]]
    if opened is None:
        close = max(closes, key=rest.rfind, default="")
        before, close, after = rest.rpartition(close) if close else (rest, "", "")
    else:
        close = min(closes, key=rest.find, default="")
        before, close, after = rest.partition(close) if close else (rest, "", "")
    if close:
        return Reply(before, after)
    if tags is not None or opened:
        return Reply(rest, None)
    return Reply(None, text)


def reasoning_end(prompt: str) -> str:
    r"""The tag that ends the reasoning, if a prompt ends with the one that opens it; else empty.

    Example:
      >>> from jaxrl_llm.core.reasoning import reasoning_end
      >>> reasoning_end("<|im_start|>assistant\n<think>\n"), reasoning_end("<think></think>")
      ('</think>', '')
    """
    return next((close for tag, close in TAGS if prompt.rstrip().endswith(tag)), "")


def in_channels(text: str) -> bool:
    """Whether a reply is written in channels, as those of gpt-oss."""
    return bool(_messages(text))


def is_well_formed(text: str) -> bool:
    """Whether a reply is one part of reasoning that ends, and then its final part.

    The reasoning begins with its opening tag, after line breaks at most, and has no other one. A
    reply without an opening tag continues the reasoning that its prompt has opened, if it has one
    closing tag.
    """
    if _messages(text):
        return None not in split_reply(text)
    for tag, close in TAGS:
        rest = text.lstrip("\r\n").removeprefix(tag)
        if tag not in rest and close in rest:
            return rest != text.lstrip("\r\n") or rest.count(close) == 1
    return False


def without_reasoning(text: str) -> str:
    """A text without its reasoning, each part of it if there are several."""
    if _messages(text):
        return split_reply(text).final or ""
    for tag, close in TAGS:
        first, *parts = text.split(close)
        if parts:  # what stands before a closing tag, from the opening tag if there is one
            heads = [x.partition(tag)[0] if tag in x else "" for x in (first, *parts[:-1])]
            text = "".join([*heads, parts[-1].lstrip()])
    return text


def shown_tokens(specials: set[str]) -> set[str]:
    """The special tokens of a vocabulary that mark reasoning, without which its parts would merge.

    Example:
      >>> from jaxrl_llm.core.reasoning import shown_tokens
      >>> sorted(shown_tokens({"[THINK]", "[/THINK]", "[INST]", "<|end|>"}))
      ['[/THINK]', '[THINK]']
    """
    shown = specials & set(_TAG_TOKENS)
    if {_START, _MESSAGE} <= specials:
        shown |= {_START, _MESSAGE} | specials & {_MORE}
        shown |= specials & {_CHANNEL, _END} if _CHANNEL in specials else set()
    return shown


def _messages(text: str) -> list[tuple[bool, str]]:
    """The messages of a reply in channels: whether each is final, and its text; else empty."""
    head, *parts = text.split(_MESSAGE)
    if not parts or not (_CHANNEL in text or _START in text or head.lstrip().startswith("to=")):
        return []
    messages = []
    if _START in head:  # the prompt has begun the first message
        body, head = _cut(head)
        messages += [(False, body)] if body else []
    for part in parts:
        body, following = _cut(part)
        messages.append((_is_final(head), body))
        head = following
    return messages


def _cut(part: str) -> tuple[str, str]:
    """The text of a message, and the header of the next one."""
    places = [(place, end) for end in _ENDS if (place := part.find(end)) >= 0]
    if not places:
        return part, ""
    place, end = min(places)
    return part[:place], part[place + len(end) :]


def _is_final(header: str) -> bool:
    _, channel, name = header.rpartition(_CHANNEL)
    if channel:
        return name.split()[:1] == ["final"]
    _, to, recipient = header.rpartition("to=")
    return not to or recipient.split()[:1] == ["user"]
