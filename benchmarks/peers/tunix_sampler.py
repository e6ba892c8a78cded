"""tunix's Sampler as its rollout worker calls it: all jitted, log-probabilities kept."""

import jax
from tunix.generate.sampler import CacheConfig, Sampler

from benchmarks.peers.tunix_model import PACKAGES, load
from benchmarks.worker import Measured, jax_device_memory, jax_device_name, serve


class Ids:
    """A tokenizer whose text is the ids themselves, so that text costs nothing."""

    def __init__(self, pad: int):
        self._pad = pad

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none is put in front

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return self._pad


def setup(workload: dict) -> Measured:
    """Load the model; no token ends a sequence."""
    model = load(workload["folder"])
    config = model.config
    prompts = [" ".join(map(str, ids)) for ids in workload["prompt_ids"]]
    rows = [prompt for prompt in prompts for _ in range(workload["rollouts"])]
    width, new_tokens = workload["prompt_tokens"], workload["new_tokens"]
    sampler = Sampler(
        model,
        Ids(pad=config.vocab_size - 1),
        CacheConfig(
            cache_size=width + new_tokens,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )

    def run(seed: int) -> None:
        output = sampler(
            rows,
            max_generation_steps=new_tokens,
            max_prompt_length=width,
            temperature=workload["temperature"],
            top_p=1.0,
            top_k=None,
            eos_tokens=[-1],
            seed=jax.random.PRNGKey(seed),
            return_logprobs=True,
        )
        if {len(tokens) for tokens in output.tokens} != {new_tokens}:
            raise ValueError("a sequence is shorter than asked")

    def check() -> list:
        output = sampler(
            prompts,
            max_generation_steps=workload["check_tokens"],
            max_prompt_length=width,
            eos_tokens=[-1],
        )
        return [int(token) for tokens in output.tokens for token in tokens]

    return Measured(run, check, jax_device_name(), PACKAGES, jax_device_memory)


if __name__ == "__main__":
    serve(setup)
