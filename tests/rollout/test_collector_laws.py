"""What holds for every collector, played on rollouts of numbers that arrive in any order."""

import dataclasses
import inspect
import re

import jax
import numpy as np
import pytest
from rollout.collecting import Numbers, collected, rollout_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm.curation import (
    JUDGE,
    OWN,
    REPLAYED,
    Collection,
    Collector,
    SwarmGroup,
    informative_groups,
    learnability,
)
from jaxrl_llm.curation.collectors.hints.hinted import HintPolicy
from jaxrl_llm.curation.collectors.protocol import TurnStart, sized
from jaxrl_llm.curation.collectors.trees.pruned import SurvivalRule
from jaxrl_llm.curation.collectors.two_phase import Memory
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.backends import (
    Graded,
    all_scores,
    complete_rollout,
    own_scores,
    texts_of,
    ungraded,
)
from jaxrl_llm.rollout.collect import Limits
from jaxrl_llm.rollout.types import LENGTH, STOP, UNFINISHED

P, G, T, N, STEPS = 4, 6, 8, 11, 2
KEY = jax.random.key(0)
TOKENIZER = jr.testing.ByteTokenizer()
LIMITS = Limits(TextEncoder(TOKENIZER, 400, chat=False), T, TOKENIZER.vocab_size)
HARD = {1, 4, 9}  # prompts that no rollout solves without strong help


def question(n):
    columns = {
        "hints": [f"weak {n}", f"strong {n}"],
        "demonstration": "abcdefg"[: 3 + n % 3],
        "answer": "c",
        "pretraining": f"page {n} of a book"[: 6 + n],
        "paraphrases": [f"please: {n}", f"problem {n}"],
        "prior": 0.1 + 0.05 * n,
        "chosen": "abcdefg"[: 3 + n % 3],
        "rejected": "ABCD"[: 2 + n % 3],
        "reference": "abcd",
        "user": n % 3,
        "stage": n // 6,
        "responses": ["ab", "cd", "ef"][: 2 + n % 2],
        "rewards": [0.5, 0.0, 1.0][: 2 + n % 2],
        "completion": "abc",
        "label": n % 3 > 0,
        "completions": ["ab", "cd"],
        "labels": [n % 3 > 0, n % 2 > 0],
    }
    prompt = Prompt(f"problem {n:02}", "c", metadata=columns, id=str(n))
    return Question(prompt, list(prompt.text.encode()))


QUESTIONS = [question(n) for n in range(N)]


def sampled(asked, step):
    """Rollouts that depend on the step and their numbers alone; some pause, some end by length."""
    request, n = asked.request, len(asked.requests)
    most = request.limit or T
    shape = (1, n, T)
    numbers = {name: np.zeros(shape, np.float32) for name in ("behavior_logp", "model_logp")}
    tokens, version = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    mask, entropy = np.zeros(shape, bool), np.zeros(shape, np.float32)
    second, second_logp = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    finish = np.zeros((1, n), np.int32)
    for i, number in enumerate(asked.requests):
        random = np.random.default_rng((step, number))
        start = len(asked.responses[i].tokens) if asked.responses else 0
        end = min(most, start + random.integers(1, T + 1))
        tokens[0, i, :end] = random.integers(97, 123, end)
        second[0, i, :end] = random.integers(97, 123, end)
        for x in (*numbers.values(), entropy):
            x[0, i, :end] = random.random(end)
        second_logp[0, i, :end] = -numbers["model_logp"][0, i, :end] - 0.1
        version[0, i, :end], mask[0, i, :end] = step, True
        if start:
            tokens[0, i, :start] = asked.responses[i].tokens
        if request.fixed:
            held = np.append(request.fixed[i], np.full(T, -1))[:T]
            tokens[0, i] = np.where(mask[0, i] & (held >= 0), held, tokens[0, i])
            version[0, i, mask[0, i] & (held >= 0)] = -1
        paused = UNFINISHED if request.pauses and most < T else LENGTH
        finish[0, i] = paused if end == most else STOP
    prompt = asked.prompt or QUESTIONS[asked.question].tokens
    logps = {name: -x for name, x in numbers.items()}
    more = {"finish": finish, "version": version}
    rollout = rollout_of(prompt, tokens[0], mask, **logps, **more)
    return rollout, entropy, (second, second_logp)


