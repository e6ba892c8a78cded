"""The record of a folder: sizes, checksums, notes."""

import json

import pytest

from jaxrl_llm.train.files import check_record, read_notes, replace_notes, write_record


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "digits").write_bytes(b"123456789")
    (tmp_path / "empty").write_bytes(b"")
    write_record(tmp_path, {"reward": 0.5})
    return tmp_path


def test_the_checksum_is_that_of_every_zip_file(folder):
    files = json.loads((folder / "record.json").read_text())["files"]
    assert files == {"empty": [0, 0], "sub/digits": [9, 0xCBF43926]}  # the check value of CRC-32
    check_record(folder)


def test_notes_change_without_the_checksums(folder):
    assert read_notes(folder) == {"reward": 0.5}
    replace_notes(folder, {"reward": 0.75})
    assert read_notes(folder) == {"reward": 0.75}
    check_record(folder)


def test_other_files_do_not_matter(folder):
    (folder / "new").write_text("x")
    check_record(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"notes": 3}'])
def test_notes_that_cannot_be_read_are_none(folder, text):
    (folder / "record.json").write_text(text)
    assert read_notes(folder) == {}
    with pytest.raises((ValueError, LookupError, TypeError)):
        check_record(folder)


def test_bytes_that_are_swapped_are_seen(folder):
    (folder / "sub" / "digits").write_bytes(b"213456789")
    with pytest.raises(ValueError, match="its file sub/digits was changed"):
        check_record(folder)
