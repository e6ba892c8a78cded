"""Tries every fault that docs/reliability.md tells of, and writes what came of it into its table.

    python -m tests.faults --kills 500 --commands 1000 --mutations 1000 --save

Kills are divided evenly over the kinds of run and the meshes of kinds.py; ``--kind`` and ``--mesh``
choose some, and ``--jobs`` says how many are killed at a time. Commands and configs are those of
wrong_commands.py, model files those of tests/models/file_bombs.py, half of their mutations in GGUF
and half in safetensors; chat templates come with them. With --save the counts go to
benchmarks/results/faults-DEVICE.json, from which the page's tables are written; a row of it is
replaced when the same is tried again, so a trial may be made in pieces. A kind of run that fails
does not end the others.
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
from killing import torture  # noqa: E402
from kinds import CASES, KINDS, MESHES  # noqa: E402

from benchmarks import harness, reliability_page  # noqa: E402
from benchmarks.worker import jax_device_name, package_versions  # noqa: E402


def kill_runs(case: tuple[str, str], *, kills: int, seed: int) -> dict:
    """The tally of a kind of run on a mesh."""
    kind, mesh = case
    name = f"{kind}, {mesh}"
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-killing-") as folder:
        tally = torture(
            Path(folder),
            kills=kills,
            seed=seed,
            kind=kind,
            mesh=mesh,
            say=lambda text: say(f"{name}: {text}"),
        )
    say(f"{name}: {tally}")
    return {"kind": kind, "mesh": mesh, **tally._asdict()}


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


def merge(saved: dict, *, trials: dict, runs: list[dict], commit: str) -> dict:
    """A saved result with these trials and runs in the place of those of the same name."""
    rows = {(row["kind"], row["mesh"]): row for row in saved.get("runs", [])}
    rows |= {(row["kind"], row["mesh"]): row | {"commit": commit} for row in runs}
    trials = {name: each | {"commit": commit} for name, each in trials.items()}
    return {
        "name": "faults",
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "orbax-checkpoint"))},
        "trials": saved.get("trials", {}) | trials,
        "runs": [rows[case] for case in CASES if case in rows],
    }


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
    trials, commit = {}, harness.commit()
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
    cases = [
        (kind, mesh)
        for kind, mesh in CASES
        if kind in (options.kind or KINDS) and mesh in (options.mesh or MESHES)
    ]
    if not cases:
        parser.error("runs of several processes neither sample ahead nor play environments")
    file = harness.RESULTS / f"faults-{jax_device_name()}.json"
    saved = json.loads(file.read_text()) if options.save and file.exists() else {}
    result, failed = merge(saved, trials=trials, runs=[], commit=commit), []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        each = {"kills": -(-options.kills // len(cases)), "seed": options.seed}
        futures = {pool.submit(kill_runs, case, **each): case for case in cases if options.kills}
        for future in concurrent.futures.as_completed(futures):
            if error := future.exception():
                failed.append(f"{', '.join(futures[future])}: {error!r}")
                say(failed[-1])
                continue
            result = merge(result, trials={}, runs=[future.result()], commit=commit)
            if options.save:
                harness.save(result)
    harness.finish(result, to_file=options.save)
    if options.save:
        reliability_page.main([])
    if failed:
        raise SystemExit("tests.faults: " + "\n".join(failed))


if __name__ == "__main__":
    main()
