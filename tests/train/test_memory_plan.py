"""What a run will need of each device's memory, counted before anything is allocated.

    resident = weights + optimizer + reference + ...    (each device's part of a mesh)
    peak = resident + max(step, sampling), or their sum where the sampler is ahead of the step

Of n parameters in float32: weights 4 n, AdamW 8 n + 4, gradients 4 n, and 8 n with microbatches;
activations as a compiled step has them; a cache as the engine has it.
"""

import dataclasses
import gc
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from jax.extend.core import Literal
from on_meshes import mesh_of
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core.runtime.memory import available_memory
from jaxrl_llm.core.support import Support
from jaxrl_llm.models import (
    ExpertsConfig,
    LayerKind,
    LinearAttentionConfig,
    make_model,
    param_shapes,
)
from jaxrl_llm.models.gated_delta import empty_state
from jaxrl_llm.models.sharding import (
    kv_sharding,
    param_shardings,
    param_spec,
    shard,
    update_shardings,
    update_spec,
)
from jaxrl_llm.rollout.sampling.options import DrawOptions
from jaxrl_llm.testing import ByteTokenizer, tiny_config, tiny_flow_model, tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    OptimizerConfig,
    SamplingConfig,
    init_state,
    make_mesh,
    make_optimizer,
    make_step,
)
from jaxrl_llm.train.memory import memory_plan
from jaxrl_llm.train.memory.memory_bytes import (
    BatchShape,
    LayerPlacement,
    activation_bytes,
    cache_bytes,
    largest_layer_bytes,
    logits_bytes,
    recorded_bytes,
    tree_bytes,
)
from jaxrl_llm.train.memory.memory_plan import lay_out, load_inputs, make_plan
from jaxrl_llm.train.models.score import score_hidden
from jaxrl_llm.train.update.init import abstract_batch, abstract_state
from jaxrl_llm.train.update.part import Part

ROOT = Path(__file__).parents[1]


SMALL = {"width": 128, "num_layers": 3, "head_dim": 32, "mlp_width": 384, "max_length": 512}


EXPERTS = {"experts": ExpertsConfig(count=8, active=3, width=96)}


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
    shapes = ((P, Lp), jnp.int32), ((P, Lp), bool), ((P, G, T), jnp.int32), ((P, G, T), bool)
    return [jax.ShapeDtypeStruct(*x) for x in shapes]


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


def compiled_bytes(config, batch, *, expert=1):
    """Temporary memory of a compiled train step without rematerialization, and its estimate.

    ``batch`` is what a device has, of as many as the axis ``expert`` has.
    """
    model, sizes = make_model(config), {"expert": expert}
    mesh, (prompts, group_size, width, length) = mesh_of(sizes), batch
    optimizer, recipe = optax.adamw(1e-3), jr.recipes.dr_grpo(length=length)
    state = abstract_state(param_shapes(model), optimizer, recipe, mesh=mesh)
    shape = (expert * prompts, group_size, length)
    rollouts = abstract_batch(*shape, prompt_length=width, mesh=mesh)
    step = make_step(model, recipe, optimizer, remat="none", mesh=mesh)
    program = step.lower(state, rollouts).compile()
    estimate = tree_bytes(state.params, sizes, spec=update_spec)
    estimate += logits_bytes(config.vocab_size, math.prod(shape), config.width, mesh=sizes)
    estimate += activation_bytes(config, batch, remat="none", on=LayerPlacement(expert=expert))
    return program.memory_analysis().temp_size_in_bytes, estimate


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "config, batch, expert, rtol",
    [
        (tiny_config(**SMALL), (4, 4, 64, 64), 1, 0.2),  # copies for attention weigh more here
        (SMOLLM2, (2, 8, 192, 64), 1, 0.15),
        (tiny_config(**SMALL | {"max_length": 3072}), (1, 2, 2048, 1024), 1, 0.25),  # no square
        (tiny_config(**SMALL, **EXPERTS), (4, 4, 64, 64), 2, 0.2),
    ],
    ids=["small", "real", "long", "experts"],
)
def test_activations_are_those_of_a_compiled_step(config, batch, expert, rtol):
    found, estimate = compiled_bytes(config, BatchShape(*batch), expert=expert)
    np.testing.assert_allclose(estimate, found, rtol=rtol)


@for_each("experts", [{}, EXPERTS])
@for_each("remat", ["full", "dots"])
def test_what_is_kept_is_what_a_trace_keeps(remat, experts):
    config, batch = tiny_config(**SMALL, **experts), BatchShape(4, 4, 64, 64)
    two = dataclasses.replace(config, num_layers=2)
    pair = [activation_bytes(c, batch, remat="none") for c in (config, two)]
    kept = activation_bytes(config, batch, remat=remat) - (pair[0] - pair[1])
    np.testing.assert_allclose(kept, traced_bytes(config, batch, remat), rtol=0.1)


