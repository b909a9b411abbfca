"""The loop's own track: what it waits for, and at the end of a step the shares of its time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from orchestrator.tracing.activity import PARTS, TRACK_PARTS, stretches
from orchestrator.tracing.shares import WALL, generation_speed, shares
from orchestrator.tracing.spans import OpenSpan, Spans, Track


class Waits:
    """Records the loop's waits: `with waits("push"): ...`. Time outside of them is the loop's own work."""

    def __init__(self, spans: Spans, parts: Sequence[str] = PARTS) -> None:
        """`parts` are those of activity.PARTS that the run has."""
        self._spans = spans
        self._track = spans.on("loop")
        self._parts = parts

    def __call__(self, name: str) -> OpenSpan:
        """Begins a wait; its name is one of activity.AWAITED."""
        return self._track(name)

    def on(self, track: str) -> Track:
        """The track of a part that the loop has work."""
        return self._spans.on(track)

    @contextmanager
    def for_batch(self) -> Iterator[set[int]]:
        """Context of the wait for a batch, whose samples' numbers are to be put into the set that it gives.

        The wait is for samples until the last of them was generated and answered, then for scores until the last was
        scored, referenced and valued, then for log-probs if the policy took the last of them later. The rest, such as
        the journal, is the loop's own work.
        """
        numbers: set[int] = set()
        samples = self._track("samples")
        try:
            yield numbers
        except BaseException as error:
            samples.end(error=type(error).__name__)
            raise
        generated = self._last(numbers, {"rollout", "environment"}, samples.began)
        scored = self._last(numbers, {"scoring"}, generated)
        samples.end(at=generated)
        self._track("scores", at=generated).end(at=scored)
        if (own := self._last(numbers, {"policy"}, scored)) > scored:
            self._track("logprobs", at=scored).end(at=own)

    def _last(self, numbers: set[int], parts: set[str], began: float) -> float:
        """The time at which these parts had done with the last of these samples; not before `began`."""
        ends = [
            span.ended
            for span in self._spans.since(began)
            if TRACK_PARTS.get(span.track) in parts and span.args.get("sample") in numbers
        ]
        return max(ends, default=began)

    def begin(self) -> None:
        """Begins the time of the first step."""
        self._spans.cut("start")

    def step(self, step: int) -> dict[str, float]:
        """Ends the time of a step: the metrics of who worked and who waited for whom in it, and the speed of
        generation."""
        window = self._spans.cut(f"step {step}", step=step)
        metrics = {WALL: window.ended - window.began} | shares(stretches(window, self._parts))
        return metrics | generation_speed(window, metrics.get("work/rollout", 0.0))
