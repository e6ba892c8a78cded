"""Prompts, the order in which they are visited, and the tokenizer that turns them into token ids.

Each name loads its module on first use; datasets, tokenizers and reasoning-gym load only in the
functions that need them.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.core.runtime.lazy import lazy

if TYPE_CHECKING:
    from jaxrl_llm.data.order import Cursor, take
    from jaxrl_llm.data.prompts import Prompt, PromptSet, split_distinct
    from jaxrl_llm.data.questions import Question, encode_prompts
    from jaxrl_llm.data.sources import from_file, from_hub, from_reasoning_gym
    from jaxrl_llm.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

_HOMES = {
    "Cursor": "order",
    "take": "order",
    "Prompt": "prompts",
    "PromptSet": "prompts",
    "Question": "questions",
    "encode_prompts": "questions",
    "from_file": "sources",
    "from_hub": "sources",
    "from_reasoning_gym": "sources",
    "split_distinct": "prompts",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "save_tokenizer": "tokenizer",
}

__all__ = [
    "Cursor",
    "Prompt",
    "PromptSet",
    "Question",
    "Tokenizer",
    "encode_prompts",
    "from_file",
    "from_hub",
    "from_reasoning_gym",
    "load_tokenizer",
    "save_tokenizer",
    "split_distinct",
    "take",
]

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
