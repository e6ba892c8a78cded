"""Hints: which prompts get one, how much of it, which rollouts give way, and what is spliced."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

JUNK = (jnp.nan, jnp.inf, -jnp.inf, 1e4)


def test_who_needs_a_hint():
    # A group without a right answer needs a hint.
    rewards = jnp.array([[0.0, 0.0], [0.0, 0.5], [-1.0, 0.0], [jnp.nan, 0.0]])
    assert cur.needs_hint(rewards).tolist() == [True, False, True, False]
    assert cur.needs_hint(rewards, threshold=0.5).tolist() == [True, True, True, False]

    # A group without rollouts is left alone.
    nothing = jnp.zeros((1, 2), bool)
    assert not cur.needs_hint(jnp.zeros((1, 2)), where=nothing).any()
    assert cur.adhint_ratio(jnp.zeros((1, 2)), where=nothing, low=0.25).tolist() == [0.25]

    # Nurl keeps one plain rollout.
    slots = cur.hint_slots(jnp.array([True, False]), group_size=8)
    assert slots.sum(-1).tolist() == [7, 0] and not slots[0, 0]
    assert cur.hint_slots(jnp.array([True]), group_size=3, plain=0).all()


@for_each("junk", JUNK)
def test_masked_rewards_decide_nothing(junk):
    rewards, where = jnp.array([[0.0, junk], [1.0, junk]]), jnp.array([[True, False]] * 2)
    assert cur.needs_hint(rewards, where=where).tolist() == [True, False]
    assert cur.minimal_hint(rewards, where=where).tolist() == [-1, 0]
    assert cur.first_bad_step(rewards, where=where).tolist() == [0, 2]
    equal(
        cur.distilled_where(rewards, jnp.array([1, 1]), where=where),
        [[False, False], [True, False]],
    )
    close(cur.adhint_ratio(rewards, where=where), [0.8, 0.0])


@for_each(
    ("level", "accuracy", "after"),
    [(0, 0.0, 1), (1, 0.1, 2), (3, 0.05, 3), (2, 0.36, 1), (2, 0.35, 2), (0, 0.9, 0), (2, None, 0)],
)
def test_levels_of_sage_light(level, accuracy, after):
    accuracy = jnp.float32(jnp.nan if accuracy is None else accuracy)
    assert int(cur.hint_level(jnp.int32(level), accuracy)) == after


def test_stages_and_lengths():
    # Stages rise where a group is hard and stop at the last.
    stage, hard = jnp.zeros(3, jnp.int32), jnp.array([True, True, False])
    for expected in ([1, 1, 0], [2, 2, 0], [3, 3, 0], [3, 3, 0]):
        stage = cur.guidance_stage(stage, hard)
        assert stage.tolist() == expected
    assert cur.guidance_stage(jnp.array([2]), jnp.array([True]), stages=2).tolist() == [2]

    # Lengths of prefixes round half to even.
    lengths = np.arange(1, 200)
    for ratio in (0.25, 0.5, 0.75):
        shown = cur.prefix_length(jnp.asarray(lengths), ratio)
        assert shown.tolist() == [round(n * ratio) for n in lengths.tolist()]
    assert cur.prefix_length(jnp.array(101), jnp.array([0.25, 0.5, 0.75])).tolist() == [25, 50, 76]
    assert cur.prefix_length(jnp.array(10), jnp.array([-1.0, 2.0])).tolist() == [0, 10]


def test_what_a_hint_trains():
    # The least hint that helps replaces the first rollout.
    level = cur.minimal_hint(jnp.array([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    assert level.tolist() == [1, -1, 0]
    slots = cur.scaffold_slots(level, group_size=8)
    assert slots.sum(-1).tolist() == [1, 0, 1] and slots[0, 0]
    where = jnp.array([[False, True, True, True]])
    two = cur.scaffold_slots(jnp.array([0]), group_size=4, where=where, count=2)
    assert two.tolist() == [[False, True, True, False]]

    # What is distilled is right and was helped.
    rewards, stage = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), jnp.array([0, 1, 2])
    equal(cur.distilled_where(rewards, stage), [[False, False], [False, True], [True, True]])

    # Tokens of a prefix do not train.
    mask = cur.continuation_mask(jnp.array([0, 2, 4]), jnp.array([3, 4, 4]), size=5)
    assert mask.astype(int).tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]


def test_adhint():
    # Harder prompts see more of the solution.
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4])
    ratio = cur.adhint_ratio(rewards, low=0.1, high=0.9)
    close(ratio, [0.7, 0.1, 0.9], rtol=1e-6)
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lambda k: cur.adhint_ratio(rewards, key=k, noise=0.3))(keys)
    assert drawn.min() >= 0.0 and drawn.max() <= 1.0
    assert (jnp.abs(drawn - cur.adhint_ratio(rewards)) <= 0.3 + 1e-6).all()
    close(drawn[:, 0].mean(), 0.6, atol=0.03)

    # Cuts lie between their bounds.
    length = jnp.array([1000, 7, 0])
    cuts = cur.prefix_cuts(jax.random.key(1), length, cuts=400)
    assert cuts.shape == (3, 400)
    assert (cuts >= jnp.floor(0.4 * length)[:, None]).all()
    assert (cuts <= jnp.floor(0.8 * length)[:, None]).all()
    close(cuts[0].mean(), 600, rtol=0.03)
    fixed = cur.prefix_cuts(jax.random.key(1), jnp.array(10), cuts=2, low=0.5, high=0.5)
    assert fixed.tolist() == [5, 5]


def test_steps_and_splices():
    # The first rejected step.
    scores = jnp.array([[0.9, 0.8, 0.2, 0.7], [0.9] * 4, [0.1] * 4])
    assert cur.first_bad_step(scores).tolist() == [2, 4, 0]
    assert cur.first_bad_step(scores, threshold=0.85).tolist() == [1, 4, 0]
    assert cur.first_bad_step(jnp.zeros((2, 0))).tolist() == [0, 0]

    # Splicing equals joining lists.
    rng = np.random.default_rng(0)
    tokens, more = rng.integers(1, 99, (20, 6)), rng.integers(1, 99, (20, 4))
    keep, length = rng.integers(0, 7, 20), rng.integers(0, 5, 20)
    out = jax.jit(cur.splice)(tokens, keep, more, length)
    for i in range(20):
        joined = [*tokens[i, : keep[i]], *more[i, : length[i]]][:6]
        assert out.tokens[i].tolist() == joined + [0] * (6 - len(joined))
        assert int(out.length[i]) == len(joined)
        assert out.foreign[i].tolist() == [keep[i] <= t < len(joined) for t in range(6)]
    # A first step that is wrong is the replacement of the complete response.
    assert not cur.splice(tokens, keep, more, 0 * length).foreign.any()


# --- bad input -------------------------------------------------------------------------------
