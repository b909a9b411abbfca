"""The seam with vLLM, against its classes. The reload of layers, with vLLM's own machinery:
services/rollout/vllm/test_vllm_loading.py and test_vllm_experts.py; spans and the generators of requests:
test_requests.py there, and tests/engine/test_resumed.py."""

import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.engine import logprobs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker import gpu_worker

from quartet.seams import vllm
from tests.models import make_tokenizer


def test_an_engine_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    for _ in range(2):
        vllm.register_engine("mine", "os", "PathLike")
    assert list(WeightTransferEngineFactory._registry) == ["mine"]


def test_only_an_engines_own_memory_loses_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those of vLLM's class; that workers compute without them: tests/engine/test_engine.py."""
    communicator: Any = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    for engine in ("vllm_dist_1", "vllm_dist_12"):
        monkeypatch.setenv("VLLM_DIST_IDENT", engine)
        for worker in (0, 1):
            (tmp_path / f"{_CPUSHMDistributed.make_group_name(communicator)}_{worker}").touch()
    monkeypatch.setenv("VLLM_DIST_IDENT", "vllm_dist_1")
    for _ in range(2):
        vllm.unname_workers_memory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"vllm_dist_12-tp:0-[0-1]-cpushm_{worker}" for worker in (0, 1)
    ]
    monkeypatch.delenv("VLLM_DIST_IDENT")  # as on a GPU
    vllm.unname_workers_memory(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_tokens_beside_log_probs_are_decoded_once_and_to_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    decode: Any = inspect.unwrap(logprobs.convert_ids_list_to_tokens)
    tokenizers, decoded = [make_tokenizer(), make_tokenizer()], []

    def noted(tokenizer: Any, token_ids: list[int]) -> Any:
        decoded.extend(token_ids)
        return decode(tokenizer, token_ids)

    monkeypatch.setattr(logprobs, "convert_ids_list_to_tokens", noted)
    for _ in range(2):
        vllm.decode_tokens_once()
    shape = (4, 3)
    ids = torch.tensor([[5, 6, 7], [6, 5, 7], [8, 5, 6], [2, 5, 0]])
    for tokenizer in tokenizers:
        given: dict[str, Any] = {"logprobs": None, "cumulative_logprob": None, "num_logprobs": None}
        processor = logprobs.LogprobsProcessor(tokenizer, prompt_logprobs=[None], num_prompt_logprobs=2, **given)
        listed = LogprobsTensors(ids, torch.zeros(shape), torch.ones(4, dtype=torch.int64))
        processor._update_prompt_logprobs(listed)
        processor._update_prompt_logprobs(listed)
        assert processor.prompt_logprobs is not None
        for entry, row in zip(processor.prompt_logprobs[1:], ids.tolist() * 2, strict=True):
            assert entry is not None
            assert [entry[token].decoded_token for token in row] == decode(tokenizer, row)
    assert sorted(decoded) == sorted([0, 2, 5, 6, 7, 8] * 2)


def test_a_layer_that_is_not_open_has_got_what_it_needs() -> None:
    layer = torch.nn.Linear(1, 1)
    assert not get_layerwise_info(layer).can_load()
    assert not vllm.got_nothing(layer)
    vllm.drop_layers(layer)


def test_packed_copies_that_were_renewed_by_the_load_are_left_alone() -> None:
    packed: list[str] = []

    def layer(name: str) -> torch.nn.Module:
        made: Any = torch.nn.Linear(1, 1)
        made.cpu_linear, made.quant_method = (
            object(),
            SimpleNamespace(process_weights_after_loading=lambda module: packed.append(name)),
        )
        return made  # type: ignore[no-any-return]

    model = torch.nn.ModuleList([layer("stays"), layer("renewed"), torch.nn.Linear(1, 1)])
    copies = vllm.packed_copies(model)
    assert len(copies) == 2
    model[1].cpu_linear = object()  # type: ignore[assignment]
    vllm.pack_again(copies)
    assert packed == ["stays"]


def test_vllm_notes_where_versions_change_before_a_response_ends() -> None:
    assert callable(RequestState._weight_version_spans)
    kept = inspect.getsource(OutputProcessor.__init__)
    assert "self.external_req_ids" in kept
    assert "self.request_states" in kept


def test_an_engine_is_drained_by_its_core() -> None:
    inspect.signature(AsyncMPClient.pause_scheduler_async).bind(None, "wait", True)
    assert "self.engine_core =" in inspect.getsource(AsyncLLM.__init__)


def test_a_worker_opens_one_update_at_a_time_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    worker: Any = object.__new__(gpu_worker.Worker)
    worker.vllm_config = None
    worker.weight_transfer_engine = SimpleNamespace(start_weight_update=lambda: None)
    worker._check_weight_transfer_engine = lambda: None
    assert not vllm.forget_update(worker)
    worker.start_weight_update()
    with pytest.raises(RuntimeError):
        worker.start_weight_update()
    assert vllm.forget_update(worker)
    worker.start_weight_update()
