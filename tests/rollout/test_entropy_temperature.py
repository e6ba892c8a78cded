"""A sampling temperature that follows the entropy: draw, sampler, engine and collector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.advantages import EntropyStats, entropy_signal, signal_temperature
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.rollout.sampling.draw import Drawn, RowOptions, draw_rows
from jaxrl_llm.rollout.sampling.options import ENTROPY_STATS, DrawOptions, make_draw
from jaxrl_llm.rollout.slots import Requests, Slots, Tokens
from jaxrl_llm.train.models.score import score_hidden

V = 50
MODEL, PARAMS = jr.testing.tiny_model(num_layers=1)
PROMPTS = [[1, 2, 3], [4, 5]]
KEY = jax.random.key(3)
# Wide enough that some tokens lie above and some below the pivot.
STATS = (1.0, 0.5, 2.0, 1.5)


def draw(logits, uniform, **options):
    return jax.jit(lambda z, u: jr.rollout.draw_tokens(z, u, **options))(logits, uniform)


def test_the_temperature_of_a_token_as_worked_out():
    # h = -1, -2/3, -1/3, 0, 1 for the entropies .1, .2, .4, .8, 1.6 of the last batch.
    entropy = jnp.array([0.1, 0.2, 0.4, 0.8, 1.6])
    stats = entropy_signal(entropy, jnp.ones(5, bool)).stats
    got = signal_temperature(entropy, stats, base=0.8, tau=0.3)
    np.testing.assert_allclose(got, 0.8 * np.array([0.7, 0.8, 0.9, 1.0, 1.3]), rtol=1e-5)


def test_a_token_is_drawn_at_the_temperature_of_its_entropy():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 1, (64, V)) * rng.uniform(0.2, 6, (64, 1)), jnp.float32)
    uniform = jnp.asarray(rng.random(64), jnp.float32)
    p = np.asarray(jax.nn.softmax(logits), float)
    entropy = -(p * np.log(p)).sum(-1)
    temperature = signal_temperature(jnp.float32(entropy), EntropyStats(*STATS), base=0.9, tau=0.4)
    assert temperature.min() < 0.8 and temperature.max() > 1.0
    got = draw(logits, uniform, temperature=0.9, entropy_tau=0.4, entropy_stats=STATS, top_k=20)
    want = draw(logits, uniform, temperature=np.asarray(temperature), top_k=20)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    for name in ("behavior_logp", "model_logp", "log_kept", "entropy"):
        a, b = getattr(got, name), getattr(want, name)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    first = draw(logits, uniform, temperature=0.9, entropy_tau=0.4, entropy_stats=(0.0,) * 4)
    plain = draw(logits, uniform, temperature=0.9)
    jax.tree.map(np.testing.assert_array_equal, first, plain)


def slots_of(settings):
    grid = (2, 3)
    zeros = jnp.zeros(grid, jnp.int32)
    requests = Requests(zeros, zeros, zeros, {k: jnp.full(grid, v) for k, v in settings.items()})
    return Slots(None, None, requests, jnp.ones(grid, bool), zeros, zeros, zeros, None)


def test_without_the_option_the_program_is_that_of_a_plain_draw():
    logits, uniform = jnp.zeros((2, 3, V)), jnp.zeros((2, 3))

    def plain(z, u):
        drawn: Drawn = draw_rows(z, u, RowOptions(temperature=0.7))
        version = jnp.zeros_like(drawn.tokens)
        names = ("tokens", "behavior_logp", "model_logp", "log_kept")
        return Tokens(*(getattr(drawn, name) for name in names), version)

    def program(**options):
        made = make_draw("f", DrawOptions(temperature=0.7, **options), vocab_size=V)
        slots = slots_of(made.settings)
        return made, str(jax.make_jaxpr(lambda z, u: made.next_token(z, u, slots))(logits, uniform))

    made, off = program()
    assert made.settings == {} and off == str(jax.make_jaxpr(plain)(logits, uniform))
    made, on = program(entropy_tau=0.05)
    assert tuple(made.settings) == ENTROPY_STATS and len(on) > len(off)


def engine_of(**options):
    return jr.rollout.make_engine(
        MODEL, rows=2, width=2, prompt_length=4, max_new_tokens=6, chunk=2, stop_ids=(7,), **options
    )


def completions(engine, settings):
    generation = jr.rollout.Generation(engine, PARAMS, key=KEY)
    for i, prompt in enumerate(PROMPTS):
        numbers = tuple(range(3 * i, 3 * i + 3))
        generation.submit(
            jr.rollout.Group(id=i, prompt=prompt, requests=numbers, settings=settings)
        )
    done = sorted(generation, key=lambda group: group.id)
    return [c for group in done for c in group.completions]


@pytest.mark.slow
def test_engine_and_sampler_draw_the_same_and_differ_from_the_base():
    options = {"temperature": 1.2, "entropy_tau": 0.6}
    sample = jr.rollout.make_sampler(
        MODEL, max_new_tokens=6, group_size=3, stop_ids=(7,), **options
    )
    engine = engine_of(model_entropy=True, **options)
    base = sample(PARAMS, KEY, PROMPTS)
    stats = np.float32([1.2, 0.3, 3.0, 3.0])
    whole = sample(PARAMS, KEY, PROMPTS, entropy_stats=stats)
    settings = dict(zip(ENTROPY_STATS, stats.tolist(), strict=True))
    every = np.asarray(logits_of(whole))
    for rollout, chosen in ((base, {}), (whole, settings)):
        for i, done in enumerate(completions(engine, chosen)):
            p, g = divmod(i, 3)
            n = int(rollout.mask[p, g].sum())
            np.testing.assert_array_equal(done.tokens, rollout.tokens[p, g, :n])
            for name in ("behavior_logp", "model_logp"):
                a, b = getattr(done.out, name), getattr(rollout, name)[p, g, :n]
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            if not chosen:
                continue
            # What was really sampled, from the model's entropy and the scores of a trainer.
            entropy = done.out.entropy
            want = signal_temperature(entropy, EntropyStats(*stats), base=1.2, tau=0.6)
            logits = every[p, g, :n]
            plain = jax.nn.log_softmax(logits)
            np.testing.assert_allclose(
                entropy, -(np.exp(plain) * plain).sum(-1), rtol=1e-3, atol=1e-4
            )
            logp = jax.nn.log_softmax(logits / np.asarray(want)[:, None])
            logp = np.take_along_axis(np.asarray(logp), done.tokens[:, None], axis=-1)[:, 0]
            np.testing.assert_allclose(done.out.behavior_logp, logp, rtol=1e-3, atol=1e-4)
    there = np.asarray(base.mask & whole.mask)
    assert (np.asarray(base.behavior_logp) != np.asarray(whole.behavior_logp))[there].any()


@jax.jit
def logits_of(rollout):
    """The plain logits ``[P, G, T, V]`` of every token, as a trainer computes them."""
    fields = (rollout.prompt_tokens, rollout.prompt_mask, rollout.tokens, rollout.mask)
    return score_hidden(MODEL, PARAMS, *fields) @ MODEL.output_matrix(PARAMS).T


def test_bad_options_are_named():
    for options, words in (
        ({"entropy_tau": 1.0}, r"entropy_tau must be in \(0, 1\); got 1"),
        ({"entropy_tau": 0.1, "temperature": 0.0}, "entropy_tau has no effect at temperature 0"),
        ({"entropy": True, "model_entropy": True}, "entropy and model_entropy cannot both be on"),
    ):
        with pytest.raises(ValueError, match=words):
            make_draw("f", DrawOptions(**options), vocab_size=V)
    with pytest.raises(ValueError, match="entropy_tau and entropy_stats go together"):
        jr.rollout.draw_tokens(jnp.zeros(4), jnp.float32(0.5), entropy_tau=0.1)
    sample = jr.rollout.make_sampler(MODEL, max_new_tokens=2, group_size=1)
    with pytest.raises(ValueError, match="entropy_stats has no effect without entropy_tau"):
        sample(PARAMS, KEY, PROMPTS, entropy_stats=STATS)
    with pytest.raises(ValueError, match="sets 'entropy_high'; options that may vary"):
        completions(engine_of(), {"entropy_high": 1.0})
    with pytest.raises(ValueError, match="sets entropy_low to -1; it must be at least 0"):
        completions(engine_of(entropy_tau=0.1), {"entropy_low": -1.0})
    with pytest.raises(ValueError, match=r"entropy_temperature: tau must be in \(0, 1\); got 0"):
        jr.curation.entropy_temperature(entropy_signal, tau=0.0)
    with pytest.raises(TypeError, match="entropy_temperature: measure must be a function"):
        jr.curation.entropy_temperature(0.8)
    twice = jr.curation.entropy_temperature(entropy_signal)
    assert needs_of(twice).entropy_tau == 0.05
    assert needs_of(jr.curation.in_order()).entropy_tau is None
    with pytest.raises(ValueError, match="one entropy_tau is possible"):
        needs_of(jr.curation.entropy_temperature(entropy_signal, source=twice))
