"""A collector whose sampling temperature follows the entropy of each next token."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import evaluation_text_of
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Request,
    for_batch_of,
    in_order,
    on_host,
    sized,
    width_of,
)

__all__ = ["TemperedState", "entropy_temperature"]


class TemperedState(NamedTuple):
    """State of :func:`entropy_temperature`: NumPy arrays.

    Attributes:
      stats: float32 ``[4]``: pivot, scale, high and low of the last batch; 0 before the first.
      source: State of the collector that asks for the groups.
    """

    stats: np.ndarray
    source: ArrayTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _EntropyTemperature:
    """Made by :func:`entropy_temperature`."""

    measure: Callable
    tau: float
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(
            slots=True, records_model_entropy=True, entropy_tau=self.tau
        )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_EntropyTemperature":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def for_batch(self, num_groups: int) -> "_EntropyTemperature":
        return dataclasses.replace(self, source=for_batch_of(self.source, num_groups))

    def width(self, group_size: int) -> int:
        return width_of(self.source, group_size)

    @property
    def evaluation_text(self) -> Callable:
        """That of the source, if it has one."""
        return evaluation_text_of(self.source)

    def init(self, num_prompts: int) -> TemperedState:
        return TemperedState(np.zeros(4, np.float32), self.source.init(num_prompts))

    def propose(self, state: TemperedState, key, collection: Collection, count: int):
        requests, source = self.source.propose(state.source, key, collection, count)
        return self._tempered(requests, state), state._replace(source=source)

    def observe(self, state: TemperedState, collection: Collection):
        decision, source = self.source.observe(state.source, collection)
        requests = self._tempered(decision.requests, state)
        learned = TemperedState(state.stats, source)
        # Only tokens that were sampled and train have a part in the statistics.
        entropies = [np.zeros(0, np.float32)]
        for i, j in (member for row in decision.rows or () for member in row.members):
            response = collection.outcome(i).responses[j]
            if response.entropy is None:
                continue
            entropy = np.asarray(response.entropy, np.float32)
            there = np.isfinite(entropy)
            if response.trains is not None:
                there &= np.asarray(response.trains, bool)
            if response.version is not None:
                there &= np.asarray(response.version) >= 0
            entropies.append(entropy[there])
        entropy = np.concatenate(entropies)
        if entropy.size:
            size = power_of_two(entropy.size)
            padded = np.pad(entropy, (0, size - entropy.size))
            with on_host():
                stats = _measure(padded, np.arange(size) < entropy.size, measure=self.measure)
            learned = learned._replace(stats=np.stack([np.float32(x) for x in stats]))
        return decision._replace(requests=requests), learned

    def _tempered(self, requests, state: TemperedState) -> tuple[Request, ...]:
        pivot, scale, high, low = map(float, state.stats)
        return tuple(
            each._replace(entropy_stats=(pivot, scale, high, low)) if each.sampled else each
            for each in requests
        )

    def __repr__(self) -> str:
        text = f"{stable_repr(self.measure)}, tau={self.tau:g}"
        return f"entropy_temperature({text}, source={self.source!r})"


_measure = jax.jit(
    lambda entropy, mask, *, measure: tuple(measure(entropy, mask)), static_argnames="measure"
)


def entropy_temperature(
    measure: Callable, *, tau: float = 0.05, source: Collector | None = None
) -> Collector:
    """Samples at a temperature that follows the entropy of each next token.

        T = base (1 + tau h),   h = the log-entropy of the plain model, between -1 and 1, by the
                                statistics of the last batch
        stats <- measure(entropies of the batch)      once it is complete

    The rule is ``advantages.signal_temperature``, and the base is the temperature of the run or of
    the request; the first batch has no statistics and uses the base. Rollouts decode in slots, and
    ``behavior_logp`` is at the temperature that was used. The policy trains at the base
    temperature.

    Args:
      measure: ``(entropies [N], mask [N]) -> (pivot, scale, high, low)``, such as the ``stats`` of
        ``advantages.entropy_signal``.
      tau: Strength, in (0, 1).
      source: Asks for the groups; None for :func:`in_order`.

    Returns:
      A collector; its state is a :class:`TemperedState`.

    Raises:
      TypeError: If ``measure`` is no function.
      ValueError: If ``tau`` is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> def stats(entropy, mask):
      ...     return jr.advantages.entropy_signal(entropy, mask).stats
      >>> jr.curation.entropy_temperature(stats)
      entropy_temperature(stats, tau=0.05, source=in_order())

    References:
      HAPO (arXiv:2509.16591), and its released code, which measures the policy that trains at the
      temperature of the run; here the sampler's plain model.
    """
    name = "entropy_temperature"
    if not callable(measure):
        raise TypeError(f"{name}: measure must be a function; got {measure!r}.")
    checks.check_share(name, zero=False, one=False, tau=tau)
    source = in_order() if source is None else source
    return _EntropyTemperature(measure=measure, tau=float(tau), source=source)
