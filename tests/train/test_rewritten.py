"""Episodes whose past is rewritten, by the environment or by the chat template."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from test_episodes import TROLL, Letters, config, one_batch
from test_linear_runs import hybrid

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet, make_renderer
from jaxrl_llm.environments import SemiOnline
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import DataConfig, SamplingConfig, make_scorer, train
from jaxrl_llm.train.experiment.rollouts import pack_pending, unpack_pending
from jaxrl_llm.train.experiment.run_data import why_no_rewrites
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.models.teachers import ServerTeacher


class Forgets(ByteTokenizer):
    """Its template writes earlier turns without what stands before their last sign or capital."""

    def chat(self, messages, *, add_generation_prompt=True):
        text = "<bos>"
        for message in messages:
            said = message["content"]
            if message["role"] == "assistant":
                said = re.split("[!-Z]", said)[-1]
            text += f"{message['role'][0]}:{said}<eos>"
        return text + ("a:" if add_generation_prompt else "")


def forgetful():
    return *tiny_model(num_layers=1), Forgets()


def plain():
    return *tiny_model(num_layers=1), ByteTokenizer()


def houses():
    turns = {"observations": "door {}?", "actions": "open {}"}
    metadata = {name: [text.format(k) for k in range(3)] for name, text in turns.items()}
    rows = (Prompt(f"house {n}", metadata=metadata, id=str(n)) for n in range(10))
    return PromptSet(rows, source="test")


def near(reply, action):
    """A tiny model says nothing that an expert says: what begins with a letter or sign is right."""
    return float(reply[:1].isascii() and reply[:1] != "")


SAMPLING = SamplingConfig(group_size=4, max_new_tokens=128, slots=8, prompt_length=48)
FORGETS = {"model": forgetful, "data": DataConfig(prompts=houses), "sampling": SAMPLING}
ALONG = {"model": plain, "data": DataConfig(prompts=houses), "sampling": SAMPLING}
RULE = jr.recipes.ui_s1(threshold=None)


def before(batch, p, g, t):
    """The tokens of a response that token t comes after."""
    if batch.packing is None:
        return np.asarray(batch.tokens)[p, g, :t].tolist()
    ends, tokens = np.asarray(batch.packing.ends)[p, g], np.asarray(batch.tokens)[p, g]
    return [int(tokens[s]) for s in range(t) if ends[s] > t]


def turns_of(batch, p, g):
    """The turns of a response: where each begins, and its tokens."""
    turn_ids, tokens = np.asarray(batch.extras["turn_ids"])[p, g], np.asarray(batch.tokens)[p, g]
    count = turn_ids.max() + 1
    return [(int(np.argmax(turn_ids == k)), tokens[turn_ids == k].tolist()) for k in range(count)]


def prompt_of(batch, p):
    return np.asarray(batch.prompt_tokens)[p][np.asarray(batch.prompt_mask)[p]].tolist()


def check_scores(experiment, params, batch):
    """The trainer sees every sampled token after what the sampler saw it after."""
    mask = np.asarray(batch.mask)
    logp = np.asarray(make_scorer(experiment.model)(params, batch))
    np.testing.assert_allclose(logp[mask], np.asarray(batch.behavior_logp)[mask], atol=1e-4)
    # One turn alone, after a prompt that is all that stands before it.
    for p, g in ((0, 0), (3, 2)):
        start, turn = turns_of(batch, p, g)[-1]
        prompt = np.array([prompt_of(batch, p) + before(batch, p, g, start)])
        tokens = np.array([[turn]])
        ones = np.ones(tokens.shape, bool)
        alone, _ = jr.train.score(
            experiment.model, params, prompt, np.ones(prompt.shape, bool), tokens, ones
        )
        np.testing.assert_allclose(
            np.asarray(alone)[0, 0], logp[p, g, start : start + len(turn)], atol=1e-4
        )


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory):
    return one_batch(tmp_path_factory.mktemp("batch"), Letters(), TROLL, **FORGETS)


@pytest.mark.slow
def test_each_turn_comes_after_what_the_template_writes(forgotten):
    experiment, params, collected = forgotten
    batch, tokenizer = collected.batch, experiment.tokenizer
    renderer, changed, appended = make_renderer(tokenizer), 0, 0
    for p, g in np.ndindex(4, 4):
        prompt = prompt_of(batch, p)
        text = tokenizer.decode(prompt, skip_special=False)
        messages = [{"role": "user", "content": text.split(":")[1].removesuffix("<eos>a")}]
        context = list(prompt)
        for start, turn in turns_of(batch, p, g):
            assert prompt + before(batch, p, g, start) == context
            stopped = turn[-1] in tokenizer.eos_ids
            said = tokenizer.decode(turn[:-1] if stopped else turn)
            low = str(sum(c < "m" for c in renderer.parse(turn).text))
            low = {"role": "user", "content": low}
            messages += [{"role": "assistant", "content": said}, low]
            if re.search("[!-Z]", "".join(m["content"] for m in messages[1::2])):
                context = tokenizer.encode(tokenizer.chat(messages))
                changed += 1
            else:
                context += turn + renderer.follow([low], stopped=stopped)
                appended += 1
    assert changed > 20 and appended > 2
    # Every token that was sampled trains, once.
    assert np.asarray(batch.mask).sum() == sum(
        len(turn) for p, g in np.ndindex(4, 4) for _, turn in turns_of(batch, p, g)
    )
    assert ((np.asarray(batch.extras["turn_ids"]) >= 0) == np.asarray(batch.mask)).all()
    check_scores(experiment, params, batch)


@pytest.mark.slow
def test_what_was_rewritten_is_as_it_was_whatever_slots_do(forgotten, tmp_path):
    experiment, _, reference = forgotten
    _, _, slow = one_batch(tmp_path, Letters(seconds=0.02), TROLL, **FORGETS)
    first, second = (dataclasses.asdict(x.batch) for x in (reference, slow))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), first, second)
    # As a checkpoint holds a batch that no step has trained on.
    stored = pack_pending(experiment, [reference])
    back = unpack_pending(stored.arrays[0], stored.notes["batches"][0])
    jax.tree.map(np.testing.assert_array_equal, back.batch, reference.batch)


@pytest.mark.slow
def test_branches_of_rewritten_episodes_go_on_from_what_they_read(tmp_path):
    recipe = jr.recipes.portool(first=2, prob=1.0)
    experiment, params, collected = one_batch(tmp_path, Letters(), recipe, **FORGETS)
    assert collected.metrics["turns"] == 3 and collected.batch.packing is not None
    check_scores(experiment, params, collected.batch)


@pytest.mark.slow
def test_the_experts_turn_stands_in_for_one_that_deviates(tmp_path):
    env = SemiOnline(near, limit=1)
    experiment, params, collected = one_batch(tmp_path, env, RULE, **ALONG)
    batch, renderer = collected.batch, make_renderer(experiment.tokenizer)
    matches = np.asarray(batch.extras["expert_match"]) > 0
    counts = np.asarray(batch.extras["turn_where"]).sum(-1)
    patched = cut = 0
    for p, g in np.ndindex(4, 4):
        turns, expected = turns_of(batch, p, g), []
        assert len(turns) == counts[p, g]
        missed = [k for k in range(3) if k < len(turns) and not matches[p, g, k]]
        # The second deviation ends it.
        assert len(turns) == (3 if len(missed) < 2 else missed[1] + 1)
        cut += len(turns) < 3
        for k, (start, turn) in enumerate(turns):
            assert before(batch, p, g, start) == expected
            patched += k + 1 < len(turns) and not matches[p, g, k]
            stopped = matches[p, g, k] and turn[-1] in renderer.stop_ids
            said = turn if matches[p, g, k] else renderer.turn(f"open {k}")
            answer = [{"role": "user", "content": f"door {k + 1}?"}]
            expected = expected + said
            expected += renderer.follow(answer, stopped=stopped or not matches[p, g, k])
    assert patched > 4 and cut > 1
    assert collected.metrics["end/stopped"] == cut / 16
    check_scores(experiment, params, batch)


@pytest.mark.slow
def test_models_and_methods_that_cannot_read_rewritten_rows_say_so(forgotten):
    experiment, params, collected = forgotten
    with pytest.raises(ValueError, match="reads_trees"):
        make_scorer(experiment.model._replace(reads_trees=False))(params, collected.batch)
    with pytest.raises(ValueError, match="the answer after each turn cannot be computed if"):
        Scorer(experiment.model).answers(params, collected.batch)


def linear():
    return *hybrid()[:2], ByteTokenizer()


def linear_and_forgetful():
    return *hybrid()[:2], Forgets()


TEACHES = {"recipe": "gkd", "teacher": linear_and_forgetful}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": linear_and_forgetful}, "the model, whose reads_trees is False"),
        (TEACHES, "the teacher, whose reads_trees is False"),
        ({"tokens_per_microbatch": 2048}, "tokens_per_microbatch cannot be used with that"),
    ],
)
def test_a_run_that_cannot_train_on_rewritten_turns_is_warned_and_ends(changes, why, tmp_path):
    warned = pytest.warns(UserWarning, match=f"drops the reasoning of earlier turns, but {why}")
    ends = f"after Letters.step of prompt .* rewrites earlier turns, but {why}"
    with warned, pytest.raises(ValueError, match=ends):
        train(config(tmp_path, Letters(), **FORGETS | changes))


def test_what_cannot_read_rewritten_turns(tmp_path):
    chosen, model = config(tmp_path, Letters()), forgetful()[0]
    assert why_no_rewrites(chosen, TROLL, model) == ""
    teacher = ServerTeacher("http://localhost:1")
    assert "reads a response as one text" in why_no_rewrites(chosen, TROLL, model, teacher)
    assert why_no_rewrites(chosen, jr.recipes.igpo(), model) == "recipe 'igpo' cannot read that"


@pytest.mark.slow
def test_an_experts_turn_ends_a_run_that_cannot_train_on_it(tmp_path):
    changes = {"recipe": RULE, **ALONG, "model": linear}
    message = r"after SemiOnline.step of prompt '\d' the chat template, or Observation.instead, rew"
    with pytest.raises(ValueError, match=message):
        train(config(tmp_path, SemiOnline(near, limit=1), **changes))
