"""The groups and rollouts that began in a batch: one that pauses and goes on counts once."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.curation.collectors.protocol import Response
from jaxrl_llm.rollout.backends import Asked, Graded
from jaxrl_llm.rollout.types import UNFINISHED


def count_begun(asked: Sequence[Asked], finished: Mapping[Asked, Graded]) -> tuple[int, int]:
    """The numbers of groups and of rollouts that began in a batch.

    A rollout that paused, in this batch or an earlier one, goes on as the same rollout. The second
    request that continues it is a fork, which is another rollout, as is one that continues a
    response from an earlier place. A group begins with its first rollout.

    Args:
      asked: The requests of the batch, in order.
      finished: Their outcomes.
    """
    groups = rollouts = 0
    paused: Counter[tuple[int, bytes]] = Counter()  # that nothing has continued
    for each in asked:
        request = each.request
        if not request.sampled:
            continue
        begun = request.rollouts
        for response in each.responses:
            key = each.question, _content(response.tokens)
            if paused[key]:
                paused[key] -= 1
                begun -= 1
            elif request.extends is None and _paused_earlier(response):
                begun -= 1
        rollouts += begun
        groups += request.extends is None and begun > 0
        if request.pauses and each in finished:
            rollout = finished[each].rollout
            for i in np.flatnonzero(rollout.finish[0] == UNFINISHED):
                tokens = rollout.tokens[0, i][rollout.mask[0, i]]
                paused[each.question, _content(tokens)] += 1
    return groups, rollouts


def _content(tokens: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def _paused_earlier(response: Response) -> bool:
    """Whether the policy of an earlier batch sampled the beginning, which did not end."""
    versions = response.version
    known = versions is not None and len(versions) > 0 and bool((np.asarray(versions) >= 0).all())
    return known and response.finish == UNFINISHED
