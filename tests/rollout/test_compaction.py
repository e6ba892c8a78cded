"""Smaller grids for the last long responses: where slots go, and that results stay the same."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.rollout.compaction import (
    compact_active,
    compact_slots,
    rows_for,
    smaller_grid,
)


@for_each(
    "grid, smaller",
    [
        ((8, 8), (8, 2)),
        ((64, 1), (16, 1)),
        ((2, 32), (2, 8)),
        ((4, 4), (4, 1)),
        ((5, 4), (5, 1)),
        ((1, 8), None),
    ],
)
def test_a_grid_shrinks_to_a_quarter_and_never_gains_rows(grid, smaller):
    assert smaller_grid(*grid) == smaller


def test_siblings_are_split_over_rows_where_there_is_room():
    compaction = compact_slots([(5, 0), (1, 3), (1, 0), (1, 2)], (3, 2))
    assert compaction.rows.tolist() == [1, 1, 5]
    assert compaction.columns.tolist() == [[0, 2], [3, 0], [0, 0]]
    assert compaction.used.tolist() == [[True, True], [True, False], [True, False]]
    assert compact_slots([(0, 0), (1, 0), (2, 0)], (2, 2)) is None


on_device_slots = jax.jit(compact_active, static_argnums=1)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=10))
def test_every_slot_is_copied_once(places):
    compaction = compact_slots(places, (8, 2))
    active = np.zeros((8, 4), bool)
    for place in places:
        active[place] = True
    assert (rows_for(active, 2) <= 8) == (compaction is not None)
    if compaction is None:
        rows = [row for row, _ in places]
        assert sum(-(-rows.count(row) // 2) for row in set(rows)) > 8
        return
    rows = np.broadcast_to(compaction.rows[:, None], compaction.used.shape)
    result = zip(
        rows[compaction.used].tolist(), compaction.columns[compaction.used].tolist(), strict=True
    )
    assert sorted(result) == sorted(places)
    on_device = on_device_slots(active, (8, 2))
    np.testing.assert_array_equal(on_device.used, compaction.used)
    for got, expected in zip(on_device[:2], compaction[:2], strict=True):
        used = compaction.used if np.ndim(got) == 2 else compaction.used[:, 0]
        np.testing.assert_array_equal(np.asarray(got)[used], expected[used])


@pytest.mark.slow
def test_responses_that_end_in_a_smaller_grid_are_the_same():
    model, params = jr.testing.tiny_model()
    rng, T, G = np.random.default_rng(0), 24, 8
    prompts = [rng.integers(1, 200, n).tolist() for n in (3, 8, 1, 5)]
    limits = np.where(rng.random((4, G)) < 0.2, T, rng.integers(1, 8, (4, G)))
    key = jax.random.key(3)
    sample = jr.rollout.make_sampler(model, max_new_tokens=T, group_size=G)
    expected = jax.device_get(sample(params, key, prompts))
    engine = jr.rollout.make_engine(
        model, rows=4, width=G, prompt_length=8, max_new_tokens=T, chunk=5
    )
    engine.warm_up(params)
    compiled, compacted = engine.compiled(), []
    decode = engine.functions["decode"]

    def spy(*arguments):
        compacted.append(arguments[-1] is not None)
        return decode(*arguments)

    generation = jr.rollout.Generation(engine, params, key=key)
    for i, prompt in enumerate(prompts):
        requests = tuple(range(i * G, (i + 1) * G))
        most = tuple(limits[i].tolist())
        generation.submit(
            jr.rollout.Group(id=i, prompt=prompt, requests=requests, max_new_tokens=most)
        )
    engine.functions["decode"] = spy
    done = list(generation)
    engine.functions["decode"] = decode
    assert engine.compiled() == compiled
    assert compacted[-1] and not compacted[0]
    for group in done:
        for g, completion in enumerate(group.completions):
            n = limits[group.id, g]
            np.testing.assert_array_equal(completion.tokens, expected.tokens[group.id, g, :n])
            np.testing.assert_allclose(
                completion.out.behavior_logp, expected.behavior_logp[group.id, g, :n], atol=1e-5
            )
    assert len(done) == 4


@pytest.mark.of_many
@pytest.mark.parametrize("shared_prefix_len", [0, 1])
def test_the_last_responses_of_a_batch_decode_in_a_smaller_grid(monkeypatch, shared_prefix_len):
    """They are those of one grid, and most steps of the longest ones read few slots."""
    model, params = jr.testing.tiny_model(num_layers=1)
    prompts, T = [[7, *range(1, n + 1)] for n in (3, 8, 1, 5)], 24
    stops = tuple(range(0, model.config.vocab_size, 8))  # so a response has some eight tokens

    def sample(shrinks_from):
        monkeypatch.setattr("jaxrl_llm.rollout.sampler._SHRINKS_FROM", shrinks_from)
        sampler = jr.rollout.make_sampler(
            model,
            max_new_tokens=T,
            group_size=8,
            stop_ids=stops,
            shared_prefix_len=shared_prefix_len,
        )
        return jax.device_get(sampler(params, jax.random.key(0), prompts))

    sizes = []
    apply = model.apply

    def spy(params, tokens, *args, **options):
        jax.debug.callback(lambda: sizes.append(tokens.shape[:2]))
        return apply(params, tokens, *args, **options)

    model = model._replace(apply=spy)
    plain = sample(T + 1)
    steps = sizes.count((4, 8))
    assert plain.mask.sum(axis=-1).max() == steps > 16 and (4, 2) not in sizes
    sizes.clear()
    shrunk = sample(T)
    assert sizes.count((4, 8)) + sizes.count((4, 2)) == steps
    assert sizes.count((4, 2)) > steps // 3
    for name, got in shrunk._asdict().items():
        expected = getattr(plain, name)
        if name in ("behavior_logp", "model_logp", "log_kept"):
            np.testing.assert_allclose(got, expected, atol=1e-5)
        elif got is not None:
            np.testing.assert_array_equal(got, expected)
