"""The figures of methods show the numbers of the library, and every method has one."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog

pytest.importorskip("matplotlib").use("Agg")
EXTENSIONS = Path(__file__).resolve().parents[2] / "docs" / "_extensions"
sys.path.insert(0, str(EXTENSIONS))
try:
    names = ("method_curves", "method_figures", "method_own", "method_pushes")
    curves, figures, own, pushes = map(importlib.import_module, names)
finally:
    sys.path.remove(str(EXTENSIONS))


def chosen(key):
    (method,) = (m for m in catalog.CATALOG if m.key == key)
    with figures.quick_compiler():
        return figures.choose(method)


@for_each(
    ("key", "kind"),
    [
        ("kl_estimators", "penalty"),
        ("entropy_bonus", "entropy_loss"),
        ("rollout_correction", "correction"),
        ("cosine_length", "length_reward"),
        ("dynamic_sampling", "of_groups"),
        ("learnability", "swept"),
        ("remax", "advantages"),
        ("trloo", "turn_advantages"),
        ("rm_losses", "pair_loss"),
        ("gkd", "choice_loss"),
        ("value_loss", "value_loss"),
        ("aggregate", "token_weights"),
        ("open_es", "fitness"),
        ("otr", "choice_loss"),
        ("spg", "level_weight"),
        ("n_step", "credit"),
        ("mua_rl", "own"),
        ("past_future", "own"),
        ("slot_sampler", "own"),
    ],
)
def test_a_method_has_its_kind_of_figure(key, kind):
    figure, caption, found = chosen(key)
    assert found == kind
    assert caption.endswith(".") and caption.count("`") % 2 == 0 and "{" not in caption
    assert figure.axes[0].has_data()
    curves.plt.close(figure)


def test_a_truncated_weight_stops_at_its_cap():
    figure, caption, _ = chosen("rollout_correction")
    assert "`importance_weights`" in caption
    ratio, weight = figure.axes[0].lines[0].get_data()
    at = {x: weight[np.argmin(abs(ratio - x))] for x in (0.5, 1.0, 8.0)}
    assert at == pytest.approx({0.5: 0.5, 1.0: 1.0, 8.0: 2.0}, rel=1e-4)
    curves.plt.close(figure)


def test_estimators_of_a_divergence_share_a_figure():
    figure, _, _ = chosen("kl_estimators")
    by_name = {line.get_label(): line.get_data() for line in figure.axes[0].lines}
    x, k1 = by_name["k1"]
    assert k1 == pytest.approx(x, abs=1e-5)
    assert by_name["k2"][1] == pytest.approx(x**2 / 2, abs=1e-5)
    assert by_name["k3"][1] == pytest.approx(np.exp(-x) - 1 + x, rel=1e-4, abs=1e-5)
    curves.plt.close(figure)


def test_groups_that_agree_are_dropped():
    kept = curves.of_groups(jr.curation.informative_groups)
    assert kept.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0]


def test_a_turn_is_compared_with_the_same_turn_of_others():
    values = curves.turn_advantages(jr.advantages.trloo)
    others = curves.TURNS[:, -1]
    want = others - (others.sum() - others) / 3
    assert np.asarray(values)[:, -1] == pytest.approx(np.asarray(want))


def test_a_figure_without_a_message_is_refused():
    x = np.arange(3)
    for flat in ({"a": np.zeros(3)}, {"a": np.full(3, 0.5)}, {"a": np.array([0, np.nan, 1])}):
        with pytest.raises(ValueError, match="a: "):
            curves.curves(flat, x=x, xlabel="x")


def test_a_preset_pushes_up_what_is_better():
    push, mask = pushes.push("grpo")
    assert np.abs(push).max() == 1 and not push[~mask].any()
    assert push[0].max() > 0.5 and push[0].min() > -0.01  # the penalty pulls a little
    assert push[-1].min() == -1 and push[-1].max() < 0.01


def test_a_preset_that_only_chooses_prompts_has_no_push():
    with pytest.raises(ValueError, match="plain method"):
        pushes.show("vade")


@pytest.fixture(scope="module")
def sample():
    """Methods, and the figures of all of them; the site's build draws every method."""
    methods = catalog.CATALOG[::12]
    return methods, figures.draw(methods)


@pytest.mark.slow
def test_every_method_has_a_figure(sample):
    methods, found = sample
    assert len(found) == len(methods), [m.key for m in methods if m.key not in found]
    assert all(picture.png.startswith(b"\x89PNG") for picture in found.values())


def test_own_figures_are_of_methods_of_the_catalog():
    assert own.OWN.keys() <= {method.key for method in catalog.CATALOG}


@pytest.mark.slow
def test_only_methods_that_no_kind_suits_have_their_own_figure(sample, monkeypatch):
    methods, found = sample
    keys = {key for key, picture in found.items() if picture.kind == "own"}
    monkeypatch.setattr(own, "OWN", {})
    assert keys and not figures.draw([method for method in methods if method.key in keys])


def test_the_peak_of_running_requests_is_the_top_of_their_area():
    figure, _ = own.past_future()
    (axis,) = figure.axes
    top = max(path.vertices[:, 1].max() for area in axis.collections for path in area.get_paths())
    assert axis.lines[0].get_ydata()[0] == top
    curves.plt.close(figure)
