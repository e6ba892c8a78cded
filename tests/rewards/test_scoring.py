"""``score`` calls a reward for each completion and gives one batch of numbers.

- A number is a reward; a mapping is columns, whose entry "reward" or else whose sum counts; NaN is
  what does not apply; texts and lists are details. Whatever else comes back names its prompt.
- A mistake of the code ends the scoring. A call of an async reward that fails is dropped, counted
  as zero or raised, by ``on_error``; if all fail, the scoring ends.
- A call that hangs frees the caller after ``deadline`` seconds, whatever it does.
"""

import asyncio
import contextlib
import functools
import pickle
import threading
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm.rewards import FAILED, RewardError, Scores, VerifierWarning, score
from jaxrl_llm.rewards.scoring import grade, join_scores

PROMPTS, COMPLETIONS = ["p"] * 3, ["a", "bb", "ccc"]
METADATA = [{"id": "one"}, {"id": "two"}, {}]
NAN = float("nan")


def run(reward, **options):
    return score(reward, PROMPTS, COMPLETIONS, METADATA, **options)


def giving(value, at="bb"):
    """A reward that gives `value` for one of the completions and 1.0 for the others."""

    def reward(prompt, completion, metadata):
        return value if completion == at else 1.0

    return reward


@contextlib.contextmanager
def freed():
    """An event that hanging calls wait for; what is inside ends long before they would."""
    release, before = threading.Event(), time.monotonic()
    yield release
    release.set()
    assert time.monotonic() - before < 50


def test_numbers_keep_their_order():
    scores = run(lambda prompt, completion, metadata: len(completion))
    assert scores.rewards.tolist() == [1, 2, 3] and scores.rewards.dtype == np.float32
    assert scores.reward_components == {} and scores.failures == 0
    assert score(lambda p, c, m: len(m), ["p"], ["c"]).rewards.tolist() == [0]
    for one in (True, 1, np.float64(1), np.int32(1), np.bool_(True), np.array(1.0), jnp.float32(1)):
        assert run(giving(one)).rewards.tolist() == [1, 1, 1]


def test_names_become_columns_and_their_sum_or_the_entry_reward_is_the_total():
    scores = run(lambda p, c, m: {"length": len(c), "first": c == "a"})
    assert scores.rewards.tolist() == [2, 2, 3]
    assert scores.reward_components["length"].tolist() == [1, 2, 3]
    assert scores.reward_components["first"].tolist() == [1, 0, 0]
    assert scores.reward_components["first"].dtype == np.float32
    scores = run(lambda p, c, m: {"reward": 0.5, "length": len(c)})
    assert scores.rewards.tolist() == [0.5] * 3
    assert set(scores.reward_components) == {"reward", "length"}


def test_components_that_do_not_apply_are_left_out_of_the_sum():
    scores = run(lambda p, c, m: {"a": len(c), "b": NAN if c == "bb" else 10.0})
    assert scores.rewards.tolist() == [11, 2, 13] and not scores.failed.any()
    np.testing.assert_array_equal(scores.reward_components["b"], [10, NAN, 10])
    whole = run(lambda p, c, m: {"reward": 0.5, "a": NAN})
    assert whole.rewards.tolist() == [0.5] * 3 and np.isnan(whole.reward_components["a"]).all()


def test_async_calls_run_together_also_inside_a_running_loop():
    everyone = asyncio.Barrier(3)

    async def reward(prompt, completion, metadata):
        await everyone.wait()  # passes only if the three calls are under way at once
        return {"n": len(completion)}

    async def notebook():
        return run(reward, deadline=20)

    assert run(reward, deadline=20).rewards.tolist() == [1, 2, 3]
    everyone = asyncio.Barrier(3)
    assert asyncio.run(notebook()).reward_components["n"].tolist() == [1, 2, 3]


def dividing(prompt, completion, metadata):
    return 1 / (len(completion) - 2)


def weighted(prompt, completion, metadata, *, weight):
    raise ValueError("no")


