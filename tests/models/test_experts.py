"""Mixtures of experts: each token equals the sum over its experts, with adapters and on meshes."""

import operator
from functools import partial, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from models.forwards import logits_of, scores_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.models import ExpertsConfig, LayerKind, load_model, param_shardings
from jaxrl_llm.models.experts import Mixture, choose_experts, clamped_swiglu
from jaxrl_llm.models.linear import Linear
from jaxrl_llm.models.lora import Adapted, LoRAConfig, adapted_model, init_lora, merge_lora
from jaxrl_llm.models.peft import save_adapter
from jaxrl_llm.models.sharding import on_mesh, shard
from jaxrl_llm.testing import tiny_config, tiny_model
from jaxrl_llm.train.mesh import make_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"
KINDS = {
    "plain": ExpertsConfig(count=5, active=2, width=6, normalized=False),
    "clamped": ExpertsConfig(count=5, active=3, width=6, bias=True, limit=0.5),
}


def mixture_of(experts, dtype="float32"):
    config = tiny_config(width=8, experts=experts, dtype=dtype)
    rngs = nnx.Rngs(0)
    router = Linear(8, experts.count, config, rngs, bias=experts.bias)
    mixture = Mixture(config, experts, rngs, router=router, activation=jax.nn.silu)
    graphdef, state = nnx.split(mixture)
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda x: x + jnp.float32(0.3 * rng.normal(size=x.shape)), state)
    return lambda state, x, given=None: nnx.merge(graphdef, state)(x, given=given)[0], state


def by_hand(experts, state, x, given=None):
    """Every expert for every token, and then the weights, most of which are 0."""
    p = nnx.to_pure_dict(state)
    logits = x @ p["router"]["kernel"] + p["router"].get("bias", 0.0)
    taken = logits >= jnp.sort(logits, axis=-1)[..., -experts.active, None]
    if given is not None:
        named = jnp.any(given[..., None] == jnp.arange(1, experts.count + 1), axis=-2)
        taken = jnp.where(jnp.any(given > 0, axis=-1, keepdims=True), named, taken)
    weights = jnp.where(taken, jax.nn.softmax(logits), 0.0)
    if experts.normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

    def linear(x, name):
        of = p["experts"][name]
        y = jnp.einsum("...ei,eio->...eo", x, of["kernel"])
        return y + of.get("bias", 0.0)

    tokens = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], experts.count, x.shape[-1]))
    gate, up = linear(tokens, "gate"), linear(tokens, "up")
    hidden = jax.nn.silu(gate) * up
    if experts.limit is not None:
        gate, up = jnp.minimum(gate, experts.limit), jnp.clip(up, -experts.limit, experts.limit)
        hidden = (up + 1) * gate / (1 + jnp.exp(-experts.alpha * gate))
    return jnp.sum(weights[..., None] * linear(hidden, "down"), axis=-2)


@pytest.mark.parametrize(
    ("name", "replayed"),
    [("plain", True), ("clamped", False)],
)
def test_a_token_is_the_weighted_sum_of_its_experts(name, replayed):
    experts, given = KINDS[name], None
    apply, state = mixture_of(experts)
    x = jax.random.normal(jax.random.key(2), (2, 3, 4, 8))
    if replayed:  # experts that the router would not choose; the first token of a row chooses
        order = jax.random.permutation(
            jax.random.key(3), jnp.tile(jnp.arange(1, 6), (2, 3, 4, 1)), axis=-1, independent=True
        )
        given = order[..., : experts.active].at[:, :, 0].set(0).astype(jnp.int16)

    def loss(function, state, x):
        y = function(state, x, given)
        return jnp.sum(jnp.sin(y)), y

    both = [
        jax.jit(jax.grad(partial(loss, f), argnums=(0, 1), has_aux=True))(state, x)
        for f in (apply, partial(by_hand, experts))
    ]
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), *both)
    if replayed:
        assert np.abs(both[0][1] - jax.jit(apply)(state, x))[:, :, 1:].max() > 0.1


