"""A client of OpenAI's protocol that asks the model while a run trains it: versions move, the run goes on."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import Quartet
from tests.commands import PATIENCE_S
from tests.runs import Run, journal

STEPS, VERSIONS = 8, 3
SAID: Any = [{"role": "user", "content": "w8 w9"}]
PAUSE_S = 0.3
"""Seconds between two chats, in which the run has the processors to itself."""


async def _chat(client: AsyncOpenAI, stop: asyncio.Event, proofs: dict[int, float]) -> list[Any]:
    """Events of streams, one after the other until they have seen enough versions; the last of each holds all spans
    of its response. Notes the proofs that they tell of, by version."""
    ends: list[Any] = []
    while not stop.is_set() and len({span["version"] for each in ends for span in each}) < VERSIONS:
        stream = await client.chat.completions.create(
            **{"model": "", "messages": SAID, "max_completion_tokens": 100, "logprobs": True, "stream": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        events = [event async for event in stream]
        spans: list[Any] = [(event.choices[0].model_extra or {})["version_spans"] for event in events]
        tokens = [token for event in events for token in (event.choices[0].model_extra or {}).get("token_ids") or ()]
        versions = [version for span in spans[-1] for version in [span["version"]] * (span["end"] - span["start"])]
        assert len(versions) == len(tokens) == 100
        # Each event names the version of its own last token, and what is told once stays true.
        for event, so_far in zip(events, spans, strict=True):
            if so_far:
                assert event.policy_version == so_far[-1]["version"]
                told = [v["version"] for v in so_far for _ in range(v["end"] - v["start"])]
                assert told == versions[: len(told)]
        ends.append(spans[-1])
        if (proof := (events[-1].model_extra or {})["proved"]) is not None:
            proofs[proof["version"]] = proof["difference"]
        await asyncio.sleep(PAUSE_S)
    return ends


async def test_versions_move_with_the_pushes_and_the_run_ends_as_it_would(quartet: Quartet) -> None:
    run = Run(quartet, "chatted")
    with run.changing() as raw:
        raw["orchestrator"]["steps"] = STEPS
    stop = asyncio.Event()
    proofs: dict[int, float] = {}
    try:
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{quartet.http}/rollout/v1", api_key=quartet.token
        ) as client:
            training = run.start()
            # Until its first step the replicas may hold what another test has left: weights, version and proof.
            await asyncio.to_thread(run.wait, lambda: bool(run.steps()), training)
            # One stream after the other: an event for each token takes both cores from the run.
            chat = asyncio.create_task(_chat(client, stop, proofs))
            assert await asyncio.to_thread(training.wait, PATIENCE_S) == 0, run.log.read_text()
            stop.set()
            spans = await asyncio.wait_for(chat, PATIENCE_S)
            cards = (await client.models.list()).data
    finally:
        stop.set()
        run.end()
    lines = read_metrics(run.folder / "metrics.jsonl")
    pushed = {int(line["policy/version"]) for line in lines if "policy/version" in line}
    seen = {span["version"] for each in spans for span in each}
    print(f"{len(spans)} chats, {sum(len(each) > 1 for each in spans)} across a push, versions {sorted(seen)}")
    assert len(seen) >= VERSIONS
    assert proofs
    assert proofs.keys() <= {min(pushed) - 1, *pushed}  # the first is pushed before the first step
    assert all(difference < 1e-3 for difference in proofs.values())
    newest: Any = cards[0]
    assert [card.id for card in cards] == ["chatted", f"chatted@{newest.policy_version}"]
    assert newest.policy_version >= max(pushed)
    assert max(seen) <= newest.policy_version
    # What the client sampled is in nothing that was trained on.
    used = [number for columns in journal(run) for number in columns["number"].tolist()]
    assert sorted(used) == list(range(STEPS * quartet.raw["orchestrator"]["batch_size"]))
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines if "mismatch/max_abs" in line)
