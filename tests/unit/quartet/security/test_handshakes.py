"""Connections that break off their TLS handshake end no process, keep no call out and fill no log."""

import asyncio
import socket
from contextlib import closing
from pathlib import Path

import pytest
from grpc import StatusCode

from tests.unit.door_process import door
from tests.unit.front_door import ask, channel_of, made_keys, outcome

pytestmark = pytest.mark.processes
BEGINNINGS = (b"\x16\x03\x01", b"P", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"")
TOGETHER = 200


def break_off(target: str, beginning: bytes) -> None:
    """Opens connections, sends the beginning on each, and closes all."""
    host, _, port = target.rpartition(":")
    opened = [socket.create_connection((host, int(port)), timeout=30) for _ in range(TOGETHER)]
    for connection in opened:
        with closing(connection):
            connection.sendall(beginning)


async def test_five_thousand_broken_handshakes_end_no_process_and_fill_no_log(tmp_path: Path) -> None:
    """gRPC's core aborted, within two thousand of them, while it was handed the same certificates at each."""
    keys, log = made_keys(tmp_path / "keys", {"run-a": "trainer"}), tmp_path / "errors"
    with door(keys.policy, log) as (target, process):
        async with channel_of(keys, "run-a", target) as channel:
            for number in range(25):
                await asyncio.to_thread(break_off, target, BEGINNINGS[number % len(BEGINNINGS)])
                assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        assert process.poll() is None
    assert process.returncode == 0
    assert "Handshake failed" not in log.read_text()
