"""What a step costs from first principles: tokens, operations, bytes, collectives, and the memory.

    python -m benchmarks.scaling --save      # the planner's layouts, into benchmarks/results
    python -m benchmarks.scaling_page        # the tables of docs/scaling.md

Seconds are lower bounds: every device multiplies at its peak, reads at its full bandwidth, uses all
its links at once, and nothing waits for anything. The planner (`--plan`) chooses the layouts: the
fewest devices that hold the run, weights split by `fsdp` alone before those of a host are split by
`tensor`, and the fewest microbatches.
"""

import argparse
import dataclasses
import json
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import RESULTS, ROOT
from benchmarks.pods import QWEN3_8B, load
from jaxrl_llm.train.profile import ModelSize, train_flops
from jaxrl_llm.train.state import device_bytes

RESULT = RESULTS / "scaling.json"


class Device(NamedTuple):
    """What its maker says of a device; bytes a second in one direction."""

    flops: float  # of bfloat16 products a second, dense
    memory: float  # bytes
    bandwidth: float  # of the memory
    link: float  # into a device from the others of its slice or node, over all its links
    network: float | None  # into a device from other slices or nodes; None if no page says it
    slice: int  # most devices that links join
    tensor: int  # devices of a host, the most that `tensor` should split over
    source: str


_TPU, _GPU = "https://cloud.google.com/tpu/docs/", "https://www.nvidia.com/en-us/data-center/"
DEVICES = {
    "v5e": Device(197e12, 16e9, 819e9, 200e9, 6.4e12 / 8 / 256, 256, 4, f"{_TPU}v5e"),
    "v6e": Device(918e12, 32e9, 1638e9, 400e9, None, 256, 4, f"{_TPU}v6e"),
    "h100": Device(989e12, 80e9, 3.35e12, 450e9, 400e9 / 8, 8, 8, f"{_GPU}h100/"),
    "h200": Device(989e12, 141e9, 4.8e12, 450e9, 400e9 / 8, 8, 8, f"{_GPU}h200/"),
}

_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
# What shapes depend on in the config.json of each.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-32B": QWEN3_8B
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "Llama-3.3-70B": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


class Work(NamedTuple):
    """What a step samples and trains on."""

    prompts: int = 128
    group_size: int = 8
    prompt_length: int = 256
    length: int = 1024  # of every response

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size


class Shape(NamedTuple):
    """What of a model decides its costs."""

    parameters: int
    matrices: int  # weights of the matrix products of all layers
    projection: int  # those of the projection to the vocabulary
    attention: int  # sum over the layers of heads times `head_dim`
    layers: int
    width: int
    cache: int  # numbers that a token leaves in the keys and values of all layers


class Layout(NamedTuple):
    """A mesh of `fsdp` x `tensor` devices, and the microbatches of a step."""

    fsdp: int
    tensor: int
    microbatches: int

    @property
    def devices(self) -> int:
        return self.fsdp * self.tensor


class Cost(NamedTuple):
    """A step on one device: operations, and bytes read from memory or received over links."""

    train_flops: float  # remat "full" computes the forward pass again
    sample_flops: float
    decode_bytes: float  # weights and cache, read for each token of the longest response
    decode_gathered: float  # weights of the other devices, where each token gathers them anew
    train_gathered: float  # weights forward and backward, and the sum of their gradients
    train_reduced: float  # sums of activations over `tensor`


class Seconds(NamedTuple):
    """Lower bounds of a step."""

    train: float
    train_links: float
    sample: float
    sample_links: float

    @property
    def least(self) -> float:
        """Seconds of a step whose communication hides behind the rest where it can."""
        return max(self.train, self.train_links) + self.sample


def shape_of(model) -> Shape:
    """The shape of a model."""
    import jax

    from jaxrl_llm.models import param_shapes
    from jaxrl_llm.train.profile import model_size

    size, known = model.config, model_size(model)
    assert known is not None
    return Shape(
        sum(math.prod(x.shape) for x in jax.tree.leaves(param_shapes(model))),
        *known,
        size.num_layers,
        size.width,
        2 * size.num_layers * size.num_kv_heads * size.head_dim,
    )


