"""Machines of one network: namespaces of this one, each with a network, processes, shared memory and name of its own.
They share its disk and its cores."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

NEEDS = "machines take root, with NET_ADMIN and SYS_ADMIN, and the commands ip, unshare and nsenter"
_INIT = """
set -e
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs {temporary}
hostname {name}
printf '127.0.0.1 localhost\\n{address} {name}\\n' >{temporary}/hosts
mount --bind {temporary}/hosts /etc/hosts
ip link set lo up
echo ready
sleep infinity &
while :; do wait; done
"""
"""Script of a machine: bash takes in processes whose parents have ended, as any machine's first process does."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One of two machines that reach each other."""

    address: str
    pid: int
    """Number of its first process, as this machine counts."""

    @property
    def enter(self) -> tuple[str, ...]:
        """Words to put before a command that is to run there."""
        return ("nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--uts")

    def cut(self) -> None:
        """Takes its network away: nothing that is sent arrives, and no connection is closed."""
        _run(*self.enter, "ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Gives it back."""
        _run(*self.enter, "ip", "link", "set", "eth0", "up")


@contextmanager
def two_machines(temporary: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, 10.0.0.1 and 10.0.0.2, which do not see this machine's network. `temporary` is a folder that each
    has for itself. At the end all of their processes are killed."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(_machine(f"10.0.0.{i}", f"node{i}", temporary)) for i in (1, 2))
        pair = ("netns", str(first.pid), "type", "veth", "peer", "name", "eth0", "netns", str(second.pid))
        _run("ip", "link", "add", "eth0", *pair)
        for machine in (first, second):
            _run(*machine.enter, "ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.mend()
        yield first, second


@contextmanager
def _machine(address: str, name: str, temporary: Path) -> Iterator[Machine]:
    spaces = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
    script = _INIT.format(address=address, name=name, temporary=temporary)
    holder = subprocess.Popen(["unshare", *spaces, "bash", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", NEEDS
        yield Machine(address, psutil.Process(holder.pid).children()[0].pid)
    finally:
        holder.kill()
        holder.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{NEEDS}"
