"""Writes the measured parts of docs/evolution.md from benchmarks/results.

python -m benchmarks.evolution_page            # write
python -m benchmarks.evolution_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT, short
from benchmarks.quickstart import WAYS
from benchmarks.readme import spread

PAGE = ROOT / "docs" / "evolution.md"
CURVE = "es_quickstart.png"
NAMES = {
    "plain": "plain inference",
    "premade": "low-rank noise, made before",
    "redrawn": "low-rank noise, drawn with every batch",
    "dense_premade": "a perturbed copy a member, made before",
    "dense": "a perturbed copy a member, drawn with every batch",
}
# arXiv:2511.16652, for one layer of width 8,192.
PAPER = {"premade": 0.91, "redrawn": 0.69, "dense_premade": 0.0041, "dense": 0.00054}


def percent(share: float) -> str:
    """With two digits, however small."""
    return f"{float(f'{100 * share:.2g}'):g}%"


def measured(folder: Path = RESULTS) -> str:
    """What a population costs beside plain inference."""
    found = pages.results(folder)
    parts = [part for each in found if each["name"] == "evolution" for part in _costs(each)]
    for each in found:
        if each["name"] == "gpu" and "evolution" in each:
            parts += _gpu(each["evolution"], each["device"])
    return "\n\n".join(parts) or "Nothing yet."


def task(folder: Path = RESULTS) -> str:
    """What evolution and policy gradient learn of one task."""
    found = pages.results(folder)
    return "\n\n".join(
        _task(each, folder) for each in found if each["name"] == "es_quickstart"
    ) or ("Nothing yet.")


def _costs(result: Mapping[str, Any]) -> list[str]:
    """The tables of benchmarks/evolution.py, as many as there are parts."""
    work, ours, device = result["workload"], result["ours"], result["device"]
    command = f"{device} (`python -m benchmarks.evolution`)"
    parts = []
    if layer := ours.get("layer"):
        parts.append(_layer(layer, work["layer"], f"{work['dtype']}, {command}"))
    batch = f"{work['members']} members, {work['prompt_tokens']} + {work['new_tokens']} tokens each"
    if decoding := ours.get("decoding"):
        dense = ours.get("dense")
        shares = dict(decoding["share_of_plain"])
        speeds = {name: spread(s) for name, s in decoding["tokens_per_s"].items()}
        if dense:
            shares["dense"], speeds["dense"] = dense["share_of_plain"], ""
        rows = [
            (NAMES[name], speed, percent(shares.get(name, 1.0))) for name, speed in speeds.items()
        ]
        title = f"A population of {work['model']}, {work['dtype']}, {batch}, {command}:"
        parts.append(pages.table(title, ("", "tokens/s", "of plain"), rows))
        text = (
            f"The update that follows takes {spread(decoding['seconds']['update'])} s, "
            f"{percent(decoding['update_of_evaluation'])} of the evaluation."
        )
        if dense:
            text += (
                f" Perturbed copies answer one after the other; {dense['members']} of them were "
                "measured and counted for all."
            )
        parts.append(text)
    if memory := ours.get("memory"):
        parts.append(_memory(memory, work, device))
    return parts


def _layer(layer: Mapping[str, Any], size: Mapping[str, Any], where: str) -> str:
    shares = layer["share_of_plain"]
    rows = [(NAMES["plain"], "100%", "100%")]
    rows += [(NAMES[name], percent(shares[name]), percent(PAPER[name])) for name in PAPER]
    title = (
        f"One layer of width {size['width']:,}, a batch of {size['rows']:,} members with a row "
        f"each, {where}; the last two with {size['dense_rows']} members, counted for all:"
    )
    return pages.table(title, ("speed", "measured", "the paper, width 8,192"), rows)


def _memory(memory: Mapping[str, Any], work: Mapping[str, Any], device: str) -> str:
    peaks, parts = memory["peak_memory_bytes"], memory["bytes"]

    def gigabytes(size: float) -> str:
        return f"{size / 1e9:.2f}"

    rows = [
        ("weights of the model", gigabytes(parts["model"])),
        ("keys and values of the batch", gigabytes(parts["cache"])),
        ("peak, plain decoding", gigabytes(peaks["plain"])),
        ("peak, the population", gigabytes(peaks["population"])),
    ]
    title = (
        f"Memory of {memory['members']} members of {work['model']}, "
        f"{work['prompt_tokens']} + {work['new_tokens']} tokens each, {device}, the largest "
        "resident size of a process of its own. The population takes "
        f"{memory['times_model_and_cache']:.2f} times weights, keys and values together, and "
        f"{memory['times_plain']:.2f} times what plain decoding takes:"
    )
    return pages.table(title, ("", "GB"), rows)


def _gpu(result: Mapping[str, Any], device: str) -> list[str]:
    """The tables of benchmarks/gpu_evolution.py."""
    work, ours = result["workload"], result["ours"]
    command = f"{device} (`python -m benchmarks.gpu --part evolution`)"
    rows = [
        (
            f"{int(members):,}",
            spread(found["tokens_per_s"]["plain"]),
            *(percent(found["share_of_plain"][name]) for name in ("premade", "redrawn")),
            percent(found["update_of_evaluation"]),
        )
        for members, found in ours.items()
        if members != "layer"
    ]
    title = (
        f"A population of {work['model']}, {work['dtype']}, {work['prompt_tokens']} + "
        f"{work['new_tokens']} tokens each, {command}:"
    )
    columns = ("members", "plain, tokens/s", "noise made before", "drawn with the batch", "update")
    return [
        _layer(ours["layer"], work["layer"], f"{work['dtype']}, {command}"),
        pages.table(title, columns, rows),
    ]


def _task(result: Mapping[str, Any], folder: Path) -> str:
    work = result["workload"]
    rows = []
    for run in result["runs"]:
        reached = run["reached"]
        rows.append(
            (
                f"{run['method']}, seed {run['seed']}",
                str(run["steps"]),
                f"{run['minutes']:.1f}",
                f"{run['tokens']:,}",
                *(f"{run[f'{way}_before']:.3f} to {run[f'{way}_after']:.3f}" for way in WAYS),
                f"{reached['tokens']:,}" if reached else "not reached",
                f"{reached['seconds']:.0f}" if reached else "not reached",
            )
        )
    title = (
        f"Held-out accuracy ({result['runs'][0]['questions']} questions), {result['device']} "
        f"(`{work['config']}` of commit {short(result['commit'])}, "
        "`python -m benchmarks.es_quickstart RUNS`); the last two columns count to the first "
        f"evaluation at which greedy accuracy had risen by {work['rise']:g}:"
    )
    spent = (f"tokens to +{work['rise']:g}", f"seconds to +{work['rise']:g}")
    columns = ("run", "steps", "minutes", "generated tokens", *WAYS, *spent)
    gains = [
        (
            f"{run['method']}, seed {run['seed']}",
            *(f"{run['gain_per_10k_tokens'][way]:.3g}" for way in WAYS),
            *(f"{run['gain_per_minute'][way]:.3g}" for way in WAYS),
        )
        for run in result["runs"]
    ]
    units = [f"{way}, per {unit}" for unit in ("10,000 tokens", "minute") for way in WAYS]
    gain_title = "Accuracy gained by the whole run, in what it cost:"
    parts = [pages.table(title, columns, rows), pages.table(gain_title, ("run", *units), gains)]
    if (folder / CURVE).is_file():
        parts.append(f"![Accuracy by tokens and by seconds](../benchmarks/results/{CURVE})")
    if trials := result.get("trials"):
        parts.append(_trials(trials))
    return "\n\n".join(parts)


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            str(each["seed"]),
            f"{each['sigma']:g}",
            f"{each['learning_rate']:g}",
            str(each["decay_steps"]),
            str(each["step"]),
            *("{:.3f} to {:.3f}".format(*each[way]) for way in WAYS),
        )
        for each in trials
    ]
    columns = ("seed", "sigma", "rate", "falls to 0 in steps", "evaluated at step", *WAYS)
    return pages.table("Other settings of evolution, which were tried before:", columns, rows)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    script = "benchmarks.evolution_page"
    return max(
        pages.write(PAGE, measured, script, argv),
        pages.write(PAGE, task, script, argv, part="task"),
    )


if __name__ == "__main__":
    sys.exit(main())
