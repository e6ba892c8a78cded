"""Every claim in its quick form, the page that lists them, and the intervals and verdicts."""

import json
import math

import jax
import numpy as np
import pytest
from rows import for_each

from benchmarks.claims import __main__ as command
from benchmarks.claims import _bandit, _chosen, _trained, harness, table
from jaxrl_llm.recipes.catalog import CATALOG

NAMES = harness.names()


def _saved(name):
    return json.loads((harness.RESULTS / f"{name}.json").read_text())


# They run longer than they compile.
LONG = ("ace", "pkpo", "rover")


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("name", NAMES)
def test_quick_form(name, request):
    """It runs, and does not contradict what was saved with more samples."""
    if name in LONG:
        request.getfixturevalue("optimized")
    claim, _ = harness.run(name, quick=True)
    saved = _saved(name)
    quick = {measure.what: measure for measure in claim.measures}
    for measure in saved["measures"]:
        verdicts = {measure["verdict"], quick[measure["what"]].verdict}
        assert not verdicts >= {harness.HOLDS, harness.FAILS}, measure["what"]
    assert len(quick) == len(saved["measures"]) == len(claim.measures)
    for series in claim.plot.series:
        assert len(series.x) == len(series.y) > 0
        assert np.all(np.isfinite(np.asarray(series.y, float)))
    json.dumps(harness.record(name, claim, seed=0, seconds=0.0, commit=""))


@for_each("name", NAMES)
def test_saved(name):
    """What is saved belongs to the file that is there, and its verdicts to its numbers."""
    saved, module = _saved(name), harness.load(name)
    assert (saved["name"], saved["paper"]) == (name, module.PAPER)
    assert saved["statement"] == harness.text(module)[0]
    assert (harness.RESULTS / f"{name}.png").is_file()
    measures = []
    for kept in saved["measures"]:
        estimate = harness.Estimate(*(kept[key] for key in harness.Estimate._fields))
        assert estimate.low <= estimate.value <= estimate.high
        measures.append(harness.Measure(kept["what"], estimate, kept["holds"], kept["threshold"]))
        assert measures[-1].verdict == kept["verdict"]
    claim = harness.Claim(measures, harness.Plot("x", "y", []))
    assert claim.verdict == saved["verdict"]


def test_every_result_has_its_claim():
    saved = {path.name for path in harness.RESULTS.iterdir()}
    assert saved == {f"{name}.{ending}" for name in NAMES for ending in ("json", "png")}


def test_every_family_has_a_claim():
    """A claim belongs to the methods of its name, by key or by preset."""
    claimed = {method.kind for method in CATALOG if {method.key, method.preset} & set(NAMES)}
    assert claimed == {method.kind for method in CATALOG}


def _measure(low, value, high, **side):
    ((holds, threshold),) = side.items()
    return harness.Measure("x", harness.Estimate(value, low, high, "normal"), holds, threshold)


def test_verdicts():
    assert _measure(1.1, 2, 3, above=1).verdict == harness.HOLDS
    assert _measure(0.9, 2, 3, above=1).verdict == harness.UNDECIDED
    assert _measure(0.0, 0.5, 1, above=1).verdict == harness.FAILS
    assert _measure(0.0, 0.5, 0.9, below=1).verdict == harness.HOLDS
    assert _measure(0.0, 0.5, 1, below=1).verdict == harness.UNDECIDED
    assert _measure(1.0, 2, 3, below=1).verdict == harness.FAILS
    yes, no, unsure = (_measure(v - 0.5, v, v + 0.5, above=1) for v in (2, 0, 1))
    plot = harness.Plot("x", "y", [])
    for measures, verdict in (
        ([yes, yes], harness.HOLDS),
        ([yes, no], harness.PARTLY),
        ([yes, unsure], harness.UNDECIDED),
        ([no, unsure], harness.FAILS),
        ([unsure], harness.UNDECIDED),
    ):
        assert harness.Claim(measures, plot).verdict == verdict


@for_each("name", NAMES)
def test_no_saved_learning_rate_is_at_an_end_of_its_grid(name):
    module = harness.load(name)
    grid = getattr(module, "RATES", _trained.RATES if hasattr(module, "_trained") else None)
    facts = _saved(name)["facts"]
    rates = [v for what, v in facts.items() if what.startswith(("learning rate", "best learning"))]
    assert bool(rates) or not hasattr(module, "_trained")
    for rate in rates:
        assert 1.001 * min(grid) < rate < 0.999 * max(grid), facts


