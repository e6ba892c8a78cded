"""The train step of a config at Qwen3-8B's size, compiled for a mesh of devices that are not there.

    python -m benchmarks.pods configs/tpu_v5e_64.py --device v5e --prompt-length 256
    python -m benchmarks.pods configs/tpu_v5e_64.py --layers 2        # for fake CPU devices

Nothing is allocated: the state and a batch are shapes with shardings, and XLA compiles for as many
devices as the mesh has. With --device the compiler is that of the TPU or GPU (benchmarks/absent.py
says what to install), else that of CPUs. Printed as JSON, in bytes of one device: the state, which
is exact, and what the compiled step takes besides. CPUs take more: their compiler computes bfloat16
products in float32 and holds the gradients of all layers before it sums them over the devices. The
operations are those of one device, where the compiler tells them; the loops over microbatches and
blocks of the vocabulary count once.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.absent import KINDS, prepare_environment, present

# https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json, what shapes depend on
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def load(path: str):
    """The config of a file; its mesh says how many devices to fake, so before jax starts."""
    from jaxrl_llm.cli.options import load_config

    return load_config(path)


def measure(
    config, *, layers: int, prompt_length: int, options: Mapping[str, str] | None = None
) -> dict:
    """Bytes and operations of one device, by name."""
    import jax

    from jaxrl_llm.models import ModelConfig, make_model, param_shapes
    from jaxrl_llm.train import make_mesh, make_optimizer, make_step
    from jaxrl_llm.train.config import find_recipe
    from jaxrl_llm.train.optimizer import policy_optimizer
    from jaxrl_llm.train.state import device_bytes
    from jaxrl_llm.train.update.init import abstract_batch, abstract_state

    size = ModelConfig.from_hf(QWEN3_8B, dtype=config.dtype)
    size = dataclasses.replace(size, num_layers=layers, scan_layers=config.scan_layers)
    model, mesh = make_model(size), make_mesh(**dataclasses.asdict(config.mesh))
    if mesh is None:
        raise SystemExit("pods.py: the mesh of this config is one device.")
    sampling, optimizer = config.sampling, make_optimizer(policy_optimizer(config))
    recipe: Any = find_recipe(config.recipe, sampling)
    state = abstract_state(param_shapes(model), optimizer, recipe, mesh=mesh)
    batch = abstract_batch(
        config.prompts_per_step,
        sampling.group_size,
        sampling.max_new_tokens,
        prompt_length=prompt_length,
        mesh=mesh,
    )
    found = {
        "layers": layers,
        "scan_layers": config.scan_layers,
        "prompt_length": prompt_length,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        "params_bytes": device_bytes(state.params),
        "optimizer_bytes": device_bytes(state.opt_state),
        "batch_bytes": device_bytes(batch),
    }
    step: Any = make_step(
        model,
        recipe,
        optimizer,
        microbatches=config.microbatches,
        mesh=mesh,
        remat=config.remat,
        temperature=sampling.temperature,
    )
    lowered = step.lower(state, batch)
    start = time.perf_counter()
    program = lowered.compile(compiler_options=dict(options or {}))
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    return found | {
        "arguments_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": cost.get("flops"),
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"])
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--response-length", type=int)
    parser.add_argument("--scan-layers", action="store_true")
    parser.add_argument("--device", choices=KINDS)
    parser.add_argument("--option", nargs="*", default=[], help="of the compiler: NAME=VALUE")
    given = parser.parse_args()
    prepare_environment()
    config = load(given.config)
    count = math.prod(dataclasses.astuple(config.mesh))
    import jax

    if given.response_length is not None:
        sampling = dataclasses.replace(config.sampling, max_new_tokens=given.response_length)
        config = dataclasses.replace(config, sampling=sampling)
    if given.scan_layers:
        config = dataclasses.replace(config, model=QWEN3_8B["architectures"][0], scan_layers=True)
    options = dict(each.split("=", 1) for each in given.option)
    sizes = {"layers": given.layers, "prompt_length": given.prompt_length, "options": options}
    if given.device is None:
        jax.config.update("jax_num_cpu_devices", count)
        found = measure(config, **sizes)
    else:
        with present(given.device, count):
            found = measure(config, **sizes)
    work = {"config": Path(given.config).name, "device": given.device or "cpu", "options": options}
    print(json.dumps(work | found, indent=2))


if __name__ == "__main__":
    sys.exit(main())
