"""SmolLM2-135M-Instruct plays text adventures: it follows the way that is told and takes the coin.

Command: jaxrl-llm train configs/textworld.py --recipe gigpo --run-dir runs/textworld_gigpo
         jaxrl-llm train configs/textworld.py
Needs: pip install 'jaxrl_llm[train,envs]'; the model, 98 MB, is downloaded once.
Hardware: two CPU cores, 10 GB of memory.
Method: GRPO; or GiGPO, whose steps are credited among the visits of one state of a game.
Games: 72 of TextWorld's coin collector; a third is held out and never trained on. Three commands
win a game, of at most six turns; commands drawn at random win about one in ten.
"""

from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.environments import TextWorld
from jaxrl_llm.rollout.episodes import EpisodeOptions
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
)

GAMES = 72


def prompts():
    games = (Prompt(f"game {i}", metadata={"seed": i}, id=f"coin-{i}") for i in range(GAMES))
    return PromptSet(games, source="TextWorld's coin collector")


config = TrainConfig(
    model="smollm2-135m-instruct",
    data=DataConfig(prompts=prompts, held_out=1 / 3),
    # The first line of each text, and the commands: a third of the tokens of the full text.
    environment=TextWorld(
        "coin_collector",
        {"level": 3},
        instructions="Answer with one of the commands and nothing else.",
        brief=True,
        folder="runs/textworld_games",
    ),
    episodes=EpisodeOptions(max_turns=6, turn_tokens=12),
    recipe="grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=320, prompt_length=192, slots=16),
    optimizer=OptimizerConfig(learning_rate=2e-5, b2=0.99),
    checkpoint=CheckpointConfig(every=20, keep=1),  # 1.6 GB each
    evaluation=EvaluationConfig(samples=4),
    steps=24,
    prompts_per_step=4,
    remat="none",
    dtype="auto",
    run_dir="runs/textworld",
)
