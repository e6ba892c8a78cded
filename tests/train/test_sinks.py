"""Sinks get every line of metrics.jsonl, and one that fails costs a run nothing."""

import json
import struct
import sys
import types

import pytest
from rows import for_each
from tiny_run import tiny_run

from jaxrl_llm.train import EvaluationConfig, ReportConfig, train
from jaxrl_llm.train.logging.sinks import RunInfo, Sinks, find_sinks


class Memory:
    """A sink that remembers, and fails at the calls whose numbers are given."""

    def __init__(self, run=None, *, fails=()):
        self.run, self.fails, self.calls, self.rows, self.closed = run, fails, 0, [], 0

    def write(self, step, numbers):
        self.calls += 1
        if self.calls in self.fails:
            raise ConnectionError("the service is away")
        self.rows.append((step, dict(numbers)))

    def close(self):
        self.closed += 1


def opened(*sinks, folder="run", first=0):
    return Sinks([lambda run, s=s: s for s in sinks], RunInfo(folder, first, {}))


def test_numbers_arrive_by_the_names_of_their_line():
    memory = Memory()
    sinks = opened(memory)
    sinks.write({"step": 3, "reward": 0.5, "mfu": None, "note": "x", "reward/a": 1})
    sinks.write({"step": 3, "held_out": {"greedy": {"mean": 0.25, "questions": 4}}})
    sinks.close()
    assert memory.rows == [
        (3, {"reward": 0.5, "reward/a": 1}),
        (3, {"held_out/greedy/mean": 0.25, "held_out/greedy/questions": 4}),
    ]
    assert memory.closed == 1


def test_a_sink_that_fails_is_told_of_once_and_gets_all_when_it_heals():
    flaky, steady = Memory(fails=(2, 3)), Memory()
    sinks = opened(flaky, steady)
    sinks.write({"step": 1, "x": 1.0})
    with pytest.warns(UserWarning, match=r"sink .* fails at step 2: the service is away\. It is"):
        sinks.write({"step": 2, "x": 2.0})
    sinks.write({"step": 3, "x": 3.0})  # a second warning would be an error here
    assert [step for step, _ in flaky.rows] == [1]
    sinks.write({"step": 4, "x": 4.0})
    assert flaky.rows == steady.rows == [(n, {"x": float(n)}) for n in (1, 2, 3, 4)]
    # It healed in between, so that it fails anew.
    flaky.fails = (flaky.calls + 1,)
    with pytest.warns(UserWarning, match="fails at step 5"):
        sinks.write({"step": 5, "x": 5.0})
    with pytest.warns(UserWarning, match=r"lacks 1 line\(s\) of metrics.jsonl"):
        sinks.close()
    sinks.close()  # nothing is closed twice
    assert flaky.closed == steady.closed == 1


def test_a_sink_that_cannot_be_opened_or_closed_leaves_the_others():
    def absent(run):
        raise OSError(2, "No such file or directory")

    class Stuck(Memory):
        def close(self):
            raise TimeoutError("nobody answers")

    memory, stuck = Memory(), Stuck()
    makers = [absent, lambda run: stuck, lambda run: memory]
    with pytest.warns(UserWarning, match=r"sink .*absent cannot be opened and is left out: "):
        sinks = Sinks(makers, RunInfo("run", 0, {}))
    sinks.write({"step": 1, "x": 1.0})
    with pytest.warns(UserWarning, match="cannot be closed: nobody answers"):
        sinks.close()
    assert memory.rows == stuck.rows == [(1, {"x": 1.0})] and memory.closed == 1


