"""The integer language model on real text: bits per byte it never saw, against order 0.

    python -m benchmarks.egg_text --save             # trains and writes the result, with its curve

The text is the language reference that comes with Python, `pydoc_data.topics`: of ten blocks of a
kilobyte nine to train on, one to measure on. Order 0 is the entropy of the single bytes of the
held-out part itself, so that no model without memory can be better, whatever it was trained on.
Weights, activations, noise, scores and updates are integers; members of the population are pairs,
and what counts is which side of a pair finds its piece of text more likely.
"""

import argparse
import dataclasses
import sys
import time
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm import evolution
from jaxrl_llm.core import Array, ArrayTree, trees

BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is, with the text.

    Attributes:
      width: Of the model.
      layers: Of the model.
      members: In the population, even.
      streams: How many places of the text are read at a time, each by as many pairs.
      window: Bytes between updates.
      steps: Updates.
      decay: How fast the share of moving weights falls.
      shift: The noise has scale 2^-shift.
      seed: Of everything.
    """

    width: int = 64
    layers: int = 1
    members: int = 4096
    streams: int = 2048
    window: int = 16
    steps: int = 2000
    decay: float = 0.04
    shift: int = 4
    seed: int = 0


def reference_text() -> bytes:
    """The language reference, topics in alphabetical order."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def symbols(text: bytes) -> tuple[np.ndarray, bytes]:
    """The text as numbers from 0, and the bytes that they stand for."""
    letters = bytes(sorted(set(text)))
    return np.array([letters.index(byte) for byte in text], np.int32), letters


def order_0(data: np.ndarray) -> float:
    """Entropy of the single symbols, in bits."""
    share = np.bincount(data) / len(data)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def split(data: np.ndarray, *, length: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """The text to train on, and the held-out blocks ``[blocks, length]``: the last of every ten."""
    blocks = data[: len(data) // length * length].reshape(-1, length)
    held_out = np.arange(len(blocks)) % 10 == 9
    return blocks[~held_out].reshape(-1), blocks[held_out]


def bits(params: ArrayTree, blocks: np.ndarray) -> float:
    """Bits a symbol of the plain model, which reads each block from its beginning."""
    return float(-_scores(params, jnp.asarray(blocks)).mean() / 16)


@jax.jit
def _scores(params: ArrayTree, texts: Array) -> Array:
    return evolution.egg_scores(params, texts)[0]


def make_step(table: Array, key: Array, setting: Setting):
    """An update of the parameters, and the states of the members after their piece of text."""

    @jax.jit
    def step(params, state, texts, epoch):
        members = jnp.arange(setting.members)
        noise = evolution.egg_noise(params, table, key, epoch, members)
        texts = jnp.repeat(texts, setting.members // setting.streams, axis=0)
        options = {"perturbations": noise, "shift": setting.shift}
        scores, state = evolution.egg_scores(params, texts, state, **options)
        signs = evolution.pair_sign(scores.sum(-1))
        threshold = evolution.egg_threshold(evolution.egg_alpha(epoch, decay=setting.decay))
        params = evolution.egg_evolve(params, table, key, epoch, signs, threshold=threshold)
        return params, state, -scores.mean() / 16

    return step


def train(data: np.ndarray, vocab: int, setting: Setting, report=None) -> ArrayTree:
    """The parameters after all updates.

    Args:
      data: The text as numbers.
      vocab: How many numbers there are.
      setting: Of the run.
      report: Called after each update with its number, the parameters and the members' mean bits.
    """
    keys = jax.random.split(jax.random.key(setting.seed), 3)
    params = evolution.egg_init(keys[0], vocab=vocab, width=setting.width, layers=setting.layers)
    table = evolution.int8_table(keys[1])
    step = make_step(table, keys[2], setting)
    state = jnp.zeros((setting.layers, setting.members, setting.width), jnp.int8)
    starts = np.arange(setting.streams) * (len(data) // setting.streams)
    for epoch in range(setting.steps):
        places = starts[:, None] + epoch * setting.window + np.arange(setting.window + 1)
        texts = jnp.asarray(data[places % len(data)])
        params, state, mean = step(params, state, texts, epoch)
        if report is not None:
            report(epoch + 1, params, mean)
    return params


def measure(text: bytes, setting: Setting, *, every: int) -> dict[str, Any]:
    """A run on a text: its curve on the held-out tenth, and the entropies to compare it with.

    Args:
      text: Train and held out.
      setting: Of the run.
      every: Updates between two points of the curve.
    """
    data, letters = symbols(text)
    seen, held_out = split(data)
    curve: list[dict[str, float]] = []
    start, busy = time.perf_counter(), time.process_time()

    def report(step: int, params: ArrayTree, mean: Array) -> None:
        if step % every and step != setting.steps:
            return
        row = {"step": step, "minutes": round((time.perf_counter() - start) / 60, 2)}
        # Of all cores together: what remains where others compute on the same ones.
        row["cpu_minutes"] = round((time.process_time() - busy) / 60, 2)
        row |= {"members": round(float(mean), 4), "held_out": round(bits(params, held_out), 4)}
        curve.append(row)
        print(row, file=sys.stderr, flush=True)

    params = train(seen, len(letters), setting, report)
    return {
        "text": {"bytes": len(text), "symbols": len(letters), "held_out": held_out.size},
        "parameters": trees.size(params),
        "order_0": {
            "held_out": round(order_0(held_out.reshape(-1)), 4),
            "train": round(order_0(seen), 4),
        },
        "order_1": {"train": round(order_1(seen), 4)},
        "uniform": round(float(np.log2(len(letters))), 4),
        "bits_per_byte": curve[-1]["held_out"],
        "minutes": curve[-1]["minutes"],
        "cpu_minutes": curve[-1]["cpu_minutes"],
        "curve": curve,
    }


def order_1(data: np.ndarray) -> float:
    """Entropy of a symbol given the one before, in bits."""
    vocab = int(data.max()) + 1
    return order_0(data[:-1] * vocab + data[1:]) - order_0(data[:-1])


def main(argv: list[str] | None = None) -> None:
    """Run, and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tiny", action="store_true", help="a small run, for tests")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = options.parse_args(argv)
    if options.tiny and options.save:
        raise SystemExit("benchmarks.egg_text: --tiny would not be the run to save")
    text, setting, every = reference_text(), Setting(), 50
    if options.tiny:
        text, every = text[: 20 * BLOCK], 2
        setting = Setting(width=8, members=16, streams=4, window=8, steps=4)
    result = {
        "name": "egg_text",
        "workload": {"text": "pydoc_data.topics", **dataclasses.asdict(setting)},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "ours": measure(text, setting, every=every),
        "peers": {},
        "ratios": {},
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