def by_sum(asked, texts):
    """1 for every second text; hard prompts need strong help."""
    hopeless = asked.question in HARD and "strong" not in (asked.request.text or "")
    return [0.0 if hopeless else float(sum(text.encode()) % 2) for text in texts]


def graded(asked, step, reward):
    if asked.request.sampled:
        rollout, entropy, second = sampled(asked, step)
    else:
        prompt = asked.prompt or QUESTIONS[asked.question].tokens
        rollout, entropy, second = complete_rollout(asked, prompt), None, None
    texts, scores = texts_of(rollout, TOKENIZER.decode)[0], None
    if members := ungraded(asked, rollout):
        chosen = [texts[i] for i in members]
        if asked.request.reward is not None:
            scores = own_scores(asked, chosen)
        else:
            rewards = np.float32(reward(asked, chosen))
            parts = {"right": rewards.copy(), "right_steps": 0 * rewards}
            scores = Scores(rewards, parts, np.zeros(len(chosen), bool))
    by_run = asked.request.reward is None and bool(members)
    scores = all_scores(asked, members, scores)
    ends = rollout.mask[0].sum(-1)
    starts = tuple(tuple(TurnStart(n) for n in range(2, end, 2)) for end in ends.tolist())
    return Graded(rollout, texts, scores, entropy, second, by_run, turn_starts=starts)


class Stopped(Exception):
    """In place of what ends a process."""


class Imagined(Numbers):
    """Finishes one queued group at a time in an order of its own, or all of them at once."""

    def __init__(self, step, *, order=None, spare=0, stop=None, reward=by_sum):
        super().__init__(order, spare=spare)
        self.step, self.stop, self.reward, self.waits = step, stop, reward, 0

    def submit(self, asked):
        super().submit(asked)
        assert len(self.seen) < 60 * P, "the number of requests has no bound"

    def wait(self):
        if self.waits == self.stop:
            raise Stopped
        self.waits += 1
        return super().wait()

    def finish(self, asked):
        return graded(asked, self.step, self.reward)


@dataclasses.dataclass
class Watched:
    """A collector that proposes all at once, or one by one, and remembers what it decided on."""

    inner: Collector
    one_by_one: bool = False
    collection: Collection = Collection(P, G)
    rows: tuple = ()

    def __getattr__(self, name):
        if name == "inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self):
        return repr(self.inner)

    def propose(self, state, key, collection, count):
        if not self.one_by_one:
            return self.inner.propose(state, key, collection, count)
        requests = ()
        for _ in range(count):
            asked = collection._replace(
                requests=collection.requests + requests,
                outcomes=collection.outcomes + (None,) * len(requests),
            )
            new, state = self.inner.propose(state, key, asked, 1)
            requests += new
        return requests, state

    def observe(self, state, collection):
        decision, state = self.inner.observe(state, collection)
        if decision.rows is not None:
            self.collection, self.rows = collection, decision.rows
        return decision, state


def play(collector, state, step, first, backend):
    options = {"state": state, "first": first, "step": step, "version": step, "limits": LIMITS}
    key = jax.random.fold_in(KEY, step)
    return collected(collector, backend, questions=QUESTIONS, groups=(P, G), key=key, **options)


def more_where_mixed(accuracy, counts, max_rollouts):
    return np.where((accuracy > 0) & (accuracy < 1), np.minimum(3, max_rollouts - counts), 0)


def one_more_each(rewards, budget):
    return np.full(len(rewards), int(budget >= len(rewards)))


def nothing(rewards):
    return np.zeros(rewards.shape, bool)


def long_ones(rewards, lengths):
    return lengths > 4


def likely(old_logp, mask, unfinished):
    mean = (old_logp * mask).sum(-1) / np.maximum(mask.sum(-1), 1)
    return mean >= np.median(mean)


def two_hints(text):
    return (text, "strong")


