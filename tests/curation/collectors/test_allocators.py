"""Collectors that give prompts different numbers of rollouts, as pure values without a sampler."""

import functools

import numpy as np
import pytest
from batches_of_collectors import RecordingSource, outcome, play_alike, play_batch
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import HINTED, OWN, Collection, Request

P, G, N = 4, 6, 10
DATA = [
    {"text": f"write {n} {'red' if n % 2 else 'blue'} words", "prior": n / 10} for n in range(N)
]
PRESETS = ("v0_budget", "v05_baseline", "rollout_gdro", "xrpo")


def rate(prompt):
    """The true success rate of a prompt; two of them are never solved."""
    return 0.0 if prompt in (3, 8) else 0.2 + 0.08 * prompt


def collected(collector, state=None, step=0, *, data=DATA, **timing):
    """The rows, the next state and the collection; rewards depend on their place alone."""

    def answer(request, number, place):
        numbers = range(request.rollouts)
        draws = [np.random.default_rng((step, number, j, place)).random() for j in numbers]
        texts = tuple(f"answer {place}.{number}.{j}" for j in numbers)
        return outcome(place, [u < rate(place) for u in draws], texts=texts)

    state = collector.init(N) if state is None else state
    return play_batch(collector, state, Collection(P, G, step, data=data), answer, **timing)


@pytest.mark.of_many
@pytest.mark.parametrize("name", PRESETS)
def test_the_laws_of_collectors(name):
    collector = getattr(jr.recipes, name)().collector
    for rows, _, now in play_alike(functools.partial(collected, collector), collector.init(N), 4):
        every = [(i, j) for i, r in enumerate(now.requests) for j in range(r.rollouts)]
        assert sorted(m for row in rows for m in row.members) == every  # none lost, none twice
        sizes = [len(row.members) for row in rows]
        assert len(rows) == P and max(sizes) <= collector.width(G)
        assert [row.members[0][0] for row in rows] == list(range(P))
        assert sum(sizes) <= P * G or name == "v05_baseline"


@for_each(
    ("name", "sizes", "message"),
    [
        ("xrpo", (2, 4, 32, 40), "(above the 4 .* first round|below max_rollouts 32).* got {}"),
        ("v0_budget", (1, 2, 32), "(above the 2 .* first round|below max_rollouts 32).* got {}"),
        ("rollout_gdro", (2, 12, 16), "(above the 2 .* first|below max_rollouts 12).* got {}"),
        ("dars", (32, 64), "max_rollouts 32 must be above the {} rollouts .* group_size"),
    ],
)
def test_a_group_size_with_which_an_allocator_has_no_choice_is_refused(name, sizes, message):
    collector = getattr(jr.recipes, name)().collector
    for size in sizes:
        with pytest.raises(ValueError, match=message.format(size)) as error:
            check_size(collector, size)
        assert "group_size" in str(error.value) and "\n" not in str(error.value)
    for size in (6, 11):
        check_size(collector, size)
    collector.for_run(32, 16)  # what only evaluates takes any


def check_size(collector, size):
    collector.check_sizes((), group_size=size, num_groups=P)


