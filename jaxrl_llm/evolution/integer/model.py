"""EGG: a small recurrent language model that computes in integers alone.

``params`` is a nested dict of int8 matrices ``[out, in]`` and vectors, from :func:`egg_init`. The
package describes the other shared arguments, and the TypeError and ValueError that every function
raises.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks, trees
from jaxrl_llm.evolution import _inputs, noise
from jaxrl_llm.evolution.integer.layers import (
    ONE_BITS,
    check_int8,
    egg_embed,
    egg_gru,
    egg_log_likelihood,
    egg_matmul,
    egg_norm,
    egg_vector,
    int8_noise,
    saturate,
)
from jaxrl_llm.evolution.integer.update import egg_update

# Leaves are drawn one by one: a mistyped size would never end.
_MOST_LAYERS = 4096
_MOST_PARAMETERS = 2**36


def egg_init(key: Array, *, vocab: int = 256, width: int = 256, layers: int = 6) -> ArrayTree:
    """Random parameters of the integer language model.

    Matrices are ``round(16 normal)``, weights of norms 16, biases 0.

    Args:
      key: See the package.
      vocab: V, size of the vocabulary.
      width: D.
      layers: Number of layers, each a recurrent cell and an MLP of width 4 D.

    Returns:
      Nested dict of int8; matrices are ``[out, in]``.

    Raises:
      ValueError: If there are more than 4,096 layers, or more than 2^36 parameters.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> params = jr.evolution.egg_init(jax.random.key(0), width=8, layers=1)
      >>> params["layers"]["0"]["up"].shape, params["embed"].dtype.name
      ((32, 8), 'int8')

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    checks.check_key("egg_init", key)
    _inputs.check_at_least("egg_init", 1, vocab=vocab, width=width, layers=layers)
    size = 2 * vocab * width + 12 * layers * width**2
    if layers > _MOST_LAYERS or size > _MOST_PARAMETERS:
        raise ValueError(
            f"egg_init: a model may have {_MOST_LAYERS:,} layers and {_MOST_PARAMETERS:,} "
            f"parameters; vocab {vocab:,}, width {width:,} and layers {layers:,} make {size:,}."
        )

    def vector(value: int) -> Array:
        return jnp.full((width,), value, jnp.int8)

    def matrix(path: str, outputs: int, inputs: int = width) -> Array:
        drawn = jax.random.normal(noise.leaf_key(key, path), (outputs, inputs))
        return saturate(jnp.round(2**ONE_BITS * drawn).astype(jnp.int32))

    def layer(i: int) -> dict:
        square = {name: matrix(f"{i}/{name}", width) for name in ("wf", "uf", "wh", "uh")}
        mlp = {"up": matrix(f"{i}/up", 4 * width), "down": matrix(f"{i}/down", width, 4 * width)}
        norms = {"cell_norm": vector(2**ONE_BITS), "mlp_norm": vector(2**ONE_BITS)}
        return {**square, **mlp, **norms, "bf": vector(0), "bh": vector(0)}

    return {
        "embed": matrix("embed", vocab),
        "layers": {str(i): layer(i) for i in range(layers)},
        "norm": vector(2**ONE_BITS),
        "head": matrix("head", vocab),
    }


def egg_noise(
    params: ArrayTree,
    table: Array,
    key: Array,
    epoch: Array | int,
    members: Array,
    *,
    noise_reuse: int = 1,
) -> ArrayTree:
    """The noise of some members for every leaf of an integer model, of rank 1.

    Args:
      params, table, key, epoch, members, noise_reuse: See the package.

    Returns:
      The tree with a :class:`LowRank` for each leaf, by :func:`int8_noise`.

    Raises:
      ValueError: If a leaf reads more entries than ``table`` has.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = jr.evolution.egg_init(jax.random.key(0), width=8, layers=1)
      >>> table = jr.evolution.int8_table(jax.random.key(1), size=1024)
      >>> noise = jr.evolution.egg_noise(params, table, jax.random.key(2), 0, jnp.arange(4))
      >>> noise["head"].a.shape
      (4, 256, 1)

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """

    def one(path: str, w: Array):
        here = noise.leaf_key(key, path)
        return int8_noise(table, here, epoch, members, w.shape, noise_reuse=noise_reuse)

    return trees.map_with_path(one, params)


def _add(*terms: Array) -> Array:
    return saturate(sum((x.astype(jnp.int32) for x in terms), jnp.int32(0)))


