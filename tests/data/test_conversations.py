"""Rows of preferences in conversational form, as TRL's data sets have them."""

import json

import datasets
import pytest
from datasets import Dataset
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, encode_prompts, from_file, from_hub, split_distinct
from jaxrl_llm.data.conversations import plain_row
from jaxrl_llm.data.questions import TextEncoder

TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
]
GOOD, BAD = ([{"role": "assistant", "content": x}] for x in ("6", "7"))


def read(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return from_file(path, needs_answer=False)


@for_each(
    "row",
    [
        {"prompt": TURNS, "chosen": GOOD, "rejected": BAD},
        {"prompt": TURNS, "chosen": TURNS + GOOD, "rejected": TURNS + BAD},
        {"chosen": TURNS + GOOD, "rejected": TURNS + BAD},
    ],
)
def test_the_forms_of_a_conversation_are_one(tmp_path, row):
    (prompt,) = read(tmp_path, row)
    assert (prompt.text, list(prompt.messages)) == ("3+3?", TURNS)
    assert (prompt.metadata["chosen"], prompt.metadata["rejected"]) == ("6", "7")
    tokenizer = jr.testing.ByteTokenizer()
    (question,) = encode_prompts([prompt], tokenizer, room=200)
    text = tokenizer.decode(question.tokens)
    assert text.index("2+2?") < text.index("4") < text.index("3+3?")
    with_system = TextEncoder(tokenizer, 200, system="be brief").conversation(TURNS, "a")
    assert "be brief" in tokenizer.decode(with_system)


def test_one_message_is_a_text(tmp_path):
    prompt = read(tmp_path, {"prompt": TURNS[:1], "completion": GOOD, "label": True})[0]
    assert (prompt.text, prompt.messages, prompt.metadata["completion"]) == ("2+2?", None, "6")


def test_responses_of_a_list_are_texts(tmp_path):
    row = {"prompt": TURNS, "responses": [GOOD, TURNS + BAD], "rewards": [1.0, 0.0]}
    (prompt,) = read(tmp_path, row | {"demonstration": GOOD, "reference": TURNS + GOOD})
    assert prompt.metadata["responses"] == ["6", "7"]
    assert (prompt.metadata["demonstration"], prompt.metadata["reference"]) == ("6", "6")
    (prompt,) = read(tmp_path, {"prompt": TURNS, "demonstration": [GOOD, BAD]})
    assert prompt.metadata["demonstration"] == ["6", "7"]
    with pytest.raises(ValueError, match="line 1 of .*'responses' must be one message"):
        read(tmp_path, row | {"responses": [GOOD, GOOD + BAD]})


@for_each(
    ("row", "message"),
    [
        ({"prompt": TURNS + GOOD, "chosen": GOOD}, "must end with a text message of the user"),
        ({"prompt": TURNS, "chosen": GOOD + BAD}, "line 1 of .*'chosen' must be one message"),
        ({"prompt": TURNS, "chosen": TURNS}, "line 1 of .*'chosen' must be one message"),
        ({"chosen": GOOD}, "line 1 of .*have no common first messages"),
    ],
)
def test_what_is_no_preference_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, row | {"rejected": BAD})


def test_messages_need_the_template(tmp_path):
    prompts = read(tmp_path, {"prompt": TURNS, "chosen": GOOD, "rejected": BAD})
    with pytest.raises(ValueError, match="is a list of messages, which needs the chat template"):
        encode_prompts(prompts, jr.testing.ByteTokenizer(), room=200, chat=False)
    with pytest.raises(ValueError, match="leaves room for 10"):
        encode_prompts(prompts, jr.testing.ByteTokenizer(), room=10)


def test_a_row_without_a_prompt_that_is_no_conversation_is_named(tmp_path):
    row = {"chosen": TURNS + GOOD, "rejected": TURNS + BAD}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in (row, row | {"chosen": []})))
    with pytest.raises(ValueError, match="line 2 of .* its 'chosen' must be a list of messages"):
        from_file(path, needs_answer=False)


def test_conversations_that_end_alike_are_two_prompts():
    first = [{"role": "user", "content": "2+2?"}, GOOD[0]]
    prompts = [
        Prompt("yes", messages=[*x, {"role": "user", "content": "yes"}]) for x in ([], first)
    ]
    train, held_out = split_distinct(prompts, held_out=0.5)
    assert (len(train), len(held_out)) == (1, 1)


