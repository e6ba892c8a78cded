"""Squared norms of the gradients of responses, beside gradients that each test takes itself.

    norms[p, g] = || grad sum_t logp[p, g, t] ||^2    over the tokens of a response that train

Of a softmax over fixed hidden states h the gradient is sum_t (e_y - pi) h^T / temperature. Layouts,
microbatches and devices change nothing; a response without such a token has 0 and costs nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from on_meshes import mesh_of
from rows import for_each
from step_makers import flat_step, state_of
from step_makers import one_layer as tiny
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core.packing import plan_packing, plan_tree, row_trees
from jaxrl_llm.core.support import Support
from jaxrl_llm.models import ExpertsConfig, param_shardings
from jaxrl_llm.models.sharding import batch_shards, on_mesh, shard
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    Adapted,
    AsyncConfig,
    LoRAConfig,
    Scorer,
    adapted_model,
    init_lora,
    init_state,
    make_step,
    merge_lora,
    pack_batch,
    score_batch,
    score_sq_norms,
    train,
)
from jaxrl_llm.train.batches import Passes
from jaxrl_llm.train.mesh import place_batch

pytestmark = pytest.mark.usefixtures("shared_programs")

TEMPERATURE = 0.7


def small_batch():
    """Responses of unequal lengths: one is empty, one has a hole, one takes no part."""
    batch = make_batch(prompts=2, group=3, length=6)
    mask = np.arange(6) < np.array([[6, 2, 3], [4, 0, 5]])[..., None]
    mask[1, 2, 1:3] = False  # as of tokens that an environment wrote
    where = jnp.ones((2, 3), bool).at[0, 2].set(False)
    return batch.replace(mask=jnp.asarray(mask), where=where)


BATCH = small_batch()
NONE = np.array([[False, False, True], [False, True, False]])  # without a token to train on


@functools.cache
def measured(model, temperature=TEMPERATURE, **options):
    scorer = Scorer(model, temperature, **options)
    return jax.jit(lambda params, batch, base=(): score_sq_norms(scorer, params, batch, base=base))


def sq_norm(grads):
    leaves = (np.asarray(x, np.float64) for x in jax.tree.leaves(grads))
    return sum((x**2).sum() for x in leaves)


def of_each(logp_of, params, batch):
    """Squared norms from one gradient of the whole batch's log-probabilities for each response."""

    @jax.jit
    def grads(params, member):
        def total(params):
            return jnp.sum(jnp.where(member, logp_of(params), 0.0))

        return jax.grad(total)(params)

    found = np.zeros(batch.where.shape)
    for place in zip(*np.nonzero(batch.where), strict=True):
        member = jnp.zeros(batch.mask.shape, bool).at[place].set(True)
        found[place] = sq_norm(grads(params, member))
    return found


@functools.cache
def expected():
    model, params = tiny()
    scorer = Scorer(model, TEMPERATURE)
    return of_each(lambda p: scorer(p, BATCH).logp, params, BATCH)


def test_worked_numbers_of_a_softmax():
    """A model whose hidden states do not move: the gradient is sum (e_y - pi) h^T / T."""
    model, params = tiny()
    rng = np.random.default_rng(0)
    table = rng.normal(size=(259, 4)).astype(np.float32)
    params = {"w": jnp.asarray(rng.normal(size=(259, 4)), jnp.float32)}

    def apply(params, tokens, positions, context, *, delta=None, remat="none"):
        return jnp.asarray(table)[tokens], ()

    model = model._replace(apply=apply, output_matrix=lambda params: params["w"])
    want = np.zeros(BATCH.where.shape)
    for p, g in np.ndindex(want.shape):
        mask = np.asarray(BATCH.mask[p, g]) & bool(BATCH.where[p, g])
        tokens = np.asarray(BATCH.tokens[p, g])
        last = np.asarray(BATCH.prompt_tokens[p])[np.asarray(BATCH.prompt_mask[p]).sum() - 1]
        hidden = np.float64(table)[np.concatenate([[last], tokens[:-1]])] / TEMPERATURE
        logits = hidden @ np.float64(params["w"]).T
        chance = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
        error = (np.eye(259)[tokens] - chance) * mask[:, None]
        want[p, g] = ((error.T @ hidden) ** 2).sum()
    got = measured(model)(params, BATCH)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got.dtype == jnp.float32


def test_equals_a_gradient_of_each_response_alone():
    model, params = tiny()
    got = measured(model)(params, BATCH)
    np.testing.assert_allclose(got, expected(), rtol=1e-5)
    assert (np.asarray(got == 0) == NONE).all()


