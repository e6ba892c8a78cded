"""Which batches are packed, and that a step of one is the step of the padded batch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch, refuses
from rows import for_each
from step_makers import flat_step
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core.packing import FlatPacking
from jaxrl_llm.core.support import Support
from jaxrl_llm.models import param_shardings
from jaxrl_llm.models.sharding import batch_sharding, shard
from jaxrl_llm.recipes import Critic, Recipe
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.testing.model_checks import model, packed
from jaxrl_llm.train import SamplingConfig, init_critic, init_state, train
from jaxrl_llm.train.batches import (
    Passes,
    accumulate_gradients,
    least_saved_in,
    pack_batch,
    run_passes,
    summarize_updates,
)
from jaxrl_llm.train.mesh import make_mesh
from jaxrl_llm.train.metrics import batch_metrics
from jaxrl_llm.train.policy_gradient import RunOptions, make_policy_gradient

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.mark.slow
def test_metrics_of_unequal_minibatches_are_those_of_the_batch():
    """The mean over all rollouts, groups, responses, tokens or pairs, not over the minibatches."""
    recipe, batch = jr.recipes.brain(), make_batch(prompts=4, group=8)
    ones = jnp.ones(batch.mask.shape)
    where = jnp.ones((4, 8), bool).at[0].set(jnp.arange(8) < 1).at[2].set(False)
    rewards = jnp.ones((4, 8)).at[0].set(0.0).at[3, :3].set(0.0)
    batch = batch.replace(
        where=where,
        mask=batch.mask & where[..., None],
        rewards=rewards,
        ref_logp=-ones * jnp.arange(4.0)[:, None, None],
    )

    def update(carry, part, there):
        made = there.astype(jnp.float32)
        logp = -jnp.ones(part.mask.shape) * part.tokens / 256 - carry
        metrics = batch_metrics(recipe, logp, -logp, part)
        metrics |= {"updates": made, "skipped": 0 * made}
        return carry, (metrics, None)

    def of(**passes):
        return run_passes(Passes(**passes), update, 0.0, batch)[1][0]

    whole = of()
    assert whole["informative"] == np.float32(1 / 3) and whole["pairs"] == 15
    np.testing.assert_allclose(whole["reward"], 13 / 17, rtol=1e-6)
    names = whole.keys() - {"updates", "ref_kl"}  # which is that of the first minibatch
    assert {"pair_accuracy", "pair_margin", "length", "entropy", "reward_std"} <= names
    for passes in ({"minibatches": 2}, {"minibatches": 4, "epochs": 2}):
        parts = of(**passes)
        for name in names:
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6, err_msg=name)


def test_minibatches_of_texts_alone_are_no_updates_without_a_clip():
    """Two groups of responses and two of texts, one a minibatch."""
    history = {
        "tokens": jnp.array([8.0, 8.0, 0.0, 0.0] * 2),
        "text_tokens": jnp.array([0.0, 0.0, 3.0, 5.0] * 2),
        "text_loss": jnp.array([0.0, 0.0, 1.0, 2.0] * 2),
        "ratio_max": jnp.array([1.0, 1.5, 0.0, 0.0, 1.2, 1.1, 0.0, 0.0]),
        "approx_kl": jnp.array([0.0, 0.1, 0.0, 0.0, 0.2, 0.3, 0.0, 0.0]),
        "clip_fraction": jnp.array([0.0, 0.5, 0.0, 0.0, 0.25, 0.25, 0.0, 0.0]),
        "reward": jnp.array([1.0, 2.0, 0.0, 0.0] * 2),
        "updates": jnp.ones(8),
        "loss": jnp.arange(8.0),
    }
    sizes = {"rollouts": jnp.array([2.0, 4.0, 0.0, 0.0] * 2)}
    got = summarize_updates(history, 4, jnp.ones(8, bool), sizes)
    assert float(got["approx_kl"]) == np.float32(0.3) and float(got["ratio_max"]) == 1.5
    assert (float(got["clip_fraction"]), float(got["updates"])) == (0.25, 8)
    assert (float(got["tokens"]), float(got["text_tokens"])) == (16, 8)
    assert float(got["loss"]) == 3.5 and float(got["text_loss"]) == (3 * 1 + 5 * 2) / 8
    np.testing.assert_allclose(got["reward"], (2 * 1 + 4 * 2) / 6, rtol=1e-6)


def batch_of(lengths, size):
    lengths = np.asarray(lengths)
    batch = jax.device_get(make_batch(*lengths.shape, size))
    return batch.replace(mask=np.arange(size) < lengths[..., None])


SKEWED = [[8, 1, 2, 2], [3, 3, 0, 1]]


@for_each(
    ("lengths", "packing", "cells", "tokens"),
    [
        (SKEWED, "auto", 32, 20),
        (SKEWED, "never", 64, 20),
        ([[8, 6, 8, 2]], "auto", 24, 24),
        ([[8, 6, 8, 3]], "always", 32, 25),
    ],
)
def test_the_measured_padding_decides(lengths, packing, cells, tokens, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.train.batches.MIN_SAVED", 8)
    batch = batch_of(lengths, 8)
    prompts, kept, full = batch.prompt_mask.size, batch.prompt_mask.sum(), batch.mask.size
    no_trees = model()[0]._replace(reads_prompt_trees=False)  # else rows would be flat
    batch, numbers = pack_batch(batch, packing, model=no_trees)
    packed = (cells + prompts) / (full + prompts)
    padding = 1 - (tokens + kept) / (cells + prompts)
    assert numbers == pytest.approx({"packed": packed, "padding": padding})
    assert (batch.packing is None) == (packing == "never" or (packed, packing) == (1.0, "auto"))
    assert not isinstance(batch.packing, FlatPacking)
    batch.check()


def test_a_tree_has_unique_tokens():
    batch = batch_of([[8, 8, 8, 3]], 8)
    tokens = np.array(batch.tokens)
    tokens[0, 1], tokens[0, 2, :6] = tokens[0, 0], tokens[0, 0, :6]
    batch = batch.replace(tokens=tokens)
    tree, numbers = pack_batch(batch, "tree", model=model()[0])
    tree.check()
    assert (tree.packing.sources >= 0).sum() == 8 + 2 + 3
    prompts, kept = batch.prompt_mask.size, batch.prompt_mask.sum()
    expected = {
        "packed": (16 + prompts) / (32 + prompts),
        "padding": 1 - (13 + kept) / (16 + prompts),
    }
    assert numbers == pytest.approx(expected)
    ids = np.zeros((*tokens.shape, 2), np.int32)
    ids[0, 1, :, 0] = 1  # another support: another distribution
    apart = pack_batch(batch.replace(support=Support(ids=ids)), "tree", model=model()[0])[0]
    assert (apart.packing.sources >= 0).sum() == 8 + 2 + 8 + 3


def test_what_saves_little_is_not_compiled_anew():
    mask = np.arange(64) < np.array([[64, 1, 1, 1]] * 32)[..., None]
    shape = mask.shape[:2]
    full = batch_of(np.zeros(shape, int), 64).replace(mask=mask)
    for prompts, packs in ((32, True), (31, False)):  # 2 rows of 64 cells each are saved
        part = jax.tree.map(lambda x, n=prompts: x[:n], full)
        no_trees = model()[0]._replace(reads_prompt_trees=False)
        assert (pack_batch(part, "auto", model=no_trees)[0].packing is not None) == packs
    for response, packs in ((128, True), (64, False)):  # of four responses, three are one token
        mask = np.arange(response) < np.array([[response, 1, 1, 1]] * 2)[..., None]
        part = batch_of(np.zeros((2, 4), int), response).replace(mask=mask)
        flat = pack_batch(part, "auto", model=model()[0])[0].packing
        assert isinstance(flat, FlatPacking) == packs


def test_what_all_prompts_begin_with_makes_rows_flat_though_that_saves_no_cell():
    batch = batch_of(np.full((2, 2), 4), 4)
    for shared, shards, flat in ((0, 1, False), (1, 1, True), (1, 2, False)):
        packed, _ = pack_batch(
            batch, "auto", model=model()[0], shards=shards, shared_prefix_len=shared
        )
        assert isinstance(packed.packing, FlatPacking) == flat
    no_trees = model()[0]._replace(reads_prompt_trees=False)
    packed, _ = pack_batch(batch, "auto", model=no_trees, shared_prefix_len=1)
    assert packed.packing is None


def test_a_model_that_reads_no_segments_is_left_alone(tmp_path):
    deaf = model()[0]._replace(reads_segments=False, reads_prompt_trees=False)
    batch, numbers = pack_batch(batch_of(np.ones((4, 8), int), 512), "auto", model=deaf)
    assert batch.packing is None and numbers["packed"] == 1.0
    no_trees = model()[0]._replace(reads_trees=False)
    for network, packing in ((deaf, "always"), (no_trees, "tree"), (deaf, "flat")):
        given = (network, model()[1], ByteTokenizer())
        with pytest.raises(ValueError, match=f'train: packing "{packing}" needs a model whose'):
            train(tiny_run(tmp_path, model=lambda given=given: given, packing=packing))


def test_bad_options_are_named():
    sometimes = "packing must be one of"
    packs = functools.partial(pack_batch, batch_of(SKEWED, 8), "sometimes", model=model()[0])
    refuses(f"pack_batch: {sometimes}", packs)
    refuses(f"config: {sometimes}", tiny_run, "unused", packing="sometimes")
    alone = SamplingConfig(group_size=1, max_new_tokens=4)
    options = {"packing": "always", "sampling": alone, "recipe": "reinforce_pp"}
    refuses('packing "always" has no effect with one rollout', tiny_run, "unused", **options)


def top(logits, targets):
    return jax.nn.log_softmax(logits).max(-1)


def of_the_old_policy(advantages, *, old_top, hidden_sq, old_entropy):
    return old_top + 0.01 * hidden_sq + 0.1 * old_entropy


def lower_the_top(top, gate, mask):
    return jnp.where(mask, gate * top, 0.0)


# What a model is asked for in a step: values, statistics before it and in it, entropies, norms.
EVERYTHING = Recipe(
    name="everything",
    advantage=jr.chain(
        jr.stateless(jr.advantages.terminal_rewards),
        jr.stateless(jr.advantages.gae),
        jr.stateless(jr.advantages.whiten),
    ),
    surrogate=jr.surrogates.ppo_clip,
    computed=(
        jr.recipes.Computed("top", top, "policy"),
        jr.recipes.Computed("old_top", top, "old_policy"),
        jr.recipes.Computed("gate", of_the_old_policy, "batch"),
    ),
    regularizers=(lower_the_top, jr.bind(jr.regularizers.entropy_bonus, coef=0.1)),
    critic=Critic(
        returns=jr.pipe(jr.advantages.terminal_rewards, jr.advantages.gae_returns),
        loss=jr.bind(jr.surrogates.value_loss, eps=0.2),
        heads=2,
        combine=jr.surrogates.soft_min,
    ),
)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, np.abs(b).max()))


def updated(batch, *, mesh=None, rate=0.5, **options):
    """What the updates on a batch in two epochs change, and the metrics."""
    network, params = model()
    batch = jax.tree.map(jnp.asarray, batch)
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))
    critic = init_critic(network, params, heads=2, key=jax.random.key(1))
    kept = {"key": jax.random.key(0), "critic": critic, "critic_optimizer": optax.sgd(2 * rate)}
    state = init_state(params, optax.sgd(rate), EVERYTHING, mesh=mesh, **kept)
    options |= {"epochs": 2, "temperature": 0.7, "critic_optimizer": optax.sgd(2 * rate)}
    step = flat_step(network, EVERYTHING, optax.sgd(rate), mesh=mesh, **options)
    after, metrics = step(state, batch)
    return jax.device_get(((after.params, after.critic.params), metrics))


@pytest.mark.slow
def test_a_packed_step_is_the_padded_step():
    batch = make_batch(prompts=8, group=4, length=6)
    lengths = np.random.default_rng(1).integers(0, 4, (8, 4, 1))
    batch = batch.replace(mask=jnp.arange(6) < lengths)
    ids = np.random.default_rng(2).integers(0, 259, (8, 4, 6, 20))
    ids[..., 0] = batch.tokens
    batch = batch.replace(support=Support(ids=jnp.asarray(ids, jnp.int32)))
    want = updated(batch, remat="none")
    rows, passes = packed(batch), Passes(microbatches=2)
    host = jax.tree.map(np.asarray, batch)
    flat, numbers = pack_batch(
        host, "flat", model=model()[0], passes=passes, shards=4, least_saved=1
    )
    assert len(flat.packing.sources) == 8 and numbers["packed"] < 0.7
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    for given in (rows, flat):
        got = updated(given, mesh=mesh, microbatches=2, remat="full")
        assert_close(got, want)


@pytest.mark.slow
def test_flat_rows_make_the_minibatches_of_padded_rows():
    microbatches = 8
    batch = make_batch(prompts=8, group=4, length=6)
    lengths = np.random.default_rng(1).integers(0, 4, (8, 4, 1))
    batch = jax.tree.map(np.asarray, batch.replace(mask=jnp.arange(6) < lengths))
    passes = Passes(epochs=2, minibatches=4, microbatches=microbatches)
    flat, _ = pack_batch(batch, "auto", model=model()[0], passes=passes)
    assert flat.packing is None  # a test's batch saves too few cells to be compiled anew
    flat, numbers = pack_batch(batch, "flat", model=model()[0], passes=passes, least_saved=1)
    assert passes.of(None) == passes
    assert passes.of(flat.packing).microbatches == max(4, microbatches)
    assert len(flat.packing.sources) == max(4, microbatches) and numbers["packed"] < 0.8
    # A rate of 0.5 diverges in eight updates, and what diverges magnifies rounding.
    options = {"rate": 0.02, "remat": "none", "minibatches": 4, "microbatches": microbatches}
    want, got = (updated(given, **options) for given in (batch, flat))
    assert_close(got, want)


@pytest.mark.slow
def test_a_budget_of_cells_chooses_the_number_of_microbatches():
    minibatches = 2
    batch, passes = make_batch(prompts=8, group=4, length=6), Passes(minibatches=minibatches)
    options = {"rate": 0.02, "remat": "none", "minibatches": minibatches}
    packs, counts = functools.partial(pack_batch, model=model()[0], least_saved=1), []
    for longest in (6, 3, 1):
        lengths = np.random.default_rng(longest).integers(1, longest + 1, (8, 4, 1))
        part = jax.tree.map(np.asarray, batch.replace(mask=jnp.arange(6) < lengths))
        flat, _ = packs(part, "auto", passes=passes, tokens_per_microbatch=64)
        packing = flat.packing
        counts.append(packing.microbatches // minibatches)
        assert packing.num_cells / packing.microbatches <= 64
        fewer = passes._replace(microbatches=packing.microbatches // 2)
        if counts[-1] > 1:  # half as many would not do
            plan = packs(part, "flat", passes=fewer)[0].packing
            assert plan.num_cells / plan.microbatches > 64
        if longest == 3:
            want, got = (updated(given, **options) for given in (part, flat))
            assert_close(got, want)
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 1, counts


def test_a_budget_that_cannot_be_kept_is_refused(tmp_path):
    batch, (network, _) = batch_of([[6, 2], [3, 3]], 6), model()
    pack = functools.partial(pack_batch, packing="auto", model=network)
    cells = "a microbatch of one group on each device takes .* cells"
    refuses(cells, pack, batch, tokens_per_microbatch=4)
    tree, _ = pack_batch(batch, "tree", model=network)
    told = "pack_batch: tokens_per_microbatch cannot be used with"
    refuses(told, pack, tree, tokens_per_microbatch=512)
    run = functools.partial(tiny_run, tmp_path, tokens_per_microbatch=512)
    refuses("config: microbatches has no effect with tokens_per", run, microbatches=2)
    refuses("config: tokens_per_microbatch needs flat rows; got", run, packing="tree")
    least = r"train: tokens_per_microbatch must be at least the \d+"
    refuses(least, train, tiny_run(tmp_path, tokens_per_microbatch=8))
    assert not list(tmp_path.iterdir())
    deaf = (network._replace(reads_prompt_trees=False), model()[1], ByteTokenizer())
    told = 'packing "flat" needs a model whose reads_prompt_trees'
    refuses(told, train, run(model=lambda: deaf))


def talkative():
    """A tiny model whose responses end after a few bytes, one way or the other."""
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = tuple(range(0, 259, 3))
    return *tiny_model(num_layers=1), tokenizer


@pytest.mark.slow
def test_the_loop_packs_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.train.policy_gradient.least_saved_in", lambda steps: 1)
    sampling = SamplingConfig(group_size=4, max_new_tokens=16)
    run = tiny_run(tmp_path / "packed", model=talkative, sampling=sampling, steps=2)
    lines = {}
    for packing in ("always", "tree", "flat", "tokens", "never"):
        chosen = {"packing": packing} if packing != "tokens" else {"tokens_per_microbatch": 110}
        changed = dataclasses.replace(run, **chosen, run_dir=str(tmp_path / packing))
        lines[packing] = train(changed).history
    for *packed_lines, line in zip(*lines.values(), strict=True):
        for packed_line in packed_lines:
            assert packed_line["packed"] < 0.8 and line["packed"] == 1.0
            assert packed_line["padding"] < line["padding"]
            for name in ("loss", "grad_norm", "reward", "entropy", "sampler_gap"):
                assert packed_line[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6)


def test_a_short_run_has_fewer_shapes():
    """Of the quickstart's size: the sizes that lengths from 16 to 1 tokens lead to."""
    rng, shapes = np.random.default_rng(0), {}
    for steps in (1000, 40, 8):
        found = []
        for longest in range(16, 0, -1):
            lengths = np.full((8, 8), longest)
            batch = batch_of(lengths, 16)
            ids = rng.integers(0, 259, batch.tokens.shape)
            batch = batch.replace(tokens=ids, prompt_tokens=rng.integers(0, 259, (8, 60)))
            batch = batch.replace(prompt_mask=np.ones((8, 60), bool))
            least = least_saved_in(steps)
            flat, _ = pack_batch(batch, "flat", model=model()[0], least_saved=least)
            found.append(flat.packing.num_cells)
        assert found == sorted(found, reverse=True)
        saved = [a - b for a, b in itertools.pairwise(dict.fromkeys(found))]
        assert all(cells >= least_saved_in(steps) for cells in saved)
        shapes[steps] = len(saved) + 1
    assert shapes[1000] > shapes[40] > shapes[8] >= 1