def egg_scores(
    params: ArrayTree,
    tokens: Array,
    state: Array | None = None,
    *,
    perturbations: ArrayTree | None = None,
    shift: int = 4,
) -> tuple[Array, Array]:
    """Scores of every next token of a text, in sixteenths of a bit, by integers alone.

        x <- sat(x + cell(norm(x)));   x <- sat(x + down(up(norm(x))));   logits = head(norm(x))

    Saturation is the only nonlinearity. Bits of the text are ``-sum(scores) / 16``; a member's
    fitness is the sum of its scores over a window.

    Args:
      params, shift: See the package.
      tokens: int ``[..., T + 1]``, with the axes of the members in front if there are any.
      state: int8 ``[layers, ..., D]``, the state after the previous text; None for its beginning.
      perturbations: Noise from :func:`egg_noise`, of members with the leading axes of ``tokens``;
        None for the plain model.

    Returns:
      ``(scores, state)``: int32 ``[..., T]`` and int8 ``[layers, ..., D]``.

    Raises:
      ValueError: If there are fewer than two tokens.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = jr.evolution.egg_init(jax.random.key(0), vocab=16, width=8, layers=1)
      >>> scores, state = jr.evolution.egg_scores(params, jnp.array([3, 1, 4, 1, 5]))
      >>> scores.shape, state.shape
      ((4,), (1, 8))

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G. Its paper has no other nonlinearity,
      as here; the released code has relu between ``up`` and ``down``.
    """
    checks.check_min_rank("egg_scores", 1, tokens=tokens)
    checks.check_integer("egg_scores", tokens=tokens)
    if tokens.shape[-1] < 2:
        raise ValueError(f"egg_scores: tokens must be at least two; got shape {tokens.shape}.")
    lead, (width,) = tokens.shape[:-1], params["norm"].shape
    if state is None:
        state = jnp.zeros((len(params["layers"]), *lead, width), jnp.int8)
    check_int8("egg_scores", state=state)
    shape = (len(params["layers"]), *lead, width)
    checks.check_shape("egg_scores", "state", state, shape)

    # A vector's noise is added once for the text.
    def vector(w: Array, perturbation=None) -> Array:
        if w.ndim == 2:
            return w
        w = egg_vector(w, perturbation, shift=shift)
        return w if perturbation is None else w[..., None, :]

    moved = jax.tree.map(vector, params, *([] if perturbations is None else [perturbations]))

    def step(state: Array, pair: Array) -> tuple[Array, Array]:
        logits, state = _logits(moved, perturbations, pair[0], state, shift)
        return state, egg_log_likelihood(logits, pair[1])

    inputs, targets = (jnp.moveaxis(x, -1, 0) for x in (tokens[..., :-1], tokens[..., 1:]))
    state, scores = jax.lax.scan(step, state, jnp.stack([inputs, targets], axis=1))
    return jnp.moveaxis(scores, 0, -1), state


def _logits(params, perturbations, token: Array, state: Array, shift: int) -> tuple[Array, Array]:
    """Logits ``[..., V]`` after one token, and the new state; vectors have their noise already."""

    def noise_of(*path: str):
        node = perturbations
        for name in path if node is not None else ():
            node = node[name]
        return node

    x = egg_embed(token[..., None], params["embed"], noise_of("embed"), shift=shift)
    new = []
    for i in map(str, range(len(params["layers"]))):  # a mapped dict has its keys as sorted texts
        layer = params["layers"][i]

        def linear(name: str, x: Array, i=i, layer=layer) -> Array:
            return egg_matmul(x, layer[name], noise_of("layers", i, name), shift=shift)

        before = state[int(i)][..., None, :]
        y = egg_norm(x, layer["cell_norm"])
        forget = _add(linear("wf", y), linear("uf", before), layer["bf"])

        def propose(gated: Array, y=y, layer=layer, linear=linear) -> Array:
            return _add(linear("wh", y), linear("uh", gated), layer["bh"])

        after = egg_gru(before, forget, propose)
        new.append(after[..., 0, :])
        x = _add(x, after)
        x = _add(x, linear("down", linear("up", egg_norm(x, layer["mlp_norm"]))))
    x = egg_norm(x, params["norm"])
    logits = egg_matmul(x, params["head"], noise_of("head"), shift=shift)
    return logits[..., 0, :], jnp.stack(new)


def egg_evolve(
    params: ArrayTree,
    table: Array,
    key: Array,
    epoch: Array | int,
    signs: Array,
    *,
    threshold: Array | int,
    noise_reuse: int = 1,
    chunk: int = 64,
) -> ArrayTree:
    """All leaves of an integer model after an update, each by :func:`egg_update`.

    Args:
      params, table, key, epoch, signs, threshold, noise_reuse, chunk: See the package.

    Returns:
      Parameters of the same form, int8; none moves by more than 1.

    Raises:
      ValueError: If ``signs`` is empty, or a leaf reads more entries than ``table`` has.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = jr.evolution.egg_init(jax.random.key(0), vocab=16, width=8, layers=1)
      >>> table = jr.evolution.int8_table(jax.random.key(1), size=1024)
      >>> signs = jr.evolution.pair_sign(jnp.array([3.0, 1.0, 2.0, 5.0]))
      >>> new = jr.evolution.egg_evolve(params, table, jax.random.key(2), 0, signs, threshold=10)
      >>> new["head"].dtype.name, int(abs(new["head"] - params["head"]).max())
      ('int8', 1)

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H.
    """

    def one(path: str, w: Array) -> Array:
        return egg_update(
            w,
            table,
            noise.leaf_key(key, path),
            epoch,
            signs,
            threshold=threshold,
            noise_reuse=noise_reuse,
            chunk=chunk,
        )

    return trees.map_with_path(one, params)