class FixedSwarm:
    """Groups of others, always the same."""

    def get(self):
        texts = ("abc", "de")
        return [SwarmGroup(f"problem {n:02}", texts, (1.0, 0.0), (True, False)) for n in range(4)]

    def put(self, groups, *, step):
        """Kept by nobody."""

    def __repr__(self):
        return "FixedSwarm()"


TIERS = jr.bind(curation.tier_messages, template="{question}: {hint}")
BY_RATE = curation.prioritized(learnability)
LADDER = curation.hinted(curation.ladder(TIERS))
PREFIXES = curation.prefixed(low=0.8, high=0.9)
PREDICTED_FIRST = jr.recipes.masa(efficient=True).collector


def second_chance(batch):
    """A generator that requests a second group of each prompt that failed, after one more."""
    groups = batch.ask(batch.num_groups)
    while any(group.outcome is None for group in groups):
        yield
    failed = [group for group in groups if group.outcome.rewards.mean() <= 0.5]
    size = batch.group_size
    again = {each: batch.request(curation.Request(size, extends=each.index)) for each in failed}
    (spare,) = batch.ask(1)  # after requests of another kind
    while any(group.outcome is None for group in (*again.values(), spare)):
        yield
    rows = [again.get(group, group).row() for group in groups]
    return rows[:-1] + [spare.row()]


HALF_JUDGED = curation.judged(judges=0.5, refines=0.0)

