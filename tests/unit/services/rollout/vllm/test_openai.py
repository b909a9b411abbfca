"""vLLM's own serving classes before an engine that answers by a script: shares, versions, errors, leaving."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.input_processor import InputProcessor

from quartet.config.limits import LimitsConfig
from quartet.serving.admission import Admission
from quartet.serving.share import Share
from quartet.serving.slots import EngineSlots
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument, NotFound, ResourceExhausted, ServiceError, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.http import Served
from services.rollout.interface import NO_VERSION
from services.rollout.vllm import openai as module
from services.rollout.vllm.arguments import engine_args
from services.rollout.vllm.openai import VLLMCompletions
from services.rollout.vllm.requests import Requests
from services.rollout.vllm.scheduler import AT_ONCE_KEY
from tests.http_requests import Answer
from tests.models import BOS, MAX_LENGTH, ROWS, make_tokenizer

ME = Share("me", Purpose.FOREIGN)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def noted(length: int) -> list[Any]:
    """vLLM's note: the first two tokens are of version 3, the others of version 4."""
    spans = [SimpleNamespace(version="3", start=0, end=min(length, 2))]
    return spans + ([SimpleNamespace(version="4", start=2, end=length)] if length > 2 else [])


@dataclass
class Script:
    """AsyncLLM as the serving classes know it. A response is the tokens 10, 11 and so on, one an
    output, up to its limit."""

    vllm_config: Any
    renderer: Any
    input_processor: Any
    end: str = "length"
    asked: list[Any] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    external_req_ids: dict[str, list[str]] = field(default_factory=dict)
    request_states: dict[str, Any] = field(default_factory=dict)
    errored = False

    def __post_init__(self) -> None:
        self.model_config = self.vllm_config.model_config
        self.output_processor = self
        self.gate.set()

    def check_admission(self, n: int = 1) -> None:
        """Refuses nothing."""

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[RequestOutput]:
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
        text = "".join(f"w{token} " for token in tokens)
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

    async def ask(self, path: str, **body: Any) -> Answer:
        return await heard(await self.completions.answer(path, json.dumps(body).encode(), ME))

    def beat(self) -> None:
        if self.still:
            raise self.still[0]


async def heard(response: Response, leave: Callable[[bytes], bool] = lambda body: False) -> Answer:
    """Sends a response to a client, which may leave by what it has got."""
    got = bytearray()
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.extend(message.get("body", b""))
        if leave(bytes(got)):
            left.set()
            await asyncio.sleep(0.01)

    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
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
        tokenizer=make_tokenizer(),
        **{"vocab_size": ROWS, "max_length": MAX_LENGTH},
    )
    limits = LimitsConfig(max_waiting_calls=8, max_call_rows=8, max_waiting_rows=16)
    admission, slots = Admission(limits), EngineSlots(8, limits, quantum=MAX_LENGTH)
    made: list[Replica] = []
    served = Served(engine, admission, slots, lambda: "mine", lambda: made[0].beat())
    config = RolloutConfig(model=str(policy_folder), kv_cache_mib=1)
    made.append(Replica(llm, VLLMCompletions(config, served), engine, admission))
    return made[0]


def spans(length: int) -> list[Any]:
    return [{"version": int(each.version), "start": each.start, "end": each.end} for each in noted(length)]


async def test_an_answer_names_the_versions_of_its_tokens(replica: Replica) -> None:
    got = await replica.ask(TEXT, prompt=[[5], [6, 7]], max_tokens=5, logprobs=0, return_token_ids=True)
    assert got.status == 200
    assert (got.json["model"], got.json["policy_version"]) == ("mine", 4)
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
    assert all(params.extra_args == {AT_ONCE_KEY: True} for _, params in replica.llm.asked)


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
    assert late.json["error"]["message"].startswith("model: version 3 is not served any more")
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
    monkeypatch.setattr(module, "STILL_S", 0.01)
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
    response = await replica.completions.answer(TEXT, body, ME)
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
