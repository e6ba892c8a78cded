"""The processes of a run, its device mesh, and the devices that only sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models.sharding import (
    AXES,
    BATCH_AXES,
    ShardingRules,
    batch_sharding,
    batch_shards,
    param_spec,
)


def check_mesh_sizes(function: str, sizes: dict[str, int]) -> None:
    """Raises ValueError unless every size is positive or -1, and at most one is -1."""
    for name, size in sizes.items():
        if size != -1:
            checks.check_positive(function, **{name: size})
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"{function}: only one mesh axis may be -1; got {sizes}.")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; they multiply to the number of devices, or to 1 for one device.

    Attributes:
      data: Splits the batch.
      context: Splits the tokens of a row in training, for long responses: activations, products
        and the rows of attention, whose keys and values each device gathers. Rollouts spread their
        prompts over it instead, if it divides them.
      fsdp: Splits the batch and the parameters.
      expert: Splits the batch and the experts of a mixture, whose devices exchange tokens.
      tensor: Splits heads, hidden units and vocabulary.
    """

    data: int = 1
    context: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self):
        checks.check_numbers("mesh", self)
        check_mesh_sizes("mesh", {axis: getattr(self, axis) for axis in AXES})

    @property
    def shards(self) -> int:
        """The number of devices that a batch is split over; 1 if one of the sizes is -1."""
        sizes = [getattr(self, axis) for axis in BATCH_AXES]
        return 1 if -1 in sizes else math.prod(sizes)


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Whether the next rollouts are sampled and graded while a step trains.

    Batch n trains version n of the weights. Its sampling starts once version n - max_staleness
    exists, and uses the newest version. A recipe that weighs tokens by ``behavior_logp``
    corrects for older weights itself. For any other recipe, ``behavior_logp`` is the ``old_logp``,
    so the ratio compares the policy with the weights that sampled; a recipe without a ratio is
    refused, unless it is for samples of any policy (`asymre`) or its collector samples nothing
    (`sft`, `otr`). Checkpoints contain the batches that are finished and not yet trained on.

    On one device, rewards overlap with all other work, but the sampler and the step take turns, and
    the sampler has a copy of the weights (two while it finishes a batch from older weights). With
    `sampler_devices` both run at once. During an evaluation between steps, two threads may call the
    reward.

    Attributes:
      max_staleness: Maximum number of steps, each of one batch, by which the weights that sample
        are older than those that train. 0 samples and trains in turns; 1 does both at once; more
        evens out batches of unequal duration.
      sampler_devices: Number of devices that only sample: the last ones; the mesh has the others.
        None shares the one device of a run without a mesh.
      sampler_mesh: The mesh of those devices; by default all of them split the batch.
    """

    max_staleness: int = 0
    sampler_devices: int | None = None
    sampler_mesh: MeshConfig = MeshConfig(data=-1)

    def __post_init__(self):
        name = "asynchrony"
        checks.check_numbers(name, self)
        checks.check_non_negative(name, max_staleness=self.max_staleness)
        checks.check_positive(name, sampler_devices=self.sampler_devices)
        if self.sampler_devices is not None and not self.max_staleness:
            raise ValueError(
                "asynchrony: sampler_devices has no effect with max_staleness 0: sampling and "
                "training take turns on all devices."
            )
        if self.sampler_devices is None and self.sampler_mesh != MeshConfig(data=-1):
            raise ValueError("asynchrony: sampler_mesh has no effect without sampler_devices.")
        if self.sampler_mesh.context != 1:
            raise ValueError(
                "asynchrony: context has no effect in sampler_mesh, because a sampler makes one "
                "token of a row at a time; use data."
            )

    def check_apart(self, devices: int) -> None:
        """Raises ValueError if a step and the sampler share several devices at one time."""
        if devices > 1 and self.max_staleness and self.sampler_devices is None:
            raise ValueError(
                "asynchrony: a sampler and a step that share several devices would deadlock; give "
                "the sampler its own devices with sampler_devices."
            )


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes of a run: one, unless the cluster or the three options specify more.

    Attributes:
      detect: Reads the processes from the cluster: a TPU pod, Slurm, Open MPI or Kubernetes.
      coordinator: HOST:PORT on the host of process 0, reachable from all.
      processes: Number of processes.
      process: Index of this process, from 0.
      silence: Seconds without a heartbeat after which a process counts as dead, which ends all
        processes; 45 by default.
    """

    detect: bool = False
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    silence: int | None = None

    def __post_init__(self):
        name = "distributed"
        checks.check_numbers(name, self)
        set_options = [x is not None for x in (self.coordinator, self.processes, self.process)]
        checks.check_positive(name, processes=self.processes)
        checks.check_seconds(name, silence=self.silence)
        checks.check_non_negative(name, process=self.process)
        if any(set_options) and (self.detect or not all(set_options)):
            raise ValueError(
                "distributed: give coordinator, processes and process together, or detect alone."
            )
        if self.process is not None and self.process >= (self.processes or 0):
            raise ValueError(
                f"distributed: process must be below {self.processes}, the number of processes; "
                f"got {self.process}."
            )
        if self.silence is not None and not (self.detect or any(set_options)):
            raise ValueError("distributed: silence has no effect on a single process.")

    def start(self) -> None:
        """Joins this process with the others; does nothing for a single process.

        Raises:
          RuntimeError: If jax has used a device already, or the others do not answer.
        """
        if self.detect or self.coordinator is not None:
            processes.start(
                self.coordinator, self.processes, self.process, silence=self.silence or 45
            )


