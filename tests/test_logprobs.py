"""Chunked log-probabilities: value, gradient and memory against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from cheap import close, equal, put
from rows import for_each

from jaxrl_llm.core.kernels.vocabulary import block_words
from jaxrl_llm.core.support import Support, pack_bits
from jaxrl_llm.logprobs import token_logprobs, vocabulary_statistics
from jaxrl_llm.rollout.sampling.draw import sampled_logprobs
from jaxrl_llm.surrogates import support_log_probs

# Sixteen stripes of ten words, which blocks of eight do not divide.
V, D = 160, 8


def _data(shape=(2, 5), dtype=np.float32, seed=0, vocab=V):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(*shape, D)).astype(dtype)
    matrix = rng.normal(size=(vocab, D)).astype(dtype)
    return hidden, matrix, rng.integers(0, vocab, shape)


def _value_and_grad(loss):
    """Of the hidden states and the matrix, beside what else the loss returns, in one program."""
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def _plain_logits(hidden, matrix, temperature, cap):
    """All logits in float64 NumPy, and their derivative by ``hidden @ matrix.T``."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(matrix, np.float64).T
    if cap is None:
        return logits / temperature, 1 / temperature
    share = np.tanh(logits / cap)
    return cap * share / temperature, (1 - share**2) / temperature


def _plain(hidden, matrix, targets, temperature=1.0, cap=None):
    """The same in float64 NumPy, every logit at once."""
    logits, _ = _plain_logits(hidden, matrix, temperature, cap)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    logp = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return logp, -(np.exp(log_p) * log_p).sum(-1)


def _plain_gradient(hidden, matrix, targets, u, w, temperature=1.0, cap=None):
    """Gradient of sum(u * logp + w * entropy), written out in float64."""
    h, m = np.asarray(hidden, np.float64), np.asarray(matrix, np.float64)
    logits, slope = _plain_logits(h, m, temperature, cap)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1, keepdims=True)
    d = u[..., None] * (np.eye(len(m))[targets] - p) - w[..., None] * p * (log_p + entropy)
    d *= slope
    return d @ m, d.reshape(-1, len(m)).T @ h.reshape(-1, D)


@for_each(
    ("temperature", "vocab", "cap", "chunk_size"),
    [
        (1.0, V, None, 3),
        (0.7, V, None, 1),
        (0.7, V, None, 256),
        (0.7, 37, None, 4),
        (0.7, 5, None, 10),
        (0.7, 37, 2.0, 1),
        (0.7, 37, 2.0, 4),
    ],
)
def test_value_and_gradient_equal_the_plain_form(temperature, vocab, cap, chunk_size):
    hidden, matrix, targets = _data(vocab=vocab)
    rng = np.random.default_rng(1)
    u, w = rng.normal(size=targets.shape), rng.normal(size=targets.shape)

    def loss(h, m):
        logp, entropy = token_logprobs(
            h, m, targets, temperature=temperature, logit_cap=cap, chunk_size=chunk_size
        )
        return jnp.sum(u * logp + w * entropy), (logp, entropy)

    (_, (logp, entropy)), grads = _value_and_grad(loss)(hidden, matrix)
    expected = _plain(hidden, matrix, targets, temperature, cap)
    close(logp, expected[0], rtol=5e-6, atol=5e-6)
    close(entropy, expected[1], rtol=5e-6, atol=5e-6)
    for got, want in zip(
        grads, _plain_gradient(hidden, matrix, targets, u, w, temperature, cap), strict=True
    ):
        close(got, want, rtol=2e-5, atol=1e-5)


def test_a_soft_cap_in_worked_numbers():
    """Logits 2, 0 and -2 with a cap of 2: 2 tanh(1) = 1.523188, 0 and -1.523188.

    log(e^1.523188 + 1 + e^-1.523188) = 1.758692. The slopes are 1 - tanh(1)^2 = 0.419974, 1 and
    0.419974, so d logp / d matrix = 2 (0.419974 (1 - p_0), -p_1, -0.419974 p_2).
    """
    matrix, target = np.array([[1.0], [0.0], [-1.0]]), np.array([0])

    def logp_of(hidden, matrix):
        return token_logprobs(hidden, matrix, target, logit_cap=2.0)[0][0]

    logp, grads = jax.jit(jax.value_and_grad(logp_of, (0, 1)))(np.array([[2.0]]), matrix)
    close(logp, -0.235504, rtol=1e-5)
    close(grads[0], [[0.103895]], rtol=1e-5)
    close(grads[1][:, 0], [0.176244, -0.344540, -0.0315464], rtol=1e-5)


