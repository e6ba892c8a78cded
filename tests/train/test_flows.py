"""Flow policies: the sampler, the scorer and the loop, against exact flows and float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_resume import assert_resumes
from helpers import refuses
from step_makers import flat_step
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.diffusion import (
    FlowLikelihood,
    branch_likelihood,
    flow_likelihood,
    flow_sde_step,
    mean_field_likelihood,
)
from jaxrl_llm.models import LayerKind, LinearAttentionConfig, TextFlowConfig, make_text_flow_model
from jaxrl_llm.models.protocol import has_states
from jaxrl_llm.models.text_flow import writer_of
from jaxrl_llm.rollout import DenoisingOptions, make_flow_sampler
from jaxrl_llm.testing import ByteTokenizer, tiny_config, tiny_flow_model, tiny_text_flow_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    SamplingConfig,
    init_state,
    make_step,
    train,
)
from jaxrl_llm.train.experiment.rollouts import collect_rollouts, sampling_params
from jaxrl_llm.train.experiment.setup import init_experiment, load_experiment
from jaxrl_llm.train.models.denoising import scorer_of
from jaxrl_llm.train.update.score_batch import score_reference

MEAN, STD = 2.0, 0.5
pytestmark = pytest.mark.usefixtures("shared_programs")


def exact_flow():
    """The velocity from N(0, 1) to N(2, 0.5^2), whose marginal at sigma is Gaussian."""

    def velocity(params, x, sigma, prompts, prompt_mask):
        at = sigma[..., None]
        variance = (1 - at) ** 2 * STD**2 + at**2
        residual = (x - (1 - at) * MEAN) / variance
        return at * residual - (MEAN + (1 - at) * STD**2 * residual)

    return tiny_flow_model()[0]._replace(velocity=velocity)


def linear_flow():
    """``v = x W + b``, whose gradient is a line of NumPy."""

    def velocity(params, x, sigma, prompts, prompt_mask):
        return x @ params["w"] + params["b"]

    params = {"w": jnp.array([[-0.5, 0.2], [0.1, -0.8]]), "b": jnp.array([0.3, -0.4])}
    model, _ = tiny_flow_model()
    return model._replace(velocity=velocity, init=lambda key: params), params


@pytest.mark.slow
def test_the_sampler_keeps_the_marginals_of_the_flow():
    """At every level those of the exact flow, as without noise; not so for a step without drift."""

    def without_drift(x, v, sigma, sigma_next, *, sigma_1, eps):
        step = flow_sde_step(x, v, sigma, sigma_next, sigma_1=sigma_1, eps=eps)
        plain = x + v * (sigma_next - sigma)[..., None]
        return step._replace(x=plain + step.x - step.mean)

    steps, levels = 100, jr.diffusion.flow_levels(100)[1:]
    means = (1 - levels) * MEAN
    stds = np.sqrt((1 - levels) ** 2 * STD**2 + levels**2)

    def error(likelihood, **options):
        sample = make_flow_sampler(
            exact_flow(), likelihood, steps=steps, group_size=8000, **options
        )
        after = np.asarray(sample({}, jax.random.key(0), [[65]]).latents)[0, :, :, 1]
        return max(np.abs(after.mean((0, 2)) - means).max(), np.abs(after.std((0, 2)) - stds).max())

    assert error(flow_likelihood(noise=0.5)) < 0.03
    assert error(flow_likelihood(noise=0.5), deterministic=True) < 0.03
    assert error(branch_likelihood(eta=0.3, splits=(0,), split_noise=1.0)) < 0.03
    assert error(FlowLikelihood(without_drift)) > 0.2


@pytest.mark.slow
def test_a_tree_shares_its_first_latents_and_no_other():
    """A node's latents are equal in its members; the noise of a split is enlarged."""
    model, params = tiny_flow_model()
    likelihood = branch_likelihood(splits=(0, 2), split_noise=3.0)
    sample = make_flow_sampler(model, likelihood, steps=4, group_size=8)
    rollout = sample(params, jax.random.key(3), [[65], [66]])
    before, after = np.moveaxis(np.asarray(rollout.latents), -2, 0)
    np.testing.assert_array_equal(before[:, :, 1:], after[:, :, :-1])
    ids = likelihood.node_ids(4, 8)
    for p, k in np.ndindex(2, 4):
        same = (after[p, :, None, k] == after[p, None, :, k]).all(-1)
        np.testing.assert_array_equal(same, ids[:, None, k] == ids[None, :, k])
    assert len(np.unique(before[:, :, 0, 0])) == 4  # two trees a prompt
    recipe = jr.recipes.branch_grpo_flow(splits=(0, 2), split_noise=3.0)
    batch = jr.recipes.Batch.from_rollout(rollout, jnp.zeros((2, 8)))
    batch = batch.replace(extras={"latents": rollout.latents})
    scores = scorer_of(recipe, model)(params, batch)
    np.testing.assert_allclose(scores.logp, rollout.behavior_logp, rtol=1e-3, atol=1e-4)
    scale = np.asarray(scores.statistics["step_scale"])
    noise = (after - np.asarray(scores.statistics["step_mean"])) / scale[..., None]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), np.arange(16))
    for k, factor in enumerate((3.0, 1.0, 3.0, 1.0)):
        drawn = [jax.random.normal(jax.random.fold_in(key, k), (2,)) for key in keys]
        first = np.argmax(ids[:, None, k] == ids[None, :, k], axis=1)
        want = factor * np.stack(drawn).reshape(2, 8, 2)[:, first]
        np.testing.assert_allclose(noise[:, :, k], want, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(scores.entropy, np.log(scale) + 0.5 * np.log(2 * np.pi * np.e))


def test_a_trajectory_depends_on_its_number_alone():
    """Not on its place, its neighbors or the steps that are random after it."""
    model, params = tiny_flow_model()
    key, ids = jax.random.key(1), np.array([[5, 9], [7, 2]])
    sample = make_flow_sampler(model, flow_likelihood(), steps=3, group_size=2)
    one = sample(params, key, [[65], [66]], request_ids=ids)
    other = sample(params, key, [[66], [65]], request_ids=ids[::-1, ::-1])
    np.testing.assert_allclose(one.latents, other.latents[::-1, ::-1], rtol=1e-5, atol=1e-6)
    window = make_flow_sampler(model, flow_likelihood(window=(0, 2)), steps=3, group_size=2)
    part = window(params, key, [[65], [66]], request_ids=ids)
    np.testing.assert_allclose(part.latents[:, :, :2], one.latents[:, :, :2], rtol=1e-5)
    assert part.mask[0, 0].tolist() == [True, True, False]
    x, after = np.moveaxis(np.asarray(part.latents[:, :, 2]), -2, 0)
    prompts = jnp.array([[65], [66]])
    v = model.velocity(params, jnp.asarray(x), jnp.full((2, 2), 1 / 3), prompts, prompts > 0)
    np.testing.assert_allclose(after, x - v / 3, rtol=1e-5, atol=1e-6)


def assert_moved(after, params, x, d_v):
    """That the linear velocity of latents ``x`` moved by the gradient ``d_v`` of its values."""
    want = {"w": np.einsum("pgki,pgkj->ij", x, d_v), "b": d_v.sum((0, 1, 2))}
    for name, value in want.items():
        got = np.float64(after.params[name]) - np.float64(params[name])
        np.testing.assert_allclose(got, value, rtol=1e-3, atol=1e-5)


REWARDS = np.array([[1.0, 0.0, 0.25, 0.5], [1.0, 1.0, 1.0, 1.0]])
ADVANTAGES = (REWARDS - REWARDS.mean(-1, keepdims=True)) / (REWARDS.std() + 1e-4)


def test_the_update_is_the_gradient_of_the_densities():
    """One step of plain descent with flow_grpo against float64: A grad log p and that of the KL.

    The reference is another velocity, and the second group has equal rewards.
    """
    model, params = linear_flow()
    P, G, K = 2, 4, 3
    recipe, optimizer = jr.recipes.flow_grpo(kl_coef=0.5), optax.sgd(1.0)
    sample = make_flow_sampler(model, recipe.likelihood, steps=K, group_size=G)
    rollout = sample(params, jax.random.key(0), [[65], [66]])
    batch = jr.recipes.Batch.from_rollout(rollout, jnp.float32(REWARDS))
    batch = batch.replace(extras={"latents": rollout.latents})
    reference = jax.tree.map(lambda x: 0.5 * x, params)
    batch = score_reference(batch, recipe, scorer_of(recipe, model), reference)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    after, _ = flat_step(model, recipe, optimizer, minibatches=1, donate=False)(state, batch)

    x, y = np.moveaxis(np.float64(rollout.latents), -2, 0)
    w, b, rw, rb = (np.float64(z[n]) for z in (params, reference) for n in ("w", "b"))
    sigma = np.linspace(1, 0, K + 1)
    dt, level = np.diff(sigma), sigma[:-1]
    std = 0.7 * np.sqrt(level / (1 - np.where(level == 1, sigma[1], level)))
    factor = (1 + std**2 * (1 - level) / (2 * level)) * dt  # d mean / d v
    at = x * (1 + std**2 / (2 * level) * dt)[:, None]
    mean = at + (x @ w + b) * factor[:, None]
    ref_mean = at + (x @ rw + rb) * factor[:, None]
    score = ADVANTAGES[..., None, None] * (y - mean) / (std**2 * -dt)[:, None] / 2
    kl = 0.5 * (mean - ref_mean) / (std**2)[:, None] / 2
    d_v = (score - kl) * factor[:, None] / (P * G * K)  # minus the gradient of the loss
    assert_moved(after, params, x, d_v)


def test_the_update_of_diffusion_nft_is_the_gradient_of_its_errors():
    """One step of plain descent against float64, at freshly noised last latents of an ODE.

    Three velocities share the noise: the policy, the one that sampled, and the first.
    """
    model, params = linear_flow()
    P, G, K, beta, coef = 2, 4, 3, 0.5, 0.2
    recipe = jr.recipes.diffusion_nft(beta=beta, kl_coef=coef)
    optimizer = optax.sgd(1.0)
    old, first = (jax.tree.map(lambda x, f=f: f * x, params) for f in (0.7, 0.4))
    sample = make_flow_sampler(model, recipe.likelihood, steps=K, group_size=G)
    rollout = sample(old, jax.random.key(0), [[65], [66]])
    latents = np.float64(rollout.latents)
    assert rollout.mask.all()
    w, b = np.float64(old["w"]), np.float64(old["b"])
    x = latents[..., 0, :]
    np.testing.assert_allclose(latents[..., 1, :], x - (x @ w + b) / K, rtol=1e-4, atol=1e-5)
    batch = jr.recipes.Batch.from_rollout(rollout, jnp.float32(REWARDS))
    drawn = jr.train.draw_noise(jax.random.key(5), rollout.latents)
    extras = {"latents": rollout.latents, **drawn}
    batch = batch.replace(behavior_logp=None, extras=extras)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    state = state.with_parts(reference=jr.regularizers.Anchored(old, first))
    after, _ = make_step(model, recipe, optimizer, donate=False)(state, batch)

    noise, clean = np.float64(drawn["forward_noise"]), latents[:, :, -1:, 1]
    level = np.array([1, 2 / 3, 1 / 3])[:, None]
    x, target = (1 - level) * clean + level * noise, noise - clean
    v, old_v, first_v = (x @ np.float64(z["w"]) + np.float64(z["b"]) for z in (params, old, first))
    r = (0.5 + ADVANTAGES / 10)[..., None, None]

    def slope(u):
        e = level * (u - target)
        return 2 * e * level / np.abs(e).mean(-1, keepdims=True) / 2

    positive = slope(beta * v + (1 - beta) * old_v)
    negative = slope((1 + beta) * old_v - beta * v)
    d_v = 5 * (r * positive - (1 - r) * negative) + coef * (v - first_v)
    d_v = -d_v / (P * G * K)
    assert_moved(after, params, x, d_v)
    decay = np.float64(0.001)  # of the first step
    moved = decay * np.float64(old["w"]) + (1 - decay) * np.float64(after.params["w"])
    np.testing.assert_allclose(after.reference.reference["w"], moved, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after.reference.anchor["w"], first["w"])
    with pytest.raises(ValueError, match="has no forward_noise in its extras; draw it with"):
        scorer_of(recipe, model)(params, batch.replace(extras={"latents": rollout.latents}))


def to_the_right(prompt, completion, metadata):
    point = completion.rpartition("\n")[2]  # behind a text, where there is one
    return 1 / (1 + np.exp(-2 * float(point.split()[0])))


def flow():
    return *tiny_flow_model(), ByteTokenizer()


def text_flow():
    return *tiny_text_flow_model(), ByteTokenizer()


def answered_prompts():
    columns = {"demonstration": "0", "chosen": "0", "rejected": "1"}
    return PromptSet([Prompt(x, metadata=columns) for x in "abcdefgh"], source="tiny")


RUN = {
    "model": flow,
    "reward": to_the_right,
    "recipe": "flow_grpo",
    "sampling": SamplingConfig(group_size=8, max_new_tokens=4),
}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        (jr.recipes.branch_grpo_flow(splits=(0, 1)), flow),
        (jr.recipes.unigrpo(steps=3, window=(0, 2)), text_flow),
        (jr.recipes.sol_rl_flow(oversample=2, draft_steps=2, slope=0.2, kl_coef=0.0), flow),
    ],
    ids=["tree", "text", "drafts"],
)
def test_a_run_resumes_exactly(recipe, model, tmp_path):
    """On a mesh drafts are rounded, and the noise of the levels is that of one device."""
    options = {"steps": 3, "recipe": recipe, "model": model, "prompts_per_step": 8}
    options["checkpoint"] = CheckpointConfig(every=1, keep=3)
    config = tiny_run(tmp_path / "whole", **RUN | options)
    whole = train(config)
    if recipe.name != "sol_rl_flow":  # what the sampler says of a step, the trainer does too
        assert whole.history[1]["sampler_gap"] < 1e-3
    assert_resumes(config, whole, tmp_path / "again")
    if recipe.name != "sol_rl_flow":
        return
    mesh = {"mesh": jr.train.MeshConfig(data=8), "run_dir": str(tmp_path / "mesh")}
    many = train(dataclasses.replace(config, **mesh)).state
    for name in ("params", "reference"):
        pair = getattr(whole.state, name), getattr(many, name)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *pair)