def test_a_mixture_in_bfloat16():
    apply, state = mixture_of(KINDS["clamped"], "bfloat16")
    x = jax.random.normal(jax.random.key(2), (2, 3, 4, 8), jnp.bfloat16)

    @jax.jit
    def both(state, x):
        y, pullback = jax.vjp(apply, state, x)
        return y, pullback(y)

    y, grads = both(state, x)
    want = jax.jit(partial(by_hand, KINDS["clamped"]))(state, x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    # A token whose second and third expert are close may go to the other.
    assert np.mean(np.abs(np.asarray(y, np.float32) - want)) < 0.03
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_tokens_that_all_choose_one_expert():
    """No token is dropped."""
    apply, state = mixture_of(KINDS["plain"])
    kernel = state["router"]["kernel"]
    state["router"]["kernel"] = kernel.replace(jnp.zeros_like(kernel[...]))
    x = jax.random.normal(jax.random.key(2), (1, 1, 40, 8))
    y = jax.jit(apply)(state, x)
    p = nnx.to_pure_dict(state)["experts"]
    expected = sum(
        (jax.nn.silu(x @ p["gate"]["kernel"][e]) * (x @ p["up"]["kernel"][e]))
        @ p["down"]["kernel"][e]
        for e in (0, 1)
    )
    np.testing.assert_allclose(y, expected / 5, atol=1e-5)


@pytest.mark.slow
# What the router chooses, of 4 rows that the axis divides, and all the experts of one device, of 3
# rows, none of which is exchanged.
@pytest.mark.parametrize(("first", "rows"), [(None, 4), (5, 3)])
def test_devices_of_experts_take_all_tokens_that_choose_theirs(first, rows):
    experts = ExpertsConfig(count=8, active=2, width=6, bias=True, limit=0.5)
    apply, state = mixture_of(experts)
    x = jax.random.normal(jax.random.key(2), (rows, 1, 5, 8))
    given = None if first is None else jnp.full((rows, 1, 5, 2), jnp.array([first, first + 1]))

    def loss(function, state, x):
        y = function(state, x, given)
        return jnp.sum(jnp.sin(y)), y

    mesh = make_mesh(expert=4, devices=jax.devices()[:4])
    got = on_mesh(jax.grad(partial(loss, apply), argnums=(0, 1), has_aux=True), mesh)
    want = jax.grad(partial(loss, partial(by_hand, experts)), argnums=(0, 1), has_aux=True)
    grads, y = jax.jit(got)(*jax.device_put((state, x), NamedSharding(mesh, PartitionSpec())))
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), (grads, y), want(state, x))
    if first is not None:
        kernel = np.asarray(nnx.to_pure_dict(grads[0])["experts"]["up"]["kernel"])
        assert [e for e in range(8) if kernel[e].any()] == [4, 5]


def test_choice_and_activation_by_hand():
    chosen, weights = choose_experts(jnp.array([[0.0, 2.0, 1.0]]), 2, normalized=False)
    total = 1 + np.exp(1) + np.exp(2)
    assert chosen.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[np.exp(2) / total, np.exp(1) / total]], rtol=1e-6)
    # Given ones keep their order and count from 1, with weights of the same logits.
    given = jnp.array([[2, 1]], jnp.int16)
    chosen, weights = choose_experts(jnp.array([[0.0, 2.0, 1.0]]), 2, given=given)
    assert chosen.tolist() == [[1, 0]] and chosen.dtype == jnp.int32
    np.testing.assert_allclose(weights[0, 1], 1 / (1 + np.exp(2)), rtol=1e-6)
    y = clamped_swiglu(jnp.array([-3.0, 9.0]), jnp.array([0.5, -8.0]), limit=7.0, alpha=2.0)
    expected = [1.5 * -3 / (1 + np.exp(6)), -6 * 7 / (1 + np.exp(-14))]
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_given_experts_that_a_token_cannot_take():
    replay = partial(choose_experts, jnp.array([[0.0, 2.0, 3.0]]), 2)
    weights = jax.jit(lambda given: replay(given=given)[1])
    for given in ([2, 2], [1, 4], [9, 1], [0, 3]):  # of the last, the token would choose the third
        given = jnp.array([given])
        with pytest.raises(ValueError, match=rf"from 1 to 3 .* got \[{given[0, 0]}, {given[0, 1]}"):
            replay(given=given)
        assert jnp.isnan(weights(given)).all()
    assert jnp.isfinite(weights(jnp.array([[3, 1]]))).all()


@for_each(
    ("options", "message"),
    [
        ({"active": 5}, r"`active` \(5\) is above `count` \(4\)"),
        ({"count": 10**6, "active": 1}, "`count` must be at most 4,096, got 1,000,000"),
        ({"alpha": 2.0}, "`alpha` has no effect without a `limit`"),
        ({"width": 0}, "width must be above 0; got 0"),
    ],
)
def test_experts_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=f"ExpertsConfig: {message}"):
        ExpertsConfig(**{"count": 4, "active": 2, "width": 8, **options})


@for_each(
    ("options", "message"),
    [
        ({"layers": (LayerKind(dense=True),)}, "dense have no effect without `experts`"),
        ({"layers": (LayerKind(dense=True),), "experts": KINDS["plain"]}, "every layer is dense"),
    ],
)
def test_dense_layers_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(num_layers=1, **options)