COLLECTORS = {
    "in order": curation.in_order(),
    "refill": curation.refill(informative_groups),
    "refill at once": curation.refill(informative_groups, oversample=2.5, source=BY_RATE),
    "refill bounded": curation.refill(informative_groups, max_rounds=1),
    "refill nothing": curation.refill(nothing, max_rounds=2),
    "refill by length": curation.refill(long_ones),
    "by rate": BY_RATE,
    "first visits": curation.prioritized(learnability, retain=0.5, first=3),
    "thompson": curation.prioritized(
        curation.vade_information_gain, choose="top", thompson=True, candidates=2
    ),
    "partial": curation.partial_rollouts(segments=3),
    "partial, fresh": curation.partial_rollouts(segments=2, max_staleness=1, source=BY_RATE),
    "windowed": curation.windowed(segments=3),
    "budgeted": curation.budgeted((2, 4, 8)),
    "paraphrased": curation.paraphrased(source=BY_RATE),
    "two phases": curation.two_phase(more_where_mixed, max_rollouts=9, first=2, source=BY_RATE),
    "three rounds": curation.two_phase(
        one_more_each, max_rollouts=8, first=2, rounds=2, memory=curation.remembered_rates()
    ),
    "rollout_gdro": jr.recipes.rollout_gdro(arms=(2, 4, 8)).collector,
    "xrpo": jr.recipes.xrpo(first=2, max_rollouts=8).collector,
    "forked": curation.forked(curation.top_entropy_forks, forks=1, branches=2),
    "segments": curation.forked(curation.segment_forks, forks=1, rounds=2, segment=2),
    "branched": curation.branched(source=BY_RATE),
    "valued": curation.valued(jr.bind(curation.stretch_starts, length=3), rollouts=2),
    "cut points": curation.valued(
        jr.bind(curation.spo_cutpoints, interval=2), rollouts=1, segments=2, source=BY_RATE
    ),
    "uncertain": curation.entropy_branched(segment=2, first=2, tokens=2, source=BY_RATE),
    "turns": curation.turn_branched(first=2, tokens=2, source=BY_RATE),
    "lookahead": curation.lookahead(ages=(2,), max_distance=0.5),
    "pruned": curation.pruned(likely, limit=3),
    "quality": curation.pruned(curation.quality_survivors(warmup=1), limit=3, first=8),
    "ladder": LADDER,
    "clue": curation.hinted(curation.ladder(TIERS, plain=1), source=BY_RATE),
    "self_hints": curation.hinted(curation.self_hints(parse=two_hints)),
    "scaffold": curation.hinted(curation.scaffold(TIERS, after="both")),
    "hint_share": curation.hinted(curation.hint_share()),
    "examples": curation.hinted(curation.examples_in_prompt()),
    "rethink": curation.hinted(curation.rethink()),
    "inpainted": curation.hinted(
        curation.inpainted(
            jr.bind(jr.diffusion.draw_hints, shortest=1, longest=1, low=1.0, high=1.0),
            jr.diffusion.igpo_replace,
        )
    ),
    "repair": curation.hinted(curation.repair()),
    "levels": curation.hint_levels(TIERS),
    "prefixed": curation.prefixed(),
    "demonstrations": curation.demonstrations(),
    "probes": curation.demonstrations(when="failed", probe="answer"),
    "only": curation.only_demonstrations(),
    "pairs": curation.offline_pairs(),
    "degraded": curation.degraded_pairs(jr.preferences.degrade_mask),
    "triples": curation.offline_triples(),
    "few_shot": curation.few_shot_pairs(shots=2),
    "lists": curation.offline_lists(3),
    "labels": curation.offline_labels(),
    "steps": curation.offline_steps(),
    "epochs": curation.in_epochs(seed=3),
    "texts": curation.mixed((curation.in_order(), 0.5), (curation.plain_texts(), 0.5)),
    "staged": curation.staged((1, 9), seed=3),
    "mixed": curation.mixed(
        (curation.refill(informative_groups, max_rounds=3), 0.5), (LADDER, 0.25), (BY_RATE, 0.25)
    ),
    "mixed mixtures": curation.mixed(
        (curation.mixed((LADDER, 0.5), (curation.judged(judges=0.5, refines=0.0), 0.5)), 0.75),
        (curation.mixed((curation.refill(informative_groups), 0.5), (BY_RATE, 0.5)), 0.25),
    ),
    "mixed downsampled": curation.mixed(
        (
            curation.downsampled(
                curation.resample_on_correct,
                source=curation.mixed((curation.in_order(), 0.5), (BY_RATE, 0.5)),
            ),
            0.5,
        ),
        (curation.in_order(), 0.5),
    ),
    "from_generator": curation.from_generator(second_chance),
    "mixed generators": curation.mixed(
        (curation.from_generator(second_chance), 0.5), (curation.refill(informative_groups), 0.5)
    ),
    "replayed": curation.replayed(capacity=5, share=0.5),
    "replayed, each": curation.replayed(capacity=5, share=0.5, draw="each", source=BY_RATE),
    "replaced": curation.replayed(capacity=5, replace=informative_groups, max_staleness=2),
    "downsampled": curation.downsampled(curation.resample_on_correct),
    "drafted": curation.drafted(curation.contrasts, oversample=2),
    "drawn": curation.downsampled(curation.resample_groups, source=BY_RATE),
    "judged": curation.judged(),
    "targeted": curation.targeted(references=3, every=1),
    "pooled": curation.pooled(capacity=4),
    "predicted": jr.recipes.masa().collector,
    "predicted first": PREDICTED_FIRST,
    "experienced": curation.experienced(capacity=3, length=8),
    "shared": curation.shared(FixedSwarm()),
    "entropy_temperature": jr.recipes.hapo().collector,
    # Collectors of others whose requests extend earlier ones, or that ask for a part at first.
    "mixed budgets": curation.mixed(
        (curation.in_order(), 0.5), (curation.budgeted((2, 4, 8)), 0.5)
    ),
    "mixed predictions": curation.mixed(
        (jr.recipes.masa().collector, 0.5), (curation.in_order(), 0.5)
    ),
    "targeted paraphrases": curation.targeted(references=3, every=1, source=curation.paraphrased()),
    "replayed judges": curation.replayed(capacity=5, share=0.25, source=HALF_JUDGED),
    "replayed predictions": curation.replayed(capacity=5, share=0.5, source=PREDICTED_FIRST),
    "replayed targets": curation.replayed(
        capacity=5, share=0.5, source=curation.targeted(references=3, every=2)
    ),
    "replayed mixture": curation.replayed(
        capacity=5,
        share=0.25,
        source=curation.mixed((HALF_JUDGED, 0.5), (curation.in_order(), 0.5)),
    ),
    # A smaller batch, which is divided again.
    "replayed paraphrases": curation.replayed(
        capacity=5,
        share=0.5,
        source=curation.mixed((curation.paraphrased(), 0.5), (curation.in_order(), 0.5)),
    ),
    # What is built of a collector whose next groups are sampled ahead.
    "replayed refill": curation.replayed(
        capacity=5, share=0.5, source=curation.refill(informative_groups)
    ),
    "replaced refill": curation.replayed(
        capacity=5, replace=informative_groups, source=curation.refill(informative_groups)
    ),
    "downsampled refill": curation.downsampled(
        curation.resample_on_correct, source=curation.refill(informative_groups)
    ),
    # Responses that begin with a prefix.
    "budgeted prefixes": curation.budgeted((2, 4, 8), source=PREFIXES),
    "pruned prefixes": curation.pruned(likely, limit=3, source=PREFIXES),
    "forked prefixes": curation.forked(
        curation.segment_forks, forks=1, rounds=2, segment=2, source=PREFIXES
    ),
    "uncertain prefixes": curation.entropy_branched(segment=2, first=2, source=PREFIXES),
    "lookahead prefixes": curation.lookahead(ages=(2,), max_distance=0.5, source=PREFIXES),
}
# A rule that draws with replacement may take a rollout twice.
WITH_REPLACEMENT = {"drawn"}


