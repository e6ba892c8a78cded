"""The catalog and the public functions are the same set, both ways."""

import dataclasses
import importlib
import inspect
import json
import operator
import re

import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS, EvolutionRecipe, Recipe, catalog, wiring

LAYERS = (
    "advantages",
    "surrogates",
    "preferences",
    "diffusion",
    "corrections",
    "regularizers",
    "curation",
    "evolution",
    "aggregate",
    "rewards",
    "rollout",
)
# Of these layers the modules that hold methods; the others grade text, or run a model.
METHODS = {
    "rewards": ("agents", "progress", "shaping", "length", "meta", "paraphrases", "votes"),
    "rollout": ("admission", "request_arrays", "rounds", "scheduler", "speculative"),
}
WRITING = ("from_generator", "needs")  # modules by which a user writes a collector, no methods
# No methods of their own, but what a row may point to.
ELSEWHERE = ("diagnostics", "logprobs", "models", "recipes", "train")
EVERY_PRESET = {**PRESETS, **EVOLUTION_PRESETS}


def public_functions() -> set[str]:
    """Functions that a module of methods defines or re-exports under a public name."""
    found = set()
    for layer in LAYERS:
        module = importlib.import_module(f"jaxrl_llm.{layer}")
        public = [name for name in vars(module) if not name.startswith("_")]
        for name in getattr(module, "__all__", public):
            value = getattr(module, name)
            module_name = getattr(value, "__module__", "")
            home = module_name.split(".")[-1]
            if home not in METHODS.get(layer, (home,)) or home in WRITING:
                continue
            if inspect.isfunction(value) and module_name.startswith(f"jaxrl_llm.{layer}"):
                found.add(f"{layer}.{name}")
    return found


def test_every_function_is_in_the_catalog_and_the_reverse():
    listed = {f for method in catalog.CATALOG for f in method.functions}
    found = public_functions()
    assert found <= listed
    # Of other modules of these layers, and of other layers, a row may point to what it builds on.
    for path in listed - found:
        layer, name = path.split(".")
        assert layer in METHODS or layer in ELSEWHERE, path
        assert callable(getattr(getattr(jr, layer), name))


def test_presets_and_catalog_agree():
    named = [m.preset for m in catalog.CATALOG if m.preset]
    assert sorted(named) == sorted(EVERY_PRESET)
    public = {n for n in jr.recipes.__all__ if inspect.isfunction(getattr(jr.recipes, n))}
    makers = {"listwise", "pairwise", "unpaired"}  # recipes of any loss
    assert public - {"validate_batch"} - makers == set(EVERY_PRESET)


def modules_in(recipe: Recipe) -> set[str]:
    """Modules of all functions in the slots of a recipe."""
    left, found = [r.function for part in wiring.readers(recipe) for r in part], set()
    left += recipe.likelihood or ()
    if recipe.subagent is not None:
        left += [recipe.subagent.rewards, recipe.subagent.advantage]
    if recipe.collector is not None:
        parts = (recipe.collector, getattr(recipe.collector, "policy", None))
        found |= {type(part).__module__ for part in parts}
    while left:
        function = left.pop()
        options = getattr(function, "options", ())
        options = [value for _, value in options] if isinstance(options, tuple) else []
        options += [y for x in options if isinstance(x, tuple) for y in x]
        left += [getattr(function, "function", None), *options]
        left = [x for x in left if callable(x)]
        found |= {getattr(function, "__module__", ""), type(function).__module__}
    return found


# Their functions say how many rollouts to sample, or which tokens train, before there is a batch.
BEFORE_THE_BATCH = {"brorl", "dars", "mua_rl"}


@for_each("name", PRESETS)
def test_a_preset_carries_its_key_its_paper_and_its_method(name):
    recipe = catalog.preset(name, length=8, num_prompts=4)
    (row,) = [m for m in catalog.CATALOG if m.preset == name]
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert recipe.paper == (f"arXiv:{row.arxiv}" if row.arxiv else "")
    homes = {operator.attrgetter(f)(jr).__module__ for f in row.functions}
    assert name in BEFORE_THE_BATCH or homes & modules_in(recipe)


