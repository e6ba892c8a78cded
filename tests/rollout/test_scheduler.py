"""The scheduler without a device: every request is in one state, and is handed out once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout import Completion, Group
from jaxrl_llm.rollout.engine.requests import limits_of
from jaxrl_llm.rollout.engine.scheduler import Scheduler
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, STOP, UNFINISHED

T = 9


def completion(request, n, finish):
    return Completion(request, Tokens(*[[0] * n] * 5), finish)


class Run:
    """Random moves; of the tokens of a request only their number is modeled."""

    def __init__(self, draw, shards):
        self.draw, self.scheduler = draw, Scheduler(4, 2, shards)
        self.next, self.submitted, self.handed, self.tokens = 0, {}, {}, {}

    def number(self, most):
        return self.draw(st.integers(0, most))

    def submit(self):
        size = 1 + self.number(4)
        requests = tuple(range(self.next, self.next + size))
        self.next += size
        expected = float(self.number(T)) if self.number(1) else None
        group = Group(requests[0], [1], requests, expected=expected)
        self.submitted |= dict.fromkeys(requests, requests[0])
        self.scheduler.submit([(group, limits_of(group, T))])

    def begin(self):
        scheduler, before = self.scheduler, set(self.scheduler.slots)
        starts = scheduler.start_requests()
        assert len(starts) == len({each.slot for each in starts})
        assert set(scheduler.slots) == before | {each.request for each in starts}
        for each in starts:
            assert scheduler.rows[each.slot[0]] is each.group
            assert scheduler.lengths[each.request] == self.tokens.get(each.request, 0)
        # No slot stays free that a waiting sibling of its row could take, nor any row for a group.
        for row, group in enumerate(scheduler.rows):
            assert group is None or not group.waiting or scheduler.busy[row].all()
            assert group is not None or not scheduler.queue

    def end(self):
        finish = [STOP, CANCELLED, UNFINISHED][self.number(2)]
        waiting = [r for g in self.scheduler.groups.values() for r in g.waiting]
        running = sorted(self.scheduler.slots)
        requests = running if self.number(2) else sorted(set(waiting))
        if requests and (finish != UNFINISHED or requests == running):
            request = requests[self.number(len(requests) - 1)]
            self.tokens[request] = self.tokens.get(request, 0) + 1
            self.scheduler.end(request, completion(request, self.tokens[request], finish))
            self.scheduler.free_rows()

    def fork(self):
        if running := sorted(self.scheduler.slots):
            request = running[self.number(len(running) - 1)]
            slot = self.scheduler.slot_for_fork(request)
            if slot is not None:
                size = 4 // self.scheduler.shards
                assert slot[0] // size == self.scheduler.slots[request][0] // size
                self.scheduler.fork(request, self.next, slot)
                self.submitted[self.next] = self.submitted[request]
                self.tokens[self.next] = self.scheduler.lengths[request]
                self.next += 1

    def take(self):
        while self.scheduler.finished:
            done = self.scheduler.finished.popleft()
            for each in done.completions:
                assert each.request not in self.handed
                self.handed[each.request] = done.id

    def stop(self):
        for request in list(self.scheduler.slots):
            n = self.tokens.setdefault(request, 0)
            self.scheduler.end(request, completion(request, n, UNFINISHED))
        rest = self.scheduler.unfinished()
        self.scheduler = Scheduler(4, 2, self.scheduler.shards)
        for group in rest:
            self.scheduler.submit([(group, limits_of(group, T))])

    def check(self):
        """Every request is handed out, finished, or in one state of its group."""
        scheduler = self.scheduler
        finished = {c.request: done.id for done in scheduler.finished for c in done.completions}
        opened = {r: group.group.id for r, group in scheduler.groups.items()}
        assert len(finished) + len(opened) + len(self.handed) == len(self.submitted)
        assert finished | opened | self.handed == self.submitted
        for group in {id(g): g for g in scheduler.groups.values()}.values():
            running = {r for r in group.limits if r in scheduler.slots}
            states = [running, set(group.waiting), set(group.done)]
            states.append(set(group.partial) - running - set(group.waiting))
            assert sum(map(len, states)) == len(group.limits)
            assert group.running == len(running) and set().union(*states) == set(group.limits)
            assert (group in scheduler.paused) == (not running and not group.waiting)
        busy = {slot: r for r, slot in scheduler.slots.items()}
        assert len(busy) == len(scheduler.slots) == scheduler.busy.sum()
        assert set(scheduler.lengths) == set(scheduler.slots)
        for (row, column), request in busy.items():
            assert scheduler.busy[row, column] and scheduler.rows[row] is scheduler.groups[request]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_no_request_is_lost_or_handed_out_twice(data):
    run = Run(data.draw, shards=data.draw(st.sampled_from([1, 2])))
    moves = [run.submit, run.begin, run.end, run.end, run.fork, run.take, run.stop]
    for _ in range(data.draw(st.integers(5, 40))):
        data.draw(st.sampled_from(moves))()
        run.check()
    # In the end all are answered.
    run.stop()
    for _ in range(10_000):
        run.begin()
        if not run.scheduler.slots:
            break
        for request in list(run.scheduler.slots):
            run.scheduler.end(request, completion(request, 1, STOP))
        run.scheduler.free_rows()
    run.take()
    assert run.handed == run.submitted and not run.scheduler.groups and not run.scheduler.has_work
