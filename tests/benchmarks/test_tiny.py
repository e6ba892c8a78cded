"""Every benchmark runs on a tiny model, and prints one JSON line last.

The figures themselves are of no interest: that they are there, positive, and in the form that the
pages read. Where a benchmark compares two checkouts, both are this one, and one process answers for
both (``harness.run_child`` is compared with another checkout in its own test).
"""

import importlib.util
import itertools
import json

import jax
import pytest
from rows import for_each

from benchmarks import (
    absent,
    checkpoint,
    collectors,
    compiled,
    context_axis,
    decoding,
    denoise_speed,
    dpo_step,
    engine,
    engine_page,
    environments,
    few_samples,
    first_step,
    harness,
    long_context,
    mismatch,
    packing,
    refill,
    sampler,
    sandbox,
    selection,
    start,
    train_step,
    training_page,
    tree_step,
)
from jaxrl_llm.recipes import catalog
from jaxrl_llm.rewards import SandboxError, check_sandbox


@pytest.fixture
def one_child(monkeypatch):
    """Children with the same request run once, though they are of two checkouts."""
    run, done = harness.run_child, {}

    def run_child(script, request, checkout, **environment):
        key = script, json.dumps(request)
        if key not in done:
            done[key] = run(script, request, checkout, **environment)
        return done[key]

    monkeypatch.setattr(harness, "run_child", run_child)


def test_a_child_runs_the_code_of_its_checkout(tmp_path):
    (tmp_path / "other.py").write_text("where = 'there'")
    script = tmp_path / "script.py"
    script.write_text("import json, other, sys\nprint(json.dumps([other.where, sys.argv[1:]]))")
    found = harness.run_child(str(script), {"a": 1}, tmp_path)
    assert found == ["there", ["--child", '{"a": 1}']]


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, benchmark, options",
    [
        ("sampler_bfloat16", sampler, ["--case", "bfloat16"]),
        ("dpo_step_precomputed", dpo_step, ["--case", "precomputed"]),
        ("train_step_bfloat16", train_step, ["--case", "bfloat16"]),
    ],
)
def test_runs_without_peers(name, benchmark, options, ran):
    result = ran(benchmark, *options)
    assert (result["name"], result["peers"]) == (name, {})
    assert result["ours"]["seconds"]["min"] > 0
    assert {"jax", "jaxrl_llm"} <= result["versions"]["ours"].keys()


@for_each(
    "benchmark, message",
    [
        (collectors, "measures ours alone"),
        (denoise_speed, "no peers"),
        (engine, "no peers"),
        (mismatch, "not with peers"),
        (packing, "compares packing with itself"),
        (sandbox, "has no peers"),
        (selection, "measures ours alone"),
        (tree_step, "compares trees with rows"),
    ],
)
def test_peers_are_refused(benchmark, message):
    with pytest.raises(SystemExit, match=message):
        benchmark.main(["--tiny", "--peer-python", "python"])


@pytest.mark.slow
def test_long_context_beside_a_checkout(ran, few_rounds):
    found = ran(long_context, "--before", harness.ROOT, "--rounds", 1)["ours"]
    assert found["now"]["bytes"] == found["before"]["bytes"] and found["times_faster"] > 0
    assert found["now"]["bytes"]["16"] > found["now"]["bytes"]["8"] > 0


@pytest.mark.slow
def test_decoding_beside_a_checkout(ran, one_child, monkeypatch):
    monkeypatch.setattr(decoding, "TINY_CASES", decoding.TINY_CASES[1:2])
    result = ran(decoding, "--before", harness.ROOT, "--turns", 1)
    (of,), (ratio,) = result["ours"].values(), result["ratios"].values()
    assert 0 < of["now"]["share_of_products"]["median"] < 1 == ratio


@pytest.mark.slow
def test_few_samples_beside_a_checkout(ran, one_child):
    result = ran(few_samples, "--before", harness.ROOT, "--turns", 1)
    assert set(result["ours"]) == set(result["ratios"]) and len(result["ours"]) == 3
    assert all(of["now"]["min"] > 0 < of["before"]["min"] for of in result["ours"].values())
    assert "| 1 to each of 24 prompts | " in engine_page._few_samples(result)


@pytest.mark.slow
def test_devices_of_context_hold_less(ran):
    result = ran(context_axis)
    one, two = result["ours"]["1"], result["ours"]["2"]
    assert all(two[name] < one[name] for name in ("arguments", "others"))
    assert "| 2 | 0.00 | 0.00 |" in training_page._context_axis(result)


