"""Where the time of a step goes: seconds by phase, model FLOP utilization, profiler traces.

Shared arguments: ``prompt_lengths``, int ``[P]``; ``lengths``, int ``[P, G]``, of the responses;
``size``, of the model; ``shared_prefix_len``, the number of first tokens that all prompts share
and that are computed once; ``frozen``, whether an adapter is trained instead of the weights.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.kernels.products import row_products
from jaxrl_llm.core.runtime.files import reason
from jaxrl_llm.diffusion import FlowLikelihood, Likelihood
from jaxrl_llm.models.denoising import block_length_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.transformer import param_shapes
from jaxrl_llm.recipes import Batch

PHASES = ("wait", "score", "train", "save", "evaluate")
"""The phases of a step, in order."""

# Enough for a CPU to reach its full speed.
_MEASURED_SIZE, _MEASURED_SECONDS = 1024, 0.25


class Clock:
    """Seconds of the loop by phase, since the last read.

    Example:
      >>> from jaxrl_llm.train.profile import Clock
      >>> clock = Clock()
      >>> with clock("train"):
      ...     pass
      >>> seconds = clock.read()
      >>> seconds["save"], seconds["total"] >= seconds["train"] > 0
      (0.0, True)
    """

    def __init__(self):
        self._start = time.perf_counter()
        self._spent = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time spent in the ``with`` block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[phase] += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Seconds by phase, and the elapsed "total"; resets all of them to zero."""
        now = time.perf_counter()
        spent = self._spent | {"total": now - self._start}
        self._start, self._spent = now, dict.fromkeys(PHASES, 0.0)
        return spent


class ModelSize(NamedTuple):
    """The sizes that determine the number of operations per token."""

    matrices: int  # weights of the matrix products that all layers compute for a token
    projection: int  # V D, weights of the projection to the vocabulary; 0 for a head of values
    attention: int  # sum over the layers with softmax attention of heads times ``head_dim``


def model_size(model: Model) -> ModelSize | None:
    """The size of a model; None if its configuration lacks the number of heads.

    Of experts those that compute a token count, not all. A layer with a window counts as one that
    sees all tokens. Nothing is allocated.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.profile import model_size
      >>> model_size(jr.testing.tiny_model()[0])
      ModelSize(matrices=18432, projection=8288, attention=64)
    """
    config = model.config
    heads = getattr(config, "num_heads", None)
    if heads is None:
        return None
    params = param_shapes(model)
    vocabulary = jax.eval_shape(model.output_matrix, params).shape
    experts, matrices = getattr(config, "experts", None), 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if experts is not None and "/experts/" in trees.path_str(path):
            matrices += x.size * experts.active // experts.count if x.ndim > 2 else 0  # not biases
        elif x.ndim > 1 and x.shape not in (vocabulary, vocabulary[::-1]):
            matrices += x.size
    layers = config.num_layers
    if hasattr(config, "kind_of"):
        layers = sum(not config.kind_of(i).linear for i in range(layers))
    projection = 0 if model.values is not None else int(np.prod(vocabulary))
    return ModelSize(matrices, projection, layers * heads * config.head_dim)


def train_flops(
    prompt_lengths, lengths, *, size: ModelSize, shared_prefix_len: int = 0, frozen: bool = False
) -> float:
    """Operations of the model in the forward and backward passes of a batch.

        6 N U + 6 V D R + 12 A C
        U = sum_p l_p - (P - 1) c + R,   R = sum_pg t_pg
        C = sum_p l_p (l_p + 1) / 2 - (P - 1) c (c + 1) / 2
            + sum_pg (t_pg l_p + t_pg (t_pg + 1) / 2)

    with ``l_p`` the tokens of a prompt, c the ``shared_prefix_len``, ``t_pg`` the tokens of a
    response, N the weights of all matrix products but the last, V D those of the projection to the
    vocabulary, which only responses need, C the pairs of tokens that attend to each other, and A
    the sum over the layers of heads times ``head_dim``. A multiply-add is two operations, and a
    backward pass costs twice the forward pass. A prompt counts once per group, whatever is
    computed. Rematerialization, padding, a critic, and passes without a gradient do not count.
    With weights frozen below an adapter, 4 replaces the first two 6: these weights have no
    gradient, and the adapter is not counted.

    Example:
      >>> from jaxrl_llm.train.profile import ModelSize, train_flops
      >>> train_flops([2], [[1, 0]], size=ModelSize(100, 10, 4))
      2148.0
    """
    prompts = np.asarray(prompt_lengths, np.float64)
    responses = np.asarray(lengths, np.float64)
    trained = responses.sum()
    pairs = (prompts * (prompts + 1) / 2).sum()
    pairs += (responses * prompts[:, None] + responses * (responses + 1) / 2).sum()
    twice = shared_prefix_len * (prompts.size - 1)
    pairs -= twice * (shared_prefix_len + 1) / 2
    weights = size.matrices * (prompts.sum() - twice + trained) + size.projection * trained
    return float((4 if frozen else 6) * weights + 12 * size.attention * pairs)


