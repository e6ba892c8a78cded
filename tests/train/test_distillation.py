"""A policy learns from another model: in the step, over HTTP, from a file, across tokenizers."""

import contextlib
import dataclasses
import functools
import json
import socketserver
import threading
import unicodedata
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch_with
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core.kernels.soft_cap import soft_cap
from jaxrl_llm.core.packing import Tree
from jaxrl_llm.data import Cursor, Prompt, PromptSet
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainConfig,
    init_state,
    make_step,
    train,
)
from jaxrl_llm.train.config import find_prompts
from jaxrl_llm.train.rollouts import collect_rollouts
from jaxrl_llm.train.score_batch import Teacher
from jaxrl_llm.train.setup import load_experiment
from jaxrl_llm.train.teachers import (
    AlignedTeacher,
    ModelTeacher,
    ServerTeacher,
    StoredTeacher,
    TokenScores,
    host_scores,
    tokenizer_digest,
    write_scores,
)

pytestmark = pytest.mark.usefixtures("shared_programs")

WEIGHT = 0.2  # of the teacher in what MiniLLM samples
ANSWERS = ["abcdef", "ghi", "jklm", "nopqr"]
TOK = ByteTokenizer()
ENCODER = TextEncoder(TOK, 100, False)
URL = "http://127.0.0.1:1"


def student():
    return *tiny_model(num_layers=1), ByteTokenizer()


def teacher():
    """Two layers and another width: only the vocabulary is the student's."""
    return *tiny_model(seed=7, width=48), ByteTokenizer()


def prompts():
    rows = [
        Prompt(f"say {i}", metadata={"demonstration": x, "pretraining": f"{x} {i} {x}"})
        for i, x in enumerate(ANSWERS)
    ]
    return PromptSet(rows, source="test")


def zero(prompt, completion, metadata):
    return 0.0


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        model=student,
        teacher=teacher,
        data=DataConfig(prompts=prompts, chat=False),
        reward=zero,
        recipe="gkd",
        sampling=SamplingConfig(group_size=2, max_new_tokens=8),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        checkpoint=CheckpointConfig(every=0),
        evaluation=EvaluationConfig(enabled=False),
        prompts_per_step=2,
        steps=6,
        remat="none",
        run_dir=str(tmp_path / "run"),
    )


def batch_of(P=2, G=2, T=5):
    rng = np.random.default_rng(0)
    mask = np.arange(T) < np.array([[5, 3], [4, 0]])[..., None]
    tokens = jnp.asarray(rng.integers(0, 250, (P, G, T)), jnp.int32)
    prompts = rng.integers(0, 250, (P, 3), dtype=np.int32)
    batch = batch_with(tokens, prompts, mask=mask, where=mask.any(-1))
    return jax.tree.map(jnp.asarray, batch)


@functools.partial(jax.jit, static_argnums=0)
def whole_logits(model, params, row):
    context = jr.models.AttentionContext(jnp.ones((1, 1, len(row)), bool))
    hidden, _ = model.apply(params, row[None, None], jnp.arange(len(row))[None, None], context)
    return soft_cap(hidden[0, 0] @ model.output_matrix(params).T, model.logit_cap)


def log_probs(model, params, batch):
    """Of all tokens ``[P, G, T, V]``, each row scored alone by the full logits."""
    P, G, T = batch.tokens.shape
    out = np.zeros((P, G, T, model.config.vocab_size))
    for p, g in np.ndindex(P, G):
        row = jnp.concatenate([batch.prompt_tokens[p], batch.tokens[p, g]])
        logits = np.asarray(whole_logits(model, params, row), np.float64)
        logits = logits[batch.prompt_tokens.shape[1] - 1 : -1]
        out[p, g] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return out


def divergence(s, t, beta):
    if beta in (0, 1):
        p, q = (s, t) if beta else (t, s)
        return np.sum(np.exp(p) * (p - q), -1)
    m = np.log((1 - beta) * np.exp(s) + beta * np.exp(t))
    return sum(w * np.sum(np.exp(x) * (x - m), -1) for w, x in ((1 - beta, s), (beta, t)))


