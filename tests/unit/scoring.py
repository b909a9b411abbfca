"""A reward service with scorers by name, as a client sees it, and JSONL files for it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from orchestrator.evaluation.hub import Hub
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from quartet.wire.codec import pack_floats
from quartet.wire.errors import InvalidArgument
from quartet.wire.outcomes import Outcome, Unscored
from services.reward.client import Scores

Scored = float | Mapping[str, float] | Unscored
Judge = Callable[[str, str], Scored]
"""Gives the score of a prompt, messages as JSON, and a response."""


def length(prompt: str, response: str) -> Scored:
    """Characters of the response; none for `?`, and none for `...`, for a reason that may pass."""
    if response == "?":
        return Unscored(Outcome.NOT_APPLICABLE, "a question")
    if response == "...":
        return Unscored(Outcome.TIMEOUT, "too slow")
    return float(len(response))


def right(prompt: str, response: str) -> Scored:
    """1 for a response that is in the prompt."""
    return float(response in prompt)


class Service:
    """A RewardClient that computes in this process; `named` gives one that asks one scorer."""

    def __init__(self, judges: Mapping[str, Judge], hashes: Mapping[str, str] | None = None) -> None:
        self.judges, self.hashes = dict(judges), dict(hashes or {})
        self.asked: list[tuple[str, list[Any]]] = []
        """Scorer and prompts of each call."""
        self.columns: list[Mapping[str, Any]] = []
        self.labels: list[str] = []
        self.groups: list[int] = []
        self.ended: list[bool] = []
        self.closed = False
        self.fails: Exception | None = None
        self._scorer = ""

    def named(self, scorer: str) -> "Service":
        other = object.__new__(Service)
        other.__dict__ = self.__dict__ | {"_scorer": scorer, "_whole": self}
        return other

    def identity(self, name: str) -> pb.ScorerIdentity:
        names = sorted(each) if isinstance(each := self.judges[name]("", ""), Mapping) else []
        return pb.ScorerIdentity(name=f"function:{name}", model_hash=self.hashes.get(name, "h" * 64), names=names)

    async def scorers(self, timeout_s: float) -> list[pb.ScorerInfo]:
        return [pb.ScorerInfo(name=name, identity=self.identity(name)) for name in self.judges]

    async def score_texts(self, prompts: Sequence[str], responses: Sequence[str], **known: Any) -> Scores:
        return self._scored([*prompts], responses, **known)

    async def score_conversations(self, conversations: Sequence[Sequence[Mapping[str, Any]]], **known: Any) -> Scores:
        prompts = [json.dumps([*messages[:-1]]) for messages in conversations]
        return self._scored(prompts, [str(messages[-1]["content"]) for messages in conversations], **known)

    def _scored(
        self,
        prompts: list[str],
        responses: Sequence[str],
        *,
        labels: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        groups: Sequence[int],
        ended: Sequence[bool] = (),
        timeout_s: float,
    ) -> Scores:
        if (error := self.__dict__.get("_whole", self).fails) is not None:
            raise error
        if too_long := [row for row, response in enumerate(responses) if len(response) > 1000]:
            raise InvalidArgument(f"texts[{too_long[0]}]: too long")
        self.asked.append((self._scorer, prompts))
        self.columns.extend(columns)
        self.labels.extend(labels)
        self.groups.extend(groups)
        self.ended.extend(ended)
        given = [self.judges[self._scorer](*each) for each in zip(prompts, responses, strict=True)]
        identity = self.identity(self._scorer)
        names = [*identity.names] or ["score"]
        unscored = {row: each for row, each in enumerate(given) if isinstance(each, Unscored)}
        numbers = [
            [np.nan] * len(names)
            if isinstance(each, Unscored)
            else [each[name] for name in names]
            if isinstance(each, Mapping)
            else [each]
            for each in given
        ]
        table = np.asarray(numbers, np.float32).reshape(-1, len(names))
        return Scores(dict(zip(names, table.T, strict=True)), identity.name, identity.model_hash, unscored)

    async def close(self) -> None:
        self.closed = True

    async def hub(self, *names: str) -> Hub:
        """A hub of these scorers, or of the only one."""
        return await Hub.asked(self, names, 10)  # type: ignore[arg-type]


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    """Writes rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Servicer(RewardServicer):  # type: ignore[misc]
    """The same scorers behind gRPC, as the application of this name."""

    def __init__(self, judges: Mapping[str, Judge], application: str) -> None:
        self.service, self._application = Service(judges), application

    async def _check(self, context: Any) -> None:
        """Refuses a call to another application."""
        if ("application", self._application) not in [*context.invocation_metadata()]:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is only {self._application}")

    async def Info(self, request: Any, context: Any) -> pb.RewardInfo:
        await self._check(context)
        return pb.RewardInfo(scorers=await self.service.scorers(1))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        await self._check(context)
        service = self.service.named(request.scorer or next(iter(self.service.judges)))
        known: dict[str, Any] = {"labels": [*request.labels], "groups": (), "timeout_s": 1}
        known["columns"] = [json.loads(each) for each in request.columns]
        if request.WhichOneof("pairs") == "texts":
            scores = await service.score_texts(request.texts.prompts, request.texts.responses, **known)
        else:
            talks = [json.loads(messages) for messages in request.conversations.messages]
            scores = await service.score_conversations(talks, **known)
        table = np.stack([*scores.columns.values()], axis=1)
        outcomes = np.zeros(len(table), np.uint8)
        for row, each in scores.unscored.items():
            outcomes[row] = each.outcome
        return pb.ScoreResponse(
            scores=pack_floats(table),
            scorer=service.identity(request.scorer or next(iter(self.service.judges))),
            outcomes=outcomes.tobytes(),
            reasons=[scores.unscored[row].reason for row in sorted(scores.unscored)],
        )


@asynccontextmanager
async def served(judges: Mapping[str, Judge], application: str = "reward") -> AsyncIterator[str]:
    """The address of a real gRPC server with these scorers."""
    server = grpc.aio.server()
    add_RewardServicer_to_server(Servicer(judges, application), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class InThread:
    """A context with such a server in a thread, for callers that block their own; the address."""

    def __init__(self, judges: Mapping[str, Judge], application: str = "reward") -> None:
        self._judges, self._application, self.target = judges, application, ""
        self._up, self._ends = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with served(self._judges, self._application) as self.target:
            self._up.set()
            await self._ends.wait()

    def __enter__(self) -> str:
        self._thread.start()
        self._up.wait()
        return self.target

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()
