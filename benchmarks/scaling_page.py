"""Writes the tables of docs/scaling.md from benchmarks/scaling.py and benchmarks/results.

python -m benchmarks.scaling_page            # write
python -m benchmarks.scaling_page --check    # exit 1 if it would change anything
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import asynchrony, pages, scaling
from benchmarks.harness import RESULTS, ROOT
from benchmarks.scaling import DEVICES, Layout, Shape, Work

PAGE = ROOT / "docs" / "scaling.md"
STEPS = 200
# Devices of the table of splits, and seconds of each half of a step on all of them.
SPLIT_DEVICES, SPLIT_SECONDS = 64, 60.0


def _read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def devices() -> str:
    """What the makers say, and the two ratios that decide what a run waits for."""
    rows = [
        (
            f"[{name}]({device.source})",
            f"{device.flops / 1e12:.0f}",
            f"{device.memory / 1e9:.0f}",
            f"{device.bandwidth / 1e9:,.0f}",
            f"{device.link / 1e9:.0f}",
            f"{device.network / 1e9:.1f}" if device.network else "",
            str(device.slice),
            f"{device.flops / device.bandwidth:,.0f}",
            f"{device.flops / device.link:,.0f}",
            f"{device.flops / device.network:,.0f}" if device.network else "",
        )
        for name, device in DEVICES.items()
    ]
    columns = ("device", "Tflop/s, bfloat16", "GB", "memory, GB/s", "links, GB/s")
    columns += ("network, GB/s", "devices that links join")
    columns += ("rows to decode", "tokens to gather", "tokens over the network")
    return pages.table("Of one device; bytes a second are those that it receives:", columns, rows)


def models(folder: Path = RESULTS) -> str:
    """What a step and a run cost, whatever they run on."""
    result = _read(folder, "scaling.json")
    work = Work(**result["workload"])
    rows = []
    for name, found in result["models"].items():
        shape = Shape(**found["shape"])
        flops = scaling.forward_flops(shape, work)
        weights = 2 * (shape.matrices + shape.projection)
        rows.append(
            (
                name,
                f"{shape.parameters / 1e9:.2f}",
                f"{flops / 1e15:,.2f}",
                f"{4 * flops / 1e15:,.1f}",
                f"{STEPS * 5 * flops / 1e18:,.1f}",
                f"{12 * shape.parameters / 1e9:,.1f}",
                f"{weights / 1e9:,.2f}",
                f"{2 * shape.cache / 1e3:,.0f}",
                f"{weights / (2 * shape.cache) / 1e3:,.0f}",
            )
        )
    title = (
        f"A step of {work.prompts} prompts of {work.prompt_length} tokens and {work.group_size} "
        f"responses each of {work.length:,}, which is {work.rollouts * work.length / 1e6:.2f} "
        f"million sampled tokens, and a run of {STEPS} steps:"
    )
    columns = ("model", "parameters, 10^9", "sampling, Pflop", "training, Pflop", "run, Eflop")
    columns += ("weights and moments, GB", "weights read by a token, GB", "cache of a token, kB")
    columns += ("cached tokens as large as the weights, 10^3",)
    return pages.table(title, columns, rows)


def layouts(folder: Path = RESULTS) -> str:
    """The fewest devices that the planner fits a run on, and the least seconds there."""
    result = _read(folder, "scaling.json")
    work, rows = Work(**result["workload"]), []
    for name, found in result["models"].items():
        shape = Shape(**found["shape"])
        for kind, chosen in found["layouts"].items():
            if chosen is None:
                rows.append((name, kind, "none that links join", *[""] * 8))
                continue
            most, device = chosen["most_bytes"], DEVICES[kind]
            layout = Layout(*(chosen[field] for field in Layout._fields))
            cost = scaling.step_cost(shape, work, layout)
            least = scaling.seconds(cost, device, layout)
            between = scaling.between_slices(shape, layout)
            rows.append(
                (
                    name,
                    kind,
                    f"{layout.devices}: {layout.fsdp} x {layout.tensor}, {layout.microbatches}",
                    f"{most / 1e9:.1f} of {device.memory / 1e9:.0f}",
                    *(f"{value:,.1f}" for value in least),
                    f"{STEPS * least.least * layout.devices / 3600:,.1f}",
                    f"{between / device.network:.2f}" if device.network else "",
                )
            )
    columns = ("model", "device", "devices: `fsdp` x `tensor`, microbatches", "GB", "training, s")
    columns += ("its links, s", "sampling, s", "its links, s", f"device-hours of {STEPS} steps")
    columns += ("sum between two, s",)
    return pages.table("The fewest devices that hold the run, and lower bounds:", columns, rows)


def planned(folder: Path = RESULTS) -> str:
    """The planner's bytes beside those of compilers."""
    plans = _read(folder, "scaling.json")["compiled"]
    programs = _read(folder, "compiled.json")["programs"]
    rows = []
    for name, program in programs.items():
        plan = plans[name.removesuffix("_gathered")]
        numbers = (plan["state"], program["arguments_bytes"])
        numbers += (plan["step"], program["temporary_bytes"])
        gathered = ", weights gathered first" if program.get("options") else ""
        what = f", remat `{program['remat']}`" if "remat" in program else ""
        scanned = ", layers scanned" if program.get("scan_layers") else ""
        label = f"{Path(program['config']).stem}{gathered}{scanned}{what}"
        rows.append((label, program["device"], *(f"{x / 1e9:.1f}" for x in numbers)))
    columns = ("train step", "device", "state, planned", "compiled")
    columns += ("while it trains, planned", "compiled")
    return pages.table("GB of one device:", columns, rows)