def test_what_is_masked_is_never_read():
    model, params = tiny()
    trains = BATCH.mask & BATCH.where[..., None]
    after = jnp.flip(jnp.cumsum(jnp.flip(trains, -1), -1), -1) == 0  # behind the last
    junk = BATCH.replace(
        tokens=jnp.where(after, 10_000, BATCH.tokens),
        prompt_tokens=jnp.where(BATCH.prompt_mask, BATCH.prompt_tokens, -5),
        rewards=jnp.full((2, 3), jnp.nan),
    )
    np.testing.assert_array_equal(measured(model)(params, junk), measured(model)(params, BATCH))


EXPERTS = {"experts": ExpertsConfig(count=8, active=2, width=16, bias=True, limit=7.0)}


def with_support():
    ids = np.random.default_rng(2).integers(0, 259, (2, 3, 6, 9))
    ids[..., 0] = BATCH.tokens
    return {"support": Support(ids=jnp.asarray(ids, jnp.int32))}


def rewritten():
    """Responses that are read as they were."""
    ends = np.broadcast_to([6, 3, 3, 6, 6, 6], BATCH.mask.shape)
    return {"packing": jax.tree.map(jnp.asarray, row_trees(ends))}


def with_experts():
    """The experts that sampled are taken again."""
    first = np.random.default_rng(4).integers(0, 8, (*BATCH.mask.shape, 1, 1))
    experts = 1 + np.concatenate([first, (first + 3) % 8], axis=-1)
    return {"experts": jnp.asarray(experts, jnp.int16)}


@pytest.mark.slow
@for_each(
    "changes, temperature, parts",
    [(with_support, 1.3, {}), (rewritten, TEMPERATURE, {}), (with_experts, TEMPERATURE, EXPERTS)],
)
def test_norms_are_of_the_policy_as_it_is_read(changes, temperature, parts):
    model, params = tiny_model(num_layers=1, **parts)
    batch, scorer = BATCH.replace(**changes()), Scorer(model, temperature)
    want = of_each(lambda p: scorer(p, batch).logp, params, batch)
    np.testing.assert_allclose(measured(model, temperature)(params, batch), want, rtol=1e-4)
    assert not np.allclose(want[0, 0], measured(model)(params, BATCH)[0, 0], rtol=1e-3)


RECIPE = jr.recipes.vcpo()


def rows_of(layout):
    tokens, mask = np.asarray(BATCH.tokens), np.asarray(BATCH.mask)
    if layout == "packed":
        return BATCH.replace(packing=jax.tree.map(jnp.asarray, plan_packing(mask, size=12)))
    if layout == "tree":
        return BATCH.replace(packing=jax.tree.map(jnp.asarray, plan_tree(tokens, mask, size=12)))
    host = jax.tree.map(np.asarray, BATCH)
    flat, _ = pack_batch(host, "flat", model=tiny()[0], passes=Passes(microbatches=2))
    return flat


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "tree", "flat", "shared"])
def test_any_layout_and_microbatches_have_the_norms_of_padded_rows(layout):
    model, params = tiny()
    options, batch = {"remat": "full"}, BATCH
    if layout == "shared":
        same = jnp.broadcast_to(BATCH.prompt_tokens[1], BATCH.prompt_tokens.shape)
        batch = BATCH.replace(prompt_tokens=same, prompt_mask=jnp.ones(same.shape, bool))
        want = measured(model)(params, batch)
        options["shared_prefix_len"] = 3
    else:
        batch, want = rows_of(layout), expected()
        assert batch.packing is not None
    batch = batch.replace(old_logp=jnp.zeros(BATCH.mask.shape), behavior_logp=jnp.zeros((2, 3, 6)))
    state = state_of(RECIPE, optax.sgd(1.0))
    scorer = Scorer(model, TEMPERATURE, **options)
    scored = jax.jit(lambda s, b: score_batch(b, RECIPE, scorer, state=s, microbatches=2))
    np.testing.assert_allclose(
        scored(state, batch).extras["grad_sq_norms"], want, rtol=1e-5, atol=1e-6
    )


def test_of_an_adapter_only_its_matrices_count():
    model, params = tiny()
    config = LoRAConfig(rank=2)
    adapted, adapter = adapted_model(model, config), init_lora(params, config)
    adapter = jax.tree.map(lambda x: x + 0.05, adapter)
    scorer = Scorer(model, TEMPERATURE)

    def merged_logp(adapter):
        return scorer(merge_lora(Adapted(params, adapter), config), BATCH).logp

    want = of_each(merged_logp, adapter, BATCH)
    got = measured(adapted)(adapter, BATCH, params)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert not np.allclose(want, expected(), rtol=0.1)