def test_experts_are_not_rounded():
    pytest.importorskip("qwix")
    with pytest.raises(ValueError, match="`quantization` 'int8' does not round `experts`"):
        tiny_config(experts=KINDS["plain"], quantization="int8")


@pytest.fixture(scope="module")
def small():
    """A layer with experts after one without."""
    kinds = (LayerKind(dense=True), LayerKind())
    experts = ExpertsConfig(count=4, active=2, width=16, bias=True, limit=1.0)
    return tiny_model(num_layers=2, experts=experts, layers=kinds, sinks=True, output_bias=True)


TOKENS = np.arange(48, dtype=np.int32).reshape(2, 2, 12)


@pytest.mark.slow
def test_an_adapter_of_experts_equals_the_merged_model(small):
    model, params = small
    config = LoRAConfig(rank=2)
    adapter = init_lora(params, config)
    assert adapter["layers"]["1"]["mlp"]["experts"]["down"]["a"].shape == (4, 16, 2)
    adapter = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), adapter
    )
    policy, adapted = adapted_model(model, config), Adapted(params, adapter)
    merged = logits_of(model, merge_lora(adapted, config), TOKENS)
    assert np.abs(merged - logits_of(model, params, TOKENS)).max() > 0.1
    np.testing.assert_allclose(logits_of(policy, adapted, TOKENS), merged, atol=2e-5)
    # Sampler and trainer have the same policy.
    prompts = TOKENS[:, 0]
    sample = jr.rollout.make_sampler(policy, max_new_tokens=6, group_size=2)
    rollout = sample(adapted, jax.random.key(0), prompts.tolist())
    logp = scores_of(policy, adapted, rollout)
    np.testing.assert_allclose(rollout.behavior_logp, logp, atol=2e-5)


@pytest.mark.slow
def test_an_adapter_of_experts_is_rounded_once_in_trainer_and_sampler():
    """A sampler casts the factors before it decodes, a trainer where it uses them."""
    experts = ExpertsConfig(count=4, active=2, width=16)
    model, params = tiny_model(num_layers=1, experts=experts, dtype="bfloat16")
    config = LoRAConfig(rank=3, alpha=10.0, targets=("experts",))
    rng = np.random.default_rng(1)
    adapter = jax.tree.map(
        lambda x: x + jnp.float32(0.3 * rng.normal(size=x.shape)), init_lora(params, config)
    )
    policy, adapted = adapted_model(model, config), Adapted(params, adapter)
    logits = jax.jit(partial(logits_of, policy, tokens=TOKENS))
    cast = jr.models.cast_params(policy, adapted)
    np.testing.assert_array_equal(logits(adapted), logits(cast))


def test_peft_has_no_adapter_of_experts(small, tmp_path):
    model, params = small
    config = LoRAConfig(rank=2, targets=("experts",))
    message = "no adapter for 'layers/1/mlp/experts/down', since routers and experts"
    with pytest.raises(ValueError, match=f"save_adapter: PEFT has {message}"):
        save_adapter(init_lora(params, config), tmp_path, lora=config, config=model.config)


@pytest.fixture(scope="module")
def population(small):
    """Classes, and a member of a population of four for each row of ``TOKENS``."""
    _, params = small
    classes = jr.evolution.leaf_classes(params)
    members = jnp.arange(4).reshape(2, 2)
    delta = partial(jr.evolution.model_delta, params, classes, jax.random.key(0), 0, sigma=0.1)
    return classes, delta, members


@pytest.mark.slow
def test_evolution_perturbs_each_expert(small, population):
    model, params = small
    classes, delta, members = population
    of_layer = classes["layers"]["1"]["mlp"]
    assert set(jax.tree.leaves(of_layer["experts"])) == {"lowrank", "frozen"}  # with biases
    made = delta(members, rank=2)
    a, b, scale = made["layers"]["1"]["mlp"]["experts"]["down"]
    assert (a.shape, b.shape, scale.shape) == ((2, 2, 4, 16, 2), (2, 2, 4, 2, 32), (2, 2, 1, 1))
    logits = logits_of(model, params, TOKENS, delta=made)
    assert np.abs(logits - logits_of(model, params, TOKENS)).max() > 0.1
    for member in range(4):
        one = jr.evolution.perturb(params, classes, jax.random.key(0), 0, member, sigma=0.1, rank=2)
        assert not np.allclose(*one["layers"]["1"]["mlp"]["experts"]["up"]["kernel"][:2])
        row = divmod(member, 2)
        np.testing.assert_allclose(logits[row], logits_of(model, one, TOKENS)[row], atol=2e-5)


