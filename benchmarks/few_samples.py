"""Few responses to many prompts in slots made for groups, beside another checkout of this code.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.few_samples --before /tmp/before --save
    python -m benchmarks.few_samples --tiny         # a look, on any machine

An evaluation of episodes decodes in the slots of the rollouts, 8 rows of 8 here, though each of its
prompts has one response (greedy) or two. Here 24 prompts of 150 to 190 tokens have responses of 24
to 48, whose lengths are drawn, by SmolLM2-135M with random weights in bfloat16. Seconds of a
process that has compiled everything before; each checkout runs in a process of its own, in turns.
"""

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.checkpoint import SMOLLM2
from jaxrl_llm.rollout import Generation, Group, make_engine
from jaxrl_llm.testing import tiny_config

ROWS, WIDTH, PROMPTS = 8, 8, 24
PROMPT, RESPONSE = (150, 190), (24, 48)
SAMPLES = (1, 2, 8)


def _groups(samples: int, vocab_size: int, seed: int) -> list[Group]:
    """Groups of as many samples, of which each has a length of its own."""
    rng, groups = np.random.default_rng(seed), []
    for n in range(PROMPTS):
        prompt = rng.integers(3, vocab_size, rng.integers(*PROMPT, endpoint=True))
        limits = tuple(rng.integers(*RESPONSE, endpoint=True, size=samples).tolist())
        requests = tuple(range(n * samples, (n + 1) * samples))
        groups.append(Group(n, prompt.tolist(), requests, max_new_tokens=limits))
    return groups


def _child(tiny: bool) -> None:
    """Prints the seconds by samples."""
    config = dataclasses.replace(tiny_config(max_length=256) if tiny else SMOLLM2, dtype="bfloat16")
    model = jr.models.make_model(config)
    params = jax.jit(model.init)(jax.random.key(0))
    engine = make_engine(
        model, rows=ROWS, width=WIDTH, prompt_length=PROMPT[1], max_new_tokens=RESPONSE[1]
    )
    engine.warm_up(params)
    seconds = {}
    for samples in SAMPLES:
        groups = _groups(samples, config.vocab_size, seed=samples)
        generation = Generation(engine, params, key=jax.random.key(1))
        start = time.perf_counter()
        generation.submit(*groups)
        tokens = sum(len(each) for done in generation for each in done.completions)
        seconds[samples] = time.perf_counter() - start
        expected = sum(int(np.sum(group.max_new_tokens)) for group in groups)
        if tokens != expected:
            raise SystemExit(f"benchmarks.few_samples: {tokens} tokens, not {expected}.")
    print(json.dumps(seconds))


def _seconds(checkout: Path, programs: Path, tiny: bool) -> dict[str, float]:
    """Seconds by samples, in a process of a checkout, whose programs stay for the next one."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    return harness.run_child(__file__, {"tiny": tiny}, checkout, **kept)


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.options_beside(__doc__.splitlines()[0], argv)
    if options.child is not None:
        _child(**options.child)
        return
    checkouts = harness.checkouts(options.before)
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            rounds.append(
                {
                    name: _seconds(path, Path(folder) / name, options.tiny)
                    for name, path in checkouts.items()
                }
            )
    ours: dict[str, Any] = {
        f"{samples} to each of {PROMPTS} prompts": {
            name: harness.summary([each[name][str(samples)] for each in rounds])
            for name in checkouts
        }
        for samples in SAMPLES
    }
    workload: dict[str, Any] = {
        "model": "tiny" if options.tiny else "SmolLM2-135M",
        "dtype": "bfloat16",
        "slots": f"{ROWS} rows of {WIDTH}",
        "prompts": PROMPTS,
        "prompt_tokens": "150 to 190",
        "new_tokens": "24 to 48",
    }
    if options.before is not None:
        workload["before"] = harness.commit(options.before)
    result = harness.of_ours("few_samples", workload, ours)
    if options.before is not None:
        result["ratios"] = {
            case: round(of["before"]["median"] / of["now"]["median"], 2)
            for case, of in ours.items()
        }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
