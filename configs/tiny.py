"""A tiny random model learns to write lower-case letters; for tests and notebooks.

Command: jaxrl-llm train configs/tiny.py
Hardware: one CPU core, less than a minute. No download.
Expected: the mean reward (share of bytes that are lower-case letters) goes from about 0.1 to above
0.8 in 30 steps, on held-out prompts as well.

Most methods train with --recipe NAME; distillation has configs/distill.py:tiny. Its rewards rarely
agree within a group, and no group fails wholly; with those of configs/tiny.py:hard most do, so that
methods act that drop such groups, or help them: jaxrl-llm train configs/tiny.py:hard
--recipe ghpo. Evolution strategies have no backward pass: --recipe eggroll --remat full.

With configs/tiny.py:denoiser it is a masked-diffusion model, for the methods of these:
jaxrl-llm train configs/tiny.py:denoiser --recipe espo.

With configs/tiny.py:inpainter that model fills in what chunks of a reference leave open:
jaxrl-llm train configs/tiny.py:inpainter --recipe igpo_inpainting.

With configs/tiny.py:predictor some tokens of the model are predictions of its own solutions:
jaxrl-llm train configs/tiny.py:predictor --recipe masa.

With configs/tiny.py:flow it is a flow policy, whose response is a point of the plane:
jaxrl-llm train configs/tiny.py:flow --recipe branch_grpo_flow. With configs/tiny.py:text_flow a
model writes a text of six bytes before it denoises: --recipe unigrpo.

With configs/tiny.py:game it plays a game of three turns instead, of which it learns what a number
is: jaxrl-llm train configs/tiny.py:game --recipe trloo.

With configs/tiny.py:subgoals each turn of the game names a subgoal, in blocks that stand for half
of the bytes: jaxrl-llm train configs/tiny.py:subgoals --recipe hiper_hae.

With configs/tiny.py:scorer it becomes a reward model, which learns from pairs that small letters
are better: jaxrl-llm train configs/tiny.py:scorer; process_reward_model and reward_model_listwise
train so too. jaxrl-llm export runs/tiny_scorer FOLDER writes it for train.reward_model(FOLDER).

With configs/tiny.py:team it passes what it writes on to a subagent, of other weights, whose answers
count too: jaxrl-llm train configs/tiny.py:team trains both by m_grpo.

With configs/tiny.py:path it plays along recorded episodes, in which an expert's turn stands in for
one that deviates: jaxrl-llm train configs/tiny.py:path --recipe ui_s1.
"""

import dataclasses
import math

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.environments import NumberGuess, Observation, SemiOnline, Subgoals, ask
from jaxrl_llm.environments.text import last_number
from jaxrl_llm.rollout import DenoisingOptions, EpisodeOptions
from jaxrl_llm.testing import ByteTokenizer, tiny_flow_model, tiny_model, tiny_text_flow_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    SamplingConfig,
    SubagentConfig,
    TrainConfig,
)


def model():
    return *tiny_model(), ByteTokenizer()


def columns(n):
    """What some methods read of a question: help, other words for it, how hard it is."""
    return {
        "hints": ["use letters", "use lower-case letters", "write: abcdef"],  # weakest first
        "demonstration": "abcdefgh"[: 3 + n % 5],
        "paraphrases": [f"please write {n}", f"{n}: write"],
        "difficulty": n / 20,
        "prior": 0.1 + 0.02 * n,
        "chosen": "abcdefgh"[: 3 + n % 5],
        "rejected": "ABCDEFGH"[: 3 + n % 4],
        "pretraining": f"the {n}. letter of the alphabet",
        "reference": "abcdefgh"[: 4 + n % 4],
        "reference_response": "aBCd" if n % 2 else "ABcD",
        "user": n % 4,
        "stage": n // 7,
        "responses": ["abcdefgh"[: 3 + n % 5], "aBcD", "ABCDEF"][: 2 + n % 2],
        "rewards": [1.0, 0.5, 0.0][: 2 + n % 2],
        "completion": "abcd" if n % 2 else "ABCD",
        "label": bool(n % 2),
        "completions": ["ab", "AB"] if n % 2 else ["AB", "ab"],
        "labels": [bool(n % 2), not n % 2],
    }


def prompts():
    every = (columns(n) for n in range(20))
    rows = (
        Prompt(f"write {n}", row["demonstration"][-1], metadata=row, id=str(n))
        for n, row in enumerate(every)
    )
    return PromptSet(rows, source="configs/tiny.py")


