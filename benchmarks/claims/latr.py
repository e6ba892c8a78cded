"""A tree that branches where the policy is unsure has more different answers than plain sampling.

A response has 16 words: at every fourth place a word that counts, and between them words that do
not, each by the place and the last word that counted. The answer are the four words that count. A
choice is sure, with a probability of 0.99, or unsure between two words of nearly the same: half of
the choices that count, and a quarter of the others, so that most groups of plain rollouts have
answers more than once, and forks at words that do not count lead nowhere new. The group of eight
is that of the collector of the preset `latr`, with branches compared after four words and, as in
the released code, no limit to where its tree ends; what is left of a response is sampled.

The number are the different answers in a group with `latr` less those of plain sampling, over
policies; 0 or below refutes the claim. So it does for the share of groups with a signal, where one
of the eight likeliest answers is right, drawn evenly, and for the different answers less those of
the same tree that drops nothing, which is what looking ahead is for. Then the different answers
less those of plain sampling where all logits are normal and nearly every choice is open, and where
the tree ends at half of a response, as it does in the preset unless told: here that is after two of
four choices, too early for eight leaves.

This form was not fixed blindly: the tree that ends at half of a response came first, and a short
run of it had failed before the limit was taken off.

What is measured are groups; the words of a tree are not drawn from the policy that trains on them.
"""

import itertools
from typing import NamedTuple

import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _simulated, harness
from jaxrl_llm.curation.collectors.protocol import UNFINISHED

