"""Both vLLM versions, by their recorded signatures: whatever is called exists in each, with these arguments."""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from services.common.wire.errors import Unavailable
from services.rollout.vllm import engine, loading, plugin, requests, versions
from services.rollout.vllm.transfer import QuartetWeightTransferEngine
from services.rollout.vllm.versions import WeightVersions
from tests.unit.vllm_signatures import Version, read, recorded, signature

RECORDED = recorded()
both = pytest.mark.parametrize("version", [pytest.param(methods, id=name) for name, methods in RECORDED.items()])


class RecordedEngine:
    """Has exactly the methods of one version's AsyncLLM, which take exactly its arguments and note them."""

    def __init__(self, version: Version) -> None:
        self._methods = version["AsyncLLM"]
        self.calls: list[Any] = []
        self.output_processor: Any = SimpleNamespace(get_num_unfinished_requests=lambda: 2)

    def __getattr__(self, name: str) -> Any:
        if name not in self._methods:
            raise AttributeError(name)
        bound = signature(self._methods[name])

        def called(*arguments: Any, **options: Any) -> Any:
            given = bound.bind(self, *arguments, **options).arguments
            del given["self"]
            self.calls.append((name, given) if given else name)
            return 2 if name == "get_num_unfinished_requests" else _nothing()

        return called


async def _nothing() -> None:
    pass


def new() -> RecordedEngine:
    return RecordedEngine(RECORDED["0.32"])


def old() -> RecordedEngine:
    return RecordedEngine(RECORDED["0.26"])


def test_what_is_recorded_of_the_installed_version_is_so() -> None:
    """Should another version be installed, `python -m tests.unit.vllm_signatures` records it."""
    installed = vllm.__version__.split("+")[0]
    assert read(Path(vllm.__path__[0])) == RECORDED[installed.rpartition(".")[0]]


async def test_the_engine_that_counts_is_told_and_asked() -> None:
    llm = new()
    counted = WeightVersions(llm)
    await counted.begin()
    await counted.answer()
    await counted.finish(4)
    assert llm.calls == [
        ("update_weight_version", {"new_version": "0"}),
        "get_weight_version",
        ("finish_weight_update", {"weight_version": "4"}),
    ]
    spans = [SimpleNamespace(version="3", start=0, end=2), SimpleNamespace(version="4", start=2, end=5)]
    # Its own note, whatever served when the request came.
    assert counted.spans(SimpleNamespace(weight_versions=spans), began_with=3) == ((3, 0, 2), (4, 2, 5))
    assert counted.spans(SimpleNamespace(weight_versions=None), began_with=3) == ()
    # While a response goes on, from its state.
    state = SimpleNamespace(_weight_version_spans=lambda: spans[:1])
    llm.output_processor = SimpleNamespace(external_req_ids={"r5": ["r5-a"]}, request_states={"r5-a": state})
    assert counted.spans_so_far("r5", SimpleNamespace(), began_with=3) == ((3, 0, 2),)


async def test_for_the_engine_that_does_not_count_we_do() -> None:
    llm = old()
    counted = WeightVersions(llm)
    await counted.begin()
    await counted.answer()
    output = SimpleNamespace(token_ids=[5, 6, 7])
    assert counted.spans(output, began_with=0) == ((0, 0, 3),)
    await counted.finish(4)
    assert llm.calls == ["is_sleeping", "finish_weight_update"]
    assert counted.spans(output, began_with=4) == counted.spans_so_far("r5", output, began_with=4) == ((4, 0, 3),)
    with pytest.raises(Unavailable, match="the weights changed while this was sampled"):
        counted.spans(output, began_with=0)


async def test_the_kv_cache_is_released_and_comes_back_while_the_weights_stay() -> None:
    release: list[tuple[RecordedEngine, list[Any]]] = [
        (new(), ["release_kv_cache_memory"]),
        (old(), [("sleep", {"level": 1, "mode": "keep"}), ("wake_up", {"tags": ["weights"]})]),
    ]
    for llm, expected in release:
        told = WeightVersions(llm)
        await told.release_cache()
        await told.restore_cache()
        assert llm.calls == [*expected, ("wake_up", {"tags": ["kv_cache"]})]


@both
def test_unfinished_requests_are_counted(version: Version) -> None:
    assert WeightVersions(RecordedEngine(version)).running() == 2


@both
def test_the_engine_calls_nothing_that_a_version_lacks(version: Version) -> None:
    """Calls whose versions differ are in versions.py alone."""
    source = inspect.getsource(engine) + inspect.getsource(requests)
    calls = [call for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call)]
    asked = {name: call for call in calls if (name := ast.unparse(call.func)).startswith(("self._llm.", "llm."))}
    assert len(asked) > 8
    for name, call in asked.items():
        method = name.rpartition(".")[2]
        if method != "get_vocab_size":  # of its model_config
            options = {keyword.arg or "": None for keyword in call.keywords}
            signature(version["AsyncLLM"][method]).bind(None, *call.args, **options)


@both
def test_the_engines_arguments_exist(version: Version) -> None:
    source = (Path(engine.__file__).parent / "arguments.py").read_text()
    (call,) = (
        call
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "AsyncEngineArgs"
    )
    given = {keyword.arg for keyword in call.keywords}
    assert len(given) > 15
    assert given <= version["EngineArgs"].keys() | version["AsyncEngineArgs"].keys()


@both
def test_the_transfer_engine_has_every_abstract_method(version: Version) -> None:
    """One that it lacked would keep every worker from starting."""
    methods = version["WeightTransferEngine"]
    abstract = [name for name, text in methods.items() if text.startswith("abstract ")]
    assert len(abstract) >= 5
    for name in abstract:
        ours = getattr(QuartetWeightTransferEngine, name)
        assert not getattr(ours, "__isabstractmethod__", False)
        assert len(inspect.signature(ours).parameters) == len(signature(methods[name]).parameters)
    with pytest.raises(NotImplementedError, match="weights are sent by Quartet's learner"):
        QuartetWeightTransferEngine.trainer_send_weights(iter(()), {})


@both
def test_what_is_taken_from_the_loading_of_layers_exists(version: Version) -> None:
    (taken,) = (
        node
        for node in ast.parse(inspect.getsource(loading)).body
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith("reload.layerwise")
    )
    assert {name.name for name in taken.names} <= version["layerwise"].keys()
    assert {"can_load", "reset", "kernel_tensors", "load_numel", "load_numel_total"} <= version[
        "LayerReloadingInfo"
    ].keys()


@both
def test_the_transfer_engine_is_registered_and_chosen_by_its_name(version: Version) -> None:
    assert "register_engine" in inspect.getsource(plugin)
    register = version["WeightTransferEngineFactory"]
    assert register["_registry"] == version["WeightTransferConfig"]["backend"] == "field"
    signature(register["register_engine"]).bind(None, "quartet", "module", "class")


@both
def test_responses_and_messages_have_the_fields_that_are_read(version: Version) -> None:
    assert {"token_ids", "logprobs", "finish_reason"} <= version["CompletionOutput"].keys()
    assert {"new_token_ids", "new_logprobs", "prefill_stats", "finished"} <= version["EngineCoreOutput"].keys()
    assert {"outputs", "finished_requests", "scheduler_stats"} <= version["EngineCoreOutputs"].keys()
    # What 0.32 alone tells is asked for in versions.py, after a look at its methods.
    assert "weight_versions" in inspect.getsource(versions)
    assert "weight_versions" in RECORDED["0.32"]["CompletionOutput"]