def forward_flops(shape: Shape, work: Work) -> float:
    """Operations of one forward pass over a step's rollouts, their prompts once a group."""
    size = ModelSize(shape.matrices, shape.projection, shape.attention)
    prompts = np.full(work.prompts, work.prompt_length)
    responses = np.full((work.prompts, work.group_size), work.length)
    return train_flops(prompts, responses, size=size) / 3


def step_cost(shape: Shape, work: Work, layout: Layout) -> Cost:
    """A step of one device.

        train      4 F / n                       forward, again, backward (twice a forward)
        sample     F / n
        decoding   T (2 W / tensor) + 2 c (P Lp T + P G T (T + 1) / 2) / n
        gathered   (1 - 1/fsdp) / tensor times  T 2 W  (sampling)  and  m (2 + 2 + 4) N  (training)
        reduced    2 (1 - 1/tensor) 6 layers 2 D tokens / fsdp

    with F of :func:`forward_flops`, n devices, W weights of matrix products, N parameters, c the
    cache numbers of a token, m microbatches, bfloat16 weights and activations, float32 gradients.
    A layer has two sums over ``tensor`` in each of its three passes.
    """
    flops, weights = forward_flops(shape, work), shape.matrices + shape.projection
    tokens = work.prompts * work.prompt_length + work.rollouts * work.length
    read = work.prompts * work.prompt_length * work.length
    read += work.rollouts * work.length * (work.length + 1) / 2
    others = (1 - 1 / layout.fsdp) / layout.tensor
    sums = 2 * (1 - 1 / layout.tensor) * 6 * shape.layers
    return Cost(
        4 * flops / layout.devices,
        flops / layout.devices,
        work.length * 2 * weights / layout.tensor + 2 * shape.cache * read / layout.devices,
        others * work.length * 2 * weights,
        others * layout.microbatches * 8 * shape.parameters,
        sums * 2 * shape.width * tokens / layout.fsdp,
    )


