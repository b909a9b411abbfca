"""The HTTP door of the reward service: its own JSON, the protocols of others, and that no door invents a score."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from quartet.models.loading import load_tokenizer
from quartet.security.http_routes import ROUTES
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from services.reward import http_fields
from tests import plain
from tests.configuration import REPO
from tests.http_requests import Answer, ask
from tests.models import BOS, EOS, MAX_LENGTH, PAD
from tests.unit import reward_door
from tests.unit.reward_door import Scorers, replicas
from tests.unit.waiting import until

LENGTH = {"kind": "function", "function": "tests.unit.reward_door:length"}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }} <eos> {% endfor %}"
UNSCORED = {
    "w14": ("failed", "raised OSError"),
    "w15": ("not_applicable", "gave None"),
    "w16": ("refused", "the judge declined"),
    "w17": ("not_finite", "not finite"),
}


@pytest.fixture(scope="module")
def folders(policy_folder: Path, reward_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A reward model whose tokenizer has a chat template, and its tokenizer's folder."""
    made = tmp_path_factory.mktemp("door") / "reward"
    shutil.copytree(reward_folder, made)
    reward_door.with_template(str(made), TEMPLATE)
    return str(made), str(made)


@pytest.fixture(scope="module")
def scorers(folders: tuple[str, str]) -> Scorers:
    model, tokenizer = folders
    return reward_door.scorers_of_all_kinds(model, tokenizer)


@pytest.fixture
async def port(scorers: Scorers) -> AsyncIterator[int]:
    async with reward_door.reward_door(scorers) as number:
        yield number


async def test_the_pages_programs_in_python_score_and_raise_where_there_is_no_score(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPO / "docs/reward-http.md").read_text()
    programs = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    (tmp_path / ".quartet/access").mkdir(parents=True)
    (tmp_path / ".quartet/access/token").write_text("any, as the port is open")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    async with reward_door.reward_door(replicas({"": LENGTH}, folders[1])) as number:
        await asyncio.to_thread(exec, programs.replace(":18000/", f":{number}/"), names)
        assert capsys.readouterr().out == "wonderful {'score': 9.0}\ndull {'score': 4.0}\n"
        assert await asyncio.to_thread(names["compute_score"], "gsm8k", "w5 w6", 7) == 5.0
        with pytest.raises(RuntimeError, match=r"^failed: "):
            await asyncio.to_thread(names["compute_score"], "gsm8k", "w14", 7)


async def asked(port: int, path: str, body: Any = None, *headers: tuple[str, str]) -> Answer:
    return await ask(port, f"/reward{path}", body, *headers)


async def scored(port: int, path: str, body: Any) -> Any:
    got = await asked(port, path, body)
    assert got.status == 200, got.body
    return got.json


def pair(response: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "w5", "response": response} | more


async def test_texts_ids_and_messages_are_scored_as_over_grpc(port: int, folders: tuple[str, str]) -> None:
    prompts, responses = plain.random_pairs(5)
    expected = plain.scores(Path(folders[0]), prompts, responses)
    ids = [{"prompt_ids": p.tolist(), "response_ids": r.tolist()} for p, r in zip(prompts, responses, strict=True)]
    got = await scored(port, "/v1/rewards", {"scorer": "taste", "pairs": ids})
    assert [result["scores"]["score"] for result in got["results"]] == pytest.approx(expected.tolist(), abs=1e-5)
    assert {result["outcome"] for result in got["results"]} == {"scored"}
    assert got["scorer"]["name"] == "model:reward"
    assert re.fullmatch(r"[0-9a-f]{64}", got["scorer"]["model_hash"])
    texts = await scored(port, "/v1/rewards", {"scorer": "taste", "pairs": [pair("w7 w8")]})
    one = plain.scores(Path(folders[0]), [np.asarray([BOS, 5])], [np.asarray([7, 8, EOS])])
    assert texts["results"][0]["scores"]["score"] == pytest.approx(one[0], abs=1e-5)
    said = {"prompt": [{"role": "user", "content": "w5"}], "response": "w7"}
    assert (await scored(port, "/v1/rewards", {"scorer": "taste", "pairs": [said]}))["results"][0][
        "outcome"
    ] == "scored"