def share(text):
    return sum(c.isascii() and c.islower() for c in text) / max(len(text), 1)


def lower_case(prompt, completion, metadata):
    """The share of lower-case letters; the default recipe trains on the entry "reward" alone.

    Other recipes read the rest: more rewards, an answer to vote for, judges' verdicts, a text for a
    teacher, rewards and unit tests of the two halves.
    """
    reward, ends = share(completion), [len(completion) // 2, len(completion)]
    halves = [completion[: ends[0]], completion[ends[0] :]]
    return {
        "reward": reward,
        "varied": len(set(completion)) / max(len(completion), 1),
        "task": reward,
        "grounding": share(completion[: ends[0]]),
        "history": share(completion[ends[0] :]),
        "answer_ids": ord(completion[0]) % 3 if completion else -1,
        "flawed": len(set(completion)) < len(completion),
        "satisfied": completion.isascii(),
        "right_steps": 0,
        "feedback": f"{reward:.0%} of it are lower-case letters",
        "turn_ends": ends,
        "turn_rewards": [share(half) for half in halves],
        "test_passes": [[half.isascii(), share(half) > 0.5] for half in halves],
    }


config = TrainConfig(
    model=model,
    data=DataConfig(prompts=prompts),
    reward=lower_case,
    recipe="dr_grpo",
    sampling=SamplingConfig(group_size=8, max_new_tokens=8),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    checkpoint=CheckpointConfig(every=10),
    steps=30,
    max_skipped=30,  # once every letter is right, no group differs
    prompts_per_step=8,
    remat="none",
    run_dir="runs/tiny",
)


scorer = dataclasses.replace(config, reward=None, recipe="reward_model", run_dir="runs/tiny_scorer")


def mostly_wrong(prompt, completion, metadata):
    """As lower_case, but 1 where more than a quarter of the letters are right, and else 0."""
    values = lower_case(prompt, completion, metadata)
    return values | {"reward": float(values["reward"] > 0.25)}


hard = dataclasses.replace(config, reward=mostly_wrong, run_dir="runs/tiny_hard")


def denoising_model():
    return *tiny_model(causal=False, vocab_size=260, mask_id=259), ByteTokenizer()


denoiser = dataclasses.replace(
    config,
    model=denoising_model,
    recipe=jr.recipes.diffu_grpo(epochs=1),
    sampling=SamplingConfig(
        group_size=8, max_new_tokens=8, denoising=DenoisingOptions(steps=4, block_length=4)
    ),
    run_dir="runs/tiny_denoiser",
)


def long_references():
    """The prompts with references of 32 letters, which several chunks cover, before an answer."""

    def with_reference(prompt):
        columns = {**prompt.metadata, "demonstration": "abcdefgh" * 4 + "z"}
        return dataclasses.replace(prompt, answer="z", metadata=columns)

    return PromptSet(map(with_reference, prompts()), source="configs/tiny.py, long references")


inpainter = dataclasses.replace(
    denoiser,
    data=DataConfig(prompts=long_references),
    reward=mostly_wrong,
    recipe="igpo_inpainting",
    sampling=SamplingConfig(
        group_size=8, max_new_tokens=32, denoising=DenoisingOptions(steps=8, block_length=4)
    ),
    run_dir="runs/tiny_inpainter",
)


def predicting_model():
    """Of its tokens one in sixteen is a prediction in the form that masa asks for."""
    texts = (
        f'{{"math_notion": ["letter"], "pass_rate": {n % 9}, "solution_length": {n % 8 + 1}}}'
        for n in range(16)
    )
    return *tiny_model(), ByteTokenizer(dict(zip(range(240, 256), texts, strict=True)))


def without_predictions(prompt, completion, metadata):
    """As mostly_wrong, of the letters before the first prediction."""
    return mostly_wrong(prompt, completion.partition("{")[0], metadata)


predictor = dataclasses.replace(
    hard,
    model=predicting_model,
    reward=without_predictions,
    recipe="masa",
    run_dir="runs/tiny_predictor",
)


def flow_model():
    return *tiny_flow_model(), ByteTokenizer()


def to_the_right(prompt, completion, metadata):
    """From 0 to 1, the greater the first number of the point, which stands in the last line."""
    return 1 / (1 + math.exp(-float(completion.split("\n")[-1].split()[0])))


flow = dataclasses.replace(
    config,
    model=flow_model,
    recipe="flow_grpo",
    reward=to_the_right,
    sampling=SamplingConfig(group_size=16, max_new_tokens=12),
    run_dir="runs/tiny_flow",
)


def text_flow_model():
    return *tiny_text_flow_model(), ByteTokenizer()


def letters_and_right(prompt, completion, metadata):
    """Half for small letters in the text before the point, half for a point to the right."""
    text = completion.rpartition("\n")[0]
    return 0.5 * (share(text) + to_the_right(prompt, completion, metadata))


text_flow = dataclasses.replace(
    flow,
    model=text_flow_model,
    recipe="unigrpo",
    reward=letters_and_right,
    sampling=SamplingConfig(group_size=16, max_new_tokens=16),
    run_dir="runs/tiny_text_flow",
)


@dataclasses.dataclass(frozen=True)
class Game(NumberGuess):
    """Guess a number; it says of a turn what some methods read besides its reward."""

    def step(self, state, action):
        after, observation = super().step(state, action)
        guess = last_number(action.text)
        info = {
            "won": observation.info["right"],
            "step_rewards": observation.info["number"] / 10,  # of its form
            "expert_match": float(guess == (state.low + state.high) // 2),  # an expert that bisects
        }
        return after, observation._replace(info={**observation.info, **info})


game = dataclasses.replace(
    config,
    reward=None,
    environment=Game(),
    episodes=EpisodeOptions(turn_tokens=4),
    sampling=SamplingConfig(group_size=8, max_new_tokens=96, prompt_length=64),
    run_dir="runs/tiny_game",
)


class Blocks(ByteTokenizer):
    """The bytes from 128 on stand for blocks, which a model of random weights never writes."""

    pieces = (
        *("<switch>KEEP</switch>", "<switch>SWITCH</switch>"),
        *("<subgoal>low</subgoal>", "<subgoal>high</subgoal>"),
        *("<action>2</action>", "<action>4</action>", "<action>6</action>"),
    )

    def decode(self, ids, *, skip_special=True):
        def piece(i):
            special = super(Blocks, self).decode([i], skip_special=skip_special)
            return self.pieces[i % len(self.pieces)] if 128 <= i < 256 else special

        return "".join(piece(int(i)) for i in ids)


def model_of_blocks():
    return *tiny_model(num_layers=1), Blocks()


subgoals = dataclasses.replace(
    game,
    model=model_of_blocks,
    environment=Subgoals(Game(), form="three blocks"),
    recipe="hiper_hae",
    sampling=SamplingConfig(group_size=4, max_new_tokens=144, prompt_length=96),
    prompts_per_step=4,
    run_dir="runs/tiny_subgoals",
)


@dataclasses.dataclass(frozen=True)
class Relay:
    """Two turns, each passed on to a subagent; lower-case letters of both count."""

    tools = ()

    def reset(self, task, seed):
        return 0, Observation([{"role": "user", "content": task["text"]}])

    def step(self, turns, action):
        answer = ask(f"write {action.text}", check=lambda text: float(bool(text)))
        reward = (share(action.text) + share(answer)) / 4
        message = {"role": "user", "content": answer or "nothing"}
        return turns + 1, Observation([message], reward=reward, done=turns == 1)


team = dataclasses.replace(
    game,
    environment=Relay(),
    recipe="m_grpo",
    subagent=SubagentConfig(max_new_tokens=8, prompt_length=64),
    run_dir="runs/tiny_team",
)


def episodes():
    """Of an expert, who opens three doors."""
    letters = "abcdefghij"
    rows = (
        Prompt(
            f"house {n}",
            metadata={
                "observations": [f"door {letter}?" for letter in letters[n : n + 3]],
                "actions": [f"open {letter}" for letter in letters[n : n + 3]],
            },
            id=str(n),
        )
        for n in range(8)
    )
    return PromptSet(rows, source="configs/tiny.py")


def letters_first(reply, action):
    """1 where a reply begins with a small letter, as the expert's does, and else what of it is."""
    return 1.0 if share(reply[:1]) else share(reply)


path = dataclasses.replace(
    game,
    data=DataConfig(prompts=episodes),
    environment=SemiOnline(letters_first),
    sampling=SamplingConfig(group_size=8, max_new_tokens=192, prompt_length=64),
    recipe="ui_s1",
    run_dir="runs/tiny_path",
)