def test_sources_and_sizes():
    # An allocator without a budget may have any group size.
    collector = jr.recipes.v05_baseline().collector
    for size in (1, 4, 8, 16, 64):
        check_size(collector, size)

    def evenly(budget):
        return np.full(P, budget // P)

    # Without a first size, nothing of the budget is left.
    with pytest.raises(ValueError, match="above the 6 rollouts of the first round"):
        check_size(curation.two_phase(evenly, max_rollouts=8), 6)
    # It may leave some of its budget, so groups may be as large as the batch is wide.
    check_size(curation.two_phase(evenly, max_rollouts=8, first=2), 8)

    # A group that no reward is known of gets no more and the source learns of the first.
    source = RecordingSource(Request(2, text="please", role=HINTED, limit=3))

    def up_to_four(accuracy, counts):
        return np.where(accuracy < 1, 4 - counts, 0)

    collector = curation.two_phase(up_to_four, max_rollouts=4, first=2, source=source)

    def answer(request, number, place):
        return outcome(place, [0, 0], where=np.full(2, number != 1))

    rows, _, batch = play_batch(collector, (), Collection(3, 2), answer)
    first, more = batch.requests[:3], batch.requests[3:]
    # As the first ones were sampled.
    assert [x.extends for x in more] == [0, 2]
    told = {(x.rollouts, x.text, x.role, x.limit, x.round) for x in more}
    assert told == {(2, "please", HINTED, 3, 1)}
    assert [len(row.members) for row in rows] == [4, 2, 4]
    assert [(x.requests, x.outcomes) for x in source.seen] == [(first, batch.outcomes[:3])]


def test_v0():
    # V0 gives the greedy allocation of its paper.
    rates, options = np.float32([0.25, 0.5, 0.75]), {"budget": 6, "max_rollouts": 8}
    counts = np.full(3, 2)
    extra = cur.v0_extra_rollouts
    assert extra(rates, counts=counts, **options).tolist() == [4, 2, 0]
    assert extra(rates, counts=counts, exact=True, **options).tolist() == [6, 0, 0]
    assert extra(rates, counts=counts, budget=100, max_rollouts=8).tolist() == [6, 6, 6]
    with pytest.raises(ValueError, match=r"counts must be equal; got \[1, 2, 2\]"):
        extra(rates, counts=np.array([1, 2, 2]), **options)

    # V0 learns rates or reads them.
    collector = jr.recipes.v0_budget(retain=1.0).collector
    rows, state, _ = collected(collector)
    assert [len(row.members) for row in rows] == [6, 6, 6, 6]  # all alike so far
    seen = state.memory.alpha + state.memory.beta - 2
    assert seen.tolist() == [6, 6, 6, 6] + [0] * 6
    collector = jr.recipes.v0_budget(prior="data", max_rollouts=8).collector
    rows, state, _ = collected(collector, step=1)
    gain = cur.v0_extra_rollouts(
        np.float32([0.4, 0.5, 0.6, 0.7]), counts=np.full(4, 2), budget=16, max_rollouts=8
    )
    assert [len(row.members) - 2 for row in rows] == gain.tolist() and state == ()
    bare = [{"text": row["text"]} for row in DATA]
    with pytest.raises(ValueError, match="reads a number 'prior' of every prompt; prompt 0 of"):
        collected(collector, data=bare)


def test_v05_stops_where_one_more_rollout_no_longer_pays():
    collector = jr.recipes.v05_baseline().collector
    rows, _, now = collected(collector)
    sizes = [len(row.members) for row in rows]
    assert min(sizes) >= 4 and max(sizes) <= 16 and len(set(sizes)) > 1
    for p, row in enumerate(rows):
        rewards = np.float32([now.outcomes[i].rewards[j] for i, j in row.members])
        for n in range(4, len(rewards) + 1):
            more = jr.advantages.osla_continue(
                rewards[:n].mean()[None],
                np.array([n]),
                prior=np.float32([p / 10]),
                cost=1 / 1024,
                var="bound",
            )
            assert bool(more[0]) == (n < len(rewards))
    # One round adds at most one rollout to a group.
    assert all(r.rollouts == 1 for r in now.requests[P:])


@for_each("order", [(0, 1), (1, 0)])
def test_a_group_without_rewards_credits_no_arm(order):
    """Its count is that of the first phase, whichever arm its bin chose."""
    memory = cur.rollout_gdro_memory(arms=(2, 4, 6), edges=(0.4, 0.75), rate=0.1)
    rewards, where = np.zeros((2, 6), np.float32), np.zeros((2, 6), bool)
    where[0, :4] = rewards[0, 0] = True
    both = {"rewards": rewards, "where": where, "counts": np.array([4, 2])}
    both = {name: x[list(order)] for name, x in both.items()}
    state = memory.init(3)._replace(price=np.float32(0.5))
    learned = memory.learn(state, prompts=np.array(order), group_size=3, **both)
    assert learned.scores[0, 0] == 0.0 and np.array_equal(learned.scores[1:], np.zeros((2, 3)))


def test_rollout_gdro():
    # Rollout gdro by hand.
    memory = cur.rollout_gdro_memory(arms=(2, 4, 6), edges=(0.4, 0.75), rate=0.1)
    rewards, where = np.zeros((2, 6), np.float32), np.zeros((2, 6), bool)
    rewards[0, 0], where[:, :4] = 1.0, True

    def learn(state, prompts, counts):
        shown = {"prompts": np.array(prompts), "counts": np.array(counts), "group_size": 3}
        return memory.learn(state, rewards=rewards, where=where, **shown)

    assert memory.read(memory.init(3), prompts=np.array([0, 2]))["bins"].tolist() == [0, 0]
    state = learn(memory.init(3), [0, 2], [4, 4])
    # All are of one bin, so none is above the batch; the price was 0; the mean is one above target.
    equal(state.scores, np.zeros((3, 3)))
    assert float(state.price) == pytest.approx(0.1)
    assert state.bins.tolist() == [0, -1, 0] and state.history.count.tolist() == [1, 0, 1]
    # Prompt 0 had a right answer in all its groups: rate 1.
    assert memory.read(state, prompts=np.array([0, 1, 2]))["bins"].tolist() == [2, 0, 0]
    rewards[0, :2] = 1.0
    state = learn(state, [0, 1], [4, 2])
    # Bins 2 and 0 fail in 1/2 and 1 of their rollouts, all in 3/4; a rollout costs 0.1.
    close(state.scores, [[0.25 + 0.1, 0, 0], [0, 0, 0], [0, -0.25 - 0.1, 0]], atol=1e-6)
    assert float(state.price) == pytest.approx(0.1)

    def extra(bins, counts):
        scores, of_arms = np.float32([[0, 0, 2], [0, 1, 0]]), {"budget": 4, "arms": (2, 4, 6)}
        return cur.gdro_extra_rollouts(np.array(bins), scores, counts=np.array(counts), **of_arms)

    equal(extra([0, 1], [2, 2]), [4, 0])
    equal(extra([-1, 1], [2, 2]), [2, 2])  # without a bin: the mean
    with pytest.raises(ValueError, match="counts must be at most the first arm 2; got 3"):
        extra([0, 1], [3, 2])


def test_xrpo():
    # Xrpo seeds prompts that only fail.
    collector = jr.recipes.xrpo(max_rollouts=12).collector
    state, seeded, right = collector.init(N), [], set()
    for step in range(5):
        _, state, now = collected(collector, state, step)
        right |= {done.prompt for done in now.outcomes if done.rewards.max() == 1}
        for i, request in enumerate(now.requests):
            assert request.role == (OWN if request.text is None else HINTED)
            if request.text is not None:
                seeded.append((now.outcomes[i].prompt, request.text))
                assert request.extends is not None and not request.train_as_prompt
    assert {prompt for prompt, _ in seeded} >= {3, 8}
    for prompt, text in seeded:
        assert text.endswith(f"Problem: {DATA[prompt]['text']}") and text.count("Solution: ") <= 2
        assert f"answer {prompt}." not in text  # an example is another problem
    solved = state.memory
    assert set(solved.prompts.tolist()) == right | {-1}
    row = int(np.flatnonzero(solved.prompts == 9)[0])
    assert bytes(solved.texts[row, : solved.lengths[row]]).startswith(b"answer 9.")

    # The nearest solved problems come first.
    memory = cur.solved_examples(capacity=3, length=8)
    data = [{"text": t} for t in ("add two apples", "the sky is blue", "add two pears", "add two")]
    one = {"rewards": np.ones((1, 1), np.float32), "where": np.ones((1, 1), bool)}

    def learn(state, *solved):
        for prompt, text in solved:
            state = memory.learn(state, prompts=np.array([prompt]), texts=[[text]], **one)
        return state

    state = learn(memory.init(4), (0, "three"), (1, "a longer text"), (0, "3"))
    assert state.prompts.tolist() == [0, 1, -1] and int(state.next) == 2
    assert state.lengths.tolist() == [1, 8, 0]
    asked = {"prompts": np.array([3, 0]), "memory": state, "data": data}
    asked |= {"rewards": np.zeros((2, 1), np.float32), "where": np.ones((2, 1), bool)}
    texts = cur.seeded_message(count=1)(**asked)
    start = "add two\n\nSolved problems:\n\n"
    assert texts[0] == f"{start}Problem: add two apples\nSolution: 3\n\nProblem: add two"
    # Its own solution is no example.
    assert "Problem: the sky is blue\nSolution: a longer\n\n" in texts[1]
    assert texts[1].count("Solution") == 1
    texts = cur.seeded_message()(**asked, takes_text=lambda text: len(text) < 100)
    assert texts[0].count("Solution") == 1 and texts[1] is None
    right = asked | one | {"prompts": np.array([3])}
    assert cur.seeded_message(count=1)(**right) == [None]
    assert cur.seeded_message(threshold=0.99)(**asked) == [None, None]
    # The oldest gives way.
    assert learn(state, (2, "x"), (3, "x")).prompts.tolist() == [3, 1, 2]