def make_mesh(
    *,
    data: int = 1,
    context: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence | None = None,
    whole: bool = False,
) -> Mesh | None:
    """A mesh with the axes ``data``, ``context``, ``fsdp``, ``expert`` and ``tensor``.

    ``data`` splits the batch, ``context`` the tokens of a row, ``fsdp`` splits the batch and the
    parameters, ``expert`` the batch and the experts of a mixture, and ``tensor`` splits heads,
    hidden units and vocabulary. One size may be -1, for the remaining devices. If there are several
    slices (TPU slices or GPU nodes), the first axes span them, in this order.

    Args:
      data, context, fsdp, expert, tensor: Size of the axis, or -1.
      devices: The devices; all of them by default.
      whole: Whether to use all devices, even if the mesh then has only one.

    Returns:
      The mesh, or None for one device, which needs none.

    Raises:
      ValueError: If a size is neither positive nor -1, two are -1, or the sizes do not multiply to
        the number of devices (or to 1).

    Example:
      >>> make_mesh() is None
      True
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(zip(AXES, (data, context, fsdp, expert, tensor), strict=True))
    check_mesh_sizes("make_mesh", sizes)
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if len(devices) % known:
            raise ValueError(
                f"make_mesh: {known} (the other sizes) does not divide the {len(devices)} devices."
            )
        sizes = {k: len(devices) // known if v == -1 else v for k, v in sizes.items()}
    total = math.prod(sizes.values())
    if total == 1 and not whole:
        return None
    if total != len(devices):
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        several = " JAX_NUM_CPU_DEVICES makes several of one CPU." if total > len(devices) else ""
        raise ValueError(
            f"make_mesh: {text} needs {total} devices, but there are {len(devices)}; the sizes "
            f"must multiply to the number of devices{'' if whole else ', or to 1'}.{several}"
        )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    # The first axes communicate least, so they cross the network between slices.
    between = dict.fromkeys(sizes, 1)
    for axis, size in sizes.items():
        between[axis] = math.gcd(slices // math.prod(between.values()), size)
    within = [size // between[axis] for axis, size in sizes.items()]
    if slices == 1:
        grid = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            within, list(between.values()), devices, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sampling_shards(sizes: Mapping[str, int], prompts: int) -> int:
    """Over how many devices of a mesh with these sizes the rollouts of P prompts are spread.

    A sampler makes one token of a row at a time, which ``context`` cannot split. So its devices
    take prompts of their own, if they divide P; else they repeat each other's work.
    """
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    spread = shards * sizes["context"]
    return shards if prompts % spread else spread


def sampling_mesh(mesh: Mesh | None, prompts: int) -> Mesh | None:
    """The mesh of rollouts on the devices of a training mesh; see :func:`sampling_shards`."""
    if mesh is None or sampling_shards(mesh.shape, prompts) == batch_shards(mesh):
        return mesh
    data, context, *others = mesh.devices.shape
    # The devices keep their order, by which arrays of one mesh are arrays of the other.
    return Mesh(mesh.devices.reshape(data * context, 1, *others), AXES, axis_types=mesh.axis_types)


def check_batch(function: str, prompts: int, microbatches: int, shards: int) -> None:
    """Raises ValueError unless P prompts split into equal microbatches, each split over the mesh.

    A microbatch is split over ``shards`` devices: the axes ``data``, ``fsdp`` and ``expert``.
    """
    checks.check_positive(function, prompts=prompts, microbatches=microbatches)
    if prompts % microbatches:
        raise ValueError(
            f"{function}: {prompts} prompts do not split into {microbatches} microbatches of "
            "full groups."
        )
    if (prompts // microbatches) % shards:
        raise ValueError(
            f"{function}: a microbatch of {prompts // microbatches} prompts ({prompts} in "
            f"{microbatches} microbatch(es)) does not divide over {shards} devices, the mesh axes "
            "data x fsdp x expert."
        )


def check_expert_axis(sizes: Mapping[str, int], params: ArrayTree, rules: ShardingRules) -> None:
    """Raises ValueError if the mesh axis ``expert`` splits no experts of the parameters."""
    if (size := sizes["expert"]) == 1:
        return
    mesh = AbstractMesh((size,), ("expert",))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = (param_spec(trees.path_str(path), x.shape, mesh, rules) for path, x in leaves)
    if not any("expert" in spec for spec in specs):
        raise ValueError(
            f"mesh: expert {size} has no effect: the model has no experts whose number it divides; "
            "use data."
        )


def place_batch(batch: ArrayTree, mesh: Mesh | None) -> ArrayTree:
    """The batch on the mesh, split over its first axis; unchanged without a mesh."""
    return batch if mesh is None else processes.place(batch, batch_sharding(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds entirely."""
    return NamedSharding(mesh, PartitionSpec())


