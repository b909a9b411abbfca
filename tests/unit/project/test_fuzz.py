"""The fuzzer itself: what it sends, and that it tells a broken promise from a kept one."""

import grpc
import pytest

from tests.fuzz.fuzzer import Verdict
from tests.fuzz.generator import METHODS, requests


def test_the_same_seed_gives_the_same_requests_over_every_method() -> None:
    first, again = list(requests(3, 3000)), list(requests(3, 3000))
    assert first == again
    asked = {request.method for request in first}
    assert asked >= {f"/{method.containing_service.full_name}/{method.name}".encode() for method in METHODS}
    assert {request.kind for request in first} == {"structured", "mutated", "random"}
    assert any(not request.metadata for request in first)
    assert any(request.leave_after is not None for request in first)


@pytest.mark.parametrize(
    ("code", "details", "fault"),
    [
        (grpc.StatusCode.OK, "", None),
        (grpc.StatusCode.INVALID_ARGUMENT, "pairs.prompts: empty; send at least one", None),
        (grpc.StatusCode.UNIMPLEMENTED, "/quartet.v1.Reward/Nothing: there is no such method", None),
        (grpc.StatusCode.INVALID_ARGUMENT, "", "without a word"),
        (grpc.StatusCode.INTERNAL, "Score: internal error", "INTERNAL"),
        (grpc.StatusCode.UNAVAILABLE, "the replica died", "UNAVAILABLE"),
        (grpc.StatusCode.NOT_FOUND, "no such file: /home/me/x", "a path"),
        (grpc.StatusCode.INVALID_ARGUMENT, "from 10.0.0.5:4711", "an address"),
        (grpc.StatusCode.INVALID_ARGUMENT, "<object at 0x7f0012ab34cd>", "a memory address"),
        (grpc.StatusCode.INVALID_ARGUMENT, 'Traceback: File "x.py"', "a traceback"),
        (grpc.StatusCode.NOT_FOUND, "actor (pid=4711)", "a process id"),
    ],
)
def test_a_reply_is_judged(code: grpc.StatusCode, details: str, fault: str | None) -> None:
    verdict = Verdict()
    verdict.add(next(iter(requests(0, 1))), code, details, 0.1)
    assert bool(verdict.faults) == (fault is not None)
    assert fault is None or fault in verdict.faults[0]
