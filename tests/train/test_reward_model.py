"""A head on a model: trained on pairs and steps, resumed, exported, and the reward of a policy."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from batch_makers import write_rows
from exact_resume import assert_resumes
from helpers import batch_with
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli import main
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import TextEncoder
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoRAConfig,
    SamplingConfig,
    train,
)
from jaxrl_llm.train.experiment.run_models import with_trained
from jaxrl_llm.train.logging.results import read_jsonl
from jaxrl_llm.train.models.score import Scorer

pytestmark = pytest.mark.usefixtures("shared_programs")

PAIRS = [
    {"prompt": f"q{n % 10}", "chosen": "abc"[: 1 + n % 3], "rejected": "XY"[: 1 + n % 2]}
    for n in range(20)
]
STEPS = [
    {"prompt": f"q{n % 10}", "completions": ["ab", "XY"][:: 1 - 2 * (n % 2)], "labels": [1, 0]}
    for n in range(20)
]
for row in STEPS:
    row["labels"] = [step.islower() for step in row["completions"]]


def of_data(run_dir, path, recipe="reward_model", **changes):
    changes = {
        "data": DataConfig(prompts=path, chat=False),
        "reward": None,
        "recipe": recipe,
        "evaluation": EvaluationConfig(),
        "sampling": SamplingConfig(max_new_tokens=8),
    } | changes
    return tiny_run(run_dir, **changes)


CONFIG = """
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import *
def model():
    return *tiny_model(num_layers=1), ByteTokenizer()
config = TrainConfig(model=model, data=DataConfig(prompts={path!r}, chat=False), recipe={recipe!r},
    sampling=SamplingConfig(max_new_tokens=8), optimizer=OptimizerConfig(learning_rate=1e-2),
    steps={steps}, prompts_per_step=4, remat="none", run_dir={run_dir!r})
"""


def trained_by_command(folder, recipe, rows, steps):
    """A folder with an exported reward model, and with the folder of its run."""
    path, run_dir = write_rows(folder / "rows.jsonl", rows), str(folder / f"{recipe}_run")
    config = folder / "config.py"
    config.write_text(CONFIG.format(path=path, recipe=recipe, run_dir=run_dir, steps=steps))
    assert main(["train", str(config)]) == 0
    assert main(["export", run_dir, str(folder / recipe)]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A reward model of responses."""
    return trained_by_command(tmp_path_factory.mktemp("rm"), "reward_model", PAIRS, 6)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A reward model of steps."""
    return trained_by_command(tmp_path_factory.mktemp("prm"), "process_reward_model", STEPS, 20)


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    """A reward model whose head was drawn, large enough to tell responses apart."""
    model, params = jr.models.with_head(*tiny_model(num_layers=1), key=jax.random.key(0))
    params["head"] = {"kernel": params["head"]["kernel"] * 100}
    folders = {head: tmp_path_factory.mktemp(head) for head in ("response", "step")}
    for head, folder in folders.items():
        jr.models.save_safetensors(params, folder, config=model.config, head=head)
    return folders


def value_at_the_end(model, params, tokens):
    """What the head says of a row's last token: by the decoder alone, without a batch."""
    row = jnp.array([[tokens]])
    context = jr.models.AttentionContext(jnp.ones(row.shape, bool))
    hidden, _ = applied(model.apply)(params, row, jnp.arange(len(tokens))[None, None], context)
    return model.values(params, hidden)[0, 0, -1, 0]


applied = functools.cache(jax.jit)


def last_evaluation(run_dir):
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [row["held_out"]["pairs"] for row in rows if "held_out" in row]


@pytest.mark.slow
def test_a_head_learns_pairs_and_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    config = of_data(tmp_path / "run", path, checkpoint=CheckpointConfig(every=2, keep=3))
    through = train(config)
    after = through.after["pairs"]
    assert after.mean == 1.0 and (after.questions, after.samples) == (2, 2)
    assert after.calibration_error < through.before["pairs"].calibration_error
    assert after.brier < 0.05 and "calibration error" in str(after)
    steps = [row for row in through.history if "loss" in row]
    # One of pairs that the head cannot tell apart; centering adds next to nothing.
    np.testing.assert_allclose(steps[0]["loss"], np.log(2), atol=0.02)
    assert steps[-1]["pair_margin"] > 1.0 and steps[0]["tokens"] > 0
    assert_resumes(config, through, tmp_path / "again", first=2)