@pytest.mark.slow
def test_the_seconds_of_a_start_beside_a_checkout(capfd, tmp_path, monkeypatch):
    found = start.seconds(harness.ROOT, "configs/tiny.py", tmp_path)
    assert 1 < found["model"] < found["step"] and list(tmp_path.iterdir())
    asked = []
    monkeypatch.setattr(start, "seconds", lambda *where: asked.append(where) or found)
    start.main(["--config", "configs/tiny.py", "--before", str(tmp_path), "--turns", "1"])
    # Warm is with the programs that the cold run left.
    folders = [folder for _, _, folder in asked]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert [where for where, *_ in asked] == [harness.ROOT] * 2 + [tmp_path] * 2
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    table = training_page._start(result)
    for until, name in itertools.product(start.UNTIL, ("now", "before")):
        assert f"\n| {until}, {name} | " in table


@pytest.mark.of_many
@pytest.mark.slow
def test_the_parts_of_a_first_step_beside_a_checkout(ran, few_rounds, one_child, monkeypatch):
    monkeypatch.setattr(first_step, "DTYPES", ("bfloat16",))
    monkeypatch.setattr(first_step, "TINY_LAYERS", (1,))
    result = ran(first_step, "--before", harness.ROOT, "--rounds", 1)
    (case,) = result["ours"]
    assert case == "1 layers, bfloat16"
    table = training_page._first_step(result)
    for name, parts in result["ours"][case].items():
        assert f"| {case}, {name} |" in table
        assert all(parts[part]["min"] > 0 for part in first_step.PARTS)


@pytest.mark.of_many
@pytest.mark.slow
def test_the_engine(ran, few_rounds):
    result = ran(engine, "--rounds", 1)
    assert result["name"] == "engine"
    assert result["products"]["share_of_products"] > 0
    assert result["skewed"]["ratio"] > 0
    assert result["long_prompt"]["prompt_cache_ratio"] == 1
    assert min(result["startup"][f"{part}_seconds"] for part in ("warm_start", "compile")) > 0


SMALL = ["--group-size", 2, "--slots", 4, "--turn-tokens", 4, "--runs"]


