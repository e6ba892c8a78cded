"""A policy learns from another model: in the step, over HTTP, from a file, across tokenizers."""

import contextlib
import dataclasses
import functools
import json
import socketserver
import threading
import unicodedata
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch_with, refuses
from rows import for_each
from tiny_run import model, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core.kernels.soft_cap import soft_cap
from jaxrl_llm.core.packing import Tree
from jaxrl_llm.data import Cursor, Prompt, PromptSet
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.testing import ByteTokenizer, tiny_model
from jaxrl_llm.train import (
    DataConfig,
    EvaluationConfig,
    SamplingConfig,
    init_state,
    make_step,
    train,
)
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.models.teachers import (
    AlignedTeacher,
    ModelTeacher,
    ServerTeacher,
    StoredTeacher,
    TokenScores,
    host_scores,
    tokenizer_digest,
    write_scores,
)
from jaxrl_llm.train.update.part import Teacher

pytestmark = pytest.mark.usefixtures("shared_programs")

WEIGHT = 0.2  # of the teacher in what MiniLLM samples
ANSWERS = ["abcdef", "ghi", "jklm", "nopqr"]
TOK = ByteTokenizer()
ENCODER = TextEncoder(TOK, 100, False)
URL = "http://127.0.0.1:1"


SAMPLING = SamplingConfig(group_size=2, max_new_tokens=8)
ALONE = dataclasses.replace(SAMPLING, group_size=1)


def teacher():
    """Two layers and another width: only the vocabulary is the student's."""
    return *tiny_model(seed=7, width=48), ByteTokenizer()


def prompts():
    rows = [
        Prompt(f"say {i}", metadata={"demonstration": x, "pretraining": f"{x} {i} {x}"})
        for i, x in enumerate(ANSWERS)
    ]
    return PromptSet(rows, source="test")