@pytest.mark.slow
def test_the_gradient_of_experts_is_the_sum_of_their_noise(small, population):
    _, params = small
    classes, _, _ = population
    key, fitness = jax.random.key(0), jnp.array([1.0, -0.5, 0.25, 2.0])
    grads = jr.evolution.eggroll_grad(
        params, classes, key, 0, fitness, rank=2, scale="mean", chunk=1
    )
    members = [
        jr.evolution.perturb(params, classes, key, 0, n, sigma=1.0, rank=2) for n in range(4)
    ]
    for name in ("up", "down"):
        path = ("layers", "1", "mlp", "experts", name, "kernel")
        grad, plain, *moved = (
            reduce(operator.getitem, path, tree) for tree in (grads, params, *members)
        )
        noise = sum(f * (x - plain) for f, x in zip(fitness, moved, strict=True))
        np.testing.assert_allclose(grad, -noise / 4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        ({"data": 2, "tensor": 2}, True),
        ({"expert": 2, "tensor": 2}, True),
        ({"data": 2, "context": 2}, False),
    ],
)
def test_noise_of_experts_on_a_mesh(small, population, sizes, pairs):
    model, params = small
    _, delta, _ = population
    tokens = np.arange(48, dtype=np.int32).reshape(4, 1, 12)
    made = jax.tree.map(lambda x: x[:, None], delta(np.arange(4), share_pairs=pairs))
    mesh = make_mesh(**sizes, devices=jax.devices()[:4])
    placed = shard(params, param_shardings(params, mesh, model.sharding_rules))
    logits = jax.jit(on_mesh(lambda p, d: logits_of(model, p, tokens, delta=d), mesh))(placed, made)
    np.testing.assert_allclose(logits, logits_of(model, params, tokens, delta=made), atol=2e-5)


@for_each(
    ("rule", "message"),
    [
        (("*/experts/*/kernel", "full"), "no model takes a delta for .*down/kernel' as 'full'"),
        (("*/experts/*/bias", "full"), "down/bias' is of experts, whose biases take no noise"),
    ],
)
def test_other_noise_of_experts_is_refused(small, rule, message):
    _, params = small
    classes = jr.evolution.leaf_classes(params, rules=[rule])
    with pytest.raises(ValueError, match=message):
        jr.evolution.model_delta(params, classes, jax.random.key(0), 0, np.arange(2), sigma=0.1)


def test_a_rank_that_no_expert_can_have_is_refused(small):
    _, params = small
    rules = [("*/experts/*/kernel", "lowrank"), ("*", "frozen")]
    classes = jr.evolution.leaf_classes(params, rules=rules)
    with pytest.raises(ValueError, match=r"rank must be at most .*down/kernel' \(16, 32\); got 17"):
        jr.evolution.perturb(params, classes, jax.random.key(0), 0, 0, sigma=0.1, rank=17)


@for_each("leading", [(), (2,)])
def test_a_delta_of_experts_of_another_form_is_refused(small, leading):
    model, params = small
    a, b = jnp.zeros((*leading, 4, 32, 2)), jnp.zeros((*leading, 4, 2, 16))
    entry = (a, b, 1.0) if leading else (a, b, 1.0, jnp.zeros((1, 16)))
    delta = {"layers": {"1": {"mlp": {"experts": {"up": entry}}}}}
    with pytest.raises(ValueError, match="delta 'layers/1/mlp/experts/up' must be .* for all rows"):
        logits_of(model, params, TOKENS, delta=delta)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}])
def test_a_step_on_a_mesh_has_the_same_gradients(sizes):
    """Rows, experts and their hidden units are split; what does not divide is not."""
    model, params = load_model(GOLDEN / "gpt_oss")
    tokens = np.arange(4 * 9, dtype=np.int32).reshape(4, 1, 9)

    def loss(params, tokens):
        return jnp.mean(jax.nn.logsumexp(logits_of(model, params, tokens), axis=-1))

    mesh = make_mesh(**sizes, devices=jax.devices()[: np.prod(list(sizes.values()))])
    placed = shard(params, param_shardings(params, mesh))
    kernel = placed["layers"]["0"]["mlp"]["experts"]["down"]["kernel"]
    names = {name: name if size > 1 else None for name, size in mesh.shape.items()}
    assert kernel.sharding.spec == PartitionSpec(names["fsdp"], names["tensor"], None)
    grads = jax.jit(on_mesh(jax.grad(loss), mesh))(placed, tokens)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=2e-5), grads, jax.grad(loss)(params, tokens)
    )
