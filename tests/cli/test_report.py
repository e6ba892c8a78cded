"""`jaxrl-llm report`: the page of a run, on demand."""

import json

from test_cli import config_file, one_sentence, refused, run

ROW = {"reward": 0.5, "seconds_total": 1.0, "seconds_train": 1.0}


def test_a_report_on_demand(capsys, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [json.dumps({"step": n, **ROW}) for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "rew']))
    code, out, err = run(capsys, "report", folder)
    told = f"{str(folder / 'metrics.jsonl')!r} is damaged at line 3, which is left out."
    assert (code, out, err) == (0, f"{folder / 'report.html'}\n", f"{told}\n")
    page = (folder / "report.html").read_text()
    assert "2 steps; how it ended is not known." in page and "damaged at line 3" in page
    code, out, _ = run(capsys, "report", folder, "--out", tmp_path / "page.html")
    assert code == 0 and out == f"{tmp_path / 'page.html'}\n" and (tmp_path / "page.html").is_file()


def test_what_is_no_run_is_one_sentence(capsys, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, _, err = run(capsys, "report", folder)
        assert code == 2
        one_sentence(err, f"{str(folder)!r} is not the folder of a run: no metrics.jsonl in it.")
    (tmp_path / "metrics.jsonl").write_text("")
    code, _, err = run(capsys, "report", tmp_path, "--out", tmp_path / "nowhere" / "page.html")
    assert code == 1
    one_sentence(err, "page.html", "No such file or directory")


def test_reports_of_runs_that_failed_and_that_were_configured_by_options(capsys, tmp_path):
    path, folder = config_file(tmp_path, "reward=bad"), tmp_path / "run"
    code, _, err = run(capsys, "train", path, "--run-dir", folder, "--report.sinks", "nowhere")
    assert code == 2 and "sinks must be one of 'tensorboard', 'trackio', 'wandb'" in " ".join(
        err.replace("│", " ").split()
    )
    options = ["--report.sinks", "tensorboard", "--report.peak-flops", "1e12"]
    refused(capsys, ["train", path, "--run-dir", folder, *options], "gave None", code=1)
    assert list((folder / "tensorboard").iterdir())
    page = (folder / "report.html").read_text()
    assert "Failed after 0 of 2 steps: RewardError: " in page and "No step is finished" in page
    assert "report.peak_flops" in page


def test_a_page_goes_through_links_and_to_devices(capsys, tmp_path):
    folder, page = tmp_path / "run", tmp_path / "page.html"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **ROW}) + "\n")
    link, full = tmp_path / "link.html", tmp_path / "full"
    link.symlink_to(page)
    full.symlink_to("/dev/full")
    code, out, err = run(capsys, "report", folder, "--out", link)
    assert (code, out) == (0, f"{link}\n") and link.is_symlink(), err
    assert page.read_text().startswith("<!doctype html>")
    code, out, err = run(capsys, "report", folder, "--out", full)
    assert code == 1 and out == "" and full.is_symlink()
    one_sentence(err, "No space left on device", str(full))


def test_a_page_on_standard_output_is_all_of_it(capfd, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **ROW}) + "\n")
    code, out, err = run(capfd, "report", tmp_path, "--out", "/dev/stdout")
    assert code == 0 and out.startswith("<!doctype html>") and out.endswith("</html>\n"), err
