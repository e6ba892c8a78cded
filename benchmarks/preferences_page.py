"""Writes the measured part of docs/preferences.md from benchmarks/results.

python -m benchmarks.preferences_page            # write
python -m benchmarks.preferences_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT
from benchmarks.readme import spread

PAGE = ROOT / "docs" / "preferences.md"
STEPS = {
    "dpo_step": "the reference in the step",
    "dpo_step_precomputed": "reference log-probabilities precomputed",
}


def measured(folder: Path = RESULTS) -> str:
    """The methods side by side, and seconds of a step of ours and TRL's, on each device."""
    tables = {"preferences": methods, "dpo_step": step, "dpo_step_precomputed": step}
    results = [each for each in pages.results(folder) if each["name"] in tables]
    return "\n\n".join(tables[each["name"]](each) for each in results) or "Nothing yet."


def methods(result: Mapping[str, Any]) -> str:
    """Accuracy on held-out pairs and of greedy answers, of each method."""
    pairs, first = result["pairs"], result["runs"][0]
    title = (
        f"`{result['workload']['config']}` on {result['device']}, "
        f"{pairs['rows']} pairs of {pairs['prompts']} prompts, sampled in {pairs['minutes']} "
        f"minutes. Pairs are of {first['held_out_prompts']} prompts held out of it; answers are "
        f"to {first['questions']} questions that are not in it. In brackets 95% intervals "
        "(`python -m benchmarks.preferences`):"
    )
    columns = ("method", "minutes", "held-out pairs", "greedy before", "greedy after", "sampled")
    return pages.table(title, columns, map(_row, result["runs"]))


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    def with_interval(name: str) -> str:
        low, high = run[f"{name}_interval"]
        return f"{run[name]:.3f} [{low:.3f}, {high:.3f}]"

    names = ("pairs_after", "greedy_before", "greedy_after", "sampled_after")
    return (f"`{run['method']}`", f"{run['minutes']:.1f}", *map(with_interval, names))


def step(result: Mapping[str, Any]) -> str:
    """Seconds and peak memory of a step of ours and of the peers."""
    work = result["workload"]
    title = (
        f"One DPO step of {work['model']}, {work['dtype']}, {work['pairs']} pairs, "
        f"{work['prompt_tokens']} + {work['response_tokens']} tokens, {STEPS[result['name']]}, "
        f"{result['device']} (`python -m benchmarks.dpo_step`):"
    )
    versions = {k: v.get(k, "") for k, v in result["versions"].items()}
    rows = []
    for name, each in (("ours", result["ours"]), *result["peers"].items()):
        ratio = f"{result['ratios'][name]:.3g}" if name in result["ratios"] else ""
        gigabytes = f"{each['peak_memory_bytes'] / 1e9:.2f}"
        label = f"{name} {versions.get(name, '')}".strip()
        rows.append((label, spread(each["seconds"]), ratio, gigabytes))
    return pages.table(title, ("", "seconds", "of ours", "peak memory, GB"), rows)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.preferences_page", argv)


if __name__ == "__main__":
    sys.exit(main())
