"""Parsing of JSON requests: every field is checked, and unknown fields are rejected."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rollout import EngineSpec

# Limits of one request; a client that needs more sends another request.
MOST_CHOICES, MOST_STOPS, MOST_STOP_CHARACTERS = 128, 16, 256
# Maximum number of most probable tokens per position of the prompt.
MOST_PROMPT_LOGPROBS = 128
# Draw options by their names in vLLM and OpenAI.
_SETTINGS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
}


class RequestError(ValueError):
    """A request that cannot be served; ``status`` is the status code of the HTTP response."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class SampleRequest(NamedTuple):
    """A prompt and how to sample from it.

    Attributes:
      prompt: Token ids.
      choices: Number of responses.
      max_tokens: Maximum number of tokens per response.
      settings: Draw options, restricted to those that the engine can vary.
      seed: Response i is request ``seed + i`` under the server's key; None for unused numbers.
      stop_ids: Token ids that end a response, in addition to those of the engine.
      stops: Texts that end a response.
    """

    prompt: Sequence[int]
    choices: int
    max_tokens: int
    settings: Mapping[str, float] = {}
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """Minimum number of tokens, which a stop comes after."""
        return int(self.settings.get("min_new_tokens", 0))


def find_stop(text: str, stops: Sequence[str], behind: int = 0) -> int | None:
    """Start of the first stop text that ends after character ``behind``; None if there is none."""
    starts = (text.find(stop, max(behind - len(stop) + 1, 0)) for stop in stops)
    return min((start for start in starts if start >= 0), default=None)


