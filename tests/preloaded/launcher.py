"""Python, but in a fork of a process that has imported its libraries.

    launcher.py SOCKET [options] script.py arguments...
    launcher.py SOCKET [options] -c code arguments...
    launcher.py SOCKET [options] -m module arguments...

The arguments, environment, folder, open files, process group and niceness of this process go to the server that
listens at the socket, and that starts with the first call. This process ends as the fork does. A fork is killed when
its launcher is.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

_START_S = 120


def main(path: str, arguments: "list[str]") -> None:
    """Has the fork made and waits for its end."""
    inherited = _open_files()
    # One server for each session, thus for each Ray head: processes join groups of their own session only.
    server = _connected(f"{path}.{os.getsid(0)}")
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": inherited,
        "group": os.getpgrp(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
    body = json.dumps(request).encode()
    socket.send_fds(server, [len(body).to_bytes(4, "big")], inherited)
    server.sendall(body)
    pid = int.from_bytes(server.recv(4), "big")
    if not pid:
        raise SystemExit(f"{path}: the server ended")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    with open("/proc/self/comm", "w") as name:  # tests look there for the fork of a launcher
        name.write(f"fork {pid}")
    code = server.recv(4)
    os._exit(int.from_bytes(code, "big") if code else 1)


def _open_files() -> "list[int]":
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the listing's own
        return False
    return True


def _connected(path: str) -> socket.socket:
    """A connection to the server, which is started if none is there."""
    end = time.monotonic() + _START_S
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = None
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(path)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
            if server is None:
                server = _start(path)
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{path}: the server did not start; see {path}.log")
            time.sleep(0.05)


def _start(path: str) -> "subprocess.Popen[bytes]":
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
    with open(f"{path}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, program, path],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ray ends whole groups
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
