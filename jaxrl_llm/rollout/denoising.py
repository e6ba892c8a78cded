"""The sampler of masked-diffusion models: a response is hidden, and uncovered in steps.

    in each step: a token is drawn for each hidden cell of the block, and the surest of them stay

Blocks are uncovered from left to right; one block is all of the response. Those of a model with
blocks begin where the model has them begin, see :mod:`jaxrl_llm.models.denoising`. ``sample`` in a
message is the function that :func:`make_denoising_sampler` builds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.support import Temperature
from jaxrl_llm.models.denoising import block_length_of, denoise, mask_id_of
from jaxrl_llm.models.protocol import Model, cast_params
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, sampling_on_mesh
from jaxrl_llm.rollout._inputs import check_ids, check_sizes, check_spread
from jaxrl_llm.rollout.sampler import BUCKETS, PromptSpec, prompt_room
from jaxrl_llm.rollout.sampling.draw import sample_from
from jaxrl_llm.rollout.sampling.filters import GREEDY_BELOW
from jaxrl_llm.rollout.types import FAILED, LENGTH, STOP, Rollout

# The most logits in memory at one time, unless one cell of each response has more.
LOGITS = 2**26
REMASKING = ("confidence", "entropy", "random")


@dataclass(frozen=True, kw_only=True)
class DenoisingOptions:
    """In which order the tokens of a response are uncovered.

    Attributes:
      steps: Forwards of a response, at most its tokens; None for one per token.
      block_length: Tokens of a block, which divides the response, and whose number divides the
        steps; None for those of a model with blocks, else for one block.
      remasking: Which drawn tokens stay: those of the greatest probability ("confidence") or of the
        least entropy ("entropy"), both of the model at temperature 1; or any ("random").

    References:
      Nie et al., LLaDA (arXiv:2502.09992), confidence and random; Ye et al., Dream
      (arXiv:2508.15487), entropy.
    """

    steps: int | None = None
    block_length: int | None = None
    remasking: str = "confidence"

    def __post_init__(self):
        for name in ("steps", "block_length"):
            if (value := getattr(self, name)) is not None:
                check_sizes("DenoisingOptions", **{name: value})
        checks.check_option("DenoisingOptions", "remasking", self.remasking, REMASKING)

    def schedule(self, length: int) -> tuple[int, tuple[int, ...]]:
        """The tokens of a block, and how many are uncovered in each of its steps.

        The first steps uncover one more where the steps do not divide the tokens. Raises ValueError
        if blocks, steps and a response of ``length`` tokens do not fit together.

        Example:
          >>> DenoisingOptions(steps=4, block_length=5).schedule(10)
          (5, (3, 2))
        """
        block = self.block_length or length
        steps = self.steps or length
        if length % block:
            raise ValueError(
                f"DenoisingOptions: block_length {block} does not divide a response of {length} "
                "tokens."
            )
        if steps > length:
            raise ValueError(
                f"DenoisingOptions: {steps} steps are more than the {length} tokens of a response."
            )
        blocks = length // block
        if steps % blocks:
            raise ValueError(
                f"DenoisingOptions: {steps} steps do not divide into the {blocks} blocks of a "
                "response."
            )
        each, more = divmod(block, steps // blocks)
        return block, tuple(each + (i < more) for i in range(steps // blocks))


class Denoised(NamedTuple):
    """Responses on their way, and when each token was uncovered."""

    tokens: Array  # int32 [P, G, T], the mask id where hidden
    behavior_logp: Array  # float32 [P, G, T]
    model_logp: Array  # float32 [P, G, T]
    order: Array  # int32 [P, G, T], the step that uncovered a token; -1 for none
    failed: Array  # bool [P, G], whether a logit was non-finite


def make_denoising_sampler(
    model: Model,
    *,
    max_new_tokens: int,
    group_size: int,
    options: DenoisingOptions = DenoisingOptions(),  # noqa: B008  frozen
    stop_ids: Sequence[int] = (),
    temperature: float = 1.0,
    pad_id: int = 0,
    buckets: Sequence[int] = BUCKETS,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Rollout]:
    """Builds a compiled sampler of ``group_size`` responses per prompt from a denoising model.

    All T cells of a response exist from the start. A response ends with its first stop token; once
    every row has one, no more blocks are uncovered. The mask id is never drawn. The log-probability
    of a token is that of the step that uncovered it: their sum depends on the order of uncovering,
    and is not the likelihood of the response.

    With a block model a response may begin and end within a block, so it may span one more block
    than its length suggests: each block takes the same number of steps, or fewer if less of it is
    masked.

    Args:
      model: One with ``causal=False`` and a mask id.
      max_new_tokens: T, the cells of a response.
      group_size: G, responses per prompt.
      options: The order.
      stop_ids: Token ids that end a response; they belong to it.
      temperature: The logits are divided by it; 0 draws the most likely token.
      pad_id, buckets, mesh: As of :func:`~jaxrl_llm.rollout.make_sampler`.

    Returns:
      ``sample(params, key, prompts, *, request_ids=None, version=0, fixed=None) -> Rollout``, with
      the arguments of :func:`~jaxrl_llm.rollout.make_sampler`'s. ``fixed`` int ``[P, G, T]`` are
      tokens that are set at their positions from the start, -1 for none; their version is -1.

    Raises:
      ValueError: If the model is not a denoising model, an option is out of range, there are more
        steps than tokens, or the block size does not divide the length or is not the model's.
        ``sample`` raises for a bad prompt, such as one with the mask id, and names it.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(causal=False, vocab_size=260, mask_id=259)
      >>> sample = jr.rollout.make_denoising_sampler(model, max_new_tokens=4, group_size=2)
      >>> rollout = sample(params, jax.random.key(0), [[1, 2, 3], [4]])
      >>> rollout.tokens.shape, bool((rollout.tokens == 259).any())
      ((2, 2, 4), False)

    References:
      Nie et al., LLaDA (arXiv:2502.09992): blocks, low-confidence and random remasking, a schedule
      linear in the steps. Its release may draw the mask id. Cheng et al., SDAR (arXiv:2510.06303):
      blocks from the first token of the prompt; its release fills the last one up.
    """
    name = "make_denoising_sampler"
    mask_id = mask_id_of(name, model)
    check_sizes(name, max_new_tokens=max_new_tokens, group_size=group_size)
    checks.check_non_negative(name, finite=True, temperature=temperature)
    options = options_of(options, model)
    options.schedule(max_new_tokens)
    checks.check_token_ids(name, stop_ids=stop_ids, pad_id=(pad_id,))
    if mask_id in stop_ids:
        raise ValueError(f"{name}: stop_ids holds the mask id {mask_id}.")
    room = prompt_room(name, model, max_new_tokens)
    prompt_spec = PromptSpec(model.config.vocab_size, room, buckets)
    stops = jnp.asarray(tuple(stop_ids), jnp.int32)
    uncover = make_uncover(model, options, max_new_tokens, temperature, stops)

    def run(params, key, prompts, prompt_mask, ids, version, fixed) -> Rollout:
        start = jnp.where(fixed < 0, mask_id, fixed).astype(jnp.int32)
        done = uncover(cast_params(model, params), key, prompts, prompt_mask, ids, start)
        stop = jnp.isin(done.tokens, stops)
        ended = jnp.cumsum(stop, axis=-1) - stop > 0
        mask = ~ended & (done.tokens != mask_id)
        finish = jnp.where(jnp.any(stop, axis=-1), STOP, LENGTH)
        zeros = jnp.zeros(mask.shape, jnp.float32)
        return Rollout(
            prompt_tokens=prompts,
            prompt_mask=prompt_mask,
            tokens=jnp.where(mask, done.tokens, pad_id),
            mask=mask,
            behavior_logp=jnp.where(mask, done.behavior_logp, 0.0),
            model_logp=jnp.where(mask, done.model_logp, 0.0),
            log_kept=zeros,
            finish=jnp.where(done.failed, FAILED, finish),
            version=jnp.where(mask, jnp.where(fixed < 0, version, -1), 0),
        )

    run = jax.jit(sampling_on_mesh(run, mesh, model.sharding_rules))

    def sample(
        params: ArrayTree, key: Array, prompts, *, request_ids=None, version: int = 0, fixed=None
    ) -> Rollout:
        tokens, mask = prompt_spec.pad(prompts)
        check_unmasked("sample: prompt", prompts, mask_id)
        shape = (len(prompts), group_size)
        if request_ids is None:
            request_ids = np.arange(shape[0] * shape[1]).reshape(shape)
        request_ids = check_ids("sample", request_ids=request_ids)
        check_ids("sample", version=version)
        checks.check_shape("sample", "request_ids", request_ids, shape)
        cells = (*shape, max_new_tokens)
        fixed = np.full(cells, -1, np.int32) if fixed is None else np.asarray(fixed)
        checks.check_shape("sample", "fixed", fixed, cells)
        wrong = (fixed >= model.config.vocab_size) | (fixed == mask_id)
        if wrong.any():
            raise ValueError(
                f"sample: fixed holds token {fixed[wrong][0]}, which is the mask id or outside the "
                "vocabulary."
            )
        if mesh is not None:
            check_spread("sample", len(prompts), "prompts", batch_shards(mesh))
            placed = processes.place((tokens, mask, request_ids, fixed), batch_sharding(mesh))
            tokens, mask, request_ids, fixed = placed
        result = run(params, key, tokens, mask, request_ids, np.int32(version), fixed)
        return result._replace(sampled_at=Temperature(temperature) if temperature > 0 else None)

    sample.compiled = run  # type: ignore[attr-defined]
    return sample


def options_of(options: DenoisingOptions, model: Model) -> DenoisingOptions:
    """The options with the blocks of a model; raises ValueError where they have others."""
    block = block_length_of(model)
    if block is None or options.block_length == block:
        return options
    if options.block_length is not None:
        raise ValueError(
            f"DenoisingOptions: block_length {options.block_length} is not the model's, {block}."
        )
    return replace(options, block_length=block)


def check_unmasked(start: str, rows: Sequence[Sequence[int]], mask_id: int) -> None:
    """Raises ValueError, in a sentence that begins with ``start``, if a row holds the mask id."""
    for i, row in enumerate(rows):
        if mask_id in row:
            raise ValueError(
                f"{start} {i} holds the mask id {mask_id}, which is reserved for masked positions."
            )


def make_uncover(
    model: Model,
    options: DenoisingOptions,
    length: int,
    temperature: float,
    stops: Array,
) -> Callable[..., Denoised]:
    """The loop of :func:`make_denoising_sampler`, in whose responses some tokens may be fixed.

    Args:
      model: A denoiser.
      options: Steps, blocks and which positions are unmasked first.
      length: T, positions of a response.
      temperature: Divides the logits; 0 takes the most likely token.
      stops: int32 ``[S]``, tokens that end a response.

    Returns:
      ``uncover(params, key, prompts, prompt_mask, ids, tokens) -> Denoised``, a pure function:
      ``prompts`` and ``prompt_mask`` are ``[P, L]``, ``ids`` int32 ``[P, G]`` the numbers of the
      requests, which determine their randomness, and ``tokens`` ``[P, G, T]``, masked ids where
      they are to be filled.
    """
    mask_id = mask_id_of("uncover", model)
    block, counts = options.schedule(length)
    from_response = block_length_of(model) is None
    # A response that begins within a block ends within another.
    blocks = length // block + (not from_response and block > 1)
    each, steps = jnp.asarray(counts), len(counts) * blocks

    def uncover(params, key, prompts, prompt_mask, ids, tokens) -> Denoised:
        keys = jax.vmap(jax.vmap(lambda request: jax.random.fold_in(key, request)))(ids)
        start = jnp.sum(prompt_mask, axis=-1) * (not from_response)
        of_cell = masking.block_ids(start, length, block)[:, None]  # [P, 1, T]

        def step(carry: tuple[Array, Denoised]) -> tuple[Array, Denoised]:
            i, state = carry
            now = i // len(counts)
            # The slice has the cells of a full block; a shorter block lies within it.
            first = jnp.clip(now * block - start % block, 0, length - block)

            def cells(x: Array) -> Array:
                take = jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, block, axis=1))
                return take(x, first)

            def propose(hidden: Array, uniform: Array) -> tuple[Array, ...]:
                logits = jnp.matmul(
                    hidden, model.output_matrix(params).T, preferred_element_type=jnp.float32
                )
                logits = jnp.where(jnp.arange(logits.shape[-1]) == mask_id, -jnp.inf, logits)
                return _propose(logits, uniform, temperature, options.remasking)

            hidden = cells(denoise(model, params, prompts, prompt_mask, state.tokens))
            # A row's numbers depend on its request and the step alone.
            of_step = jax.vmap(jax.vmap(lambda k: jax.random.fold_in(k, i)))(keys)
            uniform = jax.vmap(jax.vmap(lambda k: jax.random.uniform(k, (2, block))))(of_step)
            drawn, behavior_logp, model_logp, score = _in_parts(
                propose, hidden, uniform, vocab_size=model.config.vocab_size
            )
            covered = (cells(state.tokens) == mask_id) & (cells(of_cell) == now)
            order = jnp.argsort(jnp.where(covered, -score, jnp.inf), axis=-1, stable=True)
            rank = jnp.argsort(order, axis=-1)
            chosen = covered & (rank < each[i % len(counts)])

            def put(x: Array, new: Array) -> Array:
                new = jnp.where(chosen, new, cells(x)).astype(x.dtype)
                write = jax.vmap(
                    lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, new, i, axis=1)
                )
                return write(x, new, first)

            wrong = jnp.any(jnp.isnan(model_logp) & covered, axis=-1)
            return i + 1, Denoised(
                put(state.tokens, drawn),
                put(state.behavior_logp, behavior_logp),
                put(state.model_logp, model_logp),
                put(state.order, i),
                state.failed | wrong,
            )

        def goes_on(carry) -> Array:
            i, state = carry
            before = of_cell < i // len(counts)
            ended = jnp.any(jnp.isin(state.tokens, stops) & before, axis=-1)
            ended |= ~jnp.any(state.tokens == mask_id, axis=-1)
            return (i < steps) & ~jnp.all(ended)

        zeros = jnp.zeros(tokens.shape, jnp.float32)
        never = jnp.full(tokens.shape, -1, jnp.int32)
        state = Denoised(tokens, zeros, zeros, never, jnp.zeros(tokens.shape[:2], bool))
        carry = (jnp.int32(0), state)
        return jax.lax.while_loop(goes_on, step, carry)[1]

    return uncover


def cells_at_once(responses: int, block: int, vocab_size: int) -> int:
    """How many cells of each response have their logits in memory at one time."""
    return min(block, max(1, LOGITS // (responses * vocab_size)))


def _in_parts(propose: Callable, hidden: Array, uniform: Array, *, vocab_size: int):
    """``propose`` of hidden states ``[P, G, B, D]`` and numbers ``[P, G, 2, B]``, in parts of B."""
    P, G, block, _ = hidden.shape
    size = cells_at_once(P * G, block, vocab_size)
    if size == block:
        return propose(hidden, uniform)

    def of_cell(x: tuple[Array, Array]) -> tuple[Array, ...]:
        values = propose(x[0][:, :, None], x[1][..., None])
        return tuple(value[:, :, 0] for value in values)

    each = (jnp.moveaxis(hidden, 2, 0), jnp.moveaxis(uniform, 3, 0))
    values = jax.lax.map(of_cell, each, batch_size=size)
    return tuple(jnp.moveaxis(value, 0, 2) for value in values)


def _propose(
    logits: Array, uniform: Array, temperature: float, remasking: str
) -> tuple[Array, Array, Array, Array]:
    """A token for each cell, its log-probability as drawn and of the model, and how sure it is."""
    plain = jax.nn.log_softmax(logits)
    if temperature < GREEDY_BELOW:
        drawn = jnp.argmax(logits, axis=-1)
        behavior_logp = jnp.zeros(drawn.shape, jnp.float32)
    else:
        drawn = sample_from(logits / temperature, uniform[:, :, 0])
        tempered = jax.nn.log_softmax(logits / temperature)
        behavior_logp = jnp.take_along_axis(tempered, drawn[..., None], axis=-1)[..., 0]
    model_logp = jnp.take_along_axis(plain, drawn[..., None], axis=-1)[..., 0]
    if remasking == "confidence":
        score = model_logp
    elif remasking == "entropy":
        score = jnp.sum(jnp.where(plain > -jnp.inf, jnp.exp(plain) * plain, 0.0), axis=-1)
    else:
        score = uniform[:, :, 1]
    return drawn, behavior_logp, model_logp, score
