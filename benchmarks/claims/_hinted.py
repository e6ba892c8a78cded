"""Hard prompts, whose rates a hint raises: which collectors meet a group with a signal.

The logits of 128 success rates are normal with mean -5 and deviation 1.5, so that most groups of
eight are wrong throughout. A hint, or a share of a solution, adds to the logit.
"""

from collections.abc import Sequence

import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _simulated, harness

PROMPTS, GROUPS, SIZE, STEPS = 128, 16, 8, 24
SOLUTION = "x" * 100
CLUE = "clue"


def policy(seed: int, *, clue: float, solution: float) -> _simulated.Answer:
    """``clue`` logits for each clue, ``solution`` for all of the solution."""
    logits = np.random.default_rng((seed, 0)).normal(-5.0, 1.5, PROMPTS)

    def answer(generator, request, prompt):
        text = request.text or ""
        shown = min(text.count("x"), 100) / 100
        z = logits[prompt] + clue * text.count(CLUE) + solution * shown
        right = generator.random(request.rollouts) < 1 / (1 + np.exp(-z))
        responses = (jr.curation.Response(np.zeros(1, np.int32), np.zeros(1)),) * request.rollouts
        return _simulated.Answers(right.astype(np.float32), responses)

    return answer


def measure(
    name: str,
    collector,
    *,
    seed: int,
    quick: bool,
    clue: float,
    solution: float,
    hints: Sequence[str | Sequence[str]] = (CLUE,),
) -> harness.Claim:
    """The collector against none, and against asking for other prompts."""
    data = [{"text": "q", "hints": list(hints), "demonstration": SOLUTION}] * PROMPTS
    refill = jr.curation.refill(jr.curation.informative_groups, max_rounds=50)
    found: dict[str, np.ndarray] = {}
    for label, each in ((name, collector), ("no hints", None), ("refill", refill)):
        rows = []
        for i in range(2 if quick else 8):
            run = _simulated.Run(
                each, prompts=PROMPTS, groups=GROUPS, size=SIZE, seed=1000 * seed + i, data=data
            )
            answer = policy(1000 * seed + i, clue=clue, solution=solution)
            batches = [run.batch(answer) for _ in range(STEPS)]
            groups = sum(batch.informative.sum() for batch in batches)
            distinct = {p for b in batches for p in b.prompts[b.informative].tolist()}
            rollouts = sum(batch.sampled for batch in batches)
            rows.append((groups / (STEPS * GROUPS), rollouts / groups, len(distinct) / PROMPTS))
        found[label] = np.array(rows).T

    def over(other: str):
        pair = (found[key][1] for key in (name, other))
        return harness.ratio(*pair, what="seeds")

    measures = [
        harness.Measure(
            "share of informative groups, less without hints",
            harness.mean(found[name][0] - found["no hints"][0], "seeds"),
            "above",
            0.0,
        ),
        harness.Measure(
            "rollouts an informative group, over those of asking for other prompts",
            over("refill"),
            "below",
            1.0,
        ),
        harness.Measure(
            "share of prompts with a signal at any time, less by asking for other prompts",
            harness.mean(found[name][2] - found["refill"][2], "seeds"),
            "above",
            0.0,
        ),
    ]
    words = ("share of informative groups", "rollouts an informative group", "share of prompts")
    facts = {
        f"{what}, {label}": values[i].mean()
        for label, values in found.items()
        for i, what in enumerate(words)
    }
    centers = [harness.mean(values[0], "seeds") for values in found.values()]
    value, low, high, _ = zip(*centers, strict=True)
    series = [harness.Series(words[0], list(found), value, low, high)]
    return harness.Claim(measures, harness.Plot("", words[0], series, kind="bars"), facts)