class Short:
    def score_batch(self, prompts, completions, metadata):
        return [1.0]


@for_each(
    ("value", "told"),
    [
        *((x, repr(x)) for x in (None, "1.0", NAN, 1j, b"1", float("inf"), -float("inf"))),
        *((1e300, "1e"), (10**400, "1000"), ([1.0], r"\[1.0\]"), (np.ones(2), "array")),
        (10**5000, "an object of type int"),  # which Python does not write
    ],
)
def test_what_is_no_finite_number_is_refused(value, told):
    with pytest.raises(RewardError, match=f"giving.*{told}.* for prompt 1 .id 'two'"):
        run(giving(value))


@for_each(
    ("reward", "message"),
    [
        *((giving({"a": 1.0, "s": x}, "a"), "as 's' for prompt 0") for x in (None, b"x", 1e999)),
        (giving({"reward": "x"}, "a"), "as 'reward' for prompt 0 .* where a finite number is"),
        (giving({"style": "x"}, "a"), "gave no number for prompt 0 .*; an entry 'reward' must"),
        (giving({"r": 1.0, "t": [1.0, NAN]}, "a"), "as 't' for .* or a list of such"),
        (giving({"r": 1.0, "t": [[1.0], [1.0, 2.0]]}, "a"), "as 't' for prompt 0"),
        (giving({"r": 1.0, "t": ["a"]}, "a"), "as 't' for prompt 0"),
        (
            lambda p, c, m: {"r": 1.0, "t": 1.0 if c == "bb" else "text"},
            "gave a number as 't' for some completions, and a text .* of which one is prompt 1",
        ),
        (
            lambda p, c, m: {"r": 1.0} | ({} if c == "bb" else {"feedback": "text"}),
            r"gave the names \['r'\] for prompt 1 .* but the names \['feedback', 'r'\] before",
        ),
        (giving({"reward": NAN, "a": 1.0}, "a"), "nan as 'reward' for prompt 0"),
        (giving({"a": NAN, "b": NAN}, "a"), "NaN in every entry for prompt 0"),
        *((giving(x, "a"), "at least one name") for x in ({}, {1: 1.0})),
        (giving({"a": 3e38, "b": 3e38}, "a"), "no finite sum for prompt 0"),
        (giving({"a": 1.0}), "names .* for prompt 1 .* but a plain number before"),
        (dividing, "dividing raised ZeroDivisionError on prompt 1 .id 'two'"),
        (lambda p, c, m: exit(3), "SystemExit on prompt 0"),
        (functools.partial(weighted, weight=2), "weighted raised"),
        (Short(), "gave 1 values for 3 prompts"),
    ],
)
def test_bad_rewards_are_named(reward, message):
    with pytest.raises(RewardError, match=message) as caught:
        run(reward)
    assert "\n" not in str(caught.value)


@for_each(
    ("error", "call", "message"),
    bad_calls("""
ValueError:
    score(giving(1.0), [], [], [])  # .*the batch is empty
    score(giving(1.0), ["p"] * 2, ["c"], [{}] * 2)  # .*got 2, 1 and 2
    run(giving(1.0), deadline=0)  # .*deadline must be positive
    run(giving(1.0), deadline=-1.0)  # .*deadline must be positive
    run(giving(1.0), deadline=NAN)  # .*deadline must be positive
    run(giving(1.0), on_error="ignore")  # .*on_error must be .*'ignore'
TypeError:
    run(1.0)  # .*must be callable, got float
"""),
)
def test_bad_calls_are_named(error, call, message):
    raises(error, call, f"!{message}", globals())


def test_a_sync_hang_gives_control_back():
    with freed() as release:
        reward = lambda p, c, m: float(c == "bb" and release.wait(60))  # noqa: E731
        with pytest.raises(RewardError, match="nothing for prompt 1 .id 'two'. within 0.2 s"):
            run(reward, deadline=0.2)


