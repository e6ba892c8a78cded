"""What both parts of the benchmark of accelerators share: its model, and timing in turns."""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxrl_llm as jr

MODEL = {
    "architecture": "qwen3",
    "vocab_size": 151936,
    "width": 2048,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "mlp_width": 6144,
    "max_length": 40960,
    "rope_theta": 1e6,
    "tied": True,
    "qk_norm": True,
}


def make_model(*, tiny: bool) -> jr.models.Model:
    """Qwen3-1.7B's shape, or a tiny one; both compute in bfloat16."""
    if tiny:
        return jr.models.make_model(jr.testing.tiny_config(dtype="bfloat16", num_layers=1))
    return jr.models.make_model(jr.models.ModelConfig(**MODEL, dtype="bfloat16"))


def random_params(model: jr.models.Model, dtype: str) -> Any:
    """Parameters of a dtype: matrices drawn one at a time, and ones elsewhere.

    One program of ``model.init`` took the compiler of a GPU over 100 seconds for 28 layers.
    """

    @partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    shapes, form = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [
        draw(key, leaf.shape) if leaf.ndim > 1 else jnp.ones(leaf.shape, dtype)
        for key, leaf in zip(keys, shapes, strict=True)
    ]
    return jax.tree.unflatten(form, leaves)


def model_name(*, tiny: bool) -> str:
    return "tiny" if tiny else "Qwen3-1.7B, random"


class Timed(NamedTuple):
    """Seconds of the first run of a function, which compiles, and of those that count."""

    first: float
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def in_turns(rounds: int, runs: dict[str, Callable[[], Any]]) -> dict[str, Timed]:
    """Times functions in turns."""

    def seconds_of(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - begin

    found = {name: Timed(seconds_of(run), []) for name, run in runs.items()}
    for turn in range(1, rounds + 1):
        for name, run in runs.items():
            found[name].seconds.append(seconds_of(run))
            message = f"{name}: run {turn} of {rounds}, {found[name].seconds[-1]:.3g} s"
            print(message, file=sys.stderr, flush=True)
    return found


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


def compile_time(seconds: float) -> dict[str, float]:
    """Seconds of compilation, or nothing where programs may come from a cache."""
    cached = jax.config.jax_compilation_cache_dir
    return {} if cached else {"compile_seconds": rounded(max(0.0, seconds))}
