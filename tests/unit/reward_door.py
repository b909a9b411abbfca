"""The reward service's HTTP door in this process: the port and its guard, the door, and replicas without Serve."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from protos import reward_pb2 as pb
from quartet.models.loading import load_tokenizer
from quartet.security.port import Port
from quartet.serving.share import Share
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair
from services.reward.config import RewardConfig
from services.reward.http import Door
from services.reward.ingress import Ingress
from services.reward.measures import text_of
from services.reward.replica import Reward
from tests.unit.http_door import http_door

OPEN = Port(local="open", http=True)
SEEN: list[Pair] = []
"""Pairs that `length` was given."""


def length(pairs: Sequence[Pair]) -> list[Any]:
    """Characters of the response. Fails on w14, does not apply to w15, declines w16, gives no number for w17."""
    SEEN.extend(pairs)
    del SEEN[:-100]
    if any(pair.response == "w14" for pair in pairs):
        raise OSError("a secret")
    special: dict[str, Any] = {
        "w15": None,
        "w16": Unscored(Outcome.REFUSED, "the judge declined"),
        "w17": float("nan"),
    }
    return [special.get(pair.response, float(len(pair.response))) for pair in pairs]


def two(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    """Characters, and words, of the response."""
    return [{"long": float(len(pair.response)), "words": float(len(pair.response.split()))} for pair in pairs]


class Handle:
    """A replica in the place of Serve's handle of its deployment."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._replica, name))


@dataclass
class Scorers:
    """The replica that takes the calls of an application: of the only scorer, or one before those of several."""

    front: Any
    shares: list[Share] = field(default_factory=list)
    """The share of each call over HTTP."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.front, name)

    async def score(self, request: pb.ScoreRequest, share: Share, door: str) -> pb.ScoreResponse:
        self.shares.append(share)
        response: pb.ScoreResponse = await self.front.score(request, share, door)
        return response

    async def measures(self) -> bytes:
        return text_of([("one", self.front._measures.taken())])


def replicas(scorers: Mapping[str, Any], tokenizer: str, **settings: Any) -> Scorers:
    """Replicas of these scorers, each described as in `args:`; one of an empty name is the only one."""
    args = {"scorer": scorers[""]} if "" in scorers else {"scorers": scorers}
    made = {}
    for name, hosted in RewardConfig.parse(args | {"tokenizer": tokenizer} | settings, "reward.args").hosted.items():
        made[name] = object.__new__(Reward.func_or_class)  # type: ignore[attr-defined]
        made[name].__init__(hosted, name=name)
    if len(made) == 1:
        return Scorers(next(iter(made.values())))
    front = object.__new__(Ingress.func_or_class)  # type: ignore[attr-defined]
    front.__init__({name: Handle(replica) for name, replica in made.items()})
    return Scorers(front)


def scorers_of_all_kinds(model: str, tokenizer: str) -> Scorers:
    """A model `taste`, a function `length`, and a function `two` that names its scores."""
    here = "tests.unit.reward_door"
    return replicas(
        {
            "taste": {"kind": "model", "model": model},
            "length": {"kind": "function", "function": f"{here}:length"},
            "two": {"kind": "function", "function": f"{here}:two", "names": ["long", "words"]},
        },
        tokenizer,
    )


@asynccontextmanager
async def reward_door(scorers: Scorers, port: Port = OPEN, prefix: str = "/{}") -> AsyncIterator[int]:
    """The number of the port behind which these scorers answer. `prefix` is that of `http_door`."""
    hub: Any = scorers
    door = Door(hub)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await door.answer()(scope, receive, send)

    async with http_door(port, {"reward": "Reward"}, prefix=prefix) as (number, behind):
        behind.app = app
        yield number


def with_template(folder: str, template: str) -> str:
    """Gives the tokenizer in a folder a chat template; returns the folder."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
