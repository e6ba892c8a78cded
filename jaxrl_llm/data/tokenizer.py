"""Text to token ids and back, with the tokenizer and chat template of the model."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxrl_llm.core import checks
from jaxrl_llm.core.reasoning import shown_tokens
from jaxrl_llm.core.runtime.files import parse_json, parsing
from jaxrl_llm.data.chat import TEMPLATE_FILES, load_templates, render_chat
from jaxrl_llm.data.patterns import check_patterns

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from jaxrl_llm.models.gguf import GgufFile

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# How many characters a tokenizer may make of one: far more than any published one.
_MAX_GROWTH = 1024


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Args:
      eos_ids: Ids that end a reply; the first is the one to write.
      pad_id: Id for the unused cells of an array.
      vocab_size: Upper bound of the ids, exclusive.
    """

    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Text of a conversation; ``tools`` is passed only if there are any."""
        ...


class PretrainedTokenizer:
    """The tokenizer of a pretrained model, over the `tokenizers` package.

    Args:
      backend: Splits and merges text; adds no special tokens itself.
      eos_ids: Ids that end a reply.
      pad_id: Id for unused cells; the first of `eos_ids` if the model defines none.
      prefix_ids: Added before every encoded text that does not begin with them: BOS, or nothing.
      template: jinja2 source of the chat template, or None.
      tool_template: The chat template of conversations with tools; None if `template` is.
      special_tokens: Names for the template, such as `bos_token`.

    Raises:
      ValueError: If no token ends a reply, or an id is not an integer from 0 to 2^31 - 1.
    """

    def __init__(
        self,
        backend: "Backend",
        *,
        eos_ids: Sequence[int],
        pad_id: int | None = None,
        prefix_ids: Sequence[int] = (),
        template: str | None = None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        checks.check_token_ids(
            "PretrainedTokenizer",
            eos_ids=eos_ids,
            pad_id=() if pad_id is None else (pad_id,),
            prefix_ids=prefix_ids,
        )
        if not len(eos_ids):
            raise ValueError("PretrainedTokenizer: `eos_ids` is empty, so no token ends a reply")
        self._backend = backend
        self.eos_ids = tuple(dict.fromkeys(int(i) for i in eos_ids))
        self.pad_id = self.eos_ids[0] if pad_id is None else int(pad_id)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.prefix_ids = tuple(int(i) for i in prefix_ids)
        self.template, self.tool_template = template, tool_template
        self.special_tokens = dict(special_tokens or {})
        self.template_options: dict[str, Any] = {}  # see chat.with_template_options

    @classmethod
    def from_gguf(cls, file: "GgufFile") -> "PretrainedTokenizer":
        """The tokenizer of an open GGUF file.

        Raises:
          ValueError: If the file is incomplete, or of an unknown kind.
        """
        from jaxrl_llm.data.gguf_tokenizer import backend_from_gguf, splitting_of

        with parsing("load_tokenizer", file.path, "tokenizer"):
            backend = backend_from_gguf(file)
            ids = {
                name: file.metadata(f"tokenizer.ggml.{key}_token_id", None)
                for name, key in {
                    "bos_token": "bos",
                    "eos_token": "eos",
                    "unk_token": "unknown",
                    "pad_token": "padding",
                    "eot": "eot",
                    "eom": "eom",
                }.items()
            }
            add_bos = file.metadata("tokenizer.ggml.add_bos_token", splitting_of(file).add_bos)
            bos = ids["bos_token"]
            if add_bos and bos is None:
                raise ValueError(f"load_tokenizer: {file.path} asks for a BOS token but names none")
            ends = [ids[name] for name in ("eos_token", "eot", "eom") if ids[name] is not None]
            if not ends:
                raise ValueError(f"load_tokenizer: {file.path} names no token that ends a text")
            named = {
                name: token
                for name in _NAMED
                if ids.get(name) is not None and (token := backend.id_to_token(ids[name]))
            }
            template = file.metadata("tokenizer.chat_template", None)
            if not isinstance(template, str | None):
                raise ValueError(
                    f"load_tokenizer: the chat template of {file.path} must be a string"
                )
            return cls(
                backend,
                eos_ids=ends,
                pad_id=ids["pad_token"],
                prefix_ids=[bos] if add_bos else [],
                template=template,
                special_tokens=named,
            )

    @classmethod
    def from_folder(cls, folder: Path) -> "PretrainedTokenizer":
        """The tokenizer of a folder with tokenizer.json and the other files of transformers.

        Raises:
          ValueError: If a file is broken, or defines no token that ends a text.
        """
        from tokenizers import Tokenizer as Backend

        source = folder / "tokenizer.json"
        with parsing("load_tokenizer", source, "tokenizer"):
            check_patterns(parse_json(source.read_bytes()))
            backend = Backend.from_file(str(source))
            _check_growth(backend)
            backend.no_padding()
            backend.no_truncation()
            # As in transformers 5, which ignores `add_bos_token` where there is a tokenizer.json.
            prefix = _prefix(backend)
        file = folder / "tokenizer_config.json"
        settings = _optional_json(file)
        named: dict[str, str] = {}
        for name in filter(settings.get, _NAMED):
            token = settings[name]
            text = token.get("content") if isinstance(token, Mapping) else token
            if not isinstance(text, str):
                raise ValueError(
                    f"load_tokenizer: `{name}` of {file} must be a string, got {token!r}"
                )
            named[name] = text
        file, ids = _stored_ends(folder)
        ends = list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
        for i in ends:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31:
                raise ValueError(
                    f"load_tokenizer: {file} has {i!r} for a token id in `eos_token_id`"
                )
        if (end := backend.token_to_id(named.get("eos_token", ""))) is not None:
            ends.append(end)
        if not ends:
            raise ValueError(f"load_tokenizer: {folder} names no token that ends a text")
        templates = load_templates(folder, settings)
        return cls(
            backend,
            eos_ids=ends,
            pad_id=backend.token_to_id(named.get("pad_token", "")),
            prefix_ids=prefix,
            template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            special_tokens=named,
        )

    @cached_property
    def _literal(self) -> "Backend":
        """The same tokenizer, blind to special tokens; a copy, for the switch is its state."""
        copy = type(self._backend).from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _skipped(self) -> tuple[frozenset[int], frozenset[int]]:
        """The special tokens that `decode` skips, and those that mark reasoning."""
        added = self._backend.get_added_tokens_decoder().items()
        specials = {token.content: i for i, token in added if token.special}
        shown = frozenset(specials[name] for name in shown_tokens(set(specials)))
        return frozenset(specials.values()) - shown, shown

    def backend(self) -> "Backend":
        """A copy of the backend, which adds `prefix_ids` first if it adds special tokens."""
        from tokenizers.processors import TemplateProcessing

        copy = type(self._backend).from_str(self._backend.to_str())
        if self.prefix_ids and _prefix(copy) != list(self.prefix_ids):
            # A file without a post-processor, such as GGUF; it appends no tokens.
            first = [(copy.id_to_token(i), i) for i in self.prefix_ids]
            start = " ".join(token for token, _ in first)
            copy.post_processor = TemplateProcessing(
                single=f"{start} $A", pair=f"{start} $A {start} $B:1", special_tokens=first
            )
        return copy

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Token ids of a text. A BOS token is added only if the text does not begin with it.

        ``allow_special``: whether the spelling of a special token becomes that token. False for
        text that must not imitate the template, such as a question from a data set.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode: `text` must be a string, got {type(text).__name__}")
        backend = self._backend if allow_special else self._literal
        with _panics("encode"):
            ids = backend.encode(text, add_special_tokens=False).ids
        prefix = list(self.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become the replacement character.

        Unassigned ids are skipped: the vocabulary of a model is often padded, so it can sample
        them. A negative id raises ValueError. ``skip_special`` skips special tokens such as the end
        of the turn, but not those that mark reasoning, such as ``[THINK]`` and the channels of
        gpt-oss: without them a reply's reasoning and its final part would be one text.
        """
        numbers = [int(i) for i in ids]
        if min(numbers, default=0) < 0:
            raise ValueError(f"decode: token {min(numbers)} is negative")
        skipped, shown = self._skipped
        if skip_special and not shown.isdisjoint(numbers):
            numbers, skip_special = [i for i in numbers if i not in skipped], False
        with _panics("decode"):
            return self._backend.decode(numbers, skip_special_tokens=skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Text of a conversation in the format of the model, by :func:`render_chat`.

        Raises ValueError if the model has no chat template, or it rejects the conversation.
        """
        template = self.template
        if tools and self.tool_template is not None:
            template = self.tool_template
        if template is None:
            raise ValueError(
                "chat: this model has no chat template; send plain text: --raw of `jaxrl-llm "
                "sample`, --data.no-chat of a run, `encode` in your code"
            )
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self.special_tokens,
            options=self.template_options,
        )


def load_tokenizer(name_or_path: str | Path) -> PretrainedTokenizer:
    """Loads the tokenizer of a model by the model's name.

    Args:
      name_or_path: A folder with tokenizer.json, a .gguf file, a short name such as
        `smollm2-135m-instruct`, or a Hugging Face repository `owner/name`.

    Raises:
      FileNotFoundError: If nothing has that name, or the folder has no tokenizer.json.
      ValueError: If a file is broken or of an unknown kind.
      ConnectionError: If the model must be downloaded but cannot be.

    Example:
      >>> import json, pathlib, tempfile
      >>> import tokenizers
      >>> import jaxrl_llm as jr
      >>> words = tokenizers.models.WordLevel({"<eos>": 0, "hi": 1}, unk_token="<eos>")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     tokenizers.Tokenizer(words).save(f"{folder}/tokenizer.json")
      ...     settings = pathlib.Path(folder, "tokenizer_config.json")
      ...     _ = settings.write_text(json.dumps({"eos_token": "<eos>"}))
      ...     tokenizer = jr.data.load_tokenizer(folder)
      >>> tokenizer.encode("hi"), tokenizer.eos_ids, tokenizer.vocab_size
      ([1], (0,), 2)
    """
    from jaxrl_llm.models.gguf import open_gguf
    from jaxrl_llm.models.names import locate

    path = locate(name_or_path, weights=False)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise FileNotFoundError(f"load_tokenizer: the folder {path} holds no tokenizer.json")
        path = files[0]
    if path.is_dir():
        return PretrainedTokenizer.from_folder(path)
    return PretrainedTokenizer.from_gguf(open_gguf(path))


def save_tokenizer(
    tokenizer: PretrainedTokenizer,
    folder: str | os.PathLike[str],
    *,
    ends: Sequence[int] | None = None,
) -> None:
    """Writes a tokenizer in the format of `load_tokenizer` and transformers.

    tokenizer.json splits text as the tokenizer does and adds its BOS; tokenizer_config.json has the
    special tokens and the chat templates, which have files as well; generation_config.json has the
    tokens that end a reply and the padding token.

    Args:
      tokenizer: The tokenizer.
      folder: The folder; it is created if it does not exist, and files of these names are replaced.
      ends: The tokens that end a reply; None for ``eos_ids``.

    Raises:
      TypeError: If the tokenizer is not from `load_tokenizer`.

    Example:
      >>> import pathlib, tempfile
      >>> import tokenizers
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.data.tokenizer import PretrainedTokenizer
      >>> words = tokenizers.models.WordLevel({"<eos>": 0, "hi": 1}, unk_token="<eos>")
      >>> tokenizer = PretrainedTokenizer(tokenizers.Tokenizer(words), eos_ids=[0])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.data.save_tokenizer(tokenizer, folder)
      ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
      ...     jr.data.load_tokenizer(folder).encode("hi")
      ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
      [1]
    """
    from jaxrl_llm.models.export import write_json

    if not isinstance(tokenizer, PretrainedTokenizer):
        raise TypeError(
            "save_tokenizer: the tokenizer must come from load_tokenizer; got a "
            f"{type(tokenizer).__name__}, which has no tokenizer files."
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    backend = tokenizer.backend()
    (target / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    names = tokenizer.special_tokens
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    settings |= {"clean_up_tokenization_spaces": False}
    # A reply ends with it; a model that has no token of this name gives it none by itself.
    settings.setdefault("eos_token", backend.id_to_token(tokenizer.eos_ids[0]))
    if tokenizer.pad_id not in tokenizer.eos_ids:
        settings.setdefault("pad_token", backend.id_to_token(tokenizer.pad_id))
    templates = {"default": tokenizer.template, "tool_use": tokenizer.tool_template}
    held = {name: template for name, template in templates.items() if template is not None}
    # Old versions of transformers read the settings, new ones the files.
    if set(held) == {"default"}:
        settings["chat_template"] = tokenizer.template
    elif held:
        settings["chat_template"] = [{"name": k, "template": x} for k, x in held.items()]
    for name, file in TEMPLATE_FILES.items():
        (target / file).unlink(missing_ok=True)  # of a tokenizer that was there before
        if name in held:
            (target / file).parent.mkdir(exist_ok=True)
            (target / file).write_text(held[name], encoding="utf-8")
    write_json(target / "tokenizer_config.json", settings)
    ends = list(tokenizer.eos_ids if ends is None else ends)
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    generation["pad_token_id"] = tokenizer.pad_id
    if "bos_token" in names:
        generation["bos_token_id"] = backend.token_to_id(names["bos_token"])
    write_json(target / "generation_config.json", generation)


@contextlib.contextmanager
def _panics(function: str) -> Iterator[None]:
    """A panic of the `tokenizers` package, which is no Exception, as a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{function}: the tokenizer fails on this input ({error})") from error


def _check_growth(backend: "Backend") -> None:
    """Raises ValueError for a normalizer or decoder that makes a text many times as long.

    Sixty steps that double it would fill any memory with the first text.
    """

    def growth(step: dict[str, Any]) -> float:
        inner = step.get("normalizers") or step.get("decoders") or ()
        product = math.prod((growth(x) for x in inner), start=1.0)
        if step["type"] == "Prepend":
            return product * (1 + len(step["prepend"]))
        if step["type"] == "Replace":
            before = step["pattern"].get("String")
            return product * max(1.0, len(step["content"]) / max(1, len(before or "a")))
        return product

    for name in ("normalizer", "decoder"):
        steps = getattr(backend, name)
        if steps is not None and growth(json.loads(steps.__getstate__())) > _MAX_GROWTH:
            raise ValueError(f"its {name} makes a text more than {_MAX_GROWTH} times as long")


def _prefix(backend: "Backend") -> list[int]:
    """What the post-processor of the tokenizer puts before a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    return full[: full.index(plain[0])] if plain and plain[0] in full else []


def _stored_ends(folder: Path) -> tuple[Path, Any]:
    """The ids that end a text, as a model's files have them, and the file.

    Without generation_config.json, transformers makes one from config.json, where the ids of a
    model of images and text may be those of its decoder.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        return file, _optional_json(file).get("eos_token_id")
    file = folder / "config.json"
    values = _optional_json(file)
    ids, inner = values.get("eos_token_id"), values.get("text_config")
    if ids is None and isinstance(inner, Mapping):
        ids = inner.get("eos_token_id")
    return file, ids


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_tokenizer: {path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"load_tokenizer: {path} must hold a JSON object")
    return value
