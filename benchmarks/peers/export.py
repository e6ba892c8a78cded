"""Write a GGUF model as float32 safetensors and config.json: `export FILE.gguf FOLDER`."""

import sys
from pathlib import Path

import torch
import transformers


def main(gguf: str, folder: str) -> None:
    """Dequantize with transformers and save in its own layout."""
    path = Path(gguf)
    options = {}
    if hasattr(transformers, "GgufConfig"):  # where it would keep the weights quantized
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, **options
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
