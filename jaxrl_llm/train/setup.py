"""From a configuration to the parts of a run: mesh, model, tokenizer, questions, samplers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.train import mesh as meshes
from jaxrl_llm.train.collect import Question, encode_prompts
from jaxrl_llm.train.config import TrainConfig, find_prompts, find_recipe
from jaxrl_llm.train.evaluate import Accuracy, evaluate


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes:
      config: The configuration.
      mesh: The device mesh, or None for one device.
      model: The model.
      tokenizer: A ``data.Tokenizer``.
      recipe: The method.
      train: Questions that are trained on.
      held_out: Questions that never are; empty if none are held out.
      sampler: Of rollouts; as for the next two, see ``rollout.make_sampler``.
      greedy: One most likely response a question.
      sampled: Responses of the sampled evaluation.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh | None
    model: Model
    tokenizer: Any
    recipe: Recipe
    train: list[Question]
    held_out: list[Question]
    sampler: Callable
    greedy: Callable
    sampled: Callable

    def evaluate(self, params: ArrayTree, key: jax.Array) -> tuple[dict[str, Accuracy], list[dict]]:
        """Greedy and sampled accuracy on the held-out questions, and the greedy completions."""
        config = self.config
        common = {"reward": config.reward, "tokenizer": self.tokenizer}
        common["deadline"] = config.reward_deadline
        size = config.prompts_per_step
        greedy, rows = evaluate(
            self.greedy,
            params,
            key,
            self.held_out,
            batch_size=size * config.sampling.group_size,
            **common,
        )
        sampled, _ = evaluate(self.sampled, params, key, self.held_out, batch_size=size, **common)
        return {"greedy": greedy, "sampled": sampled}, rows

    def describe(self, params: ArrayTree) -> str:
        """One line about the run."""
        config, devices = self.config, 1 if self.mesh is None else self.mesh.size
        name = config.model if isinstance(config.model, str) else "model"
        return (
            f"{name}, {trees.size(params):,} parameters, {devices} of {jax.device_count()} "
            f"{jax.default_backend()} device(s); {self.recipe.name}, {config.prompts_per_step} "
            f"prompts x {config.sampling.group_size} rollouts a step; {len(self.train)} questions "
            f"to train on, {len(self.held_out)} held out"
        )


def load_model(config: TrainConfig, mesh: jax.sharding.Mesh | None) -> tuple[Model, ArrayTree, Any]:
    """The model, its parameters on the mesh, and its tokenizer."""
    if isinstance(config.model, str):
        from jaxrl_llm import data, models

        model, params = models.load_model(config.model, mesh=mesh, dtype=config.dtype)
        return model, params, data.load_tokenizer(config.model)
    model, params, tokenizer = config.model()
    if mesh is not None:
        from jaxrl_llm.models.sharding import param_shardings, shard

        params = shard(params, param_shardings(params, mesh))
    return model, params, tokenizer


def load_questions(config: TrainConfig, tokenizer, room: int) -> tuple[list, list]:
    """The questions to train on and those held out, as tokens."""
    from jaxrl_llm import data

    prompts, held_out = find_prompts(config.data.prompts), ()
    if config.data.evaluation is not None:
        held_out = find_prompts(config.data.evaluation)
    elif config.data.held_out:
        prompts, held_out = data.split_distinct(
            prompts, held_out=config.data.held_out, seed=config.data.seed
        )
    if len(prompts) == 0:
        raise ValueError("data: there are no prompts to train on.")
    if config.evaluation.limit is not None:
        held_out = held_out[: config.evaluation.limit]
    options = {"room": room, "chat": config.data.chat, "system": config.data.system}
    train = encode_prompts(prompts, tokenizer, **options)
    return train, encode_prompts(held_out, tokenizer, **options)


def load_parts(config: TrainConfig) -> tuple[Parts, ArrayTree]:
    """Everything that a run needs, loaded and checked against each other, and the parameters.

    Raises:
      ValueError: If the parts do not fit: a mesh that the devices or the batch do not divide, a
        prompt that is longer than the context, no held-out questions for an evaluation.
    """
    from jaxrl_llm.rollout import make_sampler

    if jax.process_count() > 1:
        raise ValueError(
            f"train: the loop runs in one process, with all its devices; there are "
            f"{jax.process_count()} processes."
        )
    sizes = config.mesh
    mesh = meshes.make_mesh(data=sizes.data, fsdp=sizes.fsdp, tensor=sizes.tensor)
    meshes.check_batch("train", config.prompts_per_step, config.microbatches, batch_shards(mesh))
    model, params, tokenizer = load_model(config, mesh)
    sampling = config.sampling
    room = model.config.max_length - sampling.max_new_tokens
    train, held_out = load_questions(config, tokenizer, room)
    if config.evaluation.enabled and not held_out:
        raise ValueError(
            "evaluation: there are no held-out questions; set data.held_out or data.evaluation, or "
            "turn the evaluation off."
        )
    shared = {"max_new_tokens": sampling.max_new_tokens, "stop_ids": tokenizer.eos_ids}
    shared |= {"pad_id": tokenizer.pad_id, "mesh": mesh}
    policy = {"temperature": sampling.temperature, "top_k": sampling.top_k}
    policy |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
    sampler = make_sampler(model, group_size=sampling.group_size, **policy, **shared)
    samples = config.evaluation.samples
    if samples in (None, sampling.group_size):
        sampled = sampler
    else:
        sampled = make_sampler(model, group_size=samples, **policy, **shared)
    parts = Parts(
        config=config,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        recipe=find_recipe(config.recipe, sampling),
        train=train,
        held_out=held_out,
        sampler=sampler,
        greedy=make_sampler(model, group_size=1, temperature=0.0, **shared),
        sampled=sampled,
    )
    return parts, params