@pytest.mark.slow
def test_policy_and_teacher_sample_together_beside_texts(config):
    """MiniLLM: half of the groups are drawn from 0.8 policy + 0.2 teacher, half are texts."""
    config = dataclasses.replace(config, recipe="minillm", prompts_per_step=4)
    experiment, params = load_experiment(config)
    state = experiment.collector.init(4)
    made = collect_rollouts(
        experiment, params, jax.random.key(0), Cursor(), state, number=0, version=0
    )
    batch = jax.tree.map(np.asarray, made.batch)
    np.testing.assert_array_equal(batch.extras["texts"], [[False] * 2] * 2 + [[True] * 2] * 2)
    assert made.metrics["rollouts_sampled"] == 4 and made.cursor.index == 2
    assert int(made.collector_state[1]) == 0  # four texts of four rows: it begins anew
    tokenizer = ByteTokenizer()
    texts = [f"{x} {i} {x}"[:8] for i, x in enumerate(ANSWERS)]  # as long as responses are
    assert [tokenizer.decode(x.tolist()) for x in batch.tokens[2:].reshape(4, -1)] == texts
    stop = tokenizer.eos_ids[0]
    assert batch.prompt_tokens[2:][batch.prompt_mask[2:]].tolist() == [stop, stop]
    own, other = student()[:2], teacher()[:2]
    assert experiment.samplers.rollouts is not experiment.samplers.sampled
    p, t = (
        np.exp(np.take_along_axis(log_probs(*pair, row), row.tokens[..., None], -1)[..., 0])
        for pair in (own, other)
        for row in [short_prompts(batch)]
    )
    mask = batch.mask[:2]
    expected = np.log((1 - WEIGHT) * p + WEIGHT * t)
    np.testing.assert_allclose(batch.behavior_logp[:2][mask], expected[mask], atol=1e-4)
    assert np.abs(np.log(p) - expected)[mask].max() > 0.01  # the policy alone is another


def short_prompts(batch):
    """The sampled groups of a batch, whose prompts have one length."""
    width = int(batch.prompt_mask[0].sum())
    assert (batch.prompt_mask[:2].sum(-1) == width).all()
    rows = batch_with(batch.tokens[:2], batch.prompt_tokens[:2, :width], mask=batch.mask[:2])
    return jax.tree.map(jnp.asarray, rows)


@pytest.mark.slow
def test_the_loop_trains_minillm_in_slots_as_well(config):
    """A step of each way to sample, which agree."""
    losses = []
    for slots in (None, 4):
        sampling = dataclasses.replace(config.sampling, slots=slots)
        changed = dataclasses.replace(
            config, recipe="minillm", sampling=sampling, steps=1, run_dir=f"{config.run_dir}{slots}"
        )
        result = train(changed)
        losses.append([row["loss"] for row in result.history])
        assert int(result.state.collector_state[1]) == 2 and result.history[0]["skipped"] == 0
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "top", "caps"),
    [
        (0.0, None, (None, None)),
        (0.3, None, (2.0, 1.0)),
        (1.0, None, (None, None)),
        (0.5, 3, (None, None)),
    ],
)
def test_the_loss_of_a_step_is_the_divergence_of_the_two_models(beta, top, caps):
    (model, params, _), (other, theirs, _) = student(), teacher()
    model, other = model._replace(logit_cap=caps[0]), other._replace(logit_cap=caps[1])
    batch, optimizer = batch_of(), optax.sgd(0.1)
    recipe = jr.recipes.gkd(beta=beta, top=top)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    step = make_step(
        model, recipe, optimizer, teacher=Teacher(other, theirs), microbatches=2, donate=False
    )
    _, metrics = step(state, batch)
    s, t = (log_probs(*pair, batch) for pair in ((model, params), (other, theirs)))
    if top is not None:
        best = np.argsort(-t, axis=-1)[..., :top]

        def cut(x):
            x = np.take_along_axis(x, best, -1)
            return np.concatenate([x, np.log1p(-np.exp(x).sum(-1, keepdims=True))], -1)

        s, t = cut(s), cut(t)
    want = divergence(s, t, beta)[np.asarray(batch.mask)].mean()
    np.testing.assert_allclose(metrics["loss"], want, rtol=2e-4)
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_a_student_approaches_its_teacher_in_the_loop(config):
    losses = [row["loss"] for row in train(dataclasses.replace(config, steps=12)).history]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
def test_a_teacher_may_have_rows_of_no_token(config, tmp_path):
    def padded():
        model, params = tiny_model(seed=7, width=48, vocab_size=288)
        return model, params, ByteTokenizer()

    def cut():
        model, size = tiny_model(width=48)[0], ByteTokenizer().vocab_size
        params = jax.tree.map(lambda x: x[:size] if x.shape[0] == 288 else x, padded()[1])
        return model, params, ByteTokenizer()

    config = dataclasses.replace(config, steps=1)
    runs = [
        train(dataclasses.replace(config, teacher=of, run_dir=str(tmp_path / of.__name__)))
        for of in (padded, cut)
    ]
    assert runs[0].history[0]["loss"] == runs[1].history[0]["loss"] > 0