async def test_a_pair_without_a_score_has_null_its_outcome_and_the_reason(port: int) -> None:
    pairs = [pair(word, label="a") for word in ("w7", *UNSCORED, "w8 w9")]
    results = (await scored(port, "/v1/rewards", {"scorer": "length", "pairs": pairs}))["results"]
    assert [result["outcome"] for result in results] == ["scored", *(name for name, _ in UNSCORED.values()), "scored"]
    assert [result["scores"] for result in results] == [{"score": 2.0}, None, None, None, None, {"score": 5.0}]
    for result, (_, reason) in zip(results[1:], UNSCORED.values(), strict=False):
        assert reason in result["reason"]
        assert "secret" not in result["reason"]
    assert results[0]["reason"] is None
    assert reward_door.SEEN[-1].label == "a"
    known = [pair("w7", columns={"unit": [1]}, group=-3), pair("w8", group=4), pair("w9", group=4)]
    for _ in range(2):
        await scored(port, "/v1/rewards", {"scorer": "length", "pairs": known, "pair_timeout_s": 2})
    first, second, third = sorted(reward_door.SEEN[-3:], key=lambda each: each.response)
    assert (dict(first.columns), first.timeout_s) == ({"unit": [1]}, 2.0)
    assert (dict(second.columns), second.group) == ({}, third.group)
    # The numbers of a request are of no other.
    assert len({each.group for each in reward_door.SEEN[-6:]}) == 4
    # Unless both say that their numbers are of one whole.
    for whole in ("a", "a", "b"):
        await scored(port, "/v1/rewards", {"scorer": "length", "pairs": known, "groups_of": whole})
    of_two, others = reward_door.SEEN[-9:-3], reward_door.SEEN[-3:]
    assert (len({each.group for each in of_two}), len({each.group for each in of_two + others})) == (2, 4)
    for wrong in ("", "a" * 257, 3):
        body = {"scorer": "length", "pairs": known, "groups_of": wrong}
        assert (await asked(port, "/v1/rewards", body)).status == 400
    cut = [pair("w7", ended=False), pair("w8 w9")]
    await scored(port, "/v1/rewards", {"scorer": "length", "pairs": cut})
    ended = {each.response: each.ended for each in reward_door.SEEN[-2:]}
    assert ended == {"w7": False, "w8 w9": True}


async def test_scores_have_their_names(port: int) -> None:
    got = await scored(port, "/v1/rewards", {"scorer": "two", "pairs": [pair("w7 w8")]})
    assert got["results"] == [{"outcome": "scored", "scores": {"long": 5.0, "words": 2.0}, "reason": None}]


REQUESTS: dict[str, Any] = {
    "/get_reward": lambda text: {"query": ["w7", text]},
    "/score": lambda text: {"text_1": "w5", "text_2": ["w7", text]},
    "/classify": lambda text: {"input": ["w7", text]},
    "/pooling": lambda text: {"input": ["w7", text]},
    "/predict": lambda text: {"inputs": [["w7"], ["w5", text]]},
    "/v1/score": lambda text: {"queries": "w5", "documents": ["w7", text]},
    "/rerank": lambda text: {"query": "w5", "texts": ["w7", text]},
    "/v1/rerank": lambda text: {"query": "w5", "documents": ["w7", text], "top_n": 1},
}
"""Path of another server's protocol -> a request with two responses."""


