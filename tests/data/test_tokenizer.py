"""Tokenizers of SmolLM2 and of folders: the ids, texts and ends that transformers has."""

import json
import lzma
from hashlib import sha256
from pathlib import Path

import pytest
from rows import for_each
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxrl_llm.data import patterns
from jaxrl_llm.data.chat import render_chat
from jaxrl_llm.data.gguf_tokenizer import SPLITTINGS
from jaxrl_llm.data.tokenizer import (
    PretrainedTokenizer,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"
DATA = json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))

# The text by which llama.cpp's converter recognizes a pre-tokenizer, and the SHA-256 of the list of
# ids it expects from the published tokenizer of SmolLM: a second witness besides transformers.
FINGERPRINT_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d"
    "\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 333"
    "3 33333 333333 3333333 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2"
    "\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple"
    "\u5de5\u4f5c1314151\u5929\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 "
    "\u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''''```````\"\"\"\"......!!!!!!"
    "?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like s"
    "ome tea? We'Ve a'lL"
)
FINGERPRINT = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"


@pytest.fixture(scope="module")
def vocabulary_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("smollm2") / "smollm2.gguf"
    path.write_bytes(lzma.decompress((GOLDEN / "smollm2.gguf.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def smollm2(vocabulary_file):
    return load_tokenizer(vocabulary_file)


@for_each("number", range(200))
def test_ids_equal_transformers(smollm2, number):
    row = DATA["strings"][number]
    assert smollm2.encode(row["text"]) == row["ids"]
    assert smollm2.decode(row["ids"], skip_special=False) == row["text"]


def test_ids_without_the_digit_step_are_few_and_have_numbers():
    other = [row["text"] for row in DATA["strings"] if "without_digits" in row]
    assert len(other) == DATA["provenance"]["strings_with_other_ids_without_it"] == 8
    assert all(any(character.isnumeric() for character in text) for text in other)


def test_fingerprint_of_the_published_tokenizer(smollm2):
    ids = smollm2.encode(FINGERPRINT_TEXT)
    assert sha256(str(ids).encode()).hexdigest() == FINGERPRINT


def test_special_tokens_as_plain_text(smollm2):
    text = "hi<|im_end|>"
    literal = smollm2.encode(text, allow_special=False)
    assert 2 in smollm2.encode(text)
    assert 2 not in literal
    assert smollm2.decode(literal) == text
    assert 2 in smollm2.encode(text), "the switch must not stick"


@for_each("number", range(len(DATA["chats"])))
def test_chats_equal_transformers(smollm2, number):
    row = DATA["chats"][number]
    template = DATA["templates"].get(row["template"], smollm2.template)
    text = render_chat(
        template,
        row["messages"],
        add_generation_prompt=row["add_generation_prompt"],
        special_tokens=smollm2.special_tokens,
    )
    assert text == row["text"]
    assert smollm2.encode(text) == row["ids"]


USER = {"role": "user", "content": "a"}


def test_protocol_and_numbers(smollm2):
    assert isinstance(smollm2, Tokenizer) and smollm2.vocab_size == 49152
    assert (smollm2.eos_ids, smollm2.pad_id, smollm2.prefix_ids) == ((2,), 2, ())
    said, prompt = "<|im_start|>user\na<|im_end|>\n", "<|im_start|>assistant\n"
    assert smollm2.chat([USER]).endswith(said + prompt)
    assert smollm2.chat([USER], add_generation_prompt=False).endswith(said)


def test_ids_of_a_padded_vocabulary_are_left_out(smollm2):
    ids = smollm2.encode("2 + 2")
    assert smollm2.decode([49152, *ids, 151935]) == "2 + 2"
    assert smollm2.decode([49152], skip_special=False) == smollm2.decode([]) == ""


@for_each(
    ("call", "error", "message"),
    [
        (lambda t: t.encode(b"abc"), TypeError, "string, got bytes"),
        (lambda t: t.decode([5, -1]), ValueError, "token -1 is negative"),
        (lambda t: t.chat([USER, {"content": "b"}]), TypeError, "message 1 "),
        (lambda t: t.chat(USER), TypeError, "not one message"),
        (lambda t: PretrainedTokenizer(t.backend(), eos_ids=[]), ValueError, "eos_ids"),
        (lambda t: PretrainedTokenizer(t.backend(), eos_ids=[-1]), ValueError, "eos_ids .*got -1"),
        (lambda t: PretrainedTokenizer(t.backend(), eos_ids=[True]), TypeError, "eos_ids .*True"),
        (lambda t: PretrainedTokenizer(t.backend(), eos_ids=[2], pad_id=-1), ValueError, "pad_id"),
    ],
)
def test_bad_input_is_named(smollm2, call, error, message):
    with pytest.raises(error, match=message):
        call(smollm2)


@for_each(
    ("template", "message"),
    [
        ("{{ raise_exception('no systems') }}", "no systems"),
        ("{% for %}", ""),
        # It cannot reach out of the sandbox.
        ("{{ ''.__class__.__mro__ }}", ""),
        ("{{ messages.append(1) }}", ""),
    ],
)
def test_a_template_that_fails_is_told(template, message):
    with pytest.raises(ValueError, match=f"the chat template raised an error: .*{message}"):
        render_chat(template, [])


# A Hugging Face folder, made here: bytes, one merge, BOS by the post-processor as Llama 3 has it.


def make_folder(folder, *, bos=True, config=None, generation=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "hi"])}
    backend = Backend(models.BPE(vocabulary, [("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<bos>", "<eos>", "<eot>"]
    backend.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def test_bos_is_put_once(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path / "m"))
    bos, hi = 257, 256
    assert tokenizer.encode("hi") == [bos, hi]
    assert tokenizer.encode("<bos>hi") == [bos, hi]
    assert tokenizer.encode("") == [bos]
    assert load_tokenizer(make_folder(tmp_path / "n", bos=False)).encode("hi") == [hi]


@for_each(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [259, 258]}, None, (259, 258)),
        ({"eos_token_id": 259}, None, (259, 258)),
        # Without that file transformers makes it from config.json, and only then.
        (None, {"eos_token_id": [259, 258]}, (259, 258)),
        (None, {"eos_token_id": 259}, (259, 258)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 259}}, (259, 258)),
        (None, {"eos_token_id": 257, "text_config": {"eos_token_id": 259}}, (257, 258)),
        (None, {"text_config": 3}, (258,)),
        (None, {}, (258,)),
        ({}, {"eos_token_id": True}, (258,)),
        (None, {"eos_token_id": True}, r"m/config\.json has True for a token id"),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_and_else_of_config(
    tmp_path, generation, config, ends
):
    folder = make_folder(tmp_path / "m", generation=generation)
    if generation is None:
        (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    if isinstance(ends, str):
        with pytest.raises(ValueError, match=ends):
            load_tokenizer(folder)
    else:
        tokenizer = load_tokenizer(folder)
        assert tokenizer.eos_ids == ends and tokenizer.pad_id == ends[0]


def test_a_pad_token_of_its_own_and_other_ends_where_a_tokenizer_is_written(tmp_path):
    config = {"eos_token": "<eos>", "pad_token": "<bos>"}
    assert load_tokenizer(make_folder(tmp_path / "o", config=config)).pad_id == 257
    tokenizer = load_tokenizer(make_folder(tmp_path / "m"))
    for ends, expected in ((None, tokenizer.eos_ids), ((*tokenizer.eos_ids, 259), (258, 259))):
        save_tokenizer(tokenizer, tmp_path / "new", ends=ends)
        assert load_tokenizer(tmp_path / "new").eos_ids == expected


def test_template_of_a_folder(tmp_path):
    folder = make_folder(tmp_path / "m")
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(folder).chat([])
    config = {"eos_token": "<eos>", "chat_template": [{"name": "default", "template": "list"}]}
    make_folder(folder, config=config)
    assert load_tokenizer(folder).chat([]) == "list"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}file", encoding="utf-8")
    assert load_tokenizer(folder).chat([]) == "<eos>file"


TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_tools_have_the_template_of_that_name(tmp_path):
    """As in transformers: from the settings, or from files, which replace those of the settings."""
    named = {"default": "plain", "tool_use": "{{ tools[0].function.name }}", "rag": "r"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    folder = make_folder(tmp_path / "m", config={"eos_token": "<eos>", "chat_template": listed})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat([]) == tokenizer.chat([], tools=[]) == "plain"
    assert tokenizer.chat([], tools=TOOLS) == "add"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat([], tools=TOOLS) == "file"
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([])
    (folder / "chat_template.jinja").write_text("one", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat([]), tokenizer.chat([], tools=TOOLS)) == ("one", "file")
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert load_tokenizer(folder).chat([], tools=TOOLS) == "one"
    broken = {"eos_token": "<eos>", "chat_template": [{"name": "tool_use", "template": 3}]}
    folder = make_folder(tmp_path / "n", config=broken)
    with pytest.raises(ValueError, match=r"`chat_template` of .*config\.json must be a string"):
        load_tokenizer(folder)


@for_each(
    ("name", "text", "error", "message"),
    [
        ("tokenizer.json", None, FileNotFoundError, r"holds no tokenizer\.json"),
        ("tokenizer.json", "{}", ValueError, r"tokenizer\.json is not a readable tokenizer"),
        ("tokenizer_config.json", "{}", ValueError, "no token that ends"),
        ("tokenizer_config.json", "{", ValueError, r"tokenizer_config\.json is not valid JSON"),
    ],
)
def test_broken_folders(tmp_path, name, text, error, message):
    folder = make_folder(tmp_path / str(len(list(tmp_path.iterdir()))))
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        load_tokenizer(folder)


def with_step(folder, name, step):
    """The folder's tokenizer.json with another step."""
    source = make_folder(folder) / "tokenizer.json"
    settings = json.loads(source.read_text(encoding="utf-8"))
    source.write_text(json.dumps(settings | {name: step}), encoding="utf-8")
    return folder


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": "-"}


@for_each(
    ("name", "step", "told"),
    [
        ("pre_tokenizer", split("(x+)+y"), r"'\(x\+\)\+y' fails on .* that begin with 'x.*limit"),
        ("normalizer", replace(r"(\d+)*b"), "begin with '1"),
        ("normalizer", {"type": "Sequence", "normalizers": [replace("(ab|abab)+c")]}, "with 'ab"),
        ("pre_tokenizer", split("(?:q*q*q*r|.)"), "it takes more than 1 s"),
    ],
)
def test_an_expression_that_backtracks_without_bound_is_refused(
    tmp_path, monkeypatch, name, step, told
):
    monkeypatch.setattr(patterns, "_CPU_SECONDS", 1)
    with pytest.raises(ValueError, match=rf"load_tokenizer: .*tokenizer\.json .*{told}"):
        load_tokenizer(with_step(tmp_path / str(len(list(tmp_path.iterdir()))), name, step))


def test_expressions_of_published_tokenizers_are_not(tmp_path):
    for splitting in SPLITTINGS.values():
        if splitting.pattern:
            folder = with_step(tmp_path / "m", "pre_tokenizer", split(splitting.pattern))
            assert load_tokenizer(folder).vocab_size == 260