def _curve(accuracy, batch):
    accuracy = np.asarray(accuracy)
    count = np.arange(1, len(accuracy) + 1)
    return _bandit.Curve(accuracy, batch * count, np.ones(len(count)), np.zeros(1), np.ones(1))


def test_a_seed_that_never_reaches_the_accuracy_is_not_the_cheapest():
    never, plain = _curve([0.1] * 100, 128), _curve(np.linspace(0.1, 0.9, 100), 256)
    found = {"a": [never] * 6, "b": [plain] * 6}
    assert _trained.cost_over(found, "a", "b", "sampled").value == pytest.approx(100 / 76)
    assert _trained.cost_over(found, "a", "b", "updates").value == pytest.approx(100 / 76)
    (count,) = _trained.reaching(found, "a", "b").values()
    assert count == 0
    # With more rollouts of its own than the other has, all of them.
    found["a"] = [_curve([0.1] * 300, 128)] * 6
    assert _trained.cost_over(found, "a", "b", "sampled").value == pytest.approx(150 / 76)
    found["a"] = [_curve(np.linspace(0.1, 0.9, 100), 128)] * 6
    assert _trained.cost_over(found, "a", "b", "sampled").value == pytest.approx(0.5)
    (count,) = _trained.reaching(found, "a", "b").values()
    assert count == 6


def test_what_is_measured_after_the_updates_leaves_out_those_that_follow():
    curve = _curve([0.5] * _trained.STEPS + [0.9], 2)
    curve = curve._replace(informative=np.append(np.ones(_trained.STEPS), 0.0))
    assert _trained.last(curve) == 0.5 and _trained.informative(curve) == 1.0
    assert _trained.facts({"a": [curve]})["rollouts, a"] == 2 * _trained.STEPS


def test_a_training_goes_on_until_it_has_sampled_enough():
    batch = _bandit.GROUPS * _bandit.SIZE
    curves = [_bandit.train(None, seed=0, steps=2, rollouts=n) for n in (0, 2 * batch + 1)]
    assert [curve.sampled.tolist() for curve in curves] == [
        [batch, 2 * batch],
        [batch, 2 * batch, 3 * batch],
    ]
    np.testing.assert_array_equal(curves[1].accuracy[:2], curves[0].accuracy)


def test_intervals():
    generator = np.random.default_rng(0)
    values = generator.normal(3.0, 2.0, 400)
    mean = harness.mean(values, "values")
    half = 1.965927 * np.std(values, ddof=1) / 20
    assert mean.value == pytest.approx(values.mean())
    assert (mean.low, mean.high) == pytest.approx((mean.value - half, mean.value + half))
    drawn = harness.bootstrap(np.mean, values, what="values")
    assert (drawn.low, drawn.high) == pytest.approx((mean.low, mean.high), abs=0.03)
    none = harness.share(0, 1000, "trials")
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.003827, abs=1e-6)
    assert harness.exact(2.0)[:3] == (2.0, 2.0, 2.0)


def test_a_grid_is_chosen_on_a_third_of_the_seeds_and_may_not_end_there():
    # The last four seeds would choose otherwise; they are those that count.
    scores = np.array([[0, 0, 9, 9, 9, 9], [2, 2, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    assert _chosen.best("rate", (0.1, 1.0, 10.0), scores) == 1
    assert list(range(6))[_chosen.counted(6)] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="rate: the best of .* is 10, at its end"):
        _chosen.best("rate", (0.1, 1.0, 10.0), scores[[0, 2, 1]])
    assert _chosen.best("rate", (0.1, 1.0, 10.0), scores[[0, 2, 1]], quick=True) == 2
    # Runs that diverge are not the best.
    assert _chosen.highest("rate", (0.1, 1.0, 10.0), [0.0, 1.0, math.nan]) == 1


def test_intervals_cover_in_95_of_100_cases():
    """With few values too, where those of a normal distribution cover in 86 (four) or 89 (six)."""
    generator = np.random.default_rng(1)
    cases = [(generator.exponential(1.0, (400, 100)) - 1.0, 0.90, 0.98)]
    cases += [(generator.normal(size=(4000, count)), 0.94, 0.96) for count in (4, 6)]
    for rows, low, high in cases:
        found = [harness.mean(row, "values") for row in rows]
        assert low < np.mean([each.low <= 0.0 <= each.high for each in found]) < high


@for_each("count", [6, 8])
@for_each("kind", ["log-normal", "counts"])
def test_intervals_of_ratios_cover_in_95_of_100_cases(count, kind):
    """With few units too, where the percentiles of a bootstrap cover in 86 (six) or 88 (eight)."""
    generator = np.random.default_rng(2)
    if kind == "counts":
        pairs, truth = generator.poisson([[[30.0]], [[40.0]]], (2, 4000, count)), 0.75
    else:
        pairs, truth = np.exp(0.2 * generator.normal(size=(2, 4000, count))), 1.0
    found = [harness.ratio(x, y, what="values") for x, y in zip(*pairs, strict=True)]
    assert 0.93 < np.mean([each.low <= truth <= each.high for each in found]) < 0.97


def test_a_difference_of_shares():
    # Newcombe (1998), Statistics in Medicine 17, 873-890, table II, method 10: 9/10 less 3/10.
    found = harness.share_difference(9, 3, 10, "trials")
    assert found[:3] == pytest.approx((0.6, 0.1705, 0.8090), abs=1e-4)
    none = harness.share_difference(0, 0, 2000, "trials")
    assert none.value == 0.0 and none.high == -none.low == pytest.approx(0.001917, abs=1e-6)


def test_a_ratio_of_means():
    rows = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 5.0]])
    estimate = harness.ratio(*rows, what="seeds")
    assert estimate.value == pytest.approx(0.6)
    assert estimate.low * estimate.high == pytest.approx(0.36)
    # Columns of a unit are averaged.
    wide = harness.ratio(np.stack([rows[0] - 0.5, rows[0] + 0.5], 1), rows[1], what="seeds")
    assert wide[:3] == pytest.approx(estimate[:3])
    none = harness.ratio(2 * rows[1], rows[1], what="seeds")
    assert none[:3] == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="a ratio needs means above 0"):
        harness.ratio([0.0, 0.0, 1.0], rows[1], what="seeds")


