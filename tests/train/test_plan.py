import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from jax.extend.core import Literal
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.models import make_model, param_shapes
from jaxrl_llm.models.sharding import (
    param_shardings,
    param_spec,
    shard,
    update_shardings,
    update_spec,
)
from jaxrl_llm.testing import tiny_config, tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    OptimizerConfig,
    SamplingConfig,
    fits,
    init_state,
    make_mesh,
    make_optimizer,
    make_step,
)
from jaxrl_llm.train import plan as planning
from jaxrl_llm.train.memory import (
    Batch,
    activation_bytes,
    available_memory,
    cache_bytes,
    logits_bytes,
    tree_bytes,
)
from jaxrl_llm.train.plan import load_subject, make_plan
from jaxrl_llm.train.score import score_hidden

SMALL = {"width": 128, "num_layers": 3, "head_dim": 32, "mlp_width": 384, "max_length": 512}
SMOLLM2 = tiny_config(
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    max_length=2048,
)


def arrays(batch):
    P, G, Lp, T = batch
    shape = jax.ShapeDtypeStruct
    return (
        shape((P, Lp), jnp.int32),
        shape((P, Lp), bool),
        shape((P, G, T), jnp.int32),
        shape((P, G, T), bool),
    )


def traced_bytes(config, batch, remat):
    """What a traced forward pass hands to its backward pass, apart from the parameters."""
    model = make_model(config)

    def run(params, *arrays):
        return jax.vjp(lambda p: score_hidden(model, p, *arrays, remat=remat), params)

    traced = jax.make_jaxpr(run)(param_shapes(model), *arrays(batch)).jaxpr
    given = {id(x) for x in traced.invars}
    made = [x for x in traced.outvars[1:] if not isinstance(x, Literal)]
    kept = {id(x): x.aval for x in made if id(x) not in given}
    return sum(x.size * x.dtype.itemsize for x in kept.values())


def compiled_bytes(config, batch):
    """Temporary memory of a compiled train step without rematerialization, and its estimate."""
    model = make_model(config)
    optimizer, recipe = optax.adamw(1e-3), jr.recipes.dr_grpo(length=batch.length)
    state = jax.eval_shape(
        lambda p: init_state(p, optimizer, recipe, key=jax.random.key(0)), param_shapes(model)
    )
    rollouts = make_batch(batch.prompts, batch.group_size, batch.length, batch.prompt_length)
    step = make_step(model, recipe, optimizer, remat="none")
    given = (state._replace(key=(), data_cursor=()), rollouts, None, ())
    program = jax.jit(step._step, donate_argnums=0).lower(*given).compile()
    estimate = tree_bytes(state.params) + logits_bytes(config.vocab_size)
    estimate += activation_bytes(config, batch, remat="none")
    return program.memory_analysis().temp_size_in_bytes, estimate


def test_activations_are_those_of_a_compiled_step():
    found, estimate = compiled_bytes(tiny_config(**SMALL), Batch(4, 4, 64, 64))
    np.testing.assert_allclose(estimate, found, rtol=0.2)  # copies for attention weigh more here


@pytest.mark.slow
def test_activations_are_those_of_a_compiled_step_of_a_real_size():
    found, estimate = compiled_bytes(SMOLLM2, Batch(2, 8, 192, 64))
    np.testing.assert_allclose(estimate, found, rtol=0.15)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_what_is_kept_is_what_a_trace_keeps(remat):
    config, batch = tiny_config(**SMALL), Batch(4, 4, 64, 64)
    two = dataclasses.replace(config, num_layers=2)
    pair = [activation_bytes(c, batch, remat="none") for c in (config, two)]
    kept = activation_bytes(config, batch, remat=remat) - (pair[0] - pair[1])
    np.testing.assert_allclose(kept, traced_bytes(config, batch, remat), rtol=0.1)


def test_activations_by_hand():
    config, batch = tiny_config(num_layers=1), Batch(2, 3, 5, 7)
    tokens, pairs = 2 * (5 + 21), 2 * (25 + 21 * 12)
    none = 4 * tokens * (4 * 32 + 2 * (32 + 16) + 3 * 64) + 4 * 2 * 4 * pairs
    ends = 4 * 2 * 21 * 32
    assert activation_bytes(config, batch, remat="none") == none + ends
    beside = activation_bytes(config, batch, remat="none", adapter=True)
    assert beside - none - ends == 4 * tokens * 2 * 64
    full = 4 * (tokens * 32 + 2 * 2 * 5 * 16)
    assert activation_bytes(config, batch, remat="full") == full + none + ends
    with pytest.raises(ValueError, match="activation_bytes: remat"):
        activation_bytes(config, batch, remat="some")