def test_microbatches_without_a_token_that_trains_are_not_computed():
    rng = np.random.default_rng(0)
    scale, x = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=(8, 2, 3)))
    mask = np.zeros((8, 2, 3), bool)
    mask[[2, 3, 6]] = True  # of neighbors 0 to 3 two groups, of 4 to 7 one
    batch = make_batch(group=2, length=3, mask=mask, advantages=x)
    computed = []

    def loss(params, part):
        jax.debug.callback(lambda: computed.append(1))
        values = jnp.where(part.mask, (part.advantages * params) ** 2, 0.0)
        return values.sum(), values

    once = accumulate_gradients(loss, scale, batch, 1)
    jax.effects_barrier()
    computed.clear()
    parts = accumulate_gradients(loss, scale, batch, 4)
    jax.effects_barrier()
    assert len(computed) == 2
    for got, want in zip(parts, once, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    nothing = accumulate_gradients(loss, scale, batch.replace(mask=jnp.zeros_like(batch.mask)), 4)
    jax.effects_barrier()
    assert len(computed) == 2 and float(jnp.abs(nothing[2]).sum()) == 0


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize(
    ("sizes", "steps", "done"), [((2, 1, 1), 18, 0), (None, 16, 0), (None, 18, 2)]
)
def test_smaller_rows_are_compiled_before_they_come(sizes, steps, done, monkeypatch):
    """The program that a thread has compiled is that of the later step, which compiles nothing.

    Where few steps are left, also of a resumed run, no thread compiles.
    """
    monkeypatch.setattr("jaxrl_llm.train.policy_gradient.least_saved_in", lambda steps: 1)
    mesh = None if sizes is None else make_mesh(data=2, devices=jax.devices()[:2])
    network, params = model()
    params = params if mesh is None else shard(params, param_shardings(params, mesh))
    recipe, optimizer = jr.recipes.dr_grpo(length=6), optax.sgd(0.1)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0), mesh=mesh)
    state = state._replace(step=state.step + done)
    options = RunOptions(
        passes=Passes(),
        temperature=1.0,
        remat="none",
        shared_prefix_len=0,
        packing="flat",
        stale=False,
        mesh=mesh,
        steps=steps,
    )
    algorithm = make_policy_gradient(network, recipe, optimizer, lambda: None, options=options)
    step = algorithm.step
    batch = make_batch(prompts=8, group=4, length=6)
    compiled = []
    listener = "/jax/core/compile/backend_compile_duration"

    def listen(event, seconds, fun_name="", **_):
        if event == listener and "step" in fun_name:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        counts = []
        for longest in (6, 3):
            mask = jnp.arange(6) < jnp.full((8, 4, 1), longest)
            flat, _ = algorithm.score(jax.tree.map(np.asarray, batch.replace(mask=mask)))
            state, _ = step(state, flat)
            counts.append(len(compiled))
            for program in step.compiling.values():
                program.result()  # what was begun is done
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    ahead = steps - done == 18
    assert counts == [1, 2] and len(compiled) == (3 if ahead else 2), compiled
    assert bool(step.compiling) == ahead