@pytest.mark.slow
def test_a_decoder_with_states_has_its_own_cache():
    layers = LayerKind(linear=True), LayerKind()
    linear = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8)
    decoder = tiny_config(
        architecture="qwen3_5_text", num_layers=2, layers=layers, linear_attention=linear
    )
    model = make_text_flow_model(TextFlowConfig(decoder=decoder, width=16))
    assert has_states(writer_of("a test", model))
    # Padding inside of a prompt, as of one that is shorter than its bucket, changes nothing.
    params = model.init(jax.random.key(0))
    x, sigma = jnp.ones((1, 2, model.config.latent_dim)), jnp.full((1, 2), 0.5)
    velocities = []
    for prompt in ([65, 66, 67, 68], [65, 66, -1, -1, -1, 67, 68]):
        tokens = jnp.array([prompt])
        velocities.append(model.velocity(params, x, sigma, jnp.maximum(tokens, 0), tokens >= 0))
    np.testing.assert_allclose(*velocities, atol=1e-5)


@pytest.mark.slow
def test_what_writes_and_denoises_is_scored_as_it_was_sampled():
    """Tokens and steps; a latent depends on its text, and its density moves the decoder too."""
    model, params = tiny_text_flow_model()
    recipe = jr.recipes.unigrpo(steps=3, window=(0, 2))
    sample = make_flow_sampler(
        model, recipe.likelihood, steps=3, group_size=4, text_length=5, stop_ids=tuple(range(100))
    )
    rollout = sample(params, jax.random.key(0), [[65, 66], [67]])
    mask = np.asarray(rollout.mask)
    assert rollout.tokens.shape == (2, 4, 8) and rollout.latents.shape == (2, 4, 8, 2, 2)
    assert mask[..., 5:].tolist() == [[[True, True, False]] * 4] * 2
    assert len(set(mask[..., :5].sum(-1).ravel().tolist())) > 1  # texts end where they end
    batch = jr.recipes.Batch.from_rollout(rollout, jnp.zeros((2, 4)))
    batch = batch.replace(extras={"latents": rollout.latents, "written": rollout.mask})
    scorer = jax.jit(lambda params, batch: scorer_of(recipe, model)(params, batch))
    scores = scorer(params, batch)
    np.testing.assert_allclose(scores.logp, rollout.behavior_logp * mask, rtol=1e-3, atol=1e-4)
    assert not np.asarray(scores.statistics["velocity"])[:, :, :5].any()
    other = scorer(params, batch.replace(tokens=batch.tokens.at[:, :, 0].add(1)))
    changed = np.abs(np.asarray(scores.logp - other.logp))[..., 5:7]
    assert changed.min() > 1e-7  # every step has another density after another text
    selected = scorer(params, batch.replace(mask=batch.mask.at[:, :, 0].set(False)))
    np.testing.assert_array_equal(selected.logp[..., 1:], scores.logp[..., 1:])
    with pytest.raises(ValueError, match="the batch has no written in its extras"):
        scorer(params, batch.replace(extras={"latents": rollout.latents}))

    def density(params):
        return jnp.sum(scorer(params, batch).logp[..., 5:])

    moved = jax.jit(jax.grad(density))(params)["decoder"]
    assert any(np.abs(np.asarray(x)).max() > 0 for x in jax.tree.leaves(moved))
    with pytest.raises(ValueError, match="cannot write texts of their own"):
        splits = branch_likelihood(splits=(0,))
        make_flow_sampler(model, splits, steps=3, group_size=2, text_length=5)
    with pytest.raises(ValueError, match="needs a model of models.make_text_flow_model"):
        plain, _ = tiny_flow_model()
        make_flow_sampler(plain, recipe.likelihood, steps=3, group_size=2, text_length=5)