@pytest.fixture
def config(tmp_path):
    return tiny_run(
        tmp_path / "run",
        teacher=teacher,
        data=DataConfig(prompts=prompts, chat=False),
        recipe="gkd",
        sampling=SAMPLING,
        prompts_per_step=2,
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
    own, other = model()[:2], teacher()[:2]
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


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "top", "caps"),
    [(0.3, None, (2.0, 1.0)), (1.0, None, (None,) * 2), (0, 3, (None,) * 2)],
)
def test_the_loss_of_a_step_is_the_divergence_of_the_two_models(beta, top, caps):
    (mine, params, _), (other, theirs, _) = model(), teacher()
    mine, other = mine._replace(logit_cap=caps[0]), other._replace(logit_cap=caps[1])
    batch, optimizer = batch_of(), optax.sgd(0.1)
    recipe = jr.recipes.gkd(beta=beta, top=top)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    step = make_step(
        mine, recipe, optimizer, teacher=Teacher(other, theirs), microbatches=2, donate=False
    )
    _, metrics = step(state, batch)
    s, t = (log_probs(*pair, batch) for pair in ((mine, params), (other, theirs)))
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
    losses = [run.history[0]["loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0


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
    refuses("loaded", load_experiment, config, error=AssertionError)


@pytest.mark.slow
def test_stored_scores_train_as_the_model_does(config, tmp_path):
    path, recipe = str(tmp_path / "scores.npz"), jr.recipes.gkd(beta=0.0, top=5, offline=True)
    config = dataclasses.replace(config, recipe=recipe, sampling=ALONE, steps=2)
    experiment, _ = load_experiment(config)
    asked = [question.tokens for question in experiment.train]
    rows = [question.prompt.metadata["demonstration"] for question in experiment.train]
    answers = [experiment.encoder.response(x, ends=True) for x in rows]
    write_scores(path, ModelTeacher(*teacher()[:2]), asked, answers, top=5, tokenizer=TOK)
    online = train(config)
    # Its responses come with their rewards, so that it runs without one.
    alone = {"teacher": path, "run_dir": str(tmp_path / "stored"), "reward": None}
    stored = train(dataclasses.replace(config, **alone))
    with pytest.raises(ValueError, match="there are no pairs to compare; set a reward"):
        dataclasses.replace(config, **alone, evaluation=EvaluationConfig())
    a, b = (x.history[-1]["loss"] for x in (online, stored))
    np.testing.assert_allclose(a, b, rtol=1e-4)
    write_scores(path, Counting(top=5), asked, answers, top=5, tokenizer=TOK)
    with pytest.raises(Exception, match="another teacher, or with one in another precision: the"):
        train(dataclasses.replace(config, **alone, steps=3), resume=True)

    with pytest.raises(ValueError, match=r"5 best tokens at each position, not 9"):
        StoredTeacher(path).score([[1]], [[2]], top=9)
    more = dataclasses.replace(config, teacher=path, data=DataConfig(prompts=others, chat=False))
    refuses("was made from another data set: .* prompt 'other 0'", load_experiment, more)
    with pytest.raises(ValueError, match="was made with another tokenizer"):
        StoredTeacher(path).check(Upper(), [])


@for_each("recipe", ["iw_opd", "span_distillation", jr.recipes.gkd(top=2, demonstrations=1)])
def test_a_file_of_scores_does_not_teach_a_recipe_that_samples(config, tmp_path, recipe):
    path = str(tmp_path / "scores.npz")
    write_scores(path, Counting(top=2), [[1]], [[3, 4]], top=2, tokenizer=TOK)
    spans = recipe == "span_distillation"
    stored = AlignedTeacher(StoredTeacher(path), Pairs()) if spans else path
    told = r"samples responses, but .*StoredTeacher.* only of stored ones; .*offline=True"
    with pytest.raises(ValueError, match=told):
        load_experiment(dataclasses.replace(config, teacher=stored, recipe=recipe))


def test_a_response_that_a_file_of_scores_lacks_is_named_before_the_first_batch(config, tmp_path):
    path = str(tmp_path / "scores.npz")
    read = [TOK.encode(prompt.text) for prompt in prompts()]
    answers = [[*TOK.encode(x), END] for x in ANSWERS]
    options = {"recipe": jr.recipes.gkd(top=2, offline=True), "sampling": ALONE}
    config = dataclasses.replace(config, teacher=path, **options)

    def write(responses):
        write_scores(path, Counting(top=2), read, responses, top=2, tokenizer=TOK)

    write([*answers[:3], answers[3][:-1]])  # without the stop token
    refuses("no scores for a response of 6 tokens to prompt 'say 3'", load_experiment, config)
    write(answers)
    assert isinstance(load_experiment(config)[0].teacher, StoredTeacher)


def test_a_file_of_scores_is_written_whole_and_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "scores.npz"

    def write(*responses, path=path):
        prompts = [[1]] * len(responses)
        write_scores(path, Counting(top=2), prompts, responses, top=2, tokenizer=TOK)

    write([3, 4])
    monkeypatch.setenv("HOME", str(tmp_path))
    write([3, 4], path="~/scores.npz")
    assert StoredTeacher("~/scores.npz").score([[1]], [[3, 4]])[0].logp.shape == (2,)
    assert (tmp_path / "scores.npz").exists()
    before = path.read_bytes()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="the disk"):
        patched.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("the disk")))
        write([3, 4], [5])
    assert path.read_bytes() == before and [x.name for x in path.parent.iterdir()] == [path.name]
    refuses(r"path must end in .npz; got 'scores'", write, [3], path="scores")
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
        refuses(f"was not written by write_scores: .*{words}", StoredTeacher, path)
    for data in (b"", b"PK\x03\x04 no archive"):
        path.write_bytes(data)
        refuses("is not a file of teacher scores", StoredTeacher, path)


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
        best = [np.zeros((len(x), self.top)) for x in responses]
        return [TokenScores(-np.arange(1.0, len(x) + 1), x, x) for x in best]


def spans_of(teacher, responses, *, reads=None, encoder=ENCODER):
    """The ids and the log-probabilities of the spans of some responses, as lists."""
    aligned = AlignedTeacher(teacher, Pairs() if reads is None else reads)
    found = aligned.spans(["q"] * len(responses), responses, encoder=encoder)
    return [(ids.tolist(), logp.tolist()) for ids, logp in found]


def none_of(length):
    return [-1] * length, [0] * length


END = TOK.eos_ids[0]


def test_spans_of_two_tokenizers():
    counting = Counting()
    found = spans_of(counting, [[*b"abcde", END], [*b"xy"], [END]])
    # "ab", "cd", "e" and the two stop tokens.
    whole = [0, 0, 1, 1, 2, 3], [-1, -1, -2, -2, -3, -4]
    assert found == [whole, ([0, 0], [-1, -1]), ([0], [-1])]
    theirs = Pairs().encode
    assert counting.asked[0] == (theirs("q"), [*theirs("abcde"), 1])


def test_a_response_beyond_the_context_of_the_teacher_has_no_spans():
    """The run goes on, as it must: resumed, it would sample the same response again."""
    counting = Counting()
    counting.context = 4
    responses = [[*b"abcdefgh"], [*b"xy"], [*b"abcdef", END]]
    with pytest.warns(UserWarning, match="2 of 3 responses exceed the teacher's context of 4"):
        assert spans_of(counting, responses) == [none_of(8), ([0, 0], [-1, -1]), none_of(7)]
    counting.context = 1  # where no text fits, it is not asked
    with pytest.warns(UserWarning, match="2 of 2 responses exceed the teacher's context of 1"):
        assert spans_of(counting, responses[:2]) == [none_of(8), none_of(2)]
    assert len(counting.asked) == 1


