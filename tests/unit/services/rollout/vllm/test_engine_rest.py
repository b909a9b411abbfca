"""An engine that rests while the learners compute, and the versions of its weights: the calls that vLLM gets."""

import asyncio
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from quartet.models.loading import shape_of_causal
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from quartet.wire.errors import Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.interface import NO_VERSION
from services.rollout.vllm.engine import VLLMEngine
from tests.unit.services.rollout.vllm.test_vllm_interface import RecordedEngine

PAUSE = ("pause_generation", {"mode": "keep", "clear_cache": True})
AWAKE = ("wake_up", {"tags": ["kv_cache"]})


class Llm(RecordedEngine):
    """One that was started with or without the allocator that releases memory; its workers have an old model."""

    failure = ""
    """Answer of the second of its workers to a load."""
    known: tuple[bool, bool] = True, True
    """Answers of its workers to whether they know their pieces of a push."""

    def __init__(self, *, releases: bool, whole: bool = True) -> None:
        super().__init__()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 64, max_model_len=32, enable_sleep_mode=releases)
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._drained)
        self._whole = whole

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, *args) if args else method)
        if method == "knows_pieces":
            return list(self.known)
        return [self._whole] * 2 if method == "abort_weight_update" else [("", "sum"), (self.failure, "sum")]

    async def _drained(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(("drained", mode, clear_cache))

    def names(self) -> list[str]:
        names = [call if isinstance(call, str) else call[0] for call in self.calls]
        self.calls.clear()
        return names


def make(llm: Llm, folder: Path, **own: Any) -> VLLMEngine:
    config = RolloutConfig.parse({"model": str(folder), "dtype": "float32", "kv_cache_mib": 8} | own, "rollout")
    engine = VLLMEngine(llm, config, ExpectedWeights(shape_of_causal(config.model, config.dtype), config.dtype))
    engine._received = "sum"
    return engine


async def test_the_cache_comes_back_at_the_commit_and_generation_is_paused_once(policy_folder: Path) -> None:
    llm = Llm(releases=True)
    engine = make(llm, policy_folder)
    await engine.rest()
    await engine.rest()
    assert llm.calls == [PAUSE, "release_kv_cache_memory"]
    llm.calls.clear()
    await engine.pause("wait")
    assert llm.names() == ["close_weight_update", "start_weight_update"]
    await engine.commit(5)
    assert llm.calls == [
        ("finish_weight_update", {"weight_version": "5"}),
        "push_outcome",
        AWAKE,
        "resume_generation",
    ]
    llm.calls.clear()
    # The next push finds nothing released.
    await engine.pause("keep")
    await engine.commit(6)
    names = llm.names()
    assert names[:3] == ["pause_generation", "close_weight_update", "start_weight_update"]
    assert "wake_up" not in names


@pytest.mark.parametrize(
    ("in_flight", "paused"),
    [
        ("keep", PAUSE),
        ("keep-cache", ("pause_generation", {"mode": "keep", "clear_cache": False})),
        ("abort", PAUSE),
        # Not vLLM's pause_generation, which refuses requests that come in this mode.
        ("wait", ("drained", "wait", True)),
    ],
)
async def test_a_push_pauses_as_it_says(policy_folder: Path, in_flight: str, paused: Any) -> None:
    llm = Llm(releases=False)
    await make(llm, policy_folder).pause(in_flight)
    assert llm.calls[:3] == [paused, "close_weight_update", "start_weight_update"]


@pytest.mark.parametrize("whole", [True, False])
async def test_an_abort_ends_the_rest_unless_the_weights_are_lost(policy_folder: Path, whole: bool) -> None:
    llm = Llm(releases=True, whole=whole)
    engine = make(llm, policy_folder)
    await engine.rest()
    llm.calls.clear()
    assert await engine.abort() is whole
    assert llm.names() == ["abort_weight_update", *(["wake_up", "resume_generation"] if whole else [])]


async def test_an_engine_that_releases_nothing_only_pauses(policy_folder: Path) -> None:
    llm = Llm(releases=False)
    engine = make(llm, policy_folder)
    await engine.rest()
    assert llm.calls == [PAUSE]
    await engine.abort()
    assert "wake_up" not in llm.names()


async def test_the_engine_is_asked_whether_it_answers_and_how_much_it_does(policy_folder: Path) -> None:
    llm = Llm(releases=False)
    engine = make(llm, policy_folder)
    await engine.check_health()
    assert llm.calls == ["check_health", "get_weight_version"]
    assert engine.running() == 2


@pytest.mark.parametrize("versions", [1, 2])
async def test_weights_whose_commit_was_given_up_are_not_served_as_the_old_ones(
    policy_folder: Path, versions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = Llm(releases=False)
    engine = make(llm, policy_folder, adapters={"rank": 2}, adapter_versions=versions)

    async def slow(weight_version: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(llm, "finish_weight_update", slow, raising=False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.commit(5)
    # The workers end it all the same, and then have no push that is open. Adapters beside others serve no request.
    whole = await engine.abort()
    assert (whole, engine.version) == ((False, NO_VERSION) if versions == 1 else (True, 0))
    assert ("resume_generation" in llm.names()) == whole
    monkeypatch.undo()
    await engine.commit(6)
    assert await engine.abort()
    assert engine.version == 6


@pytest.mark.parametrize("versions", [1, 2])
async def test_weights_that_one_of_several_workers_could_not_load_are_not_served(
    policy_folder: Path, versions: int
) -> None:
    """Though each of them says that its own model is whole: it is the new one in some, the old one in others."""
    llm = Llm(releases=False)
    engine = make(llm, policy_folder, adapters={"rank": 2}, adapter_versions=versions)
    llm.failure = "RuntimeError: other weights meanwhile"
    with pytest.raises(Unavailable, match=r"^RuntimeError: other weights meanwhile$"):
        await engine.commit(5)
    assert (await engine.abort(), engine.version) == ((False, NO_VERSION) if versions == 1 else (True, 0))
    llm.failure = ""
    await engine.commit(6)
    assert (await engine.abort(), engine.version, engine.checksum) == (True, 6, "sum")


@pytest.mark.parametrize("known", [(True, True), (True, False)])
async def test_workers_make_room_together_before_any_of_them_receives(
    policy_folder: Path, known: tuple[bool, bool]
) -> None:
    """Each of them keeps its pieces alone only if all know them; one alone needs not be asked."""
    manifest = Manifest.of({"w": torch.zeros(2)}, 8)
    llm, fields = Llm(releases=False), asdict(manifest)
    llm.known = known
    assert await make(llm, policy_folder, tensor_parallel_size=2).receive(manifest) == "sum"
    assert llm.calls[:2] == [("knows_pieces", fields), ("make_room", fields, all(known))]
    assert llm.names()[2:] == ["update_weights", "push_outcome"]
    await make(llm, policy_folder).receive(manifest)
    assert llm.names() == ["update_weights", "push_outcome"]


@pytest.mark.parametrize(("versions", "oldest"), [(1, 13), (3, 13), (11, 10)])
async def test_checksums_are_kept_of_all_versions_that_responses_may_be_of(
    policy_folder: Path, versions: int, oldest: int
) -> None:
    engine = make(Llm(releases=False), policy_folder, adapters={"rank": 2}, adapter_versions=versions)
    for version in range(21):
        await engine.commit(version)
    assert list(engine.checksums) == list(range(oldest, 21))


class InProcesses(Llm):
    """One whose workers answer through vLLM's executor; the first cannot have its cache back while another has the
    memory."""

    def __init__(self, workers: int) -> None:
        super().__init__(releases=True)
        self.taken = True
        self._answers = [deque[tuple[Any, Any]]() for _ in range(workers)]
        executor: Any = object.__new__(MultiprocExecutor)
        executor.is_failed, executor.futures_queue = False, deque()
        executor.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
        executor.rpc_broadcast_mq = SimpleNamespace(enqueue=self._carry_out)
        executor.response_mqs = [SimpleNamespace(dequeue=self._reader(answers)) for answers in self._answers]
        self._executor = executor

    def _carry_out(self, call: tuple[Any, ...]) -> None:
        status, given = WorkerProc.ResponseStatus, {"abort_weight_update": True, "push_outcome": ("", "sum")}
        for worker, answers in enumerate(self._answers):
            if call[0] == "wake_up" and self.taken and worker == 0:
                answers.append((status.FAILURE, "out of memory"))
            else:
                answers.append((status.SUCCESS, given.get(call[0])))

    @staticmethod
    def _reader(answers: deque[tuple[Any, Any]]) -> Any:
        return lambda timeout: answers.popleft()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        try:
            return list(self._executor.collective_rpc(method, args=args))
        except RuntimeError as error:
            raise Exception(f"Call to {method} method failed: {error}") from None  # as vLLM's client does

    async def wake_up(self, tags: list[str]) -> None:
        await self.collective_rpc("wake_up")


async def asleep_after_a_commit(llm: InProcesses, folder: Path, workers: int) -> VLLMEngine:
    engine = make(llm, folder, tensor_parallel_size=workers)
    await engine.rest()
    await engine.pause("keep")
    with pytest.raises(Exception, match="out of memory"):
        await engine.commit(5)
    llm.taken = False
    return engine


async def test_an_engine_one_of_whose_workers_failed_is_not_asked_again(policy_folder: Path) -> None:
    llm = InProcesses(2)
    engine = await asleep_after_a_commit(llm, policy_folder, 2)
    # Otherwise it would be a member of each further attempt of the push, and fail it, until Serve replaces it.
    for asked in (engine.check_health, engine.abort, engine.leave):
        with pytest.raises(Unavailable, match=r"out of turn since one of them failed: Exception: .*'out of memory'"):
            await asked()
    # The second worker's answer is the one to the call that failed.
    assert await llm.collective_rpc("push_outcome") == [("", "sum"), None]


async def test_an_engine_whose_only_worker_failed_goes_on_when_it_can(policy_folder: Path) -> None:
    llm = InProcesses(1)
    engine = await asleep_after_a_commit(llm, policy_folder, 1)
    await engine.check_health()
    assert await engine.abort()
    assert llm.names()[-2:] == ["wake_up", "resume_generation"]
    assert engine.version == 5
