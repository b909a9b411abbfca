"""The stages of samples as spans, each sample by its number."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from orchestrator.tracing.spans import Spans

TRACKS = {"generate": "rollout", "score": "reward", "reference": "reference", "value": "values"}
"""Stage of a sample -> track of the service that carries it out."""


class SampleStages:
    """Records one span per sample and stage; a span's argument is the sample's number."""

    def __init__(self, spans: Spans, key: str = "sample") -> None:
        """`key` is the argument's name: another one for samples that are numbered by themselves."""
        self._tracks = {stage: spans.on(track) for stage, track in TRACKS.items()}
        self._key = key

    @contextmanager
    def __call__(self, stage: str, numbers: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """Context of a stage of these samples. Gives a function that ends one sample's span, given its number; those
        left end with the block."""
        track = self._tracks[stage]
        spans = {number: track(stage, **{self._key: number}) for number in numbers}
        error = ""
        try:
            yield lambda number: spans[number].end()
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            for span in spans.values():
                span.end(error=error)
