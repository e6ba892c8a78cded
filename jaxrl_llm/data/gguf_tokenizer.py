"""A tokenizer built from the vocabulary, merges and pre-tokenizer name of a GGUF file."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from jaxrl_llm.models.gguf import GgufFile

# Types of llama.cpp's vocabulary entries that are matched before any splitting.
_CONTROL = 3
_USER_DEFINED = 4


class Splitting(NamedTuple):
    """How text is split before the merges.

    Args:
      pattern: Regular expression of the pieces; "" for GPT-2's, which is built into `tokenizers`.
      digits: Whether every numeric character is first split into a separate piece.
      nfc: Whether text is first normalized to Unicode NFC.
      whole_words: Whether a piece that is in the vocabulary is one token, without merging.
      add_bos: Whether BOS is added at the start if the file has no entry for it.
    """

    pattern: str = ""
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _words(numbers: str) -> str:
    """The expression of GPT-4 and its descendants, by how many digits make a piece."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = Splitting(pattern=_words(r"\p{N}{1,3}"), whole_words=True, add_bos=True)
SPLITTINGS = {
    "default": Splitting(),
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    "qwen2": Splitting(pattern=_words(r"\p{N}"), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def backend_from_gguf(file: "GgufFile") -> "Backend":
    """The `tokenizers` tokenizer of a GGUF file; it adds no BOS, and control tokens are special.

    Raises:
      ValueError: If the vocabulary is not byte-level BPE, or the pre-tokenizer is unknown.

    References:
      The pre-tokenizer names and their expressions are those of llama.cpp and of the tokenizer.json
      files that they were made from. The GGUF reader of transformers (5.12 and 5.23 were tried)
      also uses GPT-2's splitting for `smollm` and thus does not split digits: two spaces before a
      digit, or a fraction character, get other ids there. We follow the tokenizer of the model.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    splitting = splitting_of(file)
    tokens = file.metadata("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in file.metadata("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for pair in merges:
        if len(pair) != 2 or "".join(pair) not in vocabulary:
            raise ValueError(
                f"load_tokenizer: {file.path} has the merge {' '.join(pair)!r}, whose result is "
                "not in its vocabulary"
            )
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    backend.normalizer = normalizers.NFC() if splitting.nfc else None
    steps: list[Any] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    use_regex = not splitting.pattern
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    kinds = file.metadata("tokenizer.ggml.token_type", [])
    marked = {
        kind: [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, other in zip(tokens, kinds, strict=False)
            if other == kind
        ]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    backend.add_special_tokens(marked[_CONTROL])
    backend.add_tokens(marked[_USER_DEFINED])
    return backend


def splitting_of(file: "GgufFile") -> Splitting:
    """The splitting a GGUF file names; an unknown one raises a ValueError that lists the known."""
    model = file.metadata("tokenizer.ggml.model", None)
    if model != "gpt2":
        raise ValueError(
            f"load_tokenizer: {file.path} has a {model!r} vocabulary; only byte-level BPE ('gpt2') "
            "is supported"
        )
    name = file.metadata("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        raise ValueError(
            f"load_tokenizer: {file.path} names the unknown pre-tokenizer {name!r}; known: "
            f"{', '.join(SPLITTINGS)}"
        )
    return SPLITTINGS[name]
