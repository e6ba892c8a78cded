"""A run in words: its settings, the versions of its packages, its devices."""

import dataclasses
import functools
import math
import platform
import re
import types
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import PurePath
from typing import Any, get_args

import jax

from jaxrl_llm.core.compose import Bound, in_full, stable_repr, with_options
from jaxrl_llm.core.secrets import MASK, is_secret, mask
from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS
from jaxrl_llm.recipes.catalog import preset
from jaxrl_llm.recipes.records import format_value
from jaxrl_llm.train.optimizer import policy_optimizer

_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint")


_PASSES = ("epochs", "minibatches")
_EVALUATES = "evaluation.enabled"
_CHANGED_SLOTS = "recipe.changed_slots"
_IN_FULL = ".in_full"  # ends the name of an object whose own name leaves its options out


def settings(config: Any) -> dict[str, Any]:
    """A configuration as texts and numbers by dotted names; functions by their names.

    Objects are shown by their types and plain options, and values whose name says that they are
    secrets as ***; see :mod:`jaxrl_llm.core.secrets`.

    Example:
      >>> from jaxrl_llm.train import SamplingConfig
      >>> from jaxrl_llm.train.logging.settings import settings
      >>> settings(SamplingConfig(top_k=5))["top_k"]
      5
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # As they are for this recipe, mesh and machine, which a resumed run compares.
        if field.name == "dtype":
            value = getattr(config, "product_dtype", value)
        if field.name == "optimizer" and hasattr(config, "resolved_recipe"):
            value = policy_optimizer(config)
        if field.name in _PASSES and hasattr(config, "passes"):
            value = getattr(config.passes, field.name)
        if field.name == "recipe":
            flat |= recipe_settings(value, length=config.sampling.max_new_tokens)
        elif dataclasses.is_dataclass(value):
            flat |= {f"{field.name}.{k}": v for k, v in settings(value).items()}
            if isinstance(value, Bound):
                flat[f"{field.name}.options{_IN_FULL}"] = mask(in_full(dict(value.options)))
            elif type(value) not in (field.type, *get_args(field.type)):
                flat[f"{field.name}{_IN_FULL}"] = type(value).__qualname__  # of its subclasses
        else:
            flat[field.name] = MASK if is_secret(field.name, value) else _plain(value)
            hides = isinstance(getattr(value, "in_full", None), str)
            if hides or isinstance(value, types.MethodType | functools.partial):
                flat[f"{field.name}{_IN_FULL}"] = mask(in_full(value))
    return flat


def recipe_settings(recipe: Any, *, length: int) -> dict[str, Any]:
    """A recipe by its name, in which slots it differs from the preset of that name, and its slots.

    Slots that hold nothing are left out.

    Args:
      recipe: A recipe, or the name of a preset.
      length: Tokens of the longest response, for presets that depend on it.

    Example:
      >>> from jaxrl_llm.train.logging.settings import recipe_settings
      >>> recipe_settings("rloo", length=8)["recipe"]
      'rloo'
    """
    name = recipe if isinstance(recipe, str) else recipe.name
    flat, presets = {"recipe": name}, []
    if name in (*PRESETS, *EVOLUTION_PRESETS):
        presets = [preset(name, length=length, num_prompts=count) for count in (1, 2)]
    slots = presets[0] if isinstance(recipe, str) else recipe
    for key, value in _slots(slots).items():
        if key != "name" and value not in (None, (), ""):
            slot = isinstance(value, tuple) or callable(value)
            flat[f"recipe.{key}"] = mask(format_value(value)) if slot else _plain(value)
    if presets and not isinstance(recipe, str):
        run_slots, one, two = map(_slots, (recipe, *presets))
        # Where both presets differ, the slot depends on the number of questions.
        changed = [k for k in one if run_slots[k] != one[k] and one[k] == two[k]]
        flat[_CHANGED_SLOTS] = ", ".join(changed) or "none"
    return flat


def _slots(recipe: Any) -> dict[str, Any]:
    """The fields of a recipe; a part that one of them makes is not in ``parts`` too."""
    slots = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return slots | ({"parts": recipe.further_parts} if "parts" in slots else {})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has none, and a resumed run compares them
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, tuple | list):
        return ", ".join(str(_plain(x)) for x in value)
    if isinstance(value, Mapping):
        shown = {k: MASK if is_secret(str(k), v) else _plain(v) for k, v in value.items()}
        return ", ".join(f"{k}: {v}" for k, v in shown.items())
    named = callable(value) and not dataclasses.is_dataclass(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "name", None)
    if named and isinstance(name, str):
        return mask(name)
    if type(value).__repr__ is object.__repr__:  # an address in memory differs at every resume
        return mask(with_options(value))
    return mask(stable_repr(value))


# Settings that a resumed run may change, and why: they do not change what a step learns. Any other
# change is refused by name, unless it is allowed, and is then recorded.
_FREE = {
    "steps": "how many steps the run takes",
    "checkpoint": "when the state is saved",
    "evaluation": "when and how much is evaluated",
    "report": "where the metrics go",
    "samples_shown": "what is logged",
    "samples_every": "what is logged",
    "run_dir": "a run may be moved",
    "reference_logp": "a file of numbers that are computed again if it is missing",
    "mesh": "which devices are available",
    "asynchrony.sampler_devices": "which devices are available",
    "asynchrony.sampler_mesh": "which devices are available",
    "microbatches": "what fits in the memory of a device; only rounding differs",
    "tokens_per_microbatch": "what fits in the memory of a device; only rounding differs",
    "packing": "what fits in the memory of a device; only rounding differs",
    "remat": "what fits in the memory of a device; only rounding differs",
    "scan_layers": "how the step is compiled; only rounding differs",
    "max_skipped": "when a run gives up",
    "reward_deadline": "how long a call may take",
    "episodes.seconds": "how long a call may take",
    "environment.timeout": "how long a call may take",
    "episodes.workers": "how many environments step at a time",
    "recipe.status": "a word that earlier versions wrote and nothing read",
}

# Files that may be moved, but not be replaced by others of another name. That a model, a reference,
# a teacher and the questions are still the same, the checkpoint tells by their digests.
_MOVABLE = ("model", "init_from", "reference", "teacher", "data.prompts", "data.evaluation")
_SUFFIXES = (".gguf", ".json", ".jsonl", ".npz", ".parquet")

# What earlier versions wrote for the name of a reward with bound options in a pool or a vote.
_UNNAMED = re.compile(r"(?:majority_vote\()?(Bound|partial)\)?")

# Options that earlier versions wrote under another name: the functions, the old name, the new one.
_RENAMED = (
    ("sdpo|sdpo_sampled|srpo", "is_clip", "cap"),
    ("srpo|srpo_route|srpo_weights", "correct_at", "success"),
    ("dcpo_distribution", "good_above", "threshold"),
    ("rollout_gdro_memory|solved_examples", "correct", "threshold"),
    ("_CapoAdam|capo_selection", "lr", "learning_rate"),
)


def _with_new_names(text: str) -> str:
    """The text of a recipe's slot with the names that its functions and options have now."""
    text = re.sub(r"\b_penalized\(", "penalized(", text)
    text = re.sub(r"\bgiven\(", "connect(", text)
    for functions, old, new in _RENAMED:

        def renamed(match: re.Match, old: str = old, new: str = new) -> str:
            options = re.split(r", (?=\w+=)", match[2])
            is_sorted = options == sorted(options)  # as those of `bind` are
            options = [re.sub(rf"^{old}=", f"{new}=", option) for option in options]
            return f"{match[1]}({', '.join(sorted(options) if is_sorted else options)})"

        # Values may be tuples, so up to one parenthesis lies inside.
        text = re.sub(rf"\b({functions})\(((?:[^()]|\([^()]*\))*)\)", renamed, text)
    return text


