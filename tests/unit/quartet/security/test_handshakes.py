"""Connections that break off their TLS handshake end no process, keep no call out and fill no log."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from grpc import StatusCode

from orchestrator.deployment.head import _environment
from quartet.security.keys.folder import Keys
from tests.configuration import REPO
from tests.unit.front_door import ask, channel_of, outcome

pytestmark = pytest.mark.processes
BEGINNINGS = (b"\x16\x03\x01", b"P", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"")
TOGETHER = 200


@contextmanager
def door(policy: Path, log: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Target and process of a front door, with the environment that `quartet up` gives to Serve's proxy."""
    environment = os.environ | {"PYTHONPATH": str(REPO), "GRPC_VERBOSITY": _environment()["GRPC_VERBOSITY"]}
    command = [sys.executable, "-m", "tests.unit.door_process", str(policy)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        assert process.stdout
        yield process.stdout.readline().strip(), process


def break_off(target: str, beginning: bytes) -> None:
    """Opens connections, sends the beginning on each, and closes all."""
    host, _, port = target.rpartition(":")
    opened = [socket.create_connection((host, int(port)), timeout=30) for _ in range(TOGETHER)]
    for connection in opened:
        with closing(connection):
            connection.sendall(beginning)


async def test_five_thousand_broken_handshakes_end_no_process_and_fill_no_log(tmp_path: Path) -> None:
    """gRPC's core aborted, within two thousand of them, while it was handed the same certificates at each."""
    keys, log = Keys(tmp_path / "keys", days=1), tmp_path / "errors"
    keys.make(["127.0.0.1"], {"run-a": "trainer"}, tokens=False)
    with door(keys.policy, log) as (target, process):
        async with channel_of(keys, "run-a", target) as channel:
            for number in range(25):
                await asyncio.to_thread(break_off, target, BEGINNINGS[number % len(BEGINNINGS)])
                assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        assert process.poll() is None
    assert process.returncode == 0
    assert "Handshake failed" not in log.read_text()
