"""Presets whose collectors choose, repeat or cut rollouts: their losses, and what is asked for.

The loss of each is built of one clipped surrogate, row by row in float64. A collector's batch is
played with outcomes of a rule, and compared with what the method's rule gives in plain NumPy.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import MASK, REWARDS, batch_of, near
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import JUDGE, OWN, REPLAYED, Collection, Outcome, Response
from jaxrl_llm.curation.collectors.protocol import UNFINISHED, sized
from jaxrl_llm.recipes import Batch

P, G, T = 3, 4, 5
PLAIN = ("april", "arrol", "pf_ppo", "training_free_grpo")


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    rng = np.random.default_rng(8)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    values = rng.normal(0, 0.5, (P, G, T)).astype(np.float32)
    batch = batch_of(
        MASK[:P],
        REWARDS,
        old_logp=near(rng, logp),
        ref_logp=near(rng, logp),
        behavior_logp=near(rng, logp, 0.6),
        extras={
            "greedy_rewards": np.array([0.25, 1.0, 0.5]),
            "satisfied": rng.random((P, G)) < 0.7,
            "answer_ids": np.array([[3, 3, 5, 7], [4, 4, 4, 4], [1, 2, 2, 1]]),
            "old_entropy": rng.uniform(0.1, 2.0, (P, G, T)),
            "hidden_rank": rng.uniform(0.2, 3.0, (P, G, 3)),
            "values": values,
            "old_values": values[..., None],
        },
    )
    return logp, batch


@dataclass
class Rollout:
    """One that takes part: float64 numbers of its tokens, and its reward."""

    place: tuple[int, int]
    x: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    mu: np.ndarray
    entropy: np.ndarray
    values: np.ndarray
    reward: float


def rollouts(logp, batch) -> list[Rollout]:
    out = []
    for place in map(tuple, np.argwhere(np.asarray(batch.where))):
        m = np.asarray(batch.mask[place])
        arrays = (logp, batch.old_logp, batch.ref_logp, batch.behavior_logp)
        extras = (batch.extras["old_entropy"], batch.extras["values"])
        rows = (np.asarray(v[place], np.float64)[m] for v in (*arrays, *extras))
        out.append(Rollout(place, *rows, float(batch.rewards[place])))
    return out


def clipped(ratio, a, *, center=1.0, high=1.2):
    """The one surrogate of these presets, around what the policy was at the start of the step."""
    return -np.minimum(ratio * a, np.clip(ratio, 0.8 * center, high * center) * a)


def plain(row, a, high=1.2):
    return clipped(np.exp(row.x - row.old), a, high=high)


def replay(row, a):
    return clipped(np.exp(row.x - row.mu), a, center=np.exp(row.old - row.mu))


def kl(row):
    return np.exp(row.ref - row.x) - 1 - (row.ref - row.x)


TOKEN_LOSS = dict.fromkeys(PLAIN, plain) | {
    "spark": lambda row, a: plain(row, a) + 0.001 * kl(row),
    "latr": lambda row, a: plain(row, a) + 0.01 * kl(row),
    "verl_erank": lambda row, a: plain(row, a) + 0.001 * (kl(row) - row.entropy),
    "rollout_replay": replay,
    "dots": replay,
    "fading_replay": replay,
    "llm_replay": lambda row, a: np.exp(row.old - row.mu) * plain(row, a),
    "ssb": lambda row, a: clipped(np.exp(row.x - row.mu), a),
    "sol_rl": lambda row, a: np.minimum(np.exp(row.old - row.mu), 2.0) * plain(row, a),
    "grpo_roc": lambda row, a: plain(row, a, high=1.28),
    "sapo_swarm": lambda row, a: plain(row, a, high=1.28),
    "ettrl": lambda row, a: plain(row, a) + 0.001 * kl(row),
    "cgpo": lambda row, a: -a * row.x,
}


def normalized(rows, rewards):
    """GRPO: of each group, over its deviation; 0 where the rewards agree."""
    out = np.zeros(len(rows))
    for p in range(P):
        group = [i for i, row in enumerate(rows) if row.place[0] == p]
        r = np.array(rewards)[group]
        if r.max() > r.min():
            out[group] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
    return out


def voted(rows, batch):
    """Of the most common answer of a group, less where a response is uncertain."""
    ids = np.asarray(batch.extras["answer_ids"])
    rewards, factors = [], []
    entropy = [row.entropy.mean() if len(row.x) else 0.0 for row in rows]
    for row in rows:
        group = [i for i, other in enumerate(rows) if other.place[0] == row.place[0]]
        answers = [ids[rows[i].place] for i in group]
        rewards.append(float(ids[row.place] == max(answers, key=answers.count)))
        mean = np.mean([entropy[i] for i in group if len(rows[i].x)])
        own = row.entropy.mean() if len(row.x) else mean
        factors.append(max(0.0, 2 - own / mean))
    return normalized(rows, rewards) * factors


def calibrated(rows, batch, budget=5.0):
    out = []
    for row in rows:
        base = float(batch.extras["greedy_rewards"][row.place[0]])
        near = max(0.0, 1 - (row.old - row.ref).sum() / budget)
        out.append(batch.extras["satisfied"][row.place] * near / (1 + np.exp(base - row.reward)))
    return np.array(out) - np.mean(out)


def spreading(rows, batch, seen):
    """GRPO's with a bonus for ranks above the average of the batch before, ``seen``."""

    def above(x, mu):
        return np.clip((x - mu) / (abs(mu) + 1e-8), -5, 5)

    out = normalized(rows, [row.reward for row in rows])
    for i, row in enumerate(rows):
        rank, velocity, acceleration = np.float64(batch.extras["hidden_rank"][row.place])
        b = 1 / (1 + np.exp(-2 * above(acceleration, seen[2])))
        bonus = b * np.tanh(above(rank, seen[0])) + (1 - b) * np.tanh(above(velocity, seen[1]))
        if len(row.x):
            out[i] += min(max(bonus, 0.0), abs(out[i]) / 2)
    return out