@pytest.mark.parametrize("kind", ["line", "bars"])
def test_a_run_is_saved_drawn_and_listed(tmp_path, kind):
    name = NAMES[0]
    x = ["a", "b"] if kind == "bars" else [1.0, 2.0]
    series = harness.Series("s", x, np.array([1.0, 2.0]), [0.5, 1.5], [1.5, 2.5])
    plot = harness.Plot("x", "y", [series], kind=kind, log="y", line=1.0)
    measure = _measure(1.25, 1.23456789, 2.0, above=1)
    claim = harness.Claim([measure], plot, {"a fact": np.float32(0.5)})
    result = harness.record(name, claim, seed=3, seconds=1.23, commit="abc")
    harness.save(result, tmp_path)
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert kept == json.loads(json.dumps(result))
    assert kept["measures"][0]["value"] == 1.2346
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = table.generate(tmp_path)
    assert f"| [{name}](#{name}) |" in page
    assert "| x | 1.23 | 1.25 to 2 | above 1 | holds (1 of 1) |" in page
    assert "a fact: 0.5" in page and "Seed 3, 1.2 s on" in page and "commit abc" in page


def test_the_page_says_how_long_all_claims_took(tmp_path, monkeypatch):
    folder = tmp_path / "claims"
    folder.mkdir()
    monkeypatch.setattr(harness, "RESULTS", folder)
    assert "The times below add up to 0 minutes." in table.generate(folder)
    table.save_whole(60, jobs=2, seconds=1190.5, commit="abc")
    assert "All 60, 2 at a time, took 20 minutes on cpu-" in table.generate(folder)


@pytest.mark.slow
def test_claims_run_side_by_side_as_they_do_alone(capsys):
    lines = []
    for jobs in ("2", "1"):
        command.main(["--quick", "--jobs", jobs, "gdpo", "ipo"])
        shown = capsys.readouterr()
        told = (*shown.out.splitlines(), *shown.err.splitlines())
        lines.append({line for line in told if not line.endswith(" s")})  # how long each took
    assert lines[0] == lines[1] and len(lines[0]) > 4


def test_a_claim_that_fails_leaves_the_others(capsys, monkeypatch):
    result = harness.result

    def fails_once(name, **options):
        # jax has errors that cannot be sent to another process.
        return jax.jit(bool)(True) if name == "ipo" else result(name, **options)

    monkeypatch.setattr(harness, "result", fails_once)
    with pytest.raises(SystemExit, match="failed: ipo"):
        command.main(["--quick", "--jobs", "1", "ipo", "gdpo"])
    shown = capsys.readouterr()
    assert list(json.loads(shown.out)["verdicts"]) == ["gdpo"]
    assert "TracerBoolConversionError" in shown.err


def test_an_unknown_claim_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["no_such_claim"])
    assert "no claim no_such_claim; there are" in capsys.readouterr().err


def test_a_measure_must_be_finite():
    with pytest.raises(ValueError, match="x: a measure must be finite"):
        _measure(0.0, math.nan, 1.0, above=1)
