"""The reward service over gRPC: a model, a function and several by name as scorers."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from protos import common_pb2, reward_pb2
from quartet.wire.errors import InvalidArgument
from quartet.wire.identity import model_hash
from services.reward.client import RewardClient
from tests import plain
from tests.cluster import SERVICES, Quartet, refused
from tests.configuration import model_scorer
from tests.integration.malformed import MALFORMED, ONE, pairs
from tests.models import EOS, MAX_LENGTH, ROWS
from tests.trajectories import of

METHOD = "/quartet.v1.Reward/Score"
Texts = reward_pb2.TextPairs


async def ask(quartet: Quartet, application: str = "reward", **fields: Any) -> reward_pb2.ScoreResponse:
    return await quartet.call(METHOD, reward_pb2.ScoreRequest(**fields), reward_pb2.ScoreResponse, application)


async def test_info_describes_tokenizer_and_scorer(quartet: Quartet) -> None:
    info = await quartet.services.reward.info(30)
    assert (info.model.vocab_size, info.model.max_length) == (ROWS, MAX_LENGTH)
    assert info.identity.name == f"model:{quartet.reward.name}"
    assert info.identity.model_hash == model_hash(quartet.reward)


async def test_scores_are_the_heads_output_at_the_last_token(quartet: Quartet) -> None:
    prompts, responses = plain.random_pairs(40)
    actual = await quartet.services.reward.score(of(prompts, responses), timeout_s=60)
    assert plain.furthest([actual.values], [plain.scores(quartet.reward, prompts, responses)]) < 1e-4
    assert actual.model_hash == model_hash(quartet.reward)


async def test_texts_score_as_their_ids_do(quartet: Quartet) -> None:
    """<bos> before the prompt, <eos> after the response: w5 is id 5."""
    reward = quartet.services.reward
    ids = await reward.score(of([[1, 5, 6]], [[7, 8, EOS]]), timeout_s=60)
    texts = await reward.score_texts(["w5 w6"], ["w7 w8"], timeout_s=60)
    assert texts.values == pytest.approx(ids.values, abs=1e-6)


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_ids_are_refused_by_name(quartet: Quartet, kind: str) -> None:
    wrong, message = MALFORMED[kind]
    code, details = await refused(ask(quartet, tokens=wrong))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "tokens" + message in details
    assert len((await ask(quartet, tokens=ONE)).scores) == 4


_LONG = " ".join(["w5"] * MAX_LENGTH)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "pairs: set tokens, texts or conversations"),
        ({"texts": Texts()}, "texts: empty; send at least one"),
        ({"texts": Texts(prompts=["w5"])}, "texts: 1 prompts but 0 responses"),
        ({"texts": Texts(prompts=["w5"], responses=[_LONG])}, "texts[0]: 2 prompt + 129 response tokens exceed"),
        ({"tokens": ONE, "labels": ["a", "b"]}, "labels: 2 for 1 pairs"),
    ],
)
async def test_malformed_requests_are_refused_by_name(quartet: Quartet, fields: Any, message: str) -> None:
    code, details = await refused(ask(quartet, **fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


async def test_more_pairs_than_a_call_may_hold_are_refused(quartet: Quartet) -> None:
    code, details = await refused(ask(quartet, tokens=pairs([[5]] * 4097, [[6]] * 4097)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "tokens: 4097 rows, but a call may hold 4096; send it in several" in details


@pytest.fixture(scope="module")
def scorers(quartet: Quartet) -> Iterator[dict[str, Any]]:
    """Deploys other scorers and broken configurations beside the four services; what Serve says of each then."""
    model = model_scorer(quartet.reward)
    function = {"kind": "function", "function": "tests.scorers:words"}
    two = {"kind": "function", "function": "tests.scorers:two", "names": ["right", "words"]}
    several = {"kind": "several", "scorers": {"taste": model, "length": function, "both": two}}
    before = ray_cluster.applications(quartet.cluster)
    quartet.deploy(
        [
            quartet.scorer("words", scorer=function),
            quartet.scorer("several", scorer=several),
            quartet.scorer("named", scorers={"taste": model, "words": function | {"max_length": 9}}),
            quartet.scorer("typo", scorer=model, max_lenght=64),
            quartet.scorer("nowhere", scorer={**model, "model": "/no/such/model"}),
        ],
        "scorers",
    )
    serving.await_running(quartet.cluster, ("words", "several", "named"), print, 120)
    for broken in ("typo", "nowhere"):
        with pytest.raises(ray_cluster.ClusterError, match=f"^{broken}: "):
            serving.await_running(quartet.cluster, (broken,), print, 120)
    after = ray_cluster.applications(quartet.cluster)
    for name in SERVICES:  # what was there has not even been restarted
        assert _processes(after[name]) == _processes(before[name])
    yield after
    quartet.deploy([], "as-before")


def _processes(application: dict[str, Any]) -> set[int]:
    deployments = application["deployments"].values()
    return {replica["pid"] for deployment in deployments for replica in deployment["replicas"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("typo", "reward.args.max_lenght: unknown field; known: limits, max_length, scorer"),
        ("nowhere", "reward.args.scorer.model: no such folder on this machine (looked for /no/such/model)"),
    ],
)
def test_a_broken_configuration_fails_alone_and_says_where(scorers: Any, name: str, message: str) -> None:
    assert scorers[name]["status"] == "DEPLOY_FAILED"
    assert message in scorers[name]["message"]
    assert {scorers[service]["status"] for service in SERVICES} == {"RUNNING"}


@pytest.mark.usefixtures("scorers")
async def test_a_function_sees_text_label_and_end(quartet: Quartet) -> None:
    """0.1 per word, 100 for a label, 1000 for an end: of two words, labelled, ended; and of one, cut off."""
    words = RewardClient(quartet.channel, "words")
    prompts, responses = [[1, 5]] * 2, [[7, 8, EOS], [9]]
    actual = await words.score(of(prompts, responses), labels=["yes", ""], timeout_s=120)
    assert actual.values == pytest.approx([1100.2, 0.1])
    assert actual.scorer == "function:tests.scorers:words"
    assert (await words.score_texts(["w5"], ["w7 w8 w9"], timeout_s=120)).values == pytest.approx([1000.3])


@pytest.mark.usefixtures("scorers")
async def test_a_function_that_fails_costs_a_pair_its_score_and_tells_no_secrets(quartet: Quartet) -> None:
    words = RewardClient(quartet.channel, "words")
    good = [asyncio.create_task(words.score_texts(["w5"], ["w7"], timeout_s=120)) for _ in range(8)]
    scores = await words.score_texts(["w5", "secret", "w5"], ["w7"] * 3, timeout_s=120)
    assert scores.values == pytest.approx([1000.1, np.nan, 1000.1], nan_ok=True)
    told = str(scores.unscored[1])
    assert re.match(r"failed: tests\.scorers:words raised RuntimeError in line \d+ of scorers\.py; see the rew", told)
    assert "1234" not in told
    assert [scores.values.tolist() for scores in await asyncio.gather(*good)] == [[pytest.approx(1000.1)]] * 8


@pytest.mark.usefixtures("scorers")
async def test_a_scorer_is_chosen_by_its_name_and_one_that_dies_touches_no_other(quartet: Quartet) -> None:
    named = RewardClient(quartet.channel, "named")
    infos = {each.name: each for each in await named.scorers(60)}
    assert {name: each.identity.name for name, each in infos.items()} == {
        "taste": f"model:{quartet.reward.name}",
        "words": "function:tests.scorers:words",
    }
    assert [infos[name].model.max_length for name in ("taste", "words")] == [MAX_LENGTH, 9]
    asked, (taste, words) = of([[1, 5, 6]], [[7, 8, EOS]]), map(named.named, ("taste", "words"))
    before = await taste.score(asked, timeout_s=60)
    assert before.values == pytest.approx((await quartet.services.reward.score(asked, timeout_s=60)).values, abs=1e-6)
    assert (await words.score(asked, labels=["a"], timeout_s=60)).values == pytest.approx([1100.2])
    with pytest.raises(InvalidArgument, match=r"^named.Score: scorer: required, as there are several: taste, words$"):
        await named.score(asked, timeout_s=60)
    with pytest.raises(InvalidArgument, match=r"tokens.lengths\[0\]: 10 tokens exceed the model's max_length of 9$"):
        await words.score(of([[5] * 5], [[6] * 5]), timeout_s=60)
    replicas = ray_cluster.applications(quartet.cluster)["named"]["deployments"]["taste"]["replicas"]
    psutil.Process(replicas[0]["pid"]).kill()
    waiting = asyncio.create_task(taste.score(asked, timeout_s=120))
    for _ in range(10):
        assert (await words.score(asked, timeout_s=5)).values == pytest.approx([1000.2])
    assert (await waiting).values == pytest.approx(before.values, abs=1e-6)
    assert await quartet.health("named") == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.usefixtures("scorers")
async def test_several_scorers_give_a_column_each(quartet: Quartet) -> None:
    """The call is divided, as it has more than 512 pairs."""
    prompts, responses = (many * 60 for many in plain.random_pairs(10))
    asked = of(prompts, responses)
    alone = {
        name: (await RewardClient(quartet.channel, name).score(asked, timeout_s=120)).values
        for name in ("reward", "words")
    }
    scores = await RewardClient(quartet.channel, "several").score(asked, timeout_s=120)
    # The file is written with its keys in order.
    assert [*scores.columns] == ["both.right", "both.words", "length", "taste"]
    assert scores.columns["taste"] == pytest.approx(alone["reward"], abs=1e-4)
    assert scores.columns["length"].tolist() == alone["words"].tolist()
    assert scores.columns["both.words"] == pytest.approx(10 * (alone["words"] % 100), abs=1e-3)
    with pytest.raises(ValueError, match=r"several gives both\.right, both\.words, length, taste; take one"):
        _ = scores.values
    request = common_pb2.InfoRequest()
    reply = await quartet.call("/quartet.v1.Reward/Info", request, reward_pb2.RewardInfo, "several")
    [info] = reply.scorers
    assert [*info.identity.names] == [*scores.columns]
    assert [part.name for part in info.identity.parts] == [
        "function:tests.scorers:two",
        "function:tests.scorers:words",
        f"model:{quartet.reward.name}",
    ]
