"""Collectors: they choose the prompts of a batch, their rollouts, and the groups that train.

A collector is a value with three functions on the host. They are pure, NumPy in and NumPy out, and
their state is a pytree of arrays that is saved with the run::

    init(num_prompts)                      -> state
    propose(state, key, collection, count) -> (requests, state)   the next groups to request
    observe(state, collection)             -> (decision, state)   request more, or the rows

:func:`jaxrl_llm.rollout.collect` runs them. It calls ``observe`` before the first request and after
groups have finished, and passes to ``propose`` the count from ``observe``. An outcome is None while
its group is being sampled. The state that ``observe`` returns is used once it has decided on the
rows; until then it may be called any number of times. A collector whose groups may be larger than G
has a fourth function, ``width(group_size)``, the maximum rollouts of a group: the width of the
batch. A collector whose state depends on the sizes of a run has ``for_run(group_size,
max_new_tokens)``, which returns the collector for the run; if it also depends on P, then also
``for_batch(num_groups)``, called after it.

Every collector guarantees: the requests do not depend on how many are proposed at once; the rows
depend on which groups have finished, but not on their order; the number of requests is bounded. A
batch thus depends only on key, state and weights.

A collector may have ``needs``, the :class:`~jaxrl_llm.curation.Needs` of its requests. Without it,
it has those of the collectors that it is built of.

A collector that follows quantities learned in training has ``follows(algo_state)``, which selects
them from the recipe's state, and ``follow(state, learned)``; a run calls them before each batch,
with the state that came with the newest weights. It cannot be a part of another collector.

A mixture, a collector that divides a batch between others, has ``sources``, a tuple of these, and
``groups_of_sources(num_groups)``, which returns the number of groups of each. The parts of a
collector without these two count as if each had all groups. One whose source samples groups of
another size has ``group_size_of_source(group_size)``.

A collector that reads columns of the data has ``check_data(data)``, which raises ValueError for a
row that lacks them; a run calls it before it samples. An ``offline`` collector also has
``check_rows(data)``, for the held-out rows. One that needs a number of groups or rollouts has
``check_sizes(data, group_size=, num_groups=)``. One that has no effect in the first batches has
``first_help``, the index of the first batch with an effect; a shorter run warns. One that is only
defined for some rewards has ``reward_range``, the smallest and the largest.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.core import Array, ArrayTree

__all__ = [
    "Collection",
    "Collector",
    "DEMONSTRATION",
    "Decision",
    "HINTED",
    "JUDGE",
    "OWN",
    "Outcome",
    "REPLAYED",
    "Request",
    "Response",
    "Row",
    "TEXT",
    "in_order",
]

# Roles of a rollout: sampled for this batch; the same with help in its prompt; written by another
# policy; sampled for an earlier batch; an answer to a question about other rollouts; a text of the
# data, which answers nothing.
OWN, HINTED, DEMONSTRATION, REPLAYED, JUDGE, TEXT = range(6)
# How a recipe gets all that the run's reward gives, where a collector has ``lacks_components``.
GRADED_BY_RUN = (
    "Leave that collector out; replayed needs regrade=True, and demonstrations no reward=."
)
# The ``finish`` of a response that has not ended, as in rollout.types.
UNFINISHED = 4


class TurnStart(NamedTuple):
    """The beginning of a later turn of an episode.

    Attributes:
      length: Number of tokens of the response before it.
      play: State that the run needs to continue from there; valid only in this batch.
    """

    length: int
    play: Any = None


class Response(NamedTuple):
    """A response, or the beginning of one, of t tokens.

    Attributes:
      tokens: int32 ``[t]``; or a text, which is encoded with the run's tokenizer and, if the
        response is complete, ends with the stop token.
      behavior_logp: float32 ``[t]``, under the policy that sampled, at its temperature and over the
        full vocabulary; NaN for tokens whose log-probability is unknown, None if all are, as in a
        demonstration.
      model_logp: float32 ``[t]``, under the plain model that sampled; NaN or None as above.
      version: int32 ``[t]``, version of the weights that sampled each token; -1 or None as above.
      trains: bool ``[t]``, False for tokens that are only context; None for all True.
      entropy: float32 ``[t]``, entropy of the distribution of each token, or of the plain model if
        the collector has ``records_model_entropy``; NaN for tokens of an earlier batch, None if the
        sampler does not record it.
      finish: Why it ended, as in :class:`~jaxrl_llm.rollout.Rollout`; ignored for a beginning.
      reward: Its reward; None to grade it. A beginning has none.
      nodes: int32 ``[t]``, the rollout of this batch that sampled each token, by its number; -1 or
        None where there is none. Responses that fork share the number of a token.
      runner_up: int32 ``[t]``, the plain model's most likely token other than the sampled one; None
        if the sampler does not record it.
      runner_up_logp: float32 ``[t]``, its log-probability.
      ends: int32 ``[t]``, as in :class:`~jaxrl_llm.rollout.Rollout`: where tokens are no longer
        read, because the policy's context was rewritten; None if all are read.
      turn_starts: For an episode, the starts of its second and later turns, from which a request
        may continue. None if a response is one turn.
      turn_rewards: float32 ``[k]``, rewards of the steps of a complete response with its reward;
        None if there are none.
      turn_ends: ``[k]``, the characters of the response up to the end of each step.
    """

    tokens: np.ndarray | str
    behavior_logp: np.ndarray | None = None
    model_logp: np.ndarray | None = None
    version: np.ndarray | None = None
    trains: np.ndarray | None = None
    entropy: np.ndarray | None = None
    finish: int = 1
    reward: float | None = None
    nodes: np.ndarray | None = None
    runner_up: np.ndarray | None = None
    runner_up_logp: np.ndarray | None = None
    ends: np.ndarray | None = None
    turn_starts: tuple[TurnStart, ...] | None = None
    turn_rewards: np.ndarray | None = None
    turn_ends: np.ndarray | None = None


def beginning(response: Response, length: int) -> Response:
    """The first tokens of a response, with their statistics, for a request that continues them.

    Args:
      response: A response of an outcome.
      length: Number of tokens, from 0 to all.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> whole = jr.curation.Response(np.array([5, 6, 7]), np.array([-0.1, -0.2, -0.3]))
      >>> beginning(whole, 2).behavior_logp.tolist()
      [-0.1, -0.2]
    """

    def cut(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x[:length]

    starts = response.turn_starts
    return response._replace(
        tokens=response.tokens[:length],
        behavior_logp=cut(response.behavior_logp),
        model_logp=cut(response.model_logp),
        version=cut(response.version),
        trains=cut(response.trains),
        entropy=cut(response.entropy),
        nodes=cut(response.nodes),
        runner_up=cut(response.runner_up),
        runner_up_logp=cut(response.runner_up_logp),
        ends=cut(response.ends),
        turn_starts=starts and tuple(start for start in starts if start.length <= length),
        finish=UNFINISHED,
        reward=None,
    )


class Request(NamedTuple):
    """A requested group.

    Attributes:
      rollouts: Number of responses.
      prompt: Index of the prompt in the data set; None for the next one in the order of the data.
      extends: An earlier request, by its index in the batch, whose prompt is requested again.
      round: Round of the collector that it belongs to.
      text: The user's message in place of the prompt's own: with a hint, a paraphrase, examples, or
        a question about other rollouts; or a function of the prompt's row of ``Collection.data``,
        for a prompt that is not known yet. None for the prompt's own.
      train_as_prompt: Whether the responses to ``text`` train as responses to the prompt's own
        message.
      responses: One per rollout, or none: their beginnings if they are ``sampled``, else complete
        responses.
      sampled: False if ``responses`` are complete: nothing is sampled, and responses without a
        reward are graded.
      limit: Maximum tokens of a response, including its beginning; None for the run's limit.
      pauses: Whether responses that reach ``limit``, below that of the run, are unfinished and not
        graded, so that a later request may continue them.
      temperature: Sampling temperature; None for the run's.
      entropy_stats: The statistics by which that temperature follows the entropy of the next token,
        for a collector with ``entropy_tau``: pivot, scale, high and low of
        ``advantages.EntropyStats``.
      role: Role of its rollouts in the batch: ``OWN``, ``HINTED``, ``DEMONSTRATION``, ``REPLAYED``,
        ``JUDGE`` or ``TEXT``.
      reward: ``texts -> rewards [n]`` in place of the run's reward, as for a judge.
      fixed: int ``[t]``, one per rollout, or none: tokens that are fixed at their positions in a
        denoising model, -1 where it writes its own; t is at most the maximum length. Their version
        is -1.
      draft: Whether a flow policy uses only the collector's ``draft_steps`` steps.
      prompt_tokens: Tokens that replace the prompt's, before complete responses, such as the token
        between documents; none for the prompt's.
      turns: Maximum turns of an episode; None for the run's limit.
      draws_of: Rollouts of the request that this one ``extends``, one for each of its rollouts,
        whose random numbers are used again; none for new numbers.
    """

    rollouts: int
    prompt: int | None = None
    extends: int | None = None
    round: int = 0
    text: str | Callable[[Mapping[str, Any]], str] | None = None
    train_as_prompt: bool = False
    responses: tuple[Response, ...] = ()
    sampled: bool = True
    limit: int | None = None
    pauses: bool = False
    temperature: float | None = None
    role: int = OWN
    reward: Callable[[Sequence[str]], Sequence[float]] | None = None
    entropy_stats: tuple[float, float, float, float] | None = None
    fixed: tuple[np.ndarray, ...] = ()
    draft: bool = False
    prompt_tokens: tuple[int, ...] = ()
    turns: int | None = None
    draws_of: tuple[int, ...] = ()


def resized(request: Request, rollouts: int) -> Request:
    """A request for another number of rollouts, which begin as its own do if these begin alike."""
    begun = request.responses if request.sampled else ()
    if begun and _begin_alike(begun):
        request = request._replace(responses=begun[:1] * rollouts)
    return request._replace(rollouts=rollouts)


def _begin_alike(responses: Sequence[Response]) -> bool:
    return all(np.array_equal(x.tokens, responses[0].tokens) for x in responses)


def more_of(request: Request, rollouts: int, responses: tuple[Response, ...] = ()) -> Request:
    """A request for more rollouts of the prompt of a group, sampled as those of its first request.

    They have its text, role and options, but not its responses, unless all of these begin alike,
    as after a prefix; the caller sets ``extends``.

    Args:
      request: The first request of the group.
      rollouts: Number of responses.
      responses: Their beginnings, if they have any.
    """
    begun = request.responses if request.sampled else ()
    if begun and not responses and _begin_alike(begun):
        responses = begun[:1] * rollouts
    return request._replace(
        rollouts=rollouts,
        prompt=None,
        responses=responses,
        # What is sampled for a complete response is the policy's own.
        sampled=True,
        role=request.role if request.sampled else OWN,
        fixed=(),
        draws_of=(),
    )


class Outcome(NamedTuple):
    """The results of a finished group of n rollouts, or of several with a leading axis.

    Attributes:
      prompt: Index of the prompt in the data set.
      rewards: float32 ``[n]``.
      where: bool ``[n]``, False where there is no reward, as after a failure of the grader.
      lengths: int32 ``[n]``, tokens of each response.
      truncated: bool ``[n]``, True where the response ended by its length; not where it is
        unfinished.
      reward_components: Rewards by name, float32 ``[n]`` each.
      responses: The n responses, for collectors that continue, fork or store them; not stacked.
      texts: The same as text.
      prompt_tokens: Tokens of the prompt that they answer; not stacked.
    """

    prompt: int | np.ndarray
    rewards: np.ndarray
    where: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    reward_components: Mapping[str, np.ndarray]
    responses: tuple[Response, ...] = ()
    texts: tuple[str, ...] = ()
    prompt_tokens: tuple[int, ...] = ()


def no_tokenizer(value: Any) -> Any:
    """Raises RuntimeError: what a collection has in the place of a tokenizer outside of a run."""
    raise RuntimeError(f"This collection has no tokenizer, which {value!r} needs.")


class Collection(NamedTuple):
    """A batch in the making.

    Attributes:
      num_groups: P, groups of a batch.
      group_size: G, rollouts of a group.
      step: Index of the batch in the run, from 0.
      requests: All requests so far, in order.
      outcomes: Outcome of each request, or None while it is being sampled.
      data: For each prompt of the data set, its ``text`` and the columns of its row: hints,
        demonstrations, paraphrases, difficulty.
      version: Version of the weights that sample.
      stop_ids: Tokens that end a response.
      encode: ``encode(text, ends=False) -> tokens`` of a response by the chat template, with the
        token that ends it if ``ends``; a ``core.reasoning.Continuation`` is encoded as it is.
      decode: ``tokens -> text``.
      takes_text: ``text -> bool``, whether a message is short enough for a prompt.
      plays: Whether the rollouts are episodes of an environment, which alone rewards them.
      seed: Seed of the order of the data, for a collector that chooses its prompts.
    """

    num_groups: int
    group_size: int
    step: int = 0
    requests: tuple[Request, ...] = ()
    outcomes: tuple[Outcome | None, ...] = ()
    data: Sequence[Mapping[str, Any]] = ()
    version: int = 0
    stop_ids: tuple[int, ...] = ()
    encode: Callable[..., Sequence[int]] = no_tokenizer
    decode: Callable[[Sequence[int]], str] = no_tokenizer
    takes_text: Callable[[str], bool] = bool
    plays: bool = False
    seed: int = 0

    @property
    def waiting(self) -> int:
        """Number of requests that are still being sampled."""
        return sum(outcome is None for outcome in self.outcomes)

    def outcome(self, request: int) -> Outcome:
        """That of a request that has finished."""
        outcome = self.outcomes[request]
        if outcome is None:
            raise ValueError(f"Collection: request {request} has not finished.")
        return outcome


def computed_once(data: Sequence, function: Callable[[Sequence], Any]) -> Any:
    """``function(data)``; the rows of a run remember it, so that no batch reads all rows again.

    Args:
      data: ``Collection.data``.
      function: Pure, and hashable by value, such as a ``core.bind``.
    """
    computed = getattr(data, "computed", None)
    return function(data) if computed is None else computed(function)


def joined_outcome(members: Sequence[tuple[int, int]], collection: Collection) -> Outcome:
    """One outcome of rollouts of several requests for a prompt, each as (request, rollout)."""
    pairs = [(collection.outcome(request), j) for request, j in members]
    names = set.intersection(*(set(each.reward_components) for each, _ in pairs))

    def joined(name: str) -> np.ndarray:
        return np.array([getattr(each, name)[j] for each, j in pairs])

    return Outcome(
        prompt=pairs[0][0].prompt,
        rewards=joined("rewards"),
        where=joined("where"),
        lengths=joined("lengths"),
        truncated=joined("truncated"),
        reward_components={
            name: np.array([each.reward_components[name][j] for each, j in pairs])
            for name in sorted(names)
        },
        responses=tuple(each.responses[j] for each, j in pairs),
        texts=tuple(each.texts[j] for each, j in pairs if each.texts),
    )


class Row(NamedTuple):
    """One group of a batch.

    Attributes:
      members: Its rollouts as ``(request, rollout)``, both from 0, all of one prompt; at most G, or
        the collector's ``width``.
      takes_part: False for a row that only fills the batch and does not train.
      rewards: New rewards of its members, for rewards that are only known after other groups have
        finished. None to keep their rewards.
      segments: For each member, the segments of its response as (first token, value of the prefix).
        None if nothing is valued.
    """

    members: tuple[tuple[int, int], ...]
    takes_part: bool = True
    rewards: tuple[float, ...] | None = None
    segments: tuple[tuple[tuple[int, float], ...], ...] | None = None


class Decision(NamedTuple):
    """The next action of a collector.

    Attributes:
      ask: Number of further groups to propose.
      rows: The P groups of the complete batch; None before.
      requests: Additional requests, such as more rollouts of a finished group.
    """

    ask: int = 0
    rows: tuple[Row, ...] | None = None
    requests: tuple[Request, ...] = ()


class Collector(Protocol):
    """The prompts and rollouts of a batch; see the module."""

    def init(self, num_prompts: int) -> ArrayTree:
        """The state before the first batch.

        Args:
          num_prompts: N, size of the data set.
        """
        ...

    def propose(
        self, state: ArrayTree, key: Array, collection: Collection, count: int
    ) -> tuple[tuple[Request, ...], ArrayTree]:
        """The next ``count`` groups to request, after ``collection.requests``.

        Args:
          state: The state.
          key: A typed key, the same for all proposals of a batch.
          collection: The requests so far.
          count: Number of groups.
        """
        ...

    def observe(self, state: ArrayTree, collection: Collection) -> tuple[Decision, ArrayTree]:
        """The next decision, and the state after the batch if the decision completes it."""
        ...


def sized(
    collector: Collector, *, group_size: int, max_new_tokens: int, num_groups: int | None = None
) -> Collector:
    """The collector with the sizes of a run: what ``for_run`` returns, or the same one."""
    for_run = getattr(collector, "for_run", None)
    collector = collector if for_run is None else for_run(group_size, max_new_tokens)
    return collector if num_groups is None else for_batch_of(collector, num_groups)


def for_batch_of(collector: Collector, num_groups: int) -> Collector:
    """The collector for batches of P groups: what ``for_batch`` returns, or the same one."""
    for_batch = getattr(collector, "for_batch", None)
    return collector if for_batch is None else for_batch(num_groups)


def groups_of(share: float, num_groups: int, *, up: bool = False) -> int:
    """A share of a number of groups as a whole number: rounded down, or up if ``up``.

    Example:
      >>> groups_of(0.29, 100), int(0.29 * 100)
      (29, 28)
    """
    # A product may miss a whole number by a rounding error.
    exact = share * num_groups
    return math.ceil(exact - 1e-9) if up else math.floor(exact + 1e-9)


def check_is_group(
    collector: Collector, option: str, share: float, *, groups: int, num_groups: int
) -> None:
    """Raises ValueError if an option's share of a batch, as a number of groups, is none."""
    if groups < 1:
        raise ValueError(
            f"{collector!r}: {option}={share} is no group of a batch of {num_groups}, so it would "
            "have no effect; enlarge it or prompts_per_step."
        )


