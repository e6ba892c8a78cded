"""The harness, with small workers in place of models."""

import json
import sys

import pytest
from rows import for_each

from benchmarks import harness
from benchmarks.worker import processor_kind

WORKER = r"""
import time
from benchmarks.worker import Measured, serve
order = open({log!r}, "a", buffering=1)
def setup(workload):
    def run(seed):
        print("noise on stdout")
        order.write("{name}%d\n" % seed)
        time.sleep({seconds})
    return Measured(run, lambda: {check!r}, "cpu-2core", ("pytest",))
serve(setup)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes the module of a worker; all workers write the order of their runs into one file."""
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "benchmarks").symlink_to(harness.RESULTS.parent)

    def make(name, *, seconds=0.0, check=(1.0,)):
        values = dict(log=str(tmp_path / "order"), name=name, seconds=seconds, check=list(check))
        (tmp_path / f"{name}.py").write_text(WORKER.format(**values))
        return name

    make.order = lambda: (tmp_path / "order").read_text().split()
    return make


def measure(ours, peers, **options):
    return harness.measure(
        "sleep",
        workload={"tokens": 10},
        private={"secret_path": "somewhere"},
        ours=ours,
        peers=peers,
        peer_python=sys.executable,
        rounds=2,
        tokens=10,
        **options,
    )


def test_workers_run_in_turn(worker):
    measure(worker("a"), {"b": worker("b"), "c": worker("c")})
    assert " ".join(worker.order()) == "a0 a0 b0 b0 a1 b1 a2 b2 c0 c0 a1 c1 a2 c2"


def test_result_has_the_form(worker):
    result = measure(worker("a", seconds=0.02), {"b": worker("b", seconds=0.06)})
    keys = "name workload device versions commit ours peers ratios"
    assert list(result) == keys.split()
    assert result["workload"] == {"tokens": 10, "runs": 2}
    ours, peer = result["ours"], result["peers"]["b"]
    ratio = peer["seconds"]["median"] / ours["seconds"]["median"]
    assert result["ratios"]["b"] == pytest.approx(ratio, rel=1e-2)
    assert peer["seconds"]["min"] >= 0.06
    assert ours["seconds"]["min"] >= 0.02
    assert ours["tokens_per_s"]["max"] == pytest.approx(10 / ours["seconds"]["min"], rel=1e-2)
    assert ours["peak_memory_bytes"] > 2**20
    assert ours["compile_seconds"] >= 0
    assert result["versions"]["b"].keys() == {"python", "pytest"}
    assert "somewhere" not in json.dumps(result)


def test_peers_must_agree(worker):
    with pytest.raises(harness.WorkerError, match="b and ours do not compute the same"):
        measure(worker("a"), {"b": worker("b", check=[1.1])}, tolerance=1e-3)
    assert measure(worker("a"), {"b": worker("b", check=[1.0001])}, tolerance=1e-3)


def test_a_worker_that_ends_is_named(worker, tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    with pytest.raises(harness.WorkerError, match="broken ended with code 3 before 'ready'"):
        measure("broken", {})


def test_without_a_peer_python_only_ours_runs(worker):
    result = harness.measure(
        "sleep",
        workload={},
        private={},
        ours=worker("a"),
        peers={"b": "no_such_module"},
        peer_python=None,
        rounds=1,
        tokens=1,
    )
    assert result["peers"] == result["ratios"] == {}


def test_summary_is_median_and_range():
    assert harness.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_compile_seconds_are_apart():
    figure = harness.figures([2.0, 2.0, 3.0], tokens=8, warm_up_seconds=14.0, peak_memory_bytes=1)
    assert figure["compile_seconds"] == 10.0
    assert figure["tokens_per_s"] == {"median": 4.0, "min": 2.667, "max": 4.0}


def test_save_names_the_file_after_the_device(tmp_path):
    result = {"name": "sleep", "device": "cpu-2core", "ours": {}}
    path = harness.save(result, tmp_path)
    assert path.name == "sleep-cpu-2core.json"
    assert json.loads(path.read_text()) == result


def test_fewer_than_five_runs_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        harness.parser("").parse_args(["--rounds", "4"])
    assert ended.value.code == 2
    assert "at least 5 runs, not 4" in capsys.readouterr().err


@for_each("share, agree", [(0.75, True), (0.8, False)])
def test_a_share_may_differ(share, agree):
    checks = {"ours": [1, 2, 3, 4], "peer": [1, 2, 3, 5]}
    if agree:
        harness.check_agreement(checks, tolerance=0.0, share=share)
    else:
        with pytest.raises(harness.WorkerError, match="3 of 4 numbers agree"):
            harness.check_agreement(checks, tolerance=0.0, share=share)


def test_the_kind_of_a_processor_is_part_of_its_name(tmp_path):
    file = tmp_path / "cpuinfo"
    one = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n"
    file.write_text("\n".join(one.format(i) + "model name\t: AMD EPYC\n" for i in range(2)))
    assert processor_kind(file) == "-amd-25-17"
    for flags, kind in (("avx2 avx512f", "-amd-25-17"), ("avx avx2", "-amd-25-17-avx2")):
        file.write_text(one.format(0) + f"flags\t\t: fpu {flags} bmi2\n")
        assert processor_kind(file) == kind
    file.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert processor_kind(file) == processor_kind(tmp_path / "nothing") == ""
