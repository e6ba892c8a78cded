"""A masked-diffusion model of 130 thousand parameters learns to spell words backward, from nothing.

Commands: jaxrl-llm train configs/diffusion.py
          jaxrl-llm train configs/diffusion.py:espo
Hardware: two CPU cores, minutes. No download.
Task: spell_backward of reasoning-gym, words of nine letters. The prompt is the word alone, without
the sentence around it; the reward is the task's own, the share of letters in their places.
Method: the lower bound of the likelihood of right answers; then a method of diffusion policies,
from the checkpoint that the first run leaves, on the reward: improved is diffu-GRPO, coupled is
coupled-GRPO, espo is ESPO. Each makes one pass over a batch, where its paper makes 12, 2 and 8, and
keeps its reference.
Expected: about 0.85 of the letters are right after the first run, 0.02 to 0.05 more after another.
A response has ten tokens, the last of which ends it; it is uncovered in five steps.
`python -m benchmarks.diffusion_training` measures both runs; docs/diffusion.md has what it found.
"""

import dataclasses

import jax

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet, from_reasoning_gym
from jaxrl_llm.models import ModelConfig, make_model
from jaxrl_llm.rollout import DenoisingOptions
from jaxrl_llm.testing import ByteTokenizer
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

TASK, LETTERS = "spell_backward", 9
SHAPE = ModelConfig(
    architecture="qwen3",
    vocab_size=260,
    width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    mlp_width=128,
    max_length=64,
    tied=True,
    qk_norm=True,
    causal=False,
    mask_id=259,
)


def model():
    made = make_model(SHAPE)
    return made, made.init(jax.random.key(0)), ByteTokenizer()


def prompts(size=4000):
    every = from_reasoning_gym(TASK, size=size, min_word_len=LETTERS, max_word_len=LETTERS)
    rows: dict[str, Prompt] = {}
    for each in every:  # a word may be drawn twice
        word, known = each.metadata["entry"]["metadata"]["word"], {"demonstration": each.answer}
        rows.setdefault(word, Prompt(word, each.answer, {**each.metadata, **known}, each.id))
    return PromptSet(rows.values(), source=f"reasoning-gym task {TASK!r}")


supervised = jr.recipes.sft().replace(
    likelihood=jr.diffusion.elbo_likelihood(samples=2, draws="stratified")
)

config = TrainConfig(
    model=model,
    data=DataConfig(prompts=prompts, held_out=0.05, chat=False),
    reward=jr.rewards.reasoning_gym(TASK),
    recipe=supervised,
    sampling=SamplingConfig(
        group_size=1, max_new_tokens=LETTERS + 1, denoising=DenoisingOptions(steps=5)
    ),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
    checkpoint=CheckpointConfig(every=0, keep=1),
    evaluation=EvaluationConfig(samples=4),
    steps=300,
    prompts_per_step=64,
    remat="none",
    samples_every=100,
    run_dir="runs/diffusion",
)


improved = dataclasses.replace(
    config,
    init_from=config.run_dir,
    recipe=jr.recipes.diffu_grpo(epochs=1),
    sampling=SamplingConfig(
        group_size=8, max_new_tokens=LETTERS + 1, denoising=DenoisingOptions(steps=5)
    ),
    optimizer=OptimizerConfig(learning_rate=2e-4),
    evaluation=EvaluationConfig(samples=4),
    steps=150,
    prompts_per_step=16,
    samples_every=50,
    run_dir="runs/diffusion_improved",
)


coupled = dataclasses.replace(
    improved,
    recipe=jr.recipes.coupled_grpo(epochs=1, sync_every=None),
    run_dir="runs/diffusion_coupled",
)


# With one mask and the mean of a group, where the preset has two and the mean of the others.
espo = dataclasses.replace(
    improved,
    recipe=jr.recipes.espo(samples=1, epochs=1).replace(
        advantage=jr.stateless(jr.advantages.dr_grpo)
    ),
    run_dir="runs/diffusion_espo",
)