def _is_text_of_before(old: str, new: str) -> bool:
    """Whether earlier versions wrote ``old`` for a recipe's slot that has the text ``new`` now."""
    old = _with_new_names(old)
    # A Transform said nothing of itself, and its text has parentheses inside.
    parts = [re.escape(part) for part in old.split("Transform(...)")]
    return re.fullmatch(r"\w+\(.*\)".join(parts), new) is not None


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ and that a resumed run should not change, by name, with both values.

    Example:
      >>> changed_settings({"seed": 1, "steps": 5}, {"seed": 2, "steps": 9})
      {'seed': (1, 2)}
    """

    def is_free(name: str) -> bool:
        free = any(name == each or name.startswith(f"{each}.") for each in _FREE)
        return free and name != _EVALUATES  # without an evaluation, no question is held out

    def is_moved(name: str, values: tuple[Any, Any]) -> bool:
        if name not in _MOVABLE or not all(isinstance(value, str) for value in values):
            return False
        local = all(x.startswith(("/", "./", "../", "~")) or x.endswith(_SUFFIXES) for x in values)
        return local and len({PurePath(value).name for value in values}) == 1

    def is_named(name: str, values: tuple[Any, Any]) -> bool:
        if name != "reward" or not all(isinstance(value, str) for value in values):
            return False
        unnamed = _UNNAMED.fullmatch(values[0])
        return unnamed is not None and bool(
            re.fullmatch(re.escape(values[0]).replace(unnamed[1], ".+"), values[1])
        )

    def is_renamed(name: str, values: tuple[Any, Any]) -> bool:
        texts = name.startswith("recipe.") and all(isinstance(value, str) for value in values)
        return texts and _is_text_of_before(*values)

    # Earlier versions did not resolve these.
    unknown = [name for name in (*_PASSES, _EVALUATES) if old.get(name) is None]
    names = [name for name in {**new, **old} if not is_free(name) and name not in unknown]
    values = {name: (old.get(name), new.get(name)) for name in names}
    for name in [name for name in names if name.endswith(_IN_FULL)]:
        pair = values.pop(name)
        if None not in pair and pair[0] != pair[1]:  # earlier versions wrote the name alone
            values[name.removesuffix(_IN_FULL)] = pair
    differ = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    same = (is_moved, is_named, is_renamed)
    changed = {k: pair for k, pair in differ.items() if not any(rule(k, pair) for rule in same)}
    # Slots that earlier versions wrote otherwise never compared equal to those of a preset there,
    # so they were not counted. Others are: one's own function may have the name of another.
    if _CHANGED_SLOTS in changed:
        before, after = (set(str(x).split(", ")) - {"none"} for x in changed[_CHANGED_SLOTS])
        rewritten = {name.removeprefix("recipe.") for name in differ if name not in changed}
        if before ^ after <= rewritten:
            del changed[_CHANGED_SLOTS]
    return changed


# What decides an evaluation besides its own options: these settings and sections.
_OF_EVALUATION = ("environment", "episodes", "reward", "reward_on_error", "sampling")
_OF_QUESTIONS = ("data.chat", "data.system")
# Of these, what has no effect on one metric.
_OF_DRAWS = tuple(f"sampling.{name}" for name in ("top_k", "top_p", "min_p", "slots"))
_OF_ROLLOUTS = ("sampling.quantization",)  # an evaluation has the policy in full precision
_OF_ANSWERS = ("environment", "episodes", "reward", "reward_on_error")
_NOT_OF_SCORE = {
    "reward": ("evaluation.limit", "evaluation.samples"),
    "greedy": ("evaluation.samples", "sampling.temperature", *_OF_DRAWS, *_OF_ROLLOUTS),
    "sampled": _OF_ROLLOUTS,
    "pairs": ("evaluation.samples", *_OF_DRAWS, *_OF_ROLLOUTS, *_OF_ANSWERS),
}


def evaluation_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what an evaluation of a state finds, and on how many questions.

    Without ``evaluation.samples`` it has the group size.

    Example:
      >>> evaluation_settings({"steps": 9, "evaluation.samples": None, "sampling.group_size": 4})
      {'evaluation.samples': 4}
    """

    def decides(name: str) -> bool:
        if name in ("evaluation.limit", *_OF_QUESTIONS):
            return True
        return name.partition(".")[0] in _OF_EVALUATION and name != "sampling.group_size"

    named = {name: value for name, value in settings.items() if decides(name)}
    samples = settings.get("evaluation.samples") or settings.get("sampling.group_size")
    return named | ({"evaluation.samples": samples} if samples else {})


