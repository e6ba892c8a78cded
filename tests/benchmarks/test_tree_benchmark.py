"""The benchmark of trees runs on a tiny model, and prints one JSON line last."""

import json

import pytest

from benchmarks import tree_step


@pytest.mark.slow
def test_runs_tiny(capfd):
    tree_step.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["name"] == "tree_step"
    cells = result["ours"]["cells"]
    assert cells["tree"] == cells["flattened"] * 10 / 16
    assert result["ours"]["share"]["median"] > 0


def test_a_tree_has_ten_halves_of_sixteen():
    batch = tree_step.forked_batch(tree_step.TINY)
    first = {tuple(row[:4]) for row in batch.tokens[0].tolist()}
    assert len(first) == 4 and len({tuple(row) for row in batch.tokens[0].tolist()}) == 16


def test_peers_are_refused():
    with pytest.raises(SystemExit, match="compares trees with rows"):
        tree_step.main(["--tiny", "--peer-python", "python"])