@for_each(
    "name, package", [("tensorboard", "tensorboardX"), ("trackio", "trackio"), ("wandb", "wandb")]
)
def test_a_package_that_is_not_there_is_one_sentence(monkeypatch, tmp_path, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"sink '{name}' needs the package {package}: pip install 'jaxrl_llm\[sinks\]'"
    with pytest.raises(ImportError, match=message):
        train(tiny_run(tmp_path / "run", report=ReportConfig(sinks=(name,))))
    assert not (tmp_path / "run").exists()  # it is said before anything is made


def events(folder):
    """What event files hold, in their order: each a list of (step, name, value) or "purge"."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.iterdir()):
        data, rows = path.read_bytes(), []
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                rows.append((event.step, "purge", None))
            rows += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        found.append(rows)
    return found


def test_tensorboard_goes_on_with_the_same_curves(tmp_path, monkeypatch):
    # Files are named by the second, and this test takes none.
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1e9)
    (maker,) = find_sinks(["tensorboard"])
    sink = maker(RunInfo(tmp_path, 0, {}))
    sink.write(0, {"held_out/greedy/mean": 0.25})
    sink.write(1, {"reward": 0.5, "loss": float("nan")})
    sink.close()
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1e9 + 1)
    sink = maker(RunInfo(tmp_path, 1, {}))
    sink.write(2, {"reward": 0.75})
    sink.close()
    first, second = events(tmp_path / "tensorboard")
    assert first[:3] == [(0, "purge", None), (0, "held_out/greedy/mean", 0.25), (1, "reward", 0.5)]
    assert first[3][:2] == (1, "loss") and first[3][2] != first[3][2]
    # Steps from 2 on that were written before the run was killed are hidden.
    assert second == [(2, "purge", None), (2, "reward", 0.75)]


@pytest.fixture
def services(monkeypatch):
    """Stand-ins of trackio and wandb that remember how they are called."""
    calls = []

    class Run:
        def define_metric(self, name, **options):
            calls.append(("define_metric", name, options))

        def log(self, numbers):
            calls.append(("wandb.log", numbers))

        def finish(self):
            calls.append(("wandb.finish",))

    def init(**options):
        calls.append(("wandb.init", options))
        return Run()

    trackio = types.SimpleNamespace(
        init=lambda **options: calls.append(("trackio.init", options)),
        log=lambda numbers, step: calls.append(("trackio.log", numbers, step)),
        finish=lambda: calls.append(("trackio.finish",)),
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    return calls


def named(calls, name):
    return [call[1:] for call in calls if call[0] == name]


def test_services_know_the_run_by_the_same_name_after_a_resume(services, tmp_path):
    folder = tmp_path / "project" / "try_1"
    folder.mkdir(parents=True)
    for first in (0, 4, 0):
        for maker in find_sinks(["trackio", "wandb"]):
            sink = maker(RunInfo(folder, first, {"steps": 6}))
            sink.write(first + 1, {"reward": 0.5})
            sink.close()
    inits = [options for (options,) in named(services, "wandb.init")]
    ids = [options["id"] for options in inits]
    assert ids[0] == ids[1] != ids[2]
    assert {(o["project"], o["name"], o["resume"]) for o in inits} == {
        ("project", "try_1", "allow")
    }
    assert all(o["config"] == {"steps": 6} and o["dir"] == str(folder) for o in inits)
    inits = [options for (options,) in named(services, "trackio.init")]
    names = [options["name"] for options in inits]
    assert names[0] == names[1] != names[2] and names[0].startswith("try_1-")
    assert [o["resume"] for o in inits] == ["never", "allow", "never"]
    assert json.loads((folder / "sinks.json").read_text()) == {"trackio": names[2], "wandb": ids[2]}
    assert named(services, "define_metric") == [("*", {"step_metric": "step"})] * 3
    assert named(services, "wandb.log")[1] == ({"step": 5, "reward": 0.5},)
    assert named(services, "trackio.log")[1] == ({"reward": 0.5}, 5)
    assert len(named(services, "wandb.finish")) == len(named(services, "trackio.finish")) == 3


@pytest.mark.slow
def test_a_failing_sink_costs_a_run_nothing(tmp_path):
    made = []

    def memory(run):
        made.append(Memory(run))
        return made[-1]

    def broken(run):
        return Memory(run, fails=range(100))

    report = ReportConfig(sinks=(memory, broken), profile=(2,))
    options = {"report": report, "evaluation": EvaluationConfig(samples=2)}
    for steps in (2, 3):
        with pytest.warns(UserWarning) as warned:
            result = train(tiny_run(tmp_path / "run", steps=steps, **options), resume=steps > 2)
        told = [str(w.message) for w in warned]
        assert len(told) == 2 and "fails at step" in told[0] and "lacks" in told[1]
    assert [row["step"] for row in result.history] == [0, 1, 2, 2, 3, 3]
    first, second = made
    assert [step for step, _ in first.rows] == [0, 1, 2, 2]
    assert [step for step, _ in second.rows] == [3, 3]
    assert (first.run.first, second.run.first) == (0, 2) and first.closed == second.closed == 1
    assert second.run.settings["optimizer.learning_rate"] == 1e-2
    assert second.run.settings["reward"] == "low_bytes"
    numbers = second.rows[0][1]
    line = {k: v for k, v in result.history[-2].items() if k != "step"}
    assert numbers == line
    # The time of a step, split up.
    phases = ("wait", "score", "train", "save", "evaluate")
    assert 0 < sum(line[f"seconds_{p}"] for p in phases) <= line["seconds_total"]
    assert line["seconds_wait"] >= line["seconds_sample"] > 0 and line["seconds_reward"] > 0
    assert line["mfu"] > 0 and line["unique_tokens"] > line["tokens"] > 0
    evaluated = [row["seconds_evaluate"] > 0 for row in result.history if "loss" in row]
    assert evaluated == [True, False, False]  # the one before step 1; the last is in no line
    sessions = [json.loads(x) for x in (tmp_path / "run/sessions.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in sessions] == [
        ("start", 0), ("end", 2), ("start", 2), ("end", 3),
    ]  # fmt: skip
    assert sessions[-1]["outcome"] == "done" and sessions[-1]["seconds_save"] > 0
    assert sessions[-1]["seconds_evaluate"] > 0 and "cpu" in sessions[-2]["about"]["devices"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Finished: 3 of 3 steps." in page and "resumed" in page
    traces = [p.name for p in (tmp_path / "run" / "profile").iterdir()]
    assert traces == ["step_00000002"]
