"""A tokenizer written as files and read back: the same ids, texts and conversations."""

import json

import pytest
from rows import for_each
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_llm.data import load_tokenizer, save_tokenizer
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.testing import ByteTokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
SPECIAL = ("<s>", "</s>", "<turn>", "<pad>")


def tokenizer(**options):
    """A byte-level vocabulary without merges, and four special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    ids = {name: backend.token_to_id(name) for name in SPECIAL}
    given = {"eos_ids": [ids["</s>"], ids["<turn>"]], "pad_id": ids["<pad>"]}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    given |= {"template": TEMPLATE, "special_tokens": names}
    return PretrainedTokenizer(backend, **given | options), ids


@for_each("bos", [True, False])
def test_what_is_written_is_read_back(tmp_path, bos):
    _, ids = tokenizer()
    ours, _ = tokenizer(prefix_ids=[ids["<s>"]] if bos else [])
    save_tokenizer(ours, tmp_path)
    again = load_tokenizer(tmp_path)
    for name in ("eos_ids", "pad_id", "vocab_size", "prefix_ids", "template", "special_tokens"):
        assert getattr(again, name) == getattr(ours, name), name
    talk = [{"role": "user", "content": "Größe 3 </s>"}]
    assert again.chat(talk) == ours.chat(talk)
    for text in ("", "Größe 3", "a</s>b", "<s>a"):
        assert again.encode(text) == ours.encode(text)
        assert again.encode(text, allow_special=False) == ours.encode(text, allow_special=False)
        assert again.decode(again.encode(text)) == ours.decode(ours.encode(text))
    assert ours.encode("a")[0] == (ids["<s>"] if bos else ours.encode("<s>a")[1])


def test_a_second_round_changes_nothing(tmp_path):
    _, ids = tokenizer()
    save_tokenizer(tokenizer(prefix_ids=[ids["<s>"]])[0], tmp_path / "a")
    save_tokenizer(load_tokenizer(tmp_path / "a"), tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_text() == (tmp_path / "b" / file.name).read_text(), file.name


def test_the_template_of_tools_is_written_as_transformers_writes_it(tmp_path):
    ours, _ = tokenizer(tool_template="{{ tools[0].name }}")
    save_tokenizer(ours, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {x["name"]: x["template"] for x in settings["chat_template"]}
    assert named == {"default": TEMPLATE, "tool_use": "{{ tools[0].name }}"}
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE
    file = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    assert file.read_text() == "{{ tools[0].name }}"
    for _ in range(2):  # from the files, then from the settings alone, as old versions write them
        again = load_tokenizer(tmp_path)
        assert again.chat([], tools=[{"name": "add"}]) == "add"
        assert again.template == TEMPLATE
        file.unlink(missing_ok=True)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    save_tokenizer(ours, tmp_path)
    save_tokenizer(tokenizer()[0], tmp_path)  # over one that had such a template
    assert load_tokenizer(tmp_path).tool_template is None


def test_one_end_is_a_number_and_a_model_without_names_gets_one(tmp_path):
    _, ids = tokenizer()
    ours, _ = tokenizer(eos_ids=[ids["<turn>"]], pad_id=None, special_tokens={}, template=None)
    save_tokenizer(ours, tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": ids["<turn>"], "pad_token_id": ids["<turn>"]}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<turn>"
    again = load_tokenizer(tmp_path)
    assert again.eos_ids == (ids["<turn>"],) and again.template is None


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    with pytest.raises(TypeError, match="must come from load_tokenizer; got a ByteTokenizer"):
        save_tokenizer(ByteTokenizer(), tmp_path / "new")
    assert not (tmp_path / "new").exists()
