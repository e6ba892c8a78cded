"""Plays a collector against a simulated policy, without a model: requests in, groups out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxrl_llm as jr
from jaxrl_llm.curation import Collection, Outcome, Request, Response, Row
from jaxrl_llm.curation.collectors.protocol import UNFINISHED, sized, width_of


class Answers(NamedTuple):
    """Rewards of a request's rollouts; where a collector reads them, responses and components."""

    rewards: np.ndarray
    responses: tuple[Response, ...] = ()
    components: Mapping[str, np.ndarray] = {}


Answer = Callable[[np.random.Generator, Request, int], Answers]


class Batch(NamedTuple):
    """A batch of a collector, W rollouts wide.

    Attributes:
      prompts: ``[P]``.
      rewards, where: ``[P, W]``; a row that takes no part is False.
      members: Of each row, ``(request, rollout)``.
      collection: All requests and outcomes.
    """

    prompts: np.ndarray
    rewards: np.ndarray
    where: np.ndarray
    members: list[tuple[tuple[int, int], ...]]
    collection: Collection

    @property
    def sampled(self) -> int:
        """Rollouts that were sampled for it."""
        return sum(request.rollouts for request in self.collection.requests if request.sampled)

    @property
    def informative(self) -> np.ndarray:
        """bool ``[P]``, groups with an advantage."""
        rule = jr.curation.informative_groups
        return np.asarray(rule(self.rewards, where=self.where)).any(-1)

    def responses(self) -> list[list[Response]]:
        """Of each row."""
        outcome = self.collection.outcome
        return [[outcome(i).responses[j] for i, j in row] for row in self.members]


class Run:
    """A collector, its state, and the order of the data: one prompt after another, shuffled."""

    def __init__(
        self,
        collector,
        *,
        prompts: int,
        groups: int,
        size: int,
        seed: int,
        tokens: int = 1,
        data: Sequence[Mapping[str, Any]] = (),
    ):
        collector = jr.curation.in_order() if collector is None else collector
        self.collector = sized(collector, group_size=size, max_new_tokens=tokens, num_groups=groups)
        self.state = self.collector.init(prompts)
        self.prompts, self.groups, self.size, self.seed = prompts, groups, size, seed
        self.data, self.step = data, 0
        self.order: list[int] = []
        self.shuffle = np.random.default_rng((seed, 1))

    def batch(self, answer: Answer) -> Batch:
        """Plays one batch; all requests that wait finish together."""
        key = jax.random.fold_in(jax.random.key(self.seed), self.step)
        collection = Collection(
            self.groups, self.size, step=self.step, data=self.data, version=self.step
        )
        state = self.state
        while True:
            decision, learned = self.collector.observe(state, collection)
            if decision.rows is not None:
                self.state, self.step = learned, self.step + 1
                return self._stack(decision.rows, collection)
            requests = decision.requests
            if decision.ask:
                requests, state = self.collector.propose(state, key, collection, decision.ask)
            for request in requests:
                outcome = self._answer(answer, request, collection)
                collection = collection._replace(
                    requests=(*collection.requests, request),
                    outcomes=(*collection.outcomes, outcome),
                )

    def _answer(self, answer: Answer, request: Request, collection: Collection) -> Outcome:
        number = len(collection.requests)
        if request.extends is not None:
            prompt = int(collection.outcome(request.extends).prompt)
        elif request.prompt is not None:
            prompt = request.prompt
        else:
            if not self.order:
                self.order = self.shuffle.permutation(self.prompts).tolist()
            prompt = self.order.pop()
        if request.sampled:
            generator = np.random.default_rng((self.seed, 2, self.step, number))
            rewards, responses, components = answer(generator, request, prompt)
        else:
            responses, components = request.responses, {}
            rewards = np.array([x.reward for x in responses], np.float32)
        paused = np.array([x.finish == UNFINISHED for x in responses])
        where = ~paused if len(responses) else np.ones(request.rollouts, bool)
        return Outcome(
            prompt=prompt,
            rewards=np.asarray(rewards, np.float32),
            where=where,
            lengths=np.array([len(x.tokens) for x in responses] or [1] * len(where), np.int32),
            truncated=np.zeros(len(where), bool),
            reward_components=components,
            responses=tuple(responses),
        )

    def _stack(self, rows: Sequence[Row], collection: Collection) -> Batch:
        shape = (len(rows), width_of(self.collector, self.size))
        rewards, where = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for p, row in enumerate(rows):
            for g, (i, j) in enumerate(row.members):
                outcome = collection.outcome(i)
                rewards[p, g] = outcome.rewards[j]
                where[p, g] = row.takes_part and outcome.where[j]
        prompts = [int(collection.outcome(row.members[0][0]).prompt) for row in rows]
        members = [row.members for row in rows]
        return Batch(np.array(prompts), rewards, where, members, collection)


def by_rates(rates: np.ndarray) -> Answer:
    """Right with the rate of the prompt ``[N]``, wrong otherwise."""

    def answer(generator, request, prompt):
        return Answers((generator.random(request.rollouts) < rates[prompt]).astype(np.float32))

    return answer
