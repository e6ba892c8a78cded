"""Gymnasium in text: compared with the same environments stepped directly."""

import pytest
from rows import for_each

from jaxrl_llm.environments import Gymnasium, Parsed
from jaxrl_llm.testing import check_env

gymnasium = pytest.importorskip("gymnasium")
REPLIES = ["Left!", "to the RIGHT", "not right but left"]


class Echo(gymnasium.Env):
    """Texts in and out: answers with the text reversed; ends at "stop", cut off at "cut"."""

    action_space = gymnasium.spaces.Text(20)
    observation_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"hello {seed}", {}

    def step(self, action):
        return action[::-1], len(action) / 4, action == "stop", action in ("stop", "cut"), {}


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
    yield
    del gymnasium.registry["Echo-v0"]


def test_cart_pole_is_that_of_gymnasium():
    env = Gymnasium("CartPole-v1", ("left", "right"), instructions="Balance the pole.")
    peer = gymnasium.make("CartPole-v1")
    expected, _ = peer.reset(seed=3)
    state, seen = env.reset({}, 3)
    assert seen.messages[0]["content"].startswith("Balance the pole.\n[")
    for k in range(200):
        assert env.describe(expected) == seen.state
        expected, reward, done, _, _ = peer.step(k % 3 % 2)
        state, seen = env.step(state, Parsed(REPLIES[k % 3]))
        assert (seen.reward, seen.done) == (reward, done)
        if done:
            break
    assert done and k < 199
    peer.close()


def test_cart_pole_obeys_the_laws_of_an_environment():
    check_env(Gymnasium("CartPole-v1"), [{}, {"seed": 5}], ["0", "push 1", "neither"], turns=4)


def test_a_reply_that_names_no_action_moves_nothing():
    env = Gymnasium("CartPole-v1", ("left", "right"))
    state, _ = env.reset({}, 0)
    direct = env.step(state, Parsed("left"))[1]
    state, seen = env.step(state, Parsed("up"))
    assert seen.messages[0]["content"] == "Answer with one of: left, right"
    assert seen.reward == 0.0 and not seen.done
    assert env.step(state, Parsed("left"))[1] == direct


def test_a_state_has_one_name_whatever_was_said_in_it():
    env = Gymnasium("CartPole-v1", ("left", "right"), describe=lambda x: f"at\n    {x}")
    state, first = env.reset({"seed": None}, 7)
    assert first.messages == [{"role": "user", "content": first.state}]  # with its indentation
    state, seen = env.step(state, Parsed("up"))
    assert seen.state == first.state
    state, moved = env.step(state, Parsed("left"))
    assert env.step(state, Parsed("up"))[1].state == moved.state != first.state


def test_texts_are_actions_and_observations():
    env = Gymnasium("Echo-v0")
    check_env(env, [{}], ["abc", "cut"])
    state, seen = env.reset({"seed": 8}, 1)
    assert seen.messages[0]["content"] == "hello 8"
    state, seen = env.step(state, Parsed("abc"))
    assert (seen.messages[0]["content"], seen.reward) == ("cba", 0.75)
    _, cut = env.step(state, Parsed("cut"))
    assert (cut.done, cut.stopped) == (False, True)
    _, stop = env.step(state, Parsed("stop"))
    assert (stop.done, stop.stopped) == (True, False)


def test_a_time_limit_stops_and_is_no_end():
    env = Gymnasium("CartPole-v1", options={"max_episode_steps": 2})
    state, _ = env.reset({}, 0)
    state, seen = env.step(state, Parsed("0"))
    _, seen = env.step(state, Parsed("1"))
    assert seen.stopped and not seen.done


@for_each(
    ("env", "message"),
    [
        (Gymnasium("Pendulum-v1"), "take neither numbers nor texts"),
        (Gymnasium("CartPole-v1", ("left",)), "take 2 names; actions has 1"),
        (Gymnasium("Echo-v0", ("left",)), "take 0 names; actions has 1"),
    ],
)
def test_actions_that_cannot_be_read_are_refused(env, message):
    with pytest.raises(ValueError, match=message):
        env.reset({}, 0)
