"""TextWorld: games of its generators, compared with the games played directly."""

import dataclasses
import pickle
import runpy
from pathlib import Path

import pytest

from jaxrl_llm.environments import Parsed, TextWorld
from jaxrl_llm.testing import check_env

textworld = pytest.importorskip("textworld")
pytestmark = pytest.mark.filterwarnings("ignore")  # what the package warns of itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("games"))


@pytest.fixture(scope="module")
def coins(folder):
    return TextWorld("coin_collector", {"level": 3}, folder=folder)


@pytest.mark.slow
def test_obeys_the_laws_of_an_environment(coins):
    replies = [*coins.walkthrough({}, 5), "undo"]
    check_env(coins, [{"text": "play"}], replies, seeds=[5], turns=3)


def test_a_walkthrough_wins_and_equals_the_game_played_directly(coins, folder):
    commands = coins.walkthrough({"seed": 5})
    (path,) = Path(folder).glob("*-5.z8")
    names = ("admissible_commands", "feedback", "score", "won", "facts")
    peer = textworld.start(str(path), textworld.EnvInfos(**dict.fromkeys(names, True)))
    peer.reset()
    state, seen = coins.reset({"seed": 5}, 99)
    assert "coin" in seen.messages[0]["content"] and "$$" not in seen.messages[0]["content"]
    for k, command in enumerate(commands):
        options = seen.messages[0]["content"].rpartition("Commands: ")[2].split(", ")
        assert command in options
        state, seen = coins.step(state, Parsed(f"I will {command.upper()}."))
        expected, score, done = peer.step(command)
        assert seen.messages[0]["content"].startswith(expected.feedback.split("\n")[1].strip())
        assert seen.done == done == (k == len(commands) - 1)
        assert seen.reward == (score if done else 0.0)
        assert seen.info["won"] == float(expected.won)
        assert seen.state == "; ".join(sorted(map(str, expected.facts)))
        if not done:
            listed = seen.messages[0]["content"].rpartition("Commands: ")[2]
            assert listed.split(", ") == expected.admissible_commands
    peer.close()


def test_a_fork_and_a_resume_see_the_same_game(coins):
    first, *rest = coins.walkthrough({}, 5)
    state, _ = coins.step(coins.reset({}, 5)[0], Parsed(first))
    saved, other = pickle.loads(pickle.dumps((state, coins)))
    for reply in ("look", *rest):
        before = state
        state, seen = coins.step(state, Parsed(reply))
        assert coins.step(before, Parsed(reply))[1] == seen
        saved, again = other.step(saved, Parsed(reply))
        assert again == seen and saved == state
    assert seen.info["won"] == 1.0


def test_a_brief_game_shows_the_first_line_and_the_commands(coins):
    env = dataclasses.replace(coins, brief=True, instructions="Play.")
    state, seen = env.reset({}, 5)
    first, goal, room, commands = seen.messages[0]["content"].splitlines()
    assert first == "Play." and "coin" in goal and commands.startswith("Commands: ")
    assert room.startswith("-=") and room.endswith("=-")
    state, again = env.step(state, Parsed("look"))
    assert again.messages[0]["content"] == f"{room}\n{commands}"
    assert again.state == seen.state == coins.reset({}, 5)[1].state


def test_the_status_line_of_the_interpreter_is_not_shown(coins):
    state, _ = coins.reset({}, 5)
    _, seen = coins.step(state, Parsed("look"))
    lines = seen.messages[0]["content"].splitlines()
    assert lines[0].startswith("-=") and sum("=-" in line for line in lines) == 1


def test_words_that_are_no_command_never_reach_the_game(coins):
    state, first = coins.reset({}, 5)
    for reply in ("undo", "quit", "restart", "tw-trace-actions", ""):
        state, seen = coins.step(state, Parsed(reply))
        assert seen.messages[0]["content"].startswith("That is none of the commands.\nCommands: ")
        assert (seen.reward, seen.done, seen.state) == (0.0, False, first.state)


@pytest.mark.slow
def test_dense_rewards_of_another_generator_add_up_to_one(folder):
    settings = {"rewards": "dense", "goal": "brief", "test": False}
    env = TextWorld("simple", settings, folder=folder)
    state, _ = env.reset({}, 1)
    total, earned = 0.0, 0
    for command in env.walkthrough({}, 1):
        state, seen = env.step(state, Parsed(command))
        total, earned = total + seen.reward, earned + (seen.reward > 0)
    assert seen.done and total == pytest.approx(1.0) and earned > 3


@pytest.mark.slow
def test_treasure_hunts_end_with_the_wrong_object_too(folder):
    env = TextWorld("treasure_hunter", {"level": 2}, folder=folder)
    state, seen = env.reset({}, 5)
    _, won = env.step(state, Parsed(env.walkthrough({}, 5)[0]))
    assert (won.reward, won.done, won.info["won"]) == (1.0, True, 1.0)


def test_a_game_is_made_once(coins, folder, monkeypatch):
    coins.reset({}, 5)
    monkeypatch.setattr(textworld.generator, "compile_game", None)
    coins.reset({}, 5)
    assert not [path for path in Path(folder).iterdir() if path.is_dir()]


def test_an_unknown_challenge_is_refused(folder):
    with pytest.raises(ValueError, match="no challenge 'coins'; there are coin_collector, "):
        TextWorld("coins", folder=folder).reset({}, 0)


@pytest.mark.slow
def test_the_main_job_and_its_warm_up_play_different_games(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it stores the games
    names = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "textworld.py"))
    config, rows = names["config"], names["prompts"]()
    assert len(set(rows.texts)) == len({row.metadata["seed"] for row in rows}) == len(rows) == 72
    # Two games of the twelve, whose seeds follow those of the main job.
    examples = names["examples"]
    monkeypatch.setitem(examples.__globals__, "SHOWN", 2)
    shown = examples()
    assert [row.id for row in shown] == [f"coin-{n}-{turn}" for n in (72, 73) for turn in range(3)]
    assert {row.metadata["demonstration"] for row in shown} >= {"take coin"}
    env, row = config.environment, rows[3].metadata
    first = env.reset(row, 0)[1].messages[0]["content"]
    assert len({first, *(row.messages[0]["content"] for row in shown)}) == 3
    assert len(env.walkthrough(row)) == 3 < config.episodes.max_turns
    # Four characters are about a token.
    assert len(first) < 4 * config.sampling.prompt_length
