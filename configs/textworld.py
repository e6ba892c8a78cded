"""SmolLM2-135M-Instruct plays text adventures: it follows the way that is told and takes the coin.

Commands: jaxrl-llm train configs/textworld.py:warmup
          jaxrl-llm train configs/textworld.py --recipe gigpo --run-dir runs/textworld_gigpo
          jaxrl-llm train configs/textworld.py
Needs: pip install 'jaxrl_llm[train,envs]'; the model, 98 MB, is downloaded once.
Hardware: two CPU cores, 20 GB of memory.
Method: some steps of supervised fine-tuning on twelve other games that are won show how a command
is written; then GRPO, or GiGPO, whose steps are credited among the visits of one state of a game.
Games: 72 of TextWorld's coin collector; a third is held out and never trained on. Three commands
win a game, of at most six turns; commands drawn at random win one game in eight.
"""

import dataclasses

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.environments import Parsed, TextWorld
from jaxrl_llm.rollout.episodes import EpisodeOptions
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

MODEL, WARMUP = "smollm2-135m-instruct", "runs/textworld_warmup"
GAMES, SHOWN = 72, 12
# The first line of each text, and the commands: a third of the tokens of the full text.
ENVIRONMENT = TextWorld(
    "coin_collector",
    {"level": 3},
    instructions="Answer with one of the commands and nothing else.",
    brief=True,
    folder="runs/textworld_games",
)


def prompts():
    games = (Prompt(f"game {i}", metadata={"seed": i}, id=f"coin-{i}") for i in range(GAMES))
    return PromptSet(games, source="TextWorld's coin collector")


config = TrainConfig(
    model=MODEL,
    init_from=WARMUP,
    data=DataConfig(prompts=prompts, held_out=1 / 3),
    environment=ENVIRONMENT,
    episodes=EpisodeOptions(max_turns=6, turn_tokens=6),
    recipe="grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=224, prompt_length=160, slots=64),
    optimizer=OptimizerConfig(learning_rate=3e-5, b2=0.99),
    checkpoint=CheckpointConfig(every=0, keep=1),  # 1.6 GB
    evaluation=EvaluationConfig(samples=2),
    steps=12,
    prompts_per_step=8,
    remat="dots",
    run_dir="runs/textworld",
)


def examples():
    """The commands that win twelve games that are none of the above, each as a row."""
    rows = []
    for seed in range(GAMES, GAMES + SHOWN):
        state, seen = ENVIRONMENT.reset({"seed": seed}, seed)
        messages = []
        for turn, command in enumerate(ENVIRONMENT.walkthrough({"seed": seed})):
            messages += seen.messages
            asked, shown = messages[-1]["content"], {"demonstration": command}
            rows.append(Prompt(asked, "", shown, f"coin-{seed}-{turn}", list(messages)))
            messages.append({"role": "assistant", "content": command})
            state, seen = ENVIRONMENT.step(state, Parsed(command))
    return PromptSet(rows, source="twelve games that are won")


warmup = dataclasses.replace(
    config,
    init_from=None,
    data=DataConfig(prompts=examples, held_out=0),
    environment=None,
    episodes=EpisodeOptions(),
    reward=jr.rewards.last_integer,
    recipe="sft",
    sampling=SamplingConfig(group_size=1, max_new_tokens=16),
    checkpoint=CheckpointConfig(every=0, keep=1),
    evaluation=EvaluationConfig(enabled=False),
    steps=3,
    prompts_per_step=8,
    run_dir=WARMUP,
)
