"""Scores of a batch: of each token, its log-probability and the entropy before it.

    logp[p, g, t] = log softmax(z / temperature)[token],  z = logits after the prompt and tokens < t

Prompts are read once for their responses, and what all prompts share once. Rows may be packed, form
a tree, or hold several prompts: values and gradients are those of a row for each response.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from on_meshes import mesh_of
from rows import for_each
from step_makers import arrays_of

import jaxrl_llm as jr
from jaxrl_llm.core.flat_packing import plan_flat
from jaxrl_llm.core.packing import plan_packing, plan_tree, row_trees
from jaxrl_llm.models import AttentionContext, LayerKind
from jaxrl_llm.models.sharding import on_mesh
from jaxrl_llm.rollout.sampler import count_shared_prefix
from jaxrl_llm.testing import make_case, tiny_model
from jaxrl_llm.testing.extras import make_extras
from jaxrl_llm.testing.model_checks import score_rows
from jaxrl_llm.train import init_state, make_mesh, make_scorer, pack_batch, score
from jaxrl_llm.train.batches import map_microbatches
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.update import reads
from jaxrl_llm.train.update.part import At, Setup
from jaxrl_llm.train.update.parts import mismatched_prompts
from jaxrl_llm.train.update.score_batch import score_batch, score_visits


def log_softmax(model, params, before, targets, *, temperature, size):
    """Over the vocabulary ``[T, V]`` before each target: one row alone, a softmax in float64."""
    row, start, end = np.zeros(size, np.int32), len(before), len(before) + len(targets)
    row[:end] = [*before, *targets]  # padded behind, so that one compiled program serves all rows
    tokens = jnp.asarray(row)[None, None]
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
    positions = jnp.arange(size, dtype=jnp.int32)[None, None]
    hidden = np.float64(_forward(model.apply, params, tokens, positions, context)[0, 0])
    logits = hidden[start - 1 : end - 1] @ np.float64(model.output_matrix(params)).T / temperature
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def kept_of(batch, p, g):
    """The tokens of a prompt, and of a response."""
    prompt = np.asarray(batch.prompt_tokens[p])[np.asarray(batch.prompt_mask[p])]
    return prompt, np.asarray(batch.tokens[p, g])[np.asarray(batch.mask[p, g])]


def plain_score(model, params, batch, *, temperature):
    """Each response after its own copy of the prompt."""
    logp, entropy = np.zeros((2, *batch.tokens.shape))
    for p, g in np.ndindex(batch.tokens.shape[:2]):
        prompt, response = kept_of(batch, p, g)
        n, options = len(response), {"temperature": temperature, "size": 16}
        log_p = log_softmax(model, params, prompt, response, **options)
        logp[p, g, :n] = log_p[np.arange(n), response]
        entropy[p, g, :n] = -np.sum(np.exp(log_p) * log_p, -1)
    return logp, entropy


_forward = jax.jit(lambda apply, *args: apply(*args)[0], static_argnums=0)


def test_inputs_of_another_kind_are_refused():
    # What assumes logits without a cap is refused.
    scorer = Scorer(tiny_model(num_layers=1, logit_cap=30.0)[0])
    with pytest.raises(ValueError, match="hidden_sq is computed for logits .* logit_cap 30"):
        scorer({}, None, of_hidden=("hidden_sq",))
    with pytest.raises(ValueError, match="the effect of an optimizer step is computed for logits"):
        scorer.step_effects({}, None, None, {}, advantages=None, rate=None)

    # A mask is bool and a shared prefix not negative.
    model, params = tiny_model()
    batch = make_batch(prompts=2)
    with pytest.raises(TypeError, match="score: mask must be bool"):
        score(model, params, batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.tokens)
    for make in (make_scorer, jr.rollout.make_sampler):
        options = {} if make is make_scorer else {"max_new_tokens": 2, "group_size": 1}
        with pytest.raises(ValueError, match="shared_prefix_len must not be negative"):
            make(model, shared_prefix_len=-1, **options)


def test_an_answer_is_read_where_the_next_turn_begins():
    model, params = tiny_model()
    batch, rng = make_batch(), np.random.default_rng(5)
    P, G, T = batch.tokens.shape
    # Two turns with an observation of two tokens between them; the last response has one turn.
    turn_ids = np.where(np.asarray(batch.mask), np.array([0, 0, -1, -1] + [1] * (T - 4)), -1)
    turn_ids[-1, -1] = np.where(np.arange(T) < 3, 0, -1)
    frames, answers = rng.integers(1, 90, (P, 2)), rng.integers(1, 90, (P, 3))
    lengths = [1 + p % 3 for p in range(P)]
    extras = {
        "ground_truth": jnp.asarray(np.hstack([frames, answers]), jnp.int32),
        "ground_truth_mask": jnp.array([[False] * 2 + [t < n for t in range(3)] for n in lengths]),
        "turn_ids": jnp.asarray(turn_ids, jnp.int32),
        "turn_where": jnp.asarray(np.stack([(turn_ids == k).any(-1) for k in range(2)], -1)),
    }
    batch = batch.replace(extras=extras)
    scorer = Scorer(model, 0.7)
    out = np.asarray(jax.jit(scorer.answers)(params, batch))
    expected = np.zeros((P, G, 3))
    for p, g, k in np.ndindex(P, G, 3):
        (prompt, _), ids = kept_of(batch, p, g), turn_ids[p, g]
        end = next((t for t in range(T) if ids[t] == k), np.flatnonzero(ids >= 0)[-1] + 1)
        answer = answers[p, : lengths[p]]
        before = [*prompt, *np.asarray(batch.tokens[p, g])[:end], *frames[p]]
        log_p = log_softmax(model, params, before, answer, temperature=0.7, size=32)
        expected[p, g, k] = log_p[np.arange(len(answer)), answer].mean()
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert np.ptp(out, axis=-1)[:-1].min() > 1e-3
    # What stands behind an answer, and behind a response, is not read.
    late = np.arange(T) > np.max(np.where(turn_ids >= 0, np.arange(T), -1), -1)[..., None]
    tokens = jnp.where(late, 10**6, batch.tokens)
    after = jnp.cumsum(extras["ground_truth_mask"][:, ::-1], axis=-1)[:, ::-1] == 0
    ground_truth = jnp.where(after, 10**6, extras["ground_truth"])
    junk = batch.replace(tokens=tokens, extras=extras | {"ground_truth": ground_truth})
    np.testing.assert_array_equal(jax.jit(scorer.answers)(params, junk), out)
    on_devices = jax.jit(on_mesh(scorer.answers, make_mesh(data=2, fsdp=4)))
    np.testing.assert_allclose(on_devices(params, batch), out, atol=2e-5)


def test_equals_one_row_at_a_time():
    (model, params), batch, temperature = tiny_model(), make_batch(), 0.7
    scorer = jax.jit(lambda p, *x: score(model, p, *x, temperature=temperature, chunk_size=7))
    logp, entropy = scorer(params, *arrays_of(batch))
    expected_logp, expected_entropy = plain_score(model, params, batch, temperature=temperature)
    np.testing.assert_allclose(logp, expected_logp, atol=2e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=2e-5)


def weighted(scorer, batch, *, seed=0):
    """Value and gradient of a sum in which each token has weights of its own, compiled."""
    rng = np.random.default_rng(seed)
    weights = jnp.asarray(rng.normal(size=(2, *batch.mask.shape)), jnp.float32)

    def loss(params):
        found = jnp.stack(scorer(params)[:2])
        return jnp.sum(weights * found), found

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def expect_equal(got, want, tolerance=1e-5):
    """Within ``tolerance`` of the largest value of each leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def expect_alike(got, want):
    """Compares values and gradients of ``weighted``; returns the values that were got."""
    ((_, values), gradient), ((_, expected), expected_gradient) = got, want
    expect_equal(values, expected)
    expect_equal(gradient, expected_gradient)
    return values