class Composed(ByteTokenizer):
    """Writes a letter and its accent as one character, as many tokenizers do."""

    def encode(self, text, *, allow_special=True):
        return super().encode(unicodedata.normalize("NFC", text), allow_special=allow_special)


def test_a_response_that_the_teacher_writes_as_another_text_has_no_spans():
    counting, responses = Counting(), [TOK.encode("cafe\u0301 ok"), TOK.encode("caf\u00e9")]
    with pytest.warns(UserWarning, match="^1 of 2 responses have another number of char"):
        unknown, (known, _) = spans_of(counting, responses, reads=Composed())
    assert unknown == none_of(len(responses[0]))
    assert known == [0, 1, 2, 3, 3] and len(counting.asked) == 1


def test_a_response_that_ends_as_its_template_does_ends_for_the_teacher_too():
    class OtherEnd(ByteTokenizer):
        """Ends turns with a token that it does not name as EOS, as many base models do."""

        eos_ids = (258,)

    counting, text = Counting(), [*b"ab", END]
    options = {"reads": ByteTokenizer(), "encoder": TextEncoder(OtherEnd(), 100)}
    assert spans_of(counting, [text], **options) == [([0, 1, 2], [-1, -2, -3])]
    assert counting.asked[0][1] == text


@pytest.mark.slow
def test_a_resumed_run_wants_the_same_teacher(config):
    def aligned(seed):
        return AlignedTeacher(ModelTeacher(*tiny_model(seed=seed, num_layers=1)), Pairs())

    config = dataclasses.replace(config, recipe="span_distillation", teacher=aligned(0), steps=1)
    assert np.isfinite(train(config).history[0]["loss"])
    assert train(dataclasses.replace(config, steps=2), resume=True).state.step == 2
    other = dataclasses.replace(config, teacher=aligned(1), steps=3)
    refuses("another teacher", train, other, error=Exception, resume=True, allow_changed=True)


@pytest.mark.slow
def test_a_teacher_on_the_host_trains_as_the_one_in_the_step(config, tmp_path):
    in_step = dataclasses.replace(config, recipe="on_policy_distillation", steps=2)
    of_tokens = ModelTeacher(*teacher()[:2])
    host = dataclasses.replace(in_step, teacher=of_tokens, run_dir=str(tmp_path / "host"))
    states = [train(x).state.params for x in (in_step, host)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), *states)
    with pytest.raises(ValueError, match="have 13 tokens, but the teacher's context has 12"):
        ModelTeacher(*short()[:2]).score([[1], [1]], [[2], [2] * 12])
    refuses("top 300 is above the 259 tokens", of_tokens.score, [[1]], [[2]], top=300)


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
        load_experiment(dataclasses.replace(config, model=lambda: (*model()[:2], EndsElsewhere())))


WARM = {"sampling": dataclasses.replace(SAMPLING, temperature=0.5)}
CUT = {"sampling": dataclasses.replace(SAMPLING, top_p=0.9)}
ALIGNED = AlignedTeacher(Counting(), Pairs())
TOO_LONG = "may have 13 tokens together, but the teacher's context has 12"
TALKS = {"data": DataConfig(prompts=conversations)}


def by(recipe, teacher, **changes):
    return {"recipe": recipe, "teacher": teacher, **changes}