PAPER = "2510.24302"
LENGTH, APART, COUNTED, OTHERS = 16, 4, 4, 4
PROMPTS, GROUPS, SIZE, BATCHES = 48, 16, 8, 3
ANSWERS = np.array(list(itertools.product(range(COUNTED), repeat=LENGTH // APART)))


class Policy(NamedTuple):
    """Chances ``[N, T, COUNTED + 1, V]`` by the last word that counted; answers ``[N, 4]``."""

    table: np.ndarray
    right: np.ndarray


def make_policy(seed: int, *, peaked: bool) -> Policy:
    generator = np.random.default_rng((seed, 0))
    shape = (PROMPTS, LENGTH, COUNTED + 1)
    counts = np.arange(LENGTH) % APART == 0
    if peaked:
        share = np.where(counts, 0.5, 0.25)[:, None]
        unsure = generator.random(shape) < share
        gap = 0.4 * generator.random(shape)
        first = np.where(unsure, 3.0, 6.0)
        second = np.where(unsure, 3.0 - gap, 0.0)
        logits = np.stack([first, second, 0 * first, 0 * first], axis=-1)
        logits = generator.permuted(logits, axis=-1)
    else:
        logits = generator.normal(size=(*shape, COUNTED))
    each = np.exp(logits)
    each /= each.sum(-1, keepdims=True)
    table = np.zeros((*shape, COUNTED + OTHERS))
    table[:, counts, :, :COUNTED] = each[:, counts]
    table[:, ~counts, :, COUNTED:] = each[:, ~counts]
    places = np.arange(0, LENGTH, APART)
    before = np.concatenate([np.full((len(ANSWERS), 1), COUNTED), ANSWERS[:, :-1]], axis=1)
    chance = table[:, places, before, ANSWERS].prod(-1)
    likely = np.argsort(-chance, axis=-1)[:, :SIZE]
    drawn = generator.integers(0, SIZE, PROMPTS)
    return Policy(table, ANSWERS[likely[np.arange(PROMPTS), drawn]])


def answering(policy: Policy) -> _simulated.Answer:
    """Goes on from where a request begins: greedily, or by the policy."""

    def respond(generator, request, table, begin):
        tokens = [] if begin is None else begin.tokens.tolist()
        limit = LENGTH if request.limit is None else min(request.limit, LENGTH)
        last = next((x for x in reversed(tokens) if x < COUNTED), COUNTED)
        while len(tokens) < limit:
            row = table[len(tokens), last]
            greedy = request.temperature == 0.0
            token = row.argmax() if greedy else generator.choice(row.size, p=row)
            tokens.append(int(token))
            last = tokens[-1] if tokens[-1] < COUNTED else last
        states = [COUNTED]
        for token in tokens[:-1]:
            states.append(token if token < COUNTED else states[-1])
        rows = table[np.arange(len(tokens)), states[: len(tokens)]].copy()
        places = np.arange(len(tokens))
        chosen = rows[places, tokens]
        rows[places, tokens] = -1.0
        logp = np.log(chosen).astype(np.float32)
        return jr.curation.Response(
            np.array(tokens, np.int32),
            logp,
            logp,
            runner_up=rows.argmax(-1).astype(np.int32),
            runner_up_logp=np.log(np.maximum(rows.max(-1), 1e-30)).astype(np.float32),
            finish=UNFINISHED if len(tokens) < LENGTH else 0,
        )

    def answer(generator, request, prompt):
        begins = request.responses or [None] * request.rollouts
        table = policy.table[prompt]
        responses = [respond(generator, request, table, begin) for begin in begins]
        rewards = [np.array_equal(x.tokens[::APART], policy.right[prompt]) for x in responses]
        return _simulated.Answers(np.array(rewards, np.float32), tuple(responses))

    return answer


def different(batch: _simulated.Batch) -> float:
    """Answers in a group, each once; the mean over the batch."""
    groups = batch.responses()
    return float(np.mean([len({tuple(x.tokens[::APART]) for x in row}) for row in groups]))


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Two kinds of policies; plain sampling, the preset, and its tree without looking ahead."""
    free = {"ages": (APART,), "limit": LENGTH - 1}
    ways = {
        "plain": None,
        "latr": jr.recipes.latr(**free).collector,
        "no looking ahead": jr.recipes.latr(**free, max_distance=0.0).collector,
        "half": jr.recipes.latr(ages=(APART,)).collector,
    }
    found = {}
    for kind, (name, collector) in itertools.product(("few unsure", "normal"), ways.items()):
        rows = []
        for i in range(2 if quick else 8):
            policy = make_policy(1000 * seed + i, peaked=kind == "few unsure")
            options = {"prompts": PROMPTS, "groups": GROUPS, "size": SIZE, "tokens": LENGTH}
            played = _simulated.Run(collector, seed=1000 * seed + i, **options)
            batches = [played.batch(answering(policy)) for _ in range(1 if quick else BATCHES)]
            signal = np.mean([x.informative.mean() for x in batches])
            rows.append((np.mean([different(x) for x in batches]), signal))
        found[kind, name] = np.array(rows).T

    def less(what, kind, other, number, name="latr"):
        pair = found[kind, name][number], found[kind, other][number]
        return harness.Measure(what, harness.mean(np.subtract(*pair), "policies"), "above", 0.0)

    few = "few unsure"
    measures = [
        less("different answers in a group, less plain sampling", few, "plain", 0),
        less("share of informative groups, less plain sampling", few, "plain", 1),
        less(
            "different answers in a group, less without looking ahead", few, "no looking ahead", 0
        ),
        less("different answers, less plain sampling, normal logits", "normal", "plain", 0),
        less("different answers, half of a tree less plain sampling", few, "plain", 0, "half"),
    ]
    facts = {}
    for (kind, name), (answers, signal) in found.items():
        facts[f"different answers in a group, {kind}, {name}"] = answers.mean()
        facts[f"share of informative groups, {kind}, {name}"] = signal.mean()
    series = []
    for kind in ("few unsure", "normal"):
        centers = [harness.mean(found[kind, name][0], "policies") for name in ways]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(kind, list(ways), value, low, high))
    return harness.Claim(
        measures, harness.Plot("", "different answers in a group", series, kind="bars"), facts
    )
