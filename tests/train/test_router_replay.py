"""Training takes the experts that the sampler took, in every layout of a batch and in a run."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_makers import loaded_batch
from exact_resume import assert_resumes
from helpers import make_batch
from rows import for_each
from step_makers import flat_step, moved
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.models import AttentionContext, ExpertsConfig, LayerKind
from jaxrl_llm.models.lora import Adapted, LoRAConfig, adapted_model, init_lora
from jaxrl_llm.models.sharding import on_mesh
from jaxrl_llm.recipes import Batch
from jaxrl_llm.rollout import Generation, Group, make_engine, to_rollout
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    OptimizerConfig,
    SamplingConfig,
    init_state,
    make_mesh,
    make_step,
    pack_batch,
    train,
)
from jaxrl_llm.train.experiment.rollouts import pack_pending, unpack_pending
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.memory.memory_plan import load_inputs, make_plan
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.update.score_batch import score_batch

pytestmark = pytest.mark.usefixtures("shared_programs")

# A layer without experts between two that have some, of which a token takes 2.
PARTS = {
    "num_layers": 3,
    "layers": (LayerKind(), LayerKind(dense=True), LayerKind()),
    "experts": ExpertsConfig(count=8, active=2, width=8),
}
PROMPTS = [[5, 6, 7], [8], [5, 6, 9, 10]]


def model():
    layers = (LayerKind(dense=True), LayerKind())
    return *tiny_model(**PARTS | {"num_layers": 2, "layers": layers}), ByteTokenizer()


def dense_model():
    return *tiny_model(num_layers=1), ByteTokenizer()


def denoising_model():
    return *tiny_model(**PARTS, causal=False, vocab_size=260, mask_id=259), ByteTokenizer()


@pytest.fixture(scope="module")
def small():
    return tiny_model(**PARTS)


@pytest.fixture(scope="module")
def rollout(small):
    """Responses of unequal lengths, with the experts of their tokens."""
    network, params = small
    sample = jr.rollout.make_sampler(
        network, max_new_tokens=7, group_size=4, stop_ids=range(90), record_experts=True
    )
    return jax.tree.map(np.asarray, sample(params, jax.random.key(0), PROMPTS))


def routes_of(network, params, rollout, p, g):
    """The experts of one response, which the model reads after its prompt, token by token."""
    n = int(rollout.mask[p, g].sum())
    row = [*PROMPTS[p], *rollout.tokens[p, g, : n - 1].tolist()]
    tokens = jnp.array(row)[None, None]
    context = AttentionContext(jnp.ones(tokens.shape, bool))
    hidden, kv, experts = network.apply_routed(
        params, tokens, jnp.arange(len(row))[None, None], context
    )
    assert hidden.shape[:3] == tokens.shape and len(kv) == PARTS["num_layers"]
    return np.asarray(experts)[0, 0, len(PROMPTS[p]) - 1 :]


@pytest.mark.slow
def test_a_sampler_records_what_the_model_takes(small, rollout):
    assert rollout.experts.shape == (3, 4, 7, 2, 2) and rollout.experts.dtype == np.int16
    lengths = rollout.mask.sum(-1)
    assert lengths.min() < 7 and rollout.experts[rollout.mask].min() == 1
    for p, g in ((0, 0), (1, 2), (2, 3)):
        routes = routes_of(*small, rollout, p, g)
        np.testing.assert_array_equal(rollout.experts[p, g, : lengths[p, g]], routes)


def batch_of(rollout, **changes):
    rewards = np.arange(12, dtype=np.float32).reshape(3, 4) % 3
    return Batch.from_rollout(rollout, rewards).replace(**changes)


def logp_of(small, params, batch, **options):
    score = jax.jit(lambda params, batch: Scorer(small[0], **options)(params, batch).logp)
    return np.asarray(score(params, jax.tree.map(jnp.asarray, batch)))


def test_the_weights_that_sampled_choose_the_same(small, rollout):
    batch = batch_of(rollout)
    replayed = logp_of(small, small[1], batch)
    np.testing.assert_allclose(replayed, logp_of(small, small[1], batch.replace(experts=None)))
    mask = rollout.mask
    np.testing.assert_allclose(replayed[mask], rollout.model_logp[mask], atol=2e-5)


@pytest.mark.slow
def test_other_weights_take_the_experts_of_the_sampler(small, rollout):
    params, batch, mask = moved(small[1], seed=9), batch_of(rollout), rollout.mask
    own = logp_of(small, params, batch.replace(experts=None))
    replayed = logp_of(small, params, batch)
    assert np.abs(replayed - own)[mask].max() > 0.01
    # Given those that these weights choose themselves, they compute what they do without.
    chosen = np.zeros_like(rollout.experts)
    for p, g in np.ndindex(3, 4):
        routes = routes_of(small[0], params, rollout, p, g)
        chosen[p, g, : len(routes)] = routes
    assert (chosen != rollout.experts)[mask].any()
    given = logp_of(small, params, batch.replace(experts=chosen))
    np.testing.assert_allclose(given[mask], own[mask], atol=1e-5)
    # Zeros choose, token by token: what comes before a change does not see it.
    cut = batch.experts * (np.arange(7) < 3)[:, None, None]
    some = logp_of(small, params, batch.replace(experts=cut))
    np.testing.assert_allclose(some[..., :3], replayed[..., :3], atol=1e-6)
    assert np.abs(some - replayed)[mask].max() > 1e-3


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(("packing", "shared"), [("flat", 0), ("always", 0), ("tree", 1)])
def test_every_layout_takes_the_same(small, rollout, packing, shared):
    params = moved(small[1], seed=9)
    batch = batch_of(rollout)
    if shared:  # then prompts are read before responses
        prompts = batch.prompt_tokens.copy()
        prompts[:, 0] = 5
        prompts[1, 1] = 8
        batch = batch.replace(
            prompt_tokens=prompts, prompt_mask=batch.prompt_mask | (np.arange(len(prompts[0])) < 2)
        )
    expected = logp_of(small, params, batch)
    packed, _ = pack_batch(batch, packing, model=small[0], shared_prefix_len=shared)
    assert packed.packing is not None
    options = {"shared_prefix_len": shared, "remat": "full"}
    given = logp_of(small, params, packed, **options)
    np.testing.assert_allclose(given[rollout.mask], expected[rollout.mask], atol=2e-5)


@pytest.mark.slow
def test_responses_share_a_token_only_with_its_experts(small, rollout):
    twins = rollout._replace(
        tokens=np.broadcast_to(rollout.tokens[:, :1], rollout.tokens.shape),
        mask=np.broadcast_to(rollout.mask[:, :1], rollout.mask.shape),
    )
    alike = np.broadcast_to(rollout.experts[:, :1], rollout.experts.shape).copy()
    other = alike.copy()
    other[:, 1:, 0] = 9 - other[:, 1:, 0]
    cells = []
    for experts in (alike, other):
        batch = batch_of(twins._replace(experts=experts))
        packed, _ = pack_batch(batch, "tree", model=small[0])
        cells.append(int((packed.packing.sources >= 0).sum()))
        logp = [logp_of(small, moved(small[1], seed=9), x) for x in (batch, packed)]
        np.testing.assert_allclose(logp[0][twins.mask], logp[1][twins.mask], atol=2e-5)
    assert cells[0] < cells[1]


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "packing"), [({"context": 4}, "flat"), ({"data": 2, "context": 2}, "never")]
)
def test_a_mesh_takes_the_same(small, sizes, packing):
    rng = np.random.default_rng(0)
    batch = make_batch(4, 3, 21, 9)
    experts = 1 + rng.permuted(np.tile(np.arange(8), (4, 3, 21, 2, 1)), axis=-1)[..., :2]
    experts *= rng.random((4, 3, 21, 1, 1)) < 0.8  # the others choose
    batch = batch.replace(experts=experts.astype(np.int16))
    expected = logp_of(small, small[1], batch)
    assert np.abs(expected - logp_of(small, small[1], batch.replace(experts=None))).max() > 0.01
    mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    packed, _ = pack_batch(batch, packing, model=small[0], shards=shards)

    def score(params, batch):
        return Scorer(small[0])(params, batch).logp

    logp = jax.jit(on_mesh(score, mesh))(small[1], place_batch(packed, mesh))
    np.testing.assert_allclose(logp[batch.mask], expected[batch.mask], atol=2e-5)


@pytest.mark.slow
def test_routers_and_experts_learn(small, rollout):
    """The step's loss has the derivative of its value, with the experts held."""
    network, params = small
    params = moved(params, seed=9)
    recipe = jr.recipes.dr_grpo(length=7)
    batch = batch_of(rollout)
    step = make_step(network, recipe, optax.sgd(1.0), donate=False)
    state = init_state(params, optax.sgd(1.0), recipe, key=jax.random.key(0))
    after, _ = step(state, jax.tree.map(jnp.asarray, batch))
    change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.params, params)
    advantages = batch.rewards - batch.rewards.mean(axis=1, keepdims=True)

    def loss(params, batch):
        logp = Scorer(network)(params, batch).logp
        return -jnp.sum(advantages[..., None] * logp) / (12 * 7)

    grad = jax.jit(jax.grad(loss))
    held = grad(params, jax.tree.map(jnp.asarray, batch))
    jax.tree.map(lambda d, g: np.testing.assert_allclose(d, -g, atol=2e-6), change, held)
    chosen = grad(params, jax.tree.map(jnp.asarray, batch.replace(experts=None)))
    for part in ("router", "experts"):
        both = (tree["layers"]["2"]["mlp"][part] for tree in (held, chosen))
        leaves = zip(*map(jax.tree.leaves, both), strict=True)
        assert all(np.abs(x).max() > 0 and np.abs(x - y).max() > 1e-6 for x, y in leaves)


