"""Evolution beside policy gradient: the figures that finished runs leave."""

import json

import pytest

from benchmarks import es_quickstart


def run(folder, held_out, *, evolves, accuracy, overrides=()):
    """A run of four steps of ten seconds and 1,000 tokens, evaluated at every second one."""
    step = {"loss": 0.0, "tokens": 1000.0, "seconds_evaluate": 5.0}
    step |= {"seconds_wait": 6.0, "seconds_score": 1.0, "seconds_train": 3.0}
    step |= {"member_std": 0.1} if evolves else {}
    rows = [held_out(0, *accuracy[0])]
    for i in range(1, 5):
        rows.append({"step": i, **step})
        if i % 2 == 0:
            rows.append(held_out(i, *accuracy[i // 2]))
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.json").write_text(json.dumps({"overrides": list(overrides)}))
    return folder


@pytest.fixture
def folders(tmp_path, held_out):
    rising = [(0.4, 0.1), (0.6, 0.1), (0.8, 0.2)]
    flat = [(0.4, 0.1), (0.5, 0.1), (0.5, 0.1)]
    named = ["--run-dir", "x", "--seed", "3"]
    return [
        run(tmp_path / "a", held_out, evolves=True, accuracy=rising, overrides=named),
        run(tmp_path / "b", held_out, evolves=False, accuracy=flat),
    ]


def test_figures_of_a_run(folders):
    first, second = map(es_quickstart.measured, folders)
    assert (first["method"], first["seed"], first["steps"]) == ("evolution", 3, 4)
    assert (second["method"], second["seed"]) == ("policy gradient", 0)
    assert [each["tokens"] for each in first["evaluations"]] == [0, 2000, 4000]
    assert [each["seconds"] for each in first["evaluations"]] == [0, 20, 40]
    assert first["reached"] == first["evaluations"][1] and second["reached"] is None
    assert first["gain"] == {"greedy": 0.4, "sampled": 0.1}
    assert first["gain_per_10k_tokens"] == {"greedy": 1.0, "sampled": 0.25}
    assert first["gain_per_minute"] == {"greedy": 0.6, "sampled": 0.15}


def test_trials_are_settings_and_where_they_came(folders, capsys):
    """As far as the last evaluation; a run without a sigma is none."""
    recipe = "EvolutionRecipe(name='eggroll', sigma=0.003, paper='')"
    settings = {"optimizer.learning_rate": 0.5, "optimizer.decay_steps": 75}
    for folder, kind in zip(folders, (recipe, "Recipe(name='grpo')"), strict=True):
        start = {"event": "start", "settings": {**settings, "recipe": kind}}
        (folder / "sessions.jsonl").write_text(json.dumps(start) + "\n{}\n")
    es_quickstart.main([str(folders[1]), "--trials", str(folders[0])])
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]
    assert found == {
        "seed": 3,
        "sigma": 0.003,
        "learning_rate": 0.5,
        "decay_steps": 75,
        "step": 4,
        "greedy": [0.4, 0.8],
        "sampled": [0.1, 0.2],
    }
    with pytest.raises(ValueError, match="its recipe has no sigma"):
        es_quickstart.trial(folders[1])


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        es_quickstart.main([str(tmp_path)])
    assert "has no metrics.jsonl" in capsys.readouterr().err
