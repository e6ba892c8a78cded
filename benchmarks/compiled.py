"""Train steps compiled for a TPU slice and for GPUs that are not there: do they fit?

    python -m benchmarks.compiled --save             # all; absent.py says what to install
    python -m benchmarks.compiled --program gpu_8    # one, printed

The configs of a pod and of a node at Qwen3-8B's size (benchmarks/pods.py), and the step that
benchmarks/gpu_train.py measures, Qwen3-1.7B's size on one GPU, for each rematerialization. Each is
compiled in a process of its own by the compiler of its device. `taken_bytes` is what one device
needs while the step runs: its arguments, most of which are written over, and temporary memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.absent import KINDS, prepare_environment, present
from benchmarks.worker import package_versions

PODS = {"tpu_v5e_64": "v5e", "gpu_8": "h100"}
# A product of activations and gathered weights waits for all of the weights.
GATHERED = "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
DEVICE = "h100"
REMAT = ("full", "dots", "none")


def one_device(remat: str) -> dict[str, Any]:
    """Bytes of the step of benchmarks/gpu_train.py."""
    import jax

    import jaxrl_llm as jr
    from benchmarks import accelerator, gpu_train
    from jaxrl_llm.train.update.init import abstract_batch, abstract_state

    model, size = accelerator.make_model(tiny=False), gpu_train.SIZE
    recipe = jr.recipes.dr_grpo(length=size["response_tokens"])
    optimizer = jr.train.make_optimizer(jr.train.OptimizerConfig())
    state = abstract_state(jr.models.param_shapes(model), optimizer, recipe)
    shape = (size["prompts"], size["rollouts"], size["response_tokens"])
    batch = abstract_batch(*shape, prompt_length=size["prompt_tokens"])
    with present(DEVICE, 1) as devices:
        place = jax.sharding.SingleDeviceSharding(devices[0])
        state, batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (state, batch)
        )
        step: Any = jr.train.make_step(model, recipe, optimizer, remat=remat)
        start = time.perf_counter()
        memory = step.lower(state, batch).compile().memory_analysis()
    return {
        "config": "benchmarks/gpu_train.py",
        "device": DEVICE,
        "model": accelerator.model_name(tiny=False),
        "remat": remat,
        "arguments_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def taken(found: dict[str, Any]) -> dict[str, Any]:
    """With the bytes that a device needs beside those that it has."""
    # What is written beside the donated state are metrics alone.
    bytes_ = found["arguments_bytes"] + found["temporary_bytes"]
    memory = KINDS[found["device"]].memory_bytes
    return found | {"taken_bytes": bytes_, "memory_bytes": int(memory)}


def programs() -> dict[str, list[str]]:
    """The command of each program."""
    own = ["-m", "benchmarks.compiled", "--remat"]
    made = {name: ["-m", "benchmarks.pods", f"configs/{name}.py"] for name in PODS}
    made = {name: [*words, "--device", PODS[name]] for name, words in made.items()}
    made |= {f"{name}_scanned": [*words, "--scan-layers"] for name, words in made.items()}
    made["tpu_v5e_64_gathered"] = [*made["tpu_v5e_64"], "--option", GATHERED]
    return made | {f"one_gpu_{remat}": [*own, remat] for remat in REMAT}


def save(found: Mapping[str, Any], folder: Path = harness.RESULTS) -> None:
    """Writes programs beside those that were saved before."""
    path = folder / "compiled.json"
    known = json.loads(path.read_text())["programs"] if path.exists() else {}
    known |= found
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "nvidia-cudnn-cu12")
    result = {
        "name": "compiled",
        "versions": package_versions(packages),
        "commit": harness.commit(),
        "programs": {name: known[name] for name in programs() if name in known},
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=programs(), nargs="+", default=list(programs()))
    parser.add_argument("--remat", choices=REMAT, help="one step, in this process")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.remat is not None:
        prepare_environment()
        print(json.dumps(one_device(given.remat)))
        return
    found = {}
    for name in given.program:
        with tempfile.TemporaryFile("w+") as output:
            words = [sys.executable, *programs()[name]]
            subprocess.run(words, cwd=harness.ROOT, stdout=output, check=True)
            output.seek(0)
            found[name] = taken(json.loads(output.read()))
        print(name, json.dumps(found[name], indent=2), flush=True)
    if given.save:
        save(found)


if __name__ == "__main__":
    sys.exit(main())