@pytest.mark.slow
def test_an_adapter_trains_beside_the_head(tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    config = of_data(tmp_path / "run", path, lora=LoRAConfig(rank=4), steps=8)
    result = train(config)
    assert set(result.state.params) == {"model", "head"}
    assert result.after["pairs"].mean == 1.0


@pytest.mark.slow
def test_steps_are_graded_one_by_one(graded):
    first, last = last_evaluation(graded / "process_reward_model_run")
    assert first["mean"] < last["mean"] == 1.0 and last["samples"] == 1
    reward = jr.train.reward_model(
        graded / "process_reward_model", tokenizer=ByteTokenizer(), chat=False
    )
    scores = jr.rewards.score(reward, ["q1"] * 3, ["ab\n\nXY", "ab", "XY\n\nab"])
    steps = [[x > 0.5 for x in each] for each in scores.details["turn_rewards"]]
    assert steps == [[True, False], [True], [False, True]]
    assert [list(x) for x in scores.details["turn_ends"]] == [[4, 6], [2], [4, 6]]
    least = [min(each) for each in scores.details["turn_rewards"]]
    np.testing.assert_allclose(scores.rewards, least, rtol=1e-6)


@pytest.mark.slow
def test_an_exported_reward_model_scores_what_was_trained(exported):
    reward = jr.train.reward_model(
        str(exported / "reward_model"), tokenizer=ByteTokenizer(), chat=False, batch_size=2
    )
    settings = json.loads((exported / "reward_model" / "config.json").read_text())
    assert settings["pad_token_id"] == ByteTokenizer().pad_id
    texts = ["abc", "X", "a", "XY", ""]
    scores = jr.rewards.score(reward, ["q1", "q2", "q3", "q4", "q5"], texts).rewards
    assert min(scores[[0, 2]]) > max(scores[[1, 3]])
    # The same text in another batch, and by the arrays themselves.
    assert abs(reward("q3", "a", {}) - scores[2]) < 1e-5
    model, params = jr.models.load_reward_model(exported / "reward_model")
    mask = jnp.array([[[True, True, False, False]]])
    batch = batch_with(jnp.array([[[*b"a", 257, 0, 0]]]), [[*b"q3"]], mask=mask)
    values = jax.jit(Scorer(model).values)(params, batch)
    np.testing.assert_allclose(values[0, 0, 1, 0], scores[2], rtol=1e-5)
    # The value of a token has seen it.
    alone = value_at_the_end(model, params, [*b"q3a", 257])
    np.testing.assert_allclose(alone, scores[2], rtol=1e-5)


@pytest.mark.slow
def test_a_conversation_is_scored_and_judged_as_a_whole(headed, tmp_path):
    """As it was trained: rows whose last message alone is equal have other rewards."""
    reward = jr.train.reward_model(str(headed["response"]), tokenizer=ByteTokenizer())
    last = {"role": "user", "content": "and then?"}
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}, last]
        for text in ("q1", "XYZ")
    ]
    prompts = [Prompt(last["content"], messages=talk) for talk in talks]
    asked = [prompt.text for prompt in prompts], ["abc"] * 2, [x.metadata for x in prompts]
    scores = jr.rewards.score(reward, *asked).rewards
    encoder = TextEncoder(ByteTokenizer(), 500)
    model, params = jr.models.load_reward_model(headed["response"])
    for talk, seen in zip(talks, scores, strict=True):
        prompt, reply = encoder.conversation(talk, "p"), encoder.response("abc", ends=True)
        alone = value_at_the_end(model, params, prompt + reply)
        np.testing.assert_allclose(alone, seen, rtol=1e-4)
    assert scores[0] != scores[1]
    # A column of that name with another conversation, such as one that is answered, is not read.
    answered = [{"messages": [*talk, {"role": "assistant", "content": "abc"}]} for talk in talks]
    plain = [reward(last["content"], "abc", row) for row in (*answered, {})]
    np.testing.assert_allclose(plain, plain[0], rtol=1e-6)
    model, params = tiny_model(num_layers=1)
    jr.models.save_safetensors(params, tmp_path, config=model.config)
    both = Scripted(tmp_path, compare=True)
    twice = [x * 2 for x in asked]
    assert jr.rewards.score(both, *twice).rewards.tolist() == [0.5] * 4
    assert len(both.seen) == 4 and not any("q1" in x and "XYZ" in x for x in both.seen)
    alone = Scripted(tmp_path)
    jr.rewards.score(alone, *asked)
    assert "User: q1\n\nAssistant: ok\n\nUser: and then?" in alone.seen[0]