def returns_above_values(rows, lam=0.95, kl_coef=0.02):
    """The generalized advantages of PPO on scores over their deviation, a penalty at each token."""
    std, out = np.std([row.reward for row in rows], ddof=1), []
    for row in rows:
        rewards = -kl_coef * (row.old - row.ref)
        if len(rewards):
            rewards[-1] += np.clip(row.reward / std, -10, 10)
        errors = rewards + np.append(row.values[1:], 0.0)[: len(rewards)] - row.values
        every = [sum(lam**k * e for k, e in enumerate(errors[t:])) for t in range(len(errors))]
        out.append(np.array(every))
    return out


def reference(name, logp, batch, seen=None):
    rows = rollouts(logp, batch)
    plainly = normalized(rows, [row.reward for row in rows])
    advantages = {
        "cgpo": lambda: calibrated(rows, batch),
        "ettrl": lambda: voted(rows, batch),
        "pf_ppo": lambda: returns_above_values(rows),
        "verl_erank": lambda: plainly if seen is None else spreading(rows, batch, seen),
    }.get(name, lambda: plainly)()
    losses = [
        TOKEN_LOSS[name](row, a)
        for row, a in zip(rows, advantages, strict=True)
        if not (name == "grpo_roc" and row.place[0] == 1)  # a group that agrees
    ]
    return np.concatenate(losses).mean()


@for_each("name", TOKEN_LOSS)
def test_the_loss_is_the_papers(name):
    logp, batch = make_batch()
    recipe = jr.recipes.PRESETS[name]()
    ready, state = recipe.prepare(batch, recipe.init())
    expected, entropy = reference(name, logp, batch), batch.extras["old_entropy"]
    got = float(recipe.loss(jnp.asarray(logp), ready, entropy=entropy))
    assert got == pytest.approx(expected, rel=1e-5)
    if name == "verl_erank":
        # The first batch has no bonus; its mean is what the second is compared with.
        every = np.float64(batch.extras["hidden_rank"])[np.asarray(batch.where)]
        ready, _ = recipe.prepare(batch, state)
        with_bonus = reference(name, logp, batch, seen=every.mean(0))
        assert abs(with_bonus - expected) > 1e-3
        got = float(recipe.loss(jnp.asarray(logp), ready, entropy=entropy))
        assert got == pytest.approx(with_bonus, rel=1e-5)


def test_training_free_grpo_makes_no_update():
    _, batch = make_batch()
    recipe = jr.recipes.training_free_grpo()
    ready, _ = recipe.prepare(batch, recipe.init())
    assert not np.asarray(ready.extras["update_scale"]).any()


