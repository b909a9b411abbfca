"""The folder that `quartet keys` makes: the policy file, and the certificates and tokens of callers."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.keys import make_keys
from quartet.config.base import ConfigError
from quartet.security.credentials import VARIABLE, connect
from quartet.security.keys.folder import Keys
from quartet.security.policy import digest, load_policy
from quartet.security.port import HOST_VARIABLE, HTTP_VARIABLE, LOCAL_VARIABLE, POLICY_VARIABLE, Port

TOKEN = {"role": "trainer", "tokens": [digest("secret")]}


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_command_makes_a_policy_that_opens_a_port(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    arguments = ["keys", str(keys), "--host", "10.0.0.5", "--client", "run-a=trainer", "--client", "e=judge-client"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    policy = Port(host="0.0.0.0", policy=keys / "policy.yaml").checked()
    assert policy is not None
    assert {name: identity.role for name, identity in policy.identities.items()} == {
        "run-a": "trainer",
        "e": "judge-client",
    }


def test_making_keys_again_keeps_what_was_set_by_hand(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", days=1)
    keys.make(["10.0.0.5"], {"e": "judge-client"}, tokens=False)
    values = yaml.safe_load(keys.policy.read_text())
    values["identities"]["e"]["applications"] = ["reward"]
    values["limits"] = {"other_message_bytes": 1000}
    write(keys.policy, values)
    server = (keys.folder / "server/server.pem").read_bytes()
    keys.make([], {"run-a": "trainer"}, tokens=False)
    policy = load_policy(keys.policy)
    assert policy.identities["e"].applications == ("reward",)
    assert policy.limits.other_message_bytes == 1000
    assert policy.limits.of("/quartet.v1.Reward/Score") == 2 << 20
    assert (keys.folder / "server/server.pem").read_bytes() == server


@pytest.mark.parametrize("name", ["../run", "", "a b", "x" * 65, "anonymous"])
def test_names_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        Keys(tmp_path / "keys", days=1).make(["10.0.0.5"], {name: "trainer"}, tokens=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["a b", "http://a.org", "a.org:443", "a..org", ""])
def test_hosts_that_are_none_are_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--host: '{host}': should be a name such as"):
        list(make_keys(tmp_path / "keys", ["me=trainer"], [host], tokens=False, days=1, withdraw=False))
    hosts = ["gpu-1.a.org", "*.b.org", "::1"]
    list(make_keys(tmp_path / "fine", ["me=trainer"], hosts, tokens=False, days=1, withdraw=False))


def test_keys_are_withdrawn_from_callers_that_are_named(tmp_path: Path) -> None:
    """A command that withdraws nothing does not end as if it had."""
    list(make_keys(tmp_path, ["me=trainer"], ["::1"], tokens=False, days=1, withdraw=False))
    before = (tmp_path / "policy.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"^--withdraw: name the callers"):
        list(make_keys(tmp_path, [], ["::1"], tokens=False, days=1, withdraw=True))
    with pytest.raises(ConfigError, match=r"^--withdraw: .*policy\.yaml has no caller mee; its callers are me$"):
        list(make_keys(tmp_path, ["me=trainer", "mee=trainer"], [], tokens=False, days=1, withdraw=True))
    assert (tmp_path / "policy.yaml").read_bytes() == before
    assert not (tmp_path / "clients" / "mee").exists()


def test_a_folder_of_keys_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "keys", Path("/proc/none/keys")):
        with pytest.raises(ConfigError, match=rf"^{folder}.*: cannot be made or read: |^/proc/none: cannot be made"):
            list(make_keys(folder, ["me=trainer"], ["127.0.0.1"], tokens=False, days=1, withdraw=False))


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="holds something else"):
        Keys(tmp_path, days=1).make(["10.0.0.5"], {"a": "trainer"}, tokens=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "reward.internal", "192.0.2.2"])
def test_off_loopback_nothing_opens_without_tls_and_a_policy(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="no policy says who may call; set security"):
        Port(host=host).checked()
    plain = write(tmp_path / "policy.yaml", {"identities": {"a": TOKEN}})
    with pytest.raises(ConfigError, match="tls: required"):
        Port(host=host, policy=plain).checked()
    assert Port(policy=plain).checked() is not None


def test_the_port_travels_in_the_environment(tmp_path: Path) -> None:
    port = Port(host="10.0.0.5", policy=tmp_path / "policy.yaml")
    assert Port.of(port.environment) == port
    assert Port.of({}) == Port()
    given = {HOST_VARIABLE: "127.0.0.1", POLICY_VARIABLE: "", LOCAL_VARIABLE: "token", HTTP_VARIABLE: ""}
    assert Port().environment == given
    for same in (Port(), Port(local="open"), Port(http=True)):
        assert Port.of(same.environment) == same


def test_on_loopback_nothing_opens_either_until_something_says_who_may_call(tmp_path: Path) -> None:
    says = r"QUARTET_POLICY: unset, so every user of this machine could call\. .* or QUARTET_LOCAL=open where"
    with pytest.raises(ConfigError, match=says):
        Port().opened()
    assert Port(local="open").opened() is None
    plain = write(tmp_path / "policy.yaml", {"identities": {"a": TOKEN}})
    assert Port(policy=plain).opened() is not None
    with pytest.raises(ConfigError, match="is open to other machines"):
        Port(host="0.0.0.0", local="open").opened()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"identities": {}}, "identities: should have 1 or more items"),
        ({"identities": {"a": {"role": "king"}}}, "identities.a.role: should be 'trainer'"),
        ({"identities": {"a": {"role": "trainer"}}}, "none has tokens, and without tls.client_ca no certificate"),
        ({"identities": {"a": TOKEN, "b": TOKEN}}, "the same entry of tokens is given more than once"),
        ({"identities": {"a": TOKEN | {"tokens": ["secret"]}}}, "should be a SHA-256 digest"),
        ({"identities": {"a": TOKEN | {"certificates": ["pager.corp"]}}}, "certificates.0: should be a URI, such as"),
        (
            {"identities": {"a": TOKEN | {"not_before": "2031-05-01 12:00"}}},
            "not_before: should be a time",
        ),
        (
            {"identities": {"a": TOKEN | {"not_before": "May"}}},
            "not_before: should be a time with its zone",
        ),
        ({"identities": {"anonymous": TOKEN}}, "is for callers without credentials"),
        ({"identities": {"a": TOKEN}, "limit": {}}, "did you mean limits?"),
        ({"identities": {"a": TOKEN}, "tls": {"certificate": "no.pem", "key": "no.key"}}, "no.pem cannot be read"),
    ],
)
def test_a_wrong_policy_is_refused_by_its_field(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(write(tmp_path / "policy.yaml", values))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("place", "mode"),
    [("policy.yaml", 0o620), ("policy.yaml", 0o602), ("", 0o720), ("server/server.pem", 0o622), ("ca", 0o703)],
)
def test_what_others_can_write_to_makes_them_no_callers(tmp_path: Path, place: str, mode: int) -> None:
    keys = Keys(tmp_path / "keys", days=1)
    keys.make(["10.0.0.5"], {"a": "trainer"}, tokens=False)
    changed = keys.folder / place
    before = changed.stat().st_mode
    changed.chmod(mode)
    with pytest.raises(ConfigError, match=f"{changed} can be written to by other users; chmod go-w {changed}"):
        load_policy(keys.policy)
    changed.chmod(before)
    load_policy(keys.policy)


def test_a_policy_of_another_user_or_in_its_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of one's own may lead to it. In a folder with the sticky bit only the owner can replace the file."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    file = write(theirs / "policy.yaml", {"identities": {"a": TOKEN}})
    link = tmp_path / "policy.yaml"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match=f"{theirs} can be written to by other users"):
        load_policy(link)
    theirs.chmod(0o1777)
    load_policy(link)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    stat = Path.stat

    def owned(path: Path, **how: bool) -> os.stat_result:
        status = stat(path, **how)
        return os.stat_result((*status[:4], own + 2 if path == file else own + 1, *status[5:10]))

    monkeypatch.setattr(Path, "stat", owned)
    with pytest.raises(ConfigError, match=f"{file} belongs to another user"):
        load_policy(file)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", days=1)
    keys.make(["10.0.0.5"], {"a": "trainer"}, tokens=False)
    (keys.folder / "server/server.key").chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by other users; chmod 600"):
        load_policy(keys.policy)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"plaintext": True, "token_file": "token"}, "10.0.0.5:1 is not on loopback"),
        ({"plaintext": True, "token_file": "none"}, "none cannot be read"),
        ({"certificate": "client.pem"}, "certificate, key: give both, or neither"),
        ({"ca": "none.pem"}, "none.pem cannot be read"),
        ({"plaintext": True, "ca": "ca.pem"}, "needs no ca"),
        ({"targets": {"10.0.0.5:1": "elsewhere"}}, "elsewhere does not exist"),
        ({"cert": "x"}, "unknown field"),
    ],
)
async def test_credentials_that_cannot_work_are_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    (tmp_path / "token").write_text("secret")
    with pytest.raises(ConfigError) as caught:
        connect("10.0.0.5:1", {VARIABLE: str(write(tmp_path / "credentials.yaml", values))})
    assert says in str(caught.value)


async def test_a_credentials_file_that_is_not_there_is_an_error_and_not_plaintext(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"QUARTET_CREDENTIALS: .* does not exist"):
        connect("10.0.0.5:1", {VARIABLE: str(tmp_path / "nothing")})


@pytest.mark.parametrize("tokens", [False, True])
def test_keys_are_for_their_owner_alone(tmp_path: Path, tokens: bool) -> None:
    keys = Keys(tmp_path / "keys", days=1)
    before = os.umask(0)
    try:
        keys.make(["127.0.0.1"], {"run-a": "trainer", "run-b": "trainer"}, tokens=tokens)
    finally:
        os.umask(before)
    actual = [keys.folder, *keys.folder.rglob("*")]
    modes = {path.relative_to(keys.folder).as_posix(): path.stat().st_mode & 0o777 for path in actual}
    assert {modes[name] for name in ("ca/ca.key", "server/server.key", "policy.yaml")} == {0o600}
    assert {mode for path, mode in zip(actual, modes.values(), strict=True) if path.is_dir()} == {0o700}
    assert {mode for path, mode in zip(actual, modes.values(), strict=True) if path.is_file()} == {0o600}
    written = [path.read_text() for path in actual if path.name == "token"]
    assert not any(token in keys.policy.read_text() for token in written)
    assert all(a != b for a, b in itertools.pairwise(written))