@pytest.mark.parametrize("word", UNSCORED)
@pytest.mark.parametrize("path", REQUESTS)
async def test_no_other_protocol_gets_a_number_for_a_pair_without_a_score(port: int, path: str, word: str) -> None:
    got = await asked(port, f"/scorers/length{path}", REQUESTS[path](word))
    assert got.status == 503
    outcome, reason = UNSCORED[word]
    assert re.match(rf"\w+\[1\]: {outcome.replace('_', ' ')}: .*{reason}", got.message)
    assert got.message.endswith("(1 of 2 are not scored)")
    assert re.fullmatch(r"\w+\[1\]", got.json["error"]["param"])
    # To ask again helps only if the outcome may be another then.
    assert ("retry-after" in got.headers) == (outcome in ("failed", "refused"))


async def test_openrlhf_gets_a_reward_for_each_query(port: int) -> None:
    body = {"query": ["w5 w6w7", "w8"], "prompts": ["w5 w6", "w9"], "labels": ["a", None]}
    got = await scored(port, "/scorers/length/get_reward", body)
    assert got == {"rewards": [2.0, 2.0], "scores": [2.0, 2.0], "extra_logs": {"score": [2.0, 2.0]}}
    seen = {(each.prompt, each.response, each.label) for each in reward_door.SEEN[-2:]}
    assert seen == {("w5 w6", "w7", "a"), ("", "w8", "")}
    one = await scored(port, "/get_reward", {"query": ["w7 w8"], "scorer": "two/words"})
    assert one["rewards"] == [2.0]
    assert await scored(port, "/scorers/two/words/get_reward", {"query": ["w7 w8"]}) == one
    for scorer in ("two", "two/words"):
        body = {"query": ["w7 w8"], "scorer": scorer}
        assert await scored(port, "/scorers/two/words/get_reward", body) == one
    several = await asked(port, "/scorers/two/get_reward", {"query": ["w7"]})
    assert (several.status, several.json["error"]["param"]) == (400, "scorer")
    assert "the scorer gives long, words; name one of them as SCORER/long" in several.message


async def test_the_texts_of_openrlhf_have_the_scores_of_their_ids(port: int, folders: tuple[str, str]) -> None:
    """OpenRLHF sends what its tokenizer decodes, special tokens included."""
    prompts, responses = [[BOS, 5, 6], [BOS, 7]], [[8, EOS], [9, 10, 11, EOS]]
    ids = [{"prompt_ids": p, "response_ids": r} for p, r in zip(prompts, responses, strict=True)]
    results = (await scored(port, "/v1/rewards", {"scorer": "taste", "pairs": ids}))["results"]
    expected = [result["scores"]["score"] for result in results]
    decode = load_tokenizer(folders[1]).batch_decode
    asked = decode(prompts)
    for after in ([], [PAD] * 3):
        whole = decode([[*p, *r, *after] for p, r in zip(prompts, responses, strict=True)])
        for more in ({}, {"prompts": asked}):
            got = await scored(port, "/scorers/taste/get_reward", {"query": whole} | more)
            assert got["rewards"] == pytest.approx(expected, abs=1e-5)


