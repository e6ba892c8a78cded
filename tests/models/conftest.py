"""What the tests of this folder share."""

import itertools

import pytest


@pytest.fixture
def new_folder(tmp_path):
    """A function whose every call makes an empty folder, for the rows of ``for_each``."""
    numbers = itertools.count()

    def make():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return folder

    return make
