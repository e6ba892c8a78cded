"""Methods by name on the command line: the catalog, and runs of presets that need more."""

import dataclasses
import json
import re

import pytest
from rows import for_each
from test_cli import ROOT, config_file, one_sentence, run

import jaxrl_llm as jr
from jaxrl_llm.cli import methods, options
from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS, catalog
from jaxrl_llm.train import OptimizerConfig

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_methods_as_json_say_all_there_is_to_know(capsys):
    code, out, _ = run(capsys, "methods", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {row["key"] for row in rows} == {method.key for method in catalog.CATALOG}
    presets = {*PRESETS, *EVOLUTION_PRESETS}
    assert {row["preset"] for row in rows} - {None} == presets
    for row in rows:
        assert {"key", "title", "arxiv", "kind", "functions", "preset"} <= set(row), row
        assert {"verified_against", "confidence", "confirmed", "whole", "missing"} <= set(row), row
        assert row["functions"] and all(re.fullmatch(r"\w+\.\w+", f) for f in row["functions"])
        assert re.fullmatch(r"(\d{4}\.\d{5})?", row["arxiv"]), row
        assert row["verified_against"] and row["title"], row
        assert row["confidence"] in ("CODE", "PAPER", "NOTES", "ABSTRACT"), row
    # What the issue of a method is about is found by its short name.
    keys = {row["key"]: row for row in rows}
    assert keys["gdpo"]["preset"] == "gdpo" and keys["gdpo"]["arxiv"] == "2601.05242"
    assert keys["gdpo"]["whole"] and not keys["gdpo"]["missing"]
    peers = {row["peer"]: row["function"] for row in keys["d3s"]["confirmed"]}
    assert peers == {"TRL 1.16.0": "curation.top_fraction_token_mask"}
    code, out, _ = run(capsys, "methods")
    assert len(out.splitlines()) == len(rows) + 1


def test_methods_of_a_kind_or_a_name(capsys):
    code, out, _ = run(capsys, "methods", "--kind", "correction")
    kinds = {line.split()[1] for line in out.splitlines()[1:]}
    assert code == 0 and kinds == {"correction"} and "rollout_correction" in out
    code, out, _ = run(capsys, "methods", "passk", "--json")
    assert code == 0 and {r["key"] for r in json.loads(out)} == {"grpo_passk", "passk_training"}
    code, _, err = run(capsys, "methods", "gspoo")
    assert code == 2 and "Did you mean 'gspo'" in err and "Traceback" not in err
    code, _, err = run(capsys, "methods", "--kind", "surogate")
    assert code == 2 and "Did you mean 'surrogate'" in err


def test_a_method_is_found_by_what_a_peer_calls_it(capsys):
    code, out, _ = run(capsys, "methods", "--like", "TRL:loss_type=dapo")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "TRL 1.16.0: GRPOConfig.loss_type=dapo"
    assert lines[1].startswith("  here     jr.recipes.grpo(") and max(map(len, lines)) <= 100
    # TRL's name is not the method of that name.
    assert "its recipe" in lines and not any(line.startswith("dapo_clip: ") for line in lines)
    assert any(line.startswith("grpo: ") for line in lines)
    code, out, _ = run(capsys, "methods", "--like", "cispo")
    assert code == 0 and out.count("\n  differs  ") >= 3
    assert out.count("cispo: Clipped importance-weighted policy gradient (MiniMax-M1)") == 1
    code, out, _ = run(capsys, "methods", "--like", "verl:loss_agg_mode", "--json")
    assert code == 0 and "jr.aggregate.token_mean" in {row["ours"] for row in json.loads(out)}
    code, _, err = run(capsys, "methods", "--like", "TRL:loss_type=dappo")
    assert code == 2 and "Did you mean loss_type=dapo" in err
    one_sentence(err)
    for words in (("gspo",), ("--kind", "surrogate")):
        code, _, err = run(capsys, "methods", *words, "--like", "TRL")
        assert code == 2 and "no effect" in err


def test_one_method_whole(capsys):
    code, out, _ = run(capsys, "methods", "gspo")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 100
    assert lines[0] == "gspo: Group sequence policy optimization"
    assert "paper       https://arxiv.org/abs/2507.18071" in lines and "trains      whole" in lines
    assert "  jr.recipes.gspo(*, eps_low=0.0003, eps_high=0.0004)" in lines
    assert "  surrogate = gspo(eps_high=0.0004, eps_low=0.0003)" in lines
    assert "  verl 0.9.1: surrogates.gspo, eps_high=0.04; eps_low=0.03" in lines
    assert "  own checks: float64 NumPy, worked numbers" in lines
    in_part = dataclasses.replace(catalog.select(name="gspo")[0], missing="a teacher")
    assert "trains      without a teacher" in methods.describe(in_part).splitlines()


@for_each("method", catalog.CATALOG, ids=lambda method: method.key)
def test_every_method_is_described_in_a_terminals_width(method):
    lines = methods.describe(method).splitlines()
    assert lines[0].startswith(method.key) and len(lines) > 6
    assert all(len(line) <= 100 for line in lines)


@for_each(
    ("name", "code", "parts"),
    [
        ("gdpo", 1, ["keeps several rewards apart, but the reward returns one number"]),
        ("trloo", 1, ["needs 'turn_rewards'", "no mapping with a list under this name"]),
        ("v05_baseline", 2, ["needs 'prior'", "has none in its metadata"]),
    ],
)
def test_presets_that_lack_something_are_one_sentence(capsys, tmp_path, name, code, parts):
    path, run_dir = config_file(tmp_path), tmp_path / "run"
    found, _, err = run(capsys, "train", path, "--run-dir", run_dir, "--recipe", name)
    assert found == code and "Traceback" not in err
    if code == 1:
        one_sentence(err, *parts)
    else:
        text = " ".join(err.replace("│", " ").split())
        assert all(part in text for part in parts), text
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_every_preset_is_a_recipe_of_the_example_config():
    config = options.load_config(ROOT / "configs" / "tiny.py")
    critics = {n for n in PRESETS if has_second_model(n)}
    assert {"ppo_max", "oprl"} <= critics
    guessing = jr.environments.NumberGuess()
    plain = []
    for name in PRESETS:
        recipe = catalog.preset(name, length=8, num_prompts=4)
        # A reward model writes nothing to reward; some learn from another model.
        changes = {"reward": None} if recipe.head else {}
        changes |= {"teacher": "another-model"} if recipe.learns_from_model else {}
        if recipe.subagent:  # only an environment asks it
            changes = {"environment": guessing, "reward": None}
        plain += [] if changes else [name]
        made = dataclasses.replace(config, recipe=name, **changes)
        assert (made.critic_optimizer is not None) == (name in critics)
    # The parser, which takes the tenth of a second to build.
    for name in {*critics, *plain[::20]}:
        found = options.parse_config(config, ["--recipe", name])
        assert found.recipe == name and found.critic is None
        assert found.critic_optimizer == (config.optimizer if name in critics else None)
    words = ["--recipe", "ppo_max", "--critic.learning-rate=1e-3"]
    assert options.parse_config(config, words).critic_optimizer.learning_rate == 1e-3


@for_each("name", EVOLUTION_PRESETS)
def test_a_preset_of_evolution_is_a_recipe_of_the_example_config(capsys, name):
    config = options.load_config(ROOT / "configs" / "tiny.py")
    words = ["--recipe", name, "--remat", "full"]
    assert options.parse_config(config, words).recipe == name
    with pytest.raises(SystemExit):
        options.parse_config(config, words[:2])
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"remat has no effect with '{name}', which has no backward pass" in text


def test_options_of_the_command_change_the_optimizer_of_the_recipe():
    config = options.load_config(ROOT / "configs" / "tiny.py")
    config = dataclasses.replace(config, recipe="dr_grpo", optimizer=None)
    words = ["--recipe", "es_qiu", "--remat", "full"]
    assert options.parse_config(config, words).optimizer is None
    own = jr.recipes.es_qiu().optimizer
    found = options.parse_config(config, [*words, "--optimizer.learning-rate", "1e-3"])
    assert found.optimizer == dataclasses.replace(own, learning_rate=1e-3)
    found = options.parse_config(config, ["--optimizer.name=adamw", *words])
    assert found.optimizer == OptimizerConfig() != own
    found = options.parse_config(config, ["--optimizer.weight-decay=0.1"])
    assert found.optimizer == OptimizerConfig(weight_decay=0.1)
    words = ["--recipe", "ppo_max", "--optimizer.eps", "1e-6", "--critic.b1", "0.8"]
    found = options.parse_config(config, words)
    assert found.critic == dataclasses.replace(found.optimizer, b1=0.8) != found.optimizer


def has_second_model(name):
    return catalog.preset(name, length=8, num_prompts=4).second_model is not None


CRITIC = OptimizerConfig(learning_rate=0.5)


@for_each(
    ("words", "rate"),
    [
        ("--steps 3", None),
        ("--critic.learning-rate 0.1 --recipe ppo_max --steps 3", 0.1),
        ("--recipe ppo_max critic:optimizer-config --steps 3", 1e-6),
        ("critic:optimizer-config --critic.max-grad-norm None --steps 3 --recipe ppo_max", 1e-6),
        ("--steps 3 --critic.learning-rate=0.1 --recipe ppo_max", 0.1),
    ],
)
def test_options_of_a_critic_stand_anywhere(words, rate):
    config = options.load_config(ROOT / "configs" / "tiny.py")
    found = options.parse_config(config, words.split())
    assert found.steps == 3
    assert (None if found.critic is None else found.critic.learning_rate) == rate


def test_a_critic_of_the_config_file_is_changed_or_left_out(capsys):
    config = options.load_config(ROOT / "configs" / "tiny.py")
    # Without one in the file, it is the policy's but for what is given.
    found = options.parse_config(config, ["--critic.b1", "0.8", "--recipe", "ppo_max"])
    assert found.critic == dataclasses.replace(config.optimizer, b1=0.8)
    words = ["--optimizer.weight-decay", "0.1", "--recipe", "ppo_max", "--critic.b2=0.95"]
    found = options.parse_config(config, words)
    assert found.critic == dataclasses.replace(found.optimizer, b2=0.95)
    assert found.optimizer.weight_decay == 0.1
    words = ["--recipe", "ppo_max", "--critic.name", "sgd", "--critic.learning-rate", "0.1"]
    assert options.parse_config(config, words).critic.name == "sgd"
    config = dataclasses.replace(config, recipe="ppo_max", critic=CRITIC)
    assert options.parse_config(config, ["--steps", "3"]).critic == CRITIC
    found = options.parse_config(config, ["--critic.eps", "1e-6", "--steps", "3"])
    assert found.critic == dataclasses.replace(CRITIC, eps=1e-6)
    without = options.parse_config(config, ["critic:none", "--recipe", "dr_grpo"])
    assert without.critic is None and without.recipe == "dr_grpo"
    with pytest.raises(SystemExit):
        options.parse_config(config, ["--recipe", "dr_grpo"])
    assert "critic has no effect: recipe 'dr_grpo'" in capsys.readouterr().err


def test_functions_as_defaults_are_shown_by_their_names(capsys):
    shown = [
        run(capsys, "methods", method.key)
        for method in catalog.CATALOG
        if any(path.startswith("evolution.") for path in method.functions)
    ]
    assert shown and not any(" at 0x" in out for _, out, _ in shown)
    assert any("=zscore" in out for _, out, _ in shown)