def test_equals_the_plain_form_in_float64():
    with jax.enable_x64(True):
        hidden, matrix, targets = _data(dtype=np.float64)
        rng = np.random.default_rng(1)
        u, w = rng.normal(size=targets.shape), rng.normal(size=targets.shape)

        def loss(h, m):
            logp, entropy = token_logprobs(h, m, targets, chunk_size=4)
            return jnp.sum(u * logp + w * entropy)

        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, matrix)
        logp, entropy = _plain(hidden, matrix, targets)
        close(value, (u * logp + w * entropy).sum(), rtol=1e-12)
        for got, want in zip(grads, _plain_gradient(hidden, matrix, targets, u, w), strict=True):
            close(got, want, rtol=1e-10, atol=1e-12)


def test_masked_tokens_are_never_read():
    hidden, matrix, targets = _data()
    mask = np.ones(targets.shape, bool)
    mask[0, 3:] = False

    def loss(h, m, t):
        logp, entropy = token_logprobs(h, m, t, mask=mask, chunk_size=4)
        return jnp.sum(logp + 0.3 * entropy), (logp, entropy)

    gradient = _value_and_grad(loss)
    clean = gradient(hidden, matrix, targets)
    for junk in (1e4, np.nan, np.inf):
        dirty = gradient(put(hidden, np.s_[0, 3:], junk), matrix, put(targets, np.s_[0, 3:], 10**4))
        jax.tree.map(equal, dirty, clean)
    assert not np.asarray(clean[0][1][0])[0, 3:].any()


def test_bfloat16_in_float32_out():
    hidden, matrix, targets = _data()
    low = np.asarray(hidden, jnp.bfloat16), np.asarray(matrix, jnp.bfloat16)
    (_, (logp, entropy)), grads = _value_and_grad(
        lambda h, m: ((out := token_logprobs(h, m, targets))[0].sum(), out)
    )(*low)
    assert logp.dtype == entropy.dtype == jnp.float32
    expected = _plain(*(np.asarray(x, np.float32) for x in low), targets)
    close(logp, expected[0], atol=1e-4)
    assert all(g.dtype == jnp.bfloat16 for g in grads)


def _largest(jaxpr):
    """The largest array of the program that has no axis of the width of hidden states."""
    largest = 0
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            shape = getattr(var.aval, "shape", ())
            if D not in shape:
                largest = max(largest, int(np.prod(shape)))
        for value in eqn.params.values():
            for sub in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns"):
                    largest = max(largest, _largest(inner))
    return largest


@for_each(
    ("tokens", "width", "words"),
    [
        (4096, 1024, 2368),  # 64 tokens' worth, in sixteen stripes
        (131_072, 4096, 8192),  # twice the width
        (131_072, 16, 128),  # the least
        (10, 1024, 151_936),
        (0, 0, 151_936),
    ],
)
def test_words_of_a_block(tokens, width, words):
    assert block_words(151_936, tokens, width, 64) == words
    assert block_words(7, tokens, width, 64) == 7


def test_no_array_of_all_tokens_by_vocabulary():
    vocab = 512
    hidden, _, targets = _data((4, 64))
    matrix = np.ones((vocab, D), np.float32)

    def loss(h, m, chunk_size):
        logp, entropy = token_logprobs(h, m, targets, chunk_size=chunk_size)
        return jnp.sum(logp + entropy)

    def largest(chunk_size):
        jaxpr = jax.make_jaxpr(jax.grad(lambda h, m: loss(h, m, chunk_size), (0, 1)))
        return _largest(jaxpr(hidden, matrix).jaxpr)

    assert largest(64) == 64 * vocab
    assert largest(256) == 256 * vocab  # The measure does see the whole tensor where there is one.
    assert largest(1) == targets.size * 16 * 8  # words of each of sixteen stripes


def _temporary(tokens, vocab, width, **options):
    """Bytes that the compiled gradient needs beside its inputs and outputs."""
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    matrix = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(h, m, t):
        logp, entropy = token_logprobs(h, m, t, **options)
        return jnp.sum(logp + entropy)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, matrix, targets).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_compiled_memory_is_a_twentieth_of_the_logits():
    # The vocabulary of Qwen3, which no convenient block divides.
    assert _temporary(4096, 151936, 1024) < 4096 * 151936 * 4 / 20


