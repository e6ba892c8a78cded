"""Rewards by name on the command line.

NAME                    a verifier or format of the package, such as boxed_math
reasoning_gym:TASK      the scorer of a reasoning-gym task
majority_vote:NAME      the votes of a verifier, for questions without answers
NAME+0.2*NAME           a weighted sum, such as dapo_math+0.2*think_format
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from jaxrl_llm import rewards
from jaxrl_llm.core import bind
from jaxrl_llm.rewards.answers import row_check

_VERIFIERS = ("last_integer", "dapo_math", "f1", "exact_match", "multiple_choice")
_FORMATS = ("think_format", "word_repetition")
_PROGRAMS = ("code_stdio", "code_asserts")
_MATHEMATICS = ("math_verify", "boxed_math", "reasoning_accuracy")
NAMES = (*_VERIFIERS, *_MATHEMATICS, *_PROGRAMS, *_FORMATS)


def find_reward(name: str) -> Callable:
    """The reward of a name, or of a sum of names.

    Raises:
      ValueError: If there is no such reward, or it needs a package that is not installed.

    Example:
      >>> from jaxrl_llm.cli.rewards import find_reward
      >>> reward = find_reward("last_integer+0.5*think_format")
      >>> reward("", "<think></think> 4", {"answer": "4"})
      {'reward': 1.5, 'last_integer': 1.0, 'think_format': 1.0}
    """
    if "+" in name or "*" in name:
        terms: dict[str, tuple[Callable, float]] = {}
        for word in name.split("+"):
            weight, _, term = (x.strip() for x in word.rpartition("*"))
            if term in terms:
                raise ValueError(f"the reward {name!r} names {term} twice")
            try:
                scale = float(weight or 1.0)
            except ValueError:
                raise ValueError(f"the weight of {term} must be a number, got {weight!r}") from None
            terms[term] = _one(term), scale
        reward = rewards.weighted_sum(terms)
    else:
        reward = _one(name)
    reads_math, runs_code = (
        any(known in name for known in kind) for kind in (_MATHEMATICS, _PROGRAMS)
    )
    if not reads_math and not runs_code:
        return reward
    if reads_math and importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"{name} needs math-verify: pip install 'jaxrl_llm[train]'")
    make_pool = rewards.math_verify_pool if reads_math else rewards.VerifierPool
    # A call of code_stdio takes at most 45 seconds.
    options = {"workers": os.cpu_count() or 1, "deadline": 60.0} if runs_code else {}
    return _Pooled(name, reward, bind(make_pool, **options))


def _one(name: str) -> Callable:
    kind, _, rest = name.partition(":")
    if name in NAMES:
        return getattr(rewards, name)
    if kind == "majority_vote" and rest:
        return rewards.majority_vote(_one(rest))
    if kind == "reasoning_gym" and rest:
        try:
            return rewards.reasoning_gym(rest)
        except rewards.SandboxError as error:
            raise ValueError(str(error)) from error
    raise ValueError(
        f"no reward {name!r}; there are {', '.join(NAMES)}, reasoning_gym:TASK and "
        "majority_vote:NAME, sums such as dapo_math+0.2*think_format, and a config file can use "
        "any function"
    )


class _Pooled:
    """A reward in processes that start with the first batch, not while options are read."""

    patience = 600.0  # the pool's

    def __init__(self, name: str, reward: Callable, make_pool: Callable):
        self.name = self.__qualname__ = name
        self.answer, self.check_row = rewards.answer_of(reward), row_check(reward)
        self.weights_of_sum = getattr(reward, "weights_of_sum", None)
        self.told_absent = getattr(reward, "told_absent", None)
        self._reward, self._make_pool = reward, make_pool
        self._pool: Any = None

    def __repr__(self) -> str:
        return self.name

    def score_batch(self, prompts, completions, metadata) -> list[Any]:
        """Values of a batch, from the pool."""
        if self._pool is None:
            self._pool = self._make_pool(self._reward)
        return self._pool.score_batch(prompts, completions, metadata)

    def __call__(self, prompt, completion, metadata) -> Any:
        """The value of one completion."""
        return self.score_batch([prompt], [completion], [metadata])[0]
