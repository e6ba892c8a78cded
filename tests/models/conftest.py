"""Lets the tests of this folder use the helpers that all tests share."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture
def new_folder(tmp_path):
    """A function whose every call makes an empty folder, for the rows of ``for_each``."""
    numbers = itertools.count()

    def make():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return folder

    return make
