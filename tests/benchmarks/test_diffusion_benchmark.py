"""The benchmark of diffusion policies: its worlds, its verdicts on estimators, and its page."""

import json

import numpy as np
import pytest
from rows import for_each

from benchmarks import (
    denoise_speed,
    diffusion,
    diffusion_page,
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


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result["device"])
def test_the_page_shows_a_picture_of_each_result(result):
    name = diffusion_page.picture(result)
    assert f"](../benchmarks/results/{name})" in diffusion_page.measured()
    assert (harness.RESULTS / name).is_file(), "run python -m benchmarks.diffusion_page"


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