def test_equals_the_padded_form_in_value_and_gradient():
    model, params = tiny_model()
    batch = make_batch(prompts=3, group=4)
    batch = batch.replace(mask=batch.mask.at[1, 2].set(False).at[2, 0].set(False))
    assert len(set(np.asarray(batch.prompt_mask).sum(-1).tolist())) == 3
    shared = weighted(lambda p: score(model, p, *arrays_of(batch)), batch)
    padded = weighted(lambda p: score_rows(p, batch, network=model), batch)
    want = padded(params)
    got = expect_alike(shared(params), want)
    assert not np.asarray(got)[:, ~np.asarray(batch.mask)].any()


def test_padding_is_never_read():
    model, params = tiny_model()
    batch = make_batch()
    junk = jnp.where(batch.mask, batch.tokens, 10_000)
    prompt_junk = jnp.where(batch.prompt_mask, batch.prompt_tokens, -5)

    def loss(params, prompt_tokens, tokens):
        logp, entropy = score(model, params, prompt_tokens, batch.prompt_mask, tokens, batch.mask)
        return jnp.sum(logp) + jnp.sum(entropy)

    grad = jax.jit(jax.grad(loss))
    clean = grad(params, batch.prompt_tokens, batch.tokens)
    dirty = grad(params, prompt_junk, junk)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def packed_batch():
    """Responses of unequal lengths, one of them empty, one with a hole, in two rows of four."""
    batch = make_batch(prompts=3, group=4, length=6)
    lengths = np.array([[6, 1, 2, 2], [3, 3, 0, 5], [1, 1, 1, 1]])
    mask = np.arange(6) < lengths[..., None]
    mask[1, 3, 1:3] = False  # as of tokens that an environment wrote
    packing = jax.tree.map(jnp.asarray, plan_packing(mask))
    assert packing.members.shape == (3, 2, 6)
    return batch.replace(mask=jnp.asarray(mask), packing=packing)