def changed_evaluation(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Those of :func:`evaluation_settings` that differ: by name, both values.

    Example:
      >>> old = {"evaluation.samples": None, "sampling.group_size": 4}
      >>> changed_evaluation(old, old | {"evaluation.samples": 64})
      {'evaluation.samples': (4, 64)}
    """
    old, new = evaluation_settings(old), evaluation_settings(new)
    free = ("evaluation.limit", "evaluation.samples")  # not among the changed settings
    pairs = {name: (old[name], new[name]) for name in free if name in old and name in new}
    return {k: pair for k, pair in pairs.items() if pair[0] != pair[1]} | changed_settings(old, new)


def changed_score(
    old: Mapping[str, Any], new: Mapping[str, Any], metric: str
) -> dict[str, tuple[Any, Any]]:
    """Those of :func:`changed_evaluation` that decide one metric, such as "greedy" or "reward".

    Example:
      >>> old = {"evaluation.samples": 4, "evaluation.limit": 8}
      >>> changed_score(old, {"evaluation.samples": 64, "evaluation.limit": 9}, "greedy")
      {'evaluation.limit': (8, 9)}
    """
    without = _NOT_OF_SCORE.get(metric, ())
    if metric == "greedy" and any("recipe.subagent" in each for each in (old, new)):
        without = ("evaluation.samples",)  # the answers of a subagent are sampled
    changed = changed_evaluation(old, new)
    return {
        name: pair
        for name, pair in changed.items()
        if not any(name == each or name.startswith(f"{each}.") for each in without)
    }


def fixed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The changed settings with which no checkpoint of the run can be read.

    Of others, such as the questions and a teacher, a checkpoint tells whether it can be read.

    Example:
      >>> fixed_settings({"seed": 1, "dtype": "float32"}, {"seed": 2, "dtype": "bfloat16"})
      ['seed']
    """

    def is_fixed(name: str) -> bool:
        if name not in old or name not in new:  # a setting that one of the two versions has not
            return False
        section, _, option = name.rpartition(".")
        if section in ("optimizer", "critic"):
            shapes = (_shapes_of_state(each, section) for each in (old, new))
            return len({each.get(option) for each in shapes}) > 1
        return name in ("seed", "data.seed", _EVALUATES) or section == "lora"

    return [name for name in changed_settings(old, new) if is_fixed(name)]


def _shapes_of_state(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    """What decides which arrays the state of an optimizer has, by the settings that decide it."""

    def read(option: str) -> Any:
        return settings.get(f"{section}.{option}")

    is_sgd = read("name") == "sgd"
    counts = bool(read("warmup_steps") or read("decay_steps"))
    return {
        "name": read("name"),
        "transform": read("transform.function") or read("transform"),
        "moment_dtype": read("moment_dtype"),
        "max_grad_norm": read("max_grad_norm") is None,
        "warmup_steps": counts,
        "decay_steps": counts,
        # Without these, the state has fewer arrays, at other places.
        "b1": is_sgd and bool(read("b1")),
        "weight_decay": is_sgd and counts and bool(read("weight_decay")),
    }


def surroundings() -> dict[str, str]:
    """Versions and devices of this process."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package == "jaxrl_llm":  # run from a checkout
                import jaxrl_llm

                versions[package] = jaxrl_llm.__version__
    devices = Counter((d.platform, d.device_kind) for d in jax.devices())
    versions["devices"] = ", ".join(
        f"{n} x {name}" if kind.lower() == name.lower() else f"{n} x {name} {kind}"
        for (name, kind), n in devices.items()
    )
    versions["processes"] = str(jax.process_count())
    versions["machine"] = f"{platform.system()} {platform.machine()}"
    return versions
