"""Prompts near a target success rate, predicted from the rollouts of a few references: DOTS."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, ArrayTree, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import evaluation_text_of
from jaxrl_llm.curation.collectors.protocol import (
    REPLAYED,
    Collection,
    Collector,
    Decision,
    Request,
    for_batch_of,
    in_order,
    on_host,
    sized,
    stack_outcomes,
    width_of,
)
from jaxrl_llm.curation.prompts.adapters import RateAdapter, adapted_rates
from jaxrl_llm.curation.prompts.embeddings import hashed_magnitudes
from jaxrl_llm.curation.prompts.selection import gumbel_top, target_logits
from jaxrl_llm.curation.prompts.similarity import attention_rates, linear_recalibration

__all__ = ["TargetedState", "targeted"]


class TargetedState(NamedTuple):
    """State of :func:`targeted`.

    Attributes:
      order: int32 ``[N]``, the prompts of the round in the order of their draw.
      rates: float32 ``[N]``, the predicted success rates that they were drawn by; 0 before the
        first round.
      drawn_at: int32 ``[]``, the step at which the round was drawn; -1 before the first.
      source: State of the collector that says how many prompts are rolled out, and how.
    """

    order: Array
    rates: Array
    drawn_at: Array
    source: ArrayTree


@dataclasses.dataclass(frozen=True, repr=False)
class _Adapted:
    """The prediction of a fitted adapter, which compares and prints by a digest of its numbers."""

    digest: str
    params: RateAdapter = dataclasses.field(compare=False)

    def __call__(self, queries, references, reference_rates, *, where) -> Array:
        return adapted_rates(queries, references, reference_rates, self.params, where=where)

    def __repr__(self) -> str:
        return f"RateAdapter({self.digest})"


def _adapted(params: RateAdapter) -> _Adapted:
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(str(leaf.shape).encode() + leaf.tobytes())
    return _Adapted(digest.hexdigest()[:12], params)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Targeted:
    """Made by :func:`targeted`."""

    references: int
    every: int
    target: float
    temperature: float
    embed: Callable
    predict: Callable | None
    source: Collector
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    # The embeddings of the last data set, by its texts; a run makes a copy for each batch.
    embedded: dict[tuple[str, ...], np.ndarray] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(asks_again=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Targeted":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def for_batch(self, num_groups: int) -> "_Targeted":
        return dataclasses.replace(self, source=for_batch_of(self.source, num_groups))

    def width(self, group_size: int) -> int:
        return width_of(self.source, group_size)

    @property
    def evaluation_text(self) -> Callable:
        """That of the source, if it has one."""
        return evaluation_text_of(self.source)

    def init(self, num_prompts: int) -> TargetedState:
        return TargetedState(
            order=np.arange(num_prompts, dtype=np.int32),
            rates=np.zeros(num_prompts, np.float32),
            drawn_at=np.array(-1, np.int32),
            source=self.source.init(num_prompts),
        )

    def propose(self, state: TargetedState, key, collection: Collection, count: int):
        first, total = len(collection.requests), len(state.order)
        leading = self._leading(collection, total)
        with on_host():
            key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)))
            reference_key, draw_key, source_key = jax.random.split(key, 3)
            requests: list[Request] = []
            if first < leading:
                places = np.asarray(jax.random.permutation(reference_key, total))[:leading]
                now = places[first : first + count]
                requests = [Request(collection.group_size, int(place)) for place in now]
            elif (
                leading
                and int(state.drawn_at) != collection.step
                and None not in collection.outcomes[:leading]
            ):
                state = self._drawn(state, draw_key, collection, leading)
        if missing := count - len(requests):
            part = self._part(collection, leading)
            more, source = self.source.propose(state.source, source_key, part, missing)
            state = state._replace(source=source)
            # The steps of a round take its prompts in turns, so that no step has the nearest ones.
            mine = np.arange(total) % self.every == collection.step % self.every
            order = np.concatenate([state.order[mine], state.order[~mine]])
            used = sum(_takes_next(request) for request in part.requests)
            for request in more:
                if _takes_next(request):
                    if request.prompt is not None:
                        self._check(request)
                    request = request._replace(prompt=int(order[used % total]))
                    used += 1
                requests.append(_behind(request, leading))
        return tuple(requests), state

    def observe(self, state: TargetedState, collection: Collection):
        leading = self._leading(collection, len(state.order))
        if (missing := leading - len(collection.requests)) > 0:
            return Decision(ask=missing), state
        if None in collection.outcomes[:leading]:
            return Decision(), state
        decision, source = self.source.observe(state.source, self._part(collection, leading))
        for request in decision.requests:
            self._check(request)
        decision = decision._replace(
            requests=tuple(_behind(request, leading) for request in decision.requests)
        )
        if decision.rows is not None:
            rows = tuple(
                row._replace(members=tuple((i + leading, j) for i, j in row.members))
                for row in decision.rows
            )
            decision = decision._replace(rows=rows)
        return decision, state._replace(source=source)

    def _leading(self, collection: Collection, total: int) -> int:
        """How many requests of this batch are references, which come first."""
        return 0 if collection.step % self.every else min(self.references, total)

    def _part(self, collection: Collection, leading: int) -> Collection:
        """The batch without its references, as the source sees it."""
        return collection._replace(
            requests=tuple(_behind(each, -leading) for each in collection.requests[leading:]),
            outcomes=collection.outcomes[leading:],
        )

    def _check(self, request: Request) -> None:
        if request.extends is None and request.role != REPLAYED:
            raise ValueError(
                f"{self!r} chooses the prompts, but its source asks for prompt {request.prompt}; "
                "the source must take them in the order of the data."
            )

    def _drawn(self, state: TargetedState, key, collection: Collection, leading: int):
        """The state with the prompts of a round, drawn by what its references tell."""
        outcomes = [collection.outcome(i) for i in range(leading)]
        seen = stack_outcomes(outcomes, rows=leading)
        outside = seen.where & ~((seen.rewards >= 0) & (seen.rewards <= 1))
        for row, member in np.argwhere(outside)[:1]:
            raise ValueError(
                f"{self!r}: rewards must be in [0, 1]; prompt {outcomes[row].prompt} has "
                f"{seen.rewards[row, member]:g}."
            )
        where = seen.where.any(axis=-1)
        rewards = np.where(seen.where, seen.rewards, 0.0).sum(axis=-1)
        reference_rates = np.float32(rewards / np.maximum(seen.where.sum(axis=-1), 1))
        texts = tuple(str(row["text"]) for row in collection.data)
        if texts not in self.embedded:
            rows = [np.asarray(self.embed(text), np.float32) for text in texts]
            for text, row in zip(texts, rows, strict=True):
                if row.shape != rows[0].shape or row.ndim != 1:
                    raise ValueError(
                        f"{self!r}: an embedding must have shape [D], the same for all prompts; "
                        f"that of {text[:40]!r} has {row.shape}, the first one {rows[0].shape}."
                    )
            self.embedded.clear()
            self.embedded[texts] = np.stack(rows)
        queries = self.embedded[texts]
        references = queries[seen.prompt]
        if self.predict is None:
            # Attention is between embeddings scaled as a layer norm would, to norm sqrt(D).
            root = np.sqrt(queries.shape[-1], dtype=np.float32)
            queries, references = (
                x * root / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
                for x in (queries, references)
            )
        predict = attention_rates if self.predict is None else self.predict
        rates = predict(queries, references, reference_rates, where=where)
        checks.check_shape(repr(self), "the result of predict", rates, state.rates.shape)
        rates = linear_recalibration(
            jnp.asarray(rates, jnp.float32), seen.prompt, reference_rates, where=where
        )
        if not np.isfinite(np.asarray(rates)).all():
            raise ValueError(f"{self!r}: a predicted rate is not finite.")
        logits = target_logits(rates, target=self.target, temperature=self.temperature)
        order = np.asarray(gumbel_top(key, logits, count=len(state.order)))
        drawn_at = np.array(collection.step, np.int32)
        return state._replace(order=order, rates=np.asarray(rates), drawn_at=drawn_at)

    def __repr__(self) -> str:
        text = f"references={self.references}, every={self.every}"
        for name, default in (("target", 0.5), ("temperature", 1e-3)):
            if (value := getattr(self, name)) != default:
                text += f", {name}={value}"
        if self.embed is not hashed_magnitudes:
            text += f", embed={stable_repr(self.embed)}"
        if self.predict is not None:
            option = "adapter" if isinstance(self.predict, _Adapted) else "predict"
            text += f", {option}={stable_repr(self.predict)}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"targeted({text})"


def _takes_next(request: Request) -> bool:
    """Whether a request of the source is for a prompt that is chosen here."""
    return request.extends is None and request.role != REPLAYED


def _behind(request: Request, count: int) -> Request:
    """A request whose numbers begin behind ``count`` others."""
    extends = request.extends
    return request if extends is None else request._replace(extends=extends + count)


def targeted(
    *,
    references: int = 256,
    every: int = 2,
    target: float = 0.5,
    temperature: float = 1e-3,
    embed: Callable[[str], np.ndarray] = hashed_magnitudes,
    adapter: RateAdapter | None = None,
    predict: Callable | None = None,
    source: Collector | None = None,
) -> Collector:
    """Requests the prompts whose predicted success rate is near a target.

        once in `every` steps:  `references` random prompts -> G rollouts each -> mean rewards
            rate_i = attention of prompt i to these prompts, then a linear fit
            order ~ softmax(-|rate - target| / temperature), without replacement
        batch = the prompts of the order, in turns of the round's steps

    The rollouts of the references are only for the prediction and do not train. Rewards must be in
    [0, 1].

    The prediction knows what the embedding holds. Correlation of predicted and true rates, over 400
    prompts whose difficulty depends on one thing, with 64 references of eight rollouts:

    ==================================  ==========  ==========  ============
    embedding                           topic       operator    size of sums
    ==================================  ==========  ==========  ============
    hashed_words                        above 0.98  above 0.95  below 0.2
    hashed_magnitudes, the default      above 0.97  above 0.9   above 0.8
    hashed_words, with an adapter                               below 0.3
    hashed_magnitudes, with an adapter  above 0.98  above 0.98  above 0.95
    ==================================  ==========  ==========  ============

    An adapter is fitted to eight rollouts of four other policies for 200 of the prompts, and
    predicts the rest. Difficulty that no embedding of words and magnitudes shows, such as that of a
    proof, needs an ``embed`` of a language model.

    Args:
      references: R, prompts that are rolled out to predict the others; all if there are fewer.
      every: Steps of a round, which share its references.
      target: The preferred rate, in [0, 1].
      temperature: Of the draw, above 0; 0.001 almost sorts by the distance.
      embed: ``text -> [D]``, called once for each prompt of a run.
      adapter: The fitted adapter of the paper, for embeddings of this ``embed``, such as from
        :func:`~jaxrl_llm.curation.rate_adapter_fit`. It does not change in a run and is no part of
        the state; a resumed run compares a digest of its numbers. None for attention between the
        embeddings, each scaled to norm sqrt(D).
      predict: ``(queries [N, D], references [R, D], reference_rates [R], where=[R]) -> rates [N]``,
        a predictor of another form, instead of ``adapter``.
      source: The collector that determines how many prompts are rolled out, and how, in the order
        of the data, such as :func:`~jaxrl_llm.curation.replayed`; None for :func:`in_order`.

    Returns:
      A collector; its state is a :class:`TargetedState`.

    Raises:
      TypeError: If ``embed`` or ``predict`` is no function, or ``adapter`` no ``RateAdapter``.
      ValueError: If a number is out of its range; in a run, if a reward is outside [0, 1], an
        embedding has another shape than the first, or the source chooses prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.targeted(references=32, every=1)
      targeted(references=32, every=1)

    References:
      DOTS (arXiv:2506.05316) and its released code: R = 256, rounds of 2 steps. It trains an
      adapter on embeddings of a language model beforehand, with success rates of other prompts
      under several policies. A run has no such rates: they are the user's, as are the embeddings.
      It shuffles the prompts of a round over its steps.
    """
    name = "targeted"
    checks.check_count(name, references=references, every=every)
    checks.check_share(name, target=target)
    checks.check_positive(name, finite=True, temperature=temperature)
    for option, function in {"embed": embed, "predict": predict}.items():
        if not callable(function) and (option == "embed" or function is not None):
            raise TypeError(f"{name}: {option} must be a function; got {function!r}.")
    if adapter is not None:
        checks.check_no_effect(name, "with an adapter", predict=predict)
        if not isinstance(adapter, RateAdapter):
            raise TypeError(f"{name}: adapter must be a RateAdapter; got {type(adapter).__name__}.")
        predict = _adapted(adapter)
    return _Targeted(
        references=references,
        every=every,
        target=float(target),
        temperature=float(temperature),
        embed=embed,
        predict=predict,
        source=in_order() if source is None else source,
    )