def test_activations_by_hand():
    config, batch = tiny_config(num_layers=1), BatchShape(2, 3, 5, 7)
    tokens, pairs = 2 * (5 + 21), 2 * (25 + 21 * 12)
    none = 4 * tokens * (4 * 32 + 2 * (32 + 16) + 3 * 64)
    none += 4 * 4 * pairs + 4 * 2 * (5 + 2 * 21) * 4 * (8 + 1)
    ends = 4 * 2 * 21 * 32
    assert activation_bytes(config, batch, remat="none") == none + ends
    beside = activation_bytes(config, batch, remat="none", adapter=True)
    assert beside - none - ends == 4 * tokens * 2 * 64
    capped = dataclasses.replace(config, attention_cap=50.0)
    assert activation_bytes(capped, batch, remat="none") == none + ends
    for c, more in ((config, 1), (capped, 2)):  # scores that XLA's gradients keep elsewhere
        elsewhere = activation_bytes(c, batch, remat="none", on=LayerPlacement(accelerator=True))
        assert elsewhere == none + ends + more * 4 * 4 * pairs
    experts = {"experts": EXPERTS["experts"], "layers": (LayerKind(), LayerKind(dense=True))}
    mixed = dataclasses.replace(config, num_layers=2, **experts)
    more = 4 * tokens * (3 * (3 * 96 - 64) + 2 * (8 + 3 * 32))
    assert activation_bytes(mixed, batch, remat="none") == 2 * none + ends + more
    full = 4 * (tokens * 32 + 2 * 2 * 5 * 16)
    assert activation_bytes(config, batch, remat="full") == full + none + ends
    with pytest.raises(ValueError, match="activation_bytes: remat"):
        activation_bytes(config, batch, remat="some")


def test_bytes_of_a_mesh_are_those_of_its_shards():
    # Bytes of a mesh are those of its shards.
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    mesh, params = make_mesh(**axes), tiny_model()[1]
    params = shard(params, param_shardings(params, mesh))
    state = make_optimizer(OptimizerConfig(moment_dtype="bfloat16")).init(params)
    spread = shard(state, update_shardings(state, mesh))
    for tree, spec in ((params, param_spec), (state, param_spec), (spread, update_spec)):
        held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)]
        assert tree_bytes(tree, axes, spec=spec) == sum(held)
        assert tree_bytes(tree) == sum(x.nbytes for x in jax.tree.leaves(tree))

    # States of linear attention are split by their heads.
    sizes = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=4, value_dim=8)
    kinds = {"layers": (LayerKind(linear=True),), "linear_attention": sizes}
    config = tiny_config(num_layers=1, num_kv_heads=1, **kinds)
    mesh = make_mesh(tensor=4, devices=jax.devices()[:4])
    states = jax.tree.leaves(jax.eval_shape(lambda: empty_state(sizes, (6,), config.dtype)))
    held = [math.prod(kv_sharding(x.shape, mesh).shard_shape(x.shape)) for x in states]
    assert sum(held) < sum(x.size for x in states)
    shape = {"prompts": 2, "prompt_length": 8, "slots": 4, "length": 8, "recorded": 0}
    assert cache_bytes(config, **shape, split=4) == 4 * sum(held)


@for_each(
    "dtype, filters",
    [("float32", {}), ("bfloat16", {}), ("float32", {"top_p": 0.9}), ("float32", {"top_k": 40})],
)
def test_a_cache_is_that_of_the_engine(dtype, filters):
    model = make_model(tiny_config(width=64, num_layers=2, head_dim=16, dtype=dtype))
    sizes = {"rows": 2, "width": 3, "prompt_length": 64, "max_new_tokens": 32}
    engine = jr.rollout.make_engine(model, **sizes, **filters)
    recorded, support = recorded_bytes(model.config.vocab_size, DrawOptions(**filters))
    assert support == sum({"top_p": 4 * 9, "top_k": 4 * 40}[name] for name in filters)
    sizes = {"prompts": 2, "prompt_length": 64, "slots": 6, "length": 32}
    found = cache_bytes(model.config, **sizes, recorded=recorded)
    np.testing.assert_allclose(found, 2 * engine.row_bytes, rtol=0.05)


@dataclasses.dataclass(frozen=True)
class TwoCopies(jr.recipes.RecipePart):
    def step_part(self, setup):
        return Part("copies", lambda recipe, start: (start.params, start.params))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("plan"), remat="none")


@pytest.fixture(scope="module")
def inputs(config):
    return load_inputs(config)


@pytest.fixture
def plan(config, inputs):
    """The plan of a tiny run with some changes, as of an accelerator."""

    def plan(inputs=inputs, **changes):
        return make_plan(changed(config, **changes), inputs, accelerator=True)

    return plan


def changed(config, **changes):
    """A config with changes; a dict changes some fields of a part, such as ``sampling``."""
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = dataclasses.replace(getattr(config, name), **value)
    return dataclasses.replace(config, **changes)


def plan_of(config, **changes):
    """The plan of a config whose inputs are its own."""
    config = changed(config, **changes)
    return make_plan(config, load_inputs(config), accelerator=True)


RANK_4 = LoRAConfig(rank=4)
ADAPTER = 2048  # its numbers
CACHE, LOGITS = "cache of the sampler", "logits of the sampler"


def in_dtype(inputs, **changes):
    """The inputs with a model that computes in another dtype, or rounds."""
    return inputs._replace(model=make_model(dataclasses.replace(inputs.model.config, **changes)))


def numbers_of(inputs, *, dims=1, linear=False):
    """How many numbers the parameters are; of matrices alone, or of linear layers."""
    return sum(
        x.size
        for path, x in jax.tree_util.tree_leaves_with_path(inputs.params)
        if x.ndim >= dims and (not linear or jr.core.trees.path_str(path).startswith("layers"))
    )


def test_a_plan_reads_no_weights(config, inputs):
    gc.collect()  # of other tests' arrays, some may still wait for this
    live = len(jax.live_arrays())
    found = load_inputs(config)
    assert found.longest_prompt == inputs.longest_prompt == 16
    assert found.slot_prompt == 3  # without padding
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(inputs.params))
    assert len(jax.live_arrays()) == live