def test_the_deadline_is_for_one_call_not_for_the_batch():
    assert run(lambda *row: time.sleep(0.4) or 1.0, deadline=1.0).rewards.sum() == 3


def test_a_batch_reward_that_never_ends_frees_the_caller():
    class Stuck:
        def score_batch(self, prompts, completions, metadata):
            threading.Event().wait(60)

    class Patient(Stuck):
        patience = 1.0

        def score_batch(self, prompts, completions, metadata):
            time.sleep(0.3)
            return [1.0] * len(prompts)

    class Late(Stuck):
        def score_batch(self, prompts, completions, metadata):
            raise TimeoutError("the judge is away")

    told = "Stuck gave nothing for a batch of 3 .* within 0.1 s"
    with freed(), pytest.raises(RewardError, match=told):
        run(Stuck(), deadline=0.1)
    assert run(Patient(), deadline=0.1).rewards.tolist() == [1.0] * 3  # it minds that itself
    with pytest.raises(TimeoutError, match="the judge is away"):  # an error of its own
        run(Late())


def test_a_thread_of_an_async_reward_that_never_ends_holds_nobody():
    async def reward(prompt, completion, metadata):
        try:
            call = asyncio.to_thread(threading.Event().wait, 60)
            return await asyncio.wait_for(call, timeout=0.1)
        except TimeoutError:
            return 0.5

    with freed():
        assert run(reward).rewards.tolist() == [0.5] * 3


def test_the_first_error_is_told_though_another_call_refuses_to_end():
    async def reward(prompt, completion, metadata):
        if metadata.get("id") == "two":
            await asyncio.sleep(0.1)
            raise ValueError("no")
        for _ in range(600):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    with freed(), pytest.raises(RewardError, match="raised ValueError"):
        run(reward, on_error="raise")


async def faulty(prompt, completion, metadata):
    """Fails at "bb" in the way that FAULT names; other calls answer after that."""
    fault = FAULT[0]
    if completion != "bb":
        await asyncio.sleep(0.05)
        return {"length": len(completion), "one": 1}
    if fault == "raises":
        raise KeyError("no answer")
    if fault == "exits":
        raise SystemExit(3)
    while True:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            if fault != "refuses" or RELEASE.is_set():
                raise


FAULT, RELEASE = ["raises"], threading.Event()
FAULTS = {
    "raises": r"raised KeyError: 'no answer' \(.*test_scoring\.py:\d+\)",
    "exits": r"raised SystemExit: 3 \(.*test_scoring\.py:\d+\)",
    "hangs": "gave nothing within 0.4 s",
    "refuses": "gave nothing within 0.4 s",
}


@for_each(
    ("fault", "on_error"),
    [
        *(("raises", on_error) for on_error in ("drop", "zero", "raise")),
        *(("exits", "drop"), ("hangs", "zero"), ("hangs", "raise"), ("refuses", "drop")),
        ("refuses", "raise"),
    ],
)
def test_one_call_of_an_async_reward_may_fail(fault, on_error):
    FAULT[0], reason = fault, FAULTS[fault]
    RELEASE.clear()
    if on_error == "raise":
        what = r"raised \w+ on prompt 1 \(id 'two'\)|gave nothing for prompt 1 \(id 'two'\)"
        with pytest.raises(RewardError, match=what):
            run(faulty, deadline=0.4, on_error=on_error)
    else:
        told = rf"faulty failed on 1 of 3 completions; the first {reason} on prompt 1 \(id 'two'\)"
        with pytest.warns(VerifierWarning, match=told) as caught:
            scores = run(faulty, deadline=0.4, on_error=on_error)
        assert len(caught) == 1 and scores.failures == 1
        assert scores.rewards.tolist() == [2, 0, 4]
        assert scores.reward_components["length"].tolist() == [1, 0, 3]
        assert scores.failed.tolist() == [False, on_error == "drop", False]
        assert scores.unanswered.tolist() == [False, True, False]
    RELEASE.set()


