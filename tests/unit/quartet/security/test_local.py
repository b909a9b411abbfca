"""The owner's token: who finds it, who cannot read it, and where it is sent."""

from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from quartet.config.base import ConfigError
from quartet.security.credentials import VARIABLE, connect, token_for
from quartet.security.identity import Caller
from quartet.security.local import FOLDER, let_owner_in, own_credentials, policy_in, shut
from quartet.security.port import Port
from tests.unit.front_door import ask, front_door, outcome


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `quartet up` was called in; this process is in it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    let_owner_in(1)
    return tmp_path / FOLDER


def number(target: str) -> int:
    return int(target.rpartition(":")[2])


async def test_a_caller_in_the_folder_is_let_in_and_another_user_is_not(folder: Path) -> None:
    async with front_door(Port(policy=policy_in())) as (target, replicas):
        let_owner_in(number(target))
        async with connect(target) as channel:
            for method in ("Reward/Score", "Rollout/Generate", "Critic/Save"):
                assert (await outcome(ask(channel, method)))[0] is StatusCode.OK
        assert {caller for _, caller, _ in replicas.seen} == {Caller("owner", "trainer")}
        async with grpc.aio.insecure_channel(target) as channel:
            for method in ("Reward/Score", "Rollout/Generate", "Critic/Save", "Reward/Info"):
                code, details = await outcome(ask(channel, method))
                assert code is StatusCode.UNAUTHENTICATED
                assert details.endswith("or call from the folder in which `quartet up` ran")
        assert len(replicas.seen) == 3


async def test_a_token_that_is_gone_is_named(folder: Path) -> None:
    async with front_door(Port(policy=policy_in())) as (target, _):
        let_owner_in(number(target))
        async with connect(target) as channel:
            (folder / "token").unlink()
            expected = r"/token: the token for this service cannot be read \(No such file .* are the services up\?"
            with pytest.raises(ConfigError, match=expected):
                await ask(channel, "Reward/Score")


async def test_a_cleaner_that_removes_the_folder_ends_no_run(folder: Path) -> None:
    async with front_door(Port(policy=policy_in())) as (target, _):
        let_owner_in(number(target))
        async with connect(target) as channel:
            assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
            shut(folder)
            # Streams too, which have not been asked for before.
            for method in ("Reward/Score", "Rollout/Generate"):
                assert (await outcome(ask(channel, method)))[0] is StatusCode.OK


def test_other_users_cannot_read_it(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()} == dict.fromkeys(
        ("token", "policy.yaml", "owner.yaml", "credentials.yaml"), 0o600
    )


async def test_it_is_sent_to_the_port_that_it_is_for_and_to_no_other(folder: Path) -> None:
    async with front_door(Port(local="open")) as (target, replicas), connect(target) as channel:
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        [(_, caller, metadata)] = replicas.seen
        assert (caller.name, dict(metadata).get("authorization")) == ("anonymous", None)


async def test_from_elsewhere_the_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front_door(Port(policy=folder / "policy.yaml")) as (target, _):
        let_owner_in(number(target), folder)
        monkeypatch.chdir("/")
        for environment, code in (({}, StatusCode.UNAUTHENTICATED), ({VARIABLE: str(folder)}, StatusCode.OK)):
            async with connect(target, environment) as channel:
                assert (await outcome(ask(channel, "Reward/Score")))[0] is code


@pytest.mark.parametrize(
    ("named", "token"),
    [
        ("targets: {10.0.0.5:1: elsewhere}", "the folder's"),  # it says nothing of this port
        ("{plaintext: true, token_file: token, targets: {10.0.0.5:1: elsewhere}}", "mine"),
        ("{plaintext: true, targets: {127.0.0.1:1: mine.yaml}}", "mine"),
        ("{}", None),  # TLS, and no token
    ],
)
def test_credentials_that_are_named_come_first_unless_they_are_of_other_ports(
    folder: Path, tmp_path: Path, named: str, token: str | None
) -> None:
    (folder / "token").write_text("the folder's\n")
    (tmp_path / "token").write_text("mine\n")
    (tmp_path / "mine.yaml").write_text("{plaintext: true, token_file: token}")
    (tmp_path / "named.yaml").write_text(named)
    assert token_for("127.0.0.1:1", {VARIABLE: str(tmp_path / "named.yaml")}) == token
    assert token_for("127.0.0.1:1", {}) == "the folder's"


def test_a_folder_without_credentials_is_as_none(folder: Path) -> None:
    (folder / "credentials.yaml").unlink()
    assert own_credentials() is None


def test_it_is_made_once_and_goes_with_the_head(folder: Path) -> None:
    first = (folder / "token").read_text()
    let_owner_in(2)
    assert (folder / "token").read_text() == first
    shut(folder)
    assert (folder.exists(), own_credentials()) == (False, None)
    let_owner_in(2)
    assert (folder / "token").read_text() != first


def test_what_another_user_left_in_a_shared_folder_is_not_followed(folder: Path) -> None:
    assert own_credentials(user=folder.stat().st_uid)
    assert own_credentials(user=folder.stat().st_uid + 1) is None


def test_a_folder_that_others_can_write_to_is_not_followed(folder: Path) -> None:
    folder.chmod(0o770)
    assert own_credentials() is None
