"""The stages of samples as spans, each sample by its number."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from orchestrator.tracing.spans import Spans, Value

TRACKS = {
    "generate": "rollout",
    "answer": "environment",
    "score": "reward",
    "reference": "reference",
    "value": "values",
    "logprobs": "policy",
}
"""Stage of a sample -> track of the model that carries it out."""


class Finish(Protocol):
    """Ends a stage of one sample."""

    def __call__(self, number: int, **args: Value) -> None:
        """Ends the span of sample `number`, and adds arguments to it."""


class SampleStages:
    """Records one span per sample and stage; a span's argument is the sample's number."""

    def __init__(self, spans: Spans, key: str = "sample") -> None:
        """`key` is the argument's name: another one for samples that are numbered by themselves."""
        self._tracks = {stage: spans.on(track) for stage, track in TRACKS.items()}
        self._key = key
        self._clock = spans.clock
        self._under_way: dict[str, dict[int, float]] = {stage: {} for stage in TRACKS}
        """Stage -> number of each sample in it -> when it began."""

    @contextmanager
    def __call__(self, stage: str, numbers: Sequence[int]) -> Iterator[Finish]:
        """Context of a stage of these samples. Gives a function that ends one sample's span; those left end with the
        block."""
        track = self._tracks[stage]
        spans = {number: track(stage, **{self._key: number}) for number in numbers}
        under_way, error, began = self._under_way[stage], "", self._clock()
        under_way.update(dict.fromkeys(numbers, began))

        def finished(number: int, **args: Value) -> None:
            spans[number].args.update(args)
            spans[number].end()
            under_way.pop(number, None)

        try:
            yield finished
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            for number, span in spans.items():
                span.end(error=error)
                if under_way.get(number) == began:  # not of a later turn of the sample
                    del under_way[number]

    def __str__(self) -> str:
        """The services, and the environment, that work on samples now:
        `rollout: 2 samples for up to 31 s, the first is number 64; ...`."""
        now, parts = self._clock(), []
        for stage, under_way in self._under_way.items():
            if under_way:
                count = "1 sample" if len(under_way) == 1 else f"{len(under_way)} samples"
                longest = f"for up to {now - min(under_way.values()):.0f} s, the first is number {min(under_way)}"
                parts.append(f"{TRACKS[stage]}: {count} {longest}")
        return "; ".join(parts) or "no service works on a sample"
