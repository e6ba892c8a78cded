"""Memory of a step of long rows on the mesh axis ``context``, by its size: random weights.

    python -m benchmarks.context_axis --save
    python -m benchmarks.context_axis --tiny         # a look, on any machine

One prompt and one response of equal lengths, each layer computed again in the backward pass, on
processors that share this machine: nothing runs, so seconds are not measured. Bytes are those of
one device, as the compiler counts them: its arguments (weights, its part of the optimizer) and all
temporary arrays.

Steps are those of SmolLM2-135M in float32 with AdamW.
"""

import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.checkpoint import SMOLLM2
from benchmarks.long_context import one_response
from jaxrl_llm.testing import tiny_config
from jaxrl_llm.train.batches import pack_batch
from jaxrl_llm.train.mesh import make_mesh
from jaxrl_llm.train.update.init import abstract_state

LENGTH, SIZES = 8192, (1, 2, 4, 8)


def _child(length: int, size: int, tiny: bool) -> None:
    """Prints the bytes of one device."""
    config = tiny_config(num_layers=1) if tiny else SMOLLM2
    model, mesh = jr.models.make_model(config), make_mesh(context=size)
    recipe, optimizer = jr.recipes.reinforce_pp(), optax.adamw(1e-6)
    batch, _ = pack_batch(one_response(length, config.vocab_size), "flat", model=model)
    shapes = jr.models.param_shapes(model)
    state = abstract_state(shapes, optimizer, recipe, mesh=mesh)
    step: Any = jr.train.make_step(model, recipe, optimizer, mesh=mesh, remat="full")
    everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P())
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=everywhere), batch
    )
    memory = step.lower(state, batch).compile().memory_analysis()
    sizes = {"arguments": memory.argument_size_in_bytes, "others": memory.temp_size_in_bytes}
    print(json.dumps(sizes), flush=True)


def measure(length: int, size: int, *, tiny: bool) -> dict[str, int]:
    """The bytes of one of ``size`` devices, in a process that has them."""
    request = json.dumps({"length": length, "size": size, "tiny": tiny})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.context_axis", "--child", request],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(size)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--child", type=json.loads, help="used by the command itself")
    options = parser.parse_args(argv)
    if options.child is not None:
        _child(**options.child)
        return
    harness.refuse_peers(parser, options)
    length, sizes = (16, (1, 2)) if options.tiny else (LENGTH, SIZES)
    ours = {str(size): measure(length, size, tiny=options.tiny) for size in sizes}
    workload = {
        "model": "tiny" if options.tiny else "SmolLM2-135M's size, random",
        "dtype": "float32",
        "length": length,
    }
    harness.finish(harness.of_ours("context_axis", workload, ours), to_file=options.save)


if __name__ == "__main__":
    main()
