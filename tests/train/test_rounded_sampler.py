"""Rollouts of a policy in 8 bits beside a trainer in full precision."""

import dataclasses

import jax
import numpy as np
import pytest
from batch_makers import first_batch
from rows import for_each
from tiny_run import prompts, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.models.protocol import has_rounded
from jaxrl_llm.models.quantize import QUANTIZATIONS
from jaxrl_llm.testing import ByteTokenizer, tiny_flow_model, tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    DataConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    SamplingConfig,
    make_scorer,
    train,
)
from jaxrl_llm.train.experiment.rollouts import make_rollouts
from jaxrl_llm.train.experiment.setup import init_experiment, load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")

KEY = jax.random.key(0)


def sampling(mode="int8", **options):
    return SamplingConfig(group_size=4, max_new_tokens=6, quantization=mode, **options)


def rounded_model(mode):
    return tiny_model(num_layers=1, quantization=mode)[0]


def gap(model, params, batch):
    """The mean difference of behavior_logp to what a model says of a batch.

    A sum in another order may round one activation otherwise, so single tokens may differ by more.
    """
    logp = np.asarray(make_scorer(model)(params, batch))
    return float(np.abs(logp - batch.behavior_logp)[batch.mask].mean())


# Between rounding that two programs share and rounding that one of them does alone.
NEAR = 1e-3


def rounded_batch(folder, mode, slots):
    """A batch whose rollouts are of the policy in 8 bits."""
    options = {"recipe": "sol_rl", "sampling": sampling(mode, slots=slots)}
    experiment, params = load_experiment(tiny_run(folder, **options))
    batch = first_batch(experiment, params).batch
    assert gap(rounded_model(mode), params, batch) < NEAR < gap(experiment.model, params, batch)
    return experiment, params, batch


def test_what_is_sampled_has_the_probabilities_of_the_rounded_policy(tmp_path):
    rounded_batch(tmp_path, "int8", 8)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "slots"), [("int8", None), ("fp8", 8)])
def test_old_logp_is_of_the_policy_in_full_precision(mode, slots, tmp_path):
    """Where a correction reads it beside that of the rounded policy."""
    experiment, params, batch = rounded_batch(tmp_path, mode, slots)
    scorer, recipe = jr.train.Scorer(experiment.model), experiment.recipe
    optimizer = jr.train.make_optimizer(experiment.config.optimizer)
    state = jr.train.init_state(params, optimizer, recipe, key=KEY)
    scored = jr.train.score_batch(batch, recipe, scorer, state=state)
    full = np.where(batch.mask, make_scorer(experiment.model)(params, batch), 0.0)
    np.testing.assert_allclose(np.where(batch.mask, scored.old_logp, 0.0), full, atol=1e-5)
    weights, _ = recipe.correction(scored.old_logp, scored.behavior_logp, scored.mask)
    want = np.minimum(np.exp(full - np.where(batch.mask, batch.behavior_logp, 0.0)), 2.0)
    np.testing.assert_allclose(
        np.asarray(weights)[batch.mask], want[batch.mask], rtol=1e-4, atol=1e-5
    )


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(("most", "lora"), [(0, LoRAConfig()), (1, LoRAConfig(rank=2))])
def test_new_weights_are_rounded_anew(most, lora, tmp_path):
    config = tiny_run(
        tmp_path,
        recipe="areal",
        sampling=sampling(),
        asynchrony=AsyncConfig(max_staleness=most),
        lora=lora,
    )
    experiment, _, _, state = init_experiment(config, tmp_path, resume=False)
    moved = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(KEY, x.shape), state.params)
    later = state._replace(params=moved, step=state.step + 1)
    model = rounded_model("int8")
    if lora.rank is not None:
        model = jr.train.adapted_model(model, lora)
    rollouts = make_rollouts(experiment, state)  # whose thread does not start
    batch = rollouts.prepare().batch
    assert gap(model, state.policy, batch) < NEAR < gap(model, later.policy, batch)
    rollouts.publish(later)
    batch = rollouts.prepare().batch
    assert gap(model, later.policy, batch) < NEAR < gap(model, state.policy, batch)
    if most:  # the sampler holds 8 bits, and the base below an adapter is not rounded again
        assert has_rounded(rollouts._weights[1])


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_rounded_weights_are_split_over_the_devices_that_sample(apart, tmp_path):
    sizes = MeshConfig(data=1 if apart else 2, fsdp=2, tensor=2)
    options = {"recipe": "areal", "sampling": sampling("fp8"), "mesh": sizes}
    if apart:
        options["asynchrony"] = AsyncConfig(
            max_staleness=1, sampler_devices=4, sampler_mesh=MeshConfig(data=2, tensor=2)
        )
    config = tiny_run(tmp_path, **options)
    experiment, _, _, state = init_experiment(config, tmp_path, resume=False)
    rollouts = make_rollouts(experiment, state)
    batch = rollouts.prepare().batch
    params = jax.device_get(state.params)
    assert gap(rounded_model("fp8"), params, batch) < NEAR < gap(experiment.model, params, batch)
    weights = rollouts._weights[1] if apart else experiment.behavior(state.params)
    up = weights["layers"]["0"]["mlp"]["up"]["kernel"]
    assert up.q.addressable_shards[0].data.size == up.q.size // (2 if apart else 4)
    assert up.q.sharding.device_set == set(jax.devices()[4:] if apart else jax.devices())