async def test_vllm_gets_its_answers(port: int, folders: tuple[str, str]) -> None:
    whole = plain.scores(Path(folders[0]), [np.asarray([BOS])] * 2, [np.asarray([5, 6, 7]), np.asarray([8, EOS])])
    texts = {"model": "taste", "input": ["w5 w6 w7", "w8 <eos>"], "use_activation": False}
    ids = {"model": "taste", "input": [[BOS, 5, 6, 7], [BOS, 8, EOS]], "activation": False}
    for body in (texts, ids):
        got = await scored(port, "/classify", body)
        assert [each["probs"][0] for each in got["data"]] == pytest.approx(whole.tolist(), abs=1e-5)
        assert [each["index"] for each in got["data"]] == [0, 1]
        assert (got["object"], got["model"], got["data"][0]["num_classes"]) == ("list", "taste", 1)
        pooled = await scored(port, "/pooling", body)
        assert [each["data"] for each in pooled["data"]] == [each["probs"] for each in got["data"]]
    one = await scored(port, "/classify", {"model": "taste", "input": "w5 w6 w7"})
    assert len(one["data"]) == 1
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        body = {"model": "length", names[0]: "w5", names[1]: ["w7", "w8 w9"]}
        got = await scored(port, "/score", body)
        assert [each["score"] for each in got["data"]] == [2.0, 5.0]
        assert (await scored(port, "/score", body | {names[0]: ["w5", "w6"]}))["data"] == got["data"]
        assert (await scored(port, "/score", body | {"model": "length/score"}))["data"] == got["data"]
    chat = [{"role": "user", "content": [{"type": "text", "text": "w5"}]}, {"role": "assistant", "content": "w7 w8"}]
    got = await scored(port, "/pooling", {"model": "two", "messages": chat})
    assert got["data"][0]["data"] == [5.0, 2.0]
    listed = (await asked(port, "/v1/models")).json["data"]
    assert [(each["id"], each["scores"]) for each in listed] == [
        ("taste", ["score"]),
        ("length", ["score"]),
        ("two", ["long", "words"]),
    ]
    assert listed[0]["max_model_len"] == MAX_LENGTH
    assert (await scored(port, "/tokenize", {"model": "taste", "prompt": "w5 w6"}))["tokens"] == [BOS, 5, 6]


async def test_text_embeddings_inference_gets_its_answers(port: int) -> None:
    path = "/scorers/length/predict"
    assert await scored(port, path, {"inputs": "w7"}) == [{"score": 2.0, "label": "score"}]
    assert await scored(port, path, {"inputs": ["w5", "w7 w8"]}) == [{"score": 5.0, "label": "score"}]
    batch = {"inputs": [["w7"], ["w5", "w7 w8"]], "raw_scores": True, "truncate": False}
    assert [row[0]["score"] for row in await scored(port, path, batch)] == [2.0, 5.0]
    assert {(each.prompt, each.response) for each in reward_door.SEEN[-2:]} == {("", "w7"), ("w5", "w7 w8")}
    both = await scored(port, "/scorers/two/predict", {"inputs": "w7 w8"})
    assert both == [{"score": 5.0, "label": "long"}, {"score": 2.0, "label": "words"}]
    body = {"query": "w5", "texts": ["w7", "w8 w9"], "return_text": True}
    assert await scored(port, "/scorers/length/rerank", body) == [
        {"index": 1, "score": 5.0, "text": "w8 w9"},
        {"index": 0, "score": 2.0, "text": "w7"},
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_vllm_gets_documents_best_first(port: int, path: str) -> None:
    body = {"model": "length", "query": "w5", "documents": ["w7", "w8 w9 w10", "w8 w9"]}
    got = await scored(port, path, body)
    assert [(each["index"], each["relevance_score"]) for each in got["results"]] == [(1, 9.0), (2, 5.0), (0, 2.0)]
    assert got["results"][0]["document"] == {"text": "w8 w9 w10"}
    assert got["model"] == "length"
    two = await scored(port, path, body | {"top_n": 2})
    assert two["results"] == got["results"][:2]


def gym(text: str, **more: Any) -> dict[str, Any]:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "w5"}]},
        "response": {"id": "r", "output": [{"type": "reasoning", "summary": []}, said | {"content": None}, said]},
        "expected_answer": "w8",
        **more,
    }


