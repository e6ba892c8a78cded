"""Rows of files and of the Hub: values as they are written, whatever their types and places.

What is wrong with a file is told in one line, with the line where it is.
"""

import dataclasses
import gzip
import io
import json
import lzma
import os
import pathlib
import warnings
import zipfile

import datasets
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
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


@for_each("kind", ["jsonl", "json"])
def test_values_are_those_of_the_file(tmp_path, kind):
    answers = ["2024-01-15", 1, 2.5, ["Eiffel Tower", "La Tour Eiffel"]]
    answers = [12345678901234567890123, *answers] if kind == "jsonl" else answers
    for answer in answers:
        rows = [{"prompt": "a", "answer": answer, "more": {"day": "2024-01-15"}}]
        rows += [{"prompt": "b", "answer": 2.5 if answer == 1 else answer}]
        if kind == "json":
            (tmp_path / "f.json").write_text(json.dumps(rows))
        first, second = from_file(
            write(tmp_path / "f.jsonl", rows) if kind == "jsonl" else tmp_path / "f.json"
        )
        want = tuple(answer) if isinstance(answer, list) else str(answer)
        assert first.answer == first.metadata["answer"] == want
        assert first.metadata["more"] == {"day": "2024-01-15"} and second.metadata["more"] is None
        assert hash(first) != hash(second)
    assert jr.rewards.exact_match("", "la tour eiffel", first.metadata) == 1.0


@for_each(
    "value, text",
    [
        (0.00001, "0.00001"),
        (-1.5e-07, "-0.00000015"),
        (1e16, "10000000000000000"),
        (1.25e17, "125000000000000000"),
        (18.0, "18.0"),
        (0.1, "0.1"),
        (-0.0, "-0.0"),
    ],
)
def test_an_answer_that_is_a_float_is_written_in_decimals(tmp_path, value, text):
    (row,) = from_file(write(tmp_path / "f.jsonl", [{"prompt": "a", "answer": value}]))
    path = tmp_path / "f.parquet"
    datasets.Dataset.from_list([{"prompt": "a", "answer": value}]).to_parquet(path)
    assert row.answer == from_file(path)[0].answer == text
    for metadata in (row.metadata, {"answer": value}, {"answer": np.float64(value)}):
        assert jr.rewards.dapo_math("", f"Answer: {text}", metadata) == 1.0
        assert jr.rewards.exact_match("", text, metadata) == 1.0
        if value >= 1:
            assert jr.rewards.last_integer("", f"It is {text}.", metadata) == 1.0


def test_rows_may_lack_an_answer_where_none_is_needed(tmp_path):
    path = write(tmp_path / "f.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b"}])
    assert [x.answer for x in from_file(path, needs_answer=False)] == ["1", None]


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


def test_answers_that_are_lists_become_text(tmp_path):
    path = write(tmp_path / "f.jsonl", [{"prompt": "which?", "answer": [1, 2]}])
    assert from_file(path)[0].answer == "[1, 2]"
    # Beside lists of numbers an empty list is one, beside lists of texts it has no right one.
    rows = [{"prompt": "which?", "answer": x} for x in ([], [1, 2])]
    assert [x.answer for x in from_file(write(path, rows))] == ["[]", "[1, 2]"]
    rows = [{"prompt": "which?", "answer": x} for x in ([], ["a", "b"])]
    answers = [x.answer for x in from_file(write(path, rows), needs_answer=False)]
    assert answers == [None, ("a", "b")]


def test_a_missing_file(tmp_path):
    for path, told in [(tmp_path / "gone.jsonl", "gone.jsonl"), (tmp_path, tmp_path.name)]:
        with pytest.raises(FileNotFoundError, match=f"no file .*{told}"):
            from_file(path)


FIRST = b'{"prompt": "a", "answer": "1"}\n'
UNREADABLE = "f.jsonl' cannot be read as json: "


