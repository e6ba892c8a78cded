"""What a run takes of each device's memory, before anything of it is allocated."""

import dataclasses
import math
from typing import NamedTuple

import jax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.lora import Adapted, trainable
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import AXES, param_spec, update_spec
from jaxrl_llm.recipes import EvolutionRecipe
from jaxrl_llm.train import memory
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.critic import init_critic
from jaxrl_llm.train.evolution import moving_only
from jaxrl_llm.train.frozen import with_adapter
from jaxrl_llm.train.mesh import MeshConfig, check_batch, load_meshes
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.phases import (
    published_bytes,
    sampler_bytes,
    sampling_bytes,
    step_bytes,
    unknown_sizes,
)
from jaxrl_llm.train.subject import Subject, abstract_model


class Plan(NamedTuple):
    """Bytes on one device, by what they are for.

    Attributes:
      loading: Until the state is there.
      state: There for the whole run.
      step: Besides, while a step trains.
      sampling: Besides, while rollouts are sampled or the policy is evaluated.
      together: Whether a step and the sampler are at work at once.
      sampler: On a device that does nothing but sample; empty if there is none.
      unknown: What the model's configuration does not say, for which activations are left out.
    """

    loading: dict[str, int]
    state: dict[str, int]
    step: dict[str, int]
    sampling: dict[str, int]
    together: bool
    sampler: dict[str, int]
    unknown: tuple[str, ...] = ()

    @property
    def held(self) -> int:
        """Bytes that are there for the whole run."""
        return sum(self.state.values())

    @property
    def peak(self) -> int:
        """The most that is at one time on a device that trains."""
        step, sampling = sum(self.step.values()), sum(self.sampling.values())
        at_work = step + sampling if self.together else max(step, sampling)
        return max(sum(self.loading.values()), self.held + at_work)

    @property
    def most(self) -> int:
        """The most that is at one time on any device."""
        return max(self.peak, sum(self.sampler.values()))


def make_plan(config: TrainConfig, subject: Subject, *, accelerator: bool | None = None) -> Plan:
    """Bytes of a run on each device.

    Args:
      config: The run, the sizes of its mesh in numbers; see :func:`lay_out`.
      subject: From :func:`~jaxrl_llm.train.subject.load_subject`, of this configuration or of one
        that differs in nothing that it depends on.
      accelerator: Whether the device multiplies bfloat16 numbers as they are; by default, whether
        the one that is here does. On CPUs most of what is between products is float32.

    Returns:
      The plan. Packed rows, which take less, are counted as if they were padded.

    Raises:
      ValueError: If a part of the run cannot be made, such as an adapter of too high a rank.
    """
    if accelerator is None:
        accelerator = jax.default_backend() != "cpu"
    mesh, own = dataclasses.asdict(config.mesh), config.asynchrony.sampler_devices
    model, params = _with_adapter(config, subject.model, subject.params)
    sampling = sampling_bytes(config, subject, params, mesh)
    shared = config.asynchrony.max_staleness > 0 and own is None
    if shared:
        sampling["weights of the sampler"] = published_bytes(config, params, mesh)
    evolves = isinstance(find_recipe(config.recipe, config.sampling), EvolutionRecipe)
    return Plan(
        {} if isinstance(config.model, str) else _loading_bytes(subject, params, mesh),
        _state_bytes(config, model, params, mesh),
        step_bytes(config, subject, params, mesh, accelerator=accelerator),
        sampling,
        shared,
        {} if own is None else sampler_bytes(config, subject, params, sampler_mesh(config)),
        () if evolves else unknown_sizes(subject),
    )


def held_bytes(config: TrainConfig) -> dict[str, int]:
    """Bytes on one device that are there for the whole run, whose mesh is laid out.

    Only the shape of the model is read.
    """
    model, params, _ = abstract_model(config)
    mesh = dataclasses.asdict(config.mesh)
    return _state_bytes(config, *_with_adapter(config, model, params), mesh)


