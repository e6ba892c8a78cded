"""A policy of ours is trained by episodes that the package `verifiers` plays, unmodified.

Its environment class, its harness and its two clients run here: the one for training renders
messages and asks for tokens, the one for evaluation asks for chats. `null`, the harness, is a
program that `uv` sets up in a process of its own.
"""

import asyncio
import dataclasses
import shutil
import socket
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import uvicorn
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import jaxrl_llm as jr
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.serve import TokenServer, make_app

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASKSET = '''
    import verifiers.v1 as vf


    class LettersTask(vf.Task):
        """The reward is the share of lower-case letters in the reply."""

        @vf.reward(weight=1.0)
        async def letters(self, trace: vf.Trace) -> float:
            text = trace.last_reply or "."
            return sum("a" <= c <= "z" for c in text) / len(text)


    class LettersTaskset(vf.Taskset[LettersTask]):
        def load(self):
            return [
                LettersTask(vf.TaskData(idx=i, prompt=text), self.config.task)
                for i, text in enumerate(["Write.", "Go on."])
            ]


    __all__ = ["LettersTaskset"]
'''
GROUP, TOKENS, STEPS = 6, 8, 2


@pytest.fixture
def vf(tmp_path, monkeypatch):
    """The package, which finds a set of tasks by the name of its module."""
    verifiers = pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed")
    if shutil.which("uv") is None:
        pytest.skip("uv, which sets up a harness's program, is not installed")
    (tmp_path / "letters_tasks.py").write_text(textwrap.dedent(TASKSET))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "letters_tasks", raising=False)
    return verifiers


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of bytes with a chat template, as transformers reads it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PretrainedTokenizer(
        backend,
        eos_ids=[backend.token_to_id("<|im_end|>")],
        template=TEMPLATE,
        special_tokens={"eos_token": "<|im_end|>"},
    )
    path = tmp_path / "tiny"
    jr.data.save_tokenizer(tokenizer, path)
    return path


@dataclasses.dataclass
class Policy:
    """A model behind HTTP, and its training."""

    model: object
    tokens: TokenServer
    tokenizer: object
    url: str


@pytest.fixture
def policy(folder):
    tokenizer = jr.data.load_tokenizer(folder)
    model, params = jr.testing.tiny_model(vocab_size=tokenizer.vocab_size)
    engine = jr.rollout.make_engine(
        model,
        rows=GROUP,
        width=1,
        prompt_length=64,
        max_new_tokens=TOKENS,
        stop_ids=tokenizer.eos_ids,
        vary=("temperature",),
    )
    tokens = TokenServer(engine, params, key=jax.random.key(0))
    renderer = jr.data.make_renderer(tokenizer)
    app = make_app(tokens, tokenizer, name="tiny", renderer=renderer, key="secret")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    yield Policy(model, tokens, tokenizer, f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    tokens.close()
    server.should_exit = True
    thread.join(30)
    listener.close()


async def play(vf, client, n):
    """Episodes of verifiers' environment of one agent: ``n`` of each task."""
    from verifiers.v1.utils.loaders import resolve_env_config

    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": "letters_tasks"}, "agent": agent}
    env = vf.SingleAgentEnv(resolve_env_config(config))
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=TOKENS)
    context = vf.ModelContext(model="tiny", client=client, sampling=sampling)
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, n=n)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    for episode in episodes:
        assert episode.ok, [e.message for t in episode.traces for e in t.errors] or episode.errors
    return [episode.traces[0] for episode in episodes]


def to_batch(traces, policy):
    """The traces of groups of GROUP as a batch; what they hold is checked on the way."""
    P = len(traces) // GROUP
    prompts = np.zeros((P, 64), np.int32), np.zeros((P, 64), bool)
    tokens, mask = np.zeros((P, GROUP, TOKENS), np.int32), np.zeros((P, GROUP, TOKENS), bool)
    logp = np.zeros((P, GROUP, TOKENS), np.float32)
    for i, trace in enumerate(traces):
        (branch,) = trace.branches
        ids, sampled = np.array(branch.token_ids), np.array(branch.sampled_mask)
        start = int(sampled.argmax())
        stop = start + int(sampled.sum())
        assert sampled[start:stop].all() and 0 < stop - start <= TOKENS
        text = policy.tokenizer.chat([{"role": "user", "content": trace.task.data.prompt}])
        assert ids[:start].tolist() == policy.tokenizer.encode(text)
        p, g, n = i // GROUP, i % GROUP, stop - start
        prompts[0][p, :start], prompts[1][p, :start] = ids[:start], True
        tokens[p, g, :n], mask[p, g, :n] = ids[start:stop], True
        logp[p, g, :n] = np.array(branch.logprobs)[start:stop]
    rewards = jnp.array([trace.reward for trace in traces]).reshape(P, GROUP)
    return jr.recipes.Batch(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        rewards=rewards,
        where=jnp.ones((P, GROUP), bool),
        prompt_tokens=jnp.asarray(prompts[0]),
        prompt_mask=jnp.asarray(prompts[1]),
        behavior_logp=jnp.asarray(logp),
    ).check()


def score(policy, params, batch):
    """Log-probabilities of a batch's tokens."""
    prompts = batch.prompt_tokens, batch.prompt_mask
    return jr.train.score(policy.model, params, *prompts, batch.tokens, batch.mask)[0]


def test_verifiers_trains_and_evaluates_a_policy(vf, policy, folder, monkeypatch):
    from renderers import DefaultRendererConfig

    monkeypatch.setenv("TINY_KEY", "secret")
    common = {"base_url": policy.url, "api_key_var": "TINY_KEY"}
    client = vf.TrainClientConfig(
        renderer=DefaultRendererConfig(), renderer_model_name=str(folder), **common
    )
    recipe, optimizer = jr.recipes.rloo(), optax.adam(2e-2)
    state = jr.train.init_state(
        policy.tokens._generation.params, optimizer, recipe, key=jax.random.key(1)
    )
    step = jr.train.make_step(policy.model, recipe, optimizer, donate=False)
    for number in range(STEPS):
        batch = to_batch(asyncio.run(play(vf, client, GROUP)), policy)
        logp = score(policy, state.params, batch)
        # What verifiers hands the trainer is what the trainer computes.
        error = jnp.where(batch.mask, logp - batch.behavior_logp, 0.0)
        assert float(jnp.abs(error).max()) < 1e-4
        state, metrics = step(state, batch)
        assert float(metrics["grad_norm"]) > 0
        # Better replies have become more probable than worse ones of the same task.
        gain = jnp.where(batch.mask, score(policy, state.params, batch) - logp, 0.0).sum(-1)
        better = batch.rewards - batch.rewards.mean(-1, keepdims=True)
        assert float((better * gain).sum()) > 0
        policy.tokens.update(state.params, version=number + 1)
    # And its client of chats, on the trained weights.
    traces = asyncio.run(play(vf, vf.EvalClientConfig(**common), 1))
    assert all(trace.num_turns == 1 and trace.num_output_tokens <= TOKENS for trace in traces)