def seconds(cost: Cost, device: Device, layout: Layout) -> Seconds:
    """Lower bounds of a step in seconds.

    Where ``fsdp`` spans nodes, a weight of another node comes into a node once, over the network
    of its devices together, and goes around there over links.
    """

    def gathering(received: float) -> float:
        nodes = layout.devices // device.slice
        if nodes <= 1:
            return received / device.link
        assert device.network is not None
        foreign = (1 - 1 / nodes) / (1 - 1 / layout.fsdp)  # share of what a device receives
        over_network = received * foreign / (layout.fsdp // nodes)
        return max(received / device.link, over_network / device.network)

    return Seconds(
        cost.train_flops / device.flops,
        gathering(cost.train_gathered) + cost.train_reduced / device.link,
        max(cost.sample_flops / device.flops, cost.decode_bytes / device.bandwidth),
        gathering(cost.decode_gathered),
    )


def between_slices(shape: Shape, layout: Layout, *, slices: int = 2) -> float:
    """Bytes that a device receives at an update where ``data`` spans slices.

    4 (2 - 2 / slices) N / n        sums of gradients, then the new weights, in float32
    """
    return 4 * (2 - 2 / slices) * shape.parameters / layout.devices


def model_of(name: str):
    """A model of the table, which computes in bfloat16; nothing is allocated."""
    from jaxrl_llm.models import ModelConfig, make_model

    return make_model(ModelConfig.from_hf(MODELS[name], dtype="bfloat16"))


def _plan(config, model, work: Work):
    from jaxrl_llm.models import param_shapes
    from jaxrl_llm.train.memory.memory_plan import PlanInputs, make_plan

    inputs = PlanInputs(model, param_shapes(model), work.prompt_length, num_held_out=256)
    return make_plan(config, inputs, accelerator=True)


def planned_bytes(model, layout: Layout, work: Work) -> int:
    """The planner's bytes on one device at most, of configs/gpu_8.py with this model and work."""
    from jaxrl_llm.train import MeshConfig

    base = load(str(ROOT / "configs" / "gpu_8.py"))
    config = dataclasses.replace(
        base,
        prompts_per_step=work.prompts,
        sampling=dataclasses.replace(
            base.sampling, group_size=work.group_size, max_new_tokens=work.length
        ),
        mesh=MeshConfig(fsdp=layout.fsdp, tensor=layout.tensor),
        microbatches=layout.microbatches,
    )
    return _plan(config, model, work).most


def fewest_devices(model, device: Device, work: Work) -> tuple[Layout, int] | None:
    """The first layout that the planner says fits, and its bytes on one device at most, if any."""
    from jaxrl_llm.models import param_shapes

    room = 0.95 * device.memory  # as `--plan` has it
    state = device_bytes(param_shapes(model)) * 3  # float32 weights and two moments
    for devices in (2**i for i in range(10)):
        if state / devices > room:
            continue
        for tensor in (1, device.tensor):
            fsdp = devices // tensor
            if not 1 <= fsdp <= work.prompts:
                continue
            parts = work.prompts // fsdp
            if planned_bytes(model, Layout(fsdp, tensor, parts), work) > room:
                continue
            for count in (2**i for i in range(parts.bit_length())):
                layout = Layout(fsdp, tensor, count)
                if (most := planned_bytes(model, layout, work)) <= room:
                    return layout, most
    return None


def compiled_plans() -> dict[str, dict[str, int]]:
    """The planner's bytes of the steps that benchmarks/compiled.py compiles, by program."""
    from benchmarks import accelerator, compiled, gpu_train
    from jaxrl_llm.models import make_model
    from jaxrl_llm.train import MeshConfig

    found = {}
    for name in compiled.PODS:
        config = load(str(ROOT / "configs" / f"{name}.py"))
        found[name] = _plan(config, model_of("Qwen3-8B"), Work())
        scanned = dataclasses.replace(model_of("Qwen3-8B").config, scan_layers=True)
        found[f"{name}_scanned"] = _plan(config, make_model(scanned), Work())
    size, base = gpu_train.SIZE, load(str(ROOT / "configs" / "gpu_8.py"))
    model = accelerator.make_model(tiny=False)
    sampling = dataclasses.replace(
        base.sampling, group_size=size["rollouts"], max_new_tokens=size["response_tokens"]
    )
    for remat in compiled.REMAT:
        config = dataclasses.replace(
            base,
            prompts_per_step=size["prompts"],
            sampling=sampling,
            mesh=MeshConfig(),
            microbatches=1,
            remat=remat,
        )
        work = Work(prompt_length=size["prompt_tokens"])
        found[f"one_gpu_{remat}"] = _plan(config, model, work)
    return {
        name: {"state": plan.resident, "step": sum(plan.step.values())}
        for name, plan in found.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--compiled", action="store_true", help="the steps of compiled.py alone")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    work = Work()
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {"models": {}, "compiled": {}}
    models = old["models"]
    for name in [] if options.compiled else options.model:
        layouts, model = {}, model_of(name)
        for kind, device in DEVICES.items():
            found = fewest_devices(model, device, work)
            layouts[kind] = found and {**found[0]._asdict(), "most_bytes": found[1]}
            print(name, kind, layouts[kind], file=sys.stderr, flush=True)
        models[name] = {"shape": shape_of(model)._asdict(), "layouts": layouts}
    plans = old["compiled"]
    if options.compiled or options.model == list(MODELS):
        plans = compiled_plans()
    result = {
        "name": "scaling",
        "workload": work._asdict(),
        "models": {name: models[name] for name in MODELS if name in models},
        "compiled": plans,
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.save:
        RESULT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
