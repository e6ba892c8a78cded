"""A collector that trains on groups of other trainers, and the folder through which they share."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.core.reasoning import Continuation
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.files import write_whole
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    Row,
    check_is_group,
    on_host,
)
from jaxrl_llm.curation.recycling import swarm_groups

__all__ = ["Swarm", "SwarmGroup", "shared", "shared_folder"]

_FORMAT = 1
_NODE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(rf"({_NODE.pattern})\.(\d{{8,12}})\.json")
_MOST_GROUPS = 4096  # of a file
_MOST_BYTES = 1 << 26  # of a file
_MOST_NODES = 256
_ENDED, _CUT = 1, 0  # the ``finish`` of a response


class SwarmGroup(NamedTuple):
    """The rollouts of a question, as a trainer shares them.

    Attributes:
      question: The user's message.
      texts: n responses.
      rewards: n, by the trainer that sampled them.
      ended: n, whether each response ended by itself, not by its budget.
    """

    question: str
    texts: tuple[str, ...]
    rewards: tuple[float, ...]
    ended: tuple[bool, ...]


class Swarm(Protocol):
    """The store of shared groups; get is called before each batch, put once after it."""

    def put(self, groups: Sequence[SwarmGroup], *, step: int) -> None:
        """Shares the groups of a batch; a second call for the same step replaces them."""
        ...

    def get(self) -> Sequence[SwarmGroup]:
        """Groups of the other trainers, in an order that depends only on them."""
        ...


@dataclasses.dataclass(frozen=True, repr=False)
class _SharedFolder:
    """Made by :func:`shared_folder`."""

    path: str
    node: str
    keep: int

    def put(self, groups: Sequence[SwarmGroup], *, step: int) -> None:
        """Writes the file of a batch, and removes those before the last ``keep`` batches.

        It also removes files of later steps: this run has started again from an earlier one.
        """
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"format": _FORMAT, "groups": [group._asdict() for group in groups]}
        write_whole(folder / f"{self.node}.{step:08d}.json", json.dumps(record, allow_nan=False))
        for number, file in self._files().get(self.node, []):
            if not step - self.keep < number <= step:
                file.unlink(missing_ok=True)

    def get(self) -> Sequence[SwarmGroup]:
        """The last ``keep`` files of every other node; what is no such file is passed over."""
        files = self._files()
        nodes = sorted(node for node in files if node != self.node)[:_MOST_NODES]
        groups: list[SwarmGroup] = []
        for file in [file for node in nodes for _, file in files[node][-self.keep :]]:
            try:
                if file.stat().st_size > _MOST_BYTES:
                    continue
                record = json.loads(file.read_text(encoding="utf-8"))
                if record["format"] != _FORMAT or len(record["groups"]) > _MOST_GROUPS:
                    continue
                read = []
                for row in record["groups"]:
                    texts, rewards, ended = (
                        tuple(row[name]) for name in ("texts", "rewards", "ended")
                    )
                    good = (
                        isinstance(row["question"], str)
                        and len(texts) == len(rewards) == len(ended) > 0
                        and all(isinstance(text, str) for text in texts)
                        and all(type(r) in (int, float) and math.isfinite(r) for r in rewards)
                        and all(isinstance(flag, bool) for flag in ended)
                    )
                    if not good:
                        raise ValueError("not a group")
                    rewards = tuple(map(float, rewards))
                    read.append(SwarmGroup(row["question"], texts, rewards, ended))
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                # Another trainer may have removed it, or been killed by a full disk.
                continue
            groups += read  # of a whole file, or none
        return tuple(groups)

    def _files(self) -> dict[str, list[tuple[int, Path]]]:
        """Of each node, its files in the order of their steps."""
        folder = Path(self.path)
        files: dict[str, list[tuple[int, Path]]] = {}
        for file in folder.iterdir() if folder.is_dir() else ():
            if match := _FILE.fullmatch(file.name):
                files.setdefault(match[1], []).append((int(match[2]), file))
        return {node: sorted(each) for node, each in files.items()}

    def __repr__(self) -> str:
        keep = "" if self.keep == 8 else f", keep={self.keep}"
        return f"shared_folder({self.path!r}, node={self.node!r}{keep})"


def shared_folder(path: str, *, node: str, keep: int = 8) -> Swarm:
    """A folder through which trainers share groups, as on one machine or a shared disk.

        <path>/<node>.<step>.json      a batch of a trainer, as text

    A file is first written under another name, so that readers never see a partial file. Files that
    cannot be read, or have another format, are skipped.

    Args:
      path: Path of the folder, which is created if it does not exist.
      node: Name of this trainer, of letters, digits, "-" and "_"; it must be unique, and a resumed
        run must use the same name.
      keep: Number of batches to keep per trainer, at least 1.

    Returns:
      A :class:`Swarm` for :func:`shared`.

    Raises:
      TypeError: If the path is not a text, or ``keep`` not an integer.
      ValueError: If the name has other characters, or ``keep`` is below 1.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> with tempfile.TemporaryDirectory() as path:
      ...     a, b = (jr.curation.shared_folder(path, node=node) for node in "ab")
      ...     group = jr.curation.SwarmGroup("1 + 1?", ("2", "3"), (1.0, 0.0), (True, True))
      ...     a.put([group], step=0)
      ...     len(a.get()), b.get()[0].texts
      (0, ('2', '3'))

    References:
      SAPO, swarm sampling policy optimization (arXiv:2509.08721), whose nodes talk over a network.
    """
    if not isinstance(path, str):
        raise TypeError(f"shared_folder: path must be a string; got {path!r}.")
    if not isinstance(node, str) or not _NODE.fullmatch(node):
        raise ValueError(
            "shared_folder: node must have 1 to 64 letters, digits, '-' or '_'; got " + repr(node)
        )
    checks.check_count("shared_folder", keep=keep)
    return _SharedFolder(path, node, keep)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Shared:
    """Made by :func:`shared`."""

    swarm: Swarm
    share: float
    max_new_tokens: int | None = None
    # Of the batch in the making, what the swarm had when it began; and the places of questions.
    pool: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)

    needs: ClassVar[Needs] = Needs(stores_responses=True)

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError if no group of a batch can be one of others."""
        del data, group_size
        groups = self._wanted(num_groups)
        check_is_group(self, "share", self.share, groups=groups, num_groups=num_groups)

    def _wanted(self, num_groups: int) -> int:
        """Groups of others in a batch, at most; one group at least is sampled."""
        return min(round(self.share * num_groups), num_groups - 1)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Shared":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def init(self, num_prompts: int) -> ArrayTree:
        del num_prompts
        return {"shared": np.zeros((), np.int32), "drawn": np.zeros((), np.int32)}

    def propose(self, state, key, collection: Collection, count: int):
        drawn, groups = self._draw(key, collection), collection.num_groups
        start, first = groups - len(drawn), len(collection.requests)
        plain = Request(collection.group_size)
        requests = (
            drawn[i - start] if start <= i < groups else plain for i in range(first, first + count)
        )
        return tuple(requests), state

    def _draw(self, key, collection: Collection) -> list[Request]:
        """The groups of others that train in this batch: evenly drawn of those that can."""
        key_data = np.asarray(jax.random.key_data(key))
        seed = (collection.step, key_data.tobytes())
        if self.pool.get("seed") == seed:
            return self.pool["drawn"]
        if "groups" not in self.pool:
            self.pool["groups"] = processes.from_first(lambda: tuple(self.swarm.get()))
        wanted = self._wanted(collection.num_groups)
        # The place of each question is the same for all batches of a data set.
        data = collection.data
        name = (len(data), *(str(data[i]["text"]) for i in ((0, -1) if len(data) else ())))
        if self.pool.get("name") != name:
            texts = [str(row["text"]) for row in data]
            first = {text: i for i, text in reversed(list(enumerate(texts)))}
            self.pool.update(name=name, places=first)
        places = self.pool["places"]
        known = [
            group
            for group in self.pool["groups"]
            if group.question in places
            and len(group.texts) <= collection.group_size
            and min(group.rewards) < max(group.rewards)
        ]
        order: list[int] = []
        if known:
            there = np.arange(power_of_two(len(known))) < len(known)
            with on_host():
                chosen = swarm_groups(
                    jax.random.wrap_key_data(key_data),
                    there,
                    local=np.zeros_like(there),
                    count=0,
                    foreign=len(there),
                )
            order = np.asarray(chosen.index)[np.asarray(chosen.where)].tolist()
        drawn: list[Request] = []
        for i in order:
            if len(drawn) == wanted:
                break
            responses: list[Response] = []
            for text, ended in zip(known[i].texts, known[i].ended, strict=True):
                tokens = np.asarray(collection.encode(Continuation(text), ends=ended), np.int32)
                if not 1 <= len(tokens) <= (self.max_new_tokens or len(tokens)):
                    responses = []  # one response that is too long or empty spoils its group
                    break
                responses.append(Response(tokens, finish=_ENDED if ended else _CUT))
            if responses:
                drawn.append(
                    Request(
                        rollouts=len(responses),
                        prompt=places[known[i].question],
                        responses=tuple(responses),
                        sampled=False,
                        role=DEMONSTRATION,
                    )
                )
        self.pool.update(seed=seed, drawn=drawn)
        return drawn

    def observe(self, state, collection: Collection):
        requests, groups = collection.requests, collection.num_groups
        if not requests:
            for name in ("seed", "drawn", "groups"):
                self.pool.pop(name, None)
        if (missing := groups - len(requests)) > 0:
            return Decision(ask=missing), state
        if collection.waiting:
            return Decision(), state
        own = [i for i, request in enumerate(requests) if request.sampled]
        shared = []
        for outcome in map(collection.outcome, own):
            # A response without a reward is not shared, nor a group that has no other.
            if graded := np.flatnonzero(outcome.where).tolist():
                shared.append(
                    SwarmGroup(
                        question=str(collection.data[int(outcome.prompt)]["text"]),
                        texts=tuple(outcome.texts[g] for g in graded),
                        rewards=tuple(float(outcome.rewards[g]) for g in graded),
                        ended=tuple(not outcome.truncated[g] for g in graded),
                    )
                )
        # An error there reaches every process.
        processes.from_first(lambda: self.swarm.put(shared, step=collection.step))
        state = {
            "shared": np.asarray(state["shared"] + len(shared), np.int32),
            "drawn": np.asarray(state["drawn"] + groups - len(own), np.int32),
        }
        rows = (
            Row(tuple((i, j) for j in range(request.rollouts)))
            for i, request in enumerate(requests)
        )
        return Decision(rows=tuple(rows)), state

    def __repr__(self) -> str:
        return f"shared({self.swarm!r}, share={self.share})"


