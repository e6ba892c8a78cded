"""A folder for each row of a table, where one test runs them all."""

import tempfile
from pathlib import Path


def fresh(folder) -> Path:
    """A new folder within ``folder``."""
    return Path(tempfile.mkdtemp(dir=folder))
