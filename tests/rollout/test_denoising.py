"""The sampler of models that denoise: its distribution by enumeration, its order, its laws."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.forwards import logits_of

import jaxrl_llm as jr
from jaxrl_llm.models import denoise
from jaxrl_llm.rollout import DenoisingOptions, make_denoising_sampler
from jaxrl_llm.rollout.denoising import cells_at_once, make_uncover

MASK, V = 5, 6
PROMPTS = [[1, 2, 3], [4]]


@pytest.fixture(scope="module")
def tiny():
    model, params = jr.testing.tiny_model(
        num_layers=1, causal=False, tied=False, vocab_size=V, mask_id=MASK
    )
    return model, jax.tree.map(lambda x: 1.4 * x, params)


@functools.cache
def forward(model):
    def logits(params, prompt, tokens):
        mask = jnp.ones((1, prompt.shape[-1]), bool)
        hidden = denoise(model, params, prompt[None], mask, tokens[None, None])
        return (hidden @ model.output_matrix(params).T)[0, 0]

    return jax.jit(logits)


def logprobs(model, params, prompt, tokens):
    """Of every token at every place, by one forward of one row."""
    logits = forward(model)(params, jnp.array(prompt), jnp.array(tokens))
    logits = np.array(logits, np.float64)
    logits[:, MASK] = -np.inf
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def exact(model, params, prompt, length, remasking):
    """The probability of each response, one token a step: a sum over all that may be drawn."""
    total = {}

    def go_on(tokens, logp):
        hidden = [i for i in range(length) if tokens[i] == MASK]
        if not hidden:
            total[tuple(tokens)] = total.get(tuple(tokens), 0.0) + np.exp(logp)
            return
        values = logprobs(model, params, prompt, tokens)
        entropy = -(np.exp(values[:, :MASK]) * values[:, :MASK]).sum(-1)
        for drawn in itertools.product(range(MASK), repeat=len(hidden)):
            of_draw = logp + sum(values[i, x] for i, x in zip(hidden, drawn, strict=True))
            if remasking == "random":
                chosen = [(k, -np.log(len(hidden))) for k in range(len(hidden))]
            elif remasking == "entropy":
                chosen = [(int(np.argmin(entropy[hidden])), 0.0)]
            else:
                sure = [values[i, x] for i, x in zip(hidden, drawn, strict=True)]
                chosen = [(int(np.argmax(sure)), 0.0)]
            for k, more in chosen:
                after = list(tokens)
                after[hidden[k]] = drawn[k]
                go_on(after, of_draw + more)

    go_on([MASK] * length, 0.0)
    return total


@pytest.mark.of_many
@pytest.mark.parametrize("remasking", ["confidence", "entropy", "random"])
def test_the_distribution_of_responses(tiny, remasking):
    model, params = tiny
    size = 6000
    sample = make_denoising_sampler(
        model,
        max_new_tokens=2,
        group_size=size,
        options=DenoisingOptions(remasking=remasking),
    )
    tokens = np.asarray(sample(params, jax.random.key(3), PROMPTS[:1]).tokens)[0]
    expected = exact(model, params, PROMPTS[0], 2, remasking)
    assert abs(sum(expected.values()) - 1) < 1e-6
    counts = np.zeros((MASK, MASK))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    pairs = [(counts[x], size * p) for x, p in expected.items()]
    often = [(n, m) for n, m in pairs if m >= 5]
    rare = np.array([(n, m) for n, m in pairs if m < 5]).reshape(-1, 2).sum(0)
    assert len(often) > 8 and abs(rare[0] - rare[1]) < 5 * np.sqrt(rare[1] + 1)
    assert sum((n - m) ** 2 / m for n, m in often) < 56  # up to 24 degrees of freedom, 0.9998


def test_logits_of_few_cells_at_a_time_draw_the_same(tiny, monkeypatch):
    model, params = tiny
    options = DenoisingOptions(steps=2, remasking="random")

    def rollout():
        sample = make_denoising_sampler(
            model, max_new_tokens=5, group_size=3, options=options, temperature=0.7
        )
        return sample(params, jax.random.key(1), PROMPTS)

    at_once = rollout()
    assert cells_at_once(6, 5, V) == 5
    monkeypatch.setattr("jaxrl_llm.rollout.denoising.LOGITS", 2 * 6 * V)
    assert cells_at_once(6, 5, V) == 2
    parts = rollout()
    np.testing.assert_array_equal(at_once.tokens, parts.tokens)
    np.testing.assert_allclose(at_once.behavior_logp, parts.behavior_logp, atol=1e-5)


def test_the_order_and_the_log_probabilities(tiny):
    """Each token has that of the step that uncovered it, and blocks come one after the other."""
    model, params = tiny
    options = DenoisingOptions(steps=4, block_length=3, remasking="entropy")
    assert options.schedule(6) == (3, (2, 1))
    uncover = make_uncover(model, options, 6, 0.7, jnp.zeros(0, jnp.int32))
    ids = jnp.arange(4).reshape(1, 4)
    prompts, mask = jnp.array([PROMPTS[0]]), jnp.ones((1, 3), bool)
    start = jnp.full((1, 4, 6), MASK)
    done = jax.jit(uncover)(params, jax.random.key(0), prompts, mask, ids, start)
    order = np.asarray(done.order)[0]
    assert (np.sort(order[:, :3]) == [0, 0, 1]).all() and (np.sort(order[:, 3:]) == [2, 2, 3]).all()
    for row in range(4):
        tokens = np.asarray(done.tokens)[0, row]
        for step in range(4):
            seen = np.where(order[row] < step, tokens, MASK)
            values = logprobs(model, params, PROMPTS[0], seen.tolist())
            now = np.flatnonzero(order[row] == step)
            plain = values[now, tokens[now]]
            tempered = values[now] / 0.7
            tempered = tempered - np.log(np.exp(tempered).sum(-1, keepdims=True))
            np.testing.assert_allclose(done.model_logp[0, row, now], plain, atol=1e-4)
            np.testing.assert_allclose(
                done.behavior_logp[0, row, now],
                tempered[np.arange(len(now)), tokens[now]],
                atol=1e-4,
            )
            # What is uncovered is of the least entropy in its block.
            entropy = -(np.exp(values[:, :MASK]) * values[:, :MASK]).sum(-1)
            block = np.arange(3) + 3 * (step // 2)
            left = [i for i in block if order[row, i] > step]
            assert not left or entropy[now].max() <= entropy[left].min() + 1e-5


@pytest.mark.slow
def test_blocks_of_a_model_begin_in_the_prompt():
    """Prompts of 3 and 5 tokens end within a block of 4, which the response goes on with.

    Sampled a block a step, the log-probabilities are those of the model's own likelihood.
    """
    model, params = jr.testing.tiny_model(
        num_layers=2, causal=False, tied=False, vocab_size=V, mask_id=MASK, block_length=4
    )
    params = jax.tree.map(lambda x: 1.4 * x, params)
    prompts = jnp.array([[1, 2, 3, 0, 0], [4, 1, 1, 2, 3]])
    mask = jnp.arange(5) < jnp.array([[3], [5]])
    ids, start = jnp.arange(4).reshape(2, 2), jnp.full((2, 2, 8), MASK)
    blocks = [[0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1, 1, 2]]

    plain_logits = jax.jit(logits_of, static_argnums=0)
    for steps, remasking in ((2, "confidence"), (8, "random")):
        options = DenoisingOptions(steps=steps, block_length=4, remasking=remasking)
        uncover = make_uncover(model, options, 8, 1.0, jnp.zeros(0, jnp.int32))
        done = jax.jit(uncover)(params, jax.random.key(0), prompts, mask, ids, start)
        order = np.asarray(done.order)
        assert (order // (steps // 2) == np.array(blocks)[:, None]).all()
        for p, step in np.ndindex(2, order.max() + 1):
            g = step % 2
            now = np.flatnonzero(order[p, g] == step)
            if not now.size:
                continue
            # One row without padding, up to the end of the block; nothing behind it is there.
            end = int(np.flatnonzero(np.array(blocks[p]) == blocks[p][now[0]])[-1]) + 1
            seen = np.where(order[p, g] < step, done.tokens[p, g], MASK)[:end]
            prompt = np.asarray(prompts[p])[np.asarray(mask[p])]
            row = np.array([*prompt, *seen])[None, None]
            logits = np.array(plain_logits(model, params, row)[0, 0], np.float64)
            logits[:, MASK] = -np.inf
            logits = logits[len(prompt) :][now]
            values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            expected = values[np.arange(len(now)), np.asarray(done.tokens)[p, g, now]]
            np.testing.assert_allclose(done.model_logp[p, g, now], expected, atol=1e-4)
        if steps > 2:
            continue
        recipe = jr.recipes.diffu_grpo(p=0.0, epochs=1)
        batch = jr.recipes.Batch(
            tokens=done.tokens,
            mask=jnp.ones((2, 2, 8), bool),
            rewards=jnp.zeros((2, 2)),
            where=jnp.ones((2, 2), bool),
            prompt_tokens=prompts,
            prompt_mask=mask,
        )
        draws = jr.train.draw_masks(recipe.likelihood, jax.random.key(0), batch)
        scorer = jr.train.DenoisingScorer(model, recipe.likelihood)
        scored = jax.jit(scorer)(params, batch.replace(extras=draws))
        np.testing.assert_allclose(scored.logp, done.model_logp, atol=1e-4)
    with pytest.raises(ValueError, match="block_length 2 is not the model's, 4"):
        make_denoising_sampler(
            model, max_new_tokens=8, group_size=1, options=DenoisingOptions(block_length=2)
        )
    with pytest.raises(ValueError, match="uncovered has no effect with a model without blocks"):
        plain, _ = jr.testing.tiny_model(causal=False, vocab_size=V, mask_id=MASK)
        denoise(plain, params, prompts, mask, done.tokens, uncovered=done.tokens)


def test_a_response_depends_on_its_request_alone(tiny):
    model, params = tiny
    make = {"max_new_tokens": 4, "options": DenoisingOptions(steps=2)}
    key = jax.random.key(1)
    both = make_denoising_sampler(model, max_new_tokens=4, group_size=2, options=make["options"])
    rollout = both(params, key, PROMPTS, request_ids=[[7, 3], [5, 9]])
    alone = make_denoising_sampler(
        model, max_new_tokens=4, group_size=1, options=make["options"], buckets=(24,)
    )(params, key, [PROMPTS[1]], request_ids=[[9]])
    assert alone.tokens[0, 0].tolist() == rollout.tokens[1, 1].tolist()
    np.testing.assert_allclose(alone.behavior_logp[0, 0], rollout.behavior_logp[1, 1], atol=1e-5)


def test_ends_fixed_tokens_and_greedy(tiny):
    model, params = tiny
    options = DenoisingOptions(block_length=2)
    sample = make_denoising_sampler(
        model, max_new_tokens=4, group_size=3, options=options, stop_ids=(2,), pad_id=0
    )
    fixed = np.full((2, 3, 4), -1)
    fixed[0, 0] = [1, 2, -1, 3]
    fixed[0, 1, 3] = 4
    rollout = sample(params, jax.random.key(0), PROMPTS, fixed=fixed, version=8)
    assert rollout.tokens[0, 0].tolist() == [1, 2, 0, 0]
    assert rollout.mask[0, 0].tolist() == [True, True, False, False]
    assert rollout.version[0, 0].tolist() == [-1, -1, 0, 0] and rollout.finish[0, 0] == 1
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.mask)
    ends = (tokens == 2) & mask
    assert (ends.sum(-1) == (np.asarray(rollout.finish) == 1)).all()
    assert not (tokens == MASK).any()
    assert mask[0, 1, 3] <= (tokens[0, 1, 3] == 4)
    greedy = make_denoising_sampler(model, max_new_tokens=4, group_size=2, temperature=0.0)
    a = greedy(params, jax.random.key(0), PROMPTS)
    assert (a.tokens[:, 0] == a.tokens[:, 1]).all() and not np.asarray(a.behavior_logp).any()
    cold = make_denoising_sampler(model, max_new_tokens=4, group_size=2, temperature=1e-38)
    np.testing.assert_array_equal(cold(params, jax.random.key(0), PROMPTS).tokens, a.tokens)


def test_errors(tiny):
    model, params = tiny

    def make(**options):
        return make_denoising_sampler(
            model, max_new_tokens=6, group_size=1, options=DenoisingOptions(**options)
        )

    with pytest.raises(ValueError, match="7 steps are more than the 6 tokens"):
        make(steps=7)
    with pytest.raises(ValueError, match="block_length 4 does not divide a response of 6"):
        make(block_length=4)
    with pytest.raises(ValueError, match="4 steps do not divide into the 3 blocks"):
        make(steps=4, block_length=2)
    with pytest.raises(ValueError, match="remasking"):
        make(remasking="best")
    sample = make()
    with pytest.raises(ValueError, match="prompt 1 holds the mask id 5"):
        sample(params, jax.random.key(0), [[1], [2, MASK]])
    with pytest.raises(ValueError, match="fixed holds token 5, which is the mask id"):
        sample(params, jax.random.key(0), [[1]], fixed=np.full((1, 1, 6), MASK))
    causal, _ = jr.testing.tiny_model()
    with pytest.raises(ValueError, match="a denoising model; this one is causal; set causal=False"):
        make_denoising_sampler(causal, max_new_tokens=2, group_size=1)
