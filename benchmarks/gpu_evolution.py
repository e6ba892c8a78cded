"""A population on an accelerator, beside plain decoding of the same batch.

    python -m benchmarks.gpu --part evolution --save               # 512 and 2,048 members
    python -m benchmarks.gpu --part evolution --members 512
    python -m benchmarks.gpu --part evolution --tiny               # a look, on any machine

Qwen3-1.7B's size, bfloat16 weights and noise, random: every member answers a prompt of its own.
What is measured is that of benchmarks/evolution.py: plain decoding, with noise that was made
before, with noise that is drawn with the batch, and the update; and one layer of width 8,192 with
1,024 rows, which is what the paper of EGGROLL (arXiv:2511.16652) measures.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from benchmarks import evolution, harness
from benchmarks.accelerator import model_name
from benchmarks.worker import jax_device_memory, package_versions, peak_memory

SIZE = {"prompt_tokens": 64, "new_tokens": 64}
TINY = {"prompt_tokens": 4, "new_tokens": 3}
LAYER = {"width": 8192, "rows": 1024, "dense_rows": 4, "calls": 100}
MEMBERS, TINY_MEMBERS = (512, 2048), (4,)


def measure(model, params, *, tiny: bool, members: Sequence[int], rounds: int) -> dict[str, Any]:
    """Every number of members in turn, and the layer.

    Args:
        model: The model.
        params: Its parameters.
        tiny: Whether sizes are those of a look.
        members: How many, each of which decodes in one batch.
        rounds: Runs of each.
    """
    size = TINY if tiny else SIZE
    layer = evolution.TINY_LAYER if tiny else LAYER
    ours: dict[str, Any] = {"layer": evolution.layer(layer, rounds, jnp.bfloat16)}
    for count in members:
        found = evolution.decoding(model, params, {**size, "members": count}, rounds)
        # Of all so far: a device does not forget its peak.
        ours[str(count)] = {**found, "peak_memory_bytes": jax_device_memory() or peak_memory()}
    return {
        "workload": {
            "model": model_name(tiny=tiny),
            "dtype": model.config.dtype,
            "members": list(members),
            "layer": layer,
            **size,
            "runs": rounds,
        },
        "versions": {"ours": package_versions(("jax", "jaxlib", "optax", "jaxrl_llm"))},
        "commit": harness.commit(),
        "ours": ours,
    }