@for_each("name", EVOLUTION_PRESETS)
def test_a_preset_of_evolution_carries_its_key_and_its_paper(name):
    recipe = catalog.preset(name, length=8)
    (row,) = [m for m in catalog.CATALOG if m.preset == name]
    assert isinstance(recipe, EvolutionRecipe)
    assert recipe.name == name
    assert recipe.paper == f"arXiv:{row.arxiv}"
    assert row.kind == "evolution"


def test_a_preset_by_its_name():
    assert catalog.preset("dr_grpo", length=8) == jr.recipes.dr_grpo(length=8)
    assert catalog.preset("grpo", length=8) == jr.recipes.grpo()
    assert catalog.preset("dapo", length=8) == jr.recipes.dapo(length=8) != jr.recipes.dapo()
    assert catalog.preset("eggroll", length=8) == jr.recipes.eggroll()
    # The bytes of an experience are no budget in tokens.
    experienced = catalog.preset("training_free_grpo", length=8).collector
    assert experienced == jr.recipes.training_free_grpo().collector
    with pytest.raises(ValueError, match="no preset 'dr_gpro'. Did you mean 'dr_grpo' or"):
        catalog.preset("dr_gpro", length=8)
    with pytest.raises(ValueError, match=r"has no options; .* jr.recipes.dapo\(length=8\)\.$"):
        catalog.preset("dapo(length=8)", length=8)


def test_rows_are_well_formed():
    keys = [m.key for m in catalog.CATALOG]
    assert len(set(keys)) == len(keys)
    for method in catalog.CATALOG:
        assert method.kind in catalog.KINDS
        assert method.confidence in {"CODE", "PAPER", "NOTES", "ABSTRACT"}
        assert method.title and method.verified_against
        assert re.fullmatch(r"(\d{4}\.\d{5})?", method.arxiv)


def test_rows_survive_json():
    assert json.loads(json.dumps(catalog.rows()))[0]["functions"][0] == "advantages.grpo"
    assert len(catalog.rows()) == len(catalog.CATALOG)


def test_a_table_for_a_terminal_is_aligned_and_at_most_100_wide():
    text = catalog.as_table().splitlines()
    assert len(text) == len(catalog.CATALOG) + 1 and max(map(len, text)) <= 100
    assert text[0].split() == ["method", "kind", "trains", "paper", "title"]
    for start in (text[0].index("kind"), text[0].index("title")):
        assert all(line[start - 1] == " " and line[start] != " " for line in text)
    by_key = {line.split()[0]: line for line in text[1:]}
    assert "whole" in by_key["gspo"]
    assert "in part" in catalog.as_table([in_part("gspo")]).splitlines()[1]
    assert "whole" in by_key["gspo"]
    assert "whole" not in by_key["gspo_token"] and "in part" not in by_key["gspo_token"]


def in_part(key):
    """A row of the catalog that would miss something."""
    return dataclasses.replace(catalog.select(name=key)[0], missing="a teacher")


@for_each(
    ("options", "keys"),
    [
        ({"name": "gspo"}, {"gspo"}),
        ({"name": "dapo"}, {"dapo_clip"}),  # a preset's name
        ({"name": "GSPO t"}, set()),
        ({"name": "passk"}, {"grpo_passk", "passk_training"}),
        ({"kind": "reference"}, {"accelerated_po", "merge", "mwa", "salsa_soup_ref"}),
        ({"kind": "surrogate", "name": "dcpo"}, {"dcpo_dynamic_clip"}),
    ],
)
def test_methods_are_found_by_kind_and_name(options, keys):
    if keys:
        assert {method.key for method in catalog.select(**options)} == keys
    else:
        with pytest.raises(ValueError, match="no method matches 'GSPO t'"):
            catalog.select(**options)


