"""docs/precision.md tells the truth: its example runs, its numbers are those of the benchmark."""

import json
import re

import pytest

import jaxrl_llm as jr
from benchmarks import mismatch, precision_page

TEXT = precision_page.PAGE.read_text()


@pytest.mark.slow
def test_the_example_runs_as_pasted(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(code, "precision.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("Mismatch(mean_abs=")


def test_names_of_the_page_exist():
    for name in ("sampler_gap", "sampler_gap_max", "sampler_kl", "sampler_ess"):
        assert f"`{name}`" in TEXT and f"``{name}``" in jr.train.metrics.batch_metrics.__doc__


def test_measured_numbers_are_current():
    assert precision_page.main(["--check"]) == 0, "run python -m benchmarks.precision_page"


def test_results_become_a_table(tmp_path, monkeypatch):
    assert precision_page.measured(tmp_path) == "Nothing yet."
    numbers = {"max_abs": 0.5, "kl": 0.01}
    result = {
        "device": "D",
        "workload": {"model": "M", "prompts": 4, "rollouts": 2, "prompt_tokens": 9}
        | {"new_tokens": 8},
        "flows": [
            {"sampler": "fp8", "trainer": "fp8", "mean_abs": 0.02, **numbers},
            {"sampler": "fp8", "trainer": "float32", "mean_abs": 0.25, **numbers},
        ],
    }
    (tmp_path / "mismatch-D.json").write_text(json.dumps(result))
    text = precision_page.measured(tmp_path)
    assert "M, 4 prompts of up to 9 tokens, 2 rollouts of up to 8, D" in text
    assert "| fp8 | float32 | 0.25 | 0.5 | 0.01 |" in text
    assert text.endswith("fp8 beside a float32 trainer: 12 times.")
    # An old page is told, and written.
    page = tmp_path / "precision.md"
    page.write_text("<!-- measured:begin -->\nold\n<!-- measured:end -->\n")
    monkeypatch.setattr(precision_page, "PAGE", page)
    monkeypatch.setattr(precision_page, "measured", lambda: text)
    assert precision_page.main(["--check"]) == 1 and "old" in page.read_text()
    assert precision_page.main([]) == 0 and "12 times" in page.read_text()
    assert precision_page.main(["--check"]) == 0


def test_every_precision_flows_alone_and_split():
    flows = mismatch.flows()
    assert len(set(flows)) == len(flows)
    assert {(p, p) for p in mismatch.PRECISIONS} <= set(flows)
    assert {(p, "float32") for p in mismatch.PRECISIONS} <= set(flows)


@pytest.mark.slow
def test_runs_tiny(capfd):
    mismatch.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    found = {(row["sampler"], row["trainer"]): row["mean_abs"] for row in result["flows"]}
    assert list(found) == mismatch.flows()
    assert found["float32", "float32"] < 1e-5
    for precision in ("bfloat16 int8", "bfloat16 fp8"):
        assert found[precision, "float32"] > found[precision, precision]


def test_peers_are_refused():
    with pytest.raises(SystemExit, match="not with peers"):
        mismatch.main(["--tiny", "--peer-python", "python"])
