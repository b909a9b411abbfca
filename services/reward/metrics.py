"""Metrics of the reward service, in Prometheus' text format."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from protos import reward_pb2 as pb
from quartet.wire.errors import ServiceError
from quartet.wire.outcomes import Outcome

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Upper ends of the classes of durations."""


class Metrics:
    """Counts the calls that one replica takes, at all doors."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "quartet_reward_calls",
            "Calls by their end: ok, or the name of the gRPC status.",
            ("scorer", "door", "status"),
            registry=registry,
        )
        self._rows = Counter(
            "quartet_reward_rows", "Pairs of answered calls by outcome.", ("scorer", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "quartet_reward_call_seconds",
            "Seconds from a call's arrival at the replica to its answer.",
            ("scorer", "door"),
            buckets=SECONDS,
            registry=registry,
        )
        self._waiting = Gauge(
            "quartet_reward_waiting_rows",
            "Pairs of calls that are not answered yet.",
            ("scorer",),
            registry=registry,
        )

    @contextmanager
    def call(self, scorer: str, door: str, rows: int) -> Iterator[Callable[[pb.ScoreResponse], None]]:
        """Context of a call; gives the function to call with its reply.

        Args:
            scorer: name of one that there is.
            door: `grpc`, or the last part of the path over HTTP.
            rows: pairs of the call.
        """
        began, status = time.perf_counter(), "INTERNAL"

        def answered(reply: pb.ScoreResponse) -> None:
            nonlocal status
            status = "ok"
            for outcome in Outcome:
                count = reply.outcomes.count(outcome) if reply.outcomes else rows * (outcome is Outcome.SCORED)
                if count:
                    self._rows.labels(scorer, outcome.name.lower()).inc(count)

        waiting = self._waiting.labels(scorer)
        waiting.inc(rows)
        try:
            yield answered
        except ServiceError as error:
            status = error.code.name
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        finally:
            waiting.dec(rows)
            self._calls.labels(scorer, door, status).inc()
            self._seconds.labels(scorer, door).observe(time.perf_counter() - began)

    def taken(self) -> list[Metric]:
        """The metrics now."""
        return [*self._registry.collect()]


def text_of(replicas: Sequence[tuple[str, Iterable[Metric]]]) -> bytes:
    """The metrics of all replicas, given by name, as one text, each with the label `replica`."""
    return bytes(generate_latest(_Joined(replicas)))


class _Joined(Collector):
    """Metrics of several registries as those of one."""

    def __init__(self, replicas: Sequence[tuple[str, Iterable[Metric]]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        """All metrics, those of one name together."""
        joined: dict[str, Any] = {}
        for replica, taken in self._replicas:
            for metric in taken:
                made = joined.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    labels = {**sample.labels, "replica": replica}
                    made.samples.append(sample._replace(labels=labels, exemplar=None))
        return joined.values()