@pytest.mark.slow
def test_an_evaluation_has_the_policy_in_full_precision(tmp_path):
    options = {
        "evaluation": EvaluationConfig(limit=2),
        "data": DataConfig(prompts=prompts, chat=False, held_out=0.2),
    }
    found = []
    for mode in (None, "int8"):
        config = tiny_run(tmp_path, sampling=sampling(mode), **options)
        experiment, params = load_experiment(config, trains=False)
        found.append(experiment.evaluate(params, KEY))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_greedy_baseline_is_of_the_rounded_policy(tmp_path):
    remax = jr.recipes.remax()
    with pytest.raises(ValueError, match="'remax' has no correction"):
        tiny_run(tmp_path, recipe=remax, sampling=sampling())
    recipe = remax.replace(correction=jr.recipes.sol_rl().correction)
    experiment, params = load_experiment(tiny_run(tmp_path, recipe=recipe, sampling=sampling()))
    samplers, weights = experiment.samplers, []

    def baseline(params, *arguments):
        weights.append(params)
        return samplers.baseline(params, *arguments)

    experiment = dataclasses.replace(experiment, samplers=samplers._replace(baseline=baseline))
    batch = first_batch(experiment, params).batch
    assert "greedy_rewards" in batch.extras and [has_rounded(x) for x in weights] == [True]


@pytest.mark.slow
def test_without_a_correction_the_ratio_is_to_the_rounded_policy(tmp_path):
    """As with rollouts of older weights: reported, and within the clip of the surrogate."""

    def row(recipe):
        options = {"recipe": recipe, "minibatches": 1, "steps": 1, "sampling": sampling()}
        return train(tiny_run(tmp_path / recipe, **options)).history[-1]

    found = row("dapo")
    assert found["ratio_max"] > 1.005 and found["sampler_gap"] > 1e-3
    # With a correction for it the ratio is to the policy at the start of the step.
    found = row("sol_rl")
    assert found["ratio_max"] == pytest.approx(1, abs=1e-4) and found["sampler_gap"] > 1e-3


def test_the_recipe_asks_for_it_and_the_config_decides(tmp_path):
    assert {jr.recipes.sol_rl().sampler_quantization, None, "fp8"} == set(QUANTIZATIONS)
    assert jr.recipes.sol_rl_flow(quantization="fp8").sampler_quantization == "fp8"
    config = tiny_run(tmp_path, recipe="sol_rl")
    assert config.sampler_quantization == "int8" and config.rounds_rollouts
    config = dataclasses.replace(config, sampling=sampling("fp8"))
    assert config.sampler_quantization == "fp8"
    config = tiny_run(tmp_path, recipe=jr.recipes.sol_rl(quantization=None))
    assert config.sampler_quantization is None and not config.samples_off_policy
    config = parse_config(config, ["--recipe", "sol_rl", "--sampling.quantization", "off"])
    assert config.sampler_quantization is None and not config.samples_off_policy
    both = {"model": "smollm2-135m", "quantization": "fp8"}
    with pytest.raises(ValueError, match="sol_rl' asks .* set sampling.quantization to 'off'"):
        tiny_run(tmp_path, recipe="sol_rl", **both)
    assert dataclasses.replace(config, **both).quantization == "fp8"
    flows = tiny_run(tmp_path, recipe="sol_rl_flow")
    assert flows.sampler_quantization == "int8" and not flows.rounds_rollouts


def flow():
    """A flow model with a large weight in each column, which makes 8 bits coarse.

    Its input is always 0, so in full precision it has no effect.
    """
    model, params = tiny_flow_model()
    layers, embedding = params["layers"], params["embed"]["embedding"]
    first = layers[0] | {"kernel": layers[0]["kernel"].at[-1].set(30.0)}
    embed = {"embedding": embedding.at[:, -1].set(0.0)}
    head = jax.tree.map(lambda x: 20.0 * x, params["head"])  # beside the noise of a latent
    changed = {"layers": layers | {0: first}, "embed": embed, "head": head}
    return model, params | changed, ByteTokenizer()