@for_each(
    ("changes", "error"),
    [
        (by("gkd", None), "recipe 'gkd' needs a teacher; set teacher to a model"),
        ({"recipe": "dr_grpo"}, "teacher has no effect: recipe 'dr_grpo' learns from none"),
        ({"recipe": "sdpo"}, "teacher has no effect: recipe 'sdpo' is its own teacher"),
        ({"teacher": other_vocabulary}, "has 200 tokens in its vocabulary, but the policy has 259"),
        ({"teacher": upper}, "has another tokenizer .*; use span_distillation"),
        (by("minillm", Counting()), "'minillm' samples with the policy, .*; use a model"),
        ({"teacher": Counting()}, r"reads all logits of its teacher, .*recipes.gkd\(top=20\)"),
        (by("gkd", ALIGNED), "compares tokens, so the teacher needs the policy's tokenizer"),
        (by("span_distillation", Counting()), "compares spans of text; use a train.Alig"),
        ({"teacher": "scores.npz"}, "'scores.npz' cannot be read: no such file or directory"),
        (by("iw_opd", Counting(), **WARM), "scores at temperature 1; sampling.temperature is 0.5"),
        (by("span_distillation", upper, **WARM), "at temperature 1; sampling.temperature is 0.5"),
        (by("iw_opd", Counting(), **CUT), "all tokens of its vocabulary; sampling.top_p is 0.9"),
        (by("span_distillation", ALIGNED, **TALKS), "prompt 'say 0' is a conversation, but Align"),
        ({"teacher": denoiser}, "the teacher is a denoising model"),
        (by("gkd", no_trees, packing="flat"), '"flat" needs a teacher whose reads_prompt_trees is'),
        (by("on_policy_distillation", ModelTeacher(*short()[:2])), TOO_LONG),
        ({"teacher": short}, TOO_LONG),
        ({"recipe": jr.recipes.gkd(top=300)}, "reads the 300 most probable tokens .* has 259"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(config, changes, error):
    with pytest.raises(ValueError, match=error):
        load_experiment(dataclasses.replace(config, **changes))


def test_a_teacher_on_the_host_reads_the_prompts_of_the_batch():
    """An environment writes prompts that are not those of the data."""
    batch, counting = batch_of(), Counting()
    questions = [Question(x, [1]) for x in prompts()[:2]]
    recipe = jr.recipes.on_policy_distillation()

    def scores(batch):
        rest = questions, [[None] * 2] * 2
        return host_scores(counting, recipe, batch, *rest, encoder=ENCODER, vocab_size=259)

    said = scores(batch)
    rows = [(0, 0), (0, 1), (1, 0)]
    want = [batch.prompt_tokens[p].tolist() for p, _ in rows]
    assert [prompt for prompt, _ in counting.asked] == want
    np.testing.assert_array_equal(said["teacher_token_logp"][0, 1], [-1, -2, -3, 0, 0])
    tree = batch.replace(packing=Tree(*[batch.tokens] * 5))
    refuses("reads a response as one text", scores, tree)


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


# vLLM samples at least one token.
@for_each(
    ("model", "context"),
    [(None, 64), ("big", 4095), ("tuned", 4095), ("small", 64), ("bare", None)],
)
def test_the_context_is_that_of_the_model_of_that_name(monkeypatch, model, context):
    cards = [
        {"id": "small", "owned_by": "jaxrl_llm", "max_model_len": 64},
        {"id": "big", "owned_by": "vllm", "max_model_len": 4096},  # samples one
        {"id": "tuned", "owned_by": "vllm", "parent": "big", "max_model_len": None},
        {"id": "bare"},
    ]
    monkeypatch.setattr(ServerTeacher, "_ask", lambda self, route, body=None: {"data": cards})
    assert ServerTeacher(URL, model=model).context == context
    with pytest.raises(ValueError, match="lists no model 'other'; it lists 'small', 'big', 'tun"):
        ServerTeacher(URL, model="other").score([[1]], [[2]])


def test_a_server_is_sent_no_text_beyond_its_context(config, monkeypatch):
    """It would refuse the text, and end the run."""
    lengths = serve(monkeypatch, {"owned_by": "vllm", "max_model_len": 5})
    with pytest.warns(UserWarning, match="1 of 2 responses exceed the teacher's context of 4"):
        found = spans_of(ServerTeacher(URL), [[*b"abcdefgh"], [*b"abcdef"]])
    assert found == [none_of(8), ([0, 0, 1, 1, 2, 2], [-1] * 6)] and lengths == [4]
    config = dataclasses.replace(config, recipe="iw_opd", teacher=URL)
    refuses("13 tokens together, but the teacher's context has 4", load_experiment, config)


CARD = {"data": [{"id": "m"}]}


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


@for_each(
    ("card", "reply"),
    [
        *((x, None) for x in ([], {"status": "ok"}, {"data": [None]}, {"data": [[]]})),
        ({"data": [{"id": "m", "max_model_len": "4"}]}, None),
        (CARD, []),
        (CARD, {"prompt_logprobs": [None]}),
        *(
            (CARD, {"prompt_logprobs": [None, entry]})
            for entry in (
                *(None, [], {"two": -1.0}),
                *({"2": x} for x in (None, {}, {"logprob": None}, "x", [-1.0], 10**400)),
                *({"2": x} for x in (np.nan, {"logprob": -np.inf}, -1e300)),
                *({"2": -0.5} | x for x in ({str(2**40): -1.0}, {"-1": -0.1}, {"3": np.nan})),
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
    monkeypatch.setattr("jaxrl_llm.train.models.teachers._PAUSES", (0.0, 0.0))


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
    refuses("must begin with http", ServerTeacher, "localhost")


@for_each("fault", [HALF, AWAY, b""])
def test_a_request_that_fails_once_is_repeated(soon, fault):
    answer = http({"prompt_logprobs": [None, {"2": {"logprob": -0.5}}]})
    with listening(fault, http(CARD), fault, fault, answer) as (url, asked):
        (scores,) = ServerTeacher(url, timeout=60).score([[1]], [[2]])
    assert scores.logp.tolist() == [-0.5]
    assert asked == ["/v1/models"] * 2 + ["/inference/v1/generate"] * 3
