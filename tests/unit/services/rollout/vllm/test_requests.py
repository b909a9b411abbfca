"""Requests to an engine, which here answers by a script: parts that are reported, limits of responses that go on,
adapters of several versions, and seeds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs, Logprob

from quartet.seams.vllm import adapters_at
from quartet.wire.errors import Unavailable
from services.rollout.sample import Sample, Sampling
from services.rollout.vllm.requests import Requests
from services.rollout.vllm.sampling import BEGUN_KEY, RunnerRequests, continue_seeds, continued
from tests.unit.waiting import settled

PROMPT = np.asarray([10, 11], np.int32)
SAMPLING = Sampling(max_new_tokens=9, min_new_tokens=4, stop_token_ids=(3,))
LOGPROB = -0.25


def noted(length: int) -> list[Any] | None:
    """vLLM's note of the weights that sampled so many tokens."""
    spans = [SimpleNamespace(version="3", start=0, end=min(length, 2))]
    if length > 2:
        spans.append(SimpleNamespace(version="4", start=2, end=length))
    return spans if length else None


class Script:
    """An engine whose response has so many tokens at each output: 20, 21 and so on. The first two are of version 3,
    the others of version 4."""

    def __init__(self, lengths: list[int], end: str) -> None:
        self._lengths, self._end = lengths, end
        self.asked: list[Any] = []
        self.adapters: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.ended: list[str] = []
        self.output_processor = self
        self.external_req_ids: dict[str, list[str]] = {}
        self.request_states: dict[str, Any] = {}

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any = None) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, name))
        self.adapters.append(lora_request)
        for place, length in enumerate(self._lengths, 1):
            if place > 1:
                await self.gate.wait()
            self.external_req_ids[name] = [f"{name}-a"]
            self.request_states[f"{name}-a"] = SimpleNamespace(_weight_version_spans=partial(noted, length))
            ids = list(range(20, 20 + length))
            logprobs = FlatLogprobs()
            logprobs.extend({token: Logprob(LOGPROB)} for token in ids)
            reason = self._end if place == len(self._lengths) else None
            if reason is not None:
                # As vLLM: with the end its state is gone, and its spans come with the output.
                del self.external_req_ids[name], self.request_states[f"{name}-a"]
            versions = None if reason is None else noted(length)
            output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_versions=versions)
            yield SimpleNamespace(outputs=[output])

    async def abort(self, names: list[str]) -> None:
        self.ended += names


async def answered(script: Script, begun: Any = None) -> tuple[Sample, list[list[int]]]:
    parts: list[Sample] = []
    requests = Requests(script)
    try:
        return await requests.generate(5, PROMPT, SAMPLING, 77, begun, parts.append), [_ids(part) for part in parts]
    finally:
        assert all(part.index == 5 for part in parts)
        assert all(_versions(part) == [3 if token < 22 else 4 for token in _ids(part)] for part in parts)
        assert all(part.logprobs.tolist() == [LOGPROB] * len(part.response_ids) for part in parts)
        script.reported = [_ids(part) for part in parts]  # type: ignore[attr-defined]


def _ids(part: Sample) -> list[int]:
    ids: list[int] = part.response_ids.tolist()
    return ids


def _versions(part: Sample) -> list[int]:
    """The version of each token."""
    return [version for version, start, end in part.spans for _ in range(start, end)]


async def test_each_token_is_reported_once_and_the_sample_has_all() -> None:
    sample, parts = await answered(Script([2, 2, 3, 5], "stop"))
    assert parts == [[20, 21], [22]]
    assert (_ids(sample), sample.finish_reason) == ([20, 21, 22, 23, 24], "stop")
    assert sample.spans == ((3, 0, 2), (4, 2, 5))


async def test_no_request_waits_for_the_thread_that_renders_messages() -> None:
    """vLLM's engine takes prompts of this kind at once."""
    script = Script([1], "stop")
    requests = Requests(script)
    await requests.generate(0, PROMPT, SAMPLING, None)
    [_] = [output async for output in requests.stream([5], SamplingParams(), "ours")]
    with contextlib.suppress(AttributeError):  # the script has no log-probs of prompts
        await requests.score(PROMPT)
    whole, own = (tokens_input([10, 11], cache_salt="0"), tokens_input([5], cache_salt="0-ours"))
    assert [prompt for prompt, _, _ in script.asked] == [whole, own, whole]


async def test_all_requests_name_the_adapters() -> None:
    for adapters, named in ((0, None), (1, adapters_at(0))):
        script = Script([1], "stop")
        requests = Requests(script, adapters)
        await requests.generate(0, PROMPT, SAMPLING, None)
        [_] = [output async for output in requests.stream([5], SamplingParams())]
        with contextlib.suppress(AttributeError):  # the script has no log-probs of prompts
            await requests.score(PROMPT)
        await requests.serve(7)
        await requests.generate(0, PROMPT, SAMPLING, None)
        assert script.adapters == [named] * 4


