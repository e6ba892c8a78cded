"""``--plan``: whether a run fits the memory of its devices, and which option to turn if not."""

import dataclasses
import math
from collections.abc import Iterator

import jax

from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.memory import available_memory
from jaxrl_llm.train.plan import Plan, Subject, held_bytes, load_subject, make_plan, mesh_sizes

# Of a device's memory, what the formulas may fill: compilers and fragments take the rest.
_SHARE = 0.95


class NoRoom(ValueError):
    """A run takes more memory than a device has."""


def plan_text(config: TrainConfig, *, memory: float | None = None) -> str:
    """The plan of a run as a table, if it fits.

    Args:
      config: The run; its questions are read, its weights are not.
      memory: Bytes of one device, an accelerator that need not be here; None asks the one that is.

    Raises:
      NoRoom: If it does not fit; the message holds the table and the options that would help.
      ValueError: If the configuration does not fit the model or the data.
    """
    accelerator = None if memory is None else True
    room = _room(config) if memory is None else int(memory)
    subject = load_subject(config)
    plan = make_plan(config, subject, accelerator=accelerator)
    lines = [_title(config, subject), *_table(plan)]
    if room is None:
        return "\n".join([*lines, "The device does not tell how much memory it has."])
    fits = plan.peak <= _SHARE * room
    lines.append(f"  {'a device has':<28}{_size(room):>12}")
    if fits:
        return "\n".join([*lines, "It fits."])
    lines.append("It does not fit. At most, one of these options at a time:")
    for text, changed in knobs(config):
        other = _other(config, changed, subject)
        less = make_plan(changed, other, accelerator=accelerator).peak
        if less < 0.99 * plan.peak:
            verdict = ", fits" if less <= _SHARE * room else ""
            lines.append(f"  {text:<40}{_size(less):>12}{verdict}")
    raise NoRoom("\n".join(lines))


def check_held(config: TrainConfig) -> None:
    """Raises NoRoom if what is there for the whole run is already more than a device has.

    Only for a pretrained model, whose shapes are known before its weights are read.
    """
    room = _room(config)
    if room is None or not isinstance(config.model, str):
        return
    held = held_bytes(config)
    if sum(held.values()) > room:
        parts = ", ".join(f"{name} {_size(count)}" for name, count in held.items())
        raise NoRoom(
            f"train: the state of this run, {_size(sum(held.values()))} on each device ({parts}), "
            f"is more than the {_size(room)} there are; train an adapter (--lora.rank 16), split "
            "the state over devices (--mesh.fsdp), or see what helps with --plan."
        )


def _room(config: TrainConfig) -> int | None:
    """Bytes that a device has for the run."""
    return available_memory(math.prod(mesh_sizes(config).values()))


def knobs(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Options that make a run smaller; those that change least of what is learned come first."""
    sampling, count = config.sampling, config.prompts_per_step
    changes: list[tuple[str, dict]] = []
    if config.remat != "full":
        changes.append(("--remat full", {"remat": "full"}))
    more = [n for n in (2, 4, 8, 16, 32) if n > config.microbatches and count % n == 0]
    changes += [(f"--microbatches {n}", {"microbatches": n}) for n in more]
    if sampling.slots is None and count > 1:
        slots = dataclasses.replace(sampling, slots=count // 2)
        changes.append((f"--sampling.slots {count // 2}", {"sampling": slots}))
    if config.mesh.fsdp == 1 and jax.device_count() > 1:
        if config.mesh.data == 1:
            spread = dataclasses.replace(config.mesh, data=-1)
            changes.append(("--mesh.data -1", {"mesh": spread}))
        split = dataclasses.replace(config.mesh, data=1, fsdp=-1)
        changes.append(("--mesh.fsdp -1", {"mesh": split}))
    if isinstance(config.model, str) and config.dtype == "float32":
        changes.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if config.optimizer.moment_dtype == "float32":
        half = dataclasses.replace(config.optimizer, moment_dtype="bfloat16")
        changes.append(("--optimizer.moment-dtype bfloat16", {"optimizer": half}))
    if config.lora.rank is None:
        adapter = dataclasses.replace(config.lora, rank=16)
        changes.append(("--lora.rank 16", {"lora": adapter}))
    if (tokens := sampling.max_new_tokens // 2) > 0:
        shorter = dataclasses.replace(sampling, max_new_tokens=tokens)
        changes.append((f"--sampling.max-new-tokens {tokens}", {"sampling": shorter}))
    for text, options in changes:
        try:
            yield text, dataclasses.replace(config, **options)
        except ValueError:
            continue  # the rest of this configuration does not go with it


def _other(config: TrainConfig, changed: TrainConfig, subject: Subject) -> Subject:
    """The subject of a configuration that differs at most in the dtype of the model."""
    if changed.dtype == config.dtype:
        return subject
    from jaxrl_llm import models

    model = models.make_model(dataclasses.replace(subject.model.config, dtype=changed.dtype))
    return subject._replace(model=model)


def _title(config: TrainConfig, subject: Subject) -> str:
    name = config.model if isinstance(config.model, str) else "model"
    sampling = config.sampling
    return (
        f"{name}: {config.prompts_per_step} prompts of up to {subject.longest} tokens x "
        f"{sampling.group_size} rollouts of up to {sampling.max_new_tokens}, in "
        f"{config.microbatches} microbatch(es); bytes on each device"
    )


def _table(plan: Plan) -> list[str]:
    lines = []
    for title, parts in (
        ("always", plan.state),
        ("while a step trains", plan.step),
        ("while the policy samples", plan.sampling),
    ):
        lines.append(f"  {title:<28}{_size(sum(parts.values())):>12}")
        lines += [f"    {name:<26}{_size(count):>12}" for name, count in parts.items()]
    return [*lines, f"  {'at most':<28}{_size(plan.peak):>12}"]


def _size(count: float) -> str:
    """Bytes in words."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.1f} KiB"