def batch() -> str:
    """Worked numbers of the rules for rollouts and minibatches."""
    from jaxrl_llm import diagnostics

    critical, rows = 256, []
    for count in (64, 256, 1024, 4096):
        cost = diagnostics.batch_cost(float(count), critical_batch=critical)
        plateau = [
            float(diagnostics.outer_plateau(size, count, curvature=1.0, noise=1.0))
            for size in (0.2, 0.1)
        ]
        step = diagnostics.scale_rollouts(count // 64, samples=64, minibatches=1)
        rows.append(
            (
                f"{count:,}",
                f"{float(cost.steps):.2f}",
                f"{float(cost.samples):.2f}",
                *(f"{value:.2g}" for value in plateau),
                f"{step.minibatches} of {step.minibatch_size}",
            )
        )
    columns = ("samples of a step", "steps", "samples", "plateau, step 0.2", "plateau, step 0.1")
    columns += ("minibatches",)
    title = f"With a critical batch of {critical}; curvature and noise of the plateau are 1:"
    return pages.table(title, columns, rows)


def split() -> str:
    """How many devices should sample, by the share of sampling that devices do not shorten."""
    rows = []
    for fixed in (0.0, 0.25, 0.5, 0.75):
        options = {"sample": SPLIT_SECONDS, "train": SPLIT_SECONDS, "fixed": fixed}
        count, took = asynchrony.best_split(SPLIT_DEVICES, **options)
        rows.append((f"{fixed:.0%}", str(count), f"{took:.0f}", f"{2 * SPLIT_SECONDS / took:.2f}"))
    title = (
        f"{SPLIT_DEVICES} devices, {SPLIT_SECONDS:.0f} s of sampling and {SPLIT_SECONDS:.0f} s of "
        "training if all do both in turns:"
    )
    columns = ("sampling that more devices do not shorten", "devices that sample", "s a step")
    return pages.table(title, (*columns, "times as fast as in turns"), rows)


def stale(folder: Path = RESULTS) -> str:
    """The simulated table."""
    return asynchrony.table(_read(folder, "asynchrony.json")["rows"])


PARTS = {
    "devices": devices,
    "models": models,
    "layouts": layouts,
    "planned": planned,
    "batch": batch,
    "stale": stale,
    "split": split,
}


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return max(
        pages.write(PAGE, content, "benchmarks.scaling_page", argv, part=part)
        for part, content in PARTS.items()
    )


if __name__ == "__main__":
    sys.exit(main())
