"""The cost model's network formula against gloo on links of a known rate, in one run (root, iproute2 and tc needed).

    sudo python -m benchmarks.push_network [--mib 32] [--mbit 400] [--replicas 1,2,4,7] [--senders 1,2]

Every member lives in a network namespace of its own: a host with one link to a switch, limited to `--mbit` in each
direction by a token bucket. The links are slow enough for the cores not to matter, however many there are. What is
measured is the transfer: all buckets to all members, from every sender at once.

    model = max(bytes, (bytes / senders + bucket) * ceil(log2(replicas + 1))) / rate
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from quartet.config.base import MIB
from quartet.ranks.rendezvous import reach_store, serve_store
from quartet.weight_transfer.groups.group import Group, turned
from quartet.weight_transfer.groups.wires import gloo_wire

STALL_S = 120.0
BRIDGE = "quartet-br"
NET = "10.217.33"
"""Address prefix of the namespaces, which are not reachable from outside."""
console = Console()


def main(
    mib: Annotated[int, typer.Option(min=1)] = 32,
    mbit: Annotated[int, typer.Option(min=1)] = 400,
    replicas: Annotated[str, typer.Option(help="numbers of replicas, such as 1,2,4,7")] = "1,2,4,7",
    senders: Annotated[str, typer.Option(help="numbers of senders, such as 1,2")] = "1,2",
    bucket_mib: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    member: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Runs the benchmark and prints its results."""
    torch.set_num_threads(1)
    if member:
        _member(**json.loads(member))
        return
    title = f"{mib} MiB in buckets of {bucket_mib} MiB, links of {mbit} Mbit/s"
    drawn = Table(title=title, title_justify="left")
    for column in ("replicas", "senders", "measured s", "model s", "measured/model"):
        drawn.add_column(column, justify="right")
    for sending in [int(number) for number in senders.split(",")]:
        for receiving in [int(number) for number in replicas.split(",")]:
            took = _measure(mib, mbit, receiving, sending, bucket_mib, rounds)
            carried = max(mib, (mib / sending + bucket_mib) * math.ceil(math.log2(receiving + 1)))
            model = carried * MIB * 8 / (mbit * 1e6)
            drawn.add_row(str(receiving), str(sending), f"{took:.2f}", f"{model:.2f}", f"{took / model:.2f}")
    console.print(drawn)


def _measure(mib: int, mbit: int, replicas: int, senders: int, bucket_mib: int, rounds: int) -> float:
    """Median seconds of the slowest member. Sender k and the replicas are one group; each sender is one host."""
    with _hosts(replicas + senders, mbit):
        members = []
        for host in range(replicas + senders):
            place = {"host": host, "replicas": replicas, "senders": senders, "rounds": rounds}
            sizes = {"buckets": mib // bucket_mib, "bucket_bytes": bucket_mib * MIB}
            command = [sys.executable, "-m", "benchmarks.push_network", "--member", json.dumps(place | sizes)]
            members.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", _name(host), *command],
                    stdout=subprocess.PIPE,
                    cwd=Path(__file__).parents[1],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                )
            )
        by_member = [json.loads(member.communicate(timeout=600)[0].splitlines()[-1]) for member in members]
    return float(median(max(seconds) for seconds in zip(*by_member, strict=True)))


def _member(host: int, replicas: int, senders: int, rounds: int, buckets: int, bucket_bytes: int) -> None:
    """One host's part: senders come first. Prints the seconds of each round."""
    own = _address(host)
    groups: dict[int, Group] = {}
    for sender in range(senders):
        if host < senders and host != sender:
            continue
        store = _store(sender, own if host == sender else None)
        place = {"world_size": 1 + replicas, "sender": sender, "senders": senders}
        rank = 0 if host == sender else turned(1 + host - senders, **place)
        groups[sender] = Group(
            store, gloo_wire(own), rank=rank, world_size=1 + replicas, membership=1, timeout_s=STALL_S
        )
    data = {sender: torch.ones(bucket_bytes, dtype=torch.uint8) for sender in groups}
    times = []
    for _ in range(rounds):
        for sender, group in groups.items():
            group.broadcast(data[sender][:1])  # all begin together
        began = time.perf_counter()
        lines = [Thread(target=_line, args=(group, data[s], buckets // senders)) for s, group in groups.items()]
        for line in lines:
            line.start()
        for line in lines:
            line.join()
        times.append(time.perf_counter() - began)
    print(json.dumps(times), flush=True)


def _line(group: Group, bucket: torch.Tensor, count: int) -> None:
    for _ in range(count):
        group.broadcast(bucket)


def _store(sender: int, own: str | None) -> Any:
    """The sender's store, whose port the others find in a file: namespaces share the disk."""
    note = Path(f"/tmp/{BRIDGE}-{sender}")
    if own is not None:
        store = serve_store(own, STALL_S)
        note.write_text(str(store.port))
        return store
    end = time.monotonic() + STALL_S
    while not note.exists() or not note.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    return reach_store(_address(sender), int(note.read_text()), STALL_S)


@contextmanager
def _hosts(count: int, mbit: int) -> Iterator[None]:
    """Namespaces with a link each to one switch; all gone at the end."""
    with ExitStack() as gone:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        gone.callback(_run, "ip", "link", "del", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for host in range(count):
            name, outer = _name(host), f"qt-port{host}"
            _run("ip", "netns", "add", name)
            gone.callback(_run, "ip", "netns", "del", name)
            gone.callback(Path(f"/tmp/{BRIDGE}-{host}").unlink, missing_ok=True)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outer, "master", BRIDGE, "up")
            _run("ip", "-n", name, "addr", "add", f"{_address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "50ms"]
            _run("tc", "qdisc", "add", "dev", outer, *limit)
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        yield


def _name(host: int) -> str:
    return f"quartet-{host}"


def _address(host: int) -> str:
    return f"{NET}.{host + 1}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


if __name__ == "__main__":
    typer.run(main)
