"""The forward passes of a train step: of the policy, before and in it, its teacher and critic."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.packing import unpack
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.critic import critic_values
from jaxrl_llm.train.score import project, project_statistics, score_hidden
from jaxrl_llm.train.state import TrainState


def split(batch: ArrayTree, microbatches: int) -> ArrayTree:
    """``[P, ...] -> [M, P / M, ...]``: prompt ``i`` goes to microbatch ``i % M``.

    Strided, so that on a mesh each microbatch still has prompts on every device.
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1), batch
    )


def join(parts: ArrayTree) -> ArrayTree:
    """The inverse of :func:`split`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), parts)


def over_parts(function: Callable, batch: Batch, microbatches: int) -> ArrayTree:
    """``function`` of the whole batch, one microbatch after the other."""
    if microbatches == 1:
        return function(batch)
    _, out = jax.lax.scan(lambda _, part: (None, function(part)), None, split(batch, microbatches))
    return join(out)


class Passes(NamedTuple):
    """What a step computes with models.

    Attributes:
      model: The policy.
      recipe: The Recipe, or None where only log-probabilities are wanted.
      temperature: Of the policy.
      chunk_size: As of ``logprobs``, or None.
      remat: What backward passes keep of a layer.
      critic_model: The critic's body.
      shared_prefix_len: How many first tokens all prompts share.
    """

    model: Model
    recipe: Any
    temperature: float
    chunk_size: int | None
    remat: str
    critic_model: Model
    shared_prefix_len: int = 0

    def policy(
        self, params: ArrayTree, batch: Batch, functions=None, *, norms: bool = False
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Log-probabilities, entropies and vocabulary statistics of the responses.

        Args:
          params: Of the policy.
          batch: Prompts, responses, and the extras that the statistics name.
          functions: Statistics by name; those of the recipe by default.
          norms: Whether the squared norm of the last hidden state is one of them.
        """
        if functions is None:
            functions = {} if self.recipe is None else self.recipe.computed_from("policy")
        arrays = (batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
        packing = batch.packing
        layout: dict[str, Any] = {"packing": packing, "shared_prefix_len": self.shared_prefix_len}
        hidden = score_hidden(self.model, params, *arrays, remat=self.remat, **layout)
        logp, entropy, found = self._project(params, hidden, batch, functions, packing)
        if norms:
            squares = jnp.sum(hidden.astype(jnp.float32) ** 2, axis=-1)
            found = found | {"hidden_sq": unpack(packing, squares, batch.mask)}
        return logp, entropy, found

    def _project(self, params, hidden, batch, functions, packing):
        places = (self.model, params, hidden, batch.tokens, batch.mask)
        options = (self.temperature, self.chunk_size, batch.support, packing)
        rows = {k: x for k, x in batch.extras.items() if x.shape[:3] == batch.mask.shape}
        statistics = project_statistics(*places, functions, rows, *options)
        return *project(*places, *options), statistics

    def before(
        self, state: TrainState, batch: Batch, microbatches: int, *, score_old: bool
    ) -> Batch:
        """The batch with all that the recipe wants computed at the start of the step.

        What the batch already brings is left as it is.
        """
        recipe, extras = self.recipe, batch.extras
        needs = recipe.required_fields
        old_logp = (score_old or "old_logp" in needs) and batch.old_logp is None
        entropy = "old_entropy" in needs and "old_entropy" not in extras
        norms = "hidden_sq" in needs and "hidden_sq" not in extras
        scored = {n: f for n, f in recipe.computed_from("old_policy").items() if n not in extras}
        if old_logp or entropy or norms or scored:
            logp, old_entropy, found = over_parts(
                lambda part: self.policy(state.policy, part, scored, norms=norms),
                batch,
                microbatches,
            )
            found = found | ({"old_entropy": old_entropy} if entropy else {})
            batch = batch.replace(
                old_logp=logp if old_logp else batch.old_logp, extras={**batch.extras, **found}
            )
        moving = recipe.reference is not None
        if moving and "ref_logp" in needs and batch.ref_logp is None:
            logp = over_parts(
                lambda part: self.policy(state.whole(state.reference), part, {})[0],
                batch,
                microbatches,
            )
            batch = batch.replace(ref_logp=logp)
        taught = {n: f for n, f in recipe.computed_from("teacher").items() if n not in extras}
        if taught:
            params = state.whole(state.reference) if moving else state.policy
            found = over_parts(lambda part: self._teach(params, part, taught), batch, microbatches)
            batch = batch.replace(extras={**batch.extras, **found})
        if recipe.critic is not None and "old_values" not in extras:
            critic = state.critic
            params = critic.params if recipe.critic.target_rate is None else critic.target
            values = over_parts(
                lambda part: critic_values(self.critic_model, params, part), batch, microbatches
            )
            found = {"old_values": values, "values": recipe.critic.combine(values)}
            batch = batch.replace(extras={**batch.extras, **found})
        return batch

    def _teach(self, params: ArrayTree, batch: Batch, functions) -> dict[str, Array]:
        """Statistics of the teacher, who reads a prompt of its own before each response."""
        if "teacher_prompt_tokens" not in batch.extras:
            raise ValueError(
                f"Recipe {self.recipe.name!r}: the batch has no teacher_prompt_tokens and "
                "teacher_prompt_mask in its extras, and no "
                f"{', '.join(functions)} computed from them."
            )
        P, G, T = batch.tokens.shape
        prompts = batch.extras["teacher_prompt_tokens"].reshape(P * G, -1)
        kept = batch.extras["teacher_prompt_mask"].reshape(P * G, -1)
        rows = (batch.tokens.reshape(P * G, 1, T), batch.mask.reshape(P * G, 1, T))
        hidden = score_hidden(self.model, params, prompts, kept, *rows)
        hidden = hidden.reshape(P, G, T, -1)
        found = self._project(params, hidden, batch, functions, None)[2]
        return jax.tree.map(jax.lax.stop_gradient, found)

    def critic_loss(self, params: ArrayTree, batch: Batch):
        """The critic's loss on a part of a prepared batch; nothing else is returned."""
        values = critic_values(self.critic_model, params, batch, remat=self.remat)
        return self.recipe.critic.total_loss(values, batch), ()
