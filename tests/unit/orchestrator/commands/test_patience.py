"""The patience of a start: what is waited for, what is told, and where it ends."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands import patience as module
from orchestrator.commands.patience import Patience, reached, serves
from orchestrator.deployment.cluster import Cluster
from quartet.config.base import ConfigError
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, LeaseLost, NotFound, Unavailable, leaves
from tests.unit.virtual_time import in_virtual_time

HEAD = Cluster(1, 1.0, "127.0.0.1:1", "http://127.0.0.1:2", "token", "folder", "secret")


def now() -> float:
    return asyncio.get_running_loop().time()


class Service:
    """Answers from `up_s` on; fails at once until then, or is silent until the deadline of each call."""

    def __init__(self, up_s: float, *, silent: bool = False) -> None:
        self._up_s, self._silent = up_s, silent
        self.tries: list[tuple[float, float]] = []

    async def info(self, try_s: float) -> str:
        self.tries.append((round(now(), 1), try_s))
        if now() >= self._up_s:
            return "up"
        if self._silent:
            await asyncio.sleep(try_s)
            raise DeadlineExceeded(f"critic.Info: no answer within {try_s:g} s")
        raise ExceptionGroup("", [Unavailable("critic.Info: failed to connect")])


@in_virtual_time
async def test_what_is_being_replaced_is_asked_again_and_its_name_is_told_every_ten_seconds() -> None:
    notes: list[str] = []
    service = Service(35)
    assert await Patience(300, 30, notes.append)(service.info) == "up"
    assert 35 <= now() < 38
    assert notes[0] == "waiting up to 300 s: critic.Info: failed to connect"
    assert len(notes) == 4
    assert {note.partition(": ")[2] for note in notes} == {"critic.Info: failed to connect"}


@in_virtual_time
async def test_a_silent_service_gets_longer_and_longer_and_the_user_is_told_during_a_try() -> None:
    notes: list[tuple[int, str]] = []
    service = Service(60, silent=True)
    await Patience(300, 30, lambda text: notes.append((round(now()), text.partition(": ")[2])))(service.info)
    assert [try_s for _, try_s in service.tries] == [3, 6, 12, 24, 30, 30]
    assert notes[0][0] == 3
    assert max(later - earlier for (earlier, _), (later, _) in pairwise(notes)) <= 12
    assert all("critic.Info: no answer within" in reason for _, reason in notes)


@in_virtual_time
async def test_a_first_try_is_told_of_by_the_name_of_what_is_waited_for() -> None:
    """A try may keep to its seconds, as calls of services do, or not; and the start may be old by then."""
    notes: list[str] = []
    patience = Patience(300, 30, lambda text: notes.append(text.partition(": ")[2]))
    await asyncio.sleep(100)
    await patience(Service(102, silent=True).info)
    assert notes == ["critic.Info: no answer within 3 s"]
    notes.clear()

    async def start(_: float) -> None:
        await asyncio.sleep(35)

    await patience(start, reason="Ray has not started the registry yet")
    assert notes == ["Ray has not started the registry yet"] * 3


@in_virtual_time
async def test_the_deadline_ends_it_with_that_name() -> None:
    patience = Patience(45, 30, lambda text: None)
    with pytest.raises(
        Unavailable, match=r"^critic\.Info: failed to connect; waited 45 s \(orchestrator\.timeouts\.start_s\)$"
    ):
        await patience(Service(1e9).info)
    assert 42 < now() < 46
    # The waits of one start share it.
    with pytest.raises(Unavailable):
        await patience(Service(1e9).info)
    assert now() < 46


@in_virtual_time
async def test_what_is_asked_after_the_deadline_gets_one_try() -> None:
    """A start may have waited longer for another run's end."""
    patience, service = Patience(45, 30, lambda text: pytest.fail(text)), Service(0)
    await asyncio.sleep(100)
    assert await patience(service.info) == "up"
    assert service.tries == [(100, 3)]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("dtype"),
        InvalidArgument("ttl_s"),
        NotFound("critic"),
        LeaseLost("lease: another run"),
        ExceptionGroup("", [Unavailable("rollout"), NotFound("critic")]),
    ],
)
@in_virtual_time
async def test_what_time_does_not_mend_is_raised_at_once(error: Exception) -> None:
    async def ask(try_s: float) -> None:
        raise error

    with pytest.raises(Exception) as caught:  # noqa: PT011  # any of these
        await Patience(300, 30, lambda text: pytest.fail(text))(ask)
    assert leaves(caught.value) == leaves(error)
    assert now() == 0


class Nothing:
    """Services at which nothing accepts connections until `up_s`."""

    def __init__(self, up_s: float = 1e9) -> None:
        self._up_s = up_s

    async def reach(self, config: Any, file: Path) -> None:
        await asyncio.sleep(3)
        if now() < self._up_s:
            raise Unavailable(f"no answer at 127.0.0.1:1; are the services up? quartet up {file}")


class File:
    """A deployment of which only the path is used."""

    orchestrator, path = None, Path("my.yaml")


async def reach(services: Any, notes: list[str]) -> None:
    file: Any = File()
    await reached(services, file, Patience(300, 30, notes.append))


@in_virtual_time
async def test_where_nothing_runs_the_first_try_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module, "running", lambda: None)
    notes: list[str] = []
    with pytest.raises(Unavailable, match=r"are the services up\? quartet up my\.yaml$"):
        await reach(Nothing(), notes)
    assert (now(), notes) == (3, [])


@in_virtual_time
async def test_a_cluster_that_the_environment_names_is_waited_for_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    notes: list[str] = []
    with pytest.raises(Unavailable, match=r"are the services up\? quartet up my\.yaml$"):
        await reach(Nothing(), notes)
    assert module.HEAD_S <= now() < module.HEAD_S + 6
    assert len(notes) == 3
    await reach(Nothing(now() + 20), notes)


async def test_a_head_that_is_alive_speaks_for_its_services_unless_serve_knows_of_none() -> None:
    """Serve says nothing, or that it has none, while its controller is replaced: for a moment that means nothing."""

    def silent(head: Cluster) -> dict[str, Any]:
        raise TimeoutError

    assert await serves(HEAD, 1e9, lambda head: {"rollout": {}})
    assert await serves(HEAD, 1e9, silent)
    assert await serves(HEAD, module.HEAD_S - 1, lambda head: {})
    assert not await serves(HEAD, module.HEAD_S, lambda head: {})
    assert not await serves(None, 0, silent)
