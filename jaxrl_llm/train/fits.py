"""``--plan``: whether a run fits the memory of its devices, and which option to turn if not."""

import dataclasses
import math
from collections.abc import Iterator

import jax

from jaxrl_llm.train.config import TrainConfig
from jaxrl_llm.train.memory import available_memory
from jaxrl_llm.train.mesh import MeshConfig
from jaxrl_llm.train.plan import Plan, held_bytes, lay_out, make_plan
from jaxrl_llm.train.subject import Subject, load_subject

# Of a device's memory, what the formulas may fill: compilers and fragments take the rest.
_SHARE = 0.95
# A limit on the tokens to sample from that is rarely noticed.
_TOP_K = 128


class NoRoom(ValueError):
    """A run takes more memory than a device has."""


def plan_text(config: TrainConfig, *, memory: float | None = None) -> str:
    """The plan of a run as a table, if it fits.

    Args:
      config: The run; its questions are read, its weights are not.
      memory: Bytes of one device, an accelerator that need not be here, of which there are as many
        as the mesh says; None asks those that are here.

    Raises:
      NoRoom: If it does not fit; the message holds the table and the options that would help.
      ValueError: If the run could not start: the configuration does not fit the model, the data or
        the devices.
    """
    elsewhere = memory is not None
    _check_here(config, elsewhere)
    config = lay_out(config, elsewhere=elsewhere)
    accelerator = True if elsewhere else None
    room = _room(config) if memory is None else int(memory)
    subject = load_subject(config)
    plan = make_plan(config, subject, accelerator=accelerator)
    lines = [_title(config, subject), *_table(plan)]
    if plan.unknown:
        names = ", ".join(plan.unknown)
        lines.append(f"Activations are not counted: the model's configuration has no {names}.")
    if room is None:
        return "\n".join([*lines, "The device does not tell how much memory it has."])
    lines.append(_row(2, "a device has", room))
    if plan.most <= _SHARE * room:
        return "\n".join([*lines, "What is counted fits." if plan.unknown else "It fits."])
    lines.append("It does not fit. At most, one of these options at a time:")
    for text, less in _smaller(config, subject, elsewhere, accelerator):
        if less < 0.99 * plan.most:
            verdict = ", fits" if less <= _SHARE * room and not plan.unknown else ""
            lines.append(f"  {text:<40}{_size(less):>12}{verdict}")
    raise NoRoom("\n".join(lines))


def check_held(config: TrainConfig) -> None:
    """Raises NoRoom if what is there for the whole run is already more than a device has.

    Only for a pretrained model, whose shapes are known before its weights are read.
    """
    if not isinstance(config.model, str):
        return
    config = lay_out(config)
    room = _room(config)
    if room is None:
        return
    held = held_bytes(config)
    if sum(held.values()) > room:
        parts = ", ".join(f"{name} {_size(count)}" for name, count in held.items())
        raise NoRoom(
            f"train: the state of this run, {_size(sum(held.values()))} on each device ({parts}), "
            f"is more than the {_size(room)} there are; train an adapter (--lora.rank 16), split "
            "the state over devices (--mesh.fsdp), or see what helps with --plan."
        )


def _check_here(config: TrainConfig, elsewhere: bool) -> None:
    """Raises ValueError for a mesh of more devices than are here, where it is planned for those."""
    wanted, there = math.prod(dataclasses.astuple(config.mesh)), jax.device_count()
    if not elsewhere and wanted > there:
        raise ValueError(
            f"plan: the mesh is of {wanted} devices, but there are {there}; for devices elsewhere "
            "give the memory of one (--plan-memory)."
        )


def _room(config: TrainConfig) -> int | None:
    """Bytes that a device has for the run."""
    own = config.asynchrony.sampler_devices or 0
    return available_memory(math.prod(dataclasses.astuple(config.mesh)) + own)


def _smaller(
    config: TrainConfig, subject: Subject, elsewhere: bool, accelerator: bool | None
) -> Iterator[tuple[str, int]]:
    """Options and the most that the run would take with each of them, if it could start."""
    for text, changed in knobs(config, elsewhere=elsewhere):
        try:
            changed = lay_out(changed, elsewhere=elsewhere)
            plan = make_plan(changed, _other(config, changed, subject), accelerator=accelerator)
        except ValueError:  # such as a rank above the size of a matrix
            continue
        yield text, plan.most


