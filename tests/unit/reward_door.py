"""The reward service's HTTP door in this process: the port and its guard, the door, and replicas without Serve."""

import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from protos import reward_pb2 as pb
from quartet.config.functions import load_function
from quartet.models.loading import load_tokenizer
from quartet.security.port import Port
from quartet.serving.batcher import SpoiltError
from quartet.serving.share import Share
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.pairs import Pair
from services.reward.config import RewardConfig
from services.reward.http import Door
from services.reward.ingress import Ingress
from services.reward.metrics import text_of
from services.reward.replica import Reward
from services.reward.scorers.make import make_scorer
from services.reward.scorers.scorer import EncodedPair, Result, results
from tests.unit.handles import Response
from tests.unit.http_door import http_door

OPEN = Port(local="open", http=True)
GO_ON = threading.Event()
SEEN: list[Pair] = []
"""Pairs that `length` was given."""


def length(pairs: Sequence[Pair]) -> list[Any]:
    """Characters of the response. Fails on w14, does not apply to w15, declines w16, gives no number for w17, and
    waits for GO_ON at w18."""
    SEEN.extend(pairs)
    del SEEN[:-100]
    if any(pair.response == "w18" for pair in pairs):
        GO_ON.wait(60)
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


class Called:
    """A scorer whose function is called in this process, where a test sees what it is given."""

    max_length, batch_tokens, passes = 1 << 30, 16_384, 1
    texts, vocab_size, patience_s, batch_s = True, None, None, None

    def __init__(self, config: Any) -> None:
        self._function, self._name, self.names = load_function(config.function), config.function, config.names
        self.identity = pb.ScorerIdentity(
            name=f"function:{config.function}", model_hash=f"{0:064}", names=config.names
        )

    def score(self, pairs: Sequence[EncodedPair]) -> list[Result]:
        try:
            given = self._function([scored.pair for scored in pairs])
        except OSError:
            raise SpoiltError(Unscored(Outcome.FAILED, f"{self._name} raised OSError")) from None
        return [self._result(each) for each in given]

    def _result(self, given: Any) -> Result:
        if given is None:
            return Unscored(Outcome.NOT_APPLICABLE, f"{self._name} gave None")
        if isinstance(given, Unscored):
            return given
        numbers = [given[name] for name in self.names] if self.names else [given]
        [result] = results(np.asarray([numbers], np.float32), self._name)
        return result

    def check(self) -> None:
        """Does nothing."""


def _made(config: Any, tokenizer: Any, device: Any, *more: Any) -> Any:
    if config.kind == "function":
        return Called(config)
    return make_scorer(config, tokenizer, device, *more)


class Handle:
    """A replica in the place of Serve's handle of its deployment."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def options(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Response(getattr(self._replica, name)(*arguments)))


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

    async def metrics(self) -> bytes:
        return text_of([("one", self.front._metrics.taken())])


def replicas(
    scorers: Mapping[str, Any],
    tokenizer: str,
    make: Callable[..., Any] | None = _made,
    handle: type[Handle] = Handle,
    **settings: Any,
) -> Scorers:
    """Replicas of these scorers, each described as in `args:`; one of an empty name is the only one.

    Args:
        scorers: name -> scorer.
        tokenizer: folder of it.
        make: makes a scorer; None: as Serve's replicas do.
        handle: reaches one of several.
        settings: further `args:`.
    """
    args = {"scorer": scorers[""]} if "" in scorers else {"scorers": scorers}
    made = {}
    for name, hosted in RewardConfig.parse(args | {"tokenizer": tokenizer} | settings, "reward.args").hosted.items():
        made[name] = object.__new__(Reward.func_or_class)  # type: ignore[attr-defined]
        made[name].__init__(hosted, make=make, name=name)
    if len(made) == 1:
        return Scorers(next(iter(made.values())))
    front = object.__new__(Ingress.func_or_class)  # type: ignore[attr-defined]
    names = {name: replica.listed()[name].scores for name, replica in made.items()}
    front.__init__({name: handle(replica) for name, replica in made.items()}, names)
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

    async def answer(_: Any) -> Any:
        return door

    async with http_door(port, {"reward": "Reward"}, prefix=prefix) as (number, behind):
        behind.door = answer
        yield number


def with_template(folder: str, template: str) -> str:
    """Gives the tokenizer in a folder a chat template; returns the folder."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