class Fields:
    """The fields of a JSON object, read one by one; fields that are never read are unknown.

    A field with the value null counts as absent.

    Args:
      name: Name of the object in errors.
      values: The object.
    """

    def __init__(self, name: str, values: Any):
        if not isinstance(values, Mapping):
            raise RequestError(f"{name} must be a JSON object; got {_short(values)}.")
        self.name, self._known = name, set()
        self._values = {key: value for key, value in values.items() if value is not None}

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a field, which must have the type ``kind``."""
        self._known.add(key)
        if key not in self._values:
            return default
        value = self._values.pop(key)
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
            raise RequestError(
                f"{self.name}: {key} must be {words.get(kind, 'a list')}; got {_short(value)}."
            )
        return value

    def take_integer(self, key: str, default: Any, low: int, high: int) -> Any:
        """An integer from ``low`` to ``high``."""
        value = self.take(key, int, default)
        if value is not default and not low <= value <= high:
            raise RequestError(
                f"{self.name}: {key} must be from {low} to {high:,}; got {_short(value)}."
            )
        return value

    def take_any(self, key: str, default: Any = None) -> Any:
        """The value of a field, of any type."""
        self._known.add(key)
        return self._values.pop(key, default)

    def ignore(self, *keys: str) -> None:
        """Reads and ignores fields that have no effect on responses of this server."""
        for key in keys:
            self.take_any(key)

    def refuse(self, reason: str, **off: Any) -> None:
        """Rejects unsupported fields, unless they have the value in ``off``."""
        for key, value in off.items():
            sent = self.take_any(key, value)
            if sent != value or isinstance(sent, bool) != isinstance(value, bool):
                raise RequestError(f"{self.name}: {key} {_short(sent)} is not served: {reason}.")

    def end(self) -> None:
        """Raises RequestError if any field was not read."""
        if self._values:
            key = min(self._values)
            near = difflib.get_close_matches(key, self._known, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known are {', '.join(sorted(self._known))}."
            )
            raise RequestError(f"{self.name} has an unknown field {key[:40]!r}; {hint}")


def check_prompt(name: str, prompt: Any, spec: EngineSpec) -> Sequence[int]:
    """Checks that a prompt is a list of token ids that fits the engine, and returns it."""
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{name} must be a list of at least one token id.")
    if len(prompt) > spec.prompt_length:
        raise RequestError(
            f"{name} has {len(prompt):,} tokens; this server takes prompts of at most "
            f"{spec.prompt_length:,}."
        )
    for place, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < spec.vocab_size:
            raise RequestError(
                f"{name}[{place}] must be an integer from 0 to {spec.vocab_size - 1:,}, inside the "
                f"vocabulary; got {_short(token)}."
            )
    return prompt


def read_settings(fields: Fields, spec: EngineSpec) -> dict[str, float]:
    """Draw options of a request by our names.

    Options that the engine cannot vary are rejected, unless they have the value of the engine.
    """
    settings, varies = {}, spec.draw.settings
    for key, option in _SETTINGS.items():
        value = fields.take(key, float)
        if value is None:
            continue
        if option == "top_k" and value in (-1, 0):
            value = varies.get("top_k", 0)  # all that a request can have
        if option not in varies and value != spec.draw.fixed[option]:
            names = ", ".join(k for k, v in _SETTINGS.items() if v in varies) or "none"
            raise RequestError(
                f"{fields.name}: {key} is fixed on this server; requests may set {names}."
            )
        if option in varies:
            settings[option] = value
    try:
        spec.draw.check(f"{fields.name}: the request", settings)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error
    return settings


def read_sampling(
    fields: Fields, prompt: Sequence[int], spec: EngineSpec, *, max_tokens: int | None = None
) -> SampleRequest:
    """Reads the sampling parameters of both routes; ``max_tokens`` is None if not read yet."""
    if max_tokens is None:
        most = spec.max_new_tokens
        max_tokens = fields.take_integer("max_tokens", most, 1, most)
    choices = fields.take_integer("n", 1, 1, MOST_CHOICES)
    seed = fields.take_integer("seed", None, 0, 2**31 - choices)
    stop_ids = fields.take("stop_token_ids", list, [])
    for token in stop_ids:
        if type(token) is not int or not 0 <= token < spec.vocab_size:
            raise RequestError(
                f"{fields.name}: stop_token_ids must be integers from 0 to "
                f"{spec.vocab_size - 1:,}; got {_short(token)}."
            )
    stops = fields.take_any("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    texts = isinstance(stops, list) and all(isinstance(x, str) and x for x in stops)
    if not texts or len(stops) > MOST_STOPS or any(len(x) > MOST_STOP_CHARACTERS for x in stops):
        raise RequestError(
            f"{fields.name}: stop must be a string or a list of at most {MOST_STOPS}, each of 1 to "
            f"{MOST_STOP_CHARACTERS} characters."
        )
    settings = read_settings(fields, spec)
    fixed = "log-probabilities would not be the policy's"
    fields.refuse(fixed, logit_bias={}, presence_penalty=0, frequency_penalty=0)
    fields.refuse("a response ends with the model's stop tokens", ignore_eos=False)
    return SampleRequest(
        prompt,
        choices,
        max_tokens,
        settings,
        seed,
        frozenset(stop_ids) - frozenset(spec.stop_ids),
        tuple(stops),
    )


class GenerateRequest(NamedTuple):
    """A request of ``/inference/v1/generate``.

    Attributes:
      sample: The prompt and the sampling options.
      id: Id of the response; None for an id from the server.
      logprobs: Whether the response includes log-probabilities.
      prompt_ids: Whether the response repeats the prompt.
      prompt_logprobs: Number of most probable tokens to return for each position of the prompt,
        with the log-probability of the prompt's token; None for neither.
    """

    sample: SampleRequest
    id: str | None
    logprobs: bool
    prompt_ids: bool
    prompt_logprobs: int | None = None


def read_generate(body: Any, spec: EngineSpec, model: str) -> GenerateRequest:
    """Parses a request of ``/inference/v1/generate``, in vLLM's format, for the model ``model``."""
    fields = Fields("The request", body)
    check_model(fields, model)
    name = fields.take("request_id", str)
    prompt = fields.take_any("token_ids")
    prompt_ids = fields.take("return_token_ids", bool, False)
    # The salt separates shared prefixes, which this server does not have.
    fields.ignore("cache_salt")
    fields.refuse("requests are served in the order in which they come", priority=0)
    fields.refuse("the whole response comes at once", stream=False)
    fields.ignore("stream_options")
    values = fields.take_any("sampling_params", {})
    fields.end()
    params = Fields("sampling_params", values)
    count = params.take_integer("logprobs", None, 0, 1)
    most = min(MOST_PROMPT_LOGPROBS, spec.vocab_size)
    of_prompt = params.take_integer("prompt_logprobs", None, 0, most)
    # If nothing is sampled, the prompt may be as long as a prompt and a response together.
    scores = of_prompt is not None and values.get("max_tokens") == 0
    if scores:
        params.take("max_tokens", int)
        spec = dataclasses.replace(spec, prompt_length=spec.prompt_length + spec.max_new_tokens)
    prompt = check_prompt("token_ids", prompt, spec)
    # These options concern texts and experts, which this response does not contain.
    params.ignore("skip_special_tokens", "spaces_between_special_tokens", "detokenize")
    params.ignore("routed_experts_prompt_start")
    sample = read_sampling(params, prompt, spec, max_tokens=0 if scores else None)
    params.end()
    return GenerateRequest(sample, name, count is not None, prompt_ids, of_prompt)


def check_model(fields: Fields, model: str) -> None:
    """Reads the field ``model``, which must be absent or name the served model."""
    name = fields.take("model", str, model)
    if name != model:
        raise RequestError(f"There is no model {name[:80]!r} here; this server has {model!r}.", 404)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