def knobs(config: TrainConfig, *, elsewhere: bool = False) -> Iterator[tuple[str, TrainConfig]]:
    """Options that make a run smaller; those that change least of what is learned come first.

    Args:
      config: The run, the sizes of its mesh in numbers.
      elsewhere: Whether its devices are not here, so that nobody knows how many there are.
    """
    sampling, count = config.sampling, config.prompts_per_step
    changes: list[tuple[str, dict]] = []
    if config.remat != "full":
        changes.append(("--remat full", {"remat": "full"}))
    more = [n for n in (2, 4, 8, 16, 32) if n > config.microbatches and count % n == 0]
    changes += [(f"--microbatches {n}", {"microbatches": n}) for n in more]
    if sampling.slots is None and count > 1:
        changes.append((f"--sampling.slots {count // 2}", {"sampling": {"slots": count // 2}}))
    changes += _meshes(config, elsewhere)
    if isinstance(config.model, str) and config.dtype == "float32":
        changes.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if config.optimizer.moment_dtype == "float32":
        half = {"optimizer": {"moment_dtype": "bfloat16"}}
        changes.append(("--optimizer.moment-dtype bfloat16", half))
    if sampling.top_k is None or sampling.top_k > _TOP_K:
        changes.append((f"--sampling.top-k {_TOP_K}", {"sampling": {"top_k": _TOP_K}}))
    if config.lora.rank is None:
        changes.append(("--lora.rank 16", {"lora": {"rank": 16}}))
    if (tokens := sampling.max_new_tokens // 2) > 0:
        shorter = {"sampling": {"max_new_tokens": tokens}}
        changes.append((f"--sampling.max-new-tokens {tokens}", shorter))
    for text, options in changes:
        try:
            yield text, _replaced(config, options)
        except ValueError:
            continue  # the rest of this configuration does not go with it


def _meshes(config: TrainConfig, elsewhere: bool) -> list[tuple[str, dict]]:
    """Options that spread a run over more devices, or split more of it."""
    mesh, own = config.mesh, config.asynchrony.sampler_devices or 1
    found: list[tuple[str, dict]] = []
    if mesh.fsdp == 1 and mesh.data > 1:
        size = mesh.data if elsewhere else -1
        found.append((f"--mesh.data 1 --mesh.fsdp {size}", {"mesh": {"data": 1, "fsdp": size}}))
    elif mesh.fsdp == 1:
        for size in (2, 4, 8) if elsewhere else (-1,):
            found += [
                (f"--mesh.{axis} {size}", {"mesh": {axis: size}}) for axis in ("data", "fsdp")
            ]
    if own > 1:
        name, split = "--asynchrony.sampler-mesh", MeshConfig(fsdp=own)
        text = f"{name}.data 1 {name}.fsdp {own}"
        found.append((text, {"asynchrony": {"sampler_mesh": split}}))
    return found


def _replaced(config: TrainConfig, options: dict) -> TrainConfig:
    """The configuration with other values, those of a section in a dict of their own."""
    changes = {
        name: dataclasses.replace(getattr(config, name), **value)
        if isinstance(value, dict)
        else value
        for name, value in options.items()
    }
    return dataclasses.replace(config, **changes)


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
    for title, parts, needed in (
        ("until all is loaded", plan.loading, False),
        ("always", plan.state, True),
        ("while a step trains", plan.step, True),
        ("while the policy samples", plan.sampling, True),
        ("at most", {"": plan.peak}, True),
        ("on a device that samples", plan.sampler, False),
    ):
        if parts or needed:
            lines.append(_row(2, title, sum(parts.values())))
            lines += [_row(4, name, count) for name, count in parts.items() if name]
    return lines


def _row(indent: int, name: str, count: int) -> str:
    return f"{' ' * indent}{name:<{30 - indent}}{_size(count):>12}"


def _size(count: float) -> str:
    """Bytes in words."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.1f} KiB"
