"""Spans: what was done from when to when, recorded while it happens."""

import heapq
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

Result = TypeVar("Result")
Value = int | float | str

STEPS = "steps"
"""Track of whole steps: the windows between two cuts."""
_WRITE_EVERY = 1024
"""Spans after which the recorder writes even within a step."""


class Span(NamedTuple):
    """One thing that was done, in seconds of the recorder's clock."""

    track: str
    """Name of the part that did it, such as `rollout`."""
    lane: int
    """Line of the track, from 0. Spans of one lane do not overlap."""
    name: str
    began: float
    ended: float
    args: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Window:
    """The spans of a stretch of time. They may begin before it; those still open end with it."""

    began: float
    ended: float
    spans: Sequence[Span]


class OpenSpan:
    """A span that goes on. As a context it ends with the block, and an error adds its name as `error`."""

    __slots__ = ("_spans", "args", "began", "lane", "name", "track")

    def __init__(
        self, spans: "Spans", track: str, lane: int, name: str, began: float, args: dict[str, Value]
    ) -> None:
        """Made by a Track."""
        self._spans, self.track, self.lane, self.name, self.began, self.args = spans, track, lane, name, began, args

    def end(self, *, at: float | None = None, error: str = "") -> None:
        """Ends it now or at another time; without effect if it has ended."""
        self._spans.end(self, at, error)

    def until(self, ended: float) -> Span:
        """The span, if it ends then."""
        return Span(self.track, self.lane, self.name, self.began, max(ended, self.began), self.args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._spans.end(self, None, kind.__name__ if kind else "")


class Track:
    """Makes the spans of one track: `with track("train", step=5): ...`."""

    def __init__(self, spans: "Spans", name: str) -> None:
        self._spans, self._name = spans, name

    def __call__(self, name: str, *, at: float | None = None, **args: Value) -> OpenSpan:
        """Begins a span, now or at another time. Spans that overlap get lanes of their own."""
        return self._spans.begin(self._name, name, at, args)

    async def timing(self, name: str, work: Awaitable[Result], **args: Value) -> Result:
        """Awaits `work` within a span."""
        with self._spans.begin(self._name, name, None, args):
            return await work


class Spans:
    """Records spans of one event loop and keeps those of the present step; earlier ones are written and forgotten.

    As a context it writes at its end what has ended until then.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Span]], None] = lambda spans: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`write` is given all spans, each once, in the order in which they ended."""
        self.clock = clock
        self._write = write
        self._open: dict[OpenSpan, None] = {}
        self._ended: list[Span] = []
        self._written = 0
        self._cut = clock()
        self._lanes: defaultdict[str, int] = defaultdict(int)
        self._free: defaultdict[str, list[int]] = defaultdict(list)

    def on(self, track: str) -> Track:
        """The track of this name."""
        return Track(self, track)

    def begin(self, track: str, name: str, at: float | None, args: dict[str, Value]) -> OpenSpan:
        """Begins a span on the lowest free lane of its track."""
        free = self._free[track]
        if free:
            lane = heapq.heappop(free)
        else:
            lane = self._lanes[track]
            self._lanes[track] += 1
        opened = OpenSpan(self, track, lane, name, self.clock() if at is None else at, args)
        self._open[opened] = None
        return opened

    def end(self, opened: OpenSpan, at: float | None, error: str) -> None:
        """Ends a span, unless it has ended."""
        if opened not in self._open:
            return
        del self._open[opened]
        heapq.heappush(self._free[opened.track], opened.lane)
        if error:
            opened.args["error"] = error
        self._keep(opened.until(self.clock() if at is None else at))

    def since(self, began: float) -> list[Span]:
        """Spans of the present step that ended after `began`."""
        return [span for span in self._ended if span.ended > began]

    def cut(self, name: str, **args: Value) -> Window:
        """Ends the present window, which becomes a span of the track `steps`, and begins the next. Writes what has
        ended."""
        now = self.clock()
        window = Window(self._cut, now, [*self._ended, *(opened.until(now) for opened in self._open)])
        self._keep(Span(STEPS, 0, name, self._cut, now, args))
        self._flush()
        self._ended, self._written, self._cut = [], 0, now
        return window

    def _keep(self, span: Span) -> None:
        self._ended.append(span)
        if len(self._ended) - self._written >= _WRITE_EVERY:
            self._flush()

    def _flush(self) -> None:
        self._write(self._ended[self._written :])
        self._written = len(self._ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()


class _Untraced(Spans):
    """Keeps nothing."""

    def _keep(self, span: Span) -> None:
        """Forgets the span."""


UNTRACED = _Untraced()
"""A recorder for what is not part of a run: it keeps and writes nothing."""
