"""Teachers that score tokens on the host: a model, a token server, a file, another tokenizer.

Where possible, a run's teacher is a model on its devices, which ``TrainConfig.teacher`` names. This
module has the other teachers. ``score(prompts, responses, top=K)`` takes token ids and returns the
:class:`TokenScores` of each response, at temperature 1.
"""

import contextlib
import hashlib
import http.client
import io
import itertools
import json
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import surrogates
from jaxrl_llm.core import bind, checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.compose import in_full
from jaxrl_llm.core.packing import rewritten_rows
from jaxrl_llm.core.reasoning import Continuation
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.files import parse_json, reason, with_home, write_whole
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.data.alignment import align_spans, token_ends
from jaxrl_llm.data.chat import date_written
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.models.score import Responses, Scorer, score_hidden

Tokens = Sequence[Sequence[int]]
# The statistics of a recipe that a teacher on the host returns.
_KNOWN = ("teacher_token_logp", "top_ids", "teacher_logp")
_FORMAT = 1
# Seconds before each further try of a request to a server, and the answers that are tried again.
_PAUSES, _BUSY = (1.0, 3.0, 9.0), (502, 503, 504)
_LARGEST = float(np.finfo(np.float32).max)
# Encoded for a tokenizer's digest: most tokenizers split this text differently.
_PROBE = "The quick brown fox — 12,345 + 6.7 = naïve\n\tdef f(x): return {'a': [x]}  你好"


class TokenScores(NamedTuple):
    """A teacher's log-probabilities of one response of n tokens.

    Attributes:
      logp: float32 ``[n]``, log-probability (nats) of each token.
      top_ids: int32 ``[n, K]``, the most probable tokens at each position, most probable first.
      top_logp: float32 ``[n, K]``, their log-probabilities.
    """

    logp: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray


@runtime_checkable
class TokenTeacher(Protocol):
    """A teacher on the host.

    If it has ``context``, its maximum tokens of a prompt and a response (None if unknown), an
    :class:`AlignedTeacher` does not send it longer ones.
    """

    def score(self, prompts: Tokens, responses: Tokens, *, top: int = 0) -> list[TokenScores]:
        """Scores of responses after their prompts, with the ``top`` best tokens per position."""
        ...


def _width(rows: Tokens) -> int:
    return max(16, power_of_two(max(map(len, rows))))