class Templated(ByteTokenizer):
    """With a template that writes on after a turn's stop token, and before a last reply."""

    def chat(self, messages, *, add_generation_prompt=True, tools=None):
        if not messages[-1]["content"]:
            raise ValueError("a message is empty")
        texts = [f"<bos>{m['role']}\n{m['content']}<eos>\n" for m in messages]
        if messages[-1]["role"] == "assistant":
            begin = "<bos>assistant\n"
            texts[-1] = texts[-1].replace(begin, begin + "<think>\n\n</think>\n\n")
        return "".join(texts) + ("<bos>assistant\n" if add_generation_prompt else "")


def test_a_reward_model_of_transformers_is_read_at_the_end_of_the_conversation(tmp_path):
    model, params = jr.models.with_head(*tiny_model(num_layers=1), key=jax.random.key(0))
    params["head"] = {"kernel": params["head"]["kernel"] * 100}
    jr.models.save_safetensors(params, tmp_path, config=model.config, head="response")
    tokenizer, config = Templated(), tmp_path / "config.json"
    reward_model = functools.partial(jr.train.reward_model, tmp_path, tokenizer=tokenizer)
    ours, saved = json.loads(config.read_text()), {"transformers_version": "5.23.0"}
    assert ours["read_at"] == "stop"
    plain = {name: value for name, value in ours.items() if name != "read_at"}
    # An export, the same saved by transformers, an export without the mark, a model from elsewhere.
    contents, read_at = (ours, ours | saved, plain, plain | saved), []
    for content in contents:
        config.write_text(json.dumps(content))
        read_at.append(reward_model().read_at)
    assert read_at == ["stop", "stop", "stop", "end"]
    assert reward_model(chat=False).read_at == "stop"

    system, asked, last = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "q"), ("user", "and then?"))
    )
    reply = {"role": "assistant", "content": "ab"}

    def written(*messages, **options):
        return tokenizer.chat([system, *messages], **options)

    talks = (asked, reply), (asked, reply, last, reply)
    texts = {"end": [written(*talk, add_generation_prompt=False) for talk in talks]}
    # As the pairs that such a model is trained on: the template's turn up to its stop token.
    texts["stop"] = [text.removesuffix("\n") for text in texts["end"]]
    assert all(text.endswith("</think>\n\nab<eos>") for text in texts["stop"])
    rows = ["q", "and then?"], ["ab", "ab"], [{}, {"messages": [asked, reply, last]}]
    rewards = {
        "end": reward_model(system="Be brief.", batch_size=2),
        "stop": reward_model(system="Be brief.", batch_size=2, read_at="stop"),
    }
    for name, reward in rewards.items():
        for text, value in zip(texts[name], reward.score_batch(*rows), strict=True):
            alone = value_at_the_end(model, params, tokenizer.encode(text))
            np.testing.assert_allclose(alone, value, rtol=1e-4)
    assert "read_at='stop'" in rewards["stop"].in_full and "read_at" not in rewards["end"].in_full
    # A completion that the template refuses has no reward; a prompt that it refuses is an error.
    (failure,) = rewards["end"].score_batch(["q"], [""], [{}])
    assert failure.reason == "raised ValueError: a message is empty"
    with pytest.raises(ValueError, match="a message is empty"):
        rewards["end"].score_batch([""], ["ab"], [{}])


# What AutoModelForSequenceClassification and AutoModelForTokenClassification of transformers 5.23.0
# (torch 2.13.0) compute of the folders below: at the last token, and at every one plus the bias.
LOGITS = [-1.3863, -2.2687, -2.7517, -1.4319, -0.1499, -1.7983]


