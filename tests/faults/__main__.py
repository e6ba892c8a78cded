"""Kills every kind of run on every mesh, and writes what was tried into docs/reliability.md.

    python -m tests.faults --kills 500 --save

The kills are divided evenly over the kinds of run and the meshes of kinds.py. With --save the
counts go to benchmarks/results/kills-DEVICE.json, from which the page's table is written.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from killing import KINDS, MESHES, torture  # noqa: E402

from benchmarks import harness, reliability_page  # noqa: E402
from benchmarks.worker import jax_device_name, package_versions  # noqa: E402


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="this alone; may be repeated"
    )
    parser.add_argument("--mesh", choices=MESHES, action="append", help="these alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and the page")
    options = parser.parse_args()
    cases = [(k, m) for k in options.kind or KINDS for m in options.mesh or MESHES]
    each, runs = -(-options.kills // len(cases)), []
    for kind, mesh in cases:
        print(f"{kind}, {mesh}:", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="jaxrl_llm-killing-") as name:
            found = torture(
                Path(name),
                kills=each,
                seed=options.seed,
                kind=kind,
                mesh=mesh,
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
        runs.append({"kind": kind, "mesh": mesh, **found._asdict()})
    result = {
        "name": "kills",
        "seed": options.seed,
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "orbax-checkpoint"))},
        "commit": harness.commit(),
        "runs": runs,
    }
    harness.finish(result, to_file=options.save)
    if options.save:
        reliability_page.main([])


if __name__ == "__main__":
    main()
