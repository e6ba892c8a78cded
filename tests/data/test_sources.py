import json
import os

import datasets
import pytest

from jaxrl_llm.data import from_file, from_hub

ROWS = [
    {"prompt": "1 + 1 =", "answer": 2, "level": {"terms": 2}},
    {"prompt": "6 - 9 =", "answer": -3, "level": {"terms": 2}},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["jsonl", "json", "parquet"])
def file(request, tmp_path):
    path = tmp_path / f"sums.{request.param}"
    if request.param == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif request.param == "json":
        path.write_text(json.dumps(ROWS))
    else:
        write(path, ROWS)
    return path


def test_each_kind_of_file(file, capfd):
    prompts = from_file(file)
    assert prompts.texts == ("1 + 1 =", "6 - 9 =")
    assert [prompt.answer for prompt in prompts] == ["2", "-3"]
    assert prompts[1].id == f"{file.name}:1"
    assert prompts[1].metadata == {"level": {"terms": 2}, "answer": "-3", "id": prompts[1].id}
    assert str(file) in prompts.source
    assert os.listdir(file.parent) == [file.name]
    assert capfd.readouterr().err == ""


def test_other_fields_and_own_ids(tmp_path):
    path = write(tmp_path / "f.jsonl", [{"question": "why?", "solution": "so", "id": 7}])
    (prompt,) = from_file(str(path), prompt_field="question", answer_field="solution")
    assert (prompt.text, prompt.answer, prompt.id) == ("why?", "so", "7")


def test_a_file_without_answers(tmp_path):
    (prompt,) = from_file(write(tmp_path / "f.jsonl", [{"prompt": "why?"}]), answer_field=None)
    assert prompt.answer is None and prompt.metadata["answer"] is None


def test_a_changed_file_is_read_anew(tmp_path):
    path = write(tmp_path / "f.jsonl", ROWS)
    assert len(from_file(path)) == 2
    write(path, ROWS[:1])
    assert len(from_file(path)) == 1


def test_answers_that_are_lists_become_text(tmp_path):
    path = write(tmp_path / "f.jsonl", [{"prompt": "which?", "answer": [1, 2]}])
    assert from_file(path)[0].answer == "[1, 2]"


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*gone.jsonl"):
        from_file(tmp_path / "gone.jsonl")
    with pytest.raises(FileNotFoundError):
        from_file(tmp_path)


def test_another_kind_of_file(tmp_path):
    (tmp_path / "sums.csv").write_text("prompt,answer\n1,2\n")
    with pytest.raises(ValueError, match="sums.csv' must end in one of .json, .jsonl, .parquet"):
        from_file(tmp_path / "sums.csv")


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file(tmp_path, text):
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(ValueError, match="f.jsonl is empty, there is no prompt in it"):
        from_file(tmp_path / "f.jsonl")


def test_an_empty_parquet_file(tmp_path):
    table = datasets.Dataset.from_dict({"prompt": [], "answer": []})
    table.to_parquet(tmp_path / "f.parquet")
    with pytest.raises(ValueError, match="f.parquet is empty, there is no prompt in it"):
        from_file(tmp_path / "f.parquet")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "b", "answ', "line 2 is not JSON"),
        (b"[1, 2]", "line 2 is not a JSON object"),
        (b'{"prompt": "\xff", "answer": "1"}', "line 2 is not UTF-8"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, told):
    (tmp_path / "f.jsonl").write_bytes(b'{"prompt": "a", "answer": "1"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"f.jsonl' cannot be read as json: {told}") as caught:
        from_file(tmp_path / "f.jsonl")
    assert "\n" not in str(caught.value)


def nested(depth, text="deep"):
    """A row of this many levels, with brackets in a string that are none."""
    lists = "[" * (depth - 1) + json.dumps(text) + "]" * (depth - 1)
    return '{"prompt": "a", "answer": "1", "more": ' + lists + "}\n"


@pytest.mark.parametrize("depth", [64, 5_000, 100_000])
@pytest.mark.parametrize(("name", "where"), [("f.jsonl", "line 2 of "), ("f.json", "")])
def test_a_row_that_is_nested_too_deeply_is_named(tmp_path, name, where, depth):
    (tmp_path / name).write_text((nested(2) if where else "") + nested(depth))
    with pytest.raises(ValueError, match=f"from_file: {where}'.*{name}' is nested more than 63 "):
        from_file(tmp_path / name)


def test_a_row_may_be_nested_and_its_texts_may_hold_brackets(tmp_path):
    text = "[{" * 40 + '\\" [[[[' + "\\"
    (tmp_path / "f.jsonl").write_text(nested(63, text))
    value = from_file(tmp_path / "f.jsonl")[0].metadata["more"]
    while isinstance(value, list):
        (value,) = value
    assert value == text


def test_a_malformed_parquet_file(tmp_path):
    (tmp_path / "f.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="f.parquet' cannot be read as parquet"):
        from_file(tmp_path / "f.parquet")


@pytest.mark.parametrize("missing", ["prompt", "answer"])
def test_a_missing_field_is_named(tmp_path, missing):
    rows = [{k: v for k, v in row.items() if k != missing} for row in ROWS]
    with pytest.raises(ValueError, match=f"has no field '{missing}'; its fields are .*level"):
        from_file(write(tmp_path / "f.jsonl", rows))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": None, "answer": "1"}, "'prompt' of row 1 .* got None"),
        ({"prompt": "  ", "answer": "1"}, "'prompt' of row 1 .* not empty"),
        ({"prompt": "b"}, "'answer' of row 1 .* is missing"),
    ],
)
def test_a_missing_entry_is_named(tmp_path, row, told):
    with pytest.raises(ValueError, match=f"from_file: the field {told}"):
        from_file(write(tmp_path / "f.jsonl", [{"prompt": "a", "answer": "1"}, row]))


def test_a_prompt_that_is_no_text(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}]
    with pytest.raises(ValueError, match="row 0 .* must be a text"):
        from_file(write(tmp_path / "f.jsonl", rows))


def test_datasets_settings_are_left_as_they_were(tmp_path):
    level = datasets.logging.get_verbosity()
    from_file(write(tmp_path / "f.jsonl", ROWS))
    assert not datasets.utils.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == level


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder laid out as a dataset repository; datasets treats both alike."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repo").mkdir()
    write(tmp_path / "repo" / "train.jsonl", ROWS)
    return str(tmp_path / "repo")


def test_hub(hub):
    prompts = from_hub(hub, split="train")
    assert prompts.texts == ("1 + 1 =", "6 - 9 =") and prompts[0].answer == "2"
    assert prompts[1].id == f"{hub}/train:1"
    assert from_hub(hub, split="train[1:]").texts == ("6 - 9 =",)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"split": "tset"}, "split 'tset' of the dataset .* cannot be loaded"),
        ({"split": "train", "config": "none"}, "cannot be loaded"),
        ({"split": "train", "prompt_field": "question"}, "has no field 'question'"),
        ({"split": "train[2:]"}, "is empty"),
    ],
)
def test_hub_bad_input(hub, options, told):
    with pytest.raises(ValueError, match=f"from_hub: .*{told}"):
        from_hub(hub, **options)


def test_hub_out_of_reach():
    with pytest.raises(ValueError, match="from_hub: .*'nobody/nothing' cannot be loaded") as caught:
        from_hub("nobody/nothing", split="train")
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None


def test_datasets_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the package datasets.*jaxrl_llm\[train\]"):
        from_file(write(tmp_path / "f.jsonl", ROWS))
