"""What goes wrong in an engine: bad requests, non-finite numbers, Ctrl-C, too little memory."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.groups import assert_same, by_request, draw_groups
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core.support import Support
from jaxrl_llm.rollout import Completion, Group
from jaxrl_llm.rollout.engine import memory
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import FAILED, LENGTH, UNFINISHED

# Requests.


def begun(n, finish=UNFINISHED, *, entropy=True):
    numbers, integers = np.zeros(n, np.float32), np.zeros(n, np.int32)
    out = Tokens(integers, numbers, numbers, numbers, integers, numbers if entropy else None)
    return Completion(7, out, finish)


@for_each(
    ("fields", "message"),
    [
        ({"prompt": []}, "has an empty prompt; it needs at least one token"),
        ({"prompt": [1] * 17}, "has a prompt of 17 tokens; the engine's slots hold prompt_length"),
        ({"prompt": [1, 259]}, ": its prompt holds token 259, outside the vocabulary of 259"),
        ({"prompt": [-1]}, "holds token -1, outside"),
        ({"requests": ()}, "has no requests"),
        ({"requests": (7, 7)}, "request 7 is listed twice"),
        ({"requests": (7, 0)}, "request 0 is listed twice"),
        ({"requests": (2**31,)}, "request 2147483648 must be an integer from 0 to"),
        ({"requests": (-1,)}, "request -1 must be an integer from 0 to"),
        ({"requests": (0.5,)}, "request 0.5 must be an integer from 0 to"),
        ({"max_new_tokens": 25}, "asks for 25 new tokens; the engine's slots hold between 1 and"),
        ({"max_new_tokens": 0}, "asks for 0 new tokens"),
        ({"max_new_tokens": 2.5}, "asks for 2.5 new tokens"),
        ({"max_new_tokens": (3, 4)}, "has 1 requests and max_new_tokens for 2"),
        ({"expected": float("nan")}, "expects nan tokens; it must be 0 or more"),
        ({"settings": {"top_p": 0.5}}, "sets 'top_p'; options that may vary with this engine"),
        ({"adapter": 1}, "names adapter 1 of 1"),
        ({"adapter": 0.5}, "names adapter 0.5 of 1"),
        ({"partial": {8: begun(3)}}, "has a partial response of request 8, which it does not list"),
        ({"partial": {7: begun(24)}}, "request 7 already has 24 tokens; its maximum is 24"),
        ({"partial": {7: begun(4, LENGTH)}, "max_new_tokens": 3}, "request 7 already has 4 tokens"),
        ({"partial": {7: begun(3, entropy=False)}}, "request 7 were sampled with other outputs"),
    ],
)
def test_a_bad_group_is_named_and_none_is_queued(engine, generate, fields, message):
    generation = generate(engine, Group("there", [20], (0,)))
    good = Group("good", [21], (1,))
    bad = Group(**{"id": "bad", "prompt": [20], "requests": (7,), **fields})
    with pytest.raises(ValueError, match=f"submit: group 'bad'.*{message}"):
        generation.submit(good, bad)
    assert [group.id for group in generation.stop()] == ["there"]


def test_settings_out_of_range_are_named(make, generate):
    generation = generate(make(vary=("temperature",)))
    with pytest.raises(ValueError, match="submit: group 'a' sets temperature to -1"):
        generation.submit(Group("a", [20], (0,), settings={"temperature": -1.0}))


def test_tokens_that_were_drawn_from_more_candidates_are_named(make, generate):
    generation = generate(make(top_k=5))
    support = Support(ids=np.zeros((3, 8), np.int32))
    out = begun(3, entropy=False).out._replace(support=support)
    group = Group("a", [20], (7,), partial={7: Completion(7, out, UNFINISHED)})
    with pytest.raises(ValueError, match="submit: group 'a': .* request 7 were sampled with other"):
        generation.submit(group)
    assert generation.stop() == []


def test_nothing_to_do(engine, tiny, generate, monkeypatch):
    generation = generate(engine)
    for name in ("decode", "fill_prompts", "fill_responses", "end_slots"):
        monkeypatch.setitem(engine.functions, name, None)
    generation.step()
    generation.update(tiny[1], version=1)
    generation.submit()
    generation.cancel()
    assert list(generation) == [] and generation.stop() == []


# Non-finite numbers.


@pytest.fixture(scope="module")
def poisoned(tiny, reference):
    """An engine whose model cannot bear one token: it makes all numbers NaN, those kept too.

    And the token, one that responses often hold.
    """
    tokens = np.concatenate([c.tokens[:-1] for c in reference(draw_groups(20, seed=11)).values()])
    model, token = tiny[0], int(np.bincount(tokens).argmax())

    def apply(params, tokens, positions, context, **options):
        hidden, kv = model.apply(params, tokens, positions, context, **options)
        bad = (tokens == token).any(axis=-1)[..., None, None]
        kv = jax.tree.map(lambda x: jnp.where(bad[..., None], jnp.nan, x), kv)
        return jnp.where(bad, jnp.nan, hidden), kv

    sizes = {"rows": 2, "width": 2, "prompt_length": 16, "max_new_tokens": 24, "chunk": 4}
    options = {"stop_ids": tuple(range(12)), "temperature": 0.7, "block": 7}
    return jr.rollout.make_engine(model._replace(apply=apply), **sizes, **options), token


def test_a_nonfinite_token_fails_one_response(poisoned, generate, reference):
    engine, token = poisoned
    groups = draw_groups(20, seed=11)
    groups[3] = groups[3]._replace(prompt=[20, token, 21])
    groups[6] = groups[6]._replace(prompt=[20, token])
    finished = list(generate(engine, *groups))
    result, expected = by_request(finished), reference(groups)
    failed = set()
    for group in groups:
        for request in group.requests:
            tokens = expected[request].tokens.tolist()
            # The token that is sampled is still there; what comes of it is not.
            n = tokens[:-1].index(token) + 1 if token in tokens[:-1] else None
            n = 0 if token in group.prompt else n
            if n is not None:
                failed.add(group.id)
                completion = result.pop(request)
                assert completion.finish == FAILED
                assert completion.tokens.tolist() == tokens[:n]
                del expected[request]
    # Others have gone through the same slots behind them, in rows of all kinds.
    assert_same(result, expected)
    assert {"g3", "g6"} < failed and len(failed) < 12
    reported = {done.id for done in finished if any(c.finish == FAILED for c in done.completions)}
    assert reported == failed


def test_a_failed_response_is_refused_by_a_batch(poisoned, generate):
    engine, token = poisoned
    (done,) = generate(engine, Group("bad", [token], (5, 6)))
    with pytest.raises(
        ValueError, match="request 5 of group 'bad' failed: the model's logits were"
    ):
        jr.rollout.to_rollout([done], max_new_tokens=24, prompt_width=4)


# Ctrl-C.


@for_each("name", ["decode", "start", "fill_prompts", "take_tokens"])
def test_ctrl_c_loses_nothing(engine, generate, reference, monkeypatch, name):
    groups, calls = draw_groups(9, seed=12), []
    function = engine.functions[name]

    def interrupted(*arguments):
        # The slots that it is given are gone, those that it gives have not arrived.
        result = function(*arguments)
        calls.append(len(calls))
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return result

    generation, result = generate(engine, *groups), []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(engine.functions, name, interrupted)
        for done in generation:
            result.append(done)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(calls) >= 4 and len(result) < len(groups)
    rest = generation.stop()
    assert sorted([x.id for x in (*result, *rest)]) == sorted(g.id for g in groups)
    assert any(c.finish == UNFINISHED for g in rest for c in g.partial.values())
    result += list(generate(engine, *rest))
    assert_same(by_request(result), reference(groups))


def test_ctrl_c_during_an_update(tiny, engine, generate, monkeypatch):
    generation = generate(engine, Group("a", [65], (0, 1, 2)))
    generation.step()
    fill = engine.functions["fill_responses"]

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return fill(*arguments)

    monkeypatch.setitem(engine.functions, "fill_responses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generation.update(jax.tree.map(lambda x: x * 1.5, tiny[1]), version=1)
    monkeypatch.undo()
    # It was done before the interruption was let through.
    interrupted_and_on = list(generation)
    quiet = generate(engine, Group("a", [65], (0, 1, 2)))
    quiet.step()
    quiet.update(jax.tree.map(lambda x: x * 1.5, tiny[1]), version=1)
    for ours, theirs in zip(
        interrupted_and_on[0].completions, next(iter(quiet)).completions, strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, ours.out, theirs.out)


# Memory.


def test_too_many_slots_are_refused(engine, tiny, generate, monkeypatch):
    each = engine.row_bytes
    monkeypatch.setattr(memory, "device_memory", lambda *_: (each * 3, int(each * 1.5)))
    message = r"The engine's 2 rows of 3 slots take .* about 1 rows \(3 slots\) would fit\."
    with pytest.raises(MemoryError, match=message):
        generate(engine)
    monkeypatch.setattr(memory, "device_memory", lambda *_: (each * 3, each))
    generate(engine)
    # A device that does not tell, and runs out.
    monkeypatch.setattr(memory, "device_memory", lambda *_: None)

    def full():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setitem(engine.functions, "init", full)
    with pytest.raises(MemoryError, match="more than the device has left; make rows, width or"):
        generate(engine)


@for_each("deleted", [False, True])
def test_out_of_memory_while_decoding(engine, generate, reference, monkeypatch, deleted):
    groups = draw_groups(6, seed=13)
    decode, calls = engine.functions["decode"], []

    def full(params, slots, *rest):
        calls.append(0)
        if len(calls) < 3:
            return decode(params, slots, *rest)
        if deleted:
            jax.tree.map(lambda x: x.delete(), slots)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setitem(engine.functions, "decode", full)
    generation, result = generate(engine, *groups), []
    each = engine.row_bytes
    monkeypatch.setattr(memory, "device_memory", lambda *_: (each * 3, each * 2))
    with pytest.raises(MemoryError, match=r"about 1 rows \(3 slots\) would fit\.$"):
        for done in generation:
            result.append(done)
    monkeypatch.undo()
    # What the device still holds is kept, the rest begins again; no request is lost.
    rest = generation.stop()
    kept = [len(c) for g in rest for c in g.partial.values() if c.finish == UNFINISHED]
    assert deleted == (not kept)
    result += list(generate(engine, *rest))
    assert_same(by_request(result), reference(groups))


@for_each("name", ["put_prompts", "start", "fill_prompts", "fill_responses"])
def test_half_filled_slots_are_not_read(tiny, engine, generate, reference, monkeypatch, name):
    groups, calls = draw_groups(9, seed=14), []
    function = engine.functions[name]

    def broken(*arguments):
        calls.append(0)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: a cable")
        return function(*arguments)

    generation, result = generate(engine, *groups), []
    patch, raises = (
        monkeypatch.context(),
        pytest.raises(jax.errors.JaxRuntimeError, match="a cable"),
    )
    with patch as patched, raises:
        patched.setitem(engine.functions, name, broken)
        for done in generation:
            result.append(done)
            if name == "fill_responses":
                generation.update(tiny[1], version=0)
    # The slots hold requests that have not started: their tokens are those of others.
    message = r"the slots were lost with an error; stop\(\) returns"
    some = generation.decoding[0]
    for call in (
        generation.step,
        lambda: generation.update(tiny[1], version=0),
        lambda: generation.cancel(some),
        lambda: generation.fork(some, 900),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    rest = generation.stop()
    assert sorted(x.id for x in (*result, *rest)) == sorted(g.id for g in groups)
    result += list(generate(engine, *rest))
    assert_same(by_request(result), reference(groups))


def test_a_device_error_during_stop(engine, generate, monkeypatch):
    groups = draw_groups(4, seed=15)
    generation = generate(engine, *groups)
    generation.step()

    def broken(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: a cable")

    monkeypatch.setitem(engine.functions, "take_tokens", broken)
    rest = generation.stop()
    assert sorted(g.id for g in rest) == sorted(g.id for g in groups)
    assert not any(c.finish == UNFINISHED for g in rest for c in g.partial.values())


def test_ctrl_c_during_stop(engine, generate, monkeypatch):
    groups, reported = draw_groups(4, seed=16), []
    generation = generate(engine, *groups, on_tokens=lambda *news: reported.append(news))
    decode, end_slots = engine.functions["decode"], engine.functions["end_slots"]

    def interrupted(function):
        def call(*arguments):
            signal.raise_signal(signal.SIGINT)
            return function(*arguments)

        return call

    monkeypatch.setitem(engine.functions, "decode", interrupted(decode))
    with pytest.raises(KeyboardInterrupt):
        generation.step()
    assert not reported
    monkeypatch.setitem(engine.functions, "end_slots", interrupted(end_slots))
    with pytest.raises(KeyboardInterrupt):
        generation.stop()
    rest = generation.stop()
    assert sorted(g.id for g in rest) == sorted(g.id for g in groups)
    # What was sampled and not yet told of is told before all is handed back.
    lengths = [len(c) for g in rest for c in g.partial.values()]
    assert sum(len(out.tokens) for *_, out in reported) == sum(lengths) > 0


def test_the_memory_is_that_of_the_devices_of_the_slots():
    class Device:
        def __init__(self, limit, used):
            self.stats = {"bytes_limit": limit, "bytes_in_use": used}

        def memory_stats(self):
            return self.stats

    devices = [Device(900, 100), Device(1000, 300), Device(800, 0)]
    assert memory.device_memory(devices) == (1000, 300)
    assert memory.has_room(7, 100, devices=devices)
    assert not memory.has_room(8, 100, devices=devices)
    assert "about 6 rows" in memory.out_of_memory(8, 4, 100, devices=devices)


def test_room_for_rows_by_hand(monkeypatch):
    # 1000 bytes a row; 8 rows on two devices that have 4500 bytes each, 500 of them in use.
    monkeypatch.setattr(memory, "device_memory", lambda *_: (4500, 500))
    assert memory.has_room(8, 1000, shards=2) and not memory.has_room(9, 1000, shards=2)
    # Nine tenths of 8000 are 7 rows, which two devices share as 6.
    assert "about 6 rows (24 slots) would fit" in memory.out_of_memory(10, 4, 1000, shards=2)
    # If the slots themselves are part of what is in use, they count as free.
    assert "about 9 rows (36 slots)" in memory.out_of_memory(10, 4, 1000, allocated=True)
    assert "about 3 rows (12 slots)" in memory.out_of_memory(10, 4, 1000)