def test_a_call_that_blocks_the_event_loop_frees_the_caller():
    with freed() as release:

        async def reward(prompt, completion, metadata):
            if completion == "bb":
                release.wait(60)  # the third call cannot begin
            return 1.0

        with pytest.warns(VerifierWarning, match="2 of 3 .* nothing within 0.3 s on prompt 1"):
            assert run(reward, deadline=0.3).failed.tolist() == [False, True, True]


async def away(prompt, completion, metadata):
    raise OSError("the judge is away")


async def ungradable(prompt, completion, metadata):
    raise RewardError("the answer is prose")


async def empty(prompt, completion, metadata):
    return None


@for_each("on_error", ["drop", "zero", "raise"])
@for_each(
    ("reward", "told"),
    [
        (dividing, "ZeroDivisionError on prompt 1"),
        (ungradable, "RewardError on prompt . .*: the answer is prose"),
        (empty, "gave None for prompt 0"),
        (away, None),
    ],
)
def test_mistakes_of_the_code_and_failures_of_all_calls_are_raised(reward, told, on_error):
    if told is None:
        told = "OSErr" if on_error == "raise" else "on all 3 responses; the first raised OSErr"
    with warnings.catch_warnings(), pytest.raises(RewardError, match=told):
        warnings.simplefilter("ignore")
        run(reward, on_error=on_error)


def test_an_attribute_of_a_reward_does_not_make_it_a_pool():
    class Unrelated:
        patience = 5  # as a pool has

        async def __call__(self, prompt, completion, metadata):
            if completion == "bb":
                raise OSError("the judge is away")
            return 1.0

    with pytest.warns(VerifierWarning, match="Unrelated failed on 1 of 3 completions"):
        assert run(Unrelated()).failures == 1


def test_failures_of_a_batch_reward():
    class Partial:
        def score_batch(self, prompts, completions, metadata):
            return [{"a": 2.0}, FAILED, {"a": 3.0}]

    with pytest.warns(VerifierWarning, match="Partial failed on 1 of 3 .* failed on prompt 1"):
        dropped, zeroed = run(Partial()), run(Partial(), on_error="zero")
    assert dropped.failed.tolist() == zeroed.zeroed.tolist() == [False, True, False]
    assert not zeroed.failed.any() and dropped.failures == zeroed.failures == 1
    with pytest.raises(RewardError, match="Reward Partial failed on prompt 1"):
        run(Partial(), on_error="raise")


def test_taken_and_joined_scores_keep_what_does_not_apply_and_what_failed():
    no = np.zeros(2, bool)
    first = Scores(np.float32([1, 2]), {"a": np.float32([NAN, 2])}, no)
    second = Scores(np.float32([3, 0]), {"a": np.float32([3, 0])}, no, ~no & [False, True], "hung")
    dead = Scores(np.zeros(2, np.float32), {}, no, ~no, "died")
    joined = join_scores([first, dead, second])
    np.testing.assert_array_equal(joined.reward_components["a"], [NAN, 2, 0, 0, 3, 0])
    assert joined.zeroed.tolist() == [False, False, True, True, False, True]
    assert joined.failures == 3 and not joined.failed.any() and joined.error == "died"
    taken = joined.take(np.array([5, 0, -1]))
    np.testing.assert_array_equal(taken.reward_components["a"], [0, NAN, 0])
    assert taken.failed.tolist() == [False, False, True]
    assert taken.zeroed.tolist() == [True, False, False] and taken.failures == 2


def speaking(prompt, completion, metadata):
    """A reward with a text, a list and a list of lists."""
    return {
        "reward": len(completion),
        "feedback": f"not {completion}",
        "turn_rewards": [0.5] * len(completion),
        "test_passes": [[True, False]] * len(completion),
    }


