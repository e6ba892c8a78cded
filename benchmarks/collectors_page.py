"""Writes the measured part of docs/collectors.md from benchmarks/results.

python -m benchmarks.collectors_page            # write
python -m benchmarks.collectors_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT, short
from benchmarks.quickstart import CURVES, WAYS

PAGE = ROOT / "docs" / "collectors.md"
COLUMNS = ("preset", "milliseconds of a batch (least to most)", "of a step of the quickstart")
VOTE_COLUMNS = ("questions", "seed", "minutes", *WAYS, "vote")
RUN_COLUMNS = ("target", "seed", "steps", "minutes", "greedy", "sampled")


def measured(folder: Path = RESULTS) -> str:
    """What collectors bring to the quickstart, what a vote teaches, and what they cost the host."""
    found = pages.results(folder)
    parts = [_curves(each) for each in found if each["name"] == "quickstart_beside"]
    parts += [_votes(each) for each in found if each["name"] == "test_time_training"]
    parts += [_host(each) for each in found if each["name"] == "collectors"]
    return "\n\n".join(parts) or "Nothing yet."


def _curves(result: Mapping[str, Any]) -> str:
    beside, before = result.get("beside", {}), result.get("before")
    targets = {"quickstart": result["runs"], **beside}
    command = "python -m benchmarks.quickstart"
    if beside:
        command += f" --beside {' '.join(beside)}"
    if before:
        targets[f"quickstart of {short(before['commit'])}"] = before["runs"]
        command += " --before CHECKOUT"
    title = (
        f"Minutes of training and held-out accuracy of targets of `{result['workload']['config']}`,"
        f" {result['device']} (`{command}`):"
    )
    rows = [
        (
            f"`{name}`",
            str(run["seed"]),
            str(run["steps"]),
            f"{run['minutes']:.1f}",
            *(f"{run[f'{way}_before']:.3f} to {run[f'{way}_after']:.3f}" for way in WAYS),
        )
        for name, runs in targets.items()
        for run in runs
    ]
    means = " ".join(_against(targets, name) for name in targets if name != "quickstart")
    image = CURVES.relative_to(RESULTS.parents[1]).as_posix()
    picture = f"![Held-out accuracy by minutes](../{image})"
    return "\n\n".join((pages.table(title, RUN_COLUMNS, rows), means, picture))


def _against(targets: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> str:
    """The means of the quickstart's seeds beside those of another target."""

    def mean(target: str, column: str) -> float:
        return fmean(run[column] for run in targets[target])

    accuracies = " and ".join(
        f"{mean('quickstart', column):.3f} (`{name}`: {mean(name, column):.3f}) {way}"
        for way, column in ((way, f"{way}_after") for way in WAYS)
    )
    share = mean("quickstart", "minutes") / mean(name, "minutes")
    return (
        f"On average over the seeds, the quickstart takes {share:.2f} of the minutes of `{name}` "
        f"and ends at {accuracies}."
    )


def _votes(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    title = (
        f"`{work['config']}` trained for {work['half']} steps, then by `ttrl_majority` for "
        f"{work['steps']} on the majority vote of {work['votes']} completions, without answers: "
        f"accuracy on the held-out questions before and after, {result['device']} "
        "(`python -m benchmarks.test_time_training`). `held out` trains on the same questions, "
        "`others` on those of the first phase:"
    )
    rows = [
        (
            run["questions"],
            str(run["seed"]),
            f"{run['minutes']:.1f}",
            *(
                f"{run[f'{way}_before']:.3f} to {run[f'{way}_after']:.3f}"
                for way in (*WAYS, "majority")
            ),
        )
        for run in result["runs"]
    ]
    return pages.table(title, VOTE_COLUMNS, rows)


def _host(result: Mapping[str, Any]) -> str:
    size, times = result["workload"], result["milliseconds"]
    title = (
        f"Time on the host of a batch of {size['prompts']} x {size['rollouts']} rollouts of "
        f"{size['tokens']} tokens, without the sampler, {result['device']}, where a step of the "
        f"quickstart takes {result['quickstart_seconds']['median']:.1f} s "
        "(`python -m benchmarks.collectors`; `grpo` has no collector):"
    )
    order = sorted(times, key=lambda name: times[name]["median"])
    rows = [
        (
            f"`{name}`",
            f"{times[name]['median']:.1f} ({times[name]['min']:.1f} to {times[name]['max']:.1f})",
            f"{result['share'][name]:.1%}",
        )
        for name in order
    ]
    return pages.table(title, COLUMNS, rows)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.collectors_page", argv)


if __name__ == "__main__":
    sys.exit(main())
