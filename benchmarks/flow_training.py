"""Flow policies learn to draw from one mode of a mixture: configs/flow.py, by each method.

    python -m benchmarks.flow_training --folder runs/flow_training --save
    python -m benchmarks.diffusion_page

Each run starts from the same velocity, with another seed of noise and order. A run that is in the
folder is not done again. With --save it writes benchmarks/results/flow_training-DEVICE.json, of
which the page makes a table.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.diffusion_training import measure
from benchmarks.worker import jax_device_name, package_versions

CONFIG = harness.ROOT / "configs" / "flow.py"
METHODS = ("flow_grpo", "branch_grpo_flow", "diffusion_nft", "sol_rl_flow", "unigrpo")
SEEDS = (0, 1, 2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is left to do and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, default=Path("runs/flow_training"))
    options.add_argument("--tiny", action="store_true", help="two steps of each, for tests")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = options.parse_args(argv)
    if options.save and options.tiny:
        raise SystemExit("benchmarks.flow_training: --tiny is not this benchmark")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    few = ("--steps", "2") if options.tiny else ("--evaluation.every", "20")
    runs = []
    for method in METHODS:
        for seed in SEEDS:
            name = f"{method}-{seed}"
            # A model without a text has a preset's loss of its own.
            target, words = str(CONFIG), ("--recipe", method, "--seed", str(seed), *few)
            if method == "unigrpo":
                target, words = f"{CONFIG}:no_text", ("--seed", str(seed), *few)
            run = measure(folder, name, target, f"runs/{name}", *words)
            runs.append(run | {"method": method, "seed": seed})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    result = {
        "name": "flow_training",
        "workload": {"config": "configs/flow.py"},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": harness.commit(),
        "runs": runs,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
