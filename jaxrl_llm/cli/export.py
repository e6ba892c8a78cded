"""``jaxrl-llm export``."""

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.data.questions import TextEncoder
from jaxrl_llm.data.rendering import response_ends
from jaxrl_llm.models.export import check_decoder
from jaxrl_llm.models.heads import merge_headed
from jaxrl_llm.models.lora import Adapted, merge_lora
from jaxrl_llm.models.names import SHORT_NAMES
from jaxrl_llm.train import Checkpoints, TrainConfig, save_adapter
from jaxrl_llm.train.checkpoint.serialization import abstract, base_fingerprint
from jaxrl_llm.train.experiment.run_models import load_model, with_trained

# In a folder that an export writes, until it is complete: no other folder is removed.
_MARK = ".jaxrl_llm.unfinished"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Exports a trained model as a Hugging Face folder: config.json, safetensors, tokenizer files.

    An adapter is merged into its base model, or written separately in PEFT's format.

    Attributes:
      run: The folder of a run.
      folder: The folder to write; it must not exist yet.
      step: The step of the run's checkpoint; by default the last.
      best: Use the checkpoint that was saved as best.
      trust: Execute the config.py of a run that was not made here; read it first.
      dtype: Dtype of the stored weights.
      adapter: Write only the adapter, float32: adapter_model.safetensors and adapter_config.json.
    """

    run: tyro.conf.Positional[str]
    folder: tyro.conf.Positional[str]
    step: int | None = None
    best: bool = False
    trust: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    adapter: bool = False


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    from jaxrl_llm import models

    args = options.parse(Export, arguments, command="export")
    config, run_dir = options.load_target(args.run, trust=args.trust)
    if run_dir is None:
        raise UsageError(f"{args.run!r} is a config file; give the folder of a run.")
    check_new(args.folder)
    choice = options.CheckpointChoice(args.run, args.step, args.best, args.trust)
    choice.check(config)
    if args.adapter and config.lora.rank is None:
        raise UsageError(f"--adapter has no effect: the run {args.run!r} has no adapter.")
    if args.adapter and args.dtype != "float32":
        raise UsageError("--dtype has no effect with --adapter, which is float32.")
    recipe = config.resolved_recipe
    if args.adapter and recipe.needs.head:
        raise UsageError("--adapter has no effect: PEFT's format has no place for a head.")
    with options.usage_errors():
        model_config, step, params, tokenizer = load_trained(
            run_dir, config, choice, merge=not args.adapter
        )
    left_out = ""
    with new_folder(args.folder) as unfinished:
        if args.adapter:
            name = config.model if isinstance(config.model, str) else ""
            # PEFT loads no GGUF, and the policy of another run has no name.
            if name in SHORT_NAMES or name.endswith(".gguf") or config.init_from is not None:
                name = ""
            save_adapter(params, unfinished, lora=config.lora, config=model_config, base=name)
        else:
            models.save_safetensors(
                params,
                unfinished,
                config=model_config,
                dtype=args.dtype,
                head=recipe.needs.head,
                pad_id=_pad_id(tokenizer, config, model_config) if recipe.needs.head else None,
            )
            ends = response_ends(tokenizer, chat=config.data.chat)
            left_out = save_tokenizer(tokenizer, unfinished, ends=ends)
    what = "adapter" if args.adapter else "reward model" if recipe.needs.head else "model"
    print(f"The {what} after step {step} is in {args.folder}, as {args.dtype}.{left_out}")
    return 0


def _pad_id(tokenizer, config: TrainConfig, model_config) -> int | None:
    """The padding of a reward model; None where it is the token that ends a response."""
    encoder = TextEncoder(tokenizer, sys.maxsize, config.data.chat, config.data.system)
    pad_id, end = int(tokenizer.pad_id), encoder.end_ids[-1]
    return pad_id if pad_id != end and pad_id < model_config.vocab_size else None


def check_new(folder: str) -> None:
    """Raises UsageError if a folder to write exists, is a link, or cannot be created."""
    if os.path.lexists(folder):
        raise UsageError(f"{folder!r} exists already; name a folder that does not.")
    unfinished = _unfinished(folder)
    if os.path.lexists(unfinished) and not (unfinished / _MARK).is_file():
        raise UsageError(
            f"{str(unfinished)!r}, where {folder!r} is written first, is not from an export that "
            "was ended; move it, or name another folder."
        )
    options.check_creatable(folder)


def _unfinished(folder: str) -> Path:
    target = Path(folder)
    return target.with_name(f"{target.name}.unfinished")


@contextlib.contextmanager
def new_folder(folder: str) -> Iterator[Path]:
    """A folder to write to, which gets its name when it is complete and is deleted on failure."""
    check_new(folder)  # again, since much time may have passed
    target, unfinished = Path(folder), _unfinished(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        (unfinished / _MARK).touch()
        yield unfinished
        unfinished.rename(target)
        (target / _MARK).unlink()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def save_tokenizer(tokenizer, folder: Path, *, ends: Sequence[int] | None = None) -> str:
    """Writes the files of a tokenizer; returns a message if it has none, else ""."""
    from jaxrl_llm import data

    try:
        data.save_tokenizer(tokenizer, folder, ends=ends)
    except TypeError:
        return f" Its {type(tokenizer).__name__} has no files, so there are none of the tokenizer."
    return ""


def load_trained(
    run_dir: Path, config: TrainConfig, choice: options.CheckpointChoice, *, merge: bool
):
    """The model's configuration, the step, the parameters or adapter after it, the tokenizer."""
    config = options.in_its_precision(run_dir, options.without_start(config))
    model, params, tokenizer = load_model(config, None)
    with options.usage_errors("save_safetensors: "):
        check_decoder("save_safetensors", model.config)
    recipe = config.resolved_recipe
    with_delta, policy = with_trained(config, recipe, model, params)
    marks, best = base_fingerprint(policy, config.lora), config.checkpoint.best
    checkpoints = Checkpoints(run_dir / "checkpoints", model=with_delta, best=best, run=marks)
    step = choice.resolve(checkpoints)
    if isinstance(policy, Adapted):
        policy = checkpoints.restore_policy(policy, step=step)
        trained = policy.adapter
        if merge:
            # Into the weights as they were loaded: the policy's base may have been rounded.
            if recipe.needs.head:
                trained = merge_headed(Adapted({"model": params}, trained), config.lora)
            else:
                trained = merge_lora(Adapted(params, trained), config.lora)
    else:
        like = jax.tree.map(abstract, policy)
        del params, policy  # before the checkpoint is read, so that one model is in memory
        trained = checkpoints.restore_params(like, step=step)
    return model.config, checkpoints.last, trained, tokenizer