class Counted:
    """A model whose layers count on the host how often they run."""

    def __init__(self):
        model, self.params = tiny()
        self.runs = 0

        def apply(params, tokens, positions, context, *, delta=None, remat="none"):
            jax.debug.callback(self.add)
            return model.apply(params, tokens, positions, context, delta=delta, remat=remat)

        self.model = model._replace(apply=apply)

    def add(self):
        self.runs += 1

    def of(self, run):
        self.runs = 0
        out = jax.block_until_ready(run())
        jax.effects_barrier()
        return out, self.runs


@pytest.mark.slow
def test_devices_skip_responses_at_the_same_time():
    """A response of each, at another place on each of four devices: none waits for the others."""
    counted, mesh, batch = Counted(), mesh_of({"data": 4}), make_batch(4, 4, 6, 5)
    scorer = Scorer(counted.model, TEMPERATURE)
    norms = jax.jit(on_mesh(functools.partial(score_sq_norms, scorer), mesh))
    params = shard(counted.params, param_shardings(counted.params, mesh, tiny()[0].sharding_rules))
    runs = {}
    for name, where in {"first": jnp.arange(4) < 1, "own": jnp.eye(4, dtype=bool)}.items():
        part = batch.replace(where=jnp.broadcast_to(where, (4, 4)))
        got, runs[name] = counted.of(lambda part=part: norms(params, place_batch(part, mesh)))
        np.testing.assert_allclose(got, measured(tiny()[0])(tiny()[1], part), rtol=1e-5)
    assert runs["own"] == runs["first"] > 0


def scored_of(recipe, batch):
    """What a train step computes for a recipe, and how often the layers ran."""
    counted = Counted()
    state = state_of(recipe, optax.sgd(1.0))
    scorer = Scorer(counted.model, TEMPERATURE)
    scored = jax.jit(lambda s, b: score_batch(b, recipe, scorer, state=s))
    return counted.of(lambda: scored(state, batch))


@pytest.mark.slow
def test_groups_of_equal_rewards_cost_nothing_and_change_nothing():
    recipe = jr.recipes.vcpo()
    logp = jnp.full(BATCH.mask.shape, -5.0)
    batch = BATCH.replace(old_logp=logp, behavior_logp=logp + 0.1 * BATCH.tokens % 0.3)
    batch = batch.replace(rewards=jnp.array([[0.5, 0.5, jnp.nan], [0.0, 1.0, 1.0]]))
    scored, runs = scored_of(recipe, batch)
    norms = scored.extras["grad_sq_norms"]
    assert not np.any(norms[0]) and runs == 2  # of six: one of the others is empty
    np.testing.assert_allclose(norms[1], expected()[1], rtol=1e-5)
    brought = batch.with_extras({"grad_sq_norms": jnp.asarray(expected(), jnp.float32)})
    (got, _), (want, _) = (recipe.prepare(x, recipe.init()) for x in (scored, brought))
    np.testing.assert_allclose(got.advantages, want.advantages, rtol=1e-5)
    assert np.any(got.advantages) and not np.any(got.advantages[0])


@pytest.mark.slow
def test_what_reads_norms_elsewhere_has_those_of_all_responses():
    """Of an advantage that is not 0 in a group of equal rewards, or of another slot."""
    logp = jnp.zeros(BATCH.mask.shape)
    batch = BATCH.replace(old_logp=logp, behavior_logp=logp, rewards=jnp.ones((2, 3)))

    def selected(advantages, mask, *, grad_sq_norms):
        return mask & (grad_sq_norms < 1e9)[..., None]

    raw = jr.stateless(lambda rewards, *, grad_sq_norms: rewards * grad_sq_norms)
    for recipe in (RECIPE.replace(selection=selected), RECIPE.replace(advantage=raw)):
        scored, _ = scored_of(recipe, batch)
        np.testing.assert_allclose(scored.extras["grad_sq_norms"], expected(), rtol=1e-5)


