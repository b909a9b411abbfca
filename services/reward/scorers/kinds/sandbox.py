"""Runs a program that is not trusted, within limits: a process of its own, started as a file.

It needs the standard library alone. Limits: memory, processor time, the size of a file and the number of open ones;
no signals to other processes and none left behind, a limit of their number, and no network unless it is asked for,
where the kernel gives an ordinary user namespaces of its own; files are written in one folder only, and read in the
system's and Python's folders only, where it has Landlock.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

MARK = "QUARTET_MARK"
"""Variable with the text that is written to the pipe when the program has come to its end."""
BEGUN = b"."
"""Written to the pipe just before the program begins."""
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWPID, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK = {"create": 444, "add": 445, "restrict": 446}
"""System calls, of the same numbers on all machines."""
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_SHARED = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo")
_RESOLVER = ("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki")
"""Read besides where the network may be reached."""
_MOST_FILE = 16 << 20
_MOST_OPEN = 64
_MOST_PROCESSES = 32
"""Most processes and threads at the same time."""
_COUNT_S = 0.02
"""Time between two counts of them, in seconds."""


def _limited(settings: dict[str, Any]) -> None:
    for kind, most in (
        (resource.RLIMIT_DATA, settings["memory_bytes"]),
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        (resource.RLIMIT_FSIZE, _MOST_FILE),
        (resource.RLIMIT_NOFILE, _MOST_OPEN),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _apart(libc: Any, *, network: bool) -> None:
    """Moves to namespaces of its own, with a child as their first process; returns in the child. With `network` that
    of the machine is kept, and all others where the kernel gives none."""
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWIPC | (0 if network else _CLONE_NEWNET)):
        if network:
            return
        sys.exit(3)
    if child := os.fork():
        os._exit(_watched(child))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # No rights over the new namespaces either.
    libc.capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))
    resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_PROCESSES, _MOST_PROCESSES))


def _watched(child: int) -> int:
    """The exit code of the first process of a namespace, which is killed, and with it all others there, where they
    become too many: the kernel holds root to no number of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # which so ends the wait below
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if _processes(child) > _MOST_PROCESSES:
            os.kill(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, _COUNT_S)


def _processes(first: int) -> int:
    """The number of threads of a process and all that come from it; some number beyond the limit if it is larger."""
    found, looked = 0, [first]
    while looked and found <= _MOST_PROCESSES:
        try:
            folder = f"/proc/{looked.pop()}/task"
            for thread in os.listdir(folder):
                found += 1
                with open(f"{folder}/{thread}/children") as file:
                    looked += map(int, file.read().split())
        except OSError:  # it has ended
            continue
    return found + len(looked)


def _confine(libc: Any, folder: str, more: tuple[str, ...]) -> None:
    """Lets the process read the system's and Python's files and `more` alone, and write below the folder; does
    nothing where the kernel has no Landlock."""
    version = libc.syscall(_LANDLOCK["create"], None, 0, 1)
    if version < 1:
        return
    handled = (1 << 13 + min(version - 1, 2)) - 1
    rules = libc.syscall(_LANDLOCK["create"], ctypes.byref(ctypes.c_uint64(handled)), 8, 0)
    shared = (*_SHARED, *more, sys.prefix, sys.base_prefix)
    readable = {os.path.realpath(each): _EXECUTE | _READ | _LIST for each in shared}
    for path, rights in {**readable, "/dev/null": _READ | _WRITE, folder: handled}.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= ~_LIST
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
        if libc.syscall(_LANDLOCK["add"], rules, 1, rule, 0):
            sys.exit(4)
        os.close(place)
    if libc.syscall(_LANDLOCK["restrict"], rules, 0):
        sys.exit(4)
    os.close(rules)


def main() -> NoReturn:
    """Runs the program, and says so when it has come to its end."""
    pipe, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    mark = os.environ.pop(MARK)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    with open(settings["program"], encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    os.chdir(settings["folder"])
    _apart(libc, network=settings["network"])
    _confine(libc, settings["folder"], _RESOLVER if settings["network"] else ())
    _limited(settings)
    sys.argv[:] = ["program.py"]
    os.write(pipe, BEGUN)
    try:
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        sys.stdout.flush()
    except SystemExit as ended:
        sys.stdout.flush()
        if ended.code not in (None, 0) or not settings["may_exit"]:
            os._exit(1)
    except BaseException:
        os._exit(1)
    os.write(pipe, mark.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
