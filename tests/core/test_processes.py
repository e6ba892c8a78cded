"""What several processes share, as one process sees it. More start in tests/train."""

import errno
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rows import for_each

from jaxrl_llm.cli import UsageError
from jaxrl_llm.cli.options import usage_errors
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.train import CheckpointError, OccupiedError


@pytest.fixture
def sharding():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


@for_each("count", [0, 1, 5, 8, 13])
@for_each("among", [1, 2, 3, 8])
def test_portions_are_all_there_is_once(count, among, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: among)
    found = []
    for index in range(among):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        found.append(list(range(count))[processes.portion(count)])
    assert sum(found, []) == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_one_process_shares_with_itself():
    assert processes.is_first()
    assert processes.share("a") == ["a"] == processes.together(lambda: "a")
    assert processes.from_first(lambda: 3) == 3
    assert processes.any_of(None) is None and processes.any_of(15) == 15
    with pytest.raises(KeyError, match="gone"):
        processes.together(lambda: {}["gone"])
    processes.leave(1)  # returns: nobody waits


def test_place_and_back(sharding):
    tree = {"x": np.arange(16.0, dtype=np.float32).reshape(8, 2), "y": jnp.arange(8)}
    placed = processes.place(tree, sharding)
    assert all(x.sharding == sharding for x in jax.tree.leaves(placed))
    jax.tree.map(np.testing.assert_array_equal, processes.to_host(placed), tree)


def test_with_others_each_device_is_given_its_part(sharding, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(type(sharding), "is_fully_addressable", False)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    tree = {"x": np.arange(8), "key": jax.random.key(3)}
    placed = processes.place(tree, {"x": sharding, "key": whole})
    assert placed["x"].sharding == sharding
    np.testing.assert_array_equal(placed["x"].addressable_shards[3].data, [3])
    assert placed["key"].dtype == tree["key"].dtype
    got, want = (jax.random.key_data(tree["key"]) for tree in (placed, tree))
    np.testing.assert_array_equal(got, want)


def outcomes(monkeypatch, *others):
    """Two processes or more, of which this one is the first."""
    monkeypatch.setattr(jax, "process_count", lambda: 1 + len(others))
    monkeypatch.setattr(processes, "share", lambda value: [value, *others])


def test_an_error_of_another_process_is_named(monkeypatch):
    outcomes(monkeypatch, 15, 2)
    assert processes.any_of(None) == 15  # the first that has one
    outcomes(monkeypatch, ("b", None), (None, ("OSError: full", OSError, None)))
    with pytest.raises(processes.ProcessError, match="Process 2 failed: OSError: full"):
        processes.together(lambda: "a")
    with pytest.raises(ZeroDivisionError):  # one's own comes first
        processes.together(lambda: 1 // 0)


def test_what_each_process_gives_is_in_their_order(monkeypatch):
    outcomes(monkeypatch, ("b", None))
    assert processes.together(lambda: "a") == ["a", "b"]
    assert processes.from_first(lambda: "a") == "a"


def test_a_process_that_is_not_first_does_not_call(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "share", lambda value: [("theirs", None), value])
    assert processes.from_first(lambda: pytest.fail("called")) == "theirs"


class Damaged(KeyError):
    """An error that only one process knows."""


UNWRITABLE = CheckpointError("cannot be written")
UNWRITABLE.__cause__ = NotADirectoryError(errno.ENOTDIR, "no folder")


@for_each(
    ("fault", "error", "told"),
    [
        (OccupiedError("taken"), UsageError, "Process 0 failed: OccupiedError: taken"),
        (UNWRITABLE, UsageError, "Process 0 failed: CheckpointError: cannot be written"),
        (Damaged("cut"), processes.ProcessError, "Process 0 failed: Damaged: 'cut'"),
    ],
)
def test_what_is_wrong_with_a_command_is_so_for_the_others(monkeypatch, fault, error, told):
    outcomes = []

    def function():
        raise fault

    def share(value):
        outcomes.append(pickle.loads(pickle.dumps(value)))
        return outcomes

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "share", share)
    with pytest.raises(Exception, match="taken|cannot be written|cut"):
        processes.together(function)
    with pytest.raises(error, match=told), usage_errors():
        processes.together(lambda: None)