def test_where_the_model_of_a_plan_comes_from(config, inputs, tmp_path, monkeypatch):
    model, params, tokenizer = config.model()

    def looks():  # a function that looks at values is called
        assert float(params["norm"]["scale"].sum()) == 32
        return model, params, tokenizer

    state = init_state(params, optax.sgd(0.1), jr.recipes.grpo(), key=jax.random.key(0))
    jr.train.save(tmp_path, state, model=model)

    def trained():  # so is one that goes on from the weights of another run
        found = jr.train.Checkpoints(tmp_path, model=model).restore_policy(params)
        return model, found, tokenizer

    for function in (looks, trained):
        found = load_inputs(changed(config, model=function))
        assert jax.tree.map(jnp.shape, found.params) == jax.tree.map(jnp.shape, inputs.params)

    # A plan of a named model takes its configuration alone.
    shutil.copy(ROOT / "golden" / "logits" / "llama" / "config.json", tmp_path)
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda path: path, raising=False)
    config = changed(config, model=str(tmp_path), dtype="bfloat16")
    model, params, tokenizer = memory_plan.abstract_model(config)
    assert tokenizer == tmp_path and model.config.dtype == "bfloat16"
    assert params["norm"]["scale"].shape == (model.config.width,)


def test_what_a_plan_counts(config, inputs, plan):
    n, whole = numbers_of(inputs), plan()
    assert whole.state == {"weights": 4 * n, "optimizer": 8 * n + 4}
    assert whole.step["gradients"] == 4 * n
    assert whole.peak == whole.resident + max(
        sum(whole.step.values()), sum(whole.sampling.values())
    )
    parts = plan(microbatches=2)
    assert parts.step["gradients"] == 8 * n
    assert parts.step["activations"] == whole.step["activations"] / 2
    sampling = config.sampling
    group = inputs.longest_prompt + sampling.group_size * sampling.max_new_tokens
    half = config.prompts_per_step * group // 2
    assert plan(tokens_per_microbatch=half).step == parts.step
    assert plan(tokens_per_microbatch=2 * half).step == whole.step
    assert plan(remat="full").step["activations"] >= whole.step["activations"]  # of one layer
    assert plan(recipe="grpo").state["reference"] == 4 * n
    assert plan(recipe="dpo").state["reference"] == 4 * n
    assert "reference" not in plan(recipe="dpo", reference_logp="refs.npz").state
    mnpo = plan(recipe="mnpo").state
    assert (mnpo["reference"], mnpo["earlier"]) == (4 * n, 12 * n + 4)
    own = jr.recipes.dr_grpo(length=4).replace(parts=(TwoCopies(),))
    assert plan(recipe=own).state["copies"] == 8 * n
    table = 4 * 259 * 32  # two moments of the output matrix, and a count
    capo = plan(recipe="capo")
    assert capo.state["moments of the last layer"] == 2 * table + 4
    assert capo.step["sums of the last layer"] == 2 * (table + 4 * 259)
    assert plan(optimizer={"moment_dtype": "bfloat16"}).state["optimizer"] == 6 * n + 4
    spread = plan(mesh=MeshConfig(fsdp=2), prompts_per_step=4)
    assert spread.step["activations"] == whole.step["activations"] / 2
    assert spread.state["weights"] < 0.6 * 4 * n and spread.step["weights gathered"] > 0
    spread = plan(mesh=MeshConfig(data=2), prompts_per_step=4)
    assert spread.state["weights"] == 4 * n and spread.state["optimizer"] < 0.6 * 8 * n
    table = max(x.size for x in jax.tree.leaves(inputs.params))
    assert 4 * table < spread.step["gradients"] < 0.6 * 4 * n + 4 * table
    ahead = plan(asynchrony=AsyncConfig(max_staleness=1))
    assert ahead.overlap and ahead.sampling["weights of the sampler"] == 8 * n
    assert ahead.peak > whole.peak
    later = plan(asynchrony=AsyncConfig(max_staleness=2))  # a batch of them is not the last
    assert later.sampling["weights of the sampler"] == 12 * n


def test_a_backward_pass_has_a_part_of_a_minibatch(config, inputs, plan):
    n = numbers_of(inputs)

    def dapo(microbatches, **changes):
        return plan(recipe="dapo", prompts_per_step=64, microbatches=microbatches, **changes).step

    four = plan(recipe="dapo", minibatches=1).step  # groups
    for found in (dapo(1, packing="flat"), dapo(16)):  # 16 minibatches of four groups
        assert found["gradients"] == four["gradients"] == 4 * n
        assert found["activations"] == four["activations"]
    assert dapo(32)["gradients"] == 8 * n
    assert dapo(32)["activations"] == four["activations"] / 2
    # Padded rows are scored by microbatches of the batch, here all of it at one time.
    group_size, length = config.sampling.group_size, config.sampling.max_new_tokens
    batch = BatchShape(64, group_size, inputs.longest_prompt, length)
    layer = largest_layer_bytes(inputs.model.config, batch, on=LayerPlacement(accelerator=True))
    assert dapo(1)["activations"] == layer
    cells = inputs.longest_prompt + group_size * length
    assert dapo(1, tokens_per_microbatch=2 * cells) == dapo(32)