class ModelTeacher:
    """A model of this package as a teacher on the host: to store scores, or for another tokenizer.

    Args:
      model, params: The model and its parameters.
      rows: Sequences scored at one time.

    Raises:
      ValueError: If the model denoises; in a call, if a text is longer than its context.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.models.teachers import ModelTeacher
      >>> teacher = ModelTeacher(*jr.testing.tiny_model())
      >>> (scores,) = teacher.score([[1, 2]], [[3, 4, 5]], top=2)
      >>> scores.logp.shape, scores.top_ids.shape
      ((3,), (3, 2))
    """

    def __init__(self, model: Model, params: ArrayTree, *, rows: int = 8):
        checks.check_positive("ModelTeacher", rows=rows)
        check_causal("ModelTeacher", model, what="the teacher")
        self.model, self.params, self._rows = model, params, rows
        self._compiled = jax.jit(self._scores, static_argnames="top")

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its response."""
        return self.model.config.max_length

    def __repr__(self) -> str:
        return "ModelTeacher()"

    def score(self, prompts: Tokens, responses: Tokens, *, top: int = 0) -> list[TokenScores]:
        """See :class:`TokenTeacher`."""
        size = self.model.config.vocab_size
        if top > size:
            raise ValueError(f"ModelTeacher: top {top} is above the {size} tokens it has.")
        lengths = (len(x) + len(y) for x, y in zip(prompts, responses, strict=True))
        if (longest := max(lengths, default=0)) > self.context:
            raise ValueError(
                f"ModelTeacher: a prompt and its response have {longest} tokens, but the teacher's "
                f"context has {self.context}."
            )
        scores: list[TokenScores] = []
        for first in range(0, len(responses), self._rows):
            before, after = (list(x[first : first + self._rows]) for x in (prompts, responses))
            count = len(after)
            before += [[0]] * (self._rows - count)
            after += [[0]] * (self._rows - count)
            read, read_mask = _padded(before, _width(before))
            tokens, mask = _padded(after, _width(after))
            logp, ids, top_logp = jax.device_get(
                self._compiled(self.params, read, read_mask, tokens, mask, top=top)
            )
            scores += [
                TokenScores(logp[i, :n], ids[i, :n], top_logp[i, :n])
                for i, n in enumerate(map(len, after[:count]))
            ]
        return scores

    def _scores(self, params, prompts, prompt_mask, tokens, mask, *, top: int):
        tokens, mask = tokens[:, None], mask[:, None]
        hidden = score_hidden(self.model, params, prompts, prompt_mask, tokens, mask)
        scorer, responses = Scorer(self.model), Responses(tokens, mask)
        logp, _ = scorer.project(params, hidden, responses)
        shape = (*tokens.shape, top)
        ids, best = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        if top:
            functions = {
                "ids": bind(surrogates.top_tokens, count=top),
                "logp": bind(surrogates.top_log_probs, count=top),
            }
            of_top = scorer.project_statistics(params, hidden, responses, functions, {})
            ids, best = of_top["ids"], of_top["logp"]
        return logp[:, 0], ids[:, 0], best[:, 0]


def _padded(rows: Tokens, width: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask


class ServerTeacher:
    """A token server as the teacher: ``jaxrl-llm serve`` of another model, or vLLM.

    The teacher requests ``prompt_logprobs`` of prompt and response together from
    ``POST /inference/v1/generate``. It repeats a request a few times if the connection fails or the
    server is busy.

    Args:
      url: URL of the server, such as ``http://localhost:8000``.
      model: Name of the model on the server; None for the model that it serves.
      key: API key that clients send.
      timeout: Seconds that each try of a request may take.
      parallel: Maximum number of concurrent requests.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 120.0,
        parallel: int = 16,
    ):
        checks.check_positive("ServerTeacher", timeout=timeout, parallel=parallel)
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"ServerTeacher: url must begin with http:// or https://; got {url!r}."
            )
        key = None if key is None else key.strip()  # a file's last line break is no part of it
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("ServerTeacher: key must be printable ASCII.")
        self.url, self._model, self._key = url.rstrip("/"), model, key
        named = "" if model is None else f", model={model!r}"
        self.in_full = f"ServerTeacher({self.url!r}{named})"
        self._timeout, self._parallel = timeout, parallel
        self._fewest: int | None = None  # minimum tokens that a request must sample
        self._context: int | None = None

    def __repr__(self) -> str:
        return f"ServerTeacher({self.url!r})"

    @property
    def context(self) -> int | None:
        """Maximum tokens of a prompt and its response; None if the server does not state it."""
        self._read_card()
        return self._context

    def score(self, prompts: Tokens, responses: Tokens, *, top: int = 0) -> list[TokenScores]:
        """See :class:`TokenTeacher`."""
        self._read_card()

        def each(pair) -> TokenScores:
            prompt, response = pair
            return self._score(list(map(int, prompt)), list(map(int, response)), top)

        pool = ThreadPoolExecutor(self._parallel)
        try:
            return list(pool.map(each, zip(prompts, responses, strict=True)))
        finally:  # an error or a Ctrl-C does not wait for the requests under way
            pool.shutdown(wait=False, cancel_futures=True)

    def _read_card(self) -> None:
        """Asks the server for its model, at the first call."""
        if self._fewest is not None:
            return
        reply = self._ask("/v1/models")
        try:
            cards = {card["id"]: card for card in reply["data"]}
            model = self._model or list(cards)[0]
            card = cards.get(model, {})
            fewest = 0 if card.get("owned_by") == "jaxrl_llm" else 1
            length, base = card.get("max_model_len"), cards.get(card.get("parent"), {})
            if length is None:  # vLLM states none for an adapter
                length = base.get("max_model_len")
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"The server at {self.url} names no model.") from error
        if model not in cards:
            raise ValueError(
                f"The server at {self.url} lists no model {model!r}; it lists "
                f"{', '.join(map(repr, cards)) or 'none'}."
            )
        if length is not None:
            if not isinstance(length, int):
                raise ValueError(
                    f"The server at {self.url} returned max_model_len {length!r}, not an integer."
                )
            self._context = length - fewest
        self._model, self._fewest = model, fewest

    def _score(self, prompt: list[int], response: list[int], top: int) -> TokenScores:
        params = {"max_tokens": self._fewest, "prompt_logprobs": top}
        body = {"model": self._model, "token_ids": prompt + response, "sampling_params": params}
        reply = self._ask("/inference/v1/generate", body)
        entries = reply.get("prompt_logprobs") if isinstance(reply, dict) else None
        if not isinstance(entries, list) or len(entries) != len(prompt) + len(response):
            raise ValueError(f"The teacher at {self.url} returned no prompt_logprobs.")
        logp, ids, best = [], [], []
        for token, entry in zip(response, entries[len(prompt) :], strict=True):
            try:
                numbers = {_token(k): float(_logprob(x)) for k, x in entry.items()}
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(
                    f"The teacher at {self.url} returned malformed prompt_logprobs."
                ) from error
            if token not in numbers or len(numbers) < top:
                raise ValueError(
                    f"The teacher at {self.url} returned {len(numbers)} log-probabilities for a "
                    f"token, but the request asked for the token and the {top} best."
                )
            if not all(abs(x) <= _LARGEST for x in numbers.values()):
                raise ValueError(
                    f"The teacher at {self.url} returned a non-finite log-probability."
                )
            order = sorted(numbers, key=lambda k: -numbers[k])[:top]
            logp.append(numbers[token])
            ids.append(order)
            best.append([numbers[k] for k in order])
        shape = (len(response), top)
        return TokenScores(
            np.float32(logp), np.int32(ids).reshape(shape), np.float32(best).reshape(shape)
        )

    def _ask(self, route: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + route, data=data, headers=headers)
        for pause in (*_PAUSES, None):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                    return parse_json(reply.read())
            except urllib.error.HTTPError as error:
                if pause is None or error.code not in _BUSY:
                    text = f"{error.code} {error.reason}"
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        text = error.read().decode(errors="replace")[:300]
                    raise ValueError(
                        f"The teacher at {self.url} refused {route}: {text}"
                    ) from error
            except (OSError, ValueError, http.client.HTTPException) as error:
                if pause is None or isinstance(error, ValueError):
                    raise ValueError(
                        f"The teacher at {self.url} does not answer: {error}."
                    ) from error
            time.sleep(pause)