def test_mpo_compares_the_best_and_the_worst_of_each_group():
    logp, batch = make_batch()
    recipe = jr.recipes.mpo(beta=0.3)
    ready, _ = recipe.prepare(batch, recipe.init())
    rows = {row.place: row for row in rollouts(logp, batch)}
    # The only success of the last group has no token; the second group agrees.
    groups = ([((0, 0), (0, 1)), ((0, 0), (0, 2))], [((2, 2), (2, 0))])
    implicit = {at: 0.3 * (row.old - row.ref).sum() for at, row in rows.items()}
    middles = [np.mean([implicit[w] + implicit[l] for w, l in pairs]) / 2 for pairs in groups]  # noqa: E741
    center, total = np.mean(middles), 0.0
    for pairs in groups:
        for places in pairs:
            w, l = (0.3 * (rows[at].x - rows[at].ref).sum() for at in places)  # noqa: E741
            classes = np.logaddexp(0, center - w) + np.logaddexp(0, l - center)
            likelihood = rows[places[0]].x.mean()
            total += (0.8 * np.logaddexp(0, l - w) + 0.2 * classes - likelihood) / len(pairs)
    got = float(recipe.loss(jnp.asarray(logp), ready))
    assert got == pytest.approx(total / len(groups), rel=1e-5)


