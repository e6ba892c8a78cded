"""SPO and MSSR: batch-normalized differences from a tracked value, which never contains them."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, put, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.advantages import (
    batch_normalize,
    beta_tracker_update,
    beta_tracker_value,
    kl_forgetting,
    mssr_tracker,
    spo,
    spo_tracker,
)

eighths = hnp.arrays(np.float32, (4, 2), elements=st.integers(-16, 16).map(lambda i: i / 8))
kept = hnp.arrays(np.bool_, (4, 2))


def reference(rewards, values, where, *, ddof=1, eps=1e-8):
    gain = np.array(rewards, np.float64) - np.array(values, np.float64)[:, None]
    out, kept_gain = np.zeros(gain.shape), gain[where]
    if kept_gain.size and kept_gain.max() != kept_gain.min():
        out[where] = (kept_gain - kept_gain.mean()) / (kept_gain.std(ddof=ddof) + eps)
    return out


def test_worked_numbers():
    rewards, values = np.array([[1.0], [0.0], [1.0], [0.0]]), np.array([0.5, 0.25, 0.75, 0.5])
    expected = [1.095445, -0.547723, 0.547723, -1.095445]
    close(spo(rewards, values)[:, 0], expected, atol=1e-6)


@quick
@given(rewards=eighths, where=kept, seed=st.integers(0, 50), ddof=st.sampled_from([0, 1]))
def test_equals_the_reference(rewards, where, seed, ddof):
    # Sixteenths, so that equal differences are equal in float32 too.
    values = np.random.default_rng(seed).integers(0, 17, 4).astype(np.float32) / 16
    out = spo(rewards, values, where=where, ddof=ddof)
    close(out, reference(rewards, values, where, ddof=ddof), atol=2e-5)
    assert out.dtype == jnp.float32
    assert not np.asarray(out)[~where].any()
    if ddof == 1:
        gain = np.asarray(rewards - values[:, None])
        close(out, batch_normalize(gain, where=where), atol=2e-6)


def test_the_tracker_is_read_before_it_is_updated():
    track = spo_tracker(num_prompts=3, rho=0.875, prior=(1.0, 1.0))
    ids, state = np.array([2, 0]), track.init()
    rewards = np.array([[1.0, 0.0], [1.0, 1.0]])
    step = jax.jit(lambda r, s, ids: track.update(r, s, prompt_ids=ids, unused=1))
    for _ in range(3):
        values = beta_tracker_value(state, ids)
        advantages, new = step(rewards, state, ids)
        close(advantages, spo(rewards, values), rtol=1e-5, atol=1e-6)
        expected = beta_tracker_update(state, ids, rewards, 0.875)
        for a, b in zip(new, expected, strict=True):
            close(a, b, rtol=1e-6)
        state = new
    # What the prompt earns now changes nothing in its baseline now.
    other, _ = step(np.array([[0.0, 0.0], [1.0, 1.0]]), state, ids)
    values = beta_tracker_value(state, ids)
    close(other, spo(np.array([[0.0, 0.0], [1.0, 1.0]]), values), rtol=1e-5, atol=1e-6)


def test_the_factor_adapts_to_the_shift_of_each_prompt():
    track = spo_tracker(num_prompts=2, rho=None)
    shift, ids = np.array([0.0, 0.01]), np.array([1, 0])
    rewards = np.array([[1.0], [0.0]])
    _, state = track.update(rewards, track.init(), prompt_ids=ids, policy_shift=shift)
    expected = beta_tracker_update(track.init(), ids, rewards, kl_forgetting(shift))
    close(state.alpha, expected.alpha, rtol=1e-6)


@for_each("rho", [None, 0.875])
def test_a_new_prompt_starts_from_its_first_rollouts(rho):
    track = spo_tracker(num_prompts=5, rho=rho, first=8)
    state = track.init()
    state = state._replace(alpha=put(state.alpha, 1, 2.0), beta=put(state.beta, 1, 6.0))
    batch = {
        "prompt_ids": np.array([3, 1, 0, 4]),
        "where": np.array([[True], [True], [True], [False]]),
        # Of prompt 3, 3 of 8 were right; prompt 1 is not new; prompt 0 has none that were graded.
        "prefix_values": np.array([0.375, 1.0, np.nan, 1.0])[:, None, None],
        "segment_where": np.array([True, True, False, True])[:, None, None],
    }
    if rho is None:
        batch["policy_shift"] = np.zeros(4)
    rewards = np.array([[1.0], [0.0], [1.0], [1.0]])
    advantages, after = jax.jit(track.update)(rewards, state, **batch)
    # The baseline of the first batch is (3 + 1/2) / 9, not 1/2.
    values = np.array([0.388889, 0.25, 0.5, 0.5])
    expected = spo(rewards, values, where=batch["where"])
    close(advantages, expected, rtol=1e-5, atol=1e-6)
    keeps = 0.96 if rho is None else rho
    alpha = keeps * np.array([0.5, 2.0, 0.5, 3.111111, 0.5]) + [1, 0, 0, 1, 0]
    beta = keeps * np.array([0.5, 6.0, 0.5, 4.888889, 0.5]) + [0, 1, 0, 0, 0]
    alpha[[2, 4]] = beta[[2, 4]] = 0.5  # without a rollout that trains
    close(after.alpha, alpha, rtol=1e-6)
    close(after.beta, beta, rtol=1e-6)
    # Two rows of a new prompt have twice as many first rollouts: 8 (4 + 1/2) / 17.
    batch["prompt_ids"] = np.array([3, 3, 0, 4])
    batch["prefix_values"] = np.array([0.375, 0.125, np.nan, 1.0])[:, None, None]
    _, after = track.update(rewards, track.init(), **batch)
    close(after.alpha[3], keeps * 8 * 4.5 / 17 + 1, rtol=1e-6)


def test_a_foreign_prompt_is_loud_unless_all_its_rollouts_are_dropped():
    track = spo_tracker(num_prompts=2)
    ids, rewards = np.array([0, 5]), np.array([[1.0], [0.0]])
    advantages, state = track.update(rewards, track.init(), prompt_ids=ids)
    assert np.isnan(advantages).all()
    assert np.isfinite(state.alpha).all()
    where = np.array([[True], [False]])
    advantages, _ = track.update(rewards, track.init(), prompt_ids=ids, where=where)
    assert advantages.tolist() == [[0.0], [0.0]]


def test_mssr_steps_as_written_out_by_hand():
    track = mssr_tracker(num_prompts=2, window=2)
    ids, rewards = np.array([0, 1]), np.array([[1.0], [0.0]])
    step = jax.jit(lambda s, kl: track.update(rewards, s, prompt_ids=ids, last_kl=kl))
    state = track.init()
    alpha, window = np.array([4.0, 4.0]), []
    for batch, kl in enumerate([123.0, 0.004, 0.006, 0.03]):
        advantages, state = step(state, jnp.float32(kl))
        close(advantages, [[1.0], [-1.0]], rtol=1e-5)
        if batch:  # before the first update there was no KL to measure
            window = [*window, kl][-2:]
        tau = np.mean(window) / 0.01 if window else None
        rho = 0.9175 if tau is None else 0.875 if tau > 1 else 0.875 + tau * 0.085
        alpha = rho * alpha + [1.0, 0.0]
        close(state.rates.alpha, alpha, rtol=1e-5)
    assert int(state.batches) == 4


@for_each("make", [spo_tracker, mssr_tracker])
def test_transforms_compare_by_value_and_chain(make):
    assert make(num_prompts=3) == make(num_prompts=3)
    assert make(num_prompts=3) != make(num_prompts=4)
    assert hash(make(num_prompts=3)) == hash(make(num_prompts=3))
    both = jr.chain(make(num_prompts=2), jr.stateless(jnp.negative))
    rewards, context = np.array([[1.0], [0.0]]), {"prompt_ids": np.arange(2), "last_kl": 0.0}
    out, _ = both.update(rewards, both.init(), **context)
    alone, _ = jax.jit(make(num_prompts=2).update)(rewards, both.init()[0], **context)
    equal(out, -alone)