def to_the_right(prompt, completion, metadata):
    return 1 / (1 + np.exp(-2 * float(completion.split()[0])))


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "int8"])
def test_drafts_are_rounded_and_what_trains_is_not(mode, tmp_path):
    """Drafts of the rounded policy choose the seeds, other ones than in full precision."""
    drafted = jr.curation.drafted(jr.curation.contrasts, oversample=2, steps=2)
    recipe = jr.recipes.flow_grpo().replace(collector=drafted, sampler_quantization=mode)
    options = {"model": flow, "reward": to_the_right, "recipe": recipe}
    sizes = SamplingConfig(group_size=8, max_new_tokens=4)
    experiment, params = load_experiment(tiny_run(tmp_path, **options, sampling=sizes))
    batch = first_batch(experiment, params).batch
    model, (P, G), width = experiment.model, batch.rewards.shape, int(batch.prompt_mask[0].sum())
    numbers, of_batch = np.arange(2 * P * G).reshape(P, -1), jax.random.fold_in(KEY, 0)
    rows = np.asarray(batch.prompt_tokens)[:, :width].tolist()
    flow_of = jr.diffusion.flow_likelihood()
    draft = jr.rollout.make_flow_sampler(
        model, flow_of, steps=2, group_size=2 * G, deterministic=True
    )

    def chosen(params):
        last = np.asarray(draft(params, of_batch, rows, request_ids=numbers).latents)[:, :, -1, 1]
        order = np.argsort(-last[..., 0], axis=-1, kind="stable")
        return np.sort(np.concatenate([order[:, : G // 2], order[:, -G // 2 :]], -1), -1)

    rounded = params if mode is None else jr.models.round_params(model, params, mode=mode)
    assert (mode is None) == np.array_equal(chosen(rounded), chosen(params))
    again = jr.rollout.make_flow_sampler(model, recipe.likelihood, steps=4, group_size=2 * G)
    latents = np.asarray(again(params, of_batch, rows, request_ids=numbers).latents)
    want = np.take_along_axis(latents, chosen(rounded)[..., None, None, None], axis=1)
    np.testing.assert_allclose(batch.extras["latents"], want, rtol=1e-4, atol=1e-5)


def own_model():
    """A model whose configuration does not say that its layers take rounded weights."""
    model, params = tiny_model(num_layers=1)
    names = ("vocab_size", "max_length", "num_layers", "num_kv_heads", "head_dim", "dtype")
    config = dataclasses.make_dataclass("OwnConfig", [*names, "causal", "mask_id"])
    values = [getattr(model.config, name) for name in (*names, "causal", "mask_id")]
    return model._replace(config=config(*values)), params, ByteTokenizer()


def named_otherwise():
    """A model whose linear layers have no parameter `kernel`."""
    model, _ = tiny_model(num_layers=1)

    def renamed(tree):
        if not isinstance(tree, dict):
            return tree
        return {"weight" if k == "kernel" else k: renamed(x) for k, x in tree.items()}

    model = model._replace(init=lambda key, init=model.init: renamed(init(key)))
    return model, model.init(KEY), ByteTokenizer()


def eight_bits():
    return *tiny_model(num_layers=1, quantization="int8"), ByteTokenizer()


def experts():
    kind = jr.models.ExpertsConfig(count=2, active=1, width=8)
    return *tiny_model(num_layers=1, experts=kind), ByteTokenizer()


@for_each(
    "changes, message",
    [
        (
            {"recipe": "eggroll", "remat": "full"},
            "quantization 'int8' has no effect with 'eggroll'",
        ),
        ({"recipe": "sft", "reward": None}, "samples nothing, so quantization 'int8' of the"),
        ({"recipe": "flow_grpo", "model": flow}, "a collector of drafts"),
        ({"recipe": "rloo"}, "a surrogate without a ratio, so rollouts of rounded weights"),
        ({"model": "smollm2-135m", "quantization": "fp8"}, "sampling.quantization asks for a sa"),
        ({"model": own_model}, "a OwnConfig, has no `quantization`. Use None"),
        ({"model": named_otherwise}, "'/kernel', and this model has none; its first is 'embed/emb"),
        ({"model": eight_bits}, "int8 has no effect on a model that rounds to int8 itself"),
        ({"model": experts}, "sampling: quantization: int8 does not round `experts`"),
    ],
)
def test_what_cannot_be_rounded_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_experiment(tiny_run(tmp_path, **{"sampling": sampling()} | changes))


def test_what_has_no_rounded_weights_is_refused():
    # Weights of another name are not rounded in silence.
    model, params, _ = named_otherwise()
    with pytest.raises(ValueError, match="round_params: int8 rounds the weights of linear layers"):
        jr.models.round_params(model, params, mode="int8")

    # An unknown mode is refused.
    with pytest.raises(ValueError, match="sampling: quantization must be one of"):
        sampling("int4")
    with pytest.raises(ValueError, match="'sol_rl': sampler_quantization must be one of"):
        jr.recipes.sol_rl(quantization="int4")