def width_of(collector: Collector, group_size: int) -> int:
    """The most rollouts of a group: G, or more for a collector that says so."""
    width = getattr(collector, "width", None)
    return group_size if width is None else width(group_size)


def collector_parts(collector: Any) -> Iterator[Any]:
    """A collector and those that it is built of.

    Example:
      >>> list(collector_parts(in_order()))
      [in_order()]
    """
    return (part for part, _, _ in parts_with_sizes(collector, 0, 0))


def parts_with_sizes(
    collector: Any, num_groups: int, group_size: int
) -> Iterator[tuple[Any, int, int]]:
    """:func:`collector_parts`, each with its groups of a batch and the rollouts of one."""
    yield collector, num_groups, group_size
    size_of = getattr(collector, "group_size_of_source", None)
    size = group_size if size_of is None else size_of(group_size)
    for source, count in sources_of(collector, num_groups):
        yield from parts_with_sizes(source, count, size)


def sources_of(collector: Any, num_groups: int) -> list[tuple[Any, int]]:
    """The collectors that a collector holds itself, each with its number of groups."""
    inner = vars(collector).values() if hasattr(collector, "__dict__") else ()
    every = [(y, num_groups) for x in inner for y in (x if isinstance(x, tuple | list) else (x,))]
    if (of_sources := getattr(collector, "groups_of_sources", None)) is not None:
        every = list(zip(collector.sources, of_sources(num_groups), strict=True))
    functions = ("init", "propose", "observe")
    return [(x, count) for x, count in every if all(hasattr(x, f) for f in functions)]


