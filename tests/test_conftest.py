"""``--share`` divides the tests that are alike; pages are compared with results that git tracks."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
WHOLE, NAMED = pytest.Config.ArgsSource.TESTPATHS, pytest.Config.ArgsSource.ARGS


@pytest.fixture
def conftest(pytestconfig):
    plugins = pytestconfig.pluginmanager.get_plugins()
    (found,) = (x for x in plugins if getattr(x, "__file__", None) == str(CONFTEST))
    return found


@pytest.fixture
def share_of(conftest):
    """``share_of(share)``: the ids kept of 63 tests alike, of 3 others, and of 50 alone."""

    def ids_of(share, source=WHOLE):
        def item(name, marker=None):
            return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: marker)

        items = [item(f"f.py::test_many[{n}]", "of_many") for n in range(63)]
        items += [item(f"f.py::test_few[{n}]", "of_many") for n in range(3)]
        items += [item(f"f.py::test_alone[{n}]") for n in range(50)]
        items, dropped = [Hashable(**vars(x)) for x in items], []
        config = SimpleNamespace(
            args_source=source,
            getoption=lambda name: share,
            hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)),
            rootpath=CONFTEST.parent,
            stash=pytest.Stash(),
        )
        conftest.pytest_configure(config)
        conftest.pytest_collection_modifyitems(config, every := list(items))
        assert len(every) + len(dropped) == len(items)
        return {x.nodeid for x in every}

    return ids_of


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def test_shares_divide_what_is_one_of_many(share_of):
    everything, parts = share_of("1"), [share_of(f"{k}/4") for k in range(4)]
    alone = {f"f.py::test_alone[{n}]" for n in range(50)}
    assert len(everything) == 116 and set.union(*parts) == everything
    assert set.intersection(*parts) == alone
    for part in parts:
        assert 15 <= sum("many" in x for x in part) <= 16
        assert sum("few" in x for x in part) == 1


def test_the_commit_chooses_the_part_of_a_whole_run(share_of):
    assert share_of("4") in [share_of(f"{k}/4") for k in range(4)]
    assert share_of(None) in [share_of(f"{k}/8") for k in range(8)]
    assert share_of(None, NAMED) == share_of("1")


@pytest.mark.parametrize("share", ["3/3", "-1/3", "0", "-2", "a/b", "1/2/3", "/"])
def test_a_share_that_makes_no_sense_is_refused(share_of, share):
    with pytest.raises(pytest.UsageError, match="--share"):
        share_of(share)


def test_a_saved_result_that_git_does_not_track_changes_no_page(conftest, tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert conftest._tracked_results(tmp_path) is None  # no checkout
    git("init")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "speed.json").write_text("1")
    git("add", ".")
    git("commit", "-m", "a result")
    assert conftest._tracked_results(tmp_path) is None
    (results / "speed.json").write_text("2")
    (results / "other.json").write_text("3")
    tracked = conftest._tracked_results(tmp_path)
    assert {x.name: x.read_text() for x in tracked.iterdir()} == {"speed.json": "1"}
    git("add", ".")  # as whoever changes a page does before the tests
    assert conftest._tracked_results(tmp_path) is None