@for_each("head, bias", [("response", 0.0), ("step", 0.5)])
def test_a_stored_reward_model_is_a_classifier_of_transformers(tmp_path, head, bias):
    model, params = jr.models.with_head(*tiny_model(num_layers=2), key=jax.random.key(0))
    params["head"] = {"kernel": params["head"]["kernel"] * 100}
    if bias:
        params["head"]["bias"] = jnp.array([bias])
    jr.models.save_safetensors(params, tmp_path, config=model.config, head=head)
    model, params = jr.models.load_reward_model(tmp_path)
    row = jnp.array([[[5, 9, 200, 17, 33, 250]]])
    context = jr.models.AttentionContext(jnp.ones(row.shape, bool))
    hidden, _ = jax.jit(model.apply)(params, row, jnp.arange(6)[None, None], context)
    values = model.values(params, hidden)[0, 0, :, 0]
    np.testing.assert_allclose(values - bias, LOGITS, atol=1e-4)
    settings = json.loads((tmp_path / "config.json").read_text())
    kind = {"response": "Sequence", "step": "Token"}[head]
    assert settings["architectures"] == [f"LlamaFor{kind}Classification"]
    assert "pad_token_id" not in settings
    with pytest.raises(
        ValueError, match="pad_id is only for a reward model, and must be below its"
    ):
        jr.models.save_safetensors(params, tmp_path, config=model.config, head=head, pad_id=259)


def test_a_reward_model_has_no_output_matrix_of_words(tmp_path):
    model, params = tiny_model(num_layers=1, tied=False)
    recipe = jr.recipes.reward_model()
    config = of_data(tmp_path / "run", write_rows(tmp_path / "rows.jsonl", PAIRS))
    row = jnp.arange(4)[None, None]
    context, values = jr.models.AttentionContext(jnp.ones((1, 1, 4), bool)), []
    for name in ("a/name", lambda: None):
        changed = dataclasses.replace(config, model=name)
        headed, trained = with_trained(changed, recipe, model, params)
        assert ("head" in trained["model"]) == (name != "a/name")
        hidden, _ = headed.apply(trained, row, row, context)
        values.append(headed.values(trained, hidden))
    np.testing.assert_array_equal(*values)


@pytest.mark.slow
def test_packed_values_are_the_padded_ones():
    model, params = jr.models.with_head(*tiny_model(num_layers=2), key=jax.random.key(1))
    params["head"]["kernel"] *= 100
    batch = jax.tree.map(np.array, jr.testing.make_case().batch)
    batch.tokens[:, 1, :2] = batch.tokens[:, 0, :2]  # a beginning that a tree has once
    lengths = np.broadcast_to(np.array([3, 4, 1, 2])[:, None], (*batch.mask.shape[:2], 1))
    batch = batch.replace(mask=np.arange(6) < lengths)
    score = jax.jit(Scorer(model).values)
    values = score(params, batch)
    assert jnp.std(values) > 0.1
    for packing in ("always", "tree"):
        packed, metrics = jr.train.pack_batch(batch, packing, model=model)
        assert metrics["packed"] < 1
        np.testing.assert_allclose(score(params, packed), values, atol=1e-5)


@for_each(
    "changes, message",
    [
        ({"reward": lambda *_: 1.0}, "reward has no effect: recipe 'reward_model' trains a reward"),
        ({"sampling": SamplingConfig(temperature=0.5)}, "temperature has no effect"),
    ],
)
def test_what_a_reward_model_has_no_use_for_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        of_data(tmp_path, "pairs.jsonl", **changes)


