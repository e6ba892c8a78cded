"""Writes the measured part of docs/training.md from benchmarks/results.

python -m benchmarks.training_page            # write
python -m benchmarks.training_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import first_step, pages
from benchmarks.harness import RESULTS, ROOT, short
from benchmarks.readme import spread

PAGE = ROOT / "docs" / "training.md"


def measured(folder: Path = RESULTS) -> str:
    """What the benchmarks of training found."""
    writers = {
        "train_step": _beside_peers,
        "train_step_short": _beside_peers,
        "train_step_bfloat16": _beside_peers,
        "quickstart_step": _quickstart,
        "training": _alone,
        "packing": _packing,
        "tree_step": _tree,
        "start": _start,
        "first_step": _first_step,
        "late_steps": _late_steps,
        "long_context": _long,
        "context_axis": _context_axis,
        "checkpoint": _checkpoint,
        "gpu": _gpu,
    }
    found = [r for r in pages.results(folder) if r["name"] != "gpu" or "train" in r]
    order = list(writers)
    chosen = sorted(
        (r for r in found if r["name"] in writers), key=lambda r: order.index(r["name"])
    )
    return "\n\n".join(writers[r["name"]](r) for r in chosen) or "Nothing yet."


def _beside_peers(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    peers = "rematerialized (ours keeps what linear layers give, the peers a layer's input)"
    kept = peers if work["remat"] else "keeping activations"
    _, _, case = result["name"].partition("train_step_")
    case = f" --case {case}" if case else ""
    dtype = work["dtype"]
    if dtype == "bfloat16":
        dtype = (
            "products in bfloat16, weights and optimizer in float32 (transformers by autocast; "
            '"transformers bfloat16" has all of it in bfloat16)'
        )
    title = (
        f"One GRPO step of {work['model']}, {dtype}, {work['prompts']} prompts x "
        f"{work['rollouts']} rollouts, {work['prompt_tokens']} + {work['response_tokens']} tokens, "
        f"{kept}, {result['device']} (`python -m benchmarks.train_step{case}`):"
    )
    sides = {"ours": result["ours"], **result["peers"]}
    rows = [
        (
            name,
            spread(side["seconds"]),
            f"{result['ratios'].get(name, 1.0):.3g}",
            f"{side['peak_memory_bytes'] / 1e9:.1f}",
        )
        for name, side in sides.items()
    ]
    return pages.table(title, ("", "seconds", "times ours", "peak memory, GB"), rows)


def _gpu(result: Mapping[str, Any]) -> str:
    train = result["train"]
    work = train["workload"]
    title = (
        f"One step of {work['model']}, products in {work['dtype']}, weights and AdamW in "
        f"{work['master_dtype']}, {work['prompts']} prompts x {work['rollouts']} rollouts, "
        f"{work['prompt_tokens']} + {work['response_tokens']} tokens, {result['device']}, whose "
        f"largest product is {train['peak_flops_per_s']['measured'] / 1e12:.0f} Tflop/s "
        "(`python -m benchmarks.gpu --part train`):"
    )
    rows = [
        (
            f'`remat="{remat}"`',
            spread(found["seconds"]),
            spread(found["tokens_per_s"]),
            f"{found['mfu']['measured']['median']:.0%}",
            f"{found['peak_memory_bytes'] / 1e9:.1f}",
        )
        for remat, found in train["ours"].items()
    ]
    columns = ("", "seconds", "tokens/s", "utilization", "peak memory, GB")
    return pages.table(title, columns, rows)


def _quickstart(result: Mapping[str, Any]) -> str:
    before, ours, kept, factor = (result[k] for k in ("before", "ours", "kept", "factor"))
    rows = [
        (
            part,
            spread(before["seconds"][part]),
            spread(ours["seconds"][part]),
            f"{factor[part]:.2f}",
            spread(kept["seconds"][part]),
        )
        for part in ("whole", "sample", "train")
    ]
    memory = [f"{side['peak_memory_bytes'] / 1e9:.2f}" for side in (before, ours, kept)]
    rows.append(("peak memory, GB", memory[0], memory[1], "", memory[2]))
    title = (
        f"A step of `configs/quickstart.py`, {result['device']}, beside commit "
        f"{short(before['commit'])}, which had neither the rollout engine nor what this page tells "
        "(`python -m benchmarks.quickstart_step --before COMMIT`). Each version has its own "
        "config: the present one replaces groups of equal rewards, so its steps sample up to "
        "three times as many. The last column is that version with [freed memory](#freed-memory) "
        "kept, as `jaxrl-llm train` does now:"
    )
    return pages.table(title, ("seconds", "before", "now", "factor", "freed memory kept"), rows)


def _alone(result: Mapping[str, Any]) -> str:
    rows = []
    if scores := result["ours"].get("logprobs"):
        what = (
            f"log-probabilities and entropies of {scores['tokens']:,} tokens over "
            f"{scores['vocab_size']:,} words at width {scores['width']:,}, with gradients"
        )
        found = (
            f"{scores['time_of_plain']:.2f} times the seconds of whole logits; temporary memory "
            f"{scores['temporary']['ours']:.1%} of the logits, beside "
            f"{scores['temporary']['plain']:.0%}"
        )
        rows.append((what, found))
    if growth := result["ours"].get("growth"):
        doubling = ", ".join(f"{x:.2f}" for x in growth["doubling"])
        what = (
            f"a step with a prompt of {growth['prompt_tokens']:,} and G responses of "
            f"{growth['response_tokens']} tokens"
        )
        rows.append((what, f"each doubling of G up to 8 takes {doubling} times as long"))
    remat = result["ours"].get("remat", {})
    for kept in ("none", "dots", "full"):
        if case := remat.get(kept):
            what = (
                f"a step of {remat['prompts']} x {remat['rollouts']}, {remat['tokens'][0]} + "
                f'{remat["tokens"][1]} tokens, `remat="{kept}"`'
            )
            found = (
                f"{spread(case['seconds'])} s, {case['temporary_bytes'] / 1e9:.2f} GB of temporary "
                f"memory, {case['product_share']:.0%} of the operations a second of the "
                "model's largest matrix products"
            )
            rows.append((what, found))
    devices = result["ours"].get("devices", {})
    for tokens, case in devices.get("tokens_of_a_device", {}).items():
        times = " and ".join(f"{x:.2f} ({name})" for name, x in case["time_of_one"].items())
        what = (
            f"a step on {devices['devices']} devices that share the processor of one, {tokens} "
            "tokens each"
        )
        rows.append((what, f"{times} times as long as on one"))
    work = result["workload"]
    title = (
        f"The parts, {work['model']}, {work['dtype']}, {result['device']} "
        "(`python -m benchmarks.training`):"
    )
    return pages.table(title, ("what", "measured"), rows)


def _packing(result: Mapping[str, Any]) -> str:
    work, skewed, even = result["workload"], result["skewed"], result["even"]
    cases = (
        (f"mean {work['mean']}, longest {skewed['longest']}", skewed),
        (f"all of {work['even_tokens']}", even),
    )
    names = {"never": "one row each", "always": "rows of a group", "flat": "flat rows"}
    rows = [
        (
            lengths,
            name,
            f"{case['cells'][form]:,}",
            f"{case['padding'][form]:.0%}",
            f"{case['ratio'].get(form, 1.0):.2f}",
        )
        for lengths, case in cases
        for form, name in names.items()
    ]
    title = f"Packing, {result['device']} (`python -m benchmarks.packing`):"
    header = ("lengths of responses", "rows", "cells", "without a token", "times faster")
    return pages.table(title, header, rows)


def _tree(result: Mapping[str, Any]) -> str:
    work, ours = result["workload"], result["ours"]
    rows = [
        (form, f"{ours['cells'][name]:,}", spread(ours["seconds"][name]))
        for form, name in (("a row each", "flattened"), ("trees", "tree"))
    ]
    title = (
        f"A step on {work['prompts']} groups of {work['trees']} x {work['branches']} responses of "
        f"{work['response_tokens']} tokens, those of a tree with the first half in common, takes "
        f"{spread(ours['share'])} of the time of a row each, {result['device']} "
        "(`python -m benchmarks.tree_step`):"
    )
    return pages.table(title, ("", "cells", "seconds"), rows)


def _start(result: Mapping[str, Any]) -> str:
    work, ours = result["workload"], result["ours"]
    title = (
        f"Seconds from the command until a run of `{work['config']}`, seed {work['seed']}, names "
        "its model, and to the end of its first step, with the evaluation before it, "
        f"{result['device']} (`python -m benchmarks.start`; commit {short(result['commit'])}; "
        "cold: nothing is compiled yet; before: a start traced random numbers of all layers four "
        "times):"
    )
    rows = [
        (f"{until}, {name}", *(spread(ours[name][way][until]) for way in ("cold", "warm")))
        for until in ("model", "step")
        for name in ("before", "now")
        if name in ours
    ]
    return pages.table(title, ("", "cold", "warm"), rows)


def _first_step(result: Mapping[str, Any]) -> str:
    rows = [
        (f"{case}, {name}", *(spread(parts[name][part]) for part in first_step.PARTS))
        for case, parts in result["ours"].items()
        for name in ("now", "before")
        if name in parts
    ]
    title = (
        f"Processor seconds before the first step of a batch like the quickstart's runs, "
        f"{result['workload']['model']}, {result['device']} (`python -m benchmarks.first_step`; "
        "before: XLA inlined each layer's function, and optimized every copy of it):"
    )
    return pages.table(title, ("", "trace and lower", "compile", "read from a cache"), rows)


def _long(result: Mapping[str, Any]) -> str:
    ours, shortest = result["ours"], str(min(result["workload"]["lengths"]))
    rows = [
        (
            name,
            *(f"{taken / 1e9:.1f} GB" for taken in ours[name]["bytes"].values()),
            f"{spread(ours[name]['seconds'])} s",
        )
        for name in ("now", "before")
        if name in ours
    ]
    lengths = (f"{int(n):,} + {int(n):,}" for n in ours["now"]["bytes"])
    title = (
        f"A step on one prompt and one response, {result['workload']['model']}, "
        f'{result["workload"]["dtype"]}, `remat="full"`: weights, optimizer and all else, as '
        f"the compiler counts them, by the tokens of both, {result['device']} "
        "(`python -m benchmarks.long_context`; before: attention in blocks of queries alone, by "
        "automatic differentiation):"
    )
    return pages.table(
        title, ("", *lengths, f"seconds of {int(shortest):,} + {int(shortest):,}"), rows
    )


def _late_steps(result: Mapping[str, Any]) -> str:
    work, ours = result["workload"], result["ours"]
    lengths = {side: figures["tokens_of_response"]["median"] for side, figures in ours.items()}
    if "before" in work:
        tokens = f"{lengths['now']:.1f} of 16 tokens, {lengths['before']:.1f} before"
        then = f"before: commit {short(work['before'])}, each with its own config):"
    else:
        tokens = f"{lengths['now']:.1f} of 16 tokens"
        then = (
            "before: the sampler computed every row until the last one ended, and the first step "
            "was compiled after the first evaluation). The second loop of the sampler delays the "
            "first step, so later commits use it from 64 tokens on:"
        )
    title = (
        f"The last {work['last']} of {work['steps']} steps of `configs/quickstart.py`, seed "
        f"{work['seed']}, when responses have {tokens}, {result['device']} (`python -m "
        f"benchmarks.late_steps --before CHECKOUT`; commit {short(result['commit'])}; {then}"
    )
    names = {
        "seconds of sampling": "sample_seconds",
        "sampled tokens per second": "sampled_tokens_per_s",
        "seconds of the update": "train_seconds",
        "minutes of all steps, with their programs": "minutes",
        "seconds until the first step has ended, with an evaluation": "first_step_seconds",
    }
    rows = []
    for what, name in names.items():
        before, now = ours["before"][name], ours["now"][name]
        factor = now["median"] / before["median"]
        rows.append((what, spread(before), spread(now), f"{factor:.2f}"))
    return pages.table(title, ("", "before", "now", "now / before"), rows)


def _context_axis(result: Mapping[str, Any]) -> str:
    work, ours = result["workload"], result["ours"]
    title = (
        f"The same step of {work['length']:,} + {work['length']:,} tokens on devices of the mesh "
        f"axis `context`, GB of each as the compiler of CPUs counts them, {result['device']} "
        "(`python -m benchmarks.context_axis`):"
    )
    rows = [
        (count, *(f"{sizes[name] / 1e9:.2f}" for name in ("arguments", "others")))
        for count, sizes in ours.items()
    ]
    return pages.table(title, ("devices", "weights, optimizer", "all else"), rows)


def _checkpoint(result: Mapping[str, Any]) -> str:
    ours = result["ours"]
    title = (
        f"A checkpoint of {ours['bytes'] / 1e9:.1f} GB, {result['device']} "
        "(`python -m benchmarks.checkpoint`):"
    )
    rows = [
        ("written and verifiable after", f"{spread(ours['whole'])} s"),
        (
            "of which training waits",
            f"{spread(ours['blocked'])} s, {ours['share']['median']:.1%}",
        ),
        ("the next update takes longer by", f"{spread(ours['first_update_more'])} s"),
    ]
    return pages.table(title, ("what", "measured"), rows)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.training_page", argv)


if __name__ == "__main__":
    sys.exit(main())