def tree_batch():
    """The packed batch, where responses begin alike, one of them twice, one with another mask."""
    batch = packed_batch()
    tokens, mask = np.array(batch.tokens), np.array(batch.mask)
    tokens[0, 2:, :2] = tokens[0, 0, :2]
    tokens[1, 3, :3] = tokens[1, 0, :3]
    mask[1, 3, :3] = True, False, True
    tree = plan_tree(tokens, mask, size=18)
    assert (tree.sources >= 0).sum() < mask.sum() - 3
    arrays = jax.tree.map(jnp.asarray, (tokens, mask, tree))
    return batch.replace(tokens=arrays[0], mask=arrays[1], packing=arrays[2])


def flat_batch(**options):
    """The tree's batch with a prompt that begins like another one and one of a single token."""
    batch = tree_batch()
    prompts, kept = np.array(batch.prompt_tokens), np.array(batch.prompt_mask)
    prompts[1, :3], kept[2] = prompts[0, :3], np.arange(kept.shape[1]) < 1
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    flat = plan_flat(tokens, mask, prompts, kept, most=9.0, **options)
    return batch.replace(prompt_tokens=prompts, prompt_mask=kept, packing=flat)


def spread_batch():
    return flat_batch(span=1, shards=3)


WINDOW = {"layers": (LayerKind(window=4), LayerKind(rotary=False)), "num_layers": 2}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "parts", "takes_prompts", "sizes"),
    [
        (packed_batch, {}, True, {}),
        (tree_batch, {}, False, {}),
        (tree_batch, {}, True, {"data": 2, "fsdp": 4}),
        (flat_batch, WINDOW, True, {}),
        (spread_batch, {}, True, {"fsdp": 3}),
    ],
)
def test_any_rows_equal_a_row_each_in_value_and_gradient(make, parts, takes_prompts, sizes):
    model, params = tiny_model(**parts)
    model, batch = model._replace(takes_prompts=takes_prompts), make()
    apart = weighted(lambda p: score(model, p, *arrays_of(batch), temperature=0.7), batch)
    options = {"temperature": 0.7, "remat": "full", "packing": batch.packing}
    # Another token in every cell of a packed row that holds none, and behind every response.
    last = batch.mask[..., ::-1].cumsum(-1)[..., ::-1] > 0
    tokens = jnp.where(last, batch.tokens, -7) if make is packed_batch else batch.tokens
    arrays = arrays_of(batch.replace(tokens=tokens))
    rows = on_mesh(lambda p: score(model, p, *arrays, **options), mesh_of(sizes))
    expect_alike(weighted(rows, batch)(params), apart(params))
    if make is spread_batch:
        assert len(batch.packing.sources) == 3
    if make is flat_batch:
        assert len(batch.packing.sources) < len(batch.tokens)


