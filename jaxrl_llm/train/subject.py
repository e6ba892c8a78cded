"""What a plan is about: a model as shapes, and questions as lengths; no weight is read."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.train.config import TrainConfig, find_recipe
from jaxrl_llm.train.packing import check_reads_segments
from jaxrl_llm.train.provide import check_provided


class Subject(NamedTuple):
    """What a plan is about, as shapes.

    Attributes:
      model: The model, without an adapter.
      params: Shapes of its parameters.
      longest: Tokens of the longest prompt, as the sampler pads it.
      held_out: How many questions are held out.
    """

    model: Model
    params: ArrayTree
    longest: int
    held_out: int


def abstract_model(config: TrainConfig) -> tuple[Model, ArrayTree, Any]:
    """Model, shapes of its float32 parameters, and tokenizer; no weight is read or fetched.

    A function that returns the model is traced; one that cannot be is called.
    """
    from jaxrl_llm import data, models

    if isinstance(config.model, str):
        from jaxrl_llm.models.loading import read_config

        files = models.resolve(config.model, weights=False)
        asked = {"dtype": config.dtype, "quantization": config.quantization}
        model = models.make_model(dataclasses.replace(read_config(files.config), **asked))
        return model, models.param_shapes(model), data.load_tokenizer(files.tokenizer)
    found: list[Any] = []

    def build():
        model, params, tokenizer = config.model()
        found[:] = model, tokenizer
        return trees.cast(params, jnp.float32)

    try:
        shapes = jax.eval_shape(build)
    except jax.errors.JAXTypeError:  # it looks at values
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), build())
    return found[0], shapes, found[1]


def load_subject(config: TrainConfig) -> Subject:
    """What a plan of this configuration is about: reads the questions, but no weights.

    Raises:
      ValueError: If model or questions are such that the run would not start.
    """
    from jaxrl_llm.rollout.sampler import BUCKETS, prompt_room
    from jaxrl_llm.train.setup import load_questions

    model, params, tokenizer = abstract_model(config)
    if config.packing == "always":
        check_reads_segments("train", model)
    room = prompt_room("sampling", model, config.sampling.max_new_tokens)
    train, held_out, _ = load_questions(config, tokenizer, room)
    if config.evaluation.enabled and not held_out:
        raise ValueError(
            "evaluation: there are no held-out questions; set data.held_out or data.evaluation, or "
            "turn the evaluation off."
        )
    recipe = find_recipe(config.recipe, config.sampling, num_prompts=len(train))
    if isinstance(recipe, Recipe):
        check_provided(recipe, train)
    longest = max(len(question.tokens) for question in [*train, *held_out])
    longest = next((size for size in BUCKETS if size >= longest), longest)
    return Subject(model, params, longest, len(held_out))
