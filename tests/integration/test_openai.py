"""OpenAI's protocol on the real services: its own library and curl, ids and log-probs, hostile requests."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

from orchestrator.algorithms.reinforce_pp import ReinforcePP
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution
from services.rollout.sample import Sampling
from services.rollout.session_trajectory import columns_of_session, trajectories_of
from tests import plain
from tests.cluster import TEMPLATE, Quartet, eventually, named, rollouts, whole
from tests.configuration import REPO
from tests.http_requests import Answer, ask, bearer
from tests.models import BOS, EOS, MAX_LENGTH, ROWS, WORDS
from tests.pages import Page, shell

PROMPTS = [[BOS, 5 + row, 7 + row, 9 + row] for row in range(8)]
TEXT, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
GENERATE, START = "/inference/v1/generate", "/rl/start_session"
SAID: Any = [{"role": "user", "content": "w8 w9"}]
UNCUT = {"ignore_eos": True, "skip_special_tokens": False}
RENDERED = [8, 9, EOS, 5]
"""Tokens of SAID by the chat template of the tests."""


async def asked(quartet: Quartet, path: str, body: Any = None) -> Answer:
    return await ask(quartet.http, f"/rollout{path}", body, bearer(quartet.token))


@pytest.fixture
async def client(quartet: Quartet) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{quartet.http}/rollout/v1", api_key=quartet.token) as made:
        yield made


async def sampled(quartet: Quartet, sampling: Sampling, seed: int) -> list[Any]:
    """Responses to PROMPTS over gRPC."""
    prompts = [np.asarray(prompt, np.int32) for prompt in PROMPTS]
    stream = quartet.services.rollout.generate(prompts, sampling, seeds=[seed] * len(prompts), timeout_s=60)
    return sorted([sample async for samples in stream for sample in samples], key=lambda sample: sample.index)


async def running(quartet: Quartet) -> float:
    """Requests in the engines of all replicas; an Info would be that of the replica that has the fewest."""
    text = (await asked(quartet, "/metrics")).body.decode()
    found = re.findall(r"^quartet_rollout_running_requests\{.*\} (\S+)$", text, re.MULTILINE)
    assert len(found) == quartet.rollout_replicas
    return sum(map(float, found))


async def idle(quartet: Quartet) -> bool:
    return await running(quartet) == 0


async def test_the_model_has_the_name_of_the_run_and_its_version(quartet: Quartet, base: Any) -> None:
    info = await quartet.services.rollout.info(30)
    newest, exact = (await asked(quartet, MODELS)).json["data"]
    assert exact["id"] == f"{newest['id']}@{info.policy_version}"
    for card in (newest, exact):
        told = {name: card[name] for name in ("policy_version", "weights_checksum", "max_model_len")}
        assert told == {
            **{"policy_version": info.policy_version, "weights_checksum": info.weights_checksum},
            **{"max_model_len": MAX_LENGTH},
        }
        assert str(quartet.folder) not in str(card)
    for name, status in ((newest["id"], 200), (exact["id"], 200), (f"{newest['id']}@999", 404), ("gpt-4", 404)):
        got = await asked(quartet, TEXT, {"model": name, "prompt": "w5", "max_tokens": 1})
        assert got.status == status
        if status == 404:
            assert f"{newest['id']}, {exact['id']}" in got.message
        else:
            assert got.json["model"] == newest["id"]


async def test_ids_and_logprobs_are_those_of_grpc(quartet: Quartet, base: Any) -> None:
    version = (await quartet.services.rollout.info(30)).policy_version
    for temperature in (1.0, 0.7):
        sampling = Sampling(max_new_tokens=20, temperature=temperature)
        body = {"prompt": PROMPTS, "max_tokens": 20, "temperature": temperature, "seed": 11, "logprobs": 0}
        got = await asked(quartet, TEXT, body | {"return_token_ids": True})
        assert got.status == 200
        samples, choices = await sampled(quartet, sampling, 11), got.json["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == PROMPTS
        assert [choice["token_ids"] for choice in choices] == [each.response_ids.tolist() for each in samples]
        assert [choice["finish_reason"] for choice in choices] == [str(each.finish_reason) for each in samples]
        logprobs = [np.asarray(choice["logprobs"]["token_logprobs"]) for choice in choices]
        assert plain.furthest(logprobs, [sample.logprobs for sample in samples]) < 1e-5
        prompts = [np.asarray(prompt) for prompt in PROMPTS]
        responses = [sample.response_ids for sample in samples]
        assert plain.furthest(logprobs, plain.logprobs(base, prompts, responses, temperature, len(WORDS))) < 1e-4
        assert got.json["policy_version"] == version
        for choice in choices:
            spans = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
            assert choice["version_spans"] == spans


@pytest.mark.parametrize("most", [0, 1, 5])
async def test_log_probs_of_prompts_are_the_models(quartet: Quartet, base: Any, most: int) -> None:
    """This is how lm-evaluation-harness asks for those of a continuation."""
    asks = {"echo": True, "logprobs": 1, "max_tokens": most, "temperature": 0, "seed": 1234, "ignore_eos": True}
    got = await asked(quartet, TEXT, {"model": "", "prompt": PROMPTS} | asks)
    assert got.status == 200, got.body
    rest = [np.asarray(prompt[1:]) for prompt in PROMPTS]
    expected = plain.logprobs(base, [np.asarray(prompt[:1]) for prompt in PROMPTS], rest, 1.0, ROWS)
    for choice, logprobs in zip(got.json["choices"], expected, strict=True):
        told = choice["logprobs"]
        assert (told["token_logprobs"][0], len(told["token_logprobs"])) == (None, len(logprobs) + 1 + most)
        assert told["token_logprobs"][1 : len(logprobs) + 1] == pytest.approx(logprobs.tolist(), abs=1e-4)
        # It compares each with the likeliest of its place.
        for number, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert number in top.values()
            assert max(top.values()) >= number


async def test_a_stream_brings_the_same_piece_by_piece(quartet: Quartet) -> None:
    body = {"prompt": PROMPTS[:2], "max_tokens": 40, "seed": 5, "logprobs": 0, "return_token_ids": True}
    whole = (await asked(quartet, TEXT, body | {"ignore_eos": True})).json
    more = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    got = await asked(quartet, TEXT, body | more)
    assert got.headers["content-type"].startswith("text/event-stream")
    *events, usage = got.events
    assert usage["usage"]["completion_tokens"] == 80
    # One for each token, or for several where the loop falls behind the engine: a first and a later one of both.
    assert len(events) >= 4
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        logprobs = [number for part in parts for number in part["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert parts[-1]["version_spans"] == choice["version_spans"]
    assert {event["policy_version"] for event in (*events, usage)} == {whole["policy_version"]}


async def test_text_chat_and_stop_strings_by_openais_library(client: AsyncOpenAI) -> None:
    newest = (await client.models.list()).data[0].id
    text = await client.completions.create(
        model=newest, prompt=["w5 w6", "w7"], max_tokens=4, logprobs=2, extra_body={"return_token_ids": True}
    )
    assert [choice.prompt_token_ids for choice in text.choices] == [[BOS, 5, 6], [BOS, 7]]  # type: ignore[attr-defined]
    assert all(len(each or {}) >= 2 for each in text.choices[0].logprobs.top_logprobs)  # type: ignore[union-attr]
    answer = await client.chat.completions.create(
        model=newest, messages=SAID, max_completion_tokens=6, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == RENDERED  # type: ignore[attr-defined]
    [choice] = answer.choices
    assert len(choice.logprobs.content) == len(choice.token_ids) <= 6  # type: ignore
    spans = [{"version": answer.policy_version, "start": 0, "end": len(choice.token_ids)}]  # type: ignore
    assert choice.version_spans == spans  # type: ignore[attr-defined]
    again: Any = [*SAID, choice.message.model_dump(), *SAID]
    assert (await client.chat.completions.create(model=newest, messages=again, max_tokens=2)).choices
    said, versions = "", set()
    async for event in await client.chat.completions.create(
        model=newest, messages=SAID, max_completion_tokens=30, seed=4, stream=True, extra_body=UNCUT
    ):
        said += event.choices[0].delta.content or ""
        versions.add(event.policy_version)  # type: ignore[attr-defined]
    assert len(said.split()) == 30
    assert versions == {answer.policy_version}  # type: ignore[attr-defined]
    word = next(word for word in said.split()[10:] if word.startswith("w"))
    before = re.split(rf"\b{word}\b", said)[0]
    stopped = await client.chat.completions.create(
        **{"model": newest, "messages": SAID, "max_completion_tokens": 30, "seed": 4, "stop": f"{word} "},
        extra_body=UNCUT,
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert (stopped.choices[0].message.content or "").strip() == before.strip()


async def test_openais_library_raises_its_own_errors(quartet: Quartet, client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="gpt-4"):
        await client.completions.create(model="gpt-4", prompt="w5")
    with pytest.raises(BadRequestError, match="temperature: 3"):
        await client.completions.create(model="", prompt="w5", temperature=3)
    with pytest.raises(AuthenticationError, match="quartet up"):
        await client.with_options(api_key="guessed").models.list()
    look: Any = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(APIStatusError, match="tools: this application has no tool_parser"):
        await client.chat.completions.create(model="", messages=SAID, tools=[look])


def test_the_page_works_as_it_stands(quartet: Quartet) -> None:
    page, text = Page.at("openai.md"), (REPO / "docs/openai.md").read_text()
    assert len(page.commands) == 4
    for line in page.commands:
        shell(quartet.folder, line.replace("curl -sS", "curl -sS --fail").replace(":18000/", f":{quartet.http}/"))
    [loop] = [rest.partition("```")[0] for rest in text.split("```sh\n")[1:] if rest.startswith("for version")]
    loop = loop.replace("lm_eval ", "echo lm_eval ").replace("100 200 300", "0")
    shell(quartet.folder, loop.replace(":18000/", f":{quartet.http}/") + "test $version = 0")
    programs = [rest.partition("```")[0] for rest in text.split("```python\n")[1:]]
    told = []
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program.replace(":18000/", f":{quartet.http}/")],
            cwd=quartet.folder,
            env=os.environ | {"PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0].startswith("weights ")
    assert told[1] == "0 [False, True, False, True]\n"
    assert told[2].startswith("weights ")


def test_the_terminal_prompts_the_model_too(quartet: Quartet) -> None:
    answered = "quartet chat ppo.yaml --max-tokens 4 | grep -c '(version [0-9]*)' | grep -qx 2"
    shell(quartet.folder, f"printf 'w8 w9\\nw10\\n' | {answered}")


NO_NUMBERS: list[Any] = [0, -1, 129, 1 << 70, "2", 1.5, []]
NO_TEMPERATURES: list[Any] = [-0.1, 1e308, "hot", [], {}]
HOSTILE: list[Any] = [
    *(b"", b"{", b"null", b'"a"', b"[]", b"\x00", b"\xff\xfe", b'{"prompt": "\\udc00"}', b'{"prompt": NaN}'),
    *({}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [[5], []]}, {"prompt": [["w5"]]}),
    *({"prompt": {}}, {"prompt": 5}, {"prompt": [5, "w5"]}, {"prompt": [5.5]}, {"prompt": [True, None]}),
    *({"prompt": [-1]}, {"prompt": [ROWS]}, {"prompt": [1 << 31]}, {"prompt": [1 << 70]}, {"prompt": [5] * 5000}),
    {"prompt": "w5 " * 100_000},
    {"prompt": [5] * MAX_LENGTH},
    {"prompt": ["w5"] * 5000},
    *({"prompt": "w5", **more} for more in ({"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": "5"})),
    *({"prompt": "w5", "min_tokens": least, "max_tokens": 5} for least in (6, 1 << 31, -1)),
    *({"prompt": "w5", "stop_token_ids": ids} for ids in ([ROWS], [1 << 40], [-1], ["a"], [[1]])),
    *({"prompt": "w5", "seed": seed} for seed in (-1, 1 << 64, "a", 0.5)),
    *({"prompt": "w5", "temperature": wrong} for wrong in NO_TEMPERATURES),
    *({"prompt": "w5", "top_k": wrong} for wrong in (-2, 1 << 31, 1.5)),
    *({"prompt": "w5", "n": wrong} for wrong in NO_NUMBERS),
    *({"prompt": ["w5"] * 1000, "n": 128}, {"prompt": "w5", "n": 2, "temperature": 0}),
    *({"prompt": "w5", "logprobs": wrong} for wrong in (-1, 21, 1 << 40, "a")),
    *({"prompt": "w5", "stream_options": options} for options in (5, {"include_usage": True})),
    *({"prompt": "w5", name: {}} for name in ("model", "user", "stop", "echo", "stream", "return_token_ids")),
    *(
        {"prompt": "w5", name: 1}
        for name in ("logit_bias", "guided_regex", "prompt_embeds", "vllm_xargs", "a" * 9999)
    ),
    *(
        {"prompt": "w5", name: 1}
        for name in ("structured_outputs", "kv_transfer_params", "use_beam_search", "suffix")
    ),
]
HOSTILE_CHATS: list[Any] = [
    *({}, {"messages": []}, {"messages": [{}]}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    {"messages": [{"role": "a" * 100_000, "content": 5}]},
    {"messages": SAID * 2000},
    {"messages": SAID, "chat_template": "{{ 'a' * 10 ** 10 }}"},
    {"messages": SAID, "chat_template_kwargs": 5},
    {"messages": SAID, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    {"messages": SAID, "top_logprobs": 5},
    {"messages": SAID, "logprobs": "yes"},
    {"messages": SAID, "max_completion_tokens": 0},
    {"messages": SAID, "continue_final_message": True, "add_generation_prompt": True},
    *({"messages": SAID, name: 1} for name in ("tools", "response_format", "documents", "mm_processor_kwargs")),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_hostile_requests_get_a_reason_and_no_replica_dies(quartet: Quartet, stream: bool) -> None:
    before = rollouts(quartet)
    requests = [(TEXT, body) for body in HOSTILE] + [(CHAT, body) for body in HOSTILE_CHATS]
    for path, body in requests:
        sent = body | {"stream": True} if stream and isinstance(body, dict) and "stream" not in body else body
        got = await asked(quartet, path, sent)
        if stream and "stream_options" in str(body)[:60] and got.status == 200:
            continue  # right, in a stream
        assert 400 <= got.status < 500, (str(sent)[:200], got.status, got.body[:300])
        message = got.message
        assert 3 < len(message) < 1500, str(sent)[:200]
        assert "Traceback" not in message
        assert not re.search(r"/(root|work|home|tmp|usr)/|\.py\b", message), message
    assert (await asked(quartet, TEXT, {"prompt": "w5", "max_tokens": 1})).status == 200
    assert rollouts(quartet) == before


async def test_hostile_chats_of_a_session_get_a_reason(quartet: Quartet, session: tuple[str, str]) -> None:
    for body in HOSTILE_CHATS:
        got = await ask(quartet.http, f"/rollout{CHAT}", body, bearer(session[1]))
        assert 400 <= got.status < 500, (str(body)[:200], got.status, got.body[:300])


async def test_anthropics_library(quartet: Quartet, base: Any) -> None:
    """The same answer as by OpenAI's protocol, whole and streamed."""
    async with anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{quartet.http}/rollout", auth_token=quartet.token
    ) as client:
        said: Any = []
        for number in range(8, 40):  # until there is one to which the model says something
            said = [{"role": "user", "content": f"w{number}"}]
            body = {"messages": said, "max_tokens": 8, "top_k": 1, "return_token_ids": True}
            reply = (await asked(quartet, CHAT, body)).json
            [choice] = reply["choices"]
            if choice["message"]["content"]:
                break
        # The library has no `top_k` any more.
        asks: Any = {"model": reply["model"], "messages": said, "max_tokens": 8, "extra_body": {"top_k": 1}}
        message: Any = await client.messages.create(**asks)
        async with client.messages.stream(**asks) as stream:
            streamed: Any = await stream.get_final_message()
        for got in (message, streamed):
            assert [block.text for block in got.content] == [choice["message"]["content"]]
            assert got.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
        assert message.policy_version == reply["policy_version"]
        prompt = len(reply["prompt_token_ids"])
        assert (message.usage.input_tokens, message.usage.output_tokens) == (prompt, len(choice["token_ids"]))
        history = [*said, {"role": "assistant", "content": message.content}, *said]
        counted = await client.messages.count_tokens(model=reply["model"], messages=history)
        again = {"messages": [*said, choice["message"], *said]}
        assert counted.input_tokens == (await asked(quartet, "/tokenize", again)).json["count"] > prompt
        with pytest.raises(anthropic.BadRequestError, match="tool_choice: should be auto or none"):
            await client.messages.create(**asks, tool_choice={"type": "any"})


