"""How much a step computes, and in which time.

A token that trains passes each weight three times, at 2 operations: forward, and twice backward. A
frozen weight is passed twice, and a population only goes forward. Attention adds 4 operations for
each pair of places and pass.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.models.heads import headed_model
from jaxrl_llm.models.layers import ExpertsConfig, LayerKind, LinearAttentionConfig
from jaxrl_llm.models.protocol import AttentionContext
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import profile
from jaxrl_llm.train.profile import (
    Clock,
    Meter,
    ModelSize,
    model_size,
    population_flops,
    traced,
    train_flops,
)


def test_a_clock_adds_up_phases_and_begins_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    clock = Clock()
    for phase, seconds in (("wait", 2.0), ("train", 3.0), ("wait", 0.5)):
        with clock(phase):
            now[0] += seconds
    now[0] += 1.0  # in no phase
    with pytest.raises(RuntimeError), clock("save"):
        now[0] += 4.0
        raise RuntimeError
    expected = {"wait": 2.5, "score": 0.0, "train": 3.0, "save": 4.0, "evaluate": 0.0}
    assert clock.read() == expected | {"total": 10.5}
    assert set(clock.read().values()) == {0.0}
    with pytest.raises(KeyError), clock("sleep"):
        pass


def counted(prompts, responses, size, *, shared_prefix_len=0, passes=(3, 3)):
    """Operations one token after the other: as many passes of the weights, and of attention."""
    total, (of_weights, of_pairs) = 0.0, passes
    for i, (prompt, group) in enumerate(zip(prompts, responses, strict=True)):
        for place in range(shared_prefix_len if i else 0, prompt):
            total += 2 * size.matrices * of_weights + 4 * size.attention * (place + 1) * of_pairs
        for length in group:
            for place in range(length):
                total += 2 * (size.matrices + size.projection) * of_weights
                total += 4 * size.attention * (prompt + place + 1) * of_pairs
    return total


@for_each("frozen, shared_prefix_len", [(False, 0), (True, 0), (False, 3)])
def test_operations_are_those_counted_token_by_token(frozen, shared_prefix_len):
    rng, size = np.random.default_rng(0), ModelSize(matrices=1000, projection=70, attention=12)
    prompts, responses = shared_prefix_len + rng.integers(1, 9, 5), rng.integers(0, 7, (5, 3))
    shared = {"shared_prefix_len": shared_prefix_len}
    found = train_flops(prompts, responses, size=size, frozen=frozen, **shared)
    passes = (2 if frozen else 3, 3)  # forward, and twice that backward
    assert found == counted(prompts, responses, size, passes=passes, **shared)
    # A pair of responses to one prompt costs less than each with a prompt of its own.
    one, pair = (train_flops([8], [[6] * n], size=size) for n in (1, 2))
    assert one < pair < 2 * one
    assert train_flops([8], [[0]], size=size) == counted([8], [[0]], size)


@for_each("shared_prefix_len", [0, 3])
def test_operations_of_a_population_are_those_counted_token_by_token(shared_prefix_len):
    size = ModelSize(matrices=100, projection=10, attention=4)
    # Two members read two tokens each, one of them answers with one more.
    by_hand = 2 * (2 * 2 * 100 + 4 * 4 * (1 + 2)) + 2 * (100 + 10) + 4 * 4 * 3
    assert population_flops([2], [[1, 0]], size=size) == by_hand
    rng = np.random.default_rng(0)
    prompts, responses = shared_prefix_len + rng.integers(1, 9, 5), rng.integers(0, 7, (5, 3))
    shared = {"shared_prefix_len": shared_prefix_len}
    # Forward passes alone, of which each member reads the prompts itself.
    members = (responses[:, [member]] for member in range(3))
    want = sum(counted(prompts, x, size, passes=(1, 1), **shared) for x in members)
    assert population_flops(prompts, responses, size=size, **shared) == pytest.approx(want)


@pytest.mark.of_many
@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_the_compiler_counts(tied):
    # A forward pass over one prompt, in a model whose products outweigh everything else. The
    # compiler counts every pair of places, also those that are masked.
    model, params = tiny_model(width=128, mlp_width=512, tied=tied)
    length, size = 32, model_size(model)

    def forward(params, tokens):
        context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
        return model.apply(params, tokens, jnp.arange(length)[None, None], context)[0]

    lowered = jax.jit(forward).lower(params, jax.ShapeDtypeStruct((1, 1, length), jnp.int32))
    found = train_flops([length], [[0]], size=size) / 3
    assert 1.0 < lowered.cost_analysis()["flops"] / found < 1.15
    assert size.projection == model.config.vocab_size * 128


def test_only_what_a_token_passes_through_counts():
    # Only the experts of a token count.
    experts = ExpertsConfig(count=8, active=2, width=16)
    sizes = {
        active: model_size(tiny_model(experts=dataclasses.replace(experts, active=active))[0])
        for active in (1, 2, 8)
    }
    one = 2 * 3 * 32 * 16  # gate, up and down of an expert, in both layers
    for active, found in sizes.items():
        assert found.matrices - sizes[1].matrices == (active - 1) * one

    # A head of values has no projection and linear layers have no pairs.
    model, _ = tiny_model()
    assert model_size(headed_model(model)).projection == 0
    linear = LinearAttentionConfig(key_heads=1, value_heads=1, key_dim=8, value_dim=8)
    layers = (LayerKind(linear=True), LayerKind())
    mixed = tiny_model(layers=layers, linear_attention=linear)[0]
    assert 2 * model_size(mixed).attention == model_size(model).attention

    # A model that does not tell its heads is not measured.
    model, _ = tiny_model(num_layers=1)
    config = dataclasses.make_dataclass("Config", ["dtype"])("float32")
    meter = Meter(model._replace(config=config), peak_flops=1e12)
    seconds = {"wait": 1.0, "score": 0.0, "train": 1.0}
    assert set(meter(make_batch(), seconds)) == {"unique_tokens", "unique_tokens_per_second"}


def test_speed_of_a_step(monkeypatch):
    model, _ = tiny_model(num_layers=1)
    batch = make_batch(prompts=2, group=2)
    batch = batch.replace(where=jnp.array([[True, True], [True, False]]))
    seconds = {"wait": 1.0, "score": 0.5, "train": 0.5}
    prompts = np.asarray(batch.prompt_mask).sum(-1)
    lengths = np.asarray(batch.mask).sum(-1) * np.asarray(batch.where)
    tokens = prompts.sum() + lengths.sum()
    flops = train_flops(prompts, lengths, size=model_size(model))
    found = Meter(model, peak_flops=1e6, devices=4, epochs=2)(batch, seconds)
    assert found == {
        "unique_tokens": tokens,
        "unique_tokens_per_second": tokens / 2.0,
        "flops_per_second": 2 * flops / 0.5,
        "mfu": 2 * flops / 0.5 / 4e6,
    }
    assert Meter(model, shared_prefix_len=2)(batch, seconds)["unique_tokens"] == tokens - 2
    observed = batch.replace(mask=jnp.asarray(batch.mask).at[0, 0, 0].set(False))
    assert Meter(model)(observed, seconds)["unique_tokens"] == tokens  # the model reads it still
    frozen = Meter(model, peak_flops=1e6, frozen=True)(batch, seconds)
    assert frozen["flops_per_second"] < flops / 0.5
    # On a device whose peak nobody gave there is no utilization.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    meter = Meter(model)
    assert meter.peak is None and "mfu" not in meter(batch, seconds)
    assert meter.about() == {"peak FLOP/s": "not known"}
    given = Meter(model, peak_flops=1e14, devices=4).about()
    assert given == {"peak FLOP/s": "4e+14, as configured for each of 4"}


def test_speed_of_a_population():
    model, _ = tiny_model(num_layers=1)
    batch = make_batch(prompts=2, group=2)
    batch = batch.replace(where=jnp.array([[True, True], [True, False]]))
    seconds = {"wait": 1.0, "score": 0.5, "train": 0.25}
    prompts = np.asarray(batch.prompt_mask).sum(-1)
    lengths = np.asarray(batch.mask).sum(-1) * np.asarray(batch.where)
    for shared_prefix_len in (0, 1):
        tokens = 2 * (prompts.sum() - shared_prefix_len) + lengths.sum()
        flops = population_flops(
            prompts, lengths, size=model_size(model), shared_prefix_len=shared_prefix_len
        )
        meter = Meter(
            model, peak_flops=1e6, shared_prefix_len=shared_prefix_len, samples_members=True
        )
        # The answers are its work, so their time counts and that of scoring does not.
        assert meter(batch, seconds) == {
            "unique_tokens": tokens,
            "unique_tokens_per_second": tokens / 1.75,
            "flops_per_second": flops / 1.25,
            "mfu": flops / 1.25 / 1e6,
        }


def test_speed_of_a_denoiser():
    """Each draw is a row of a prompt and all cells of a response, which all see each other."""
    model, _ = tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259)
    size, seconds = model_size(model), {"wait": 1.0, "score": 0.5, "train": 0.5}
    batch = make_batch(prompts=3, group=2, length=5)
    batch = batch.replace(where=batch.where.at[1, 0].set(False))
    rows = [
        int(prompt) + 5
        for prompt, group in zip(batch.prompt_mask.sum(-1), batch.where, strict=True)
        for _ in range(int(group.sum()))
    ]
    once = sum(6 * size.matrices * n + 12 * size.attention * n * n for n in rows)
    once += 6 * size.projection * 5 * len(rows)

    def measured(draws, passes=1, model=model, **options):
        masked = np.ones((*batch.mask.shape, draws), bool)
        likelihood = jr.diffusion.elbo_likelihood(passes=passes)
        meter = Meter(model, peak_flops=1e6, likelihood=likelihood, **options)
        return meter(batch.with_extras({"masked": masked}), seconds)

    for draws, passes, epochs, times in ((1, 1, 1, 1), (4, 1, 1, 4), (4, 2, 2, 4), (4, 1, 3, 12)):
        found = measured(draws, passes, epochs=epochs)
        assert found["flops_per_second"] == times * once / 0.5
        assert found["mfu"] == times * once / 0.5 / 1e6
    assert found["unique_tokens"] == Meter(model)(batch, seconds)["unique_tokens"]
    # In blocks, what a token sees depends on its place.
    blocks = tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259, block_length=2)
    found = measured(1, model=blocks[0])
    assert set(found) == {"unique_tokens", "unique_tokens_per_second"}


def test_the_peak_of_a_cpu_is_measured(monkeypatch):
    # The peak of a cpu is measured once.
    peak = profile.measured_peak("float32")
    assert 1e8 < peak < 1e14
    measured = profile.measured_peak.cache_info().misses
    assert Meter(tiny_model(num_layers=1)[0], devices=8).peak == peak
    assert profile.measured_peak.cache_info().misses == measured

    # The peak is that of the fastest product so far.
    measured = iter([2e6, 1e6, 4e6, 3e6, 8e6])
    monkeypatch.setattr(profile, "_timed_product", lambda dtype, size: lambda: next(measured))
    monkeypatch.setattr(profile, "measured_peak", lambda dtype: 1e6)
    model, batch = tiny_model(num_layers=1)[0], make_batch()
    meter = Meter(model)
    at = [meter(batch, {"wait": 0.0, "score": 0.0, "train": t}) for t in (0.5, 2.0, 1.0, 1.0, 1.0)]
    peaks = [round(x["flops_per_second"] / x["mfu"]) for x in at]
    assert peaks == [1e6, 2e6, 2e6, 4e6, 4e6]  # a short step measures nothing
    configured = Meter(model, peak_flops=5e6)
    assert configured(batch, {"wait": 0.0, "score": 0.0, "train": 2.0})["mfu"] > 0
    assert configured.peak == 5e6 and next(measured) == 8e6


def test_traces_of_steps(tmp_path, monkeypatch):
    # A trace of the steps that are asked for.
    for step in (1, 2, 3):
        with traced(step, (2,), tmp_path / "profile"):
            jnp.ones(3).sum().block_until_ready()
    files = [p for p in (tmp_path / "profile").rglob("*") if p.is_file()]
    assert {p.relative_to(tmp_path / "profile").parts[0] for p in files} == {"step_00000002"}
    assert any(p.name.endswith(".xplane.pb") for p in files)

    # A trace that fails is a warning.
    with traced(1, (1,), tmp_path / "outer"):
        with pytest.warns(UserWarning, match="no trace of step 2: "), traced(2, (2,), tmp_path):
            done = True
        assert done
    stopped = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: stopped.append(True))
    with pytest.raises(KeyError), traced(3, (3,), tmp_path):
        raise KeyError
    assert stopped == [True]

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    message = "no trace of step 4: no space is left"
    with pytest.warns(UserWarning, match=message), traced(4, (4,), tmp_path):
        pass