async def test_nemo_gym_gets_its_request_with_a_reward_or_with_the_class_of_its_failure(port: int) -> None:
    body = gym("w7 w8", verifier_metadata={"unit": [1, 2]})
    got = await scored(port, "/scorers/length/verify", body)
    assert got == body | {"reward": 5.0, "reward_components": {"score": 5.0}, "mask_sample": False}
    seen = reward_door.SEEN[-1]
    assert (seen.response, seen.label) == ("w7 w8", "w8")
    assert dict(seen.columns) == {"expected_answer": "w8", "verifier_metadata": {"unit": [1, 2]}}
    for word, (outcome, reason) in UNSCORED.items():
        got = await scored(port, "/scorers/length/verify", gym(word))
        assert (got["reward"], got["reward_components"], got["mask_sample"]) == (None, None, True)
        assert (got["_ng_failure_class"], got["failure_kind"]) == (outcome, f"quartet:{outcome}")
        assert reason in got["failure_reason"]
        again = await scored(port, "/scorers/length/verify", got | gym("w7 w8"))
        assert again == gym("w7 w8") | {"reward": 5.0, "reward_components": {"score": 5.0}, "mask_sample": False}
    assert (await asked(port, "/seed_session", {})).json == {}
    assert (await asked(port, "/reverify_mode")).json == "stateless"
    # A field `model` or `scorer` of the body is a column, so the address says which score.
    got = await scored(port, "/scorers/two/words/verify", body | {"model": "x"})
    assert (got["reward"], got["reward_components"], got["model"]) == (2.0, {"words": 2.0}, "x")
    several = await asked(port, "/scorers/two/verify", body)
    assert (several.status, several.json["error"]["param"]) == (400, "address")
    assert several.message == "address: the scorer gives long, words; name one of them as SCORER/long"


async def test_scores_that_cannot_be_given_are_refused_before_anything_is_scored(port: int, scorers: Scorers) -> None:
    before = len(scorers.shares)
    texts = {"text_1": "w5", "text_2": "w6"}
    for path, body in (
        ("/score", {"model": "two/short"} | texts),
        ("/score", {"model": "two"} | texts),
        ("/scorers/two/get_reward", {"query": ["w7"]}),
        ("/scorers/two/rerank", {"query": "w5", "texts": ["w6"]}),
        ("/scorers/two/verify", gym("w7")),
        ("/scorers/length/words/classify", {"input": "w7"}),
        ("/scorers/two/long/score", {"model": "two/words"} | texts),
    ):
        assert (await asked(port, path, body)).status == 400, path
    assert len(scorers.shares) == before


PAIRS = [pair("w7")]
SAID = {"role": "user", "content": "w5"}


