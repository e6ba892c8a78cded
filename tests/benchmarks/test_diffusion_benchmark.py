"""The benchmark of diffusion policies: its worlds, its verdicts on estimators, and its page."""

import json

import numpy as np
import pytest
from rows import for_each

from benchmarks import (
    denoise_speed,
    diffusion,
    diffusion_page,
    diffusion_training,
    flow_training,
    harness,
)

RESULTS = [json.loads(p.read_text()) for p in sorted(harness.RESULTS.glob("diffusion-*.json"))]
WORLDS = [pytest.param(r["worlds"][w], id=w) for r in RESULTS for w in diffusion.WORLDS]


def test_a_tiny_run(capsys):
    diffusion.main(["--tiny"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["worlds"]) == list(diffusion.WORLDS)
    for world in result["worlds"].values():
        exact, rows = world["exact"], world["estimators"]
        assert exact["elbo"] <= exact["log_likelihood"] + 1e-4
        assert rows["mean field"]["1"]["std"] == 0
        row = rows["ELBO, exact counts"]["2"]
        assert abs(row["elbo_bias"]) < 5 * row["noise"] and row["std"] > 0
        variance = row["error"] ** 2
        assert variance >= row["std"] ** 2 - 1e-3
    consistent = result["worlds"]["consistent"]["exact"]
    np.testing.assert_allclose(consistent["elbo"], consistent["log_likelihood"], atol=1e-4)


def test_measured_part_is_current():
    assert diffusion_page.main(["--check"]) == 0, "run python -m benchmarks.diffusion_page"


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result["device"])
def test_the_page_shows_a_picture_of_each_result(result, tmp_path):
    name = diffusion_page.picture(result)
    assert f"](../benchmarks/results/{name})" in diffusion_page.measured()
    assert (harness.RESULTS / name).is_file(), "run python -m benchmarks.diffusion_page"
    diffusion_page.draw(result, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@for_each("world", WORLDS)
def test_verdicts_of_the_page(world):
    def value(name, forwards, column):
        return world["estimators"][name][str(forwards)][column]

    for name, rows in world["estimators"].items():
        for forwards, row in rows.items():
            if name.startswith("ELBO") and (name, forwards) != ("ELBO, quadrature", "1"):
                # Levels below 1e-3 are cut off, and two levels are less than half of six.
                assert abs(row["elbo_bias"]) < 4 * row["noise"] + 0.1, (name, forwards)
            if name != "mean field":
                assert row["ratio_apart"] > 4 * row["ratio_error"], (name, forwards)
    for forwards in (2, 4, 8):
        stds = [
            value(f"ELBO, {form}", forwards, "std")
            for form in ("stratified counts", "exact counts", "quadrature", "independent levels")
        ]
        assert stds == sorted(stds)
        assert value("EUBO, beta L", forwards, "bias") > value("EUBO, beta 1.5", forwards, "bias")
    biases = [value("EUBO, beta L", n, "bias") for n in (2, 4, 8)]
    assert biases == sorted(biases) and biases[-1] > 0
    # A ratio is worth something from many forwards alone.
    size = world["exact"]["log_ratio_rms"]
    assert value("mean field", 1, "ratio_error") > size
    assert value("ELBO, stratified counts", 8, "ratio_error") > size


def test_nothing_was_measured_yet(tmp_path):
    page = diffusion_page
    for part in (page.measured, page.trained, page.speed, page.flows):
        assert part(tmp_path) == "Nothing yet."


def test_the_page_shows_the_flow_runs_over_seeds(tmp_path):
    runs = [
        {"method": m, "steps": 2, "questions": 4, "sampled_before": 0.2, "sampled_after": x}
        for m in flow_training.METHODS
        for x in (0.5, 0.7, 0.9)
    ]
    work = {"config": "configs/flow.py"}
    result = {"name": "flow_training", "workload": work, "device": "cpu", "runs": runs}
    (tmp_path / "flow_training-cpu.json").write_text(json.dumps(result))
    page = diffusion_page.flows(tmp_path)
    assert "| `sol_rl_flow` | 2 | 0.200 [0.200, 0.200] | 0.700 [0.500, 0.900] |" in page
    assert "the mean of 3 seeds" in page


def test_the_page_shows_the_runs_and_their_curves(tmp_path):
    """What a folder has is not trained again."""
    for name in ("supervised", *diffusion_training.METHODS):
        run = {
            "name": name,
            "steps": 2,
            "minutes": 1.0,
            "questions": 7,
            "curve": [[0, 0.1], [2, 1]],
        }
        for way in ("greedy", "sampled"):
            run |= {f"{way}_after": 0.5, f"{way}_after_interval": [0.4, 0.6]}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    runs = [diffusion_training.measure(tmp_path, run.stem, "", "") for run in tmp_path.iterdir()]
    work = {"config": "configs/diffusion.py"}
    result = {"name": "diffusion_training", "workload": work, "device": "cpu", "runs": runs}
    (tmp_path / "diffusion_training-cpu.json").write_text(json.dumps(result))
    for run in runs:
        (tmp_path / f"{run['name']}.json").unlink()
    page = diffusion_page.trained(tmp_path)
    assert "| then `espo` | 2 | 1.0 | 0.500 [0.400, 0.600] | 0.500 [0.400, 0.600] |" in page
    assert diffusion_page.curves(result) in page
    diffusion_page.draw_curves(result, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_speed_of_a_tiny_sampler(capfd, tmp_path):
    denoise_speed.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [case["block"] for case in result["cases"]] == [8, 2]
    assert all(case["share_of_products"] > 0 for case in result["cases"])
    (tmp_path / "denoise_speed-cpu.json").write_text(json.dumps(result))
    assert "| 8 | " in diffusion_page.speed(tmp_path)
    with pytest.raises(SystemExit, match="no peers"):
        denoise_speed.main(["--tiny", "--peer-python", "python"])