class Kept:
    """An engine with three versions of adapters, whose responses get tokens when they are told to."""

    def __init__(self) -> None:
        self.requests = Requests(self, 3)
        self.places: list[int] = []
        """Places of the adapters of each request, in the order of requests."""
        self.seeds: list[int | None] = []
        """Their seeds."""
        self._lengths: dict[str, int] = {}
        self._made: dict[str, asyncio.Queue[str | None]] = {}
        self.output_processor = self
        self.external_req_ids = self.request_states = dict[str, Any]()

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any) -> AsyncIterator[Any]:
        self.places += [place for place in range(3) if lora_request == adapters_at(place)]
        self.seeds.append(params.seed)
        self.external_req_ids[name] = [f"{name}-a"]
        self.request_states[f"{name}-a"] = SimpleNamespace(_weight_version_spans=lambda: noted(self._lengths[name]))
        self._lengths[name], made, reason = 0, self._made.setdefault(name, asyncio.Queue()), None
        while reason is None:
            reason, length = await made.get(), self._lengths[name]
            logprobs = FlatLogprobs()
            logprobs.extend({token: Logprob(LOGPROB)} for token in range(length))
            if reason is not None:
                del self.external_req_ids[name], self.request_states[f"{name}-a"]
            versions = None if reason is None else noted(length)
            output = SimpleNamespace(
                token_ids=range(length), logprobs=logprobs, finish_reason=reason, weight_versions=versions
            )
            yield SimpleNamespace(outputs=[output])

    async def abort(self, names: list[str]) -> None:
        for name in names:
            self._made[name].put_nowait("abort")
        await settled()

    async def begin(self, parts: list[Sample] | None = None, seed: int | None = None) -> "asyncio.Task[Sample]":
        report = (lambda part: None) if parts is None else parts.append
        task = asyncio.create_task(self.requests.generate(0, PROMPT, SAMPLING, seed, None, report))
        await settled()
        return task

    async def give(self, name: str, tokens: int, end: str | None = None) -> None:
        self._lengths[name] += tokens
        self._made[name].put_nowait(end)
        await settled()

    async def push(self, version: int) -> int:
        place = await self.requests.make_place()
        await self.requests.serve(version)
        await settled()
        return place


async def test_a_response_is_finished_with_the_adapters_with_which_it_began() -> None:
    kept, parts = Kept(), list[Sample]()
    first = await kept.begin(parts)
    await kept.give("r0", 1)
    assert [await kept.push(version) for version in (5, 6)] == [1, 2]
    second = await kept.begin()
    await kept.give("r0", 2)
    await kept.give("r1", 4, "stop")
    await kept.give("r0", 1, "length")
    # vLLM notes versions 3 and 4 here.
    assert [part.spans for part in parts] == [((0, 0, 1),), ((0, 0, 2),)]
    assert (await first).spans == ((0, 0, 4),)
    assert (await second).spans == ((6, 0, 4),)
    assert kept.places == [0, 2]


async def test_a_response_ends_where_a_push_takes_the_place_of_its_adapters() -> None:
    kept, parts = Kept(), list[Sample]()
    old = await kept.begin(parts)
    await kept.give("r0", 2)
    assert await kept.push(1) == 1
    middle = await kept.begin()
    await kept.give("r1", 1)
    assert await kept.push(2) == 2
    young = await kept.begin()
    assert not old.done()
    assert await kept.push(3) == 0
    with pytest.raises(Unavailable, match="ask again"):
        await old
    assert sum(len(part.response_ids) for part in parts) == 2
    assert [middle.done(), young.done()] == [False, False]
    for task in (middle, young):
        task.cancel()


async def test_a_push_takes_a_place_that_no_response_needs_before_it_ends_one() -> None:
    kept = Kept()
    begun = list[asyncio.Task[Sample]]()
    for version in (6, 7):
        await kept.push(version)
        begun.append(await kept.begin())
        await kept.give(f"r{version - 6}", 1)
    # Of three attempts the first is given up before its commit, the second after it, as other replicas lacked it.
    places = [await kept.requests.make_place(), await kept.push(8)]
    assert places == [0, 0]
    assert await kept.push(8) == 1
    assert [task.done() for task in begun] == [True, False]
    # The one of version 7 is within the bound of staleness still, and that of the second attempt is none's.
    assert await kept.push(9) == 0
    assert not begun[1].done()
    await kept.give("r1", 1, "stop")
    assert (await begun[1]).spans == ((7, 0, 2),)
    with pytest.raises(Unavailable, match="ask again"):
        await begun[0]