def test_every_collector_is_listed():
    made = (Collector, HintPolicy, Memory, SurvivalRule)
    names = {
        name
        for name in curation.__all__
        if inspect.isfunction(function := getattr(curation, name))
        and inspect.signature(function).return_annotation in made
    }
    assert {"in_order", "judged", "ladder", "remembered_rates", "quality_survivors"} <= names
    called = {each for x in COLLECTORS.values() for each in re.findall(r"\w+(?=\()", repr(x))}
    assert sorted(names - called) == []


def test_collectors_are_values_that_print_themselves():
    for collector in COLLECTORS.values():
        assert not re.search("Hint| at 0x", repr(collector)) and repr(collector)[0].islower()
        assert collector == dataclasses.replace(collector)
        hash(collector)


def assert_same(a, b):
    """Two batches are equal, what remembers them included.

    How long they took is not, nor what is of the groups that happened to finish.
    """
    for name in a._fields:
        x, y = getattr(a, name), getattr(b, name)
        if name == "questions":
            assert [each.prompt.id for each in x] == [each.prompt.id for each in y]
        elif name not in ("seconds", "reward", "failures", "tokens"):
            jax.tree.map(np.testing.assert_array_equal, x, y)


def shapes(state):
    return jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), state)


@pytest.mark.of_many
@pytest.mark.parametrize("name", COLLECTORS)
def test_the_laws_of_collectors(name):
    collector = sized(COLLECTORS[name], group_size=G, max_new_tokens=T, num_groups=P)
    state, first = collector.init(N), 0
    for step in range(STEPS):
        watched = Watched(collector)
        batch = play(watched, state, step, first, backend := Imagined(step))
        requests, outcomes = watched.collection.requests, watched.collection.outcomes
        # No request is lost and none is sampled twice, but for those made again from their numbers.
        fresh = [asked for asked in backend.seen if not asked.request.draws_of]
        numbers = [number for asked in fresh for number in asked.requests]
        new = sum(request.rollouts for request in requests if not request.draws_of)
        assert numbers == list(range(new))
        members = [member for row in watched.rows for member in row.members]
        assert all(outcomes[i] is not None for i, _ in members)
        assert len(set(members)) == len(members) or name in WITH_REPLACEMENT
        # The order of the groups is that of their requests, or, where requests to one prompt are
        # groups of their own, of the prompts that they extend.
        firsts = [row.members[0][0] for row in watched.rows]
        roots = [i if requests[i].extends is None else requests[i].extends for i in firsts]
        assert len(firsts) == P
        assert firsts == sorted(firsts) or roots == sorted(roots)
        # Neither the order of arrival nor how many are proposed at once changes anything.
        one_by_one = Watched(collector, one_by_one=True)
        assert_same(play(one_by_one, state, step, first, Imagined(step, order=step)), batch)
        # A batch that was stopped in the middle is collected again as it was, from a saved state,
        # also where rows that a round does not need sample what may be asked for next.
        with pytest.raises(Stopped):
            play(collector, state, step, first, Imagined(step, order=5, stop=1))
        saved = jax.tree.map(np.array, state)
        ahead = Imagined(step, order=7, spare=2 * P)
        assert_same(play(collector, saved, step, first, ahead), batch)
        # A checkpoint has arrays of fixed shapes.
        assert shapes(batch.state) == shapes(collector.init(N))
        state, first = batch.state, first + batch.in_order
    # A batch ends where all rewards agree, too.
    state, first = collector.init(N), 0
    for step, value in enumerate((0.0, 1.0)):
        backend = Imagined(step, reward=lambda asked, texts, value=value: [value] * len(texts))
        batch = play(collector, state, step, first, backend)
        assert len(batch.places) == P
        state, first = batch.state, first + batch.in_order