# Over the tokens that a sampler's truncation kept


def _supports(targets, size=5, seed=3):
    """Sets of a few tokens and the target, in both forms, and as a mask."""
    rng = np.random.default_rng(seed)
    kept = np.zeros((*targets.shape, V), bool)
    np.put_along_axis(kept, rng.integers(0, V, (*targets.shape, size)), True, -1)
    np.put_along_axis(kept, targets[..., None], True, -1)
    kept[0, 0] = np.arange(V) == targets[0, 0]  # the target alone
    order = np.argsort(~kept, axis=-1, kind="stable")[..., : size + 1]
    ids = np.where(np.take_along_axis(kept, order, -1), order, -1)
    return kept, {"ids": Support(ids=ids), "bits": Support(bits=np.asarray(pack_bits(kept)))}


@for_each("form, chunk_size", [("ids", 3), ("bits", 3), ("bits", 256)])
def test_a_support_is_a_softmax_over_it(form, chunk_size):
    hidden, matrix, targets = _data()
    kept, forms = _supports(targets)
    rng = np.random.default_rng(1)
    u, w = rng.normal(size=targets.shape), rng.normal(size=targets.shape)

    def loss(h, m):
        logp, entropy = token_logprobs(
            h, m, targets, temperature=0.7, support=forms[form], chunk_size=chunk_size
        )
        return jnp.sum(u * logp + w * entropy), (logp, entropy)

    (_, (logp, entropy)), grads = _value_and_grad(loss)(hidden, matrix)
    h, m = np.asarray(hidden, np.float64), np.asarray(matrix, np.float64)
    z = np.where(kept, h @ m.T / 0.7, -np.inf)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    log_p = np.log(np.where(kept, p, 1))
    want_entropy = -(p * log_p).sum(-1)
    want_logp = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    close(logp, want_logp, atol=5e-6)
    close(entropy, want_entropy, atol=5e-6)
    assert float(logp[0, 0]) == 0 and float(entropy[0, 0]) == 0
    d = u[..., None] * (np.eye(len(m))[targets] - p) - w[..., None] * p * (
        log_p + want_entropy[..., None]
    )
    d /= 0.7
    close(grads[0], d @ m, rtol=2e-5, atol=1e-5)
    close(grads[1], d.reshape(-1, V).T @ h.reshape(-1, D), atol=2e-5)
    # No gradient at all reaches a token that no set holds.
    assert not np.asarray(grads[1])[~kept.any((0, 1))].any() and (~kept.any((0, 1))).any()


@for_each("cap", [None, 3.0])
def test_gradient_over_a_support_against_finite_differences(cap):
    with jax.enable_x64(True):
        hidden, matrix, targets = _data((1, 2), np.float64)
        _, forms = _supports(targets, size=3)

        def loss(h, m):
            logp, entropy = token_logprobs(h, m, targets, support=forms["ids"], logit_cap=cap)
            return jnp.sum(jnp.exp(logp)) + 0.5 * jnp.sum(entropy)

        jax.test_util.check_grads(jax.jit(loss), (hidden, matrix), order=1, modes=["rev"], eps=1e-6)


@for_each("form", ["ids", "bits"])
def test_masked_supports_are_never_read_and_empty_ones_keep_all(form):
    hidden, matrix, targets = _data()
    mask = np.ones(targets.shape, bool)
    mask[1, 2:] = False
    support = _supports(targets)[1][form]

    @jax.jit
    def run(support):
        loss = lambda h: token_logprobs(h, matrix, targets, mask=mask, support=support)  # noqa: E731
        value, pull = jax.vjp(loss, hidden)
        return *value, *pull((jnp.ones(targets.shape), jnp.ones(targets.shape)))

    junk = jax.tree.map(np.array, support)
    empty = jax.tree.map(np.array, support)
    (junk.ids if form == "ids" else junk.bits)[1, 2:] = 10**6
    (empty.ids if form == "ids" else empty.bits)[0, 1] = -1 if form == "ids" else 0
    for a, b in zip(run(support), run(junk), strict=True):
        equal(a, b)
    whole = jax.jit(token_logprobs)(hidden, matrix, targets)
    for got, want in zip(run(empty), whole, strict=False):
        close(got[0, 1], want[0, 1], rtol=1e-6)


