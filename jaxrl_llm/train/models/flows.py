"""Scores of a flow policy: the densities of the sampled steps, or the errors of its velocity."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.diffusion import FlowLikelihood, flow_levels
from jaxrl_llm.models.denoising import velocity_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.text_flow import writer_of
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.models.score import ModelScores, score


def draw_noise(key: Array, latents: Array) -> dict[str, Array]:
    """Draws the noise of the forward process for a batch, as an extra whose first axis is P.

    Args:
      key: Typed key of the batch.
      latents: ``[P, G, T, 2, D]``, those of the trajectories; only their shape is used.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> drawn = jr.train.draw_noise(jax.random.key(0), jax.numpy.zeros((2, 4, 3, 2, 5)))
      >>> drawn["forward_noise"].shape
      (2, 4, 3, 5)
    """
    checks.check_rank("draw_noise", 5, latents=latents)
    *rows, _, dim = jnp.shape(latents)
    return {"forward_noise": jax.random.normal(key, (*rows, dim), jnp.float32)}


@dataclass(frozen=True)
class FlowScorer:
    """A flow model and the steps of its policy, with the interface of a ``Scorer``.

    The batch holds the latents before and after each step in the extra ``latents``,
    ``[P, G, T, 2, D]``. One call of the model scores all steps of all trajectories. For a
    likelihood without a step, it scores the last latent at all levels of the forward process, with
    the noise in the extra ``forward_noise``; there is no entropy then. If text
    precedes the steps, the extra ``written`` says which tokens the steps depend on, and text tokens
    have the log-probabilities and entropies of the language model, and statistics of 0.
    """

    model: Model
    likelihood: FlowLikelihood
    temperature: float | Array = 1.0

    def __post_init__(self):
        if isinstance(self.temperature, float | int) and self.temperature != 1.0:
            raise ValueError(
                f"score: temperature has no effect on a flow policy; got {self.temperature:g}. Its "
                "noise is an option of its likelihood."
            )

    def __call__(
        self,
        params: ArrayTree,
        batch: Batch,
        statistics: Mapping[str, Callable] | None = None,
        *,
        of_hidden: tuple[str, ...] = (),
    ) -> ModelScores:
        """Log-densities and entropies ``[P, G, T]`` of the steps, a mean or sum over dimensions.

        The only statistics are those of ``FlowLikelihood.statistics``.
        """
        del statistics, of_hidden
        if absent := [name for name in self.likelihood.fields if name not in batch.extras]:
            hint = "; draw it with train.draw_noise" if absent[0] == "forward_noise" else ""
            raise ValueError(f"score: the batch has no {absent[0]} in its extras{hint}.")
        length = self.likelihood.text_length(batch.mask.shape[-1])
        before, after = jnp.moveaxis(batch.extras["latents"][:, :, length:], -2, 0)
        prompts = (batch.prompt_tokens, batch.prompt_mask)
        if length:
            prompts = self._rows(batch, length)
        levels = flow_levels(before.shape[2])
        steps = jnp.broadcast_to(jnp.arange(before.shape[2]), before.shape[:3])
        velocity, shape = velocity_of("score", self.model), before.shape
        rows = (len(prompts[0]), -1, *shape[2:])  # one row per prompt, or per prompt and text
        sigma, x, target = jnp.asarray(levels)[steps], before, None
        if self.likelihood.draws:
            clean, noise = after[:, :, -1:], batch.extras["forward_noise"][:, :, length:]
            x = (1.0 - sigma[..., None]) * clean + sigma[..., None] * noise
            target = noise - clean
        v = velocity(params, x.reshape(rows), sigma.reshape(rows[:-1]), *prompts).reshape(shape)
        if target is not None:
            logp = -jnp.mean((v - target) ** 2, axis=-1)
            entropy = jnp.zeros_like(logp)
            statistics = {"velocity": v, "target_velocity": target, "level": sigma}
        else:
            made = self.likelihood.at(before, v, steps, levels, x_next=after)
            entropy = jnp.log(made.scale) + 0.5 * math.log(2.0 * math.pi * math.e)
            if dict(getattr(self.likelihood.step, "options", ())).get("reduce") == "sum":
                entropy = entropy * before.shape[-1]
            logp = made.logp
            statistics = {
                "step_mean": made.mean,
                "step_scale": made.scale,
                "step_std": made.std,
                "velocity": v,
            }
        if length:
            text = score(
                writer_of("score", self.model),
                params,
                batch.prompt_tokens,
                batch.prompt_mask,
                batch.tokens[..., :length],
                batch.mask[..., :length],
            )
            logp, entropy = (
                jnp.concatenate(pair, axis=-1) for pair in zip(text, (logp, entropy), strict=True)
            )
            statistics = {name: _behind(length, x) for name, x in statistics.items()}
        return ModelScores(
            masking.zero_masked(logp, batch.mask),
            masking.zero_masked(entropy, batch.mask),
            statistics,
        )

    def _rows(self, batch: Batch, length: int) -> tuple[Array, Array]:
        """Prompt and text tokens of each trajectory ``[P * G, Lp + length]``, and their mask."""
        P, G, _ = batch.mask.shape

        def rows(of_prompts: Array, of_texts: Array) -> Array:
            spread = jnp.broadcast_to(of_prompts[:, None], (P, G, of_prompts.shape[-1]))
            return jnp.concatenate([spread, of_texts[..., :length]], axis=-1).reshape(P * G, -1)

        # Not the mask, which a recipe's selection may narrow: the velocity reads all of the text.
        written = batch.extras["written"]
        return rows(batch.prompt_tokens, batch.tokens), rows(batch.prompt_mask, written)


def _behind(length: int, x: Array) -> Array:
    """Values ``[P, G, K, ...]`` of steps, preceded by zeros for ``length`` text tokens."""
    return jnp.pad(x, [(0, 0), (0, 0), (length, 0), *[(0, 0)] * (x.ndim - 3)])