@pytest.mark.slow
def test_statistics_of_a_tree_read_the_rows_of_each_response():
    model, params = tiny_model()
    batch = tree_batch()
    batch = batch.replace(extras={"x": jnp.arange(batch.mask.size * 1.0).reshape(batch.mask.shape)})

    @jax.jit
    def numbers(batch):
        functions = {"top": lambda z, y: z.max(-1), "mine": lambda z, y, x: x + 0 * z[:, 0]}
        return Scorer(model)(params, batch, functions).statistics

    got, want = numbers(batch), numbers(batch.replace(packing=None))
    expect_equal(got, want)
    np.testing.assert_array_equal(got["mine"], jnp.where(batch.mask, batch.extras["x"], 0))


PACKING, TREE = packed_batch().packing, tree_batch().packing
SHORT = PACKING._replace(starts=PACKING.starts[:, :3])


@for_each("takes_prompts", [True, False])
@for_each(
    "changes, options, message",
    [
        ({"prompts": 2}, {}, r"score: prompt_tokens \(2, 6\) and tokens \(3, 4, 6\)"),
        ({}, {"shared_prefix_len": -1}, "score: shared_prefix_len must not be negative; got -1"),
        ({}, {"shared_prefix_len": 6}, "score: shared_prefix_len must be below the 6 tokens of a"),
        ({"reads_segments": False}, {"packing": PACKING}, "needs a model whose reads_segments"),
        (
            {"reads_trees": False},
            {"packing": TREE},
            "score: a Tree needs a model whose reads_trees",
        ),
        ({}, {"packing": SHORT}, r"score: packing.starts must have shape \(3, 4\)"),
    ],
)
def test_bad_inputs_are_named(takes_prompts, changes, options, message):
    model, params = tiny_model()
    reads = {name: changes.get(name, True) for name in ("reads_segments", "reads_trees")}
    model = model._replace(takes_prompts=takes_prompts, **reads)
    batch, prompts = packed_batch(), changes.get("prompts", 3)
    arrays = (batch.prompt_tokens[:prompts], batch.prompt_mask[:prompts], batch.tokens, batch.mask)
    with pytest.raises(ValueError, match=message):
        score(model, params, *arrays, **options)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_go_through_the_layers_with_their_responses_or_before_them(packed):
    model, params = tiny_model()
    batch = packed_batch()
    arrays = (batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
    calls = []

    def apply(params, tokens, *rest, **options):
        calls.append(tokens.shape)
        return model.apply(params, tokens, *rest, **options)

    packing = batch.packing if packed else None
    seen = model._replace(apply=apply)
    both = (3, 1, 6 + (2 if packed else 4) * 6)

    def found(network, mesh=None, **options):
        calls.clear()
        options |= {"temperature": 0.7, "remat": "full", "packing": packing}
        scorer = on_mesh(lambda p: score(network, p, *arrays, **options), mesh)
        return weighted(scorer, batch)(params)

    want = found(seen._replace(takes_prompts=False))
    assert len(calls) == 2 and both not in calls
    mesh = make_mesh(data=2, fsdp=4)
    # On a mesh, what prompts have in common is not computed apart.
    for options in ({}, {"mesh": mesh}, {"mesh": mesh, "shared_prefix_len": 1}):
        got = found(seen, **options)
        assert calls == [both]
        expect_equal(got, want)
    calls.clear()
    jax.eval_shape(lambda p: score(seen, p, *arrays, shared_prefix_len=1), params)
    assert len(calls) == 3  # what is common, the rest of the prompts, responses


COMMON = 6
PROMPTS = [[7, 8, 9, 10, 11, 12, *rest] for rest in ([1], [2, 3, 4], [5, 6])]


@pytest.fixture(scope="module")
def tiny():
    return jr.testing.tiny_model()


def _padded():
    width = max(map(len, PROMPTS)) + 2
    tokens = np.zeros((len(PROMPTS), width), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.arange(width) < np.array([[len(p)] for p in PROMPTS])


@pytest.mark.slow
def test_scores_and_gradients_are_those_of_whole_prompts(tiny):
    model, params = tiny
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, (3, 2, 5))
    mask = np.arange(5) < rng.integers(0, 6, (3, 2, 1))
    weights = rng.normal(size=mask.shape)

    def loss(params, shared_prefix_len, remat):
        options = {"shared_prefix_len": shared_prefix_len, "remat": remat}
        logp, entropy = score(model, params, *_padded(), tokens, mask, **options)
        return jnp.sum(weights * (logp + entropy)), (logp, entropy)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 2))
    wanted, out = grad(params, 0, "none")
    for remat in ("none", "full"):
        got, found = grad(params, COMMON, remat)
        np.testing.assert_allclose(found, out, rtol=1e-5, atol=1e-5)
        expect_equal(got, wanted)