def population_flops(
    prompt_lengths, lengths, *, size: ModelSize, shared_prefix_len: int = 0
) -> float:
    """Operations of the model when the members of a population sample: forward passes only.

        2 N U + 2 V D R + 4 A C
        U = G (sum_p l_p - (P - 1) c) + R,   C as if each of G members read the prompts itself

    with the letters of :func:`train_flops`. Each member has separate weights, so it reads the
    prompts itself, and their shared prefix once. The noise is not counted.

    Example:
      >>> from jaxrl_llm.train.profile import ModelSize, population_flops
      >>> population_flops([2], [[1, 0]], size=ModelSize(100, 10, 4))
      1164.0
    """
    one = train_flops(prompt_lengths, lengths, size=size, shared_prefix_len=shared_prefix_len)
    none = train_flops(
        prompt_lengths,
        np.zeros((len(prompt_lengths), 1)),
        size=size,
        shared_prefix_len=shared_prefix_len,
    )
    return (one + none * (np.shape(lengths)[1] - 1)) / 3


def denoising_flops(prompt_lengths, cells: int, *, size: ModelSize, frozen: bool = False) -> float:
    """Operations of the model in the forward and backward passes of one draw of masks.

        6 N U + 6 V D R + 12 A C
        U = sum_r (l_r + T),   R = sum_r T,   C = sum_r (l_r + T)^2

    with the letters of :func:`train_flops`. Each response is a row r with its own copy of the
    prompt, of l_r tokens, and all T cells, also those past its end; all tokens of a row see each
    other.

    Example:
      >>> from jaxrl_llm.train.profile import ModelSize, denoising_flops
      >>> denoising_flops([2, 2], 3, size=ModelSize(100, 10, 4))
      8760.0
    """
    lengths = np.asarray(prompt_lengths, np.float64) + cells
    weights = size.matrices * lengths.sum() + size.projection * cells * lengths.size
    return float((4 if frozen else 6) * weights + 12 * size.attention * (lengths**2).sum())


@functools.cache
def measured_peak(dtype: str, *, size: int = _MEASURED_SIZE) -> float:
    """Operations per second of the fastest of several matrix products on the default device.

    The matrices are random, since accelerators multiply equal numbers faster. The default ``size``
    saturates a CPU; an accelerator needs 16,384. On CPUs the product has the form of the models',
    which is the fast one in bfloat16.
    """
    timed = _timed_product(dtype, size)
    begin, rates = time.perf_counter(), []
    while len(rates) < 3 or time.perf_counter() - begin < _MEASURED_SECONDS:
        rates.append(timed())
    return max(rates)


def _timed_product(dtype: str, size: int) -> Callable[[], float]:
    """A function that multiplies two matrices and returns its operations per second."""
    a, product = jax.random.normal(jax.random.key(0), (size, size), dtype), jax.jit(row_products)
    product(a, a).block_until_ready()

    def timed() -> float:
        start = time.perf_counter()
        product(a, a).block_until_ready()
        return 2 * size**3 / (time.perf_counter() - start)

    return timed


