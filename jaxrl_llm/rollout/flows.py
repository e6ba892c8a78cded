"""The sampler of flow policies: a latent moves from noise to data in K steps, some of them random.

    x at level 1 ~ N(0, 1);    x after step k ~ the Gaussian of the step, or x + v dt

The K steps take the positions of the tokens of a response; a model that first writes a text has
that text before them, and its latents depend on the prompt and the text. ``sample`` in a message is
the function that :func:`make_flow_sampler` builds.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.diffusion import FlowLikelihood, flow_levels
from jaxrl_llm.models.denoising import velocity_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_sharding, batch_shards
from jaxrl_llm.models.text_flow import writer_of
from jaxrl_llm.rollout._inputs import check_ids, check_sizes, check_spread
from jaxrl_llm.rollout.sampler import BUCKETS, PromptSpec, make_sampler, prompt_room
from jaxrl_llm.rollout.types import FAILED, LENGTH, Rollout

# Sets the noise that a trajectory begins with apart from that of its steps.
_START = 2**32 - 1
# Sets the noise of latents apart from the draws of texts.
_FLOW = 2**32 - 2


def make_flow_sampler(
    model: Model,
    likelihood: FlowLikelihood,
    *,
    steps: int,
    group_size: int,
    deterministic: bool = False,
    text_length: int = 0,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    buckets: Sequence[int] = BUCKETS,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Rollout]:
    """Builds a compiled sampler of ``group_size`` trajectories per prompt from a flow model.

    If the likelihood splits, the members of a tree share their first latents, which are computed
    once; the noise of a node is that of its first member.

    Args:
      model: A model with a velocity.
      likelihood: The recipe's likelihood: which steps are random, their noise, and where trees
        split.
      steps: K, at the levels of ``diffusion.flow_levels``.
      group_size: G, trajectories per prompt.
      deterministic: Whether no step is random or trains and nothing splits, as in an evaluation. A
        text is then sampled greedily.
      text_length: Maximum tokens of the text before the steps, for a model that writes; 0 for none.
      stop_ids, pad_id: For the text, as in :func:`~jaxrl_llm.rollout.make_sampler`.
      buckets, mesh: As of :func:`~jaxrl_llm.rollout.make_sampler`.

    Returns:
      ``sample(params, key, prompts, *, request_ids=None, version=0) -> Rollout``, with the
      arguments of :func:`~jaxrl_llm.rollout.make_sampler`'s. Its ``latents`` are ``[P, G, K, 2,
      D]``, before and after each step, ``mask`` is True for steps that train, and the tokens are 0.
      With a text, its tokens and their cells come before those of the steps; their latents are 0.

    Raises:
      ValueError: If the model is not a flow model, or the steps, the splits and the group are
        incompatible. ``sample`` raises for a bad prompt and names it.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model = jr.models.make_flow_model(jr.models.FlowConfig(width=8))
      >>> sample = jr.rollout.make_flow_sampler(
      ...     model, jr.diffusion.flow_likelihood(), steps=3, group_size=2)
      >>> rollout = sample(model.init(jax.random.key(0)), jax.random.key(1), [[65], [66]])
      >>> rollout.latents.shape, bool(rollout.mask.all())
      ((2, 2, 3, 2, 2), True)

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470), 10 steps to train and 40 to evaluate; Li et al.,
      BranchGRPO (arXiv:2509.06040). Levels in equal steps are ours.
    """
    name = "make_flow_sampler"
    velocity_of(name, model)
    check_sizes(name, steps=steps, group_size=group_size)
    if deterministic:
        likelihood = FlowLikelihood(likelihood.step)
    likelihood.node_ids(steps, group_size)  # checks that they go together
    checks.check_non_negative(name, text_length=text_length)
    if likelihood.splits and text_length:
        raise ValueError(f"{name}: members that share latents cannot write texts of their own.")
    room = prompt_room(name, model, steps + text_length)
    prompt_spec = PromptSpec(model.config.vocab_size, room, buckets)
    trains = likelihood.trains(steps) & (not deterministic)
    make, write = _make_run(model, likelihood, steps, trains), None
    if text_length:
        write = make_sampler(
            writer_of(name, model),
            max_new_tokens=text_length,
            group_size=group_size,
            stop_ids=stop_ids,
            temperature=0.0 if deterministic else 1.0,
            pad_id=pad_id,
            buckets=buckets,
            mesh=mesh,
        )
        make = _after_texts(make)
    run = jax.jit(make)

    def sample(
        params: ArrayTree, key: Array, prompts, *, request_ids=None, version: int = 0
    ) -> Rollout:
        tokens, mask = prompt_spec.pad(prompts)
        shape = (len(prompts), group_size)
        if request_ids is None:
            request_ids = np.arange(shape[0] * shape[1]).reshape(shape)
        request_ids = check_ids("sample", request_ids=request_ids)
        check_ids("sample", version=version)
        checks.check_shape("sample", "request_ids", request_ids, shape)
        if mesh is not None:
            check_spread("sample", len(prompts), "prompts", batch_shards(mesh))
            placed = processes.place((tokens, mask, request_ids), batch_sharding(mesh))
            tokens, mask, placed_ids = placed
        else:
            placed_ids = request_ids
        arguments = (tokens, mask, placed_ids, np.int32(version))
        if write is None:
            return run(params, key, *arguments)
        written = write(params, key, prompts, request_ids=request_ids, version=version)
        return run(params, jax.random.fold_in(key, _FLOW), *arguments, written)

    sample.compiled = run  # type: ignore[attr-defined]
    return sample


def _after_texts(run: Callable[..., Rollout]) -> Callable[..., Rollout]:
    """``run(..., written)``: trajectories whose prompts are a prompt and a text each, behind it."""

    def after(params, key, prompts, prompt_mask, ids, version, written: Rollout) -> Rollout:
        P, G, L = written.tokens.shape

        def rows(of_prompts: Array, of_texts: Array) -> Array:
            spread = jnp.broadcast_to(of_prompts[:, None], (P, G, of_prompts.shape[-1]))
            return jnp.concatenate([spread, of_texts], axis=-1).reshape(P * G, -1)

        read = rows(prompts, written.tokens), rows(prompt_mask, written.mask)
        made = run(params, key, *read, ids.reshape(P * G, 1), version)
        steps = jax.tree.map(
            lambda x: x.reshape(P, G, *x.shape[2:]),
            made._replace(prompt_tokens=None, prompt_mask=None),
        )
        blank = jnp.zeros((P, G, L, *steps.latents.shape[3:]), steps.latents.dtype)

        def joined(name: str) -> Array:
            return jnp.concatenate([getattr(written, name), getattr(steps, name)], axis=2)

        failed = (written.finish == FAILED) | (steps.finish == FAILED)
        return steps._replace(
            prompt_tokens=prompts,
            prompt_mask=prompt_mask,
            tokens=joined("tokens"),
            mask=joined("mask"),
            behavior_logp=joined("behavior_logp"),
            model_logp=joined("model_logp"),
            log_kept=joined("log_kept"),
            version=joined("version"),
            finish=jnp.where(failed, FAILED, LENGTH),
            latents=jnp.concatenate([blank, steps.latents], axis=2),
        )

    return after


def _make_run(model: Model, likelihood: FlowLikelihood, steps: int, trains: np.ndarray):
    """``run(params, key, prompts, prompt_mask, ids, version) -> Rollout``, not compiled."""
    velocity = velocity_of("sample", model)
    random = trains & (likelihood.step is not None)
    levels, splits = flow_levels(steps), likelihood.splits
    begins = sorted({0, *splits})
    stretches = list(zip(begins, [*begins[1:], steps], strict=True))

    def run(params, key, prompts, prompt_mask, ids, version) -> Rollout:
        P, G = ids.shape
        dim = model.config.latent_dim
        keys = jax.vmap(jax.vmap(lambda request: jax.random.fold_in(key, request)))(ids)

        def noise(keys: Array, step: Array | int) -> Array:
            def of(key: Array) -> Array:
                return jax.random.normal(jax.random.fold_in(key, step), (dim,))

            return jax.vmap(jax.vmap(of))(keys)

        def one(carry: tuple[Array, Array], inputs):
            (x, keys), (step, enlarged, is_random) = carry, inputs
            at = jnp.broadcast_to(step, x.shape[:-1])
            sigma = jnp.asarray(levels)[at]
            v = velocity(params, x, sigma, prompts, prompt_mask)
            after = x + v * (levels[1] - levels[0])
            if not random.any():
                return (after, keys), (x, after, jnp.zeros(x.shape[:-1]))
            made = likelihood.at(x, v, at, levels, eps=enlarged * noise(keys, step))
            after = jnp.where(is_random, made.x, after)
            return (after, keys), (x, after, jnp.where(is_random, made.logp, 0.0))

        shared = 2 ** len(splits)  # members that a latent serves
        x, pieces = noise(keys[:, ::shared], _START), []
        for first, end in stretches:
            if first in splits:
                x, shared = jnp.repeat(x, 2, axis=1), shared // 2
            numbers = np.arange(first, end)
            enlarged = np.where(np.isin(numbers, splits), likelihood.split_noise, 1.0)
            inputs = (jnp.asarray(numbers), jnp.float32(enlarged), jnp.asarray(random[first:end]))
            (x, _), made = jax.lax.scan(one, (x, keys[:, ::shared]), inputs)
            pieces.append([jnp.repeat(y, shared, axis=2) for y in made])
        before, after, logp = (
            jnp.moveaxis(jnp.concatenate([part[i] for part in pieces]), 0, 2) for i in range(3)
        )
        mask = jnp.broadcast_to(jnp.asarray(trains), (P, G, steps))
        zeros = jnp.zeros(mask.shape, jnp.float32)
        finite = jnp.all(jnp.isfinite(after), axis=(-2, -1))
        return Rollout(
            prompt_tokens=prompts,
            prompt_mask=prompt_mask,
            tokens=jnp.zeros(mask.shape, jnp.int32),
            mask=mask,
            behavior_logp=logp,
            model_logp=logp,
            log_kept=zeros,
            finish=jnp.where(finite, LENGTH, FAILED),
            version=jnp.where(mask, version, 0),
            latents=jnp.stack([before, after], axis=-2),
        )

    return run
