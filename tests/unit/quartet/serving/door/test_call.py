"""The copy of a servicer context that outlives its call, and what it is for."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve import grpc_util
from ray.serve._private import proxy
from ray.serve.grpc_util import RayServegRPCContext

from quartet.serving.door.call import CallContext

pytestmark = pytest.mark.processes


class Live:
    """A servicer context whose call lives until `end`; later use of it would crash the process."""

    def __init__(self) -> None:
        self.over = False
        self.given: list[tuple[str, Any]] = []
        self.callbacks: list[Any] = []

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)
        self.over = True

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def __getattr__(self, name: str) -> Any:
        assert not self.over, f"{name} of a freed call"
        if name.startswith("set_"):
            return lambda value: self.given.append((name, value))
        values = {"invocation_metadata": (("application", "rollout"),), "auth_context": {}, "trailing_metadata": ()}
        return lambda: values.get(name, name)


def test_serve_reads_and_writes_the_copy_of_a_call_that_is_over() -> None:
    live = Live()
    call = CallContext(live, ())
    call.set_details("lives")
    live.end()
    seen = RayServegRPCContext(call)
    seen.set_code(5)
    seen.set_details("over")
    seen._set_on_grpc_context(call)
    assert (call.peer(), call.code(), call.details()) == ("peer", 5, "over")
    assert live.given == [("set_details", "lives")]


def test_the_copy_has_every_method_of_a_context_that_serve_calls() -> None:
    source = inspect.getsource(grpc_util) + inspect.getsource(proxy)
    of_a_context = {name for name in dir(RayServegRPCContext) if not name.startswith("_")}
    called = {name for name in of_a_context if f"context.{name}(" in source}
    assert called >= {"peer", "invocation_metadata", "set_code", "trailing_metadata"}
    assert called <= set(dir(CallContext))


@pytest.mark.processes
@pytest.mark.parametrize("callers", [300, pytest.param(1000, marks=pytest.mark.exhaustive)])  # more of the same
def test_callers_that_leave_a_stream_do_not_end_the_proxy(callers: int) -> None:
    script = Path(__file__).parents[3] / "leaving_callers.py"
    done = subprocess.run(
        [sys.executable, str(script), str(callers)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"ended by {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.strip().endswith(f"outlived {callers}, 0 still open")
