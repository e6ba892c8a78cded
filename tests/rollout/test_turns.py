"""Responses of several turns: they read what comes between and go on in their slots."""

import threading
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from models.forwards import scores_of
from rollout.groups import assert_same, by_request
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core.runtime.threads import LAUNCHING
from jaxrl_llm.data import make_renderer
from jaxrl_llm.environments import Observation
from jaxrl_llm.rollout import Completion, Group, NextTurn
from jaxrl_llm.rollout.engine.requests import slice_tokens
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, STOP, UNFINISHED
from jaxrl_llm.train.mesh import make_mesh

TURNS, T = 3, 24


def answered(value):
    future = Future()
    future.set_result(value)
    return future


def observation(request, length):
    """Tokens that depend on the request and the place, 1 to 5 of them."""
    return [20 + (7 * request + 3 * length + i) % 200 for i in range(1 + (request + length) % 5)]


class Dialog:
    """``follow`` of groups: TURNS turns, with observations between them."""

    def __init__(self, delay=None):
        self.turns, self.delay = {}, delay

    def next_of(self, completion):
        turn = self.turns[completion.request] = self.turns.get(completion.request, 0) + 1
        tokens = observation(completion.request, len(completion))
        room = T - len(completion) - len(tokens) - 1
        return NextTurn(tokens) if turn < TURNS and room >= 0 else None

    def __call__(self, completion):
        following = self.next_of(completion)
        if self.delay is None:
            return answered(following)
        future = Future()
        seconds = self.delay(completion.request)
        threading.Timer(seconds, lambda: future.set_result(following)).start()
        return future


def groups(dialog, *, turn_limit=None):
    return [
        Group(i, [30 + i, 40, 50 + i][: 1 + i % 3], tuple(range(5 * i, 5 * i + 5)), follow=dialog,
              turn_limit=turn_limit)
        for i in range(4)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one_turn_at_a_time(engine, generate):
    """The completions by request, each turn read again from its beginning in a new generation."""

    def play(turn_limit=None):
        dialog, result = Dialog(), {}
        for group in groups(dialog, turn_limit=turn_limit):
            for request in group.requests:
                partial, following = None, NextTurn([])
                while following is not None:
                    begun = 0 if partial is None else len(partial)
                    most = T if turn_limit is None else min(T, begun + turn_limit)
                    one = Group(0, group.prompt, (request,), most)
                    if partial is not None:
                        one = one._replace(partial={request: partial})
                    ((done,),) = (g.completions for g in generate(engine, one))
                    following = dialog.next_of(done)
                    if following is not None:
                        out = joined(done.out, following.tokens)
                        partial = Completion(request, out, UNFINISHED)
                result[request] = done
        return result

    return play


def joined(out: Tokens, tokens) -> Tokens:
    n = len(tokens)
    blank = jax.tree.map(lambda x: np.zeros((n, *x.shape[1:]), x.dtype), out)
    blank = blank._replace(tokens=np.int32(tokens), version=np.full(n, -1, np.int32))
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), out, blank)


@pytest.mark.parametrize("turn_limit", [None, 3])
def test_turns_equal_one_after_the_other_and_nothing_is_read_twice(
    engine, generate, one_turn_at_a_time, turn_limit, monkeypatch
):
    calls = []
    for name in ("fill_prompts", "fill_responses"):
        function = engine.functions[name]
        monkeypatch.setitem(
            engine.functions, name, lambda *a, f=function, n=name: calls.append(n) or f(*a)
        )
    generation = generate(engine, *groups(Dialog(), turn_limit=turn_limit))
    result = by_request(list(generation))
    assert "fill_responses" not in calls and len(calls) <= 4  # each prompt once
    monkeypatch.undo()
    assert_same(result, one_turn_at_a_time(turn_limit))
    versions = np.concatenate([c.out.version for c in result.values()])
    assert (versions == -1).sum() > 40
    if turn_limit is not None:
        assert any(c.finish == LENGTH and len(c) < T for c in result.values())
    assert generation.stop() == []


class Unanswered:
    """``follow`` of responses of one turn, which end no earlier than :meth:`answer`."""

    def __init__(self):
        self.waiting, self.answers = {}, False

    def __call__(self, completion):
        if self.answers:
            return answered(None)
        return self.waiting.setdefault(completion.request, Future())

    def answer(self):
        self.answers = True
        for future in self.waiting.values():
            future.set_result(None)


@pytest.fixture
def left(engine, monkeypatch):
    """The slots that late turns have left, in order."""
    slots, function = [], engine.functions["take_slot"]

    def spy(arrays, index):
        slots.append(tuple(np.asarray(index)[0].tolist()))
        return function(arrays, index)

    monkeypatch.setitem(engine.functions, "take_slot", spy)
    return slots