@pytest.mark.slow
def test_a_token_that_the_policy_lacks_is_named(config):
    class Elsewhere(Counting):
        def score(self, prompts, responses, *, top=0):
            every = super().score(prompts, responses, top=top)
            return [x._replace(top_ids=x.top_ids + 300) for x in every]

    recipe = jr.recipes.gkd(top=2)
    with pytest.raises(ValueError, match="names token 30., but the policy has 259 tokens"):
        train(dataclasses.replace(config, teacher=Elsewhere(top=2), recipe=recipe, steps=1))


def test_an_evaluation_loads_no_teacher(config):
    def never():
        raise AssertionError("loaded")

    config = dataclasses.replace(config, teacher=never)
    assert load_experiment(config, trains=False)[0].teacher is None
    with pytest.raises(AssertionError, match="loaded"):
        load_experiment(config)


@pytest.mark.slow
def test_a_resumed_run_wants_the_same_teacher(config, tmp_path):
    train(dataclasses.replace(config, steps=1))
    other = dataclasses.replace(config, steps=2, teacher=lambda: (*tiny_model(), ByteTokenizer()))
    with pytest.raises(Exception, match="another teacher"):
        train(other, resume=True, allow_changed=True)


@pytest.mark.slow
def test_stored_scores_train_as_the_model_does(config, tmp_path):
    tok, path = ByteTokenizer(), str(tmp_path / "scores.npz")
    model, params, _ = teacher()
    config = dataclasses.replace(
        config,
        recipe=jr.recipes.gkd(beta=0.0, top=5, offline=True),
        sampling=SamplingConfig(group_size=1, max_new_tokens=8),
        steps=2,
    )
    rows = [row["demonstration"] for row in (p.metadata for p in find_prompts(prompts))]
    experiment, _ = load_experiment(config)
    by_text = {q.prompt.text: q.tokens for q in experiment.train}
    texts = [p.text for p in prompts()]
    answers = [experiment.encoder.response(x, ends=True) for x in rows]
    write_scores(
        path, ModelTeacher(model, params), [by_text[x] for x in texts], answers, top=5,
        tokenizer=tok,
    )  # fmt: skip
    online = train(config)
    # Its responses come with their rewards, so that it runs without one.
    alone = {"teacher": path, "run_dir": str(tmp_path / "stored"), "reward": None}
    stored = train(dataclasses.replace(config, **alone))
    with pytest.raises(ValueError, match="there are no pairs to compare; set a reward"):
        dataclasses.replace(config, **alone, evaluation=EvaluationConfig())
    a, b = (x.history[-1]["loss"] for x in (online, stored))
    np.testing.assert_allclose(a, b, rtol=1e-4)
    write_scores(path, Counting(top=5), [by_text[x] for x in texts], answers, top=5, tokenizer=tok)
    with pytest.raises(Exception, match="another teacher, or with one in another precision: the"):
        train(dataclasses.replace(config, **alone, steps=3), resume=True)

    with pytest.raises(ValueError, match=r"5 best tokens at each position, not 9"):
        StoredTeacher(path).score([[1]], [[2]], top=9)
    more = dataclasses.replace(config, teacher=path, data=DataConfig(prompts=others, chat=False))
    with pytest.raises(ValueError, match="was made from another data set: .* prompt 'other 0'"):
        load_experiment(more)
    with pytest.raises(ValueError, match="was made with another tokenizer"):
        StoredTeacher(path).check(Upper(), [])


@for_each(
    "recipe",
    ["iw_opd", "span_distillation", jr.recipes.gkd(top=2), jr.recipes.gkd(top=2, demonstrations=1)],
)
def test_a_file_of_scores_does_not_teach_a_recipe_that_samples(config, tmp_path, recipe):
    path = str(tmp_path / "scores.npz")
    write_scores(path, Counting(top=2), [[1]], [[3, 4]], top=2, tokenizer=TOK)
    spans = recipe == "span_distillation"
    stored = AlignedTeacher(StoredTeacher(path), Pairs()) if spans else path
    told = (
        r"samples responses, but .*StoredTeacher.* has scores only of stored ones; .*offline=True"
    )
    with pytest.raises(ValueError, match=told):
        load_experiment(dataclasses.replace(config, teacher=stored, recipe=recipe))


