"""What takes part in pairs of sampled responses, with a sampler that writes given texts."""

import jax
import numpy as np
import pytest
from rows import for_each
from tiny_run import tiny_run

from jaxrl_llm.rewards import VerifierWarning
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.rollout.types import FAILED, STOP
from jaxrl_llm.testing import ByteTokenizer
from jaxrl_llm.train import EvaluationConfig
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.sampled_pairs import sample_pairs
from jaxrl_llm.train.experiment.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")


def sampled(folder, monkeypatch, texts, reward, *, finish=(STOP,) * 3, keys=None, **options):
    """Pairs of two prompts, to each of which a sampler writes ``texts`` of three letters."""

    def sampler(experiment, group_size):
        def sample(params, key, prompts):
            if keys is not None:
                keys.append(tuple(jax.random.key_data(key).tolist()))
            rows = [[*text.encode(), ByteTokenizer.eos_ids[0]] for text in texts]
            tokens = np.tile(np.int32(rows), (len(prompts), 1, 1))
            zeros = np.zeros(tokens.shape, np.float32)
            return Rollout(
                prompt_tokens=np.ones((len(prompts), 2), np.int32),
                prompt_mask=np.ones((len(prompts), 2), bool),
                tokens=tokens,
                mask=np.ones(tokens.shape, bool),
                behavior_logp=zeros,
                model_logp=zeros,
                log_kept=zeros,
                finish=np.tile(np.int32(finish), (len(prompts), 1)),
                version=np.zeros(tokens.shape, np.int32),
            )

        assert group_size == len(texts)
        return sample

    monkeypatch.setattr(Experiment, "sampler", sampler)
    config = tiny_run(folder, reward=reward, evaluation=EvaluationConfig(), **options)
    experiment, params = load_experiment(config, trains=False)
    return sample_pairs(experiment, params, jax.random.key(0), samples=len(texts), limit=2)


async def all_but_bad(prompt, completion, metadata):
    if completion == "bad":
        raise ValueError("x")
    return 1.0


class FirstFails:
    """Fails on the first "bad" of a prompt, grades "bad" 0 and everything else 1."""

    def __init__(self):
        self.failed = set()

    async def __call__(self, prompt, completion, metadata):
        if completion == "bad" and prompt not in self.failed:
            self.failed.add(prompt)
            raise ValueError("x")
        return float(completion != "bad")


@for_each("on_error", ["drop", "zero"])
def test_an_answer_that_nobody_graded_is_not_wrong(tmp_path, monkeypatch, on_error):
    options = {"reward_on_error": on_error}
    with pytest.warns(VerifierWarning):
        pairs = sampled(tmp_path, monkeypatch, ["abc", "bad", "abd"], all_but_bad, **options)
    assert (pairs.rows, pairs.failed, pairs.no_wrong, pairs.no_right) == ([], 2, 2, 0)
    # The second of two equal answers is graded, and takes the place of the first.
    with pytest.warns(VerifierWarning):
        pairs = sampled(tmp_path, monkeypatch, ["abc", "bad", "bad"], FirstFails(), **options)
    assert [(row["chosen"], row["rejected"]) for row in pairs.rows] == [("abc", "bad")] * 2
    assert pairs.failed == 2


def test_non_finite_logits_end_the_sampling_of_pairs(tmp_path, monkeypatch):
    told = r"^sample_pairs: the logits of a response to prompt 'q\d\d' are non-finite.$"
    with pytest.raises(ValueError, match=told):
        finish = (STOP, FAILED, STOP)
        sampled(tmp_path, monkeypatch, ["abc", "bad", "abd"], lambda *_: 1.0, finish=finish)


def test_each_batch_of_prompts_is_sampled_with_a_key_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.train.experiment.sampled_pairs._AT_ONCE", 3)  # one prompt
    keys = []
    sampled(tmp_path, monkeypatch, ["abc", "bad", "abd"], lambda *_: 1.0, keys=keys)
    assert len(keys) == len(set(keys)) == 2