def test_a_late_turn_keeps_a_slot_that_nobody_else_could_take(engine, generate, left):
    """A new prompt needs a whole row, and the others of this row still decode."""
    follow = Unanswered()
    # With a limit of two tokens, a first turn ends in the first chunk of four.
    rows = [
        Group(i, [30 + i], tuple(range(3 * i, 3 * i + 3)), (2, T, T), follow=follow)
        for i in range(2)
    ]
    generation, late = generate(engine, *rows, Group("next", [40], (9,))), 0
    while 9 not in generation.decoding:
        generation.step()
        late += 0 in follow.waiting and not left
    assert late > 1
    # All have left one row, and none the other.
    assert len(left) == 3 and len({row for row, _ in left}) == 1
    follow.answer()
    assert {done.id for done in generation} == {0, 1, "next"}


def test_as_many_late_turns_leave_as_siblings_wait(engine, generate, left):
    follow = Unanswered()
    groups = [Group(i, [30 + i], tuple(range(9 * i, 9 * i + 3 + i)), 2, follow=follow)
              for i in range(2)]  # fmt: skip
    generation = generate(engine, *groups)
    while generation.decoding or len(follow.waiting) < 7:
        generation.step()
    assert len(follow.waiting) == 7 and len(left) == 1  # of four siblings, one waited
    follow.answer()
    assert {done.id for done in generation} == {0, 1}


@pytest.mark.slow
def test_late_answers_on_a_mesh_come_back_as_themselves(make, tiny, generate):
    """Also to the slot of another device than the one that they left."""
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    params = jax.device_put(tiny[1], jr.models.param_shardings(tiny[1], mesh))
    spread, alone = make(rows=4, width=1, mesh=mesh), make(rows=4, width=1)
    dialog = Dialog(lambda request: 0.3 if request % 3 == 0 else 0.01)
    result = by_request(list(generate(spread, *groups(dialog), params=params)))
    expected = by_request(list(generate(alone, *groups(Dialog()))))
    for request, each in expected.items():
        assert result[request].tokens.tolist() == each.tokens.tolist(), request
        np.testing.assert_array_equal(result[request].out.version, each.out.version)


def test_late_answers_of_a_response_that_began_with_tokens(engine, generate, left):
    """It frees its slot, and comes back as it left, not as it began."""
    whole = by_request(list(generate(engine, *groups(Dialog()))))
    begun = {r: Completion(r, slice_tokens(c.out, 0, 1), UNFINISHED) for r, c in whole.items()}

    def partial(dialog):
        return [
            group._replace(partial={r: begun[r] for r in group.requests[:3]})
            for group in groups(dialog)
        ]

    expected = by_request(list(generate(engine, *partial(Dialog()))))
    dialog = Dialog(lambda request: 0.3 if request % 3 == 0 else 0.01)
    result = by_request(list(generate(engine, *partial(dialog))))
    assert left  # six slots, and twenty requests
    for request, each in expected.items():
        assert result[request].tokens.tolist() == each.tokens.tolist(), request