def test_a_plan_counts_the_model_of_the_reward(plan, tmp_path):
    model, params = jr.testing.tiny_model(num_layers=1)
    _, scorer = jr.models.with_head(model, params, key=jax.random.key(0))
    jr.models.save_safetensors(scorer, tmp_path / "rm", config=model.config, head="response")
    jr.models.save_safetensors(params, tmp_path / "judge", config=model.config)
    plain, options = plan(), {"tokenizer": ByteTokenizer(), "batch_size": 4}
    graded = plan(reward=jr.train.reward_model(tmp_path / "rm", **options))
    body = sum(x.size for x in jax.tree.leaves(scorer))
    assert graded.state["model of the reward"] == 4 * body
    assert graded.resident == plain.resident + 4 * body
    judged = plan(reward=jr.train.judge(tmp_path / "judge", max_new_tokens=3, **options))
    assert judged.state["model of the reward"] == 4 * sum(x.size for x in jax.tree.leaves(params))
    assert judged.sampling["cache of the judge"] > 0
    assert sum(judged.sampling.values()) > sum(plain.sampling.values())


def test_what_trains_and_what_stays_beside_an_adapter(inputs, plan):
    n, half = numbers_of(inputs), in_dtype(inputs, dtype="bfloat16")
    small = plan(lora=RANK_4, recipe="grpo")
    assert small.step["gradients"] == 4 * ADAPTER
    # Its reference is the base.
    assert small.state == {"weights": 4 * (n + ADAPTER), "optimizer": 8 * ADAPTER + 4}
    given = {"lora": RANK_4, "recipe": "grpo", "reference": "a soup"}
    assert plan(**given).state["reference"] == 4 * n
    # The base is then bfloat16, but not a reference of its own.
    state = plan(half, **given).state
    assert state["weights"] < 4 * n == state["reference"]
    # A critic beside an adapter has gradients.
    given = {"recipe": "ppo_max", "critic": OptimizerConfig(), "lora": RANK_4}
    found = plan(**given).step
    assert (found["gradients"], found["gradients of the critic"]) == (4 * ADAPTER, 4 * n)
    assert plan(half, **given).step["weights as multiplied"] == 2 * numbers_of(inputs, dims=2)


def test_evolution_keeps_no_activations_but_its_members(inputs, plan):
    sgd = OptimizerConfig(name="sgd", b1=0.0, max_grad_norm=None)
    adam = {"recipe": "eggroll", "remat": "full", "prompts_per_step": 4}
    spread = plan(**adam, mesh=MeshConfig(data=2)).state
    assert spread == plan(**adam).state  # each device makes the whole update
    evolved = plan(recipe="eggroll", optimizer=sgd, remat="full", sampling={"group_size": 6})
    drawn = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)  # q and o, k and v, the MLP
    assert evolved.state["optimizer"] == 0
    noise = {"noise of an update": 4 * 6 * drawn}
    assert evolved.step == {"gradients": 4 * numbers_of(inputs)} | noise
    assert evolved.sampling["members"] == 4 * 3 * drawn


def test_the_support_of_tokens_is_counted(plan):
    whole, tokens = plan(), 4 * 2 * 4
    assert "support of tokens" not in whole.step
    for filters, each in (({"top_p": 0.9}, 36), ({"min_p": 0.1, "top_k": 5}, 20)):
        found = plan(sampling=filters)
        more = {k: found.sampling[k] - whole.sampling[k] for k in whole.sampling}
        logits = 4 * 259 * 8 * (0 if "top_k" in filters else 3)
        assert more == {CACHE: tokens * each, LOGITS: logits}
        assert found.step["support of tokens"] == 2 * tokens * each
        parts = plan(sampling=filters, microbatches=4)
        assert parts.step["support of tokens"] == (3 + 1 / 4) * tokens * each