def test_dart_trains_on_the_least_certain_steps():
    logp, batch = make_batch()
    turn_ids = jnp.broadcast_to(jnp.arange(T) // 2, (P, G, T))
    batch = batch.replace(extras={**batch.extras, "turn_ids": turn_ids})
    recipe = jr.recipes.dart(keep=0.5)
    ready, _ = recipe.prepare(batch, recipe.init())
    rows = rollouts(logp, batch)
    advantages = normalized(rows, [row.reward for row in rows])
    losses = []
    for p in range(P):
        group = [(row, a) for row, a in zip(rows, advantages, strict=True) if row.place[0] == p]
        cuts = [(row, a, slice(t, t + 2)) for row, a in group for t in range(0, len(row.x), 2)]
        entropy = [row.entropy[cut].mean() for row, _, cut in cuts]
        least = sorted(entropy, reverse=True)[len(cuts) // 2 - 1]
        for (row, a, cut), certain in zip(cuts, entropy, strict=True):
            if certain >= least:
                loss = np.minimum(plain(row, a, high=1.28), np.inf if a >= 0 else -10 * a)
                every = np.minimum(np.exp(row.old - row.mu), 1.0) * loss + 0.1 * kl(row)
                losses.append(every[cut])
    got = float(recipe.loss(jnp.asarray(logp), ready))
    assert got == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)


def test_ettrl_may_clip_in_place_of_reshaping():
    logp, batch = make_batch()
    recipe = jr.recipes.ettrl(reshape=False, bound=0.4, kl_coef=0.0)
    ready, _ = recipe.prepare(batch, recipe.init())
    ids = np.asarray(batch.extras["answer_ids"])
    rows = rollouts(logp, batch)
    most = {0: 3, 1: 4, 2: 2}
    votes = normalized(rows, [float(ids[row.place] == most[row.place[0]]) for row in rows])
    got = [float(ready.advantages[row.place]) for row in rows]
    np.testing.assert_allclose(got, np.clip(votes, -0.4, 0.4), atol=1e-6)


# What collectors ask for: 4 groups of 8 rollouts of at most 16 tokens.
GROUPS, SIZE, LENGTH, PROMPTS = 4, 8, 16, 40
MIXED = (0, 1, 0, 0, 1, 0, 2, 0)


def reward_of(place, member):
    """Of every second prompt all rewards agree; those of the others differ in spread."""
    return 1.0 if place % 2 else (1 + place) * float(MIXED[member % 8]) - 0.01 * member


def respond(request, place, member, version):
    begin = request.responses[member] if request.responses else None
    if begin is not None and not request.sampled:
        return begin
    start = 0 if begin is None else len(begin.tokens)
    length = max(start + 1, 6 + (3 * place + 5 * member) % 10)
    limit = LENGTH if request.limit is None else request.limit
    rng = np.random.default_rng(100 * place + member)
    entropy = rng.random(LENGTH).astype(np.float32)
    n = min(length, limit)
    paused = length > limit and request.pauses
    logp = np.full(n, -1.0, np.float32)
    return Response(
        tokens=np.arange(n, dtype=np.int32),
        behavior_logp=logp,
        model_logp=logp,
        version=np.full(n, version, np.int32),
        trains=np.ones(n, bool),
        entropy=entropy[:n],
        finish=UNFINISHED if paused else 1,
    )


def finish(collection, i, reward=reward_of):
    request = collection.requests[i]
    place = request.prompt
    if place is None:
        parent = request if request.extends is None else collection.requests[request.extends]
        place = parent.prompt
    if place is None:
        first = i if request.extends is None else request.extends
        place = GROUPS * collection.step + first
    responses = [respond(request, place, j, collection.version) for j in range(request.rollouts)]
    done = np.array([each.finish != UNFINISHED for each in responses])
    rewards = np.float32([reward(place, j) for j in range(request.rollouts)])
    return Outcome(
        prompt=place,
        rewards=np.where(done, rewards, 0.0).astype(np.float32),
        where=done,
        lengths=np.array([len(each.tokens) for each in responses], np.int32),
        truncated=np.zeros(len(responses), bool),
        reward_components={},
        responses=tuple(responses),
        texts=tuple(f"answer {j} of {place}" for j in range(request.rollouts)),
    )


def play(collector, state, step=0, groups=GROUPS, reward=reward_of):
    """A batch: the collection, its rows, and the state after it."""
    data = [{"text": f"question {n}"} for n in range(PROMPTS)]
    collection = Collection(groups, SIZE, step, data=data, version=step)
    for _ in range(60):
        decision, learned = collector.observe(state, collection)
        if decision.rows is not None:
            return collection, decision.rows, learned
        requests = decision.requests
        if decision.ask:
            key = jax.random.key(step)
            requests, state = collector.propose(state, key, collection, decision.ask)
        if requests:
            requests = (*collection.requests, *requests)
            waiting = (None,) * (len(requests) - len(collection.requests))
            collection = collection._replace(
                requests=requests, outcomes=collection.outcomes + waiting
            )
        else:
            outcomes = tuple(
                finish(collection, i, reward) if done is None else done
                for i, done in enumerate(collection.outcomes)
            )
            collection = collection._replace(outcomes=outcomes)
    raise AssertionError("a batch without an end")


def started(name, groups=GROUPS):
    """The collector of a preset with its default options, and its first state."""
    collector = jr.recipes.PRESETS[name]().collector
    collector = sized(collector, group_size=SIZE, max_new_tokens=LENGTH, num_groups=groups)
    return collector, collector.init(PROMPTS)


def asked(collection):
    return [(each.round, each.rollouts, each.role) for each in collection.requests]


DRAWS = 150
FRESH, STORED = (0, SIZE, OWN), (0, SIZE, REPLAYED)


@for_each("name", ["cgpo", "verl_erank"])
def test_presets_without_a_collector_ask_for_prompts_in_order(name):
    assert jr.recipes.PRESETS[name]().collector is None


@for_each(("name", "stored"), [("rollout_replay", 2), ("fading_replay", 4), ("sapo_swarm", 2)])
def test_half_of_the_second_batch_is_stored(name, stored):
    collector, state = started(name)
    first, rows, state = play(collector, state)
    assert asked(first) == [FRESH] * 4 and len(rows) == 4
    # Only groups with advantages are stored, but in fading replay, which stores the others too.
    assert int((state.buffer.order >= 0).sum()) == stored
    second, rows, _ = play(collector, state, step=1)
    assert asked(second) == [FRESH] * 2 + [STORED] * 2
    assert [row.members[0][0] for row in rows] == [0, 1, 2, 3]
    past = {int(outcome.prompt) for outcome in first.outcomes}
    assert {each.prompt for each in second.requests[2:]} <= past


def test_dots_stores_what_its_replay_stores():
    recipe, options = jr.recipes.dots(), {"share": 0.5, "capacity": 512, "unique": True}
    replay = jr.curation.replayed(store=jr.curation.informative_groups, **options)
    assert jr.recipes.rollout_replay().collector == replay
    source = recipe.collector.source
    assert source == jr.curation.replayed(store=jr.curation.informative_groups, start=2, **options)
    assert recipe.minibatches == jr.recipes.rollout_replay().minibatches


@for_each("name", ["llm_replay", "ssb"])
def test_stored_groups_take_the_places_of_those_that_agree(name):
    collector, state = started(name)
    first, rows, state = play(collector, state)
    # Nothing is stored yet, so those that agree stay.
    assert asked(first) == [FRESH] * 4 and len(rows) == 4
    second, rows, state = play(collector, state, step=1)
    assert asked(second) == [FRESH] * 4 + [STORED] * 2
    assert [row.members[0][0] for row in rows] == [0, 2, 4, 5]
    scores = {}
    for outcome in (*first.outcomes, *second.outcomes[:4]):
        r = np.float64(outcome.rewards)
        if r.max() > r.min():
            sizes = np.abs((r - r.mean()) / (r.std(ddof=1) + 1e-6))
            scores[int(outcome.prompt)] = (
                sizes.sum() * r.std(ddof=1) if name == "llm_replay" else sizes.mean()
            )
    used = state.buffer.order >= 0
    got = zip(state.buffer.prompt_ids[used].tolist(), state.buffer.scores[used], strict=True)
    assert dict(got) == pytest.approx(scores, rel=1e-5)


@for_each("name", ["rollout_replay", "fading_replay", "sapo_swarm", "llm_replay", "ssb"])
def test_what_is_stored_is_drawn_as_often_as_the_paper_says(name):
    collector, state = started(name)
    for step in range(2):
        last, _, state = play(collector, state, step)
    buffer = state.buffer
    used = np.flatnonzero(buffer.order >= 0)
    used = used[np.argsort(buffer.order[used])]
    if name in ("llm_replay", "ssb"):
        weights = np.float64(buffer.scores[used])
    elif name == "fading_replay":
        weights = np.tanh(7.0 * (np.arange(len(used)) / len(used)) ** 2)
    else:
        weights = np.ones(len(used))
    fresh = Collection(GROUPS, SIZE, 2, last.requests[:4], last.outcomes[:4], version=2)
    if name not in ("llm_replay", "ssb"):
        fresh = fresh._replace(requests=fresh.requests[:2], outcomes=fresh.outcomes[:2])
    drawn = []
    for seed in range(DRAWS):
        (request,), _ = collector.propose(state, jax.random.key(seed), fresh, 1)
        drawn.append(request.prompt)
    places = buffer.prompt_ids[used].tolist()
    probability = weights / weights.sum()
    for place, p in zip(places, probability, strict=True):
        sigma = np.sqrt(p * (1 - p) / DRAWS)
        assert abs(drawn.count(place) / DRAWS - p) <= 4 * sigma


def test_old_groups_of_llm_replay_are_not_drawn():
    collector, state = started("llm_replay")
    *_, state = play(collector, state)
    late, _, _ = play(collector, state, step=8)
    assert asked(late)[4:] == [STORED] * 2
    late, _, _ = play(collector, state, step=9)
    assert asked(late) == [FRESH] * 4


def members_of(rows):
    return [[member for _, member in row.members] for row in rows]


def test_sol_rl_trains_the_best_four_and_the_worst_four_of_32():
    collector, state = started("sol_rl")
    collection, rows, _ = play(collector, state)
    assert asked(collection) == [(0, 32, OWN)] * 4
    for outcome, members in zip(collection.outcomes, members_of(rows), strict=True):
        order = sorted(range(32), key=lambda j: -outcome.rewards[j])
        if outcome.rewards.min() < outcome.rewards.max():
            assert sorted(order[:4] + order[-4:]) == members
        assert len(set(members)) == 8


def test_grpo_roc_trains_eight_of_sixteen_in_the_shares_of_the_group():
    collector, state = started("grpo_roc")

    def reward(place, member):
        return float(member < (1, 4, 8, 16)[place])  # right ones; at least 2 of 1 is 1

    collection, rows, _ = play(collector, state, reward=reward)
    assert asked(collection) == [(0, 16, OWN)] * 4
    for rights, members in zip((1, 4, 8, 16), members_of(rows), strict=True):
        right, wrong = list(range(rights)), list(range(rights, 16))
        a, b = round(len(wrong) / 2), 8 - round(len(wrong) / 2)
        if a <= min(2, len(wrong)):
            a, b = min(2, len(wrong)), 8 - min(2, len(wrong))
        if b <= min(2, len(right)):
            b, a = min(2, len(right)), 8 - min(2, len(right))
        b = min(b, len(right))
        assert members == right[:b] + wrong[: 8 - b]


def test_pf_ppo_draws_eight_times_from_the_best_and_the_worst():
    collector, state = started("pf_ppo")
    collection, rows, _ = play(collector, state)
    assert asked(collection) == [FRESH] * 4
    extremes = set()
    for outcome, members in zip(collection.outcomes, members_of(rows), strict=True):
        assert len(members) == 8
        if outcome.rewards.min() < outcome.rewards.max():
            both = {int(outcome.rewards.argmax()), int(outcome.rewards.argmin())}
            assert set(members) <= both
            extremes |= set(members)
    assert len(extremes) == 2


def test_ettrl_forks_a_root_at_its_two_tokens_of_greatest_entropy():
    collector, state = started("ettrl")
    collection, rows, _ = play(collector, state)
    # A tree of 5 leaves and 3 roots that do not fork are 8.
    assert asked(collection) == [(0, 4, OWN)] * 4 + [(1, 4, OWN)] * 4
    for p, request in enumerate(collection.requests[4:]):
        root = collection.outcomes[p].responses[0]
        forks = sorted(np.argsort(-root.entropy, kind="stable")[:2].tolist())
        begun = [len(each.tokens) for each in request.responses]
        assert request.extends == p and sorted(begun) == [forks[0]] * 2 + [forks[1]] * 2
    assert [len(row.members) for row in rows] == [8] * 4
    paper = sized(collector, group_size=60, max_new_tokens=LENGTH)
    requests, _ = paper.propose(paper.init(9), jax.random.key(0), Collection(1, 60), 1)
    assert requests[0].rollouts == 12


def test_arrol_ends_half_of_the_rollouts_after_twenty_steps():
    collector, state = started("arrol")
    for step, survivors in ((0, 8), (19, 8), (20, 4)):
        collection, rows, learned = play(collector, state, step)
        limits = {(each.limit, each.rollouts) for each in collection.requests[:4]}
        assert limits == {(LENGTH // 4, 8)}  # none ends within a quarter
        assert [each.rollouts for each in collection.requests[4:]] == [survivors] * 4
        assert [len(row.members) for row in rows] == [survivors] * 4
        assert np.abs(learned["rule"].head).sum() > 0


def test_april_starts_twice_as_many_groups_and_the_others_go_on():
    collector, state = started("april")
    collection, rows, state = play(collector, state)
    assert asked(collection)[:8] == [FRESH] * 8
    assert all(each.limit == LENGTH // 8 and each.pauses for each in collection.requests[:8])
    assert [len(row.members) for row in rows] == [8] * 4
    asked_first = [i if x.extends is None else x.extends for i, x in enumerate(collection.requests)]
    trained = {asked_first[row.members[0][0]] for row in rows}
    left = sorted(set(range(8)) - trained)
    assert state.prompts.tolist() == [int(collection.outcomes[i].prompt) for i in left]
    more, _, _ = play(collector, state, step=1)
    riding = [each for each in more.requests if each.round == 0 and each.responses]
    assert {each.prompt for each in riding} == set(state.prompts.tolist())
    tokens = sum(len(y.tokens) for each in riding for y in each.responses)
    assert tokens == state.lengths.sum()


def test_spark_makes_half_of_a_batch_of_tasks_with_known_answers():
    collector, state = started("spark", groups=8)
    rights = (8, 0, 3, 5, 1, 1, 1, 1)

    def reward(place, member):
        return float(member < rights[place])

    collection, rows, state = play(collector, state, groups=8, reward=reward)
    assert len(rows) == 8 and [len(row.members) for row in rows] == [8] * 8
    questions, tasks = collection.requests[:4], collection.requests[4:]
    assert [each.text for each in questions] == [None] * 4
    assert [each.role for each in tasks] == [JUDGE, JUDGE, OWN, OWN]
    for task in tasks:
        shown = [j for j in range(8) if f"answer {j} of {task.prompt}" in task.text]
        right = [j < rights[task.prompt] for j in shown]
        if task.role == OWN:
            # A wrong answer to be refined, for the reward of the question.
            assert right == [False] and task.reward is None
        elif len(shown) == 2:
            assert sorted(right) == [False, True] and 0 < rights[task.prompt] < 8
            first = task.text.index(f"answer {shown[right.index(True)]} of")
            other = task.text.index(f"answer {shown[right.index(False)]} of")
            verdicts = ["first", "second"] if first < other else ["second", "first"]
            assert task.reward(verdicts) == [1.0, 0.0]
        else:
            verdicts = ["yes", "no"] if right[0] else ["no", "yes"]
            assert len(shown) == 1 and task.reward(verdicts) == [1.0, 0.0]
    assert (int(state["judged"]), int(state["refined"])) == (2, 2)
