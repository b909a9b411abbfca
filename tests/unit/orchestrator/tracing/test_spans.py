"""The recorder, by a clock that the test sets."""

import asyncio
from itertools import pairwise

import pytest

from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import UNTRACED, Span, Spans
from tests.unit.fake_clock import Clock


def test_a_span_has_its_times_and_an_error_its_name() -> None:
    clock, written = Clock(), list[Span]()

    def fail(spans: Spans) -> None:
        with spans.on("policy")("train", step=4):
            clock.now = 3.0
            raise ValueError("wrong")

    with Spans(written.extend, clock) as spans:
        clock.now = 1.0
        with spans.on("policy")("train", step=3):
            clock.now = 2.5
        with pytest.raises(ValueError, match="wrong"):
            fail(spans)
        spans.on("push")("stage", at=2.0, version=2).end()
    assert written == [
        Span("policy", 0, "train", 1.0, 2.5, {"step": 3}),
        Span("policy", 0, "train", 2.5, 3.0, {"step": 4, "error": "ValueError"}),
        Span("push", 0, "stage", 2.0, 3.0, {"version": 2}),
    ]


def test_what_overlaps_on_a_track_is_on_lanes_of_its_own_and_the_lowest_free_one_is_taken() -> None:
    clock, written = Clock(), list[Span]()
    with Spans(written.extend, clock) as spans:
        track = spans.on("rollout")
        first, second = track("a"), track("b")
        clock.now = 1.0
        first.end()
        third = track("c")  # takes the lane of a, while b goes on
        other = spans.on("reward")("d")
        clock.now = 2.0
        for span in (second, third, other, second):
            span.end()
    assert [(span.name, span.lane, span.began, span.ended) for span in written] == [
        ("a", 0, 0.0, 1.0),
        ("b", 1, 0.0, 2.0),
        ("c", 0, 1.0, 2.0),
        ("d", 0, 1.0, 2.0),
    ]


async def test_tasks_that_run_at_once_do_not_share_a_lane() -> None:
    clock, written = Clock(), list[Span]()

    async def work(track: str, index: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
            clock.now += 1.0
        return index

    with Spans(written.extend, clock) as spans:
        works = [spans.on("x").timing("work", work("x", index, 1 + index % 3), index=index) for index in range(20)]
        assert await asyncio.gather(*works) == list(range(20))
    assert sorted(span.args["index"] for span in written) == list(range(20))
    for lane in {span.lane for span in written}:
        spans_of = sorted((span.began, span.ended) for span in written if span.lane == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(spans_of))


def test_a_window_has_what_ended_in_it_and_what_is_still_open() -> None:
    clock, written = Clock(), list[Span]()
    spans = Spans(written.extend, clock)
    long = spans.on("rollout")("generate")
    clock.now = 4.0
    first = spans.cut("step 1", step=1)
    assert (first.began, first.ended) == (0.0, 4.0)
    assert [(span.name, span.began, span.ended) for span in first.spans] == [("generate", 0.0, 4.0)]
    assert written == [Span("steps", 0, "step 1", 0.0, 4.0, {"step": 1})]  # the open one is written when it ends
    clock.now = 6.0
    long.end()
    second = spans.cut("step 2", step=2)
    assert [(span.name, span.began, span.ended) for span in second.spans] == [("generate", 0.0, 6.0)]
    assert [span.name for span in written] == ["step 1", "generate", "step 2"]


def test_a_long_step_is_written_on_the_way_and_a_cut_forgets_it() -> None:
    written = list[int]()
    spans = Spans(lambda some: written.append(len(some)), Clock())
    for _ in range(3000):
        spans.on("rollout")("x").end()
    assert written == [1024, 1024]
    assert len(spans.cut("step 1").spans) == 3000  # shares need the whole step
    assert written == [1024, 1024, 953]  # 952 and the step itself
    assert spans.since(-1.0) == []


def test_a_sample_that_is_in_a_later_turn_stays_under_way_when_the_call_of_an_earlier_one_ends() -> None:
    clock = Clock()
    with Spans(lambda spans: None, clock) as spans:
        stages = SampleStages(spans)
        first = stages("generate", [7, 8])
        finished = first.__enter__()
        finished(7)
        clock.now = 1.0
        with stages("generate", [7]):
            first.__exit__(None, None, None)
            clock.now = 3.0
            assert str(stages) == "rollout: 1 sample for up to 2 s, the first is number 7"
        assert str(stages) == "no service works on a sample"


def test_without_a_run_nothing_is_kept() -> None:
    UNTRACED.on("rollout")("x").end()
    assert UNTRACED.since(-1.0) == []


def test_a_samples_stage_ends_by_itself_or_with_the_block() -> None:
    clock, written = Clock(), list[Span]()

    def fail(stages: SampleStages) -> None:
        with stages("generate", [7, 8, 9]) as finished:
            clock.now = 1.0
            finished(8)
            finished(8)
            clock.now = 2.0
            raise RuntimeError("the service is lost")

    with Spans(written.extend, clock) as spans, pytest.raises(RuntimeError):
        fail(SampleStages(spans))
    assert [(span.track, span.args, span.ended) for span in written] == [
        ("rollout", {"sample": 8}, 1.0),
        ("rollout", {"sample": 7, "error": "RuntimeError"}, 2.0),
        ("rollout", {"sample": 9, "error": "RuntimeError"}, 2.0),
    ]