@pytest.mark.slow
def test_a_support_in_a_compiled_step():
    vocab_size, batch = 8192, BatchShape(4, 4, 8, 128)
    model = make_model(tiny_config(vocab_size=vocab_size, num_layers=1))
    optimizer, recipe = optax.sgd(1e-3), jr.recipes.dr_grpo(length=batch.length)
    state = jax.eval_shape(
        lambda p: init_state(p, optimizer, recipe, key=jax.random.key(0)), param_shapes(model)
    )
    plain = make_batch(batch.prompts, batch.group_size, batch.length, batch.prompt_length)
    bits = jnp.ones((*plain.mask.shape, vocab_size // 32), jnp.uint32)
    step = make_step(model, recipe, optimizer, microbatches=2)

    def taken(rollouts):
        program = step.lower(state, rollouts).compile()
        found = program.memory_analysis()
        return found.temp_size_in_bytes + found.argument_size_in_bytes

    more = taken(plain.replace(support=Support(bits=bits))) - taken(plain)
    assert 0.7 * more < 3.5 * bits.nbytes < 1.3 * more


def test_other_copies_of_the_weights_are_counted(inputs, plan):
    # Weights of another dtype while they load.
    n, matrices = numbers_of(inputs), numbers_of(inputs, dims=2)
    assert plan(lora=RANK_4).loading == {}
    bfloat16, int8 = in_dtype(inputs, dtype="bfloat16"), in_dtype(inputs, quantization="int8")
    half, kept = plan(bfloat16, lora=RANK_4), 4 * n - 2 * matrices
    assert half.loading == {"weights in float32": 4 * n, "weights as kept": kept}
    assert half._replace(step={}, sampling={}).peak == 4 * n + kept > half.resident
    named = {"lora": RANK_4, "model": "owner/name", "dtype": "bfloat16"}  # loaded as kept
    assert plan(bfloat16, **named).loading == {}

    # A scan copies the weights of the layers.
    model, params = jr.testing.tiny_model()
    two = inputs._replace(model=model, params=params)
    layers = 4 * jr.core.trees.size(params["layers"])
    stacked = plan(in_dtype(two, scan_layers=True)).step
    assert stacked == plan(two).step | {"weights stacked": layers}

    # Weights that are rounded for the sampler.
    linear = numbers_of(inputs, dims=2, linear=True)
    for lora in (LoRAConfig(), RANK_4):
        assert plan(int8, lora=lora).sampling["weights as multiplied"] == linear
    assert plan(bfloat16).sampling["weights as multiplied"] == 2 * matrices

    # A sampler in 8 bits alone has a copy of its weights: while it samples; ahead of a step it has
    # no other weights, of which two exist at a time.
    eight = {"recipe": "dr_grpo", "sampling": {"quantization": "int8"}}
    assert plan(**eight).sampling["weights as multiplied"] == linear
    eight["asynchrony"] = AsyncConfig(max_staleness=1)
    found, others = plan(**eight).sampling, 4 * (n - linear) + linear
    assert "weights as multiplied" not in found
    scales = found["weights of the sampler"] // 2 - others
    assert 0 < scales < 0.2 * linear
    assert plan(**eight, lora=RANK_4).sampling["weights of the sampler"] > others + scales


def test_devices_that_sample_and_evaluate(inputs, plan):
    # Devices that only sample.
    n, whole = numbers_of(inputs), plan()

    def ahead(*, max_staleness=1, mesh=None, **changes):
        given = {} if mesh is None else {"sampler_mesh": mesh}
        given = AsyncConfig(max_staleness=max_staleness, sampler_devices=2, **given)
        return plan(asynchrony=given, **changes)

    found = ahead()
    assert whole.sampler == {} and whole.most == whole.peak
    assert not found.overlap and found.sampling == {}
    assert found.state == whole.state and found.step == whole.step
    halves = {name: whole.sampling[name] / 2 for name in (CACHE, LOGITS)}
    assert found.sampler == {"weights": 8 * n} | halves
    assert ahead(max_staleness=2).sampler["weights"] == 12 * n
    assert ahead(mesh=MeshConfig(fsdp=2)).sampler["weights"] < 0.6 * 8 * n
    assert ahead(lora=RANK_4).sampler["weights"] == 4 * n + 2 * 4 * ADAPTER
    large = found._replace(sampler={"weights": 10 * found.peak})
    assert large.most == 10 * found.peak

    # Episodes are evaluated beside those of the next batch.
    def episodes(every, *, lora=None, **options):
        return plan(
            environment=jr.environments.NumberGuess(),
            reward=None,
            evaluation=EvaluationConfig(every=every),
            asynchrony=AsyncConfig(max_staleness=1, **options),
            lora=LoRAConfig(rank=lora),
        )

    first, found = episodes(0), episodes(2)
    assert first.episodes == {} and found.sampling == first.sampling
    slots = {name: found.sampling[name] for name in found.episodes}
    assert CACHE in slots and found.episodes == slots
    # A step and an evaluation are never at the same time.
    idle = found._replace(step={})
    assert found.peak == first.peak
    assert idle.peak == idle.resident + sum(idle.sampling.values()) + sum(slots.values())
    assert any("while episodes are evaluated" in line for line in found.table())
    # Devices that only sample have a copy of the policy for it.
    first, found = (episodes(every, sampler_devices=2).sampler for every in (0, 2))
    assert "weights of the evaluation" not in first
    assert found["weights of the evaluation"] == 4 * n and found[CACHE] == 2 * first[CACHE]
    adapted = episodes(0, sampler_devices=2, lora=4).sampler  # the base a second time
    assert adapted["weights of the evaluation"] == 4 * n


def test_logits_are_there_in_chunks(config, inputs, plan):
    # Statistics have larger chunks of logits; of few tokens all are there at once.
    vocab_size, sampling = inputs.model.config.vocab_size, config.sampling
    whole = config.prompts_per_step * sampling.group_size * sampling.max_new_tokens
    assert plan().step["logits"] == 3 * 4 * min(64, whole) * vocab_size
    assert plan(recipe="otr").step["logits"] == 3 * 4 * min(256, whole) * vocab_size
    assert logits_bytes(51_200, 4096, 16) == 3 * 4 * 64 * 51_200
    assert logits_bytes(51_200, 4096, 16, statistics=True) == 3 * 4 * 256 * 51_200
    # Blocks of logits grow with the hidden states: 64 tokens' worth would be 128 words for so many
    # tokens, of 4,096 numbers each.
    tokens, width = 131_072, 4096
    for options in ({}, {"statistics": True}):
        assert logits_bytes(2**18, tokens, width, **options) == 3 * 4 * tokens * 2 * width
    mesh = {"data": 1, "fsdp": 16, "tensor": 4}
    # A vocabulary that devices do not divide is whole on each.
    assert logits_bytes(2**18 + 1, tokens, width, mesh=mesh) > 3 * 4 * tokens / 16 * width
    assert logits_bytes(2**18, tokens, width, mesh=mesh) == 3 * 4 * tokens * 2 * width / 64


def test_responses_of_a_denoiser_have_a_prompt_each(config, plan):
    def model():
        model, params, tokenizer = config.model()
        shape = dataclasses.replace(model.config, causal=False, mask_id=model.config.vocab_size - 1)
        return make_model(shape), params, tokenizer

    causal, own = plan().step["activations"], changed(config, model=model, recipe="espo")
    inputs = load_inputs(own)
    found = make_plan(own, inputs, accelerator=True)
    assert found.step["activations"] > causal
    sampling = own.sampling  # of a tiny vocabulary the logits of all cells are there at one time
    cells = own.prompts_per_step * sampling.group_size * sampling.max_new_tokens
    assert found.sampling[LOGITS] >= 4 * 4 * cells * inputs.model.config.vocab_size
    # A model with blocks scores each of them twice.
    twice = make_plan(own, in_dtype(inputs, block_length=4), accelerator=True)
    assert twice.step["activations"] > 1.4 * found.step["activations"]
    # It has no slots, and its sampler no filters.
    causal, others = (
        {text.split()[0] for text, _ in memory_plan.suggestions(lay_out(config), causal=x)}
        for x in (True, False)
    )
    assert causal - others == {"--sampling.slots", "--sampling.top-k"}
    with pytest.raises(memory_plan.OutOfMemory) as error:
        memory_plan.plan_text(own, memory=2**12)
    assert "--sampling.slots" not in str(error.value)


def test_a_model_of_which_little_is_known(config, inputs):
    names = ("vocab_size", "max_length", "num_layers", "num_kv_heads", "head_dim", "dtype")
    shape = SimpleNamespace(**{name: getattr(inputs.model.config, name) for name in names})

    def model():
        model, params, tokenizer = config.model()
        return model._replace(config=shape), {"all": [params["layers"], params]}, tokenizer

    own = changed(config, model=model)
    found = plan_of(own)
    assert "activations" not in found.step
    assert found.unknown == ("width", "num_heads", "mlp_width")
    text = memory_plan.plan_text(own, memory=1e9)
    assert text.endswith("What is counted fits.")
    assert "not counted: the model's configuration has no width, num_heads, mlp_width." in text
    assert plan_of(own, mesh=MeshConfig(fsdp=2)).step["weights gathered"] > 0
    with pytest.raises(memory_plan.OutOfMemory, match="--optimizer.moment-dtype") as error:
        memory_plan.plan_text(own, memory=1e5)
    assert "--lora.rank" not in str(error.value)  # it has no linear layer by that name


def test_the_cache_is_that_of_the_rows_of_a_run(config, inputs, plan):
    shape = inputs.model.config
    one = cache_bytes(shape, prompts=1, prompt_length=16, slots=1, length=4)
    # Slots have no padding.
    bare = cache_bytes(shape, prompts=1, prompt_length=3, slots=1, length=4)
    whole = plan().sampling[CACHE]
    assert plan(sampling={"slots": 2}).sampling[CACHE] == 2 * bare < whole
    greedy = plan(inputs._replace(num_held_out=100), evaluation=EvaluationConfig()).sampling[CACHE]
    assert greedy == 8 * one > whole  # as many prompts as a batch has rows
    # Five questions are three rows of each of two devices.
    spread = {"evaluation": EvaluationConfig(), "mesh": MeshConfig(fsdp=2)}
    assert plan(inputs._replace(num_held_out=5), **spread).sampling[CACHE] == 3 * one

    # Episodes take the rows of the engine that plays them. Prompts of 3 tokens are short beside
    # responses of 64, so each slot has a row.
    episodes = {"sampling": {"max_new_tokens": 64}, "environment": jr.environments.NumberGuess()}
    count = config.prompts_per_step * config.sampling.group_size
    rows = {"prompts": count, "prompt_length": 3, "slots": count, "length": 64}
    for evaluation in (EvaluationConfig(), EvaluationConfig(enabled=False)):
        found = plan(evaluation=evaluation, reward=None, **episodes).sampling[CACHE]
        assert found == cache_bytes(shape, **rows)

    # The grid of slots is that of the run. With 129 tokens a row has one slot; with their padding
    # to 192 it would have two.
    longer = inputs._replace(longest_prompt=192, slot_prompt=129)
    found = plan(longer, sampling={"max_new_tokens": 300, "slots": 8}).sampling[CACHE]
    rows = {"prompts": 8, "prompt_length": 129, "slots": 8, "length": 300}
    assert found == cache_bytes(shape, **rows)


def options(error):
    return [line.strip() for line in str(error.value).splitlines() if line.startswith("  --")]


@dataclasses.dataclass(frozen=True)
class Wide:
    """A collector of wider groups, some of which have a text of their own."""

    needs: jr.curation.Needs = jr.curation.Needs()
    init, propose, observe = (lambda *x: None,) * 3

    def width(self, group_size):
        return 3 * group_size


def test_rows_of_a_collector_and_of_a_teacher_are_counted(config, inputs):
    # A plan counts the rollouts and texts of a collector.
    def step(collector, **sampling):
        own = changed(
            config, recipe=jr.recipes.grpo().replace(collector=collector), sampling=sampling
        )
        return load_inputs(own), plan_of(own).step

    (_, plain), (_, wide) = step(None), step(Wide())
    assert wide["gradients"] == plain["gradients"]
    # A prompt has 16 tokens and 2 or 6 responses of 4: 24 or 40 in all.
    assert 1.6 < wide["activations"] / plain["activations"] < 1.8
    told, texts = step(Wide(jr.curation.Needs(sends_text=True)), prompt_length=20)
    assert told.longest_prompt == 24 and inputs.longest_prompt == 16
    # 24 and 6 times 28.
    assert texts["activations"] > 4 * wide["activations"]

    # A plan counts the prompts of a teacher.
    def activations(name, room=None, **changes):
        own = changed(
            config, recipe=name, sampling={"prompt_length": room}, remat="full", **changes
        )
        return make_plan(own, load_inputs(own)).step["activations"]

    # Eight responses of 4 tokens, each after a prompt of its own, that of the data and more.
    shape, batch = inputs.model.config, BatchShape(8, 1, 64, 4)
    assert shape.num_layers == 1
    assert activations("sdpo", 60) == activation_bytes(shape, batch, remat="none")
    # A budget of cells holds two of the four groups, each of 2 x (64 + 4).
    two = activations("sdpo", 60, tokens_per_microbatch=280)
    assert two == activation_bytes(shape, batch._replace(prompts=4), remat="none")
    assert activations("sdpo", 16) < activations("sdpo", 60) < activations("sdpo")
    batch = batch._replace(prompt_length=256)  # what the context leaves, in a power of two
    assert activations("sdpo") == activation_bytes(shape, batch, remat="none")
    with pytest.raises(ValueError, match="sends no text and which has no teacher"):
        activations("grpo", 60)


def test_the_largest_layer_is_that_with_the_most(config, inputs):
    """Layers of several kinds, which cannot be cut to one by their number."""
    kinds = (LayerKind(dense=True), LayerKind(window=8), LayerKind())
    mixed = tiny_config(num_layers=3, layers=kinds, **EXPERTS, scan_layers=False)
    batch = BatchShape(8, 1, 64, 4)
    alone = [
        activation_bytes(tiny_config(num_layers=1, **one), batch, remat="none")
        for one in ({}, EXPERTS)
    ]
    assert alone[0] != alone[1]
    assert largest_layer_bytes(mixed, batch) == max(alone)
    # A teacher's rows go through the policy's layers.
    inputs = inputs._replace(model=make_model(mixed), params=param_shapes(make_model(mixed)))
    sdpo = dataclasses.replace(config, recipe="sdpo", remat="full")
    taught = largest_layer_bytes(mixed, batch._replace(prompt_length=256))
    keys = mixed.num_kv_heads * mixed.head_dim
    want = taught + 2 * 4 * (mixed.num_layers - 1) * 8 * 256 * keys
    assert make_plan(sdpo, inputs).step["activations"] == want


def test_another_model_of_a_run_may_come_from_a_function(config, tmp_path, monkeypatch):
    """A policy by name with a dtype; the teacher's is the one that its function chose."""
    shutil.copy(ROOT / "golden" / "logits" / "llama" / "config.json", tmp_path)
    monkeypatch.setattr(jr.data, "load_tokenizer", lambda path: ByteTokenizer(), raising=False)
    named = {"model": str(tmp_path), "dtype": "bfloat16", "scan_layers": True}
    teacher = {"recipe": "gkd", "teacher": lambda: (*tiny_model(), ByteTokenizer())}
    config = changed(config, **named, **teacher)
    inputs = load_inputs(config)
    assert inputs.model.config.dtype == "bfloat16" and inputs.teacher_config.dtype == "float32"
    assert config.with_model(str(tmp_path)).dtype == "bfloat16"
    assert not config.with_model(str(tmp_path)).scan_layers


@for_each("name, itemsize", [("some/model", 2), (None, 4)])
def test_a_plan_counts_another_model_that_teaches(config, monkeypatch, name, itemsize):
    """The matrices of a name are read in the dtype of the products, a function's in float32."""
    model = make_model(tiny_config(width=48, dtype="bfloat16"))
    made = (model, param_shapes(model), ByteTokenizer())
    monkeypatch.setattr(memory_plan, "abstract_model", lambda config: made)
    config = changed(config, recipe="gkd", teacher=name or (lambda: None))
    plan, leaves = plan_of(config), jax.tree.leaves(made[1])
    assert plan.state["teacher"] == sum(x.size * (itemsize if x.ndim > 1 else 4) for x in leaves)
    sampling = config.sampling
    tokens = config.prompts_per_step * sampling.group_size * sampling.max_new_tokens
    copies = 1 if config.microbatches == 1 else 2
    assert plan.step["hidden states of the teacher"] == copies * tokens * 48 * 2
    assert "the teacher that samples" not in plan.sampling
    config = changed(config, recipe=jr.recipes.minillm(text_coef=0.0))
    plan, inputs = plan_of(config), load_inputs(config)
    rows, shape = config.prompts_per_step, model.config
    places = rows * (inputs.longest_prompt + sampling.group_size * sampling.max_new_tokens)
    cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * places
    logits = 2 * 4 * shape.vocab_size * rows * sampling.group_size
    assert plan.sampling["the teacher that samples"] == cache + logits


WIDE = SamplingConfig(group_size=4, max_new_tokens=64)


def refused(config, **changes):
    """The options that are offered where a plan does not fit."""
    memory = changes.pop("memory", None)
    with pytest.raises(memory_plan.OutOfMemory, match="does not fit") as error:
        memory_plan.plan_text(changed(config, **changes), memory=memory)
    return options(error)


def test_what_fits_and_which_option_helps(config):
    config = changed(config, sampling=WIDE)
    peak = plan_of(config).peak
    text = memory_plan.plan_text(config, memory=1.1 * peak)
    assert text.endswith("It fits.") and "activations" in text and "weights" in text
    lines = refused(config, memory=0.9 * peak)
    known = ("microbatches 2", "microbatches 4", "max-new-tokens 32", "mesh.data 4", "mesh.fsdp 4")
    assert all(any(name in line for line in lines) for name in known), lines
    # The activations decide, of which an adapter takes nothing away, nor has a filter a part.
    assert not any("lora" in line or "top-k" in line for line in lines)
    assert any(line.endswith("fits") for line in lines if "microbatches 4" in line)
    assert "It fits." in memory_plan.plan_text(config)  # the machine that is here has more
    config = changed(config, tokens_per_microbatch=999)
    assert "microbatches of up to 999 cells" in memory_plan.plan_text(config)
    assert not any("microbatches" in line for line in refused(config, memory=0.5 * peak))
    assert 2**28 < available_memory(8) <= available_memory()


@pytest.mark.slow
def test_a_filter_that_records_less_helps(config):
    def model():
        return *tiny_model(num_layers=1, vocab_size=16384), ByteTokenizer()

    sampling = dataclasses.replace(WIDE, top_p=0.9)
    lines = refused(config, sampling=sampling, model=model, remat="full", memory=1e6)
    assert any("--sampling.top-k 128" in line for line in lines)


@pytest.mark.slow
def test_only_meshes_that_a_run_takes_are_offered(config, monkeypatch):
    config = changed(config, sampling=WIDE)
    monkeypatch.setattr(memory_plan, "available_memory", lambda devices: 2**20)
    assert not any("mesh" in line for line in refused(config))  # 4 prompts, 8 devices
    lines = refused(config, prompts_per_step=8)
    assert {"--mesh.data -1", "--mesh.fsdp -1"} <= {" ".join(x.split()[:2]) for x in lines}
    # Microbatches of 4 do not divide over 8 devices, nor do 4 slots.
    spread = changed(config, prompts_per_step=8, mesh=MeshConfig(data=-1))
    assert not any("microbatches" in line or "slots" in line for line in refused(spread))
    found = dict(memory_plan.suggestions(lay_out(spread)))
    assert found["--mesh.data 1 --mesh.fsdp -1"].mesh == MeshConfig(fsdp=-1)


APART = {"max_staleness": 1, "sampler_devices": 2}
FEW = SamplingConfig(group_size=2, max_new_tokens=4, slots=2)


@for_each(
    "match, memory, changes",
    [
        ("4 prompts .* does not divide over 8 devices", None, {"mesh": MeshConfig(data=-1)}),
        ("64 devices, but there are 8; .*--plan-memory", None, {"mesh": MeshConfig(tensor=64)}),
        ("2 devices, but there are 8; the sizes", None, {"mesh": MeshConfig(fsdp=2)}),
        ("set fsdp to a size instead of -1", 1e9, {"mesh": MeshConfig(fsdp=-1)}),
        (
            "would deadlock",
            1e9,
            {"mesh": MeshConfig(data=2), "asynchrony": AsyncConfig(max_staleness=1)},
        ),
        (
            "data 3 .* does not match 2 sampler_devices",
            1e9,
            {"asynchrony": AsyncConfig(**APART, sampler_mesh=MeshConfig(data=3))},
        ),
        (
            "does not divide over 2 devices",
            1e9,
            {"asynchrony": AsyncConfig(**APART), "prompts_per_step": 3},
        ),
        ("are 2 rows, which", 1e9, {"sampling": FEW, "mesh": MeshConfig(data=4)}),
        ("no held-out", None, {"evaluation": EvaluationConfig(), "data": {"held_out": 0.0}}),
        ("leaves no room", None, {"sampling": SamplingConfig(max_new_tokens=4096)}),
    ],
)
def test_a_plan_of_a_run_that_could_not_start(config, match, memory, changes):
    with pytest.raises(ValueError, match=match):
        memory_plan.plan_text(changed(config, **changes), memory=memory)


def test_the_plan_of_a_flow_model_is_refused_and_devices_that_sample_are_told(config):
    flow = lambda: (*tiny_flow_model(), ByteTokenizer())  # noqa: E731
    with pytest.raises(ValueError, match="of a flow model cannot be planned; leave out --plan"):
        load_inputs(changed(config, model=flow, recipe="flow_grpo"))
    text = memory_plan.plan_text(changed(config, asynchrony=AsyncConfig(**APART)), memory=1e9)
    assert "on a device that samples" in text and text.endswith("It fits.")


def test_what_a_container_has_left(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def left(devices=1):
        return available_memory(devices, root=str(tmp_path))

    assert left() is None
    write("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n")
    assert left() == 8_000_000 * 1024 and left(2) == 4_000_000 * 1024
    write("proc/self/cgroup", "0::/box/job\n")
    for folder, most in (("", "max"), ("box/", "5000"), ("box/job/", "max")):
        write(f"sys/fs/cgroup/{folder}memory.max", most)
        write(f"sys/fs/cgroup/{folder}memory.current", "3000\n")
        write(f"sys/fs/cgroup/{folder}memory.stat", "anon 3000\ninactive_file 0\n")
    assert left() == 2000
    # Files that were read are dropped when the memory is wanted.
    write("sys/fs/cgroup/box/memory.stat", "anon 1000\ninactive_file 1500\n")
    assert left() == 3500
    # The first version, seen from inside: the path is that of the host, the folder its own.
    write("proc/self/cgroup", "5:cpu,memory:/docker/abc\n1:name=systemd:/\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000")
    write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000\n")
    assert left() == 0
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "garbage")
    assert left() == 8_000_000 * 1024


def test_a_state_that_is_more_than_the_device_is_refused(config, inputs, monkeypatch):
    shapes = (inputs.model, inputs.params, config.model()[2])
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "abstract_model", lambda config: shapes)
        named = changed(config, model="owner/name")
        memory_plan.check_memory(named)
        patch.setattr(memory_plan, "available_memory", lambda devices: 100_000)
        told = r"206.* KiB on each device \(weights 68.*--lora.rank 16"
        with pytest.raises(memory_plan.OutOfMemory, match=told):
            memory_plan.check_memory(named)
        memory_plan.check_memory(changed(named, lora=LoRAConfig(rank=2)))
        memory_plan.check_memory(config)  # a function has allocated its weights by then
        patch.setattr(memory_plan, "available_memory", lambda devices: None)
        memory_plan.check_memory(named)
        assert memory_plan.plan_text(config).endswith("does not tell how much memory it has.")
