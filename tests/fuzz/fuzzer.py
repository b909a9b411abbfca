"""Makes the calls, a few at a time, and judges every reply."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.fuzz.generator import Request

DEADLINE_S = 60.0
AT_ONCE = 16

NAMED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Codes with which a caller's mistake may be answered."""
TIMED = b"/quartet.v1.Rollout/UpdateWeights"
"""A method whose requests say how long they may take, so the answer may also be that this was too short."""

LEAKS = {
    "a path": re.compile(r"(?<![\w.])/(?!quartet\.v1\.)[\w.-]+/[\w./-]+"),
    "an address": re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+"),
    "a memory address": re.compile(r"0x[0-9a-f]{6,}"),
    "a traceback": re.compile(r"Traceback|File \"|\bline \d+\b"),
    "a process id": re.compile(r"\bpid[ =]\d+"),
}


@dataclass
class Verdict:
    """The result of a round of fuzzing."""

    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Replies that break the promise, each with the number that reproduces it."""
    slowest_s: float = 0.0
    slowest: str = ""

    def add(self, request: Request, code: grpc.StatusCode, details: str, seconds: float) -> None:
        """Counts a reply and notes what is wrong with it."""
        self.codes[code.name] += 1
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, f"{request.method!r} (request {request.number})"
        where = f"request {request.number}, {request.kind} {request.method!r}"
        timed = code is grpc.StatusCode.DEADLINE_EXCEEDED and request.method == TIMED
        if code is not grpc.StatusCode.OK and code not in NAMED and not timed:
            self.faults.append(f"{where}: {code.name}: {details[:300]}")
        elif seconds > 0.9 * DEADLINE_S:
            self.faults.append(f"{where}: {code.name} after {seconds:.0f} s")
        elif code is not grpc.StatusCode.OK and not details:
            self.faults.append(f"{where}: {code.name} without a word")
        for leak, pattern in LEAKS.items():
            if leaked := pattern.search(details):
                self.faults.append(f"{where}: {code.name} tells {leak}: {leaked[0]!r} in {details[:300]!r}")


async def fuzz(channel: grpc.aio.Channel, requests: Iterable[Request]) -> Verdict:
    """Makes all calls, AT_ONCE of them at a time."""
    verdict, waiting = Verdict(), iter(requests)

    async def caller() -> None:
        for request in waiting:
            began = time.monotonic()
            code, details = await _call(channel, request)
            verdict.add(request, code, details, time.monotonic() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(caller())
    return verdict


async def _call(channel: grpc.aio.Channel, request: Request) -> tuple[grpc.StatusCode, str]:
    name: Any = request.method  # which gRPC sends as it is
    try:
        if request.streams:
            await _read(channel.unary_stream(name)(request.data, **_options(request)), request.leave_after)
        else:
            await channel.unary_unary(name)(request.data, **_options(request))
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details() or "")
    return grpc.StatusCode.OK, ""


def _options(request: Request) -> dict[str, object]:
    return {"metadata": request.metadata, "timeout": DEADLINE_S}


async def _read(stream: grpc.aio.UnaryStreamCall, leave_after: int | None) -> None:
    """Reads to the end, or leaves early, as a caller does that is killed or cancelled."""
    if leave_after == 0:
        await asyncio.sleep(0.01)
        stream.cancel()
        return
    messages = 0
    async for _ in stream:
        messages += 1
        if messages == leave_after:
            stream.cancel()
            return
