"""Bytes that the parts of a run take, as formulas of shapes; nothing is allocated or compiled."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import logprobs
from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.kernels.vocabulary import block_words
from jaxrl_llm.models.sharding import AXES, param_spec
from jaxrl_llm.rollout.sampling.options import make_draw


class Batch(NamedTuple):
    """The part of a batch that a device works on at one time.

    Attributes:
      prompts: P.
      group_size: G.
      prompt_length: Lp, padding included.
      length: T.
    """

    prompts: int
    group_size: int
    prompt_length: int
    length: int


def tree_bytes(
    tree: ArrayTree, mesh: Mapping[str, int] | None = None, *, spec: Callable = param_spec
) -> int:
    """Bytes of arrays, or of their shapes, on one device of a mesh.

    Args:
      tree: Parameters, or an optimizer's state whose paths end as theirs do.
      mesh: Sizes of the mesh axes; they need not be those of devices that are there.
      spec: How a leaf is split: ``param_spec``, or ``update_spec`` of gradients and optimizers.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory import tree_bytes
      >>> params = jr.testing.tiny_model()[1]
      >>> tree_bytes(params), tree_bytes(params, {"fsdp": 2})
      (107520, 54080)
    """
    sizes = {axis: (mesh or {}).get(axis, 1) for axis in AXES}
    there = jax.sharding.AbstractMesh(tuple(sizes.values()), AXES)

    def one(path: str, x) -> int:
        axes = jax.tree.leaves(tuple(spec(path, x.shape, there)))  # one may be split over two
        return x.size * x.dtype.itemsize // math.prod(sizes[axis] for axis in axes)

    arrays = [x for x in jax.tree_util.tree_leaves_with_path(tree) if hasattr(x[1], "shape")]
    return sum(one(trees.path_str(path), x) for path, x in arrays)


def activation_bytes(
    config: Any,
    batch: Batch,
    *,
    remat: str,
    itemsize: int = 4,
    adapter: bool = False,
    split: int = 1,
) -> int:
    """Bytes that the forward pass keeps for the backward pass, at their most.

    With N = P (Lp + G T) tokens, S = P (Lp^2 + G T (Lp + T)) pairs of them, width D, H query and K
    key heads of size d, and M hidden units, a layer keeps

        full   N D + 2 P Lp K d
        dots   N (2 D + (H + 2 K) d + 2 M) + 2 P Lp K d
        none   N (4 D + 2 (H + K) d + 3 M) + 2 H S

    numbers: its input and what responses attend to of the prompt, which is kept where prompts go
    through the layers first; its matrix products too; all.
    While a layer that keeps less is computed again, all of that one layer is there. With an adapter
    it is ``2 N M`` more: what is added to hidden units stands beside them. The last norm keeps ``2
    P G T D`` once.

    Args:
      config: A ``ModelConfig``.
      batch: What a device works on at one time.
      remat: "none", "dots" or "full".
      itemsize: Bytes of a number; those of attention scores are float32.
      adapter: Whether linear layers have low-rank matrices beside them.
      split: Size of the ``tensor`` axis: a device has that part of H, K and M.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory import Batch, activation_bytes
      >>> config, batch = jr.testing.tiny_config(), Batch(1, 2, 8, 4)
      >>> activation_bytes(config, batch, remat="none")
      64512

    References:
      None; ours. Held to compiled programs on CPUs, and to what traced ones keep, by its tests.
    """
    checks.check_option("activation_bytes", "remat", remat, ("none", "dots", "full"))
    c, (P, G, Lp, T) = config, batch
    tokens, pairs = P * (Lp + G * T), P * (Lp * Lp + G * T * (Lp + T))
    heads, key_heads, hidden = (
        max(size // split, 1) for size in (c.num_heads, c.num_kv_heads, c.mlp_width)
    )
    width, queries, keys = c.width, heads * c.head_dim, key_heads * c.head_dim
    everything = 4 * width + 2 * (queries + keys) + 3 * hidden
    everything += queries + keys if getattr(c, "qk_norm", False) else 0
    everything += 2 * hidden if adapter else 0
    whole = itemsize * tokens * everything + 4 * 2 * heads * pairs
    ends = itemsize * P * G * T * width
    if remat == "none":
        return c.num_layers * whole + ends
    shared, kept = 2 * P * Lp * keys, width
    if remat == "dots":
        kept = 2 * width + queries + 2 * keys + 2 * hidden
    return c.num_layers * itemsize * (tokens * kept + shared) + whole + ends


def logits_bytes(
    vocab_size: int,
    tokens: int,
    width: int,
    *,
    mesh: Mapping[str, int] | None = None,
    statistics: bool = False,
) -> int:
    """Bytes on one device of the three blocks of logits that exist at one time.

    Args:
      vocab_size: V.
      tokens: Of the responses of a microbatch, on all devices.
      width: Of hidden states.
      mesh: Sizes by axis; None is one device.
      statistics: Whether statistics over the vocabulary are computed, in chunks of tokens.
    """
    mesh = dict.fromkeys(AXES, 1) | dict(mesh or {})
    parts = 1 if vocab_size % mesh["tensor"] else mesh["tensor"]
    own = -(-tokens // (mesh["data"] * mesh["fsdp"]))
    words = block_words(vocab_size, tokens, width, _chunk_of(logprobs.token_logprobs))
    found = own * -(-words // parts)
    if statistics:  # which are computed beside the log-probabilities
        chunk = min(_chunk_of(logprobs.vocabulary_statistics), own)
        found = max(found, chunk * vocab_size // parts)
    return 3 * 4 * found


def _chunk_of(scorer: Callable) -> int:
    return inspect.signature(scorer).parameters["chunk_size"].default


def recorded_bytes(vocab_size: int, **sampling) -> tuple[int, int]:
    """Bytes that a sampler records of one token, and how many of them are its support.

    Args:
      vocab_size: V.
      **sampling: Options of :func:`~jaxrl_llm.rollout.sampling.options.make_draw`.

    Example:
      >>> from jaxrl_llm.train.memory import recorded_bytes
      >>> recorded_bytes(320), recorded_bytes(320, top_p=0.9), recorded_bytes(320, top_k=5)
      ((20, 0), (60, 40), (40, 20))
    """
    blank = make_draw("recorded_bytes", vocab_size=vocab_size, **sampling).blank
    return _bytes(blank), _bytes(blank.support)


def cache_bytes(
    config: Any,
    *,
    prompts: int,
    prompt_length: int,
    slots: int,
    length: int,
    recorded: int = 20,
    split: int = 1,
) -> int:
    """Bytes of a sampler's keys, values and outputs.

    Args:
      config: A ``ModelConfig``.
      prompts: Whose keys and values are there once each.
      prompt_length: Room for a prompt.
      slots: Responses that decode at one time.
      length: Room for a response.
      recorded: Bytes of the outputs of one token, from :func:`recorded_bytes`.
      split: Devices that the weights of a layer are split over; those that divide its heads have
        each their part of keys and values.
    """
    heads = config.num_kv_heads
    each = 2 * config.num_layers * config.head_dim * (heads if heads % split else heads // split)
    each *= np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    return each * (prompts * prompt_length + slots * length) + recorded * slots * length


def _bytes(tree: ArrayTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def available_memory(devices: int = 1, *, root: str = "/") -> int | None:
    """Bytes that one device has for a run; None if it does not tell.

    On CPUs it is what the machine or the container has left, an equal share for each of the run's
    ``devices`` there.

    Args:
      devices: How many the run has.
      root: Where the files of the operating system begin.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu":
        return None
    try:
        lines = _numbers(Path(root, "proc/meminfo"))
        left = min([lines["MemAvailable:"] * 1024, *_left_in_groups(Path(root))])
    except (OSError, KeyError, ValueError):
        return None
    return left // max(min(devices, jax.local_device_count()), 1)


# By version of control groups: where memory is limited, its limit, use, and the files in that use
# that can be dropped.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left under each limit of the process's control groups, such as a container's."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        for kind, limit, used, droppable in _GROUPS:
            if kind not in names.split(","):
                continue
            here = PurePosixPath(path.lstrip("/"))
            for part in (here, *here.parents):  # in a container its own group may be the first
                folder = root / "sys/fs/cgroup" / kind / part
                try:
                    most, taken = (int((folder / name).read_text()) for name in (limit, used))
                    taken -= _numbers(folder / "memory.stat").get(droppable, 0)
                except (OSError, ValueError):  # not there, or "max": without a limit
                    continue
                yield max(most - taken, 0)


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line of a file of the operating system: a name and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
