"""``jaxrl-llm merge``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.export import check_new, load_trained, new_folder, save_tokenizer
from jaxrl_llm.data.rendering import response_ends
from jaxrl_llm.models.config import ModelConfig, differences
from jaxrl_llm.train.logging.results import read_jsonl

# Which options each method reads, besides the models.
_READS = {
    "average": {"weights", "by", "power"},
    "extrapolate": {"alpha"},
    "slerp": {"t"},
    "task_arithmetic": {"base", "weights", "scale"},
    "ties": {"base", "weights", "scale", "density"},
    "dare": {"base", "weights", "scale", "drop", "seed"},
    "model_stock": {"base"},
    "iso_c": {"base", "scale"},
}
_OF_TWO = ("extrapolate", "slerp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
    """Merges models of one architecture into one, as a Hugging Face folder.

    Their contexts may differ in length; the result has that of the first model.

    Attributes:
      models: Names or folders of models, or folders of runs: RUN for the last checkpoint, RUN@STEP
        for another.
      out: The folder to write; it must not exist yet.
      method: average; extrapolate (from the second model through the first and beyond); slerp,
        between the two; or, for differences from --base: task_arithmetic, ties, dare, model_stock,
        iso_c.
      base: The model that the others were trained from.
      weights: One number per model. For average and ties they add up to 1 and are equal by
        default; for task_arithmetic and dare they scale the task vectors and are 1 by default.
      by: Weights for an average of checkpoints RUN@STEP: by their steps, larger for later ones, or
        by the training loss at those steps, larger for smaller losses.
      power: Exponent of the steps or losses; by default 1.
      scale: Factor of the merged task vectors; by default 1.
      density: Share of the entries that ties keeps; by default 0.2.
      drop: Share of the entries that dare drops; by default 0.9.
      seed: Seed of the entries that dare drops; by default 0.
      alpha: Extrapolation coefficient; by default 0.3.
      t: Position of slerp between the first (0) and the second (1) model; by default 0.5.
      trust: Execute the config.py of runs that were not made here; read it first.
      dtype: Dtype of the stored weights.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    out: str
    method: Literal[
        "average", "extrapolate", "slerp", "task_arithmetic", "ties", "dare", "model_stock", "iso_c"
    ] = "average"
    base: str | None = None
    weights: tuple[float, ...] = ()
    by: Literal["step", "loss"] | None = None
    power: float | None = None
    scale: float | None = None
    density: float | None = None
    drop: float | None = None
    seed: int | None = None
    alpha: float | None = None
    t: float | None = None
    trust: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        count, reads = len(self.models), _READS[self.method]
        for name in sorted(set().union(*_READS.values()) - reads):
            if getattr(self, name) not in (None, ()):
                raise ValueError(f"--{name} has no effect with --method {self.method}.")
        if "base" in reads and self.base is None:
            raise ValueError(f"--method {self.method} needs --base, what the models started from.")
        least = 1 if "base" in reads and self.method != "model_stock" else 2
        if count < least or (self.method in _OF_TWO and count != 2):
            number = "two" if self.method in _OF_TWO else f"at least {least}"
            raise ValueError(f"--method {self.method} needs {number} models; got {count}.")
        if self.by is not None and self.weights:
            raise ValueError("--weights has no effect with --by, which makes them.")
        if self.by is None and self.power is not None:
            raise ValueError("--power has no effect without --by.")
        if self.by is not None:
            for name in self.models:
                if _checkpoint(name).step is None:
                    raise ValueError(f"--by needs checkpoints, RUN@STEP; got {name!r}.")
        if self.weights and len(self.weights) != count:
            raise ValueError(f"{count} models need {count} --weights; got {len(self.weights)}.")


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    from jaxrl_llm import models

    args = options.parse(Merge, arguments, command="merge")
    check_new(args.out)
    names = [_checkpoint(name).target for name in (*args.models, *filter(None, [args.base]))]
    if args.trust and not any(map(options.names_run, names)):
        raise UsageError("--trust has no effect without a run.")
    with options.usage_errors():
        sources = [_load(name, args.trust) for name in args.models]
        base = None if args.base is None else _load(args.base, args.trust)
        first = sources[0]
        for name, source in zip(args.models[1:], sources[1:], strict=True):
            _check_config(args.models[0], first.config, name, source.config)
        if base is not None:
            _check_config(args.models[0], first.config, str(args.base), base.config)
        merged = _merge(args, [source.params for source in sources], base and base.params)
    with new_folder(args.out) as unfinished:
        models.save_safetensors(merged, unfinished, config=first.config, dtype=args.dtype)
        left_out = save_tokenizer(first.tokenizer, unfinished, ends=first.ends)
    print(
        f"The {args.method} of {', '.join(args.models)} is in {args.out}, as "
        f"{args.dtype}.{left_out}"
    )
    return 0


