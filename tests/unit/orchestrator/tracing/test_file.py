"""The trace file against a schedule by hand, and after a crash."""

import json
import resource
from pathlib import Path
from typing import Any

from orchestrator.tracing.file import TraceFile, read_tail
from orchestrator.tracing.samples import SampleStages
from orchestrator.tracing.spans import Span, Spans
from tests.unit.fake_clock import Clock


def silent(note: str) -> None:
    raise AssertionError(note)


def a_step(path: Path, epoch: float = 100.0) -> None:
    """One step of two samples that overlap, in a file whose clock's zero is second 100."""
    clock = Clock()
    with TraceFile(path, silent, epoch) as file, Spans(file.write, clock) as spans:
        stages = SampleStages(spans)
        with spans.on("loop")("samples"), stages("generate", [0, 1]) as finished:
            clock.now = 0.5
            finished(1)
            with stages("score", [1]):
                clock.now = 1.25
        with spans.on("policy")("train", step=1):
            clock.now = 2.0000004
        with spans.on("policy")("train", step=2):
            clock.now = 2.0000011
        spans.cut("step 1", step=1)


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


def test_a_schedule_by_hand(tmp_path: Path) -> None:
    a_step(path := tmp_path / "trace.json")
    processes = {e["pid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "process_name"}
    lanes = {e["tid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    drawn = [
        (processes[e["pid"]], lanes[e["tid"]], e["name"], e["ts"], e["dur"], e["args"])
        for e in sorted(events(path), key=lambda e: (e["ts"], e["tid"]))
    ]
    # Microseconds since 1970. Both ends are rounded, so that neighbours in a lane touch and do not overlap.
    assert drawn == [
        ("steps", "steps", "step 1", 100_000_000, 2_000_001, {"step": 1}),
        ("loop", "loop", "samples", 100_000_000, 1_250_000, {}),
        ("rollout", "rollout", "generate", 100_000_000, 1_250_000, {"sample": 0}),
        ("rollout", "rollout 2", "generate", 100_000_000, 500_000, {"sample": 1}),
        ("reward", "reward", "score", 100_500_000, 750_000, {"sample": 1}),
        ("policy", "policy", "train", 101_250_000, 750_000, {"step": 1}),
        ("policy", "policy", "train", 102_000_000, 1, {"step": 2}),
    ]
    # The arrow from a sample's generation to its score.
    arrows = {(e["bind_id"], "flow_out" in e, "flow_in" in e) for e in events(path) if "bind_id" in e}
    assert arrows == {("0x1", True, False), ("0x2", True, False), ("0x2", False, True)}


def test_the_file_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path, silent, 0.0) as file:
        for index in range(3):
            file.write([Span("loop", 0, f"span {index}", index, index + 1, {})])
            assert [event["name"] for event in events(path)] == [f"span {n}" for n in range(index + 1)]
        file.write([])
    assert len(events(path)) == 3


def test_a_resumed_run_goes_on_after_what_a_crash_left(tmp_path: Path) -> None:
    with TraceFile(straight := tmp_path / "straight.json", silent, 100.0) as file:
        file.write([Span("loop", 0, "before", 0, 1, {}), Span("policy", 0, "train", 1, 2, {"step": 1})])
    written = straight.read_bytes()
    for kept in range(len(written)):  # a crash may end a write anywhere
        (path := tmp_path / "trace.json").write_bytes(written[:kept])
        with TraceFile(path, silent, 200.0) as file:
            file.write([Span("loop", 0, "after", 0, 1, {})])
        names = [event["name"] for event in events(path)]
        # An event counts once its line has ended, be it by a comma.
        before = [line for line in written[:kept].splitlines(keepends=True) if line.endswith((b"}\n", b"},\n"))]
        assert names == [event["name"] for event in map(parsed, before) if event["ph"] == "X"] + ["after"]


def parsed(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line.rstrip(b",\n"))
    return event


def test_a_file_of_something_else_is_begun_again(tmp_path: Path) -> None:
    (path := tmp_path / "trace.json").write_text("not a trace")
    a_step(path)
    assert len(events(path)) == 7


def test_a_disk_that_is_full_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    notes, before = list[str](), resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "trace.json"
    with TraceFile(path, notes.append, 0.0) as file:
        file.write([Span("loop", 0, "a", 0, 1, {})])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
        try:
            file.write([Span("loop", 0, "b", 1, 2, {})])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.write([Span("loop", 0, "c", 2, 3, {})])
    assert notes == [f"{path} cannot be written ([Errno 27] File too large); the run goes on without it"]
    assert [span.name for span in read_tail(path)] == ["a"]


def test_a_trace_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    notes = list[str]()
    with TraceFile(tmp_path, notes.append, 0.0) as file:
        file.write([Span("loop", 0, "a", 0, 1, {})])
    assert notes == [
        f"{tmp_path} cannot be written ([Errno 21] Is a directory: '{tmp_path}'); the run goes on without it"
    ]


def test_the_tail_gives_the_spans_back(tmp_path: Path) -> None:
    a_step(path := tmp_path / "trace.json")
    spans = read_tail(path)
    assert spans[0] == Span("rollout", 1, "generate", 100.0, 100.5, {"sample": 1})
    assert [span.name for span in spans] == ["generate", "score", "generate", "samples", "train", "train", "step 1"]
    assert read_tail(path, size=150)[-1].name == "step 1"  # begins in the middle of a line
    assert len(read_tail(path, size=150)) < 7
