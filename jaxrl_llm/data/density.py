"""Density ratios of prompts: how much more often good responses have such a prompt."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.curation import density_ratios, hashed_words
from jaxrl_llm.data.prompts import PromptSet


def with_density(
    prompts: PromptSet,
    *,
    label: str = "label",
    embed: Callable[[str], np.ndarray] = hashed_words,
    low: float = 0.5,
    high: float = 10.0,
) -> PromptSet:
    """The prompts with the column "density", which ``recipes.bco(density=True)`` reads.

        density = curation.density_ratios(embed(text of each prompt), label of each row)

    Args:
      prompts: Rows with one labeled response each.
      label: The column with true or false.
      embed: ``text -> [D]``; the paper and TRL have a model.
      low: Smallest density.
      high: Largest density.

    Raises:
      ValueError: If a row has no such label, or all labels are equal.

    Example:
      >>> from jaxrl_llm.data import Prompt, PromptSet, with_density
      >>> rows = [("a sum", True), ("a sum", False), ("a poem", False)]
      >>> prompts = PromptSet(Prompt(text, metadata={"label": x}) for text, x in rows)
      >>> densities = [prompt.metadata["density"] for prompt in with_density(prompts)]
      >>> densities[0] == densities[1] > densities[2]
      True

    References:
      Jung et al., BCO (arXiv:2404.04656).
    """
    labels = [prompt.metadata.get(label) for prompt in prompts]
    for prompt, value in zip(prompts, labels, strict=True):
        if value not in (0, 1):
            raise ValueError(
                f"with_density: {label!r} of prompt {prompt.name!r} must be true "
                f"or false; got {value!r}."
            )
    embeddings = np.stack([embed(prompt.text) for prompt in prompts])
    ratios = density_ratios(embeddings, np.array(labels, bool), low=low, high=high)
    return PromptSet(
        (
            dataclasses.replace(prompt, metadata={**prompt.metadata, "density": float(ratio)})
            for prompt, ratio in zip(prompts, ratios, strict=True)
        ),
        source=prompts.source,
    )
