"""The callers, the pusher and the killer of a campaign, and its verdict."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray

from orchestrator.push.newcomers import registered
from orchestrator.push.pusher import WeightPusher
from quartet.wire.errors import ServiceError
from services.rollout.client import RolloutClient
from tests import plain
from tests.cluster import Quartet, eventually, rollouts, titled
from tests.models import BOS
from tests.newcomers import adding_newcomers, once
from tests.pushing import ModelSource, hold, make_pusher
from tests.streams.certain import become, token_of

TOGETHER = 16
"""Streams that are open at a time."""
TOKENS = 100
LEFT = 0.75
"""Part of the streams that their callers leave; the others are read to their end."""
MOST_EVENTS = 12
"""Most events that are read of one that is left."""
END_S = 60.0
"""Seconds within which a stream has to end."""
WHOLE_S = 120.0
"""Seconds within which replicas have to be back, and the requests of callers that left have to have ended."""
_LEASE_S, CLAIM_S = 600.0, 5.0


@dataclass
class Verdict:
    """Outcomes of the streams, and all that is wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    """Ways in which streams ended, with the reasons of errors -> their number."""
    tokens: int = 0
    """Tokens that were compared with what the weights of their version compute."""
    across: int = 0
    """Replies with tokens of several versions."""
    pushes: int = 0
    tries: int = 0
    """Tries of all pushes."""
    kills: int = 0
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def streams(self) -> int:
        """Number of streams that have ended."""
        return self.ends.total()

    @property
    def wrong(self) -> list[str]:
        """All problems, and what nothing was learned of, as where each stream is refused with a reason."""
        told = {"no token was compared": self.tokens, "no stream was read to its end": self.ends["whole"]}
        return self.problems + [problem for problem, count in told.items() if not count]


async def campaign(
    quartet: Quartet,
    seed: int,
    streams: int,
    seconds: float,
    push_every_s: float,
    kill_every_s: float,
    say: Callable[[str], None],
) -> Verdict:
    """Opens so many streams, none after so many seconds, while there is a push and a killed replica whenever so many
    seconds have passed."""
    until = time.monotonic() + seconds
    verdict, draw, numbers = Verdict(), random.Random(seed), itertools.count()
    proxies = titled(quartet, "ray::ProxyActor")
    async with _pushing(quartet) as (pusher, model), _session(quartet) as session:

        async def call() -> None:
            while (number := next(numbers)) < streams and time.monotonic() < until:
                await _stream(session, number, draw, verdict)
                if verdict.streams % 500 == 0:
                    say(f"{verdict.streams} streams, {verdict.pushes} pushes, {verdict.kills} kills")

        ending = asyncio.Event()
        around = [
            asyncio.create_task(_push(quartet.services.rollout, pusher, model, push_every_s, ending, verdict)),
            asyncio.create_task(_kill(quartet, kill_every_s, draw, ending, verdict)),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(TOGETHER):
                    group.create_task(call())
        finally:
            ending.set()
            await asyncio.gather(*around)
        say("all streams have ended")
        await _settled(quartet, verdict)
    if titled(quartet, "ray::ProxyActor") != proxies:
        verdict.problems.append("the proxy was replaced")
    return verdict


@asynccontextmanager
async def _pushing(quartet: Quartet) -> AsyncIterator[tuple[WeightPusher, Any]]:
    """A pusher of a model's weights, which lets newcomers in as that of a run does."""
    os.environ["RAY_AUTH_TOKEN_PATH"] = quartet.cluster.token
    ray.init(address=quartet.cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        rollout, model = quartet.services.rollout, plain.language_model(quartet.policy)
        await hold(rollout)
        async with (
            registered("rollout", once) as desk,
            make_pusher(rollout, ModelSource(model), attempts=5) as pusher,
            adding_newcomers(pusher, desk, rollout.lease, _LEASE_S),
        ):
            yield pusher, model
    finally:
        ray.shutdown()


@asynccontextmanager
async def _session(quartet: Quartet) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{quartet.http}/rollout/",
        headers={"Authorization": f"Bearer {quartet.token}"},
        timeout=aiohttp.ClientTimeout(total=END_S),
    ) as session:
        yield session


async def _push(
    rollout: RolloutClient, pusher: WeightPusher, model: Any, every_s: float, ending: asyncio.Event, verdict: Verdict
) -> None:
    """Pushes one version after the other until the campaign ends, and renews the lease."""
    for version in itertools.count(1):
        began = time.monotonic()
        become(model, version)
        try:
            with contextlib.suppress(ServiceError):  # of a replica that was killed; a lost lease fails the push
                await rollout.claim(rollout.lease, _LEASE_S, CLAIM_S)
            report = await pusher.push(version)
        except Exception as error:  # which would end a run
            verdict.problems.append(f"the push of version {version} failed: {error}")
            return
        verdict.pushes += 1
        verdict.tries += report.attempts
        if await _ends(ending, began + every_s - time.monotonic()):
            return


async def _kill(
    quartet: Quartet, every_s: float, draw: random.Random, ending: asyncio.Event, verdict: Verdict
) -> None:
    """Kills one replica after the other, each only while another one serves."""
    while not await _ends(ending, every_s):
        while len(running := await _running(quartet)) < quartet.rollout_replicas:
            if await _ends(ending, 0.2):
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(running), signal.SIGKILL)
            verdict.kills += 1


