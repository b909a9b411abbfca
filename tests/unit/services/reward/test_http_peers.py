"""The HTTP door of the reward service by other systems' clients: Hugging Face's own, and those of OpenRLHF and NeMo
Gym as their sources describe them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from pydantic import BaseModel, ConfigDict, ValidationError

from tests.unit.reward_door import SEEN, reward_door, scorers_of_all_kinds

TRIES = 5
"""Times that OpenRLHF asks."""


@pytest.fixture
async def address(policy_folder: Path, reward_folder: Path) -> AsyncIterator[str]:
    async with reward_door(scorers_of_all_kinds(str(reward_folder), str(policy_folder))) as port:
        yield f"http://127.0.0.1:{port}/reward/scorers/length"


async def test_hugging_faces_client_classifies(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test of this process may have imported it offline, where it calls nothing at all.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    client = InferenceClient(model=f"{address}/predict")
    batch: Any = [["w5", "w7 w8"]]
    [[first]] = [await asyncio.to_thread(client.text_classification, batch)]
    assert (first.label, first.score) == ("score", 5.0)
    named = InferenceClient(model=f"{address.replace('length', 'two')}/predict")
    best = await asyncio.to_thread(named.text_classification, batch, top_k=1, function_to_apply="none")
    assert [(each.label, each.score) for each in best] == [("long", 5.0)]
    with pytest.raises(HfHubHTTPError, match="503"):
        await asyncio.to_thread(client.text_classification, [["w5", "w14"]])  # type: ignore[arg-type]
    with pytest.raises(HfHubHTTPError, match="400"):
        await asyncio.to_thread(client.text_classification, batch, function_to_apply="sigmoid")


async def fetch_rewards(url: str, queries: list[str], prompts: list[str], labels: list[str]) -> Any:
    """OpenRLHF's request to a remote reward model: what it answers, or None when it gives up."""
    body = {"query": queries, "prompts": prompts, "labels": labels}
    for _ in range(TRIES):
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                answer.raise_for_status()
                return await answer.json()
        except aiohttp.ClientError:
            continue
    return None


async def test_openrlhf_gets_rewards_or_gives_up(address: str) -> None:
    got = await fetch_rewards(f"{address}/get_reward", ["w5w7 w8<eos>"], ["w5"], ["w8"])
    assert (got["rewards"], got["scores"], got["extra_logs"]) == ([5.0], [5.0], {"score": [5.0]})
    assert (SEEN[-1].prompt, SEEN[-1].response, SEEN[-1].label) == ("w5", "w7 w8", "w8")
    assert await fetch_rewards(f"{address}/get_reward", ["w5w14"], ["w5"], [""]) is None


class BaseVerifyResponse(BaseModel):
    """A resources server's answer as NeMo Gym's agents read it."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    response: dict[str, Any]
    reward: float
    mask_sample: bool = False
    failure_reason: str | None = None


async def test_nemo_gym_gets_a_reward_or_no_number(address: str) -> None:
    async def verify(text: str) -> Any:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        body = {"responses_create_params": {"input": "w5"}, "response": {"output": [said]}, "verifier_metadata": {}}
        async with aiohttp.ClientSession() as session, session.post(f"{address}/verify", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    read = BaseVerifyResponse.model_validate(await verify("w7 w8"))
    assert (read.reward, read.mask_sample) == (5.0, False)
    assert read.model_extra == {"verifier_metadata": {}, "reward_components": {"score": 5.0}}
    other, failed = await verify("w7"), await verify("w14")
    assert (failed["_ng_failure_class"], failed["mask_sample"]) == ("failed", True)
    with pytest.raises(ValidationError, match="reward"):
        BaseVerifyResponse.model_validate(failed)
    # An agent sends them stripped of their texts, each with the number of its task.
    rows = [read.model_dump(), other, failed, failed | {"_ng_task_index": 1}]
    stripped = [{k: v for k, v in row.items() if k != "response"} for row in rows]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address}/aggregate_metrics", json={"verify_responses": stripped}) as answer,
    ):
        figures = await answer.json()
    assert figures["key_metrics"] == {"mean/reward": 3.5}
    assert figures["agent_metrics"]["std/reward"] == pytest.approx(1.5 * 2**0.5)
    [task] = figures["group_level_metrics"]  # the other one has no score
    assert (task["_ng_task_index"], task["max/reward"], task["min/reward"]) == (0, 5.0, 2.0)