def test_texts_and_lists_are_details_which_count_for_nothing_and_stay_with_their_row():
    scores = run(speaking)
    assert scores.rewards.tolist() == [1, 2, 3] and set(scores.reward_components) == {"reward"}
    assert scores.details["feedback"] == ("not a", "not bb", "not ccc")
    assert [x.tolist() for x in scores.details["turn_rewards"]] == [[0.5], [0.5] * 2, [0.5] * 3]
    assert scores.details["test_passes"][1].tolist() == [[1, 0], [1, 0]]
    assert scores.details["test_passes"][1].dtype == np.float32
    taken = pickle.loads(pickle.dumps(scores)).take(np.array([2, -1, 0]))  # as processes exchange
    assert taken.details["feedback"] == ("not ccc", None, "not a")
    assert taken.failed.tolist() == [False, True, False]
    failed = Scores(np.zeros(1, np.float32), {}, np.ones(1, bool))
    joined = join_scores([failed, taken])
    assert joined.details["feedback"] == (None, "not ccc", None, "not a")
    other = Scores(np.zeros(1, np.float32), {"reward": np.zeros(1)}, np.zeros(1, bool))
    with pytest.raises(RewardError, match=r"the names \['reward'\] for one prompt and .*feedback"):
        join_scores([taken, other])

    async def reward(prompt, completion, metadata):
        if completion == "a":
            raise KeyError("x")
        return speaking(prompt, completion, metadata)

    with pytest.warns(VerifierWarning):
        assert run(reward).details["feedback"] == (None, "not bb", "not ccc")


class BrokenError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def unprintable(prompt, completion, metadata):
    raise BrokenError


async def awaited_unprintable(prompt, completion, metadata):
    raise BrokenError


class NoNumber:
    def __float__(self):
        raise OSError("gone")

    __repr__ = __float__


class NoNames(dict):
    def items(self):
        raise KeyError("gone")


@for_each(
    ("reward", "told"),
    [
        (unprintable, "BrokenError on prompt 0 (id 'a'): BrokenError that cannot be printed"),
        (
            awaited_unprintable,
            "BrokenError on prompt 0 (id 'a'): BrokenError that cannot be printed",
        ),
        (lambda *_: NoNumber(), "gave for prompt 0 (id 'a') a NoNumber that cannot be read: OSErr"),
        (lambda *_: {"a": NoNumber()}, "gave for prompt 0 (id 'a') a dict that cannot be read: OS"),
        (lambda *_: NoNames(a=1), "gave for prompt 0 (id 'a') a NoNames that cannot be read: Key"),
    ],
)
def test_what_is_broken_names_the_prompt(reward, told):
    with pytest.raises(RewardError) as error:
        score(reward, ["p"], ["c"], [{"id": "a"}], on_error="raise")
    assert told in str(error.value)


class Recorder:
    """A watchdog that only writes down what it is told."""

    @contextlib.contextmanager
    def watching(self, seconds):
        self.seconds, self.notes = seconds, []
        yield self.notes.append


async def slowly(prompt, completion, metadata):
    await asyncio.sleep(0.01)
    return 1.0


class OneBatch:
    def score_batch(self, prompts, completions, metadata):
        return [1.0] * len(prompts)


@for_each(
    ("reward", "deadline", "told"),
    [
        (giving(1.0), 60.0, ["prompt 0 (id 'one')", "prompt 1 (id 'two')", "prompt 2"]),
        (slowly, 2.0, ["prompt 1 (id 'two') or one of 1 others that are awaited"]),
        (OneBatch(), None, ["3 completions, of which the first is of prompt 0 (id 'one')"]),
    ],
)
def test_what_watches_learns_of_each_call_before_it_begins(reward, deadline, told):
    watch = Recorder()
    grade(reward, PROMPTS, COMPLETIONS, METADATA, deadline=deadline, watch=watch)
    assert watch.seconds == (3600.0 if deadline is None else deadline) + 30.0
    places = [note.partition(" holds the interpreter on ")[2] for note in watch.notes]
    assert [place for place in dict.fromkeys(places) if place in told] == told
