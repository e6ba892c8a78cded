"""SmolLM2-135M-Instruct learns to call a calculator for sums that it cannot do in its head.

Commands: jaxrl-llm train configs/calculator.py:warmup
          jaxrl-llm train configs/calculator.py
Hardware: two CPU cores, 12 GB of memory, 4 GB of disk; the model, 98 MB, is downloaded once.
Method: eight steps of supervised fine-tuning on twelve worked sums show how a call is written; then
GRPO on episodes of at most three turns, whose reward is that of the answer.
Sums: three terms of two digits. A fifth of the questions is held out and never trained on.
Expected: of sampled answers to held-out sums none is right before the warm-up, one in five after
it, and more than nine in ten after the second command. Greedy decoding calls the tool sooner.
"""

import dataclasses

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet, describe_tools
from jaxrl_llm.rollout import EpisodeOptions
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

MODEL, WARMUP = "smollm2-135m-instruct", "runs/calculator_warmup"
TOOLS = [jr.environments.calculator]

prompts = jr.bind(
    jr.data.from_reasoning_gym,
    task="chain_sum",
    size=500,
    min_terms=3,
    max_terms=3,
    min_digits=2,
    max_digits=2,
)


config = TrainConfig(
    model=MODEL,
    init_from=WARMUP,
    data=DataConfig(prompts=prompts, held_out=0.2),
    environment=jr.environments.ToolEnv(TOOLS, jr.rewards.last_integer, max_turns=3),
    episodes=EpisodeOptions(max_turns=3, turn_tokens=40),
    recipe="grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=96, prompt_length=256, slots=64),
    optimizer=OptimizerConfig(learning_rate=1e-5, b2=0.99),
    checkpoint=CheckpointConfig(every=0, keep=1),  # 1.6 GB
    evaluation=EvaluationConfig(samples=2, limit=60),
    steps=16,
    prompts_per_step=8,
    microbatches=2,
    remat="dots",
    run_dir="runs/calculator",
)


def examples():
    """Twelve sums that are in no question above, each as two turns: the call, and the answer."""
    rows = []
    for n, sum_of in enumerate(
        jr.data.from_reasoning_gym(
            "chain_sum", size=12, seed=10_000, min_terms=3, max_terms=3, min_digits=2, max_digits=2
        )
    ):
        expression = sum_of.text.split(":")[1].strip(" =")
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
        asked = [{"role": "user", "content": sum_of.text}]
        called = {"role": "assistant", "content": call % expression}
        answered = [*asked, called, {"role": "tool", "content": sum_of.answer}]
        for turn, (messages, text) in enumerate(
            ((asked, call % expression), (answered, sum_of.answer))
        ):
            metadata = {"demonstration": text}
            rows.append(
                Prompt(messages[-1]["content"], sum_of.answer, metadata, f"{n}-{turn}", messages)
            )
    return PromptSet(rows, source="twelve worked sums")


warmup = dataclasses.replace(
    config,
    init_from=None,
    data=DataConfig(prompts=examples, held_out=0, system=describe_tools(TOOLS)),
    environment=None,
    episodes=EpisodeOptions(),
    reward=jr.rewards.last_integer,
    recipe="sft",
    sampling=SamplingConfig(group_size=1, max_new_tokens=64),
    optimizer=OptimizerConfig(learning_rate=1e-5, b2=0.99),
    checkpoint=CheckpointConfig(every=0, keep=1),
    evaluation=EvaluationConfig(enabled=False),
    steps=8,
    prompts_per_step=8,
    microbatches=1,
    run_dir=WARMUP,
)
