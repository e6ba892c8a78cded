"""`jaxrl-llm merge`: several models as one folder that loads."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each
from test_cli import config_file, one_sentence, ran, refused, run
from tiny_run import model

from jaxrl_llm import models
from jaxrl_llm.cli import UsageError, merge
from jaxrl_llm.models import load_model, save_safetensors
from jaxrl_llm.recipes import catalog
from jaxrl_llm.testing import ByteTokenizer

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three models: a base and two that moved away from it. Tokenizers are left out."""
    root = tmp_path_factory.mktemp("merge")
    module, base, _ = model()
    for seed, name in enumerate(("base", "a", "b")):
        noise = 0.0 if name == "base" else 0.1
        keys = iter(jax.random.split(jax.random.key(seed), 64))
        params = jax.tree.map(
            lambda x, keys=keys, noise=noise: x + noise * jax.random.normal(next(keys), x.shape),
            base,
        )
        save_safetensors(params, root / name, config=module.config)
    return root


@pytest.fixture(autouse=True)
def no_tokenizers(monkeypatch):
    from jaxrl_llm import data

    monkeypatch.setattr(data, "load_tokenizer", lambda name: None)


def loaded(*paths):
    return [load_model(path)[1] for path in paths]


def assert_same(found, expected, **options):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), found, expected)


CASES = {
    "average --weights 0.25 0.75": lambda a, b, c: models.average_params([a, b], [0.25, 0.75]),
    "extrapolate --alpha 0.5": lambda a, b, c: models.extrapolate(a, b, alpha=0.5),
    "slerp": lambda a, b, c: models.slerp(a, b, t=0.5),
    "task_arithmetic --scale 0.5 --weights 1 2": lambda a, b, c: models.task_arithmetic(
        c, [models.task_vector(x, c) for x in (a, b)], scale=(0.5, 1.0)
    ),
    "ties --density 0.5": lambda a, b, c: models.ties_merge(
        c, [models.task_vector(x, c) for x in (a, b)], density=0.5
    ),
    "dare --drop 0.0": lambda a, b, c: models.task_arithmetic(
        c, [models.task_vector(x, c) for x in (a, b)]
    ),
    "model_stock": lambda a, b, c: models.model_stock(c, [a, b]),
    "iso_c --scale 0.5": lambda a, b, c: models.iso_c(
        c, [models.task_vector(x, c) for x in (a, b)], scale=0.5
    ),
}


@pytest.mark.slow
def test_every_method_is_its_function_and_the_folder_loads(capsys, folders, tmp_path):
    a, b, base = loaded(folders / "a", folders / "b", folders / "base")
    for number, (words, function) in enumerate(CASES.items()):
        method, *rest = words.split()
        if "base" in merge._READS[method]:
            rest += ["--base", folders / "base"]
        out = tmp_path / f"out{number}"
        text = ran(
            capsys, "merge", folders / "a", folders / "b", "--out", out, "--method", method, *rest
        )
        assert text.startswith(f"The {method} of {folders / 'a'}, {folders / 'b'} is in {out}")
        assert_same(loaded(out)[0], function(a, b, base), rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"out{n}" for n in range(len(CASES))
    )


@pytest.mark.slow
def test_a_run_is_merged_with_a_model_in_bfloat16(capsys, folders, tmp_path):
    path = config_file(tmp_path, "lora=__import__('jaxrl_llm').train.LoRAConfig(rank=2)")
    assert run(capsys, "train", path, "--run-dir", tmp_path / "run", "--steps", 1)[0] == 0
    assert run(capsys, "export", tmp_path / "run", tmp_path / "trained")[0] == 0
    words = ["--out", tmp_path / "out", "--dtype", "bfloat16"]
    ran(capsys, "merge", tmp_path / "run", folders / "a", *words)
    expected = models.average_params(loaded(tmp_path / "trained", folders / "a"))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), expected)
    assert_same(loaded(tmp_path / "out")[0], half)


@pytest.mark.slow
def test_checkpoints_of_a_run_are_weighed_by_loss(capsys, tmp_path):
    path = config_file(tmp_path, "checkpoint=dataclasses.replace(config.checkpoint, every=1)")
    run_dir = tmp_path / "run"
    assert run(capsys, "train", path, "--run-dir", run_dir)[0] == 0
    each = []
    for step in (1, 2):
        folder = tmp_path / f"step{step}"
        assert run(capsys, "export", run_dir, folder, "--step", step)[0] == 0
        each += loaded(folder)
    names = [f"{run_dir}@{step}" for step in (1, 2)]
    rows = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    for scale, words in ((-1.0, "needs a loss above 0 at each step"), (1.0, "")):
        lines = [json.dumps({"step": s, "loss": scale * abs(losses[s]) + scale}) for s in losses]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines))
        by_loss = ["--by", "loss", "--power", 2]
        code, _, err = run(capsys, "merge", *names, "--out", tmp_path / "low", *by_loss)
        assert (code == 2 and words in err) if words else code == 0
    (run_dir / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": s, "loss": None}) for s in losses)
    )
    code, _, err = run(capsys, "merge", *names, "--out", tmp_path / "none", "--by", "loss")
    assert code == 2 and "needs a loss above 0 at each step" in err
    inverse = np.array([(1 + abs(losses[s])) ** -2.0 for s in (1, 2)])
    expected = models.average_params(each, [float(x) for x in inverse / inverse.sum()])
    assert_same(loaded(tmp_path / "low")[0], expected, rtol=1e-5)


