"""The trace of a run in Chrome's trace-event format, which Perfetto opens, with one event on each line.

The file is a closed JSON array after each write. A crash while it is written leaves an array without its end, which
Perfetto opens too.
"""

import io
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from orchestrator.tracing.activity import LOOP, TRACK_PARTS
from orchestrator.tracing.spans import STEPS, Span

TRACKS = (STEPS, LOOP, *TRACK_PARTS)
"""Tracks from top to bottom; others come below them."""
_END = b"\n]\n"
_LANES = 1_000_000
"""Most lanes of a track; lanes of all tracks have numbers of their own."""
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_TAIL = 1 << 16
"""Bytes in which a crash's last whole line is looked for; more than any line has."""


class TraceFile:
    """Appends spans to a trace file, and goes on with that of a resumed run."""

    def __init__(self, path: Path, note: Callable[[str], None], clock_zero_s: float | None = None) -> None:
        """
        Args:
            path: the file; it is made if it does not exist, and mended if a crash cut it short.
            note: gets a message when the file cannot be written; the run goes on without it.
            clock_zero_s: seconds since 1970 at which the spans' clock read 0; by default that of `time.monotonic`.
        """
        self._path, self._note = path, note
        self._clock_zero_s = time.time() - time.monotonic() if clock_zero_s is None else clock_zero_s
        self._pids = {track: pid for pid, track in enumerate(TRACKS, 1)}
        self._known: set[tuple[str, int]] = set()
        self._file: io.BufferedRandom | None = None
        self._end = 0
        """Bytes up to the end of the last event."""
        try:
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._end = _mended(self._file)
        except OSError as error:
            self._give_up(error)

    def write(self, spans: Sequence[Span]) -> None:
        """Appends these spans."""
        if self._file is None or not spans:
            return
        events = [event for span in spans for event in self._events(span)]
        lines = ",\n".join(map(_ENCODE, events)).encode()
        added = (b"[\n" if self._end == 0 else b",\n") + lines
        try:
            self._file.seek(self._end)
            self._file.write(added + _END)
            self._file.flush()
            self._end += len(added)
        except OSError as error:
            self._give_up(error)

    def _events(self, span: Span) -> list[dict[str, Any]]:
        """The span's event, after those that name its track and its lane if they are new."""
        pid = self._pids.setdefault(span.track, len(self._pids) + 1)
        place = {"pid": pid, "tid": pid * _LANES + span.lane}
        began, ended = self._microseconds(span.began), self._microseconds(span.ended)
        event = {"name": span.name, "ph": "X", "ts": began, "dur": ended - began, **place, "args": dict(span.args)}
        if "sample" in span.args:  # an arrow from the sample's generation to its other stages
            event |= {"bind_id": hex(int(span.args["sample"]) + 1)}
            event["flow_out" if span.track == "rollout" else "flow_in"] = True
        new = [] if (span.track, span.lane) in self._known else _names(span, place)
        self._known.add((span.track, span.lane))
        return [*new, event]

    def _microseconds(self, clock: float) -> int:
        return round((self._clock_zero_s + clock) * 1e6)

    def _give_up(self, error: OSError) -> None:
        self._note(f"{self._path} cannot be written ({error}); the run goes on without it")
        self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what a full disk refused is refused again
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_tail(path: Path, size: int = 16 << 20) -> list[Span]:
    """The spans in the last `size` bytes of a trace file, in seconds since 1970, as far as their lines are whole."""
    pids = dict(enumerate(TRACKS, 1))
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().splitlines()
    spans = []
    for line in lines:
        try:
            event = json.loads(line.rstrip(b","))
            if event["ph"] == "X" and event["pid"] in pids:
                began, lane = event["ts"] / 1e6, event["tid"] % _LANES
                ended = (event["ts"] + event["dur"]) / 1e6
                spans.append(Span(pids[event["pid"]], lane, event["name"], began, ended, event["args"]))
        except (ValueError, TypeError, KeyError):
            continue  # the brackets, or a line that is not whole
    return spans


def _names(span: Span, place: dict[str, int]) -> list[dict[str, Any]]:
    lane = span.track if span.lane == 0 else f"{span.track} {span.lane + 1}"
    named = {"process_name": {"name": span.track}, "process_sort_index": {"sort_index": place["pid"]}}
    named |= {"thread_name": {"name": lane}, "thread_sort_index": {"sort_index": span.lane}}
    return [{"name": name, "ph": "M", **place, "args": args} for name, args in named.items()]


def _mended(file: io.BufferedRandom) -> int:
    """Cuts off an unfinished line and the array's end; returns the number of bytes that stay, 0 for no events."""
    size = file.seek(0, io.SEEK_END)
    start = max(0, size - _TAIL)
    file.seek(start)
    tail = file.read(_TAIL)
    # Each event ends a line, with a comma if another follows.
    end = max(tail.rfind(b"}\n"), tail.rfind(b"},\n"))
    kept = start + end + 1 if end >= 0 else 0
    file.truncate(kept)
    return kept
