"""Log-probabilities of responses under the model, with the prompt of a group computed once."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import logprobs
from jaxrl_llm.advantages import rank_growth
from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import accepted
from jaxrl_llm.core.kernels.vocabulary import scaled_logits
from jaxrl_llm.core.packing import (
    FlatPacking,
    Layout,
    Tree,
    apart,
    check_packing,
    pack,
    pack_prompts,
    rewritten_rows,
    unpack,
)
from jaxrl_llm.core.support import Support, keep_mask
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import AttentionContext, Model, PromptTree, prefill
from jaxrl_llm.models.sharding import on_each_device, over_context, spreads_batch
from jaxrl_llm.recipes import Batch

# Statistics of the last hidden states, by their names as extras: the squared norm for each token,
# and the effective rank and its growth for each response.
HIDDEN_STATISTICS = ("hidden_sq", "hidden_rank")

# Number of tokens whose logits are in memory while a rule of the optimizer's step is computed.
_STEPS_AT_ONCE = 64


def score(
    model: Model,
    params: ArrayTree,
    prompt_tokens: Array,
    prompt_mask: Array,
    tokens: Array,
    mask: Array,
    *,
    temperature: float | Array = 1.0,
    delta=None,
    remat: str = "none",
    packing: Layout | None = None,
    shared_prefix_len: int = 0,
    chunk_size: int | None = None,
    support: Support | None = None,
) -> tuple[Array, Array]:
    """Log-probability and entropy of every response token given its prompt.

        logp[p, g, t] = log softmax(logits(prompt[p], y[p, g, :t]) / temperature)[y[p, g, t]]

    The keys and values of a prompt are computed once for its G responses, so the cost is that of
    the unique tokens: Lp + G T per group instead of G (Lp + T). The gradient flows through prompts
    and responses.

    If the model supports it, a prompt and its responses go through the layers together: each
    product is computed once for both, and on a mesh the all-gather of a weight and the sum of its
    gradient run once.

    The first ``shared_prefix_len`` tokens of all prompts, such as a chat template, can be computed
    once for all prompts. Prompts are then computed before responses. If the batch is sharded over
    devices, this saves almost nothing, so each prompt computes those tokens itself.

    With a ``packing``, several responses to a prompt share a row, so short responses cost less
    than the longest one. In a :class:`~jaxrl_llm.core.packing.Tree`, responses also share common
    prefixes: the model reads and projects each unique token once. In a
    :class:`~jaxrl_llm.core.packing.FlatPacking`, different prompts share rows too, and what they
    begin with.

    The prompt's last token is the first input of each response. Attention ignores ``mask``: a token
    written by an environment is context, although it is not trained on. Padding must therefore come
    after the response.

    Args:
      model: The model.
      params: Its parameters.
      prompt_tokens: int32 ``[P, Lp]``, right padded.
      prompt_mask: bool ``[P, Lp]``, at least one token per prompt.
      tokens: int32 ``[P, G, T]``, the responses, right padded.
      mask: bool ``[P, G, T]``, the tokens that are scored.
      temperature: The logits are divided by it, as in sampling.
      delta: Low-rank delta of the linear layers, shared by all rows; None for none.
      remat: What the backward pass keeps of a layer; see :func:`~jaxrl_llm.models.make_model`.
      packing: Layout of the responses; None for one row per response.
      shared_prefix_len: Number of first tokens that all prompts share; each prompt is longer.
      chunk_size: As in ``logprobs``, which chooses it if None; bounds the logits in memory.
      support: The set from which each token was drawn, with leading axes ``[P, G, T]``; the softmax
        runs over this set only.

    Returns:
      ``(logp, entropy)``, both float32 ``[P, G, T]`` and 0 where masked.

    Raises:
      ValueError: If shapes disagree, ``shared_prefix_len`` is negative or not below Lp, or the
        model cannot read the segments, trees or prompt trees of ``packing``.
      TypeError: If a mask is not bool or tokens are not integers.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> prompts, responses = jnp.array([[1, 2, 3]]), jnp.array([[[4, 5], [6, 0]]])
      >>> logp, entropy = jr.train.score(
      ...     model, params, prompts, prompts > 0, responses, responses > 0)
      >>> (logp < 0).tolist()  # the second response has one token
      [[[True, True], [True, False]]]
    """
    hidden = score_hidden(
        model,
        params,
        prompt_tokens,
        prompt_mask,
        tokens,
        mask,
        delta=delta,
        remat=remat,
        packing=packing,
        shared_prefix_len=shared_prefix_len,
    )
    scorer = Scorer(model, temperature=temperature, chunk_size=chunk_size)
    return scorer.project(params, hidden, Responses(tokens, mask, support, packing))


def score_hidden(
    model: Model,
    params: ArrayTree,
    prompt_tokens: Array,
    prompt_mask: Array,
    tokens: Array,
    mask: Array,
    *,
    delta=None,
    remat: str = "none",
    packing: Layout | None = None,
    shared_prefix_len: int = 0,
    after: bool = False,
    experts: Array | None = None,
) -> Array:
    """Hidden states ``[P, G, T, D]`` from which each response token is predicted.

    The hidden state of token t has seen the prompt and the tokens before t. The output matrix maps
    it to the log-probability of token t, and a critic's head to the value of the state before t.
    With a ``packing``, the result has one state per cell of a response, ``[P, R, S, D]``. With
    ``after``, the state of token t has also seen token t, as a reward model needs. ``experts`` are
    those of a :class:`~jaxrl_llm.recipes.Batch`. Other arguments and errors are those of
    :func:`score`.
    """
    _check(model, prompt_tokens, prompt_mask, tokens, mask, packing, shared_prefix_len)
    tokens = _in_vocabulary(model, tokens)
    prompt_tokens = jnp.where(prompt_mask, _in_vocabulary(model, prompt_tokens), 0)
    inputs, positions, prefix_mask = _inputs_of_responses(
        prompt_tokens, prompt_mask, tokens, packing, after
    )
    inputs, positions = pack(packing, (inputs, positions))
    context = AttentionContext(
        jnp.ones(inputs.shape, bool), None, prefix_mask, experts=pack(packing, experts)
    )
    apply = functools.partial(model.apply, params, delta=delta, remat=remat)
    if isinstance(packing, FlatPacking):
        cells = tokens.shape[1] * tokens.shape[2]
        context = _flat_context(packing, context, cells)
        rows = _rows(pack_prompts(packing, prompt_tokens), inputs)
        places = _rows(jnp.maximum(packing.prompt_sources, 0) % prompt_tokens.shape[1], positions)
        hidden, _ = apply(rows, places, context)
        return hidden[:, 0, packing.prompt_sources.shape[1] :].reshape(*inputs.shape, -1)
    if isinstance(packing, Tree):
        context = context._replace(ends=packing.ends)
    elif packing is not None:
        context = context._replace(segments=packing.members)
    if model.takes_prompts and (spreads_batch() or not shared_prefix_len):
        length = prompt_tokens.shape[1]
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), prompt_tokens.shape)
        hidden, _ = apply(_rows(prompt_tokens, inputs), _rows(places, positions), context)
        return hidden[:, 0, length:].reshape(*inputs.shape, -1)
    prefix = prefill(
        model,
        params,
        prompt_tokens,
        prefix_mask,
        shared_prefix_len=shared_prefix_len,
        delta=delta,
        remat=remat,
    )
    hidden, _ = apply(inputs, positions, context._replace(prefix=prefix))
    return hidden


def _inputs_of_responses(
    prompt_tokens: Array, prompt_mask: Array, tokens: Array, packing: Layout | None, after: bool
) -> tuple[Array, Array, Array]:
    """The tokens after which those of responses are predicted, their positions, and a mask.

    The first two are ``[P, G, T]``; the mask ``[P, Lp]`` is of the prompt tokens that they attend
    to. The last token of a prompt predicts the first of each response, so it is read once with each
    of them and is not in the mask. With ``after``, the responses' own tokens are read, and the mask
    is that of the whole prompt.
    """
    P, G, T = tokens.shape
    last = masking.last_token(prompt_mask)
    start = jnp.argmax(last, axis=-1).astype(jnp.int32)[:, None, None]
    first = jnp.sum(jnp.where(last, prompt_tokens, 0), axis=-1, dtype=tokens.dtype)
    first = jnp.broadcast_to(first[:, None, None], (P, G, 1))
    if isinstance(packing, Tree) and packing.parents is not None:
        before = jnp.take_along_axis(tokens, jnp.maximum(packing.parents, 0), axis=-1)
        inputs = jnp.where(packing.parents < 0, first, before)
        positions = start + packing.depths
    else:
        inputs = jnp.concatenate([first, tokens[..., :-1]], axis=-1)
        positions = jnp.broadcast_to(start + jnp.arange(T, dtype=jnp.int32), (P, G, T))
    if after:
        return tokens, positions + 1, prompt_mask
    return inputs, positions, prompt_mask & ~last


def _flat_context(packing: FlatPacking, context: AttentionContext, cells: int) -> AttentionContext:
    """The context of flat rows, which hold prompts and responses.

    ``cells`` is G T, the cells of a prompt's responses.
    """
    # The last token of a prompt that its responses attend to; -1 for a prompt of one token.
    behind = jnp.sum(context.prefix_mask, axis=-1, dtype=jnp.int32) - 1
    leaves = jnp.take_along_axis(packing.prompt_cells, jnp.maximum(behind, 0)[:, None], axis=1)
    leaves = jnp.where(behind < 0, -1, leaves[:, 0])
    of_cells = leaves[jnp.maximum(packing.sources, 0) // cells]
    return context._replace(
        prefix_mask=packing.prompt_sources >= 0,
        ends=packing.ends,
        prompt_tree=PromptTree(packing.prompt_ends, of_cells),
    )


def _rows(of_prompts: Array, of_responses: Array) -> Array:
    """Concatenates ``[P, Lp]`` and ``[P, G, T]`` to ``[P, 1, Lp + G T]``."""
    flat = of_responses.reshape(len(of_responses), -1)
    return jnp.concatenate([of_prompts, flat], axis=1)[:, None]


def _check(
    model: Model, prompt_tokens, prompt_mask, tokens, mask, packing, shared_prefix_len
) -> None:
    """Raises the errors of :func:`score`."""
    check_causal("score", model)
    checks.check_rank("score", 2, prompt_tokens=prompt_tokens, prompt_mask=prompt_mask)
    checks.check_rank("score", 3, tokens=tokens, mask=mask)
    checks.check_same_shape("score", prompt_tokens=prompt_tokens, prompt_mask=prompt_mask)
    checks.check_same_shape("score", tokens=tokens, mask=mask)
    checks.check_bool("score", prompt_mask=prompt_mask, mask=mask)
    checks.check_integer("score", prompt_tokens=prompt_tokens, tokens=tokens)
    if isinstance(packing, Tree):
        if not model.reads_trees:
            raise ValueError("score: a Tree needs a model whose reads_trees is True.")
    elif isinstance(packing, FlatPacking):
        if not model.reads_prompt_trees:
            raise ValueError("score: a FlatPacking needs a model whose reads_prompt_trees is True.")
        shape = prompt_tokens.shape
        checks.check_shape("score", "packing.prompt_cells", packing.prompt_cells, shape)
    elif packing is not None and not model.reads_segments:
        raise ValueError("score: packing needs a model whose reads_segments is True.")
    if prompt_tokens.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"score: prompt_tokens {prompt_tokens.shape} and tokens {tokens.shape} must have the "
            "same number of prompts."
        )
    check_packing("score", packing, tokens.shape)
    checks.check_non_negative("score", shared_prefix_len=shared_prefix_len)
    if shared_prefix_len >= prompt_tokens.shape[1]:
        raise ValueError(
            f"score: shared_prefix_len must be below the {prompt_tokens.shape[1]} tokens of a "
            f"prompt; got {shared_prefix_len}."
        )


class Responses(NamedTuple):
    """The response tokens to score; the fields are arguments of :func:`score`."""

    tokens: Array
    mask: Array
    support: Support | None = None
    packing: Layout | None = None


class ModelScores(NamedTuple):
    """The results of one forward pass on the responses of a batch; 0 where masked."""

    logp: Array  # float32 [P, G, T], log-probabilities in nats
    entropy: Array  # float32 [P, G, T]
    statistics: dict[str, Array]  # over the vocabulary [P, G, T, ...], by name


@dataclass(frozen=True)
class Scorer:
    """A model and its scoring options: all but parameters and batch; see :func:`score`."""

    model: Model
    temperature: float | Array = 1.0
    chunk_size: int | None = None
    remat: str = "none"
    shared_prefix_len: int = 0
    # Output matrix and cap of a teacher, for statistics that read its logits; traced in a step.
    teacher_matrix: Array | None = None
    teacher_logit_cap: float | None = None

    def __call__(
        self,
        params: ArrayTree,
        batch: Batch,
        statistics: Mapping[str, Callable] | None = None,
        *,
        of_hidden: tuple[str, ...] = (),
    ) -> ModelScores:
        """Scores of the responses of a batch.

        For a model with a head, the values of its first head after each token replace the
        log-probabilities, and the entropy is 0.

        Args:
          params: Parameters of the policy.
          batch: Prompts, responses, and the extras that the statistics name.
          statistics: Functions of the logits by name; see ``logprobs.vocabulary_statistics``.
          of_hidden: The ``HIDDEN_STATISTICS`` to add to the statistics.
        """
        if self.model.values is not None:
            values = self.values(params, batch)[..., 0]
            return ModelScores(values, jnp.zeros_like(values), {})
        if "hidden_sq" in of_hidden:
            _check_linear_logits(self.model, "hidden_sq")
        hidden = self._hidden(params, batch)
        scores = self._of_hidden(params, hidden, batch, statistics or {}, batch.packing)
        if "hidden_sq" in of_hidden:
            # Of the states whose products with the matrix are the logits of the policy.
            squares = jnp.sum((hidden.astype(jnp.float32) / self.temperature) ** 2, axis=-1)
            squares = unpack(batch.packing, squares, batch.mask)
            scores = scores._replace(statistics=scores.statistics | {"hidden_sq": squares})
        if "hidden_rank" in of_hidden:
            growth = rank_growth(unpack(batch.packing, hidden, batch.mask), batch.mask)
            ranks = {"hidden_rank": jnp.stack(growth, axis=-1)}
            scores = scores._replace(statistics=scores.statistics | ranks)
        return scores

    def values(self, params: ArrayTree, batch: Batch) -> Array:
        """Values ``[P, G, T, C]`` of a model with a head after each token; 0 where masked."""
        if self.model.values is None:
            raise ValueError("score: the model has no head, so it has no values.")
        hidden = self._hidden(params, batch, after=True)
        values = unpack(batch.packing, self.model.values(params, hidden), batch.mask)
        return masking.zero_masked(values, batch.mask[..., None])

    def teacher(
        self,
        params: ArrayTree,
        batch: Batch,
        statistics: Mapping[str, Callable],
        *,
        states: bool = False,
    ) -> dict[str, Array]:
        """Vocabulary statistics of the teacher.

        The teacher reads the prompts of the batch, or a separate prompt for each response if the
        extras have ``teacher_prompt_tokens`` and ``teacher_prompt_mask`` ``[P, G, L]``.

        Args:
          params: Parameters of the teacher.
          batch: Prompts and responses.
          statistics: Functions of the logits by name.
          states: Whether to add the teacher's hidden states ``[P, G, T, D]`` as ``teacher_hidden``.
        """
        P, G, T = batch.tokens.shape
        packing = None
        if "teacher_prompt_tokens" in batch.extras:
            tree = rewritten_rows(batch.packing)
            hidden = score_hidden(
                self.model,
                params,
                batch.extras["teacher_prompt_tokens"].reshape(P * G, -1),
                batch.extras["teacher_prompt_mask"].reshape(P * G, -1),
                batch.tokens.reshape(P * G, 1, T),
                batch.mask.reshape(P * G, 1, T),
                packing=None if tree is None else apart(tree),
            )
            hidden = hidden.reshape(P, G, T, -1)
        else:
            hidden = self._hidden(params, batch.replace(experts=None))
            packing = batch.packing
        values = {}
        if statistics:
            values = self._of_hidden(params, hidden, batch, statistics, packing).statistics
        if states:
            values = values | {"teacher_hidden": unpack(packing, hidden, batch.mask)}
        return jax.tree.map(jax.lax.stop_gradient, values)

    def answers(self, params: ArrayTree, batch: Batch) -> Array:
        """Mean log-probability of the reference answer before the first turn and after each.

            context of k = prompt, response up to the start of turn k, text before the answer
            answer_logp[k] = mean over tokens of the answer of log pi(token | context of k, answer)

        The environment's reply to a turn thus counts as part of that turn. After the last turn, the
        response is read up to the last token that belongs to a turn. One k is in memory at a time.

        Args:
          params: Parameters of the policy at the start of the step.
          batch: With ``ground_truth`` and ``ground_truth_mask`` ``[P, L]``, ``turn_ids`` and
            ``turn_where`` ``[P, G, K]`` in its extras.

        Returns:
          float32 ``[P, G, K + 1]``.
        """
        if rewritten_rows(batch.packing) is not None:
            raise ValueError(
                "score: the answer after each turn cannot be computed if the chat template or the "
                "environment rewrites earlier turns."
            )
        P, G, T = batch.tokens.shape
        extras, turn_ids = batch.extras, batch.extras["turn_ids"]
        K, L = extras["turn_where"].shape[-1], extras["ground_truth_mask"].shape[-1]
        answer = jnp.broadcast_to(extras["ground_truth"][:, None], (P, G, L))
        mask = jnp.broadcast_to(extras["ground_truth_mask"][:, None], (P, G, L))
        written = jnp.max(jnp.where(turn_ids >= 0, jnp.arange(1, T + 1), 0), axis=-1)
        tokens = jnp.pad(batch.tokens, [(0, 0), (0, 0), (0, L)])

        def after(turns: Array) -> Array:
            begun = turn_ids >= turns
            cut = jnp.where(jnp.any(begun, axis=-1), jnp.argmax(begun, axis=-1), written)[..., None]
            place = jnp.arange(T + L) - cut
            forced = jnp.take_along_axis(answer, jnp.clip(place, 0, L - 1), axis=-1)
            hidden = score_hidden(
                self.model,
                params,
                batch.prompt_tokens,
                batch.prompt_mask,
                jnp.where(place < 0, tokens, forced),
                (place >= 0) & (place < L),
                shared_prefix_len=self.shared_prefix_len,
            )
            hidden = jnp.take_along_axis(hidden, (cut + jnp.arange(L))[..., None], axis=2)
            logp, _ = self.project(params, hidden, Responses(answer, mask))
            return masking.masked_mean(logp, mask, axis=-1)

        values = jax.lax.map(after, jnp.arange(K + 1))
        return jax.lax.stop_gradient(jnp.moveaxis(values, 0, -1))

    def step_effects(
        self, params: ArrayTree, batch: Batch, rule, state: ArrayTree, *, advantages: Array, rate
    ) -> tuple[Array, ArrayTree]:
        """Effects of the optimizer step that each token alone would make, as a rule computes them.

        Args:
          params: Parameters of the policy at the start of the step.
          batch: Prompts and responses.
          rule: The function of a ``Computed`` with source "optimizer".
          state: State of the rule.
          advantages: ``[P, G, T]``.
          rate: The learning rate of the update.

        Returns:
          The rule's values ``[P, G, T, ...]``, and its sums over the batch.

        Raises:
          ValueError: If the model caps its logits, whose gradient no rule computes.
        """
        _check_linear_logits(self.model, "the effect of an optimizer step")
        hidden = unpack(batch.packing, self._hidden(params, batch), batch.mask)
        tokens = _in_vocabulary(self.model, batch.tokens)
        arrays = (hidden, tokens, batch.mask, advantages, batch.support)
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        temperature = jnp.asarray(self.temperature, wide)
        shared = (self.model.output_matrix(params), temperature, state, rate)

        def of_rows(arrays, shared):
            matrix, temperature, state, rate = shared
            lead = arrays[1].shape
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), arrays)
            size = min(self.chunk_size or _STEPS_AT_ONCE, len(flat[1]))
            count = -(-len(flat[1]) // size)

            def split(x):
                x = jnp.pad(x, [(0, count * size - len(x))] + [(0, 0)] * (x.ndim - 1))
                return x.reshape(count, size, *x.shape[1:])

            def chunk(total, arrays):
                h, targets, mask, values, support = arrays
                logits = scaled_logits(h, matrix, temperature, None)
                if support is not None:
                    logits = jnp.where(keep_mask(support, len(matrix)), logits, -jnp.inf)
                logits = jnp.where(mask[:, None], logits, 0.0)
                h = h.astype(jnp.float32) / temperature  # now logits = h @ matrix.T
                effects, sums = rule(
                    state, h, logits, targets, advantages=values, mask=mask, learning_rate=rate
                )
                return jax.tree.map(jnp.add, total, sums), effects

            zeros = rule.zeros(*matrix.shape)
            total, effects = jax.lax.scan(chunk, zeros, jax.tree.map(split, flat))
            effects = effects.reshape(-1, *effects.shape[2:])[: len(flat[1])]
            # Add an axis of devices, over which the sums are added below.
            total = jax.tree.map(lambda x: x[None], total)
            return effects.reshape((*lead, *effects.shape[1:])), total

        effects, sums = on_each_device(of_rows, arrays, shared)
        return effects, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    def _hidden(self, params: ArrayTree, batch: Batch, *, after: bool = False) -> Array:
        return score_hidden(
            self.model,
            params,
            batch.prompt_tokens,
            batch.prompt_mask,
            batch.tokens,
            batch.mask,
            remat=self.remat,
            packing=batch.packing,
            shared_prefix_len=self.shared_prefix_len,
            after=after,
            experts=None if after else batch.experts,
        )

    def _of_hidden(self, params, hidden, batch: Batch, statistics, packing) -> ModelScores:
        responses = Responses(batch.tokens, batch.mask, batch.support, packing)
        rows = {k: x for k, x in batch.extras.items() if x.shape[:3] == batch.mask.shape}
        computed = self.project_statistics(params, hidden, responses, statistics, rows)
        return ModelScores(*self.project(params, hidden, responses), computed)

    def project(
        self, params: ArrayTree, hidden: Array, responses: Responses
    ) -> tuple[Array, Array]:
        """Log-probabilities and entropies ``[P, G, T]`` from hidden states, packed or not."""
        tokens, mask, support, packing = responses
        packed = pack(packing, (_in_vocabulary(self.model, tokens), mask, support))

        def of_tokens(arrays, shared) -> tuple[Array, Array]:
            hidden, (tokens, mask, support) = arrays
            matrix, temperature = shared
            return logprobs.token_logprobs(
                hidden,
                matrix,
                tokens,
                temperature=temperature,
                logit_cap=self.model.logit_cap,
                mask=mask,
                support=support,
                **self._chunks,
            )

        shared = self.model.output_matrix(params), self.temperature
        return unpack(packing, over_context(of_tokens, (hidden, packed), shared), mask)

    def project_statistics(
        self,
        params: ArrayTree,
        hidden: Array,
        responses: Responses,
        functions: Mapping[str, Callable],
        rows: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Statistics over the vocabulary ``[P, G, T, ...]`` by name, from hidden states."""
        if not functions:
            return {}
        tokens, mask, support, packing = responses
        tokens = _in_vocabulary(self.model, tokens)
        named = {name for function in functions.values() for name in accepted(function)}
        has_teacher = "teacher_logits" in named
        if has_teacher and (self.teacher_matrix is None or "teacher_hidden" not in rows):
            raise ValueError("score: a statistic reads teacher_logits, but there is no teacher.")
        named |= {"teacher_hidden"} if has_teacher else set()
        if isinstance(packing, Tree | FlatPacking) and named & set(rows):
            # Responses that share a token may have different extras at that token.
            hidden, packing = unpack(packing, hidden, mask), None
        arrays = (hidden, *pack(packing, (tokens, mask, dict(rows), support)))

        def statistics(arrays, shared):
            hidden, tokens, mask, rows, support = arrays
            matrix, temperature, of_teacher = shared
            teacher = (rows["teacher_hidden"], of_teacher) if has_teacher else None
            return logprobs.vocabulary_statistics(
                functions,
                hidden,
                matrix,
                tokens,
                temperature=temperature,
                logit_cap=self.model.logit_cap,
                mask=mask,
                rows=rows,
                support=support,
                teacher=teacher,
                teacher_logit_cap=self.teacher_logit_cap if has_teacher else None,
                **self._chunks,
            )

        shared = (
            self.model.output_matrix(params),
            self.temperature,
            self.teacher_matrix if has_teacher else None,
        )

        def of_rows(arrays, shared):
            return over_context(statistics, arrays, shared)

        return unpack(packing, on_each_device(of_rows, arrays, shared), mask)

    @property
    def _chunks(self) -> dict[str, int]:
        return {} if self.chunk_size is None else {"chunk_size": self.chunk_size}


def _check_linear_logits(model: Model, what: str) -> None:
    """Raises ValueError for a model whose logits are not linear in its last hidden states."""
    if model.logit_cap is not None:
        raise ValueError(
            f"score: {what} is computed for logits that are linear in the last hidden state; the "
            f"model has a soft cap of logits, logit_cap {model.logit_cap:g}."
        )


def _in_vocabulary(model: Model, tokens: Array) -> Array:
    """Clips token ids to the vocabulary, since padding may hold any value."""
    return jnp.clip(tokens, 0, model.config.vocab_size - 1)