def _offset_logits(offset):
    """Logits near ``offset``, float32 without rounding, most rows confident, and their targets."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(0, 3, (64, V)) * 1024) / 1024
    targets = rng.integers(0, V, 64)
    logits[np.arange(32, 64), targets[32:]] = logits[32:].max(-1) + np.linspace(1, 12, 32).round(3)
    return (np.round(logits * 1024) / 1024 + offset).astype(np.float32), targets


def _from_blocks(logits, targets):
    # Identity rows as hidden states: the products are the logits, exactly.
    return token_logprobs(jnp.eye(len(logits)), logits.T, targets, chunk_size=8)[0]


def _from_a_support(logits, targets):
    ids = jnp.broadcast_to(jnp.arange(V), logits.shape)
    rows = (jnp.eye(len(logits)), logits.T, targets)
    return token_logprobs(*rows, support=Support(ids=ids), chunk_size=8)[0]


def _from_the_sampler(logits, targets):
    behavior_logp, model_logp, log_kept = sampled_logprobs(logits, logits, targets)
    return (behavior_logp + model_logp) / 2 + log_kept


def _from_logits(logits, targets):
    return support_log_probs(logits, support=targets[:, None])[:, 0]


@for_each("logp_of", [_from_blocks, _from_a_support, _from_the_sampler, _from_logits])
def test_large_logits_round_nothing(logp_of):
    """Value and gradient with respect to the logits, against float64."""

    @jax.jit
    def run(logits, targets):
        logp, pull = jax.vjp(lambda x: logp_of(x, targets), logits)
        return logp, *pull(jnp.ones(64))

    for offset in (0.0, -100.0, 100.0, 1000.0):
        logits, targets = _offset_logits(offset)
        log_p = np.float64(logits) - np.float64(logits).max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        logp, gradient = run(logits, targets)
        close(logp, log_p[np.arange(64), targets], rtol=1e-6, atol=5e-7)
        close(gradient, np.eye(V)[targets] - np.exp(log_p), atol=1e-6)
        assert np.asarray(logp).all()


def test_a_target_outside_the_vocabulary_is_nan_and_spoils_no_other():
    hidden, matrix, targets = _data()
    wrong = targets.copy()
    wrong[0, 1], wrong[1, 3] = V, -1
    logp_of = jax.jit(lambda t: token_logprobs(hidden, matrix, t)[0])
    logp = np.asarray(logp_of(wrong))
    assert np.isnan(logp[0, 1]) and np.isnan(logp[1, 3])
    right = wrong == targets
    equal(logp[right], np.asarray(logp_of(targets))[right])


def test_a_target_outside_its_support_is_impossible_and_spoils_nothing():
    hidden, matrix, _ = _data((1, 2))
    support = Support(ids=np.array([[[1, 2, -1], [1, 3, -1]]]))
    targets = np.array([[0, 3]])

    @jax.jit
    def run(hidden):
        logp_of = lambda h: token_logprobs(h, matrix, targets, support=support)[0]  # noqa: E731
        value, pull = jax.vjp(logp_of, hidden)
        return value, *pull(jnp.ones((1, 2)))

    value, gradient = run(hidden)
    assert value[0, 0] == -np.inf and np.isfinite(value[0, 1])
    assert np.isfinite(gradient).all()


def test_statistics_see_what_cannot_be_sampled():
    hidden, matrix, targets = _data()
    kept, forms = _supports(targets)
    found = vocabulary_statistics(
        {"kept": lambda logits, targets: jnp.isfinite(logits)},
        *(hidden, matrix, targets),
        support=forms["bits"],
        chunk_size=3,
    )
    equal(found["kept"], kept)


# Statistics over the vocabulary


def square_sum(logits, targets):
    return jnp.sum(jax.nn.softmax(logits) ** 2, -1)


def on_support(logits, targets, *, support):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), support, -1)


def above(logits, targets, *, floor, unused=None):
    """Log-probability of the target over that of the mean logit, and over a number of its own."""
    chosen = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return chosen - logits.mean(-1) - floor


FUNCTIONS = {"square_sum": square_sum, "on_support": on_support, "above": above}


def _rows(shape):
    rng = np.random.default_rng(5)
    return {"support": rng.integers(0, V, (*shape, 3)), "floor": rng.normal(size=shape)}


def _plain_statistics(hidden, matrix, targets, rows, temperature=1.0):
    """Each token by itself in float64 NumPy."""
    out = {name: [] for name in FUNCTIONS}
    flat = [x.reshape(-1, *x.shape[targets.ndim :]) for x in (rows["support"], rows["floor"])]
    for h, target, support, floor in zip(
        hidden.reshape(-1, D), targets.reshape(-1), *flat, strict=True
    ):
        z = matrix.astype(np.float64) @ h.astype(np.float64) / temperature
        log_p = z - np.log(np.exp(z).sum())
        out["square_sum"].append((np.exp(log_p) ** 2).sum())
        out["on_support"].append(log_p[support])
        out["above"].append(z[target] - z.mean() - floor)
    return {k: np.reshape(x, (*targets.shape, *np.shape(x)[1:])) for k, x in out.items()}


def _plain_statistics_gradient(hidden, matrix, targets, rows, u, temperature):
    """Gradient of the statistics weighed by ``u``, from the logits' derivatives, in float64."""
    h, m = hidden.astype(np.float64), matrix.astype(np.float64)
    z = h @ m.T / temperature
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    s = (p**2).sum(-1, keepdims=True)
    d = u["square_sum"][..., None] * 2 * p * (p - s)
    for j in range(3):
        d += u["on_support"][..., j, None] * (np.eye(V)[rows["support"][..., j]] - p)
    d += u["above"][..., None] * (np.eye(V)[targets] - 1 / V)
    d /= temperature
    return d @ m, d.reshape(-1, len(m)).T @ h.reshape(-1, D)


