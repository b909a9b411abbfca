"""Several scorers of one service: which are asked, with what, and what becomes of rows that they do not score."""

import json
from typing import Any

import pytest

from orchestrator.evaluation.hub import Hub, check_free
from orchestrator.evaluation.rows import Row, dumped, parse
from protos import reward_pb2 as pb
from quartet.config.base import ConfigError
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, InvalidReply, Unavailable, leaves
from quartet.wire.outcomes import Outcome, Unscored
from tests.unit.scoring import Scored, Service, length, right


def row(**values: Any) -> Row:
    return parse(dumped(values), 1, "a.jsonl")


def named(prompt: str, response: str) -> Scored:
    return {"brief": -float(len(response)), "right": 1.0}


async def test_every_scorer_gives_its_verdict_on_every_row() -> None:
    service = Service({"length": length, "right": right, "unasked": right, "both": named})
    hub = await service.hub("length", "right", "both")
    rows = [row(prompt="abc", label="l", source="s"), row(prompt="xyz"), row(prompt="?")]
    verdicts = await hub.score(rows, ["ab", "ab", "?"])
    assert [verdict.scores for verdict in verdicts] == [
        {"length": 2.0, "right": 1.0, "both.brief": -2.0, "both.right": 1.0},
        {"length": 2.0, "right": 0.0, "both.brief": -2.0, "both.right": 1.0},
        {"length": None, "right": 1.0, "both.brief": -1.0, "both.right": 1.0},
    ]
    assert [verdict.outcomes["length"] for verdict in verdicts] == ["scored", "scored", "not_applicable"]
    assert verdicts[2].reasons == {"length": "a question"}
    assert {scorer for scorer, _ in service.asked} == {"length", "right", "both"}
    assert service.labels[:3] == ["l", "", ""]
    assert service.columns[0] == {"label": "l", "source": "s"}
    assert len({*service.groups}) == 3
    assert all(-(1 << 63) <= group < 1 << 63 for group in service.groups)


async def test_a_row_says_whether_its_response_came_to_its_end() -> None:
    service = Service({"": right})
    hub = await service.hub()
    await hub.score([row(prompt="ab", ended=True), row(prompt="ab", ended="no"), row(prompt="xy")], ["ab"] * 3)
    assert service.ended == []
    await hub.score([row(prompt="ab"), row(prompt="ab", ended=False)], ["ab"] * 2)
    assert service.ended == [True, False]


async def test_messages_are_sent_as_messages_and_texts_as_texts() -> None:
    service = Service({"": right})
    hub = await service.hub()
    talk = [{"role": "user", "content": "say ab"}]
    verdicts = await hub.score([row(prompt="ab"), row(messages=talk), row(prompt="xy")], ["ab", "ab", "ab"])
    assert [verdict.scores["score"] for verdict in verdicts] == [1.0, 1.0, 0.0]
    assert service.asked == [("", ["ab", "xy"]), ("", [json.dumps(talk)])]


async def test_a_row_that_is_refused_costs_the_others_nothing() -> None:
    service = Service({"length": length})
    hub = await service.hub()
    rows, responses = [row(prompt=str(number)) for number in range(9)], ["ab"] * 9
    responses[5] = "x" * 2000
    verdicts = await hub.score(rows, responses)
    assert [verdict.scores["length"] for verdict in verdicts] == [2.0] * 5 + [None] + [2.0] * 3
    assert verdicts[5].outcomes == {"length": "failed"}
    assert "too long" in verdicts[5].reasons["length"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["wrong"], "--scorer: 'wrong' is none of those there are: length, right"),
        ([], "--scorer: required, as there are several: length, right"),
    ],
)
async def test_a_scorer_that_is_not_there_is_named_with_those_that_are(names: list[str], said: str) -> None:
    service = Service({"length": length, "right": right})
    with pytest.raises(ConfigError, match=f"^{said}$"):
        await service.hub(*names)


