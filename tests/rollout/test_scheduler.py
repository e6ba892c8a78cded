"""The host's bookkeeping without a device: every request is in one place, and leaves once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout import Completion, Group
from jaxrl_llm.rollout.engine.requests import limits_of
from jaxrl_llm.rollout.engine.scheduler import Board
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, STOP, UNFINISHED

T = 9


def completion(request, n, finish):
    return Completion(request, Tokens(*[[0] * n] * 5), finish)


class Run:
    """Random moves on a board; what a request has is only ever its number of tokens."""

    def __init__(self, draw, shards):
        self.draw, self.board = draw, Board(4, 2, shards)
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
        self.board.submit([(group, limits_of(group, T))])

    def begin(self):
        board, before = self.board, set(self.board.held)
        starts = board.begin()
        assert len(starts) == len({each.place for each in starts})
        assert set(board.held) == before | {each.request for each in starts}
        for each in starts:
            assert board.rows[each.place[0]] is each.group
            assert board.seen[each.request] == self.tokens.get(each.request, 0)
        # No slot stays free that a waiting sibling of its row could take, nor any row for a group.
        for row, group in enumerate(board.rows):
            assert group is None or not group.waiting or board.busy[row].all()
            assert group is not None or not board.queue

    def end(self):
        finish = [STOP, CANCELLED, UNFINISHED][self.number(2)]
        waits = [r for g in self.board.groups.values() for r in g.waiting]
        places = sorted(self.board.held) if self.number(2) else sorted(set(waits))
        if places and (finish != UNFINISHED or places == sorted(self.board.held)):
            request = places[self.number(len(places) - 1)]
            self.tokens[request] = self.tokens.get(request, 0) + 1
            self.board.end(request, completion(request, self.tokens[request], finish))
            self.board.clear_rows()

    def fork(self):
        if held := sorted(self.board.held):
            request = held[self.number(len(held) - 1)]
            place = self.board.spare(request)
            if place is not None:
                size = 4 // self.board.shards
                assert place[0] // size == self.board.held[request][0] // size
                self.board.fork(request, self.next, place)
                self.submitted[self.next] = self.submitted[request]
                self.tokens[self.next] = self.board.seen[request]
                self.next += 1

    def take(self):
        while self.board.ready:
            done = self.board.ready.popleft()
            for each in done.completions:
                assert each.request not in self.handed
                self.handed[each.request] = done.id

    def stop(self):
        for request in list(self.board.held):
            n = self.tokens.setdefault(request, 0)
            self.board.end(request, completion(request, n, UNFINISHED))
        rest = self.board.rest()
        self.board = Board(4, 2, self.board.shards)
        for group in rest:
            self.board.submit([(group, limits_of(group, T))])

    def check(self):
        """Every request is handed out, ready, or in one place of its group."""
        board = self.board
        ready = {c.request: done.id for done in board.ready for c in done.completions}
        there = {r: group.group.id for r, group in board.groups.items()}
        assert len(ready) + len(there) + len(self.handed) == len(self.submitted)
        assert ready | there | self.handed == self.submitted
        for group in {id(g): g for g in board.groups.values()}.values():
            held = {r for r in group.limits if r in board.held}
            parts = [held, set(group.waiting), set(group.done)]
            aside = set(group.begun) - held - set(group.waiting)
            assert sum(map(len, parts)) + len(aside) == len(group.limits)
            assert group.running == len(held) and set().union(*parts, aside) == set(group.limits)
            assert (group in board.aside) == (not held and not group.waiting)
        busy = {place: r for r, place in board.held.items()}
        assert len(busy) == len(board.held) == board.busy.sum() and set(board.seen) == set(
            board.held
        )
        for (row, column), request in busy.items():
            assert board.busy[row, column] and board.rows[row] is board.groups[request]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_requests_are_neither_lost_nor_doubled(data):
    run = Run(data.draw, shards=data.draw(st.sampled_from([1, 2])))
    moves = [run.submit, run.begin, run.end, run.end, run.fork, run.take, run.stop]
    for _ in range(data.draw(st.integers(5, 40))):
        data.draw(st.sampled_from(moves))()
        run.check()
    # In the end all are answered.
    run.stop()
    for _ in range(10_000):
        run.begin()
        if not run.board.held:
            break
        for request in list(run.board.held):
            run.board.end(request, completion(request, 1, STOP))
        run.board.clear_rows()
    run.take()
    assert run.handed == run.submitted and not run.board.groups and not run.board.open
