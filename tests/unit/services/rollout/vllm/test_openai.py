"""vLLM's own serving classes before an engine that answers by a script: shares, versions, errors, leaving."""

import asyncio
import json
import re
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_core import to_json
from starlette.responses import Response
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from protos import rollout_pb2 as pb
from quartet.config.base import ConfigError
from quartet.config.limits import LimitsConfig
from quartet.serving.admission import Admission
from quartet.serving.http import HttpMixin
from quartet.serving.share import Share
from quartet.serving.slots import EngineSlots
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument, LeaseLost, NotFound, ResourceExhausted, ServiceError, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.histories import Told, digests
from services.rollout.http import Served
from services.rollout.interface import NO_VERSION
from services.rollout.sample import seed_of_turn
from services.rollout.session_holder import OpenSession
from services.rollout.session_trajectory import as_json
from services.rollout.vllm import openai, openai_call
from services.rollout.vllm.arguments import engine_args
from services.rollout.vllm.openai import VLLMCompletions
from services.rollout.vllm.openai_call import OpenAICall
from services.rollout.vllm.requests import Requests
from services.rollout.vllm.scheduler import AT_ONCE_KEY, STREAMED_KEY
from tests.cluster import TEMPLATE
from tests.configuration import REPO
from tests.http_requests import Answer
from tests.models import BOS, EOS, MAX_LENGTH, ROWS, make_tokenizer
from tests.unit.local_sessions import LocalSessions

ME = Share("me", Purpose.FOREIGN, "declared")
TEXT, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def noted(length: int) -> list[Any]:
    """vLLM's note: the first two tokens are of version 3, the others of version 4."""
    spans = [WeightVersionSpan("3", 0, min(length, 2))]
    return spans + ([WeightVersionSpan("4", 2, length)] if length > 2 else [])


@dataclass
class Script:
    """AsyncLLM as the serving classes know it. A response is the tokens 10, 11 and so on, one an
    output, up to its limit."""

    vllm_config: Any
    renderer: Any
    input_processor: Any
    end: str = "length"
    say: str = "w{} "
    """Text of a token."""
    asked: list[Any] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    external_req_ids: dict[str, list[str]] = field(default_factory=dict)
    request_states: dict[str, Any] = field(default_factory=dict)
    errored = False
    dead_error = EngineDeadError()

    def __post_init__(self) -> None:
        self.model_config = self.vllm_config.model_config
        self.output_processor = self
        self.gate.set()

    def check_admission(self, n: int = 1) -> None:
        """Refuses nothing."""

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: Any = None
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((prompt, params))
        try:
            for length in range(1, params.max_tokens + 1):
                if length > 1:
                    await self.gate.wait()
                self.external_req_ids[name] = [name]
                self.request_states[name] = SimpleNamespace(_weight_version_spans=lambda: noted(length))  # noqa: B023
                yield self._output(prompt, params, length)
                await asyncio.sleep(0)
        finally:
            self.ended.append(name)

    def _output(self, prompt: Any, params: Any, length: int) -> RequestOutput:
        last = length == params.max_tokens
        tokens = [9 + length] if params.output_kind.name == "DELTA" else list(range(10, 10 + length))
        text = "".join(self.say.format(token) for token in tokens)
        logprobs: Any = [{token: Logprob(-0.5, decoded_token=f"w{token}")} for token in tokens]
        output = CompletionOutput(0, text, tokens, -0.5, logprobs, finish_reason=self.end if last else None)
        output.weight_versions = noted(length) if last else None
        return RequestOutput("r", None, prompt["prompt_token_ids"], None, [output], finished=last)


@dataclass
class Replica:
    """The parts of a replica around the script."""

    llm: Script
    completions: VLLMCompletions
    engine: Any
    admission: Admission
    still: list[ServiceError] = field(default_factory=list)
    sessions: LocalSessions = field(default_factory=LocalSessions)

    async def ask(self, path: str, session: str = "", **body: Any) -> Answer:
        held = OpenSession(self.sessions, ME.name, session) if session else None
        return await heard(await self.completions.answer(path, json.dumps(body).encode(), ME, held))

    def prompts(self) -> list[list[int]]:
        """Prompts that the engine was asked for."""
        return [list(prompt["prompt_token_ids"]) for prompt, _ in self.llm.asked]

    def beat(self) -> None:
        if self.still:
            raise self.still[0]


async def heard(response: Response, leave: Callable[[bytes], bool] = lambda body: False) -> Answer:
    """Sends a response to a client, which may leave by what it has got."""
    got = bytearray()

    async def answer(_: Any) -> Response:
        return response

    replica: Any = SimpleNamespace(answer=answer)
    async with aclosing(HttpMixin.http(replica, "/", "/", b"", "POST", [])) as parts:
        async for part in parts:
            got += part[-1] if isinstance(part, tuple) else part
            if leave(bytes(got)):
                break
    return Answer(response.status_code, dict(response.headers), bytes(got))


@pytest.fixture(scope="module")
def vllm_config(policy_folder: Path) -> Any:
    config = RolloutConfig.parse({"model": str(policy_folder), "kv_cache_mib": 1, "dtype": "float32"}, "rollout")
    return engine_args(config).create_engine_config(UsageContext.LLM_CLASS)


@pytest.fixture(scope="module")
def renderer(vllm_config: Any) -> Any:
    return renderer_from_config(vllm_config)


@pytest.fixture
async def replica(vllm_config: Any, renderer: Any, policy_folder: Path) -> Replica:
    llm: Any = Script(vllm_config, renderer, InputProcessor(vllm_config, renderer))
    engine: Any = SimpleNamespace(
        **{"llm": llm, "requests": Requests(llm), "version": 4, "checksum": "c", "end_ids": (2,)},
        checksums={3: "b", 4: "c"},
        tokenizer=make_tokenizer(),
        **{"vocab_size": ROWS, "max_length": MAX_LENGTH},
    )
    limits = LimitsConfig(max_waiting_calls=8, max_call_rows=8, max_waiting_rows=16)
    admission, slots = Admission(limits), EngineSlots(8, limits, quantum=MAX_LENGTH)
    made: list[Replica] = []
    proof = pb.Proof(policy_version=2, difference=0.25)
    served = Served(
        *(engine, admission, slots, lambda: "mine", lambda: made[0].beat()),
        check=lambda request: None,
        proved=lambda: proof,
    )
    config = RolloutConfig(model=str(policy_folder), kv_cache_mib=1, tool_parser="hermes")
    made.append(Replica(llm, VLLMCompletions(config, served), engine, admission))
    return made[0]


def spans(length: int) -> list[Any]:
    return [{"version": int(each.version), "start": each.start, "end": each.end} for each in noted(length)]


async def test_an_answer_names_the_versions_of_its_tokens(replica: Replica) -> None:
    got = await replica.ask(TEXT, prompt=[[5], [6, 7]], max_tokens=5, logprobs=0, return_token_ids=True)
    assert got.status == 200
    assert (got.json["model"], got.json["policy_version"], got.json["weights_checksum"]) == ("mine", 4, "c")
    assert got.json["proved"] == {"version": 2, "difference": 0.25}
    for choice, prompt in zip(got.json["choices"], ([5], [6, 7]), strict=True):
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == [10, 11, 12, 13, 14]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * 5
        assert choice["version_spans"] == spans(5)
    short = await replica.ask(TEXT, prompt=[5], max_tokens=2)
    assert (short.json["policy_version"], short.json["choices"][0]["version_spans"]) == (3, spans(2))


