"""vLLM's classes have what is called, taken and overridden here, with these arguments."""

import ast
import inspect
from pathlib import Path
from typing import Any

import vllm
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM

from services.rollout.vllm import engine, requests
from services.rollout.vllm.transfer import QuartetWeightTransferEngine


class RecordedEngine:
    """Has exactly the methods of vLLM's AsyncLLM, which take exactly its arguments and note them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(AsyncLLM, name)

        def called(*arguments: Any, **options: Any) -> Any:
            given = inspect.signature(method).bind(self, *arguments, **options).arguments
            del given["self"]
            self.calls.append((name, given) if given else name)
            return _nothing() if inspect.iscoroutinefunction(method) else 2

        return called


async def _nothing() -> None:
    pass


def fields(kind: Any) -> set[str]:
    """Names of what its objects have: attributes with a type, and methods."""
    return set().union(*(getattr(base, "__annotations__", {}) for base in kind.__mro__)) | set(dir(kind))


def test_the_engine_calls_nothing_that_vllms_lacks() -> None:
    source = inspect.getsource(engine) + inspect.getsource(requests)
    calls = [call for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call)]
    engines = ("self.llm.", "self._llm.", "llm.")
    asked = [(name, call) for call in calls if (name := ast.unparse(call.func)).startswith(engines)]
    assert len({name for name, _ in asked}) > 12
    for name, call in asked:
        method = name.rpartition(".")[2]
        if method != "get_vocab_size":  # of its model_config
            options = {keyword.arg or "": None for keyword in call.keywords}
            inspect.signature(getattr(AsyncLLM, method)).bind(None, *call.args, **options)


def test_the_engines_arguments_exist() -> None:
    source = (Path(engine.__file__).parent / "arguments.py").read_text()
    (call,) = (
        call
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "AsyncEngineArgs"
    )
    given = {str(keyword.arg) for keyword in call.keywords}
    assert len(given) > 15
    assert given <= fields(AsyncEngineArgs)


def test_the_transfer_engine_has_every_abstract_method_with_its_arguments() -> None:
    """One that it lacked would keep every worker from starting."""
    abstract = WeightTransferEngine.__abstractmethods__
    assert len(abstract) >= 4
    assert not QuartetWeightTransferEngine.__abstractmethods__
    for name in abstract:
        ours, theirs = getattr(QuartetWeightTransferEngine, name), getattr(WeightTransferEngine, name)
        assert len(inspect.signature(ours).parameters) == len(inspect.signature(theirs).parameters)


def test_the_transfer_engine_is_chosen_by_its_name() -> None:
    assert "backend" in fields(WeightTransferConfig)


def test_responses_and_messages_have_the_fields_that_are_read() -> None:
    assert {"token_ids", "logprobs", "finish_reason", "weight_versions"} <= fields(CompletionOutput)
    assert {"new_token_ids", "new_logprobs", "prefill_stats", "finished"} <= fields(EngineCoreOutput)
    assert {"outputs", "finished_requests", "scheduler_stats"} <= fields(EngineCoreOutputs)


def test_vllms_scheduler_starts_requests_by_a_limit_of_their_own() -> None:
    assert "self.max_num_active_reqs" in inspect.getsource(Scheduler.__init__)
    assert "self.max_num_active_reqs" in inspect.getsource(Scheduler.schedule)


def test_only_the_older_model_runner_keeps_generators_of_requests() -> None:
    """The newer one draws by seed and position, so that nothing has to be continued there."""
    folder = Path(vllm.__path__[0]) / "v1" / "worker"
    assert "self.requests" in (folder / "gpu_model_runner.py").read_text()
    assert "self.requests" not in (folder / "gpu" / "model_runner.py").read_text()
