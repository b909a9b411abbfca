"""Held outputs under the asynchronous scheduling of a GPU: a batch is queued before the one before it is read. And in
step, as on a CPU."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState

from quartet.seams.vllm import drain
from services.rollout.vllm import scheduler as scheduler_module
from services.rollout.vllm.scheduler import AT_ONCE_KEY, STREAMED_KEY
from tests.unit.queued_engine import EACH, QueuedEngine

NEW = 12


@pytest.fixture(params=["V1", "V2", "in step"])
def engine(request: pytest.FixtureRequest, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> QueuedEngine:
    """One of each kind, whose responses are held until something else sends them."""
    monkeypatch.setattr(scheduler_module, "PARTS_S", 3600.0)
    made = QueuedEngine(policy_folder, v2=request.param == "V2", queued=request.param != "in step")
    assert made.core.batch_queue_size == (1 if request.param == "in step" else 2)
    return made


def whole(received: list[tuple[str, list[int], list[float], str, bool]], name: str) -> list[int]:
    """Tokens of a response, each with its log-prob, and labelled with the weights that sampled it."""
    tokens: list[int] = []
    for asked, ids, logprobs, version, _ in received:
        if asked == name:
            assert {token // EACH for token in ids} <= {int(version)}
            assert logprobs == [-float(token) for token in ids]
            tokens += ids
    return tokens


@pytest.mark.parametrize("cleared", [True, False])
def test_a_pause_sends_all_that_was_sampled_with_the_old_weights(engine: QueuedEngine, cleared: bool) -> None:
    for name, prompt in (("a", 3), ("b", 40)):
        engine.ask(name, prompt, NEW)
    engine.turn(5)
    assert engine.most_queued == engine.core.batch_queue_size - 1  # a full queue is read at once
    assert engine.received() == []
    turns = engine.pause(clear_cache=cleared)
    assert turns <= 3
    assert not engine.core.batch_queue
    before = engine.received()
    sampled = {name: len(whole(before, name)) for name in "ab"}
    assert sampled == {name: engine.workers._sampled[name] for name in "ab"}
    assert all(0 < count < NEW for count in sampled.values())
    # Nothing moves during the pause, and new requests wait.
    engine.ask("c", 5, NEW)
    engine.turn(5)
    assert engine.received() == []
    engine.change_weights(1)
    engine.resume()
    engine.turn(60)
    after = engine.received()
    for name in "abc":
        old = sampled.get(name, 0)
        assert whole(before + after, name) == [*range(old), *range(EACH + old, EACH + NEW)]
        assert [last for asked, *_, last in after if asked == name] == [True]
    assert not engine.core.has_work()
    assert engine.free_blocks() == engine.free


async def test_requests_that_come_while_others_end_wait_for_the_new_weights(engine: QueuedEngine) -> None:
    engine.ask("a", 3, NEW)
    engine.turn(3)
    drained = asyncio.create_task(drain(SimpleNamespace(engine_core=engine)))
    await asyncio.sleep(0)
    assert engine.core.scheduler.pause_state == PauseState.PAUSED_NEW
    engine.ask("b", 3, NEW)
    assert not drained.done()
    engine.turn(60)
    await drained
    before = engine.received()
    assert [(name, last) for name, *_, last in before] == [("a", True)]
    assert whole(before, "a") == list(range(NEW))
    engine.change_weights(1)
    engine.resume()
    engine.turn(60)
    assert whole(engine.received(), "b") == list(range(EACH, EACH + NEW))


def test_pauses_may_follow_one_another_at_every_step(engine: QueuedEngine) -> None:
    received = []
    for name, prompt in (("a", 3), ("b", 40), ("c", 1)):
        engine.ask(name, prompt, NEW)
    for version in range(1, 40):
        engine.turn(version % 4)
        engine.pause(clear_cache=version % 2 == 0)
        received += engine.received()
        engine.change_weights(version)
        engine.resume()
    engine.turn(60)
    received += engine.received()
    for name in "abc":
        assert [token % EACH for token in whole(received, name)] == list(range(NEW))
    assert engine.free_blocks() == engine.free


@pytest.mark.parametrize("key", [AT_ONCE_KEY, STREAMED_KEY])
def test_what_somebody_reads_along_is_not_held_back(
    engine: QueuedEngine, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MOST_MESSAGES", float("inf"))
    engine.ask("read", 3, NEW, key)
    engine.ask("held", 3, NEW)
    received = []
    for _ in range(5):
        engine.turn(1)
        received += engine.received()
    assert {name for name, *_ in received} == {"read"}
    assert [ids for _, ids, *_ in received] == [[token] for token in range(len(received))]
    assert len(received) >= 3
    engine.turn(60)
    received += engine.received()
    assert [len(whole(received, name)) for name in ("read", "held")] == [NEW, NEW]
    assert engine.free_blocks() == engine.free


def test_with_many_that_are_streamed_tokens_come_several_at_a_time(
    engine: QueuedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MOST_MESSAGES", 2 / 3600)
    for name in "ab":
        engine.ask(name, 3, NEW, STREAMED_KEY)
    engine.turn(7)
    received = engine.received()
    assert [ids for _, ids, *_ in received] == [[0], [0]]  # the first of each comes at once
    engine.pause(clear_cache=True)
    before = engine.received()
    assert all(1 < len(ids) < NEW for _, ids, *_ in before)
    engine.change_weights(1)
    engine.resume()
    engine.turn(60)
    after = engine.received()
    assert [(len(before), len(after))] == [(2, 2)]  # the last too
    for name in "ab":
        assert [token % EACH for token in whole(received + before + after, name)] == list(range(NEW))
    assert engine.core.scheduler._due == {}
    engine.ask("left", 3, NEW, STREAMED_KEY)
    engine.turn(5)
    engine.abort("left")
    engine.turn(2)
    assert engine.core.scheduler._due == engine.core.scheduler._held == {}


def test_requests_that_ask_for_more_logprobs_join_those_that_ask_for_fewer(engine: QueuedEngine) -> None:
    """The arrays of vLLM are wider in the steps that an evaluation shares with a run."""
    engine.ask("run", 3, NEW)
    engine.turn(4)
    for name, listed in (("evaluation", 1), ("other", 5)):
        engine.ask(name, 3, 2, listed=listed)
    engine.turn(60)
    received = engine.received()
    assert [whole(received, name) for name in ("run", "other")] == [[*range(NEW)], [0, 1]]
    assert [last for *_, last in received] == [True] * 3
    assert engine.free_blocks() == engine.free


def test_what_is_aborted_leaves_nothing_held_and_no_other_response_changed(engine: QueuedEngine) -> None:
    for name in "abc":
        engine.ask(name, 4, NEW)
    engine.turn(5)
    engine.abort("a")
    engine.turn(2)
    engine.pause(clear_cache=True)
    received = engine.received()
    assert {name for name, *_ in received} == {"b", "c"}
    # As a push with `in_flight: abort` does.
    engine.abort("b")
    engine.change_weights(1)
    engine.resume()
    engine.turn(60)
    received += engine.received()
    assert [name for name, *_, last in received if last] == ["c"]
    assert [token % EACH for token in whole(received, "c")] == list(range(NEW))
    assert engine.core.scheduler._held == {}
    assert not engine.core.has_work()
    assert engine.free_blocks() == engine.free


def test_an_abort_of_all_ends_a_pause_that_still_waits(engine: QueuedEngine) -> None:
    engine.ask("a", 4, NEW)
    engine.turn(5)
    engine.abort("a")
    assert engine.pause(clear_cache=True) <= 3
    assert engine.received() == []
    engine.resume()
    engine.ask("b", 4, NEW)
    engine.turn(60)
    assert whole(engine.received(), "b") == list(range(NEW))