def test_what_prompts_share_is_computed_once(tiny):
    # How many tokens prompts share.
    ten = list(range(10))
    assert count_shared_prefix([[*ten, 1], [*ten, 2, 3]]) == 10
    assert count_shared_prefix([ten, [*ten, 2]]) == 9  # each has one more
    assert count_shared_prefix([ten]) == 9
    assert count_shared_prefix([np.arange(12), np.arange(12)]) == 11
    assert count_shared_prefix([[*ten[:5], 1], [*ten[:5], 2]]) == 0  # not worth a pass of its own

    # Fewer tokens pass through the layers.
    model, params = tiny
    seen = []

    def apply(params, tokens, *rest, **options):
        seen.append(tokens.size)
        return model.apply(params, tokens, *rest, **options)

    tokens = jnp.zeros((3, 1, 2), int)
    for shared_prefix_len in (0, COMMON):
        scored = functools.partial(
            score, model._replace(apply=apply), shared_prefix_len=shared_prefix_len
        )
        jax.eval_shape(scored, params, *_padded(), tokens, tokens == 0)
    width = _padded()[0].shape[1]
    assert seen == [3 * (width + 2), COMMON, 3 * (width - COMMON), 3 * 2]


@pytest.mark.slow
def test_samples_the_same_responses(tiny):
    model, params = tiny
    key = jax.random.key(3)
    whole, shared = (
        jr.rollout.make_sampler(
            model, max_new_tokens=6, group_size=2, shared_prefix_len=shared_prefix_len
        )(params, key, PROMPTS)
        for shared_prefix_len in (0, COMMON)
    )
    np.testing.assert_array_equal(whole.tokens, shared.tokens)
    np.testing.assert_allclose(whole.model_logp, shared.model_logp, atol=1e-5)


@for_each("prompts", [[PROMPTS[0], [1, 2, 3, 4, 5, 6, 7]], [PROMPTS[0][:6]]])
def test_a_prompt_without_the_shared_prefix_is_named(tiny, prompts):
    model, params = tiny
    sample = jr.rollout.make_sampler(
        model, max_new_tokens=2, group_size=1, shared_prefix_len=COMMON
    )
    with pytest.raises(ValueError, match=rf"prompt {len(prompts) - 1} must begin with the 6"):
        sample(params, jax.random.key(0), prompts)