def ids(prompt: int, *response: int) -> dict[str, Any]:
    return {"prompt_ids": [prompt], "response_ids": [*response]}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/rewards", {"pairs": PAIRS}, "scorer", "required, as there are several: length, taste, two"),
        ("/v1/rewards", {"pairs": []}, "pairs", "at least 1 item"),
        ("/v1/rewards", {"pairs": PAIRS, "temperature": 1}, "temperature", "not a field here"),
        ("/v1/rewards", {"pairs": [{"prompt": "w5"}]}, "pairs[0]", "should have prompt and response, or"),
        ("/v1/rewards", {"pairs": [pair("w7", prompt_ids=[5])]}, "pairs[0]", "has texts and ids"),
        ("/v1/rewards", {"pairs": [pair(5)]}, "pairs[0].response", "valid string"),  # type: ignore[arg-type]
        ("/v1/rewards", {"pairs": [ids(5, -1)]}, "pairs[0].response_ids[0]", "greater than or equal"),
        ("/v1/rewards", {"scorer": "taste", "pairs": [ids(5)]}, "pairs[0].response_ids", "at least one"),
        ("/v1/rewards", {"scorer": "taste", "pairs": [ids(5, 999)]}, "pairs.ids[1]", "outside the vocabulary"),
        ("/v1/rewards", {"scorer": "taste", "pairs": [pair("w7 " * 200)]}, "pairs[0]", "exceed the model's"),
        ("/v1/rewards", {"scorer": "taste", "pairs": [pair("w7", columns=1)]}, "pairs[0].columns", "valid dict"),
        ("/v1/rewards", {"pairs": PAIRS, "pair_timeout_s": 0.01}, "pair_timeout_s", "greater than or equal to 0.05"),
        ("/v1/rewards", {"pairs": [*PAIRS, ids(5, 6)]}, "pairs", "some have texts and some ids"),
        ("/v1/rewards", {"scorer": "length", "pairs": [*PAIRS, {"prompt": [SAID], "response": "w7"}]}, "pairs",
         "some prompts are texts and some messages"),
        ("/v1/rewards", {"scorer": "length", "pairs": [ids(5, 6), ids(5, 6) | {"ended": True}]}, "pairs",
         "some say whether they ended and some do not"),
        ("/v1/rewards", {"pairs": [*PAIRS, pair("w8", group=1)]}, "pairs", "some have a group and some none"),
        ("/score", {"text_1": "w5", "documents": "w6"}, None, "should have text_1 and text_2, or queries and"),
        ("/score", {"text_1": ["w5", "w6"], "text_2": ["w6"]}, "text_1", "2 prompts for 1 responses"),
        ("/score", {"queries": ["w5", "w6"], "items": ["w6"]}, "queries", "2 prompts for 1 responses"),
        ("/score", {"queries": "w5", "documents": "w7 " * 200, "model": "taste"}, "documents[0]", "exceed the"),
        ("/score", {"text_1": "w5", "text_2": "w6"}, "model", "required, as there are several: length, taste, two"),
        ("/rerank", {"query": "w5", "texts": ["w6"]}, "model", "required, as there are several"),
        ("/tokenize", {"prompt": "w5"}, "model", "required, as there are several"),
        ("/get_reward", {"query": ["w5"]}, "scorer", "required, as there are several"),
        ("/predict", {"inputs": "w5"}, "address", "required, as there are several"),
        ("/scorers/length/words/predict", {"inputs": "w5"}, "address", "there is no score 'words'"),
        ("/classify", {}, "input", "should be given, or messages in its place"),
        ("/classify", {"input": [[5]], "model": "taste"}, "input[0]", "1 tokens; send at least two"),
        ("/classify", {"input": "w5", "use_activation": True}, "use_activation", "should be False"),
        ("/pooling", {"input": "w5", "encoding_format": "base64"}, "encoding_format", "should be 'float'"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs", "should be a text, [prompt, response], or a list"),
        ("/classify", {"input": ["w5"] * 4097}, "input", "4097 rows; at most 4096"),
        ("/pooling", {"messages": [{"role": "assistant", "content": "w7"}], "model": "length"}, "messages[0]",
         "two messages or more"),
        ("/rerank", {"query": "w5", "documents": ["w7 " * 200], "model": "taste"}, "documents[0]", "exceed the"),
        ("/scorers/taste/rerank", {"query": "w5", "texts": ["w7 " * 200]}, "texts[0]", "exceed the"),
        ("/predict", {"inputs": []}, "inputs", "should be a text, [prompt, response], or a list"),
        ("/predict", {"inputs": [["w5"]] * 4097}, "inputs", "4097 rows; at most 4096"),
        ("/predict", {"inputs": "w5", "parameters": {"top_k": 0}}, "parameters.top_k", "a whole number from 1 on"),
        ("/predict", {"inputs": "w5", "parameters": {"top_k": True}}, "parameters.top_k", "a whole number from 1 on"),
        ("/predict", {"inputs": "w5", "parameters": {"function_to_apply": "sigmoid"}},
         "parameters.function_to_apply", 'must be "none"'),
        ("/rerank", {"query": "w5", "texts": ["w6"], "raw_scores": False}, "raw_scores", "should be True"),
        ("/rerank", {"query": "w5"}, "texts", "should be given, or documents in its place"),
        ("/rerank", {"query": "w5", "texts": ["w6"], "documents": ["w6"]}, "texts", "should be given, or documents"),
        ("/v1/rerank", {"query": "w5", "documents": ["w6"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ("/get_reward", {"query": ["w5"], "labels": ["a", "b"]}, "labels", "2 for 1 queries"),
        ("/aggregate_metrics", {"verify_responses": 1}, "verify_responses", "valid list"),
        ("/aggregate_metrics", {"verify_responses": [{"a": 10**400}]}, "verify_responses", "'a' are too large"),
        ("/aggregate_metrics", {"verify_responses": [{"a": 1e308}] * 9}, "verify_responses", "'a' are too large"),
        ("/verify", {"responses_create_params": {}, "response": {}}, "response.output", "no message with text"),
        ("/verify", gym("w7", responses_create_params={"input": [SAID, "w5"]}), "responses_create_params.input",
         "a text, or a list of messages"),
        ("/verify", gym("w7", responses_create_params={"input": [SAID, {"content": "w5"}]}),
         "responses_create_params.input[1].role", "should be a text"),
        ("/verify", gym("w7"), "address", "required, as there are several"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_with_the_fields_name(
    port: int, path: str, body: Any, param: str | None, message: str
) -> None:
    got = await asked(port, path, body)
    assert (got.status, got.json["error"]["param"]) == (400, param), got.body
    assert message in got.message
    if param:
        assert got.message.startswith(param)


async def test_other_names_other_limits_and_broken_bodies(port: int) -> None:
    for body, message in (
        (b"{", "the body is not JSON"),
        (b"[]", "the body should be a JSON object"),
        (b'{"pairs": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is larger than any number"),
        (b'{"scorer": "two", "pairs": [], "scorer": "length"}', "'scorer' is in an object twice"),
        (b'{"pairs": "\\udc00"}', "surrogate"),
        (b"\xff\xfe{}", "the body is not JSON"),
    ):
        got = await asked(port, "/v1/rewards", body)
        assert got.status == 400
        assert message in got.message
    for path, name in (("/score", "nonesuch"), ("/score", "two/nonesuch/more"), ("/scorers/nonesuch/score", "")):
        got = await asked(port, path, {"model": name, "text_1": "w5", "text_2": "w6"})
        assert (got.status, got.json["error"]["param"]) == (404, "model")
        assert got.message.endswith("is no scorer here; there is length, taste, two")
    both = await asked(port, "/scorers/two/score", {"model": "length", "text_1": "w5", "text_2": "w6"})
    assert both.status == 400
    missing = await asked(port, "/score", {"model": "two/short", "text_1": "w5", "text_2": "w6"})
    assert missing.message == "model: there is no score 'short'; the scorer gives long, words"
    assert (await asked(port, "/score", b'{"text_1": "' + b"w5 " * 800_000 + b'"}')).status == 413


async def test_the_shares_limits_are_those_of_grpc(folders: tuple[str, str]) -> None:
    limits = {"max_call_rows": 4, "max_call_tokens": 100, "max_waiting_rows": 8, "max_waiting_tokens": 200}
    few = replicas({"": LENGTH}, folders[1], limits=limits)
    async with reward_door.reward_door(few) as port:
        many = await asked(port, "/v1/rewards", {"pairs": PAIRS * 5})
        assert (many.status, many.json["error"]["param"]) == (413, "pairs")
        assert many.message == "pairs: 5 rows, but a call may hold 4; send it in several"
        named = [("quartet-run", "eval"), ("quartet-purpose", "training")]
        assert (await asked(port, "/v1/rewards", {"pairs": PAIRS}, *named)).status == 200
        assert few.shares[-1] == Share("eval", Purpose.EVALUATION)
        # A caller's share of the waiting work is half of it.
        reward_door.GO_ON.clear()
        held = asyncio.create_task(asked(port, "/v1/rewards", {"pairs": [pair("w18")] * 4}, named[0]))
        await until(lambda: few.front._admission.waiting_rows == 4)
        refused = await asked(port, "/v1/rewards", {"pairs": PAIRS}, named[0])
        other = asyncio.create_task(asked(port, "/v1/rewards", {"pairs": PAIRS}, ("quartet-run", "other")))
        await until(lambda: few.front._admission.waiting_rows == 5)
        reward_door.GO_ON.set()
        assert ((await held).status, (await other).status) == (200, 200)
        assert (refused.status, refused.json["error"]["param"]) == (429, "pairs")
        assert int(refused.headers["retry-after"]) >= 1
        assert "of this caller wait already" in refused.message
        # The only scorer answers by what it is, too.
        identity = "function:tests.unit.reward_door:length"
        assert (await asked(port, "/v1/models")).json["data"][0]["id"] == identity
        assert (await asked(port, "/v1/rewards", {"scorer": identity, "pairs": PAIRS})).status == 200
        assert (await asked(port, f"/scorers/{identity}/score", {"text_1": "w5", "text_2": "w7"})).status == 200
        assert (await asked(port, "/scorers/other/score", {"text_1": "w5", "text_2": "w7"})).status == 404


async def test_health_and_measures(port: int) -> None:
    assert (await asked(port, "/health")).json == {"status": "serving"}
    await asked(port, "/v1/rewards", {"scorer": "length", "pairs": [pair("w7"), pair("w15")]})
    await asked(port, "/score", {"model": "length", "text_1": "w5", "text_2": "w7"})
    await asked(port, "/v1/rewards", {"scorer": "taste", "pairs": [pair("w7 " * 200)]})
    got = await asked(port, "/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=")
    text = got.body.decode()
    for line in (
        r'quartet_reward_calls_total{door="rewards",replica="one",scorer="length",status="ok"} \d+\.0',
        r'quartet_reward_calls_total{door="rewards",replica="one",scorer="taste",status="INVALID_ARGUMENT"} \d+\.0',
        r'quartet_reward_rows_total{outcome="not_applicable",replica="one",scorer="length"} \d+\.0',
        r'quartet_reward_rows_total{outcome="scored",replica="one",scorer="length"} \d+\.0',
        r'quartet_reward_call_seconds_bucket{door="score",le="\+Inf",replica="one",scorer="length"} \d+\.0',
        r'quartet_reward_waiting_rows{replica="one",scorer="length"} 0\.0',
    ):
        assert re.search(rf"^{line}$", text, re.MULTILINE), text


async def test_the_openapi_page_describes_what_is_taken_and_given(port: int) -> None:
    page = (await asked(port, "/openapi.json")).json
    ours = page["paths"]["/v1/rewards"]["post"]
    assert ours["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/RewardsRequest")
    assert ours["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/RewardsAnswer")
    assert ours["responses"]["429"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    served = {(path, method.upper()) for path, methods in page["paths"].items() for method in methods}
    assert served | {("/openapi.json", "GET")} == {(path, route.method) for path, route in ROUTES["Reward"].items()}
    answers: list[tuple[str, Any, Any]] = [
        ("/v1/rewards", http_fields.RewardsAnswer, {"pairs": [pair("w7"), pair("w15")]}),
        ("/score", http_fields.ScoreAnswer, {"text_1": "w5", "text_2": "w7"}),
        ("/classify", http_fields.ClassifyAnswer, {"input": "w7"}),
        ("/pooling", http_fields.PoolingAnswer, {"input": "w7"}),
        ("/predict", http_fields.PredictAnswer, {"inputs": "w7"}),
        ("/rerank", list[http_fields.Rank], {"query": "w5", "texts": ["w7"]}),
        ("/v1/rerank", http_fields.RerankAnswer, {"query": "w5", "documents": ["w7"]}),
        ("/aggregate_metrics", http_fields.AggregateAnswer, {"verify_responses": [{"reward": 1.0}]}),
        ("/verify", http_fields.VerifyAnswer, gym("w7")),
        ("/get_reward", http_fields.GetRewardAnswer, {"query": ["w7"]}),
    ]
    for path, kind, body in answers:
        got = await asked(port, f"/scorers/length{path}", body)
        TypeAdapter(kind).validate_python(json.loads(got.body))
    for path in ("/v1/models",):
        http_fields.ModelList.model_validate((await asked(port, path)).json)
