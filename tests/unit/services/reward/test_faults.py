"""Calls of which some meet a fault: no pair without a score has a number at any door or in the metrics, and each
failure is attributed."""

import asyncio
import math
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from protos import reward_pb2 as pb
from quartet.wire.codec import unpack_floats
from quartet.wire.errors import ServiceError
from quartet.wire.outcomes import Outcome
from tests.http_requests import ask
from tests.unit.contexts import Context
from tests.unit.handles import Response
from tests.unit.openai_endpoint import Asked, Reply, chat, serving
from tests.unit.reward_door import Handle, Scorers, replicas, reward_door

PAIR_S = 5.0
"""Longest time of a pair, in seconds."""
AT_ONCE = 24
FAULTS = {
    "hang": ("rules", Outcome.TIMEOUT),
    "exception": ("rules", Outcome.FAILED),
    "nan": ("rules", Outcome.NOT_FINITE),
    "exit": ("rules", Outcome.FAILED),
    "slow": ("judge", Outcome.TIMEOUT),
    "garbage": ("judge", Outcome.FAILED),
    "length": ("rules", None),
    "replica": ("rules", None),
}
"""Fault, which is the response that meets it -> the scorer, and the pair's outcome; None: the call fails."""
LOST = {"length": (grpc.StatusCode.FAILED_PRECONDITION, 409), "replica": (grpc.StatusCode.UNAVAILABLE, 503)}
"""Fault of a whole call -> its status over gRPC and over HTTP."""


class Mortal(Handle):
    """A replica that dies at a call with the response `replica`."""

    def __getattr__(self, name: str) -> Any:
        remote = super().__getattr__(name)
        live = remote.remote

        def call(*given: Any) -> Response:
            dies = name == "scored" and "replica" in given[0].texts.responses
            return Response(_dead()) if dies else live(*given)

        remote.remote = call
        return remote


async def _dead() -> None:
    raise ActorDiedError


def _judge(asked: Asked) -> Reply:
    """An endpoint's answer that is late, is none, or is a score."""
    said = asked.body["messages"][-1]["content"]
    if "slow" in said:
        time.sleep(3 * PAIR_S)
    if "garbage" in said:
        return Reply(b"<html>proxy error</html>", headers={"content-type": "text/html"})
    return chat("Score: 7")


def calls(count: int, every: int) -> list[tuple[str, list[str]]]:
    """Scorer and responses of each call; one of `every` has a fault, in turn of each kind."""
    rng, faults, made = random.Random(0), list(FAULTS), list[tuple[str, list[str]]]()
    for number in range(count):
        responses = [f"w{rng.randrange(5, 60)}" for _ in range(rng.randint(1, 4))]
        scorer = rng.choice(("rules", "rules", "judge"))
        if number % every == 0:
            fault = faults[number // every % len(faults)]
            scorer = FAULTS[fault][0]
            responses[rng.randrange(len(responses))] = fault
        made.append((scorer, responses))
    return made


def expected(scorer: str, responses: Sequence[str]) -> list[float | Outcome]:
    """The score of each pair, or its outcome."""
    faults = {each: FAULTS[each][1] for each in responses if each in FAULTS}
    return [faults.get(each) or (7.0 if scorer == "judge" else float(len(each))) for each in responses]


def check(scorer: str, responses: Sequence[str], found: Sequence[Any], door: str) -> None:
    """Fails unless exactly the pairs with a fault have no score, and their outcome."""
    assert list(found) == expected(scorer, responses), (door, scorer, responses)


async def over_grpc(scorers: Scorers, scorer: str, responses: Sequence[str]) -> Counter[str]:
    texts = pb.TextPairs(prompts=["w5"] * len(responses), responses=responses)
    context = Context()
    fault = next((each for each in responses if each in LOST), None)
    try:
        reply = await scorers.front.Score(pb.ScoreRequest(texts=texts, scorer=scorer), context)
    except ServiceError:
        assert fault
        assert context.code is LOST[fault][0]
        return Counter()
    scores = unpack_floats(reply.scores, "scores")
    outcomes = [Outcome(each) for each in reply.outcomes] or [Outcome.SCORED] * len(responses)
    assert [math.isnan(each) for each in scores] == [each is not Outcome.SCORED for each in outcomes]
    assert len(reply.reasons) == sum(each is not Outcome.SCORED for each in outcomes)
    found = [float(s) if o is Outcome.SCORED else o for s, o in zip(scores, outcomes, strict=True)]
    check(scorer, responses, found, "grpc")
    return Counter(each.name.lower() for each in outcomes)


async def over_http(port: int, scorer: str, responses: Sequence[str], number: int) -> Counter[str]:
    fault = next((each for each in responses if each in FAULTS), None)
    ours = number % 3 or fault in LOST
    pairs = [{"prompt": "w5", "response": each} for each in responses]
    body: Any = {"scorer": scorer, "pairs": pairs} if ours else {"model": scorer, "text_1": "w5", "text_2": responses}
    got = await ask(port, "/reward/v1/rewards" if ours else "/reward/score", body)
    assert b"secret" not in got.body
    if fault in LOST:
        assert got.status == LOST[fault][1], got.body
        return Counter()
    told = Counter(
        each.name.lower() if isinstance(each, Outcome) else "scored" for each in expected(scorer, responses)
    )
    if not ours and fault:  # a protocol without a place for it
        assert got.status == 503
        name = (FAULTS[fault][1] or Outcome.FAILED).name.lower().replace("_", " ")
        assert f"text_2[{responses.index(fault)}]: {name}: " in got.message
    elif not ours:
        check(scorer, responses, [each["score"] for each in got.json["data"]], "/score")
    else:
        results = got.json["results"]
        assert all(each["reason"] for each in results if each["outcome"] != "scored")
        found = [each["scores"]["score"] if each["scores"] else Outcome[each["outcome"].upper()] for each in results]
        check(scorer, responses, found, "/v1/rewards")
    return told


# Most of the time is that of pairs which hang or are slow: in the long run 125 of each.
COUNTS = [(160, 20), pytest.param(100_000, 100, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)])]


@pytest.mark.parametrize(("count", "every"), COUNTS)
async def test_no_door_gives_a_number_for_a_pair_without_a_score(count: int, every: int, policy_folder: Path) -> None:
    waiting, told = iter(enumerate(calls(count, every))), Counter[str]()
    with serving(_judge) as (url, _):
        rules = {"kind": "function", "function": "tests.faulty:score", "pair_timeout_s": PAIR_S, "workers": 4}
        judge = {"kind": "judge", "url": url, "model": "judge", "rubric": "Score it.", "pair_timeout_s": PAIR_S}
        scorers = replicas({"rules": rules, "judge": judge}, str(policy_folder), make=None, handle=Mortal)
        async with reward_door(scorers) as port:

            async def caller() -> None:
                for number, (scorer, responses) in waiting:
                    if number % 2:
                        told.update(await over_grpc(scorers, scorer, responses))
                    else:
                        told.update(await over_http(port, scorer, responses, number // 2))

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(caller())
            text = (await ask(port, "/reward/metrics")).body.decode()
    counted = Counter[str]()
    for outcome, number in re.findall(r'quartet_reward_rows_total\{outcome="(\w+)".*\} ([\d.]+)', text):
        counted[outcome] += int(float(number))
    assert counted == told
    assert told["scored"] > 20 * sum(told.values()) // 25
    assert np.isfinite(list(told.values())).all()