def _checkpoint(name: str) -> options.CheckpointChoice:
    """A run and its step, of RUN@STEP; of any other name the name and None."""
    run_dir, _, step = name.rpartition("@")
    if step.isdecimal() and options.names_run(run_dir):
        return options.CheckpointChoice(run_dir, int(step), False)
    return options.CheckpointChoice(name, None, False)


def _metric_weights(args: Merge) -> list[float]:
    """Weights of checkpoints by their steps or training losses."""
    from jaxrl_llm import models

    choices = [_checkpoint(name) for name in args.models]
    values = [float(choice.step or 0) for choice in choices]
    if args.by == "loss":
        for i, choice in enumerate(choices):
            rows = read_jsonl(Path(choice.target) / "metrics.jsonl")
            losses = [x["loss"] for x in rows if x["step"] == choice.step and "loss" in x]
            if not losses or not (losses[-1] or 0) > 0:  # null if it was not finite
                got = losses[-1] if losses else "none"
                raise UsageError(
                    f"--by loss needs a loss above 0 at each step; {args.models[i]!r} has {got}."
                )
            values[i] = losses[-1]
    power = 1.0 if args.power is None else args.power
    weights = models.metric_weights(
        np.array(values), power=power, lower_is_better=args.by == "loss"
    )
    return [float(w) for w in weights]


class _Source(NamedTuple):
    config: ModelConfig
    params: Any
    tokenizer: Any
    ends: tuple[int, ...] | None = None  # what ends the replies of a run


def _load(name: str, trust: bool) -> _Source:
    """A model in float32, an adapter merged into it."""
    from jaxrl_llm import data, models

    choice = _checkpoint(name)
    if options.names_run(choice.target):
        config, _ = options.load_target(choice.target, trust=trust)
        if config.resolved_recipe.needs.head:
            raise UsageError(f"The run {choice.target!r} trained a reward model; merge has none.")
        run_dir = Path(choice.target)
        model_config, _, params, tokenizer = load_trained(run_dir, config, choice, merge=True)
        ends = response_ends(tokenizer, chat=config.data.chat)
        return _Source(model_config, params, tokenizer, ends)
    options.check_exists(choice.target)
    model, params = models.load_model(name)
    return _Source(model.config, params, data.load_tokenizer(name))


def _check_config(name: str, config: ModelConfig, other: str, other_config: ModelConfig) -> None:
    """Raises UsageError if two models are different functions of the same parameters."""
    if apart := differences(config, other_config):
        raise UsageError(f"{name!r} and {other!r} are of different architectures: {apart}.")


def _merge(args: Merge, trees: list, base: Any) -> Any:
    """The merged parameters."""
    import jax

    from jaxrl_llm import models

    if args.method == "average":
        weights = args.weights if args.by is None else _metric_weights(args)
        return models.average_params(trees, weights or None)
    if args.method == "extrapolate":
        return models.extrapolate(
            trees[0], trees[1], alpha=0.3 if args.alpha is None else args.alpha
        )
    if args.method == "slerp":
        return models.slerp(trees[0], trees[1], t=0.5 if args.t is None else args.t)
    if args.method == "model_stock":
        return models.model_stock(base, trees)
    vectors = [models.task_vector(tree, base) for tree in trees]
    scale = 1.0 if args.scale is None else args.scale
    if args.method == "iso_c":
        return models.iso_c(base, vectors, scale=scale)
    if args.method == "ties":
        density = 0.2 if args.density is None else args.density
        return models.ties_merge(
            base, vectors, density=density, scale=scale, weights=args.weights or None
        )
    if args.method == "dare":
        drop = 0.9 if args.drop is None else args.drop
        keys = jax.random.split(jax.random.key(args.seed or 0), len(vectors))
        vectors = [models.dare(k, v, drop=drop) for k, v in zip(keys, vectors, strict=True)]
    weights = args.weights or (1.0,) * len(vectors)
    return models.task_arithmetic(base, vectors, scale=[scale * w for w in weights])