def split_context(batch, cuts):
    """The same sequences with the prompt's tokens from ``cuts[p]`` on in front of each response."""
    P, G, T = batch.tokens.shape
    lengths = np.asarray(batch.prompt_mask).sum(-1)
    extra = int((lengths - cuts).max())
    tokens, mask = np.full((P, G, T + extra), 7, np.int32), np.zeros((P, G, T + extra), bool)
    keep = np.asarray(batch.prompt_mask) & (np.arange(batch.prompt_mask.shape[1]) < cuts[:, None])
    for p in range(P):
        rest = np.asarray(batch.prompt_tokens)[p, cuts[p] : lengths[p]]
        n = len(rest)
        tokens[p, :, :n] = rest
        tokens[p, :, n : n + T], mask[p, :, n : n + T] = batch.tokens[p], batch.mask[p]
    return batch.replace(tokens=jnp.asarray(tokens), mask=jnp.asarray(mask), prompt_mask=keep)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(("most", "packed"), [(1, False), (2, True)])
def test_context_in_front_of_a_response_is_context_wherever_it_is_cut(most, packed):
    model, params = tiny_model(num_layers=1)
    batch = make_batch(prompts=4, group=3, prompt_length=6)
    # All but one of a group are short, so that several lie in a row.
    short = np.arange(batch.mask.shape[-1]) < np.array([[99], [1], [1]])
    batch = batch.replace(mask=batch.mask & jnp.asarray(short))
    cuts = np.minimum(np.asarray(batch.prompt_mask).sum(-1), most)
    cut = split_context(batch, cuts)
    assert (cut.tokens.shape[-1] > batch.tokens.shape[-1]) and cut.mask.sum() == batch.mask.sum()
    size = 2 * cut.mask.shape[-1]
    packing = plan_packing(np.asarray(cut.mask), size=size) if packed else None
    assert not packed or packing.members.shape[1] < 3
    weights = jnp.asarray(np.random.default_rng(0).normal(size=batch.mask.sum()), jnp.float32)

    def loss(params, each, at, packing=None):
        logp, entropy = score(model, params, *arrays_of(each), packing=packing)
        return jnp.sum(weights * logp[at]) + jnp.sum(entropy[at]), logp[at]

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, want), want_gradient = grad(params, batch, np.nonzero(np.asarray(batch.mask)))
    (_, got), gradient = grad(params, cut, np.nonzero(np.asarray(cut.mask)), packing)
    expect_equal(got, want)
    expect_equal(gradient, want_gradient)


def rewritten_batch():
    """Two groups of two responses whose tokens 1 and 2 are replaced by what follows."""
    batch = make_batch(prompts=2, group=2, length=6)
    batch = batch.replace(mask=jnp.ones(batch.mask.shape, bool))
    ends = np.broadcast_to([6, 3, 3, 6, 6, 6], batch.mask.shape)
    return batch.replace(packing=row_trees(ends))


@pytest.mark.slow
def test_rewritten_responses_are_read_as_they_were_after_any_prompt():
    # A teacher with prompts of its own reads rewritten responses as they were.
    model, params = tiny_model(num_layers=1)
    batch, scorer = rewritten_batch(), Scorer(model)
    spread = (2, 2, batch.prompt_mask.shape[-1])
    prompts = {
        "teacher_prompt_tokens": jnp.broadcast_to(batch.prompt_tokens[:, None], spread),
        "teacher_prompt_mask": jnp.broadcast_to(batch.prompt_mask[:, None], spread),
    }

    def some(logits, tokens):
        return logits[..., :5]

    policy = scorer.teacher(params, batch, {"some": some})
    own = scorer.teacher(params, batch.replace(extras=prompts), {"some": some})
    np.testing.assert_allclose(own["some"], policy["some"], atol=1e-4)

    # Another rows prompt leaves rewritten responses as they were.
    model, params = tiny_model(num_layers=1)
    batch, scorer = rewritten_batch(), Scorer(model)
    alike = batch.replace(
        prompt_tokens=batch.prompt_tokens[:1].repeat(2, 0),
        prompt_mask=batch.prompt_mask[:1].repeat(2, 0),
    )
    own = jnp.sum(scorer(params, alike).logp, axis=-1)
    np.testing.assert_allclose(mismatched(scorer, params, alike, 1), own, rtol=1e-4)


