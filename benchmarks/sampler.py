"""Sampler speed: SmolLM2-135M, 8 prompts x 8 rollouts, 64 prompt and 64 new tokens.

    python -m benchmarks.sampler --peer-python PATH --save
    python -m benchmarks.sampler --case bfloat16 --peer-python PATH --save

The first case is in float32, the second in bfloat16: weights and products of the peer, products of
ours, which casts the float32 weights of a run at each call.
"""

from benchmarks import harness, workload
from benchmarks.weights import model_folder

PEERS = {
    "transformers": "benchmarks.peers.transformers_sampler",
    "tunix": "benchmarks.peers.tunix_sampler",
}
CASES = {
    "float32": ("sampler", PEERS),
    "bfloat16": (
        "sampler_bfloat16",
        {"transformers": "benchmarks.peers.transformers_bfloat16_sampler"},
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="float32", help="dtype")
    options = parser.parse_args(argv)
    name, peers = CASES[options.case]
    size = {
        "model": "tiny" if options.tiny else "SmolLM2-135M-Instruct",
        "dtype": options.case,
        "prompts": 2 if options.tiny else 8,
        "rollouts": 2 if options.tiny else 8,
        "prompt_tokens": 16 if options.tiny else 64,
        "new_tokens": 8 if options.tiny else 64,
        "temperature": 1.0,
    }
    with model_folder(
        tiny=options.tiny, gguf=options.gguf, peer_python=options.peer_python
    ) as model:
        prompts = workload.prompt_ids(
            size["prompts"], size["prompt_tokens"], vocab_size=model["vocab_size"]
        )
        result = harness.measure(
            name,
            workload=size,
            private={"folder": model["model"], "prompt_ids": prompts, "check_tokens": 4},
            ours="benchmarks.ours.sampler",
            peers=peers,
            peer_python=options.peer_python,
            rounds=options.rounds,
            tokens=size["prompts"] * size["rollouts"] * size["new_tokens"],
            # Greedy tokens: a near tie may fall either way, and all after it then differ.
            share=0.8 if options.case == "float32" else 0.5,
        )
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