@pytest.mark.slow
def test_a_reference_and_policies_of_earlier_iterations_choose(small, rollout):
    """Of what a step computes, only the policy's numbers depend on the experts."""
    network, params = small
    moving = jr.bind(jr.regularizers.ema_reference, rate=0.25)
    recipe = jr.recipes.grpo(kl_coef=0.1).replace(reference=moving)
    batch = jax.tree.map(jnp.asarray, batch_of(rollout))
    step = flat_step(network, recipe, optax.sgd(1.0), donate=False, minibatches=3)

    def both(recipe, computed):
        state = init_state(moved(params, seed=9), optax.sgd(1.0), recipe, key=jax.random.key(0))
        return [computed(state, x) for x in (batch, batch.replace(experts=None))]

    with_them, without = both(recipe, step.prepared)
    np.testing.assert_allclose(with_them.ref_logp, without.ref_logp, atol=1e-6)
    assert np.abs(with_them.old_logp - without.old_logp).max() > 0.01
    mnpo = jr.recipes.mnpo()
    with_them, without = both(mnpo, lambda s, x: score_batch(x, mnpo, Scorer(network), state=s))
    np.testing.assert_array_equal(with_them.extras["earlier_logp"], without.extras["earlier_logp"])


@pytest.mark.slow
def test_slots_record_what_the_sampler_does(small, rollout):
    network, params = small
    sizes = {"rows": 2, "width": 3, "prompt_length": 4, "max_new_tokens": 7, "chunk": 3}
    engine = make_engine(network, **sizes, stop_ids=range(90), record_experts=True)
    generation = Generation(engine, params, key=jax.random.key(0))
    for i, prompt in enumerate(PROMPTS):
        generation.submit(Group(id=i, prompt=prompt, requests=tuple(range(4 * i, 4 * i + 4))))
    first = next(iter(generation))
    left = generation.stop()  # and others take what was begun, with its experts
    again = Generation(engine, params, key=jax.random.key(0))
    again.submit(*left)
    done = sorted([first, *again], key=lambda x: x.id)
    joined = to_rollout(done, max_new_tokens=7, prompt_width=4)
    np.testing.assert_array_equal(joined.tokens[joined.mask], rollout.tokens[rollout.mask])
    np.testing.assert_array_equal(joined.experts[joined.mask], rollout.experts[rollout.mask])


