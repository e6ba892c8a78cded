"""Seconds of one DPO step of SmolLM2-135M, ours and TRL's: 16 pairs, AdamW, float32.

    python -m benchmarks.dpo_step --peer-python PATH --save
    python -m benchmarks.dpo_step --case precomputed --peer-python PATH --save

Prompts have 192 tokens and responses 64. In the first case the reference scores every batch, in the
second its log-probabilities are there before the first step, with both. The peer is TRL's
`DPOTrainer` with its defaults, gradient checkpointing and the fused output layer among them; its
step is what the trainer's loop does with a batch. `--microbatches` and `--accumulation` divide the
batch of ours and of the peer, which changes seconds and memory and not the gradient.
"""

from benchmarks import harness, workload
from benchmarks.weights import model_folder

CASES = {"reference": "dpo_step", "precomputed": "dpo_step_precomputed"}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="reference")
    parser.add_argument("--microbatches", type=int, default=8, help="of our batch")
    parser.add_argument("--accumulation", type=int, default=1, help="steps of the peer's batch")
    parser.add_argument("--remat", default="dots", help="what our backward pass keeps of a layer")
    options = parser.parse_args(argv)
    size = {
        "model": "tiny" if options.tiny else "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "pairs": 4 if options.tiny else 16,
        "prompt_tokens": 24 if options.tiny else 192,
        "response_tokens": 8 if options.tiny else 64,
        "precomputed": options.case == "precomputed",
        "microbatches": min(options.microbatches, 4) if options.tiny else options.microbatches,
        "accumulation": options.accumulation,
        "remat": options.remat,
        "beta": 0.1,
        "optimizer": "adamw",
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
    }
    pairs, response = size["pairs"], size["response_tokens"]
    with model_folder(
        tiny=options.tiny, gguf=options.gguf, peer_python=options.peer_python
    ) as model:
        vocab_size = model["vocab_size"]
        result = harness.measure(
            CASES[options.case],
            workload=size,
            private={
                "folder": model["model"],
                "prompt_ids": workload.prompt_ids(
                    pairs, size["prompt_tokens"], vocab_size=vocab_size
                ),
                "response_ids": workload.response_ids(pairs, 2, response, vocab_size=vocab_size),
            },
            ours="benchmarks.ours.dpo_step",
            peers={"trl": "benchmarks.peers.trl_dpo_step"},
            peer_python=options.peer_python,
            rounds=options.rounds,
            tokens=pairs * 2 * (size["prompt_tokens"] + response),
            tolerance=1e-3,  # of the norm of the first gradient
        )
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