@pytest.mark.slow
def test_drafts_choose_the_noise_that_trains(tmp_path):
    """Of 16 seeds a prompt the best 4 and the worst 4 by their drafts, from the same noise."""
    recipe = jr.recipes.sol_rl_flow(oversample=2, draft_steps=2, quantization=None)
    config = tiny_run(tmp_path, **RUN | {"recipe": recipe})
    experiment, params = load_experiment(config)
    key = jax.random.key(0)
    made = collect_rollouts(experiment, params, key, jr.data.Cursor(), number=0, version=0)
    P, G = 4, 8
    assert made.batch.rewards.shape == (P, G) and made.metrics["rollouts_sampled"] == 3 * P * G
    model, ids = experiment.model, np.arange(2 * P * G).reshape(P, -1)
    draft = make_flow_sampler(
        model, flow_likelihood(), steps=2, group_size=2 * G, deterministic=True
    )
    prompts = np.asarray(made.batch.prompt_tokens)[:, : int(made.batch.prompt_mask[0].sum())]
    drafts = draft(params, jax.random.fold_in(key, 0), prompts.tolist(), request_ids=ids)
    begin, last = (np.asarray(drafts.latents)[:, :, k, k and 1] for k in (0, -1))
    order = np.argsort(-last[..., 0], axis=-1, kind="stable")
    taken = np.sort(np.concatenate([order[:, : G // 2], order[:, -G // 2 :]], -1), -1)
    want = np.take_along_axis(begin, taken[..., None], axis=1)
    np.testing.assert_allclose(made.batch.extras["latents"][:, :, 0, 0], want, rtol=1e-5)
    rewards = 1 / (1 + np.exp(-2 * made.batch.extras["latents"][:, :, -1, 1, 0]))
    np.testing.assert_allclose(made.batch.rewards, rewards, rtol=1e-5)
    np.testing.assert_allclose(made.metrics["sampled_reward"], rewards.mean(), rtol=1e-5)
    without = jr.recipes.grpo().replace(collector=recipe.collector)
    causal = tiny_run(tmp_path / "causal", recipe=without)
    refuses("asks for drafts, which only a flow model makes", train, causal)


@pytest.mark.slow
def test_the_moving_policy_samples_without_noise(tmp_path):
    """Its samples are those of an ODE under it, and the noise of each batch is drawn anew."""
    recipe = jr.recipes.sol_rl_flow(oversample=2, draft_steps=2, slope=0.25)
    config = tiny_run(tmp_path, **RUN | {"recipe": recipe})
    experiment, *_, state = init_experiment(config, tmp_path, resume=False)
    half = jax.tree.map(lambda x: 0.5 * x, state.params)
    state = state.with_parts(reference=jr.regularizers.Anchored(half, state.params))
    start = sampling_params(experiment, state), jax.random.key(3), jr.data.Cursor()
    batch, again = (
        collect_rollouts(experiment, *start, number=n, version=n).batch for n in range(2)
    )
    assert batch.mask.all() and batch.behavior_logp is None
    x, following = np.moveaxis(np.asarray(batch.extras["latents"]), -2, 0)
    sigma = jnp.broadcast_to(jnp.linspace(1, 0, 5)[:-1], x.shape[:-1])
    prompts = jnp.asarray(batch.prompt_tokens), jnp.asarray(batch.prompt_mask)
    rows = (len(x), -1, 2)
    latents, levels = jnp.asarray(x.reshape(rows)), sigma.reshape(rows[:2])

    def ode(params):
        v = experiment.model.velocity(params, latents, levels, *prompts)
        return x - np.asarray(v).reshape(x.shape) / 4

    np.testing.assert_allclose(following, ode(half), rtol=1e-4, atol=1e-5)
    assert np.abs(following - ode(state.params)).max() > 1e-4
    noise = np.asarray(batch.extras["forward_noise"])
    assert noise.shape == x.shape and np.unique(noise).size == noise.size
    assert not np.isin(again.extras["forward_noise"], noise).any()


@pytest.mark.parametrize(
    "more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["selected", "uneven"]
)
def test_nodes_are_those_of_the_members_that_a_collector_selects(more, tmp_path):
    """Also where it asks for further trajectories, whose numbers begin inside of a tree."""
    collector = jr.curation.downsampled(jr.curation.contrasts, oversample=2)
    if more:
        collector = jr.curation.two_phase(
            lambda counts: np.array([3, 1, 4, 2]), max_rollouts=12, first=5
        )
    recipe = jr.recipes.branch_grpo_flow(splits=(0, 1)).replace(collector=collector)
    experiment, params = load_experiment(tiny_run(tmp_path, **RUN | {"recipe": recipe}))
    start = jax.random.key(0), jr.data.Cursor(), experiment.collector.init(8)
    made = collect_rollouts(experiment, params, *start, number=0, version=0)
    ids, latents = (np.asarray(made.batch.extras[name]) for name in ("node_ids", "latents"))
    where = np.asarray(made.batch.where)
    assert where.sum(-1).tolist() == ([8, 6, 9, 7] if more else [8] * 4)
    for p, k in np.ndindex(4, 4):
        after, there = latents[p, where[p], k, 1], ids[p, where[p], k]
        same = (after[:, None] == after[None]).all(-1)
        np.testing.assert_array_equal(same, there[:, None] == there[None])


def test_drafts_have_the_noise_of_what_trains_alone(tmp_path):
    drafts = jr.curation.drafted(jr.curation.contrasts, oversample=2, steps=2)
    tree = jr.recipes.branch_grpo_flow(splits=(0, 1)).replace(collector=drafts)
    text = jr.recipes.unigrpo(steps=2, window=(0, 1)).replace(collector=drafts)
    for recipe, model in ((tree, flow), (text, text_flow)):
        config = tiny_run(tmp_path, **RUN | {"recipe": recipe, "model": model})
        refuses(r"noise of its drafts.* splits or writes a text", load_experiment, config)


def test_what_does_not_go_together(tmp_path):
    model, params = tiny_flow_model()
    causal, _ = jr.testing.tiny_model(num_layers=1)
    recipe, masks = jr.recipes.flow_grpo(), jr.recipes.diffu_grpo(epochs=1)

    def step(message, *args, **options):
        with pytest.raises(ValueError, match=message):
            flat_step(*args, optax.sgd(0.1), **options)

    def sampler(message, model, likelihood, group_size=4):
        refuses(message, make_flow_sampler, model, likelihood, steps=2, group_size=group_size)

    step("needs a flow model, such as models.make_flow_model", causal, recipe)
    step("not a flow model", model, masks)
    step("give the recipe a likelihood", model, jr.recipes.grpo())
    step("temperature has no effect on a flow policy", model, recipe, temperature=0.5)
    sampler("has no velocity", causal, flow_likelihood())
    tree = branch_likelihood(splits=(0, 1))
    sampler("4 leaves, which do not divide a group of 6", model, tree, 6)
    sampler("ascending steps from 0 to 1", model, branch_likelihood(splits=(0, 2)))
    sampler("without a step there is no noise", model, FlowLikelihood(None, splits=(0,)))
    sampler("begins behind the 2 steps", model, flow_likelihood(window=(2, 3)))
    refuses("window must be", flow_likelihood, window=(3, 3))
    refuses("there are no splits", branch_likelihood, splits=())
    refuses("reads no tokens", model.apply, params, None, None, None)
    with pytest.raises(ValueError, match="the batch has no latents"):
        scorer_of(recipe, model)(params, jr.testing.make_case().batch.replace(extras={}))
    with pytest.raises(TypeError, match="Likelihood or FlowLikelihood"):
        recipe.replace(likelihood=flow_likelihood)
    assert not recipe.replace(likelihood=mean_field_likelihood(), regularizers=()).uses_reference

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            train(tiny_run(tmp_path / "run", **RUN | changes))

    def sampled(**options):
        return dataclasses.replace(RUN["sampling"], **options)

    few = sampled(denoising=DenoisingOptions(steps=2))
    refused("denoising has no effect with a flow model", sampling=few)
    refused("top_k has no effect", sampling=sampled(top_k=3))
    refused("temperature has no effect on a flow policy", sampling=sampled(temperature=0.5))
    few = {"recipe": jr.recipes.unigrpo(steps=4, window=(0, 3)), "model": text_flow}
    refused("max_new_tokens 3 is below the 4 steps", sampling=sampled(max_new_tokens=3), **few)
    shown = recipe.replace(collector=jr.curation.only_demonstrations(reward=1.0))
    data = DataConfig(prompts=answered_prompts)
    refused("which have no latents", recipe=shown, data=data)
    budgets = recipe.replace(collector=jr.curation.budgeted((3, 40)))
    refused("sends different messages for the members of a row", recipe=budgets)
    compared = recipe.replace(collector=jr.curation.offline_pairs())
    refused("a flow model trains on trajectories", recipe=compared, data=data)
    lora = jr.models.LoRAConfig(rank=2, targets=("layers",))
    refused("lora adds adapters, which a flow model does not have", lora=lora)