async def test_a_client_that_leaves_ends_its_requests(quartet: Quartet, client: AsyncOpenAI) -> None:
    long: Any = {"prompt": PROMPTS * 128, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
    stream = await client.completions.create(model="", stream=True, **long)
    async for _ in stream:
        break
    await stream.close()
    asking = [asyncio.create_task(client.completions.create(model="", **long)) for _ in range(6)]

    async def working() -> bool:
        assert [each.exception() for each in asking if each.done() and each.exception()] == []
        return await running(quartet) > 0

    await eventually(working, 30)
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    await eventually(lambda: idle(quartet), 10)
    assert (await asked(quartet, TEXT, {"prompt": "w5", "max_tokens": 1})).status == 200


async def test_tokens_of_prompts_are_told(quartet: Quartet) -> None:
    assert (await asked(quartet, "/tokenize", {"messages": SAID})).json["tokens"] == RENDERED
    assert (await asked(quartet, "/tokenize", {"prompt": "w5"})).json["tokens"] == [BOS, 5]
    assert (await asked(quartet, "/detokenize", {"tokens": RENDERED})).json["prompt"].split()[:2] == ["w8", "w9"]
    told = (await asked(quartet, "/tokenizer_info")).json
    assert (told["eos_token"], told["chat_template"]) == ("<eos>", TEMPLATE)
    unread: list[Any] = [{}, {"prompt": 5}, {"messages": 5}, {"prompt": "w5", "tools": []}, {"tools": []}]
    for body in unread:
        assert (await asked(quartet, "/tokenize", body)).status == 400
    wrong: list[Any] = [{}, {"tokens": "w5"}, {"tokens": [ROWS]}, {"tokens": {"a": 1}}]
    for body in wrong:
        assert (await asked(quartet, "/detokenize", body)).status == 400


async def test_an_answer_that_is_larger_than_a_message_of_grpc_arrives(quartet: Quartet) -> None:
    prompts = [[BOS, *([5] * 124)]] * 512
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
    got = await asked(quartet, TEXT, body)
    assert [len(choice["logprobs"]["tokens"]) for choice in got.json["choices"]] == [126] * 512
    assert len(got.body) > 4 << 20


async def test_tokens_in_and_out_are_those_of_grpc(quartet: Quartet) -> None:
    samples = await sampled(quartet, Sampling(max_new_tokens=20), 17)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        sampling = {"max_tokens": 20, "seed": 17, "logprobs": 0}
        got = await asked(quartet, GENERATE, {"token_ids": prompt, "sampling_params": sampling})
        [choice] = got.json["choices"]
        assert choice["token_ids"] == sample.response_ids.tolist()
        told = np.asarray([each["logprob"] for each in choice["logprobs"]["content"]])
        assert plain.furthest([told], [sample.logprobs]) < 1e-5


@pytest.fixture
async def session(quartet: Quartet) -> tuple[str, str]:
    """Number and key of a session."""
    got = await asked(quartet, START, {"task_id": "t"})
    assert got.status == 200, got.body
    return got.json["session_id"], got.json["api_key"]


async def test_what_was_sampled_stays_what_it_was_through_all_replicas(
    quartet: Quartet, session: tuple[str, str], base: Any
) -> None:
    """Each turn may reach another replica. Log-probs of all turns are those of the whole sequence in one pass."""
    number, key = session
    messages: list[Any] = [*SAID]
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{quartet.http}/rollout/v1", api_key=key) as agent:
        for turn in range(4):
            asks: Any = {"model": "", "messages": messages, "max_completion_tokens": 9, "seed": turn}
            if turn % 2:
                stream = await agent.chat.completions.create(**asks, stream=True)
                text = "".join([event.choices[0].delta.content or "" async for event in stream])
                messages += [{"role": "assistant", "content": text}, *SAID]
            else:
                answer = await agent.chat.completions.create(**asks)
                messages += [answer.choices[0].message, *SAID]
        with pytest.raises(BadRequestError, match=r"top_p: 0\.5; should be 1 in a session"):
            await agent.chat.completions.create(model="", messages=messages, top_p=0.5)
    assert (await ask(quartet.http, "/rollout/rl/set_reward", {"reward": 0.5}, bearer(key))).status == 200
    assert (await ask(quartet.http, "/rollout/rl/trajectory", {}, bearer(key))).status == 403
    assert (await ask(quartet.http, "/rollout/rl/end_session", {}, bearer(key))).json["interaction_count"] == 4
    assert (await ask(quartet.http, f"/rollout{CHAT}", {"messages": SAID}, bearer(key))).status == 409
    told = (await asked(quartet, "/rl/trajectory", {"session_id": number})).json
    assert (told["reward"], told["forks"], told["task_id"]) == (0.5, 0, "t")
    [trajectory] = trajectories_of(told, 3, 3, 1)
    ids = np.concatenate([segment.ids for segment in trajectory.segments])
    assert ids.tolist() == told["sequences"][0]["ids"]
    assert [segment.sampled for segment in trajectory.segments] == [False, True] * 4
    [expected] = plain.logprobs(base, [ids[:1]], [ids[1:]], 1.0, len(WORDS))
    place = 0
    for segment in trajectory.segments:
        if segment.logprobs is not None:
            assert plain.furthest([segment.logprobs], [expected[place - 1 : place - 1 + len(segment.ids)]]) < 1e-4
            assert segment.spans[-1][2] == len(segment.ids)
        place += len(segment.ids)
    removed = await asked(quartet, "/rl/trajectory", {"session_id": number, "remove": True})
    assert removed.json == {"session_id": number, "removed": True}
    assert (await asked(quartet, "/rl/trajectory", {"session_id": number})).status == 404


async def test_a_session_is_trained_on_with_the_log_probs_that_the_learner_has(quartet: Quartet, base: Any) -> None:
    """Several turns, a request that was repeated, and a history that was changed, in the learner's first pass."""
    started = (await asked(quartet, START, {"temperature": 0.7})).json
    number, key = started["session_id"], started["api_key"]

    async def said(messages: Any, **more: Any) -> Any:
        body = {"messages": messages, "max_tokens": 9, "ignore_eos": True} | more
        got = await ask(quartet.http, f"/rollout{CHAT}", body, bearer(key))
        assert got.status == 200, got.body
        return got.json["choices"][0]["message"]

    history = [*SAID, await said(SAID, seed=1), {"role": "user", "content": "w7"}]
    await said(history, seed=2)  # its answer gets lost
    history += [await said(history, seed=3), {"role": "user", "content": "w6"}]
    await said(history, seed=4)
    await said([*SAID, {"role": "assistant", "content": "w4"}, *SAID], seed=5)
    assert (await ask(quartet.http, "/rollout/rl/set_reward", {"reward": 1.0}, bearer(key))).status == 200
    told = (await asked(quartet, "/rl/trajectory", {"session_id": number})).json
    columns = columns_of_session(told, 0, 0, 0)
    assert [each.tolist() for each in (columns.counts, columns["score"])] == [[27, 9], [1.0, 1.0]]
    config = PolicyConfig(model=str(quartet.policy), optimizer=OptimizerConfig(learning_rate=1e-4))
    algorithm = ReinforcePP(old_logprobs="rollout", minibatch_size=2, epochs=1)
    trainer = PolicyTrainer(config, algorithm, Distribution(0.7, vocabulary=len(WORDS)))
    advantages = np.ones(columns.size("sampled"), np.float32)
    metrics = trainer.train(columns.select("logprobs").with_sampled(advantages=advantages), 0.0, 0)
    assert metrics["first_log_ratio_max"] < 1e-4


async def test_sessions_whose_holder_dies_are_refused_by_name(quartet: Quartet, session: tuple[str, str]) -> None:
    number, key = session
    turn = {"messages": SAID, "max_tokens": 2}
    assert (await ask(quartet.http, f"/rollout{CHAT}", turn, bearer(key))).json["session"]["session_id"] == number
    holder = named(quartet, "ray::SessionHolder")
    holder.kill()
    await eventually(lambda: asyncio.to_thread(lambda: not holder.is_running()), 30)
    statuses = set()

    async def known_to_all() -> bool:
        got = await ask(quartet.http, f"/rollout{CHAT}", turn, bearer(key))
        assert re.search("with their tokens|tokens are lost", got.message)
        statuses.add(got.status)
        return got.status == 404

    await eventually(known_to_all, 30)
    assert statuses <= {503, 404}
    again = await asked(quartet, START, {})
    assert (await ask(quartet.http, f"/rollout{CHAT}", turn, bearer(again.json["api_key"]))).status == 200
    assert (await ask(quartet.http, f"/rollout{CHAT}", turn, bearer(key))).status == 404
    assert (await asked(quartet, CHAT, turn)).status == 200


async def test_the_numbers_of_all_replicas_are_told(quartet: Quartet) -> None:
    assert (await asked(quartet, TEXT, {"prompt": "w5", "max_tokens": 1})).status == 200
    got = await asked(quartet, "/metrics")
    assert got.headers["content-type"].startswith("text/plain")
    lines = got.body.decode().splitlines()
    for replica, info in (await quartet.replicas()).items():
        assert f'quartet_rollout_policy_version{{replica="{replica}"}} {info.policy_version}' in lines
    answered = [line for line in lines if 'path="/v1/completions",status="200"' in line]
    assert sum(float(line.rpartition(" ")[2]) for line in answered) >= 1


@pytest.mark.exhaustive
async def test_a_replica_that_dies_takes_no_tokens_of_a_session_with_it(quartet: Quartet) -> None:
    """The turns are refused by name, and the next ones go on after those that were answered."""
    started = [(await asked(quartet, START, {})).json for _ in range(12)]
    histories: list[list[Any]] = [[*SAID] for _ in started]
    answered = [0 for _ in started]

    async def turn(place: int, most: int) -> int:
        body = {"messages": histories[place], "max_tokens": most, "ignore_eos": True}
        got = await ask(quartet.http, f"/rollout{CHAT}", body, bearer(started[place]["api_key"]))
        if got.status == 200:
            assert got.json["session"]["forks"] == 0
            histories[place] += [got.json["choices"][0]["message"], *SAID]
            answered[place] += 1
        return got.status

    async def all_turns(most: int) -> set[int]:
        return set(await asyncio.gather(*(turn(place, most) for place in range(len(started)))))

    assert await all_turns(4) == {200}
    asking = asyncio.create_task(all_turns(60))
    await asyncio.sleep(0.1)
    dying = min(rollouts(quartet).values())
    os.kill(dying, signal.SIGKILL)
    assert await asking <= {200, 503}

    await whole(quartet, quartet.rollout_replicas)
    assert await all_turns(4) == {200}
    for session, count in zip(started, answered, strict=True):
        told = (await asked(quartet, "/rl/trajectory", {"session_id": session["session_id"]})).json
        [sequence] = told["sequences"]
        assert [segment["sampled"] for segment in sequence["segments"]] == [False, True] * count
