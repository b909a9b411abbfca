"""Forks of a process that has imported its libraries, for `launcher.py`.

    server.py SOCKET

The name of the socket says what is imported: `rollout`, or `models` for the other services and for learners.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

IMPORTED = {
    "rollout": [
        "services.rollout.member",
        "services.rollout.vllm.engine",
        "services.rollout.vllm.transfer",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama",
    ],
    "models": [
        "services.reward.scorers.make",
        "services.reference.model",
        "services.critic.learner",
        "quartet.ranks.rank",
        "quartet.ranks.ranks",
        "orchestrator.policy.trainer",
        "deepspeed",
        "transformers.models.llama.modeling_llama",
    ],
}
"""Modules that each kind of fork needs, without Ray, which each fork imports for itself. While Ray is imported it
reads the job's id and begins the numbers that all its ids are drawn from: forks that shared them gave their tasks
the same ids, which ended Serve's proxy."""
_HIGH = 700
"""The server's own files have numbers from here on, which no file of a launcher has."""
_LOOK_EVERY_S = 5


class Server:
    """Makes forks until it is killed."""

    def __init__(self, path: str) -> None:
        self._path = path
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(64)
        self._listener = _moved(listener)
        self._ended, self._wake = (_moved(end) for end in socket.socketpair())
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno())
        self._launchers: dict[int, socket.socket] = {}
        """The connection of each fork's launcher, by the fork's process id."""
        self._selector = selectors.SelectSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)

    def next(self) -> dict[str, Any]:
        """Serves until a fork has been made; returns in the fork, with what its launcher asked for.

        Ends when the folder of its socket is gone, as tests leave it.
        """
        while os.path.exists(self._path):
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request:
                        return request
                elif key.fileobj is self._ended:
                    self._collect()
                elif key.data in self._launchers:  # its launcher was killed
                    os.kill(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)
        raise SystemExit

    def _accept(self) -> dict[str, Any] | None:
        launcher = _moved(self._listener.accept()[0])
        head, files, _, _ = socket.recv_fds(launcher, 4, 250)
        body = launcher.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        pid = os.fork()
        if pid == 0:
            # Fails, and with it the fork, if the launcher was killed meanwhile.
            request: dict[str, Any] = json.loads(body)
            os.setpgid(0, request["group"])
            os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
            self._leave(launcher, files, request["files"])
            return request
        for file in files:
            os.close(file)
        _tell(launcher, pid)
        self._launchers[pid] = launcher
        self._selector.register(launcher, selectors.EVENT_READ, pid)
        return None

    def _collect(self) -> None:
        """Tells the launchers of forks that have ended."""
        self._ended.recv(1024)
        while self._launchers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            launcher = self._launchers.pop(pid)
            if launcher in self._selector.get_map():
                self._selector.unregister(launcher)
                _tell(launcher, os.waitstatus_to_exitcode(status) & 0xFF)
            launcher.close()

    def _leave(self, launcher: socket.socket, files: list[int], numbers: list[int]) -> None:
        """Closes, in the fork, the server's files and gives those of the launcher their numbers."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for own in (self._listener, self._ended, self._wake, launcher, *self._launchers.values()):
            own.close()
        high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(high, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)


def _tell(launcher: socket.socket, number: int) -> None:
    """Sends the number, unless the launcher was killed."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        launcher.sendall(number.to_bytes(4, "big"))


def _moved(own: socket.socket) -> socket.socket:
    """The same socket under a high number."""
    number = fcntl.fcntl(own.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    own.close()
    return socket.socket(fileno=number)


def carry_out(request: dict[str, Any], executable: str) -> int:
    """Does what Python would with these arguments; its exit code."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # What it starts is a fork as well, such as an engine's process.
    sys.executable = executable
    multiprocessing.set_executable(executable)
    arguments = request["arguments"]
    while arguments[0] not in ("-c", "-m") and arguments[0].startswith("-"):
        arguments.pop(0)  # options of the interpreter, such as -u and -B
    try:
        _run(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    """Runs `-c code`, `-m module` or a script, each with its arguments."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        code = compile(arguments[1], "<string>", "exec")
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    else:
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
        main.__file__ = arguments[0]
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    exec(code, main.__dict__)


def _import(kind: str) -> None:
    """Imports what forks of this kind need, as the replicas do it."""
    if kind == "rollout":
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    sys.modules["ray"] = None  # type: ignore[assignment]  # as if it were not installed; vLLM tries to import it
    for name in IMPORTED[kind]:
        importlib.import_module(name)
    del sys.modules["ray"]
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if names[1:]:
        raise RuntimeError(f"{kind}: an import started threads, which forks would not have: {names}")
    gc.freeze()


def main(path: str) -> None:
    """Serves; in a fork, ends the process as Python would."""
    program = path.rpartition(".")[0]
    _import(os.path.basename(program))
    request = Server(path).next()
    code = carry_out(request, f"{program}-python")
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does before it ends
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
