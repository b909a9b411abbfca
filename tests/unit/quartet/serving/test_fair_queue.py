"""The order in which callers' rows are taken."""

from collections import Counter

import numpy as np

from quartet.serving.fair_queue import MOST_PASSED_OVER, FairQueue, Slice
from quartet.serving.share import Share
from quartet.wire.callers import Purpose

A, B, C = (Share(name, Purpose.TRAINING) for name in "abc")
EVALUATION, FOREIGN = Share("a", Purpose.EVALUATION), Share("z", Purpose.FOREIGN)


def costs(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.asarray(tokens, np.int32)


def plain(slices: list[Slice[str]]) -> list[tuple[str, list[int], int]]:
    return [(part.call, part.rows.tolist(), part.tokens) for part in slices]


def test_the_rows_of_a_call_come_shortest_first_and_each_once() -> None:
    queue: FairQueue[str] = FairQueue(100)
    queue.add(A, "call", costs(3, 1, 2, 9))
    assert plain(queue.take(Purpose.TRAINING, 6, 10)) == [("call", [1, 2, 0], 6)]
    assert plain(queue.take(Purpose.TRAINING, 6, 10)) == [("call", [3], 9)]
    assert not queue
    assert queue.take(Purpose.TRAINING, 6, 10) == []


def test_no_more_rows_than_asked() -> None:
    queue: FairQueue[str] = FairQueue(100)
    queue.add(A, "call", costs(*[1] * 5))
    assert [len(queue.take(Purpose.TRAINING, 100, 2)[0].rows) for _ in range(3)] == [2, 2, 1]


def test_callers_get_equal_tokens_however_their_rows_are_cut() -> None:
    queue: FairQueue[str] = FairQueue(16)
    queue.add(A, "long rows", costs(*[40] * 500))
    queue.add(B, "short rows", costs(*[1] * 20_000))
    for call in range(50):
        queue.add(C, f"call {call}", costs(*[7] * 50))
    served: Counter[str] = Counter()
    for _ in range(100):
        for part in queue.take(Purpose.TRAINING, 128, 1024):
            served[part.call.split()[0]] += part.tokens
    assert sum(served.values()) > 100 * 128 / 2
    assert max(served.values()) - min(served.values()) <= 40 + 2 * 16


def test_a_caller_that_comes_late_is_not_behind_what_waits() -> None:
    queue: FairQueue[str] = FairQueue(8)
    for call in range(100):
        queue.add(A, f"early {call}", costs(*[8] * 10))
    queue.add(B, "late", costs(8, 8))
    first = queue.take(Purpose.TRAINING, 32, 1024)
    assert sum(len(part.rows) for part in first if part.call == "late") == 2


def test_what_waits_behind_higher_purposes_waits_so_many_turns_and_no_more() -> None:
    queue: FairQueue[str] = FairQueue(8)
    queue.add(FOREIGN, "foreign", costs(*[1] * 1000))
    queue.add(EVALUATION, "evaluation", costs(*[1] * 1000))
    queue.add(A, "training", costs(*[1] * 1000))
    turns = []
    for _ in range(100):
        purpose = queue.next_purpose()
        assert purpose is not None
        assert queue.take(purpose, 1, 1024)
        turns.append(purpose)
    assert turns[:MOST_PASSED_OVER] == [Purpose.TRAINING] * MOST_PASSED_OVER
    assert turns[MOST_PASSED_OVER : MOST_PASSED_OVER + 2] == [Purpose.EVALUATION, Purpose.FOREIGN]
    assert Counter(turns)[Purpose.TRAINING] >= 75
    assert min(Counter(turns).values()) >= 9


def test_what_is_given_back_comes_next_and_as_it_was() -> None:
    queue: FairQueue[str] = FairQueue(8)
    queue.add(A, "one", costs(1))
    queue.add(B, "two", costs(1))
    parts = queue.take(Purpose.TRAINING, 8, 8)
    queue.add(C, "three", costs(1))
    queue.again(Purpose.TRAINING, parts[1:])
    queue.again(Purpose.TRAINING, parts[:1])
    taken = [[part.call for part in queue.take(Purpose.TRAINING, 8, 8)] for _ in range(3)]
    assert taken == [["one"], ["two"], ["three"]]


def test_a_dropped_call_leaves_nothing() -> None:
    queue: FairQueue[str] = FairQueue(8)
    queue.add(A, "one", costs(1))
    queue.add(A, "two", costs(1))
    queue.drop(A, "one")
    assert plain(queue.take(Purpose.TRAINING, 8, 8)) == [("two", [0], 1)]
    queue.add(A, "three", costs(1))
    queue.drop(A, "three")
    queue.drop(A, "three")
    assert not queue
    assert queue.next_purpose() is None


def test_a_caller_that_pauses_is_passed_over_and_loses_nothing() -> None:
    queue: FairQueue[str] = FairQueue(8)
    queue.add(A, "one", costs(1))
    queue.pause(A)
    queue.add(A, "two", costs(1))
    assert not queue
    queue.add(B, "three", costs(1))
    assert plain(queue.take(Purpose.TRAINING, 8, 8)) == [("three", [0], 1)]
    queue.resume(A)
    assert [part.call for part in queue.take(Purpose.TRAINING, 8, 8)] == ["one", "two"]
    queue.pause(B)
    queue.drop(B, "three")
    queue.resume(B)
    assert not queue