def load_meshes(
    mesh: MeshConfig, asynchrony: AsyncConfig, prompts: int, microbatches: int
) -> tuple[Mesh | None, Mesh | None]:
    """The mesh of a run and the mesh of the devices that only sample; None where there is none.

    Args:
      mesh: Sizes of the axes.
      asynchrony: Which devices only sample, and their mesh.
      prompts, microbatches: As in :func:`check_batch`.

    Raises:
      ValueError: If the sizes do not divide the devices or the batch, or contradict each other.
    """
    devices, sampler_devices, sampler_mesh = jax.devices(), asynchrony.sampler_devices, None
    if asynchrony.max_staleness and jax.process_count() > 1:
        raise ValueError(
            "asynchrony: max_staleness needs a single process; several processes take turns in "
            "sampling and training, so set it to 0."
        )
    if sampler_devices is not None:
        if sampler_devices >= len(devices):
            raise ValueError(
                f"asynchrony: sampler_devices {sampler_devices} leaves none of the {len(devices)} "
                "device(s) for training."
            )
        split = asynchrony.sampler_mesh
        sampler_mesh = make_mesh(
            data=split.data,
            fsdp=split.fsdp,
            expert=split.expert,
            tensor=split.tensor,
            devices=devices[-sampler_devices:],
            whole=True,
        )
        check_batch("asynchrony", prompts, 1, batch_shards(sampler_mesh))
        devices = devices[:-sampler_devices]
    train_mesh = make_mesh(
        data=mesh.data,
        context=mesh.context,
        fsdp=mesh.fsdp,
        expert=mesh.expert,
        tensor=mesh.tensor,
        devices=devices,
    )
    check_batch("train", prompts, microbatches, batch_shards(train_mesh))
    if train_mesh is None and jax.process_count() > 1:
        raise ValueError(
            f"mesh: the {jax.process_count()} processes share one mesh of {len(devices)} devices; "
            "set its sizes, such as fsdp=-1 (--mesh.fsdp -1) for all devices."
        )
    if train_mesh is not None:
        asynchrony.check_apart(len(devices))
    return train_mesh, sampler_mesh
