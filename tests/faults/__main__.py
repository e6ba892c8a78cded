"""Tries every fault that docs/reliability.md tells of, and writes what came of it into its table.

    python -m tests.faults --kills 500 --commands 1000 --mutations 1000 --save

Kills are divided evenly over the kinds of run and the meshes of kinds.py; ``--kind`` and ``--mesh``
choose some, and ``--jobs`` says how many are killed at a time. Commands and configs are those of
wrong_commands.py, model files those of tests/models/file_bombs.py, half of their mutations in GGUF
and half in safetensors; chat templates come with them. With --save the counts go to
benchmarks/results/faults-DEVICE.json, from which the page's tables are written.
"""

import argparse
import collections
import concurrent.futures
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from capped import run_capped  # noqa: E402
from killing import KINDS, MESHES, torture  # noqa: E402

from benchmarks import harness, reliability_page  # noqa: E402
from benchmarks.worker import jax_device_name, package_versions  # noqa: E402


def kill_runs(
    kills: int, kinds: list[str], meshes: list[str], *, seed: int, jobs: int
) -> list[dict]:
    """The tally of each kind of run on each mesh, ``jobs`` of them at a time."""
    cases = [(kind, mesh) for kind in kinds for mesh in meshes]
    each = -(-kills // len(cases))

    def kill(case: tuple[str, str]) -> dict:
        kind, mesh = case
        name = f"{kind}, {mesh}"
        with tempfile.TemporaryDirectory(prefix="jaxrl_llm-killing-") as folder:
            tally = torture(
                Path(folder),
                kills=each,
                seed=seed,
                kind=kind,
                mesh=mesh,
                say=lambda text: say(f"{name}: {text}"),
            )
        say(f"{name}: {tally}")
        return {"kind": kind, "mesh": mesh, **tally._asdict()}

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(kill, cases))


def outcomes(program: Path, *words: str) -> dict[str, int]:
    """How often a program's cases came to what; it prints a case and its outcome a line.

    Raises:
      SystemExit: If any came to something else than it may.
    """
    results = dict(run_capped(program, *words))
    wrong = {
        name: result
        for name, result in results.items()
        if result not in ("refused", "planned", "loaded") and not result.startswith("a text of")
    }
    if wrong:
        raise SystemExit(f"{program.name}: {json.dumps(wrong, indent=1)}")
    counts = collections.Counter(result == "refused" for result in results.values())
    return {"cases": len(results), "refused": counts[True], "accepted": counts[False]}


def say(text: str) -> None:
    """Progress, on stderr: the last line of stdout is the result."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--commands", type=int, default=1000)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS, action="append", help="these runs alone")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="these meshes alone")
    parser.add_argument("--jobs", type=int, default=1, help="kinds of run killed at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and the page")
    options = parser.parse_args()
    trials = {}
    if options.commands:
        count = str(options.commands)
        trials["commands and configs"] = outcomes(HERE / "wrong_commands.py", count)
        say(json.dumps(trials))
    if options.mutations:
        with tempfile.TemporaryDirectory(prefix="jaxrl_llm-bombs-") as name:
            words = (name, str(-(-options.mutations // 2)))
            trials["model files"] = outcomes(HERE.parent / "models" / "file_bombs.py", *words)
        trials["chat templates"] = outcomes(HERE.parent / "data" / "template_bombs.py")
        say(json.dumps(trials))
    runs = []
    if options.kills:
        kinds, meshes = options.kind or list(KINDS), options.mesh or list(MESHES)
        runs = kill_runs(options.kills, kinds, meshes, seed=options.seed, jobs=options.jobs)
    result = {
        "name": "faults",
        "seed": options.seed,
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "orbax-checkpoint"))},
        "commit": harness.commit(),
        "trials": trials,
        "runs": runs,
    }
    harness.finish(result, to_file=options.save)
    if options.save:
        reliability_page.main([])


if __name__ == "__main__":
    main()
