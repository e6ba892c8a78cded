"""Every notebook runs from top to bottom, quickly, and is stored without outputs."""

import os
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from rows import for_each

LIMIT = 120
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert FAST in [path.stem for path in NOTEBOOKS]


@for_each("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_and_with_headings_that_render(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
        else:
            assert not cell.source.startswith("# #"), "a heading of a script, not of a page"


# A kernel with its imports and compilations takes long to start, so one stands for all.
FAST = "00_estimators"


def with_slow():
    for path in NOTEBOOKS:
        marks = [] if path.stem == FAST else [pytest.mark.slow]
        yield pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("path", list(with_slow()))
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    # The kernel chooses its own plotting backend, so that figures become outputs, and compiles as
    # a reader's does, so that the time is the reader's.
    left_out = {"MPLBACKEND", "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"}
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    start = time.monotonic()
    client.execute(env=env)
    seconds = time.monotonic() - start
    assert seconds < LIMIT, f"{seconds:.0f} s; a reader waits {LIMIT} s at most"
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert any("image/png" in o.get("data", {}) for o in outputs), "no figure was drawn"
