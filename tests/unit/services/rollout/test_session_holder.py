"""The actor that holds the sessions, as a replica asks it: what it refuses arrives as it was raised."""

import asyncio
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from quartet.wire.errors import NotFound, ResourceExhausted, Unavailable
from quartet.wire.http_errors import http_error
from services.rollout import sessions
from services.rollout.session_holder import HeldSessions, SessionHolder


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldSessions:
    """Sessions whose holder is in this process; what goes to it and comes from it is pickled, as Ray does."""
    holder = SessionHolder()

    async def ask(method: str, *args: Any) -> Any:
        return pickle.loads(pickle.dumps(holder.ask(method, *pickle.loads(pickle.dumps(args)))))

    actor = SimpleNamespace(ask=SimpleNamespace(remote=ask))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(HeldSessions, "_started", HeldSessions._existing)
    return HeldSessions("rollout", "t")


async def test_a_refusal_asks_for_its_pause_once_and_tells_callers_over_http_nothing_else(
    held: HeldSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 2)
    await held.ask("start", "me", "s1", "t")
    with pytest.raises(ResourceExhausted) as full:
        await held.ask("start", "me", "s2", "t")
    assert full.value.retry_after_s == sessions.PAUSE_S
    assert str(full.value) == "me has 1 sessions, and the most is 1 (retry after 5000 ms)"
    assert b"retry after" not in http_error(full.value).body


async def test_other_refusals_are_what_they_are(held: HeldSessions) -> None:
    with pytest.raises(NotFound, match="s is not here"):
        await held.ask("end", "me", "s")


def unanswered(error: Exception) -> Any:
    """An actor from which no answer comes."""

    async def ask(method: str, *args: Any) -> Any:
        raise error

    return SimpleNamespace(ask=SimpleNamespace(remote=ask))


async def test_a_replica_that_knows_a_dead_holder_asks_the_one_that_another_replica_has_started(
    held: HeldSessions,
) -> None:
    other = HeldSessions("rollout", "t")
    other._holder = unanswered(ActorDiedError())
    await held.ask("start", "me", "s", "t")
    assert await other.ask("end", "me", "s") == 0
    other._holder = unanswered(ActorDiedError())
    with pytest.raises(NotFound, match="gone is not here"):
        await other.ask("end", "me", "gone")


async def test_a_holder_that_is_dead_by_its_name_too_and_one_that_is_silent_are_not_asked_again(
    held: HeldSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    held._holder = unanswered(ActorUnavailableError("no answer", None))
    with pytest.raises(Unavailable, match="has died"):
        await held.ask("end", "me", "s")
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: unanswered(ActorDiedError()))
    with pytest.raises(Unavailable, match="tokens are lost"):
        await held.ask("end", "me", "s")


@pytest.mark.parametrize("first", [("start", "me", "s", "t"), ("start_all", "me", "t", [("s", "", {})])])
async def test_the_first_sessions_start_their_holder(
    held: HeldSessions, monkeypatch: pytest.MonkeyPatch, first: tuple[Any, ...]
) -> None:
    actor = held._existing()

    def missing(name: str, namespace: str) -> Any:
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr(ray, "get_actor", missing)
    with pytest.raises(NotFound, match="no session was started here"):
        await held.ask("end", "me", "s")
    monkeypatch.setattr(HeldSessions, "_started", lambda self: actor)
    await held.ask(*first)
    assert await held.ask("end", "me", "s") == 0


async def test_a_search_that_ray_does_not_answer_is_made_once_and_holds_up_nothing_else(
    held: HeldSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches, let = [], threading.Event()

    def silent(name: str, namespace: str) -> Any:
        searches.append(name)
        let.wait(30)
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr(ray, "get_actor", silent)
    asking = [asyncio.create_task(held.ask("end", "me", f"s{number}")) for number in range(64)]
    counting = asyncio.create_task(held.counts())
    try:
        while not searches:
            await asyncio.sleep(0.01)
        # The event loop's own threads are free for others.
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 30) == 7
        assert len(searches) == 1
    finally:
        let.set()
    said = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(each) for each in said] == [NotFound] * 64
    assert await counting == {}