def mismatched(scorer, params, batch, microbatches):
    """Log-probabilities of responses after the previous row's prompt."""
    setup = Setup(recipe=jr.recipes.kto(), scorer=scorer)
    at = At(setup, types.SimpleNamespace(policy=params), microbatches)
    part = mismatched_prompts.part(setup.recipe, setup)
    return reads.read_entries((part,), batch, at).extras["kl_logp"]


def watched_slices(monkeypatch):
    """The slices in which each pass over a batch reads it."""
    slices = []

    def watched(function, batch, count):
        slices.append(count)
        return map_microbatches(function, batch, count)

    monkeypatch.setattr(reads, "map_microbatches", watched)
    return slices


def short_batch(budget):
    """Eight groups of three short responses in rows of six cells, packed for a budget of cells."""
    model, _ = tiny_model(num_layers=1)
    batch = jax.device_get(make_batch(prompts=8, group=3, length=6))
    batch = batch.replace(mask=batch.mask & (np.arange(6) < 1))
    return pack_batch(batch, "flat", model=model, tokens_per_microbatch=budget, least_saved=1)[0]


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(("budget", "want"), [(512, 1), (64, 4), (20, 8)])
def test_responses_after_another_rows_prompt_are_read_within_the_budget(budget, want, monkeypatch):
    """A padded group has 24 cells, a packed one at most 18."""
    (model, params), batch = tiny_model(num_layers=1), short_batch(budget)
    slices, scorer = watched_slices(monkeypatch), Scorer(model)
    got = mismatched(scorer, params, batch, batch.packing.microbatches)
    np.testing.assert_allclose(
        got, mismatched(scorer, params, batch.replace(packing=None), 1), rtol=1e-4
    )
    assert slices == [want, 1] and batch.packing.microbatches <= want


def test_the_budget_is_that_of_each_device(monkeypatch):
    (model, params), slices = tiny_model(num_layers=1), watched_slices(monkeypatch)
    over_mesh = on_mesh(functools.partial(mismatched, Scorer(model)), make_mesh(data=2, tensor=4))
    jax.eval_shape(lambda batch: over_mesh(params, batch, 1), short_batch(64))
    assert slices == [2]


@pytest.mark.of_many
@pytest.mark.parametrize(
    "recipe, cells",
    [
        (jr.recipes.kto(), 5 + 4 * 6),
        (jr.recipes.sdpo(), 4 * (7 + 6)),  # a prompt for each response
        (jr.recipes.igpo(), 5 + 4 * (6 + 7)),  # and the answer
        (jr.recipes.spo_tracker(num_prompts=8, length=6), 5 + 2 * 6),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_passes_over_padded_rows_are_within_the_budget(recipe, cells, monkeypatch):
    (model, params), batch = tiny_model(num_layers=1), jax.device_get(make_case().batch)
    wanted = {"teacher_prompt_tokens", "teacher_prompt_mask", "ground_truth", "ground_truth_mask"}
    wanted |= {"turn_ids", "turn_where", "prompt_ids"}
    extras = {name: x for name, x in make_extras(batch).items() if name in wanted}
    batch = batch.replace(mask=batch.mask & (np.arange(6) < 2), behavior_logp=None, extras=extras)
    batch, _ = pack_batch(batch, "flat", model=model, tokens_per_microbatch=130, least_saved=1)
    assert batch.packing.microbatches == 1
    state = init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
    computes = score_visits if recipe.computed_from("last_visit") else score_batch
    slices = watched_slices(monkeypatch)
    jax.eval_shape(lambda batch: computes(batch, recipe, Scorer(model), state=state), batch)
    assert slices[-1] == next(n for n in (2, 4, 8) if 8 // n * cells <= 130)