@pytest.mark.slow
def test_texts_have_none():
    texts = jnp.array([[True] * 3, [False] * 3])
    logp = jnp.zeros(BATCH.mask.shape)
    batch = BATCH.replace(old_logp=logp, behavior_logp=logp, extras={"texts": texts})
    scored, runs = scored_of(RECIPE.replace(text_coef=1.0), batch)
    assert not np.any(scored.extras["grad_sq_norms"][0]) and runs == 2


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"data": 4}, {}),
        ({"fsdp": 4}, {"num_layers": 2, "scan_layers": True}),
        ({"data": 2, "context": 2}, {}),
        ({"data": 2, "expert": 2, "tensor": 2}, EXPERTS),
        ({"data": 8}, {}),  # which does not divide the prompts
    ],
)
def test_devices_of_a_mesh_compute_the_norms_of_one(sizes, parts):
    model, params = tiny_model(**{"num_layers": 1} | parts)
    mesh, batch = mesh_of(sizes), make_batch(4, 3, 6, 5)
    batch = batch.replace(where=batch.where.at[:, 0].set(False))  # all devices skip these
    want = measured(model)(params, batch)
    assert (np.asarray(want == 0) == [[True, False, False]] * 4).all()
    spread = shard(params, param_shardings(params, mesh, model.sharding_rules))
    function = on_mesh(functools.partial(score_sq_norms, Scorer(model, TEMPERATURE)), mesh)
    if batch_shards(mesh) <= 4:
        batch = place_batch(batch, mesh)
    program = jax.jit(function).lower(spread, batch).compile()
    np.testing.assert_allclose(program(spread, batch), want, rtol=1e-5)
    if sizes == {"data": 4}:  # of gradients, nothing goes from one device to another
        lines = [x for x in program.as_text().splitlines() if " all-" in x or " reduce-sc" in x]
        assert lines and all(" = pred[]" in x for x in lines)


def stepped(recipe, batch, params, **options):
    model = tiny()[0]
    state = init_state(params, optax.sgd(0.5), recipe, key=jax.random.key(0))
    step = flat_step(model, recipe, optax.sgd(0.5), temperature=TEMPERATURE, **options)
    prepared = step.prepared(state, batch)
    after, metrics = step(state, batch)
    assert metrics["updates"] == 1
    return prepared, jax.device_get(after.params)


@pytest.mark.slow
def test_a_step_reads_the_norms_of_its_first_policy():
    """Its update is that of a batch that brings them, and not that of lengths."""
    params = tiny()[1]
    copies = functools.partial(jax.tree.map, jnp.copy, params)
    rng = np.random.default_rng(5)
    behavior = rng.normal(-5.5, 0.3, BATCH.mask.shape).astype(np.float32)
    batch = BATCH.replace(
        behavior_logp=jnp.asarray(behavior), rewards=jnp.array([[1.0, 0.2, 0.5], [0.1, 0.9, 0.7]])
    )
    prepared, after = stepped(RECIPE, batch, copies(), microbatches=2)
    norms = expected()
    np.testing.assert_allclose(prepared.extras["grad_sq_norms"], norms, rtol=1e-5)
    want = jr.advantages.vcpo_advantage(
        batch.rewards,
        old_logp=prepared.old_logp,
        behavior_logp=behavior,
        mask=batch.mask,
        where=batch.where,
        grad_sq_norms=jnp.asarray(norms, jnp.float32),
    )
    np.testing.assert_allclose(prepared.advantages, want, rtol=1e-4, atol=1e-5)
    brought = batch.with_extras({"grad_sq_norms": jnp.asarray(norms, jnp.float32)})
    _, same = stepped(RECIPE, brought, copies())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), after, same)
    lengths, other = stepped(jr.recipes.vcpo(norms="length"), batch, copies())
    assert "grad_sq_norms" not in lengths.extras
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, other)
    assert max(jax.tree.leaves(changes)) > 1e-4


@pytest.mark.slow
def test_a_step_takes_no_more_memory_with_norms():
    """A gradient is reduced leaf by leaf, and ends before that of the update begins."""
    model, params = tiny_model(num_layers=2, width=128, mlp_width=256)
    mesh, batch = mesh_of({"data": 4}), make_batch(8, 4, 16, 8)
    batch = place_batch(batch.replace(behavior_logp=-1.0 * batch.mask), mesh)
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh, model.sharding_rules))
    memory = []
    for norms in ("length", "exact"):
        recipe, optimizer = jr.recipes.vcpo(norms=norms), optax.sgd(1.0)
        state = init_state(params, optimizer, recipe, key=jax.random.key(0), mesh=mesh)
        step = make_step(model, recipe, optimizer, mesh=mesh, microbatches=2)
        memory.append(step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes)
    assert memory[1] <= 1.02 * memory[0]


def model():
    return *tiny(), ByteTokenizer()


@pytest.mark.slow
def test_a_run_of_the_preset_computes_them(tmp_path):
    """Three steps of an adapter on data up to two updates old."""
    changes = {"lora": LoRAConfig(rank=2), "asynchrony": AsyncConfig(max_staleness=2)}
    run = train(tiny_run(tmp_path, recipe="vcpo", model=model, steps=3, **changes))
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in run.history)
    assert any(row["update_norm"] > 0 for row in run.history)


def test_a_likelihood_of_a_denoiser_has_none():
    advantage = jr.stateless(lambda rewards, *, grad_sq_norms: rewards)
    with pytest.raises(ValueError, match="reads grad_sq_norms, which only a causal model has"):
        jr.recipes.diffu_grpo().replace(advantage=advantage)
