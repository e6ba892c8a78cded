"""docs/reliability.md has the counts of benchmarks/results."""

import json

from benchmarks import reliability_page
from jaxrl_llm.train.config import TrainConfig


def test_options_of_the_page_exist():
    text = reliability_page.PAGE.read_text()
    for name in ("max_skipped", "reward_deadline", "microbatches", "packing", "remat"):
        assert f"`{name}`" in text and name in TrainConfig.__dataclass_fields__


def test_the_page_is_current():
    assert reliability_page.main(["--check"]) == 0, "run python -m benchmarks.reliability_page"


def test_counts_become_tables(tmp_path):
    assert reliability_page.measured(tmp_path) == "Nothing yet."
    counts = {"kills": 3, "runs": 2, "writing": 1, "resumed": 4, "commit": "c"}
    runs = [{"kind": kind, "mesh": "data 2", **counts} for kind in ("pairs", "critic")]
    trials = {"model files": {"cases": 1200, "refused": 1150, "accepted": 50, "commit": "c"}}
    result = {"name": "faults", "device": "D", "trials": trials, "runs": runs}
    (tmp_path / "faults-D.json").write_text(json.dumps(result))
    text = reliability_page.measured(tmp_path)
    assert "| model files | 1,200 | 1,150 | 50 | c |" in text
    assert (
        "| pairs | data 2 | 3 | 1 | 4 | 2 | c |" in text and "| all |  | 6 | 2 | 8 | 4 |  |" in text
    )
