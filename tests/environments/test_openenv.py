"""OpenEnv: the example that its command writes, served on loopback."""

import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from jaxrl_llm.environments import OpenEnv, Parsed
from jaxrl_llm.rollout.episodes import EpisodeOptions
from jaxrl_llm.testing import check_env

pytest.importorskip("openenv")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what the package warns of itself
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openenv")
    command = [sys.executable, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (app,) = folder.glob("**/server/app.py")
    # As the comment at that line advises for more sessions.
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=8"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    server = subprocess.Popen(command, cwd=app.parents[1])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def test_obeys_the_laws_of_an_environment(url):
    env = OpenEnv(url, describe="echoed_message", live=4)
    check_env(env, [{"text": "say"}], ["hello", "a longer message"], turns=3)
    env.close()


def test_messages_rewards_and_forks(url):
    env = OpenEnv(url, describe="echoed_message", live=4)
    state, seen = env.reset({}, 0)
    assert "ready" in seen.messages[0]["content"]
    ways = [env.step(state, Parsed(text))[1] for text in ("abc", "a longer message")]
    assert [one.messages[0]["content"] for one in ways] == ["abc", "a longer message"]
    assert [one.reward for one in ways] == pytest.approx([0.3, 1.0])  # a tenth a letter, at most 1
    env.close()


def test_actions_and_observations_by_functions(url):
    env = OpenEnv(
        url,
        action=lambda reply: {"message": reply.text.upper()},
        describe=lambda fields: f"{fields['message_length']} letters",
    )
    _, seen = env.step(env.reset({"reset": {"episode_id": "x"}}, 0)[0], Parsed("hello"))
    assert seen.messages[0]["content"] == "5 letters"
    env.close()


def test_an_action_that_the_server_refuses_and_a_server_that_is_not_there(url):
    env = OpenEnv(url, action="msg")
    with pytest.raises(RuntimeError, match="message"):
        env.step(env.reset({}, 0)[0], Parsed("hello"))
    with pytest.raises(ConnectionError):
        OpenEnv("http://127.0.0.1:1").reset({}, 0)


def test_a_late_step_ends_before_a_run_abandons_it_with_its_session():
    assert OpenEnv("http://127.0.0.1:1").timeout < EpisodeOptions().seconds


def test_a_lost_session_does_not_go_on_in_another_one(url, monkeypatch):
    """The client connects anew, to an environment that was never reset."""
    env = OpenEnv(url, describe="echoed_message")
    state, _ = env.reset({}, 0)

    def client():
        ((_, session),) = env._instances._waiting
        return session.client

    lost = client()
    lost._run(lost._ws.close())
    with pytest.raises(ConnectionError, match=r"OpenEnv: the session with .* was lost"):
        env.step(state, Parsed("hello"))
    env.step(env.reset({}, 0)[0], Parsed("hello"))
    env.close()
    state, _ = env.reset({}, 0)
    lost, step = client(), type(client()).step

    def closing(fields):
        lost._run(lost._ws.close())
        return step(lost, fields)

    monkeypatch.setattr(lost, "step", closing)
    with pytest.raises(ConnectionError, match=r"OpenEnv: the session with .* was lost"):
        env.step(state, Parsed("hello"))
    # The state is what it was, and a new session replays its actions.
    assert env.step(state, Parsed("hello"))[1].messages[0]["content"] == "hello"
    env.close()