async def test_each_event_of_a_stream_names_them_so_far(replica: Replica) -> None:
    got = await replica.ask(TEXT, prompt=[5], max_tokens=5, stream=True, return_token_ids=True)
    told = [(event["policy_version"], event["choices"][0]["version_spans"]) for event in got.events]
    assert told == [(3 if length < 3 else 4, spans(length)) for length in range(1, 6)]
    assert [event["choices"][0]["token_ids"] for event in got.events] == [[10], [11], [12], [13], [14]]
    await replica.ask(TEXT, prompt=[5], max_tokens=1, stream=True, stop="x")
    assert [params.extra_args for _, params in replica.llm.asked] == [{STREAMED_KEY: True}, {AT_ONCE_KEY: True}]


async def test_an_event_names_no_token_that_it_does_not_bring(replica: Replica) -> None:
    """vLLM reads the next output of several prompts while the first event waits to be sent."""
    body = json.dumps({"prompt": [[5], [6]], "max_tokens": 5, "stream": True}).encode()
    response = await replica.completions.answer(TEXT, body, ME, None)
    for _ in range(50):
        await asyncio.sleep(0)
    first = (await heard(response)).events[0]
    assert (first["policy_version"], first["choices"][0]["version_spans"]) == (3, spans(1))


async def test_the_newest_version_is_that_which_came_last(replica: Replica) -> None:
    """A run that goes back to a checkpoint pushes lower numbers again."""
    replica.engine.checksums = {4: "c", 3: "b"}
    got = await replica.ask(TEXT, prompt=[[5], [6]], max_tokens=5)
    assert (got.json["policy_version"], got.json["weights_checksum"]) == (3, "b")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (TEXT, {"prompt": [[5], [6, 7]], "n": 3, "logprobs": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "w8 w9"}], "n": 3, "logprobs": True}),
        (GENERATE, {"token_ids": [5, 6], "sampling_params": {"n": 3, "logprobs": 0, "max_tokens": 5, "seed": 7}}),
    ],
    ids=["text", "chat", "tokens"],
)
async def test_each_of_several_responses_has_ids_logprobs_and_versions_of_its_own(
    talking: Replica, path: str, more: dict[str, Any]
) -> None:
    limits: Any = {} if path == GENERATE else {"max_tokens": 5, "seed": 7, "return_token_ids": True}
    rows = 6 if path == TEXT else 3
    got = await talking.ask(path, **more, **limits)
    assert [choice["index"] for choice in got.json["choices"]] == list(range(rows))
    for choice in got.json["choices"]:
        assert choice["token_ids"] == [10, 11, 12, 13, 14]
        assert choice["version_spans"] == spans(5)
        told = choice["logprobs"]
        numbers = told["token_logprobs"] if path == TEXT else [each["logprob"] for each in told["content"]]
        assert numbers == [-0.5] * 5
        if path == CHAT:
            assert choice["message"]["generation_token_ids"] == choice["token_ids"]
    assert [(params.n, params.seed) for _, params in talking.llm.asked] == [(1, 7), (1, 8), (1, 9)] * (rows // 3)
    assert sum(choice["finish_reason"] == "length" for choice in got.json["choices"]) == rows
    events = (await talking.ask(path, **more, **limits, stream=True)).events
    for index in range(rows):
        parts = [each for event in events for each in event["choices"] if each["index"] == index]
        parts = [part for part in parts if part.get("token_ids")]
        assert [part["token_ids"] for part in parts] == [[10], [11], [12], [13], [14]]
        assert [part["version_spans"] for part in parts] == [spans(length) for length in range(1, 6)]
    assert talking.admission.waiting_rows == 0


async def test_seeds_of_several_responses_stay_within_what_the_engine_takes(replica: Replica) -> None:
    assert (await replica.ask(TEXT, prompt=[5], max_tokens=1, n=2, seed=(1 << 63) - 1)).status == 200
    assert [params.seed for _, params in replica.llm.asked] == [(1 << 63) - 1, 0]


async def test_several_responses_count_as_rows_and_are_none_of_a_session(talking: Replica) -> None:
    talking.llm.gate.clear()
    first = asyncio.create_task(talking.ask(TEXT, prompt=[5], max_tokens=3, n=4))
    while len(talking.llm.asked) < 4:
        await asyncio.sleep(0)
    assert talking.admission.waiting_rows == 4
    first.cancel()
    await asyncio.wait([first])
    assert (len(talking.llm.ended), talking.admission.waiting_rows) == (4, 0)
    alike = await talking.ask(TEXT, prompt=[5], n=2, temperature=0)
    assert (alike.status, "n must be 1" in alike.json["error"]["message"]) == (400, True)
    with pytest.raises(InvalidArgument, match="n: 2; should be 1 in a session"):
        await talking.ask(CHAT, "s", messages=[USER], max_tokens=1, n=2)
    wrongs: Any = (({"prompt": [5], "n": 9}, 9), ({"prompt": [[5], [6], [7]], "n": 100}, 300))
    for wrong, rows in wrongs:
        with pytest.raises(ResourceExhausted, match=f"prompt: {rows} rows, but a call may hold 8"):
            await talking.ask(TEXT, **wrong, max_tokens=1)


async def test_a_stream_is_divided_at_no_character_of_a_text(replica: Replica) -> None:
    """Python takes these for ends of lines too, and vLLM does not escape them."""
    prompt = "w5\u2028w6\u2029w7\u0085w8"
    got = await replica.ask(TEXT, prompt=prompt, max_tokens=1, echo=True, stream=True)
    assert got.status == 200
    assert "".join(event["choices"][0]["text"] for event in got.events).startswith(prompt)


async def test_nothing_that_a_request_leaves_out_comes_from_the_models_folder(replica: Replica) -> None:
    replica.llm.model_config.override_generation_config = {}
    await replica.ask(TEXT, prompt=[5], max_tokens=1, cache_salt=None)
    [(prompt, params)] = replica.llm.asked
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.extra_args, prompt["cache_salt"]) == (None, "0")
    replica.engine.requests.pauses += 1
    await replica.ask(TEXT, prompt=[5], max_tokens=1)
    assert replica.llm.asked[1][0]["cache_salt"] == "1"


async def test_names_of_the_model(replica: Replica) -> None:
    replica.engine.version = 3
    listed = (await replica.completions.models())["data"]
    assert [(card["id"], card["policy_version"], card["root"]) for card in listed] == [
        *(("mine", 3, "mine"), ("mine@3", 3, "mine"))
    ]
    for name, status in (("mine", 200), ("mine@3", 200), ("", 200), ("mine@4", 404), ("/etc", 404)):
        for path, more in ((TEXT, {"prompt": [5]}), (CHAT, {"messages": [{"role": "user", "content": "w5"}]})):
            if path == CHAT and status == 200:
                continue  # this model has no chat template
            if status == 200:
                assert (await replica.ask(path, model=name, max_tokens=1, **more)).status == 200
                continue
            with pytest.raises(NotFound, match=f"model: '{name}' is not served; served are mine, mine@3"):
                await replica.ask(path, model=name, max_tokens=1, **more)


async def test_a_version_that_was_asked_for_samples_every_token_or_none_is_answered(replica: Replica) -> None:
    """A push of version 4 comes after the second token."""
    replica.engine.version = 3
    assert (await replica.ask(TEXT, model="mine@3", prompt=[5], max_tokens=2)).status == 200
    late = await replica.ask(TEXT, model="mine@3", prompt=[5], max_tokens=3)
    assert (late.status, late.json["error"]["code"]) == (404, 404)
    assert late.json["error"]["message"].startswith("model: version 3 is not served any more; served is 4")
    *events, last = (await replica.ask(TEXT, model="mine@3", prompt=[5], max_tokens=3, stream=True)).events
    assert (len(events), last["error"]["code"]) == (2, 404)
    assert (await replica.ask(TEXT, model="mine", prompt=[5], max_tokens=3)).status == 200
    assert replica.admission.waiting_rows == 0