def test_bad_folders_and_recipes_are_named(tmp_path, headed):
    model, params = tiny_model(num_layers=1)
    jr.models.save_safetensors(params, tmp_path / "lm", config=model.config)
    with pytest.raises(ValueError, match="is a language model without a head"):
        jr.train.reward_model(tmp_path / "lm")
    config = tmp_path / "lm" / "config.json"
    settings = json.loads(config.read_text()) | {"architectures": ["Qwen2ForProcessRewardModel"]}
    config.write_text(json.dumps(settings))
    for read in (jr.train.reward_model, jr.models.load_reward_model):
        told = f"^{read.__name__}: .* of class 'Qwen2ForProcessRewardModel', which is not sup"
        with pytest.raises(ValueError, match=told):
            read(tmp_path / "lm")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    response, read = headed["response"], jr.train.reward_model
    for call, told in (
        (lambda: read(tmp_path / "run"), "is the folder of a run; export its model first"),
        (lambda: read(response, separator="x"), "separator='x' has no effect with a reward model"),
        (lambda: read(headed["step"], read_at="end"), "no effect with a reward model of steps"),
        (lambda: read(response, chat=False, read_at="end"), "no effect without a chat template"),
        (lambda: jr.train.judge(response), "is a reward model, which writes nothing"),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    recipe = jr.recipes.reward_model()
    with pytest.raises(ValueError, match="which writes no responses: the collector must take them"):
        recipe.replace(collector=None)
    term = jr.bind(jr.regularizers.kl_to_reference, coef=0.1)
    with pytest.raises(ValueError, match="has no log-probabilities; it cannot have regularizers"):
        recipe.replace(regularizers=(term,))
    reward = read(response, tokenizer=ByteTokenizer(), chat=False)
    with pytest.warns(jr.rewards.VerifierWarning, match="needs 502 tokens of a context of 256"):
        scores = jr.rewards.score(reward, ["q", "q"], ["a", "a" * 500])
    assert scores.failed.tolist() == [False, True]


@pytest.mark.slow
def test_commands_for_text_refuse_a_reward_model(exported, capsys):
    run = str(exported / "reward_model_run")
    assert main(["sample", run, "q"]) == 2
    assert "trained a reward model, which writes no text" in capsys.readouterr().err
    assert main(["evaluate", run, "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert pairs == last_evaluation(exported / "reward_model_run")[-1]


class Scripted(jr.train.judge):
    """A judge that prefers small letters, without a model."""

    def write(self, messages):
        self.seen = list(messages)
        said = []
        for message in messages:
            answers = [part.split("\n")[0] for part in message.split("Answer:\n")[1:]]
            low = [answer.islower() for answer in answers]
            if len(answers) == 1:
                said.append("Yes." if low[0] else "no" if answers[0].isupper() else "?")
            else:
                said.append("first" if low[0] > low[1] else "second" if low[1] > low[0] else "?")
        return said


def test_verdicts_of_a_judge_are_rewards(tmp_path):
    model, params = tiny_model(num_layers=1)
    jr.models.save_safetensors(params, tmp_path, config=model.config)
    with pytest.warns(jr.rewards.VerifierWarning, match="is not judged on prompt 2"):
        alone = jr.rewards.score(Scripted(tmp_path), ["q"] * 3, ["a", "B", "1"])
    assert alone.rewards.tolist() == [1.0, 0.0, 0.0] and alone.failed.tolist() == [0, 0, 1]
    both = Scripted(tmp_path, compare=True)
    with pytest.warns(jr.rewards.VerifierWarning, match="has none to compare with on prompt 5"):
        scores = jr.rewards.score(both, ["p", "q", "p", "q", "q", "r"], list("aBCabZ"))
    # Of q: B against a, a against b, b against B, each in both orders; r has one completion.
    assert scores.rewards.tolist() == [1.0, 0.0, 0.0, 0.75, 0.75, 0.0]
    assert scores.failed.tolist() == [False] * 5 + [True] and len(both.seen) == 8
    with pytest.raises(TypeError, match="judge: parse must be a function"):
        jr.train.judge(tmp_path, parse="yes")
    for made in (jr.train.judge, jr.train.reward_model):  # of what a config's model may be
        with pytest.raises(TypeError, match=r"model must be the name or folder of a model; got"):
            made(tiny_model)
    real = jr.train.judge(tmp_path, tokenizer=ByteTokenizer(), max_new_tokens=4, batch_size=2)
    texts = real.write(["a", "bc", "d" * 400])
    assert texts[2] is None and texts[:2] == [real.write([x])[0] for x in ("a", "bc")]


def test_a_judge_stops_where_its_template_ends_a_turn(tmp_path, monkeypatch):
    class OtherEnd(ByteTokenizer):
        eos_ids = (258,)

    model, params = tiny_model(num_layers=1)
    jr.models.save_safetensors(params, tmp_path, config=model.config)
    monkeypatch.setattr(
        "jaxrl_llm.train.models.model_rewards.make_sampler",
        lambda *args, stop_ids, **options: stop_ids,
    )
    for chat, ends in ((True, (258, 257)), (False, (258,))):
        assert jr.train.judge(tmp_path, tokenizer=OtherEnd(), chat=chat)._sample == ends


@pytest.mark.slow
def test_a_tokenizer_may_have_tokens_that_the_model_lacks(tmp_path):
    """As that of Gemma 3 1B, whose last token stands for images and is in no text."""
    words = {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<image>"])
    backend.add_tokens(["<sound>"])  # which texts may spell
    tokenizer = PretrainedTokenizer(backend, eos_ids=[0])
    model, params = tiny_model(num_layers=1, vocab_size=4)
    _, scorer = jr.models.with_head(model, params, key=jax.random.key(0))
    jr.models.save_safetensors(scorer, tmp_path / "rm", config=model.config, head="response")
    jr.models.save_safetensors(params, tmp_path / "lm", config=model.config)
    options = {"tokenizer": tokenizer, "chat": False}
    reward = jr.train.reward_model(tmp_path / "rm", **options)
    asked = ["a"] * 3, ["a b", "<image>", "b <sound>"]
    warning, told = (
        jr.rewards.VerifierWarning,
        "holds token 5, outside the vocabulary of 4 on prompt",
    )
    with pytest.warns(warning, match=told):
        scores = jr.rewards.score(reward, *asked)
    assert scores.failed.tolist() == [False, False, True]
    assert np.isfinite(scores.rewards).all() and scores.rewards[0] != 0
    judged = jr.train.judge(tmp_path / "lm", max_new_tokens=2, parse=lambda _: 0.5, **options)
    assert jr.rewards.score(judged, asked[0][:2], asked[1][:2]).rewards.tolist() == [0.5, 0.5]
    for compare in (False, True):  # the two others have each other
        options |= {"parse": lambda _: 1.0, "compare": compare}
        judged = jr.train.judge(tmp_path / "lm", max_new_tokens=2, **options)
        with pytest.warns(jr.rewards.VerifierWarning, match="is not judged on prompt 2"):
            scores = jr.rewards.score(judged, *asked)
        assert scores.failed.tolist() == [False, False, True]
        assert scores.rewards.tolist() == ([0.5, 0.5, 0.0] if compare else [1.0, 1.0, 0.0])


JUDGED = """
import dataclasses
import jaxrl_llm as jr
from tiny_run import CONFIG
reward = jr.train.judge("{folder}", tokenizer=jr.testing.ByteTokenizer(), compare=True)
config = dataclasses.replace(CONFIG, reward=reward)
"""


@pytest.mark.slow
def test_a_judge_that_compares_is_refused_one_response_to_a_prompt(tmp_path, capsys):
    model, params = tiny_model(num_layers=1)
    jr.models.save_safetensors(params, tmp_path / "judge", config=model.config)
    options = {"reward": Scripted(tmp_path / "judge", compare=True), "steps": 1}
    told = "a judge that compares needs several responses to a prompt"
    nurl = jr.curation.ladder(jr.curation.tier_messages, plain=1)
    with pytest.raises(ValueError, match=f"^evaluation: {told}, and a greedy evaluation has one;"):
        tiny_run(tmp_path / "run", evaluation=EvaluationConfig(), **options)
    one = SamplingConfig(group_size=1, max_new_tokens=4)
    with pytest.raises(ValueError, match=f"^sampling: {told}; got group_size 1"):
        tiny_run(tmp_path / "run", recipe="reinforce_pp", sampling=one, **options)
    with pytest.raises(ValueError, match=f"^config: {told}, but .* 'remax' .* a greedy response"):
        tiny_run(tmp_path / "run", recipe="remax", **options)
    told = rf"^config: {told}, but .* has responses of a group graded apart"
    for recipe in (
        "icpo",
        "luffy_shaping",
        "dars",
        jr.recipes.grpo().replace(collector=jr.curation.partial_rollouts()),
        jr.recipes.grpo().replace(collector=jr.curation.hinted(nurl)),
    ):
        with pytest.raises(ValueError, match=told):
            train(tiny_run(tmp_path / "run", recipe=recipe, **options))
    for recipe in ("grpo", "dapo", "xpo"):  # other groups, each graded as a whole
        tiny_run(tmp_path / "run", recipe=recipe, **options)
    whole = jr.curation.hinted(jr.curation.ladder(jr.curation.tier_messages))
    tiny_run(tmp_path / "run", recipe=jr.recipes.grpo().replace(collector=whole), **options)
    (row,) = train(tiny_run(tmp_path / "run", **options)).history
    assert row["reward"] == 0.5 and row["reward_failures"] == 0  # each comparison has a winner
    tiny_run(tmp_path / "alone", evaluation=EvaluationConfig(), reward=Scripted(tmp_path / "judge"))
    config = tmp_path / "config.py"
    config.write_text(JUDGED.replace("{folder}", str(tmp_path / "judge")))
    assert main(["evaluate", str(config)]) == 2
    assert "has a judge that compares responses to one prompt" in capsys.readouterr().err
