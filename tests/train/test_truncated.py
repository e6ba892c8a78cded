"""Training on rollouts of a sampler that truncates: over what was kept, ratios are 1."""

import dataclasses
import warnings

import jax
import numpy as np
import optax
import pytest
from step_makers import flat_step, one_layer, state_of
from tiny_run import CONFIG

import jaxrl_llm as jr
from jaxrl_llm.core.support import Support
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.train import make_scorer, make_step
from jaxrl_llm.train.experiment.rollouts import to_batch
from jaxrl_llm.train.optimizer import make_optimizer

ALL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
PROMPTS = [[7, 3, 9, 200, 41], [5], [100, 101, 102]]
QUESTIONS = [Question(Prompt("?", id=f"q{i}"), tokens) for i, tokens in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def tiny():
    return one_layer()


def sampled(tiny, options, **more):
    """A batch of rollouts, as the loop makes it, and the rollouts."""
    model, params = tiny
    sample = make_sampler(model, max_new_tokens=6, group_size=4, stop_ids=(3, 4), **options)
    rollout = sample(params, jax.random.key(0), PROMPTS)
    rewards = np.arange(12) % 3 / 2
    return to_batch(rollout, rewards, QUESTIONS, vocab_size=model.config.vocab_size), rollout


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("names", [[name] for name in ALL] + [list(ALL)], ids=" ".join)
def test_the_ratio_of_an_unchanged_policy_is_one(tiny, names):
    model, params = tiny
    options = {name: ALL[name] for name in names}
    batch, rollout = sampled(tiny, options)
    scorer = make_scorer(model, temperature=options.get("temperature", 1.0))
    logp = np.asarray(scorer(params, batch))[batch.mask]
    ratio = np.exp(logp - batch.behavior_logp[batch.mask])
    assert np.abs(ratio - 1).max() <= 1e-4
    if names != ["temperature"]:
        # Over the whole vocabulary it is not.
        whole = np.asarray(scorer(params, batch.replace(support=None)))[batch.mask]
        assert np.exp(whole - batch.behavior_logp[batch.mask]).min() < 0.95
        kept = np.asarray(rollout.tempered_logp)[batch.mask]
        np.testing.assert_allclose(whole, kept, atol=1e-4)


@pytest.mark.slow
def test_a_step_takes_all_its_ratios_over_the_support(tiny):
    model, params = tiny
    batch, _ = sampled(tiny, ALL)
    recipe = jr.recipes.grpo().replace(
        correction=jr.bind(
            jr.corrections.rollout_correction, weights=jr.corrections.importance_weights
        ),
        regularizers=(jr.bind(jr.regularizers.kl_to_reference, estimator="k3", coef=1e-3),),
    )
    optimizer = make_optimizer(dataclasses.replace(CONFIG.optimizer, learning_rate=1e-4))
    options = {"temperature": ALL["temperature"], "remat": "none", "epochs": 2, "donate": False}
    step = flat_step(model, recipe, optimizer, **options)
    state = state_of(recipe, optimizer)
    scorer = make_scorer(model, temperature=ALL["temperature"])
    batch = batch.replace(ref_logp=scorer(params, batch))
    np.testing.assert_allclose(
        np.asarray(batch.ref_logp)[batch.mask], batch.behavior_logp[batch.mask], atol=1e-4
    )
    after, metrics = step(state, batch)
    assert all(np.isfinite(x) for x in metrics.values()) and metrics["grad_norm"] > 0
    # The gap is of the policy before its first update; by the second it has moved, but not far.
    assert abs(metrics["sampler_gap"]) < 1e-4 and 1 < metrics["ratio_max"] < 1.2
    assert int(after.step) == 1


@pytest.mark.slow
def test_a_loop_is_told_that_its_temperatures_differ(tiny):
    model, params = tiny
    sample = make_sampler(model, max_new_tokens=6, group_size=4, temperature=0.7)
    rollout = sample(params, jax.random.key(0), PROMPTS)
    batch = jr.recipes.Batch.from_rollout(rollout, np.arange(12) % 3 / 2)
    recipe, optimizer = jr.recipes.dr_grpo(length=6), optax.sgd(0.1)
    state = state_of(recipe, optimizer)
    prepared, _ = recipe.prepare(batch, state.algo_state)

    def told(temperature, batch, prepared):
        gradients = jr.train.make_gradients(model, recipe, temperature=temperature)
        step = make_step(model, recipe, optimizer, temperature=temperature)
        scorer = jr.train.Scorer(model, temperature=temperature)
        for call in (
            lambda: jax.eval_shape(gradients, state, prepared),
            lambda: step.lower(state, batch),
            lambda: jr.train.score_batch(batch, recipe, scorer, state=state),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            yield " ".join(str(x.message) for x in caught)

    what = "sampled at temperature 0.7, and the step scores the policy at"
    assert all(f"{what} 1," in text for text in told(1.0, batch, prepared))
    assert not any("temperature" in text for text in told(0.7, batch, prepared))
    unknown = (x.replace(sampled_at=None) for x in (batch, prepared))
    assert not any("temperature" in text for text in told(1.0, *unknown))


@pytest.mark.of_many
@pytest.mark.parametrize("form", ["ids", "bits"])
def test_a_token_outside_its_support_is_named(tiny, form):
    options = {"top_k": 3} if form == "ids" else {"top_p": 0.3}
    _, rollout = sampled(tiny, options)
    spoiled = np.array(getattr(rollout.support, form))
    spoiled[1, 2, 0] = 1  # Only token 1 or, as bits, token 0.
    assert int(rollout.tokens[1, 2, 0]) > 1
    rollout = rollout._replace(support=Support(**{form: spoiled}))
    with pytest.raises(
        ValueError, match="token 0 of prompt 'q1', rollout 2, is not in its support"
    ):
        to_batch(rollout, np.zeros(12), QUESTIONS, vocab_size=tiny[0].config.vocab_size)