def _token(text: str) -> int:
    token = int(text)
    if not 0 <= token <= np.iinfo(np.int32).max:
        raise ValueError(f"{text} is not a token id.")
    return token


def _logprob(entry: Any) -> float:
    return entry["logprob"] if isinstance(entry, dict) else entry


def tokenizer_digest(tokenizer: Any, *, ends: bool = True) -> str:
    """A digest of a tokenizer's rules and vocabulary, independent of where it was loaded from.

    Args:
      tokenizer: A ``data.Tokenizer``.
      ends: Whether the digest depends on ``eos_ids``, in which a base model often differs from its
        instruct model.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.models.teachers import tokenizer_digest
      >>> len(tokenizer_digest(jr.testing.ByteTokenizer()))
      16
    """
    size = tokenizer.vocab_size
    ids = range(0, size, max(size // 512, 1))
    facts = [size, *([list(tokenizer.eos_ids)] if ends else [])]
    facts += [list(map(int, tokenizer.encode(_PROBE)))]
    facts += [tokenizer.decode([i], skip_special=False) for i in ids]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _row_key(prompt: Sequence[int], response: Sequence[int] = ()) -> str:
    sha = hashlib.sha256()
    for part in (prompt, response):
        sha.update(np.asarray(part, np.int64).tobytes() + b"/")
    return sha.hexdigest()[:24]


def write_scores(
    path: str | Path,
    teacher: TokenTeacher,
    prompts: Tokens,
    responses: Tokens,
    *,
    top: int,
    tokenizer: Any,
) -> None:
    """Stores a teacher's scores of responses, for :class:`StoredTeacher`.

    Args:
      path: The file; its name ends in .npz.
      teacher: The teacher that scores.
      prompts, responses: Token ids, the same as in the run.
      top: Number of most probable tokens stored per position.
      tokenizer: Tokenizer of the ids; the file stores its digest.
    """
    checks.check_positive("write_scores", top=top)
    scores = teacher.score(prompts, responses, top=top)
    pairs = list(zip(prompts, responses, strict=True))
    path, buffer = with_home(path), io.BytesIO()
    if path.suffix != ".npz":
        raise ValueError(f"write_scores: path must end in .npz; got {str(path)!r}.")
    np.savez(
        buffer,
        format=_FORMAT,
        tokenizer=tokenizer_digest(tokenizer),
        prompts=sorted({_row_key(prompt) for prompt, _ in pairs}),
        keys=[_row_key(prompt, response) for prompt, response in pairs],
        starts=np.cumsum([0, *(len(x.logp) for x in scores)]),
        logp=np.concatenate([x.logp for x in scores]),
        top_ids=np.concatenate([x.top_ids for x in scores]),
        top_logp=np.concatenate([x.top_logp for x in scores]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue())


def _wrong_shape(file: Mapping[str, np.ndarray]) -> str | None:
    """What is missing from a file of scores, or which shape is wrong; None if it is valid."""
    names = ("tokenizer", "prompts", "keys", "starts", "logp", "top_ids", "top_logp")
    if absent := [name for name in names if name not in file]:
        return f"it has no {', '.join(absent)}"
    starts, tokens = file["starts"], file["logp"].shape[:1]
    shapes = {name: file[name].shape for name in ("starts", "logp", "top_ids", "top_logp")}
    rows = (len(file["keys"]) + 1,) if file["keys"].ndim == 1 else None
    if shapes["starts"] != rows or starts[0] != 0 or (np.diff(starts) < 0).any():
        return f"starts {shapes['starts']} are no bounds of the {len(file['keys'])} responses"
    if shapes["logp"] != (starts[-1],):
        return f"logp has shape {shapes['logp']} for {starts[-1]} tokens"
    for name in ("top_ids", "top_logp"):
        if len(shapes[name]) != 2 or shapes[name][:1] != tokens:
            return f"{name} has shape {shapes[name]} for {starts[-1]} tokens"
    if shapes["top_ids"] != shapes["top_logp"]:
        return f"top_ids and top_logp have shapes {shapes['top_ids']} and {shapes['top_logp']}"
    return None


class StoredTeacher:
    """Scores that a teacher computed earlier, from a file of :func:`write_scores`.

    Attributes:
      path: The file.
      digest: Digest of its content.

    Raises:
      ValueError: If there is no such file, or :func:`write_scores` did not write it.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        try:
            data = with_home(path).read_bytes()
        except OSError as error:
            raise ValueError(
                f"StoredTeacher: {self.path!r} cannot be read: {reason(error)}."
            ) from error
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                self._file = dict(file)
            stored = int(self._file["format"])
        except Exception as error:  # zip files fail in many ways
            raise ValueError(
                f"StoredTeacher: {self.path!r} is not a file of teacher scores."
            ) from error
        if stored != _FORMAT:
            raise ValueError(f"StoredTeacher: {self.path!r} has format {stored}, not {_FORMAT}.")
        if wrong := _wrong_shape(self._file):
            raise ValueError(
                f"StoredTeacher: {self.path!r} was not written by write_scores: {wrong}."
            )
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self._rows = {key: i for i, key in enumerate(self._file["keys"].tolist())}

    def __repr__(self) -> str:
        return f"StoredTeacher({self.path!r})"

    def check(
        self,
        tokenizer: Any,
        questions: Sequence[Question],
        responses: Iterable[tuple[Question, Sequence[int]]] = (),
    ) -> None:
        """Raises ValueError if the scores are of another tokenizer, data set or responses."""
        if str(self._file["tokenizer"]) != tokenizer_digest(tokenizer):
            raise ValueError(f"{self!r} was made with another tokenizer than the run's.")
        known = set(self._file["prompts"].tolist())
        for question in questions:
            if _row_key(question.tokens) not in known:
                prompt = question.prompt
                raise ValueError(
                    f"{self!r} was made from another data set: it has no response to prompt "
                    f"{prompt.name!r}.{date_written(tokenizer)}"
                )
        for question, tokens in responses:
            if _row_key(question.tokens, tokens) not in self._rows:
                raise ValueError(
                    f"{self!r} has no scores for a response of {len(tokens)} tokens to prompt "
                    f"{question.prompt.name!r}; write those of all responses of the data."
                )

    def score(self, prompts: Tokens, responses: Tokens, *, top: int = 0) -> list[TokenScores]:
        """See :class:`TokenTeacher`."""
        stored = self._file["top_ids"].shape[-1]
        if top > stored:
            raise ValueError(f"{self!r} has the {stored} best tokens at each position, not {top}.")
        scores = []
        for prompt, response in zip(prompts, responses, strict=True):
            row = self._rows.get(_row_key(prompt, response))
            if row is None:
                raise ValueError(
                    f"{self!r} has no scores for a response of {len(response)} tokens; sampled "
                    "responses need a model or a token server as the teacher."
                )
            starts = self._file["starts"]
            cut = slice(starts[row], starts[row + 1])
            ids, best = (self._file[x][cut, :top] for x in ("top_ids", "top_logp"))
            scores.append(TokenScores(self._file["logp"][cut], ids, best))
        return scores


class AlignedTeacher:
    """A teacher with another tokenizer, for ``recipes.span_distillation``.

    The teacher reads the text of prompt and response with its own tokenizer and chat template. The
    text is split into spans where both tokenizers end a token; each span has one log-probability.
    A response that exceeds the teacher's context with its prompt has no spans, so nothing is
    learned from it; nor has one that the teacher's tokenizer writes with more or fewer characters,
    such as a letter with its accent as one. A warning says so.

    Args:
      teacher: A teacher that scores its own tokens.
      tokenizer: Tokenizer of the teacher.
    """

    def __init__(self, teacher: TokenTeacher, tokenizer: Any):
        self.teacher, self.tokenizer = teacher, tokenizer
        self.in_full = f"AlignedTeacher({in_full(teacher)})"

    def __repr__(self) -> str:
        return f"AlignedTeacher({self.teacher!r})"

    def spans(
        self, texts: Sequence[str], responses: Tokens, *, encoder: TextEncoder
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The span of each response token, and the teacher's log-probability of that span.

        Args:
          texts: The user's messages.
          responses: Token ids of the policy's tokenizer.
          encoder: The policy's text encoder.

        Returns:
          Per response, ``(span_ids, span_logp)``, int32 and float32 ``[n]``; -1 and 0 for tokens
          without a span.
        """
        ours, theirs = encoder.tokenizer, self.tokenizer
        teacher_encoder = TextEncoder(theirs, 1 << 30, encoder.chat, encoder.system)
        cut, rows, prompts, same, stops = [], [], [], [], set(encoder.stop_ids)
        for text, response in zip(texts, responses, strict=True):
            tokens = [int(x) for x in response]
            ends = bool(tokens) and tokens[-1] in stops
            body = tokens[:-1] if ends else tokens
            words = ours.decode(body)
            written, more = _teacher_tokens(teacher_encoder, words)
            end = list(teacher_encoder.end_ids) if ends else []
            # Tokens are aligned by the places of characters, which a normalizer may move.
            same.append(len(theirs.decode(written)) == len(words) + more)
            prompts.append(teacher_encoder.prompt(text, "of the teacher"))
            # At least one token: an empty response is scored too, and no span reads it.
            rows.append([*written, *end] or list(theirs.eos_ids[:1]))
            cut.append((body, written, more, len(end)))
        context = getattr(self.teacher, "context", None)
        is_scored = [
            context is None or len(x) + len(y) <= context
            for x, y in zip(prompts, rows, strict=True)
        ]
        if not all(is_scored):
            warnings.warn(
                f"{is_scored.count(False)} of {len(rows)} responses exceed the teacher's context "
                f"of {context} tokens with their prompts, so nothing is learned from them.",
                stacklevel=2,
            )
        if not all(same):
            warnings.warn(
                f"{same.count(False)} of {len(rows)} responses have another number of "
                "characters in the teacher's tokenizer, so nothing is learned from them.",
                stacklevel=2,
            )
        is_scored = [x and y for x, y in zip(is_scored, same, strict=True)]
        fitting = [list(itertools.compress(x, is_scored)) for x in (prompts, rows)]
        scores = iter(self.teacher.score(*fitting) if any(is_scored) else ())
        out = []
        for response, (body, written, more, after), scored in zip(
            responses, cut, is_scored, strict=True
        ):
            ends = len(response) - len(body)
            if not scored:
                n = len(response)
                out.append((np.full(n, -1, np.int32), np.zeros(n, np.float32)))
                continue
            score = next(scores)
            before = token_ends(body, ours.decode), token_ends(written, theirs.decode)
            ids, other = _aligned(*before, more)
            if ends:  # what ends the turn is one span; a template may write several tokens there
                last = max(int(ids.max(initial=-1)), int(other.max(initial=-1))) + 1
                ids = np.append(ids, np.int32(last))
                other = np.append(other, np.full(after, last, np.int32))
            sums = np.zeros(int(max(ids.max(initial=-1), other.max(initial=-1))) + 2, np.float32)
            np.add.at(sums, other, score.logp[: len(other)])
            sums[-1] = 0.0
            out.append((ids, np.float32(sums[ids])))
        return out


def _teacher_tokens(encoder: TextEncoder, words: str) -> tuple[list[int], int]:
    """The tokens of a sampled text after the teacher's prompt, and how many characters are added.

    The teacher's template may begin the turn with more than the text, or have written the beginning
    of the text in the prompt; then the number is negative.
    """
    plain = encoder.response(Continuation(words))
    try:
        written = encoder.response(words)
    except ValueError:
        return plain, 0
    text = encoder.tokenizer.decode(written)
    same = text.endswith(words) or words.endswith(text)
    return (written, len(text) - len(words)) if same else (plain, 0)


def _aligned(
    ends: Sequence[int | None], other_ends: Sequence[int | None], more: int
) -> tuple[np.ndarray, np.ndarray]:
    """The spans of a text; the second tokens begin with ``more`` characters that it lacks."""
    texts = []
    for each, skip in ((ends, max(-more, 0)), (other_ends, max(more, 0))):
        before = [n for n, end in enumerate(each, 1) if end is not None and end <= skip]
        first = before[-1] if skip and before else 0
        texts.append((first, [None if end is None else end - skip for end in each[first:]]))
    (first, ours), (second, theirs) = texts
    ids, other = align_spans(ours, theirs)
    pad = np.int32(-1)
    return np.append(np.full(first, pad), ids), np.append(np.full(second, pad), other)


def check_host_teacher(recipe: Recipe, teacher: Any) -> None:
    """Raises ValueError if a recipe needs more than its teacher on the host returns."""
    if isinstance(teacher, AlignedTeacher) != ("teacher_span_logp" in recipe.required_fields):
        if isinstance(teacher, AlignedTeacher):
            raise ValueError(
                f"config: recipe {recipe.name!r} compares tokens, so the teacher needs the "
                "policy's tokenizer; use span_distillation."
            )
        raise ValueError(
            f"config: recipe {recipe.name!r} compares spans of text; use a train.AlignedTeacher."
        )
    if recipe.needs.teacher_mixture:
        raise ValueError(
            f"config: the teacher of recipe {recipe.name!r} samples with the policy, but "
            f"{teacher!r} cannot sample; use a model."
        )
    if recipe.reads_teacher_logits:
        raise ValueError(
            f"config: recipe {recipe.name!r} reads all logits of its teacher, which {teacher!r} "
            "does not have; use the most probable tokens, such as recipes.gkd(top=20)."
        )
    if unknown := sorted(set(recipe.computed_from("teacher")) - set(_KNOWN)):
        raise ValueError(
            f"config: recipe {recipe.name!r} reads {', '.join(unknown)} of its teacher, but "
            f"{teacher!r} has only {', '.join(_KNOWN)}."
        )
    if isinstance(getattr(teacher, "teacher", teacher), StoredTeacher) and recipe.samples_responses:
        raise ValueError(
            f"config: recipe {recipe.name!r} samples responses, but {teacher!r} has scores only of "
            "stored ones; use a model or a token server as the teacher, or take all responses from "
            "the data, as recipes.gkd(top=20, offline=True) does."
        )


def host_scores(
    teacher: Any,
    recipe: Recipe,
    batch: Batch,
    questions: Sequence[Question],
    messages: Sequence[Sequence[str | None]],
    *,
    encoder: TextEncoder,
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """The extras of a batch that a teacher on the host computes.

    Args:
      teacher, recipe: Teacher and recipe of the run.
      batch: Host arrays, P groups of G.
      questions: The P questions.
      messages: Messages that a collector sent in place of prompts; None where it sent none.
      encoder: The policy's text encoder.
      vocab_size: Vocabulary size of the policy.

    Raises:
      ValueError: If the teacher cannot read these prompts or responses, or returns a token that the
        policy does not have.
    """
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    where = np.asarray(batch.where) & mask.any(axis=-1)
    if any(message is not None for row in messages for message in row):
        raise ValueError(
            f"config: {teacher!r} reads the prompts of the data, but the collector of recipe "
            f"{recipe.name!r} sends others."
        )
    if rewritten_rows(batch.packing) is not None:
        raise ValueError(
            f"config: {teacher!r} reads a response as one text, but the chat template or the "
            "environment rewrites earlier turns; use a model as the teacher."
        )
    # A server may answer each process differently, so only the first process asks; a model on a
    # mesh needs all processes.
    computes = isinstance(getattr(teacher, "teacher", teacher), ModelTeacher)
    places = [tuple(x) for x in np.argwhere(where)]
    lengths = [int(np.flatnonzero(mask[place]).max()) + 1 for place in places]
    rows = [tokens[place][:n].tolist() for place, n in zip(places, lengths, strict=True)]
    if isinstance(teacher, AlignedTeacher):
        texts = [questions[p].prompt.text for p, _ in places]
        ids, logp = np.full(mask.shape, -1, np.int32), np.zeros(mask.shape, np.float32)

        def spans():
            return teacher.spans(texts, rows, encoder=encoder) if rows else []

        every = spans() if computes else processes.from_first(spans)
        for place, n, (span_ids, span_logp) in zip(places, lengths, every, strict=True):
            ids[place][:n], logp[place][:n] = span_ids, span_logp
        return {"span_ids": ids, "teacher_span_logp": logp}
    top, names = recipe.teacher_top, recipe.computed_from("teacher")
    # Prompts of the batch: those of an environment are not the prompts of the questions.
    read, read_mask = np.asarray(batch.prompt_tokens), np.asarray(batch.prompt_mask)
    prompts = [read[p][read_mask[p]].tolist() for p, _ in places]

    def score():
        return teacher.score(prompts, rows, top=top) if rows else []

    every = score() if computes else processes.from_first(score)
    values = {
        "teacher_token_logp": np.zeros(mask.shape, np.float32),
        "top_ids": np.broadcast_to(np.arange(top, dtype=np.int32), (*mask.shape, top)).copy(),
        "teacher_logp": np.full((*mask.shape, top), -np.log(top + 1.0), np.float32),
    }
    for place, n, scores in zip(places, lengths, every, strict=True):
        if (highest := int(scores.top_ids.max(initial=0))) >= vocab_size:
            raise ValueError(
                f"config: {teacher!r} names token {highest:,}, but the policy has {vocab_size:,} "
                "tokens, so their tokenizers differ."
            )
        values["teacher_token_logp"][place][:n] = scores.logp
        values["top_ids"][place][:n] = scores.top_ids
        values["teacher_logp"][place][:n] = scores.top_logp
    return {name: x for name, x in values.items() if name in names}


def from_name(teacher: str) -> Callable | TokenTeacher | str:
    """The teacher for a name: a server's address, a file of scores, or otherwise a model."""
    if teacher.startswith(("http://", "https://")):
        return ServerTeacher(teacher)
    return StoredTeacher(teacher) if teacher.endswith(".npz") else teacher


def check_teaching(config: Any, recipe: Any) -> None:
    """Raises ValueError unless there is a teacher just where a recipe learns from one."""
    learns = recipe.needs.learns_from_model
    if config.teacher is None:
        if learns:
            raise ValueError(
                f"config: recipe {recipe.name!r} needs a teacher; set teacher to a model, the "
                "address of a token server or stored scores."
            )
        return
    if not learns:
        what = "is its own teacher" if recipe.needs.has_teacher else "learns from none"
        raise ValueError(f"config: teacher has no effect: recipe {recipe.name!r} {what}.")
    if not (isinstance(config.teacher, str) or callable(config.teacher)) and not any(
        hasattr(config.teacher, name) for name in ("score", "spans")
    ):
        raise TypeError(
            "config: teacher must be a name, a function that returns (model, params, "
            f"tokenizer), or have a method score; got {config.teacher!r}."
        )