async def _running(quartet: Quartet) -> list[int]:
    """Process ids of the replicas that run; empty while Serve does not say."""
    with contextlib.suppress(OSError, KeyError):
        return list((await asyncio.to_thread(rollouts, quartet)).values())
    return []


async def _ends(ending: asyncio.Event, within_s: float) -> bool:
    """Waits so many seconds; True if the campaign ends meanwhile."""
    try:
        async with asyncio.timeout(max(within_s, 0.0)):
            await ending.wait()
    except TimeoutError:
        pass
    return ending.is_set()


async def _stream(session: aiohttp.ClientSession, number: int, draw: random.Random, verdict: Verdict) -> None:
    """One stream, left or read to its end, and what is wrong with it."""
    read = draw.randrange(MOST_EVENTS + 1) if draw.random() < LEFT else None
    prompt = [BOS, *(draw.randrange(4, 64) for _ in range(draw.randrange(1, 12)))]
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    began = time.monotonic()
    reply = _Reply()
    try:
        async with session.post("v1/completions", json=body) as got:
            if got.status != 200:
                end = _reason((await got.json())["error"])
            else:
                end = await reply.read(got, read)
    except Exception as error:
        verdict.problems.append(f"stream {number}: {type(error).__name__}: {error}, after {reply.tokens} tokens")
        end = "none"
    took = time.monotonic() - began
    verdict.ends[end] += 1
    verdict.slowest_s = max(verdict.slowest_s, took)
    verdict.tokens += reply.tokens
    verdict.across += len(reply.spans) > 1
    verdict.problems += [f"stream {number}: {problem}" for problem in reply.problems]


class _Reply:
    """A stream as far as it was read."""

    def __init__(self) -> None:
        self.tokens = 0
        self.spans: list[dict[str, int]] = []
        self.problems: list[str] = []
        self._ids: list[int] = []

    async def read(self, got: aiohttp.ClientResponse, most: int | None) -> str:
        """Reads so many events, or all; how the stream has ended.

        Raises:
            ValueError: it ended without an answer or an error.
        """
        if most == 0:
            got.close()
            return "left"
        events = 0
        finished = None
        async for line in got.content:
            text = line.decode().strip()
            if not text:
                continue
            content = text.removeprefix("data: ")
            if content == "[DONE]":
                if finished != "length" or self.tokens != TOKENS:
                    raise ValueError(f"the answer has {self.tokens} tokens and ends by {finished}")
                return "whole"
            event = json.loads(content)
            if "error" in event:
                return _reason(event["error"])
            [choice] = event["choices"]
            self._take(event["policy_version"], choice)
            finished = choice["finish_reason"] or finished
            events += 1
            if events == most:
                got.close()
                return "left"
        raise ValueError("the stream ends without an answer or an error")

    def _take(self, version: int, choice: dict[str, Any]) -> None:
        """Compares the tokens of one event, and all before it, with what the weights that are named compute."""
        self._ids += choice["token_ids"] or ()
        self.tokens, self.spans = len(self._ids), choice["version_spans"]
        named = [span["version"] for span in self.spans for _ in range(span["end"] - span["start"])]
        if self._ids != [token_of(each) for each in named]:
            self.problems.append(f"tokens {self._ids} in spans {self.spans}")
        if named and version != named[-1]:
            self.problems.append(f"policy_version {version} in spans {self.spans}")


def _reason(error: dict[str, Any]) -> str:
    """An error's status and message, which it has to have."""
    if not error["message"]:
        raise ValueError("an error without a message")
    return f"{error['code']}: {error['message']}"


async def _settled(quartet: Quartet, verdict: Verdict) -> None:
    """Notes a problem unless all replicas are back and idle in time."""

    async def idle() -> bool:
        if len(await _running(quartet)) < quartet.rollout_replicas:
            return False
        return all(info.running == 0 for info in (await quartet.replicas()).values())

    try:
        await eventually(idle, WHOLE_S)
    except AssertionError as error:
        verdict.problems.append(f"replicas are missing, or have requests of callers that left: {error}")
