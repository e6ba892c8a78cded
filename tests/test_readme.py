"""The README tells the truth: its examples run, its tables are current, its commands are CI's."""

import re
from pathlib import Path

import pytest

from benchmarks import readme
from jaxrl_llm.recipes import catalog

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_examples_run_as_pasted(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_first_example_is_short():
    assert len(blocks("python")[0].strip().splitlines()) <= 15


def test_generated_parts_are_current():
    assert readme.generate(TEXT) == TEXT, "run python -m benchmarks.readme"
    page = readme.CATALOG.read_text()
    assert readme.generate_catalog(page) == page, "run python -m benchmarks.readme"


def test_the_readme_is_short_and_counts_every_method():
    assert len(TEXT.splitlines()) <= 150
    assert tuple(readme.FAMILIES) == catalog.KINDS
    counts = re.findall(r"^\| \[(\w+)\].*?\| (\d+) \| \d+ \|", TEXT, re.MULTILINE)
    assert [kind for kind, _ in counts] == list(catalog.KINDS)
    assert sum(int(number) for _, number in counts) == len(catalog.CATALOG)


def test_check_mode_fails_on_an_old_readme(tmp_path, monkeypatch, capsys):
    old = tmp_path / "README.md"
    old.write_text(readme.fill(TEXT, "families", "an old table"))
    monkeypatch.setattr(readme, "README", old)
    assert readme.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0


def test_every_command_is_one_line():
    train, test = (block.strip().splitlines() for block in blocks("bash"))
    assert len(train) == len(test) == 1
    assert train[0].endswith("jaxrl-llm train configs/quickstart.py")
    assert (ROOT / "configs" / "quickstart.py").is_file()


def test_ci_runs_the_test_command_of_the_readme():
    """With the tests marked slow in the same processes, which share their programs."""
    command = blocks("bash")[1].strip().rsplit(" && ", 1)[1]
    _, arguments = command.split("bin/python ")
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    command = f'"$bin/python" {arguments} -m "slow or not slow" '
    assert any(line.startswith(command) for line in lines)


def test_fill_needs_its_markers():
    with pytest.raises(ValueError, match="markers of 'curve'"):
        readme.fill(TEXT, "curve", "")


def test_results_show_what_was_measured(tmp_path):
    figure = {"median": 3.14159, "min": 3.0, "max": 3.5}
    (tmp_path / "train_step-cpu-2core.json").write_text(
        readme.json.dumps(
            {
                "name": "train_step",
                "workload": {
                    "dtype": "float32",
                    "model": "tiny",
                    "prompts": 2,
                    "rollouts": 8,
                    "prompt_tokens": 192,
                    "response_tokens": 64,
                    "remat": True,
                },
                "device": "cpu-2core",
                "ours": {"seconds": figure},
                "peers": {"tunix": {"seconds": {"median": 12345.6, "min": 1.0, "max": 2.0}}},
            }
        )
    )
    table = readme.results(tmp_path)
    assert "| 3.14 (3 to 3.5) |  | 12,300 (1 to 2) |" in table
    assert "2 x 8 rollouts, 192 + 64 tokens, rematerialized" in table
