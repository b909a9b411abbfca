"""A caller on another machine: a network namespace of its own, joined to this one by a pair of virtual devices.

    python -m tests.strangers '{"host": "10.213.0.1", "ports": [40059]}'

says what each port answers to a caller without token and certificate that sends it a pickle.
"""

import asyncio
import ipaddress
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

REPO = Path(__file__).parents[1]
NEEDS = "a network namespace takes root, with NET_ADMIN and SYS_ADMIN, and the commands ip, unshare and nsenter"
UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Stranger:
    """A place for callers from elsewhere, and the address at which they reach this machine."""

    host: str
    enter: tuple[str, ...]
    """Words to put before a command that is to run there."""
    namespace: bool
    """True if it has a network of its own, false if it is only another address of this machine."""

    def asks(self, ports: list[int], planted: Path) -> dict[int, str]:
        """The answer of each port. A pickle that is loaded makes the file `planted`. Fails if the caller does not
        reach even a port that is open to it."""
        with socket.create_server((self.host, 0)) as is_open:
            port = is_open.getsockname()[1]
            answers = self._asks([*ports, port], planted)
        assert answers.pop(port) != UNREACHABLE, f"{self} reaches nothing on this machine"
        return answers

    def _asks(self, ports: list[int], planted: Path) -> dict[int, str]:
        asked = json.dumps({"host": self.host, "ports": ports, "planted": str(planted)})
        done = subprocess.run(
            [*self.enter, sys.executable, "-m", "tests.strangers", asked],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return {int(port): answer for port, answer in json.loads(done.stdout).items()}


@contextmanager
def stranger() -> Iterator[Stranger]:
    """A caller in a namespace of its own; where none can be made, one at this machine's own outside address."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        yield Stranger(own_address(), (), False)
        return
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    device = f"qt{os.getpid()}"
    # Four addresses of its own for each process, as two may have a caller at the same time.
    block = ipaddress.IPv4Address("10.213.0.0") + 4 * (os.getpid() % (1 << 14))
    here, there = block + 1, block + 2
    enter = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
    try:
        _await_namespace(holder.pid)
        _run("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "address", "add", f"{here}/30", "dev", device)
        _run("ip", "link", "set", device, "up")
        _run(*enter, "ip", "address", "add", f"{there}/30", "dev", "eth0")
        _run(*enter, "ip", "link", "set", "eth0", "up")
        yield Stranger(str(here), enter, True)
    finally:
        holder.kill()  # the devices go with the namespace
        holder.wait()


def _await_namespace(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        pass


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{NEEDS}"


def own_address() -> str:
    """The address under which this machine would speak to others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self._path, "w")


async def _answer(host: str, port: int, planted: str) -> str:
    """`unreachable`, `silent` for what does not speak gRPC, or the code of its answer."""
    from ray.serve.generated.serve_pb2 import ASGIRequest

    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 3)
    except (OSError, TimeoutError):
        return UNREACHABLE
    writer.close()
    poison = pickle.dumps(Planted(planted))
    request = ASGIRequest(pickled_request_metadata=poison, request_args=poison).SerializeToString()
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        try:
            await channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            return "silent" if error.code() is grpc.StatusCode.UNAVAILABLE else str(error.code().name)
    return "OK"


async def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = [_answer(asked["host"], port, asked["planted"]) for port in asked["ports"]]
    print(json.dumps(dict(zip(asked["ports"], await asyncio.gather(*answers), strict=True))))


if __name__ == "__main__":
    asyncio.run(main())