def test_a_response_that_a_file_of_scores_lacks_is_named_before_the_first_batch(config, tmp_path):
    path, tok = str(tmp_path / "scores.npz"), ByteTokenizer()
    read = [tok.encode(prompt.text) for prompt in prompts()]
    answers = [[*tok.encode(x), *tok.eos_ids] for x in ANSWERS]
    config = dataclasses.replace(
        config,
        teacher=path,
        recipe=jr.recipes.gkd(top=2, offline=True),
        sampling=SamplingConfig(group_size=1, max_new_tokens=8),
    )

    def write(responses):
        write_scores(path, Counting(top=2), read, responses, top=2, tokenizer=tok)

    write([*answers[:3], answers[3][:-1]])  # without the stop token
    with pytest.raises(ValueError, match="no scores for a response of 6 tokens to prompt 'say 3'"):
        load_experiment(config)
    write(answers)
    assert isinstance(load_experiment(config)[0].teacher, StoredTeacher)


def test_a_file_of_scores_is_written_whole_and_read_whole(tmp_path, monkeypatch):
    path, tok = tmp_path / "new" / "scores.npz", ByteTokenizer()

    def write(teacher, responses):
        prompts = [[1]] * len(responses)
        write_scores(path, teacher, prompts, responses, top=2, tokenizer=tok)

    write(Counting(top=2), [[3, 4]])
    before = path.read_bytes()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="the disk"):
        patched.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("the disk")))
        write(Counting(top=2), [[3, 4], [5]])
    assert path.read_bytes() == before and [x.name for x in path.parent.iterdir()] == [path.name]
    with pytest.raises(ValueError, match=r"path must end in .npz; got 'scores'"):
        write_scores("scores", Counting(top=2), [[1]], [[3]], top=2, tokenizer=tok)
    whole = dict(np.load(path))
    for changes, words in (
        ({"logp": np.zeros(3)}, r"logp has shape \(3,\) for 2 tokens"),
        ({"top_ids": np.zeros((2, 5))}, r"shapes \(2, 5\) and \(2, 2\)"),
        ({"top_logp": np.zeros(2)}, r"top_logp has shape \(2,\) for 2 tokens"),
        ({"starts": np.array([0, 1, 2])}, "no bounds of the 1 responses"),
        ({"keys": None}, "it has no keys"),
    ):
        other = {k: v for k, v in (whole | changes).items() if v is not None}
        np.savez(path, **other)
        with pytest.raises(ValueError, match=f"was not written by write_scores: .*{words}"):
            StoredTeacher(path)
    for data in (b"", b"PK\x03\x04 no archive"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is not a file of teacher scores"):
            StoredTeacher(path)


def test_a_file_of_scores_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = Counting(top=2)
    write_scores("~/new/scores.npz", made, [[1]], [[3, 4]], top=2, tokenizer=TOK)
    assert [str(x) for x in Path().iterdir()] == ["new"]
    assert StoredTeacher("~/new/scores.npz").score([[1]], [[3, 4]])[0].logp.shape == (2,)


def others():
    return PromptSet([Prompt("other 0", metadata={"demonstration": "abc"})] * 3, source="test")


class Upper(ByteTokenizer):
    """Cuts a text into pairs of characters where it can: another tokenizer, for the same text."""

    def encode(self, text, *, allow_special=True):
        return super().encode(text.upper(), allow_special=allow_special)


class Pairs:
    """Two characters a token; id 1 ends a reply."""

    eos_ids, pad_id, vocab_size = (1,), 0, 2 + 128 * 129

    def encode(self, text, *, allow_special=True):
        cut = [text[i : i + 2] for i in range(0, len(text), 2)]
        return [2 + ord(x[0]) % 128 * 129 + (ord(x[1]) % 128 + 1 if x[1:] else 0) for x in cut]

    def decode(self, ids, *, skip_special=True):
        out = ""
        for i in ids:
            if i > 1:
                a, b = divmod(int(i) - 2, 129)
                out += chr(a) + (chr(b - 1) if b else "")
        return out


class Counting:
    """Says -1 of its first token, -2 of its second and so on, and keeps what it was asked."""

    def __init__(self, top=0):
        self.asked, self.top = [], top

    def score(self, prompts, responses, *, top=0):
        assert prompts and responses  # a server or an engine may need a text
        self.asked += list(zip(prompts, responses, strict=True))
        return [TokenScores(-np.arange(1.0, len(x) + 1), *[np.zeros((len(x), self.top))] * 2) for x in responses]  # fmt: skip  # noqa: E501


def test_spans_of_two_tokenizers():
    theirs, counting, tok = Pairs(), Counting(), TOK
    aligned = AlignedTeacher(counting, theirs)
    responses = [[*tok.encode("abcde"), tok.eos_ids[0]], tok.encode("xy"), [tok.eos_ids[0]]]
    (ids, logp), cut, empty = aligned.spans(["q", "q", "q"], responses, encoder=ENCODER)
    assert ids.tolist() == [0, 0, 1, 1, 2, 3]
    assert logp.tolist() == [-1, -1, -2, -2, -3, -4]  # "ab", "cd", "e" and the two stop tokens
    assert cut[0].tolist() == [0, 0] and cut[1].tolist() == [-1, -1]
    assert empty[0].tolist() == [0] and empty[1].tolist() == [-1]
    assert counting.asked[0] == (theirs.encode("q"), [*theirs.encode("abcde"), 1])


def test_a_response_beyond_the_context_of_the_teacher_has_no_spans():
    """The run goes on, as it must: resumed, it would sample the same response again."""
    counting, tok = Counting(), TOK
    counting.context = 4
    responses = [tok.encode("abcdefgh"), tok.encode("xy"), [*tok.encode("abcdef"), tok.eos_ids[0]]]
    with pytest.warns(UserWarning, match="2 of 3 responses exceed the teacher's context of 4"):
        spans = AlignedTeacher(counting, Pairs()).spans(["q"] * 3, responses, encoder=ENCODER)
    assert [ids.tolist() for ids, _ in spans] == [[-1] * 8, [0, 0], [-1] * 7]
    assert [logp.tolist() for _, logp in spans] == [[0] * 8, [-1, -1], [0] * 7]
    assert len(counting.asked) == 1
    counting.context = 1  # where no text fits, it is not asked
    with pytest.warns(UserWarning, match="2 of 2 responses exceed the teacher's context of 1"):
        spans = AlignedTeacher(counting, Pairs()).spans(["q"] * 2, responses[:2], encoder=ENCODER)
    assert [(ids.tolist(), logp.tolist()) for ids, logp in spans] == [
        ([-1] * 8, [0] * 8),
        ([-1] * 2, [0] * 2),
    ]


class Composed(ByteTokenizer):
    """Writes a letter and its accent as one character, as many tokenizers do."""

    def encode(self, text, *, allow_special=True):
        return super().encode(unicodedata.normalize("NFC", text), allow_special=allow_special)


def test_a_response_that_the_teacher_writes_as_another_text_has_no_spans():
    tok, counting = TOK, Counting()
    responses = [tok.encode("cafe\u0301 ok"), tok.encode("caf\u00e9")]
    with pytest.warns(UserWarning, match="^1 of 2 responses have another number of char"):
        (ids, logp), (known, _) = AlignedTeacher(counting, Composed()).spans(
            ["q"] * 2, responses, encoder=ENCODER
        )
    assert (ids == -1).all() and not logp.any() and len(ids) == len(responses[0])
    assert known.tolist() == [0, 1, 2, 3, 3] and len(counting.asked) == 1


def test_a_response_that_ends_as_its_template_does_ends_for_the_teacher_too():
    class OtherEnd(ByteTokenizer):
        """Ends turns with a token that it does not name as EOS, as many base models do."""

        eos_ids = (258,)

    counting, end = Counting(), ByteTokenizer.eos_ids[0]
    other_end = TextEncoder(OtherEnd(), 100)
    ((ids, logp),) = AlignedTeacher(counting, ByteTokenizer()).spans(
        ["q"], [[*b"ab", end]], encoder=other_end
    )
    assert ids.tolist() == [0, 1, 2] and logp.tolist() == [-1, -2, -3]
    assert counting.asked[0][1] == [*b"ab", end]


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_teaches_in_the_loop(config):
    counting = Counting()
    aligned = AlignedTeacher(counting, Pairs())
    config = dataclasses.replace(config, recipe="span_distillation", teacher=aligned, steps=2)
    result = train(config)
    assert counting.asked and all(np.isfinite(row["loss"]) for row in result.history)


@pytest.mark.slow
def test_a_resumed_run_wants_the_same_teacher_with_another_tokenizer(config):
    def aligned(seed):
        return AlignedTeacher(ModelTeacher(*tiny_model(seed=seed, num_layers=1)), Pairs())

    config = dataclasses.replace(config, recipe="span_distillation", teacher=aligned(0), steps=1)
    train(config)
    assert train(dataclasses.replace(config, steps=2), resume=True).state.step == 2
    other = dataclasses.replace(config, teacher=aligned(1), steps=3)
    with pytest.raises(Exception, match="another teacher"):
        train(other, resume=True, allow_changed=True)


@pytest.mark.slow
def test_a_teacher_of_tokens_gives_the_gradient_of_the_one_in_the_step(config, tmp_path):
    model, params, _ = teacher()
    config = dataclasses.replace(config, recipe="on_policy_distillation", steps=2)
    host = dataclasses.replace(
        config, teacher=ModelTeacher(model, params), run_dir=str(tmp_path / "b")
    )
    a, b = train(config), train(host)
    for x, y in zip(jax.tree.leaves(a.state.params), jax.tree.leaves(b.state.params), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-4)


def other_vocabulary():
    return *tiny_model(seed=7, vocab_size=200), ByteTokenizer()


def upper():
    return *tiny_model(seed=7), Upper()


def denoiser():
    return *tiny_model(seed=7, causal=False), ByteTokenizer()


def short():
    return *tiny_model(seed=7, max_length=12), ByteTokenizer()


def no_trees():
    model, params = tiny_model(seed=7)
    return model._replace(reads_prompt_trees=False), params, ByteTokenizer()


def conversations():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "say 0"}]
    return PromptSet([Prompt("say 0", messages=messages)] * 4, source="test")