def shared(swarm: Swarm, *, share: float = 0.5) -> Collector:
    """Trains on groups of other trainers in addition to its own, and shares its groups.

        P - J groups of this trainer, J <= round(share P) of others;  swarm <- those of this one

    Others' groups come as text: they are encoded with the tokenizer of this run and graded by its
    reward, and ``behavior_logp`` is not known, so no importance weight corrects for the model that
    wrote them. Eligible groups have unequal rewards, a question in the data of this run, and at
    most G responses of at most ``max_new_tokens`` tokens; they are drawn uniformly, each at most
    once. If there are too few, or the trainer is alone, its own groups replace them. A batch has at
    least one of its own groups.

    The content of the swarm at the beginning of a batch depends on the timing of other trainers.
    With the same content, a batch and a resumed run are reproducible.

    Args:
      swarm: With ``put`` and ``get``, as of :class:`Swarm`; such as :func:`shared_folder`.
      share: Share of the groups of a batch that are of others, above 0 and below 1.

    Returns:
      A collector; its state counts the groups that it shared and drew.

    Raises:
      TypeError: If ``swarm`` has no ``put`` or ``get``.
      ValueError: If ``share`` is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.shared(jr.curation.shared_folder("runs/swarm", node="first"))
      shared(shared_folder('runs/swarm', node='first'), share=0.5)

    References:
      SAPO, swarm sampling policy optimization (arXiv:2509.08721), NOTES: 4 of 8 groups come from
      others, and all groups are shared. There a question comes with the data for its reward; here
      it must be in the data of this run.
    """
    for method in ("put", "get"):
        if not callable(getattr(swarm, method, None)):
            raise TypeError(f"shared: swarm must have put and get; got {swarm!r}.")
    if not 0.0 < share < 1.0:
        raise ValueError(f"shared: share must be above 0 and below 1; got {share!r}.")
    return _Shared(swarm=swarm, share=float(share))
