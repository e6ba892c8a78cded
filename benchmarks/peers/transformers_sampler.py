"""transformers' `generate` with its key-value cache, the prompts repeated by the call."""

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.worker import Measured, cpu_name, serve


def setup(workload: dict, dtype: torch.dtype = torch.float32) -> Measured:
    """Load the model; sampling never stops early, since no token is the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(workload["folder"], dtype=dtype)
    model = model.to(device).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    prompts = torch.tensor(workload["prompt_ids"], device=device)
    width, new_tokens = prompts.shape[1], workload["new_tokens"]

    @torch.inference_mode()
    def run(seed: int) -> None:
        torch.manual_seed(seed)
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=workload["temperature"],
            top_k=0,
            num_return_sequences=workload["rollouts"],
            max_new_tokens=new_tokens,
        )
        expected = (len(prompts) * workload["rollouts"], width + new_tokens)
        if tuple(tokens.shape) != expected:
            raise ValueError(f"generate returned {tuple(tokens.shape)}, not {expected}")
        tokens.cpu()

    @torch.inference_mode()
    def check() -> list:
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=workload["check_tokens"],
        )
        return tokens[:, width:].flatten().tolist()

    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    memory = torch.cuda.max_memory_allocated if device == "cuda" else lambda: None
    return Measured(run, check, name, ("torch", "transformers"), memory)


if __name__ == "__main__":
    serve(setup)
