"""`jaxrl-llm explain` prints every preset as its formulas, with its numbers."""

import re

import pytest
from rows import for_each

import jaxrl_llm
from jaxrl_llm.cli import explain, main
from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS


def shown(capsys, *words):
    code = main(["explain", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_numbers_stand_in_formulas_and_slots_beside_those_of_grpo(capsys):
    code, out, _ = shown(capsys, "dapo")
    assert code == 0 and out.startswith("dapo: ") and "arxiv.org/abs/2503.14476" in out
    assert "\nTRL: GRPOConfig.loss_type=dapo\n" in out
    # The formula is that of ppo_clip, which dapo_clip is with other numbers.
    assert "loss[t] = max(-A[t] r[t], -A[t] clip(r[t], 1 - 0.2, 1 + 0.28))" in out
    assert "weights = token_mean\n  (grpo: sequence_mean)" in out
    assert "requests <= 10 * P" in out  # a collector is explained by what made it


def test_a_preset_is_compared_with_another(capsys):
    _, out, _ = shown(capsys, "dapo", "--beside", "dapo")
    assert "(dapo:" not in out and "as in" not in out
    _, out, _ = shown(capsys, "gspo", "--beside", "dapo")
    assert "(dapo: dapo_clip(" in out


@for_each("words", [["gspo", "dapo"], ["--beside", "grpo", "gspo", "dapo"]])
def test_two_names_without_an_option_are_told_how_to_compare(capsys, words):
    code, _, err = shown(capsys, *words)
    assert code == 2 and "jaxrl-llm explain gspo --beside dapo" in err


def test_places_are_those_of_the_code(capsys):
    _, out, _ = shown(capsys, "gigpo")
    places = re.findall(r"^  (\w+), (\S+\.py):(\d+)$", out, re.MULTILINE)
    assert len(places) >= 4
    root = explain.Path(jaxrl_llm.__file__).parent.parent
    for name, path, line in places:
        lines = (root / path).read_text().splitlines()[int(line) - 1 :]
        lines = [each for each in lines if not each.startswith("@")]  # decorators
        assert lines[0].startswith(f"def {name}(")


@pytest.mark.of_many
@pytest.mark.parametrize("names", [sorted(PRESETS)[i::8] for i in range(8)])
def test_every_preset_is_explained(names):
    for name in names:
        text = explain.explain(name)
        assert text.startswith(f"{name}: "), name
        assert len(text.splitlines()) > 4 and " at 0x" not in text, name
        assert max(map(len, text.splitlines())) <= 120, name
        # No number has an index; "1[...]" is 1 where it holds.
        assert not re.search(r"(?<![\w.])(?!1\[)[\d.]+\[", text), name


@for_each(
    ("name", "shown", "hidden"),
    [
        ("pav", "(1 - V)^4,   the prover is the best of 4 rollouts", "4+1"),
        ("arpo", "sum of the first `20` entropies of the turn", "reply 1"),
        ("portool", "is branched with probability clip(0.5 + 0 (H - H_first), 0, 1)", "reply 1"),
        ("dots", "once in `2` steps:  `256` random prompts", "2 few"),
        ("hapo", "clip(r, 1 - low[t], 1 + high[t])", "0.2[t]"),
        ("llds", "0 up to 0.0001", "the 0.0001"),
        ("sol_rl_flow", "the same noise in full", "all 6"),
        ("spo_tree", "at each split a response pauses", "the 3 a"),
        ("fading_replay", "a part of a batch:  round(0.5 P)", "``0.5``"),
        ("prefix_rl", "N plain prompts and N * 3 that begin", "N 3 more"),
        # What a recipe computes is not the default of the function that reads it.
        ("d3s", "linear in progress between", "linear in 0"),
        ("drpo_len", "loss[t] = -coef * d[t]", "-1 * d[t]"),
        ("epo", "-0.001 (H[t] - weight P[t])", "- 1 P[t]"),
        ("remix", "(1 - share) * KL[t](policy || last)", "1 - 1)"),
    ],
)
def test_numbers_stand_only_in_the_place_of_options(name, shown, hidden):
    text = explain.explain(name)
    assert shown in text and hidden not in text


@for_each("name", sorted(EVOLUTION_PRESETS))
def test_evolution_is_explained(capsys, name):
    code, out, _ = shown(capsys, name)
    assert code == 0 and out.startswith(f"{name}: ")


@for_each(
    ("name", "words"),
    [
        ("dappo", "Did you mean 'dapo'"),
        ("CISPO", "Did you mean 'cispo'"),
        ("gspo_token", "'gspo_token' has no preset; `jaxrl-llm methods gspo_token` describes it."),
    ],
)
def test_what_is_no_preset_is_one_short_sentence(capsys, name, words):
    code, _, err = shown(capsys, name)
    assert code == 2 and words in err and err.count("\n") == 1 and len(err) < 150


def test_a_method_is_explained_by_its_key(capsys):
    assert shown(capsys, "dapo_clip") == shown(capsys, "dapo")


def test_a_preset_without_a_row_in_the_catalog_is_explained(capsys, monkeypatch):
    def unlisted():
        """A method that is being written."""
        return jaxrl_llm.recipes.rloo()

    monkeypatch.setitem(PRESETS, "unlisted", unlisted)
    code, out, _ = shown(capsys, "unlisted")
    assert code == 0 and out.startswith("unlisted: A method that is being written.\n")
    assert "no row in the catalog yet: recipes/catalog/methods.py" in out
    assert shown(capsys, "dapo", "--beside", "unlisted")[0] == 0
