"""A tokenizer without a vocabulary file: one id per byte."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

_SPECIAL = {256: "<bos>", 257: "<eos>", 258: "<pad>"}
_IDS = {text: i for i, text in _SPECIAL.items()}
_SPLIT = re.compile(f"({'|'.join(map(re.escape, _IDS))})")


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then ``<bos>``, ``<eos>`` and ``<pad>``; a ``data.Tokenizer``.

    Args:
      phrases: Texts that ids below 256 decode to in place of their byte, so that a model with
        random weights writes them; ``encode`` does not use these.

    Attributes:
      vocab_size: 259.
      bos_id: 256; starts a chat message.
      eos_ids: (257,); ends a chat message.
      pad_id: 258.

    Example:
      >>> import jaxrl_llm as jr
      >>> tokenizer = jr.testing.ByteTokenizer()
      >>> tokenizer.encode("hi<eos>")
      [104, 105, 257]
      >>> tokenizer.decode([104, 105, 257])
      'hi'
      >>> jr.testing.ByteTokenizer({255: "yes"}).decode([104, 255])
      'hyes'
    """

    vocab_size: int = 259
    bos_id: int = 256
    eos_ids: tuple[int, ...] = (257,)
    pad_id: int = 258
    _phrases: Mapping[int, bytes] = MappingProxyType({})  # also of a subclass with its own start

    def __init__(self, phrases: Mapping[int, str] | None = None):
        if phrases:
            self._phrases = {i: text.encode() for i, text in phrases.items()}

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """The ids of a text.

        Without ``allow_special``, for untrusted text, ``<bos>``, ``<eos>`` and ``<pad>`` are
        encoded as bytes like any other text, not as one id each.
        """
        parts = _SPLIT.split(text) if allow_special else [text]
        ids: list[int] = []
        for part in parts:
            ids.extend([_IDS[part]] if allow_special and part in _IDS else part.encode())
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become the replacement character.

        Without ``skip_special``, special tokens appear by name instead of being left out. Raises
        ValueError if an id is outside the vocabulary.
        """
        data = bytearray()
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ByteTokenizer.decode: id {i} is outside the vocabulary of 259.")
            if i in self._phrases:
                data.extend(self._phrases[i])
            elif i < 256:
                data.append(i)
            elif not skip_special:
                data.extend(_SPECIAL[i].encode())
        return data.decode(errors="replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        r"""Messages as one text: ``<bos>role``, a new line, the content, ``<eos>``.

        Each message has "role" and "content". With ``add_generation_prompt`` the text ends with the
        opening of the assistant's message. The names of ``tools`` come first, as one message.

        Example:
          >>> ByteTokenizer().chat([{"role": "user", "content": "2+2?"}])
          '<bos>user\n2+2?<eos><bos>assistant\n'
        """
        names = " ".join(tool["function"]["name"] for tool in tools or ())
        text = f"<bos>tools\n{names}<eos>" if tools else ""
        text += "".join(f"<bos>{m['role']}\n{m['content']}<eos>" for m in messages)
        return text + ("<bos>assistant\n" if add_generation_prompt else "")