def test_bytes_of_a_mesh_are_those_of_its_shards():
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    mesh, params = make_mesh(**axes), tiny_model()[1]
    params = shard(params, param_shardings(params, mesh))
    state = make_optimizer(OptimizerConfig(moment_dtype="bfloat16")).init(params)
    spread = shard(state, update_shardings(state, mesh))
    for tree, spec in ((params, param_spec), (state, param_spec), (spread, update_spec)):
        held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)]
        assert tree_bytes(tree, axes, spec=spec) == sum(held)
        assert tree_bytes(tree) == sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_first_moment_in_half_the_memory():
    params = {"x": jnp.ones((40, 50))}
    whole, half = (
        make_optimizer(OptimizerConfig(learning_rate=0.1, moment_dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    assert tree_bytes(half.init(params)) - tree_bytes(whole.init(params)) == -2 * 2000
    moved = []
    for optimizer in (whole, half):
        state, at = optimizer.init(params), params
        for _ in range(5):
            changes, state = optimizer.update(jax.tree.map(lambda x: x - 0.5, at), state, at)
            at = optax.apply_updates(at, changes)
        moved.append(at["x"])
    np.testing.assert_allclose(*moved, rtol=0.01)
    with pytest.raises(ValueError, match="optimizer: moment_dtype"):
        OptimizerConfig(moment_dtype="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_is_that_of_the_engine(dtype):
    model = make_model(tiny_config(width=64, num_layers=2, head_dim=16, dtype=dtype))
    sizes = {"rows": 2, "width": 3, "prompt_length": 64, "max_new_tokens": 32}
    engine = jr.rollout.make_engine(model, **sizes)
    found = cache_bytes(model.config, prompts=2, prompt_length=64, slots=6, length=32)
    np.testing.assert_allclose(found, 2 * engine.row_bytes, rtol=0.05)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The plan of a tiny run with some changes, as of an accelerator."""
    config = tiny_run(tmp_path_factory.mktemp("plan"), remat="none")
    subject = load_subject(config)

    def plan(**changes):
        return make_plan(dataclasses.replace(config, **changes), subject, accelerator=True)

    return config, subject, plan


def test_a_plan_reads_no_weights(plans):
    config, subject, _ = plans
    live = len(jax.live_arrays())
    assert load_subject(config).longest == subject.longest == 16  # q00 in the smallest bucket
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(subject.params))
    assert len(jax.live_arrays()) == live


def test_a_function_that_looks_at_values_is_called(plans):
    def model():
        model, params, tokenizer = config.model()
        assert float(params["norm"]["scale"].sum()) == 32
        return model, params, tokenizer

    config, subject, _ = plans
    found = load_subject(dataclasses.replace(config, model=model))
    assert jax.tree.map(jnp.shape, found.params) == jax.tree.map(jnp.shape, subject.params)


def test_what_a_plan_counts(plans):
    _, subject, plan = plans
    numbers = jr.core.trees.size(subject.params)
    whole = plan()
    assert whole.state == {"weights": 4 * numbers, "optimizer": 8 * numbers + 4}
    assert whole.step["gradients"] == 4 * numbers
    assert whole.peak == whole.held + max(sum(whole.step.values()), sum(whole.sampling.values()))
    parts = plan(microbatches=2)
    assert parts.step["gradients"] == 8 * numbers
    assert parts.step["activations"] == whole.step["activations"] / 2
    assert plan(remat="full").step["activations"] >= whole.step["activations"]  # of one layer
    assert plan(recipe="grpo").state["reference"] == 4 * numbers
    half = plan(optimizer=OptimizerConfig(moment_dtype="bfloat16"))
    assert half.state["optimizer"] == 6 * numbers + 4
    spread = plan(mesh=MeshConfig(fsdp=2), prompts_per_step=4)
    assert spread.step["activations"] == whole.step["activations"] / 2
    assert spread.state["weights"] < 0.6 * 4 * numbers and spread.step["weights gathered"] > 0
    spread = plan(mesh=MeshConfig(data=2), prompts_per_step=4)
    assert spread.state["weights"] == 4 * numbers
    assert spread.state["optimizer"] < 0.6 * 8 * numbers
    table = max(x.size for x in jax.tree.leaves(subject.params))
    assert 4 * table < spread.step["gradients"] < 0.6 * 4 * numbers + 4 * table
    ahead = plan(asynchrony=AsyncConfig(max_staleness=1))
    assert ahead.together and ahead.sampling["weights of the sampler"] == 8 * numbers
    assert ahead.peak > whole.peak


def test_an_adapter_takes_little(plans):
    _, subject, plan = plans
    small = plan(lora=LoRAConfig(rank=4), recipe="grpo")
    numbers = 2048
    assert small.step["gradients"] == 4 * numbers
    assert small.state == {
        "weights": 4 * (jr.core.trees.size(subject.params) + numbers),
        "optimizer": 8 * numbers + 4,
    }  # its reference is the base


def test_evolution_keeps_no_activations_but_its_members(plans):
    _, subject, plan = plans
    sgd = OptimizerConfig(name="sgd", b1=0.0, max_grad_norm=None)
    given = {"recipe": "eggroll", "optimizer": sgd, "remat": "full"}
    adam = {"recipe": "eggroll", "remat": "full", "prompts_per_step": 4}
    spread = plan(**adam, mesh=MeshConfig(data=2)).state
    assert spread == plan(**adam).state  # each device makes the whole update
    evolved = plan(**given, sampling=SamplingConfig(group_size=6, max_new_tokens=4))
    drawn = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)  # q and o, k and v, the MLP
    assert evolved.state["optimizer"] == 0
    assert evolved.step == {
        "gradients": 4 * jr.core.trees.size(subject.params),
        "noise of an update": 4 * 6 * drawn,
    }
    assert evolved.sampling["members"] == 4 * 3 * drawn


def test_slots_and_the_evaluation_decide_the_cache(plans):
    config, subject, plan = plans
    one = cache_bytes(subject.model.config, prompts=1, prompt_length=16, slots=1, length=4)
    whole = plan().sampling["cache of the sampler"]
    slots = dataclasses.replace(config.sampling, slots=2)
    assert plan(sampling=slots).sampling["cache of the sampler"] == 2 * one < whole
    several = subject._replace(held_out=100)
    evaluated = dataclasses.replace(config, evaluation=EvaluationConfig())
    greedy = make_plan(evaluated, several).sampling["cache of the sampler"]
    assert greedy == 8 * one > whole  # as many prompts as a batch has rows


def test_what_fits_and_which_option_helps(plans):
    config = dataclasses.replace(plans[0], sampling=SamplingConfig(group_size=4, max_new_tokens=64))
    peak = make_plan(config, load_subject(config), accelerator=True).peak
    text = fits.plan_text(config, memory=1.1 * peak)
    assert text.endswith("It fits.") and "activations" in text and "weights" in text
    with pytest.raises(fits.NoRoom) as error:
        fits.plan_text(config, memory=0.9 * peak)
    text = str(error.value)
    assert "It does not fit" in text
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    known = (
        "microbatches 2",
        "microbatches 4",
        "max-new-tokens 32",
        "mesh.data -1",
        "mesh.fsdp -1",
    )
    assert all(any(name in line for line in lines) for name in known), text
    assert "lora" not in text  # the activations decide, of which an adapter takes nothing away
    assert any(line.endswith("fits") for line in lines if "microbatches 4" in line)
    assert "It fits." in fits.plan_text(config)  # the machine that is here has more
    assert 2**28 < available_memory(8) <= available_memory()


def test_a_state_that_is_more_than_the_device_is_refused(plans, monkeypatch):
    config, subject, _ = plans
    shapes = (subject.model, subject.params, config.model()[2])
    with monkeypatch.context() as patch:
        patch.setattr(planning, "abstract_model", lambda config: shapes)
        config = dataclasses.replace(config, model="owner/name")
        fits.check_held(config)
        patch.setattr(fits, "available_memory", lambda devices: 100_000)
        with pytest.raises(
            fits.NoRoom, match=r"206.* KiB on each device \(weights 68.*--lora.rank 16"
        ):
            fits.check_held(config)
        fits.check_held(dataclasses.replace(config, lora=LoRAConfig(rank=2)))
        fits.check_held(plans[0])  # a function has allocated its weights by then
        patch.setattr(fits, "available_memory", lambda devices: None)
        fits.check_held(config)
        assert fits.plan_text(plans[0]).endswith("does not tell how much memory it has.")