class Meter:
    """The speed of training steps, in tokens and in operations.

    Args:
      model: The model.
      peak_flops: Operations per second of one device. None measures a matrix product on a CPU,
        whose devices share its cores: at the start, when programs are being compiled, and again
        after each step of a second or more. The fastest one counts. For other devices the peak is
        then unknown.
      devices: Number of devices that train.
      epochs: Passes over a batch.
      shared_prefix_len, frozen: See the module.
      samples_members: Whether batches are of a population, which has no backward pass.
      likelihood: The recipe's, for a model that denoises.
    """

    def __init__(
        self,
        model: Model,
        *,
        peak_flops: float | None = None,
        devices: int = 1,
        epochs: int = 1,
        shared_prefix_len: int = 0,
        frozen: bool = False,
        samples_members: bool = False,
        likelihood: Likelihood | FlowLikelihood | None = None,
    ):
        self._size, self._epochs = model_size(model), epochs
        if block_length_of(model) is not None:  # what a token sees depends on its place
            self._size = None
        self._passes = likelihood.passes if isinstance(likelihood, Likelihood) else None
        self._shared_prefix_len = shared_prefix_len
        self._frozen, self._samples_members = frozen, samples_members
        self.peak = None if peak_flops is None else peak_flops * devices
        self._product: Callable[[], float] | None = None
        self._source = f"as configured for each of {devices}"
        if self.peak is None and jax.default_backend() == "cpu" and jax.process_count() == 1:
            dtype = str(jnp.dtype(model.config.dtype))
            self.peak, self._product = measured_peak(dtype), _timed_product(dtype, _MEASURED_SIZE)
            self._source = "of a matrix product, measured at the start; a faster one later counts"

    def about(self) -> dict[str, str]:
        """A description of the peak that the utilization is relative to."""
        values = "not known" if self.peak is None else f"{self.peak:.4g}, {self._source}"
        return {"peak FLOP/s": values}

    def __call__(self, batch: Batch, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics of a step; unknown values are left out.

        - ``unique_tokens``: tokens of the responses and of the prompts; a prompt counts once per
          group, the shared prefix once. Of a response, all up to its last token that trains, such
          as the observations between turns, which the model reads.
        - ``unique_tokens_per_second``: over the phases wait, score and train.
        - ``flops_per_second``: :func:`train_flops` over the phase train. For a population,
          :func:`population_flops` over wait and train; for a denoiser, :func:`denoising_flops` of
          each draw of masks over train.
        - ``mfu``: model FLOP utilization, the ratio of ``flops_per_second`` to the peak. Both are
          left out if the batch makes no update, and for a model that denoises block by block.

        ``batch`` is the batch as collected, on the host; ``seconds`` are by phase.
        """
        prompts = np.asarray(batch.prompt_mask).sum(-1)
        mask = np.asarray(batch.mask) & np.asarray(batch.where)[..., None]
        responses = np.maximum.accumulate(mask[..., ::-1], axis=-1).sum(-1)
        readers = responses.shape[1] if self._samples_members else 1
        once = prompts.sum() - self._shared_prefix_len * (prompts.size - 1)
        tokens = float(readers * once + responses.sum())
        busy = seconds["wait"] + seconds["score"] + seconds["train"]
        values = {"unique_tokens": tokens, "unique_tokens_per_second": tokens / max(busy, 1e-9)}
        if self._size is None:
            return values
        if self._samples_members:
            flops = population_flops(
                prompts, responses, size=self._size, shared_prefix_len=self._shared_prefix_len
            )
            spent = seconds["wait"] + seconds["train"]
        elif self._passes is not None:
            rows = np.repeat(prompts, (responses > 0).sum(-1))
            draws = batch.extras["masked"].shape[-1] // self._passes
            one = denoising_flops(rows, mask.shape[-1], size=self._size, frozen=self._frozen)
            flops, spent = self._epochs * draws * one, seconds["train"]
        else:
            flops = self._epochs * train_flops(
                prompts,
                responses,
                size=self._size,
                shared_prefix_len=self._shared_prefix_len,
                frozen=self._frozen,
            )
            spent = seconds["train"]
        if not responses.any() or spent <= 0:  # a batch that nothing was trained on
            return values
        values["flops_per_second"] = flops / spent
        if self._product is not None and busy >= 1:  # the product takes a hundredth of a second
            self.peak = max(self.peak or 0.0, self._product())
        if self.peak is not None:
            values["mfu"] = values["flops_per_second"] / self.peak
        return values


@contextlib.contextmanager
def traced(step: int, steps: Sequence[int], folder: Path) -> Iterator[None]:
    """Records a trace of the ``with`` block with jax.profiler, if the step is in ``steps``.

    If the profiler fails, this function warns and the run continues. Each trace has a folder inside
    ``folder``, which ``tensorboard --logdir`` or xprof reads.
    """
    if step not in steps:
        yield
        return

    def stop() -> None:
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:
            _warn(step, error)

    with contextlib.ExitStack() as stack:
        try:
            jax.profiler.start_trace(folder / f"step_{step:08}")
            stack.callback(stop)
        except (RuntimeError, OSError, ValueError) as error:
            _warn(step, error)
        yield


def _warn(step: int, error: Exception) -> None:
    warnings.warn(f"There is no trace of step {step}: {reason(error)}.", stacklevel=4)
