"""Seconds of one GRPO step of SmolLM2-135M: 2 prompts x 8 rollouts, AdamW.

    python -m benchmarks.train_step --peer-python PATH --save
    python -m benchmarks.train_step --case short --peer-python PATH --save
    python -m benchmarks.train_step --case bfloat16 --peer-python PATH --save

The long case has 192 prompt and 64 response tokens and recomputes activations in the backward pass;
the short one has 64 and 64 and keeps them. Of a layer, ours then keeps what its linear layers give,
the peers keep its input: each the best that it offers for this size. Both are in float32, but for
one peer of the short case. The third case is the short one with products in bfloat16 and float32
weights and optimizer's state; one peer has those in bfloat16 too, which is less to read and write.
"""

from benchmarks import harness, workload
from benchmarks.weights import model_folder

PEERS = {
    "transformers": "benchmarks.peers.transformers_train_step",
    "tunix": "benchmarks.peers.tunix_train_step",
}
# With what eight bits of mantissa keep of an update.
BFLOAT16 = {"transformers bfloat16": "benchmarks.peers.transformers_bfloat16_train_step"}
AUTOCAST = {"transformers": "benchmarks.peers.transformers_autocast_train_step"}
CASES = {
    "long": ("train_step", PEERS),
    "short": ("train_step_short", PEERS | BFLOAT16),
    "bfloat16": ("train_step_bfloat16", AUTOCAST | BFLOAT16),
}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="long", help="192+64 or 64+64")
    options = parser.parse_args(argv)
    long, half = options.case == "long", options.case == "bfloat16"
    name, peers = CASES[options.case]
    size = {
        "model": "tiny" if options.tiny else "SmolLM2-135M-Instruct",
        "dtype": "bfloat16" if half else "float32",
        "prompts": 2,
        "rollouts": 4 if options.tiny else 8,
        "prompt_tokens": (192 if long else 64) // (8 if options.tiny else 1),
        "response_tokens": 64 // (8 if options.tiny else 1),
        "remat": long,
        "optimizer": "adamw",
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
    }
    rows = size["prompts"], size["rollouts"]
    with model_folder(
        tiny=options.tiny, gguf=options.gguf, peer_python=options.peer_python
    ) as model:
        vocab_size = model["vocab_size"]
        rewards = workload.rewards(*rows)
        result = harness.measure(
            name,
            workload=size,
            private={
                "folder": model["model"],
                "prompt_ids": workload.prompt_ids(
                    size["prompts"], size["prompt_tokens"], vocab_size=vocab_size
                ),
                "response_ids": workload.response_ids(
                    *rows, size["response_tokens"], vocab_size=vocab_size
                ),
                "rewards": rewards.tolist(),
                "advantages": workload.group_advantages(rewards),
            },
            ours="benchmarks.ours.train_step",
            peers=peers,
            peer_python=options.peer_python,
            rounds=options.rounds,
            tokens=rows[0] * rows[1] * (size["prompt_tokens"] + size["response_tokens"]),
            # The norm of the first gradient.
            # In bfloat16 it is from 3.9 to 4.7, by library and by what is rounded; 5.0 in float32.
            tolerance=0.25 if half else 1e-3,
            tolerances=dict.fromkeys(BFLOAT16, 0.25),
        )
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