async def test_a_scorer_that_has_not_started_is_not_asked() -> None:
    class Starting(Service):
        async def scorers(self, timeout_s: float) -> list[pb.ScorerInfo]:
            return [pb.ScorerInfo(name="slow"), *await super().scorers(timeout_s)]

    service = Starting({"length": length})
    with pytest.raises(Unavailable, match="--scorer: slow has not started yet"):
        await service.hub("length", "slow")
    assert [*(await service.hub("length")).scorers] == ["length"]


async def test_two_scorers_cannot_give_the_same_measure() -> None:
    service = Service({"a.b": right, "a": lambda prompt, response: {"b": 1.0}})
    with pytest.raises(ConfigError, match=r"two scorers give a\.b"):
        await service.hub("a", "a.b")


async def test_a_scorer_that_is_replaced_ends_the_work() -> None:
    service = Service({"length": length})
    hub = await service.hub()
    service.hashes["length"] = "another"
    with pytest.raises(ExceptionGroup) as caught:
        await hub.score([row(prompt="p")], ["r"])
    [error] = leaves(caught.value)
    assert isinstance(error, InvalidReply)
    assert "function:length hhhhhhhhhhhh at the start and is function:length another now" in str(error)


@pytest.mark.parametrize("asked", [["length"], []])
async def test_a_scorer_that_is_taken_away_ends_the_work_and_fails_no_row(asked: list[str]) -> None:
    service = Service({"length": length})
    hub = await service.hub(*asked)
    service.judges.clear()
    service.judges |= {"right": right, "other": right}
    service.fails = InvalidArgument("reward.Score: scorer: 'length' is none of those there are: other, right")
    with pytest.raises(ExceptionGroup) as caught:
        await hub.score([row(prompt=str(number)) for number in range(64)], ["r"] * 64)
    [error] = leaves(caught.value)
    assert isinstance(error, InvalidReply)
    assert str(error) == "scorer length: was there at the start and is not now; there is other, right"


async def test_a_service_that_does_not_answer_is_no_outcome() -> None:
    service = Service({"length": length})
    hub = await service.hub()
    service.fails = DeadlineExceeded("reward.Score: no answer within 10 s")
    with pytest.raises(ExceptionGroup, match="unhandled") as caught:
        await hub.score([row(prompt="p")], ["r"])
    assert leaves(caught.value) == [service.fails]


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.SCORED])
async def test_no_outcome_but_scored_has_a_number(outcome: Outcome) -> None:
    hub = await Service({"judge": lambda prompt, response: Unscored(outcome, "why")}).hub()
    [verdict] = await hub.score([row(prompt="p")], ["r"])
    assert verdict.scores == {"judge": None}
    assert verdict.outcomes == {"judge": outcome.name.lower()}
    assert verdict.reasons == {"judge": "why"}


async def test_verdicts_join_those_of_other_scorers_and_replace_none() -> None:
    hub = await Service({"length": length}).hub()
    before = row(prompt="p", response="r", scores={"right": 1.0}, scorers={"right": {"name": "n", "hash": "h"}})
    check_free(before, hub.scorers, "a.jsonl")
    [verdict] = await hub.score([before], ["r"])
    after = verdict.on(before.values, hub.scorers)
    assert after["scores"] == {"right": 1.0, "length": 1.0}
    assert after["scorers"]["length"] == {"name": "function:length", "hash": "h" * 64}
    assert after["outcomes"] == {"length": "scored"}
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: scores: has been scored by length"):
        check_free(row(**after), hub.scorers, "a.jsonl")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: reasons: should be a mapping"):
        check_free(row(prompt="p", reasons="none"), hub.scorers, "a.jsonl")


@pytest.mark.parametrize(
    "target", ["127.0.0.1", "19000", "host:port", "", "host:99999", "host:999999", "http://host:19000", "host:1²"]
)
async def test_what_is_no_address_is_named(target: str) -> None:
    with pytest.raises(ConfigError, match="--hub: should be HOST:PORT"):
        await Hub.at(target, "reward", [], 1)
