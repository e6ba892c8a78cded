import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_batch

import jaxrl_llm as jr
from jaxrl_llm.train.logging.results import JsonLines, plot_reward, read_jsonl, samples_table
from jaxrl_llm.train.mesh import check_batch, make_mesh
from jaxrl_llm.train.metrics import batch_metrics, rejection_metrics


def test_numbers_of_a_batch():
    recipe, batch = jr.recipes.dapo(), make_batch(prompts=3, seed=1)
    logp = jnp.where(batch.mask, -1.0, jnp.nan)
    entropy = jnp.where(batch.mask, 0.5, jnp.nan)
    shifted = batch.replace(
        old_logp=jnp.full(batch.mask.shape, -1.0 - np.log(1.5)),
        behavior_logp=jnp.full(batch.mask.shape, -1.25).at[-1, -1, 0].set(-1.5),
        where=batch.where.at[0].set(False),
        rewards=batch.rewards.at[0].set(jnp.nan).at[1:].set(jnp.array([0.0, 1.0, 1.0])),
    )
    prepared, _ = recipe.prepare(shifted, recipe.init())
    found = batch_metrics(recipe, logp, entropy, prepared)
    assert all(x.dtype == jnp.float32 and x.shape == () for x in found.values())
    expected = {
        "reward": 2 / 3,
        "reward_std": 3**-0.5,
        "informative": 1.0,
        "length": float(batch.mask[1:].sum(-1).mean()),
        "tokens": float(batch.mask[1:].sum()),
        "entropy": 0.5,
        "approx_kl": 1.5 - 1 - np.log(1.5),
        "ratio_max": 1.5,
        "sampler_gap": 0.25 + 0.25 / float(batch.mask[1:].sum()),
        "sampler_gap_max": 0.5,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    # Ratio 1.5 is above 1.28 wherever the advantage is positive: two thirds of the rollouts.
    positive = np.asarray(prepared.advantages > 0)[..., None] & np.asarray(prepared.mask)
    share = positive.sum() / np.asarray(prepared.mask).sum()
    np.testing.assert_allclose(found["clip_fraction"], share, rtol=1e-5)


def test_numbers_that_need_an_old_policy_or_a_clip_are_left_out():
    batch = make_batch()
    recipe = jr.recipes.rloo()
    prepared, _ = recipe.prepare(batch, recipe.init())
    zeros = jnp.zeros(batch.mask.shape)
    found = batch_metrics(recipe, zeros, zeros, prepared)
    assert not {"approx_kl", "clip_fraction", "ratio_max", "sampler_gap"} & set(found)
    gspo = jr.recipes.gspo()
    prepared, _ = gspo.prepare(batch.replace(old_logp=zeros), gspo.init())
    found = batch_metrics(gspo, zeros, zeros, prepared)
    assert float(found["clip_fraction"]) == 0.0 and "dual_clip_fraction" not in found
    # A log ratio of 1 a token is far above GSPO's bound for every sequence of positive advantage.
    found = batch_metrics(gspo, zeros + 1.0, zeros, prepared)
    share = np.mean(np.asarray(prepared.advantages > 0)[np.asarray(prepared.mask).any(-1)])
    np.testing.assert_allclose(found["clip_fraction"], share, rtol=1e-5)


def test_a_dual_clip_is_reported():
    recipe, batch = jr.recipes.dapo(dual_clip=2.0), make_batch()
    zeros = jnp.zeros(batch.mask.shape)
    prepared, _ = recipe.prepare(batch.replace(old_logp=zeros), recipe.init())
    found = batch_metrics(recipe, zeros + 1.0, zeros, prepared)
    negative = np.asarray(prepared.advantages < 0)[..., None] & np.asarray(prepared.mask)
    share = negative.sum() / np.asarray(prepared.mask).sum()
    assert share > 0
    np.testing.assert_allclose(found["dual_clip_fraction"], share, rtol=1e-5)


def test_json_lines(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.keep_up_to(0)
    for step in (1, 2, 3):
        file.write({"step": step, "x": jnp.float32(step), "bad": float("nan"), "v": np.ones(2)})
    assert read_jsonl(file.path)[0] == {"step": 1, "x": 1.0, "bad": None, "v": [1.0, 1.0]}
    with file.path.open("a") as handle:
        handle.write('{"step": 4, "x"')  # cut off in the middle
    file.keep_up_to(2)
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 2]
    file.keep_up_to(0)
    assert read_jsonl(file.path) == []


def test_table_and_curve(tmp_path):
    rows = [{"reward": 0.5, "prompt": "a\nb", "completion": "x" * 200}]
    table = samples_table(rows, width=60)
    assert "a\\nb" in table and "xx..xx" in table and max(map(len, table.splitlines())) <= 60
    accuracy = {"mean": 0.5, "low": 0.3, "high": 0.7}
    history = [{"step": 0, "held_out": {"greedy": accuracy}}, {"step": 1, "reward": 0.2}]
    plot_reward(history, tmp_path / "reward.png", title="t")
    plot_reward([], tmp_path / "empty.png")
    for name in ("reward.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_mesh_sizes():
    assert make_mesh() is None and make_mesh(devices=[object()], data=-1) is None
    assert dict(make_mesh(data=-1, tensor=2).shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert dict(make_mesh(fsdp=8).shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    with pytest.raises(ValueError, match="data 2 x fsdp 1 x tensor 1 needs 2 devices, .* are 8"):
        make_mesh(data=2)
    with pytest.raises(ValueError, match="3 .* does not divide the 8 devices"):
        make_mesh(data=-1, tensor=3)
    with pytest.raises(ValueError, match="fsdp must be above 0"):
        make_mesh(fsdp=-2)
    check_batch("f", 8, 2, 4)
    with pytest.raises(ValueError, match="f: a microbatch of 4 prompts .* over 8 devices"):
        check_batch("f", 8, 2, 8)


def test_two_rules_of_one_function_have_numbers():
    batch = make_batch()
    zeros = jnp.zeros(batch.mask.shape)
    tight, wide = (jr.bind(jr.corrections.veto_mask, threshold=x) for x in (0.5, 0.1))
    recipe = jr.recipes.rollout_correction(reject=(tight, wide))
    batch = batch.replace(old_logp=zeros - 1.0, behavior_logp=zeros)
    shares = rejection_metrics(recipe, batch, batch.mask)
    assert shares["rejected_tokens/veto_mask_1"] == shares["rejected_tokens"] == 1
    assert shares["rejected_tokens/veto_mask_2"] == shares["rejected_sequences/veto_mask_2"] == 0
