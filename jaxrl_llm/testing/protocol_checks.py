"""Checks that a model fulfills the contract of :class:`jaxrl_llm.models.Model`."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, ArrayTree, trees
from jaxrl_llm.models import KV, AttentionContext, Model, empty_cache, prefill
from jaxrl_llm.models.lora import Adapted, LoRAConfig, adapted_model, init_lora, merge_lora
from jaxrl_llm.models.protocol import PromptTree, expert_shape
from jaxrl_llm.models.sharding import AXES, param_spec

# Prompts, rollouts per prompt, tokens of a response, tokens of the longest prompt.
P, G, T, LP = 2, 2, 4, 5


def assert_model_ok(
    model: Model, params: ArrayTree, *, checks: Iterable[str] | None = None
) -> None:
    """Raises AssertionError unless a model computes what sampling and training rely on.

    Args:
      model: The model; a small configuration suffices, since a check compiles it a few times.
      params: Its parameters.
      checks: Names of :data:`MODEL_CHECKS`; all by default.

    Raises:
      AssertionError: At the first check that fails; it names the check and the reason.
      ValueError: If a name is not in :data:`MODEL_CHECKS`.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> jr.testing.assert_model_ok(model, params, checks=("shapes", "causality"))
      >>> ignoring = model._replace(
      ...     apply=lambda *arguments, delta=None, **options: model.apply(*arguments, **options))
      >>> jr.testing.assert_model_ok(ignoring, params, checks=["delta"])
      Traceback (most recent call last):
      AssertionError: delta: the delta of layers/0/attention/k changes nothing: ...
    """
    for name in MODEL_CHECKS if checks is None else checks:
        if name not in MODEL_CHECKS:
            raise ValueError(
                f"assert_model_ok: there is no check {name!r}; there are {', '.join(MODEL_CHECKS)}."
            )
        MODEL_CHECKS[name](model, params)


def check_shapes(model: Model, params: ArrayTree) -> None:
    """Configuration, parameters, hidden states, keys and values have the shapes of the protocol."""
    config = model.config
    for name in ("vocab_size", "max_length", "num_layers", "num_kv_heads", "head_dim"):
        if not isinstance(size := getattr(config, name, None), int) or size < 1:
            _fail("shapes", f"config.{name} must be an integer above 0; got {size!r}.")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if _shapes(shapes) != _shapes(params):
        _fail("shapes", "init(key) gives other parameters than those that are checked.")
    tokens = _tokens(model, (P, G, T))
    hidden, kv = _apply(model, params, tokens, _positions(tokens), _context(tokens))
    if hidden.ndim != 4 or hidden.shape[:3] != (P, G, T):
        _fail("shapes", f"hidden must be [P, G, T, D], {(P, G, T)} here; got {hidden.shape}.")
    if not np.isfinite(np.asarray(hidden, np.float32)).all():
        _fail("shapes", "hidden is non-finite.")
    matrix = model.output_matrix(params).shape
    if matrix != (config.vocab_size, hidden.shape[-1]):
        expected = (config.vocab_size, hidden.shape[-1])
        _fail("shapes", f"output_matrix must be [V, D], {expected} here; got {matrix}.")
    cache = jax.eval_shape(lambda: empty_cache(model, (P, G), T))
    expected, got = (jax.tree.map(jnp.shape, tuple(x)) for x in (cache, kv))
    if got != expected:
        _fail("shapes", f"kv must hold, layer by layer, {expected}; got {got}.")


def check_causality(model: Model, params: ArrayTree) -> None:
    """A token depends on itself, on the unmasked tokens before it, and on no others."""
    tokens = _tokens(model, (P, G, T))
    mask = jnp.ones(tokens.shape, bool).at[:, :, 1].set(False)

    def hidden(changed: tuple[int, ...] | None = None) -> np.ndarray:
        other = tokens
        if changed is not None:
            other = tokens.at[changed].set((tokens[changed] + 1) % model.config.vocab_size)
        context = AttentionContext(mask=mask)
        return np.asarray(_apply(model, params, other, _positions(tokens), context)[0], np.float32)

    base = hidden()
    for changed, name in (((0, 0, 3), "a later token"), ((0, 0, 1), "a masked token")):
        got = hidden(changed)
        unchanged = np.arange(T) != changed[-1]
        message = f"changing {name} changed other tokens"
        _expect_equal("causality", model, got[0, 0, unchanged], base[0, 0, unchanged], message)
    got = hidden((0, 0, 0))
    _expect_equal("causality", model, got[0, 1], base[0, 1], "changing one row changed another")
    _expect_equal("causality", model, got[1], base[1], "changing one prompt changed another")
    if np.array_equal(got[0, 0, -1], base[0, 0, -1]):
        _fail("causality", "the last token does not depend on the first: `apply` reads no context.")


def check_prefix(model: Model, params: ArrayTree) -> None:
    """Hidden states after a shared prefix equal those of one row of prompt and response.

    Prompts are padded on the right, so the positions of a response start at the length of its
    prompt, not at the width of the array.
    """
    shared, rows = _with_and_without_prefix(model, params)
    message = "a shared prefix and positions that continue it differ from rows without a prefix"
    _expect_equal("prefix", model, shared, rows, message)


def check_cache(model: Model, params: ArrayTree) -> None:
    """Decoding token by token through the cache gives the hidden states of one pass.

    The index of the cache is one number, or one number for each row: every second row begins a step
    later.
    """
    prompts, lengths, responses, prefix, prefix_mask = _prompts(model, params)
    positions = lengths[:, None, None] + jnp.arange(T)
    positions = jnp.broadcast_to(positions, responses.shape)
    context = AttentionContext(jnp.ones(responses.shape, bool), prefix, prefix_mask)
    expected, _ = _apply(model, params, responses, positions, context)
    # Neighbors differ within a prompt and between prompts, so no row's index stands for another's.
    staggered = (jnp.arange(P)[:, None] + jnp.arange(G)) % 2
    for start in (jnp.int32(0), staggered.astype(jnp.int32)):
        cache, rows = empty_cache(model, (P, G), T), []
        for i in range(T + int(start.max())):
            index = jnp.clip(i - start, 0, T - 1)
            exists = jnp.broadcast_to(index == i - start, (P, G))[..., None]
            at = jnp.broadcast_to(index, (P, G))[..., None]
            token, position = (jnp.take_along_axis(x, at, axis=-1) for x in (responses, positions))
            context = AttentionContext(exists, prefix, prefix_mask, cache, index)
            row, cache = _apply(model, params, token, position, context)
            rows.append(row)
        steps = jnp.broadcast_to(start[..., None] + jnp.arange(T), (P, G, T))
        got = jnp.take_along_axis(jnp.concatenate(rows, axis=2), steps[..., None], axis=2)
        _expect_equal(
            "cache", model, got, expected, "decoding through the cache differs from one pass"
        )


def check_delta(model: Model, params: ArrayTree) -> None:
    """A low-rank delta acts at every linear layer, as if it were added to the weights."""
    config = LoRAConfig(rank=1, targets=(".",))
    try:
        adapter = init_lora(params, config)
    except ValueError as error:
        _fail("delta", f"no parameter takes a low-rank adapter ({error})")
    leaves, tree = jax.tree.flatten(adapter)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    moved = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    adapter, adapted = jax.tree.unflatten(tree, moved), adapted_model(model, config)
    tokens = _tokens(model, (P, G, T))
    positions, context = _positions(tokens), _context(tokens)

    @jax.jit
    def hidden(adapter):
        return adapted.apply(Adapted(params, adapter), tokens, positions, context)[0].astype(
            jnp.float32
        )

    weights = jax.random.normal(jax.random.key(1), hidden(adapter).shape)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(weights * hidden(x))))(adapter)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        if not np.any(np.asarray(grad)):
            layer = trees.path_str(path).rpartition("/")[0]
            _fail("delta", f"the delta of {layer} changes nothing: `apply` must add x A B to x W.")
    if not getattr(model.config, "quantization", None):
        merged = merge_lora(Adapted(params, adapter), config)
        expected, _ = _apply(model, merged, tokens, positions, context)
        message = "a delta differs from weights that it is added to"
        _expect_equal("delta", model, hidden(adapter), expected, message)


def check_remat(model: Model, params: ArrayTree) -> None:
    """Rematerialization changes neither hidden states nor gradients."""
    tokens = _tokens(model, (P, G, T))
    positions, context = _positions(tokens), _context(tokens)
    results = {}
    for remat in ("none", "dots", "full"):
        # Not the sum of squares, which a norm at the end makes constant: its gradient is rounding.
        @jax.jit
        def loss(params, remat=remat):
            hidden = model.apply(params, tokens, positions, context, remat=remat)[0]
            weights = jax.random.normal(jax.random.key(1), hidden.shape)
            return jnp.sum(weights * hidden.astype(jnp.float32))

        results[remat] = jax.tree.leaves(jax.value_and_grad(loss)(params))
    for remat in ("dots", "full"):
        for got, expected in zip(results[remat], results["none"], strict=True):
            _expect_equal("remat", model, got, expected, f"remat={remat!r} gave another gradient")


def check_packing(model: Model, params: ArrayTree) -> None:
    """Packed responses, trees, and prompts in their rows give the same hidden states.

    Only what the model declares: ``reads_segments``, ``reads_trees``, ``takes_prompts`` and
    ``reads_prompt_trees``. Two responses of a tree share their first token, two prompts of a row
    their first two.
    """
    prompts, lengths, responses, prefix, prefix_mask = _prompts(model, params)
    positions = jnp.broadcast_to(lengths[:, None, None] + jnp.arange(T), responses.shape)
    expected, _ = _with_and_without_prefix(model, params)

    def compare(tokens, places, expected, what, **rows) -> None:
        """After a shared prefix and, if the model takes them there, with prompts in the rows."""
        context = AttentionContext(jnp.ones(tokens.shape, bool), prefix, prefix_mask, **rows)
        if rows:
            got, _ = _apply(model, params, tokens, places, context)
            _expect_equal("packing", model, got, expected, f"{what} differ from single rows")
        if model.takes_prompts:
            first = jnp.broadcast_to(jnp.arange(LP, dtype=jnp.int32), (P, LP))
            joined = (_joined(prompts, tokens), _joined(first, places))
            got, _ = _apply(model, params, *joined, context._replace(prefix=None))
            got = got[:, :, LP:].reshape(expected.shape)
            message = f"prompts in the rows of {what} differ from a shared prefix"
            _expect_equal("packing", model, got, expected, message)

    compare(responses, positions, expected, "their responses")
    if model.reads_segments:
        segments = jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32)[:, None], responses.shape)
        row = (P, 1, G * T)
        compare(
            responses.reshape(row),
            positions.reshape(row),
            expected.reshape(*row, -1),
            "packed responses",
            segments=segments.reshape(row),
        )
    if model.reads_trees:
        alike = responses.at[:, 1, 0].set(responses[:, 0, 0])
        context = AttentionContext(jnp.ones(responses.shape, bool), prefix, prefix_mask)
        expected = _tree(_apply(model, params, alike, positions, context)[0])
        ends = _tree_ends((P, 1))
        compare(_tree(alike), _tree(positions), expected, "the trees of a row", ends=ends)
    if model.reads_prompt_trees:
        _check_prompt_trees(model, params, prompts, responses, positions)


def _check_prompt_trees(model: Model, params: ArrayTree, prompts, responses, positions) -> None:
    """Two prompts with a common beginning in one row, each with two responses or a tree of them."""
    prompts = prompts.at[1, :2].set(prompts[0, :2])
    prefix_mask = jnp.arange(LP) < jnp.array([[LP - 2], [LP]])
    prefix = jax.jit(partial(prefill, model))(params, prompts, prefix_mask)
    alike = responses.at[:, 1, 0].set(responses[:, 0, 0])
    context = AttentionContext(jnp.ones(responses.shape, bool), prefix, prefix_mask)
    expected, _ = _apply(model, params, alike, positions, context)
    # The first prompt, what is the second's own, and a cell of padding.
    cells = jnp.concatenate([prompts[0, : LP - 2], prompts[1, 2:], prompts[1, -1:]])[None]
    places = [*range(LP - 2), *range(2, LP), 0]
    size, last = len(places), jnp.array([LP - 3, 2 * LP - 5], jnp.int32)
    ends = [size] * 2 + [LP - 2] * (LP - 4) + [size] * (LP - 1)
    exists = jnp.arange(size)[None] < size - 1
    kinds = {"several prompts in a row": (alike, positions, expected, None)}
    if model.reads_trees:
        tree = _tree(alike), _tree(positions), _tree(expected)
        kinds["trees of several prompts in a row"] = (*tree, _tree_ends((1, P)))
    for what, (tokens, steps, expected, of_tree) in kinds.items():
        rows = (1, tokens.shape[0] * tokens.shape[1], tokens.shape[2])
        leaves = jnp.broadcast_to(last[:, None, None], tokens.shape).reshape(rows)
        context = AttentionContext(
            jnp.ones(rows, bool),
            prefix_mask=exists,
            ends=of_tree,
            prompt_tree=PromptTree(jnp.array([ends], jnp.int32), leaves),
        )
        steps = _joined(jnp.array([places], jnp.int32), steps.reshape(rows))
        got, _ = _apply(model, params, _joined(cells, tokens.reshape(rows)), steps, context)
        got = got[:, :, size:].reshape(expected.shape)
        _expect_equal("packing", model, got, expected, f"{what} differ from one each")


def _tree(x: Array) -> Array:
    """Two responses ``[P, 2, T, ...]`` that begin alike, as one tree ``[P, 1, 2 T - 1, ...]``."""
    return jnp.concatenate([x[:, 0], x[:, 1, 1:]], axis=1)[:, None]


def _tree_ends(leading: tuple[int, int]) -> Array:
    """The ends of such trees: the first token is before both responses, the others before one."""
    ends = [2 * T - 1] + [T] * (T - 1) + [2 * T - 1] * (T - 1)
    return jnp.broadcast_to(jnp.array(ends, jnp.int32), (*leading, len(ends)))


def _joined(of_prompts: Array, of_responses: Array) -> Array:
    """``[P, Lp]`` and ``[P, G, T]`` as rows ``[P, 1, Lp + G T]``."""
    flat = of_responses.reshape(len(of_responses), -1)
    return jnp.concatenate([of_prompts, flat], axis=1)[:, None]


def check_experts(model: Model, params: ArrayTree) -> None:
    """A model that records its experts takes those of a context instead of its own."""
    if model.apply_routed is None:
        return
    tokens = _tokens(model, (P, G, T))
    positions, context = _positions(tokens), _context(tokens)
    apply = jax.jit(model.apply_routed)
    expected, _ = _apply(model, params, tokens, positions, context)
    hidden, _, experts = apply(params, tokens, positions, context)
    _expect_equal("experts", model, hidden, expected, "recording the experts changes hidden states")
    shape = (*tokens.shape, *(expert_shape(model) or ()))
    if experts.shape != shape:
        _fail("experts", f"experts must be [P, G, T, L, k], {shape} here; got {experts.shape}.")
    got, _ = _apply(model, params, tokens, positions, context._replace(experts=experts))
    _expect_equal("experts", model, got, expected, "the same experts give other hidden states")
    others = jnp.flip(experts, axis=2)  # those of other tokens
    _, _, taken = apply(params, tokens, positions, context._replace(experts=others))
    if not np.array_equal(np.sort(taken), np.sort(others)):
        _fail("experts", "a token takes other experts than those of the context.")


def check_sharding(model: Model, params: ArrayTree) -> None:
    """The sharding rules name existing parameters and have no more axes than the parameters.

    A model that is replicated on every device declares this with ``sharding_rules=()``.
    """
    mesh, used = jax.sharding.AbstractMesh((1, 1, 2, 2, 2), AXES), set()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = trees.path_str(path)
        axes = next((axes for end, axes in model.sharding_rules if name.endswith(end)), ())
        if len(axes) > x.ndim:
            _fail("sharding", f"the rule {axes} has more axes than {name} {x.shape}.")
        used |= set(param_spec(name, x.shape, mesh, model.sharding_rules)) - {None}
    if model.sharding_rules and not used:
        _fail(
            "sharding",
            "sharding_rules split no parameter in two; a model with other names of parameters "
            "needs other rules, or () for a copy on every device.",
        )


MODEL_CHECKS: dict[str, Callable[[Model, ArrayTree], None]] = {
    "shapes": check_shapes,
    "causality": check_causality,
    "prefix": check_prefix,
    "cache": check_cache,
    "delta": check_delta,
    "remat": check_remat,
    "packing": check_packing,
    "experts": check_experts,
    "sharding": check_sharding,
}


def _prompts(model: Model, params: ArrayTree):
    """Prompts ``[P, LP]``, their lengths, responses ``[P, G, T]``, and the prefix with its mask."""
    tokens = _tokens(model, (P, LP + G * T))
    prompts, responses = tokens[:, :LP], tokens[:, LP:].reshape(P, G, T)
    lengths = jnp.array([LP - 2, LP], jnp.int32)
    mask = jnp.arange(LP) < lengths[:, None]
    return (
        prompts,
        lengths,
        responses,
        jax.jit(partial(prefill, model))(params, prompts, mask),
        mask,
    )


def _with_and_without_prefix(model: Model, params: ArrayTree) -> tuple[Array, Array]:
    """Hidden states of responses after a shared prefix, and of full rows."""
    prompts, lengths, responses, prefix, prefix_mask = _prompts(model, params)
    positions = jnp.broadcast_to(lengths[:, None, None] + jnp.arange(T), responses.shape)
    context = AttentionContext(jnp.ones(responses.shape, bool), prefix, prefix_mask)
    shared, _ = _apply(model, params, responses, positions, context)
    rows = []
    for prompt, length, group in zip(prompts, lengths.tolist(), responses, strict=True):
        start = jnp.broadcast_to(prompt[:length], (G, length))
        row = jnp.concatenate([start, group], axis=-1)[None]
        rows.append(_apply(model, params, row, _positions(row), _context(row))[0][:, :, length:])
    return shared, jnp.concatenate(rows)


def _apply(model: Model, params, tokens, positions, context) -> tuple[Array, tuple[KV, ...]]:
    return jax.jit(model.apply)(params, tokens, positions, context)


def _tokens(model: Model, shape: tuple[int, ...]) -> Array:
    return jax.random.randint(jax.random.key(7), shape, 0, model.config.vocab_size, jnp.int32)


def _positions(tokens: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)


def _context(tokens: Array) -> AttentionContext:
    return AttentionContext(mask=jnp.ones(tokens.shape, bool))


def _shapes(tree: ArrayTree) -> dict[str, tuple[int, ...]]:
    return {trees.path_str(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def _expect_equal(check: str, model: Model, got, expected, message: str) -> None:
    """Fails unless two arrays agree up to the rounding of the model's dtype."""
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    exact = jnp.dtype(model.config.dtype) == jnp.float32
    exact = exact and not getattr(model.config, "quantization", None)
    error, scale = np.abs(got - expected).max(), np.abs(expected).max() + 1e-6
    if not error <= (1e-4 if exact else 0.1) * scale:
        _fail(check, f"{message}; they differ by {error:.2g} of {scale:.2g}.")


def _fail(check: str, message: str):
    raise AssertionError(f"{check}: {message}")