def test_an_adapter_keeps_what_a_head_does_not(small):
    network, params = small
    config = LoRAConfig(rank=2)
    policy = adapted_model(network, config)
    adapted = Adapted(params, init_lora(params, config))
    tokens = jnp.array([[PROMPTS[0]]])
    call = (tokens, jnp.arange(3)[None, None], AttentionContext(tokens > 0))
    plain, routed = network.apply_routed(params, *call), policy.apply_routed(adapted, *call)
    np.testing.assert_array_equal(plain[2], routed[2])
    scorer, _ = jr.models.with_head(network, params, key=jax.random.key(1))
    assert scorer.apply_routed is None
    with pytest.raises(ValueError, match="record_experts needs a model with experts"):
        jr.rollout.make_sampler(
            tiny_model(num_layers=1)[0], max_new_tokens=2, group_size=1, record_experts=True
        )
    context = call[2]._replace(experts=jnp.zeros((1, 1, 3, 3, 2), jnp.int16))
    with pytest.raises(ValueError, match=r"context.experts must have shape \(1, 1, 3, 2, 2\)"):
        network.apply(params, *call[:2], context)


def run_of(folder, **changes):
    """A run of two optimizer steps a batch, of which the second sees other weights."""
    options = {"model": model, "recipe": "grpo", "router_replay": True, "minibatches": 2}
    options |= {"steps": 2, "optimizer": OptimizerConfig(learning_rate=3e-2)}
    return tiny_run(folder, **options | changes)


