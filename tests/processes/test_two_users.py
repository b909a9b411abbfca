"""Two users of this machine who have a quartet each, at the same time: two user ids, with folders of their own."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.deployment.cluster import STATE, TOKEN
from orchestrator.deployment.listeners import free_ports
from quartet.security.local import FOLDER
from tests.configuration import configuration, write_prompts
from tests.models import make_policy
from tests.users import NEEDS, User, possible, readable, users

pytestmark = [
    pytest.mark.exhaustive,  # two heads; one user and one who is not: tests/integration/test_closed.py
    pytest.mark.skipif(not possible(), reason=NEEDS),
]

CALL = """
import asyncio, sys
from quartet.security.credentials import connect
from quartet.wire.errors import ServiceError
from services.reward.client import RewardClient

async def main():
    async with RewardClient(connect(sys.argv[1])) as reward:
        try:
            info = await reward.info(20)
            scores = await reward.score_texts(["w5 w6"], ["w7 w8 w9"], timeout_s=20)
            print(info.identity.name, *(f"{score:.1f}" for score in scores.values))
        except ServiceError as error:
            print(type(error).__name__)

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A user, whose quartet runs, and where."""

    user: User
    target: str

    @property
    def secrets(self) -> dict[str, Path]:
        """Files, folders and sockets that only this user may read."""
        head = json.loads((self.user.folder / STATE).read_text())
        access, temporary = self.user.folder / FOLDER, Path("/tmp", head["name"])
        state = self.user.folder / STATE
        named = [access, access / "token", state.with_name(TOKEN), state, temporary]
        named += sorted(temporary.glob("ray/session_*/sockets/*"))
        named += sorted(temporary.glob("ray/session_latest/logs"))
        return {str(path): path for path in named}

    def calls(self, target: str) -> str:
        """The answer that a program of this user, in this user's folder, gets at a port."""
        return self.user.program(CALL, target).strip()


def _write(user: User) -> Path:
    """A file with the reward service alone; its scorer is a function, and its tokenizer the user's own."""
    model = make_policy(user.folder / "model", kind="llama", tied=False)
    http, port = free_ports(2)
    raw = configuration(model, model, write_prompts(user.folder), http, port)
    [reward] = [application for application in raw["applications"] if application["name"] == "reward"]
    reward["args"] = {"tokenizer": str(model), "scorer": {"kind": "function", "function": "tests.scorers:words"}}
    raw["applications"] = [reward]
    del raw["orchestrator"]
    path = user.folder / "reward.yaml"
    path.write_text(yaml.safe_dump(raw))
    user.take()
    return path


@pytest.fixture
def callers() -> Iterator[list[User]]:
    with users(61001, 61002) as made:
        yield made


async def test_each_has_a_quartet_and_neither_has_the_others(callers: list[User]) -> None:
    with ExitStack() as down:
        places = []
        for user in callers:
            config = _write(user)
            down.callback(user.quartet, "down")
            up = await asyncio.to_thread(user.quartet, "up", str(config))
            assert up.returncode == 0, up.stdout + up.stderr
            port = yaml.safe_load(config.read_text())["grpc_options"]["port"]
            places.append(Place(user, f"127.0.0.1:{port}"))
        for own, other in (places, reversed(places)):
            assert {process.uids().real for process in _family(own)} == {own.user.uid}
            assert own.calls(own.target) == "function:tests.scorers:words 1000.3"
            assert own.calls(other.target) == "Unauthenticated"
            assert len(other.secrets) > 6
            assert readable(other.user, other.secrets) == set(other.secrets)
            assert readable(own.user, other.secrets) == set()
        families = [process for place in places for process in _family(place)]
        first, second = places
        assert first.user.quartet("down").returncode == 0
        assert second.calls(second.target) == "function:tests.scorers:words 1000.3"
        assert second.user.quartet("down").returncode == 0
        _, alive = psutil.wait_procs(families, timeout=30)
        assert alive == []


def _family(place: Place) -> list[psutil.Process]:
    head = psutil.Process(json.loads((place.user.folder / STATE).read_text())["pid"])
    return [head, *head.children(recursive=True)]