@for_each("chunk_size", [1, 3, 256])
def test_statistics_and_their_gradients_equal_those_of_whole_logits(chunk_size):
    temperature = 0.7
    with jax.enable_x64(True):
        hidden, matrix, targets = _data(dtype=np.float64)
        rows = _rows(targets.shape)
        want = _plain_statistics(hidden, matrix, targets, rows, temperature)
        rng = np.random.default_rng(2)
        u = {k: rng.normal(size=x.shape) for k, x in want.items()}
        options = {"temperature": temperature, "chunk_size": chunk_size, "rows": rows}

        def loss(h, m):
            found = vocabulary_statistics(FUNCTIONS, h, m, targets, **options)
            return sum(jnp.sum(u[k] * x) for k, x in found.items()), found

        (_, found), grads = _value_and_grad(loss)(hidden, matrix)
        assert found.keys() == want.keys()
        for name in want:
            close(found[name], want[name], rtol=1e-11, atol=1e-12)
        expected = _plain_statistics_gradient(hidden, matrix, targets, rows, u, temperature)
        for got, wanted in zip(grads, expected, strict=True):
            close(got, wanted, rtol=1e-10, atol=1e-12)


def test_statistics_of_capped_logits_and_a_capped_teacher():
    hidden, matrix, targets = _data()
    states, other, _ = _data(seed=1)
    options = {"rows": {}, "teacher": (states, other), "chunk_size": 4}

    def gap(logits, targets, teacher_logits):
        return jnp.sum(jax.nn.softmax(logits) * (logits - teacher_logits), -1)

    def gap_of_capped(logits, targets, teacher_logits):
        return gap(2 * jnp.tanh(logits / 2) / 0.7, targets, 5 * jnp.tanh(teacher_logits / 5) / 0.7)

    def loss(matrix, function, **more):
        found = vocabulary_statistics({"gap": function}, hidden, matrix, targets, **options, **more)
        return jnp.sum(found["gap"] ** 2), found["gap"]

    caps = {"temperature": 0.7, "logit_cap": 2.0, "teacher_logit_cap": 5.0}
    capped = jax.jit(jax.grad(lambda m: loss(m, gap, **caps), has_aux=True))
    plain = jax.jit(jax.grad(lambda m: loss(m, gap_of_capped), has_aux=True))
    for got, want in zip(capped(matrix), plain(matrix), strict=True):
        close(got, want, rtol=1e-4, atol=1e-4)


def test_statistics_in_bfloat16():
    hidden, matrix, targets = _data()
    rows = _rows(targets.shape)
    low = np.asarray(hidden, jnp.bfloat16), np.asarray(matrix, jnp.bfloat16)

    def run(h, m):
        return vocabulary_statistics(FUNCTIONS, h, m, targets, rows=rows, chunk_size=4)

    found = jax.jit(run)(*low)
    want = _plain_statistics(*(np.asarray(x, np.float32) for x in low), targets, rows)
    for name in FUNCTIONS:
        assert found[name].dtype == jnp.float32
        close(found[name], want[name], atol=1e-4)