@pytest.mark.slow
def test_episodes_sample_as_much_as_single_turns(capfd, ran, monkeypatch):
    monkeypatch.setattr(harness, "MIN_ROUNDS", 2)
    environments.main(["--tiny", "--episodes", "4", *map(str, SMALL), "2"])
    printed = capfd.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert (result["workload"]["episodes"], result["workload"]["runs"]) == (4, 2)
    order = [line.split(":")[0] for line in printed.err.splitlines() if line.endswith(" s")]
    assert order == ["single", "fast", "slow", "slow", "fast", "single"]
    assert result["ratios"].keys() == {"fast/single", "slow/fast"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the package warns of itself
def test_games_of_textworld_sample_as_much_as_single_turns(ran, few_rounds):
    pytest.importorskip("textworld")
    result = ran(environments, "--textworld", "--episodes", 2, *SMALL, 1)
    assert result["name"] == "environments_textworld"
    assert result["ratios"].keys() == {"textworld/single"}


def test_a_median_of_fewer_runs_is_refused(capsys):
    with pytest.raises(SystemExit):
        environments.main(["--tiny", "--runs", "4"])
    assert "a median needs at least 5 runs, not 4" in capsys.readouterr().err


@pytest.mark.of_many
@pytest.mark.slow
def test_three_ways_of_refill_collect_the_same(ran):
    result = ran(refill, "--batches", 1, "--groups", 8, "--slots", 32)
    assert result["name"] == "refill"
    assert set(result["ratios"]) == {"rounds/barrier", "slots/barrier"}
    # No group is dropped here; slots begin with half a batch more.
    assert [result["ours"][name]["tokens"] for name in ("barrier", "rounds")] == [1.0, 1.0]
    assert 1.0 <= result["ours"]["slots"]["tokens"] < 1.6


@pytest.mark.slow
def test_a_batch_of_collectors_is_timed(ran):
    result = ran(collectors)
    assert result["name"] == "collectors" and set(result["share"]) == {"grpo", "dapo"}
    assert all(0 < t["min"] <= t["median"] <= t["max"] for t in result["milliseconds"].values())


@pytest.mark.slow
def test_the_dtypes_of_a_sampler_and_a_trainer(ran):
    flows = mismatch.flows()
    for precision in mismatch.PRECISIONS:
        assert {(precision, precision), (precision, "float32")} <= set(flows)
    result = ran(mismatch)
    found = {(row["sampler"], row["trainer"]): row["mean_abs"] for row in result["flows"]}
    assert list(found) == flows
    assert found["float32", "float32"] < 1e-5
    for precision in ("bfloat16 int8", "bfloat16 fp8"):
        assert found[precision, "float32"] > found[precision, precision]


def test_every_rule_of_selection_is_timed(ran):
    result = ran(selection)
    assert result["name"] == "selection" and result["workload"]["prompts"] == 1000
    rules = {"learnability", "dots", "vade", "vade_without_candidates", "mopps", "insight"}
    assert set(result["milliseconds"]) == rules | {"step", "update"}
    assert all(0 < t["min"] <= t["median"] <= t["max"] for t in result["milliseconds"].values())


@pytest.mark.slow
def test_packed_rows_have_fewer_cells(ran):
    result = ran(packing)
    skewed, even = result["skewed"], result["even"]
    for form in ("always", "flat"):
        assert skewed["cells"][form] < skewed["cells"]["never"]
        assert skewed["padding"][form] < skewed["padding"]["never"]
        assert skewed["ratio"][form] > 0 and even["ratio"][form] > 0
    assert even["cells"]["always"] == even["cells"]["never"] and even["padding"]["never"] == 0


@pytest.mark.slow
def test_a_tree_has_ten_halves_of_sixteen(ran):
    batch = tree_step.forked_batch(tree_step.TINY)
    first = {tuple(row[:4]) for row in batch.tokens[0].tolist()}
    assert len(first) == 4 and len({tuple(row) for row in batch.tokens[0].tolist()}) == 16
    ours = ran(tree_step)["ours"]
    assert ours["cells"]["tree"] == ours["cells"]["flattened"] * 10 / 16
    assert ours["share"]["median"] > 0


@pytest.mark.slow
def test_the_sandbox(ran):
    try:
        check_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    result = ran(sandbox)
    assert result["name"] == "sandbox" and result["together_per_second"]["median"] > 0
    assert set(result["milliseconds"]) == {"alone", "asserts", "python"}


def test_a_checkpoint_blocks_for_less_than_it_takes(ran, tmp_path):
    result = ran(checkpoint, "--rounds", 1, "--folder", tmp_path)
    assert result["name"] == "checkpoint" and result["bars"] == {"share": checkpoint.BAR}
    ours = result["ours"]
    figures = "blocked whole share update first_update first_update_more copy restore bytes"
    assert {*figures.split(), "gb_per_s"} <= ours.keys()
    assert 0 < ours["blocked"]["min"] < ours["whole"]["min"]
    share = ours["blocked"]["median"] / ours["whole"]["median"]
    assert ours["share"]["median"] == pytest.approx(share, rel=1e-2)
    assert list(tmp_path.iterdir()) == []
    for path in harness.RESULTS.glob("checkpoint-*.json"):
        result = json.loads(path.read_text())
        # Parameters, moments and their count.
        assert result["ours"]["bytes"] == 3 * 4 * 134_515_008 + 4
        assert 0 < result["ours"]["share"]["median"] < 1


@pytest.mark.parametrize("kind", absent.KINDS)
def test_a_compiler_that_is_not_here_is_named(kind, monkeypatch):
    def nothing(name):
        raise ModuleNotFoundError(name)

    for find in (lambda name: None, nothing):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        assert absent.missing(kind) in {"libtpu", "jax-cuda12-plugin"}
        with pytest.raises(SystemExit, match="pip install"), absent.present(kind, 1):
            raise AssertionError
    assert jax.default_backend() == "cpu"


def test_programs_that_are_saved_stand_beside_those_that_were(tmp_path, monkeypatch):
    found = {"device": "h100", "arguments_bytes": 3, "temporary_bytes": 4}
    assert compiled.taken(found) == found | {"taken_bytes": 7, "memory_bytes": 80_000_000_000}
    monkeypatch.setattr(compiled, "package_versions", lambda packages: {})
    first, second = list(compiled.programs())[:2]
    compiled.save({second: {"taken_bytes": 1}}, tmp_path)
    compiled.save({first: {"taken_bytes": 2}}, tmp_path)
    found = json.loads((tmp_path / "compiled.json").read_text())["programs"]
    assert list(found) == [first, second]


def test_every_paper_has_its_methods():
    assert len(catalog.PAPERS) == 129 == len({paper.arxiv for paper in catalog.PAPERS})
    known = {method.key for method in catalog.CATALOG}
    for paper in catalog.PAPERS:
        assert set(paper.keys) <= known and bool(paper.keys) != bool(paper.idea), paper
        assert not paper.page or (harness.ROOT / paper.page).is_file(), paper
