"""Requests with a text, responses, a limit or a temperature, on the sampler and in slots."""

import dataclasses

import jax
import numpy as np
import pytest
from rollout.collecting import collected
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import Decision, Request, Response, Row, in_order
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import DEMONSTRATION, HINTED, REPLAYED
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import TextEncoder, encode_prompts
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.backends import EngineBackend, SamplerBackend
from jaxrl_llm.rollout.collect import Limits
from jaxrl_llm.rollout.types import LENGTH, STOP, UNFINISHED

P, G, T, N = 2, 3, 6, 10
KEY = jax.random.key(0)
TOKENIZER = jr.testing.ByteTokenizer()
ENCODER = TextEncoder(TOKENIZER, 40, chat=False)
QUESTIONS = encode_prompts(
    [Prompt(f"prompt {i}", id=str(i), metadata={"hint": f"h{i}"}) for i in range(N)],
    TOKENIZER,
    room=40,
    chat=False,
)
STOPS = TOKENIZER.eos_ids
CELLS = np.array([-1, 5])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Asks for requests that are listed, and joins them to rows that are listed."""

    requests: tuple
    rows: tuple
    needs: jr.curation.Needs = jr.curation.Needs(sends_text=True, slots=True, fixes_tokens=True)

    def width(self, group_size):
        return max(len(row) for row in self.rows)

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        first = len(collection.requests)
        return self.requests[first : first + count], state

    def observe(self, state, collection):
        if (missing := len(self.requests) - len(collection.requests)) > 0:
            return Decision(ask=missing), state
        if collection.waiting:
            return Decision(), state
        return Decision(rows=tuple(Row(row) for row in self.rows)), state


@dataclasses.dataclass(frozen=True)
class Noted(Plan):
    """Remembers the outcomes that it saw last."""

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def observe(self, state, collection):
        self.seen[:] = collection.outcomes
        return super().observe(state, collection)


@pytest.fixture(scope="module")
def tiny():
    model, params = jr.testing.tiny_model(num_layers=1)
    options = {"max_new_tokens": T, "stop_ids": STOPS, "pad_id": 258}
    sample = jr.rollout.make_sampler(model, group_size=G, **options)
    engine = jr.rollout.make_engine(
        model, rows=2, width=2, prompt_length=40, vary=("temperature",), entropy=True, **options
    )
    return model, params, sample, engine


def grade(questions, texts):
    sizes = [len(text) for group in texts for text in group]
    n = len(sizes)
    return Scores(np.float32(sizes), {"size": np.float32(sizes)}, np.zeros(n, bool))


def backends(tiny, calls=None):
    model, params, sample, engine = tiny

    def noted(questions, texts):
        if calls is not None:
            calls.append(texts)
        return grade(questions, texts)

    def one_round(prompts, ids):
        return jax.device_get(sample(params, KEY, prompts, request_ids=ids))

    options = {"decode": TOKENIZER.decode, "grade": noted}
    return {
        "rounds": lambda: SamplerBackend(
            one_round, QUESTIONS, num_groups=P, group_size=G, **options
        ),
        "slots": lambda: EngineBackend(
            engine, params, KEY, QUESTIONS, version=3, max_new_tokens=T, pad_id=258, **options
        ),
    }


def play(collector, backend, **options):
    options = {"pad_id": 258, "limits": Limits(ENCODER, T, 259), "version": 3} | options
    return collected(collector, backend, questions=QUESTIONS, groups=(P, G), key=KEY, **options)


def demonstration(text, **fields):
    return Response(text, **fields)


MIXED = Plan(
    requests=(
        Request(2, 4),
        Request(1, text="prompt 4 with help", role=HINTED, extends=0, prompt=None),
        Request(1, extends=0, responses=(Response("lower"),), sampled=False, role=DEMONSTRATION),
        Request(2, 7, text="prompt 7?", train_as_prompt=True),
    ),
    rows=(((0, 0), (0, 1), (1, 0), (2, 0)), ((3, 1), (3, 0))),
)


@pytest.mark.parametrize("name", ["rounds", "slots"])
def test_a_row_may_mix_prompts_and_demonstrations(tiny, name):
    batch = play(MIXED, backends(tiny)[name]())
    rollout = batch.rollout
    own, prompt = QUESTIONS[4].tokens, rollout.prompt_tokens
    assert prompt[0, : len(own)].tolist() == own and rollout.prompt_mask[0].sum() == len(own)
    # Help stands before its response, and does not train.
    help_ = list(b" with help")
    assert rollout.tokens[0, 2, : len(help_)].tolist() == help_
    assert not rollout.mask[0, 2, : len(help_)].any() and rollout.mask[0, 2, len(help_)]
    assert rollout.mask[0, 0, 0]
    assert rollout.tokens[0, 3, :6].tolist() == [*b"lower", *STOPS]
    assert rollout.mask[0, 3].sum() == 6 and rollout.finish[0, 3] == STOP
    assert (rollout.version[0, 3, :6] == -1).all() and not batch.known[0, 3, :6].any()
    assert batch.known[0, :3].all() and batch.known[1].all()
    # The second row trains with the prompt itself.
    second = QUESTIONS[7].tokens
    assert prompt[1][rollout.prompt_mask[1]].tolist() == second and rollout.mask[1, 0, 0]
    assert batch.roles.tolist() == [[0, 0, HINTED, DEMONSTRATION], [0, 0, 0, 0]]
    np.testing.assert_array_equal(batch.where, [[True] * 4, [True, True, False, False]])
    assert batch.messages[0] == [None, None, "prompt 4 with help", None]
    assert batch.texts[0][3] == "lower" and batch.scores.rewards[3] == 5
    assert (batch.groups, batch.rollouts, batch.continued) == (2, 5, 0)


def test_rounds_and_slots_serve_the_same(tiny):
    first, second = (play(MIXED, make()) for make in backends(tiny).values())
    for name in ("prompt_tokens", "prompt_mask", "tokens", "mask", "finish"):
        x, y = getattr(first.rollout, name), getattr(second.rollout, name)
        np.testing.assert_array_equal(x, y, err_msg=name)
    np.testing.assert_allclose(
        first.rollout.behavior_logp, second.rollout.behavior_logp, rtol=1e-5, atol=1e-5
    )
    assert first.texts == second.texts and first.scores.rewards.tolist() == (
        second.scores.rewards.tolist()
    )


def test_a_response_goes_on_as_if_it_had_never_stopped(tiny):
    """A segment of three tokens and the rest, by the same request number, is the whole."""
    whole = play(Plan((Request(2, 1), Request(1, 2)), (((0, 0), (0, 1)), ((1, 0),))), slots(tiny))
    tokens, mask = whole.rollout.tokens[0], whole.rollout.mask[0]
    logp, version = whole.rollout.behavior_logp[0], np.int32([-1, 1, 2])
    begun = [Response(tokens[i, :3], logp[i, :3], version=version) for i in range(2)]
    rest = Noted((Request(2, 1, responses=tuple(begun)), Request(1, 2)), (((0, 0),), ((1, 0),)))
    batch = play(rest, slots(tiny))
    assert mask[:, 3].all()
    for i, response in enumerate(rest.seen[0].responses):
        n = int(mask[i].sum())
        np.testing.assert_array_equal(response.tokens, tokens[i, :n])
        np.testing.assert_allclose(
            response.behavior_logp, whole.rollout.behavior_logp[0, i, :n], atol=1e-5
        )
        assert (
            np.isnan(response.model_logp[:3]).all() and not np.isnan(response.model_logp[3:]).any()
        )
        assert response.version.tolist() == [-1, 1, 2] + [3] * (n - 3)
        assert response.entropy.shape == (n,) and response.reward == len(rest.seen[0].texts[i])
    assert batch.continued == 2 and batch.known is None  # one of the two is in a row


def slots(tiny, calls=None):
    return backends(tiny, calls)["slots"]()


def test_tokens_that_do_not_train_are_context(tiny):
    trains = np.array([False, False, True])
    begun = Response(np.int32([97, 98, 99]), trains=trains)
    plan = Plan((Request(1, 1, responses=(begun,)), Request(1, 2)), (((0, 0),), ((1, 0),)))
    batch = play(plan, slots(tiny))
    assert batch.rollout.tokens[0, 0, :3].tolist() == [97, 98, 99]
    assert batch.rollout.mask[0, 0, :4].tolist() == [False, False, True, True]
    assert batch.known[0, 0, :4].tolist() == [False, False, False, True]


def test_a_limit_pauses_without_a_grade(tiny):
    calls = []
    plan = Noted(
        (Request(2, 1, limit=2, pauses=True), Request(2, 3, limit=2)), (((0, 0),), ((1, 0),))
    )
    batch = play(plan, slots(tiny, calls))
    assert [x.finish for x in plan.seen[0].responses] == [UNFINISHED] * 2
    assert not plan.seen[0].where.any() and not plan.seen[0].truncated.any()
    assert [x.finish for x in plan.seen[1].responses] == [LENGTH] * 2 and plan.seen[
        1
    ].truncated.all()
    assert len(calls) == 1 and len(calls[0][0]) == 2 and batch.failures == 0
    np.testing.assert_array_equal(batch.where[:, 0], [False, True])


def test_a_temperature_of_a_request(tiny):
    plan = Plan((Request(3, 1, temperature=0.0), Request(3, 1)), (((0, 0), (0, 1)), ((1, 0),)))
    batch = play(plan, slots(tiny))
    tokens = batch.rollout.tokens[0]
    np.testing.assert_array_equal(tokens[0], tokens[1])
    assert (tokens[0] != batch.rollout.tokens[1, 0]).any()


@for_each("name", ["rounds", "slots"])
def test_rewards_that_requests_bring(tiny, name):
    calls = []

    def judge(texts):
        return [float("nan"), *range(1, len(texts))]

    replayed = (Response("ab", reward=0.25), Response("abc"))
    plan = Plan(
        (Request(2, 1, reward=judge), Request(2, 2, responses=replayed, sampled=False)),
        (((0, 0), (0, 1)), ((1, 0), (1, 1))),
        needs=jr.curation.Needs(),
    )
    batch = play(plan, backends(tiny, calls)[name]())
    assert batch.scores.rewards.reshape(2, 2).tolist() == [[0, 1], [0.25, 3]]
    np.testing.assert_array_equal(batch.where, [[False, True], [True, True]])
    size = batch.scores.reward_components["size"].reshape(2, 2)
    np.testing.assert_array_equal(np.isnan(size[:, 1]), [True, False])
    assert np.isnan(size[1, 0]) and size[1, 1] == 3
    assert calls == [[["abc"]]]


def test_what_was_stored_is_replayed_with_its_numbers(tiny):
    stored = Response(
        np.int32([97, 98, 257]),
        behavior_logp=np.float32([-1, -2, -3]),
        version=np.int32([0, 0, 1]),
        reward=0.5,
    )
    plan = Plan(
        (Request(1, 1, responses=(stored,), sampled=False, role=REPLAYED), Request(1, 2)),
        (((0, 0),), ((1, 0),)),
    )
    batch = play(plan, slots(tiny))
    assert batch.rollout.behavior_logp[0, 0, :3].tolist() == [-1, -2, -3] and batch.known is None
    assert batch.rollout.version[0, 0, :3].tolist() == [0, 0, 1]
    assert batch.roles[0, 0] == REPLAYED and batch.scores.rewards[0] == 0.5


def one(**fields):
    return Request(1, 1, **fields)


def stored(tokens, **fields):
    """A request for a complete response."""
    return one(sampled=False, responses=(Response(tokens, **fields),))


def begun(tokens, **fields):
    """A request for the rest of a response."""
    return one(responses=(Response(tokens, **fields),))


A = (Response("a"),)


@for_each(
    ("request_", "message"),
    [
        (one(text="x" * 41), "Prompt '1', with the text of collector Plan("),
        (one(text="x" * 41), "has 41 tokens, but the model's context leaves room for 40"),
        (Request(2, 1, responses=A), "with 1 responses for 2 rollouts"),
        (one(sampled=False), "of complete responses, but brings none"),
        (one(sampled=False, responses=A, limit=3), "temperature and entropy_stats have no"),
        (one(train_as_prompt=True), "train_as_prompt, which has no effect without a"),
        (one(pauses=True), "pauses, which has no effect without a limit"),
        (one(limit=7), "with limit 7; it must be from 1 to max_new_tokens 6"),
        (one(temperature=-1.0), "with temperature -1.0; it must be finite"),
        (Request(2, 1, fixed=(CELLS,)), "with fixed tokens of 1 of 2 rollouts, and 0 responses"),
        (one(fixed=(CELLS,), responses=A), "of 1 of 1 rollouts, and 1 responses"),
        (one(fixed=(np.ones(7, int),)), "tokens of shape (7,) and dtype int64"),
        (one(fixed=(0.5 * CELLS,)), "they must be integers, at most 6"),
        (one(fixed=(CELLS,)), "with fixed tokens, which slots cannot serve"),
        (one(role=6), "with role 6; roles are 0 to 5"),
        (stored(np.int32([300])), "prompt '1' holds token 300, outside the vocabulary of 259"),
        (stored("abcdef"), "a response to prompt '1' has 7 tokens; the longest response has 6"),
        (begun("abcdef"), "prompt '1' begins with 6 tokens; the longest response has 6"),
        (stored(np.int32([])), "a response to prompt '1' has no tokens"),
        (begun("a", reward=1.0), "is to be continued, so it cannot"),
        (stored("a", finish=2), "is not sampled, but its finish is 2"),
        (begun("ab", behavior_logp=np.zeros(3)), "has 2 tokens, and behavior_logp of shape (3,)"),
        (one(reward=lambda texts: [1.0, 2.0]), "prompt 1 returned shape (2,) for 1 texts"),
        (one(reward=lambda texts: [-np.inf]), "prompt 1 returned -inf; it must return finite"),
    ],
)
def test_requests_that_nothing_can_serve_are_refused(tiny, request_, message):
    plan = Plan((request_, Request(1, 2)), (((0, 0),), ((1, 0),)))
    with pytest.raises(ValueError) as error:
        play(plan, slots(tiny))
    assert message in str(error.value)


TWO, ROWS, NEEDS = Request(1, 2), (((0, 0),), ((1, 0),)), r"Needs\({}=True\)"
SLOTS = jr.curation.Needs(slots=True)
FIXED, LIMITED, SENT = one(fixed=(CELLS,)), one(limit=3), one(text="x")
MIXED_ROWS = (((0, 0), (1, 0)), ((2, 0),))


@for_each(
    ("name", "requests", "rows", "options", "message"),
    [
        ("rounds", (FIXED,), ROWS[:1], {"needs": SLOTS}, "must have fixes_tokens=True"),
        ("rounds", (LIMITED, TWO), ROWS, {}, NEEDS.format("slots")),
        ("slots", (SENT, TWO), ROWS, {"needs": SLOTS}, NEEDS.format("sends_text")),
        ("slots", (one(), SENT, TWO), MIXED_ROWS, {}, "prompts of row 0, of prompt '1', do not"),
    ],
)
def test_what_a_plan_cannot_ask_for_is_told(tiny, name, requests, rows, options, message):
    """A need that a collector does not state, and prompts that share no first token in a row."""
    with pytest.raises(ValueError, match=message):
        play(Plan(requests, rows, **options), backends(tiny)[name]())


def test_a_collector_has_the_needs_of_those_it_is_built_of():
    inner = Plan((), ((),))
    outer = jr.curation.refill(jr.curation.informative_groups, source=inner)
    assert needs_of(outer).sends_text and needs_of(outer).slots
    assert not needs_of(outer).records_entropy
    assert not needs_of(jr.curation.refill(jr.curation.informative_groups)).sends_text
    assert not needs_of(None).sends_text and not needs_of(in_order()).slots


def test_a_collector_sees_the_rows_of_the_data(tiny):
    seen = []

    class Noted(Plan):
        def propose(self, state, key, collection, count):
            seen.append((collection.data[4], len(collection.data), collection.version))
            return super().propose(state, key, collection, count)

    play(Noted((Request(1, 1), Request(1, 2)), (((0, 0),), ((1, 0),))), slots(tiny))
    row, size, version = seen[0]
    assert (row["text"], row["hint"], row["id"], size, version) == ("prompt 4", "h4", "4", N, 3)
