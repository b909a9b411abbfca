"""A program that opens connections to a port of 127.0.0.1 and lets them rest. Its arguments are PORT COUNT KIND.

It prints how many it has opened, and keeps them until it is ended.

KIND: silent (nothing is sent), http2 (HTTP/2's handshake), or tls (TLS's and HTTP/2's).
"""

import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.configuration import REPO

EACH = 5000
"""Most connections of one process, fewer than any limit of files that a test meets."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _ACKNOWLEDGED = b"\0\0\0\4\0\0\0\0\0", b"\0\0\0\4\1\0\0\0\0"


@contextmanager
def resting(target: str, count: int, kind: str) -> Iterator[None]:
    """Keeps `count` connections to host:port open, from processes of their own; those that are closed stay so."""
    port = target.rpartition(":")[2]
    with ExitStack() as stack:
        programs = []
        for start in range(0, count, EACH):
            command = [sys.executable, "-m", "tests.unit.resting", port, str(min(EACH, count - start)), kind]
            program = stack.enter_context(
                subprocess.Popen(command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(program.kill)
            programs.append(program)
        for program in programs:
            assert program.stdout
            assert program.stdout.readline().startswith("opened ")
        yield


def main(port: int, count: int, kind: str) -> None:
    """Opens the connections, says so and waits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 100, hard), hard))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    held: list[socket.socket] = []
    for _ in range(count):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            if kind == "tls":
                connection = context.wrap_socket(connection)
            if kind != "silent":
                connection.sendall(_PREFACE + _SETTINGS + _ACKNOWLEDGED)
            held.append(connection)
        except OSError:  # closed in the meantime
            continue
    print("opened", len(held), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