def spread(logits, targets):
    """Its gradient is no number where all logits are the same, as they are of no hidden state."""
    return jnp.std(logits, -1)


def test_masked_tokens_are_in_no_statistic_and_no_gradient():
    hidden, matrix, targets = _data()
    rows = _rows(targets.shape)
    mask = np.ones(targets.shape, bool)
    mask[0, 3:] = False
    functions = FUNCTIONS | {"spread": spread}

    def loss(h, m, t, r):
        # Ten tokens in chunks of four: two of the last are padding.
        found = vocabulary_statistics(functions, h, m, t, mask=mask, chunk_size=4, rows=r)
        return sum(jnp.sum(x) for x in found.values()), found

    gradient = _value_and_grad(loss)
    clean = gradient(hidden, matrix, targets, rows)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))
    cut = np.s_[0, 3:]
    for junk in (1e4, np.nan, np.inf):
        unread = {
            "support": put(rows["support"], cut, -(10**6)),
            "floor": put(rows["floor"], cut, junk),
        }
        dirty = gradient(put(hidden, cut, junk), matrix, put(targets, cut, 10_000), unread)
        jax.tree.map(equal, dirty, clean)
    assert not any(np.asarray(x)[0, 3:].any() for x in clean[0][1].values())
    assert not np.asarray(clean[1][0])[0, 3:].any() and np.asarray(clean[1][0])[0, :3].all()


@for_each("backward", [False, True])
def test_compiled_memory_of_statistics_follows_the_chunk(backward):
    tokens, width, vocab = 1024, 16, 2048
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    matrix = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def temporary(chunk_size):
        def loss(h, m, t):
            functions = {"square_sum": square_sum, "spread": spread}
            found = vocabulary_statistics(functions, h, m, t, chunk_size=chunk_size)
            return jnp.sum(found["square_sum"] + found["spread"])

        function = jax.grad(loss, (0, 1)) if backward else loss
        compiled = jax.jit(function).lower(hidden, matrix, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(32) < tokens * vocab * 4 / 4 < temporary(tokens)


H, M, T = _data()
FLOOR, SUPPORT = {"floor": np.zeros((2, 5))}, np.zeros((2, 3), int)
FEW, MEAN = Support(ids=np.zeros((2, 4, 3), int)), {"mean": lambda logits, targets: logits.mean()}
NAMES = globals()
BAD = r"""
ValueError:
token_logprobs(H, M, T[:, :4])  # targets must have shape \(2, 5\)
token_logprobs(H, M[:, 1:], T)  # must have one width
token_logprobs(H, M, T, temperature=0.0)  # temperature must be above 0
token_logprobs(H, M, T, logit_cap=0.0)  # logit_cap must be above 0
token_logprobs(H, M, T, logit_cap=np.inf)  # logit_cap must be finite
token_logprobs(H, M, T, chunk_size=0)  # chunk_size must be above 0
token_logprobs(H, M, T, support=FEW)  # support.ids must have shape \(2, 5, K\); got \(2, 4, 3\)
vocabulary_statistics({}, H, M, T[:, :4])  # targets must have shape \(2, 5\)
vocabulary_statistics({}, H, M[:, 1:], T)  # must have one width
vocabulary_statistics({}, H, M, T, temperature=0.0)  # temperature must be above 0
vocabulary_statistics({}, H, M, T, teacher_logit_cap=5.0)  # has no effect without a teacher
vocabulary_statistics({}, H, M, T, chunk_size=0)  # chunk_size must be above 0
vocabulary_statistics(FUNCTIONS, H, M, T, rows=FLOOR)
    # 'on_support' needs row 'support'; the rows .* passed: floor
vocabulary_statistics(FUNCTIONS, H, M, T, rows=FLOOR | {"support": SUPPORT})
    # row 'support' must have leading shape \(2, 5\); got \(2, 3\)
vocabulary_statistics(MEAN, H, M, T)
    # 'mean' must return one value a token, .* N = 10; it returns shape \(\)
TypeError:
token_logprobs(H, M, T * 1.0)  # targets must hold integers
token_logprobs(H, M, T, mask=T * 1.0)  # mask must be bool
vocabulary_statistics({}, H, M, T * 1.0)  # targets must hold integers
vocabulary_statistics({}, H, M, T, mask=T * 1.0)  # mask must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
