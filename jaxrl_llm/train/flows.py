"""How a flow policy is scored: the densities of the steps that were sampled."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxrl_llm.core import masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.diffusion import FlowLikelihood, flow_levels
from jaxrl_llm.models.denoising import velocity_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.score import Scores


@dataclass(frozen=True)
class FlowScorer:
    """A flow model and the steps of its policy; it stands where a ``Scorer`` stands.

    The latents before and after each step are the extra ``latents`` of the batch,
    ``[P, G, K, 2, D]``. All K steps of all trajectories are one call of the model.
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
    ) -> Scores:
        """Log-densities and entropies of the steps ``[P, G, K]``, a mean over dimensions or a sum.

        The statistics are those of ``FlowLikelihood.statistics``, and no others.
        """
        del statistics, of_hidden
        if "latents" not in batch.extras:
            raise ValueError("score: the batch has no latents in its extras.")
        before, after = jnp.moveaxis(batch.extras["latents"], -2, 0)
        levels = flow_levels(before.shape[2])
        steps = jnp.broadcast_to(jnp.arange(before.shape[2]), before.shape[:3])
        v = velocity_of("score", self.model)(
            params, before, jnp.asarray(levels)[steps], batch.prompt_tokens, batch.prompt_mask
        )
        made = self.likelihood.at(before, v, steps, levels, x_next=after)
        entropy = jnp.log(made.scale) + 0.5 * math.log(2.0 * math.pi * math.e)
        if dict(getattr(self.likelihood.step, "options", ())).get("reduce") == "sum":
            entropy = entropy * before.shape[-1]
        return Scores(
            masking.zero_masked(made.logp, batch.mask),
            masking.zero_masked(entropy, batch.mask),
            {
                "step_mean": made.mean,
                "step_scale": made.scale,
                "step_std": made.std,
                "velocity": v,
            },
        )
