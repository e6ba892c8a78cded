"""Rewards computed by a model: the values of a reward model, or the verdicts of a judge.

Both read text and encode prompt and completion with the tokenizer of the scoring model, so the
policy may have another tokenizer. The model is loaded at the first call and scores on the device,
in batches of similar lengths.

Shared arguments:
  ``model``: A folder or repository with weights, such as ``jaxrl-llm export`` writes.
  ``tokenizer``: A ``data.Tokenizer``; None for the tokenizer of the folder.
  ``chat``, ``system``: How a prompt becomes tokens, as in ``DataConfig``.
  ``batch_size``: Texts per batch.
  ``dtype``: Dtype of the matrix products.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.compose import changed_options
from jaxrl_llm.core.reasoning import Continuation, split_reply
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation import judge_message
from jaxrl_llm.data.questions import TextEncoder
from jaxrl_llm.data.rendering import encode_chat
from jaxrl_llm.models import make_model, param_shapes, resolve
from jaxrl_llm.models.heads import (
    checked_head,
    head_of,
    headed_model,
    load_reward_model,
    read_at_of,
    reward_model_config,
)
from jaxrl_llm.models.loading import read_config
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch
from jaxrl_llm.rewards.scoring import Failure, one_line
from jaxrl_llm.rollout.backends import texts_of
from jaxrl_llm.rollout.sampler import make_sampler, pad_rows, prompt_room
from jaxrl_llm.train.models.score import Scorer

_SHORTEST = 16  # minimum row width; longer rows are powers of two, so few shapes are compiled
_REDUCE = {"min": np.min, "mean": np.mean, "last": lambda x: x[-1], "product": np.prod}


class _Loaded(NamedTuple):
    """A loaded model, and the encoder of its texts."""

    model: Model
    params: ArrayTree
    encoder: TextEncoder


def _check_is_name(function: str, model: Any) -> None:
    """Raises TypeError unless the model of a reward is a name or a folder."""
    if not isinstance(model, str | Path):
        raise TypeError(f"{function}: model must be the name or folder of a model; got {model!r}.")


class reward_model:  # noqa: N801 (used as a function: `reward = reward_model("models/rm")`)
    """The reward of a completion under a reward model of complete texts or of steps.

        reward = r(prompt, completion, stop token), the head's value at the last token
              or r(conversation), likewise, for a model that transformers has saved
        of steps: p_k = sigmoid(z at the end of step k),   reward = min_k p_k

    The export of a run is read where it was trained: at the stop token. A model of responses that
    transformers has saved is read as there: the chat template writes prompt and completion as one
    conversation, without a generation prompt, and the head is read at the last token, which may be
    a new line after the stop token. Without ``chat`` both are read at the stop token. A model of
    steps is read at the last token of each step of the completion, which follows the prompt.

    With a model of steps the reward is a mapping that also has ``turn_rewards`` and ``turn_ends``,
    for recipes that use rewards of turns. A completion that exceeds the model's context, or has a
    token outside its vocabulary, has no reward.

    Args:
      model, tokenizer, chat, system, batch_size, dtype: See the module. Use the ``chat`` and
        ``system`` that the reward model was trained with.
      read_at: "stop" for the stop token, "end" for the last token of the conversation; None for
        "stop" where config.json says `"read_at": "stop"` or lacks the version of transformers, as
        exports do, else "end".
      separator: Text between two steps, for a model of steps; None for an empty line.
      reduce: "min", "mean", "last" or "product" over the steps; None for "min".

    Raises:
      TypeError: If ``model`` is no text or path.
      ValueError: If the model has no head, ``model`` is the folder of a run, or an option has no
        effect.

    Example:
      >>> import tempfile
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> _, scorer = jr.models.with_head(model, params, key=jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.models.save_safetensors(scorer, folder, config=model.config, head="response")
      ...     reward = jr.train.reward_model(folder, tokenizer=jr.testing.ByteTokenizer())
      ...     scores = jr.rewards.score(reward, ["2 + 2 ="] * 2, ["4", "five"])
      >>> scores.rewards.shape
      (2,)

    References:
      Ouyang et al., InstructGPT (arXiv:2203.02155); Lightman et al. (arXiv:2305.20050), who score a
      solution by the product over its steps; Math-Shepherd (arXiv:2312.08935) takes the minimum.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Any = None,
        chat: bool = True,
        system: str | None = None,
        read_at: Literal["stop", "end"] | None = None,
        separator: str | None = None,
        reduce: Literal["min", "mean", "last", "product"] | None = None,
        batch_size: int = 32,
        dtype: str = "float32",
    ):
        name = "reward_model"
        _check_is_name(name, model)
        checks.check_count(name, batch_size=batch_size)
        self.model, self.tokenizer, self.batch_size = str(model), tokenizer, batch_size
        self.chat, self.system, self.dtype = chat, system, dtype
        self.__qualname__ = f"{name}({self.model!r})"
        self.in_full = _in_full(
            reward_model,
            self.model,
            tokenizer=tokenizer,
            chat=chat,
            system=system,
            read_at=read_at,
            separator=separator,
            reduce=reduce,
            dtype=dtype,
        )
        if (Path(model) / "run.json").is_file() or (Path(model) / "checkpoints").is_dir():
            raise ValueError(
                f"{name}: {self.model!r} is the folder of a run; export its model first: jaxrl-llm "
                f"export {self.model} FOLDER."
            )
        self.head = checked_head(name, model)
        if self.head == "response":
            why = "with a reward model of responses"
            checks.check_no_effect(name, why, separator=separator, reduce=reduce)
        else:
            checks.check_no_effect(name, "with a reward model of steps", read_at=read_at)
        if not chat:
            checks.check_no_effect(name, "without a chat template", read_at=read_at)
        if read_at is None:
            read_at = read_at_of(model) if chat and self.head == "response" else "stop"
        checks.check_option(name, "read_at", read_at, ("stop", "end"))
        self.read_at = read_at
        self.separator = "\n\n" if separator is None else separator
        self.reduce = "min" if reduce is None else reduce
        checks.check_option(name, "reduce", self.reduce, _REDUCE)
        if not self.separator:
            raise ValueError(f"{name}: separator must not be empty.")

    def __repr__(self) -> str:
        return self.__qualname__

    @functools.cached_property
    def _loaded(self) -> _Loaded:
        model, params = load_reward_model(self.model, dtype=self.dtype)
        return _Loaded(model, params, _encoder(self))

    @functools.cached_property
    def _values(self) -> Callable[[ArrayTree, Batch], jax.Array]:
        return jax.jit(Scorer(self._loaded.model).values)

    def __call__(self, prompt: str, completion: str, metadata: Mapping[str, Any]) -> Any:
        """The reward of one completion."""
        return self.score_batch([prompt], [completion], [metadata])[0]

    def score_batch(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """The rewards of completions; a ``Failure`` for one that the model cannot read."""
        model, params, encoder = self._loaded
        out: list[Any] = [None] * len(prompts)
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            name, messages = repr(prompt[:40]), _conversation(prompt, metadata[i])
            asked = (
                encoder.conversation(messages, name) if messages else encoder.prompt(prompt, name)
            )
            try:  # the prompt alone was rendered above, so an error is of the completion
                if self.read_at == "end":
                    written = _written(encoder, prompt, messages, completion)
                    tokens = written[:-1], written[-1:]
                else:
                    # A reply that was cut off within its reasoning is no turn of a template.
                    is_complete = split_reply(completion).final is not None
                    reply = completion if is_complete else Continuation(completion)
                    tokens = asked, encoder.response(reply, ends=True)
            except ValueError as error:
                out[i] = Failure(f"raised ValueError: {one_line(str(error))}", error)
                continue
            length, most = len(tokens[0]) + len(tokens[1]), model.config.max_length
            largest, size = max([*tokens[0], *tokens[1]]), model.config.vocab_size
            if length > most:
                out[i] = Failure(f"needs {length} tokens of a context of {most}")
            elif not tokens[1]:
                out[i] = Failure("has no tokens")
            elif largest >= size:
                out[i] = Failure(f"holds token {largest}, outside the vocabulary of {size}")
            else:
                rows[i] = tokens
        order = sorted(rows, key=lambda i: len(rows[i][0]) + len(rows[i][1]))
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            filled = [rows[i] for i in part]
            filled += filled[-1:] * (self.batch_size - len(part))
            values = np.asarray(self._values(params, _batch(filled)))[: len(part), 0, :, 0]
            for i, row in zip(part, values, strict=True):
                out[i] = self._reward(completions[i], rows[i][1], row)
        return out

    def _reward(self, completion: str, tokens: list[int], values: np.ndarray) -> Any:
        """The reward of one completion, from the values at its tokens."""
        if self.head == "response":
            return float(values[len(tokens) - 1])
        ends = rewards.step_ends(completion, separator=self.separator)
        decode = self._loaded.encoder.tokenizer.decode
        # The template may write more before the text, or have written its beginning in the prompt.
        text = decode(tokens)
        same = text.endswith(completion) or completion.endswith(text)
        more = len(text) - len(completion) if same else 0
        steps = rewards.turns_of_tokens(tokens, [end + more for end in ends], decode=decode)
        steps = np.where(steps < 0, len(ends), steps)
        # A step that begins and ends within a token is read at the end of the previous step.
        last = np.searchsorted(steps, np.arange(len(ends)), side="right") - 1
        z = values[np.maximum(last, 0)].astype(np.float64)
        p = 1.0 / (1.0 + np.exp(-np.clip(z, -500, 500)))
        reward = float(_REDUCE[self.reduce](p))
        return {"reward": reward, "turn_rewards": p.tolist(), "turn_ends": ends}


class judge:  # noqa: N801 (used as a function: `reward = judge("models/judge")`)
    """The reward of a completion, parsed from the text that a language model writes about it.

        reward = parse(the judge's most likely text)             of each completion alone
        compare: mean over its comparisons of 1[it is preferred]

    With ``compare`` each completion of a prompt is compared with the next and the previous one, in
    both orders, to cancel the effect of position in the message; a verdict that cannot be parsed
    counts one half. Without ``compare`` a completion with an unparsable verdict has no reward. The
    judge is not asked a message that is too long or has a token outside its vocabulary; a
    completion without any other has no reward.

    Args:
      model, tokenizer, chat, system, batch_size, dtype: See the module.
      compare: Whether completions of one prompt are compared. A run with such a reward has no
        evaluation, since a greedy one has one completion of a prompt.
      message: ``(prompt, completions) -> text``, the question about one or two completions. The
        prompt of a conversation is all its messages, each after its role.
      parse: ``text -> number or None``, such as ``rewards.rating``; with ``compare`` 0 for the
        first, 1 for the second. None parses the words that the default message requests: "yes" or
        "no", "first" or "second".
      max_new_tokens: Maximum number of tokens that the judge writes.

    Raises:
      TypeError: If ``model`` is no text or path, or ``message`` or ``parse`` is not a function.
      ValueError: If the model has a value head instead of a vocabulary.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.models.save_safetensors(params, folder, config=model.config)
      ...     reward = jr.train.judge(
      ...         folder, tokenizer=jr.testing.ByteTokenizer(), max_new_tokens=4, compare=True)
      ...     scores = jr.rewards.score(reward, ["2 + 2 ="] * 2, ["4", "five"])
      >>> scores.rewards.tolist()
      [0.5, 0.5]

    References:
      Zheng et al. (arXiv:2306.05685), who compare in both orders; generative verifiers
      (arXiv:2408.15240).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        compare: bool = False,
        message: Callable[[str, Sequence[str]], str] = judge_message,
        parse: Callable[[str], float | None] | None = None,
        tokenizer: Any = None,
        chat: bool = True,
        system: str | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 32,
        dtype: str = "float32",
    ):
        name = "judge"
        _check_is_name(name, model)
        checks.check_count(name, batch_size=batch_size, max_new_tokens=max_new_tokens)
        self.in_full = _in_full(
            judge,
            str(model),
            compare=compare,
            message=message,
            parse=parse,
            tokenizer=tokenizer,
            chat=chat,
            system=system,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
        )
        words = ("first", "second") if compare else ("no", "yes")
        parse = functools.partial(rewards.verdict, words=words) if parse is None else parse
        for option, function in {"message": message, "parse": parse}.items():
            if not callable(function):
                raise TypeError(f"{name}: {option} must be a function; got {function!r}.")
        if head_of(model) is not None:
            raise ValueError(
                f"{name}: {str(model)!r} is a reward model, which writes nothing; use reward_model."
            )
        self.model, self.compare, self.message, self.parse = str(model), compare, message, parse
        self.tokenizer, self.chat, self.system = tokenizer, chat, system
        self.max_new_tokens, self.batch_size, self.dtype = max_new_tokens, batch_size, dtype
        self.__qualname__ = f"{name}({self.model!r})"

    def __repr__(self) -> str:
        return self.__qualname__

    @functools.cached_property
    def _loaded(self) -> _Loaded:
        from jaxrl_llm import models

        model, params = models.load_model(self.model, dtype=self.dtype)
        return _Loaded(model, params, _encoder(self))

    @functools.cached_property
    def _sample(self) -> Callable[..., Any]:
        encoder = self._loaded.encoder
        return make_sampler(
            self._loaded.model,
            max_new_tokens=self.max_new_tokens,
            group_size=1,
            stop_ids=encoder.stop_ids,
            temperature=0.0,
            pad_id=encoder.tokenizer.pad_id,
        )

    def score_batch(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """The rewards of completions; a ``Failure`` for one that is not judged."""
        prompts = [_transcript(*each) for each in zip(prompts, metadata, strict=True)]
        if not self.compare:
            asked = [self.message(p, [c]) for p, c in zip(prompts, completions, strict=True)]
            verdicts = [None if text is None else self.parse(text) for text in self.write(asked)]
            return [Failure("is not judged") if v is None else float(v) for v in verdicts]
        groups: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(i)
        pairs = []
        for members in groups.values():
            following = [*members[1:], members[0]]
            # Two completions make one comparison, a single completion none.
            count = len(members) if len(members) > 2 else len(members) - 1
            for i, j in list(zip(members, following, strict=True))[:count]:
                pairs += [(i, j), (j, i)]
        texts = self.write(
            [self.message(prompts[i], [completions[i], completions[j]]) for i, j in pairs]
        )
        wins: list[list[float]] = [[] for _ in prompts]
        for (i, j), text in zip(pairs, texts, strict=True):
            if text is None:  # not asked
                continue
            second = self.parse(text)
            second = 0.5 if second is None else float(second)
            wins[i].append(1.0 - second)
            wins[j].append(second)
        paired = {i for pair in pairs for i in pair}
        return [
            float(np.mean(w))
            if w
            else Failure("is not judged" if i in paired else "has none to compare with")
            for i, w in enumerate(wins)
        ]

    def write(self, messages: Sequence[str]) -> list[str | None]:
        """The judge's text for each message.

        None for a message that is too long, or has a token outside the vocabulary.
        """
        model, params, encoder = self._loaded
        room = prompt_room("judge", model, self.max_new_tokens)
        every = [encoder.prompt(message, "of a judge") for message in messages]
        out: list[str | None] = [None] * len(every)
        size = model.config.vocab_size
        asked = [len(x) <= room and max(x) < size for x in every]
        order = [i for i in np.argsort([len(x) for x in every]) if asked[i]]
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            filled = [every[i] for i in part] + [every[part[-1]]] * (self.batch_size - len(part))
            rollout = self._sample(params, jax.random.key(0), filled)
            for i, texts in zip(part, texts_of(rollout, encoder.tokenizer.decode), strict=False):
                out[i] = texts[0]
        return out


def _in_full(kind: type, model: str, **options: Any) -> str:
    """A reward of this module with the options that its values depend on, for a resumed run."""
    return f"{kind.__name__}({', '.join([repr(model), *changed_options(kind, options)])})"


def _conversation(prompt: str, metadata: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The conversation that ends with a prompt; a column of that name may hold something else."""
    messages = metadata.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "user":
        return None
    return messages if last.get("content") == prompt else None


def _written(
    encoder: TextEncoder,
    prompt: str,
    messages: Sequence[Mapping[str, Any]] | None,
    completion: str,
) -> list[int]:
    """The tokens of a prompt and its completion as the chat template writes a conversation."""
    messages = [*(messages or [{"role": "user", "content": prompt}])]
    if encoder.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": encoder.system})
    messages.append({"role": "assistant", "content": completion})
    render = functools.partial(encoder.tokenizer.chat, add_generation_prompt=False)
    return encode_chat(encoder.tokenizer, render, messages)


def _transcript(prompt: str, metadata: Mapping[str, Any]) -> str:
    """A prompt as a judge reads it: of a conversation, all messages with their roles."""
    messages = _conversation(prompt, metadata)
    if messages is None:
        return prompt
    return "\n\n".join(f"{x['role'].capitalize()}: {x['content']}" for x in messages)


def abstract_reward(reward: Any) -> tuple[Model, ArrayTree] | None:
    """The model behind a reward and the shapes of its parameters; no weights are read.

    None for a reward that is not computed by a model on the device.
    """
    if isinstance(reward, reward_model):
        config, _ = reward_model_config(reward.model, dtype=reward.dtype)
        model = headed_model(make_model(config))
    elif isinstance(reward, judge):
        path = resolve(reward.model, weights=False).config
        model = make_model(read_config(path, dtype=reward.dtype))
    else:
        return None
    return model, param_shapes(model)


def _encoder(reward: reward_model | judge) -> TextEncoder:
    """The text encoder of a model, whose tokenizer may have tokens that the model lacks."""
    from jaxrl_llm import data

    tokenizer = reward.tokenizer
    tokenizer = data.load_tokenizer(reward.model) if tokenizer is None else tokenizer
    return TextEncoder(tokenizer, sys.maxsize, reward.chat, reward.system)


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """A batch ``[N, 1, T]`` of prompts and responses, padded to one of a few widths."""
    prompts, responses = [prompt for prompt, _ in rows], [response for _, response in rows]

    def padded(texts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        longest = max(map(len, texts))
        width = max(_SHORTEST, power_of_two(longest))
        lengths = np.array([len(x) for x in texts])[:, None]
        return pad_rows(texts, width), np.arange(width) < lengths

    (prompt_tokens, prompt_mask), (tokens, mask) = padded(prompts), padded(responses)
    return Batch(
        tokens=tokens[:, None],
        mask=mask[:, None],
        rewards=np.zeros((len(rows), 1), np.float32),
        where=np.ones((len(rows), 1), bool),
        prompt_tokens=prompt_tokens,
        prompt_mask=prompt_mask,
    )


def check_judge(config: Any, recipe: Any) -> None:
    """Raises ValueError if a judge that compares would get one response to a prompt."""
    if not (isinstance(config.reward, judge) and config.reward.compare):
        return
    needs = "a judge that compares needs several responses to a prompt"
    if config.evaluation.enabled:
        raise ValueError(
            f"evaluation: {needs}, and a greedy evaluation has one; turn it off "
            "(evaluation.enabled=False)."
        )
    if config.sampling.group_size == 1:
        raise ValueError(f"sampling: {needs}; got group_size 1.")
    if "greedy_rewards" in recipe.needs.fields:
        raise ValueError(
            f"config: {needs}, but the baseline of recipe {recipe.name!r} is the reward of a "
            "greedy response."
        )