class EndsElsewhere(ByteTokenizer):
    """The same vocabulary, in which another token ends a reply, as of an instruct model."""

    eos_ids = (256, 257)


def test_a_teacher_may_end_its_replies_with_other_tokens(config):
    def ends_elsewhere():
        return *teacher()[:2], EndsElsewhere()

    # That of files, which were written with the tokens that end a reply.
    assert tokenizer_digest(ByteTokenizer()) == "e97d2be14be3c79d"
    assert tokenizer_digest(EndsElsewhere()) != tokenizer_digest(ByteTokenizer())
    told = r"teaches the policy to end a response with '<bos>' \(256\), but the policy goes on"
    with pytest.warns(UserWarning, match=told):
        load_experiment(dataclasses.replace(config, teacher=ends_elsewhere))
    with warnings.catch_warnings():  # the policy ends where the teacher does
        warnings.simplefilter("error")
        load_experiment(
            dataclasses.replace(config, model=lambda: (*student()[:2], EndsElsewhere()))
        )


WARM = SamplingConfig(group_size=2, max_new_tokens=8, temperature=0.5)
CUT = SamplingConfig(group_size=2, max_new_tokens=8, top_p=0.9)


@for_each(
    ("changes", "error"),
    [
        ({"teacher": None}, "recipe 'gkd' needs a teacher; set teacher to a model"),
        ({"recipe": "dr_grpo"}, "teacher has no effect: recipe 'dr_grpo' learns from none"),
        ({"recipe": "sdpo"}, "teacher has no effect: recipe 'sdpo' is its own teacher"),
        ({"teacher": other_vocabulary}, "has 200 tokens in its vocabulary, but the policy has 259"),
        ({"teacher": upper}, "has another tokenizer .*; use span_distillation"),
        (
            {"recipe": "minillm", "teacher": Counting()},
            "the teacher of recipe 'minillm' samples with the policy, .*; use a model",
        ),
        ({"teacher": Counting()}, r"reads all logits of its teacher, .*recipes.gkd\(top=20\)"),
        (
            {"teacher": AlignedTeacher(Counting(), Pairs())},
            "compares tokens, so the teacher needs the policy's tokenizer",
        ),
        (
            {"recipe": "span_distillation", "teacher": Counting()},
            "compares spans of text; use a train.teachers.AlignedTeacher",
        ),
        ({"teacher": "scores.npz"}, "'scores.npz' cannot be read: no such file or directory"),
        (
            {"recipe": "iw_opd", "teacher": Counting(), "sampling": WARM},
            "scores at temperature 1; sampling.temperature is 0.5",
        ),
        (
            {"recipe": "span_distillation", "teacher": upper, "sampling": WARM},
            "scores at temperature 1; sampling.temperature is 0.5",
        ),
        (
            {"recipe": "iw_opd", "teacher": Counting(), "sampling": CUT},
            "scores all tokens of its vocabulary; sampling.top_p is 0.9",
        ),
        (
            {
                "recipe": "span_distillation",
                "teacher": AlignedTeacher(Counting(), Pairs()),
                "data": DataConfig(prompts=conversations),
            },
            "prompt 'say 0' is a conversation, but AlignedTeacher",
        ),
        ({"teacher": denoiser}, "the teacher is a denoising model"),
        (
            {"teacher": no_trees, "packing": "flat"},
            'packing "flat" needs a teacher whose reads_prompt_trees is True',
        ),
        (
            {"recipe": "on_policy_distillation", "teacher": ModelTeacher(*short()[:2])},
            "may have 13 tokens together, but the teacher's context has 12",
        ),
        ({"teacher": short}, "may have 13 tokens together, but the teacher's context has 12"),
        ({"recipe": jr.recipes.gkd(top=300)}, "reads the 300 most probable tokens .* has 259"),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_teach_is_refused(config, changes, error):
    with pytest.raises(ValueError, match=error):
        load_experiment(dataclasses.replace(config, **changes))


def test_a_teacher_on_the_host_reads_the_prompts_of_the_batch():
    """An environment writes prompts that are not those of the data."""
    batch, counting = batch_of(), Counting()
    questions = [Question(x, [1]) for x in prompts()[:2]]
    recipe = jr.recipes.on_policy_distillation()
    said = host_scores(
        counting, recipe, batch, questions, [[None] * 2] * 2, encoder=ENCODER, vocab_size=259
    )
    rows = [(0, 0), (0, 1), (1, 0)]
    want = [batch.prompt_tokens[p].tolist() for p, _ in rows]
    assert [prompt for prompt, _ in counting.asked] == want
    np.testing.assert_array_equal(said["teacher_token_logp"][0, 1], [-1, -2, -3, 0, 0])
    tree = batch.replace(packing=Tree(*[batch.tokens] * 5))
    with pytest.raises(ValueError, match="reads a response as one text"):
        host_scores(
            counting, recipe, tree, questions, [[None] * 2] * 2, encoder=ENCODER, vocab_size=259
        )


def test_more_than_a_teacher_reads_is_refused():
    with pytest.raises(ValueError, match="have 13 tokens, but the teacher's context has 12"):
        ModelTeacher(*short()[:2]).score([[1], [1]], [[2], [2] * 12])
    with pytest.raises(ValueError, match="top 300 is above the 259 tokens"):
        ModelTeacher(*teacher()[:2]).score([[1]], [[2]], top=300)


def serve(monkeypatch, card):
    """Every server's model is this one; returns the lengths of the texts that it is sent."""
    lengths = []

    def ask(self, route, body=None):
        if route == "/v1/models":
            return {"data": [{"id": "m"} | card]}
        lengths.append(len(body["token_ids"]))
        return {"prompt_logprobs": [{str(x): -1.0} for x in body["token_ids"]]}

    monkeypatch.setattr(ServerTeacher, "_ask", ask)
    return lengths


@for_each(
    ("card", "context"),
    [
        ({"owned_by": "jaxrl_llm", "max_model_len": 4}, 4),
        ({"owned_by": "vllm", "max_model_len": 5}, 4),  # which samples at least one token
        ({}, None),
    ],
)
def test_the_context_of_a_server_is_that_of_its_model(monkeypatch, card, context):
    serve(monkeypatch, card)
    assert ServerTeacher(URL).context == context


@for_each(("model", "context"), [(None, 64), ("big", 4095), ("tuned", 4095), ("small", 64)])
def test_the_context_is_that_of_the_model_of_that_name(monkeypatch, model, context):
    cards = [
        {"id": "small", "owned_by": "jaxrl_llm", "max_model_len": 64},
        {"id": "big", "owned_by": "vllm", "max_model_len": 4096},
        {"id": "tuned", "owned_by": "vllm", "parent": "big", "max_model_len": None},
    ]
    monkeypatch.setattr(ServerTeacher, "_ask", lambda self, route, body=None: {"data": cards})
    assert ServerTeacher(URL, model=model).context == context
    with pytest.raises(ValueError, match="lists no model 'other'; it lists 'small', 'big', 'tun"):
        ServerTeacher(URL, model="other").score([[1]], [[2]])


def test_a_server_is_sent_no_text_beyond_its_context(config, monkeypatch):
    """It would refuse the text, and end the run."""
    lengths, tok = serve(monkeypatch, {"owned_by": "vllm", "max_model_len": 5}), TOK
    responses = [tok.encode("abcdefgh"), tok.encode("abcdef")]
    aligned = AlignedTeacher(ServerTeacher(URL), Pairs())
    with pytest.warns(UserWarning, match="1 of 2 responses exceed the teacher's context of 4"):
        (ids, _), (others, _) = aligned.spans(["q"] * 2, responses, encoder=ENCODER)
    assert ids.tolist() == [-1] * 8 and others.tolist() == [0, 0, 1, 1, 2, 2] and lengths == [4]
    config = dataclasses.replace(config, recipe="iw_opd", teacher=URL)
    with pytest.raises(ValueError, match="13 tokens together, but the teacher's context has 4"):
        load_experiment(config)


def test_a_refused_request_does_not_wait_for_the_others(monkeypatch):
    serve(monkeypatch, {})
    ask, begun, answers, ended = ServerTeacher._ask, threading.Event(), threading.Event(), []

    def ask_slowly(self, route, body=None):
        if body is not None and body["token_ids"] == [1, 2]:
            begun.wait(60)
            raise ValueError("refused")
        if body is not None:
            begun.set()
            ended.append(answers.wait(60))
        return ask(self, route, body)

    monkeypatch.setattr(ServerTeacher, "_ask", ask_slowly)
    with pytest.raises(ValueError, match="refused"):
        ServerTeacher(URL).score([[1], [3]], [[2], [4]])
    assert not ended
    answers.set()


CARD = {"data": [{"id": "m"}]}


@for_each(
    ("card", "reply"),
    [
        ([], None),
        ({"status": "ok"}, None),
        ({"data": [None]}, None),
        ({"data": [[]]}, None),
        ({"data": [{"id": "m", "max_model_len": "4"}]}, None),
        (CARD, []),
        (CARD, {"prompt_logprobs": [None]}),
        *(
            (CARD, {"prompt_logprobs": [None, entry]})
            for entry in (
                None,
                [],
                {"2": None},
                {"2": {}},
                {"2": {"logprob": None}},
                {"two": -1.0},
                {"2": "x"},
                {"2": [-1.0]},
                {"2": 10**400},
                {"2": -0.5, str(2**40): -1.0},
                {"2": -0.5, "-1": -0.1},
                {"2": np.nan},
                {"2": {"logprob": -np.inf}},
                {"2": -0.5, "3": np.nan},
                {"2": -1e300},
            )
        ),
    ],
)
def test_a_malformed_reply_names_the_server(monkeypatch, card, reply):
    def ask(self, route, body=None):
        return card if route == "/v1/models" else reply

    monkeypatch.setattr(ServerTeacher, "_ask", ask)
    with pytest.raises(ValueError, match="^The (server|teacher) at http://127.0.0.1:1 "):
        ServerTeacher(URL, model="m").score([[1]], [[2]], top=1)


@contextlib.contextmanager
def listening(*replies):
    """A server that sends one reply after the other, the last one to every later request."""
    left, asked = list(replies), []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            asked.append(self.rfile.readline().decode().split()[1])
            lengths = [0]
            while (line := self.rfile.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    lengths.append(int(line.split(b":")[1]))
            self.rfile.read(lengths[-1])
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def http(body, status="200 OK", *, cut=0):
    text = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text[cut:]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.train.teachers._PAUSES", (0.0, 0.0))


HALF, AWAY = http(CARD, cut=10), http({}, "503 Service Unavailable")


@for_each(
    ("reply", "message", "times"),
    [
        (HALF, "does not answer: IncompleteRead", 3),
        (b"nonsense\r\n\r\n", "does not answer: nonsense", 3),
        (b"", "does not answer: Remote end closed connection", 3),
        (AWAY, "refused /v1/models", 3),
        (http({}, "503 Service Unavailable", cut=1), "refused /v1/models", 3),
        (http({"error": "no such key"}, "401 Unauthorized"), "refused /v1/models: .*no such", 1),
        (http({}, "400 Bad Request"), "refused /v1/models", 1),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "does not answer", 1),
    ],
)
def test_a_server_that_fails_is_named(soon, reply, message, times):
    told = f"The teacher at http://127.0.0.1:[0-9]+ {message}"
    with listening(reply) as (url, asked), pytest.raises(ValueError, match=told):
        ServerTeacher(url, timeout=60).score([[1]], [[2]])
    assert len(asked) == times


@for_each("fault", [HALF, AWAY, b""])
def test_a_request_that_fails_once_is_repeated(soon, fault):
    answer = http({"prompt_logprobs": [None, {"2": {"logprob": -0.5}}]})
    with listening(fault, http(CARD), fault, fault, answer) as (url, asked):
        (scores,) = ServerTeacher(url, timeout=60).score([[1]], [[2]])
    assert scores.logp.tolist() == [-0.5]
    assert asked == ["/v1/models"] * 2 + ["/inference/v1/generate"] * 3


def test_a_server_that_is_not_there_is_named(soon):
    with pytest.raises(ValueError, match="The teacher at http://127.0.0.1:1 does not answer"):
        ServerTeacher(URL, timeout=1).score([[1]], [[2]])
    with pytest.raises(ValueError, match="must begin with http"):
        ServerTeacher("localhost")
