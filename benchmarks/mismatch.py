"""How far what samples is from what trains, on one set of weights: SmolLM2-135M by precision.

python -m benchmarks.mismatch --save

One flow has the same precision on both sides; in a split flow the sampler rounds and the trainer
does not. The numbers are over the tokens that were sampled, in nats; no figure is a time.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.data.questions import encode_prompts
from jaxrl_llm.train.models.score import score

PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "bfloat16 int8": {"dtype": "bfloat16", "quantization": "int8"},
}
QUESTIONS = (
    "A farmer has 17 sheep, buys 25 more and then sells 9. How many sheep does he have?",
    "Explain to a child what makes the tides rise and fall, and name what pulls the water.",
)
SIZES = {"prompts": 2, "rollouts": 4, "new_tokens": 64}
TINY = {"prompts": 2, "rollouts": 2, "new_tokens": 4}


def flows() -> list[tuple[str, str]]:
    """Pairs of the precision that samples and the one that trains."""
    one = [(name, name) for name in PRECISIONS]
    split = [(name, "float32") for name in PRECISIONS if name != "float32"]
    return [*one, *split, ("bfloat16 int8", "bfloat16"), ("bfloat16 fp8", "bfloat16")]


def measure(model, params, prompts, size: Mapping[str, int], stop_ids=()) -> list[dict[str, Any]]:
    """Mean and greatest log-ratio, and KL, of every flow."""
    options = {"max_new_tokens": size["new_tokens"], "group_size": size["rollouts"]}
    scorers: dict[str, Callable] = {}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for sampler in PRECISIONS:
        sample = jr.rollout.make_sampler(_with(model, sampler), stop_ids=stop_ids, **options)
        rollout = sample(params, jax.random.key(0), prompts)
        for trainer in (trainer for name, trainer in flows() if name == sampler):
            if trainer not in scorers:
                scorers[trainer] = _scorer(_with(model, trainer))
            gap = jax.device_get(scorers[trainer](params, rollout))
            numbers = {name: float(f"{float(x):.3g}") for name, x in gap._asdict().items()}
            found[sampler, trainer] = {"sampler": sampler, "trainer": trainer, **numbers}
            print(found[sampler, trainer], file=sys.stderr, flush=True)
    return [found[flow] for flow in flows()]


def _with(model, precision: str):
    """The same model in another precision; the parameters are float32 in all of them."""
    return jr.models.make_model(dataclasses.replace(model.config, **PRECISIONS[precision]))


def _scorer(model) -> Callable[..., jr.diagnostics.Mismatch]:
    """The gap of a rollout to its scores, compiled once for all that sampled."""

    def run(params, rollout):
        arrays = (rollout.prompt_tokens, rollout.prompt_mask, rollout.tokens, rollout.mask)
        logp, _ = score(model, params, *arrays)
        return jr.diagnostics.mismatch(logp, rollout.behavior_logp, rollout.mask)

    return jax.jit(run)


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None:
        raise SystemExit("benchmarks.mismatch compares precisions with each other, not with peers.")
    size, name = (TINY if options.tiny else SIZES), options.gguf or "smollm2-135m-instruct"
    if options.tiny:
        (model, params), tokenizer = jr.testing.tiny_model(num_layers=1), jr.testing.ByteTokenizer()
    else:
        model, params = jr.models.load_model(name)
        tokenizer = jr.data.load_tokenizer(name)
    asked = [jr.data.Prompt(text) for text in QUESTIONS[: size["prompts"]]]
    room = model.config.max_length - size["new_tokens"]
    prompts = [question.tokens for question in encode_prompts(asked, tokenizer, room=room)]
    result = {
        "name": "mismatch",
        "workload": {
            "model": "tiny" if options.tiny else "SmolLM2-135M-Instruct",
            **size,
            "prompt_tokens": max(map(len, prompts)),
        },
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "qwix", "jaxrl_llm"))},
        "commit": harness.commit(),
        "flows": measure(model, params, prompts, size, tokenizer.eos_ids),
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
