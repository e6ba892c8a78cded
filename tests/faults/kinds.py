"""Runs that are killed: one of each way in which the loop makes a batch and learns from it."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import CONFIG, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.environments import NumberGuess
from jaxrl_llm.models import LoRAConfig
from jaxrl_llm.rollout.episodes import EpisodeOptions
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    SamplingConfig,
    TrainConfig,
)

STEPS, SHOWN = 12, 64
MESHES = {
    "one device": MeshConfig(),
    "data 2": MeshConfig(data=2),
    "fsdp 2, tensor 2": MeshConfig(fsdp=2, tensor=2),
    "fsdp 2 in two processes": MeshConfig(fsdp=2),
}
PROCESSES = {"fsdp 2 in two processes": 2}


def denoiser():
    """A model that fills in what is masked."""
    return *tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259), ByteTokenizer()


def pairs(folder: Path) -> dict[str, Any]:
    """Changes of a run on pairs of the data, whose file lies beside its folder."""
    file = folder.parent / "pairs.jsonl"
    rows = [{"prompt": f"q{n:02}", "chosen": f"{n}", "rejected": "no"} for n in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(prompts=str(file), chat=False)
    best = dataclasses.replace(saved(), best=None)
    return {"recipe": "dpo", "reward": None, "data": data, "checkpoint": best}


def episodes(folder: Path) -> dict[str, Any]:
    """Changes of a run whose rollouts are games of several turns."""
    sampling = SamplingConfig(group_size=2, max_new_tokens=64, slots=8, prompt_length=32)
    options = EpisodeOptions(turn_tokens=6)
    game = {"environment": NumberGuess(), "episodes": options, "sampling": sampling}
    return {"recipe": "gigpo", "reward": None, **game}


def saved() -> CheckpointConfig:
    """A checkpoint of every other step, and the best by greedy answers."""
    return CheckpointConfig(every=2, keep=2, best="greedy")


def with_moving_reference() -> Any:
    """A recipe whose reference is an average of earlier policies."""
    moving = jr.bind(jr.regularizers.ema_reference, rate=0.3)
    return jr.recipes.grpo(kl_coef=0.1).replace(reference=moving)


def sampled(**changes) -> Callable[[Path], dict[str, Any]]:
    """Changes that do not depend on the folder."""
    return lambda folder: changes


# By what the run is called in docs/reliability.md.
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "one batch at a time": sampled(),
    "rollouts ahead of the weights": sampled(asynchrony=AsyncConfig(max_staleness=1)),
    "slots": sampled(sampling=dataclasses.replace(CONFIG.sampling, slots=4)),
    "epochs and minibatches": sampled(recipe="grpo", epochs=2, minibatches=2),
    "critic": sampled(recipe=jr.recipes.ppo_max(critic_warmup=2)),
    "refill": sampled(recipe="dapo"),
    "replayed": sampled(recipe="rollout_replay"),
    "moving reference": sampled(recipe=with_moving_reference()),
    "adapter": sampled(lora=LoRAConfig(rank=4, alpha=16.0), recipe="grpo"),
    "population": sampled(recipe=jr.recipes.eggroll(sigma=0.05), remat="full"),
    "pairs": pairs,
    "episodes": episodes,
    "denoiser": sampled(model=denoiser, recipe=jr.recipes.diffu_grpo(epochs=1)),
}
# Which weights sample a rollout depends on time, so only questions can be compared.
TIMED = ("rollouts ahead of the weights",)
# When an environment answers decides which rows are decoded together, and with it the last bits of
# the log-probabilities that are recorded at sampling, from which these metrics come.
ROUNDED = {"episodes": ("sampler_gap", "sampler_gap_max", "sampler_kl", "sampler_ess")}
# Where a mesh has several devices, as many again sample ahead. Several processes take turns, and
# play no environment.
CASES = [
    (kind, mesh)
    for kind in KINDS
    for mesh in MESHES
    if not (mesh in PROCESSES and (kind in TIMED or kind in ROUNDED))
]


def count_devices(kind: str, mesh: str) -> tuple[int, int]:
    """How many devices train, and how many others only sample."""
    training = math.prod(dataclasses.astuple(MESHES[mesh]))
    return training, training if kind in TIMED and training > 1 else 0


def make_config(folder: Path, kind: str, mesh: str, **changes) -> TrainConfig:
    """The configuration of a run that is killed."""
    common = {
        "steps": STEPS,
        "checkpoint": saved(),
        "evaluation": EvaluationConfig(every=2),
        "samples_shown": SHOWN,
        "mesh": MESHES[mesh],
    }
    config = tiny_run(folder, **(common | KINDS[kind](folder) | changes))
    _, sampling = count_devices(kind, mesh)
    apart = dataclasses.replace(config.asynchrony, sampler_devices=sampling or None)
    return dataclasses.replace(config, asynchrony=apart)
