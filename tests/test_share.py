"""``--share K/N`` divides the tests that are one of many alike, and leaves no other test out."""

from pathlib import Path
from types import SimpleNamespace

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def share_of(pytestconfig):
    """``share_of(share)``: what it keeps of a hundred tests, of which every second is of many."""
    plugins = pytestconfig.pluginmanager.get_plugins()
    (conftest,) = (x for x in plugins if getattr(x, "__file__", None) == str(CONFTEST))
    return lambda share: names_of(conftest, share)


def names_of(conftest, share):
    def item(n):
        return SimpleNamespace(
            nodeid=f"test_{n}", get_closest_marker=lambda name: None if n % 2 else name
        )

    items, dropped = [item(n) for n in range(100)], []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    config = SimpleNamespace(getoption=lambda name: share, hook=hook)
    conftest.pytest_collection_modifyitems(config, every := list(items))
    assert len(every) + len(dropped) == len(items)
    return {x.nodeid for x in every}


def test_shares_divide_what_is_one_of_many(share_of):
    everything, parts = share_of(None), [share_of(f"{k}/3") for k in range(3)]
    alone = {f"test_{n}" for n in range(1, 100, 2)}
    assert len(everything) == 100 and set.union(*parts) == everything
    assert set.intersection(*parts) == alone
    assert all(50 < len(part) < 80 for part in parts)


@pytest.mark.parametrize("share", ["3/3", "-1/3", "1", "a/b"])
def test_a_share_that_makes_no_sense_is_refused(share_of, share):
    with pytest.raises(pytest.UsageError, match="--share"):
        share_of(share)