def stack_outcomes(outcomes: Sequence[Outcome | None], *, rows: int) -> Outcome:
    """Outcomes as arrays ``[rows, n]``, n of the largest group; zero, and no part, elsewhere.

    Args:
      outcomes: At most ``rows``, at least one of which is not None; ``prompt`` is -1 elsewhere.
      rows: How many rows the arrays have.
    """
    shape = (rows, max((len(x.rewards) for x in outcomes if x is not None), default=1))
    names = {name for x in outcomes if x is not None for name in x.reward_components}
    prompts = np.full(rows, -1, np.int32)
    stacked = Outcome(
        prompt=prompts,
        rewards=np.zeros(shape, np.float32),
        where=np.zeros(shape, bool),
        lengths=np.zeros(shape, np.int32),
        truncated=np.zeros(shape, bool),
        reward_components={name: np.zeros(shape, np.float32) for name in sorted(names)},
    )
    for i, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        size, prompts[i] = len(outcome.rewards), outcome.prompt
        for name in ("rewards", "where", "lengths", "truncated"):
            getattr(stacked, name)[i, :size] = getattr(outcome, name)
        for name, values in outcome.reward_components.items():
            stacked.reward_components[name][i, :size] = values
    return stacked


def full_row(request: int, rollouts: int, takes_part: bool = True) -> Row:
    """All rollouts of a request, in their order."""
    return Row(tuple((request, member) for member in range(rollouts)), takes_part)


