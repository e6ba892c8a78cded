"""A tokenizer as the files of a Hugging Face folder."""

import json
import os
from pathlib import Path
from typing import Any

from jaxrl_llm.data.tokenizer import PretrainedTokenizer


def save_tokenizer(tokenizer: PretrainedTokenizer, folder: str | os.PathLike[str]) -> None:
    """Writes what `load_tokenizer` and transformers read.

    tokenizer.json cuts text as the tokenizer does and puts its BOS first; tokenizer_config.json
    names the special tokens and holds the chat template; generation_config.json says which tokens
    end a reply, and which one fills a batch.

    Args:
      tokenizer: From `load_tokenizer`.
      folder: Made if it is not there.

    Raises:
      TypeError: If the tokenizer is of another kind: only its maker knows how to write it.
    """
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise TypeError(
            f"save_tokenizer: a {type(tokenizer).__name__} did not come from load_tokenizer, so it "
            "has no such files."
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    backend = tokenizer.backend()
    (target / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    names = tokenizer.special_tokens
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    settings |= {"clean_up_tokenization_spaces": False}
    # A reply ends with it; a model that has no token of this name gives it none by itself.
    settings.setdefault("eos_token", backend.id_to_token(tokenizer.eos_ids[0]))
    if tokenizer.pad_id not in tokenizer.eos_ids:
        settings.setdefault("pad_token", backend.id_to_token(tokenizer.pad_id))
    if tokenizer.template is not None:
        settings["chat_template"] = tokenizer.template
        (target / "chat_template.jinja").write_text(tokenizer.template, encoding="utf-8")
    _write(target / "tokenizer_config.json", settings)
    ends = list(tokenizer.eos_ids)
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    generation["pad_token_id"] = tokenizer.pad_id
    if "bos_token" in names:
        generation["bos_token_id"] = backend.token_to_id(names["bos_token"])
    _write(target / "generation_config.json", generation)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
