"""A scorer of another reward service: a small gRPC server on loopback in its place."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from protos import common_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from quartet.config.base import ConfigError
from quartet.wire.codec import pack_floats
from quartet.wire.pairs import Pair
from services.reward.scorers.function import FunctionScorer
from tests.unit.scorer_calls import ask, make


class Service(RewardServicer):
    """Scores texts by their lengths in characters; what a response says otherwise it does."""

    def __init__(self) -> None:
        self.asked: list[pb.ScoreRequest] = []
        self.identity = pb.ScorerIdentity(name="model:far", model_hash="a" * 64)

    def Info(self, request: common_pb2.InfoRequest, context: grpc.ServicerContext) -> pb.RewardInfo:
        """The scorer `taste`."""
        return pb.RewardInfo(scorers=[pb.ScorerInfo(name="taste", identity=self.identity)])

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        """The scores."""
        self.asked.append(request)
        responses = [*request.texts.responses]
        responses += [json.loads(each)[-1]["content"] for each in request.conversations.messages]
        if "slow" in responses and context.time_remaining() < 5:
            time.sleep(context.time_remaining() + 0.2)
        if "wrong" in responses:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "texts[0]: has no tokens")
        if "gone" in responses:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such application in /secret/place")
        values = np.asarray([[len(each)] * max(1, len(self.identity.names)) for each in responses], np.float32)
        refused = [row for row, each in enumerate(responses) if each == "refuse"]
        values[refused] = np.nan
        outcomes = bytes(pb.REFUSED if row in refused else 0 for row in range(len(responses))) if refused else b""
        return pb.ScoreResponse(
            scores=pack_floats(values), scorer=self.identity, outcomes=outcomes, reasons=["no"] * len(refused)
        )


@pytest.fixture
def service() -> Iterator[tuple[Service, str]]:
    made, server = Service(), grpc.server(ThreadPoolExecutor(2))
    add_RewardServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}"
    server.stop(None).wait()


def remote(target: str, **fields: Any) -> FunctionScorer:
    settings = {"kind": "remote", "target": target, "scorer": "taste", "pair_timeout_s": 20.0} | fields
    return make(settings)


def test_pairs_are_scored_there_with_all_that_is_known_of_them(service: tuple[Service, str]) -> None:
    served, target = service
    made = remote(target)
    pairs = [
        Pair("Why?", "so", "yes", columns={"topic": 3}, group=8),
        Pair("Who?", "refuse", ended=False, group=9),
    ]
    call = ask(made, *pairs)
    assert call.told == [2.0, "REFUSED"]
    assert call.reason(1) == "no"
    [request] = served.asked
    assert (request.scorer, [*request.texts.prompts], [*request.labels]) == ("taste", ["Why?", "Who?"], ["yes", ""])
    assert [*request.ended] == [True, False]
    assert [json.loads(each) for each in request.columns] == [{"topic": 3}, {}]
    assert np.frombuffer(request.groups, np.int64).tolist() == [8, 9]
    talk = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "so it is"})
    assert ask(made, Pair("Why?", "so it is", messages=talk)).told == [8.0]
    assert [json.loads(each) for each in served.asked[-1].conversations.messages] == [[*talk]]
    assert not served.asked[-1].ended
    ask(made, Pair("Why?", "so", timeout_s=2.0))
    assert served.asked[-1].pair_timeout_s == pytest.approx(0.8 * 0.9 * 2.0)


def test_a_pairs_result_does_not_depend_on_those_of_other_calls(service: tuple[Service, str]) -> None:
    served, target = service
    talk = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "so it is"})
    pairs = [
        Pair("Why?", "slow", timeout_s=1.0),
        Pair("Why?", "so it is", messages=talk, group=7),
        Pair("Who?", "she", group=8),
        Pair("Who?", "slow"),
        Pair("Who?", "he", group=8),
    ]
    call = ask(remote(target, workers=1), *pairs)
    assert call.told == ["TIMEOUT", 8.0, 3.0, 4.0, 2.0]
    told = {  # a set, as the client asks again where an answer takes long
        (*each.texts.responses, *np.frombuffer(each.groups, np.int64).tolist(), round(each.pair_timeout_s, 2))
        for each in served.asked
    }
    assert told == {(7, 14.4), ("she", "he", 8, 8, 14.4), ("slow", 0.72), ("slow", 14.4)}


def test_a_pair_that_is_refused_there_costs_no_other_its_score(service: tuple[Service, str]) -> None:
    call = ask(remote(service[1]), *[Pair("", each) for each in ("a", "wrong", "abc")])
    assert call.told == [1.0, "FAILED", 3.0]


def test_a_failed_call_fails_its_pairs_without_the_services_words(service: tuple[Service, str]) -> None:
    call = ask(remote(service[1]), Pair("", "gone"))
    assert (call.told, call.reason(0)) == (["FAILED"], f"{service[1]}: NotFound")


def test_the_identity_is_that_of_the_scorer_there(service: tuple[Service, str]) -> None:
    served, target = service
    first, again = remote(target), remote(target, workers=2)
    assert first.identity.name == "remote"
    assert first.identity.model_hash == again.identity.model_hash
    served.identity = pb.ScorerIdentity(name="model:far", model_hash="b" * 64)
    assert remote(target).identity.model_hash != first.identity.model_hash
    call = ask(first, Pair("", "a"))
    assert (call.told, call.reason(0)) == (
        ["FAILED"],
        "the scorer has become another one; start this service again",
    )


def test_scores_by_name(service: tuple[Service, str]) -> None:
    served, target = service
    served.identity = pb.ScorerIdentity(name="several", model_hash="a" * 64, names=["rules.right", "brief"])
    with pytest.raises(
        ConfigError, match=r"kind: ValueError: the scorer gives scores of the names \[rules.right, br"
    ):
        remote(target)
    made = remote(target, names=["rules.right", "brief"])
    assert made.names == ("rules.right", "brief")
    assert ask(made, Pair("", "abc")).results[0].tolist() == [3.0, 3.0]  # type: ignore[union-attr]


def test_a_target_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="should be host:port of the service"):
        remote("somewhere")
