"""Rounds that end early: more groups under way than are needed, the rest goes on in the next."""

from collections import deque
from collections.abc import Callable, Iterator

from jaxrl_llm.core import checks
from jaxrl_llm.rollout.engine.generation import Generation
from jaxrl_llm.rollout.engine.requests import FinishedGroup, Group


def sample_round(
    generation: Generation,
    buffered: deque[Group],
    new: Iterator[Group],
    *,
    n: int,
    target: int,
    accept: Callable[[FinishedGroup], bool] | None = None,
) -> Iterator[FinishedGroup]:
    """Yields the first ``n`` groups that finish and are good, with ``target`` under way for them.

        1. start groups, of ``buffered`` first, until started - rejected = target
        2. a finished group that is not accepted is dropped, and another one starts
        3. with n accepted, all others go to the end of ``buffered``, with what they have

    The third step happens too if iteration is left early or ended by an error. So

        started = accepted + rejected + put back

    and nothing is sampled again: rollouts that ended stay as they are, the others go on from their
    last token. These are the rules :func:`~jaxrl_llm.rollout.pick_groups` and
    :func:`~jaxrl_llm.rollout.split_round` over a :class:`~jaxrl_llm.rollout.Generation`. New
    weights are brought by its ``update`` between two rounds.

    Args:
      generation: Has nothing to do yet.
      buffered: Groups of earlier rounds, the oldest first; it is changed.
      new: Groups that have never started; as many are taken as start.
      n: How many groups are wanted.
      target: How many are under way at one time, at least ``n``.
      accept: Whether a finished group is worth training on; None takes all.

    Yields:
      Finished groups, as they finish; fewer than ``n`` if groups run out.

    Raises:
      ValueError: If ``n`` is not above 0, ``target`` is below ``n``, or a group does not fit the
        engine; then nothing is lost but that group.

    Example:
      >>> import collections, jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=2, width=2, prompt_length=8, max_new_tokens=8, chunk=2)
      >>> generation = jr.rollout.Generation(engine, params, key=jax.random.key(0))
      >>> new = iter([jr.rollout.Group(id=i, prompt=[i + 1], requests=(2 * i, 2 * i + 1),
      ...                              max_new_tokens=8 - 3 * i) for i in range(3)])
      >>> buffered = collections.deque()
      >>> [x.id for x in jr.rollout.sample_round(generation, buffered, new, n=1, target=2)]
      [1]
      >>> [(x.id, [len(c) for c in x.partial.values()]) for x in buffered]
      [(0, [6, 6])]

    References:
      APRIL (arXiv:2509.18521), CODE reading. Its loop makes tokens of text again when a response
      goes on; here token ids stay. It drops good groups beyond ``n`` that finish at the same
      moment; here they are put back, and train in the next round.
    """
    checks.check_positive("sample_round", n=n)
    if target < n:
        raise ValueError(f"sample_round: target {target} is below n {n}.")
    good = 0
    try:
        in_flight = _start(generation, buffered, new, target)
        for done in generation:
            if accept is None or accept(done):
                good += 1
                yield done
                if good == n:
                    return
            else:
                in_flight -= 1
                in_flight += _start(generation, buffered, new, target - in_flight)
    finally:
        buffered.extend(generation.stop())


def _start(generation: Generation, buffered: deque[Group], new: Iterator[Group], most: int) -> int:
    """Submits up to ``most`` groups; how many there were."""
    for count in range(most):
        group = buffered.popleft() if buffered else next(new, None)
        if group is None:
            return count
        generation.submit(group)
    return most
