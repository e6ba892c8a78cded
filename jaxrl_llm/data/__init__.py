"""Prompts, the order in which they are visited, and the tokenizer that turns them into token ids.

Each name loads its module on first use; datasets, tokenizers and reasoning-gym load only in the
functions that need them.
"""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "align_spans": "alignment",
    "token_ends": "alignment",
    "Cursor": "order",
    "take": "order",
    "with_density": "density",
    "Prompt": "prompts",
    "PromptSet": "prompts",
    "Question": "questions",
    "encode_prompts": "questions",
    "from_file": "sources",
    "from_hub": "sources",
    "from_reasoning_gym": "sources",
    "PackageRenderer": "package_renderer",
    "Renderer": "rendering",
    "describe_tools": "rendering",
    "make_renderer": "rendering",
    "split_distinct": "prompts",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "save_tokenizer": "tokenizer",
}

__all__ = [
    "Cursor",
    "PackageRenderer",
    "Prompt",
    "PromptSet",
    "Question",
    "Renderer",
    "Tokenizer",
    "align_spans",
    "describe_tools",
    "encode_prompts",
    "from_file",
    "from_hub",
    "from_reasoning_gym",
    "load_tokenizer",
    "make_renderer",
    "save_tokenizer",
    "split_distinct",
    "take",
    "token_ends",
    "with_density",
]

# Heavy modules load on first use.
__getattr__, __dir__ = lazy(__name__, _HOMES)
