"""A flow policy on mixtures of the plane learns to draw from one of four modes.

Commands: jaxrl-llm train configs/flow.py
          jaxrl-llm train configs/flow.py --recipe branch_grpo_flow --run-dir runs/branch_grpo_flow
Hardware: two CPU cores, half a minute. No download.
Method: a velocity network of 30 thousand parameters is trained on the mixtures by flow matching,
before the run; then Flow-GRPO, on a reward that is high near one mode.
Expected: the held-out reward goes from 0.2 to 0.95; docs/diffusion.md has it of each method.
A prompt is a letter: which of sixteen mixtures, by its rotation. The reward wants the mode of the
first quadrant. The network has seen the mixtures that are held out, and no reward for them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.models import FlowConfig, make_flow_model, pretrain_flow
from jaxrl_llm.testing import ByteTokenizer
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

MIXTURES, MODES, RADIUS, SPREAD = 16, 4, 2.0, 0.25


def center(mixture, mode):
    """The middle of a mode, ``[..., 2]``."""
    angle = 2 * math.pi * (mode + mixture / MIXTURES) / MODES
    return RADIUS * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def draw(key, size=512):
    """Points of random mixtures, and their prompts."""
    keys = jax.random.split(key, 3)
    mixture = jax.random.randint(keys[0], (size,), 0, MIXTURES)
    mode = jax.random.randint(keys[1], (size,), 0, MODES)
    x = center(mixture, mode) + SPREAD * jax.random.normal(keys[2], (size, 2))
    return x, (ord("a") + mixture)[:, None]


@functools.cache
def pretrained(steps=1500):
    made = make_flow_model(FlowConfig(width=64, depth=3))
    params = made.init(jax.random.key(0))
    return made, pretrain_flow(made, params, jax.random.key(1), draw, steps=steps)


def model():
    return *pretrained(), ByteTokenizer()


def prompts():
    wanted = np.asarray(center(np.arange(MIXTURES), 0)).tolist()
    rows = [Prompt(chr(ord("a") + m), metadata={"center": x}) for m, x in enumerate(wanted)]
    return PromptSet(rows, source="configs/flow.py")


def near_the_mode(prompt, completion, metadata):
    """From 0 to 1, by how near the last latent is to the mode of the first quadrant."""
    x = np.array(completion.split(), np.float64)
    distance = np.sum((x - metadata["center"]) ** 2)
    return float(np.exp(-distance / (2 * 0.5**2)))


config = TrainConfig(
    model=model,
    data=DataConfig(prompts=prompts, held_out=0.25, chat=False),
    reward=near_the_mode,
    recipe="flow_grpo",
    sampling=SamplingConfig(group_size=16, max_new_tokens=12),
    optimizer=OptimizerConfig(learning_rate=3e-3),
    checkpoint=CheckpointConfig(every=0, keep=1),
    evaluation=EvaluationConfig(samples=16),
    steps=60,
    prompts_per_step=8,
    minibatches=1,  # one update a batch, by each method
    remat="none",
    samples_every=20,
    run_dir="runs/flow",
)

no_text = dataclasses.replace(
    config,
    recipe=jr.recipes.unigrpo(steps=None),
    epochs=1,  # the preset has two
    run_dir="runs/flow_no_text",
)