@for_each(
    ("name", "content", "told"),
    [
        ("sums.csv", b"prompt,answer", "sums.csv' must end in one of .json, .jsonl, .parquet"),
        ("f.jsonl", b"", "f.jsonl is empty; it has no prompts"),
        ("f.jsonl", b"\n\n", "f.jsonl is empty; it has no prompts"),
        ("f.parquet", None, "f.parquet is empty; it has no prompts"),
        ("f.parquet", b"PAR1 not really", "f.parquet' cannot be read as parquet"),
        ("f.jsonl", FIRST + b'{"prompt": "b", "answ\n', UNREADABLE + "line 2 is not JSON"),
        ("f.jsonl", FIRST + b"[1, 2]\n", UNREADABLE + "line 2 is not a JSON object"),
        ("f.jsonl", FIRST + b'{"prompt": "\xff"}\n', UNREADABLE + "line 2 is not UTF-8"),
        ("f.jsonl", FIRST + b'{"prompt": null}\n', "the field 'prompt' of line 2 .* got None"),
        ("f.jsonl", FIRST + b'{"prompt": "  "}\n', "'prompt' of line 2 .* non-empty string"),
        ("f.jsonl", FIRST + b'{"prompt": "b"}\n', "the field 'answer' of line 2 .* is missing"),
        ("f.jsonl", b'{"prompt": [{"role": "a"}], "answer": "1"}', "1 .* be a non-empty string"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_one_line(tmp_path, name, content, told):
    if content is None:
        datasets.Dataset.from_dict({"prompt": [], "answer": []}).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"from_file: .*{told}") as caught:
        from_file(tmp_path / name)
    assert "\n" not in str(caught.value)


EARLY = {"answer": 1, "note": None}
LATE = {  # values that differ in type from those of the first 12 MB
    "text after null": {"note": "a"},
    "object after null": {"note": {"a": [1, None]}},
    "text after integers": {"answer": "two"},
    "fraction after integers": {"answer": 0.5},
    "list after integers": {"answer": ["1", "2"]},
    "boolean after integers": {"answer": True},
    "new column": {"extra": "2024-01-15"},
    "integer beyond 64 bits": {"answer": 2**70},
}


@pytest.fixture(scope="module")
def early_rows():
    text = "x" * 430
    rows = [{"prompt": f"{i} {text}", **EARLY} for i in range(26_000)]
    return rows, "\n".join(map(json.dumps, rows))


@pytest.mark.of_many
@pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.jsonl.gz", "repo"])
def test_late_rows_may_have_values_of_other_types(tmp_path, hub, early_rows, name):
    early, lines = early_rows
    late = [{"prompt": kind, **EARLY, **values} for kind, values in LATE.items()]
    text = lines + "\n" + "\n".join(map(json.dumps, late))
    path = (
        pathlib.Path(hub, "train.jsonl") if name == "repo" else tmp_path / name.removesuffix(".gz")
    )
    if name == "f.json":
        text = f"[{text.replace(chr(10), ',' + chr(10))}]"
    path.write_bytes(gzip.compress(text.encode(), 1) if name.endswith("gz") else text.encode())
    assert path.stat().st_size > 12e6 or name.endswith("gz")
    prompts = from_hub(hub, split="train") if name == "repo" else from_file(path)
    assert len(prompts) == len(early) + len(late)
    assert prompts[0].metadata == {**EARLY, "answer": "1", "extra": None, "id": prompts[0].id}
    for prompt, values in zip(prompts[len(early) :], LATE.values(), strict=True):
        want = {**EARLY, "extra": None, **values}
        answer = want.pop("answer")
        text = "true" if answer is True else str(answer)
        assert prompt.answer == (tuple(answer) if isinstance(answer, list) else text)
        assert {key: prompt.metadata[key] for key in want} == want


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_types_of_a_table_on_the_hub_are_those_of_all_its_rows(hub, kind):
    repo = pathlib.Path(hub)
    (repo / "train.jsonl").unlink()
    if kind == "csv":  # of which datasets reads 10,000 rows at a time
        rows = [f"{i} + 0 =,{i},{i}" for i in range(12_000)]
        text = "\n".join(["prompt,answer,level", *rows, "a,two,", "b,3,0.5"])
        (repo / "train.csv").write_text(text)
    else:  # with types of its own in each file
        for i, (answer, level) in enumerate([("1", None), ("two", 0.5)]):
            row = {"prompt": "a", "answer": answer, "level": level}
            datasets.Dataset.from_list([row]).to_parquet(repo / f"train-{i}.parquet")
    prompts = from_hub(hub, split="train")
    assert [x.answer for x in prompts][-2:] == (["two", "3"] if kind == "csv" else ["1", "two"])
    assert [x.metadata["level"] for x in prompts][-2:] == [None, 0.5]
    assert prompts[0].answer == ("0" if kind == "csv" else "1")


def test_types_that_a_repository_states_hold(hub):
    """A column of the README is cast to the type that it states."""
    features = "  - name: prompt\n    dtype: string\n  - name: answer\n    dtype: float64\n"
    features += "  - name: level\n    struct:\n    - name: terms\n      dtype: string\n"
    pathlib.Path(hub, "README.md").write_text(f"---\ndataset_info:\n  features:\n{features}---\n")
    (first, _) = from_hub(hub, split="train")
    assert first.answer == "2.0" and first.metadata["level"] == {"terms": "2"}


@for_each(
    ("split", "texts"),
    [("all", "abc"), ("test+train[1:]", "cb"), ("train[:50%]", "a"), ("train[-1:]", "b")],
)
def test_parts_of_splits_of_a_repository(hub, split, texts):
    write(pathlib.Path(hub, "train.jsonl"), [{"prompt": "a", "x": 1}, {"prompt": "b"}])
    write(pathlib.Path(hub, "test.jsonl"), [{"prompt": "c"}])
    assert "".join(from_hub(hub, split=split, answer_field=None).texts) == texts


@for_each(
    ("content", "told"),
    [
        ('[\n{"prompt": "a"},\n{"prompt": "b" "c": 1}\n]', "line 3 is not JSON .* column 16"),
        ('[{"prompt": "a"},\n 3]', "item 2 of the list is not a JSON object"),
        ('{"prompt": "a"}\n{"prompt": "b", "c":\n' + '{"prompt": "d"}\n' * 2, "line 2 is not JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"\n' + '{"prompt": "d"}\n' * 2, "line 2 is not JSON"),
        ('{"prompt": "a",\n"b": 1}\n{"prompt": "c",\n"d": x}', "line 4 is not JSON"),
        ('{"prompt": "a"} {"prompt": "b"} 3', "line 1 is not a JSON object"),
        ('{"prompt": "a",\n"b":\n"\xff"}', "line 3 is not UTF-8"),
        ('{"prompt": "a"}\n{"c": ' + "9" * 5000 + "}", "line 2 is not JSON .*digits"),
    ],
)
def test_the_line_of_a_fault_is_that_of_the_file(tmp_path, content, told):
    (tmp_path / "f.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"f.json' cannot be read as json: {told}"):
        from_file(tmp_path / "f.json", answer_field=None)


@for_each(
    ("row", "line"),
    [
        (r'{"prompt": "b\ud800"}', 2),
        (r'{"prompt": "b\uDfff c"}', 2),
        (r'{"prompt": "b", "answer": {"\uD83D": 1}}', 2),
        (r'{"prompt": "b", "answer": ["\ude00\ud83d"]}', 2),
        (r'{"prompt": "b", "answer": "\\\ud83d\u0020"}', 2),
        ('{"prompt": "b",\n"answer": "\\udbff"}', 3),
        (r'{"prompt": "b"} {"prompt": "\ud83d\\ude00"}', 2),
    ],
)
@for_each("form", ["lines", "list"])
def test_half_a_character_is_named_with_its_line(tmp_path, row, line, form):
    text = '{"prompt": "a"}\n' + row
    if form == "list":
        text = "[" + text.replace("}\n{", "},\n{").replace("} {", "}, {") + "]"
    (tmp_path / "f.json").write_text(text)
    told = rf"f.json' cannot be read as json: line {line} has half a character, \\u[dD][89a-fA-F]"
    with pytest.raises(ValueError, match=told):
        from_file(tmp_path / "f.json", answer_field=None)


def test_whole_characters_and_escaped_backslashes_are_read(tmp_path):
    texts = ["\U0001f600", "\\ud83d", "\ud7ff\ue000", "\\\U0001f600\\\\udfff", '"\\']
    for text in texts:
        path = write(tmp_path / "f.jsonl", [{"prompt": "a", "answer": text}] * 2)
        assert [x.answer for x in from_file(path)] == [text] * 2
    path.write_text(r'{"prompt": "\uD83D\ude00 \\uD83D"}')
    assert from_file(path, answer_field=None)[0].text == "\U0001f600 \\uD83D"


def test_objects_may_share_a_line_and_go_on_over_lines(tmp_path):
    text = '\ufeff{"prompt": "a",\r\n "b": [\n1]}\r\n\n{"prompt": "c"}{"prompt": "d"}'
    (tmp_path / "f.json").write_text(text)
    rows = from_file(tmp_path / "f.json", answer_field=None)
    assert [(row.text, row.metadata["b"]) for row in rows] == [("a", [1]), ("c", None), ("d", None)]


@for_each(
    ("text", "places"),
    [
        ('\n{"prompt": "a"}\r\n \n\n{"prompt": "b"}', ["line 2", "line 5"]),
        ('{"prompt":\n"a"}\n{"prompt": "b"} {\n"prompt": "c"\n}{"prompt": "d"}', [1, 3, 3, 5]),
        ('{"prompt": "a",\n"b": {}} \n{"prompt": "b"}', [1, 3]),
        ('{"prompt": "a",\n"b": [\n\n]} {"prompt": "b"}', [1, 4]),
        ('[\n{"prompt": "a"},\n{"prompt": "b"}]', ["item 1 of the list", "item 2 of the list"]),
        ('["a", "b"]', ["item 1 of the list", "item 2 of the list"]),
    ],
)
def test_a_prompt_has_the_place_where_its_row_begins(tmp_path, text, places):
    path, field = tmp_path / "f.json", "text" if text.startswith('["') else "prompt"
    path.write_bytes(text.encode())
    prompts = from_file(path, prompt_field=field, answer_field=None)
    places = [f"line {each}" if isinstance(each, int) else each for each in places]
    assert [prompt.place for prompt in prompts] == [f"{each} of {path}" for each in places]
    assert [prompt.id for prompt in prompts] == [f"f.json:{n}" for n in range(len(places))]
    assert prompts[1].where == f"'f.json:1' ({places[1]} of {path})"


def test_places_of_tables_and_of_several_files(tmp_path, hub):
    path = tmp_path / "f.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert from_file(path)[1].place == f"row 1 of {path}"
    assert from_file(path)[1] == dataclasses.replace(from_file(path)[1], place="")
    assert from_file(path)[1:][0].place == f"row 1 of {path}"
    repo = pathlib.Path(hub)
    for name, rows in (("train-0.jsonl", ROWS), ("train-1.jsonl", ROWS * 2)):
        write(repo / name, rows)
    (repo / "train.jsonl").unlink()
    ids = {prompt.id: prompt.place for prompt in from_hub(hub, split="train")}
    files = ["train-0.jsonl"] * 2 + ["train-1.jsonl"] * 4
    lines = [1, 2, 1, 2, 3, 4]
    assert list(ids) == [f"{hub}/train:{n}" for n in range(6)]
    want = [f"line {line} of {repo / file}" for line, file in zip(lines, files, strict=True)]
    assert list(ids.values()) == want
    part = from_hub(hub, split="train[5:]+train[:1]")
    assert [prompt.place for prompt in part] == [want[5], want[0]]
    for file in repo.glob("*.jsonl"):
        file.unlink()
    (repo / "train.csv").write_text("prompt,answer\na,1\nb,\n")
    with pytest.raises(ValueError, match=r"'answer' of row 1 of .*repo \(train\) is missing"):
        from_hub(hub, split="train")


def test_columns_of_lists_and_numbers_are_metadata(tmp_path):
    columns = {"hints": ["a", "b"], "paraphrases": ["p", "q"], "difficulty": 0.25, "prior": 1}
    lines = [{"prompt": "x", "answer": "1", **columns}, {"prompt": "y", "answer": "2"}]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = from_file(tmp_path / "f.jsonl")
    assert {name: first.metadata[name] for name in columns} == columns
    # A row without a column has None there, which whoever reads it refuses by the row's name.
    assert {name: second.metadata[name] for name in columns} == dict.fromkeys(columns)
    data = [{**prompt.metadata, "text": prompt.text} for prompt in (first, second)]
    with pytest.raises(ValueError, match="prompt 'f.jsonl:1' has None in its column 'paraphrases'"):
        jr.curation.paraphrased().check_data(data)


def nested(depth, text="deep"):
    """A row of this many levels, with brackets in a string that are none."""
    lists = "[" * (depth - 1) + json.dumps(text) + "]" * (depth - 1)
    return '{"prompt": "a", "answer": "1", "more": ' + lists + "}\n"


def zipped(rows):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("part/train.jsonl", rows)
    return file.getvalue()


HEAD = '{"prompt": "a", "answer": "1", "more": \n'
OVER_LINES = nested(2) + HEAD + "[\n" * 5_000 + "]\n" * 5_000 + "}\n"


@for_each(
    ("name", "pack", "text", "told"),
    [
        ("f.jsonl", bytes, nested(2) + nested(64), r"line 2 of '.*f\.jsonl'"),
        ("f.jsonl", bytes, nested(2) + nested(100_000), r"line 2 of '.*f\.jsonl'"),
        ("f.json", bytes, nested(64), r"line 1 of '.*f\.json'"),
        ("f.json", bytes, nested(100_000), r"line 1 of '.*f\.json'"),
        # The parser reads on where a value is not complete at the end of its line.
        ("f.jsonl", bytes, OVER_LINES, "line 65 of"),
        ("f.jsonl", gzip.compress, nested(2) + nested(64), r"line 2 of '.*f\.jsonl'"),
    ],
)
def test_a_row_that_is_nested_too_deeply_is_named(tmp_path, name, pack, text, told):
    (tmp_path / name).write_bytes(pack(text.encode()))
    since = ".* since line 2" if told.startswith("line 65") else ""
    with pytest.raises(ValueError, match=f"from_file: {told}.* is nested more than 63 {since}"):
        from_file(tmp_path / name)


@for_each(
    ("name", "pack", "told"),
    [
        ("train.jsonl.gz", gzip.compress, ""),
        ("train.jsonl.xz", lzma.compress, ""),
        ("train.jsonl", gzip.compress, ""),
        ("train{}.ndjson", bytes, ""),
        ("train.zip", zipped, "::part/train.jsonl"),
    ],
)
def test_what_datasets_unpacks_is_checked_as_it_reads_it(hub, name, pack, told):
    file = pathlib.Path(hub, name)
    for other in pathlib.Path(hub).iterdir():
        other.unlink()
    file.write_bytes(pack((nested(2) + nested(64)).encode()))
    with pytest.raises(ValueError, match=r"from_hub: line 2 of '.*' is nested more than") as caught:
        from_hub(hub, split="train")
    assert f"{name}{told}' is nested" in str(caught.value)
    file.write_bytes(pack((nested(2) + nested(63)).encode()))
    assert len(from_hub(hub, split="train")) == 2


def test_a_row_may_be_nested_and_its_texts_may_hold_brackets(tmp_path):
    text = "[{" * 40 + '\\" [[[[' + "\\"
    (tmp_path / "f.jsonl").write_text(nested(63, text))
    value = from_file(tmp_path / "f.jsonl")[0].metadata["more"]
    while isinstance(value, list):
        (value,) = value
    assert value == text


@for_each("missing", ["prompt", "answer"])
def test_a_missing_field_is_named(tmp_path, missing):
    rows = [{k: v for k, v in row.items() if k != missing} for row in ROWS]
    with pytest.raises(ValueError, match=f"has no field '{missing}'; its fields are .*level"):
        from_file(write(tmp_path / "f.jsonl", rows))


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


@for_each(
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


@for_each(
    ("answers", "letters"),
    [
        ([(2, "123"), (1, "12")], "CB"),  # as a text, 2 would be the choice "2"
        ([(2, "123"), (1, "12"), (3, "123")], None),  # one is no position: they are values
        ([(1, "1234"), (2, "1234"), (3, "1234")], "BCD"),
        # A row whose answer is none of its choices can only be read as a position.
        ([(1, "1234"), (2, "1234"), (0, "1234")], "BCA"),
        ([("1", "1234"), ("2", "1234")], None),
    ],
)
def test_the_position_of_a_choice_becomes_its_letter(tmp_path, answers, letters):
    rows = [{"prompt": "a", "answer": x, "choices": list(choices)} for x, choices in answers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [x.answer for x in from_file(write(tmp_path / "rows.jsonl", rows))]
    assert found == (list(letters) if letters else [str(x) for x, _ in answers])
    told = ["every answer of" in str(x.message) for x in caught if x.category is UserWarning]
    assert told == [True] * (letters in ("CB", "BCD"))


@for_each("kind", ["jsonl", "parquet"])
def test_answers_and_choices_as_the_hub_has_them(tmp_path, kind):
    def read(row, **options):
        path = tmp_path / f"rows.{kind}"
        if kind == "parquet":
            datasets.Dataset.from_list([row]).to_parquet(path)
        else:
            write(path, [row])
        return from_file(path, prompt_field="question", **options)[0]

    squad = {"question": "a", "answers": {"text": ["Paris", "in Paris"], "answer_start": [1, 2]}}
    prompt = read(squad, answer_field="answers")
    assert prompt.answer == ("Paris", "in Paris")
    assert jr.rewards.f1("", "Paris", prompt.metadata) == 1.0
    assert jr.rewards.exact_match("", "In Paris.", prompt.metadata) == 1.0
    # Questions of SQuAD 2 without an answer have no right text.
    first = "line 1" if kind == "jsonl" else "row 0"
    for none in ({"text": [], "answer_start": []}, []):
        row = {"question": "a", "answers": none}
        with pytest.raises(ValueError, match=f"the field 'answers' of {first} of .* is missing"):
            read(row, answer_field="answers")
        assert read(row, answer_field="answers", needs_answer=False).answer is None
    for labels in ("ABCD", "1234"):
        choices = {"text": list("wxyz"), "label": list(labels)}
        arc = {"question": "b", "choices": choices, "answerKey": labels[2]}
        prompt = read(arc, answer_field="answerKey")
        assert jr.rewards.multiple_choice("", "Answer: C", prompt.metadata) == 1.0
    # Other mappings are JSON.
    other = read({"question": "c", "answer": {"text": "d"}})
    assert other.answer == '{"text": "d"}'


def test_a_changed_file_is_read_anew(tmp_path):
    path = write(tmp_path / "f.jsonl", ROWS)
    assert len(from_file(path)) == 2
    write(path, ROWS[:1])
    assert len(from_file(path)) == 1


def test_datasets_settings_are_left_as_they_were(tmp_path):
    level = datasets.logging.get_verbosity()
    from_file(write(tmp_path / "f.jsonl", ROWS))
    assert not datasets.utils.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == level
