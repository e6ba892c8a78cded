"""The needs of a collector: the features that its requests use, and the limits of its groups.

A run reads them before the model is loaded. A collector has them as ``needs``, an attribute or a
property; without it, it has those of the collectors that it is built of::

    needs = Needs(sends_text=True)
    needs = needs_of_sources(source) | Needs(slots=True)  # built of others, as a property
"""

import dataclasses
import functools
import operator
from typing import Any

from jaxrl_llm.curation.collectors.protocol import sources_of

__all__ = ["Needs", "needs_of_sources"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Needs:
    """What a collector, or a policy of ``hinted``, requests of a run.

    ``a | b`` are the needs of both.

    Attributes:
      sends_text: Requests with a ``text``. The prompt length is increased for it. The prompts of an
        environment are its first observations, so a run with one is rejected.
      helps_every_group: Every group has a text in place of the prompt, a hint or a response of the
        data, so no group could be stored by ``replayed``. Holds for several sources if it holds
        for all.
      mixes_texts: Rows whose members train after different texts, which a denoising or flow model
        cannot score.
      sets_prompts: Requests with ``prompt_tokens``, so prompts have no common prefix.
      stores_responses: Responses of earlier batches. Stored episodes lack their turns, so a run
        with an environment is rejected.
      lacks_components: Responses that train with rewards that the run's reward does not give, so
        that they have no components. A recipe that reads these, or other results of the reward
        such as answers or the rewards of steps, is rejected.
      brings_responses: Responses of the data, or their beginnings. They are no turns of an episode,
        so a run with an environment is rejected.
      brings_texts: Texts of role ``TEXT``, which are no responses. A recipe whose ``text_coef`` is
        0, which would train on them as on responses, is rejected.
      slots: Responses that continue, a ``limit`` or a ``temperature``, which the whole-batch
        sampler does not support; the run decodes in slots.
      splits_turns: Responses that pause, have a ``limit`` or continue from a place within a turn.
        An environment plays whole turns, so a run with one is rejected.
      environment: Episodes that branch after their turns, so a run without an environment is
        rejected.
      fresh_weights: The collector recognizes by their version the tokens that a batch sampled, so a
        run whose ``max_staleness`` is not 0, in which batches may share a version, is rejected.
      fixes_tokens: Requests with ``fixed`` tokens, which only a denoising model supports.
      varies_temperature: Requests whose ``temperature`` differs from the run's.
      records_entropy: ``Response.entropy``.
      records_model_entropy: ``Response.entropy``, at temperature 1.
      records_runner_up: ``Response.runner_up`` and its log-probability.
      values_prefixes: Rows with segments, whose prefixes the collector values.
      has_rewards: Responses come with their rewards, so a run without an evaluation needs no
        reward. Holds for several sources if it holds for all.
      offline: The data have all responses and their rewards. Nothing is sampled, so a run needs no
        reward, and the evaluation compares the responses of held-out rows. Holds for several
        sources if it holds for all.
      samples_nothing: The data have all responses, though perhaps not their rewards, so a recipe
        without a ratio may take several steps on a batch. A collector built of others has it only
        if it says so itself.
      asks_again: The collector requests more after groups have finished, selects among their
        rollouts or sets their rewards, so it cannot be the source of a collector that only uses
        its prompts.
      asks_ahead: After groups have finished it asks for further ones that do not depend on them,
        the next of ``propose``, so rows that the whole-batch sampler has to spare sample these.
      grades_apart: Rows whose responses are graded in several requests, so a reward that compares
        the responses of a group would not see all of them; a run with such a judge is rejected.
      counts_groups: Its place in the data advances by the groups of a batch that it is shown, so it
        cannot be the source of a collector whose groups end in a later batch.
      repeats_starts: The collector remembers single episodes of a task, such as their number of
        turns, so in a run with an environment all training episodes of a task begin with the same
        seed.
      draft_steps: Requests for a ``draft`` of a flow policy with this many steps; None for none.
      entropy_tau: Strength with which the temperature of requests follows the entropy of the next
        token; None if it does not.

    Example:
      >>> Needs(slots=True) | Needs(draft_steps=6)
      Needs(slots=True, draft_steps=6)
    """

    sends_text: bool = False
    helps_every_group: bool = False
    mixes_texts: bool = False
    sets_prompts: bool = False
    stores_responses: bool = False
    lacks_components: bool = False
    brings_responses: bool = False
    brings_texts: bool = False
    slots: bool = False
    splits_turns: bool = False
    environment: bool = False
    fresh_weights: bool = False
    fixes_tokens: bool = False
    varies_temperature: bool = False
    records_entropy: bool = False
    records_model_entropy: bool = False
    records_runner_up: bool = False
    values_prefixes: bool = False
    has_rewards: bool = False
    offline: bool = False
    samples_nothing: bool = False
    asks_again: bool = False
    asks_ahead: bool = False
    grades_apart: bool = False
    counts_groups: bool = False
    repeats_starts: bool = False
    draft_steps: int | None = None
    entropy_tau: float | None = None

    def __or__(self, other: "Needs") -> "Needs":
        """The needs of both; the number of drafts is that of the first one that has it.

        Raises:
          ValueError: If both have an ``entropy_tau``.
        """
        if None not in (self.entropy_tau, other.entropy_tau):
            raise ValueError(
                "Needs: one entropy_tau is possible for all requests of a collector, not "
                f"{self.entropy_tau:g} and {other.entropy_tau:g}."
            )
        more = {name: value for name, value in _set_in(other) if not getattr(self, name)}
        return dataclasses.replace(self, **more)

    def __repr__(self) -> str:
        return f"Needs({', '.join(f'{name}={value!r}' for name, value in _set_in(self))})"


def _set_in(needs: Needs) -> list[tuple[str, Any]]:
    """The fields that are set, with their values."""
    return [(name, value) for name, value in vars(needs).items() if value]


# The attributes of a collector, and the fields that replace them.
_ATTRIBUTES = {field.name: field.name for field in dataclasses.fields(Needs)}
for _field in ("slots", "environment", "fresh_weights"):
    _ATTRIBUTES[f"needs_{_field}"] = _ATTRIBUTES.pop(_field)


def needs_of(collector: Any) -> Needs:
    """The needs of a collector, or of a policy of ``hinted``; none for None.

    Raises:
      TypeError: If it has an attribute that a field of :class:`Needs` has replaced, or ``needs`` of
        another type.

    Example:
      >>> import jaxrl_llm as jr
      >>> needs_of(jr.curation.refill(jr.curation.informative_groups))
      Needs(asks_again=True, asks_ahead=True)
    """
    old = [name for name in _ATTRIBUTES if hasattr(collector, name)]
    if old:
        values = ", ".join(f"{_ATTRIBUTES[name]}={getattr(collector, name)!r}" for name in old)
        raise TypeError(
            f"{collector!r}: write needs = jr.curation.Needs({values}) in place of the attributes "
            f"{', '.join(old)}."
        )
    needs = getattr(collector, "needs", None)
    if needs is None:
        return needs_of_sources(*(source for source, _ in sources_of(collector, 0)))
    if not isinstance(needs, Needs):
        raise TypeError(f"{collector!r}: needs must be a jr.curation.Needs; got {needs!r}.")
    return needs


def reads_all_of_rows(part: Any) -> bool:
    """Whether a collector takes responses and rewards from rows of the data, not from a source."""
    return hasattr(part, "check_rows") and needs_of(part).offline


def needs_of_sources(*sources: Any) -> Needs:
    """The needs that a collector has from those that it is built of.

    ``offline``, ``has_rewards`` and ``helps_every_group`` hold if they do for all sources;
    ``samples_nothing`` does not hold, since the collector may sample; any other field holds if it
    does for one source.

    Example:
      >>> import jaxrl_llm as jr
      >>> needs_of_sources(jr.curation.offline_pairs(), jr.curation.in_order())
      Needs(lacks_components=True, brings_responses=True, counts_groups=True)
    """
    if not sources:
        return Needs()
    needs = [needs_of(source) for source in sources]
    return dataclasses.replace(
        functools.reduce(operator.or_, needs),
        offline=all(each.offline for each in needs),
        has_rewards=all(each.has_rewards for each in needs),
        helps_every_group=all(each.helps_every_group for each in needs),
        samples_nothing=False,
    )
