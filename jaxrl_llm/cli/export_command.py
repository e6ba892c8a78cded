"""``jaxrl-llm export``."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import tyro

from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.chosen import check_choice, chosen
from jaxrl_llm.models.lora import Adapted, merge_lora
from jaxrl_llm.train import Checkpoints, TrainConfig, save_adapter
from jaxrl_llm.train.checkpoint.serialization import abstract
from jaxrl_llm.train.frozen import base_fingerprint, restore_policy, with_adapter
from jaxrl_llm.train.setup import load_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """The trained model as a Hugging Face folder: config.json, safetensors, tokenizer files.

    An adapter is merged into the model that it stands beside, or written alone as PEFT reads it.

    Attributes:
      run: The folder of a run.
      folder: What to write; it must not be there yet.
      step: Which checkpoint of the run; by default the last.
      best: The checkpoint that was kept as the best.
      dtype: Of the stored weights.
      adapter: Only the adapter, float32: adapter_model.safetensors and adapter_config.json.
    """

    run: tyro.conf.Positional[str]
    folder: tyro.conf.Positional[str]
    step: int | None = None
    best: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    adapter: bool = False


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    from jaxrl_llm import models

    given = options.parse(Export, arguments, command="export")
    config, run_dir = options.load_target(given.run)
    if run_dir is None:
        raise UsageError(f"{given.run!r} is a config file; give the folder of a run.")
    folder = Path(given.folder)
    if folder.exists():
        raise UsageError(f"{given.folder!r} is there already; name a folder that is not.")
    check_choice(given.run, config, step=given.step, best=given.best)
    if given.adapter and config.lora.rank is None:
        raise UsageError(f"--adapter has no effect: the run {given.run!r} has no adapter.")
    if given.adapter and given.dtype != "float32":
        raise UsageError("--dtype has no effect with --adapter, which is float32.")
    model_config, step, params, tokenizer = _trained(run_dir, config, given)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if given.adapter:
            name = config.model if isinstance(config.model, str) else ""
            save_adapter(params, unfinished, lora=config.lora, config=model_config, base=name)
            left_out = ""
        else:
            models.save_safetensors(params, unfinished, config=model_config, dtype=given.dtype)
            left_out = _save_tokenizer(tokenizer, unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    what = "adapter" if given.adapter else "model"
    print(f"The {what} after step {step} is in {given.folder}, as {given.dtype}.{left_out}")
    return 0


def _trained(run_dir: Path, config: TrainConfig, given: Export):
    """The configuration of the model, the step, the parameters after it, and the tokenizer."""
    model, params, tokenizer = load_model(config, None)
    with_delta, policy = with_adapter(model, params, config.lora)
    marks, best = base_fingerprint(policy, config.lora), config.checkpoint.best
    checkpoints = Checkpoints(run_dir / "checkpoints", model=with_delta, best=best, run=marks)
    step = chosen(checkpoints, given.run, step=given.step, best=given.best)
    if isinstance(policy, Adapted):
        policy = restore_policy(checkpoints, policy, step=step)
        found = policy.adapter
        if not given.adapter:
            # Into the weights as they were loaded: those beside it may have been rounded.
            found = merge_lora(Adapted(params, found), config.lora)
    else:
        like = jax.tree.map(abstract, policy)
        del params, policy  # before others are read, so that only one model is in memory
        found = checkpoints.restore_params(like, step=step)
    return model.config, checkpoints.last, found, tokenizer


def _save_tokenizer(tokenizer, folder: Path) -> str:
    """Writes the tokenizer's files; says so where that is impossible."""
    from jaxrl_llm.data import save_tokenizer

    try:
        save_tokenizer(tokenizer, folder)
    except TypeError:
        return f" Its {type(tokenizer).__name__} has no files, so there are none of the tokenizer."
    return ""
