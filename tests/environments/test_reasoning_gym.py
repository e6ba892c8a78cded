"""reasoning-gym as an environment of one turn: its questions, its scores."""

import pytest

from jaxrl_llm.data import from_reasoning_gym
from jaxrl_llm.environments import Parsed, ReasoningGym
from jaxrl_llm.testing import check_env

reasoning_gym = pytest.importorskip("reasoning_gym")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_obeys_the_laws_of_an_environment():
    rows = from_reasoning_gym("chain_sum", size=2, **SUMS)
    tasks = [{}, *(row.metadata for row in rows)]
    check_env(ReasoningGym("chain_sum", SUMS), tasks, ["4", "<answer>-4</answer>"])


def test_questions_and_scores_are_those_of_the_package():
    env = ReasoningGym("chain_sum", SUMS)
    for seed in range(4):
        dataset = reasoning_gym.create_dataset("chain_sum", size=1, seed=seed, **SUMS)
        state, seen = env.reset({}, seed)
        assert seen.messages == [{"role": "user", "content": dataset[0]["question"]}]
        for answer in (dataset[0]["answer"], "999", f"it is {dataset[0]['answer']}"):
            _, scored = env.step(state, Parsed(answer))
            assert scored.reward == dataset.score_answer(answer, dataset[0])
            assert scored.done and not scored.messages


def test_a_row_has_its_question():
    row = from_reasoning_gym("chain_sum", size=1, seed=9, **SUMS)[0]
    state, seen = ReasoningGym("chain_sum").reset(row.metadata, 0)
    assert seen.messages[0]["content"] == row.text
    assert ReasoningGym("chain_sum").step(state, Parsed(row.answer))[1].reward == 1.0


def test_an_unknown_task_and_a_second_answer_are_refused():
    with pytest.raises(ValueError, match="no task 'chain_summ'"):
        ReasoningGym("chain_summ").reset({}, 0)
    env = ReasoningGym("chain_sum")
    state, _ = env.step(env.reset({}, 0)[0], Parsed("1"))
    with pytest.raises(ValueError, match="has been answered"):
        env.step(state, Parsed("1"))