def test_programs_compile_before_they_take_the_lock_to_start(tiny, generate):
    """A step that asks a subagent waits for that lock while its deadline runs."""
    sizes = {"rows": 2, "width": 2, "prompt_length": 4, "max_new_tokens": T, "chunk": 4}
    compiled, engine = [], jr.rollout.make_engine(tiny[0], **sizes, block=6)
    known = {*engine.functions, "fill_extended"} - {"init"}  # which compiles before all turns

    def listen(event, seconds, fun_name="", **_):
        name = fun_name.removeprefix("jit(").removesuffix(")")
        if event == "/jax/core/compile/backend_compile_duration" and name in known:
            compiled.append((name, LAUNCHING.locked()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert len(list(generate(engine, *groups(Dialog(), turn_limit=3)))) == 4
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert {"fill_extended", "decode"} <= {name for name, _ in compiled}
    assert not any(locked for _, locked in compiled)
    assert len(set(compiled)) == len(compiled)


def test_stop_strings_would_end_every_turn(engine, generate):
    with pytest.raises(ValueError, match="group 0 has turns, which stop strings would all end"):
        generate(engine, *groups(Dialog()), stop_strings=["x"], decode_text=str)


@pytest.mark.slow
def test_an_engine_of_one_slot_warms_up(make, tiny):
    make(rows=1, width=1).warm_up(tiny[1], turns=True)


def test_new_weights_between_turns_recompute_what_waits(engine, generate, tiny, left):
    model, params = tiny
    other, waiting, dialog = jax.tree.map(lambda x: x * 1.2, params), {}, Dialog()

    def follow(completion):
        future = Future()
        waiting[completion.request] = future, dialog.next_of(completion)
        return future

    def answer(request):
        future, following = waiting.pop(request)
        future.set_result(following)

    generation = generate(engine, *groups(follow))
    scheduler = generation._scheduler
    for _ in range(13):
        generation.step()
    away = [request for request in waiting if request not in scheduler.slots]
    answer(away[0])
    generation.step()
    # Of those that have left their slots, one waits for a slot, and others for their answers.
    assert left and set(scheduler.back) == {away[0]} and len(away) > 1
    generation.update(other, version=1)
    while waiting or scheduler.has_work:
        for request in list(waiting):
            answer(request)
        generation.step()
    rollout = jr.rollout.to_rollout(list(generation), max_new_tokens=T, prompt_width=3)
    for version, weights in enumerate((params, other)):
        logp = scores_of(model, weights, rollout)
        sampled = rollout.mask & (rollout.version == version)
        assert sampled.sum() > 100
        np.testing.assert_allclose(rollout.model_logp[sampled], logp[sampled], atol=1e-5)


LONG = "a first turn with more tokens than the policy goes on reading after it"


class Quiz:
    """An environment of two turns that rewards a turn with its number, from 0; "end" ends it."""

    tools = ()

    def __init__(self, instead):
        self.instead = instead

    def reset(self, task, seed):
        return 0, Observation([{"role": "user", "content": "0?"}])

    def step(self, state, action):
        done = state == 1 or action.text == "end"
        question = {"role": "user", "content": f"{state + 1}?"}
        return state + 1, Observation([question], float(state), done=done, instead=self.instead)


def completed(request, tokens, observed=0):
    """A response, of which the environment wrote so many tokens before its last one."""
    n = len(tokens)
    logp, version = np.arange(n, dtype=np.float32), np.zeros(n, np.int32)
    version[n - 1 - observed : n - 1] = -1
    return Completion(request, Tokens(np.int32(tokens), logp, logp, 0 * logp, version), STOP)


@pytest.fixture
def play():
    """``play(instead)``: the episodes of :class:`Quiz`, and ``turn``, the tokens of a text."""
    tokenizer, opened = jr.testing.ByteTokenizer(), []

    def play(instead=None):
        episodes = Episodes(
            Quiz(instead), make_renderer(tokenizer), decode=tokenizer.decode, seed=(0,),
            max_new_tokens=200,
        )  # fmt: skip
        opened.append(episodes)
        episodes.start(0, {}, "quiz")
        return episodes, lambda text: [*text.encode(), *tokenizer.eos_ids]

    yield play
    for episodes in opened:
        episodes.close()


@for_each(
    ("before", "first", "instead"),
    [
        ("a", "a", None),
        ("a", LONG, None),
        (LONG, LONG, "a"),
        ("end", LONG, None),
    ],
    ids=["the same", "longer", "replaced", "ended"],
)
def test_an_episode_begins_again_with_the_first_turn_of_its_response(play, before, first, instead):
    def whole(*abandoned):
        episodes, turn = play(instead)
        follow = episodes.follow(0)
        for text in abandoned:
            follow(completed(7, turn(text))).result(60)
        tokens = turn(first)
        following = follow(completed(7, tokens)).result(60)
        tokens = [*tokens[: following.keep], *following.tokens, 98]
        done = completed(7, tokens, len(following.tokens))
        assert follow(done).result(60) is None
        return episodes.take(done)

    result, expected = whole(before), whole()
    assert result.episode == expected.episode and result.episode.reward == 1
    assert [turn.text for turn in result.episode.turns] == [first, "b"]
    jax.tree.map(np.testing.assert_array_equal, result[1:4], expected[1:4])


def test_a_fork_after_the_first_turn_of_an_episode_is_refused(play):
    episodes, turn = play()
    with pytest.raises(ValueError, match="did not play the earlier turns of request 8"):
        episodes.follow(0)(completed(8, [*turn("a"), 9, 98], observed=1)).result(60)


def test_a_response_between_turns_is_cancelled_or_begins_again(engine, generate):
    never = []

    def follow(completion):
        never.append(completion.request)
        return Future()

    generation = generate(engine, *groups(follow)[:1])
    while len(never) < 5:
        generation.step()
    generation.cancel(never[0])
    with pytest.raises(KeyError, match="is unknown or has ended"):
        generation.cancel(never[0])
    (rest,) = generation.stop()
    assert rest.partial == {}
    again = by_request(list(generate(engine, rest._replace(follow=Dialog()))))
    whole = by_request(list(generate(engine, *groups(Dialog())[:1])))
    assert {r: c.tokens.tolist() for r, c in again.items()} == {
        r: c.tokens.tolist() for r, c in whole.items()
    }
    assert CANCELLED not in {c.finish for c in whole.values()} and STOP in {
        c.finish for c in whole.values()
    }


@for_each(
    ("tokens", "message"),
    [([], "0 tokens"), ([7] * T, f"{T} tokens"), ([999], "token 999")],
)
def test_what_cannot_come_next_names_the_request(engine, generate, tokens, message):
    generation = generate(engine, *groups(lambda c: answered(NextTurn(tokens)))[:1])
    with pytest.raises(ValueError, match=f"request \\d+.*{message}"):
        list(generation)
    assert len(generation.stop()) == 1
