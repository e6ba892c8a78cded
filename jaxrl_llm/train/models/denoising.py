"""Scores of a denoising model: the likelihood of a recipe on the masks of a batch.

:class:`DenoisingScorer` has the interface of :class:`~jaxrl_llm.train.Scorer`, so train
steps, references and metrics work with either. The masks are extras of the batch, ``masked``,
``masked_prompt``, ``noise`` and ``written``, so every model is scored on the same masks.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import logprobs
from jaxrl_llm.core import masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.diffusion import Draws, FlowLikelihood, Likelihood
from jaxrl_llm.models.denoising import block_length_of, denoise, is_causal, mask_id_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import over_context
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.wiring import DRAW_LOGP
from jaxrl_llm.train.models.flows import FlowScorer
from jaxrl_llm.train.models.score import ModelScores, Scorer


def draw_masks(likelihood: Likelihood, key: Array, batch: Batch) -> dict[str, Array]:
    """Draws the masks of a likelihood for a batch, as extras whose first axis is P.

    Args:
      likelihood: The likelihood of the recipe.
      key: Typed key of the batch.
      batch: ``[P, G, T]``, where T counts all cells of a response, including those past its end.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> batch = jr.testing.make_case().batch
      >>> draws = jr.train.draw_masks(
      ...     jr.diffusion.elbo_likelihood(samples=4), jax.random.key(0), batch)
      >>> batch = batch.with_extras(draws)
      >>> draws["masked"].shape == (*batch.mask.shape, 4)
      True
    """
    valid = jnp.asarray(batch.mask)
    prompt = jnp.asarray(batch.prompt_mask)[:, None]
    prompt = jnp.broadcast_to(prompt, (*valid.shape[:2], prompt.shape[-1]))
    draws = likelihood.draw(key, valid, prompt)
    return {
        "masked": jnp.moveaxis(draws.masked, 0, -1),
        "masked_prompt": jnp.moveaxis(draws.prompt, 0, -1),
        "noise": jnp.moveaxis(draws.t, 0, -1),
        "written": valid,
    }


# The default of logprobs, for runs that set no chunk size.
_CHUNK_SIZE = 64


def check_unmasked(batch: Batch, model: Model, names: Sequence[str]) -> None:
    """Raises ValueError if a prompt or response of a host batch contains the mask id.

    ``names`` are the names of the prompts.
    """
    mask_id = mask_id_of("a batch", model)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    in_prompt = (np.asarray(batch.prompt_tokens) == mask_id) & np.asarray(batch.prompt_mask)
    in_response = (tokens == mask_id) & mask
    for what, wrong in (("prompt", in_prompt), ("a response to prompt", in_response)):
        rows = wrong.reshape(len(names), -1).any(axis=-1)
        if rows.any():
            name = names[int(np.argmax(rows))]
            raise ValueError(
                f"{what} {name!r} holds the mask id {mask_id}, which is reserved for masked "
                "positions."
            )


def draws_of_pass(batch: Batch, number: Array, *, likelihood: Likelihood) -> Batch:
    """The batch of one pass: with the draws of that pass, and the estimates from these draws.

    ``old_logp`` and ``ref_logp`` are None if the batch does not hold the terms of their draws: an
    estimate from the draws of all passes is not comparable with one of this pass.

    Args:
      batch: Part of a batch, with the draws of all passes, and ``old_draw_logp`` and
        ``ref_draw_logp`` if the recipe compares with these policies.
      number: ``[]`` integer, index of the pass, from 0.
      likelihood: The likelihood of the recipe, with several sets of draws.
    """

    def of(name: str) -> Array:
        x = batch.extras[name]
        count = x.shape[-1] // likelihood.passes
        return jax.lax.dynamic_slice_in_dim(x, number * count, count, axis=-1)

    def estimate(name: str) -> Array | None:
        if name not in batch.extras:
            return None
        logp = jnp.moveaxis(of(name), -1, 0) * t[..., None]
        return masking.zero_masked(
            likelihood.estimate(logp, draws, batch.extras["written"], advantages=None), batch.mask
        )

    names = ("masked", "noise", "masked_prompt")
    masked, t, prompt = (jnp.moveaxis(of(name), -1, 0) for name in names)
    draws = Draws(masked, t, prompt)
    extras = {**batch.extras, **{name: of(name) for name in names}}
    old_logp, ref_logp = (estimate(f"{who}_{DRAW_LOGP}") for who in ("old", "ref"))
    return batch.replace(extras=extras, old_logp=old_logp, ref_logp=ref_logp)


@dataclass(frozen=True)
class DenoisingScorer:
    """A denoising model and the likelihood that scores it; see the module.

    In each draw, masked tokens and all cells past the end of a response hold the mask id, so the
    denoiser does not see the length of the response. A block-causal model sees earlier blocks
    unmasked, as during sampling. Only one draw is in memory at a time, in the backward pass too.
    With ``each_draw`` the statistics contain ``draw_logp`` ``[P, G, T, J]``, the term of each draw
    for each token.
    """

    model: Model
    likelihood: Likelihood
    temperature: float | Array = 1.0
    chunk_size: int | None = None
    remat: str = "none"
    each_draw: bool = False

    def __call__(
        self,
        params: ArrayTree,
        batch: Batch,
        statistics: Mapping[str, Callable] | None = None,
        *,
        of_hidden: tuple[str, ...] = (),
    ) -> ModelScores:
        """Estimates ``[P, G, T]`` for the responses of a batch with draws in its extras.

        The entropy of a token is the mean over the draws that mask it, or 0 if none does. There are
        no other statistics.
        """
        del statistics, of_hidden
        extras = batch.extras
        if absent := [name for name in self.likelihood.fields if name not in extras]:
            raise ValueError(
                f"score: the batch has no {absent[0]} in its extras; draw its masks with "
                "train.draw_masks."
            )
        masked, t, prompt = (
            jnp.moveaxis(extras[name], -1, 0) for name in ("masked", "noise", "masked_prompt")
        )
        draws = Draws(masked, t, prompt)

        @jax.checkpoint
        def one(draw: tuple[Array, Array]) -> tuple[Array, Array]:
            masked, prompt = draw
            return self._of_draw(params, batch, masked, prompt)

        logp, entropy = jax.lax.map(one, (draws.masked, draws.prompt))
        seen = jnp.sum(draws.masked, axis=0)
        entropy = jnp.sum(entropy, axis=0) / jnp.maximum(seen, 1)
        tokens = self.likelihood.estimate(
            logp, draws, extras["written"], advantages=_of_rows(self.likelihood, batch)
        )
        each = masking.zero_masked(logp, masked) / jnp.where(masked, t[..., None], 1.0)
        return ModelScores(
            masking.zero_masked(tokens, batch.mask),
            masking.zero_masked(entropy, batch.mask),
            {DRAW_LOGP: jnp.moveaxis(each, 0, -1)} if self.each_draw else {},
        )

    def _of_draw(
        self, params: ArrayTree, batch: Batch, masked: Array, prompt: Array
    ) -> tuple[Array, Array]:
        """Log-probability and entropy ``[P, G, T]`` of the tokens that one draw masks."""
        mask_id = mask_id_of("score", self.model)
        uncovered = jnp.where(batch.extras["written"], batch.tokens, mask_id)
        tokens = jnp.where(masked, mask_id, uncovered)
        prompts = jnp.where(prompt, mask_id, batch.prompt_tokens[:, None])
        hidden = denoise(
            self.model,
            params,
            prompts,
            batch.prompt_mask,
            tokens,
            uncovered=uncovered if block_length_of(self.model) else None,
            remat=self.remat,
        )
        targets = jnp.where(masked, batch.tokens, 0)
        matrix = self.model.output_matrix(params)

        def project(tokens: tuple[Array, Array, Array], matrix: Array) -> tuple[Array, Array]:
            hidden, targets, masked = tokens
            return logprobs.token_logprobs(
                hidden,
                matrix,
                targets,
                temperature=self.temperature,
                mask=masked,
                chunk_size=self.chunk_size or _CHUNK_SIZE,
            )

        logp, entropy = over_context(project, (hidden, targets, masked), matrix)
        return _without(hidden, matrix, targets, mask_id, masked, logp, entropy, self.temperature)


def _of_rows(likelihood: Likelihood, batch: Batch) -> Array | None:
    """Advantages ``[P, G]`` of responses; None if they are not known yet or not used."""
    if batch.advantages is None or not likelihood.reads_advantages:
        return None
    if batch.advantages.ndim == batch.mask.ndim:
        raise ValueError(
            f"score: {likelihood.estimate!r} needs one advantage per response; the recipe has one "
            f"per token, {batch.advantages.shape}."
        )
    return batch.advantages


def _without(
    hidden: Array,
    matrix: Array,
    targets: Array,
    mask_id: int,
    masked: Array,
    logp: Array,
    entropy: Array,
    temperature: float | Array,
) -> tuple[Array, Array]:
    """Log-probability and entropy if the mask id, which has probability q, is never drawn.

    log p - log(1 - q),   (H + q log q) / (1 - q) + log(1 - q)
    """
    apart = (matrix[mask_id] - matrix[targets]).astype(jnp.float32)
    gap = jnp.sum(hidden.astype(jnp.float32) * apart, axis=-1) / temperature
    log_q = jnp.where(masked, logp + gap, -1.0)
    rest = jnp.log1p(-jnp.exp(jnp.minimum(log_q, -1e-6)))
    q = jnp.exp(log_q)
    entropy = (entropy + q * log_q) / jnp.exp(rest) + rest
    return jnp.where(masked, logp - rest, 0.0), jnp.where(masked, entropy, 0.0)


# Either scorer; a recipe's checks ensure that a likelihood never needs a method of Scorer alone.
PolicyScorer = Any


def tell_temperature(batch: Batch, scorer: PolicyScorer) -> None:
    """Warns, while a step is traced, if its policy has another temperature than the sampler."""
    sampled, scored = batch.sampled_at, getattr(scorer, "temperature", None)
    if (
        sampled is None
        or not isinstance(scored, int | float)
        or math.isclose(sampled.value, scored)
    ):
        return
    warnings.warn(
        f"The batch was sampled at temperature {sampled.value:g}, and the step scores the policy "
        f"at {scored:g}, so ratios and divergences compare two distributions; pass "
        f"temperature={sampled.value:g} to make_step, make_gradients, make_scorer or Scorer, or "
        "batch.replace(sampled_at=None) if the two should differ.",
        stacklevel=2,
    )


def scorer_of(
    recipe: Recipe,
    model: Model,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    remat: str = "none",
    shared_prefix_len: int = 0,
) -> PolicyScorer:
    """The scorer for a recipe's policy: by log-probabilities, or by the recipe's likelihood.

    Raises:
      ValueError: If a recipe with a likelihood has a causal model, a recipe without one has a
        denoising model, or a denoising model is asked to share a prompt prefix.
    """
    name = f"recipe {recipe.name!r}"
    if recipe.likelihood is None:
        if not is_causal(model):
            raise ValueError(
                f"{name} needs next-token probabilities, which a model with causal=False does not "
                "have; give the recipe a likelihood, such as diffusion.mean_field_likelihood()."
            )
        return Scorer(model, temperature, chunk_size, remat, shared_prefix_len)
    flow = isinstance(recipe.likelihood, FlowLikelihood)
    if flow and model.velocity is None:
        raise ValueError(
            f"{name} needs a flow model, such as models.make_flow_model; this one has no velocity."
        )
    if not flow and model.velocity is not None:
        raise ValueError(
            f"{name} with {recipe.likelihood!r} needs a model that denoises tokens, not a flow "
            "model."
        )
    if isinstance(recipe.likelihood, FlowLikelihood):
        return FlowScorer(model, recipe.likelihood, temperature)
    mask_id_of(f"{name} with a likelihood", model)
    if shared_prefix_len:
        raise ValueError(
            f"{name}: the prompts of a denoising model attend to the responses, so responses "
            f"cannot share a prefix; use shared_prefix_len 0 instead of {shared_prefix_len}."
        )
    each_draw = "old_draw_logp" in recipe.required_fields
    return DenoisingScorer(model, recipe.likelihood, temperature, chunk_size, remat, each_draw)
