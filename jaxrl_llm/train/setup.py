"""From a configuration to the parts of a run: mesh, model, tokenizer, questions, samplers."""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.data.questions import Question, encode_prompts
from jaxrl_llm.models.lora import Adapted, describe_params, with_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.recipes import EvolutionRecipe, Recipe
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.sampler import count_shared_prefix
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.serialization import base_fingerprint, shapes_of, values_digest
from jaxrl_llm.train.collect import grade, grade_here
from jaxrl_llm.train.config import TrainConfig, find_prompts, find_recipe
from jaxrl_llm.train.critic import init_critic
from jaxrl_llm.train.evaluate import Accuracy, evaluate
from jaxrl_llm.train.mesh import load_meshes
from jaxrl_llm.train.optimizer import make_optimizer
from jaxrl_llm.train.packing import check_reads_segments
from jaxrl_llm.train.population import make_population
from jaxrl_llm.train.provide import check_provided
from jaxrl_llm.train.state import TrainState, init_state


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes:
      config: The configuration.
      mesh: The device mesh, or None for one device.
      sampler_mesh: That of the devices which only sample, or None if there are none.
      model: The model.
      tokenizer: A ``data.Tokenizer``.
      recipe: The method.
      train: Questions that are trained on.
      held_out: Questions that never are; empty if none are held out.
      sampler: Of rollouts, on the sampler's mesh if there is one; as for the next three, see
        ``rollout.make_sampler``. Of an evolution recipe, its population.
      baseline: One most likely response a question, in the same place.
      greedy: The same for the evaluation, on the mesh.
      sampled: Responses of the sampled evaluation.
      engine: Slots in which rollouts decode instead, or None.
      questions: A digest of all questions, before any limit, and of their split and order.
      shared_prefix_len: How many first tokens all questions share; they are computed once a batch.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh | None
    sampler_mesh: jax.sharding.Mesh | None
    model: Model
    tokenizer: Any
    recipe: Recipe | EvolutionRecipe
    train: list[Question]
    held_out: list[Question]
    sampler: Callable
    baseline: Callable
    greedy: Callable
    sampled: Callable
    engine: Any
    questions: str
    shared_prefix_len: int

    @property
    def deadline(self) -> float | None:
        """Seconds that one call of the reward may take; None leaves it to its kind."""
        return self.config.reward_deadline

    def grade(self, questions: list[Question], completions: list[list[str]]) -> Scores:
        """Rewards of groups of completions."""
        return grade(questions, completions, self.config.reward, deadline=self.deadline)

    def grade_here(self, questions: list[Question], completions: list[list[str]]) -> Scores:
        """The same, without the other processes of a run that has several."""
        return grade_here(questions, completions, self.config.reward, deadline=self.deadline)

    def evaluate(
        self, params: ArrayTree, key: jax.Array, *, check: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Accuracy], list[dict]]:
        """Greedy and sampled accuracy on the held-out questions, and the greedy completions.

        Args:
          params: Parameters of the policy.
          key: That of the run's state; the same key gives the same evaluation.
          check: Called before each batch; what it raises ends the evaluation.
        """

        def checked(sampler: Callable) -> Callable:
            return lambda *given: check() or sampler(*given)

        config = self.config
        common = {"reward": config.reward, "tokenizer": self.tokenizer, "deadline": self.deadline}
        inputs = (params, jax.random.fold_in(key, 0x7FFFFFFF), self.held_out)
        size, shards = config.prompts_per_step, batch_shards(self.mesh)
        # As many rows as a training batch has, but no more prompts than there are.
        enough = -(-len(self.held_out) // shards) * shards
        many = min(size * config.sampling.group_size, enough)
        greedy, rows = evaluate(checked(self.greedy), *inputs, batch_size=many, **common)
        sampled, _ = evaluate(checked(self.sampled), *inputs, batch_size=size, **common)
        return {"greedy": greedy, "sampled": sampled}, rows

    def describe(self, params: ArrayTree) -> str:
        """One line about the run."""
        config, devices = self.config, 1 if self.mesh is None else self.mesh.size
        name = config.model if isinstance(config.model, str) else "model"
        used = f"{devices} of {jax.device_count()} {jax.default_backend()} device(s)"
        if most := config.asynchrony.max_staleness:
            own = config.asynchrony.sampler_devices
            used += f" and {own} more that sample" if own else ""
            used += f", rollouts at most {most} update(s) behind"
        return (
            f"{name}, {describe_params(params)}, {used}; {self.recipe.name}, "
            f"{config.prompts_per_step} prompts x {config.sampling.group_size} rollouts a step; "
            f"{len(self.train)} questions to train on, {len(self.held_out)} held out"
        )


def load_model(config: TrainConfig, mesh, *, frozen=False) -> tuple[Model, ArrayTree, Any]:
    """The model, its parameters on the mesh, float32 unless they stay frozen, and its tokenizer."""
    if isinstance(config.model, str):
        from jaxrl_llm import data, models

        matrices = config.dtype if frozen else None
        model, params = models.load_model(config.model, mesh=mesh, matrices=matrices)
        asked = {"dtype": config.dtype, "quantization": config.quantization}
        model = models.make_model(dataclasses.replace(model.config, **asked))
        return model, params, data.load_tokenizer(config.model)
    model, params, tokenizer = config.model()
    params = trees.cast(params, jnp.float32)
    if mesh is not None:
        from jaxrl_llm.models.sharding import param_shardings, shard

        params = shard(params, param_shardings(params, mesh))
    return model, params, tokenizer


def load_questions(config: TrainConfig, tokenizer, room: int) -> tuple[list, list, str]:
    """The questions to train on and those held out, as tokens, and a digest of all of them."""
    from jaxrl_llm import data

    prompts, held_out = find_prompts(config.data.prompts), ()
    if config.data.evaluation is not None:
        held_out = find_prompts(config.data.evaluation)
        known = {prompt.text for prompt in prompts}
        if both := sum(prompt.text in known for prompt in held_out):
            warnings.warn(
                f"data: {both} of the {len(held_out)} evaluation prompts are also trained on.",
                stacklevel=2,
            )
    elif config.data.held_out and config.evaluation.enabled:
        prompts, held_out = data.split_distinct(
            prompts, held_out=config.data.held_out, seed=config.data.seed
        )
    if len(prompts) == 0:
        raise ValueError("data: there are no prompts to train on.")
    texts = [[prompt.text for prompt in part] for part in (prompts, held_out)]
    digest = hashlib.sha256(json.dumps([*texts, config.data.seed]).encode()).hexdigest()
    if config.evaluation.limit is not None:
        held_out = held_out[: config.evaluation.limit]
    options = {"room": room, "chat": config.data.chat, "system": config.data.system}
    train = encode_prompts(prompts, tokenizer, **options)
    return train, encode_prompts(held_out, tokenizer, **options), digest


def _samplers(
    config: TrainConfig,
    recipe: Recipe | EvolutionRecipe,
    model,
    tokenizer,
    mesh,
    sampler_mesh,
    *,
    longest: int,
    shared_prefix_len: int,
) -> dict:
    """The samplers of :class:`Parts` by name; nothing is compiled twice that could be shared.

    ``longest`` is the longest prompt trained on; ``shared_prefix_len`` is that of the parts.
    """
    from jaxrl_llm.rollout import make_engine, make_sampler

    sampling = config.sampling
    shared = {"max_new_tokens": sampling.max_new_tokens, "stop_ids": tokenizer.eos_ids}
    shared["pad_id"] = tokenizer.pad_id
    filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    policy = {"temperature": sampling.temperature, **filters}

    whole = shared | {"shared_prefix_len": shared_prefix_len}

    def drawn(group_size: int, where):
        return make_sampler(model, group_size=group_size, mesh=where, **policy, **whole)

    def likely(where):
        return make_sampler(model, group_size=1, temperature=0.0, mesh=where, **whole)

    greedy, group_size = likely(mesh), sampling.group_size
    samples = config.evaluation.samples or group_size
    if isinstance(recipe, EvolutionRecipe):
        own: dict = whole | (filters if recipe.temperature else {})
        sampler = make_population(model, recipe, group_size=group_size, mesh=mesh, **own)
        baseline, sampled = greedy, drawn(samples, mesh)
    elif sampler_mesh is not None:
        sampler, baseline = drawn(group_size, sampler_mesh), likely(sampler_mesh)
        sampled = drawn(samples, mesh)
    else:
        sampler, baseline = drawn(group_size, mesh), greedy
        sampled = sampler if samples == group_size else drawn(samples, mesh)
    engine = None
    if sampling.slots is not None:
        rows, width = sampling.grid(config.prompts_per_step)
        where = mesh if sampler_mesh is None else sampler_mesh
        sizes = {"rows": rows, "width": width, "prompt_length": longest}
        engine = make_engine(model, mesh=where, **sizes, **policy, **shared)
    made = {"sampler": sampler, "baseline": baseline, "greedy": greedy, "sampled": sampled}
    return made | {"engine": engine}


def load_parts(config: TrainConfig) -> tuple[Parts, ArrayTree]:
    """Everything that a run needs, loaded and checked against each other, and the parameters.

    Raises:
      ValueError: If the parts do not fit: a mesh that the devices or the batch do not divide, a
        prompt that is longer than the context, no held-out questions for an evaluation.
    """
    mesh, sampler_mesh = load_meshes(
        config.mesh, config.asynchrony, config.prompts_per_step, config.microbatches
    )
    model, params, tokenizer = load_model(config, mesh, frozen=config.lora.rank is not None)
    model, params = with_adapter(model, params, config.lora, mesh=mesh)
    if config.packing == "always":
        check_reads_segments("train", model)
    sampling = config.sampling
    room = model.config.max_length - sampling.max_new_tokens
    if room < 1:
        raise ValueError(
            f"sampling: max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in "
            f"the model's context of {model.config.max_length}."
        )
    train, held_out, digest = load_questions(config, tokenizer, room)
    if config.evaluation.enabled and not held_out:
        raise ValueError(
            "evaluation: there are no held-out questions; set data.held_out or data.evaluation, or "
            "turn the evaluation off."
        )
    recipe = find_recipe(config.recipe, sampling, num_prompts=len(train))
    if isinstance(recipe, Recipe):
        check_provided(recipe, train)
    shared_prefix_len = count_shared_prefix([q.tokens for q in (*train, *held_out)])
    lengths = {"longest": max(len(q.tokens) for q in train), "shared_prefix_len": shared_prefix_len}
    parts = Parts(
        config=config,
        mesh=mesh,
        sampler_mesh=sampler_mesh,
        model=model,
        tokenizer=tokenizer,
        recipe=recipe,
        train=train,
        held_out=held_out,
        questions=digest,
        shared_prefix_len=shared_prefix_len,
        **_samplers(config, recipe, model, tokenizer, mesh, sampler_mesh, **lengths),
    )
    return parts, params


def begin(
    config: TrainConfig, optimizer, folder: Path, *, resume: bool
) -> tuple[Parts, Checkpoints, TrainState, ArrayTree | None]:
    """The parts of a run, its checkpoints, the state it begins from, and its reference parameters.

    Args:
      config: The run.
      optimizer: Any optax transformation.
      folder: Of the checkpoints.
      resume: Begin from the last checkpoint that can be read.

    Returns:
      The last one is None unless the recipe compares the policy with a reference.
    """
    from jaxrl_llm.data import Cursor

    parts, params = load_parts(config)
    recipe, moving = parts.recipe, parts.recipe.reference is not None
    base = params.base if isinstance(params, Adapted) else params
    reference = base if recipe.uses_reference and not moving else None
    run = {"questions": parts.questions, "seed": config.seed}
    run |= base_fingerprint(params, config.lora)
    if reference is not None and "base" not in run:  # it is loaded anew, also by a resumed run
        run["reference"] = values_digest(reference)
    kept = {"keep": config.checkpoint.keep, "best": config.checkpoint.best}
    checkpoints = Checkpoints(folder, model=parts.model, run=run, **kept)
    # A model that comes from a function may be kept by whoever wrote it.
    shared = reference is not None or not isinstance(config.model, str)
    state = init_state(
        params,
        optimizer,
        parts.recipe,
        key=jax.random.key(config.seed),
        data_cursor=Cursor(),
        mesh=parts.mesh,
        copy=shared and not resume,
        **_critic(parts, base),
    )
    if resume:
        state = shapes_of(state)
        del params, base  # before others are read, so that only one state is in memory
        checkpoints.sweep()
        state = checkpoints.restore(state)
    return parts, checkpoints, state, reference


def _critic(parts: Parts, params: ArrayTree) -> dict[str, Any]:
    """The critic's first parameters, from those of the policy, and its optimizer."""
    if parts.recipe.critic is None or parts.config.critic is None:
        return {}
    key = jax.random.fold_in(jax.random.key(parts.config.seed), 0x637269)
    critic = init_critic(parts.model, params, heads=parts.recipe.critic.heads, key=key)
    return {"critic": critic, "critic_optimizer": make_optimizer(parts.config.critic)}