async def test_tokens_of_texts_and_texts_of_tokens(replica: Replica) -> None:
    got = await replica.ask("/tokenize", prompt="w5 w6", return_token_strs=True)
    assert (got.json["tokens"], got.json["token_strs"]) == ([BOS, 5, 6], ["<bos>", "w5", "w6"])
    bare = await replica.ask("/tokenize", prompt="w5 w6", add_special_tokens=False)
    assert (bare.json["tokens"], bare.json["max_model_len"]) == ([5, 6], MAX_LENGTH)
    assert (await replica.ask("/detokenize", tokens=[5, 6])).json["prompt"].split() == ["w5", "w6"]
    for tokens in ([ROWS], [-1], ["a"], [1 << 70]):
        with pytest.raises(InvalidArgument, match=r"^tokens: "):
            await replica.ask("/detokenize", tokens=tokens)
    with pytest.raises(NotFound, match="served are mine, mine@4"):
        await replica.ask("/tokenize", model="other", prompt="w5")
    told = await replica.completions.tokenizer_info()
    assert (told["bos_token"], told["eos_token"], told["chat_template"]) == ("<bos>", "<eos>", None)
    assert "/" not in json.dumps(told)
    assert replica.admission.waiting_rows == 0


async def test_a_model_without_a_chat_template_says_so(replica: Replica) -> None:
    got = await replica.ask(CHAT, messages=[{"role": "user", "content": "w5"}])
    assert got.status == 400
    assert "chat template" in got.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_share_that_is_used_up_is_told_before_an_answer_begins(replica: Replica, stream: bool) -> None:
    replica.llm.gate.clear()
    first = [asyncio.create_task(replica.ask(TEXT, prompt=[5], max_tokens=3, stream=stream)) for _ in range(4)]
    while len(replica.llm.asked) < 4:
        await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="of this caller wait already") as caught:
        await replica.ask(TEXT, prompt=[5], max_tokens=3, stream=stream)
    assert caught.value.retry_after_s
    replica.llm.gate.set()
    assert [(await each).status for each in first] == [200] * 4
    assert replica.admission.waiting_rows == 0
    with pytest.raises(ResourceExhausted, match="prompt: 9 rows, but a call may hold 8") as never:
        await replica.ask(TEXT, prompt=[[5]] * 9, max_tokens=1, stream=stream)
    assert never.value.retry_after_s is None
    assert (await replica.ask(TEXT, prompt=[[5]] * 8, max_tokens=1, stream=stream)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [ROWS]}, f"prompt: {ROWS} is outside the vocabulary of {ROWS}"),
        ({"prompt": [[5], [ROWS]]}, f"prompt: {ROWS} is outside"),
        ({"prompt": [5], "stop_token_ids": [ROWS]}, f"stop_token_ids: {ROWS} is outside"),
    ],
)
async def test_what_would_end_the_engine_does_not_reach_it(
    replica: Replica, stream: bool, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await replica.ask(TEXT, **body, stream=stream)
    assert (replica.llm.asked, replica.admission.waiting_rows) == ([], 0)


async def test_a_least_length_needs_ends_that_the_model_has(replica: Replica) -> None:
    replica.engine.end_ids = (2, ROWS)
    with pytest.raises(InvalidArgument, match="min_tokens: 1; must be 0, as the model's folder names an end"):
        await replica.ask(TEXT, prompt=[5], min_tokens=1)
    assert (await replica.ask(TEXT, prompt=[5], max_tokens=1)).status == 200


@pytest.mark.parametrize("limit", [5, None])
async def test_a_prompt_that_leaves_no_room_for_a_token_says_so(talking: Replica, limit: int | None) -> None:
    long: Any = {"content": "w5 " * (MAX_LENGTH - 2), "role": "user"}
    for path, body in (
        (TEXT, {"prompt": [5] * MAX_LENGTH, "max_tokens": limit}),
        (CHAT, {"messages": [long], "max_tokens": limit}),
        (GENERATE, {"token_ids": [5] * MAX_LENGTH, "sampling_params": {"max_tokens": limit}}),
    ):
        with pytest.raises(InvalidArgument, match=f"prompt: .* should be {MAX_LENGTH - 1} tokens at most"):
            await talking.ask(path, **body)
    assert talking.admission.waiting_rows == 0
    assert (await talking.ask(TEXT, prompt=[5] * (MAX_LENGTH - 1), max_tokens=5)).status == 200
    assert [params.max_tokens for _, params in talking.llm.asked] == [1]


async def test_a_response_that_a_push_ends_is_an_error(replica: Replica) -> None:
    replica.llm.end = "abort"
    got = await replica.ask(TEXT, prompt=[5], max_tokens=3)
    assert (got.status, got.headers["retry-after"]) == (503, "1")
    assert "the engine ended the request before it was finished" in got.json["error"]["message"]
    *events, last = (await replica.ask(TEXT, prompt=[5], max_tokens=3, stream=True)).events
    assert len(events) == 2
    assert (last["error"]["code"], last["error"]["type"]) == (503, "server_error")
    # Before the first token it is a status.
    assert (await replica.ask(TEXT, prompt=[5], max_tokens=1, stream=True)).status == 503
    assert replica.admission.waiting_rows == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_stands_still_is_told_of(
    replica: Replica, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_call, "STILL_S", 0.01)
    replica.llm.gate.clear()
    replica.still.append(Unavailable("the engine of this replica does not answer"))
    got = await replica.ask(TEXT, prompt=[5], max_tokens=3, stream=stream)
    error = got.events[-1]["error"] if stream else got.json["error"]
    assert (error["code"], error["message"]) == (503, "the engine of this replica does not answer")
    assert len(replica.llm.ended) == 1
    assert replica.admission.waiting_rows == 0


async def test_weights_that_are_incomplete_answer_nothing(replica: Replica) -> None:
    replica.engine.version = NO_VERSION
    with pytest.raises(Unavailable, match="incomplete"):
        await replica.ask(TEXT, prompt=[5], max_tokens=1)


async def test_a_client_that_leaves_ends_its_requests(replica: Replica) -> None:
    body = json.dumps({"prompt": [[5], [6]], "max_tokens": 50, "stream": True}).encode()
    response = await replica.completions.answer(TEXT, body, ME, None)
    replica.llm.gate.clear()
    await asyncio.wait_for(heard(response, leave=lambda body: b"w10" in body), 30)
    assert len(replica.llm.ended) == 2
    assert replica.admission.waiting_rows == 0
    asking = asyncio.create_task(replica.ask(TEXT, prompt=[5], max_tokens=50))
    while len(replica.llm.asked) < 3:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert len(replica.llm.ended) == 3
    assert replica.admission.waiting_rows == 0


async def test_tokens_in_and_tokens_out(replica: Replica) -> None:
    sampling = {"max_tokens": 3, "logprobs": 1, "stop_token_ids": [2], "skip_special_tokens": False}
    body: dict[str, Any] = {"token_ids": [5, 6], "sampling_params": sampling, "model": "mine"}
    got = await replica.ask(GENERATE, **body, return_token_ids=True)
    assert got.status == 200, got.body
    [choice] = got.json["choices"]
    assert (choice["token_ids"], got.json["prompt_token_ids"]) == ([10, 11, 12], [5, 6])
    told = [(each["logprob"], each["token"]) for each in choice["logprobs"]["content"]]
    assert told == [(-0.5, "token_id:10"), (-0.5, "token_id:11"), (-0.5, "token_id:12")]
    assert (choice["version_spans"], got.json["policy_version"]) == (spans(3), 4)
    events = (await replica.ask(GENERATE, **body, stream=True, cache_salt="mine")).events
    assert [event["choices"][0]["token_ids"] for event in events] == [[10], [11], [12]]
    assert events[-1]["choices"][0]["version_spans"] == spans(3)
    assert [prompt["cache_salt"] for prompt, _ in replica.llm.asked] == ["0", "0-mine"]
    assert all(params.detokenize is False for _, params in replica.llm.asked)
    await replica.ask(GENERATE, token_ids=[5], sampling_params={"max_tokens": None})
    assert replica.llm.asked[-1][1].max_tokens == MAX_LENGTH - 1
    for wrong, reason in (
        ({"token_ids": [ROWS]}, "outside the vocabulary"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5], "sampling_params": {"logit_bias": {}}}, "logit_bias: not a field of sampling_params"),
        ({"token_ids": [5], "sampling_params": 5}, "sampling_params: should be an object"),
        ({"token_ids": [5], "features": {}}, "features: not a field"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            await replica.ask(GENERATE, **{"sampling_params": {"max_tokens": 1}} | wrong)


USER = {"role": "user", "content": "w8 w9"}
RENDERED = [8, 9, EOS, 5]
"""Tokens of a first message, by the template of the tests."""


@pytest.fixture
def talking(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> Replica:
    """A model with a chat template, whose sampled tokens are not those that their text would be tokenised to, with a
    session."""
    monkeypatch.setattr(replica.llm.renderer.tokenizer, "chat_template", TEMPLATE)
    replica.llm.say = "z{} "
    replica.sessions.held.start(ME.name, "s", "t")
    return replica


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stop", [["x"] * 4, [f"x{number}" for number in range(16)], "x"], ids=["4", "16", "one"])
async def test_as_many_texts_end_a_response_as_the_bounds_allow(talking: Replica, path: str, stop: Any) -> None:
    asked: dict[str, Any] = {"prompt": [5]} if path == TEXT else {"messages": [{"role": "user", "content": "w5"}]}
    assert (await talking.ask(path, **asked, max_tokens=2, stop=stop)).status == 200
    [(_, params)] = talking.llm.asked
    assert params.stop == ([stop] if isinstance(stop, str) else stop)


def told_of(talking: Replica, session: str = "s") -> Any:
    return json.loads(as_json(talking.sessions.held.trajectory(ME.name, session)))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_sampled_is_not_rendered_again(talking: Replica, stream: bool) -> None:
    def said(got: Answer) -> Any:
        if not stream:
            return got.json["choices"][0]["message"]
        return {
            "role": "assistant",
            "content": "".join(e["choices"][0]["delta"].get("content") or "" for e in got.events),
        }

    first = await talking.ask(CHAT, "s", messages=[USER], max_tokens=3, stream=stream)
    history = [USER, said(first), {"role": "user", "content": "w7"}]
    second = await talking.ask(CHAT, "s", messages=history, max_tokens=2, stream=stream)
    assert "z10" in said(second)["content"]
    third = await talking.ask(CHAT, "s", messages=[*history, said(second), USER], max_tokens=1, stream=stream)
    assert third.status == 200
    begun = [*RENDERED, 10, 11, 12, EOS, 7, EOS, 5]
    assert talking.prompts() == [RENDERED, begun, [*begun, 10, 11, EOS, 8, 9, EOS, 5]]
    told = told_of(talking)
    [sequence] = told["sequences"]
    assert sequence["ids"] == [*begun, 10, 11, EOS, 8, 9, EOS, 5, 10]
    assert [(each["length"], each["sampled"]) for each in sequence["segments"]] == [
        *((4, False), (3, True), (4, False), (2, True), (5, False), (1, True)),
    ]
    assert [each["logprobs"] for each in sequence["segments"] if each["sampled"]] == [[-0.5] * 3, [-0.5] * 2, [-0.5]]
    assert sequence["segments"][1]["version_spans"] == spans(3)
    assert [each["weights_checksum"] for each in told["interactions"]] == ["c", "b", "b"]
    if not stream:
        assert second.json["session"] == {"session_id": "s", "sequence": 0, "forks": 0}
        assert [each["id"] for each in told["interactions"]] == [got.json["id"] for got in (first, second, third)]


async def test_a_history_is_read_once_and_beside_the_event_loop(
    talking: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(given: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return digests(given)

    monkeypatch.setattr(openai, "digests", noted)
    await talking.ask(CHAT, "s", messages=[USER], max_tokens=1)
    [thread] = threads
    assert thread is not threading.current_thread()


async def test_a_history_that_was_changed_is_a_fork(talking: Replica) -> None:
    await talking.ask(CHAT, "s", messages=[USER], max_tokens=3)
    changed = [USER, {"role": "assistant", "content": "w4"}, USER]
    got = await talking.ask(CHAT, "s", messages=changed, max_tokens=1)
    assert got.json["session"] == {"session_id": "s", "sequence": 1, "forks": 1}
    assert talking.prompts()[1] == [8, 9, EOS, 4, EOS, 8, 9, EOS, 5]


async def test_tokens_go_on_in_a_session_too(talking: Replica) -> None:
    first = await talking.ask(TEXT, "s", prompt=[5], max_tokens=2)
    assert first.json["session"]["sequence"] == 0
    second = await talking.ask(GENERATE, "s", token_ids=[5, 10, 11, 6], sampling_params={"max_tokens": 1})
    assert second.json["session"] == {"session_id": "s", "sequence": 0, "forks": 0}
    # Tokens and messages of one conversation are the same conversation.
    await talking.ask(CHAT, "s", messages=[USER], max_tokens=1)
    last = await talking.ask(GENERATE, "s", token_ids=[*RENDERED, 10, 6], sampling_params={"max_tokens": 1})
    assert last.json["session"] == {"session_id": "s", "sequence": 1, "forks": 1}
    told = told_of(talking)
    assert [sequence["ids"] for sequence in told["sequences"]] == [[5, 10, 11, 6, 10], [*RENDERED, 10, 6, 10]]
    with pytest.raises(InvalidArgument, match="prompt: several; should be one in a session"):
        await talking.ask(TEXT, "s", prompt=[[5], [6]], max_tokens=1)


@pytest.mark.parametrize(
    "more",
    [
        *({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"presence_penalty": 1}, {"min_tokens": 1}),
        *({"frequency_penalty": 0.1}, {"continue_final_message": True}, {"add_generation_prompt": False}),
    ],
)
async def test_settings_that_would_train_on_another_distribution_are_refused(
    talking: Replica, more: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(more))}: .*; should be .* in a session"):
        await talking.ask(CHAT, "s", messages=[USER], max_tokens=1, **more)
    assert talking.llm.asked == []
    assert (await talking.ask(CHAT, "s", messages=[USER], max_tokens=1, temperature=1, top_p=1.0)).status == 200


async def test_the_temperature_is_the_sessions(talking: Replica) -> None:
    talking.sessions.held.start(ME.name, "hot", "t", "", {"temperature": 1.5})
    await talking.ask(CHAT, "hot", messages=[USER], max_tokens=1)
    await talking.ask(GENERATE, "hot", token_ids=[5], sampling_params={"max_tokens": 1})
    assert [params.temperature for _, params in talking.llm.asked] == [1.5, 1.5]


async def test_a_run_s_session_has_its_seeds_its_bounds_and_its_place_in_the_queue(
    talking: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[pb.GenerateRequest] = []
    served = replace(talking.completions._served, check=checked.append)
    monkeypatch.setattr(talking.completions, "_served", served)
    shares: list[Share] = []
    enter = served.slots.enter

    def entered(share: Share, *more: Any) -> Any:
        shares.append(share)
        return enter(share, *more)

    monkeypatch.setattr(served.slots, "enter", entered)
    bounds = pb.GenerateRequest(min_version=3)
    terms = {"seed": 7, "max_tokens": 4, "max_length": 16, "purpose": Purpose.TRAINING}
    talking.sessions.held.start(ME.name, "run", "t", "", terms | {"bounds": bounds.SerializeToString()})
    await talking.ask(CHAT, "run", messages=[USER], seed=1, max_completion_tokens=100)
    await talking.ask(CHAT, "run", messages=[USER], max_tokens=2)
    long = await talking.ask(GENERATE, "run", token_ids=[5] * 14, sampling_params={})
    assert [params.seed for _, params in talking.llm.asked] == [seed_of_turn(7, turn) for turn in range(3)]
    # What is left of the session's length, where that is less.
    assert [params.max_tokens for _, params in talking.llm.asked] == [4, 2, 2]
    assert checked == [bounds] * 3
    assert [(share.name, share.purpose, share.run) for share in shares] == [("me", Purpose.TRAINING, "declared")] * 3
    assert long.status == 200
    told = told_of(talking, "run")
    assert [each["finish_reason"] for each in told["interactions"]] == ["length"] * 3
    assert not told["full"]


async def test_a_run_s_session_without_seeds_has_none_of_its_requests_either(talking: Replica) -> None:
    """With a seed of the agent's own, all samples of a prompt would be drawn alike."""
    talking.sessions.held.start(ME.name, "run", "t", "", {"purpose": Purpose.TRAINING})
    for session in ("run", "s"):
        await talking.ask(CHAT, session, messages=[USER], seed=5, max_tokens=1)
        await talking.ask(GENERATE, session, token_ids=[5], sampling_params={"max_tokens": 1, "seed": 5})
    assert [params.seed for _, params in talking.llm.asked] == [None, None, 5, 5]


@pytest.mark.parametrize("length", [16, MAX_LENGTH, 5 * MAX_LENGTH])
async def test_a_session_knows_that_a_prompt_left_no_room(talking: Replica, length: int) -> None:
    """The session's own bound is met, or the model's, in tokens or in messages."""
    talking.sessions.held.start(ME.name, "run", "t", "", {"max_length": min(length, MAX_LENGTH)})
    long = {"role": "user", "content": " ".join(["w5"] * length)}
    for path, body in ((CHAT, {"messages": [long]}), (GENERATE, {"token_ids": [5] * length, "sampling_params": {}})):
        try:
            got = await talking.ask(path, "run", **body)
            assert got.status == 400
        except InvalidArgument:
            pass
        assert told_of(talking, "run")["full"]
        talking.sessions.held._sessions["run"].full = False
    assert talking.llm.asked == []


async def test_a_request_that_got_no_response_is_repeated_with_its_seed(talking: Replica) -> None:
    talking.sessions.held.start(ME.name, "run", "t", "", {"seed": 7})
    talking.llm.end = "abort"
    assert (await talking.ask(CHAT, "run", messages=[USER], max_tokens=4)).status == 503
    await talking.ask(CHAT, "run", messages=[USER], max_tokens=4, stream=True)
    talking.llm.end = "stop"
    for wrong in ({"top_p": 0.5}, {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}):
        with pytest.raises(InvalidArgument):
            await talking.ask(CHAT, "run", messages=[USER], max_tokens=4, **wrong)
    several = [talking.ask(CHAT, "run", messages=[USER], max_tokens=4) for _ in range(2)]
    assert [got.status for got in await asyncio.gather(*several)] == [200, 200]
    await talking.ask(CHAT, "run", messages=[USER], max_tokens=4)
    turns = [seed_of_turn(7, turn) for turn in (0, 0, 0, 1, 2)]
    assert [params.seed for _, params in talking.llm.asked] == turns


async def test_a_session_knows_that_a_turn_left_no_room(talking: Replica) -> None:
    talking.sessions.held.start(ME.name, "run", "t", "", {"max_length": MAX_LENGTH})
    said = (await talking.ask(CHAT, "run", messages=[USER], max_tokens=4)).json["choices"][0]["message"]
    long = {"role": "user", "content": " ".join(["w5"] * (MAX_LENGTH - 4))}
    with pytest.raises(InvalidArgument, match="prompt: leaves no room for a response"):
        await talking.ask(CHAT, "run", messages=[USER, said, long])
    assert told_of(talking, "run")["full"]


async def test_a_lease_that_was_lost_samples_nothing(talking: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(request: pb.GenerateRequest) -> None:
        raise LeaseLost("another run holds the replicas")

    served = replace(talking.completions._served, check=lost)
    monkeypatch.setattr(talking.completions, "_served", served)
    bounds = pb.GenerateRequest(min_version=3).SerializeToString()
    talking.sessions.held.start(ME.name, "run", "t", "", {"bounds": bounds})
    with pytest.raises(LeaseLost):
        await talking.ask(CHAT, "run", messages=[USER])
    assert talking.llm.asked == []


async def test_an_evaluation_s_session_gets_no_other_version(talking: Replica) -> None:
    bounds = pb.GenerateRequest(min_version=3, max_version=3)  # while the responses are of version 3 and then 4
    talking.sessions.held.start(ME.name, "run", "t", "", {"bounds": bounds.SerializeToString()})
    got = await talking.ask(CHAT, "run", messages=[USER], max_tokens=8)
    assert got.status == 404
    assert got.json["error"]["message"] == "max_version: the session takes 3 to 3, and served is 4"
    assert told_of(talking, "run")["interactions"] == []
    talking.engine.version = 3
    named = await talking.ask(CHAT, "run", model="mine@3", messages=[USER], max_tokens=8)
    assert named.json["error"]["message"].startswith("model: version 3 ")


@pytest.mark.parametrize(("oldest", "newest", "status"), [(3, 4, 200), (3, 5, 200), (4, 5, 404)])
async def test_a_session_gets_all_versions_of_its_terms_and_no_other(
    talking: Replica, oldest: int, newest: int, status: int
) -> None:
    """The responses are of version 3 and then 4."""
    bounds = pb.GenerateRequest(min_version=oldest, max_version=newest)
    talking.sessions.held.start(ME.name, "run", "t", "", {"bounds": bounds.SerializeToString()})
    assert (await talking.ask(CHAT, "run", messages=[USER], max_tokens=8)).status == status
    assert len(told_of(talking, "run")["interactions"]) == (status == 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_no_session_holds_is_an_error(talking: Replica, stream: bool) -> None:
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 2, "stream": stream}
    talking.llm.end = "abort"
    await talking.ask(CHAT, "s", **body)
    talking.llm.end = "length"
    assert told_of(talking)["interactions"] == []
    talking.llm.gate.clear()
    asking = asyncio.create_task(talking.ask(CHAT, "s", **body))
    while len(talking.llm.asked) < 2:
        await asyncio.sleep(0)
    talking.sessions.failure = Unavailable("their tokens are lost")
    talking.llm.gate.set()
    if stream:
        *events, last = (await asking).events
        assert (last["error"]["code"], last["error"]["message"]) == (503, "their tokens are lost")
        assert not any(choice.get("finish_reason") for event in events for choice in event["choices"])
    else:
        with pytest.raises(Unavailable, match="their tokens are lost"):
            await asking
    with pytest.raises(Unavailable):
        await talking.ask(CHAT, "s", **body)
    assert talking.admission.waiting_rows == 0


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
async def test_the_end_of_a_stream_is_sent_when_the_session_holds_it(talking: Replica, path: str) -> None:
    """A client that leaves there, or asks for the next turn, does so without waiting for more."""
    more: Any = {"stream": True, "stream_options": {"include_usage": True}}
    prompts: Any = {CHAT: {"messages": [USER]}, TEXT: {"prompt": [5]}, GENERATE: {"token_ids": [5]}}
    limit: Any = {"sampling_params": {"max_tokens": 3}} if path == GENERATE else {"max_tokens": 3}
    held = OpenSession(talking.sessions, ME.name, "s")
    response = await talking.completions.answer(path, json.dumps(prompts[path] | limit | more).encode(), ME, held)
    seen = []

    def leave(body: bytes) -> bool:
        seen.append((b'"finish_reason": "length"' in body, len(told_of(talking)["interactions"])))
        return seen[-1][0]

    await asyncio.wait_for(heard(response, leave), 30)
    assert seen[0] == (False, 0)
    assert seen[-1] == (True, 1)
    assert all(count == 1 for ended, count in seen if ended)


async def test_messages_bring_their_own_tokens(talking: Replica) -> None:
    """The form of NeMo-Gym, without a session."""
    first = (await talking.ask(CHAT, messages=[USER], max_tokens=2, return_token_ids=True)).json["choices"][0][
        "message"
    ]
    assert (first["prompt_token_ids"], first["generation_token_ids"]) == (RENDERED, [10, 11])
    assert first["generation_log_probs"] == [-0.5, -0.5]
    assert (
        "prompt_token_ids"
        not in (await talking.ask(CHAT, messages=[USER], max_tokens=2)).json["choices"][0]["message"]
    )
    got = await talking.ask(CHAT, messages=[USER, first, USER], max_tokens=1, return_token_ids=True)
    assert got.json["prompt_token_ids"] == [*RENDERED, 10, 11, EOS, 8, 9, EOS, 5]
    rendered = {"role": "assistant", "content": first["content"]}
    await talking.ask(CHAT, messages=[USER, rendered, USER], max_tokens=1)
    assert talking.prompts()[-1][: len(RENDERED) + 2] == [*RENDERED[:3], 3, 3, EOS]
    for wrong, reason in (
        ({"generation_token_ids": [ROWS]}, "vocabulary"),
        ({"role": "user"}, "only an assistant's"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            await talking.ask(CHAT, messages=[USER, first | wrong, USER], max_tokens=1)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def test_calls_of_tools_are_found_by_vllms_parser_and_their_answers_go_on(talking: Replica) -> None:
    talking.llm.say, talking.llm.end = '<tool_call>{{"name": "look", "arguments": {{"at": {}}}}}</tool_call>', "stop"
    got = await talking.ask(CHAT, "s", messages=[USER], tools=[TOOL], max_tokens=1)
    [choice] = got.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"at": 10})
    answer = {"role": "tool", "content": "w7", "tool_call_id": call["id"]}
    # As a client gives it back whose library leaves out what is null.
    called = {name: value for name, value in choice["message"].items() if value is not None}
    again = await talking.ask(CHAT, "s", messages=[USER, called, answer], tools=[TOOL], max_tokens=1)
    assert again.json["session"]["forks"] == 0
    assert talking.prompts()[1] == [*RENDERED, 10, EOS, 7, EOS, 5]
    with pytest.raises(InvalidArgument, match="tool_choice: should be auto or none"):
        await talking.ask(CHAT, messages=[USER], tools=[TOOL], tool_choice="required", max_tokens=1)


HALF = '<tool_call>{{"name": "look", "arguments": {{"at": "\\ud800 w{}"}}}}</tool_call>'
"""A call that holds half of a character."""


@pytest.mark.parametrize("stream", [False, True])
async def test_half_of_a_character_in_a_call_is_no_failure(talking: Replica, stream: bool) -> None:
    talking.llm.say = HALF
    got = await talking.ask(CHAT, "s", messages=[USER], tools=[TOOL], max_tokens=1, stream=stream)
    called = got.json["choices"][0]["message"] if not stream else put_together(got)
    told = json.loads(called["tool_calls"][0]["function"]["arguments"])
    assert told == {"at": "\ud800 w10" if stream else "? w10"}
    history = [USER, called, {"role": "tool", "content": "w7"}]
    again = await talking.ask(CHAT, "s", messages=history, tools=[TOOL], max_tokens=1)
    assert again.json["session"]["forks"] == 0
    # Outside of the session the call is rendered.
    assert (await talking.ask(CHAT, messages=history, tools=[TOOL], max_tokens=1)).status == 200


def put_together(got: Answer) -> dict[str, Any]:
    """The message of a stream, as a client has it."""
    told = Told()
    for event in got.events:
        for choice in event.get("choices", ()):
            told.add(choice["delta"])
    [call] = told.message["tool_calls"]
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", **call}]}


async def test_a_prompt_is_scored_without_a_response(replica: Replica) -> None:
    got = await replica.ask(TEXT, prompt=[5, 6], max_tokens=0, echo=True)
    assert got.status == 200, got.body
    assert [params.max_tokens for _, params in replica.llm.asked] == [1]


async def test_the_requests_of_the_page_are_taken(talking: Replica) -> None:
    text = (REPO / "docs/openai.md").read_text()
    [tools] = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ curl .*?/rollout(/\S+) .* -d '(.+)'$", text, re.MULTILINE)
    assert [path for path, _ in commands] == [TEXT, "/tokenize", GENERATE]
    for path, body in [*commands, (CHAT, tools)]:
        assert (await talking.ask(path, **json.loads(body))).status == 200


async def test_without_a_parser_tools_are_refused(talking: Replica) -> None:
    talking.completions._calls_tools = False
    with pytest.raises(InvalidArgument, match="tools: this application has no tool_parser"):
        await talking.ask(CHAT, messages=[USER], tools=[TOOL], max_tokens=1)
    assert (await talking.ask(CHAT, messages=[USER], tools=[TOOL], tool_choice="none", max_tokens=1)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_an_answer_that_says_to_ask_again(talking: Replica, stream: bool) -> None:
    talking.llm.errored = True
    prompts: Any = {CHAT: {"messages": [USER]}, TEXT: {"prompt": [5]}, GENERATE: {"token_ids": [5]}}
    for path, prompt in prompts.items():
        with pytest.raises(Unavailable, match="the engine of this replica died"):
            await talking.ask(path, **prompt, stream=stream)
    assert talking.admission.waiting_rows == 0


async def test_log_probs_that_are_listed_count_as_tokens(replica: Replica) -> None:
    replica.admission._limits = replica.admission._limits.model_copy(update={"max_call_tokens": 60})
    assert (await replica.ask(TEXT, prompt=[5], max_tokens=3, logprobs=1)).status == 200
    for stream in (False, True):
        with pytest.raises(ResourceExhausted, match="prompt: 64 tokens, but a call may hold 60"):
            await replica.ask(TEXT, prompt=[5], max_tokens=3, logprobs=20, stream=stream)


async def test_an_answer_lists_log_probs_up_to_a_bound(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_call, "MOST_LISTED", 2 * 3 * 2)
    body: Any = {"prompt": [[5], [6]], "max_tokens": 3}
    assert (await replica.ask(TEXT, **body, logprobs=1)).status == 200
    assert (await replica.ask(TEXT, **body, logprobs=2, stream=True)).status == 200
    with pytest.raises(InvalidArgument, match=r"logprobs: 18 .* may list 12; send fewer prompts in a call"):
        await replica.ask(TEXT, **body, logprobs=2)
    for stream in (False, True):
        # The log-probs of a prompt come in one piece also to a stream.
        with pytest.raises(InvalidArgument, match=r"logprobs: \d\d .* may list 12"):
            await replica.ask(TEXT, prompt=[5] * 13, max_tokens=1, logprobs=0, echo=True, stream=stream)
    assert replica.admission.waiting_rows == 0


async def test_log_probs_that_a_session_keeps_end_a_response_at_the_bound(
    talking: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_call, "MOST_LISTED", 6)
    got = await talking.ask(CHAT, "s", messages=[USER])
    assert (got.status, got.json["usage"]["completion_tokens"]) == (200, 6)
    assert got.json["choices"][0]["finish_reason"] == "length"
    assert (await talking.ask(CHAT, "s", messages=[USER], stream=True)).status == 200
    await talking.ask(CHAT, messages=[USER])
    longest = MAX_LENGTH - len(talking.prompts()[0])
    assert [params.max_tokens for _, params in talking.llm.asked] == [6, longest, longest]
    # All responses of a call are in one answer.
    several = await talking.ask(CHAT, messages=[USER], n=3, return_token_ids=True)
    assert (several.status, several.json["usage"]["completion_tokens"]) == (200, 3 * 2)
    with pytest.raises(InvalidArgument, match=r"logprobs: \d+ would be listed"):
        await talking.ask(CHAT, "s", messages=[USER], logprobs=True)


def test_a_harness_that_asks_for_the_log_probs_of_sixteen_long_prompts_is_within_the_bound() -> None:
    likeliest, length, prompts = 1, 4096, 16
    assert prompts * length * (1 + likeliest) <= openai_call.MOST_LISTED


@pytest.mark.parametrize("path", [TEXT, CHAT, GENERATE])
async def test_a_long_answer_is_written_beside_the_event_loop(
    talking: Replica, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answer as a short one gets, in turns of the desk."""
    logprobs: Any = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    if path == GENERATE:
        body: Any = {"token_ids": [5], "sampling_params": {"max_tokens": 5, **logprobs}}
    else:
        body = {"messages": [USER]} if path == CHAT else {"prompt": [[5], [6]], "return_token_ids": True}
        body |= {"max_tokens": 5, **logprobs}
    short = (await talking.ask(path, **body)).json
    threads: list[threading.Thread] = []
    write, turn = OpenAICall.whole, talking.completions._desk.turn
    sizes: list[int] = []

    def noted(call: Any, made: Any) -> Any:
        threads.append(threading.current_thread())
        return write(call, made)

    def written(reply: Any) -> bytes:
        threads.append(threading.current_thread())
        return to_json(reply)

    def turned(share: Share, size: int) -> Any:
        sizes.append(size)
        return turn(share, size)

    monkeypatch.setattr(OpenAICall, "whole", noted)
    monkeypatch.setattr(openai, "to_json", written)
    monkeypatch.setattr(talking.completions._desk, "turn", turned)
    await talking.ask(path, **body)
    assert (threads, len(sizes)) == ([threading.current_thread()] * 2, 1)
    monkeypatch.setattr(openai, "_AT_ONCE", 0)
    threads.clear()
    sizes.clear()
    long = (await talking.ask(path, **body)).json
    assert len(threads) == 2
    assert threading.current_thread() not in threads
    assert len(sizes) == 3  # one to be read in, and two to be written
    for one in (long, short):
        del one["id" if path != GENERATE else "request_id"]
        one.pop("created", None)
    assert long == short


async def test_the_most_log_probs_of_an_answer_fit_in_memory(talking: Replica) -> None:
    """Bytes at their peak, from the engine's outputs on, of a token with twenty log-probs beside it."""
    size = 100

    async def whole(prompt: Any, params: Any, name: str, lora_request: Any = None) -> AsyncIterator[RequestOutput]:
        talking.llm.external_req_ids[name] = [name]
        talking.llm.request_states[name] = SimpleNamespace(_weight_version_spans=lambda: noted(size))
        output = talking.llm._output(prompt, params, size)
        [response] = output.outputs
        response.token_ids = [5] * size
        response.logprobs = [
            {5 + k: Logprob(-0.5 - k, k, f"w{k}") for k in range((params.logprobs or 0) + 1)} for _ in range(size)
        ]
        yield output

    talking.llm.generate = whole  # type: ignore[method-assign]
    body: Any = {"messages": [USER], "max_tokens": size, "logprobs": True, "top_logprobs": 20}
    assert (await talking.ask(CHAT, **body)).status == 200
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert (await talking.ask(CHAT, **body)).status == 200
        each = (tracemalloc.get_traced_memory()[1] - before) / (size * 21)
    finally:
        tracemalloc.stop()
    assert each * openai_call.MOST_LISTED < 256 << 20


async def test_a_template_without_end_keeps_no_thread_and_no_caller(
    talking: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = "{% for a in range(99999) %}{% for b in range(99999) %}"
    endless = f"{many}{{% if messages[0]['content'] == 'w4' %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "0.2")
    renderer = talking.llm.renderer
    renderer.tokenizer.chat_template = endless
    for session in ("", "s"):
        pool = renderer._executor._inner
        with pytest.raises(InvalidArgument, match="did not render them in time"):
            await talking.ask(CHAT, session, messages=[USER], max_tokens=1)
        assert pool is not renderer._executor._inner
        for thread in pool._threads:
            await asyncio.wait_for(asyncio.to_thread(thread.join), 30)
    monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "30")
    renderer.tokenizer.chat_template = TEMPLATE
    assert (await talking.ask(CHAT, messages=[USER], max_tokens=1)).status == 200
    assert talking.admission.waiting_rows == 0


@pytest.mark.parametrize("parser", [{"tool_parser": "not_there"}, {"reasoning_parser": "not_there"}])
async def test_a_parser_that_vllm_does_not_have_is_named(
    replica: Replica, policy_folder: Path, parser: dict[str, str]
) -> None:
    config = RolloutConfig(model=str(policy_folder), kv_cache_mib=1, **parser)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout\.args\.tool_parser: .*not_there.*not been registered"):
        VLLMCompletions(config, replica.completions._served)


def named(got: Answer) -> list[Any]:
    """The events of Anthropic's protocol."""
    events = [text.removeprefix("event: ").split("\ndata: ") for text in got.body.decode().split("\n\n") if text]
    assert [name for name, _ in events] == [json.loads(data)["type"] for _, data in events]
    return [json.loads(data) for _, data in events]


def blocks(got: Answer, stream: bool) -> list[dict[str, Any]]:
    """The content of a message of Anthropic's protocol, as its library has it."""
    if not stream:
        return list(got.json["content"])
    made: list[dict[str, Any]] = []
    for event in named(got):
        if event["type"] == "content_block_start":
            made.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(made) - 1
            if event["delta"]["type"] == "text_delta":
                made[-1]["text"] += event["delta"]["text"]
            else:
                made[-1]["input"] = json.loads(event["delta"]["partial_json"])
                assert isinstance(made[-1]["input"], dict)
    return made


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_anthropics_protocol_are_not_rendered_again_either(talking: Replica, stream: bool) -> None:
    first = await talking.ask(MESSAGES, "s", model="mine", messages=[USER], max_tokens=3, stream=stream)
    told = first.json if not stream else {}
    if stream:
        begun, *_, ended, _ = named(first)
        told = begun["message"] | ended | ended["delta"]
    assert (told["role"], told["model"], told["stop_reason"]) == ("assistant", "mine", "max_tokens")
    assert told["usage"] == {"input_tokens": len(RENDERED), "output_tokens": 3}
    assert (told["policy_version"], told["weights_checksum"], told["version_spans"]) == (4, "c", spans(3))
    assert told["session"] == {"session_id": "s", "sequence": 0, "forks": 0}
    assert blocks(first, stream) == [{"type": "text", "text": "z10 z11 z12 "}]
    parts = [{"type": "text", "text": "w7", "cache_control": {"type": "ephemeral"}}]
    history = [USER, {"role": "assistant", "content": blocks(first, stream)}, {"role": "user", "content": parts}]
    second = await talking.ask(MESSAGES, "s", model="mine", messages=history, max_tokens=2, metadata={"user_id": "u"})
    assert second.json["session"] == {"session_id": "s", "sequence": 0, "forks": 0}
    assert talking.prompts() == [RENDERED, [*RENDERED, 10, 11, 12, EOS, 7, EOS, 5]]
    # By these, rewards are set.
    assert [each["id"] for each in told_of(talking)["interactions"]] == [told["id"], second.json["id"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_blocks_of_anthropics_protocol(talking: Replica, stream: bool) -> None:
    talking.llm.end = "stop"
    talking.llm.say = '<tool_call>{{"name": "look", "arguments": {{"at": {}}}}}</tool_call>'
    tools = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]
    asked: dict[str, Any] = {"model": "mine", "tools": tools, "system": "w4", "max_tokens": 1}
    got = await talking.ask(MESSAGES, "s", **asked, messages=[USER], stream=stream)
    [call] = blocks(got, stream)
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": 10})
    assert (named(got)[-2]["delta"] if stream else got.json)["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "w7"}]}
    history = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    again = await talking.ask(MESSAGES, "s", **asked, messages=history)
    assert again.json["session"]["forks"] == 0
    assert talking.prompts()[1] == [*talking.prompts()[0], 10, EOS, 7, EOS, 5]


@pytest.mark.parametrize(
    "arguments",
    [
        "[{}]",
        '{{"at": NaN}}',
        '{{"at": 1e999}}',
        '{{"at": ' + "[" * 300 + "]" * 300 + "}}",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_arguments_cannot_be_sent_back_has_an_empty_input(
    talking: Replica, arguments: str, stream: bool
) -> None:
    talking.llm.say = f'<tool_call>{{{{"name": "look", "arguments": {arguments}}}}}</tool_call>'
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    got = await talking.ask(MESSAGES, "s", model="mine", tools=tools, messages=[USER], max_tokens=1, stream=stream)
    [call] = blocks(got, stream)
    assert call["input"] == {}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "w7"}
    history = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    again = await talking.ask(MESSAGES, "s", model="mine", tools=tools, messages=history, max_tokens=1)
    assert again.json["session"]["forks"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_input_of_anthropics_protocol_has_whole_characters(talking: Replica, stream: bool) -> None:
    talking.llm.say = HALF
    asked: dict[str, Any] = {"model": "mine", "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    got = await talking.ask(MESSAGES, "s", **asked, messages=[USER], max_tokens=1, stream=stream)
    [call] = blocks(got, stream)
    assert call["input"] == {"at": "? w10"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "w7"}
    history = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    again = await talking.ask(MESSAGES, "s", **asked, messages=history, max_tokens=1)
    assert again.json["session"]["forks"] == 0


LEADS = "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('leads') }}"
"""Beginning of a template that takes a system message at the beginning alone."""


@pytest.mark.parametrize(
    ("before", "rendered"),
    [
        ("", [4, EOS, 8, 9, EOS, 7, EOS, 6, EOS, 5]),
        (LEADS + "{% endif %}{% endfor %}", [4, 7, EOS, 8, 9, EOS, 6, EOS, 5]),
    ],
    ids=["anywhere", "first"],
)
async def test_a_later_system_message_stays_where_it_is_unless_the_template_refuses_it(
    talking: Replica, monkeypatch: pytest.MonkeyPatch, before: str, rendered: list[int]
) -> None:
    monkeypatch.setattr(talking.llm.renderer.tokenizer, "chat_template", before + TEMPLATE)
    later = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w6"}]
    asked: dict[str, Any] = {"model": "mine", "system": "w4 ", "messages": [USER, *later]}
    assert (await talking.ask(MESSAGES, **asked, max_tokens=1)).status == 200
    assert talking.prompts() == [rendered]
    assert (await talking.ask(COUNT, **asked)).json == {"input_tokens": len(rendered)}


async def test_a_request_of_anthropics_may_have_as_many_ends_and_tools_and_no_model(talking: Replica) -> None:
    """Requests that the class of vLLM for them would refuse are taken."""
    ends = [f"w{place}" for place in range(16)]
    for model in ({}, {"model": ""}, {"model": None}):
        got = await talking.ask(MESSAGES, **model, messages=[USER], max_tokens=1, stop_sequences=ends, tools=[])
        assert (got.status, got.json["model"]) == (200, "mine")
    assert [params.stop for _, params in talking.llm.asked] == [ends] * 3


async def test_a_body_of_anthropics_is_no_longer_for_what_it_becomes(talking: Replica) -> None:
    """A character that ASCII does not have is three bytes, and would be six as JSON may write it."""
    body = json.dumps({"messages": [{"role": "user", "content": "\u4e00" * 100_000}]}, ensure_ascii=False).encode()
    answered = await talking.completions.answer(COUNT, body, ME, None)
    assert b"input_tokens" in (await heard(answered)).body


async def test_tokens_of_anthropics_messages_are_counted(talking: Replica) -> None:
    asked: dict[str, Any] = {"model": "mine", "messages": [USER], "thinking": {"type": "disabled"}}
    assert (await talking.ask(COUNT, **asked)).json == {"input_tokens": len(RENDERED)}
    assert not talking.llm.asked


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({"model": "other"}, "not_found_error", "model: 'other' is not served"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens: "),
        ({"max_tokens": None}, "invalid_request_error", "max_tokens: "),
        ({"mm_payload": "none"}, "invalid_request_error", "mm_payload: not a field of /v1/messages here"),
        ({"temperature": 0.5}, "invalid_request_error", "temperature: 0.5; should be 1.0 in a session"),
        (
            {"tools": [{"name": "look", "input_schema": {}}], "tool_choice": {"type": "any"}},
            "invalid_request_error",
            "tool_choice: should be auto or none",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///x"}}]}
                ]
            },
            "invalid_request_error",
            "messages[0].content[0]: image; content should be a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "invalid_request_error",
            "messages.0.content",
        ),
        ({"messages": "w5"}, "invalid_request_error", "messages: "),
        ({"system": {"a": 1}}, "invalid_request_error", "system"),
        ({"system": [{"type": "image"}]}, "invalid_request_error", "system[0]: should be"),
        ({"stop_sequences": ["x"] * 17}, "invalid_request_error", "stop_sequences: may be 16 texts"),
        ({"stop_sequences": [""]}, "invalid_request_error", "stop_sequences: should be a text that is not empty"),
        ({"stop_sequences": "x"}, "invalid_request_error", "stop_sequences: should be a list"),
        *(
            (
                {"messages": [{"role": role, "content": [content]}]},
                "invalid_request_error",
                f"messages[0].content[0]{where}",
            )
            for role, content, where in (
                ("assistant", {"type": "tool_use", "name": "look", "input": {}}, ": should have an `id`"),
                ("user", {"type": "tool_result", "content": "w5"}, ".tool_use_id: missing"),
                *(
                    ("user", {"type": "tool_result", "tool_use_id": "c", "content": [part]}, ".content[0]: should be")
                    for part in (
                        {"type": "text", "text": 5},
                        {"type": "text"},
                        {"type": "image", "source": None},
                        {"type": "document", "source": {}},
                        {},
                    )
                ),
            )
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_the_form_of_anthropics(
    talking: Replica, more: dict[str, Any], kind: str, said: str, stream: bool
) -> None:
    got = await talking.ask(
        MESSAGES, "s", **({"model": "mine", "messages": [USER], "max_tokens": 1, "stream": stream} | more)
    )
    assert got.status == (404 if kind == "not_found_error" else 400)
    assert (got.json["type"], got.json["error"]["type"]) == ("error", kind)
    assert said in got.json["error"]["message"]
    assert not talking.llm.asked


async def test_an_error_amid_anthropics_events_is_the_last_of_them(talking: Replica) -> None:
    talking.llm.gate.clear()

    async def fails() -> None:
        while not talking.llm.asked:
            await asyncio.sleep(0)
        talking.still.append(Unavailable("the engine stands still"))

    asked: dict[str, Any] = {"model": "mine", "messages": [USER], "max_tokens": 3, "stream": True}
    got, _ = await asyncio.gather(talking.ask(MESSAGES, **asked), fails())
    assert [event["type"] for event in named(got)][-1] == "error"
    assert named(got)[-1]["error"] == {"type": "overloaded_error", "message": "the engine stands still"}
    assert named(got)[0]["type"] == "message_start"