def lay_out(config: TrainConfig, *, elsewhere: bool = False) -> TrainConfig:
    """The configuration with the sizes of its mesh in numbers, if a run may have it.

    Args:
      config: The run.
      elsewhere: Whether it is planned for devices that are not here; as many as the sizes say.

    Raises:
      ValueError: If the mesh fits neither the batch nor the devices, or has a size of -1 though
        nobody knows how many devices there are.
    """
    if elsewhere:
        _check_elsewhere(config)
    else:
        mesh = load_meshes(config)[0]
        sizes = dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)
        config = dataclasses.replace(config, mesh=MeshConfig(**sizes))
    if config.sampling.slots is not None:
        rows, _ = config.sampling.grid(config.prompts_per_step)
        alone = config.asynchrony.sampler_devices is not None
        sizes = sampler_mesh(config) if alone else dataclasses.asdict(config.mesh)
        if rows % (shards := sizes["data"] * sizes["fsdp"]):
            raise ValueError(
                f"sampling: slots {config.sampling.slots} are {rows} rows, which do not spread "
                f"over {shards} devices, the mesh axes data x fsdp."
            )
    return config


def _check_elsewhere(config: TrainConfig) -> None:
    """Raises ValueError for a mesh that a run refuses, or whose size is not known here."""
    sizes, given = dataclasses.asdict(config.mesh), config.asynchrony
    for axis, size in sizes.items():
        if size == -1:
            raise ValueError(
                f"mesh: how many devices there are elsewhere is not known here; give {axis} a size "
                f"in place of -1 (--mesh.{axis})."
            )
    if given.sampler_devices is not None:
        own = sampler_mesh(config)
        if math.prod(own.values()) != given.sampler_devices:
            text = " x ".join(f"{name} {size}" for name, size in own.items())
            raise ValueError(
                f"asynchrony: a sampler_mesh of {text} is not that of {given.sampler_devices} "
                "sampler_devices."
            )
        check_batch("asynchrony", config.prompts_per_step, 1, own["data"] * own["fsdp"])
    elif given.max_staleness and math.prod(sizes.values()) > 1:
        raise ValueError(
            "asynchrony: a sampler and a step that share several devices would wait for each other "
            "for ever; give the sampler some of its own with sampler_devices."
        )


def sampler_mesh(config: TrainConfig) -> dict[str, int]:
    """Sizes of the mesh axes of the devices which only sample."""
    sizes = dataclasses.asdict(config.asynchrony.sampler_mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    left = (config.asynchrony.sampler_devices or 1) // known
    return {axis: left if size == -1 else size for axis, size in sizes.items()}


def _with_adapter(config: TrainConfig, model: Model, params: ArrayTree) -> tuple[Model, ArrayTree]:
    shapes = jax.eval_shape(lambda p: with_adapter(model, p, config.lora)[1], params)
    return model, shapes


def _loading_bytes(subject: Subject, params: ArrayTree, mesh: dict[str, int]) -> dict[str, int]:
    """A function's weights are float32; those that stay frozen are cast once all are there."""
    if not isinstance(params, Adapted):
        return {}
    kept = memory.tree_bytes(params.base, mesh)
    loaded = memory.tree_bytes(subject.params, mesh)
    return {"weights in float32": loaded, "weights as kept": kept} if kept < loaded else {}


def _state_bytes(
    config: TrainConfig, model: Model, params: ArrayTree, mesh: dict[str, int]
) -> dict[str, int]:
    recipe = find_recipe(config.recipe, config.sampling)
    moving = trainable(params)
    base = params.base if isinstance(params, Adapted) else params
    chosen = moving_only(recipe, make_optimizer(config.optimizer))
    optimizer = jax.eval_shape(chosen.init, moving)
    parts = {"weights": memory.tree_bytes(params, mesh)}
    spec = param_spec if isinstance(recipe, EvolutionRecipe) else update_spec
    parts["optimizer"] = memory.tree_bytes(optimizer, mesh, spec=spec)
    if recipe.reference is not None:
        parts["reference"] = memory.tree_bytes(moving, mesh)
    elif "ref_logp" in recipe.needs and base is params:  # an adapter's reference is its base
        parts["reference"] = memory.tree_bytes(params, mesh)
    if recipe.critic is not None and config.critic is not None:
        heads, key = recipe.critic.heads, jax.random.key(0)
        critic = jax.eval_shape(lambda p: init_critic(model, p, heads=heads, key=key), base)
        own = jax.eval_shape(make_optimizer(config.critic).init, critic)
        copies = 1 if recipe.critic.target_rate is None else 2
        parts["critic"] = copies * memory.tree_bytes(critic, mesh)
        parts["critic"] += memory.tree_bytes(own, mesh, spec=update_spec)
    return parts