@pytest.fixture
def with_tokenizers(monkeypatch):
    from jaxrl_llm import data

    monkeypatch.setattr(data, "load_tokenizer", lambda name: ByteTokenizer())


def by_commands(capsys, key, names, *more):
    """Runs the commands of a row of the catalog, each hundred of steps as one."""
    for command in catalog.select(name=key)[0].commands:
        words = [re.sub(r"(\d)00\b", r"\1", word) for word in command.split()[1:]]
        words = [re.sub(r"^[A-Z_]+", lambda m: str(names[m[0]]), word) for word in words]
        ran(capsys, *words, *(more if words[0] == "train" else ()))


def numbers_of(run_dir):
    rows = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:config. the critic of 'ppo_max' trains alone")
def test_salsa_is_ppo_towards_a_soup(capsys, folders, tmp_path, with_tokenizers):
    """Away from which the policy begins."""
    names = {"SFT_A": folders / "a", "SFT_B": folders / "b", "SOUP": tmp_path / "soup"}
    names["CONFIG"] = config_file(tmp_path, "epochs=1, minibatches=1")
    by_commands(capsys, "salsa_soup_ref", names, "--run-dir", tmp_path / "run", "--steps", 1)
    (row,) = numbers_of(tmp_path / "run")
    assert abs(row["ref_kl"]) > 1e-6
    expected = models.average_params(loaded(folders / "a", folders / "b"))
    assert_same(loaded(tmp_path / "soup")[0], expected, rtol=1e-6)


@pytest.mark.slow
def test_checkpoints_are_averaged_and_models_merged_by_the_commands_of_the_catalog(
    capsys, folders, tmp_path, with_tokenizers
):
    names = {"CONFIG": config_file(tmp_path), "RUN": tmp_path / "run"}
    by_commands(capsys, "mwa", names | {"MEAN": tmp_path / "mean"}, "--steps", 3)
    each = []
    for step in (1, 2, 3):
        folder = tmp_path / f"step{step}"
        assert run(capsys, "export", tmp_path / "run", folder, "--step", step)[0] == 0
        each += loaded(folder)
    expected = models.average_params(each, [1 / 6, 1 / 3, 1 / 2])
    assert_same(loaded(tmp_path / "mean")[0], expected, rtol=1e-5, atol=1e-7)
    # A run that begins with the merged model.
    names |= {"RUN_A": folders / "a", "RUN_B": folders / "b", "BASE": folders / "base"}
    names |= {"MERGED": tmp_path / "merged"}
    more = ("--run-dir", tmp_path / "next", "--steps", 1)
    by_commands(capsys, "merge", names, *more, "--optimizer.learning-rate", "1e-12")
    assert run(capsys, "export", tmp_path / "next", tmp_path / "trained")[0] == 0
    assert_same(loaded(tmp_path / "trained")[0], loaded(tmp_path / "merged")[0], atol=1e-6)


@for_each(
    ("words", "message"),
    [
        ([], "--method average needs at least 2 models; got 1"),
        (["--method", "slerp"], "--method slerp needs two models; got 1"),
        (["--method", "ties"], "--method ties needs --base"),
        (["--t", "0.5"], "--t has no effect with --method average"),
        (["b", "--power", "2"], "--power has no effect without --by"),
        (["b", "--by", "step"], "--by needs checkpoints, RUN@STEP"),
        (["--method", "iso_c", "--base", "x", "--weights", "1"], "--weights has no effect"),
        (["--method", "ties", "--base", "x", "--weights", "1", "2"], "1 models need 1 --weights"),
    ],
)
def test_wrong_usage_is_one_sentence(capsys, folders, tmp_path, words, message):
    code, _, err = run(capsys, "merge", folders / "a", *words, "--out", tmp_path / "new")
    assert code == 2 and message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and not (tmp_path / "new").exists()


def test_what_cannot_be_merged_is_one_sentence(capsys, folders, tmp_path):
    pair, new = [folders / "a", folders / "b"], tmp_path / "new"
    refused(
        capsys, ["merge", *pair, "--out", tmp_path], "exists already; name a folder that does not"
    )
    # Before any model is loaded.
    inside = folders / "a" / "config.json" / "x"
    refused(capsys, f"merge nowhere no --out {inside}", "x' cannot be created: not a directory")
    code, _, err = run(capsys, "merge", *pair, "--out", new, "--weights", "0.5", "0.6")
    assert code == 2
    one_sentence(err, "average_params: the weights must add up to 1; got 1.1")
    module, params, _ = model()
    other = dataclasses.replace(module.config, rope_theta=5.0)
    save_safetensors(params, tmp_path / "c", config=other)
    code, _, err = run(capsys, "merge", folders / "a", tmp_path / "c", "--out", new)
    assert code == 2
    one_sentence(err, "are of different architectures: rope_theta is", "and 5.0")
    assert not new.exists()


def test_models_of_other_lengths_are_merged_but_not_of_other_windows(capsys, folders, tmp_path):
    """Qwen's base and instruct models differ in their context; the first one's is written."""
    module, params, _ = model()
    longer = dataclasses.replace(module.config, max_length=2 * module.config.max_length)
    save_safetensors(params, tmp_path / "longer", config=longer)
    ran(capsys, "merge", tmp_path / "longer", folders / "a", "--out", tmp_path / "out")
    assert load_model(tmp_path / "out")[0].config == longer
    window = dataclasses.replace(module.config, layers=(models.LayerKind(window=8),))
    with pytest.raises(UsageError, match=r"architectures: layers\[0\] is .*window=8.*window=None"):
        merge._check_config("a", window, "b", module.config)