def test_a_method_is_whole_with_a_preset_or_commands_and_nothing_missing():
    for method in catalog.CATALOG:
        trains = method.preset is not None or method.commands != ()
        assert method.whole == (trains and not method.missing)
    # tests/cli/test_merge.py runs the commands of each.
    assert {m.key for m in catalog.CATALOG if m.commands} == {"merge", "mwa", "salsa_soup_ref"}
    assert not in_part("gspo").whole
    missing = {m.preset for m in catalog.CATALOG if m.missing}
    assert {"grpo", "dr_grpo", "gspo", "mssr", "gae_token", "eggroll"}.isdisjoint(missing)


# What their docstrings say is not here is no step: of the optimizer, of a form that the paper does
# not run by default, or computed and not used in the authors' code.
NO_STEP = {"masa", "sdpo", "training_free_grpo"}
NO_STEP |= {"open_es"}  # the decay of the weights, a setting of the optimizer
# Coefficients that are 0 by default though the method has no such term: PPO, an option of GAE.
NO_TERM = {"ppo", "gae_token"}


@for_each("method", [m for m in catalog.CATALOG if m.preset], ids=lambda m: m.key)
def test_what_a_preset_leaves_out_is_missing_in_its_row(method):
    """Terms whose coefficient is 0 by default, and what the docstring says is not here."""
    make = EVERY_PRESET[method.preset]
    text = " ".join(inspect.getdoc(make).split())
    words = re.search(r"omitted|[nN]ot included|(is|are) left out|is not here|not used", text)
    terms = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if re.fullmatch("(kl|entropy|text)_coef", name) and parameter.default == 0.0
    ]
    excused = method.preset in (*NO_TERM, *NO_STEP)
    assert excused or method.missing or not (words or terms), (words, terms)
    assert not terms or method.missing == "" or terms[0] in method.missing


def test_what_peers_confirmed_are_functions_of_the_catalog():
    listed = {f for method in catalog.CATALOG for f in method.functions}
    rows = {method.key: method for method in catalog.CATALOG}
    for key, confirmed in catalog.CONFIRMED.items():
        assert key in rows and confirmed
        for peer, function, options in confirmed:
            assert function in listed and peer and options


LISTED = sorted({f for method in catalog.CATALOG for f in method.functions})


@for_each("path", LISTED)
def test_a_function_has_the_whole_docstring(path):
    function = operator.attrgetter(path)(jr)
    text, module_text = inspect.getdoc(function), inspect.getdoc(inspect.getmodule(function))
    package_text = inspect.getdoc(getattr(jr, path.split(".")[0]))
    sections = {"Returns:", "Example:", "References:"}
    if inspect.signature(function).parameters:
        sections.add("Args:")
        if not re.search("ValueError|TypeError", module_text):
            sections.add("Raises:")
    if inspect.isclass(function):
        sections = (sections - {"Args:", "Returns:"}) | {"Attributes:"}
    if path == "aggregate.weighted_sum":  # a sum has no source
        sections.remove("References:")
    assert not [s for s in sections if f"\n{s}\n" not in text]
    assert ">>> " in text and "import jaxrl_llm as jr" in text
    described = {}  # by the names before the colon of an entry: `logp, old_logp, mask: ...`
    for entry in re.finditer(r"\n  ((?:\**\w+)(?:, \**\w+)*):\s+(.*)", text):
        described |= {name.strip("*"): entry[2] for name in entry[1].split(", ")}
    for name in inspect.signature(function).parameters:
        assert name in described, f"{name} is not described"
        for place, place_text in (("module", module_text), ("package", package_text)):
            if f"See the {place}" in described[name]:
                assert f"``{name}``" in place_text, f"the {place} does not describe {name}"


def test_every_paper_is_named_by_a_function_of_its_row():
    for method in catalog.CATALOG:
        texts = [inspect.getdoc(operator.attrgetter(f)(jr)) for f in method.functions]
        if method.preset:
            texts.append(inspect.getdoc(EVERY_PRESET[method.preset]))
        assert not method.arxiv or any(f"arXiv:{method.arxiv}" in t for t in texts), method.key
