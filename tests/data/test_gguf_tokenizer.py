"""Tokenizers from small GGUF files written here: splitting, token types, BOS, refusals."""

import json
from pathlib import Path

import gguf
import pytest
from rows import for_each
from tokenizers import pre_tokenizers

from jaxrl_llm.data.gguf_tokenizer import SPLITTINGS, backend_from_gguf
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.models.gguf import GgufFile

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"
STRINGS = [
    row["text"]
    for row in json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))["strings"]
]
SPLITS = json.loads((GOLDEN / "splitting.json").read_text(encoding="utf-8"))["lengths"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, CONTROL, USER = 1, 3, 4
BOS, EOS, EOT, THINK, HI, HIS = range(256, 262)


def write(path, *, pre="gpt-2", model="gpt2", merges=("h i", "hi s"), drop=(), **extra):
    tokens = [*ALPHABET, "<bos>", "<eos>", "<eot>", "<think>", "hi", "his"]
    kinds = [NORMAL] * 256 + [CONTROL] * 3 + [USER] + [NORMAL] * 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(merges))
    for name, token in {"bos": BOS, "eos": EOS, "eot": EOT}.items():
        if name not in drop:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for key, value in extra.items():
        key = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@for_each("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_cuts_equal_transformers(tmp_path, pre):
    backend = backend_from_gguf(GgufFile(write(tmp_path / "m.gguf", pre=pre)))
    for text, lengths in zip(STRINGS, SPLITS[pre], strict=True):
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = backend.pre_tokenizer.pre_tokenize_str(text)
        assert [len(piece) for piece, _ in pieces] == lengths, text


@for_each(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ1234½"]),
        ("default", ["a", "Ġ", "Ġ1234½"]),
        ("smollm", ["a", "ĠĠ", "1", "2", "3", "4", "½"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "3", "4", "½"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "123", "4½"]),
    ],
)
def test_digits_and_spaces(tmp_path, pre, pieces):
    backend = backend_from_gguf(GgufFile(write(tmp_path / "m.gguf", pre=pre)))
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  1234½")]
    assert [piece.replace("Â½", "½") for piece in found] == pieces


def test_token_types(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf"))
    text = "<think>hi<eot>"
    assert tokenizer.encode(text) == [THINK, HI, EOT]
    assert tokenizer.decode([THINK, HI, EOT]) == "<think>hi"
    literal = tokenizer.encode(text, allow_special=False)
    assert literal[:2] == [THINK, HI]
    assert EOT not in literal
    assert tokenizer.eos_ids == (EOS, EOT)
    assert tokenizer.pad_id == EOS
    assert tokenizer.vocab_size == 262


@for_each(
    ("pre", "flag", "expected"),
    [
        ("gpt-2", None, [HI]),
        ("gpt-2", True, [BOS, HI]),
        ("llama-bpe", None, [BOS, HI]),
        ("llama-bpe", False, [HI]),
    ],
)
def test_bos_follows_the_file_and_else_the_family(tmp_path, pre, flag, expected):
    extra = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", pre=pre, **extra))
    assert tokenizer.encode("hi") == expected
    if expected[0] == BOS:
        assert tokenizer.encode("<bos>hi") == expected


def test_whole_words_need_no_merge(tmp_path):
    merges = ("h i",)
    for pre, expected in [("llama-bpe", [HIS]), ("qwen2", [HI, ALPHABET.index("s")])]:
        path = write(tmp_path / f"{pre}.gguf", pre=pre, merges=merges, add_bos_token=False)
        assert load_tokenizer(path).encode("his") == expected


def test_qwen2_composes_and_others_do_not(tmp_path):
    decomposed = "e\u0301"
    qwen2 = load_tokenizer(write(tmp_path / "q.gguf", pre="qwen2"))
    assert qwen2.decode(qwen2.encode(decomposed)) == "\u00e9"
    smollm = load_tokenizer(write(tmp_path / "s.gguf", pre="smollm"))
    assert smollm.decode(smollm.encode(decomposed)) == decomposed


def test_template_with_bos(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    path = write(tmp_path / "m.gguf", add_bos_token=True, chat_template=template)
    tokenizer = load_tokenizer(path)
    text = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert text == "<bos>hi"
    assert tokenizer.encode(text) == [BOS, HI]


@for_each(
    ("options", "words"),
    [
        ({"pre": "tekken"}, "unknown pre-tokenizer 'tekken'; known: default, gpt-2, smollm"),
        ({"model": "llama"}, "'llama' vocabulary; only byte-level BPE"),
        ({"merges": ("h x",)}, "the merge 'h x'"),
        ({"merges": ("hi",)}, "the merge 'hi'"),
        ({"drop": ("eos", "eot")}, "names no token that ends"),
        ({"drop": ("bos",), "add_bos_token": True}, "asks for a BOS token but names none"),
    ],
)
def test_refusals_name_the_file(tmp_path, options, words):
    path = write(tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=rf"m\.gguf.*{words}"):
        load_tokenizer(path)


def test_a_folder_with_one_gguf_and_without_a_name_of_the_pre_tokenizer(tmp_path):
    write(tmp_path / "m.gguf", pre=None)
    assert load_tokenizer(tmp_path).encode("hi") == [HI]
    assert set(SPLITTINGS) >= {"default", "smollm", "qwen2", "llama-bpe", "gpt-2"}