def test_contents_may_be_lists_of_texts():
    """As data sets for models of images write all their messages."""
    user = [{"role": "user", "content": [{"type": "text", "text": "2+2", "image": None}] * 2}]
    said = [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    row, messages = plain_row({"prompt": user, "chosen": said, "responses": [said]}, "prompt", "r")
    assert row == {"prompt": "2+22+2", "chosen": "4", "responses": ["4"]} and messages is None
    system = {"role": "system", "content": ["Be ", "brief."]}
    _, messages = plain_row({"prompt": [system, *user]}, "prompt", "r")
    assert messages[0]["content"] == "Be brief."
    for part, kind in (({"type": "image", "image": "x.png"}, "image"), (None, "NoneType")):
        other = [{"role": "user", "content": ["a caption", part]}]
        told = f"row 3: a message has a part of type '{kind}'; only text is read"
        with pytest.raises(ValueError, match=told):
            plain_row({"prompt": other}, "prompt", "row 3")
        # A column that nothing reads as a conversation is as it was.
        assert plain_row({"prompt": "a", "trace": other}, "prompt", "r")[0]["trace"] is other


def test_a_key_that_a_table_adds_is_no_difference(tmp_path):
    """Arrow gives each message of a column the keys of all others, as None."""
    keyed = [{**message, "tool_calls": None} for message in TURNS]
    for prompt, repeated in ((keyed, TURNS), (TURNS, keyed)):
        row = {"prompt": prompt, "chosen": [*repeated, *GOOD], "rejected": BAD}
        row, messages = plain_row(row, "prompt", "row 0")
        assert (row["chosen"], row["rejected"], messages) == ("6", "7", prompt)
    row = {"chosen": keyed + GOOD, "rejected": TURNS + BAD}
    row, messages = plain_row(row, "prompt", "row 0", implicit=True)
    assert (row["prompt"], len(messages), row["rejected"]) == ("3+3?", 3, "7")
    # A value is a difference.
    named = [{**TURNS[0], "name": "a"}, *TURNS[1:]]
    with pytest.raises(ValueError, match="row 0: 'chosen' must be one message"):
        plain_row({"prompt": TURNS, "chosen": named + GOOD, "rejected": BAD}, "prompt", "row 0")
    path = tmp_path / "rows.parquet"
    rows = [
        {"prompt": named, "chosen": GOOD, "rejected": BAD},
        {"prompt": TURNS, "chosen": TURNS + GOOD, "rejected": TURNS + BAD},
    ]
    Dataset.from_list(rows).to_parquet(path)
    prompts = from_file(path, needs_answer=False)
    assert [x.metadata["chosen"] for x in prompts] == ["6", "6"]


def calling(name, **arguments):
    call = {"function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "It is there."},
        {"role": "user", "content": "So?"},
    ]


@for_each("kind", ["parquet", "hub", "lines"])
def test_calls_have_the_arguments_that_were_written(tmp_path, kind, monkeypatch):
    """Arrow has one type for the arguments of all calls of a column."""
    first, second = calling("weather", city="Rome"), calling("sum", x=1, y={"z": [2]})
    rows = [
        {"prompt": first, "completion": first + GOOD, "responses": [GOOD], "more": {"a": 1}},
        {"prompt": second, "completion": GOOD, "responses": [second + GOOD], "more": {"b": None}},
    ]
    if kind == "lines":  # objects that go on over several lines, which are read as written
        path = tmp_path / "rows.json"
        path.write_text("\n".join(json.dumps(row, indent=1) for row in rows))
        prompts = from_file(path, needs_answer=False)
    elif kind == "hub":
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "repo").mkdir()
        Dataset.from_list(rows).to_parquet(tmp_path / "repo" / "train.parquet")
        prompts = from_hub(str(tmp_path / "repo"), split="train", needs_answer=False)
    else:
        Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        prompts = from_file(tmp_path / "rows.parquet", needs_answer=False)
    assert [list(prompt.messages) for prompt in prompts] == [first, second]
    assert [x.metadata["completion"] for x in prompts] == ["6", "6"]
    assert [x.metadata["responses"] for x in prompts] == [["6"], ["6"]]
    more = {"a": 1} if kind == "lines" else {"a": 1, "b": None}  # no messages
    assert prompts[0].metadata["more"] == more


def test_an_argument_that_is_null_in_a_file_of_lines_is_one(tmp_path):
    turns = calling("weather", city=None)
    (prompt,) = read(tmp_path, {"prompt": turns, "completion": turns + GOOD})
    assert list(prompt.messages) == turns