@for_each("name", ["refill", "two phases", "forked", "ladder", "mixed", "judged", "targeted"])
def test_what_decides_on_groups_is_no_source_of_prompts(name):
    source = COLLECTORS[name]
    for make in (
        lambda: curation.refill(informative_groups, source=source),
        lambda: curation.two_phase(one_more_each, max_rollouts=5, source=source),
        lambda: curation.hinted(curation.rethink(), source=source),
        lambda: curation.forked(curation.top_entropy_forks, source=source),
        lambda: curation.partial_rollouts(source=source),
        lambda: curation.budgeted((2, 4), source=source),
        lambda: curation.pooled(source=source),
        lambda: curation.hint_levels(str, source=source),
        lambda: curation.experienced(source=source),
        lambda: curation.offline_pairs(source=source),
    ):
        with pytest.raises(ValueError, match="source must ask for each group once, as in_order"):
            make()


def two_batches(collector):
    """The requests of two batches, and their states."""
    collector = sized(collector, group_size=G, max_new_tokens=T, num_groups=P)
    state, first, batches = collector.init(N), 0, []
    for step in range(STEPS):
        batch = play(watched := Watched(collector), state, step, first, Imagined(step))
        state, first = batch.state, first + batch.in_order
        batches.append((watched.collection.requests, state))
    return batches


def test_stored_groups_stand_behind_what_the_source_asks_for_first():
    (requests, _), (later, _) = two_batches(COLLECTORS["replayed predictions"])
    assert [(x.role, x.extends) for x in requests] == [
        (JUDGE, None), (JUDGE, None), (OWN, 0), (OWN, 1)
    ]  # fmt: skip
    assert [(x.role, x.extends) for x in later] == [
        (JUDGE, None), (REPLAYED, None), (REPLAYED, None), (OWN, 0)
    ]  # fmt: skip
    (requests, state), (later, _) = two_batches(COLLECTORS["replayed targets"])
    # The steps of a round take turns with the prompts that its references have chosen.
    order = state.source.order.tolist()
    assert [x.prompt for x in requests[3:]] == order[0::2][:P]
    assert [x.prompt for x in later[:2]] == order[1::2][:2]
    assert [x.role for x in later] == [OWN] * 2 + [REPLAYED] * 2


@for_each("make", [curation.partial_rollouts, curation.windowed])
@for_each("source", [curation.in_epochs(), curation.staged((1, 9))])
def test_groups_that_end_later_have_no_source_that_counts_those_of_a_batch(make, source):
    with pytest.raises(ValueError, match="counts the groups of a batch"):
        make(source=source)


def test_parts_of_a_mixture_have_room_for_their_groups():
    """What goes on in a later batch is stored in arrays whose size depends on the groups."""
    for collector in (
        curation.mixed((curation.partial_rollouts(), 0.5), (curation.in_order(), 0.5)),
        curation.downsampled(curation.resample_on_correct, source=curation.partial_rollouts()),
    ):
        sized(collector, group_size=G, max_new_tokens=T, num_groups=P).init(N)