@pytest.mark.slow
def test_a_run_replays_and_resumes(tmp_path):
    config = run_of(
        tmp_path / "run",
        sampling=SamplingConfig(group_size=2, max_new_tokens=4, slots=4),
        checkpoint=CheckpointConfig(every=1, keep=2),
        lora=LoRAConfig(rank=4),
    )
    whole = train(config)
    other = dataclasses.replace(config, run_dir=str(tmp_path / "other"), router_replay=False)
    without = train(dataclasses.replace(other, steps=1))
    # The first minibatch of the first batch is that of both, the second is not.
    assert whole.history[0]["reward"] == without.history[0]["reward"]
    assert whole.history[0]["loss"] != without.history[0]["loss"]
    assert_resumes(config, whole, tmp_path / "again")


def test_a_batch_of_a_run_has_the_experts_of_its_tokens(tmp_path):
    experiment, _, rollouts = loaded_batch(run_of(tmp_path))
    batch = rollouts.batch
    assert batch.experts.shape[:3] == batch.mask.shape
    assert batch.experts[batch.mask].min() >= 1 and batch.experts[batch.mask].max() <= 8
    # What a checkpoint keeps of a batch that waits for its step has them too.
    stored = pack_pending(experiment, [rollouts])
    back = unpack_pending(stored.arrays[0], stored.notes["batches"][0]).batch
    np.testing.assert_array_equal(back.experts, batch.experts)


def test_a_plan_counts_the_experts(tmp_path):
    plans = [
        make_plan(config, load_inputs(config))
        for config in (run_of(tmp_path), run_of(tmp_path, router_replay=False))
    ]
    assert "experts of tokens" in str(plans[0]) and "experts of tokens" not in str(plans[1])


@for_each(
    "changes, message",
    [
        ({"model": dense_model}, "router_replay has no effect: the model records no experts"),
        ({"model": denoising_model, "recipe": "bgpo"}, "has no effect with a denoising model"),
        (
            {"recipe": "eggroll", "minibatches": None, "remat": "full"},
            "has no effect with 'eggroll', which has no backward pass",
        ),
    ],
)
def test_a_replay_without_effect_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_experiment(run_of(tmp_path, **changes))
