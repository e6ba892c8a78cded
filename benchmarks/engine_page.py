"""Writes the measured part of docs/engine.md from benchmarks/results.

python -m benchmarks.engine_page            # write
python -m benchmarks.engine_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT, short
from benchmarks.readme import spread

PAGE = ROOT / "docs" / "engine.md"


def measured(folder: Path = RESULTS) -> str:
    """What the benchmarks of the engine, its groups and its episodes, and of accelerators found."""
    found = pages.results(folder)
    parts = [_engine(each) for each in found if each["name"] == "engine"]
    parts += [_decoding(each) for each in found if each["name"] == "decoding"]
    parts += [_refill(each) for each in found if each["name"] == "refill"]
    parts += [_episodes(each) for each in found if each["name"].startswith("environments")]
    parts += [_few_samples(each) for each in found if each["name"] == "few_samples"]
    parts += [_gpu(each) for each in found if each["name"] == "gpu" and each["ours"]]
    return "\n\n".join(parts) or "Nothing yet."


def _engine(result: Mapping[str, Any]) -> str:
    work, full, skewed = result["workload"], result["products"], result["skewed"]
    prompt, start = result["long_prompt"], result["startup"]
    rows = [
        (
            f"{work['slots']} slots, {work['prompt_tokens']} + {work['new_tokens']} tokens",
            f"{spread(full['engine_tokens_per_s'])} tokens/s, {full['share_of_products']:.0%} of "
            "what its matrix products alone would allow",
        ),
        (
            f"{work['skewed_requests']} requests of mean length {skewed['mean']:g}, longest "
            f"{skewed['longest']}",
            f"{spread(skewed['slots_tokens_per_s'])} tokens/s, {skewed['ratio']:.3g} times static "
            "batches of the same engine",
        ),
        (
            f"a prompt of {work['long_prompt']:,} tokens, 8 rollouts beside 1",
            f"{prompt['prompt_cache_ratio']:.3g} times the prompt cache, "
            f"{prompt['prefill_ratio']:.3g} times the prefill",
        ),
        (
            "start",
            f"{start['compile_seconds']:.3g} s to compile, {start['warm_start_seconds']:.3g} s "
            "from the compilation cache",
        ),
    ]
    title = f"{work['model']}, {work['dtype']}, {result['device']} (`python -m benchmarks.engine`):"
    return pages.table(title, ("what", "measured"), rows)


def _decoding(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    rows = [
        (
            case,
            spread(of["before"]["tokens_per_s"]),
            spread(of["now"]["tokens_per_s"]),
            f"{result['ratios'][case]:.2f}",
            f"{of['now']['share_of_products']['median']:.0%}",
        )
        for case, of in result["ours"].items()
    ]
    title = (
        f"Tokens/s of the sampler, {work['slots']} slots, {work['model']}, {result['device']}, "
        f"commit {short(result['commit'])} beside {short(work['before'])}, which in bfloat16 on "
        "CPUs copied the whole cache twice a step; the last column is the share of what its matrix "
        "products alone would allow (`python -m benchmarks.decoding`):"
    )
    columns = ("tokens", "before", "now", "times as fast", "share of products")
    return pages.table(title, columns, rows)


def _refill(result: Mapping[str, Any]) -> str:
    work, ways = result["workload"], result["ours"]
    told = {
        "barrier": "rounds of whole batches, graded together",
        "rounds": "`refill` on the sampler",
        "slots": "`refill` on the engine",
    }
    rows = [
        (
            told[name],
            spread(way["seconds_per_informative_group"]),
            f"{ratio:.2f}" if (ratio := result["ratios"].get(f"{name}/barrier")) else "",
            f"{way['tokens']:.2f}",
        )
        for name, way in ways.items()
    ]
    title = (
        f"{work['groups']} groups whose rewards differ, where {1 - work['informative']:.0%} of all "
        f"groups agree; groups of {work['group_size']}, up to {work['max_new_tokens']} tokens, "
        f"{work['mean_length']:.0f} in the mean; {result['device']} "
        "(`python -m benchmarks.refill`):"
    )
    columns = ("way", "seconds a group", "of the first", "tokens sampled over those unavoidable")
    return pages.table(title, columns, rows)


def _episodes(result: Mapping[str, Any]) -> str:
    work, rates = result["workload"], result["tokens_per_s"]
    told = {
        "single": "responses of one turn",
        "fast": "episodes, the environment answers at once",
        "slow": f"episodes, the environment takes {work.get('slow_seconds', 0):g} s a step",
        "textworld": "episodes, games of TextWorld",
    }
    found = result["ratios"]
    ratios = {"textworld": found.get("textworld/single")}
    between, flag = "an observation", " --textworld"
    if "fast/single" in found:
        ratios = {"fast": found["fast/single"]}
        ratios["slow"] = ratios["fast"] * found["slow/fast"]
        between, flag = f"{work['observation_tokens']} tokens of observation", ""
    rows = [
        (told[name], spread(rate), f"{ratios[name]:.2f}" if name in ratios else "")
        for name, rate in rates.items()
    ]
    title = (
        f"{work['episodes']:,} episodes of {work['turns']} turns of {work['turn_tokens']} sampled "
        f"tokens, {between} between them, "
        f"{work['slots']} slots, {work['model']}, {result['device']} "
        f"(`python -m benchmarks.environments{flag}`):"
    )
    return pages.table(title, ("what", "sampled tokens/s", "of the first"), rows)


def _few_samples(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    rows = [
        (case, spread(of["before"]), spread(of["now"]), f"{result['ratios'][case]:.2f}")
        for case, of in result["ours"].items()
    ]
    title = (
        f"Few responses to many prompts: {work['prompt_tokens']} + {work['new_tokens']} tokens, "
        f"{work['slots']}, {work['model']} in {work['dtype']}, {result['device']}, commit "
        f"{short(result['commit'])} beside {short(work['before'])} "
        "(`python -m benchmarks.few_samples`):"
    )
    return pages.table(title, ("responses", "seconds before", "seconds", "times as fast"), rows)


def _gpu(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    rows = [
        (
            slots,
            spread(case["sampler"]["tokens_per_s"]),
            spread(case["engine"]["tokens_per_s"]) if "engine" in case else "",
            f"{case['step']['bandwidth_share']:.0%}",
        )
        for slots, case in (
            *result["ours"].items(),
            *((f"{slots}, tried", case) for slots, case in result.get("tried", {}).items()),
        )
    ]
    title = (
        f"{work['model']}, {work['dtype']}, {work['prompt_tokens']} + {work['new_tokens']} tokens, "
        f"{result['device']} (`python -m benchmarks.gpu`):"
    )
    columns = ("slots", "sampler, tokens/s", "engine, tokens/s", "share of bandwidth")
    return pages.table(title, columns, rows)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.engine_page", argv)


if __name__ == "__main__":
    sys.exit(main())