async def test_a_response_that_waits_for_its_first_token_begins_again_with_the_new_adapters() -> None:
    kept = Kept()
    waiting = await kept.begin()
    begun = await kept.begin()
    await kept.give("r1", 1)
    await kept.push(8)
    assert kept.places == [0, 0, 1]
    await kept.give("r2", 3, "stop")
    assert (await waiting).spans == ((8, 0, 3),)
    # One that is begun keeps its adapters, and one that is ended for another reason is not begun again.
    waiting = await kept.begin()
    await kept.requests.end()
    for task in (begun, waiting):
        with pytest.raises(Unavailable, match="ask again"):
            await task
    assert kept.places == [0, 0, 1, 1]


async def test_responses_that_wait_keep_their_order_when_they_begin_again() -> None:
    kept = Kept()
    waiting = [await kept.begin(seed=seed) for seed in range(20)]
    waiting.pop(3).cancel()
    await kept.push(1)
    assert kept.seeds == [*range(20), *range(3), *range(4, 20)]
    for task in waiting:
        task.cancel()


async def test_a_response_that_the_engine_ends_is_reported_to_its_last_token() -> None:
    for lengths, parts in (([2, 3], [[20, 21], [22]]), ([3], [[20, 21, 22]]), ([0], []), ([2, 2], [[20, 21]])):
        script = Script(lengths, "abort")
        with pytest.raises(Unavailable, match="ended the request before it was finished; ask again"):
            await answered(script)
        assert script.reported == parts  # type: ignore[attr-defined]


@pytest.mark.parametrize(("begun", "most", "least"), [(0, 9, 4), (3, 6, 1), (4, 5, 0), (8, 1, 0)])
async def test_limits_count_from_the_true_beginning(begun: int, most: int, least: int) -> None:
    script = Script([1], "length")
    await answered(script, np.arange(30, 30 + begun, dtype=np.int32))
    [(prompt, params, _)] = script.asked
    assert prompt["prompt_token_ids"] == [10, 11, *range(30, 30 + begun)]
    assert (params.max_tokens, params.min_tokens, params.seed) == (most, least, 77)
    assert (params.extra_args or {}).get(BEGUN_KEY, 0) == begun


async def test_only_responses_under_way_are_ended() -> None:
    script = Script([2, 3], "stop")
    requests = Requests(script)
    script.gate.clear()
    reported = asyncio.Event()
    responding = asyncio.create_task(requests.generate(0, PROMPT, SAMPLING, None, None, lambda part: reported.set()))
    await reported.wait()
    await requests.end()
    [(_, _, name)] = script.asked
    assert script.ended == [name]
    script.gate.set()
    await responding
    await requests.end()
    assert script.ended == [name]


def state(seed: int | None, begun: int | None) -> Any:
    """A request of vLLM's model runner."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    params = SimpleNamespace(seed=seed, extra_args=None if begun is None else {BEGUN_KEY: begun})
    return SimpleNamespace(sampling_params=params, generator=generator, output_token_ids=[])


def drawn(generator: torch.Generator, count: int) -> list[int]:
    """Draws of vLLM's sampler on a CPU."""
    return [int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)) for _ in range(count)]


WHOLE = drawn(torch.Generator().manual_seed(7), 1200)


def test_a_generator_goes_on_as_if_the_response_had_not_moved() -> None:
    runner = SimpleNamespace(requests={})
    continue_seeds(runner)
    for begun in (None, 1, 2, 17, 1100):
        runner.requests["r"] = state(7, begun)
        assert drawn(runner.requests["r"].generator, 100) == WHOLE[begun or 0 :][:100]
    runner.requests["unseeded"] = state(None, 5)
    runner.requests["pooling"] = SimpleNamespace(sampling_params=None, generator=None)
    assert isinstance(runner.requests, RunnerRequests)
    assert set(runner.requests) == {"r", "unseeded", "pooling"}


@pytest.mark.parametrize(("begun", "tokens"), [(0, 0), (5, 0), (0, 3), (5, 3)])
def test_a_draw_for_a_piece_of_a_prompt_is_taken_back(begun: int, tokens: int) -> None:
    """Prompts are read for the first time, or again after a pause, with their tokens."""
    request = state(7, begun)
    generator = continued(request, begun)
    assert drawn(generator, tokens) == WHOLE[begun:][:tokens]
    request.output_token_ids += [1] * tokens
    for _ in range(2):
        drawn(generator, 1)
        generator.set_offset(generator.get_offset() - 4)
    assert drawn(generator, 9) == WHOLE[begun + tokens :][:9]


def test_a_runner_that_draws_by_position_is_left_alone() -> None:
    runner = SimpleNamespace()
    continue_seeds(runner)
    assert not vars(runner)