@dataclasses.dataclass(frozen=True)
class _InOrder:
    """Made by :func:`in_order`."""

    def init(self, num_prompts: int) -> ArrayTree:
        del num_prompts
        return ()

    def propose(self, state, key, collection: Collection, count: int):
        del key
        return (Request(collection.group_size),) * count, state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        if (missing := collection.num_groups - len(collection.requests)) > 0:
            return Decision(ask=missing), state
        if collection.waiting:
            return Decision(), state
        requests = enumerate(collection.requests)
        return Decision(rows=tuple(full_row(i, each.rollouts) for i, each in requests)), state

    def __repr__(self) -> str:
        return "in_order()"


def in_order() -> Collector:
    """Each prompt once per epoch, in the order of the data: P prompts, G rollouts each.

    Returns:
      A collector without state: the default of a run.

    Example:
      >>> import jaxrl_llm as jr
      >>> collector = jr.curation.in_order()
      >>> collection = jr.curation.Collection(num_groups=2, group_size=4)
      >>> collector.observe(collector.init(10), collection)[0]
      Decision(ask=2, rows=None, requests=())

    References:
      The default of verl, TRL and tunix: shuffled passes over the data.
    """
    return _InOrder()


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Runs small array functions on the CPU, so that they do not wait for an accelerator."""
    try:
        device: Any = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # a program that was started without the CPU's backend
        yield
        return
    with jax.default_device(device):
        yield
