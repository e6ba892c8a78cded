"""The byte tokenizer: everything round-trips, special tokens only where they are allowed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_round_trips(text):
    ids = TOKENIZER.encode(text, allow_special=False)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_one_id_each():
    ids = TOKENIZER.encode("<bos>a<pad><eos>")
    assert ids == [TOKENIZER.bos_id, 97, TOKENIZER.pad_id, *TOKENIZER.eos_ids]
    assert TOKENIZER.decode(ids) == "a"
    assert TOKENIZER.decode(ids, skip_special=False) == "<bos>a<pad><eos>"
    assert max(ids) < TOKENIZER.vocab_size


def test_text_from_outside_cannot_end_a_message():
    ids = TOKENIZER.encode("<eos>", allow_special=False)
    assert ids == list(b"<eos>")
    assert TOKENIZER.decode(ids) == "<eos>"


def test_half_a_character_is_replaced():
    assert TOKENIZER.decode("é".encode()[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_chat():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = TOKENIZER.chat(messages, add_generation_prompt=False)
    assert text == "<bos>user\na<eos><bos>assistant\nb<eos>"
    assert TOKENIZER.chat(messages) == text + "<bos>assistant\n"
    assert TOKENIZER.encode(text).count(TOKENIZER.eos_ids[0]) == 2


@for_each("bad", [-1, 259])
def test_an_id_outside_the_vocabulary(bad):
    with pytest.raises(ValueError, match=f"id {bad} is outside the vocabulary of 259"):
        TOKENIZER.decode([97, bad])


def test_it_is_a_tokenizer_of_the_data_layer():
    from jaxrl_llm.data import Tokenizer

    members = [name for name in vars(Tokenizer) if not name.startswith("_")]
    members += list(getattr(Tokenizer, "__annotations__", {}))
    assert {"encode", "decode"} <= set(members)
    for name in members:
        assert hasattr(TOKENIZER, name), name
